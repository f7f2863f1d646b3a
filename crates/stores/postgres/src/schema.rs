//! Tables, migrations and the check at start (contract 2.3 to 2.7).
//!
//! One migrator at a time, by an advisory lock that a transaction owns, so that it works behind a pooler. The others *ask* for it
//! again and again and never wait inside a statement: CREATE INDEX CONCURRENTLY waits for every snapshot in the database, so a
//! migrator that waited for the lock would be waited for, without an end and without a deadlock that the server could see.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use async_trait::async_trait;
use queuebox_core::{
    Fault,
    ports::schema::{Finding, MigrateOptions, Migrated, Schema, SchemaReport},
};
use queuebox_sql::{
    Applied, Catalog, Found, Migration, Names, Plan, Step,
    migrations::check_baseline,
    names::{INBOX_COLUMNS, OUTBOX_COLUMNS},
    plan,
};

use crate::{
    PostgresStore,
    cells::Cells,
    config::Capture,
    db::{Args, Conn, Mode, options},
    error::Error,
    features::Features,
};

macro_rules! migration {
    ($version:literal, $name:literal, $file:literal, $min_reader:literal) => {
        Migration {
            version: $version,
            name: $name,
            sql: include_str!(concat!("../migrations/", $file)),
            min_reader: $min_reader,
        }
    };
}

static STEPS: [Migration; 14] = [
    migration!(1, "outbox", "0001_outbox.sql", 1),
    migration!(2, "inbox", "0002_inbox.sql", 1),
    migration!(3, "claimed_at", "0003_claimed_at.sql", 1),
    migration!(4, "outbox_last_error", "0004_outbox_last_error.sql", 1),
    migration!(5, "inbox_correlation_id", "0005_inbox_correlation_id.sql", 1),
    migration!(6, "leases_and_consumption", "0006_leases_and_consumption.sql", 6),
    migration!(7, "capture_state", "0007_capture_state.sql", 6),
    migration!(8, "pull_claims", "0008_pull_claims.sql", 6),
    migration!(9, "outbox_aggregate_type", "0009_outbox_aggregate_type.sql", 6),
    migration!(10, "inbox_headers", "0010_inbox_headers.sql", 6),
    migration!(11, "outbox_sequence", "0011_outbox_sequence.sql", 11),
    migration!(12, "fan_out_crashes_trace_topic", "0012_fan_out_crashes_trace_topic.sql", 11),
    migration!(13, "indexes", "0013_indexes.sql", 11),
    migration!(14, "workers_and_lanes", "0014_workers_and_lanes.sql", 11),
];

/// The migrations of PostgreSQL.
pub static CATALOG: Catalog = Catalog { fresh: migration!(14, "create", "0014_create.sql", 11), steps: &STEPS };

/// The newest version that a classic history may name.
const CLASSIC_NEWEST: u32 = 11;
/// Pause between two questions for the lock of the migrators.
const LOCK_PAUSE: Duration = Duration::from_millis(250);
/// A migration waits so long for a lock on a table; while it waits, everybody behind it does.
const LOCK_TIMEOUT: &str = "SET LOCAL lock_timeout = '3s'; SET LOCAL statement_timeout = 0";
/// Then it steps back, lets them pass, and tries again, so many times.
const LOCK_TRIES: u32 = 100;

const MIGRATE_LOCK: &str = "SELECT pg_try_advisory_xact_lock(hashtextextended('queuebox migrate ' || $1, 0))";

const HISTORY_TABLE: &str = "CREATE TABLE IF NOT EXISTS {history} (
    version    INTEGER      NOT NULL,
    name       VARCHAR(255) NOT NULL,
    checksum   VARCHAR(64)  NOT NULL,
    applied_at TIMESTAMPTZ  NOT NULL DEFAULT CURRENT_TIMESTAMP,
    min_reader INTEGER      NOT NULL,
    PRIMARY KEY (version)
)";

const RECORD: &str = "INSERT INTO {history} (version, name, checksum, min_reader) VALUES ($1, $2, $3, $4) ON CONFLICT (version) DO NOTHING";

const HISTORY: &str = "SELECT version, name, checksum, min_reader FROM {history} ORDER BY version";

const CLASSIC: &str =
    "SELECT max(version::integer) FROM {schema}flyway_schema_history WHERE success AND version ~ '^[0-9]{1,4}$'";

const INVALID_INDEX: &str = "
SELECT count(*) FROM pg_index i WHERE i.indexrelid = to_regclass($1) AND NOT i.indisvalid";

/// Columns of the tables that there are: table, column, whether equal means equal bytes, default.
const COLUMNS: &str = "
SELECT t.name, a.attname::text, coalesce(c.collisdeterministic, TRUE), pg_get_expr(d.adbin, d.adrelid)
  FROM (VALUES ('outbox', to_regclass('{outbox}')), ('inbox', to_regclass('{inbox}')), ('worker', to_regclass('{worker}')),
               ('lane', to_regclass('{lane}')), ('history', to_regclass('{history}')),
               ('classic', to_regclass('{schema}flyway_schema_history'))) AS t(name, oid)
  JOIN pg_attribute a ON a.attrelid = t.oid AND a.attnum > 0 AND NOT a.attisdropped
  LEFT JOIN pg_collation c ON c.oid = a.attcollation
  LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum";

/// Unique indexes that hold for all rows: table, columns.
const UNIQUES: &str = "
SELECT t.name, array_agg(a.attname::text ORDER BY a.attname)
  FROM (VALUES ('outbox', to_regclass('{outbox}')), ('inbox', to_regclass('{inbox}'))) AS t(name, oid)
  JOIN pg_index i ON i.indrelid = t.oid AND i.indisunique AND i.indisvalid AND i.indpred IS NULL AND i.indexprs IS NULL
  JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = ANY (i.indkey)
 GROUP BY t.name, i.indexrelid";

const SURROUNDINGS: &str = "
SELECT EXISTS (SELECT FROM pg_trigger g WHERE g.tgrelid = to_regclass('{outbox}') AND g.tgname = 'queuebox_wake' AND g.tgenabled <> 'D'),
       EXISTS (SELECT FROM pg_sequence s
                WHERE s.seqrelid = pg_get_serial_sequence('{outbox}', $1)::regclass AND s.seqrelid = to_regclass('{sequence}')
                  AND s.seqcache = 1 AND s.seqincrement > 0 AND NOT s.seqcycle),
       to_regclass('{sequence}') IS NOT NULL, current_schema()::text";

/// The same where there is no column `sequence`.
const SURROUNDINGS_WITHOUT: &str =
    "SELECT FALSE, FALSE, to_regclass('{sequence}') IS NOT NULL, current_schema()::text WHERE $1 <> ''";

/// Definitions of the columns that a start needs (versions up to 11).
const DEFINITIONS: [(&str, &str, &str); 35] = [
    ("outbox", "id", "UUID NOT NULL DEFAULT gen_random_uuid()"),
    ("outbox", "topic", "VARCHAR(255) NOT NULL DEFAULT ''"),
    ("outbox", "key", "VARCHAR(255)"),
    ("outbox", "payload", "JSONB NOT NULL DEFAULT 'null'"),
    ("outbox", "headers", "JSONB NOT NULL DEFAULT '{}'"),
    ("outbox", "aggregate_type", "VARCHAR(255)"),
    ("outbox", "state", "VARCHAR(50) NOT NULL DEFAULT 'pending'"),
    ("outbox", "attempt", "INTEGER NOT NULL DEFAULT 0"),
    ("outbox", "max_attempts", "INTEGER NOT NULL DEFAULT 5"),
    ("outbox", "scheduled_at", "TIMESTAMPTZ NOT NULL DEFAULT CURRENT_TIMESTAMP"),
    ("outbox", "created_at", "TIMESTAMPTZ NOT NULL DEFAULT CURRENT_TIMESTAMP"),
    ("outbox", "updated_at", "TIMESTAMPTZ NOT NULL DEFAULT CURRENT_TIMESTAMP"),
    ("outbox", "claimed_at", "TIMESTAMPTZ"),
    ("outbox", "lease_expires_at", "TIMESTAMPTZ"),
    ("outbox", "claim_token", "UUID"),
    ("outbox", "last_error", "TEXT"),
    ("outbox", "sequence", "BIGINT GENERATED BY DEFAULT AS IDENTITY"),
    ("inbox", "id", "UUID NOT NULL DEFAULT gen_random_uuid()"),
    ("inbox", "source", "VARCHAR(255) NOT NULL DEFAULT ''"),
    ("inbox", "idempotency_key", "VARCHAR(255) NOT NULL DEFAULT gen_random_uuid()::text"),
    ("inbox", "aggregate_id", "VARCHAR(255)"),
    ("inbox", "event_type", "VARCHAR(255)"),
    ("inbox", "payload", "JSONB NOT NULL DEFAULT 'null'"),
    ("inbox", "headers", "JSONB NOT NULL DEFAULT '{}'"),
    ("inbox", "correlation_id", "VARCHAR(128)"),
    ("inbox", "consumption", "VARCHAR(4) NOT NULL DEFAULT 'push' CHECK ({i.consumption} IN ('push', 'pull'))"),
    ("inbox", "state", "VARCHAR(50) NOT NULL DEFAULT 'pending'"),
    ("inbox", "created_at", "TIMESTAMPTZ NOT NULL DEFAULT CURRENT_TIMESTAMP"),
    ("inbox", "processed_at", "TIMESTAMPTZ"),
    ("inbox", "scheduled_at", "TIMESTAMPTZ NOT NULL DEFAULT CURRENT_TIMESTAMP"),
    ("inbox", "attempt", "INT NOT NULL DEFAULT 0"),
    ("inbox", "last_error", "TEXT"),
    ("inbox", "claimed_at", "TIMESTAMPTZ"),
    ("inbox", "lease_expires_at", "TIMESTAMPTZ"),
    ("inbox", "claim_token", "UUID"),
];

/// What every version of the two tables has, and hardly another table of that name.
const OWN_COLUMNS: [(&str, &str); 7] = [
    ("outbox", "topic"),
    ("outbox", "payload"),
    ("outbox", "state"),
    ("inbox", "source"),
    ("inbox", "idempotency_key"),
    ("inbox", "payload"),
    ("inbox", "state"),
];

/// What a look at the database found.
#[derive(Debug, Default)]
pub(crate) struct Look {
    /// Columns by table (`outbox`, `inbox`, `worker`, `lane`, `history`, `classic`), by the names in the database.
    columns: BTreeMap<String, BTreeSet<String>>,
    /// Columns of the two tables whose collation is not deterministic.
    merging: BTreeSet<(String, String)>,
    /// Default of the column `sequence`.
    sequence_default: String,
    uniques: BTreeSet<(String, Vec<String>)>,
    trigger: bool,
    counter: bool,
    /// There is a counter of our name, whoever uses it.
    sequence_taken: bool,
    schema: Option<String>,
}

impl Look {
    fn has(&self, table: &str) -> bool {
        self.columns.contains_key(table)
    }

    fn has_column(&self, names: &Names, table: &str, column: &str) -> bool {
        let name = match table {
            "outbox" => names.outbox_column(column),
            "inbox" => names.inbox_column(column),
            _ => column,
        };
        self.columns.get(table).is_some_and(|columns| columns.contains(name))
    }
}

impl PostgresStore {
    pub(crate) async fn look(&self, names: &Names) -> Result<Look, Error> {
        let mut look = Look::default();
        let text = |template: &str| -> Arc<str> { names.render(template, &[]).into() };
        for row in &self.db.rows(&text(COLUMNS), Args::new()).await? {
            let mut cells = Cells::of(row);
            let (table, column): (String, String) = (cells.next()?, cells.next()?);
            let (deterministic, default): (bool, Option<String>) = (cells.next()?, cells.next()?);
            if !deterministic {
                look.merging.insert((table.clone(), column.clone()));
            }
            if table == "outbox" && column == names.outbox_column("sequence") {
                look.sequence_default = default.unwrap_or_default();
            }
            look.columns.entry(table).or_default().insert(column);
        }
        for row in &self.db.rows(&text(UNIQUES), Args::new()).await? {
            let mut cells = Cells::of(row);
            let (table, columns): (String, Vec<String>) = (cells.next()?, cells.next()?);
            look.uniques.insert((table, columns));
        }
        let has_counter = look.has_column(names, "outbox", "sequence");
        let surroundings = if has_counter { SURROUNDINGS } else { SURROUNDINGS_WITHOUT };
        let args = Args::new().bind(names.outbox_column("sequence"));
        if let Some(row) = self.db.rows(&text(surroundings), args).await?.first() {
            let mut cells = Cells::of(row);
            (look.trigger, look.counter, look.sequence_taken, look.schema) =
                (cells.next()?, cells.next()?, cells.next()?, cells.next()?);
        }
        Ok(look)
    }

    async fn read_history(&self, names: &Names, look: &Look) -> Result<Option<Vec<Applied>>, Error> {
        if !look.has("history") {
            return Ok(None);
        }
        let rows = match self.db.rows(&names.render(HISTORY, &[]).into(), Args::new()).await {
            // A worker's role that was never given the history: its columns tell enough.
            Err(error) if error.sqlstate().as_deref() == Some("42501") => return Ok(None),
            rows => rows?,
        };
        let mut history = Vec::with_capacity(rows.len());
        for row in &rows {
            let mut cells = Cells::of(row);
            let (version, name, checksum): (i32, String, String) = (cells.next()?, cells.next()?, cells.next()?);
            let min_reader: i32 = cells.next()?;
            history.push(Applied {
                version: version.unsigned_abs(),
                name,
                checksum,
                min_reader: min_reader.unsigned_abs(),
            });
        }
        Ok(Some(history))
    }

    /// The version that the classic history names, if it is one that the tables really have.
    async fn classic_version(&self, names: &Names, look: &Look) -> Result<Option<u32>, Error> {
        if !look.has("classic") {
            return Ok(None);
        }
        let rows = self.db.rows(&names.render(CLASSIC, &[]).into(), Args::new()).await?;
        let named: Option<i32> = rows.first().map_or(Ok(None), |row| Cells::of(row).next())?;
        let named = named.map(i32::unsigned_abs).filter(|version| (1..=CLASSIC_NEWEST).contains(version));
        Ok(named.filter(|version| {
            INTRODUCED
                .iter()
                .filter(|(since, ..)| since <= version)
                .all(|(_, table, column)| look.has_column(names, table, column))
        }))
    }

    /// Version of the tables as their columns tell it.
    fn version_by_columns(&self, look: &Look) -> u32 {
        let newer = self.features_of(look);
        match (newer.lanes, newer.fan_out && newer.crashes && newer.topics) {
            (true, true) => CATALOG.newest(),
            (false, true) => 12,
            _ => CLASSIC_NEWEST,
        }
    }

    pub(crate) fn features_of(&self, look: &Look) -> Features {
        let has = |table, column| look.has_column(&self.names, table, column);
        let own = |table: &str, columns: &[&str]| {
            look.columns.get(table).is_some_and(|there| columns.iter().all(|column| there.contains(*column)))
        };
        let merging = |table: &str, column: &str| look.merging.contains(&(table.to_owned(), column.to_owned()));
        let drawn_late = look
            .sequence_default
            .split_once("nextval")
            .is_some_and(|(before, _)| before.contains("pg_current_xact_id"));
        Features {
            lanes: own("worker", &["worker", "token", "relay_uid", "config", "lane_hash", "idle", "lease_expires_at"])
                && own("lane", &["scope", "lane", "worker", "term"]),
            fan_out: has("outbox", "destination") && has("outbox", "parent_id"),
            crashes: has("outbox", "crashes"),
            trace: has("outbox", "trace_parent"),
            inbox_crashes: has("inbox", "crashes"),
            inbox_trace: has("inbox", "trace_parent"),
            topics: has("inbox", "topic"),
            on_sent_delete: self.config.on_sent_delete,
            merging_keys: ["source", "idempotency_key"].iter().any(|c| merging("inbox", self.names.inbox_column(c))),
            floor: drawn_late && look.counter,
        }
    }

    /// A table of these names that somebody else made: neither statements nor a baseline would make it QueueBox's.
    fn foreign(&self, look: &Look) -> Result<(), Error> {
        if !self.names.renamed().is_empty() {
            return Ok(());
        }
        for (table, field) in [("outbox", "outboxTableName"), ("inbox", "inboxTableName")] {
            let own = look.columns.get(table).is_none_or(|_| {
                OWN_COLUMNS.iter().all(|(of, column)| *of != table || look.has_column(&self.names, table, column))
            });
            if !own {
                let columns: Vec<&str> = look.columns[table].iter().map(String::as_str).collect();
                let schema = self.names.schema().or(look.schema.as_deref()).unwrap_or("public");
                return Err(Error::Misconfigured {
                    code: "foreign_table",
                    detail: format!(
                        "table or view {schema}.{table} is not QueueBox's (it has {}). Give QueueBox a schema of its own with \
                         Relay.spec.database.postgres.schema, or another name with Relay.spec.database.{field}",
                        columns.join(", ")
                    ),
                });
            }
        }
        Ok(())
    }

    /// Everything that is missing, in one error, with the statements that add it.
    pub(crate) fn demand(&self, look: &Look) -> Result<(), Error> {
        self.foreign(look)?;
        let renamed = !self.names.renamed().is_empty();
        let (mut missing, mut absent) = (Vec::new(), Vec::new());
        for (table, name) in [("outbox", self.names.outbox()), ("inbox", self.names.inbox())] {
            if !look.has(table) {
                let schema = self.names.schema().or(look.schema.as_deref()).unwrap_or("public");
                absent.push(format!("there is no table {name:?} in the schema {schema:?}"));
                missing.extend(self.statements_of(look, &format!("{{{table}}}")));
            }
        }
        // Migrations make them, unless these tables have names of their own (contract 2.6).
        if !absent.is_empty() && !renamed {
            return Err(Error::Misconfigured {
                code: "schema",
                detail: format!("{}; run \"queuebox migrate\" or set database.migrate: Auto", absent.join(", and ")),
            });
        }
        for (table, column, definition) in DEFINITIONS {
            if look.has(table) && !look.has_column(&self.names, table, column) {
                let (placeholder, letter) = if table == "outbox" { ("{outbox}", "o") } else { ("{inbox}", "i") };
                missing.push(format!("ALTER TABLE {placeholder} ADD COLUMN {{{letter}.{column}}} {definition}"));
            }
        }
        for (table, columns) in [("outbox", &["id"][..]), ("inbox", &["id"]), ("inbox", &["source", "idempotency_key"])]
        {
            if look.has(table) {
                missing.extend(self.missing_unique(look, table, columns));
            }
        }
        if missing.is_empty() {
            return Ok(());
        }
        if !absent.is_empty() {
            missing.extend(self.own_objects(look));
        }
        let names = if absent.is_empty() { self.names.clone() } else { self.qualified(look) };
        let statements = missing.iter().map(|line| names.render(line, &[]).trim().to_owned()).collect::<Vec<_>>();
        let what =
            if absent.is_empty() { "the tables lack what QueueBox needs".to_owned() } else { absent.join(", and ") };
        Err(Error::Misconfigured {
            code: "schema",
            detail: format!("{what}; these statements add it:\n{};", statements.join(";\n")),
        })
    }

    /// The names with their schema: the function of the wake-up runs without a search path.
    fn qualified(&self, look: &Look) -> Names {
        match self.names.schema() {
            Some(_) => self.names.clone(),
            None => self.names.in_schema(look.schema.as_deref().unwrap_or("public")),
        }
    }

    /// The statements of the newest schema that make a table (`{outbox}`, …) and what belongs to it, each on one line, as a template with
    /// the columns' own names.
    fn statements_of(&self, look: &Look, table: &str) -> Vec<String> {
        let is_outbox = table == "{outbox}";
        let mut statements = Vec::new();
        if is_outbox && !look.sequence_taken {
            statements.push("CREATE SEQUENCE {sequence} AS BIGINT CACHE 1".to_owned());
        }
        for (_, sql) in Migration::statements(CATALOG.fresh.sql) {
            let sql = one_line(sql);
            let made = sql.starts_with(&format!("CREATE TABLE {table} ")) || sql.contains(&format!(" ON {table} ("));
            if made {
                statements.push(self.with_own_columns(&sql, table));
            }
        }
        if is_outbox && !look.sequence_taken {
            statements.push("ALTER SEQUENCE {sequence} OWNED BY {outbox}.{o.sequence}".to_owned());
        }
        statements
    }

    /// Names of columns stand in the file as they are; here each becomes a placeholder.
    fn with_own_columns(&self, sql: &str, table: &str) -> String {
        let (columns, letter): (&[&str], _) = match table {
            "{outbox}" => (&OUTBOX_COLUMNS, "o"),
            "{inbox}" => (&INBOX_COLUMNS, "i"),
            _ => return sql.to_owned(),
        };
        let is_word = |character: char| character.is_ascii_alphanumeric() || character == '_';
        let mut out = String::with_capacity(sql.len());
        let (mut rest, mut quoted) = (sql, false);
        while let Some(first) = rest.chars().next() {
            let word: String = rest.chars().take_while(|character| is_word(*character)).collect();
            let taken = if word.is_empty() { first.len_utf8() } else { word.len() };
            quoted ^= first == '\'';
            // Placeholders and texts stay as they are, and so does a type or function of the same name.
            let is_name = !quoted && !out.ends_with('{') && columns.contains(&word.as_str());
            if is_name {
                out.push_str(&format!("{{{letter}.{word}}}"));
            } else {
                out.push_str(&rest[..taken]);
            }
            rest = &rest[taken..];
        }
        out
    }

    /// What stands beside the two tables and is not there yet: QueueBox's own tables, the function and the trigger of the wake-up.
    fn own_objects(&self, look: &Look) -> Vec<String> {
        let mut statements = Vec::new();
        for (table, placeholder) in [("worker", "{worker}"), ("lane", "{lane}")] {
            if !look.has(table) {
                statements.extend(self.statements_of(look, placeholder));
            }
        }
        if !look.trigger {
            statements.extend(Self::wake_statements());
        }
        statements
    }

    /// The function and the trigger of the wake-up; the function may be there already.
    fn wake_statements() -> Vec<String> {
        let statements = Migration::statements(CATALOG.fresh.sql);
        let statements = statements.into_iter().map(|(_, sql)| one_line(sql));
        let ours = statements.filter(|sql| sql.starts_with("CREATE FUNCTION") || sql.starts_with("CREATE TRIGGER"));
        ours.map(|sql| sql.replace("CREATE FUNCTION", "CREATE OR REPLACE FUNCTION")).collect()
    }

    fn missing_unique(&self, look: &Look, table: &str, columns: &[&str]) -> Option<String> {
        let name =
            |column| if table == "outbox" { self.names.outbox_column(column) } else { self.names.inbox_column(column) };
        let mut wanted: Vec<String> = columns.iter().map(|column| name(column).to_owned()).collect();
        wanted.sort();
        if look.uniques.contains(&(table.to_owned(), wanted)) {
            return None;
        }
        let letter = if table == "outbox" { "o" } else { "i" };
        let list = columns.iter().map(|column| format!("{{{letter}.{column}}}")).collect::<Vec<_>>().join(", ");
        let named = if columns.len() > 1 { "CONSTRAINT uq_inbox_source_idempotency " } else { "" };
        Some(format!("ALTER TABLE {{{table}}} ADD {named}UNIQUE ({list})"))
    }

    /// What is off or odd, each with what mends it.
    pub(crate) fn notes(
        &self,
        look: &Look,
        features: &Features,
        version: u32,
        mode: Mode,
    ) -> Vec<(String, Option<String>)> {
        let mut notes = Vec::new();
        let renamed = !self.names.renamed().is_empty();
        let mend = if renamed { "add the column by hand" } else { "run \"queuebox migrate\"" };
        let mut off = |on: bool, feature: &str, needs: &str, mend: &str| {
            if !on {
                notes.push((format!("{feature}; it needs {needs}"), Some(mend.to_owned())));
            }
        };
        off(features.fan_out, "fan-out is off", "outbox.destination and outbox.parent_id (schema version 12)", mend);
        off(
            features.crashes && features.inbox_crashes,
            "crash counting is off",
            "the columns crashes (schema version 12)",
            mend,
        );
        off(features.topics, "stored topics are off", "inbox.topic (schema version 12)", mend);
        off(
            features.trace && features.inbox_trace,
            "stored trace context is off",
            "the columns trace_parent (schema version 12)",
            mend,
        );
        let make = |them: Vec<String>| {
            let names = self.qualified(look);
            let rendered: Vec<String> = them.iter().map(|sql| names.render(sql, &[]).trim().to_owned()).collect();
            format!("these statements make them:\n{};", rendered.join(";\n"))
        };
        let own = if renamed { make(self.own_objects(look)) } else { mend.to_owned() };
        off(
            features.lanes,
            "lanes are off and rows are claimed instead, which is slower",
            "queuebox_worker and queuebox_lane (schema version 14)",
            &own,
        );
        // Without lanes the statements above hold those of the trigger as well.
        let trigger = match (renamed, features.lanes) {
            (true, true) => make(Self::wake_statements()),
            (true, false) => "it comes with the lanes".to_owned(),
            (false, _) => mend.to_owned(),
        };
        off(
            look.trigger && features.lanes,
            "wake-up is off, so workers poll",
            "the trigger queuebox_wake (schema version 14)",
            &trigger,
        );
        if features.merging_keys {
            notes.push((
                "the collation of inbox.source or inbox.idempotency_key is not deterministic, so keys may merge"
                    .to_owned(),
                Some("change these columns to COLLATE \"C\"".to_owned()),
            ));
        }
        if version > CATALOG.newest() {
            let newest = CATALOG.newest();
            notes.push((format!("the schema has version {version}, newer than {newest}; it is used as it is"), None));
        }
        if mode == Mode::Pooled {
            let wake = if matches!(self.config.capture, Capture::Auto(Some(_))) {
                ""
            } else {
                ", and without capture.connection it polls"
            };
            let pooled = "a pooler stands in front of the database: each statement has its own transaction";
            notes.push((format!("{pooled}{wake}"), None));
        }
        notes
    }

    fn plan_wake(&self, look: &Look, features: &Features, mode: Mode) {
        let target = match &self.config.capture {
            Capture::Polling => return self.wake.poll_only("capture.mode is Polling"),
            _ if !look.trigger || !features.lanes => return self.wake.poll_only("there is no wake-up trigger"),
            Capture::Auto(None) if mode == Mode::Pooled => {
                return self.wake.poll_only("a pooler is in the way and there is no capture.connection");
            }
            Capture::Auto(None) => self.config.target.clone(),
            Capture::Auto(Some(target)) => (**target).clone(),
        };
        // Nothing of what the hot path sets is wanted there, and a listener runs no statement.
        self.wake.want(Arc::new(move || options(&target, Mode::Pooled, Duration::ZERO)));
    }

    async fn check_all(&self) -> Result<SchemaReport, Error> {
        let mode = self.db.mode().await?;
        if mode == Mode::Pooled {
            self.check_pool_mode().await?;
        }
        let look = self.look(&self.names).await?;
        self.demand(&look)?;
        let version = self.check_version(&look).await?;
        let features = self.features_of(&look);
        self.set_features(features);
        self.plan_wake(&look, &features, mode);
        let told = |(note, mend): (String, Option<String>)| mend.map_or(note.clone(), |mend| format!("{note}: {mend}"));
        let notes = self.notes(&look, &features, version, mode).into_iter().map(told).collect();
        Ok(SchemaReport { version, notes })
    }

    /// Version of the tables; an error where this release must not work on it.
    pub(crate) async fn check_version(&self, look: &Look) -> Result<u32, Error> {
        Ok(match self.read_history(&self.names, look).await? {
            Some(history) if !history.is_empty() => queuebox_sql::migrations::verify(&CATALOG, &history)?,
            _ => self.version_by_columns(look),
        })
    }

    /// A pooler that gives the connection away after each statement cannot carry a transaction.
    pub(crate) async fn check_pool_mode(&self) -> Result<(), Error> {
        let mut tx = match self.db.begin().await {
            Err(error) if error.sqlstate().as_deref().is_some_and(|code| code.starts_with("08")) => {
                return Err(Error::Misconfigured {
                    code: "pool_mode",
                    detail: "the pooler in front of the database allows no transactions; set its pool_mode to \"transaction\"".to_owned(),
                });
            }
            tx => tx?,
        };
        tx.rollback().await;
        Ok(())
    }

    // ---- migrations --------------------------------------------------------------------------------------------------

    async fn migrate_all(&self, options: MigrateOptions) -> Result<Migrated, Error> {
        let renamed = self.names.renamed();
        if !renamed.is_empty() {
            return Err(Error::Misconfigured {
                code: "names",
                detail: format!(
                    "migrations know the default names only, but these are renamed: {}; set database.migrate: Off and change the \
                     tables by hand",
                    renamed.join(", ")
                ),
            });
        }
        self.db.mode().await?;
        let names = self.resolved_names().await?;
        let mut lock = self.migrators_lock(&names).await?;
        let done = self.migrate_locked(&names, options).await;
        lock.rollback().await;
        done
    }

    /// Migrations name their schema, so that a trigger which runs with its owner's rights depends on nobody's search path.
    async fn resolved_names(&self) -> Result<Names, Error> {
        let sql: Arc<str> =
            "SELECT coalesce($1::text, current_schema()::text), to_regnamespace(quote_ident(coalesce($1::text, \
                             current_schema()::text))) IS NOT NULL"
                .into();
        let rows = self.db.rows(&sql, Args::new().bind(self.names.schema())).await?;
        let row = rows.first().ok_or(Error::Fenced)?;
        let mut cells = Cells::of(row);
        let (schema, there): (Option<String>, Option<bool>) = (cells.next()?, cells.next()?);
        match schema.filter(|schema| there == Some(true) && queuebox_sql::names::is_name(schema)) {
            Some(schema) => Ok(self.names.in_schema(&schema)),
            None => Err(Error::Misconfigured {
                code: "schema",
                detail: "the schema for the tables does not exist, or its name is not a letter or \"_\", then letters, digits, \"_\"; \
                         create it, or set database.postgres.schema"
                    .to_owned(),
            }),
        }
    }

    async fn migrators_lock(&self, names: &Names) -> Result<Conn, Error> {
        let sql: Arc<str> = MIGRATE_LOCK.into();
        let mut told = false;
        loop {
            let mut tx = self.db.begin().await?;
            tx.batch("SET LOCAL idle_in_transaction_session_timeout = 0").await?;
            let rows = tx.rows(&sql, Args::new().bind(names.schema())).await?;
            if rows.first().map_or(Ok(false), |row| Cells::of(row).next::<bool>())? {
                return Ok(tx);
            }
            tx.rollback().await;
            drop(tx);
            if !told {
                tracing::info!("another process is migrating this database; waiting for it");
                told = true;
            }
            tokio::time::sleep(LOCK_PAUSE).await;
        }
    }

    async fn migrate_locked(&self, names: &Names, options: MigrateOptions) -> Result<Migrated, Error> {
        let look = self.look(names).await?;
        self.foreign(&look)?;
        let found = Found {
            history: self.read_history(names, &look).await?,
            tables: look.has("outbox") || look.has("inbox"),
            classic: self.classic_version(names, &look).await?,
        };
        let plan: Plan = plan(&CATALOG, &found, options.baseline)?;
        if let Some(given) = options.baseline {
            check_baseline(given, &INTRODUCED, |table, column| look.has_column(names, table, column))?;
        }
        if plan.newer {
            tracing::info!(
                version = plan.to,
                known = CATALOG.newest(),
                "the schema is newer than this release; it is used as it is"
            );
        }
        if !plan.steps.is_empty() {
            self.db.conn().await?.batch(&names.render(HISTORY_TABLE, &[])).await?;
        }
        let mut applied = Vec::new();
        for step in &plan.steps {
            match step {
                Step::Record { version, name } => {
                    let args = record(*version, name, "", *version);
                    self.db.rows(&names.render(RECORD, &[]).into(), args).await?;
                }
                Step::Run(file) => {
                    self.run(names, file).await?;
                    tracing::info!(version = file.version, name = file.name, "migration applied");
                    applied.push(format!("{} {}", file.version, file.name));
                }
            }
        }
        Ok(Migrated { from: plan.from, to: plan.to, applied, adopted: plan.adopted })
    }

    /// Statements marked `outside` first, each by itself; the others in one transaction together with the record.
    async fn run(&self, names: &Names, file: &Migration) -> Result<(), Error> {
        let rendered = names.render(file.sql, &[]);
        let mut inside = Vec::new();
        for (words, sql) in Migration::statements(&rendered) {
            match words.strip_prefix("outside") {
                Some(index) => self.run_outside(names, index.trim(), sql).await?,
                None => inside.push(sql),
            }
        }
        for tried in 1.. {
            match self.run_inside(names, file, &inside).await {
                Err(error) if error.sqlstate().as_deref() == Some("55P03") && tried < LOCK_TRIES => {
                    tracing::info!(
                        version = file.version,
                        "a table is in use; the migration steps back and tries again"
                    );
                    tokio::time::sleep(LOCK_PAUSE * 4).await;
                }
                done => return done,
            }
        }
        Ok(())
    }

    async fn run_inside(&self, names: &Names, file: &Migration, statements: &[&str]) -> Result<(), Error> {
        let mut tx = self.db.begin().await?;
        let done = async {
            tx.batch(LOCK_TIMEOUT).await?;
            for sql in statements {
                tx.batch_unbounded(sql).await?;
            }
            let args = record(file.version, file.name, &file.checksum(), file.min_reader);
            tx.rows(&names.render(RECORD, &[]).into(), args).await?;
            tx.commit().await
        };
        match done.await {
            Err(error) => {
                tx.rollback().await;
                Err(error)
            }
            done => done,
        }
    }

    /// An index that an earlier try left behind half-built is there, but serves nobody: it goes first.
    async fn run_outside(&self, names: &Names, index: &str, sql: &str) -> Result<(), Error> {
        let name = names.render(&format!("{{schema}}\"{index}\""), &[]).trim().to_owned();
        let mut conn = self.db.conn().await?;
        let pooled = self.db.mode().await? == Mode::Pooled;
        let rows = self.db.rows(&INVALID_INDEX.into(), Args::new().bind(name.as_str())).await?;
        if rows.first().map_or(Ok(0i64), |row| Cells::of(row).next())? > 0 {
            conn.batch_unbounded(&format!("DROP INDEX CONCURRENTLY IF EXISTS {name}")).await?;
        }
        if !pooled {
            conn.batch("SET statement_timeout = 0").await?;
        }
        let built = conn.batch_unbounded(sql).await;
        if !pooled {
            conn.batch("RESET statement_timeout").await?;
        }
        built
    }
}

/// Columns by the version that introduced them.
const INTRODUCED: [(u32, &str, &str); 26] = [
    (1, "outbox", "topic"),
    (1, "outbox", "max_attempts"),
    (2, "inbox", "source"),
    (2, "inbox", "idempotency_key"),
    (3, "outbox", "claimed_at"),
    (3, "inbox", "claimed_at"),
    (4, "outbox", "last_error"),
    (5, "inbox", "correlation_id"),
    (6, "outbox", "claim_token"),
    (6, "outbox", "lease_expires_at"),
    (6, "inbox", "claim_token"),
    (6, "inbox", "consumption"),
    (6, "inbox", "scheduled_at"),
    (9, "outbox", "aggregate_type"),
    (10, "inbox", "headers"),
    (11, "outbox", "sequence"),
    (11, "outbox", "id"),
    (12, "outbox", "destination"),
    (12, "outbox", "parent_id"),
    (12, "outbox", "trace_parent"),
    (12, "outbox", "crashes"),
    (12, "inbox", "trace_parent"),
    (12, "inbox", "crashes"),
    (12, "inbox", "topic"),
    (14, "worker", "token"),
    (14, "lane", "term"),
];

/// A statement without comments, on one line.
fn one_line(sql: &str) -> String {
    let lines = sql.lines().filter(|line| !line.trim_start().starts_with("--"));
    let text = lines.collect::<Vec<_>>().join(" ");
    text.split_whitespace().collect::<Vec<_>>().join(" ").trim_end_matches(';').to_owned()
}

fn record(version: u32, name: &str, checksum: &str, min_reader: u32) -> Args {
    let number = |value: u32| i32::try_from(value).unwrap_or(i32::MAX);
    Args::new().bind(number(version)).bind(name).bind(checksum).bind(number(min_reader))
}

#[async_trait]
impl Schema for PostgresStore {
    fn kind(&self) -> &'static str {
        "postgres"
    }

    async fn ping(&self) -> Result<(), Fault> {
        let mut conn = self.db.conn().await?;
        let sql: Arc<str> = "SELECT current_setting('transaction_read_only')".into();
        let rows = conn.rows(&sql, Args::new()).await?;
        let answer: String = rows.first().map_or(Ok(String::new()), |row| Cells::of(row).next())?;
        if answer == "on" {
            conn.give_up();
            return Err(Error::ReadOnly.into());
        }
        Ok(())
    }

    async fn migrate(&self, options: MigrateOptions) -> Result<Migrated, Fault> {
        Ok(self.migrate_all(options).await?)
    }

    async fn check(&self) -> Result<SchemaReport, Fault> {
        Ok(self.check_all().await?)
    }

    fn fans_out(&self) -> bool {
        self.features().fan_out
    }

    fn grants(&self, role: &str) -> Vec<String> {
        let role = role.replace('"', "\"\"");
        let schema = self.names.schema().unwrap_or("public");
        [
            format!("GRANT USAGE ON SCHEMA \"{schema}\" TO \"{role}\""),
            format!(
                "GRANT SELECT, INSERT, UPDATE, DELETE ON {{outbox}}, {{inbox}}, {{worker}}, {{lane}} TO \"{role}\""
            ),
            format!("GRANT USAGE ON SEQUENCE {{sequence}} TO \"{role}\""),
            format!("GRANT SELECT ON {{history}} TO \"{role}\""),
        ]
        .iter()
        .map(|text| self.names.render(text, &[]).trim().to_owned())
        .collect()
    }

    async fn examine(&self) -> Result<Vec<Finding>, Fault> {
        Ok(self.examine_all().await?)
    }

    fn pool(&self) -> (u32, u32, u32) {
        self.db.gauges()
    }

    async fn close(&self) {
        self.wake.stop();
        self.db.close().await;
    }
}

#[cfg(test)]
mod tests {
    use queuebox_sql::names::{INBOX_COLUMNS, INBOX_COLUMNS_12, OUTBOX_COLUMNS, OUTBOX_COLUMNS_12};

    use super::*;

    #[test]
    fn every_column_up_to_version_11_has_a_definition() {
        let defined = |table: &str, column: &str| DEFINITIONS.iter().any(|(t, c, _)| *t == table && *c == column);
        for column in OUTBOX_COLUMNS.iter().filter(|column| !OUTBOX_COLUMNS_12.contains(column)) {
            assert!(defined("outbox", column), "outbox.{column}");
        }
        for column in INBOX_COLUMNS.iter().filter(|column| !INBOX_COLUMNS_12.contains(column)) {
            assert!(defined("inbox", column), "inbox.{column}");
        }
    }
}

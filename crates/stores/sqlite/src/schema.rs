//! Tables, history and the check at start (contract 2.2 to 2.7).

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use async_trait::async_trait;
use queuebox_core::{
    Fault,
    ports::schema::{Finding, MigrateOptions, Migrated, Schema, SchemaReport},
};
use queuebox_sql::{
    Applied, Catalog, Found, Migration, Step,
    names::{INBOX_COLUMNS, OUTBOX_COLUMNS, Quote},
    plan,
};
use sqlx::{Row as _, SqliteConnection};

use crate::{SqliteStore, classify, session::Session};

/// SQLite begins with the file of number 14; 1 to 13 exist on PostgreSQL and SQL Server only (contract 2.5).
const CATALOG: Catalog = Catalog {
    fresh: Migration {
        version: 14,
        name: "create",
        sql: include_str!("../migrations/0014_create.sql"),
        min_reader: 14,
    },
    steps: &[],
};

const HISTORY: &str = "
CREATE TABLE IF NOT EXISTS {history} (
    version INTEGER NOT NULL,
    name TEXT NOT NULL,
    checksum TEXT NOT NULL,
    applied_at TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%f000Z', 'now')),
    min_reader INTEGER NOT NULL,
    PRIMARY KEY (version, name))";

const APPLIED: &str = "
SELECT version, name, checksum, min_reader FROM {history} ORDER BY version, name";

const RECORD: &str = "
INSERT INTO {history} (version, name, checksum, min_reader) VALUES (?1, ?2, ?3, ?4)";

/// States that are none. It walks the table.
const UNKNOWN_OUTBOX: &str = "
SELECT {o.state}, count(*) FROM {outbox} WHERE {o.state} NOT IN ('pending', 'processing', 'sent', 'dead') GROUP BY 1 LIMIT 5";

const UNKNOWN_INBOX: &str = "
SELECT {i.state}, count(*) FROM {inbox} WHERE {i.state} NOT IN ('pending', 'processing', 'processed', 'dead') GROUP BY 1 LIMIT 5";

const UNIQUE: &str = "uq_inbox_source_idempotency";

const WORKER_COLUMNS: [&str; 7] = ["worker", "token", "relay_uid", "config", "lane_hash", "idle", "lease_expires_at"];

const LANE_COLUMNS: [&str; 4] = ["scope", "lane", "worker", "term"];

/// A unique index of a table: its columns and their collations.
struct UniqueIndex {
    columns: Vec<(String, String)>,
}

/// What a table is made of.
#[derive(Default)]
struct Table {
    columns: BTreeSet<String>,
    unique: Vec<UniqueIndex>,
}

impl Table {
    fn is_there(&self) -> bool {
        !self.columns.is_empty()
    }

    fn index_over(&self, wanted: &[&str]) -> Option<&UniqueIndex> {
        let wanted: BTreeSet<_> = wanted.iter().map(|name| name.to_ascii_lowercase()).collect();
        self.unique.iter().find(|index| {
            index.columns.iter().map(|(name, _)| name.to_ascii_lowercase()).collect::<BTreeSet<_>>() == wanted
        })
    }
}

async fn table(connection: &mut SqliteConnection, name: &str) -> Result<Table, sqlx::Error> {
    // xinfo, not info: generated columns are hidden from the latter.
    let columns: Vec<String> = sqlx::query_scalar("SELECT lower(name) FROM pragma_table_xinfo(?1)")
        .bind(name)
        .fetch_all(&mut *connection)
        .await?;
    let parts = sqlx::query(
        "SELECT l.name, x.name, x.coll FROM pragma_index_list(?1) AS l, pragma_index_xinfo(l.name) AS x
          WHERE l.\"unique\" AND NOT l.partial AND x.key",
    )
    .bind(name)
    .fetch_all(&mut *connection)
    .await?;
    let mut unique: BTreeMap<String, UniqueIndex> = BTreeMap::new();
    for part in parts {
        let column: Option<String> = part.try_get(1)?;
        let index = unique.entry(part.try_get(0)?).or_insert_with(|| UniqueIndex { columns: Vec::new() });
        index.columns.push((column.unwrap_or_default(), part.try_get(2)?));
    }
    // A rowid table's INTEGER PRIMARY KEY has no index, but it is unique.
    let key: Vec<String> = sqlx::query_scalar("SELECT name FROM pragma_table_xinfo(?1) WHERE pk > 0")
        .bind(name)
        .fetch_all(connection)
        .await?;
    let mut unique: Vec<_> = unique.into_values().collect();
    unique.push(UniqueIndex { columns: key.into_iter().map(|name| (name, "BINARY".to_owned())).collect() });
    Ok(Table { columns: columns.into_iter().collect(), unique })
}

/// Definition of a column for `ALTER TABLE`, which takes constant defaults only.
fn definition(column: &str) -> &'static str {
    match column {
        "id" => "TEXT COLLATE NOCASE",
        "topic" | "source" | "idempotency_key" | "payload" => "TEXT NOT NULL DEFAULT ''",
        "headers" => "TEXT NOT NULL DEFAULT '{}'",
        "state" => "TEXT NOT NULL DEFAULT 'pending'",
        "consumption" => "TEXT NOT NULL DEFAULT 'push'",
        "attempt" | "crashes" => "INTEGER NOT NULL DEFAULT 0",
        "max_attempts" => "INTEGER NOT NULL DEFAULT 5",
        "scheduled_at" | "created_at" | "updated_at" => "TEXT NOT NULL DEFAULT '1970-01-01T00:00:00.000000Z'",
        "parent_sequence" => "INTEGER",
        "sequence" => "INTEGER GENERATED ALWAYS AS (COALESCE(parent_sequence, row_no)) VIRTUAL",
        _ => "TEXT",
    }
}

/// Everything that is missing, and the statements that add it.
#[derive(Default)]
struct Missing {
    what: Vec<String>,
    statements: Vec<String>,
}

impl Missing {
    fn columns<'a>(&mut self, title: &str, found: &Table, columns: impl Iterator<Item = (&'a str, &'a str)>) {
        let quoted = Quote::Double.apply(title);
        // `sequence` is computed from parent_sequence, so it comes last.
        let mut columns: Vec<_> =
            columns.filter(|(_, name)| !found.columns.contains(&name.to_ascii_lowercase())).collect();
        columns.sort_by_key(|(column, _)| *column == "sequence");
        for (column, name) in columns {
            self.what.push(format!("column {title}.{name}"));
            self.statements.push(format!(
                "ALTER TABLE {quoted} ADD COLUMN {} {};",
                Quote::Double.apply(name),
                definition(column)
            ));
        }
    }

    /// A table and its indexes, as in the file of number 14.
    fn created(&mut self, store: &SqliteStore, title: &str, placeholder: &str) {
        self.what.push(format!("table {title}"));
        for (_, statement) in Migration::statements(CATALOG.fresh.sql) {
            if statement.contains(&format!("CREATE TABLE {placeholder} "))
                || statement.contains(&format!(" ON {placeholder} "))
            {
                self.statements.push(format!("{};", store.names().render(statement, &[]).trim()));
            }
        }
    }

    fn unique(&mut self, index: &str, title: &str, columns: &[&str]) {
        self.what.push(format!("{index} UNIQUE ({}) on {title}", columns.join(", ")));
        let columns: Vec<_> = columns.iter().map(|column| Quote::Double.apply(column)).collect();
        let table = Quote::Double.apply(title);
        self.statements.push(format!("CREATE UNIQUE INDEX {index} ON {table} ({});", columns.join(", ")));
    }

    fn into_fault(self) -> Option<Fault> {
        if self.what.is_empty() {
            return None;
        }
        let detail = format!(
            "the database lacks: {}. Run \"queuebox migrate\" on an empty database, or these statements:\n{}",
            self.what.join(", "),
            self.statements.join("\n")
        );
        Some(Fault::misconfigured("schema", detail))
    }
}

impl SqliteStore {
    async fn history(&self, connection: &mut SqliteConnection) -> Result<Option<Vec<Applied>>, sqlx::Error> {
        if !table(connection, "queuebox_schema_history").await?.is_there() {
            return Ok(None);
        }
        let rows = sqlx::query(self.sql(APPLIED)).fetch_all(connection).await?;
        let applied = rows
            .iter()
            .map(|row| {
                Ok(Applied {
                    version: row.try_get(0)?,
                    name: row.try_get(1)?,
                    checksum: row.try_get(2)?,
                    min_reader: row.try_get(3)?,
                })
            })
            .collect::<Result<_, sqlx::Error>>()?;
        Ok(Some(applied))
    }

    async fn found(&self, connection: &mut SqliteConnection) -> Result<Found, sqlx::Error> {
        let history = self.history(&mut *connection).await?;
        let outbox = table(&mut *connection, self.names().outbox()).await?.is_there();
        let inbox = table(&mut *connection, self.names().inbox()).await?.is_there();
        Ok(Found { history, tables: outbox || inbox, classic: None })
    }

    async fn run(&self, session: &mut Session, steps: &[Step]) -> Result<Vec<String>, sqlx::Error> {
        let mut applied = Vec::new();
        if !steps.is_empty() {
            sqlx::query(self.sql(HISTORY)).execute(session.connection()).await?;
        }
        for step in steps {
            let (version, name, checksum, min_reader) = match step {
                Step::Record { version, name } => (*version, *name, String::new(), 0),
                Step::Run(file) => {
                    for (_, statement) in Migration::statements(file.sql) {
                        sqlx::query(self.sql_text(statement)).execute(session.connection()).await?;
                    }
                    applied.push(file.name.to_owned());
                    (file.version, file.name, file.checksum(), file.min_reader)
                }
            };
            sqlx::query(self.sql(RECORD))
                .bind(version)
                .bind(name)
                .bind(checksum)
                .bind(min_reader)
                .execute(session.connection())
                .await?;
        }
        Ok(applied)
    }

    /// The index that the reads of push rows name; a table made by hand may lack it.
    async fn has_push_index(&self, connection: &mut SqliteConnection) -> Result<bool, sqlx::Error> {
        sqlx::query_scalar(
            "SELECT EXISTS (SELECT 1 FROM sqlite_schema
              WHERE type = 'index' AND name = 'idx_inbox_push_pending' AND tbl_name = ?1)",
        )
        .bind(self.names().inbox())
        .fetch_one(connection)
        .await
    }

    async fn missing(&self, connection: &mut SqliteConnection) -> Result<(Missing, Vec<String>), sqlx::Error> {
        let names = self.names();
        let mut missing = Missing::default();
        let mut notes = Vec::new();
        let outbox = table(&mut *connection, names.outbox()).await?;
        if outbox.is_there() {
            let columns = OUTBOX_COLUMNS.iter().map(|column| (*column, names.outbox_column(column)));
            missing.columns(names.outbox(), &outbox, columns.chain([("parent_sequence", "parent_sequence")]));
            let id = names.outbox_column("id");
            match outbox.index_over(&[id]) {
                None => missing.unique("uq_outbox_id", names.outbox(), &[id]),
                Some(index) => notes.extend(binary_ids(names.outbox(), index)),
            }
        } else {
            missing.created(self, names.outbox(), "{outbox}");
        }
        let inbox = table(&mut *connection, names.inbox()).await?;
        if inbox.is_there() {
            let columns = INBOX_COLUMNS.iter().map(|column| (*column, names.inbox_column(column)));
            missing.columns(names.inbox(), &inbox, columns);
            let id = names.inbox_column("id");
            if inbox.index_over(&[id]).is_none() {
                missing.unique("uq_inbox_id", names.inbox(), &[id]);
            }
            let identity = [names.inbox_column("source"), names.inbox_column("idempotency_key")];
            match inbox.index_over(&identity) {
                None => missing.unique(UNIQUE, names.inbox(), &identity),
                Some(index) => notes.extend(merging(names.inbox(), index)),
            }
        } else {
            missing.created(self, names.inbox(), "{inbox}");
        }
        self.own_tables(connection, &mut missing).await?;
        Ok((missing, notes))
    }

    /// A table of these names that somebody else made: neither statements nor a baseline would make it QueueBox's.
    async fn foreign(&self, connection: &mut SqliteConnection) -> Result<(), Fault> {
        if !self.names().renamed().is_empty() {
            return Ok(());
        }
        let own: [(&str, &str, &[&str]); 2] = [
            (self.names().outbox(), "outboxTableName", &["topic", "payload", "state"]),
            (self.names().inbox(), "inboxTableName", &["source", "idempotency_key", "payload", "state"]),
        ];
        for (name, field, columns) in own {
            let found = table(&mut *connection, name).await.map_err(|error| classify(&error))?;
            if found.is_there() && !columns.iter().all(|column| found.columns.contains(*column)) {
                let columns: Vec<&str> = found.columns.iter().map(String::as_str).collect();
                let detail = format!(
                    "table or view {name} is not QueueBox's (it has {}). Give QueueBox a file of its own with \
                     Relay.spec.database.sqlite.path, or another name with Relay.spec.database.{field}",
                    columns.join(", ")
                );
                return Err(Fault::misconfigured("foreign_table", detail));
            }
        }
        Ok(())
    }

    /// Rows that nobody will ever read.
    async fn unknown_states(&self, connection: &mut SqliteConnection) -> Result<Finding, sqlx::Error> {
        let mut unknown = Vec::new();
        for (table, sql) in [("outbox", UNKNOWN_OUTBOX), ("inbox", UNKNOWN_INBOX)] {
            for row in sqlx::query(self.sql(sql)).fetch_all(&mut *connection).await? {
                let (state, rows): (String, i64) = (row.try_get(0)?, row.try_get(1)?);
                unknown.push(format!("{rows} row(s) of {table} have the state {state:?}"));
            }
        }
        if unknown.is_empty() {
            return Ok(finding("states", "ok", "every row has a state that QueueBox knows".to_owned(), None));
        }
        let detail = format!("{}, which QueueBox does not know: nobody reads them", unknown.join("; "));
        let fix = "set them to 'pending', and leave the column to its default when inserting";
        Ok(finding("states", "warning", detail, Some(fix)))
    }

    /// The two tables of workers and lanes are needed on SQLite, also beside renamed tables (contract 2.6).
    async fn own_tables(&self, connection: &mut SqliteConnection, missing: &mut Missing) -> Result<(), sqlx::Error> {
        let tables: [(&str, &str, &[&str]); 2] =
            [("queuebox_worker", "{worker}", &WORKER_COLUMNS), ("queuebox_lane", "{lane}", &LANE_COLUMNS)];
        for (title, placeholder, columns) in tables {
            let found = table(&mut *connection, title).await?;
            if !found.is_there() {
                missing.created(self, title, placeholder);
            } else if let Some(column) = columns.iter().find(|column| !found.columns.contains(**column)) {
                missing.what.push(format!(
                    "column {title}.{column}; drop the table and make it anew, it holds nothing lasting"
                ));
                missing.statements.push(format!("DROP TABLE {title};"));
                missing.created(self, title, placeholder);
            }
        }
        Ok(())
    }
}

/// Ids of a table of one's own must be written as QueueBox writes them, unless the column compares them by value.
fn binary_ids(title: &str, index: &UniqueIndex) -> Option<String> {
    let binary = index.columns.iter().any(|(_, collation)| !collation.eq_ignore_ascii_case("NOCASE"));
    binary.then(|| {
        format!(
            "{title}: ids must be written in lower case with hyphens, since the column is not declared COLLATE NOCASE"
        )
    })
}

/// A collation that is not binary merges keys (contract 2.4).
fn merging(title: &str, index: &UniqueIndex) -> Option<String> {
    let merging = index.columns.iter().find(|(_, collation)| !collation.eq_ignore_ascii_case("BINARY"));
    merging.map(|(column, collation)| {
        format!(
            "{title}.{column} compares with {collation}: keys that differ only in what it ignores are refused as storage \
             failures; declare the column COLLATE BINARY"
        )
    })
}

#[async_trait]
impl Schema for SqliteStore {
    fn kind(&self) -> &'static str {
        "sqlite"
    }

    async fn ping(&self) -> Result<(), Fault> {
        self.read(None).await?.commit().await
    }

    async fn migrate(&self, options: MigrateOptions) -> Result<Migrated, Fault> {
        let renamed = self.names().renamed();
        if !renamed.is_empty() {
            return Err(Fault::misconfigured(
                "renamed",
                format!(
                    "renamed tables and columns are made by hand: migrations exclude {}. Set database.migrate to Off; the start \
                     then prints the statements",
                    renamed.join(", ")
                ),
            ));
        }
        // An immediate transaction: whoever migrates at the same time waits here, then finds nothing to do.
        let mut session = self.write(None).await?;
        let found = self.found(session.connection()).await.map_err(|error| classify(&error))?;
        self.foreign(session.connection()).await?;
        let plan = plan(&CATALOG, &found, options.baseline)
            .map_err(|error| Fault::misconfigured("migrate", error.to_string()))?;
        if options.baseline.is_some() {
            let (missing, _) = self.missing(session.connection()).await.map_err(|error| classify(&error))?;
            if let Some(fault) = missing.into_fault() {
                let detail = format!("--baseline is refused: {}", fault.detail);
                return Err(Fault::misconfigured("migrate", detail));
            }
        }
        let applied = self.run(&mut session, &plan.steps).await.map_err(|error| classify(&error))?;
        session.commit().await?;
        Ok(Migrated { from: plan.from, to: plan.to, applied, adopted: plan.adopted })
    }

    async fn check(&self) -> Result<SchemaReport, Fault> {
        let mut session = self.read(None).await?;
        let found = self.found(session.connection()).await.map_err(|error| classify(&error))?;
        let history = found.history.unwrap_or_default();
        self.foreign(session.connection()).await?;
        let recorded = queuebox_sql::migrations::verify(&CATALOG, &history)
            .map_err(|error| Fault::misconfigured("migrate", error.to_string()))?;
        let (missing, mut notes) = self.missing(session.connection()).await.map_err(|error| classify(&error))?;
        let push_index = self.has_push_index(session.connection()).await.map_err(|error| classify(&error))?;
        session.commit().await?;
        if let Some(fault) = missing.into_fault() {
            return Err(fault);
        }
        self.set_features(if push_index { vec!["push_index"] } else { Vec::new() });
        let version = recorded.max(CATALOG.newest());
        if version > CATALOG.newest() {
            notes.push(format!(
                "the schema has version {version}, this release knows {}; it works, newer features are off",
                CATALOG.newest()
            ));
        }
        Ok(SchemaReport { version, notes })
    }

    /// SQLite knows no roles: who may write the file may do everything.
    fn grants(&self, _role: &str) -> Vec<String> {
        Vec::new()
    }

    async fn examine(&self) -> Result<Vec<Finding>, Fault> {
        let checked = self.check().await;
        let has_tables = checked.is_ok();
        let mut findings = vec![match checked {
            Ok(report) => finding("schema", "ok", format!("version {}", report.version), None),
            Err(fault) => {
                let fix = match fault.code.as_ref() {
                    "migrate" => "run a release of QueueBox that knows this schema",
                    "foreign_table" => "choose a file or names of its own for QueueBox",
                    _ => "queuebox migrate",
                };
                finding("schema", "error", fault.detail, Some(fix))
            }
        }];
        findings.push(match self.try_write().await {
            Ok(()) => finding("write lock", "ok", "it was got, and a write was tried".to_owned(), None),
            Err(fault) if fault.code == "busy" => {
                finding("write lock", "error", fault.detail, Some("end the transaction that holds it"))
            }
            Err(fault) => {
                finding("write lock", "error", fault.detail, Some("look at the rights of the file and its folder"))
            }
        });
        let mut session = self.read(None).await?;
        if has_tables {
            findings.push(self.unknown_states(session.connection()).await.map_err(|error| classify(&error))?);
        }
        findings.extend(pragmas(session.connection()).await.map_err(|error| classify(&error))?);
        session.commit().await?;
        findings.push(self.log_size());
        Ok(findings)
    }

    fn pool(&self) -> (u32, u32, u32) {
        let inner = &self.inner;
        let idle = inner.writer.num_idle() + inner.readers.num_idle();
        let open = inner.writer.size() + inner.readers.size();
        let waiting = inner.waiting.load(std::sync::atomic::Ordering::Relaxed);
        (open, u32::try_from(idle).unwrap_or(u32::MAX), waiting)
    }

    async fn close(&self) {
        self.inner.readers.close().await;
        // Last: the connection that closes last folds the log into the file.
        self.inner.writer.close().await;
    }
}

impl SqliteStore {
    /// Writes and takes it back: a transaction alone begins on a file that may not be written.
    async fn try_write(&self) -> Result<(), Fault> {
        let mut session = self.write(None).await?;
        let written =
            sqlx::raw_sql("CREATE TABLE queuebox_write_check (tried INTEGER)").execute(session.connection()).await;
        // Dropped without a commit, the session rolls back.
        written.map(drop).map_err(|error| classify(&error))
    }

    /// A log that grows without end means that somebody reads without end.
    fn log_size(&self) -> Finding {
        const LARGE: u64 = 256 << 20;
        let mut log = self.inner.config.path.clone().into_os_string();
        log.push("-wal");
        let bytes = std::fs::metadata(&log).map_or(0, |file| file.len());
        let detail = format!("the -wal file has {} MiB", bytes >> 20);
        if bytes < LARGE {
            return finding("log", "ok", detail, None);
        }
        finding(
            "log",
            "warning",
            detail,
            Some("find the reader that keeps a transaction open; the log cannot be reset before"),
        )
    }
}

fn finding(check: &str, level: &'static str, detail: String, fix: Option<&str>) -> Finding {
    Finding { check: check.to_owned(), level, detail, fix: fix.map(str::to_owned) }
}

/// A large file takes minutes to look at.
const QUICK_CHECK_MAX: Duration = Duration::from_secs(5);

/// What SQLite says of the file; nothing when that takes longer than `max`.
async fn quick_check(connection: &mut SqliteConnection, max: Duration) -> Result<Option<String>, sqlx::Error> {
    const OPERATIONS: i32 = 100;
    let until = Instant::now() + max;
    connection.lock_handle().await?.set_progress_handler(OPERATIONS, move || Instant::now() < until);
    let said = sqlx::query_scalar("PRAGMA quick_check(1)").fetch_one(&mut *connection).await;
    connection.lock_handle().await?.remove_progress_handler();
    match said {
        Ok(said) => Ok(Some(said)),
        Err(error) if queuebox_sql::errors::code(&error).as_deref() == Some("9") => Ok(None),
        Err(error) => Err(error),
    }
}

async fn pragmas(connection: &mut SqliteConnection) -> Result<Vec<Finding>, sqlx::Error> {
    let version: String = sqlx::query_scalar("SELECT sqlite_version()").fetch_one(&mut *connection).await?;
    let mode: String = sqlx::query_scalar("PRAGMA journal_mode").fetch_one(&mut *connection).await?;
    let flush: i64 = sqlx::query_scalar("PRAGMA synchronous").fetch_one(&mut *connection).await?;
    let damage = quick_check(connection, QUICK_CHECK_MAX).await?;
    let wal = mode.eq_ignore_ascii_case("wal");
    Ok(vec![
        finding("SQLite", "ok", format!("version {version}"), None),
        finding(
            "journal",
            if wal { "ok" } else { "error" },
            format!("mode {mode}"),
            (!wal).then_some("WAL needs a local file system with shared memory; move the file off the network share"),
        ),
        finding(
            "flush",
            if flush >= 2 { "ok" } else { "error" },
            format!("synchronous {}", ["OFF", "NORMAL", "FULL", "EXTRA"].get(flush as usize).unwrap_or(&"unknown")),
            (flush < 2).then_some("set PRAGMA synchronous to FULL: otherwise a commit could be lost with the power"),
        ),
        match damage.as_deref() {
            Some("ok") => finding("file", "ok", "quick_check says ok".to_owned(), None),
            Some(damage) => {
                finding("file", "error", format!("quick_check says {damage}"), Some("restore the file from a backup"))
            }
            None => {
                let detail = format!("too large to be looked at within {} s", QUICK_CHECK_MAX.as_secs());
                finding("file", "ok", detail, Some("\"PRAGMA quick_check\" in the sqlite3 program looks at all of it"))
            }
        },
    ])
}

#[cfg(test)]
mod tests {
    use sqlx::{ConnectOptions as _, Connection as _, sqlite::SqliteConnectOptions};

    use super::*;

    /// A file as QueueBox would never leave it: the findings say so, and what mends each.
    #[tokio::test]
    async fn a_file_that_loses_commits_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let file = SqliteConnectOptions::new().filename(folder.path().join("other.db")).create_if_missing(true);
        for (setting, check, detail, fix) in [
            ("PRAGMA synchronous = NORMAL", "flush", "synchronous NORMAL", "a commit could be lost with the power"),
            ("PRAGMA synchronous = OFF", "flush", "synchronous OFF", "a commit could be lost with the power"),
            ("PRAGMA journal_mode = DELETE", "journal", "mode delete", "move the file off the network share"),
        ] {
            let mut connection = file.connect().await.unwrap();
            sqlx::raw_sql("PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL")
                .execute(&mut connection)
                .await
                .unwrap();
            let fine = pragmas(&mut connection).await.unwrap();
            assert!(fine.iter().all(|finding| finding.level == "ok" && finding.fix.is_none()), "{fine:?}");
            sqlx::raw_sql(setting).execute(&mut connection).await.unwrap();
            let told = pragmas(&mut connection).await.unwrap();
            let wrong: Vec<_> = told.iter().filter(|finding| finding.level != "ok").collect();
            assert_eq!(wrong.len(), 1, "{told:?}");
            assert_eq!((wrong[0].check.as_str(), wrong[0].level, wrong[0].detail.as_str()), (check, "error", detail));
            assert!(wrong[0].fix.as_deref().is_some_and(|told| told.contains(fix)), "{told:?}");
            connection.close().await.unwrap();
        }
    }

    /// A file that is too large to be looked at keeps nobody waiting, and the connection goes on.
    #[tokio::test]
    async fn a_look_at_the_file_has_an_end() {
        let folder = tempfile::tempdir().unwrap();
        let file = SqliteConnectOptions::new().filename(folder.path().join("large.db")).create_if_missing(true);
        let mut connection = file.connect().await.unwrap();
        let fill = "CREATE TABLE t AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 5000) SELECT i FROM n";
        sqlx::raw_sql(fill).execute(&mut connection).await.unwrap();
        assert_eq!(quick_check(&mut connection, Duration::ZERO).await.unwrap(), None);
        assert_eq!(quick_check(&mut connection, Duration::from_secs(60)).await.unwrap().as_deref(), Some("ok"));
    }
}

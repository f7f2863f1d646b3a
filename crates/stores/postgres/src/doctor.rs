//! What `queuebox doctor` looks at: pooler, tables, rights, server, clocks, connections, indexes and the plans of hot statements.
//!
//! Nothing here writes. A finding that needs somebody says what to do.

use std::sync::Arc;

use queuebox_core::ports::schema::Finding;
use serde_json::Value;

use crate::{
    PostgresStore,
    cells::Cells,
    config::Capture,
    db::{Args, Mode},
    error::Error,
};

/// Below this a wrong plan costs nothing, and the server is right to read the whole table.
const ROWS_WORTH_A_PLAN: f64 = 10_000.0;

/// Signature windows are minutes; a clock that is off by more than this will surprise somebody.
const CLOCK_SKEW_MAX_S: f64 = 10.0;

const SERVER: &str = "
SELECT current_setting('server_version_num')::integer, current_setting('transaction_read_only') = 'on',
       current_setting('default_transaction_isolation'),
       extract(epoch FROM clock_timestamp())::float8,
       current_setting('max_connections')::integer, (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'),
       (SELECT extract(epoch FROM max(clock_timestamp() - xact_start))::float8 FROM pg_stat_activity
         WHERE datname = current_database() AND pid <> pg_backend_pid()),
       current_setting('autovacuum') = 'on' AND NOT EXISTS (
            SELECT FROM pg_class WHERE oid = to_regclass('{outbox}') AND reloptions::text LIKE '%autovacuum_enabled=false%'),
       (SELECT count(*) FROM pg_replication_slots WHERE slot_name LIKE 'queuebox%')";

/// Rights on the tables that are there, one row per table.
const RIGHTS: &str = "
SELECT t.name,
       has_table_privilege(t.name, 'SELECT') AND has_table_privilege(t.name, 'INSERT')
       AND has_table_privilege(t.name, 'UPDATE') AND has_table_privilege(t.name, 'DELETE')
  FROM unnest(ARRAY['{outbox}', '{inbox}', '{worker}', '{lane}']) AS t(name)
 WHERE to_regclass(t.name) IS NOT NULL";

/// May the role make tables where they belong?
const CREATION: &str = "
SELECT coalesce($1::text, current_schema()::text), current_user::text,
       has_schema_privilege(to_regnamespace(quote_ident(coalesce($1::text, current_schema()::text)))::oid, 'CREATE')";

/// States that are none, by table.
const UNKNOWN_STATES: &str = "
SELECT t, state, n FROM (
  SELECT 'outbox' AS t, {o.state}::text AS state, count(*) AS n FROM {outbox}
   WHERE {o.state} NOT IN ('pending', 'processing', 'sent', 'dead') GROUP BY 2
  UNION ALL
  SELECT 'inbox', {i.state}::text, count(*) FROM {inbox}
   WHERE {i.state} NOT IN ('pending', 'processing', 'processed', 'dead') GROUP BY 2) AS unknown
 LIMIT 10";

/// Indexes of both tables that are broken: a build that was cut off leaves one behind, which costs writes and serves nobody.
const BROKEN_INDEXES: &str = "
SELECT c.relname::text
  FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid
 WHERE i.indrelid IN (to_regclass('{outbox}'), to_regclass('{inbox}')) AND NOT i.indisvalid";

const SIZES: &str = "
SELECT coalesce((SELECT reltuples FROM pg_class WHERE oid = to_regclass('{outbox}')), 0)::float8,
       coalesce((SELECT reltuples FROM pg_class WHERE oid = to_regclass('{inbox}')), 0)::float8";

/// The reads that each poll makes, without their parameters: what a plan may not do is walk the whole table.
const HOT_READS: [(&str, &str, &str); 3] = [
    (
        "walk",
        "outbox",
        "EXPLAIN (FORMAT JSON) SELECT {o.id} FROM {outbox} o WHERE o.{o.state} = 'pending' ORDER BY o.{o.sequence} LIMIT 500",
    ),
    (
        "abandoned rows",
        "outbox",
        "EXPLAIN (FORMAT JSON) SELECT {o.id} FROM {outbox} o WHERE o.{o.state} = 'processing' AND o.{o.lease_expires_at} <= now() LIMIT 500",
    ),
    (
        "forward",
        "inbox",
        "EXPLAIN (FORMAT JSON) SELECT {i.id} FROM {inbox} i WHERE i.{i.consumption} = 'push' AND i.{i.state} = 'pending'
          ORDER BY i.{i.scheduled_at}, i.{i.created_at}, i.{i.id} LIMIT 500",
    ),
];

impl PostgresStore {
    pub(crate) async fn examine_all(&self) -> Result<Vec<Finding>, Error> {
        let pooler = self.examine_pooler().await?;
        let refused = pooler.level == "error";
        let mut findings = vec![pooler];
        if refused {
            return Ok(findings);
        }
        if let Some(row) = self.db.rows(&self.sql(SERVER), Args::new()).await?.first() {
            self.examine_server(&mut Cells::of(row), &mut findings)?;
        }
        let look = self.look(&self.names).await?;
        match self.demand(&look) {
            Ok(()) => findings.push(ok("tables", "every column and constraint that QueueBox needs is there")),
            Err(error) => {
                let detail = error.to_string();
                let fix = if detail.contains("ALTER TABLE") || detail.contains("CREATE ") {
                    "run the statements as the owner of the tables"
                } else if matches!(&error, Error::Misconfigured { code: "foreign_table", .. }) {
                    "choose a schema or names of its own for QueueBox"
                } else {
                    "run \"queuebox migrate\", or start with database.migrate: Auto"
                };
                findings.push(failure("tables", detail, fix));
                findings.extend(self.examine_creation().await?);
                return Ok(findings);
            }
        }
        if let Err(error) = self.check_version(&look).await {
            findings.push(failure("schema", error.to_string(), "run a release of QueueBox that knows this schema"));
        }
        for (detail, fix) in self.notes(&look, &self.features_of(&look), 0, Mode::Direct) {
            findings.push(Finding { check: "features".to_owned(), level: "warning", detail, fix });
        }
        let rights = self.examine_rights().await?;
        if rights.level == "ok" {
            findings.push(self.examine_states().await?);
        }
        findings.push(rights);
        findings.push(self.examine_indexes().await?);
        findings.push(self.examine_plans().await?);
        Ok(findings)
    }

    async fn examine_pooler(&self) -> Result<Finding, Error> {
        if self.db.mode().await? == Mode::Direct {
            return Ok(ok("pooler", "none: connections are direct"));
        }
        if let Err(error) = self.check_pool_mode().await {
            return Ok(failure(
                "pooler",
                error.to_string(),
                "set pool_mode to transaction, or connect past the pooler",
            ));
        }
        Ok(match &self.config.capture {
            Capture::Auto(Some(_)) => ok("pooler", "in transaction mode; wake-up goes past it by capture.connection"),
            Capture::Polling => ok("pooler", "in transaction mode; workers poll, as capture.mode says"),
            Capture::Auto(None) => warning(
                "pooler",
                "in transaction mode: nothing can wake the workers, so they poll",
                "give capture.connection a direct way to the server, or set capture.mode to Polling",
            ),
        })
    }

    async fn examine_rights(&self) -> Result<Finding, Error> {
        let mut lacking = Vec::new();
        for row in &self.db.rows(&self.sql(RIGHTS), Args::new()).await? {
            let mut cells = Cells::of(row);
            let (table, may): (String, bool) = (cells.next()?, cells.next()?);
            if !may {
                lacking.push(table);
            }
        }
        Ok(if lacking.is_empty() {
            ok("rights", "SELECT, INSERT, UPDATE and DELETE on all tables")
        } else {
            let detail = format!("not all of SELECT, INSERT, UPDATE, DELETE on {}", lacking.join(", "));
            let role = self.role().await?;
            let grants = queuebox_core::ports::schema::Schema::grants(self, &role);
            let fix = format!(
                "as the owner of the tables, what \"queuebox migrate --print-grants {role}\" prints: {};",
                grants.join("; ")
            );
            failure("rights", detail, &fix)
        })
    }

    async fn role(&self) -> Result<String, Error> {
        let rows = self.db.rows(&Arc::from("SELECT current_user::text"), Args::new()).await?;
        rows.first().map_or(Ok(String::new()), |row| Cells::of(row).next())
    }

    /// Tables are missing: may this role make them?
    async fn examine_creation(&self) -> Result<Option<Finding>, Error> {
        let rows = self.db.rows(&Arc::from(CREATION), Args::new().bind(self.names.schema())).await?;
        let Some(row) = rows.first() else { return Ok(None) };
        let mut cells = Cells::of(row);
        let (schema, role, may): (Option<String>, String, Option<bool>) = (cells.next()?, cells.next()?, cells.next()?);
        let schema = schema.unwrap_or_else(|| "public".to_owned());
        Ok((may != Some(true)).then(|| {
            let detail = format!("role \"{role}\" may not make tables in the schema \"{schema}\"");
            let fix = format!("as the owner of the schema: GRANT USAGE, CREATE ON SCHEMA \"{schema}\" TO \"{role}\"");
            failure("rights", detail, &fix)
        }))
    }

    /// Rows that nobody will ever read.
    async fn examine_states(&self) -> Result<Finding, Error> {
        let mut unknown = Vec::new();
        let rows = match self.db.rows_planned(&self.sql(UNKNOWN_STATES), Args::new()).await {
            Ok(rows) => rows,
            // A table of that size is not walked for this.
            Err(error) if error.sqlstate().as_deref() == Some("57014") || matches!(error, Error::Timeout(_)) => {
                return Ok(ok("states", "the tables are too large to look at every row"));
            }
            Err(error) => return Err(error),
        };
        for row in &rows {
            let mut cells = Cells::of(row);
            let (table, state, count): (String, String, i64) = (cells.next()?, cells.next()?, cells.next()?);
            unknown.push(format!("{count} row(s) of {table} have the state {state:?}"));
        }
        Ok(if unknown.is_empty() {
            ok("states", "every row has a state that QueueBox knows")
        } else {
            let detail = format!("{}, which QueueBox does not know: nobody reads them", unknown.join("; "));
            warning("states", &detail, "set them to 'pending', and leave the column to its default when inserting")
        })
    }

    fn examine_server(&self, cells: &mut Cells<'_>, findings: &mut Vec<Finding>) -> Result<(), Error> {
        let (version, read_only): (i32, bool) = (cells.next()?, cells.next()?);
        findings.push(server(version));
        findings.push(if read_only {
            failure("writes", "the server is read-only".to_owned(), "connect to the primary")
        } else {
            ok("writes", "the server accepts writes")
        });
        let isolation: String = cells.next()?;
        findings.push(if isolation == "read committed" {
            ok("isolation", "read committed")
        } else {
            let detail =
                format!("default_transaction_isolation is \"{isolation}\": settles meet serialization failures");
            warning("isolation", &detail, "ALTER ROLE … SET default_transaction_isolation = 'read committed'")
        });
        findings.push(clocks(cells.next()?));
        let (connections_max, connections): (i32, i64) = (cells.next()?, cells.next()?);
        let pool = self.config.pool_size;
        let detail = format!("poolSize {pool} of {connections_max}, {connections} in use now");
        findings.push(if i64::from(pool) * 2 + connections > i64::from(connections_max) {
            warning("connections", &detail, "raise max_connections, or lower poolSize times replicas")
        } else {
            ok("connections", &detail)
        });
        let (oldest_s, autovacuum): (Option<f64>, bool) = (cells.next()?, cells.next()?);
        findings.push(transactions(oldest_s.unwrap_or(0.0)));
        findings.push(if autovacuum {
            ok("autovacuum", "on")
        } else {
            warning(
                "autovacuum",
                "off for the server or the outbox",
                "switch it on: the outbox changes each row at least once",
            )
        });
        let slots: i64 = cells.next()?;
        if slots > 0 {
            let detail = format!("{slots} replication slots of an older QueueBox keep the write-ahead log");
            findings.push(warning("replication slots", &detail, "drop them with pg_drop_replication_slot"));
        }
        Ok(())
    }

    async fn examine_indexes(&self) -> Result<Finding, Error> {
        let mut broken = Vec::new();
        for row in &self.db.rows(&self.sql(BROKEN_INDEXES), Args::new()).await? {
            broken.push(Cells::of(row).next::<String>()?);
        }
        Ok(if broken.is_empty() {
            ok("indexes", "all are valid")
        } else {
            let detail = format!("not valid: {}; a build was cut off", broken.join(", "));
            warning("indexes", &detail, "drop them, then run \"queuebox migrate\"")
        })
    }

    async fn examine_plans(&self) -> Result<Finding, Error> {
        let rows = self.db.rows(&self.sql(SIZES), Args::new()).await?;
        let mut cells = Cells::of(rows.first().ok_or(Error::Fenced)?);
        let (outbox, inbox): (f64, f64) = (cells.next()?, cells.next()?);
        let mut walked = Vec::new();
        for (name, table, read) in HOT_READS {
            if (if table == "outbox" { outbox } else { inbox }) < ROWS_WORTH_A_PLAN {
                continue;
            }
            let sql: Arc<str> = self.names.render(read, &[]).into();
            for row in &self.db.rows(&sql, Args::new()).await? {
                if walks_the_table(&Cells::of(row).next::<Value>()?) {
                    walked.push(format!("{name} ({table})"));
                }
            }
        }
        Ok(if walked.is_empty() {
            ok("plans", "no read of a poll walks a whole table")
        } else {
            let detail = format!("these reads walk a whole table: {}", walked.join(", "));
            warning("plans", &detail, "create the indexes of contract 2.3 for your table names, then ANALYZE")
        })
    }
}

/// A plan with a sequential scan somewhere.
fn walks_the_table(plan: &Value) -> bool {
    match plan {
        Value::Object(node) => {
            node.get("Node Type").and_then(Value::as_str).is_some_and(|kind| kind.ends_with("Seq Scan"))
                || node.values().any(walks_the_table)
        }
        Value::Array(parts) => parts.iter().any(walks_the_table),
        _ => false,
    }
}

fn server(version: i32) -> Finding {
    if version >= 140_000 {
        return ok("server", &format!("PostgreSQL {}", version / 10_000));
    }
    failure("server", format!("PostgreSQL {} is older than 14", version / 10_000), "upgrade the server")
}

fn transactions(oldest_s: f64) -> Finding {
    if oldest_s <= 300.0 {
        return ok("transactions", "none is open for longer than 5 minutes");
    }
    let detail = format!("a transaction has been open for {oldest_s:.0} s; what it may still see cannot be cleaned up");
    warning("transactions", &detail, "look at pg_stat_activity and end it")
}

/// Leases are the database's business alone; the clock of this machine decides about signatures (contract 10.1).
fn clocks(server_s: f64) -> Finding {
    #[allow(clippy::cast_precision_loss, reason = "milliseconds of this century")]
    let here_s = jiff::Timestamp::now().as_millisecond() as f64 / 1000.0;
    let skew_s = (here_s - server_s).abs();
    if skew_s <= CLOCK_SKEW_MAX_S {
        return ok("clocks", "this machine and the server agree");
    }
    let detail = format!("this machine and the server are {skew_s:.0} s apart; signatures with a time may be refused");
    warning("clocks", &detail, "synchronise both with NTP")
}

fn ok(check: &str, detail: &str) -> Finding {
    Finding { check: check.to_owned(), level: "ok", detail: detail.to_owned(), fix: None }
}

fn warning(check: &str, detail: &str, fix: &str) -> Finding {
    Finding { check: check.to_owned(), level: "warning", detail: detail.to_owned(), fix: Some(fix.to_owned()) }
}

fn failure(check: &str, detail: String, fix: &str) -> Finding {
    Finding { check: check.to_owned(), level: "error", detail, fix: Some(fix.to_owned()) }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_sequential_scan_is_found_at_any_depth() {
        let plan = |kind: &str| json!([{ "Plan": { "Node Type": "Limit", "Plans": [{ "Node Type": "Sort", "Plans": [{ "Node Type": kind }] }] } }]);
        assert!(walks_the_table(&plan("Seq Scan")) && walks_the_table(&plan("Parallel Seq Scan")));
        assert!(!walks_the_table(&plan("Index Scan")) && !walks_the_table(&plan("Bitmap Heap Scan")));
    }

    #[test]
    fn an_old_server_and_an_old_transaction_are_told() {
        assert_eq!((server(140_000).level, server(130_012).level), ("ok", "error"));
        assert_eq!(server(130_012).fix.as_deref(), Some("upgrade the server"));
        assert_eq!((transactions(299.0).level, transactions(301.0).level), ("ok", "warning"));
        assert_eq!(transactions(301.0).fix.as_deref(), Some("look at pg_stat_activity and end it"));
    }

    #[test]
    fn a_clock_that_is_off_is_told() {
        #[allow(clippy::cast_precision_loss)]
        let now = jiff::Timestamp::now().as_second() as f64;
        assert_eq!(clocks(now).level, "ok");
        assert_eq!(clocks(now - 600.0).level, "warning");
        assert_eq!(clocks(now + 600.0).level, "warning");
        assert_eq!(clocks(now + 600.0).fix.as_deref(), Some("synchronise both with NTP"));
    }
}

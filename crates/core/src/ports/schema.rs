//! Tables, migrations, and the check at start (contract 2.3 to 2.6).

use async_trait::async_trait;

use crate::Fault;

/// What `migrate` should do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MigrateOptions {
    /// Record versions up to this one as applied without running them, then apply the rest.
    pub baseline: Option<u32>,
    /// Change the key columns marked B to a binary collation (SQL Server).
    pub binary_keys: bool,
}

/// What `migrate` did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Migrated {
    /// Version before; `None` = no QueueBox tables.
    pub from: Option<u32>,
    /// Version now.
    pub to: u32,
    /// Names of the migrations that ran.
    pub applied: Vec<String>,
    /// The classic history was adopted at this version.
    pub adopted: Option<u32>,
}

/// What the check at start found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SchemaReport {
    /// Version of the tables.
    pub version: u32,
    /// One line per feature that is off, and per warning (collation, newer schema).
    pub notes: Vec<String>,
}

/// A named finding of `queuebox doctor`.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Finding {
    /// What was looked at.
    pub check: String,
    /// `ok`, `warning` or `error`.
    pub level: &'static str,
    /// What was found.
    pub detail: String,
    /// What would mend it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fix: Option<String>,
}

/// The schema of one database.
#[async_trait]
pub trait Schema: Send + Sync + 'static {
    /// `postgres`, `mysql`, `sqlite`, `sqlserver`.
    fn kind(&self) -> &'static str;

    /// Cheap round trip, for readiness. Also says when the server is read-only.
    async fn ping(&self) -> Result<(), Fault>;

    /// Brings the tables to the newest version. One migrator at a time; others wait.
    async fn migrate(&self, options: MigrateOptions) -> Result<Migrated, Fault>;

    /// Checks columns, unique constraints, version. One fault names everything that is missing, with the statements that add it. Must
    /// run once before the other ports are used: it also decides which features of newer versions are on.
    async fn check(&self) -> Result<SchemaReport, Fault>;

    /// The tables can hold child rows, as [`check`](Self::check) found. Below version 12 they cannot (contract 2.5).
    fn fans_out(&self) -> bool {
        true
    }

    /// Statements that give a worker's role what it needs.
    fn grants(&self, role: &str) -> Vec<String>;

    /// Findings for `queuebox doctor`.
    async fn examine(&self) -> Result<Vec<Finding>, Fault>;

    /// Open connections, idle ones, callers that wait: for the pool's gauges.
    fn pool(&self) -> (u32, u32, u32);

    /// Closes every connection.
    async fn close(&self);
}

//! The outbox, the inbox, the lanes and the ledger in a SQLite file.
//!
//! Invariants:
//! - WAL mode, commits flushed (`synchronous = FULL`): what was answered as stored survives the loss of power.
//! - A transaction that will write begins `IMMEDIATE`, so that it waits for its turn before it has read anything and never
//!   fails on a stale snapshot (D30). All writers of one process queue for one connection, in order of arrival; only other
//!   processes are met by the busy timeout.
//! - Every write that belongs to a worker checks the worker's row (token, unexpired lease) in its own transaction. There is
//!   one writer at a time, so what was checked holds until the commit.
//! - Times are text of fixed width in UTC, so that text order is time order. Now is asked of the database once per
//!   transaction, after the wait for the lock (contract 5.1.1).
//! - One lane: one process works on a file, a second one stands by and takes over (contract 5.2).

#![cfg_attr(test, allow(clippy::unwrap_used))]

mod classify;
mod inbox;
mod lanes;
mod ledger;
mod outbox;
#[cfg(test)]
mod plans;
mod read;
mod retention;
mod schema;
mod session;
mod ticks;
mod wake;

use std::{
    collections::HashMap,
    io::ErrorKind,
    os::unix::fs::MetadataExt as _,
    path::PathBuf,
    sync::{
        Arc, RwLock,
        atomic::{AtomicI64, AtomicU32},
    },
    time::Duration,
};

pub use classify::classify;
use queuebox_core::Fault;
use queuebox_sql::Names;
use sqlx::{
    ConnectOptions as _, Connection as _,
    sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePool, SqlitePoolOptions, SqliteSynchronous},
};
use tokio::time::Instant;

/// What becomes of a row that its destination took (`outbox.onSent`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnSent {
    /// It is marked `sent`.
    #[default]
    Keep,
    /// It is deleted.
    Delete,
}

/// Settings of one database file (contract 13.4, `database.sqlite`).
#[derive(Debug, Clone)]
pub struct SqliteConfig {
    /// The file. It is created where it is missing; its folder is not.
    pub path: PathBuf,
    /// How long a statement waits for the lock of another process before it fails as transient.
    pub busy_timeout: Duration,
    /// Connections: one of them writes, the others read. At least 3 (contract 13.4).
    pub pool_size: u32,
    /// Table and column names, checked.
    pub names: Names,
    /// `outbox.onSent`.
    pub on_sent: OnSent,
}

impl SqliteConfig {
    /// The defaults of contract 13.4 for a file.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            busy_timeout: Duration::from_secs(5),
            pool_size: 5,
            names: Names::new(queuebox_sql::Quote::Double),
            on_sent: OnSent::Keep,
        }
    }
}

/// A database file behind the ports of `queuebox_core`. Cheap to clone; clones share their connections.
#[derive(Clone)]
pub struct SqliteStore {
    inner: Arc<Inner>,
}

struct Inner {
    config: SqliteConfig,
    /// Device and number of the file as it was opened.
    identity: Option<(u64, u64)>,
    /// One connection: SQLite has one writer at a time, and a queue in memory is fairer than its busy handler.
    writer: SqlitePool,
    readers: SqlitePool,
    /// Callers that wait for a connection.
    waiting: AtomicU32,
    /// Receipt of the last admitted row, so that batches within one millisecond of SQLite's clock stay in order.
    last_receipt_us: AtomicI64,
    statements: RwLock<Statements>,
    wake: wake::Wake,
    passes: queuebox_sql::Passes<retention::Pass>,
}

/// Templates rendered with our names.
#[derive(Default)]
struct Statements {
    /// What the check found in the file: names of `--if` lines.
    features: Vec<&'static str>,
    /// By address of the template.
    rendered: HashMap<(usize, usize), Arc<str>>,
}

/// How long SQLite itself waits for the write lock in one go; then [`session`] asks again. Its busy handler asks the less often the longer it
/// has waited, up to ten times a second, so among processes that write all the time whoever has waited longest has the least chance: a
/// worker lost its lease that way.
const TURN: Duration = Duration::from_millis(3);

/// Opens the file. Fails where it cannot be opened or is no database; tables are looked at by `migrate` and `check`.
pub async fn open(config: SqliteConfig) -> Result<SqliteStore, Fault> {
    let path = config.path.to_string_lossy();
    if path.is_empty() || path == ":memory:" || path.starts_with("file:") {
        return Err(Fault::misconfigured(
            "sqlite_path",
            "database.sqlite.path must name a file: a database in memory would be another one for each connection",
        ));
    }
    let options = SqliteConnectOptions::new()
        .filename(&config.path)
        .create_if_missing(true)
        .journal_mode(SqliteJournalMode::Wal)
        // NORMAL would flush at checkpoints only: a commit that was answered could be lost with the power.
        .synchronous(SqliteSynchronous::Full)
        .busy_timeout(config.busy_timeout)
        .statement_cache_capacity(256)
        .disable_statement_logging()
        // Rows come from a thread of the driver; the default of 50 stops it ten times in a batch.
        .row_buffer_size(512)
        .pragma("temp_store", "MEMORY")
        // Gives space back after a long read has kept the log from being reset.
        .pragma("journal_size_limit", "67108864");
    let pool = |size: u32| {
        SqlitePoolOptions::new()
            .max_connections(size)
            .min_connections(0)
            .idle_timeout(None)
            .max_lifetime(None)
            .test_before_acquire(false)
            // On a full disk SQLite rolls the transaction back by itself; the driver, whose own ROLLBACK then fails, counts it as open for
            // ever and begins no other one.
            .before_acquire(|connection, _| Box::pin(std::future::ready(Ok(!connection.is_in_transaction()))))
            .acquire_timeout(config.busy_timeout + Duration::from_secs(25))
    };
    is_writable(&config.path)?;
    let impatient = options.clone().busy_timeout(config.busy_timeout.min(TURN));
    let writer = first_connection(&pool(1), &impatient, &config).await?;
    let readers = pool(config.pool_size.max(3) - 1).connect_lazy_with(options);
    let inner = Inner {
        identity: identity(&config.path),
        config,
        writer,
        readers,
        waiting: AtomicU32::new(0),
        last_receipt_us: AtomicI64::new(0),
        statements: RwLock::default(),
        wake: wake::Wake::default(),
        passes: queuebox_sql::Passes::default(),
    };
    Ok(SqliteStore { inner: Arc::new(inner) })
}

/// SQLite opens a file that may not be written all the same, and then refuses every write.
fn is_writable(path: &std::path::Path) -> Result<(), Fault> {
    match std::fs::OpenOptions::new().write(true).open(path) {
        Err(error) if matches!(error.kind(), ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem) => {
            let detail = format!(
                "{}: {error}; the process needs to write the database file, its -wal and -shm files, and their folder",
                path.display()
            );
            Err(Fault::misconfigured("read_only", detail))
        }
        // Whatever else is wrong SQLite says itself; a file that is not there is made.
        _ => Ok(()),
    }
}

fn identity(path: &std::path::Path) -> Option<(u64, u64)> {
    std::fs::metadata(path).ok().map(|file| (file.dev(), file.ino()))
}

/// A new file is turned to WAL under a lock that SQLite does not wait for: of processes that start together all but one are
/// told BUSY at once, and try again.
async fn first_connection(
    pool: &SqlitePoolOptions,
    options: &SqliteConnectOptions,
    config: &SqliteConfig,
) -> Result<SqlitePool, Fault> {
    let until = Instant::now() + config.busy_timeout;
    loop {
        match pool.clone().connect_with(options.clone()).await {
            Err(error) if classify::is_busy(&error) && Instant::now() < until => {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            opened => return opened.map_err(|error| classify::opening(&config.path, &error)),
        }
    }
}

impl SqliteStore {
    /// The file that was opened is still the one at its path. Otherwise everything written from here on would be gone with the process.
    fn is_in_place(&self) -> Result<(), Fault> {
        if identity(&self.inner.config.path) == self.inner.identity {
            return Ok(());
        }
        let path = self.inner.config.path.display();
        Err(Fault::transient(
            "file_gone",
            format!(
                "{path}: the file was removed or replaced while it was open; put it back where that was a mistake, and restart"
            ),
        ))
    }

    /// The file's table and column names.
    pub fn names(&self) -> &Names {
        &self.inner.config.names
    }

    /// A template of this crate with our names in it. Rendered once.
    fn sql(&self, template: &'static str) -> sqlx::AssertSqlSafe<Arc<str>> {
        let address = (template.as_ptr() as usize, template.len());
        if let Some(text) = self.inner.statements.read().ok().and_then(|known| known.rendered.get(&address).cloned()) {
            return queuebox_sql::statement(text);
        }
        let Ok(mut known) = self.inner.statements.write() else {
            return queuebox_sql::statement(self.names().render(template, &[]));
        };
        let text: Arc<str> = self.names().render(template, &known.features).into();
        known.rendered.insert(address, text.clone());
        queuebox_sql::statement(text)
    }

    /// Sets what the file has; statements are rendered anew.
    fn set_features(&self, features: Vec<&'static str>) {
        if let Ok(mut known) = self.inner.statements.write() {
            *known = Statements { features, rendered: HashMap::new() };
        }
    }

    /// Text made at run time from parts of this crate, with our names in it.
    fn sql_text(&self, template: &str) -> sqlx::AssertSqlSafe<Arc<str>> {
        queuebox_sql::statement(self.names().render(template, &[]))
    }
}

impl std::fmt::Debug for SqliteStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SqliteStore").field("path", &self.inner.config.path).finish_non_exhaustive()
    }
}

//! A file of its own for each test.

use std::{path::PathBuf, sync::Arc};

use async_trait::async_trait;
use queuebox_conformance::store::{Capabilities, OpenTransaction, Setup, StoreHarness};
use queuebox_core::ports::{
    Store,
    schema::{MigrateOptions, Schema as _},
};
use queuebox_sql::{Migration, Names, Quote, TableNames};
use queuebox_sqlite::{OnSent, SqliteConfig, SqliteStore, open};
use sqlx::{
    AssertSqlSafe, ConnectOptions as _, Connection as _, Row as _, SqliteConnection, sqlite::SqliteConnectOptions,
};
use tempfile::TempDir;

/// A database; with `RENAMED` its tables and many columns have names of their own and were made by hand.
pub struct Harness<const RENAMED: bool> {
    folder: TempDir,
    setup: Setup,
    names: Names,
}

/// The default names.
pub type SqliteHarness = Harness<false>;

/// Names of its own.
pub type RenamedHarness = Harness<true>;

/// In memory where there is such a place: the suite is about behaviour, and flushing costs it half of its time.
fn folder() -> TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

fn names(renamed: bool) -> Names {
    let mut raw = TableNames::default();
    if renamed {
        raw.outbox_table_name = "messages_out".to_owned();
        raw.inbox_table_name = "messages_in".to_owned();
        let map =
            |pairs: &[(&str, &str)]| pairs.iter().map(|(key, name)| ((*key).to_owned(), (*name).to_owned())).collect();
        raw.column_mapping.outbox = map(&[
            ("id", "message_id"),
            ("key", "order"),
            ("payload", "body"),
            ("state", "status"),
            ("scheduledAt", "due_at"),
            ("createdAt", "made_at"),
            ("sequence", "seq"),
            ("parentId", "parent"),
            ("aggregateType", "kind"),
        ]);
        raw.column_mapping.inbox = map(&[
            ("id", "message_id"),
            ("source", "from"),
            ("idempotencyKey", "dedup"),
            ("aggregateId", "subject"),
            ("state", "status"),
            ("scheduledAt", "due_at"),
            ("correlationId", "corr"),
        ]);
    }
    Names::check(&raw, Quote::Double, None).unwrap()
}

impl<const RENAMED: bool> Harness<RENAMED> {
    /// The file.
    pub fn path(&self) -> PathBuf {
        self.folder.path().join("queuebox.db")
    }

    /// A connection as an application has it.
    pub async fn connect(&self) -> SqliteConnection {
        SqliteConnectOptions::new()
            .filename(self.path())
            .busy_timeout(std::time::Duration::from_secs(20))
            .create_if_missing(true)
            .connect()
            .await
            .unwrap()
    }

    /// Another handle.
    pub async fn open(&self) -> SqliteStore {
        let on_sent = if self.setup.on_sent_delete { OnSent::Delete } else { OnSent::Keep };
        open(SqliteConfig { on_sent, names: self.names.clone(), ..SqliteConfig::new(self.path()) }).await.unwrap()
    }

    /// Runs a migration file by hand, under our names.
    pub async fn create_by_hand(&self, file: &str) {
        let mut connection = self.connect().await;
        let file = self.names.render(file, &[]);
        for (_, statement) in Migration::statements(&file) {
            sqlx::query(AssertSqlSafe(statement)).execute(&mut connection).await.unwrap();
        }
    }
}

struct Held(SqliteConnection);

#[async_trait]
impl OpenTransaction for Held {
    async fn execute(&mut self, sql: &str) -> u64 {
        sqlx::query(AssertSqlSafe(sql)).execute(&mut self.0).await.unwrap().rows_affected()
    }
    async fn commit(mut self: Box<Self>) {
        sqlx::query("COMMIT").execute(&mut self.0).await.unwrap();
    }
    async fn rollback(mut self: Box<Self>) {
        sqlx::query("ROLLBACK").execute(&mut self.0).await.unwrap();
    }
}

#[async_trait]
impl<const RENAMED: bool> StoreHarness for Harness<RENAMED> {
    async fn start(setup: Setup) -> Self {
        let harness = Self { folder: folder(), setup, names: names(RENAMED) };
        if setup.empty {
            return harness;
        }
        if RENAMED {
            harness.create_by_hand(include_str!("../../migrations/0014_create.sql")).await;
        } else {
            let store = harness.open().await;
            store.migrate(MigrateOptions::default()).await.unwrap();
            store.close().await;
        }
        harness
    }

    async fn store(&self) -> Arc<dyn Store> {
        Arc::new(self.open().await)
    }

    async fn execute(&self, sql: &str) -> u64 {
        let mut connection = self.connect().await;
        let done = sqlx::query(AssertSqlSafe(sql))
            .execute(&mut connection)
            .await
            .unwrap_or_else(|error| panic!("{sql}: {error}"));
        connection.close().await.unwrap();
        done.rows_affected()
    }

    async fn query(&self, sql: &str) -> Vec<Vec<Option<String>>> {
        let mut connection = self.connect().await;
        let rows = sqlx::query(AssertSqlSafe(sql))
            .fetch_all(&mut connection)
            .await
            .unwrap_or_else(|error| panic!("{sql}: {error}"));
        rows.iter().map(|row| (0..row.len()).map(|column| row.try_get(column).unwrap()).collect()).collect()
    }

    async fn begin(&self) -> Box<dyn OpenTransaction> {
        let mut connection = self.connect().await;
        sqlx::query("BEGIN IMMEDIATE").execute(&mut connection).await.unwrap();
        Box::new(Held(connection))
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { concurrent_writers: false, keeps_digits: true }
    }

    fn now_plus(&self, us: i64) -> String {
        let (seconds, rest) = (us.div_euclid(1_000_000), us.rem_euclid(1_000_000));
        format!("(strftime('%Y-%m-%dT%H:%M:%S', 'now', '{seconds} seconds') || '.{rest:06}Z')")
    }

    fn us_until(&self, expression: &str) -> String {
        format!(
            "((CAST(strftime('%s', substr({expression}, 1, 19)) AS INTEGER) * 1000000 + CAST(substr({expression}, 21, 6) AS INTEGER))
              - CAST(round((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000)"
        )
    }

    fn text(&self, expression: &str) -> String {
        format!("CAST({expression} AS TEXT)")
    }

    fn table(&self, name: &str) -> String {
        let name = match name {
            "outbox" => self.names.outbox(),
            "inbox" => self.names.inbox(),
            own => own,
        };
        format!("\"{name}\"")
    }

    fn column(&self, table: &str, name: &str) -> String {
        let name = match table {
            "outbox" => self.names.outbox_column(name),
            "inbox" => self.names.inbox_column(name),
            _ => name,
        };
        format!("\"{name}\"")
    }

    fn drop_identity(&self) -> String {
        "DROP INDEX uq_inbox_source_idempotency".to_owned()
    }
}

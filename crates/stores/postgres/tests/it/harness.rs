//! The database of one test on the shared server, for the suite of `queuebox-conformance` and for the tests here.

use std::sync::Arc;

use async_trait::async_trait;
use queuebox_conformance::store::{Capabilities, OpenTransaction, Setup, StoreHarness};
use queuebox_core::ports::{
    Store,
    schema::{MigrateOptions, Schema},
};
use queuebox_postgres::{PostgresConfig, PostgresStore};
use queuebox_testkit::Postgres;
use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection, Row};

/// A database with the tables of the newest version, or an empty one.
pub struct PostgresHarness {
    pub server: Postgres,
    pub database: String,
    pub setup: Setup,
}

impl PostgresHarness {
    /// An empty database on `server`.
    pub async fn on(server: Postgres) -> Self {
        let database = server.fresh_database_name().await;
        Self { server, database, setup: Setup { empty: true, ..Setup::default() } }
    }

    pub fn url(&self) -> String {
        self.server.url_of(&self.database)
    }

    pub fn config(&self) -> PostgresConfig {
        let mut config = PostgresConfig::from_url(&self.url()).unwrap();
        config.pool_size = 4;
        config.on_sent_delete = self.setup.on_sent_delete;
        config
    }

    pub fn open(&self) -> PostgresStore {
        PostgresStore::open(self.config()).unwrap()
    }

    /// A connection of an application.
    pub async fn connect(&self) -> PgConnection {
        PgConnection::connect(&self.url()).await.unwrap()
    }

    /// The first column of all rows, as text.
    pub async fn column_of(&self, sql: &str) -> Vec<String> {
        self.query(sql).await.into_iter().map(|row| row[0].clone().unwrap_or_default()).collect()
    }

    /// The first column of the first row, as text.
    pub async fn one(&self, sql: &str) -> String {
        self.column_of(sql).await.into_iter().next().unwrap()
    }
}

struct Open(PgConnection);

#[async_trait]
impl OpenTransaction for Open {
    async fn execute(&mut self, sql: &str) -> u64 {
        self.0.execute(AssertSqlSafe(sql)).await.unwrap().rows_affected()
    }

    async fn commit(mut self: Box<Self>) {
        self.0.execute("COMMIT").await.unwrap();
    }

    async fn rollback(mut self: Box<Self>) {
        self.0.execute("ROLLBACK").await.unwrap();
    }
}

#[async_trait]
impl StoreHarness for PostgresHarness {
    async fn start(setup: Setup) -> Self {
        let harness = Self { setup, ..Self::on(queuebox_testkit::postgres().await).await };
        if !setup.empty {
            let store = harness.open();
            store.migrate(MigrateOptions::default()).await.unwrap();
            store.close().await;
        }
        harness
    }

    async fn store(&self) -> Arc<dyn Store> {
        Arc::new(self.open())
    }

    async fn execute(&self, sql: &str) -> u64 {
        self.connect().await.execute(AssertSqlSafe(sql)).await.unwrap().rows_affected()
    }

    async fn query(&self, sql: &str) -> Vec<Vec<Option<String>>> {
        let rows = self.connect().await.fetch_all(AssertSqlSafe(sql)).await.unwrap();
        rows.iter().map(|row| (0..row.len()).map(|column| row.get(column)).collect()).collect()
    }

    async fn begin(&self) -> Box<dyn OpenTransaction> {
        let mut connection = self.connect().await;
        connection.execute("BEGIN").await.unwrap();
        Box::new(Open(connection))
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { concurrent_writers: true, keeps_digits: true }
    }

    fn now_plus(&self, us: i64) -> String {
        format!("(now() + {us} * interval '1 microsecond')")
    }

    fn us_until(&self, expression: &str) -> String {
        format!("(extract(epoch from {expression} - clock_timestamp()) * 1000000)::bigint")
    }

    fn text(&self, expression: &str) -> String {
        format!("({expression})::text")
    }

    fn table(&self, name: &str) -> String {
        format!("\"{name}\"")
    }

    fn column(&self, _table: &str, name: &str) -> String {
        format!("\"{name}\"")
    }

    fn drop_identity(&self) -> String {
        "ALTER TABLE \"inbox\" DROP CONSTRAINT uq_inbox_source_idempotency".to_owned()
    }
}

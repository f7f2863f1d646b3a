//! The few statements that the lab runs, on either database. `$1` is a parameter on both.

use std::{path::Path, sync::Arc};

use anyhow::{anyhow, bail};
use queuebox_core::ports::Store;
use queuebox_postgres::{PostgresConfig, PostgresStore};
use queuebox_sqlite::SqliteConfig;
use sqlx::{
    AssertSqlSafe, Connection as _, PgConnection, PgPool, Postgres, Sqlite, SqlitePool, Transaction,
    sqlite::{SqliteConnectOptions, SqliteJournalMode},
};

/// Says that the tables beside it are the lab's.
const MARK: &str = "queuebox_lab";

/// Tables that the lab replaces, and those of QueueBox whose rows it changes.
const TABLES: [&str; 7] =
    ["orders", "processed_messages", "shipments", "outbox", "inbox", "queuebox_worker", "queuebox_lane"];

/// A database of the lab: SQLite or PostgreSQL.
#[derive(Debug, Clone)]
pub enum Database {
    /// A file.
    Sqlite(SqlitePool, std::path::PathBuf),
    /// A server, with its URL.
    Postgres(PgPool, String),
}

/// A transaction of the shop or of the shipping service.
pub(crate) enum Tx {
    Sqlite(Transaction<'static, Sqlite>),
    Postgres(Transaction<'static, Postgres>),
}

impl Database {
    /// Opens `sqlite:PATH` or `postgres://…`.
    ///
    /// # Errors
    /// The database cannot be reached, or the URL is of another kind.
    pub async fn open(url: &str) -> anyhow::Result<Self> {
        if url.starts_with("postgres://") || url.starts_with("postgresql://") {
            // The text of the driver holds its cause already, and its pool would only say that time ran out.
            let unreachable = |error: sqlx::Error| anyhow!("cannot reach the database: {error}");
            PgConnection::connect(url).await.map_err(unreachable)?.close().await.map_err(unreachable)?;
            let pool = PgPool::connect(url).await.map_err(unreachable)?;
            return Ok(Self::Postgres(pool, url.to_owned()));
        }
        let path = match url.strip_prefix("sqlite:") {
            Some(path) if !path.is_empty() => path.strip_prefix("//").unwrap_or(path),
            _ => bail!("a database of the lab is sqlite:PATH or postgres://…"),
        };
        let options = SqliteConnectOptions::new()
            .filename(path)
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            .busy_timeout(std::time::Duration::from_secs(10));
        let opened = SqlitePool::connect_with(options).await;
        let pool = opened.map_err(|error| anyhow!("cannot open {path}: {error}; its folder must be there"))?;
        Ok(Self::Sqlite(pool, Path::new(path).to_owned()))
    }

    /// Takes the database for the lab: it must hold none of the tables that the lab and QueueBox make, unless the lab made them. From
    /// then on a table `queuebox_lab` says whose they are.
    ///
    /// # Errors
    /// A table is there that the lab did not make.
    pub async fn claim(&self) -> anyhow::Result<()> {
        if self.has_table(MARK).await? {
            return Ok(());
        }
        for table in TABLES {
            if self.has_table(table).await? {
                bail!("the database has a table {table} that is not the lab's; give an empty database");
            }
        }
        self.execute(&format!("CREATE TABLE {MARK} (made_by VARCHAR(64) PRIMARY KEY)"), &[]).await?;
        Ok(())
    }

    /// A table or view of that name, as statements of the lab would find it.
    async fn has_table(&self, name: &str) -> anyhow::Result<bool> {
        let sql = match self {
            Self::Sqlite(..) => format!("SELECT count(*) FROM sqlite_master WHERE lower(name) = '{name}'"),
            Self::Postgres(..) => format!("SELECT count(to_regclass('{name}'))"),
        };
        Ok(self.number(&sql).await? > 0)
    }

    /// QueueBox's own access to the same database.
    ///
    /// # Errors
    /// As for [`open`](Self::open).
    pub async fn store(&self) -> anyhow::Result<Arc<dyn Store>> {
        Ok(match self {
            Self::Sqlite(_, path) => Arc::new(queuebox_sqlite::open(SqliteConfig::new(path)).await?),
            Self::Postgres(_, url) => Arc::new(PostgresStore::open(PostgresConfig::from_url(url)?)?),
        })
    }

    /// Runs a statement; rows changed.
    ///
    /// # Errors
    /// Whatever the database says.
    pub async fn execute(&self, sql: &str, values: &[&str]) -> anyhow::Result<u64> {
        let mut tx = self.begin().await?;
        let changed = tx.execute(sql, values).await?;
        tx.commit().await?;
        Ok(changed)
    }

    /// Runs a statement and rolls it back: what an application does when its business change fails.
    ///
    /// # Errors
    /// Whatever the database says.
    pub async fn roll_back(&self, sql: &str, values: &[&str]) -> anyhow::Result<()> {
        let mut tx = self.begin().await?;
        tx.execute(sql, values).await?;
        tx.roll_back().await
    }

    /// The one number that a query gives.
    ///
    /// # Errors
    /// Whatever the database says.
    pub async fn number(&self, sql: &str) -> anyhow::Result<i64> {
        let sql = AssertSqlSafe(sql.to_owned());
        Ok(match self {
            Self::Sqlite(pool, _) => sqlx::query_scalar(sql).fetch_one(pool).await?,
            Self::Postgres(pool, _) => sqlx::query_scalar(sql).fetch_one(pool).await?,
        })
    }

    pub(crate) async fn begin(&self) -> anyhow::Result<Tx> {
        Ok(match self {
            // A transaction that will write takes the write lock at once (contract 2.3).
            Self::Sqlite(pool, _) => Tx::Sqlite(pool.begin_with("BEGIN IMMEDIATE").await?),
            Self::Postgres(pool, _) => Tx::Postgres(pool.begin().await?),
        })
    }

    /// The time of this database, in statements.
    pub(crate) fn now(&self) -> &'static str {
        match self {
            Self::Sqlite(..) => "strftime('%Y-%m-%dT%H:%M:%f000Z','now')",
            Self::Postgres(..) => "clock_timestamp()",
        }
    }

    /// A JSON parameter, in statements.
    pub(crate) fn json(&self, parameter: &str) -> String {
        match self {
            Self::Sqlite(..) => parameter.to_owned(),
            Self::Postgres(..) => format!("{parameter}::jsonb"),
        }
    }

    /// Closes the lab's own connections.
    pub async fn close(&self) {
        match self {
            Self::Sqlite(pool, _) => pool.close().await,
            Self::Postgres(pool, _) => pool.close().await,
        }
    }
}

impl Tx {
    pub(crate) async fn execute(&mut self, sql: &str, values: &[&str]) -> anyhow::Result<u64> {
        let sql = AssertSqlSafe(sql.to_owned());
        Ok(match self {
            Self::Sqlite(tx) => {
                let query = values.iter().fold(sqlx::query(sql), |query, value| query.bind((*value).to_owned()));
                query.execute(&mut **tx).await?.rows_affected()
            }
            Self::Postgres(tx) => {
                let query = values.iter().fold(sqlx::query(sql), |query, value| query.bind((*value).to_owned()));
                query.execute(&mut **tx).await?.rows_affected()
            }
        })
    }

    async fn roll_back(self) -> anyhow::Result<()> {
        match self {
            Self::Sqlite(tx) => tx.rollback().await?,
            Self::Postgres(tx) => tx.rollback().await?,
        }
        Ok(())
    }

    pub(crate) async fn commit(self) -> anyhow::Result<()> {
        match self {
            Self::Sqlite(tx) => tx.commit().await?,
            Self::Postgres(tx) => tx.commit().await?,
        }
        Ok(())
    }
}

//! The database of one rung: made for it, filled, watched, dropped.

use std::time::Duration;

use anyhow::{Context, bail};
use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection, Row};
use url::Url;

use crate::cpu;

/// A database of its own on a given server.
pub struct Database {
    /// Where it is.
    pub url: String,
    server: String,
    name: String,
    postmaster: Option<u64>,
}

/// What a run has cost the server so far.
#[derive(Debug, Clone, Copy)]
pub struct Cost {
    /// Position of the write-ahead log in bytes.
    pub log_bytes: i64,
    /// Processor time of the server, if it runs here.
    pub cpu: Option<Duration>,
}

/// Rows to insert into the outbox.
#[derive(Debug, Clone, Copy)]
pub struct Rows<'a> {
    /// Table.
    pub table: &'a str,
    /// How many.
    pub count: u64,
    /// Over so many keys.
    pub keys: u64,
    /// Topic of all.
    pub topic: &'a str,
}

/// Rows of one INSERT when a table is filled: a transaction stays small beside the memory of the server.
const FILL_STEP: u64 = 500_000;

impl Database {
    /// Makes a database on the server of `server`, a URL whose role may do so.
    ///
    /// # Errors
    /// The server cannot be reached, or the role lacks CREATEDB.
    pub async fn make(server: &str) -> anyhow::Result<Self> {
        let mut url: Url = server.parse().context("--database-url is no URL")?;
        if !matches!(url.scheme(), "postgres" | "postgresql") {
            bail!("--database-url takes postgres://…: the ladder is that of PostgreSQL");
        }
        let name = format!("queuebox_bench_{}", &uuid::Uuid::new_v4().simple().to_string()[..8]);
        let mut maintenance = PgConnection::connect(server).await.context("cannot reach the database server")?;
        maintenance
            .execute(AssertSqlSafe(format!("CREATE DATABASE {name}")))
            .await
            .context("cannot make a database for the rung; the role of --database-url needs CREATEDB")?;
        let backend: i32 = maintenance.fetch_one("SELECT pg_backend_pid()").await?.get(0);
        url.set_path(&name);
        let postmaster = if is_local(&url) { cpu::postmaster(backend) } else { None };
        Ok(Self { url: url.to_string(), server: server.to_owned(), name, postmaster })
    }

    /// A connection to it.
    ///
    /// # Errors
    /// It cannot be reached.
    pub async fn connect(&self) -> anyhow::Result<PgConnection> {
        PgConnection::connect(&self.url).await.context("cannot reach the database of the rung")
    }

    /// Settings that make figures worthless.
    pub async fn doubts(&self) -> anyhow::Result<Vec<String>> {
        let mut doubts = Vec::new();
        let mut connection = self.connect().await?;
        for setting in ["fsync", "synchronous_commit", "full_page_writes"] {
            let value: String = connection.fetch_one(AssertSqlSafe(format!("SHOW {setting}"))).await?.get(0);
            if value == "off" {
                doubts.push(format!(
                    "the server runs with {setting} = off: commits are not flushed, so figures mean little"
                ));
            }
        }
        if self.postmaster.is_none() {
            doubts.push("the server does not run on this machine: its processor time is left out".to_owned());
        }
        Ok(doubts)
    }

    /// Inserts rows with payloads of about 512 bytes, and leaves the table as autovacuum would.
    pub async fn fill(&self, rows: Rows<'_>) -> anyhow::Result<()> {
        let Rows { table, count, keys, topic } = rows;
        let mut connection = self.connect().await?;
        // As in a table from which rows are taken soon after they came: their pages were first written since the last checkpoint, so
        // the run logs no images of whole pages. Only a superuser may; without it a checkpoint may fall into the run.
        let _ = connection.execute("CHECKPOINT").await;
        let mut from = 1;
        while from <= count {
            let to = (from + FILL_STEP - 1).min(count);
            let sql = format!(
                "INSERT INTO {table} (topic, key, payload) SELECT '{topic}', 'k' || (n % {keys}), \
                 jsonb_build_object('n', n, 'fill', repeat(md5(n::text), 14)) FROM generate_series({from}, {to}) n"
            );
            connection.execute(AssertSqlSafe(sql)).await.context("cannot fill the outbox")?;
            from = to + 1;
        }
        connection.execute(AssertSqlSafe(format!("VACUUM ANALYZE {table}"))).await?;
        Ok(())
    }

    /// What it has cost so far.
    pub async fn cost(&self) -> anyhow::Result<Cost> {
        let mut connection = self.connect().await?;
        let row = connection.fetch_one("SELECT (pg_current_wal_lsn() - '0/0')::bigint").await?;
        let cpu = self.postmaster.and_then(cpu::of_server);
        Ok(Cost { log_bytes: row.get(0), cpu })
    }

    /// The number that a query gives.
    pub async fn count(&self, sql: &str) -> anyhow::Result<u64> {
        let mut connection = self.connect().await?;
        let count: i64 = connection.fetch_one(AssertSqlSafe(sql.to_owned())).await?.get(0);
        Ok(u64::try_from(count).unwrap_or(0))
    }

    /// Drops it.
    pub async fn drop(self) {
        let Ok(mut maintenance) = PgConnection::connect(&self.server).await else { return };
        let _ = maintenance.execute(AssertSqlSafe(format!("DROP DATABASE IF EXISTS {} WITH (FORCE)", self.name))).await;
    }
}

fn is_local(url: &Url) -> bool {
    matches!(url.host_str(), Some("127.0.0.1" | "localhost" | "::1" | "[::1]"))
}

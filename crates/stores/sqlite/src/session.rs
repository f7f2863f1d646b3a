//! Transactions: the queue for the one writer, the fence, and now.

use std::sync::atomic::{AtomicU32, Ordering};

use queuebox_core::{Fault, ports::Fence};
use sqlx::{Row as _, Sqlite, SqliteConnection, Transaction, sqlite::SqlitePool};
use tokio::time::{Duration, Instant};

use crate::{SqliteStore, classify, ticks};

/// A transaction with the time at which it began to see the file, by the database's clock.
pub(crate) struct Session {
    transaction: Transaction<'static, Sqlite>,
    /// Now, as text.
    pub now: String,
    /// Now, in microseconds since 1970. SQLite's clock has milliseconds.
    pub now_us: i64,
    /// End of the worker's lease, where a fence was asked for.
    pub lease: Option<String>,
}

/// `%f` has milliseconds, so three digits are filled up (contract 2.3).
const NOW: &str = "SELECT strftime('%Y-%m-%dT%H:%M:%f000Z', 'now')";

const NOW_AND_LEASE: &str = "
SELECT strftime('%Y-%m-%dT%H:%M:%f000Z', 'now'),
       (SELECT lease_expires_at FROM {worker} WHERE worker = ?1 AND token = ?2)";

impl Session {
    pub(crate) fn connection(&mut self) -> &mut SqliteConnection {
        &mut self.transaction
    }

    /// The text of now + `us`.
    pub(crate) fn later(&self, us: i64) -> String {
        ticks::text(self.now_us.saturating_add(us))
    }

    pub(crate) async fn commit(self) -> Result<(), Fault> {
        self.transaction.commit().await.map_err(|error| classify(&error))
    }
}

impl SqliteStore {
    /// A transaction that only reads: one snapshot of the file. Takes no lock that a writer would wait for.
    pub(crate) async fn read(&self, fence: Option<&Fence>) -> Result<Session, Fault> {
        let transaction = self.begin(&self.inner.readers, "BEGIN").await?;
        self.session(transaction, fence).await
    }

    /// A transaction that writes. It has the write lock before it reads anything.
    pub(crate) async fn write(&self, fence: Option<&Fence>) -> Result<Session, Fault> {
        let transaction = self.begin(&self.inner.writer, "BEGIN IMMEDIATE").await?;
        self.session(transaction, fence).await
    }

    /// Asks for the lock again and again within the busy timeout. SQLite waits for it by itself only for a moment (`TURN`), and
    /// BUSY_RECOVERY and BUSY_SNAPSHOT come at once.
    async fn begin(&self, pool: &SqlitePool, how: &'static str) -> Result<Transaction<'static, Sqlite>, Fault> {
        self.is_in_place()?;
        let _counted = Counted::new(&self.inner.waiting);
        let until = Instant::now() + self.inner.config.busy_timeout;
        loop {
            match pool.begin_with(how).await {
                Err(error) if classify::is_busy(&error) && Instant::now() < until => {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
                begun => return begun.map_err(|error| classify(&error)),
            }
        }
    }

    async fn session(
        &self,
        mut transaction: Transaction<'static, Sqlite>,
        fence: Option<&Fence>,
    ) -> Result<Session, Fault> {
        let query = match fence {
            Some(fence) => {
                sqlx::query(self.sql(NOW_AND_LEASE)).bind(fence.worker.clone()).bind(fence.token.to_string())
            }
            None => sqlx::query(NOW),
        };
        let row = query.fetch_one(&mut *transaction).await.map_err(|error| classify(&error))?;
        let now: String = row.try_get(0).map_err(|error| classify(&error))?;
        let mut lease: Option<String> = None;
        if let Some(fence) = fence {
            lease = row.try_get(1).map_err(|error| classify(&error))?;
            if lease.as_ref().is_none_or(|lease| *lease <= now) {
                return Err(lost(fence));
            }
        }
        let now_us = ticks::parse(&now)
            .ok_or_else(|| Fault::transient("clock", format!("the database says that it is {now:?}")))?;
        Ok(Session { transaction, now, now_us, lease })
    }
}

pub(crate) fn lost(fence: &Fence) -> Fault {
    Fault::fenced(format!("the lease of worker {} has ended, or its row is gone", fence.worker))
}

/// Counts a caller for as long as it waits, also when it gives up.
struct Counted<'a>(&'a AtomicU32);

impl<'a> Counted<'a> {
    fn new(count: &'a AtomicU32) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(count)
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

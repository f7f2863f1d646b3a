//! Being woken: by forwards of this process at once, by commits of any process through `PRAGMA data_version`.
//!
//! SQLite has no notification, but `data_version` changes with each commit of another connection and costs one look at the
//! shared memory of the log (about 10 µs). It is a hint: our own settles wake as well, and the engine has a timer beside it.

use std::time::Duration;

use sqlx::{ConnectOptions as _, Connection as _, SqliteConnection};
use tokio::sync::{Mutex, Notify};

use crate::SqliteStore;

/// How often other processes' commits are looked for, while somebody waits: half of it is added to the time of an idle
/// message, where a poll interval of 100 ms would add 50 ms.
const LOOK_EVERY: Duration = Duration::from_millis(10);

#[derive(Default)]
pub(crate) struct Wake {
    forwarded: Notify,
    watcher: Mutex<Option<Watcher>>,
}

struct Watcher {
    connection: SqliteConnection,
    seen: i64,
}

impl Wake {
    /// Rows were inserted by this process.
    pub fn notify(&self) {
        self.forwarded.notify_one();
    }

    pub async fn close(&self) {
        if let Some(watcher) = self.watcher.lock().await.take()
            && let Err(error) = watcher.connection.close().await
        {
            tracing::debug!(%error, "closing the connection that watched for inserts");
        }
    }
}

impl Watcher {
    async fn version(connection: &mut SqliteConnection) -> Result<i64, sqlx::Error> {
        sqlx::query_scalar("PRAGMA data_version").fetch_one(connection).await
    }

    /// Has another connection committed since the last look?
    async fn changed(&mut self) -> Result<bool, sqlx::Error> {
        let now = Self::version(&mut self.connection).await?;
        Ok(std::mem::replace(&mut self.seen, now) != now)
    }
}

impl SqliteStore {
    /// Resolves when rows may have been inserted. Pends for ever where the file cannot be watched: the engine has a timer.
    pub(crate) async fn wait_for_change(&self) {
        tokio::select! {
            () = self.inner.wake.forwarded.notified() => {}
            () = self.watch() => {}
        }
    }

    async fn watch(&self) {
        let mut slot = self.inner.wake.watcher.lock().await;
        loop {
            match self.look(&mut slot).await {
                Ok(true) => return,
                Ok(false) => tokio::time::sleep(LOOK_EVERY).await,
                Err(error) => {
                    tracing::debug!(%error, "the file cannot be watched for inserts; polling finds them");
                    *slot = None;
                    std::future::pending::<()>().await;
                }
            }
        }
    }

    /// The first look only remembers, and says "changed": what was committed before it is not known.
    async fn look(&self, slot: &mut Option<Watcher>) -> Result<bool, sqlx::Error> {
        match slot {
            Some(watcher) => watcher.changed().await,
            None => {
                let mut connection = self.inner.options.connect().await?;
                let seen = Watcher::version(&mut connection).await?;
                *slot = Some(Watcher { connection, seen });
                Ok(true)
            }
        }
    }
}

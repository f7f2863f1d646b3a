//! Being woken: by forwards and replays of this process at once, by commits of others through `PRAGMA data_version`.
//!
//! SQLite has no notification, but `data_version` changes when another connection than the asking one has committed, and costs one
//! look at the shared memory of the log. It is asked on the connection that writes: our own settles and renewals go through it, so
//! they wake nobody. It is a hint; the engine has a timer beside it.

use std::time::Duration;

use tokio::sync::{Mutex, Notify};

use crate::SqliteStore;

/// How often others' commits are looked for: half of it is added to the way of an idle message, where a poll interval of
/// 100 ms adds 50 ms.
const LOOK_EVERY: Duration = Duration::from_millis(10);

#[derive(Default)]
pub(crate) struct Wake {
    inserted: Notify,
    /// The version as last seen; locked by the one who looks.
    seen: Mutex<Option<i64>>,
}

impl Wake {
    /// Rows were inserted by this process.
    pub fn notify(&self) {
        self.inserted.notify_one();
    }
}

impl SqliteStore {
    /// Resolves when rows may have been inserted, at most once in [`LOOK_EVERY`] for commits of others.
    pub(crate) async fn wait_for_change(&self) {
        tokio::select! {
            () = self.inner.wake.inserted.notified() => {}
            () = self.watch() => {}
        }
    }

    async fn watch(&self) {
        let mut seen = self.inner.wake.seen.lock().await;
        loop {
            if self.inner.writer.is_closed() {
                std::future::pending::<()>().await;
            }
            // While the writer is busy somebody of this process is at work, and reads anyhow.
            if let Some(version) = self.version().await {
                let before = seen.replace(version);
                if before.is_some_and(|before| before != version) {
                    return;
                }
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    async fn version(&self) -> Option<i64> {
        let mut writer = self.inner.writer.try_acquire()?;
        sqlx::query_scalar("PRAGMA data_version").fetch_one(&mut *writer).await.ok()
    }
}

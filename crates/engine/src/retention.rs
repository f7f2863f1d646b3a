//! Deletes finished rows that are old enough, or too many (contract 11).
//!
//! Invariants:
//! - Only finished rows go: `sent` and `dead`, `processed` and `dead`.
//! - Short steps, each of them the store's; between two of them the database gets as much rest as the last one took.
//! - Several workers may do this at once; none has to.

use std::{sync::Arc, time::Duration};

use queuebox_core::{
    Fault,
    message::State,
    ports::{Ledger, Scope, outbox::PruneRule},
};
use tokio::{sync::watch, time::Instant};
use tokio_util::sync::CancellationToken;

use crate::{
    ids::Ids,
    inbox_observer::{InboxEvent, InboxObserver},
};

/// What is kept of one table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TableRetention {
    /// What goes of the finished rows that are not dead; `None` = nothing.
    pub rule: Option<PruneRule>,
    /// What goes of the dead ones: `deadMaxAge`, else the same; `None` = nothing.
    pub dead_rule: Option<PruneRule>,
    /// Time between two clean-ups; the first is at start.
    pub cleanup_interval: Duration,
    /// The most rows of one transaction.
    pub batch_size: u32,
}

/// Pauses while the database fails.
const FAILING_WAIT: Duration = Duration::from_millis(100);

/// So often in a row a step may fail before the clean-up is left for the next time.
const FAILURES_MAX: u32 = 8;

/// Longest rest between two steps.
const REST_MAX: Duration = Duration::from_secs(1);

/// The clean-up of one table. Run it with [`Retention::run`].
pub struct Retention {
    /// Which table.
    pub table: Scope,
    /// What is kept.
    pub keep: TableRetention,
    /// The finished rows.
    pub ledger: Arc<dyn Ledger>,
    /// Jitter, and the time that is shown.
    pub ids: Arc<Ids>,
    /// Counts.
    pub observer: Arc<dyn InboxObserver>,
    /// Why the last clean-up was given up; `None` = it was not.
    pub failure: watch::Sender<Option<String>>,
    /// Ends it between two steps.
    pub stop: CancellationToken,
}

impl Retention {
    /// Cleans up now and every `cleanup_interval`, until `stop` is cancelled.
    pub async fn run(self) {
        while !self.stop.is_cancelled() {
            let began = Instant::now();
            match self.clean().await {
                Ok(()) => {
                    self.failure.send_replace(None);
                    self.observer.observe(&InboxEvent::Cleaned {
                        table: self.table,
                        took: began.elapsed(),
                        ended_at_us: self.ids.now_us(),
                    });
                }
                Err(fault) => {
                    self.failure.send_replace(Some(fault.to_string()));
                    tracing::warn!(%fault, table = ?self.table, "a clean-up was given up; the next one comes in time");
                }
            }
            self.rest(self.keep.cleanup_interval).await;
        }
    }

    async fn clean(&self) -> Result<(), Fault> {
        let finished = match self.table {
            Scope::Outbox => State::Sent,
            Scope::Inbox => State::Processed,
        };
        for (state, rule) in [(finished, self.keep.rule), (State::Dead, self.keep.dead_rule)] {
            if let Some(rule) = rule {
                self.prune(state, rule).await?;
            }
        }
        Ok(())
    }

    /// Step after step until the store says that the pass is over.
    async fn prune(&self, state: State, rule: PruneRule) -> Result<(), Fault> {
        let mut failures = 0;
        while !self.stop.is_cancelled() {
            let began = Instant::now();
            match self.ledger.prune(self.table, state, rule, self.keep.batch_size).await {
                Ok(step) => {
                    failures = 0;
                    self.observer.observe(&InboxEvent::Deleted { table: self.table, rows: step.rows });
                    if !step.more {
                        return Ok(());
                    }
                    self.rest(began.elapsed().min(REST_MAX)).await;
                }
                Err(fault) => {
                    failures += 1;
                    if failures >= FAILURES_MAX {
                        return Err(fault);
                    }
                    // A deadlock victim among others: nobody has to hear of it.
                    tracing::debug!(%fault, table = ?self.table, "a step of the clean-up failed; it is tried again");
                    self.rest(FAILING_WAIT.saturating_mul(1 << failures).mul_f64(1.0 + self.ids.jitter())).await;
                }
            }
        }
        Ok(())
    }

    async fn rest(&self, time: Duration) {
        tokio::select! {
            () = tokio::time::sleep(time) => {}
            () = self.stop.cancelled() => {}
        }
    }
}

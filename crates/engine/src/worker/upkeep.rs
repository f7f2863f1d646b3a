//! What a worker does beside the way of a message: recovers rows whose lease has ended, and counts the backlog for the gauges.
//! None of it is needed for another worker's progress.

use std::{sync::Arc, time::Duration};

use queuebox_core::{
    LaneSet,
    message::Consumption,
    ports::{Store, inbox::SourceBacklog, outbox::OutboxBacklog},
};
use tokio::{
    sync::{mpsc, watch},
    time::Instant,
};
use tokio_util::sync::CancellationToken;

use super::keeper::KeeperState;
use crate::{config::RelayConfig, metrics::Metrics, outbox::driver::Order};

/// Rows of a gauge are counted up to this; beyond it "many" is enough.
const COUNT_BOUND: u64 = 100_000;

/// The backlog as last counted.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Backlog {
    /// Of the outbox.
    pub outbox: OutboxBacklog,
    /// Of the inbox, by source and consumption.
    pub inbox: Vec<SourceBacklog>,
    /// When the outbox was counted, once both were; `None` = not yet.
    pub counted_at: Option<Instant>,
}

/// See the module. Run it with [`run`](Self::run).
pub struct Upkeep {
    /// The Relay.
    pub relay: Arc<RelayConfig>,
    /// How often the gauges of the inbox are counted.
    pub inbox_gauge_interval: Duration,
    /// The database.
    pub store: Arc<dyn Store>,
    /// Gauges and counters.
    pub metrics: Arc<Metrics>,
    /// Whose lanes are ours.
    pub keeper: watch::Receiver<KeeperState>,
    /// To the driver.
    pub orders: mpsc::UnboundedSender<Order>,
    /// For status.
    pub backlog: watch::Sender<Backlog>,
    /// Ends it.
    pub stop: CancellationToken,
}

impl Upkeep {
    /// Runs until stopped.
    pub async fn run(self) {
        let recover_every = (self.relay.outbox.lease / 3).max(Duration::from_millis(200));
        let started = Instant::now();
        let mut counted = (false, false);
        let (mut recover_at, mut outbox_at, mut inbox_at) = (started, started, started);
        while !self.stop.is_cancelled() {
            let now = Instant::now();
            self.metrics.uptime.set(now.duration_since(started).as_secs_f64());
            if now >= recover_at {
                recover_at = now + recover_every;
                self.recover().await;
            }
            let (outbox, inbox) = (now >= outbox_at, now >= inbox_at);
            if outbox {
                outbox_at = now + self.relay.outbox.gauge_interval;
            }
            if inbox {
                inbox_at = now + self.inbox_gauge_interval;
            }
            if outbox || inbox {
                self.count(outbox, inbox, &mut counted).await;
            }
            let next = recover_at.min(outbox_at).min(inbox_at);
            tokio::select! {
                () = tokio::time::sleep_until(next.min(now + Duration::from_secs(1))) => {}
                () = self.stop.cancelled() => {}
            }
        }
    }

    /// Rows found `processing` with an ended lease: the only evidence of a crash (contract 3.3).
    async fn recover(&self) {
        let (fence, lanes) = {
            let state = self.keeper.borrow();
            let Some(fence) = state.fence.clone() else { return };
            (fence, LaneSet::from_bits(state.outbox_lanes))
        };
        if lanes.is_empty() {
            return;
        }
        match self.store.recover(&fence, lanes, self.relay.outbox.max_crashes).await {
            Ok(recovered) => {
                self.metrics.recovered(&recovered);
                if !recovered.dead.is_empty() {
                    let _ = self.orders.send(Order::Buried(recovered.dead));
                }
                if recovered.pending > 0 {
                    let _ = self.orders.send(Order::Recovered);
                }
            }
            Err(fault) if fault.is_fenced() => {}
            Err(fault) => tracing::debug!("Could not look for rows to recover: {}", fault.detail),
        }
    }

    /// Counts one table or both. What could not be counted stays as it was.
    async fn count(&self, outbox: bool, inbox: bool, counted: &mut (bool, bool)) {
        let (outbox, inbox) = tokio::join!(
            async { if outbox { self.store.outbox_backlog(COUNT_BOUND).await.ok() } else { None } },
            async { if inbox { self.store.inbox_backlog(COUNT_BOUND).await.ok() } else { None } },
        );
        let (size, idle, waiting) = self.store.pool();
        self.metrics.pool_size.set(size.into());
        self.metrics.pool_idle.set(idle.into());
        self.metrics.pool_waiting.set(waiting.into());
        let is_anew = outbox.is_some();
        if let Some(outbox) = outbox {
            self.show_outbox(outbox);
            counted.0 = true;
            self.backlog.send_modify(|backlog| backlog.outbox = outbox);
        }
        if let Some(inbox) = inbox {
            self.show_inbox(&inbox);
            counted.1 = true;
            self.backlog.send_modify(|backlog| backlog.inbox = inbox);
        }
        self.backlog.send_modify(|backlog| {
            if counted.0 && counted.1 && (is_anew || backlog.counted_at.is_none()) {
                backlog.counted_at = Some(Instant::now());
            }
        });
    }

    fn show_outbox(&self, backlog: OutboxBacklog) {
        self.metrics.outbox_pending.set(i64::try_from(backlog.pending).unwrap_or(i64::MAX));
        self.metrics.outbox_dead.set(i64::try_from(backlog.dead).unwrap_or(i64::MAX));
        self.metrics.oldest_pending.set(seconds(backlog.oldest_pending_age_us));
        self.metrics.oldest_due.set(seconds(backlog.oldest_due_age_us));
    }

    fn show_inbox(&self, backlog: &[SourceBacklog]) {
        // Series of a source without rows go away, so that a removed source does not stay for ever.
        self.metrics.source_pending.reset();
        self.metrics.source_oldest.reset();
        self.metrics.source_dead.reset();
        let mut oldest_us = 0;
        for source in backlog {
            oldest_us = oldest_us.max(source.oldest_pending_age_us);
            let word = match source.consumption {
                Consumption::Push => "push",
                Consumption::Pull => "pull",
            };
            let name = source.source.as_str();
            let pending = i64::try_from(source.pending).unwrap_or(i64::MAX);
            self.metrics.source_pending.with_label_values(&[name, word]).set(pending);
            let age = self.metrics.source_oldest.with_label_values(&[name]);
            age.set(age.get().max(seconds(source.oldest_pending_age_us)));
            self.metrics.source_dead.with_label_values(&[name]).add(i64::try_from(source.dead).unwrap_or(0));
        }
        self.metrics.inbox_oldest.set(seconds(oldest_us));
    }
}

#[allow(clippy::cast_precision_loss)]
fn seconds(us: i64) -> f64 {
    us as f64 / 1e6
}

//! Keeps a worker's registration alive and its lanes fair: registers, renews, surveys, takes, gives, leaves.
//!
//! Invariants
//! - The lease is renewed every third of its length, counted from before the renewal was sent; when the local clock says that it
//!   has ended, everything stops, whatever the database may still think (contract 5.1.1).
//! - A lane is given away only after the driver (outbox) or the forward (inbox) reported that nothing of it is in flight.
//! - An ended registration never comes back: the worker registers anew, under a new name and token.
//!
//! ```text
//!   unregistered ──register──► live ──renew, survey, take, give──► live
//!        ▲                      │  fenced, or the local end of the lease
//!        └──────────────────────┘                              live ──stop──► retired
//! ```

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use queuebox_core::{
    Fault, Lane, LaneSet, Uuid,
    ports::{
        Fence, Scope, Store,
        lanes::{Registration, Survey, Take},
    },
};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use tokio::{
    sync::{mpsc, oneshot, watch},
    time::Instant,
};

use super::share::{self, Me};
use crate::{
    config::RelayConfig,
    forward::Holding,
    metrics::Metrics,
    outbox::driver::{LocalLease, Order, Report},
};

/// Longest pause between two looks at who is there.
const SURVEY_MAX: Duration = Duration::from_millis(500);

/// What people see of the registration.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KeeperState {
    /// The registration; `None` = not registered.
    pub fence: Option<Fence>,
    /// Outbox lanes that are ours, as a bit mask.
    pub outbox_lanes: u64,
    /// Why this worker stands by, if it does.
    pub stand_by: Option<String>,
    /// Lanes of the outbox, lanes of the inbox.
    pub lanes: (u32, u32),
    /// Live workers of the Relay.
    pub workers: usize,
    /// Why the database refuses the registration, while it does.
    pub failing: Option<String>,
}

/// What a keeper is built from.
pub struct Parts {
    /// The Relay.
    pub config: Arc<RelayConfig>,
    /// The database.
    pub store: Arc<dyn Store>,
    /// Counts.
    pub metrics: Arc<Metrics>,
    /// To the driver.
    pub orders: mpsc::UnboundedSender<Order>,
    /// From the driver.
    pub reports: mpsc::UnboundedReceiver<Report>,
    /// To the driver.
    pub lease: watch::Sender<Option<LocalLease>>,
    /// To the forward.
    pub holding: watch::Sender<Option<Holding>>,
    /// From the forward: lanes of the batch under way. Lanes of the inbox move only when they are not among them.
    pub inbox_in_use: watch::Receiver<LaneSet>,
    /// For status and readiness.
    pub state: watch::Sender<KeeperState>,
    /// Resolves to the deadline when the worker is to stop.
    pub stop: watch::Receiver<Option<Instant>>,
    /// Seed of names and jitter.
    pub seed: u64,
}

struct Live {
    fence: Fence,
    lease: LocalLease,
    renew_at: Instant,
    survey_at: Instant,
    outbox: LaneSet,
    inbox: LaneSet,
    /// Lanes on their way to another worker.
    leaving: BTreeMap<Lane, String>,
    /// Lanes that were to leave and could not, since they are worked carefully: the next plan gives others, if there are any.
    careful: LaneSet,
    /// Lanes that were taken, not given: what their last owner left `processing` is recovered before anything of them is read.
    unrecovered: LaneSet,
    /// Of these, lanes whose owner's lease had ended. Remembered from before the take, whose reply may be lost.
    inherited: LaneSet,
    /// Of the unrecovered, lanes with a row whose foreign lease has not ended.
    waiting: LaneSet,
}

/// See the module.
pub struct Keeper {
    parts: Parts,
    rng: StdRng,
    live: Option<Live>,
    stood_by: Option<String>,
}

impl Keeper {
    /// Nothing happens before [`run`](Self::run).
    pub fn new(parts: Parts) -> Self {
        let rng = StdRng::seed_from_u64(parts.seed);
        Self { parts, rng, live: None, stood_by: None }
    }

    /// Runs until it was told to stop and has left.
    pub async fn run(mut self) {
        let mut pause = Duration::from_millis(100);
        loop {
            if let Some(deadline) = self.stop_deadline() {
                return self.leave(deadline).await;
            }
            match self.step_within_the_lease().await {
                Ok(()) => {
                    pause = Duration::from_millis(100);
                    self.parts.state.send_if_modified(|state| state.failing.take().is_some());
                }
                Err(fault) if fault.is_fenced() => self.lost(&fault.detail),
                Err(fault) => {
                    self.parts.state.send_modify(|state| state.failing = Some(fault.detail.clone()));
                    self.rest(pause).await;
                    pause = (pause * 2).min(Duration::from_secs(5));
                }
            }
        }
    }

    fn stop_deadline(&self) -> Option<Instant> {
        *self.parts.stop.borrow()
    }

    /// Waits, but not beyond the end of the lease or the order to stop.
    async fn rest(&mut self, pause: Duration) {
        let until = Instant::now() + pause;
        let until = self.live.as_ref().map_or(until, |live| until.min(live.lease.until));
        tokio::select! {
            () = tokio::time::sleep_until(until) => {}
            _ = self.parts.stop.changed() => {}
        }
        self.expire();
    }

    /// The local clock says that the lease has ended.
    fn expire(&mut self) {
        if self.live.as_ref().is_some_and(|live| Instant::now() >= live.lease.until) {
            self.lost("it was not renewed in time; is the database reachable?");
        }
    }

    fn lost(&mut self, why: &str) {
        if let Some(live) = self.live.take() {
            tracing::warn!(worker = live.fence.worker, "The lease is lost: {why} The worker registers anew.");
            let _ = self.parts.orders.send(Order::Lost);
            self.parts.lease.send_replace(None);
            self.parts.holding.send_replace(None);
            self.parts.state.send_modify(|state| {
                state.fence = None;
                state.outbox_lanes = 0;
                state.lanes = (0, 0);
            });
        }
    }

    /// Whatever the database is asked: when the lease ends before it answers, the lease is what counts, and what runs under it ends.
    async fn step_within_the_lease(&mut self) -> Result<(), Fault> {
        let Some(until) = self.live.as_ref().map(|live| live.lease.until) else {
            return self.step().await;
        };
        match tokio::time::timeout_at(until, self.step()).await {
            Ok(done) => done,
            // Renewed in the meantime, or lost.
            Err(_) => {
                self.expire();
                Ok(())
            }
        }
    }

    async fn step(&mut self) -> Result<(), Fault> {
        let Some(live) = &self.live else {
            return self.register().await;
        };
        let now = Instant::now();
        if now >= live.lease.until {
            self.expire();
            return Ok(());
        }
        if now >= live.renew_at {
            return self.renew().await;
        }
        if now >= live.survey_at {
            return self.look_around().await;
        }
        let until = live.renew_at.min(live.survey_at);
        tokio::select! {
            () = tokio::time::sleep_until(until) => {}
            _ = self.parts.stop.changed() => {}
            Some(report) = self.parts.reports.recv() => match report {
                Report::Rested(lanes) => return self.hand_over(lanes).await,
                Report::Careful(lanes) => {
                    if let Some(live) = &mut self.live {
                        live.leaving.retain(|lane, _| !lanes.contains(*lane));
                        live.careful = lanes;
                    }
                }
                Report::Fenced => return Err(Fault::fenced("the database refused it.")),
            },
        }
        Ok(())
    }

    fn lease_ms(&self) -> u64 {
        u64::try_from(self.parts.config.outbox.lease.as_millis()).unwrap_or(u64::MAX)
    }

    fn lease_from(&self, sent_at: Instant) -> LocalLease {
        let lease = self.parts.config.outbox.lease;
        LocalLease { until: sent_at + lease, start_until: sent_at + lease - lease / 3 }
    }

    async fn register(&mut self) -> Result<(), Fault> {
        // Reports about an older registration mean nothing for this one.
        while self.parts.reports.try_recv().is_ok() {}
        let suffix: u32 = self.rng.random();
        let fence = Fence {
            worker: format!("{}-{suffix:08x}", self.parts.config.worker_name),
            token: uuid::Builder::from_random_bytes(self.rng.random::<u128>().to_ne_bytes()).into_uuid(),
        };
        let sent_at = Instant::now();
        let registration = Registration {
            fence: fence.clone(),
            relay_uid: self.parts.config.relay_uid.clone(),
            config: self.parts.config.config_version.clone(),
            lease_ms: self.lease_ms(),
        };
        self.parts.store.register(&registration).await?;
        let lease = self.lease_from(sent_at);
        self.parts.lease.send_replace(Some(lease));
        let renew_at = sent_at + self.parts.config.outbox.lease / 3;
        let mut live = Live {
            fence: fence.clone(),
            lease,
            renew_at,
            survey_at: sent_at,
            outbox: LaneSet::EMPTY,
            inbox: LaneSet::EMPTY,
            leaving: BTreeMap::new(),
            careful: LaneSet::EMPTY,
            unrecovered: LaneSet::EMPTY,
            inherited: LaneSet::EMPTY,
            waiting: LaneSet::EMPTY,
        };
        tracing::info!(worker = fence.worker, "Registered.");
        self.parts.state.send_modify(|state| state.fence = Some(fence.clone()));
        if !self.parts.store.has_lanes() {
            let all = LaneSet::first(self.parts.store.lane_count());
            live.outbox = all;
            live.inbox = all;
            let _ = self.parts.orders.send(Order::Own { fence, lanes: all, careful: all });
        }
        self.live = Some(live);
        self.show();
        Ok(())
    }

    async fn renew(&mut self) -> Result<(), Fault> {
        let lease_ms = self.lease_ms();
        let Some(live) = &mut self.live else { return Ok(()) };
        let sent_at = Instant::now();
        self.parts.store.renew(&live.fence, lease_ms).await?;
        let lease = self.lease_from(sent_at);
        if let Some(live) = &mut self.live {
            live.lease = lease;
            live.renew_at = sent_at + self.parts.config.outbox.lease / 3;
        }
        self.parts.lease.send_replace(Some(lease));
        self.show();
        Ok(())
    }

    async fn look_around(&mut self) -> Result<(), Fault> {
        let pause = SURVEY_MAX.min(self.parts.config.outbox.lease / 6).mul_f64(self.rng.random_range(0.75..1.0));
        let Some(live) = &mut self.live else { return Ok(()) };
        live.survey_at = Instant::now() + pause;
        if !self.parts.store.has_lanes() {
            return Ok(());
        }
        let fence = live.fence.clone();
        let store = self.parts.store.clone();
        let (outbox, inbox) = (store.survey(Scope::Outbox).await?, store.survey(Scope::Inbox).await?);
        if !outbox.workers.iter().any(|worker| worker.worker == fence.worker && worker.live) {
            return Err(Fault::fenced("the worker's row is gone or its lease has ended."));
        }
        self.judge_config(&outbox);
        self.outbox_lanes(&outbox).await?;
        self.inbox_lanes(&inbox).await?;
        self.show();
        Ok(())
    }

    /// Only the newest configuration among the live workers of the Relay may say `no_route` (contract 7.1).
    fn judge_config(&self, survey: &Survey) {
        let mine = &self.parts.config.config_version;
        let number = |config: &str| config.split('/').next().and_then(|number| number.parse::<u64>().ok()).unwrap_or(0);
        let live =
            || survey.workers.iter().filter(|worker| worker.live && worker.relay_uid == self.parts.config.relay_uid);
        let newest = live().map(|worker| number(&worker.config)).max().unwrap_or(0);
        let same = |config: &str| config.split('/').nth(1) == mine.split('/').nth(1);
        let may = number(mine) >= newest
            || live().filter(|worker| number(&worker.config) == newest).all(|worker| same(&worker.config));
        let _ = self.parts.orders.send(Order::MayKillNoRoute(may));
        let workers = live().count();
        self.parts.state.send_if_modified(|state| std::mem::replace(&mut state.workers, workers) != workers);
    }

    fn plan(&mut self, survey: &Survey, keep: LaneSet) -> share::Plan {
        let name = self.live.as_ref().map(|live| live.fence.worker.clone()).unwrap_or_default();
        let me = Me {
            worker: &name,
            relay_uid: &self.parts.config.relay_uid,
            lane_hash: self.parts.store.lane_hash(),
            lane_count: self.parts.store.lane_count(),
        };
        share::plan(survey, me, keep)
    }

    async fn outbox_lanes(&mut self, survey: &Survey) -> Result<(), Fault> {
        self.adopt(survey);
        let keep = self.live.as_mut().map(|live| std::mem::take(&mut live.careful)).unwrap_or_default();
        let plan = self.plan(survey, keep);
        self.say_stand_by(plan.stand_by);
        if !plan.take.is_empty() {
            self.take_outbox(&plan.take).await?;
        }
        self.recover_taken().await?;
        let Some(live) = &mut self.live else { return Ok(()) };
        let fresh: LaneSet =
            plan.give.iter().map(|(lane, _)| *lane).filter(|lane| !live.leaving.contains_key(lane)).collect();
        for (lane, to) in plan.give {
            live.leaving.entry(lane).or_insert(to);
        }
        if !fresh.is_empty() {
            let _ = self.parts.orders.send(Order::Drain(fresh));
        }
        Ok(())
    }

    /// Lanes that name us without our having noted it: another worker gave them to us, or the reply to a take was lost.
    fn adopt(&mut self, survey: &Survey) {
        let Some(live) = &mut self.live else { return };
        let ours: LaneSet = survey
            .lanes
            .iter()
            .filter(|row| row.worker.as_deref() == Some(live.fence.worker.as_str()))
            .map(|row| row.lane)
            .filter(|lane| !live.outbox.contains(*lane) && !live.leaving.contains_key(lane))
            .collect();
        let given = ours.minus(live.unrecovered).minus(live.inherited);
        live.unrecovered = live.unrecovered.union(ours.intersect(live.inherited));
        if !given.is_empty() {
            live.outbox = live.outbox.union(given);
            let order = Order::Own { fence: live.fence.clone(), lanes: given, careful: LaneSet::EMPTY };
            let _ = self.parts.orders.send(order);
        }
    }

    async fn take_outbox(&mut self, wanted: &[Take]) -> Result<(), Fault> {
        let Some(live) = &mut self.live else { return Ok(()) };
        // A lane whose owner's lease had ended: nobody knows what was in flight there.
        let inherited: LaneSet = wanted.iter().filter(|take| take.owner.is_some()).map(|take| take.lane).collect();
        live.inherited = live.inherited.union(inherited);
        let taken = self.parts.store.take(&live.fence, Scope::Outbox, wanted).await?;
        live.inherited = live.inherited.minus(inherited.minus(taken));
        live.unrecovered = live.unrecovered.union(taken);
        if !taken.intersect(inherited).is_empty() {
            tracing::info!(
                lanes = taken.intersect(inherited).len(),
                "Took over lanes of a worker whose lease had ended."
            );
        }
        Ok(())
    }

    /// Rows that the last owner of a lane left `processing` come first in their keys: they are put back before the lane is read.
    async fn recover_taken(&mut self) -> Result<(), Fault> {
        let Some(live) = &mut self.live else { return Ok(()) };
        let lanes = live.unrecovered;
        if lanes.is_empty() {
            return Ok(());
        }
        let recovered = self.parts.store.recover(&live.fence, lanes, self.parts.config.outbox.max_crashes).await?;
        self.parts.metrics.recovered(&recovered);
        if !recovered.dead.is_empty() {
            let _ = self.parts.orders.send(Order::Buried(recovered.dead));
        }
        let waiting = recovered.waiting.intersect(lanes);
        if !waiting.minus(live.waiting).is_empty() {
            tracing::info!(
                rows = recovered.unexpired,
                lanes = waiting.len(),
                "Rows are claimed under a lease that has not ended; their lanes wait for it."
            );
        }
        live.waiting = waiting;
        live.unrecovered = waiting;
        let free = lanes.minus(waiting);
        if free.is_empty() {
            return Ok(());
        }
        let careful = free.intersect(live.inherited);
        live.inherited = live.inherited.minus(free);
        live.outbox = live.outbox.union(free);
        let _ = self.parts.orders.send(Order::Own { fence: live.fence.clone(), lanes: free, careful });
        Ok(())
    }

    async fn hand_over(&mut self, rested: LaneSet) -> Result<(), Fault> {
        let Some(live) = &mut self.live else { return Ok(()) };
        let mut by_heir: BTreeMap<String, LaneSet> = BTreeMap::new();
        for lane in rested.iter() {
            if let Some(heir) = live.leaving.remove(&lane) {
                by_heir.entry(heir).or_default().insert(lane);
            }
        }
        let mut kept = LaneSet::EMPTY;
        let mut failure = None;
        for (heir, lanes) in by_heir {
            match self.parts.store.give(&live.fence, Scope::Outbox, lanes, Some(&heir)).await {
                Ok(given) => {
                    live.outbox = live.outbox.minus(given);
                    kept = kept.union(lanes.minus(given));
                }
                Err(fault) => {
                    kept = kept.union(lanes);
                    failure = Some(fault);
                }
            }
        }
        if !kept.is_empty() {
            let order = Order::Own { fence: live.fence.clone(), lanes: kept, careful: LaneSet::EMPTY };
            let _ = self.parts.orders.send(order);
        }
        self.show();
        failure.map_or(Ok(()), Err)
    }

    async fn inbox_lanes(&mut self, survey: &Survey) -> Result<(), Fault> {
        let plan = self.plan(survey, LaneSet::EMPTY);
        let Some(live) = &mut self.live else { return Ok(()) };
        live.inbox = survey
            .lanes
            .iter()
            .filter(|row| row.worker.as_deref() == Some(live.fence.worker.as_str()))
            .map(|row| row.lane)
            .collect();
        if !plan.take.is_empty() {
            let taken = self.parts.store.take(&live.fence, Scope::Inbox, &plan.take).await?;
            live.inbox = live.inbox.union(taken);
        }
        let mut by_heir: BTreeMap<String, LaneSet> = BTreeMap::new();
        for (lane, heir) in plan.give {
            by_heir.entry(heir).or_default().insert(lane);
        }
        for (heir, lanes) in by_heir {
            // First the forward lets go of them, then, between two of its passes, they move.
            live.inbox = live.inbox.minus(lanes);
            self.parts.holding.send_replace(Some(holding(live)));
            let at_rest = self.parts.inbox_in_use.wait_for(|in_use| in_use.intersect(lanes).is_empty());
            let _ = tokio::time::timeout_at(live.lease.until, at_rest).await;
            self.parts.store.give(&live.fence, Scope::Inbox, lanes, Some(&heir)).await?;
        }
        Ok(())
    }

    fn say_stand_by(&mut self, reason: Option<String>) {
        if self.stood_by != reason {
            match &reason {
                Some(reason) => tracing::warn!("Standing by: {reason}."),
                None => tracing::info!("Not standing by any more."),
            }
            self.stood_by.clone_from(&reason);
            self.parts.state.send_modify(|state| state.stand_by = reason);
        }
    }

    fn show(&self) {
        let Some(live) = &self.live else { return };
        let (lanes, bits) = ((live.outbox.len(), live.inbox.len()), live.outbox.bits());
        self.parts.state.send_if_modified(|state| {
            let changed = (state.lanes, state.outbox_lanes) != (lanes, bits);
            (state.lanes, state.outbox_lanes) = (lanes, bits);
            changed
        });
        let holding = holding(live);
        self.parts.holding.send_if_modified(|known| {
            let changed = known.as_ref() != Some(&holding);
            if changed {
                *known = Some(holding);
            }
            changed
        });
    }

    // ---- the end -----------------------------------------------------------------------------------------------------

    /// Lets the driver finish, keeping the lease alive meanwhile, then gives everything back.
    async fn leave(mut self, deadline: Instant) {
        self.parts.holding.send_replace(None);
        let (done, mut finished) = oneshot::channel();
        if self.parts.orders.send(Order::Stop { deadline, done }).is_err() {
            return;
        }
        let careful = loop {
            let renew_at = self.live.as_ref().map_or(deadline, |live| live.renew_at);
            tokio::select! {
                careful = &mut finished => break careful.unwrap_or(LaneSet::EMPTY),
                () = tokio::time::sleep_until(renew_at), if self.live.is_some() => match self.renew().await {
                    Ok(()) => {}
                    Err(fault) if fault.is_fenced() => self.lost(&fault.detail),
                    Err(_) => self.rest(Duration::from_millis(200)).await,
                },
            }
        };
        let at_rest = self.parts.inbox_in_use.wait_for(|in_use| in_use.is_empty());
        let _ = tokio::time::timeout_at(deadline, at_rest).await;
        if let Some(live) = &self.live {
            let retiring = self.parts.store.retire(&live.fence, careful);
            match tokio::time::timeout(Duration::from_secs(5), retiring).await {
                Ok(Ok(())) => tracing::info!(worker = live.fence.worker, "Left; all lanes are given back."),
                Ok(Err(fault)) => {
                    tracing::warn!("Could not give the lanes back, they are free when the lease ends: {}", fault.detail)
                }
                Err(_) => tracing::warn!("The database did not answer; the lanes are free when the lease ends."),
            }
        }
        self.parts.lease.send_replace(None);
    }
}

/// What the forward may work on: no pass begins in the last third of an unrenewed lease.
fn holding(live: &Live) -> Holding {
    Holding { fence: live.fence.clone(), lanes: live.inbox, lease_until: live.lease.start_until }
}

/// A random seed for production; tests give their own.
pub fn fresh_seed() -> u64 {
    u64::from_ne_bytes(Uuid::new_v4().as_bytes()[..8].try_into().unwrap_or([0; 8]))
}

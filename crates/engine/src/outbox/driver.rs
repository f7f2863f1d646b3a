//! The loop of one worker's outbox: asks the [window](super::window) what to do, does it, and tells it what came of it.
//!
//! One operation of the database runs at a time (settle and read, mark, expand), while publishes run beside it; so settles batch by
//! themselves under load, and a lone message is settled at once. One exception: where the database gains by it, many deliveries are
//! settled while a poll is still under way. Only this module and the keeper know the clock.

use std::{collections::HashMap, sync::Arc, time::Duration};

use futures::future::BoxFuture;
use queuebox_core::{
    Fault, LaneSet, Uuid,
    message::{Position, Stamp},
    ports::{
        Fence, Store,
        outbox::{Buried, Expansion, Polled, Settle},
    },
};
use tokio::{
    sync::{mpsc, oneshot, watch},
    time::Instant,
};

use super::{
    publish::{Command, Event, Job, Publisher},
    window::{Asked, DestinationState, Note, Published, Start, Startable, Window},
};
use crate::{
    config::RelayConfig,
    metrics::Metrics,
    spans::Tracer,
    tail::{Outcome, Status, Tail},
};

/// First pause after a poll that found nothing; doubles up to the poll interval.
const PAUSE_FIRST: Duration = Duration::from_millis(2);
/// Longest pause after the database failed.
const FAILURE_PAUSE_MAX: Duration = Duration::from_secs(30);
/// How many rows go into the next write of a kind: fewer and fewer while the database refuses one of them, until that one is alone.
#[derive(Debug, Clone, Copy)]
struct Batch(usize);

impl Batch {
    const WHOLE: Batch = Batch(usize::MAX);

    /// So many were written together.
    fn took(&mut self) {
        self.0 = self.0.saturating_mul(2);
    }

    /// So many were refused together.
    fn refused(&mut self, rows: usize) {
        self.0 = (rows / 2).max(1);
    }
}

/// Polls in a row with rows after which a worker says that it need not be woken.
const BUSY_POLLS: u32 = 16;

/// What the keeper tells the driver.
pub enum Order {
    /// A registration with its lanes, or more lanes under the same one.
    Own {
        /// Under which fence.
        fence: Fence,
        /// These lanes.
        lanes: LaneSet,
        /// Of which these are to be worked carefully.
        careful: LaneSet,
    },
    /// Let these lanes come to rest; reported by [`Report::Rested`], or by [`Report::Careful`].
    Drain(LaneSet),
    /// The registration is lost: stop everything, write nothing.
    Lost,
    /// Come to an end by then: finish what is in flight, settle it.
    Stop {
        /// What is still open then is cut off.
        deadline: Instant,
        /// Lanes that the next owner must work carefully.
        done: oneshot::Sender<LaneSet>,
    },
    /// Rows were recovered after a crash: look at everything.
    Recovered,
    /// Rows were found dead of crashes: those who follow are told.
    Buried(Vec<Buried>),
    /// Whether this configuration may declare rows without a route dead.
    MayKillNoRoute(bool),
}

/// What the driver tells the keeper.
#[derive(Debug, Clone, Copy)]
pub enum Report {
    /// Lanes that came to rest and are not the driver's any more.
    Rested(LaneSet),
    /// Lanes that were to come to rest and go on: they are worked carefully, and whoever gets them would not know (contract 5.4).
    Careful(LaneSet),
    /// The database refused the registration. It must not be used again, even if the database thought better of it: its clock may
    /// have jumped there and back.
    Fenced,
}

/// How long the present lease holds by the local clock. `None` = no registration.
#[derive(Debug, Clone, Copy)]
pub struct LocalLease {
    /// Its end, counted from before the renewal was sent.
    pub until: Instant,
    /// Nothing starts from here on: the last third of an unrenewed lease (contract 5.1.6).
    pub start_until: Instant,
}

/// What people see of a driver.
#[derive(Debug, Clone, Default)]
pub struct DriverState {
    /// State of each destination.
    pub destinations: Vec<DestinationState>,
    /// Lanes owned.
    pub lanes: u32,
    /// How much there is to do.
    pub startable: Startable,
    /// Rows of the last minute that no route took.
    pub no_route_per_minute: u64,
    /// Why the last operation of the database failed, while it fails.
    pub failing: Option<String>,
}

/// What a driver is built from.
pub struct Parts {
    /// The Relay.
    pub config: Arc<RelayConfig>,
    /// The database.
    pub store: Arc<dyn Store>,
    /// Counts.
    pub metrics: Arc<Metrics>,
    /// Told of outcomes.
    pub tail: Tail,
    /// Where spans go.
    pub tracer: Tracer,
    /// From the keeper.
    pub orders: mpsc::UnboundedReceiver<Order>,
    /// To the keeper.
    pub reports: mpsc::UnboundedSender<Report>,
    /// From the keeper.
    pub lease: watch::Receiver<Option<LocalLease>>,
    /// Wakes the driver: the forward put rows into the outbox.
    pub nudge: Arc<tokio::sync::Notify>,
    /// For status and readiness.
    pub state: watch::Sender<DriverState>,
    /// Seed of the jitter.
    pub seed: u64,
}

enum Done {
    Polled { settles: Vec<Settle>, repeated: bool, asked: Asked, result: Result<Polled, Fault> },
    Settled { settles: Vec<Settle>, result: Result<Polled, Fault> },
    Marked { rows: Vec<(Position, Stamp)>, result: Result<Vec<Uuid>, Fault> },
    Expanded { expansions: Vec<Expansion>, result: Result<Vec<Uuid>, Fault> },
    Idled { idle: bool, result: Result<(), Fault> },
}

/// An operation of the database under way.
struct Operation {
    /// Under which registration it began: an answer under another one is worth nothing.
    epoch: u64,
    /// A poll may have settles beside it.
    is_poll: bool,
    answer: BoxFuture<'static, Done>,
}

/// See the module.
pub struct Driver {
    parts: Parts,
    window: Window,
    publishers: Vec<mpsc::UnboundedSender<Command>>,
    events: mpsc::UnboundedReceiver<Event>,
    fence: Option<Fence>,
    epoch: u64,
    /// Careful lanes that have come to rest already.
    careful_rested: LaneSet,
    operation: Option<Operation>,
    /// Deliveries that are settled while a poll runs.
    beside: Option<Operation>,
    read_at: Instant,
    pause: Duration,
    failure_pause: Duration,
    count_startable_at: Instant,
    settles_repeated: bool,
    settle_batch: Batch,
    mark_batch: Batch,
    expand_batch: Batch,
    busy_polls: u32,
    idle_written: bool,
    idle_wanted: bool,
    stopping: Option<(Instant, oneshot::Sender<LaneSet>)>,
    /// Topics and keys of publishes that ended since the last notes, while somebody follows.
    told: HashMap<Uuid, (String, Option<String>)>,
    last_state: Instant,
}

impl Driver {
    /// Starts the publishers; the loop starts with [`run`](Self::run).
    pub fn new(parts: Parts) -> Self {
        let now = Instant::now();
        let always_careful = !parts.store.has_lanes();
        let window = Window::new(&parts.config, parts.store.lane_count(), always_careful, parts.seed, now);
        let (events_out, events) = mpsc::unbounded_channel();
        let publishers = parts
            .config
            .destinations
            .iter()
            .enumerate()
            .map(|(index, (name, destination))| {
                let (commands, inbox) = mpsc::unbounded_channel();
                let publisher = Publisher {
                    index,
                    name: name.clone(),
                    port: destination.port.clone(),
                    transform: destination.transform.clone(),
                    metrics: parts.metrics.clone(),
                    tracer: parts.tracer.clone(),
                    tail: parts.tail.clone(),
                };
                tokio::spawn(publisher.run(inbox, events_out.clone()));
                commands
            })
            .collect();
        Self {
            window,
            publishers,
            events,
            fence: None,
            epoch: 0,
            careful_rested: LaneSet::EMPTY,
            operation: None,
            beside: None,
            read_at: now,
            pause: PAUSE_FIRST,
            failure_pause: Duration::ZERO,
            count_startable_at: Instant::now(),
            settles_repeated: false,
            settle_batch: Batch::WHOLE,
            mark_batch: Batch::WHOLE,
            expand_batch: Batch::WHOLE,
            busy_polls: 0,
            idle_written: false,
            idle_wanted: false,
            stopping: None,
            told: HashMap::new(),
            last_state: now,
            parts,
        }
    }

    /// Runs until it was told to stop and has come to rest.
    pub async fn run(mut self) {
        let store = self.parts.store.clone();
        let nudge = self.parts.nudge.clone();
        let mut events = Vec::with_capacity(256);
        let woken = async move {
            loop {
                store.woken().await;
                nudge.notify_one();
            }
        };
        let nudge = self.parts.nudge.clone();
        tokio::pin!(woken);
        loop {
            let now = Instant::now();
            self.advance(now);
            if self.is_over(now) {
                return self.end();
            }
            let wake_at = self.wake_at(now);
            tokio::select! {
                biased;
                order = self.parts.orders.recv() => match order {
                    Some(order) => self.obey(order, Instant::now()),
                    None => return,
                },
                (epoch, done) = finish(&mut self.operation) => {
                    self.operation = None;
                    self.done(epoch, done, Instant::now());
                }
                (epoch, done) = finish(&mut self.beside) => {
                    self.beside = None;
                    self.done(epoch, done, Instant::now());
                }
                _ = self.events.recv_many(&mut events, 256) => {
                    let now = Instant::now();
                    for event in events.drain(..) {
                        self.heed(event, now);
                    }
                }
                () = nudge.notified() => self.hurry(Instant::now()),
                () = &mut woken => {}
                _ = self.parts.lease.changed() => {}
                () = tokio::time::sleep_until(wake_at) => {}
            }
        }
    }

    /// Everything that can be done without waiting.
    fn advance(&mut self, now: Instant) {
        let careful = self.window.careful_lanes();
        let quiet = self.window.take_quiet();
        self.careful_rested = self.careful_rested.union(careful.intersect(quiet));
        if !quiet.is_empty() {
            let _ = self.parts.reports.send(Report::Rested(quiet));
        }
        for destination in self.window.take_probes(now) {
            let _ = self.publishers[destination].send(Command::Probe);
        }
        self.window.tick(now);
        if self.may_start(now) {
            let starts = self.window.start(now);
            self.launch(starts);
        }
        if self.operation.is_none() {
            self.operation = self.next_operation(now);
        }
        if self.beside.is_none() {
            self.beside = self.settle_beside();
        }
        self.tell(now);
    }

    fn may_start(&self, now: Instant) -> bool {
        self.fence.is_some() && self.parts.lease.borrow().is_some_and(|lease| now < lease.start_until)
    }

    fn launch(&mut self, starts: Vec<Start>) {
        for start in starts {
            let route = self.window.route(start.route);
            let job = Job {
                row: start.row,
                route_transform: route.transform.clone(),
                routing_key: route.routing_key.clone(),
                epoch: self.epoch,
            };
            let _ = self.publishers[start.destination].send(Command::Publish(Box::new(job)));
        }
    }

    // ---- operations of the database --------------------------------------------------------------------------------

    fn begin(&self, is_poll: bool, answer: impl Future<Output = Done> + Send + 'static) -> Operation {
        Operation { epoch: self.epoch, is_poll, answer: Box::pin(answer) }
    }

    /// Deliveries that came while a poll runs, if they are worth a statement of their own. Every row in memory is excluded from that
    /// poll's read, whether it is settled meanwhile or not. Only what was sent: any other outcome changes what the answer means. Not
    /// in careful lanes, whose marks and counts belong together, and not after a failure: what is repeated stays together.
    fn settle_beside(&mut self) -> Option<Operation> {
        let least = self.parts.store.settles_beside()?;
        if !self.operation.as_ref().is_some_and(|running| running.is_poll && running.epoch == self.epoch)
            || self.settles_repeated
            || !self.failure_pause.is_zero()
            || !self.window.careful_lanes().is_empty()
        {
            return None;
        }
        let fence = self.fence.clone()?;
        let settles = self.window.take_sent(least, self.settles_max())?;
        let store = self.parts.store.clone();
        Some(self.begin(false, async move {
            let result = store.poll(&fence, &settles, None).await;
            Done::Settled { settles, result }
        }))
    }

    fn next_operation(&mut self, now: Instant) -> Option<Operation> {
        let fence = self.fence.clone()?;
        if !self.failure_pause.is_zero() && now < self.read_at {
            return None;
        }
        let store = self.parts.store.clone();
        let lease_ms = u64::try_from(self.parts.config.outbox.lease.as_millis()).unwrap_or(u64::MAX);
        let rows = if self.may_start(now) { self.window.take_marks(self.mark_batch.0) } else { Vec::new() };
        if !rows.is_empty() {
            return Some(self.begin(false, async move {
                let result = store.mark(&fence, &rows, lease_ms).await;
                Done::Marked { rows, result }
            }));
        }
        if self.window.has_expansions() && self.may_start(now) {
            let limit = (self.parts.config.outbox.batch_size as usize).min(self.expand_batch.0);
            let expansions = self.window.take_expansions(limit);
            return Some(self.begin(false, async move {
                let result = store.expand(&fence, &expansions).await;
                Done::Expanded { expansions, result }
            }));
        }
        if self.idle_wanted != self.idle_written {
            let idle = self.idle_wanted;
            return Some(
                self.begin(false, async move { Done::Idled { idle, result: store.set_idle(&fence, idle).await } }),
            );
        }
        self.next_poll(store, fence, now)
    }

    fn next_poll(&mut self, store: Arc<dyn Store>, fence: Fence, now: Instant) -> Option<Operation> {
        let is_due = now >= self.read_at;
        if !self.window.has_settles() && !is_due {
            return None;
        }
        let planned = self.window.plan_read(is_due && self.pause > PAUSE_FIRST, now);
        if planned.is_none() && !self.window.has_settles() {
            // No room, or nothing to ask for: an event, a timer or the next interval changes that.
            self.read_at = now + self.parts.config.outbox.poll_interval;
            return None;
        }
        let (read, asked) = planned.map_or((None, Asked::default()), |(read, asked)| (Some(read), asked));
        let settles = self.window.take_settles(self.settles_max());
        let repeated = std::mem::take(&mut self.settles_repeated);
        let metrics = self.parts.metrics.clone();
        Some(self.begin(true, async move {
            let begun = Instant::now();
            let result = store.poll(&fence, &settles, read.as_ref()).await;
            metrics.poll.observe(begun.elapsed().as_secs_f64());
            Done::Polled { settles, repeated, asked, result }
        }))
    }

    /// Settles of one statement.
    fn settles_max(&self) -> usize {
        (self.parts.config.outbox.batch_size as usize * 4).min(self.settle_batch.0)
    }

    fn done(&mut self, epoch: u64, done: Done, now: Instant) {
        if epoch != self.epoch {
            return;
        }
        let outcome = match done {
            Done::Polled { settles, repeated, asked, result } => self.polled(settles, repeated, &asked, result, now),
            Done::Settled { settles, result } => match result {
                Ok(polled) => {
                    self.settle_batch.took();
                    self.window.settled(settles, &polled.lost, false, now);
                    Ok(())
                }
                Err(fault) => self.not_settled(settles, false, fault, now),
            },
            Done::Marked { rows, result } => match result {
                Ok(marked) => {
                    self.mark_batch.took();
                    let starts = self.window.marks_done(&rows, &marked, now);
                    self.launch(starts);
                    Ok(())
                }
                Err(fault) => self.not_marked(&rows, fault, now),
            },
            Done::Expanded { expansions, result } => match result {
                Ok(lost) => {
                    self.expand_batch.took();
                    self.window.expanded(expansions, &lost, now);
                    Ok(())
                }
                Err(fault) => self.not_expanded(&expansions, fault, now),
            },
            Done::Idled { idle, result } => {
                // Read once more after the flag is written: a row committed before it may have woken nobody.
                self.idle_written = idle;
                self.read_at = now;
                result
            }
        };
        match outcome {
            Ok(()) => self.failure_pause = Duration::ZERO,
            Err(fault) => self.database_failed(&fault, now),
        }
    }

    fn polled(
        &mut self,
        settles: Vec<Settle>,
        repeated: bool,
        asked: &Asked,
        result: Result<Polled, Fault>,
        now: Instant,
    ) -> Result<(), Fault> {
        let polled = match result {
            Ok(polled) => polled,
            Err(fault) => return self.not_settled(settles, repeated, fault, now),
        };
        let settled = settles.len();
        if settled > 0 {
            self.settle_batch.took();
        }
        self.window.settled(settles, &polled.lost, repeated, now);
        let found = polled.walk.len() + polled.keys.len() + polled.later.len() + polled.destinations.len();
        self.window.absorb(asked, polled, now);
        self.pace(found, settled, now);
        Ok(())
    }

    /// A row that the database refuses holds up no other: the batch is halved until that row is alone, which is then put off.
    fn not_settled(
        &mut self,
        mut settles: Vec<Settle>,
        repeated: bool,
        fault: Fault,
        now: Instant,
    ) -> Result<(), Fault> {
        self.settles_repeated |= repeated || !settles.is_empty();
        if !fault.is_of_one_row() || settles.is_empty() || !self.window.may_put_off() {
            self.window.unsettled(settles);
            return Err(fault);
        }
        self.read_at = now;
        if settles.len() == 1
            && let Some(settle) = settles.pop()
        {
            let id = settle.position.id;
            let pause = self.window.put_off_settle(settle, now);
            self.refused(id, "its outcome cannot be written", pause, &fault);
            return Ok(());
        }
        self.settle_batch.refused(settles.len());
        self.window.unsettled(settles);
        Ok(())
    }

    /// See [`not_settled`](Self::not_settled).
    fn not_marked(&mut self, rows: &[(Position, Stamp)], fault: Fault, now: Instant) -> Result<(), Fault> {
        match rows {
            _ if !fault.is_of_one_row() || !self.window.may_put_off() => {
                self.window.marks_failed(rows);
                return Err(fault);
            }
            [(position, _)] => {
                let pause = self.window.put_off_start(position.id, now);
                self.refused(position.id, "it cannot be claimed", pause, &fault);
            }
            _ => {
                self.mark_batch.refused(rows.len());
                self.window.marks_failed(rows);
            }
        }
        Ok(())
    }

    /// See [`not_settled`](Self::not_settled). Whatever the reason is, parents are put off: it may concern inserts only, and outcomes of
    /// others are to be written meanwhile.
    fn not_expanded(&mut self, expansions: &[Expansion], fault: Fault, now: Instant) -> Result<(), Fault> {
        if fault.is_fenced() {
            self.window.unexpanded(expansions);
            return Err(fault);
        }
        if fault.is_of_one_row() && expansions.len() > 1 {
            self.expand_batch.refused(expansions.len());
            self.window.unexpanded(expansions);
            return Ok(());
        }
        for expansion in expansions {
            let id = expansion.parent.id;
            let pause = self.window.put_off_start(id, now);
            self.refused(id, "it cannot be expanded into one row per destination", pause, &fault);
        }
        Ok(())
    }

    fn refused(&self, id: Uuid, what: &str, pause: Duration, fault: &Fault) {
        self.parts.metrics.process_errors.inc();
        tracing::warn!(
            message_id = %id,
            code = %fault.code,
            "The database refuses the row of this message: {what}; tried again in {} ms: {}",
            pause.as_millis(),
            fault.detail
        );
    }

    /// When to read again: at once after rows, soon after the last ones, at the poll interval when idle.
    fn pace(&mut self, found: usize, settled: usize, now: Instant) {
        if found > 0 {
            self.pause = PAUSE_FIRST;
            self.read_at = now;
            self.busy_polls = self.busy_polls.saturating_add(1);
            if self.busy_polls >= BUSY_POLLS {
                self.idle_wanted = false;
            }
            return;
        }
        if settled > 0 {
            self.pause = PAUSE_FIRST;
        }
        let interval = self.parts.config.outbox.poll_interval;
        if self.pause >= interval && self.window.is_idle() {
            self.busy_polls = 0;
            self.idle_wanted = true;
        }
        self.read_at = now + self.pause.min(interval);
        self.pause = (self.pause * 2).min(interval).max(PAUSE_FIRST);
    }

    fn database_failed(&mut self, fault: &Fault, now: Instant) {
        if fault.is_fenced() {
            tracing::warn!("The lease of this worker is lost: {}", fault.detail);
            self.lost();
            let _ = self.parts.reports.send(Report::Fenced);
            return;
        }
        let first = self.failure_pause.is_zero();
        self.failure_pause = (self.failure_pause * 2).clamp(Duration::from_millis(50), FAILURE_PAUSE_MAX);
        self.read_at = now + self.failure_pause;
        if first {
            tracing::warn!(code = %fault.code, "The database failed; trying again: {}", fault.detail);
        }
        self.parts.metrics.process_errors.inc();
        self.parts.state.send_modify(|state| state.failing = Some(fault.detail.clone()));
    }

    // ---- orders and events -------------------------------------------------------------------------------------------

    fn obey(&mut self, order: Order, now: Instant) {
        match order {
            Order::Own { fence, lanes, careful } => {
                if self.fence.as_ref() != Some(&fence) {
                    self.idle_written = false;
                    self.fence = Some(fence);
                }
                if self.stopping.is_none() {
                    self.window.own(lanes, careful, now);
                    self.hurry(now);
                }
            }
            Order::Drain(lanes) => {
                let careful = self.window.careful_lanes().intersect(lanes);
                self.window.drain(lanes.minus(careful), now);
                if !careful.is_empty() {
                    let _ = self.parts.reports.send(Report::Careful(careful));
                }
            }
            Order::Lost => self.lost(),
            Order::Recovered => {
                self.window.lap_now(now);
                self.hurry(now);
            }
            Order::Buried(rows) => self.mourn(rows),
            Order::MayKillNoRoute(may) => self.window.set_may_kill_no_route(may),
            Order::Stop { deadline, done } => {
                self.stopping = Some((deadline, done));
                self.window.stop_starting(now);
            }
        }
    }

    fn heed(&mut self, event: Event, now: Instant) {
        match event {
            Event::Published { epoch, .. } if epoch != self.epoch => {}
            Event::Published { destination, id, result, told, .. } => {
                let Some(read_at) = self.window.read_at(id) else { return };
                let metrics = &self.parts.metrics;
                metrics.processing.observe((now - read_at).as_secs_f64());
                let outcome = if matches!(result, Published::Done) { "success" } else { "failure" };
                metrics.destination_messages.with_label_values(&[self.window.name(destination), outcome]).inc();
                if let Some(told) = told {
                    self.told.insert(id, *told);
                }
                self.window.published(id, result, now);
                self.pause = PAUSE_FIRST;
            }
            Event::Probed { destination, result } => {
                self.window.probed(destination, result, now);
                self.hurry(now);
            }
        }
    }

    fn hurry(&mut self, now: Instant) {
        if self.failure_pause.is_zero() {
            self.pause = PAUSE_FIRST;
            self.read_at = now;
        }
    }

    /// The registration is gone: nothing that was started under it may be written.
    fn lost(&mut self) {
        if self.fence.take().is_none() {
            return;
        }
        for publisher in &self.publishers {
            let _ = publisher.send(Command::Abort);
        }
        for (id, published) in self.window.forget_all() {
            self.parts.metrics.claims_lost.with_label_values(&["outbox"]).inc();
            if published {
                tracing::warn!(message_id = %id, "The claim was lost after the publish; the message may be delivered twice.");
            } else {
                tracing::warn!(message_id = %id, "The claim was lost during the publish; the message may be delivered twice.");
            }
        }
        // Outcomes of dropped publishes that are on their way already mean nothing any more.
        self.epoch += 1;
        self.told.clear();
        self.failure_pause = Duration::ZERO;
        self.settles_repeated = false;
        self.idle_written = false;
    }

    // ---- notes -------------------------------------------------------------------------------------------------------

    fn tell(&mut self, now: Instant) {
        let notes = self.window.take_notes();
        if !notes.is_empty() {
            let wall_us = jiff::Timestamp::now().as_microsecond();
            for note in notes {
                self.note(note, wall_us, now);
            }
            self.told.clear();
        }
        if now >= self.last_state + Duration::from_millis(200) {
            self.last_state = now;
            self.publish_state(now);
        }
    }

    fn note(&mut self, note: Note, wall_us: i64, now: Instant) {
        let metrics = &self.parts.metrics;
        match note {
            Note::Sent { destination, id, created_at_us } => {
                let name = self.window.name(destination);
                metrics.outbox_messages.with_label_values(&["sent"]).inc();
                // The wall clock may differ from the database's; a latency is a figure for people, not a decision.
                #[allow(clippy::cast_precision_loss)]
                let latency = (wall_us - created_at_us).max(0) as f64 / 1e6;
                metrics.latency.with_label_values(&[name]).observe(latency);
                metrics.destination_up.with_label_values(&[name]).set(1);
                tracing::debug!(message_id = %id, destination = name, "Delivered.");
                self.show(Status::Sent, id, Some(destination), None, wall_us);
            }
            Note::Failed { destination, id, attempt, error } => {
                metrics.outbox_messages.with_label_values(&["failed"]).inc();
                let name = destination.map_or("", |destination| self.window.name(destination));
                if destination.is_some() {
                    metrics.destination_up.with_label_values(&[name]).set(0);
                }
                tracing::info!(message_id = %id, destination = name, attempt, "Delivery failed, will be tried again: {error}");
                self.show(Status::Failed, id, destination, Some(error), wall_us);
            }
            Note::Dead { destination, id, error } => {
                metrics.outbox_messages.with_label_values(&["dead"]).inc();
                let name = destination.map_or("", |destination| self.window.name(destination));
                tracing::warn!(message_id = %id, destination = name, "The message is dead: {error}");
                self.show(Status::Dead, id, destination, Some(error), wall_us);
            }
            Note::Expanded { id, topic, key, children } => {
                metrics.outbox_messages.with_label_values(&["expanded"]).inc();
                tracing::debug!(message_id = %id, children, "Expanded into one row per destination.");
                // The parent is not in memory any more.
                if self.parts.tail.is_watched() {
                    self.parts.tail.tell(Outcome {
                        topic: Some(topic),
                        key,
                        ..self.outcome(Status::Expanded, id, None, None, wall_us)
                    });
                }
            }
            Note::GateClosed { destination, reason } => {
                let name = self.window.name(destination);
                metrics.destination_up.with_label_values(&[name]).set(0);
                tracing::warn!(destination = name, "Messages for this destination are held: {reason}");
                self.publish_state(now);
            }
            Note::GateOpened { destination } => {
                let name = self.window.name(destination);
                metrics.destination_up.with_label_values(&[name]).set(1);
                tracing::info!(destination = name, "Messages for this destination flow again.");
                self.hurry(now);
                self.publish_state(now);
            }
            Note::Lost { id, published } => {
                metrics.claims_lost.with_label_values(&["outbox"]).inc();
                let text = if published { "after it was published; it may be delivered twice" } else { "meanwhile" };
                tracing::warn!(message_id = %id, "The row was changed by somebody else {text}.");
            }
            Note::KeysFull => tracing::warn!(
                "More than 100,000 keys wait at the same time; reading stops until some of them are done. Bring the failing \
                 destinations back, or discard dead traffic."
            ),
            Note::LaneTrusted { lane } => tracing::debug!(lane, "The lane is at full speed again."),
        }
    }

    /// Tells those who watch.
    fn show(&self, status: Status, id: Uuid, destination: Option<usize>, error: Option<String>, wall_us: i64) {
        if self.parts.tail.is_watched() {
            self.parts.tail.tell(self.outcome(status, id, destination, error, wall_us));
        }
    }

    /// Rows that ended dead of crashes were never in memory here.
    fn mourn(&mut self, rows: Vec<Buried>) {
        if !self.parts.tail.is_watched() {
            return;
        }
        let at_us = jiff::Timestamp::now().as_microsecond();
        for row in rows {
            let destination = self.window.destination_of(&row.topic, row.destination.as_deref());
            self.parts.tail.tell(Outcome {
                at_us,
                status: Status::Dead,
                message_id: row.id,
                topic: Some(row.topic),
                key: row.key,
                destination: destination.or(row.destination),
                attempt: row.attempt,
                created_at_us: Some(row.created_at_us),
                error: Some(row.error),
            });
        }
    }

    fn outcome(
        &self,
        status: Status,
        message_id: Uuid,
        destination: Option<usize>,
        error: Option<String>,
        at_us: i64,
    ) -> Outcome {
        let row = self.window.row(message_id);
        // What was published has its contents in its publish; what never was still has them in memory.
        let (topic, key) = match (self.told.get(&message_id), row) {
            (Some((topic, key)), _) => (Some(topic.clone()), key.clone()),
            (None, Some(row)) if !row.topic.is_empty() => (Some(row.topic.clone()), row.key.clone()),
            (None, _) => (None, None),
        };
        Outcome {
            at_us,
            status,
            message_id,
            topic,
            key,
            destination: destination.map(|destination| self.window.name(destination).to_owned()),
            attempt: row.map_or(0, |row| row.attempt),
            created_at_us: row.map(|row| row.created_at_us),
            error,
        }
    }

    fn publish_state(&mut self, now: Instant) {
        let metrics = &self.parts.metrics;
        let destinations = self.window.destinations();
        for destination in &destinations {
            let label = &[destination.name.as_str()];
            metrics.queue_depth.with_label_values(label).set(i64::try_from(destination.queued).unwrap_or(i64::MAX));
            metrics.breaker.with_label_values(label).set(destination.breaker);
        }
        metrics.walk_age.set(now.saturating_duration_since(self.window.lap_began()).as_secs_f64());
        let failing = self.failure_pause.is_zero();
        let lanes = self.window.active_lanes().len();
        // It looks at every row in memory: once a second is often enough for whoever counts workers.
        let no_route = self.window.no_route_per_minute(now);
        let startable = (now >= self.count_startable_at).then(|| self.window.startable());
        if startable.is_some() {
            self.count_startable_at = now + Duration::from_secs(1);
        }
        self.parts.state.send_modify(|state| {
            state.destinations = destinations;
            state.lanes = lanes;
            state.startable = startable.unwrap_or(state.startable);
            state.no_route_per_minute = no_route;
            if failing {
                state.failing = None;
            }
        });
    }

    // ---- waiting and ending ------------------------------------------------------------------------------------------

    fn wake_at(&self, now: Instant) -> Instant {
        let interval = self.parts.config.outbox.poll_interval.max(Duration::from_millis(1));
        let mut at = now + Duration::from_secs(1);
        if self.operation.is_none() && self.fence.is_some() {
            at = at.min(self.read_at.max(now + Duration::from_micros(200)));
        }
        if let Some(timer) = self.window.next_timer(now) {
            // A timer that has come but cannot act yet must not spin.
            at = at.min(if timer > now { timer } else { now + interval.min(Duration::from_millis(5)) });
        }
        if let Some((deadline, _)) = &self.stopping {
            at = at.min(*deadline);
        }
        at
    }

    fn is_over(&self, now: Instant) -> bool {
        let Some((deadline, _)) = &self.stopping else { return false };
        now >= *deadline
            || self.fence.is_none()
            || (self.operation.is_none() && self.beside.is_none() && self.window.is_quiet())
    }

    fn end(mut self) {
        let unfinished = self.window.unfinished_lanes();
        for publisher in &self.publishers {
            let _ = publisher.send(Command::Abort);
        }
        self.publish_state(Instant::now());
        if let Some((_, done)) = self.stopping.take() {
            let _ = done.send(self.window.careful_lanes().union(self.careful_rested).union(unfinished));
        }
    }
}

async fn finish(operation: &mut Option<Operation>) -> (u64, Done) {
    match operation {
        Some(operation) => (operation.epoch, (&mut operation.answer).await),
        None => std::future::pending().await,
    }
}

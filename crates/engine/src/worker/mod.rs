//! A worker: everything that one process does for one Relay, on one database.
//!
//! ```text
//!             ┌──────── keeper ────────┐  registration, lease, lanes
//!             │ holding          orders│
//!   intakes ──┴─► forward ──nudge──► driver ──► publishers ──► destinations
//!      │             │                  │
//!      └─────────────┴── the database ──┘        recovery, retention, gauges beside them
//! ```
//!
//! Start it with [`Worker::start`], receive through [`Worker::intake`], end it with [`Worker::stop`].

pub mod keeper;
mod share;
mod upkeep;

use std::{sync::Arc, time::Duration};

use queuebox_core::ports::{Intake, Ledger, Scope, Store};
use tokio::{
    sync::{Notify, mpsc, watch},
    task::JoinHandle,
    time::Instant,
};
use tokio_util::sync::CancellationToken;

use self::keeper::{Keeper, KeeperState};
use crate::{
    config::RelayConfig,
    forward,
    ids::Ids,
    inbox_observer::{InboxEvent, InboxObserver},
    intake::{AdmissionLimits, Admissions, IntakeParts, SourceConfig, SourceIntake},
    metrics::Metrics,
    outbox::driver::{self, Driver, DriverState},
    retention::{Retention, TableRetention},
    spans::Tracer,
    tail::Tail,
};

/// What a worker does.
pub struct WorkerConfig {
    /// Identity, outbox, routes, destinations.
    pub relay: Arc<RelayConfig>,
    /// The forward of push rows; `None` = off.
    pub forward: Option<forward::RelayConfig>,
    /// Bounds of the admission queue.
    pub admissions: AdmissionLimits,
    /// What is kept of each table; none = everything.
    pub retention: Vec<(Scope, TableRetention)>,
    /// How often the gauges of the inbox are counted, at most; with the forward off as well.
    pub inbox_gauge_interval: Duration,
    /// Where spans go.
    pub tracer: Tracer,
}

/// What people see of a worker.
#[derive(Debug, Clone, Default)]
pub struct WorkerState {
    /// Registration and lanes.
    pub keeper: KeeperState,
    /// Destinations.
    pub driver: DriverState,
    /// The forward, when it is on.
    pub forward: Option<forward::RelayHealth>,
    /// The last count of the backlog.
    pub backlog: upkeep::Backlog,
    /// Why the last clean-up of a table was given up.
    pub retention_failures: Vec<String>,
}

pub use upkeep::Backlog;

/// A look at a running worker that may be kept while the worker itself is stopped.
#[derive(Clone)]
pub struct WorkerView {
    keeper: watch::Receiver<KeeperState>,
    driver: watch::Receiver<DriverState>,
    forward: Option<watch::Receiver<forward::RelayHealth>>,
    backlog: watch::Receiver<upkeep::Backlog>,
    retention: Vec<watch::Receiver<Option<String>>>,
}

impl WorkerView {
    /// Waits for something new about the registration, the destinations or the database; false = the worker is gone.
    pub async fn changed(&mut self) -> bool {
        tokio::select! {
            keeper = self.keeper.changed() => keeper.is_ok(),
            driver = self.driver.changed() => driver.is_ok(),
        }
    }

    /// A snapshot for health and status.
    pub fn state(&self) -> WorkerState {
        WorkerState {
            keeper: self.keeper.borrow().clone(),
            driver: self.driver.borrow().clone(),
            forward: self.forward.as_ref().map(|forward| forward.borrow().clone()),
            backlog: self.backlog.borrow().clone(),
            retention_failures: self.retention.iter().filter_map(|failure| failure.borrow().clone()).collect(),
        }
    }
}

/// A running worker.
pub struct Worker {
    store: Arc<dyn Store>,
    admissions: Admissions,
    ids: Arc<Ids>,
    metrics: Arc<Metrics>,
    tail: Tail,
    tracer: Tracer,
    stop_at: watch::Sender<Option<Instant>>,
    stop_tasks: CancellationToken,
    view: WorkerView,
    main_tasks: Vec<JoinHandle<()>>,
    side_tasks: Vec<JoinHandle<()>>,
}

impl Worker {
    /// Starts every task. The schema was checked before. `seed` decides names, jitter and ids.
    pub fn start(config: WorkerConfig, store: Arc<dyn Store>, metrics: Arc<Metrics>, seed: u64) -> Self {
        let ids = Arc::new(Ids::new(seed, jiff::Timestamp::now().as_microsecond()));
        let nudge = Arc::new(Notify::new());
        let stored = Arc::new(Notify::new());
        let stop_tasks = CancellationToken::new();
        let observer: Arc<dyn InboxObserver> = metrics.clone();
        let inbox: Arc<dyn queuebox_core::ports::Inbox> = store.clone();
        let admissions = Admissions::start(inbox.clone(), config.admissions, stored.clone());

        let (holding, held) = watch::channel(None);
        let relay = config.forward.map(|forward| {
            let parts = forward::RelayParts {
                inbox,
                holding: held,
                stored,
                forwarded: nudge.clone(),
                ids: ids.clone(),
                observer: observer.clone(),
                tracer: config.tracer.clone(),
                stop: stop_tasks.clone(),
            };
            forward::Relay::new(forward, parts)
        });
        let in_use = relay.as_ref().map_or_else(|| watch::channel(Default::default()).1, forward::Relay::lanes_in_use);
        let forward = relay.as_ref().map(forward::Relay::health);

        let tail = Tail::default();
        let wiring = Wiring {
            relay: config.relay.clone(),
            store: store.clone(),
            metrics: metrics.clone(),
            tail: tail.clone(),
            tracer: config.tracer.clone(),
            seed,
        };
        let (stop_at, stopping) = watch::channel(None);
        let spine = wiring.spine(nudge, holding, in_use, stopping);
        let (backlog, backlog_seen) = watch::channel(upkeep::Backlog::default());
        let upkeep = upkeep::Upkeep {
            relay: config.relay,
            inbox_gauge_interval: config.inbox_gauge_interval,
            store: store.clone(),
            metrics: metrics.clone(),
            keeper: spine.keeper.clone(),
            orders: spine.orders,
            backlog,
            stop: stop_tasks.clone(),
        };
        let mut side_tasks = vec![tokio::spawn(upkeep.run())];
        side_tasks.extend(relay.map(|relay| tokio::spawn(relay.run())));
        let mut retention = Vec::new();
        for (table, keep) in config.retention {
            let (failure, seen) = watch::channel(None);
            retention.push(seen);
            let ledger: Arc<dyn Ledger> = store.clone();
            let (ids, observer, stop) = (ids.clone(), observer.clone(), stop_tasks.clone());
            side_tasks.push(tokio::spawn(Retention { table, keep, ledger, ids, observer, failure, stop }.run()));
        }
        Self {
            store,
            admissions,
            ids,
            metrics,
            tail,
            tracer: config.tracer,
            stop_at,
            stop_tasks,
            view: WorkerView { keeper: spine.keeper, driver: spine.driver, forward, backlog: backlog_seen, retention },
            main_tasks: spine.tasks,
            side_tasks,
        }
    }

    /// The way in of one source.
    pub fn intake(&self, source: SourceConfig) -> Arc<dyn Intake> {
        let observer: Arc<dyn InboxObserver> = self.metrics.clone();
        let parts = IntakeParts {
            ids: self.ids.clone(),
            admissions: self.admissions.clone(),
            observer,
            tracer: self.tracer.clone(),
            stop: self.stop_tasks.clone(),
        };
        Arc::new(SourceIntake::new(source, parts))
    }

    /// What becomes of its messages.
    pub fn tail(&self) -> Tail {
        self.tail.clone()
    }

    /// The database.
    pub fn store(&self) -> &Arc<dyn Store> {
        &self.store
    }

    /// A snapshot for health and status.
    pub fn state(&self) -> WorkerState {
        self.view.state()
    }

    /// A look that outlives the worker.
    pub fn watch(&self) -> WorkerView {
        self.view.clone()
    }

    /// Ends every task where it stands, as a crash would: nothing is settled, nothing is given back.
    pub fn abort(self) {
        for task in self.main_tasks.iter().chain(&self.side_tasks) {
            task.abort();
        }
    }

    /// Ends the worker within `within`: nothing new starts, what is in flight finishes and is settled, lanes are given back. What is
    /// still open then is cut off and left to its lease (contract 12.4).
    pub async fn stop(self, within: Duration) {
        let deadline = Instant::now() + within;
        self.stop_tasks.cancel();
        let _ = self.stop_at.send(Some(deadline));
        let grace = deadline + Duration::from_secs(6);
        for mut task in self.main_tasks.into_iter().chain(self.side_tasks) {
            if tokio::time::timeout_at(grace, &mut task).await.is_err() {
                task.abort();
            }
        }
    }
}

/// Keeper and driver, tied together.
struct Spine {
    orders: mpsc::UnboundedSender<driver::Order>,
    keeper: watch::Receiver<KeeperState>,
    driver: watch::Receiver<DriverState>,
    tasks: Vec<JoinHandle<()>>,
}

struct Wiring {
    relay: Arc<RelayConfig>,
    store: Arc<dyn Store>,
    metrics: Arc<Metrics>,
    tail: Tail,
    tracer: Tracer,
    seed: u64,
}

impl Wiring {
    fn spine(
        self,
        nudge: Arc<Notify>,
        holding: watch::Sender<Option<forward::Holding>>,
        inbox_in_use: watch::Receiver<queuebox_core::LaneSet>,
        stop: watch::Receiver<Option<Instant>>,
    ) -> Spine {
        let (orders_out, orders) = mpsc::unbounded_channel();
        let (reports_out, reports) = mpsc::unbounded_channel();
        let (lease_out, lease) = watch::channel(None);
        let (keeper_out, keeper) = watch::channel(KeeperState::default());
        let (driver_out, driver) = watch::channel(DriverState::default());
        let driver_task = Driver::new(driver::Parts {
            config: self.relay.clone(),
            store: self.store.clone(),
            metrics: self.metrics.clone(),
            tail: self.tail,
            tracer: self.tracer,
            orders,
            reports: reports_out,
            lease,
            nudge,
            state: driver_out,
            seed: self.seed.wrapping_add(1),
        });
        let keeper_task = Keeper::new(keeper::Parts {
            config: self.relay,
            store: self.store,
            metrics: self.metrics,
            orders: orders_out.clone(),
            reports,
            lease: lease_out,
            holding,
            inbox_in_use,
            state: keeper_out,
            stop,
            seed: self.seed,
        });
        Spine {
            orders: orders_out,
            keeper,
            driver,
            tasks: vec![tokio::spawn(keeper_task.run()), tokio::spawn(driver_task.run())],
        }
    }
}

impl InboxObserver for Metrics {
    fn observe(&self, event: &InboxEvent<'_>) {
        let count = |status: &str, rows: u64| self.inbox_messages.with_label_values(&[status]).inc_by(rows);
        match event {
            InboxEvent::Stored => count("new", 1),
            InboxEvent::Duplicate => count("duplicate", 1),
            InboxEvent::Rejected(why) => self.inbox_rejections.with_label_values(&[why.as_str()]).inc(),
            InboxEvent::Filtered { source } => self.inbox_filtered.with_label_values(&[source]).inc(),
            InboxEvent::Forwarded { rows } => count("forwarded", *rows as u64),
            InboxEvent::ForwardFailed { .. } => self.inbox_relay_errors.inc(),
            InboxEvent::ClaimsLost { rows } => self.claims_lost.with_label_values(&["inbox"]).inc_by(*rows as u64),
            InboxEvent::Deleted { table, rows } => {
                self.cleanup_deleted.with_label_values(&[table_name(*table)]).inc_by(*rows);
            }
            InboxEvent::Cleaned { table, took, ended_at_us } => {
                let label = &[table_name(*table)];
                self.cleanup_duration.with_label_values(label).observe(took.as_secs_f64());
                #[allow(clippy::cast_precision_loss)]
                self.cleanup_last.with_label_values(label).set(*ended_at_us as f64 / 1e6);
            }
        }
    }
}

fn table_name(table: Scope) -> &'static str {
    match table {
        Scope::Outbox => "outbox",
        Scope::Inbox => "inbox",
    }
}

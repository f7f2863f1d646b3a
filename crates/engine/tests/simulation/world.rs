//! A world: producers, workers, receivers and trouble, all from one seed; and the oracle that judges what came of it.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use queuebox_core::{
    Fault, Uuid,
    message::State,
    pattern::Pattern,
    ports::{Delivery, Destination, Store},
    retry::RetrySchedule,
};
use queuebox_engine::{
    config::{BreakerConfig, DestinationConfig, OutboxConfig, RelayConfig, Route},
    intake::AdmissionLimits,
    metrics::Metrics,
    worker::{Worker, WorkerConfig},
};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use tokio::{sync::mpsc, time::Instant};

use crate::{
    database::{Database, Row},
    faults::{Sabotage, Weather},
    store::Line,
};

/// A topic that no route takes.
const NO_ROUTE: &str = "none.x";
const LEASE: Duration = Duration::from_secs(6);

/// What a world is made of.
#[derive(Debug, Clone, Copy)]
pub struct Plan {
    pub seed: u64,
    pub workers: usize,
    pub messages: usize,
    pub keys: u32,
    pub lanes: u8,
    /// False: tables below version 14, where rows are claimed.
    pub has_lanes: bool,
    pub fan_out: bool,
    pub batch_size: u32,
    pub max_crashes: i32,
    pub weather: Weather,
    pub sabotage: Sabotage,
}

#[derive(Debug, Clone)]
struct Arrival {
    id: Uuid,
    destination: &'static str,
    key: Option<String>,
    /// Since the world began, as in the trace.
    at: Duration,
}

#[derive(Default)]
struct Log {
    arrivals: Vec<Arrival>,
    requests: HashMap<Uuid, u32>,
    /// Workers that send a message of this key to this destination now.
    in_flight: HashMap<(String, &'static str), Vec<usize>>,
    overlaps: Vec<String>,
    trace: Vec<String>,
}

struct World {
    plan: Plan,
    database: Arc<Database>,
    log: Mutex<Log>,
    calm: Arc<AtomicBool>,
    /// Destinations that cannot be reached until then.
    away: Mutex<HashMap<&'static str, Instant>>,
    began: Instant,
    committed: Mutex<HashSet<Uuid>>,
    rolled_back: Mutex<HashSet<Uuid>>,
    replayed: Mutex<HashSet<Uuid>>,
    /// Rows that were deleted by hand.
    deleted: Mutex<Vec<Row>>,
    /// Messages that kill their worker.
    killers: Mutex<HashSet<Uuid>>,
    /// Numbers of workers that were killed by a message.
    victims: mpsc::UnboundedSender<usize>,
}

impl World {
    fn trace(&self, text: impl FnOnce() -> String) {
        let at = self.began.elapsed();
        self.log.lock().unwrap().trace.push(format!("{:>9.4} {}", at.as_secs_f64(), text()));
    }

    fn is_calm(&self) -> bool {
        self.calm.load(Ordering::SeqCst)
    }
}

struct Receiver {
    name: &'static str,
    worker: usize,
    world: Arc<World>,
    rng: Mutex<StdRng>,
    dead: Arc<AtomicBool>,
}

/// Takes a key out of the table of publishes under way, also when the publish is dropped.
struct Flight<'a> {
    world: &'a World,
    key: (String, &'static str),
    worker: usize,
}

impl Drop for Flight<'_> {
    fn drop(&mut self) {
        if let Some(workers) = self.world.log.lock().unwrap().in_flight.get_mut(&self.key)
            && let Some(place) = workers.iter().position(|worker| *worker == self.worker)
        {
            workers.swap_remove(place);
        }
    }
}

#[async_trait]
impl Destination for Receiver {
    fn kind(&self) -> &'static str {
        "memory"
    }

    async fn publish(&self, delivery: Delivery) -> Result<(), Fault> {
        let _flight = self.takes_off(&delivery);
        let (roll, before, after) = {
            let mut rng = self.rng.lock().unwrap();
            (rng.random_range(0.0..1.0_f64), rng.random_range(200..6_000), rng.random_range(200..6_000))
        };
        if self.world.away.lock().unwrap().get(self.name).is_some_and(|until| Instant::now() < *until) {
            return Err(Fault::not_connected("away", "the broker is away"));
        }
        let weather = if self.world.is_calm() { Weather::CALM } else { self.world.plan.weather };
        *self.world.log.lock().unwrap().requests.entry(delivery.id).or_default() += 1;
        if self.world.plan.sabotage == Sabotage::MarkBeforeSend && roll < 0.2 {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_micros(before)).await;
        if roll < weather.publish_fails {
            return Err(Fault::transient("refused", "connection refused").tripping());
        }
        if self.world.killers.lock().unwrap().contains(&delivery.id) && !self.dead.swap(true, Ordering::SeqCst) {
            self.world.trace(|| format!("{} kills worker {}", short(delivery.id), self.worker));
            let _ = self.world.victims.send(self.worker);
        }
        if self.dead.load(Ordering::SeqCst) {
            std::future::pending::<()>().await;
        }
        self.arrives(&delivery);
        tokio::time::sleep(Duration::from_micros(after)).await;
        let roll = roll - weather.publish_fails;
        if roll < weather.answer_lost {
            return Err(Fault::ambiguous("lost", "the answer was lost").tripping());
        }
        if roll - weather.answer_lost < weather.publish_hangs {
            tokio::time::sleep(Duration::from_secs(8)).await;
            return Err(Fault::ambiguous("timeout", "no answer in time").tripping());
        }
        Ok(())
    }

    async fn probe(&self) -> Result<(), Fault> {
        tokio::time::sleep(Duration::from_millis(2)).await;
        match self.world.away.lock().unwrap().get(self.name) {
            Some(until) if Instant::now() < *until => Err(Fault::not_connected("away", "the broker is away")),
            _ => Ok(()),
        }
    }
}

impl Receiver {
    fn takes_off(&self, delivery: &Delivery) -> Option<Flight<'_>> {
        let key = (delivery.key.clone()?, self.name);
        let mut log = self.world.log.lock().unwrap();
        let workers = log.in_flight.entry(key.clone()).or_default();
        let keeps_leases = self.world.plan.weather.keeps_leases();
        let other = workers.iter().copied().find(|worker| keeps_leases || *worker == self.worker);
        workers.push(self.worker);
        if let Some(other) = other.filter(|_| !self.dead.load(Ordering::SeqCst)) {
            let text = format!(
                "OVERLAP: {} of key {} leaves for {} from worker {}, while another one is on its way from worker {other} ({:?})",
                short(delivery.id),
                key.0,
                key.1,
                self.worker,
                self.world.began.elapsed()
            );
            log.overlaps.push(text);
        }
        Some(Flight { world: &self.world, key, worker: self.worker })
    }

    fn arrives(&self, delivery: &Delivery) {
        let arrival = Arrival {
            id: delivery.id,
            destination: self.name,
            key: delivery.key.clone(),
            at: self.world.began.elapsed(),
        };
        self.world.trace(|| format!("{} arrives at {} from worker {}", short(delivery.id), self.name, self.worker));
        self.world.log.lock().unwrap().arrivals.push(arrival);
    }
}

pub fn short(id: Uuid) -> String {
    id.simple().to_string()[24..].to_owned()
}

struct Process {
    number: usize,
    worker: Worker,
    dead: Arc<AtomicBool>,
}

fn start(world: &Arc<World>, number: usize, incarnation: u64) -> Process {
    let seed = world.plan.seed.wrapping_mul(1_000_003).wrapping_add(number as u64 * 101 + incarnation * 10_007);
    let dead = Arc::new(AtomicBool::new(false));
    let line = Line::new(world.database.clone(), world.plan.weather, seed, world.calm.clone(), dead.clone());
    let store: Arc<dyn Store> = Arc::new(line);
    let destination = |name: &'static str, breaker| {
        let port = Receiver {
            name,
            worker: number,
            world: world.clone(),
            rng: Mutex::new(StdRng::seed_from_u64(seed ^ name.len() as u64)),
            dead: dead.clone(),
        };
        let config = DestinationConfig {
            port: Arc::new(port),
            paused: false,
            max_in_flight: 16,
            rate: None,
            schedule: RetrySchedule {
                initial: Duration::from_millis(200),
                max: Duration::from_secs(2),
                retry_after_max: Duration::ZERO,
            },
            breaker,
            transform: None,
        };
        (name.to_owned(), config)
    };
    let route = |topic: &str, destinations: &[&str]| Route {
        topics: vec![Pattern::parse(topic).unwrap()],
        destinations: destinations.iter().map(|name| (*name).to_owned()).collect(),
        transform: None,
        routing_key: None,
    };
    let breaker = BreakerConfig { failures: 5, open_for: Duration::from_secs(1) };
    let relay = RelayConfig {
        relay_uid: "relay".to_owned(),
        config_version: "1/same".to_owned(),
        worker_name: format!("worker-{number}"),
        outbox: OutboxConfig {
            batch_size: world.plan.batch_size,
            max_in_flight: 32,
            lease: LEASE,
            max_crashes: world.plan.max_crashes,
            ..OutboxConfig::default()
        },
        routes: vec![route("a.*", &["east"]), route("b.*", &["south"]), route("both.*", &["east", "south"])],
        destinations: BTreeMap::from([destination("east", Some(breaker)), destination("south", None)]),
        drain_timeout: Duration::from_secs(10),
    };
    let config = WorkerConfig {
        relay: Arc::new(relay),
        forward: None,
        admissions: AdmissionLimits::default(),
        retention: Vec::new(),
        inbox_gauge_interval: Duration::from_secs(5),
        tracer: None,
    };
    let worker = Worker::start(config, store, Arc::new(Metrics::new("sim").unwrap()), seed);
    Process { number, worker, dead }
}

/// Inserts rows in transactions that take their time, come out of order, and sometimes roll back. Each key has one writer.
async fn produce(world: Arc<World>, writer: usize, writers: usize) {
    let mut rng = StdRng::seed_from_u64(world.plan.seed ^ (writer as u64 + 77));
    let share = world.plan.messages / writers;
    let mut written = 0;
    while written < share {
        let count = rng.random_range(1..=4).min(share - written);
        let mut rows = Vec::new();
        for _ in 0..count {
            rows.push(new_row(&world, &mut rng, writer, writers));
            tokio::time::sleep(Duration::from_micros(rng.random_range(10..2_000))).await;
        }
        tokio::time::sleep(Duration::from_micros(rng.random_range(0..60_000))).await;
        let ids = rows.iter().map(|row| row.id);
        if rng.random_bool(0.1) {
            world.rolled_back.lock().unwrap().extend(ids);
        } else {
            world.committed.lock().unwrap().extend(ids);
            name_killers(&world, &rows, &mut rng);
            world.trace(|| {
                let texts: Vec<_> = rows
                    .iter()
                    .map(|row| {
                        format!(
                            "{}#{}({} {} +{}us)",
                            short(row.id),
                            row.sequence,
                            row.key.as_deref().unwrap_or("-"),
                            row.topic,
                            row.scheduled_at - row.created_at
                        )
                    })
                    .collect();
                format!("commit {}", texts.join(" "))
            });
            world.database.commit(rows);
        }
        written += count;
        if rng.random_bool(0.2) {
            tokio::time::sleep(Duration::from_millis(rng.random_range(0..800))).await;
        }
    }
}

/// Some of the first messages are of the kind that kills.
fn name_killers(world: &World, rows: &[Row], rng: &mut StdRng) {
    let mut killers = world.killers.lock().unwrap();
    for row in rows.iter().filter(|row| row.topic != "both.x") {
        if killers.len() < world.plan.weather.killers as usize && rng.random_bool(0.1) {
            killers.insert(row.id);
        }
    }
}

fn new_row(world: &World, rng: &mut StdRng, writer: usize, writers: usize) -> Row {
    let now = world.database.now();
    let keys = u64::from(world.plan.keys);
    // A hot key in each writer's share, some cold ones, and rows without a key.
    let own = |number: u64| format!("k{}", number * writers as u64 + writer as u64);
    let key = match rng.random_range(0..10) {
        0 => None,
        1 => Some(String::new()),
        2..=5 => Some(own(0)),
        _ => Some(own(rng.random_range(0..keys))),
    };
    let topic = match rng.random_range(0..10) {
        _ if rng.random_bool(0.02) => NO_ROUTE,
        0..=4 => "a.x",
        5..=7 => "b.x",
        _ if world.plan.fan_out => "both.x",
        _ => "a.y",
    };
    let delay = if rng.random_bool(0.05) { rng.random_range(0..3_000_000) } else { 0 };
    Row {
        id: uuid::Builder::from_random_bytes(rng.random()).into_uuid(),
        sequence: world.database.draw_sequence(),
        topic: topic.to_owned(),
        key: key.filter(|key| !key.is_empty()),
        destination: None,
        parent_id: None,
        state: State::Pending,
        attempt: 0,
        max_attempts: 1000,
        crashes: 0,
        scheduled_at: now + delay,
        created_at: now,
        token: None,
        lease: None,
        error: None,
    }
}

/// Kills, stops, outages, clock jumps and replays, spread over the run.
async fn trouble(world: Arc<World>, processes: Arc<tokio::sync::Mutex<Vec<Process>>>, over: Duration) {
    let weather = world.plan.weather;
    let mut rng = StdRng::seed_from_u64(world.plan.seed ^ 0xdead);
    let mut events: Vec<(Duration, u8)> = Vec::new();
    let kinds = [
        (weather.kills, 0),
        (weather.stops, 1),
        (weather.clock_jumps, 2),
        (weather.outages, 3),
        (weather.replays, 4),
        (weather.edits, 5),
    ];
    for (count, kind) in kinds {
        for _ in 0..count {
            events.push((over.mul_f64(rng.random_range(0.0..1.0)), kind));
        }
    }
    events.sort();
    let begun = Instant::now();
    for (number, (at, kind)) in events.into_iter().enumerate() {
        tokio::time::sleep_until(begun + at).await;
        match kind {
            0 | 1 => replace_worker(&world, &processes, kind == 0, number as u64 + 1, &mut rng).await,
            2 => {
                let jump: i64 = rng.random_range(-4_000_000..8_000_000);
                world.trace(|| format!("the database's clock jumps by {jump} us"));
                world.database.skew_us.fetch_add(jump, Ordering::SeqCst);
            }
            3 => {
                let name = if rng.random_bool(0.5) { "east" } else { "south" };
                let until = Instant::now() + Duration::from_millis(rng.random_range(100..5_000));
                world.trace(|| format!("{name} is away"));
                world.away.lock().unwrap().insert(name, until);
            }
            4 => replay(&world, &mut rng),
            _ => edit(&world, &mut rng),
        }
    }
}

/// Starts a worker in the place of each one that a message has killed.
async fn bury(
    world: Arc<World>,
    processes: Arc<tokio::sync::Mutex<Vec<Process>>>,
    mut victims: mpsc::UnboundedReceiver<usize>,
) {
    let mut deaths = 0;
    while let Some(victim) = victims.recv().await {
        deaths += 1;
        let mut processes = processes.lock().await;
        let Some(index) = processes.iter().position(|process| process.number == victim) else { continue };
        let fresh = start(&world, 100_000 + deaths, deaths as u64);
        std::mem::replace(&mut processes[index], fresh).worker.abort();
    }
}

async fn replace_worker(
    world: &Arc<World>,
    processes: &tokio::sync::Mutex<Vec<Process>>,
    kill: bool,
    incarnation: u64,
    rng: &mut StdRng,
) {
    let mut processes = processes.lock().await;
    let index = rng.random_range(0..processes.len());
    world.trace(|| format!("worker {index} is {}", if kill { "killed" } else { "stopped" }));
    let fresh = start(world, index + 10 * usize::try_from(incarnation).unwrap(), incarnation);
    let old = std::mem::replace(&mut processes[index], fresh);
    drop(processes);
    if kill {
        old.dead.store(true, Ordering::SeqCst);
        old.worker.abort();
    } else {
        old.worker.stop(Duration::from_secs(10)).await;
    }
}

fn replay(world: &World, rng: &mut StdRng) {
    let now = world.database.now();
    let mut tables = world.database.lock();
    let finished: Vec<Uuid> = tables
        .rows
        .values()
        .filter(|row| row.state == State::Sent && row.topic != "both.x")
        .map(|row| row.id)
        .collect();
    if finished.is_empty() {
        return;
    }
    let id = finished[rng.random_range(0..finished.len())];
    if let Some(row) = tables.find(id) {
        row.state = State::Pending;
        row.attempt = 0;
        row.crashes = 0;
        row.scheduled_at = now;
        world.replayed.lock().unwrap().insert(id);
    }
    drop(tables);
    world.trace(|| format!("{} is replayed", short(id)));
}

/// Somebody moves the time of a pending row, or deletes one.
fn edit(world: &World, rng: &mut StdRng) {
    let mut tables = world.database.lock();
    let is_own = |row: &&Row| row.state == State::Pending && row.topic != "both.x";
    let pending: Vec<Uuid> = tables.rows.values().filter(is_own).map(|row| row.id).collect();
    if pending.is_empty() {
        return;
    }
    let id = pending[rng.random_range(0..pending.len())];
    let is_killer = world.killers.lock().unwrap().contains(&id);
    if rng.random_bool(0.3) && !is_killer {
        world.deleted.lock().unwrap().extend(tables.remove(id));
        drop(tables);
        return world.trace(|| format!("{} is deleted", short(id)));
    }
    let by_us = rng.random_range(-1_000_000..3_000_000);
    if let Some(row) = tables.find(id) {
        row.scheduled_at += by_us;
    }
    drop(tables);
    world.trace(|| format!("{} is moved by {by_us} us", short(id)));
}

/// Runs a world; returns what the oracle found wrong, with the trace.
pub async fn run(plan: Plan) -> Result<Summary, String> {
    let (victims, dying) = mpsc::unbounded_channel();
    let world = Arc::new(World {
        plan,
        database: Database::new(plan.lanes, plan.has_lanes, plan.sabotage),
        log: Mutex::default(),
        calm: Arc::new(AtomicBool::new(false)),
        away: Mutex::default(),
        began: Instant::now(),
        committed: Mutex::default(),
        rolled_back: Mutex::default(),
        replayed: Mutex::default(),
        deleted: Mutex::default(),
        killers: Mutex::default(),
        victims,
    });
    if plan.weather.held {
        world.away.lock().unwrap().insert("south", world.began + Duration::from_secs(86_400));
    }
    let processes: Vec<Process> = (0..plan.workers).map(|number| start(&world, number, 0)).collect();
    let processes = Arc::new(tokio::sync::Mutex::new(processes));
    let burying = tokio::spawn(bury(world.clone(), processes.clone(), dying));
    let writers = 3;
    let mut tasks: Vec<_> = (0..writers).map(|writer| tokio::spawn(produce(world.clone(), writer, writers))).collect();
    tasks.push(tokio::spawn(trouble(world.clone(), processes.clone(), Duration::from_secs(12))));
    for task in tasks {
        task.await.map_err(|error| format!("the world itself failed: {error}"))?;
    }
    let mut wrong = Vec::new();
    if plan.weather.held && !flows_past_held(&world).await {
        wrong.push("a message waited for a destination that is not its own".to_owned());
    }
    world.calm.store(true, Ordering::SeqCst);
    world.away.lock().unwrap().clear();
    world.trace(|| "calm".to_owned());
    let finished = settle_down(&world).await;
    // A fresh message flows again.
    let fresh = new_row(&world, &mut StdRng::seed_from_u64(1), 0, writers);
    let fresh = Row { scheduled_at: fresh.created_at, ..fresh };
    world.committed.lock().unwrap().insert(fresh.id);
    world.database.commit(vec![fresh]);
    let flows = settle_down(&world).await;
    burying.abort();
    wrong.extend(judge(&world));
    if !finished || !flows {
        wrong.push("not everything was finished in ten minutes without faults".to_owned());
    }
    for process in processes.lock().await.drain(..) {
        process.worker.abort();
    }
    let log = world.log.lock().unwrap();
    if wrong.is_empty() {
        return Ok(Summary { arrivals: log.arrivals.len(), committed: world.committed.lock().unwrap().len() });
    }
    Err(format!("{}\n--- trace\n{}", wrong.join("\n"), log.trace.join("\n")))
}

/// What happened in a world that is all right.
#[derive(Debug)]
pub struct Summary {
    pub arrivals: usize,
    pub committed: usize,
}

/// A message with a key of its own, to the destination that is there, while the other one is away.
async fn flows_past_held(world: &World) -> bool {
    let row = new_row(world, &mut StdRng::seed_from_u64(2), 0, 1);
    let row = Row { key: Some("fresh".to_owned()), topic: "a.x".to_owned(), scheduled_at: row.created_at, ..row };
    let id = row.id;
    world.committed.lock().unwrap().insert(id);
    world.database.commit(vec![row]);
    for _ in 0..1_200 {
        if world.database.lock().find(id).is_some_and(|row| row.state == State::Sent) {
            return true;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    false
}

async fn settle_down(world: &World) -> bool {
    for _ in 0..6_000 {
        let is_open = |state: State| matches!(state, State::Pending | State::Processing);
        if !world.database.lock().rows.values().any(|row| is_open(row.state)) {
            return true;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    false
}

fn judge(world: &World) -> Vec<String> {
    let tables = world.database.lock();
    let mut wrong = tables.breaches.clone();
    let log = world.log.lock().unwrap();
    let replayed = world.replayed.lock().unwrap();
    let mut count: HashMap<(Uuid, &str), u32> = HashMap::new();
    for arrival in &log.arrivals {
        *count.entry((arrival.id, arrival.destination)).or_default() += 1;
    }
    for row in tables.rows.values() {
        let is_parent = row.topic == "both.x" && row.destination.is_none();
        let expected = match (&row.destination, row.topic.as_str()) {
            (Some(name), _) => name.as_str(),
            (None, "b.x") => "south",
            _ => "east",
        };
        let arrived = count.get(&(row.id, expected)).copied().unwrap_or(0);
        match row.state {
            State::Sent if is_parent => {
                let children = tables.rows.values().filter(|child| child.parent_id == Some(row.id)).count();
                if children != 2 {
                    wrong.push(format!("parent {} has {children} children", short(row.id)));
                }
            }
            State::Sent if arrived == 0 => wrong.push(format!("LOST: {} is sent but never arrived", short(row.id))),
            State::Sent => {}
            State::Dead
                if world.killers.lock().unwrap().contains(&row.id)
                    && row.error.as_ref().is_some_and(|error| error.starts_with("crashes:")) => {}
            State::Dead
                if row.topic == NO_ROUTE && row.error.as_ref().is_some_and(|error| error.starts_with("no_route:")) => {}
            State::Dead => wrong.push(format!("{} is dead: {:?}", short(row.id), row.error)),
            other => wrong.push(format!("{} is still {other:?}", short(row.id))),
        }
        if arrived > 1 && !world.plan.weather.allows_duplicates() && !replayed.contains(&row.id) {
            wrong.push(format!("DUPLICATE: {} arrived {arrived} times without a cause", short(row.id)));
        }
    }
    for arrival in &log.arrivals {
        if world.rolled_back.lock().unwrap().contains(&arrival.id) {
            wrong.push(format!("INVENTED: {} was rolled back and arrived", short(arrival.id)));
        }
    }
    let deleted = world.deleted.lock().unwrap();
    let rows: Vec<Row> = tables.rows.values().chain(deleted.iter()).cloned().collect();
    judge_order(&rows, &log.arrivals, &mut wrong);
    for id in replayed.iter().filter(|id| !deleted.iter().any(|row| row.id == **id)) {
        if log.arrivals.iter().filter(|arrival| arrival.id == *id).count() < 2 {
            wrong.push(format!("the replay of {} did nothing", short(*id)));
        }
    }
    wrong.extend(log.overlaps.iter().cloned());
    wrong
}

/// When a message of a key arrives at a destination, each earlier message of that key for it has arrived before.
fn judge_order(rows: &[Row], arrivals: &[Arrival], wrong: &mut Vec<String>) {
    let sequences: HashMap<Uuid, i64> = rows.iter().map(|row| (row.id, row.sequence)).collect();
    let mut by_key: HashMap<(String, &str), Vec<&Arrival>> = HashMap::new();
    for arrival in arrivals {
        if let Some(key) = &arrival.key {
            by_key.entry((key.clone(), arrival.destination)).or_default().push(arrival);
        }
    }
    for ((key, destination), arrivals) in by_key {
        let mut seen: HashSet<i64> = HashSet::new();
        let mut all: Vec<i64> =
            arrivals.iter().map(|arrival| sequences.get(&arrival.id).copied().unwrap_or(0)).collect();
        all.sort_unstable();
        all.dedup();
        for arrival in arrivals {
            let sequence = sequences.get(&arrival.id).copied().unwrap_or(0);
            let missing = all.iter().find(|earlier| **earlier < sequence && !seen.contains(*earlier));
            if let Some(earlier) = missing {
                wrong.push(format!(
                    "ORDER: {}#{sequence} of key {key} arrived at {destination} before #{earlier} ({:?})",
                    short(arrival.id),
                    arrival.at
                ));
            }
            seen.insert(sequence);
        }
    }
}

//! What a window asks of a table: a row that is read twice costs twice, and no other test would notice.

use std::collections::BTreeMap;

use async_trait::async_trait;
use bytes::Bytes;
use queuebox_core::{
    pattern::Pattern,
    ports::{Delivery, Destination},
    retry::RetrySchedule,
};

use super::*;
use crate::config::Route;

/// Fewer than a poll may read: the destination is what limits.
const DELIVERED_PER_POLL: usize = 200;

/// Nothing is published here: the test answers for it.
struct Nowhere;

#[async_trait]
impl Destination for Nowhere {
    fn kind(&self) -> &'static str {
        "null"
    }

    async fn publish(&self, _: Delivery) -> Result<(), Fault> {
        Ok(())
    }

    async fn probe(&self) -> Result<(), Fault> {
        Ok(())
    }
}

fn relay() -> RelayConfig {
    let destination = |name: &str, paused| {
        let schedule = RetrySchedule {
            initial: Duration::from_secs(1),
            max: Duration::from_secs(1),
            retry_after_max: Duration::ZERO,
        };
        let config = DestinationConfig {
            port: Arc::new(Nowhere),
            paused,
            max_in_flight: 64,
            rate: None,
            schedule,
            breaker: None,
            transform: None,
        };
        (name.to_owned(), config)
    };
    let route = |topic: &str| Route {
        topics: vec![Pattern::parse(topic).unwrap()],
        destinations: vec![topic.to_owned()],
        transform: None,
        routing_key: None,
    };
    RelayConfig {
        relay_uid: "relay".to_owned(),
        config_version: "1/same".to_owned(),
        worker_name: "worker".to_owned(),
        outbox: OutboxConfig::default(),
        routes: vec![route("open"), route("paused")],
        destinations: BTreeMap::from([destination("open", false), destination("paused", true)]),
        drain_timeout: Duration::from_secs(1),
    }
}

/// The pending rows, by sequence, and how often a payload for the open destination was read.
#[derive(Default)]
struct Table {
    pending: BTreeMap<i64, OutboxRow>,
    loaded: usize,
}

impl Table {
    fn insert(&mut self, topic: &str, key: String) {
        let sequence = i64::try_from(self.pending.len()).unwrap() + 1;
        let row = OutboxRow {
            id: Uuid::from_u128(sequence.unsigned_abs().into()),
            sequence,
            lane: 0,
            topic: topic.to_owned(),
            key: Some(key),
            destination: None,
            parent_id: None,
            payload: Payload::Loaded(Bytes::from_static(b"{}")),
            headers: "{}".to_owned(),
            aggregate_type: None,
            trace_parent: None,
            attempt: 0,
            max_attempts: 5,
            crashes: 0,
            scheduled_at: 0,
            due_in_us: 0,
            created_at_us: 0,
        };
        self.pending.insert(sequence, row);
    }

    fn answer(&mut self, read: &Read) -> Polled {
        let place = |position: Option<Position>| position.map_or(i64::MIN, |at| at.sequence);
        let walked = place(read.walk_after);
        let free = |row: &&OutboxRow| !read.exclude.contains(&row.id);
        let rows = |limit: u32| usize::try_from(limit).unwrap();
        let walk = self.pending.values().filter(|row| row.sequence > walked).filter(free).take(rows(read.walk_limit));
        let mut walk: Vec<OutboxRow> = walk.cloned().collect();
        for row in &mut walk {
            if read.omit_topics.contains(&row.topic) {
                row.payload = Payload::Omitted;
            }
        }
        // Nothing commits late here; a step over everything is asked for with a place.
        let behind = self
            .pending
            .values()
            .filter(|row| read.lap_after.is_some_and(|after| row.sequence > after.sequence) && row.sequence <= walked);
        let lap = behind.filter(free).take(rows(read.lap_limit));
        let lap: Vec<_> = lap.map(|row| OutboxRow { payload: Payload::Omitted, ..row.clone() }).collect();
        let mut keys = Vec::new();
        for asked in &read.keys {
            let of_key = self.pending.values().filter(|row| row.key.as_ref() == Some(&asked.key));
            keys.extend(of_key.filter(free).take(rows(read.key_limit)).cloned());
        }
        let is_loaded = |row: &&OutboxRow| row.topic == "open" && matches!(row.payload, Payload::Loaded(_));
        self.loaded += walk.iter().chain(&keys).filter(is_loaded).count();
        Polled {
            walk_ended: walk.len() < rows(read.walk_limit),
            lap_ended: lap.len() < rows(read.lap_limit),
            walk,
            lap,
            keys,
            ..Polled::default()
        }
    }

    /// Polls until everything for the open destination is delivered, which takes longer than to read it.
    fn drain(&mut self) -> usize {
        let mut now = Instant::now();
        let mut window = Window::new(&relay(), 64, false, 1, now);
        window.own(LaneSet::first(64), LaneSet::EMPTY, now);
        let (mut polls, mut in_flight) = (0, VecDeque::new());
        while self.pending.values().any(|row| row.topic == "open") {
            polls += 1;
            assert!(polls < 100_000, "{} rows are left", self.pending.len());
            now += Duration::from_millis(1);
            let settles = window.take_settles(2_000);
            for settle in &settles {
                self.pending.remove(&settle.position.sequence);
            }
            let planned = window.plan_read(false, now);
            window.settled(settles, &[], false, now);
            if let Some((read, asked)) = planned {
                let polled = self.answer(&read);
                window.absorb(&asked, polled, now);
            }
            let mut budget = DELIVERED_PER_POLL;
            while budget > 0 {
                in_flight.extend(window.start(now).into_iter().map(|start| start.row.id));
                let Some(id) = in_flight.pop_front() else { break };
                window.published(id, Published::Done, now);
                budget -= 1;
            }
        }
        polls
    }
}

#[test]
fn beside_a_held_destination_the_rows_of_the_others_are_read_once() {
    let mut table = Table::default();
    for number in 0..20_000 {
        if number % 10 == 0 {
            table.insert("paused", format!("held-{}", number % 900));
        } else {
            table.insert("open", format!("k{}", number % 1_000));
        }
    }
    table.drain();
    assert_eq!(table.loaded, 18_000);
}

#[test]
fn a_hot_key_is_read_about_once_although_the_walk_passes_it() {
    let mut table = Table::default();
    for _ in 0..20_000 {
        table.insert("open", "hot".to_owned());
    }
    table.drain();
    assert!(table.loaded < 22_000, "{} payloads were read for 20,000 messages", table.loaded);
}

#[test]
fn keys_behind_a_hot_one_are_reached_while_it_is_worked() {
    let mut table = Table::default();
    for _ in 0..50_000 {
        table.insert("open", "hot".to_owned());
    }
    table.insert("paused", "held".to_owned());
    table.insert("open", "cold".to_owned());
    let cold = 50_002;
    let mut now = Instant::now();
    let mut window = Window::new(&relay(), 64, false, 1, now);
    window.own(LaneSet::first(64), LaneSet::EMPTY, now);
    // The hot key's destination answers nobody: only the walk can get by.
    let started = (0..2_000).any(|_| {
        now += Duration::from_millis(1);
        if let Some((read, asked)) = window.plan_read(false, now) {
            let polled = table.answer(&read);
            window.absorb(&asked, polled, now);
        }
        window.start(now).iter().any(|start| start.row.sequence == cold)
    });
    assert!(started, "the key behind the hot one never started");
}

#[test]
fn a_lap_is_a_small_part_of_the_polls_however_long_its_steps_take() {
    const STEP: Duration = Duration::from_millis(10);
    let mut table = Table::default();
    for number in 0..20_000 {
        table.insert("paused", format!("held-{}", number % 900));
    }
    let mut now = Instant::now();
    let mut window = Window::new(&relay(), 64, false, 1, now);
    window.own(LaneSet::first(64), LaneSet::EMPTY, now);
    let began = now;
    let (mut steps, mut beside) = (0, Duration::ZERO);
    while now < began + Duration::from_secs(20) {
        let planned = window.plan_read(false, now);
        let is_step = planned.as_ref().is_some_and(|(_, asked)| asked.part == LapPart::Everything);
        let took = if is_step { STEP } else { Duration::from_millis(1) };
        now += took;
        if is_step {
            steps += 1;
        } else if window.lap_after.is_some() {
            beside += took;
        }
        if let Some((read, asked)) = planned {
            let polled = table.answer(&read);
            window.absorb(&asked, polled, now);
        }
    }
    assert!(steps >= 40, "two laps of twenty steps and more: {steps}");
    // The last step of a lap has nothing of the lap behind it.
    assert!(beside >= STEP * steps * 7, "{steps} steps of {STEP:?}, {beside:?} between them");
}

// ---------------------------------------------------------------------------------------------------------- the probe

/// A window whose open destination has a breaker that opens at the first failure, for a second; rows of many keys, all in memory.
fn breaking() -> (Window, Instant) {
    let mut config = relay();
    if let Some(open) = config.destinations.get_mut("open") {
        open.breaker = Some(crate::config::BreakerConfig { failures: 1, open_for: Duration::from_secs(1) });
    }
    let mut table = Table::default();
    for number in 0..6 {
        table.insert("open", format!("k{number}"));
    }
    let now = Instant::now();
    let mut window = Window::new(&config, 64, false, 1, now);
    window.own(LaneSet::first(64), LaneSet::EMPTY, now);
    feed(&mut window, &table, now);
    (window, now)
}

fn feed(window: &mut Window, table: &Table, now: Instant) {
    let mut table = Table { pending: table.pending.clone(), loaded: 0 };
    if let Some((read, asked)) = window.plan_read(true, now) {
        let polled = table.answer(&read);
        window.absorb(&asked, polled, now);
    }
}

fn six_rows() -> Table {
    let mut table = Table::default();
    for number in 0..6 {
        table.insert("open", format!("k{number}"));
    }
    table
}

fn failure() -> Published {
    Published::Failed(Fault::transient("http_status", "503").tripping())
}

/// After the pause: reads, and starts the probe.
fn probe(window: &mut Window, now: Instant) -> Uuid {
    feed(window, &six_rows(), now);
    let started: Vec<Uuid> = window.start(now).iter().map(|start| start.row.id).collect();
    assert_eq!(started.len(), 1, "one row probes");
    started[0]
}

#[test]
fn a_probe_whose_transform_fails_leaves_its_place_to_another_row() {
    let (mut window, mut now) = breaking();
    let started = window.start(now);
    for start in &started {
        window.published(start.row.id, failure(), now);
    }
    let settles = window.take_settles(100);
    window.settled(settles, &[], false, now);
    now += Duration::from_secs(3);
    let first = probe(&mut window, now);
    window.published(first, Published::TransformDead("no such field".to_owned()), now);
    let settles = window.take_settles(100);
    assert!(matches!(settles[0].outcome, Outcome::Dead { .. }));
    window.settled(settles, &[], false, now);
    let second = probe(&mut window, now);
    assert_ne!(first, second);
    window.published(second, Published::Done, now);
    assert_eq!(window.destinations()[0].breaker, 0, "the gate is open");
}

#[test]
fn what_was_under_way_when_the_gate_closed_is_no_probe() {
    let (mut window, mut now) = breaking();
    let started: Vec<Uuid> = window.start(now).iter().map(|start| start.row.id).collect();
    assert_eq!(started.len(), 6);
    for id in &started[..5] {
        window.published(*id, failure(), now);
    }
    let settles = window.take_settles(100);
    window.settled(settles, &[], false, now);
    now += Duration::from_secs(3);
    let probe = probe(&mut window, now);
    // A late failure of the sixth: an attempt like any other, and nothing about the probe.
    window.published(started[5], failure(), now);
    let settles = window.take_settles(100);
    assert!(matches!(settles.as_slice(), [Settle { outcome: Outcome::Retry { .. }, .. }]), "{settles:?}");
    assert_eq!(window.destinations()[0].breaker, 1, "the probe is still awaited");
    window.published(probe, failure(), now);
    assert!(window.take_settles(100).is_empty(), "a failed probe costs no attempt");
    assert_eq!(window.destinations()[0].breaker, 2);
}

// ------------------------------------------------------------------------------------------------------------ put off

#[test]
fn a_row_that_the_database_refuses_is_tried_again_with_growing_pauses_and_holds_its_key_only() {
    let mut now = Instant::now();
    let mut window = Window::new(&relay(), 64, false, 1, now);
    window.own(LaneSet::first(64), LaneSet::EMPTY, now);
    feed(&mut window, &six_rows(), now);
    let started: Vec<Uuid> = window.start(now).iter().map(|start| start.row.id).collect();
    for id in &started {
        window.published(*id, failure(), now);
    }
    let mut settles = window.take_settles(1);
    let mut pauses = Vec::new();
    for _ in 0..12 {
        let settle = settles.pop().unwrap();
        let pause = window.put_off_settle(settle, now);
        pauses.push(pause.as_millis());
        let others = window.take_settles(100);
        window.settled(others, &[], false, now);
        now += pause;
        window.tick(now);
        settles = window.take_settles(100);
        assert_eq!(settles.len(), 1, "it comes again, and nothing else");
    }
    assert_eq!(pauses[..4], [100, 200, 400, 800]);
    assert_eq!(pauses[11], 30_000);
    window.settled(settles, &[], false, now);
    assert!(window.put_off.is_empty() && window.setbacks.is_empty());
}

/// A lane that is given away must come to rest, whatever the database refuses.
#[test]
fn lanes_move_although_a_row_of_them_cannot_be_written() {
    let now = Instant::now();
    let mut window = Window::new(&relay(), 64, false, 1, now);
    window.own(LaneSet::first(64), LaneSet::EMPTY, now);
    feed(&mut window, &six_rows(), now);
    let id = window.start(now)[0].row.id;
    window.published(id, Published::Done, now);
    let settle = window.take_settles(1).remove(0);
    window.put_off_settle(settle, now);
    window.drain(LaneSet::first(1), now);
    assert!(!window.rows.contains_key(&id));
    assert!(window.take_notes().contains(&Note::Lost { id, published: true }), "whoever gets it sends it again");
}

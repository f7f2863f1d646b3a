//! The relay.

use std::{
    collections::HashMap,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use queuebox_core::{
    Fault, LaneSet, Uuid,
    message::{Consumption, NewInboxRow, State},
    ports::Fence,
    template::{Template, Vocabulary},
};
use queuebox_engine::{
    forward::{Holding, Relay, RelayConfig, RelayParts},
    ids::Ids,
};
use tokio::{
    sync::{Notify, watch},
    task::JoinHandle,
    time::Instant,
};
use tokio_util::sync::CancellationToken;

use crate::fake::{Counted, FakeInbox, push_row};

struct World {
    inbox: Arc<FakeInbox>,
    counted: Arc<Counted>,
    holding: watch::Sender<Option<Holding>>,
    stored: Arc<Notify>,
    forwarded: Arc<Notify>,
    lanes_in_use: watch::Receiver<LaneSet>,
    health: watch::Receiver<queuebox_engine::forward::RelayHealth>,
    stop: CancellationToken,
    task: JoinHandle<()>,
}

fn holding(lanes: LaneSet) -> Option<Holding> {
    let fence = Fence { worker: "me".into(), token: Uuid::nil() };
    Some(Holding { fence, lanes, lease_until: Instant::now() + Duration::from_secs(3600) })
}

fn start(poll_interval: Duration) -> World {
    let inbox = FakeInbox::new();
    let counted = Arc::new(Counted::default());
    let (holding, held) = watch::channel(holding(LaneSet::first(64)));
    let (stored, forwarded, stop) = (Arc::new(Notify::new()), Arc::new(Notify::new()), CancellationToken::new());
    let template = |text| Template::parse(text, Vocabulary::SourceTopic).unwrap();
    let config = RelayConfig {
        poll_interval,
        batch_size: 10,
        max_attempts: 7,
        max_crashes: 3,
        topics: HashMap::from([
            ("orders".to_owned(), template("{{ eventType }}")),
            ("fixed".to_owned(), template("topic")),
        ]),
    };
    let parts = RelayParts {
        inbox: inbox.clone(),
        holding: held,
        stored: stored.clone(),
        forwarded: forwarded.clone(),
        ids: Arc::new(Ids::new(1, 0)),
        observer: counted.clone(),
        tracer: None,
        stop: stop.clone(),
    };
    let relay = Relay::new(config, parts);
    let (lanes_in_use, health) = (relay.lanes_in_use(), relay.health());
    World { inbox, counted, holding, stored, forwarded, lanes_in_use, health, stop, task: tokio::spawn(relay.run()) }
}

impl World {
    /// Lets the relay work until it has nothing to do for a while.
    async fn settle(&self) {
        tokio::time::sleep(Duration::from_secs(2)).await;
    }

    fn states(&self) -> Vec<State> {
        self.inbox.rows().into_iter().map(|stored| stored.state).collect()
    }

    fn topics(&self) -> Vec<String> {
        self.inbox.outbox().into_iter().map(|(forward, _)| forward.topic).collect()
    }
}

const POLL: Duration = Duration::from_millis(100);

#[tokio::test(start_paused = true)]
async fn push_rows_are_forwarded_in_order() {
    let world = start(POLL);
    for n in 0..25 {
        world.inbox.insert(NewInboxRow {
            aggregate_id: Some("k".into()),
            topic: Some(format!("t{n}")),
            ..push_row(&n.to_string())
        });
        tokio::time::advance(Duration::from_micros(10)).await;
    }
    world.forwarded.notified().await;
    world.settle().await;
    assert_eq!(world.topics(), (0..25).map(|n| format!("t{n}")).collect::<Vec<_>>());
    assert!(world.states().iter().all(|state| *state == State::Processed));
    let outbox = world.inbox.outbox();
    assert!(outbox.iter().all(|(_, max_attempts)| *max_attempts == 7));
    let ids: std::collections::HashSet<_> = outbox.iter().map(|(forward, _)| forward.outbox_id).collect();
    assert_eq!(ids.len(), 25);
    assert!(outbox[0].0.headers.contains(r#""x-source":"orders","x-idempotency-key":"0""#));
    assert!(world.counted.count("Forwarded") >= 3, "batches of ten");
}

#[tokio::test(start_paused = true)]
async fn relay_ignores_pull_rows() {
    let world = start(POLL);
    world.inbox.insert(NewInboxRow {
        consumption: Consumption::Pull,
        aggregate_id: Some("k".into()),
        ..push_row("pull")
    });
    world.inbox.insert(NewInboxRow { aggregate_id: Some("k".into()), ..push_row("push") });
    world.settle().await;
    assert_eq!(world.states(), [State::Pending, State::Processed]);
}

#[tokio::test(start_paused = true)]
async fn empty_topic_is_dead() {
    let world = start(POLL);
    let without_topic = |key: &str| NewInboxRow { topic: None, ..push_row(key) };
    world.inbox.insert(without_topic("empty"));
    world.inbox.insert(NewInboxRow { event_type: Some("é".repeat(256)), ..without_topic("long") });
    world.inbox.insert(NewInboxRow { event_type: Some("  created ".into()), ..without_topic("rendered") });
    world.inbox.insert(NewInboxRow { source: "gone".into(), topic: Some("stored".into()), ..push_row("stored") });
    world.settle().await;
    let rows = world.inbox.rows();
    assert_eq!(world.states(), [State::Dead, State::Dead, State::Processed, State::Processed]);
    assert!(rows[0].last_error.as_ref().unwrap().starts_with("empty_topic: "));
    assert!(rows[1].last_error.as_ref().unwrap().starts_with("bad_topic: "));
    assert_eq!(world.topics(), ["created", "stored"], "a stored topic outlives its source");
}

#[tokio::test(start_paused = true)]
async fn rows_of_unknown_sources_stay_and_hide_nobody() {
    let world = start(POLL);
    for n in 0..30 {
        world.inbox.insert(NewInboxRow { source: "gone".into(), topic: None, ..push_row(&n.to_string()) });
    }
    world.inbox.insert(push_row("good"));
    world.settle().await;
    assert_eq!(world.topics(), ["t"]);
    assert_eq!(world.states().iter().filter(|state| **state == State::Pending).count(), 30);
    assert!(world.health.borrow().unknown_sources.contains("gone"));
    assert_eq!(world.health.borrow().failure, None);
    let before = world.inbox.waiting_calls.load(Ordering::SeqCst);
    tokio::time::sleep(Duration::from_secs(10)).await;
    let calls = world.inbox.waiting_calls.load(Ordering::SeqCst) - before;
    assert!(calls < 200, "no hot loop: {calls}");
}

/// contract 4, 4.5: a row that stays pending holds the later ones of its aggregate, over all sources, and nothing else.
#[tokio::test(start_paused = true)]
async fn a_row_of_an_unknown_source_holds_its_aggregate() {
    let world = start(POLL);
    let row = |key: &str, aggregate: Option<&str>| NewInboxRow {
        aggregate_id: aggregate.map(str::to_owned),
        topic: Some(key.to_owned()),
        ..push_row(key)
    };
    world.inbox.insert(row("before", Some("k")));
    world.inbox.insert(NewInboxRow { source: "gone".into(), topic: None, ..row("held", Some("k")) });
    world.inbox.insert(NewInboxRow { source: "gone".into(), topic: None, ..row("bare", None) });
    // More than one batch behind it.
    for n in 0..25 {
        world.inbox.insert(row(&format!("behind {n}"), Some("k")));
    }
    world.inbox.insert(row("other", Some("l")));
    world.inbox.insert(row("bare too", Some("")));
    // Longer than rows are left alone.
    tokio::time::sleep(Duration::from_secs(200)).await;
    assert_eq!(world.topics(), ["before", "other", "bare too"]);
    assert_eq!(world.counted.count("ClaimsLost"), 0);
    world.inbox.bury("held");
    tokio::time::sleep(Duration::from_secs(100)).await;
    let behind: Vec<String> = (0..25).map(|n| format!("behind {n}")).collect();
    assert_eq!(world.topics()[3..], behind, "in order");
}

/// contract 3.3: below version 12 nothing counts in the row, so it is never buried, and the waits grow all the same.
#[tokio::test(start_paused = true)]
async fn a_refused_row_that_cannot_be_counted_is_tried_again() {
    let world = start(POLL);
    world.inbox.counts_nothing.store(true, Ordering::SeqCst);
    *world.inbox.refused_topic.lock().unwrap() = Some("bad".into());
    world.inbox.insert(NewInboxRow { topic: Some("bad".into()), ..push_row("bad") });
    let refused = "forward failed: check_violation";
    tokio::time::sleep(Duration::from_secs(600)).await;
    assert_eq!(world.states(), [State::Pending]);
    let tries = world.counted.count(refused);
    assert!((10..=20).contains(&tries), "back-off up to a minute, not one a second: {tries}");
    *world.inbox.refused_topic.lock().unwrap() = None;
    tokio::time::sleep(Duration::from_secs(80)).await;
    assert_eq!(world.topics(), ["bad"]);
}

#[tokio::test(start_paused = true)]
async fn lost_mark_makes_no_second_row() {
    let world = start(POLL);
    let row = push_row("stolen");
    world.inbox.stolen.lock().unwrap().insert(row.id);
    world.inbox.insert(row);
    world.inbox.insert(push_row("ours"));
    world.settle().await;
    assert_eq!(world.inbox.outbox().len(), 1);
    assert_eq!(world.counted.count("ClaimsLost { rows: 1 }"), 1);
    assert_eq!(world.counted.count("Forwarded { rows: 1 }"), 1);
}

#[tokio::test(start_paused = true)]
async fn failed_forward_changes_nothing() {
    let world = start(POLL);
    *world.inbox.relay_fault.lock().unwrap() = Some(Fault::transient("io", "gone"));
    world.inbox.insert(push_row("a"));
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(world.states(), [State::Pending]);
    assert!(world.health.borrow().failure.is_some());
    let calls = world.inbox.waiting_calls.load(Ordering::SeqCst);
    assert!(calls < 15, "back-off: {calls}");
    *world.inbox.relay_fault.lock().unwrap() = None;
    tokio::time::sleep(Duration::from_secs(31)).await;
    assert_eq!(world.topics(), ["t"], "once");
    assert_eq!(world.health.borrow().failure, None);
}

#[tokio::test(start_paused = true)]
async fn a_row_that_the_database_refuses_is_dead_in_the_end() {
    let world = start(POLL);
    *world.inbox.refused_topic.lock().unwrap() = Some("bad".into());
    world.inbox.insert(NewInboxRow { topic: Some("bad".into()), ..push_row("bad") });
    world.inbox.insert(push_row("good"));
    world.settle().await;
    assert_eq!(world.topics(), ["t"], "alone");
    assert_eq!((world.inbox.rows()[0].state, world.inbox.rows()[0].crashes), (State::Pending, 2));
    tokio::time::sleep(Duration::from_secs(10)).await;
    let dead = world.inbox.rows().remove(0);
    assert_eq!(dead.state, State::Dead);
    assert_eq!(dead.last_error.unwrap(), "forward: the outbox says no");
    assert_eq!(world.counted.count("forward failed: check_violation"), 3);
}

#[tokio::test(start_paused = true)]
async fn own_messages_wake_the_relay() {
    let world = start(Duration::from_secs(60));
    world.settle().await;
    world.inbox.insert(push_row("a"));
    world.stored.notify_one();
    let before = Instant::now();
    world.forwarded.notified().await;
    assert!(before.elapsed() < Duration::from_millis(1));
}

#[tokio::test(start_paused = true)]
async fn the_relay_wakes_when_a_row_comes_due() {
    let world = start(Duration::from_secs(60));
    world.inbox.insert(NewInboxRow { delay_us: 9_000_000, ..push_row("later") });
    let before = Instant::now();
    world.forwarded.notified().await;
    assert!((9..11).contains(&before.elapsed().as_secs()), "{:?}", before.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_lane_is_given_away_with_nothing_in_flight() {
    let mut world = start(POLL);
    let gate = Arc::new(Notify::new());
    *world.inbox.forward_gate.lock().unwrap() = Some(gate.clone());
    world.inbox.insert(push_row("a"));
    world.lanes_in_use.wait_for(|lanes| !lanes.is_empty()).await.unwrap();
    tokio::time::sleep(Duration::from_millis(10)).await;
    world.holding.send_replace(holding(LaneSet::first(2)));
    let is_free = |lanes: &LaneSet| lanes.minus(LaneSet::first(2)).is_empty();
    assert!(!is_free(&world.lanes_in_use.borrow()), "the batch is under way");
    gate.notify_one();
    world.lanes_in_use.wait_for(is_free).await.unwrap();
    assert_eq!(world.topics(), ["t"]);
    world.holding.send_replace(None);
    *world.inbox.forward_gate.lock().unwrap() = None;
    world.inbox.insert(push_row("b"));
    world.settle().await;
    assert_eq!(world.topics(), ["t"], "without lanes nothing is done");
    world.holding.send_replace(holding(LaneSet::first(2)));
    world.settle().await;
    assert_eq!(world.topics(), ["t", "t"]);
}

#[tokio::test(start_paused = true)]
async fn nothing_begins_behind_the_end_of_the_lease() {
    let world = start(POLL);
    world.settle().await;
    let ended = holding(LaneSet::first(64)).map(|holding| Holding { lease_until: Instant::now(), ..holding });
    world.holding.send_replace(ended);
    world.inbox.insert(push_row("a"));
    world.settle().await;
    assert_eq!(world.states(), [State::Pending]);
}

#[tokio::test(start_paused = true)]
async fn a_stop_ends_the_relay() {
    let world = start(Duration::from_secs(60));
    world.settle().await;
    world.stop.cancel();
    world.task.await.unwrap();
}

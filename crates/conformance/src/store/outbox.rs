//! Reading and settling (contract 3.1, 4, 5.1, 5.2, 5.4, 7.2; laws in `queuebox_core::ports::outbox`).

use std::collections::HashSet;

use queuebox_core::{
    LaneSet, Uuid,
    message::{OutboxRow, Payload, Position, Stamp, State},
    ports::{
        Scope,
        outbox::{Child, DestinationRead, Expansion, KeyRead, Outcome, Read, Settle},
    },
};

use super::{
    Insert, Setup, StoreHarness, World, everything,
    world::{LEASE_MS, ids, json},
};

const MINUTE_US: i64 = 60_000_000;

fn retry(delay_us: i64) -> Outcome {
    Outcome::Retry { delay_us, error: "status 500".into() }
}

fn settle(row: &OutboxRow, outcome: Outcome) -> Settle {
    Settle { position: row.position(), stamp: row.stamp(), outcome }
}

/// Expands a row into children of `destinations`; returns their ids.
async fn expand<H: StoreHarness>(
    w: &World<H>,
    fence: &queuebox_core::ports::Fence,
    parent: Uuid,
    destinations: &[&str],
) -> Vec<Uuid> {
    let row = w.read_row(fence, parent).await;
    let children: Vec<_> =
        destinations.iter().map(|name| Child { id: Uuid::new_v4(), destination: (*name).into() }).collect();
    let made = children.iter().map(|child| child.id).collect();
    let expansion = Expansion { parent: row.position(), stamp: row.stamp(), children };
    assert!(w.store.expand(fence, &[expansion]).await.unwrap().is_empty());
    made
}

/// All columns of a row arrive, and rows come in the order of their insertion.
pub async fn rows_come_in_order_and_whole<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let fence = w.owner().await;
    let trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    let first = Insert::key("k-1")
        .payload(r#"{"text": "Grüße 🚀 it''s"}"#.replace("''", "'"))
        .with("headers", r#"'{"a": "1"}'"#)
        .with("aggregate_type", "'order'")
        .with("trace_parent", format!("'{trace}'"))
        .with("max_attempts", "7");
    let first = Insert { topic: "order.é🚀".into(), ..first };
    let id = first.id;
    let mut all = w.insert_all([first, Insert::default(), Insert::default()]).await;
    all.push(w.insert(Insert::default()).await);
    let polled = w.read(&fence).await;
    assert_eq!(ids(&polled.walk), all);
    assert!(polled.walk_ended);
    assert!(polled.walk.windows(2).all(|pair| pair[0].sequence < pair[1].sequence));
    let row = &polled.walk[0];
    assert_eq!(row.id, id);
    assert_eq!((row.topic.as_str(), row.key.as_deref()), ("order.é🚀", Some("k-1")));
    assert_eq!(json(&row.payload)["text"], "Grüße 🚀 it's");
    assert_eq!(serde_json::from_str::<serde_json::Value>(&row.headers).unwrap()["a"], "1");
    assert_eq!(row.aggregate_type.as_deref(), Some("order"));
    assert_eq!(row.trace_parent.as_deref(), Some(trace));
    assert_eq!((row.attempt, row.max_attempts, row.crashes), (0, 7, 0));
    assert_eq!((row.destination.as_deref(), row.parent_id), (None, None));
    assert!(row.due_in_us <= 0);
    assert_eq!(polled.walk[1].max_attempts, 5);
    assert!(w.all_lanes().contains(row.lane));
    // created_at is a real time: within an hour of the database's now.
    let age_us = -w.us_until("outbox", id, "created_at").await.unwrap();
    assert!((-1_000_000..3_600_000_000).contains(&age_us));
    let newest = polled.walk[3].created_at_us;
    assert!(newest >= row.created_at_us && newest > 1_600_000_000_000_000);
}

/// Null and the empty text both mean: no order.
pub async fn null_and_empty_keys_are_no_key<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let fence = w.owner().await;
    w.insert_all([Insert::default(), Insert::key("")]).await;
    assert!(w.read(&fence).await.walk.iter().all(|row| row.key.is_none()));
}

/// A walk in steps meets each row once and says when it has reached the end.
pub async fn the_walk_goes_on_behind_a_position<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let fence = w.owner().await;
    let all = w.insert_all((0..7).map(|_| Insert::default())).await;
    let mut found = Vec::new();
    let mut read = Read { walk_limit: 3, ..everything() };
    loop {
        let polled = w.store.poll(&fence, &[], Some(&read)).await.unwrap();
        assert!(polled.walk.len() <= 3);
        read.walk_after = polled.walk.last().map(OutboxRow::position).or(read.walk_after);
        found.extend(ids(&polled.walk));
        if polled.walk_ended {
            break;
        }
        assert!(!polled.walk.is_empty(), "a walk that has not ended goes on");
    }
    assert_eq!(found, all);
}

/// Children share their parent's sequence; the id decides, also where a walk stops between them.
pub async fn rows_of_one_sequence_are_ordered_by_id<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let fence = w.owner().await;
    let parent = w.insert(Insert::key("k")).await;
    let mut children = expand(&w, &fence, parent, &["a", "b", "c", "d"]).await;
    children.sort();
    assert_eq!(ids(&w.read(&fence).await.walk), children);
    let sequence = w.row(parent).await.sequence;
    for (place, id) in children.iter().enumerate() {
        let read = Read { walk_after: Some(Position { sequence, id: *id }), ..everything() };
        let polled = w.store.poll(&fence, &[], Some(&read)).await.unwrap();
        assert_eq!(ids(&polled.walk), children[place + 1..]);
    }
}

/// Rows in every other state are not read by any part.
pub async fn only_pending_rows_are_read<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let fence = w.owner().await;
    let mut pending = Vec::new();
    for state in ["pending", "processing", "sent", "dead"] {
        let id = w.insert(Insert::key("k").with("state", format!("'{state}'"))).await;
        if state == "pending" {
            pending.push(id);
        }
    }
    let read = Read { keys: vec![KeyRead { key: "k".into(), from: 0 }], key_limit: 10, ..everything() };
    let polled = w.store.poll(&fence, &[], Some(&read)).await.unwrap();
    assert_eq!(ids(&polled.walk), pending);
    assert_eq!(ids(&polled.keys), pending);
}

/// No part returns a row of `exclude`, and excluded rows do not use up a limit.
pub async fn rows_in_memory_are_not_returned<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let fence = w.owner().await;
    let due = || {
        Insert::topic("t")
            .with("created_at", w.h.now_plus(-2 * MINUTE_US))
            .with("scheduled_at", w.h.now_plus(-MINUTE_US))
    };
    let plain = w.insert_all((0..3).map(|_| due())).await;
    let keyed = w.insert_all((0..3).map(|_| Insert { key: Some("k".into()), ..due() })).await;
    let rows = w.read(&fence).await;
    let last = rows.walk.last().unwrap().position();
    let read = Read {
        walk_limit: 4,
        lap_after: Some(Position { sequence: i64::MIN, id: Uuid::nil() }),
        lap_limit: 10,
        keys: vec![KeyRead { key: "k".into(), from: 0 }],
        key_limit: 2,
        destinations: vec![DestinationRead {
            destination: "d".into(),
            topics: vec!["t".into()],
            after: None,
            limit: 2,
        }],
        exclude: vec![plain[0], keyed[0]],
        ..everything()
    };
    let polled = w.store.poll(&fence, &[], Some(&read)).await.unwrap();
    assert_eq!(ids(&polled.walk), [plain[1], plain[2], keyed[1], keyed[2]]);
    assert_eq!(ids(&polled.keys), [keyed[1], keyed[2]]);
    assert_eq!(ids(&polled.destinations), [plain[1], plain[2]]);
    assert_eq!(polled.later.len(), 4);
    assert!(polled.later.iter().all(|row| !read.exclude.contains(&row.id)));
    let lap = Read { walk_after: Some(last), ..read };
    let polled = w.store.poll(&fence, &[], Some(&lap)).await.unwrap();
    assert_eq!(ids(&polled.lap), [plain[1], plain[2], keyed[1], keyed[2]]);
}

/// A row settled in the call is not read in the call, even when it is pending and due again.
pub async fn rows_settled_in_the_call_are_not_returned<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let fence = w.owner().await;
    let all = w.insert_all((0..4).map(|_| Insert::key("k"))).await;
    let rows = w.read(&fence).await.walk;
    let settles = [settle(&rows[0], Outcome::Sent), settle(&rows[1], retry(0)), settle(&rows[2], Outcome::Release)];
    let read = Read { keys: vec![KeyRead { key: "k".into(), from: 0 }], key_limit: 10, ..everything() };
    let polled = w.store.poll(&fence, &settles, Some(&read)).await.unwrap();
    assert!(polled.lost.is_empty());
    assert_eq!(ids(&polled.walk), all[3..]);
    assert_eq!(ids(&polled.keys), all[3..]);
    assert!(polled.later.is_empty());
    assert_eq!(ids(&w.read(&fence).await.walk), all[1..]);
}

/// Only rows of the given lanes, and each row of a key in one lane.
pub async fn only_rows_of_the_lanes_are_read<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let fence = w.owner().await;
    w.insert_all((0..60).map(|n| if n % 3 == 0 { Insert::default() } else { Insert::key(&format!("k{}", n % 20)) }))
        .await;
    let all = w.read(&fence).await.walk;
    let some: LaneSet = w.all_lanes().iter().filter(|lane| lane % 2 == 1).collect();
    for lanes in [some, w.all_lanes().minus(some), LaneSet::EMPTY] {
        let read = Read { lanes, ..everything() };
        let polled = w.store.poll(&fence, &[], Some(&read)).await.unwrap();
        let expected: Vec<_> = all.iter().filter(|row| lanes.contains(row.lane)).map(|row| row.id).collect();
        assert_eq!(ids(&polled.walk), expected, "{lanes:?}");
        assert!(polled.walk_ended);
    }
    let lane_of = |key: &str| {
        all.iter().filter(|row| row.key.as_deref() == Some(key)).map(|row| row.lane).collect::<HashSet<_>>()
    };
    assert!((0..20).all(|n| lane_of(&format!("k{n}")).len() <= 1));
}

/// A part stops after the row that reaches the sum of bytes, returns at least one row, and has then not ended.
pub async fn a_read_stops_at_its_bytes<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let fence = w.owner().await;
    let all = w.insert_all((0..5).map(|_| Insert::default().payload_of(1_000))).await;
    for (bytes_max, rows) in [(1, 1), (999, 1), (1_001, 2), (2_500, 3), (4_001, 5)] {
        let read = Read { bytes_max, ..everything() };
        let polled = w.store.poll(&fence, &[], Some(&read)).await.unwrap();
        assert_eq!(ids(&polled.walk), all[..rows], "{bytes_max} bytes");
        assert!(polled.walk_ended || rows < 5, "{bytes_max} bytes");
        assert!(!polled.walk_ended || rows == 5, "{bytes_max} bytes");
    }
}

/// A payload above `payload_max` is not loaded, one of just that size is, and it does not use up the sum.
pub async fn a_huge_payload_is_never_loaded<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let fence = w.owner().await;
    let sizes = [1_000, 100_000, 1_000, 1_001];
    let all = w.insert_all(sizes.map(|size| Insert::key("k").payload_of(size))).await;
    let read = Read {
        payload_max: 1_000,
        bytes_max: 50_000,
        keys: vec![KeyRead { key: "k".into(), from: 0 }],
        key_limit: 10,
        ..everything()
    };
    let polled = w.store.poll(&fence, &[], Some(&read)).await.unwrap();
    for rows in [&polled.walk, &polled.keys] {
        assert_eq!(ids(rows), all);
        for (row, size) in rows.iter().zip(sizes) {
            match &row.payload {
                Payload::Loaded(bytes) => assert!(size == 1_000 && bytes.len() == size),
                Payload::TooLarge(bytes) => assert!(size > 1_000 && *bytes == size as u64, "{bytes} for {size}"),
                Payload::Omitted => panic!("nothing was to be omitted"),
            }
        }
    }
}

/// Rows of held topics and destinations come without payload in the walk, not at all among the later rows, whole by key.
pub async fn held_rows_come_without_payload<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let fence = w.owner().await;
    let later = |topic: &str| {
        Insert { key: Some("k".into()), ..Insert::topic(topic) }
            .with("created_at", w.h.now_plus(-2 * MINUTE_US))
            .with("scheduled_at", w.h.now_plus(-MINUTE_US))
    };
    let parent = w.insert(later("held")).await;
    let children = expand(&w, &fence, parent, &["full", "free"]).await;
    let rows = w.insert_all([later("held"), later("held.not"), later("Held")]).await;
    let read = Read {
        omit_topics: vec!["held".into()],
        omit_destinations: vec!["full".into()],
        keys: vec![KeyRead { key: "k".into(), from: 0 }],
        key_limit: 10,
        ..everything()
    };
    let polled = w.store.poll(&fence, &[], Some(&read)).await.unwrap();
    let omitted: HashSet<_> =
        polled.walk.iter().filter(|row| row.payload == Payload::Omitted).map(|row| row.id).collect();
    assert_eq!(polled.walk.len(), 5);
    assert_eq!(omitted, HashSet::from([children[0], rows[0]]));
    assert!(polled.keys.len() == 5 && polled.keys.iter().all(|row| row.payload != Payload::Omitted));
    let found: HashSet<_> = ids(&polled.later).into_iter().collect();
    assert_eq!(found, HashSet::from([children[1], rows[1], rows[2]]));
}

/// Keys are read from their sequence on, each in order, in the order in which they were asked for.
pub async fn keys_are_read_from_a_sequence_on<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let fence = w.owner().await;
    let all = w.insert_all((0..12).map(|n| Insert::key(["a", "b", "c"][n % 3]))).await;
    let from = w.row(all[3]).await.sequence;
    let key = |key: &str, from| KeyRead { key: key.into(), from };
    let read = Read {
        walk_limit: 0,
        keys: vec![key("c", 0), key("nobody", 0), key("a", from)],
        key_limit: 100,
        ..everything()
    };
    let polled = w.store.poll(&fence, &[], Some(&read)).await.unwrap();
    assert!(polled.walk.is_empty());
    assert_eq!(ids(&polled.keys), [all[2], all[5], all[8], all[11], all[3], all[6], all[9]]);
}

/// `key_limit` counts per key; the sum of bytes runs over all keys in the order asked.
pub async fn keys_stop_at_their_limit_and_bytes<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let fence = w.owner().await;
    let all = w.insert_all((0..8).map(|n| Insert::key(["a", "b"][n % 2]).payload_of(100))).await;
    let key = |key: &str| KeyRead { key: key.into(), from: i64::MIN };
    let read = Read { walk_limit: 0, keys: vec![key("a"), key("b")], key_limit: 3, ..everything() };
    let polled = w.store.poll(&fence, &[], Some(&read)).await.unwrap();
    assert_eq!(ids(&polled.keys), [all[0], all[2], all[4], all[1], all[3], all[5]]);
    let polled = w.store.poll(&fence, &[], Some(&Read { bytes_max: 301, ..read.clone() })).await.unwrap();
    assert_eq!(ids(&polled.keys), [all[0], all[2], all[4], all[1]]);
    let polled = w.store.poll(&fence, &[], Some(&Read { bytes_max: 1, ..read })).await.unwrap();
    assert_eq!(ids(&polled.keys), [all[0]]);
}

/// Retries, scheduled and replayed rows come when they are due, longest due first, and no others.
pub async fn later_rows_come_when_due<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let fence = w.owner().await;
    let at = |created: i64, scheduled: i64| {
        Insert::default().with("created_at", w.h.now_plus(created)).with("scheduled_at", w.h.now_plus(scheduled))
    };
    let rows = w
        .insert_all([
            at(-9 * MINUTE_US, -MINUTE_US),
            at(-9 * MINUTE_US, -3 * MINUTE_US),
            at(-9 * MINUTE_US, MINUTE_US),
            at(-9 * MINUTE_US, -2 * MINUTE_US),
            at(-MINUTE_US, -MINUTE_US * 5),
        ])
        .await;
    assert_eq!(ids(&w.read(&fence).await.later), [rows[1], rows[3], rows[0]]);
    let read = Read { later_limit: 2, ..everything() };
    assert_eq!(ids(&w.store.poll(&fence, &[], Some(&read)).await.unwrap().later), [rows[1], rows[3]]);
    let read = Read { later_limit: 0, ..everything() };
    let polled = w.store.poll(&fence, &[], Some(&read)).await.unwrap();
    assert!(polled.later.is_empty() && polled.next_due_in_us.is_none());
}

/// The time until the nearest row that is not due yet.
pub async fn the_nearest_later_row_is_told<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let fence = w.owner().await;
    w.insert(Insert::default()).await;
    assert_eq!(w.read(&fence).await.next_due_in_us, None);
    for minutes in [9, 5, 7] {
        w.insert(Insert::default().with("scheduled_at", w.h.now_plus(minutes * MINUTE_US))).await;
    }
    let next = w.read(&fence).await.next_due_in_us.unwrap();
    assert!((4 * MINUTE_US..=5 * MINUTE_US).contains(&next), "{next}");
}

/// A row that is not due is walked over, since it holds its key; it says how long it waits.
pub async fn rows_not_due_are_walked<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let fence = w.owner().await;
    let id = w.insert(Insert::key("k").with("scheduled_at", w.h.now_plus(5 * MINUTE_US))).await;
    let row = w.read_row(&fence, id).await;
    assert!((4 * MINUTE_US..=5 * MINUTE_US).contains(&row.due_in_us), "{}", row.due_in_us);
}

/// The lap reads from its place up to the walk's, without payloads.
pub async fn the_lap_ends_at_the_walk<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let fence = w.owner().await;
    let all = w.insert_all((0..8).map(|_| Insert::default())).await;
    let rows = w.read(&fence).await.walk;
    let mut read = Read {
        walk_after: Some(rows[5].position()),
        walk_limit: 1,
        lap_after: Some(rows[0].position()),
        lap_limit: 3,
        ..everything()
    };
    let polled = w.store.poll(&fence, &[], Some(&read)).await.unwrap();
    assert_eq!(ids(&polled.walk), all[6..7]);
    assert_eq!(ids(&polled.lap), all[1..4]);
    assert!(!polled.lap_ended && polled.lap.iter().all(|row| row.payload == Payload::Omitted));
    read.lap_after = Some(rows[3].position());
    let polled = w.store.poll(&fence, &[], Some(&read)).await.unwrap();
    assert_eq!(ids(&polled.lap), all[4..6]);
    assert!(polled.lap_ended);
    let none = Read { lap_limit: 0, ..read.clone() };
    assert!(w.store.poll(&fence, &[], Some(&none)).await.unwrap().lap.is_empty());
    // While the walk is at the start there is nothing behind it.
    let start = Read { walk_after: None, lap_after: None, lap_limit: 10, ..read };
    assert!(w.store.poll(&fence, &[], Some(&start)).await.unwrap().lap.is_empty());
}

/// Rows of one sequence on both sides of the walk's place are told apart by their id.
pub async fn a_lap_ends_between_children<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let fence = w.owner().await;
    let parent = w.insert(Insert::key("k")).await;
    let mut children = expand(&w, &fence, parent, &["a", "b", "c", "d"]).await;
    children.sort();
    let sequence = w.row(parent).await.sequence;
    let at = |child: usize| Some(Position { sequence, id: children[child] });
    let read = Read { walk_after: at(2), lap_after: at(0), lap_limit: 10, ..everything() };
    let polled = w.store.poll(&fence, &[], Some(&read)).await.unwrap();
    assert_eq!(ids(&polled.walk), children[3..]);
    assert_eq!(ids(&polled.lap), children[1..3]);
}

/// A destination alone: rows of its topics without destination, its children, nothing that has a key.
pub async fn a_destination_is_read_alone<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let fence = w.owner().await;
    let parent = w.insert(Insert::topic("fan")).await;
    let children = expand(&w, &fence, parent, &["d", "e"]).await;
    let keyed = w.insert(Insert { key: Some("k".into()), ..Insert::topic("fan") }).await;
    expand(&w, &fence, keyed, &["d"]).await;
    let rows = w
        .insert_all([
            Insert::topic("a"),
            Insert::topic("b"),
            Insert::topic("A"),
            Insert { key: Some("k".into()), ..Insert::topic("a") },
            Insert { key: Some(String::new()), ..Insert::topic("a") },
        ])
        .await;
    let of = |topics: &[&str], after, limit| DestinationRead {
        destination: "d".into(),
        topics: topics.iter().map(|topic| (*topic).to_owned()).collect(),
        after,
        limit,
    };
    let read = |destinations| Read { walk_limit: 0, destinations, ..everything() };
    let polled = w.store.poll(&fence, &[], Some(&read(vec![of(&["a", "fan"], None, 10)]))).await.unwrap();
    assert_eq!(ids(&polled.destinations), [children[0], rows[0], rows[4]]);
    assert!(polled.destinations.iter().all(|row| row.payload != Payload::Omitted));
    let after = polled.destinations[0].position();
    let polled = w.store.poll(&fence, &[], Some(&read(vec![of(&["a"], Some(after), 1)]))).await.unwrap();
    assert_eq!(ids(&polled.destinations), rows[..1]);
    let polled = w.store.poll(&fence, &[], Some(&read(vec![of(&[], None, 10)]))).await.unwrap();
    assert_eq!(ids(&polled.destinations), children[..1]);
    let other = DestinationRead { destination: "e".into(), ..of(&["b"], None, 10) };
    let polled = w.store.poll(&fence, &[], Some(&read(vec![of(&["a"], None, 2), other]))).await.unwrap();
    assert_eq!(ids(&polled.destinations), [children[0], rows[0], children[1], rows[1]]);
}

/// A lower sequence that commits after a higher one was sent is read by the next walk from the start, and by the lap.
pub async fn a_late_commit_is_read<H: StoreHarness>() {
    let w = World::<H>::start().await;
    if !w.h.capabilities().concurrent_writers {
        return;
    }
    let fence = w.owner().await;
    let (late, early) = (Insert::default(), Insert::default());
    let late_id = late.id;
    let mut open = w.h.begin().await;
    open.execute(&w.insert_sql(&late)).await;
    w.insert(early).await;
    let rows = w.read(&fence).await.walk;
    assert_eq!(rows.len(), 1, "the open one is not seen");
    assert!(w.settle(&fence, &[settle(&rows[0], Outcome::Sent)]).await.is_empty());
    // Polls go on while it is open, so that a store which remembers positions remembers them.
    for _ in 0..3 {
        assert!(w.read(&fence).await.walk.is_empty());
    }
    open.commit().await;
    // In the first poll that sees it, behind the walk: among what may have become visible, and on the way of a whole lap.
    let mut read = Read { walk_after: Some(rows[0].position()), lap_limit: 10, ..everything() };
    let polled = w.store.poll(&fence, &[], Some(&read)).await.unwrap();
    assert!(polled.walk.is_empty());
    assert!(polled.lap_ended && ids(&polled.lap).contains(&late_id));
    read.lap_after = Some(Position { sequence: i64::MIN, id: Uuid::nil() });
    assert_eq!(ids(&w.store.poll(&fence, &[], Some(&read)).await.unwrap().lap), [late_id]);
    assert_eq!(ids(&w.read(&fence).await.walk), [late_id]);
}

/// `sent`, crashes 0, no claim.
pub async fn sent_rows_are_settled<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let fence = w.owner().await;
    let id = w.insert(Insert::default().with("crashes", "2").with("attempt", "1")).await;
    let settle = w.settle_of(&fence, id, Outcome::Sent).await;
    assert!(w.settle(&fence, std::slice::from_ref(&settle)).await.is_empty());
    let row = w.row(id).await;
    assert_eq!((row.state, row.attempt, row.crashes), (State::Sent, 1, 0));
    assert!(row.is_unclaimed());
    assert_eq!(w.settle(&fence, &[settle]).await, [id], "settled already");
}

/// `pending`, one attempt more, later, with the reason, crashes 0.
pub async fn failed_rows_are_settled<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let fence = w.owner().await;
    let id = w.insert(Insert::default().with("crashes", "1")).await;
    let settle = w.settle_of(&fence, id, retry(5 * MINUTE_US)).await;
    assert!(w.settle(&fence, std::slice::from_ref(&settle)).await.is_empty());
    let row = w.row(id).await;
    assert_eq!((row.state, row.attempt, row.crashes), (State::Pending, 1, 0));
    assert_eq!(row.last_error.as_deref(), Some("status 500"));
    assert!((4 * MINUTE_US..=5 * MINUTE_US).contains(&row.due_in_us), "{}", row.due_in_us);
    assert!(row.is_unclaimed());
    assert_eq!(w.settle(&fence, &[settle]).await, [id], "the attempt has changed");
    assert_eq!(w.row(id).await.attempt, 1);
}

/// `dead` with the reason; `attempt` rises only when a delivery was tried.
pub async fn dead_rows_are_settled<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let fence = w.owner().await;
    for (counted, attempt) in [(true, 1), (false, 0)] {
        let id = w.insert(Insert::default()).await;
        let outcome = Outcome::Dead { error: "refused: too large".into(), counted };
        let settle = w.settle_of(&fence, id, outcome).await;
        assert!(w.settle(&fence, &[settle]).await.is_empty());
        let row = w.row(id).await;
        assert_eq!((row.state, row.attempt), (State::Dead, attempt));
        assert_eq!(row.last_error.as_deref(), Some("refused: too large"));
        assert!(row.is_unclaimed());
    }
}

/// A marked row is settled by its token, and by nobody after it was recovered or taken over.
pub async fn marked_rows_are_settled_by_token<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let fence = w.owner().await;
    for outcome in [Outcome::Sent, retry(1), Outcome::Dead { error: "attempts: e".into(), counted: true }] {
        let id = w.insert(Insert::default()).await;
        let settle = w.mark(&fence, id, outcome).await;
        let unmarked = Settle { stamp: Stamp { marked: false, ..settle.stamp }, ..settle.clone() };
        assert_eq!(w.settle(&fence, &[unmarked]).await, [id], "it is not pending");
        assert!(w.settle(&fence, &[settle]).await.is_empty());
        assert!(w.row(id).await.is_unclaimed());
    }
    let id = w.insert(Insert::default()).await;
    let settle = w.mark(&fence, id, Outcome::Sent).await;
    w.edit("outbox", id, &[("claim_token", &super::world::literal(&Uuid::new_v4().to_string()))]).await;
    assert_eq!(w.settle(&fence, &[settle]).await, [id], "another token");
    assert_eq!(w.row(id).await.state, State::Processing);
}

/// A released row is pending as before.
pub async fn a_release_counts_nothing<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let fence = w.owner().await;
    let id = w.insert(Insert::default().with("crashes", "1").with("attempt", "2")).await;
    let settle = w.mark(&fence, id, Outcome::Release).await;
    assert!(w.settle(&fence, &[settle]).await.is_empty());
    let row = w.row(id).await;
    assert_eq!((row.state, row.attempt, row.crashes), (State::Pending, 2, 1));
    assert!(row.is_unclaimed());
    w.read_row(&fence, id).await;
}

/// A row that a person replayed, edited, finished or deleted in between is not marked, and is told as lost.
pub async fn a_row_changed_in_between_is_left_alone<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let fence = w.owner().await;
    let soon = w.h.now_plus(1);
    let edits: [&[(&str, &str)]; 4] = [
        &[("attempt", "1")],
        &[("scheduled_at", &soon)],
        &[("state", "'dead'"), ("last_error", "'by hand'")],
        &[("state", "'processing'")],
    ];
    for edit in edits {
        let id = w.insert(Insert::default()).await;
        let settle = w.settle_of(&fence, id, Outcome::Sent).await;
        w.edit("outbox", id, edit).await;
        let before = w.row(id).await;
        assert_eq!(w.settle(&fence, &[settle]).await, [id], "{edit:?}");
        let after = w.row(id).await;
        assert_eq!((after.state, after.attempt, after.last_error), (before.state, before.attempt, before.last_error));
        w.edit("outbox", id, &[("state", "'sent'")]).await;
    }
    // Sent, replayed, and the first settle comes once more: the replay stands.
    let id = w
        .insert(
            Insert::default()
                .with("created_at", w.h.now_plus(-MINUTE_US))
                .with("scheduled_at", w.h.now_plus(-MINUTE_US)),
        )
        .await;
    let first = w.settle_of(&fence, id, Outcome::Sent).await;
    assert!(w.settle(&fence, std::slice::from_ref(&first)).await.is_empty());
    let moved = w.store.requeue(queuebox_core::ports::Scope::Outbox, &[id], &[State::Sent]).await.unwrap();
    assert_eq!(moved, [id]);
    assert_eq!(w.settle(&fence, &[first]).await, [id]);
    assert_eq!(w.row(id).await.state, State::Pending);
    let gone = w.insert(Insert::default()).await;
    let settle = w.settle_of(&fence, gone, Outcome::Sent).await;
    w.delete("outbox", gone).await;
    assert_eq!(w.settle(&fence, &[settle]).await, [gone]);
}

/// One call settles a large mixed batch, each row by its own outcome.
pub async fn a_thousand_settles_in_one_call<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let fence = w.owner().await;
    w.insert_all((0..1_000).map(|n| Insert::key(&format!("k{}", n % 7)))).await;
    let rows = w.read(&fence).await.walk;
    assert_eq!(rows.len(), 1_000);
    let outcome = |n: usize| match n % 4 {
        0 => Outcome::Sent,
        1 => Outcome::Retry { delay_us: 60_000_000 + n as i64, error: format!("error {n}") },
        2 => Outcome::Dead { error: format!("refused: {n}"), counted: n % 8 == 2 },
        _ => Outcome::Sent,
    };
    let settles: Vec<_> = rows.iter().enumerate().map(|(n, row)| settle(row, outcome(n))).collect();
    assert!(w.settle(&fence, &settles).await.is_empty());
    for n in [0, 1, 2, 3, 505, 506, 997, 998] {
        let row = w.row(rows[n].id).await;
        match outcome(n) {
            Outcome::Sent => assert_eq!((row.state, row.attempt), (State::Sent, 0), "{n}"),
            Outcome::Retry { error, .. } => {
                assert_eq!((row.state, row.attempt, row.last_error), (State::Pending, 1, Some(error)), "{n}");
            }
            Outcome::Dead { error, counted } => {
                assert_eq!((row.state, row.last_error), (State::Dead, Some(error)), "{n}");
                assert_eq!(row.attempt, i32::from(counted), "{n}");
            }
            Outcome::Release => unreachable!(),
        }
    }
    assert_eq!(w.read(&fence).await.walk.len(), 250);
}

/// `onSent: Delete`: a sent row is gone; a failed or dead one stays; a row changed in between stays too.
pub async fn sent_rows_can_be_deleted<H: StoreHarness>() {
    let w = World::<H>::start_with(Setup { on_sent_delete: true, ..Setup::default() }).await;
    let fence = w.owner().await;
    let all = w.insert_all((0..4).map(|_| Insert::default())).await;
    let rows = w.read(&fence).await.walk;
    w.edit("outbox", all[3], &[("attempt", "1")]).await;
    let dead = Outcome::Dead { error: "refused: e".into(), counted: true };
    let settles = [
        settle(&rows[0], Outcome::Sent),
        settle(&rows[1], retry(1)),
        settle(&rows[2], dead),
        settle(&rows[3], Outcome::Sent),
    ];
    assert_eq!(w.settle(&fence, &settles).await, [all[3]]);
    assert!(w.find(all[0]).await.is_none());
    assert_eq!(w.row(all[1]).await.state, State::Pending);
    assert_eq!(w.row(all[2]).await.state, State::Dead);
    assert_eq!(w.row(all[3]).await.state, State::Pending);
    let id = w.insert(Insert::default()).await;
    let marked = w.mark(&fence, id, Outcome::Sent).await;
    assert!(w.settle(&fence, &[marked]).await.is_empty());
    assert!(w.find(id).await.is_none());
}

/// `onSent: Delete`: an expanded parent stays while a child of it is unfinished, and goes with the last one.
pub async fn a_deleted_parent_waits_for_its_children<H: StoreHarness>() {
    let w = World::<H>::start_with(Setup { on_sent_delete: true, ..Setup::default() }).await;
    let fence = w.owner().await;
    let parent = w.insert(Insert::key("k")).await;
    let children = expand(&w, &fence, parent, &["a", "b"]).await;
    assert_eq!(w.row(parent).await.state, State::Sent);
    let first = w.settle_of(&fence, children[0], Outcome::Sent).await;
    assert!(w.settle(&fence, &[first]).await.is_empty());
    assert!(w.find(children[0]).await.is_none());
    assert_eq!(w.row(parent).await.state, State::Sent);
    let last = w.settle_of(&fence, children[1], Outcome::Sent).await;
    assert!(w.settle(&fence, &[last]).await.is_empty());
    assert_eq!(w.count("outbox").await, 0);
    // Children that are settled together take their parent along.
    let parent = w.insert(Insert::default()).await;
    expand(&w, &fence, parent, &["a", "b", "c"]).await;
    let settles: Vec<_> = w.read(&fence).await.walk.iter().map(|row| settle(row, Outcome::Sent)).collect();
    assert!(w.settle(&fence, &settles).await.is_empty());
    assert_eq!(w.count("outbox").await, 0);
}

/// With `onSent: Delete` only dead rows and parents with open children stay (contract 13.4), whatever ended the last open child.
pub async fn a_deleted_parent_goes_with_a_dead_child<H: StoreHarness>() {
    let w = World::<H>::start_with(Setup { on_sent_delete: true, ..Setup::default() }).await;
    let fence = w.owner().await;
    let dead = || Outcome::Dead { error: "attempts: no".to_owned(), counted: true };
    // One dies while the other is open, the other one last.
    let parent = w.insert(Insert::key("k")).await;
    let children = expand(&w, &fence, parent, &["a", "b"]).await;
    let first = w.settle_of(&fence, children[0], dead()).await;
    assert!(w.settle(&fence, &[first]).await.is_empty());
    assert!(w.find(parent).await.is_some(), "a child is open");
    let last = w.settle_of(&fence, children[1], dead()).await;
    assert!(w.settle(&fence, &[last]).await.is_empty());
    assert!(w.find(parent).await.is_none());
    assert_eq!(w.store.discard(Scope::Outbox, &children).await.unwrap().len(), 2);
    assert_eq!(w.count("outbox").await, 0);
    // One is sent and one dies in the same call.
    let parent = w.insert(Insert::key("k")).await;
    let children = expand(&w, &fence, parent, &["a", "b"]).await;
    let settles =
        [w.settle_of(&fence, children[0], Outcome::Sent).await, w.settle_of(&fence, children[1], dead()).await];
    assert!(w.settle(&fence, &settles).await.is_empty());
    assert_eq!((w.count("outbox").await, w.row(children[1]).await.state), (1, State::Dead));
    w.store.discard(Scope::Outbox, &children).await.unwrap();
    // The last one is buried for its crashes.
    let parent = w.insert(Insert::key("k")).await;
    let child = expand(&w, &fence, parent, &["a"]).await[0];
    let over = w.h.now_plus(-1_000_000);
    w.edit("outbox", child, &[("state", "'processing'"), ("lease_expires_at", &over)]).await;
    assert_eq!(w.store.recover(&fence, w.all_lanes(), 1).await.unwrap().dead.len(), 1);
    assert_eq!((w.find(parent).await.is_none(), w.row(child).await.state), (true, State::Dead));
    w.store.discard(Scope::Outbox, &[child]).await.unwrap();
    // What an earlier release left behind goes with the last dead child.
    let parent = w.insert(Insert::key("k")).await;
    let child = expand(&w, &fence, parent, &["a"]).await[0];
    w.edit("outbox", child, &[("state", "'dead'")]).await;
    assert_eq!(w.store.discard(Scope::Outbox, &[child]).await.unwrap(), [child]);
    assert_eq!(w.count("outbox").await, 0);
}

/// A mark writes token and lease, only where the row is as it was read.
pub async fn rows_are_marked_under_their_stamp<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let fence = w.owner().await;
    let all = w.insert_all((0..3).map(|_| Insert::default().with("crashes", "1"))).await;
    let rows = w.read(&fence).await.walk;
    w.edit("outbox", all[1], &[("attempt", "1")]).await;
    w.edit("outbox", all[2], &[("state", "'sent'")]).await;
    let wishes: Vec<_> = rows.iter().map(|row| (row.position(), row.stamp())).collect();
    // Whatever was wished for: until the worker's own lease ends.
    assert_eq!(w.store.mark(&fence, &wishes, 1_000).await.unwrap(), all[..1]);
    let row = w.row(all[0]).await;
    assert_eq!((row.state, row.attempt, row.crashes), (State::Processing, 0, 1));
    assert_eq!(row.claim_token, Some(fence.token));
    assert!(row.claimed && row.lease_in_us.unwrap() > 60_000_000);
    assert_eq!(w.row(all[1]).await.state, State::Pending);
    assert_eq!(w.row(all[2]).await.state, State::Sent);
    assert_eq!(ids(&w.read(&fence).await.walk), all[1..2]);
    let again = w.store.mark(&fence, &wishes, LEASE_MS).await.unwrap();
    assert_eq!(again, all[..1], "the reply of the first try may have been lost");
    let other = super::world::literal(&Uuid::new_v4().to_string());
    w.edit("outbox", all[0], &[("claim_token", &other)]).await;
    assert!(w.store.mark(&fence, &wishes, LEASE_MS).await.unwrap().is_empty(), "somebody else's");
}

/// Rows found `processing` with an ended or null lease come back with one crash more; live ones stay.
pub async fn abandoned_rows_are_recovered<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let fence = w.owner().await;
    let claimed = |lease: String| {
        Insert::default()
            .with("state", "'processing'")
            .with("attempt", "2")
            .with("claim_token", super::world::literal(&Uuid::new_v4().to_string()))
            .with("claimed_at", w.h.now_plus(-MINUTE_US))
            .with("lease_expires_at", lease)
    };
    let rows = w
        .insert_all([
            claimed(w.h.now_plus(-1_000_000)),
            Insert::default().with("state", "'processing'"),
            claimed(w.h.now_plus(5 * MINUTE_US)),
        ])
        .await;
    assert_eq!(w.store.recover(&fence, LaneSet::EMPTY, 5).await.unwrap(), Default::default());
    let recovered = w.store.recover(&fence, w.all_lanes(), 5).await.unwrap();
    assert_eq!((recovered.pending, recovered.dead.len(), recovered.unexpired), (2, 0, 1));
    assert_eq!(recovered.waiting.len(), 1, "only the lane of that row waits");
    let first = w.row(rows[0]).await;
    assert_eq!((first.state, first.attempt, first.crashes), (State::Pending, 2, 1));
    assert!(first.is_unclaimed());
    assert_eq!((w.row(rows[1]).await.state, w.row(rows[1]).await.crashes), (State::Pending, 1));
    assert_eq!((w.row(rows[2]).await.state, w.row(rows[2]).await.crashes), (State::Processing, 0));
    // What we have marked ourselves holds nobody up.
    w.mark(&fence, rows[0], Outcome::Sent).await;
    let recovered = w.store.recover(&fence, w.all_lanes(), 5).await.unwrap();
    assert_eq!((recovered.pending, recovered.dead.len(), recovered.unexpired), (0, 0, 1));
}

/// The crash that reaches the limit makes the row dead, with the code.
pub async fn crashing_rows_end_dead<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let fence = w.owner().await;
    let id = w.insert(Insert::default()).await;
    for crash in 1..=3 {
        w.mark(&fence, id, Outcome::Sent).await;
        w.edit("outbox", id, &[("lease_expires_at", &w.h.now_plus(-1))]).await;
        let recovered = w.store.recover(&fence, w.all_lanes(), 3).await.unwrap();
        let row = w.row(id).await;
        assert_eq!((row.crashes, row.attempt), (crash, 0));
        assert!(row.is_unclaimed());
        if crash < 3 {
            assert_eq!((recovered.pending, recovered.dead.len(), row.state), (1, 0, State::Pending));
        } else {
            assert_eq!((recovered.pending, recovered.dead.len(), row.state), (0, 1, State::Dead));
            let error = row.last_error.unwrap();
            assert!(error.starts_with("crashes: "));
            let buried = &recovered.dead[0];
            assert_eq!((buried.id, buried.attempt, &buried.error), (id, 0, &error));
            assert!(!buried.topic.is_empty() && buried.created_at_us > 1_700_000_000_000_000, "{buried:?}");
        }
    }
}

/// One child per destination with the parent's columns, parent `sent`, all at once and once only.
pub async fn a_parent_is_expanded_once<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let fence = w.owner().await;
    let trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    let scheduled = Insert { key: Some("k".into()), ..Insert::topic("order.created") }
        .payload(r#"{"n": 42}"#)
        .with("headers", r#"'{"h": "1"}'"#)
        .with("aggregate_type", "'order'")
        .with("trace_parent", format!("'{trace}'"))
        .with("max_attempts", "3")
        .with("created_at", w.h.now_plus(-9 * MINUTE_US))
        .with("scheduled_at", w.h.now_plus(-2 * MINUTE_US));
    let parent = w.insert(scheduled).await;
    let row = w.read_row(&fence, parent).await;
    let child = |destination: &str| Child { id: Uuid::new_v4(), destination: destination.into() };
    let expansion =
        Expansion { parent: row.position(), stamp: row.stamp(), children: vec![child("a"), child("b"), child("c")] };
    assert!(w.store.expand(&fence, std::slice::from_ref(&expansion)).await.unwrap().is_empty());
    let again = Expansion { children: vec![child("a")], ..expansion.clone() };
    assert_eq!(w.store.expand(&fence, &[again]).await.unwrap(), [parent]);
    assert_eq!(w.row(parent).await.state, State::Sent);
    assert_eq!(w.count("outbox").await, 4);

    let children = w.read(&fence).await.walk;
    assert_eq!(children.len(), 3);
    for copy in &children {
        let made = expansion.children.iter().find(|child| child.id == copy.id).unwrap();
        assert_eq!(copy.destination.as_ref(), Some(&made.destination));
        assert_eq!(copy.parent_id, Some(parent));
        assert_eq!((copy.sequence, copy.lane, &copy.topic, &copy.key), (row.sequence, row.lane, &row.topic, &row.key));
        assert_eq!((json(&copy.payload), &copy.headers), (json(&row.payload), &row.headers));
        assert_eq!((&copy.aggregate_type, &copy.trace_parent), (&row.aggregate_type, &row.trace_parent));
        assert_eq!((copy.attempt, copy.max_attempts, copy.crashes), (0, 3, 0));
        assert_eq!((copy.scheduled_at, copy.created_at_us), (row.scheduled_at, row.created_at_us));
    }
    // A child is settled like any other row.
    let settles: Vec<_> = children.iter().map(|child| settle(child, Outcome::Sent)).collect();
    assert!(w.settle(&fence, &settles).await.is_empty());
    // Children of a parent without a key are in its lane too.
    let plain = w.insert(Insert::default()).await;
    let lane = w.read_row(&fence, plain).await.lane;
    expand(&w, &fence, plain, &["a", "b"]).await;
    assert!(w.read(&fence).await.walk.iter().all(|child| child.lane == lane && child.key.is_none()));
    // A marked parent is expanded under its token.
    let marked = w.insert(Insert::default()).await;
    let claim = w.mark(&fence, marked, Outcome::Sent).await;
    let expansion = Expansion { parent: claim.position, stamp: claim.stamp, children: vec![child("a")] };
    assert!(w.store.expand(&fence, &[expansion]).await.unwrap().is_empty());
    assert!(w.row(marked).await.is_unclaimed());
}

/// A parent that changed in between gets no children; the others of the call do.
pub async fn a_changed_parent_is_not_expanded<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let fence = w.owner().await;
    let all = w.insert_all((0..3).map(|_| Insert::key("k"))).await;
    let rows = w.read(&fence).await.walk;
    w.edit("outbox", all[0], &[("attempt", "1")]).await;
    w.edit("outbox", all[1], &[("state", "'dead'")]).await;
    let expansions: Vec<_> = rows
        .iter()
        .map(|row| Expansion {
            parent: row.position(),
            stamp: row.stamp(),
            children: vec![Child { id: Uuid::new_v4(), destination: "a".into() }],
        })
        .collect();
    let mut lost = w.store.expand(&fence, &expansions).await.unwrap();
    lost.sort_by_key(|id| all.iter().position(|other| other == id));
    assert_eq!(lost, all[..2]);
    assert_eq!(w.count("outbox").await, 4);
    assert_eq!(w.row(all[0]).await.state, State::Pending);
    assert_eq!(w.row(all[1]).await.state, State::Dead);
    assert_eq!(w.row(all[2]).await.state, State::Sent);
}

/// Keys are equal only when their bytes are (contract 2.4).
pub async fn outbox_keys_never_merge<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let fence = w.owner().await;
    let keys = ["key", "Key", "kéy", "ke\u{301}y", "key ", " key", "ｋey", "straße", "strasse"];
    let all = w.insert_all(keys.map(Insert::key)).await;
    for (key, id) in keys.iter().zip(&all) {
        let read =
            Read { walk_limit: 0, keys: vec![KeyRead { key: (*key).into(), from: 0 }], key_limit: 20, ..everything() };
        let polled = w.store.poll(&fence, &[], Some(&read)).await.unwrap();
        assert_eq!(ids(&polled.keys), [*id], "{key:?}");
        assert_eq!(polled.keys[0].key.as_deref(), Some(*key));
    }
}

/// Numbers keep all of their digits on the way out.
pub async fn outbox_payloads_keep_their_digits<H: StoreHarness>() {
    let w = World::<H>::start().await;
    if !w.h.capabilities().keeps_digits {
        return;
    }
    let fence = w.owner().await;
    let digits = "12345678901234567890123456789.123456789012345678";
    let id = w.insert(Insert::default().payload(format!(r#"{{"n": {digits}}}"#))).await;
    match w.read_row(&fence, id).await.payload {
        Payload::Loaded(bytes) => assert!(String::from_utf8(bytes.to_vec()).unwrap().contains(digits)),
        other => panic!("{other:?}"),
    }
}

/// Counts go up to the bound; ages are those of the oldest pending and of the longest due row.
pub async fn the_outbox_backlog_is_bounded<H: StoreHarness>() {
    let w = World::<H>::start().await;
    assert_eq!(w.store.outbox_backlog(100).await.unwrap(), Default::default());
    let future = Insert::default()
        .with("created_at", w.h.now_plus(-7 * MINUTE_US))
        .with("scheduled_at", w.h.now_plus(60 * MINUTE_US));
    w.insert(future).await;
    let backlog = w.store.outbox_backlog(100).await.unwrap();
    assert_eq!((backlog.pending, backlog.dead, backlog.oldest_due_age_us), (1, 0, 0));
    assert!((7 * MINUTE_US..8 * MINUTE_US).contains(&backlog.oldest_pending_age_us), "{backlog:?}");
    w.insert_all((0..5).map(|_| Insert::default().with("scheduled_at", w.h.now_plus(-3 * MINUTE_US)))).await;
    w.insert_all((0..4).map(|_| Insert::default().with("state", "'dead'"))).await;
    w.insert(Insert::default().with("state", "'sent'")).await;
    let backlog = w.store.outbox_backlog(100).await.unwrap();
    assert_eq!((backlog.pending, backlog.dead), (6, 4));
    assert!((3 * MINUTE_US..4 * MINUTE_US).contains(&backlog.oldest_due_age_us), "{backlog:?}");
    let backlog = w.store.outbox_backlog(3).await.unwrap();
    assert_eq!((backlog.pending, backlog.dead), (3, 3));
}

/// Rows that applications insert and commit in any order, some rolled back, while the worker polls from the start and settles
/// what it finds: each committed row is found once, no other is (D04, conformance 73).
pub async fn nothing_is_skipped_under_load<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let fence = w.owner().await;
    let writers = if w.h.capabilities().concurrent_writers { 6 } else { 2 };
    let done = std::sync::atomic::AtomicUsize::new(0);
    let write = async |writer: usize| {
        let mut committed = Vec::new();
        for n in 0..20 {
            let rows: Vec<_> = (0..=n % 3).map(|_| Insert::key(&format!("k{}", (writer + n) % 4))).collect();
            let mut open = w.h.begin().await;
            for row in &rows {
                open.execute(&w.insert_sql(row)).await;
                // Others commit in between.
                for _ in 0..(writer * 7 + n) % 5 {
                    tokio::task::yield_now().await;
                }
            }
            if (writer + n) % 10 == 9 {
                open.rollback().await;
            } else {
                open.commit().await;
                committed.extend(rows.iter().map(|row| row.id));
            }
        }
        done.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
        committed
    };
    let poll = async {
        let mut found = Vec::new();
        let mut settles: Vec<Settle> = Vec::new();
        loop {
            let finished = done.load(std::sync::atomic::Ordering::SeqCst) == writers;
            let read = Read { walk_limit: 3, later_limit: 0, ..everything() };
            let polled = w.store.poll(&fence, &settles, Some(&read)).await.unwrap();
            assert!(polled.lost.is_empty());
            settles = polled.walk.iter().map(|row| settle(row, Outcome::Sent)).collect();
            found.extend(ids(&polled.walk));
            if finished && settles.is_empty() {
                return found;
            }
        }
    };
    let (written, found) = futures::join!(futures::future::join_all((0..writers).map(write)), poll);
    let written: HashSet<_> = written.into_iter().flatten().collect();
    assert_eq!(found.len(), written.len(), "each row once");
    assert_eq!(found.into_iter().collect::<HashSet<_>>(), written);
}

/// Two expansions of one parent at once make one set of children (conformance 64).
pub async fn two_expansions_at_once<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let other = w.other_process().await;
    let fence = w.owner().await;
    for _ in 0..5 {
        let parent = w.insert(Insert::key("k")).await;
        let row = w.read_row(&fence, parent).await;
        let expansion = || {
            let children = ["a", "b"].map(|name| Child { id: Uuid::new_v4(), destination: name.into() }).to_vec();
            [Expansion { parent: row.position(), stamp: row.stamp(), children }]
        };
        let (left, right) = (expansion(), expansion());
        let (a, b) = futures::join!(w.store.expand(&fence, &left), other.expand(&fence, &right));
        let mut lost = [a.unwrap(), b.unwrap()].concat();
        assert_eq!(lost.pop(), Some(parent));
        assert!(lost.is_empty());
        let children = w.read(&fence).await.walk;
        assert_eq!(children.len(), 2);
        let settles: Vec<_> = children.iter().map(|child| settle(child, Outcome::Sent)).collect();
        assert!(w.settle(&fence, &settles).await.is_empty());
    }
}

/// An application's open transaction holds up no call of the worker.
pub async fn an_open_insert_blocks_nobody<H: StoreHarness>() {
    let w = World::<H>::start().await;
    if !w.h.capabilities().concurrent_writers {
        return;
    }
    let fence = w.owner().await;
    w.insert_all((0..5).map(|_| Insert::key("k"))).await;
    let mut open = w.h.begin().await;
    open.execute(&w.insert_sql(&Insert::key("k"))).await;
    let work = async {
        let push = super::inbox::admit_one(&w, super::inbox::message("s", "k")).await;
        let rows = w.read(&fence).await.walk;
        assert_eq!(rows.len(), 5);
        let settles = [settle(&rows[0], Outcome::Sent), settle(&rows[1], retry(1)), settle(&rows[2], Outcome::Sent)];
        assert!(w.settle(&fence, &settles).await.is_empty());
        let marked = w.store.mark(&fence, &[(rows[3].position(), rows[3].stamp())], LEASE_MS).await.unwrap();
        assert_eq!(marked.len(), 1);
        let children = vec![Child { id: Uuid::new_v4(), destination: "a".into() }];
        let parent = Expansion { parent: rows[4].position(), stamp: rows[4].stamp(), children };
        assert!(w.store.expand(&fence, &[parent]).await.unwrap().is_empty());
        w.store.recover(&fence, w.all_lanes(), 5).await.unwrap();
        w.store.renew(&fence, LEASE_MS).await.unwrap();
        while w.store.next_push_due_in_us(w.all_lanes()).await.unwrap() != Some(0) {}
        let forward = queuebox_core::message::Forward {
            inbox_id: push,
            outbox_id: Uuid::new_v4(),
            topic: "t".into(),
            headers: "{}".into(),
        };
        assert_eq!(w.store.forward(&fence, &[forward], 5).await.unwrap(), Default::default());
        w.store.retire(&fence, LaneSet::EMPTY).await.unwrap();
    };
    tokio::time::timeout(std::time::Duration::from_secs(30), work).await.expect("a call waits for the application");
    open.rollback().await;
}

/// Every part of a read keeps to the bytes, with payloads of its own only.
pub async fn every_part_stops_at_its_bytes<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let fence = w.owner().await;
    let row = || {
        Insert::topic("t")
            .payload_of(1_000)
            .with("created_at", w.h.now_plus(-2 * MINUTE_US))
            .with("scheduled_at", w.h.now_plus(-MINUTE_US))
    };
    let all = w.insert_all((0..6).map(|_| row())).await;
    let last = w.read(&fence).await.walk[5].position();
    let destination = |limit| DestinationRead { destination: "d".into(), topics: vec!["t".into()], after: None, limit };
    let read = Read {
        walk_after: Some(last),
        lap_after: Some(Position { sequence: i64::MIN, id: Uuid::nil() }),
        lap_limit: 10,
        destinations: vec![destination(10)],
        bytes_max: 2_500,
        ..everything()
    };
    let polled = w.store.poll(&fence, &[], Some(&read)).await.unwrap();
    assert_eq!(polled.later.len(), 3);
    assert_eq!(ids(&polled.destinations), all[..3]);
    assert_eq!(ids(&polled.lap), all, "rows of a lap have no payload");
    assert!(polled.lap_ended);
    // Several destinations share the bytes.
    let read = Read { destinations: vec![destination(2), destination(2)], ..read };
    let polled = w.store.poll(&fence, &[], Some(&read)).await.unwrap();
    assert_eq!(ids(&polled.destinations), [all[0], all[1], all[0]]);
}

/// Thousands of rows in memory can be left out, and settles need no lanes.
pub async fn large_exclusions_and_settles_without_lanes<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let fence = w.owner().await;
    let all = w.insert_all((0..300).map(|_| Insert::default())).await;
    let mut exclude: Vec<_> = (0..5_000).map(|_| Uuid::new_v4()).collect();
    exclude.extend(&all[..299]);
    let read = Read { exclude, walk_limit: 10, ..everything() };
    let polled = w.store.poll(&fence, &[], Some(&read)).await.unwrap();
    assert_eq!(ids(&polled.walk), all[299..]);
    assert!(polled.walk_ended);
    let nothing = Read { lanes: LaneSet::EMPTY, ..everything() };
    let polled = w.store.poll(&fence, &[settle(&polled.walk[0], Outcome::Sent)], Some(&nothing)).await.unwrap();
    assert!(polled.lost.is_empty() && polled.walk.is_empty());
    assert_eq!(w.row(all[299]).await.state, State::Sent);
}

/// Each write of QueueBox sets `updated_at` (contract 2.1), the column that retention goes by.
pub async fn every_write_is_dated<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let fence = w.owner().await;
    let old = w.h.now_plus(-60 * MINUTE_US);
    let age = async |id| -w.us_until("outbox", id, "updated_at").await.unwrap();
    for outcome in [Outcome::Sent, retry(1), Outcome::Dead { error: "refused: e".into(), counted: true }] {
        let id = w.insert(Insert::default().with("updated_at", old.clone())).await;
        let settle = w.settle_of(&fence, id, outcome).await;
        assert!(age(id).await > 59 * MINUTE_US, "reading writes nothing");
        assert!(w.settle(&fence, std::slice::from_ref(&settle)).await.is_empty());
        assert!(age(id).await < 30 * MINUTE_US, "{settle:?}");
    }
    let id = w.insert(Insert::default().with("updated_at", old.clone())).await;
    let release = w.mark(&fence, id, Outcome::Release).await;
    assert!(age(id).await < 30 * MINUTE_US, "mark");
    w.edit("outbox", id, &[("updated_at", &old)]).await;
    assert!(w.settle(&fence, &[release]).await.is_empty());
    assert!(age(id).await < 30 * MINUTE_US, "release");
    w.edit("outbox", id, &[("updated_at", &old), ("state", "'processing'")]).await;
    assert_eq!(w.store.recover(&fence, w.all_lanes(), 5).await.unwrap().pending, 1);
    assert!(age(id).await < 30 * MINUTE_US, "recover");
    w.edit("outbox", id, &[("updated_at", &old), ("state", "'dead'")]).await;
    w.store.requeue(queuebox_core::ports::Scope::Outbox, &[id], &[State::Dead]).await.unwrap();
    assert!(age(id).await < 30 * MINUTE_US, "requeue");
    w.edit("outbox", id, &[("updated_at", &old)]).await;
    let children = expand(&w, &fence, id, &["a"]).await;
    assert!(age(id).await < 30 * MINUTE_US && age(children[0]).await < 30 * MINUTE_US, "expand");
}

/// What stands in `headers` and `payload` is handed on unchecked: the engine says what is wrong with it.
pub async fn odd_headers_and_payloads_are_handed_on<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let fence = w.owner().await;
    for odd in ["[1, 2]", "7", "\"text\"", "null", "{}", "{\"a\": {\"b\": null}}"] {
        let id = w.insert(Insert::default().payload(odd).with("headers", super::world::literal(odd))).await;
        let row = w.read_row(&fence, id).await;
        let expected: serde_json::Value = serde_json::from_str(odd).unwrap();
        assert_eq!(json(&row.payload), expected);
        assert_eq!(serde_json::from_str::<serde_json::Value>(&row.headers).unwrap(), expected);
        assert!(w.settle(&fence, &[settle(&row, Outcome::Sent)]).await.is_empty());
    }
}

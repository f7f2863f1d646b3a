//! Workers, leases, lanes (contract 2.7, 5.2; laws in `queuebox_core::ports::lanes`).

use queuebox_core::{
    Class, Fault, Lane, LaneSet, Uuid,
    message::{Forward, State},
    ports::{
        Fence, Scope,
        lanes::{Take, WorkerRow},
        outbox::{Child, Expansion, Outcome, Settle},
    },
};

use super::{Insert, StoreHarness, World, everything, world::LEASE_MS, world::literal};

async fn seen<H: StoreHarness>(w: &World<H>, fence: &Fence) -> Option<WorkerRow> {
    let survey = w.store.survey(Scope::Outbox).await.unwrap();
    survey.workers.into_iter().find(|row| row.worker == fence.worker)
}

/// Lanes of `scope` by owner.
async fn owned<H: StoreHarness>(w: &World<H>, scope: Scope, owner: Option<&str>) -> LaneSet {
    let survey = w.store.survey(scope).await.unwrap();
    survey.lanes.iter().filter(|row| row.worker.as_deref() == owner).map(|row| row.lane).collect()
}

async fn term<H: StoreHarness>(w: &World<H>, scope: Scope, lane: Lane) -> i64 {
    let survey = w.store.survey(scope).await.unwrap();
    survey.lanes.iter().find(|row| row.lane == lane).map_or(0, |row| row.term)
}

fn assert_fenced<T: std::fmt::Debug>(call: &str, result: Result<T, Fault>) {
    match result {
        Err(fault) => assert_eq!(fault.class, Class::Fenced, "{call}: {fault:?}"),
        Ok(value) => panic!("{call} went through: {value:?}"),
    }
}

/// A registered worker is live, with its Relay, configuration and lane hash.
pub async fn registration_is_seen<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let fence = w.worker("uid-1").await;
    let row = seen(&w, &fence).await.unwrap();
    assert!(row.live);
    assert_eq!((row.relay_uid.as_str(), row.config.as_str()), ("uid-1", "1/abc"));
    assert_eq!(row.lane_hash, w.store.lane_hash());
}

/// The number of lanes is part of the hash's name.
pub async fn lanes_are_numbered_and_named<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let count = w.store.lane_count();
    assert!((1..=64).contains(&count));
    assert!(w.store.lane_hash().ends_with(&format!("/{count}")), "{}", w.store.lane_hash());
    assert!(w.store.has_lanes());
}

/// Renewal extends a live lease and never brings an ended one back.
pub async fn an_ended_lease_is_never_renewed<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let fence = w.worker("relay").await;
    w.store.renew(&fence, LEASE_MS).await.unwrap();
    w.end_lease(&fence).await;
    assert!(!seen(&w, &fence).await.unwrap().live);
    assert_fenced("renew", w.store.renew(&fence, LEASE_MS).await);
    assert!(!seen(&w, &fence).await.unwrap().live);
}

/// The name without the token proves nothing.
pub async fn a_foreign_token_is_fenced<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let fence = w.owner().await;
    let id = w.insert(Insert::default()).await;
    let settle = w.settle_of(&fence, id, Outcome::Sent).await;
    let stranger = Fence { token: Uuid::new_v4(), ..fence.clone() };
    assert_fenced("renew", w.store.renew(&stranger, LEASE_MS).await);
    assert_fenced("poll", w.store.poll(&stranger, &[settle], Some(&everything())).await);
    assert_eq!(w.row(id).await.state, State::Pending);
}

/// Every call with a fence fails fenced, and changes nothing, once the lease has ended.
pub async fn nothing_is_written_after_the_lease_ended<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let fence = w.owner().await;
    let id = w.insert(Insert::default()).await;
    let abandoned = w.insert(Insert::default()).await;
    w.edit("outbox", abandoned, &[("state", "'processing'")]).await;
    let push = super::inbox::admit_one(&w, super::inbox::message("s", "k")).await;
    let row = w.read_row(&fence, id).await;
    w.end_lease(&fence).await;

    let store = &w.store;
    let settle = |outcome| [Settle { position: row.position(), stamp: row.stamp(), outcome }];
    for outcome in [
        Outcome::Sent,
        Outcome::Retry { delay_us: 1, error: "e".into() },
        Outcome::Dead { error: "refused: e".into(), counted: true },
    ] {
        assert_fenced("poll", store.poll(&fence, &settle(outcome), None).await);
    }
    assert_fenced("read", store.poll(&fence, &[], Some(&everything())).await);
    assert_fenced("mark", store.mark(&fence, &[(row.position(), row.stamp())], LEASE_MS).await);
    assert_fenced("recover", store.recover(&fence, w.all_lanes(), 5).await);
    let children = vec![Child { id: Uuid::new_v4(), destination: "d".into() }];
    let parent = Expansion { parent: row.position(), stamp: row.stamp(), children };
    assert_fenced("expand", store.expand(&fence, &[parent]).await);
    assert_fenced("waiting", store.waiting(&fence, w.all_lanes(), 10, &[]).await);
    let forward = Forward { inbox_id: push, outbox_id: Uuid::new_v4(), topic: "t".into(), headers: "{}".into() };
    assert_fenced("forward", store.forward(&fence, &[forward], 5).await);
    assert_fenced("set_aside", store.set_aside(&fence, push, Some("forward: e"), 0).await);
    assert_fenced("take", store.take(&fence, Scope::Outbox, &w.wishes(Scope::Outbox).await).await);
    assert_fenced("give", store.give(&fence, Scope::Outbox, w.all_lanes(), None).await);
    assert_fenced("retire", store.retire(&fence, LaneSet::EMPTY).await);

    let after = w.row(id).await;
    assert_eq!((after.state, after.attempt), (State::Pending, 0));
    assert!(after.is_unclaimed());
    assert_eq!(w.row(abandoned).await.state, State::Processing);
    assert_eq!(w.count("outbox").await, 2);
    assert_eq!(super::inbox::state(&w, push).await, State::Pending);
    assert_eq!(owned(&w, Scope::Outbox, Some(&fence.worker)).await, w.all_lanes());
}

/// Of two workers that saw a lane free, one gets it.
pub async fn free_lanes_are_taken_once<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let (a, b) = (w.worker("relay").await, w.worker("relay").await);
    let wanted = w.wishes(Scope::Outbox).await;
    let (got_a, got_b) =
        futures::join!(w.store.take(&a, Scope::Outbox, &wanted), w.store.take(&b, Scope::Outbox, &wanted));
    let (got_a, got_b) = (got_a.unwrap(), got_b.unwrap());
    assert_eq!(got_a.union(got_b), w.all_lanes());
    assert!(got_a.intersect(got_b).is_empty(), "{got_a:?} and {got_b:?}");
    assert_eq!(owned(&w, Scope::Outbox, Some(&a.worker)).await, got_a);
    assert_eq!(owned(&w, Scope::Outbox, Some(&b.worker)).await, got_b);
    assert!(term(&w, Scope::Outbox, 0).await > 0);
}

/// A live worker's lanes cannot be taken.
pub async fn lanes_of_a_live_owner_stay<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let a = w.owner().await;
    let b = w.worker("relay").await;
    assert!(w.take_all(&b, Scope::Outbox).await.is_empty());
    assert_eq!(owned(&w, Scope::Outbox, Some(&a.worker)).await, w.all_lanes());
}

/// After the lease has ended the lanes move, the term rises, and the old owner writes nothing any more.
pub async fn lanes_of_a_dead_owner_move<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let a = w.owner().await;
    let id = w.insert(Insert::default()).await;
    let settle = w.settle_of(&a, id, Outcome::Sent).await;
    let before = term(&w, Scope::Outbox, 0).await;
    w.end_lease(&a).await;
    let b = w.worker("relay").await;
    assert_eq!(w.take_all(&b, Scope::Outbox).await, w.all_lanes());
    assert!(term(&w, Scope::Outbox, 0).await > before);
    assert_eq!(owned(&w, Scope::Outbox, Some(&b.worker)).await, w.all_lanes());
    assert_fenced("poll", w.store.poll(&a, &[settle], None).await);
    assert_eq!(w.row(id).await.state, State::Pending);
    assert_eq!(w.read(&b).await.walk.len(), 1);
}

/// A lane that names a worker without a row is taken like one of a dead owner.
pub async fn lanes_of_a_vanished_owner_move<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let a = w.owner().await;
    let sql = format!(
        "DELETE FROM {} WHERE {} = {}",
        w.h.table("queuebox_worker"),
        w.h.column("queuebox_worker", "worker"),
        literal(&a.worker)
    );
    assert_eq!(w.h.execute(&sql).await, 1);
    let b = w.worker("relay").await;
    assert_eq!(w.take_all(&b, Scope::Outbox).await, w.all_lanes());
}

/// A take with another owner or term than stands there changes nothing.
pub async fn a_take_needs_the_term_as_seen<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let a = w.owner().await;
    let now = term(&w, Scope::Outbox, 0).await;
    w.end_lease(&a).await;
    let b = w.worker("relay").await;
    let stale = |owner: Option<&str>, term| [Take { lane: 0, owner: owner.map(str::to_owned), term }];
    for wanted in [stale(Some(&a.worker), now + 1), stale(None, now), stale(Some("somebody"), now)] {
        assert!(w.store.take(&b, Scope::Outbox, &wanted).await.unwrap().is_empty(), "{wanted:?}");
    }
    assert_eq!(w.store.take(&b, Scope::Outbox, &stale(Some(&a.worker), now)).await.unwrap(), LaneSet::first(1));
}

/// Outbox and inbox lanes are owned apart.
pub async fn scopes_do_not_collide<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let (a, b) = (w.worker("relay").await, w.worker("relay").await);
    assert_eq!(w.take_all(&a, Scope::Outbox).await, w.all_lanes());
    assert_eq!(w.take_all(&b, Scope::Inbox).await, w.all_lanes());
    assert_eq!(owned(&w, Scope::Outbox, Some(&a.worker)).await, w.all_lanes());
    assert_eq!(owned(&w, Scope::Inbox, Some(&b.worker)).await, w.all_lanes());
}

/// Lanes move to a live worker, only from their owner, never to a dead one.
pub async fn lanes_are_given_to_a_joining_worker<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let a = w.owner().await;
    let (b, dead) = (w.worker("relay").await, w.worker("relay").await);
    w.end_lease(&dead).await;
    let lane = LaneSet::first(1);
    let give = |fence, to| w.store.give(fence, Scope::Outbox, lane, Some(to));
    assert!(give(&b, b.worker.as_str()).await.unwrap().is_empty(), "not its lane");
    assert!(give(&a, dead.worker.as_str()).await.unwrap().is_empty(), "dead");
    assert!(give(&a, "nobody").await.unwrap().is_empty(), "not registered");
    let before = term(&w, Scope::Outbox, 0).await;
    assert_eq!(give(&a, b.worker.as_str()).await.unwrap(), lane);
    assert!(term(&w, Scope::Outbox, 0).await > before);
    assert_eq!(owned(&w, Scope::Outbox, Some(&b.worker)).await, lane);
    assert_eq!(owned(&w, Scope::Outbox, Some(&a.worker)).await, w.all_lanes().minus(lane));
}

/// A lane that was given back is free and can be taken.
pub async fn lanes_are_given_back<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let a = w.owner().await;
    assert_eq!(w.store.give(&a, Scope::Outbox, w.all_lanes(), None).await.unwrap(), w.all_lanes());
    assert_eq!(owned(&w, Scope::Outbox, None).await, w.all_lanes());
    assert!(w.store.give(&a, Scope::Outbox, w.all_lanes(), None).await.unwrap().is_empty());
    let b = w.worker("relay").await;
    assert_eq!(w.take_all(&b, Scope::Outbox).await, w.all_lanes());
}

/// Retiring releases marked rows without counting, frees the lanes and removes the worker.
pub async fn a_retired_worker_leaves_nothing_behind<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let a = w.owner().await;
    let id = w.insert(Insert::default()).await;
    w.mark(&a, id, Outcome::Sent).await;
    w.store.retire(&a, LaneSet::EMPTY).await.unwrap();
    let row = w.row(id).await;
    assert_eq!((row.state, row.attempt, row.crashes), (State::Pending, 0, 0));
    assert!(row.is_unclaimed());
    assert!(seen(&w, &a).await.is_none());
    assert_eq!(owned(&w, Scope::Outbox, None).await, w.all_lanes());
    assert_eq!(owned(&w, Scope::Inbox, None).await, w.all_lanes());
    assert_fenced("renew", w.store.renew(&a, LEASE_MS).await);
}

/// A careful lane keeps its owner's name, so that its next owner sees that nobody gave it back clean.
pub async fn careful_lanes_keep_the_name_of_a_retired_worker<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let a = w.owner().await;
    let careful = LaneSet::first(1);
    w.store.retire(&a, careful).await.unwrap();
    assert!(seen(&w, &a).await.is_none_or(|row| !row.live));
    assert_eq!(owned(&w, Scope::Outbox, Some(&a.worker)).await, careful);
    assert_eq!(owned(&w, Scope::Outbox, None).await, w.all_lanes().minus(careful));
    assert_eq!(owned(&w, Scope::Inbox, None).await, w.all_lanes());
    let b = w.worker("relay").await;
    assert_eq!(w.take_all(&b, Scope::Outbox).await, w.all_lanes());
}

/// A registration removes dead workers that no lane names, and no others.
pub async fn registration_sweeps_dead_workers<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let owner = w.owner().await;
    let (live, dead) = (w.worker("relay").await, w.worker("relay").await);
    w.end_lease(&owner).await;
    w.end_lease(&dead).await;
    let new = w.worker("relay").await;
    assert!(seen(&w, &dead).await.is_none(), "dead, without a lane");
    assert!(seen(&w, &owner).await.is_some(), "dead, but named by lanes");
    assert!(seen(&w, &live).await.is_some() && seen(&w, &new).await.is_some());
}

/// While a lane names a live worker of another Relay, nothing of the table is taken; afterwards all of it is.
pub async fn another_relay_stands_by<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let (a, b) = (w.worker("relay-a").await, w.worker("relay-b").await);
    let first = &w.wishes(Scope::Outbox).await[..1];
    assert_eq!(w.store.take(&a, Scope::Outbox, first).await.unwrap(), LaneSet::first(1));
    assert!(w.take_all(&b, Scope::Outbox).await.is_empty());
    w.end_lease(&a).await;
    assert_eq!(w.take_all(&b, Scope::Outbox).await, w.all_lanes());
}

/// The same for a live worker that computes lanes in another way.
pub async fn another_lane_hash_stands_by<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let (a, b) = (w.worker("relay").await, w.worker("relay").await);
    let first = &w.wishes(Scope::Outbox).await[..1];
    assert_eq!(w.store.take(&a, Scope::Outbox, first).await.unwrap(), LaneSet::first(1));
    let sql = format!(
        "UPDATE {} SET {} = 'other/7' WHERE {} = {}",
        w.h.table("queuebox_worker"),
        w.h.column("queuebox_worker", "lane_hash"),
        w.h.column("queuebox_worker", "worker"),
        literal(&a.worker)
    );
    assert_eq!(w.h.execute(&sql).await, 1);
    assert!(w.take_all(&b, Scope::Outbox).await.is_empty());
    w.end_lease(&a).await;
    assert_eq!(w.take_all(&b, Scope::Outbox).await, w.all_lanes());
}

/// Two Relays that start together, each wishing for other lanes: one of them gets none.
pub async fn two_relays_never_share_a_table<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let other = w.other_process().await;
    for _ in 0..5 {
        let (a, b) = (w.worker("relay-a").await, w.worker("relay-b").await);
        let wanted = w.wishes(Scope::Outbox).await;
        let (left, right) = wanted.split_at(wanted.len() / 2);
        let left = if left.is_empty() { right } else { left };
        let (got_a, got_b) =
            futures::join!(w.store.take(&a, Scope::Outbox, left), other.take(&b, Scope::Outbox, right));
        let (got_a, got_b) = (got_a.unwrap(), got_b.unwrap());
        assert!(got_a.is_empty() != got_b.is_empty(), "{got_a:?} and {got_b:?}");
        w.store.retire(&a, LaneSet::EMPTY).await.unwrap();
        w.store.retire(&b, LaneSet::EMPTY).await.unwrap();
    }
}

/// One renewal extends the worker's lease and that of every row it has marked.
pub async fn renewal_covers_marked_rows<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let fence = w.owner().await;
    let (mine, plain) = (w.insert(Insert::default()).await, w.insert(Insert::default()).await);
    let settle = w.mark(&fence, mine, Outcome::Sent).await;
    w.edit("outbox", mine, &[("lease_expires_at", &w.h.now_plus(1_000_000))]).await;
    w.store.renew(&fence, LEASE_MS).await.unwrap();
    assert!(w.row(mine).await.lease_in_us.unwrap() > 60_000_000);
    assert!(w.row(plain).await.is_unclaimed());
    assert!(w.settle(&fence, &[settle]).await.is_empty());
}

/// What the old owner was writing when its lease ended is committed before the takeover returns, or fails fenced.
pub async fn a_takeover_waits_for_the_old_owners_statement<H: StoreHarness>() {
    let w = World::<H>::start().await;
    if !w.h.capabilities().concurrent_writers {
        return;
    }
    let a = w.owner().await;
    let id = w.insert(Insert::default()).await;
    let settle = w.settle_of(&a, id, Outcome::Sent).await;
    // Somebody holds the row, so that the settle stops inside its transaction, behind its fence.
    let mut held = w.h.begin().await;
    let topic = w.h.column("outbox", "topic");
    let sql = format!(
        "UPDATE {} SET {topic} = {topic} WHERE {} = {}",
        w.h.table("outbox"),
        w.h.column("outbox", "id"),
        literal(&id.to_string())
    );
    assert_eq!(held.execute(&sql).await, 1);
    let settling = {
        let (store, a) = (w.store.clone(), a.clone());
        tokio::spawn(async move { store.poll(&a, &[settle], None).await })
    };
    let taking = {
        let (other, b) = (w.other_process().await, w.worker("relay").await);
        w.end_lease(&a).await;
        let wanted = w.wishes(Scope::Outbox).await;
        tokio::spawn(async move { other.take(&b, Scope::Outbox, &wanted).await })
    };
    held.rollback().await;
    assert_eq!(taking.await.unwrap().unwrap(), w.all_lanes());
    // The take has returned: whatever the old owner did is visible now and stays so.
    let now = w.row(id).await.state;
    match settling.await.unwrap() {
        Ok(polled) => {
            assert!(polled.lost.is_empty());
            assert_eq!(now, State::Sent);
        }
        Err(fault) => {
            assert!(fault.is_fenced(), "{fault:?}");
            assert_eq!(now, State::Pending);
        }
    }
    assert_eq!(w.row(id).await.state, now);
}

//! Finished rows: pages, replay, discard, retention (contract 3.1, 11; laws in `queuebox_core::ports::ledger`).

use queuebox_core::{
    Uuid,
    message::{Consumption, EXPANDED, NewInboxRow, State},
    ports::{
        Admitted, Scope,
        ledger::{Direction, LedgerFilter, LedgerRow},
        outbox::{Child, Expansion, Outcome, PruneRule},
    },
};

use super::{
    Insert, StoreHarness, World, everything,
    inbox::{admit_one, message},
};

const MINUTE_US: i64 = 60_000_000;
const DAY_US: i64 = 24 * 60 * MINUTE_US;
const HOUR_MS: u64 = 3_600_000;

fn state(state: State) -> String {
    format!("'{}'", state.as_str())
}

fn in_state(wanted: State) -> Insert {
    Insert::default().with("state", state(wanted))
}

fn of(states: &[State]) -> LedgerFilter {
    LedgerFilter { states: states.to_vec(), ..LedgerFilter::default() }
}

async fn page<H: StoreHarness>(w: &World<H>, table: Scope, filter: &LedgerFilter) -> Vec<LedgerRow> {
    w.store.page(table, filter, Direction::OldestFirst, None, 100).await.unwrap()
}

async fn found<H: StoreHarness>(w: &World<H>, table: Scope, filter: LedgerFilter) -> Vec<Uuid> {
    page(w, table, &filter).await.iter().map(|row| row.id).collect()
}

/// Pages in either direction meet each row once, also rows of one `created_at`, and rows that change in between.
pub async fn pages_cover_all_rows_once<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let mut expected = Vec::new();
    for group in 0..4 {
        // One transaction, one time: the id decides.
        let at = w.h.now_plus((group - 20) * MINUTE_US);
        let rows = (0..3).map(|_| in_state(State::Dead).with("created_at", at.clone()));
        let first = w.insert_all(rows).await;
        let pin = format!(
            "UPDATE {table} SET {created} = (SELECT t FROM (SELECT max({created}) AS t FROM {table}) AS x) WHERE {id} IN ({})",
            first.iter().map(|id| format!("'{id}'")).collect::<Vec<_>>().join(", "),
            table = w.h.table("outbox"),
            created = w.h.column("outbox", "created_at"),
            id = w.h.column("outbox", "id"),
        );
        w.h.execute(&pin).await;
        let mut first = first;
        first.sort();
        expected.extend(first);
    }
    w.insert_all([in_state(State::Pending), in_state(State::Sent)]).await;
    for direction in [Direction::OldestFirst, Direction::NewestFirst] {
        let (mut after, mut ids) = (None, Vec::new());
        loop {
            let rows = w.store.page(Scope::Outbox, &of(&[State::Dead]), direction, after, 5).await.unwrap();
            let Some(last) = rows.last() else { break };
            assert!(rows.len() <= 5);
            after = Some(last.cursor);
            ids.extend(rows.iter().map(|row| row.id));
        }
        if direction == Direction::NewestFirst {
            ids.reverse();
        }
        assert_eq!(ids, expected, "{direction:?}");
    }
    let everything = page(&w, Scope::Outbox, &LedgerFilter::default()).await;
    assert_eq!(everything.len(), 14, "no state named = any");
}

/// All filters of the outbox, alone and together.
pub async fn filters_are_combined<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let fence = w.owner().await;
    let old = w.h.now_plus(-2 * DAY_US);
    let dead = |topic: &str, key: &str, error: &str| {
        Insert { key: Some(key.into()), ..Insert::topic(topic) }
            .with("state", "'dead'")
            .with("last_error", format!("'{error}'"))
    };
    let a = w.insert(dead("a", "k", "attempts: status 500").with("created_at", old.clone())).await;
    let b = w.insert(dead("b", "k", "refused: too large").with("created_at", w.h.now_plus(-DAY_US))).await;
    let c = w.insert(dead("a", "K", "attempts_of_old: x")).await;
    let parent = w.insert(Insert::topic("fan")).await;
    let row = w.read_row(&fence, parent).await;
    let child = Child { id: Uuid::new_v4(), destination: "d".into() };
    let expansion = Expansion { parent: row.position(), stamp: row.stamp(), children: vec![child.clone()] };
    w.store.expand(&fence, &[expansion]).await.unwrap();

    let any = LedgerFilter::default;
    let now_us = page(&w, Scope::Outbox, &any()).await.last().unwrap().created_at_us;
    let cases = [
        (LedgerFilter { states: vec![State::Dead], ..any() }, vec![a, b, c]),
        (LedgerFilter { states: vec![State::Sent, State::Pending], ..any() }, vec![parent, child.id]),
        (LedgerFilter { ids: vec![c, a], ..any() }, vec![a, c]),
        (LedgerFilter { topics: vec!["a".into(), "zz".into()], ..any() }, vec![a, c]),
        (LedgerFilter { key: Some("k".into()), ..any() }, vec![a, b]),
        (LedgerFilter { code: Some("attempts".into()), ..any() }, vec![a]),
        (LedgerFilter { code: Some("%".into()), ..any() }, vec![]),
        (LedgerFilter { parent_id: Some(parent), ..any() }, vec![child.id]),
        (LedgerFilter { created_before_us: Some(now_us - DAY_US / 2), ..any() }, vec![a, b]),
        (
            LedgerFilter { created_after_us: Some(now_us - DAY_US * 3 / 2), states: vec![State::Dead], ..any() },
            vec![b, c],
        ),
        (LedgerFilter { topics: vec!["a".into()], key: Some("k".into()), states: vec![State::Dead], ..any() }, vec![a]),
        (LedgerFilter { topics: vec!["a".into()], key: Some("k".into()), states: vec![State::Sent], ..any() }, vec![]),
    ];
    for (filter, expected) in cases {
        let mut ids = found(&w, Scope::Outbox, filter.clone()).await;
        let mut expected = expected;
        ids.sort();
        expected.sort();
        assert_eq!(ids, expected, "{filter:?}");
    }
    let row = &page(&w, Scope::Outbox, &LedgerFilter { ids: vec![a], ..any() }).await[0];
    assert_eq!((row.topic.as_deref(), row.key.as_deref(), row.state), (Some("a"), Some("k"), State::Dead));
    assert_eq!(row.last_error.as_deref(), Some("attempts: status 500"));
    assert_eq!((row.attempt, row.crashes, row.max_attempts), (0, 0, Some(5)));
    assert!(row.sequence.is_some() && row.finished_at_us.is_some());
    // Times are exclusive.
    let exact = LedgerFilter { created_after_us: Some(row.created_at_us), ids: vec![a], ..any() };
    assert!(found(&w, Scope::Outbox, exact).await.is_empty());
    let exact = LedgerFilter { created_before_us: Some(row.created_at_us), ids: vec![a], ..any() };
    assert!(found(&w, Scope::Outbox, exact).await.is_empty());
}

/// All filters of the inbox.
pub async fn inbox_filters_are_combined<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let one = |source: &str, key: &str| NewInboxRow {
        aggregate_id: Some(format!("agg-{key}")),
        event_type: Some(format!("type-{key}")),
        dead: Some("bad_key: too long".into()),
        ..message(source, key)
    };
    let a = admit_one(&w, one("s", "1")).await;
    let b = admit_one(&w, NewInboxRow { consumption: Consumption::Pull, ..one("other", "1") }).await;
    let c = admit_one(&w, message("s", "2")).await;
    let any = LedgerFilter::default;
    let cases = [
        (LedgerFilter { sources: vec!["s".into()], ..any() }, vec![a, c]),
        (LedgerFilter { event_type: Some("type-1".into()), ..any() }, vec![a, b]),
        (LedgerFilter { key: Some("agg-1".into()), ..any() }, vec![a, b]),
        (LedgerFilter { consumption: Some(Consumption::Pull), ..any() }, vec![b]),
        (LedgerFilter { code: Some("bad_key".into()), sources: vec!["other".into()], ..any() }, vec![b]),
        (LedgerFilter { states: vec![State::Pending], ..any() }, vec![c]),
        (LedgerFilter { ids: vec![a, c], states: vec![State::Dead], ..any() }, vec![a]),
    ];
    for (filter, expected) in cases {
        assert_eq!(found(&w, Scope::Inbox, filter.clone()).await, expected, "{filter:?}");
    }
    let row = &page(&w, Scope::Inbox, &LedgerFilter { ids: vec![b], ..any() }).await[0];
    assert_eq!((row.source.as_deref(), row.idempotency_key.as_deref()), (Some("other"), Some("1")));
    assert_eq!((row.consumption, row.state), (Some(Consumption::Pull), State::Dead));
}

/// One row whole, of either table; `None` for an unknown id.
pub async fn an_entry_is_whole<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let id = w.insert(Insert::key("k").payload(r#"{"n": 42}"#).with("headers", r#"'{"h": "1"}'"#)).await;
    let entry = w.store.entry(Scope::Outbox, id).await.unwrap().unwrap();
    assert_eq!((entry.row.id, entry.row.key.as_deref()), (id, Some("k")));
    let json = |text: &str| serde_json::from_str::<serde_json::Value>(text).unwrap();
    assert_eq!((json(&entry.payload)["n"].as_i64(), json(&entry.headers)["h"].as_str()), (Some(42), Some("1")));
    let id = admit_one(&w, message("s", "k")).await;
    let entry = w.store.entry(Scope::Inbox, id).await.unwrap().unwrap();
    assert_eq!((entry.row.source.as_deref(), json(&entry.payload)["n"].as_i64()), (Some("s"), Some(1)));
    assert!(w.store.entry(Scope::Inbox, Uuid::new_v4()).await.unwrap().is_none());
    assert!(w.store.entry(Scope::Outbox, id).await.unwrap().is_none());
}

/// conformance 113, 114: only rows in the named finished states move; they start anew and are due now, behind their time.
pub async fn requeue_moves_finished_rows_only<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let fence = w.owner().await;
    let finished = |state| {
        in_state(state)
            .with("attempt", "5")
            .with("crashes", "2")
            .with("last_error", "'attempts: e'")
            .with("created_at", w.h.now_plus(-DAY_US))
            .with("scheduled_at", w.h.now_plus(-DAY_US))
    };
    let all = w.insert_all([State::Dead, State::Sent, State::Pending, State::Processing].map(finished)).await;
    let sequence = w.row(all[0]).await.sequence;
    let requeue = |states: &'static [State]| {
        let (store, all) = (w.store.clone(), all.clone());
        async move { store.requeue(Scope::Outbox, &all, states).await.unwrap() }
    };
    assert!(requeue(&[State::Pending, State::Processing]).await.is_empty());
    assert_eq!(requeue(&[State::Dead]).await, all[..1]);
    let row = w.row(all[0]).await;
    assert_eq!((row.state, row.attempt, row.crashes, row.last_error), (State::Pending, 0, 0, None));
    assert_eq!(row.sequence, sequence);
    assert!((-MINUTE_US..=0).contains(&row.due_in_us), "{}", row.due_in_us);
    // It is found at once, although its place in the order was passed long ago.
    assert!(w.read(&fence).await.later.iter().any(|later| later.id == all[0]));
    assert_eq!(w.row(all[1]).await.state, State::Sent);
    assert_eq!(requeue(&[State::Dead, State::Sent]).await, all[1..2]);
    for (id, state) in [(all[2], State::Pending), (all[3], State::Processing)] {
        let row = w.row(id).await;
        assert_eq!((row.state, row.attempt), (state, 5), "never touched");
    }
    assert!(w.store.requeue(Scope::Outbox, &[Uuid::new_v4()], &[State::Dead]).await.unwrap().is_empty());
}

/// conformance 66: a parent that was expanded is never moved; its children are.
pub async fn requeue_spares_expanded_parents<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let fence = w.owner().await;
    let parent = w.insert(Insert::key("k")).await;
    let row = w.read_row(&fence, parent).await;
    let child = Child { id: Uuid::new_v4(), destination: "d".into() };
    let expansion = Expansion { parent: row.position(), stamp: row.stamp(), children: vec![child.clone()] };
    w.store.expand(&fence, &[expansion]).await.unwrap();
    let settle = w.settle_of(&fence, child.id, Outcome::Sent).await;
    w.settle(&fence, &[settle]).await;
    let moved = w.store.requeue(Scope::Outbox, &[parent, child.id], &[State::Sent]).await.unwrap();
    assert_eq!(moved, [child.id]);
    assert_eq!(w.row(parent).await.state, State::Sent);
    // Its children are gone, by retention or by hand.
    let (outbox, own) = (w.h.table("outbox"), w.h.column("outbox", "id"));
    w.h.execute(&format!("DELETE FROM {outbox} WHERE {own} = '{}'", child.id)).await;
    assert!(w.store.requeue(Scope::Outbox, &[parent], &[State::Sent, State::Dead]).await.unwrap().is_empty());
    let row = w.row(parent).await;
    assert_eq!((row.state, row.last_error.as_deref()), (State::Sent, Some(EXPANDED)));
}

/// conformance 117: finished inbox rows of both kinds are pending again.
pub async fn inbox_requeue<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let fence = w.owner().await;
    let push = admit_one(&w, NewInboxRow { dead: Some("empty_topic: e".into()), ..message("s", "push") }).await;
    let pull = NewInboxRow { consumption: Consumption::Pull, dead: Some("handler: e".into()), ..message("s", "pull") };
    let pull = admit_one(&w, pull).await;
    let done = admit_one(&w, message("s", "done")).await;
    w.edit("inbox", done, &[("state", "'processed'"), ("processed_at", &w.h.now_plus(0))]).await;
    let live = admit_one(&w, message("s", "live")).await;
    w.edit("inbox", pull, &[("attempt", "4"), ("crashes", "1")]).await;
    let ids = [push, pull, done, live];
    let mut moved = w.store.requeue(Scope::Inbox, &ids, &[State::Dead]).await.unwrap();
    moved.sort_by_key(|id| ids.iter().position(|other| other == id));
    assert_eq!(moved, [push, pull]);
    let names = ["state", "attempt", "crashes", "last_error", "claim_token", "processed_at"];
    for id in [push, pull] {
        let row = w.columns("inbox", id, &names).await.unwrap();
        let row: Vec<_> = row.iter().map(|value| value.as_deref().unwrap_or("NULL")).collect();
        assert_eq!(row, ["pending", "0", "0", "NULL", "NULL", "NULL"]);
    }
    assert_eq!(w.store.requeue(Scope::Inbox, &ids, &[State::Processed]).await.unwrap(), [done]);
    let waiting = w.store.waiting(&fence, w.all_lanes(), 10, &[]).await.unwrap();
    assert!(waiting.iter().any(|row| row.id == push) && waiting.iter().all(|row| row.id != pull));
}

/// Only dead rows can be discarded, of either table.
pub async fn discard_takes_dead_rows_only<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let all = w.insert_all([State::Dead, State::Sent, State::Pending, State::Processing].map(in_state)).await;
    assert_eq!(w.store.discard(Scope::Outbox, &all).await.unwrap(), all[..1]);
    assert_eq!(w.count("outbox").await, 3);
    let dead = admit_one(&w, NewInboxRow { dead: Some("not_json: e".into()), ..message("s", "dead") }).await;
    let live = admit_one(&w, message("s", "live")).await;
    assert_eq!(w.store.discard(Scope::Inbox, &[dead, live]).await.unwrap(), [dead]);
    assert_eq!(w.count("inbox").await, 1);
}

/// Steps until one deletes something, or the pass is over; returns how many rows went.
async fn prune<H: StoreHarness>(w: &World<H>, table: Scope, state: State, rule: PruneRule, batch: u32) -> u64 {
    loop {
        let step = w.store.prune(table, state, rule, batch).await.unwrap();
        assert!(step.rows <= u64::from(batch), "a batch is a bound");
        if step.rows > 0 || !step.more {
            return step.rows;
        }
    }
}

/// D32: of old rows in every state only the named finished one goes, by `updated_at`, in batches.
pub async fn prune_by_age<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let old = |state| {
        in_state(state).with("created_at", w.h.now_plus(-40 * DAY_US)).with("updated_at", w.h.now_plus(-40 * DAY_US))
    };
    let rows = [State::Pending, State::Processing, State::Sent, State::Sent, State::Sent, State::Dead].map(old);
    let all = w.insert_all(rows).await;
    let fresh = in_state(State::Sent).with("created_at", w.h.now_plus(-40 * DAY_US));
    let fresh = w.insert(fresh).await;
    let rule = PruneRule::OlderThan(30 * 24 * HOUR_MS);
    let prune = async |state, batch| prune(&w, Scope::Outbox, state, rule, batch).await;
    assert_eq!((prune(State::Sent, 2).await, prune(State::Sent, 2).await, prune(State::Sent, 2).await), (2, 1, 0));
    assert!(w.find(fresh).await.is_some(), "finished lately, created long ago");
    assert!(w.find(all[5]).await.is_some(), "dead rows have an age of their own");
    assert_eq!(prune(State::Dead, 10).await, 1);
    assert_eq!(prune(State::Pending, 10).await + prune(State::Processing, 10).await, 0, "never");
    assert_eq!(w.count("outbox").await, 3);
    // No row is a thousand years old, and the time that long ago is one that the database knows.
    let rule = PruneRule::OlderThan(1_000 * 365 * 24 * HOUR_MS);
    assert_eq!(super::ledger::prune(&w, Scope::Outbox, State::Dead, rule, 10).await, 0);
}

/// All but the newest so many of each finished state, by `updated_at`.
pub async fn prune_by_count<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let at = |state, minutes: i64| in_state(state).with("updated_at", w.h.now_plus(-minutes * MINUTE_US));
    let sent = w.insert_all([3, 1, 5, 2, 4].map(|minutes| at(State::Sent, minutes))).await;
    w.insert_all([9, 8].map(|minutes| at(State::Dead, minutes))).await;
    w.insert(at(State::Pending, 9)).await;
    let prune = async |rule, batch| prune(&w, Scope::Outbox, State::Sent, rule, batch).await;
    assert_eq!(prune(PruneRule::Beyond(2), 2).await, 2);
    assert_eq!(prune(PruneRule::Beyond(2), 2).await, 1);
    assert_eq!(prune(PruneRule::Beyond(2), 2).await, 0);
    assert!(w.find(sent[1]).await.is_some() && w.find(sent[3]).await.is_some(), "the newest stay");
    assert_eq!(w.count("outbox").await, 5);
    assert_eq!(prune(PruneRule::Beyond(0), 10).await, 2);
}

/// Of dead rows as well exactly the newest stay, and of rows that finished in one moment exactly so many as there is room for.
pub async fn prune_by_count_is_exact<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let moment = w.h.now_plus(-MINUTE_US);
    w.insert_all((0..50).map(|_| in_state(State::Sent).with("updated_at", moment.clone()))).await;
    let at = |minutes: i64| in_state(State::Dead).with("updated_at", w.h.now_plus(-minutes * MINUTE_US));
    let dead = w.insert_all((1..=9).map(at)).await;
    let all = async |state, rule| {
        let mut gone = 0;
        while let rows @ 1.. = prune(&w, Scope::Outbox, state, rule, 4).await {
            gone += rows;
        }
        gone
    };
    assert_eq!(all(State::Sent, PruneRule::Beyond(7)).await, 43);
    assert_eq!(all(State::Dead, PruneRule::Beyond(3)).await, 6);
    assert_eq!(all(State::Dead, PruneRule::Beyond(3)).await, 0);
    for newest in &dead[..3] {
        assert!(w.find(*newest).await.is_some(), "the newest stay");
    }
    assert_eq!(all(State::Dead, PruneRule::Beyond(0)).await, 3);
}

/// The inbox prunes by `created_at`, finished rows only.
pub async fn prune_of_the_inbox_is_by_receipt<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let old = w.h.now_plus(-40 * DAY_US);
    let mut ids = Vec::new();
    for state in ["pending", "processing", "processed", "dead"] {
        let id = admit_one(&w, message("s", state)).await;
        w.edit("inbox", id, &[("state", &format!("'{state}'")), ("created_at", &old)]).await;
        ids.push(id);
    }
    let fresh = admit_one(&w, message("s", "fresh")).await;
    w.edit("inbox", fresh, &[("state", "'processed'")]).await;
    let rule = PruneRule::OlderThan(30 * 24 * HOUR_MS);
    let prune = async |state| prune(&w, Scope::Inbox, state, rule, 10).await;
    assert_eq!((prune(State::Processed).await, prune(State::Dead).await), (1, 1));
    assert_eq!(prune(State::Pending).await + prune(State::Processing).await, 0);
    assert_eq!(w.count("inbox").await, 3);
}

/// A parent stays while a child of it is unfinished.
pub async fn prune_keeps_parents_with_open_children<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let fence = w.owner().await;
    let parent = w.insert(Insert::default()).await;
    let row = w.read_row(&fence, parent).await;
    let child = Child { id: Uuid::new_v4(), destination: "d".into() };
    let expansion = Expansion { parent: row.position(), stamp: row.stamp(), children: vec![child.clone()] };
    w.store.expand(&fence, &[expansion]).await.unwrap();
    w.edit("outbox", parent, &[("updated_at", &w.h.now_plus(-DAY_US))]).await;
    let prune = async || prune(&w, Scope::Outbox, State::Sent, PruneRule::OlderThan(HOUR_MS), 10).await;
    assert_eq!(prune().await, 0);
    let settle = w.settle_of(&fence, child.id, Outcome::Sent).await;
    w.settle(&fence, &[settle]).await;
    assert_eq!(prune().await, 1);
    assert!(w.find(parent).await.is_none());
    assert!(w.store.poll(&fence, &[], Some(&everything())).await.unwrap().walk.is_empty());
}

/// conformance 122: once its row is gone, a key is new again.
pub async fn the_end_of_a_row_ends_its_deduplication<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let id = admit_one(&w, NewInboxRow { dead: Some("not_json: e".into()), ..message("s", "k") }).await;
    assert_eq!(w.store.admit(&[message("s", "k")]).await.unwrap(), [Admitted::Duplicate]);
    w.edit("inbox", id, &[("created_at", &w.h.now_plus(-DAY_US))]).await;
    assert_eq!(prune(&w, Scope::Inbox, State::Dead, PruneRule::OlderThan(HOUR_MS), 10).await, 1);
    admit_one(&w, message("s", "k")).await;
}

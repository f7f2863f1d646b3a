//! Section G: order.

use std::collections::{BTreeMap, BTreeSet};

use queuebox_testkit::{Answer, Recorded, promise};
use rand::RngExt;
use serde_json::json;

use super::pull::{claim, receive};
use crate::support::{Kind, OutboxRow, PATIENCE, World, number, on_every_database, on_postgres, text};

/// The `n` of each payload, in order of arrival.
fn numbers(requests: &[Recorded]) -> Vec<i64> {
    requests.iter().map(|request| request.json()["n"].as_i64().unwrap()).collect()
}

/// The `n` of each payload by key, in order of arrival.
fn by_key(requests: &[Recorded]) -> BTreeMap<String, Vec<i64>> {
    let mut keys: BTreeMap<String, Vec<i64>> = BTreeMap::new();
    for request in requests {
        keys.entry(request.header("x-message-key").to_owned()).or_default().push(request.json()["n"].as_i64().unwrap());
    }
    keys
}

/// Whether the receiver is asked for this `n` for the first time.
fn fails_first(n: i64) -> impl Fn(&Recorded) -> Answer {
    move |request| {
        let is_first = request.json()["n"] == n && request.header("x-attempt") == "0";
        Answer::status(if is_first { 500 } else { 200 })
    }
}

async fn key_order_in_one_transaction(kind: Kind) {
    let world = World::on(kind).await.destination("receiver", json!({ "limits": { "maxInFlight": 8 } }));
    // The first takes longest: whoever did not wait for it would overtake it.
    world.receiver.answer_with(|request| {
        let n = request.json()["n"].as_u64().unwrap();
        Answer::ok().after(std::time::Duration::from_millis(300 / n))
    });
    world.start().await;
    world.db.insert_all((1..=3).map(|n| OutboxRow::new("order.created", n).key("k"))).await;
    world.db.wait_states("outbox", &[("sent", 3)]).await;
    let requests = world.receiver.requests();
    assert_eq!(numbers(&requests), [1, 2, 3]);
    assert!(requests.iter().all(|request| request.in_flight == 1), "two of a key at once");
    world.finish().await;
}

async fn key_order_over_workers(kind: Kind) {
    let world = World::on(kind).await;
    world.receiver.answer_with(|_| Answer::ok().after(std::time::Duration::from_millis(5)));
    world.start().await;
    world.start().await;
    world.spread_over(2).await;
    for batch in 0..10 {
        let rows = (0..20).map(|n| batch * 20 + n).map(|n| OutboxRow::new("order", n).key(&format!("k{}", n % 10)));
        world.db.insert_all(rows).await;
    }
    world.db.wait_states("outbox", &[("sent", 200)]).await;
    let requests = world.receiver.requests();
    promise(requests.len() == 200, format_args!("{} requests", requests.len()));
    for (key, numbers) in by_key(&requests) {
        promise(numbers.is_sorted(), format_args!("{key}: {numbers:?}"));
    }
    world.finish().await;
}

async fn failing_head_holds_its_key(kind: Kind) {
    // Long enough that what waits behind the failed row is seen while it waits.
    let world = World::on(kind).await.relay(json!({ "outbox": { "backoff": { "initial": "3s", "max": "3s" } } }));
    world.receiver.answer_with(fails_first(1));
    world.start().await;
    let ids = world.db.insert_all((1..=3).map(|n| OutboxRow::new("order", n).key("troubled"))).await;
    world
        .db
        .wait_row(&format!("SELECT * FROM outbox WHERE id = '{}'", ids[0]), |row| number(row, "attempt") == 1)
        .await;
    let other = world.db.insert(OutboxRow::new("order", 10).key("other")).await;
    world.db.wait_outbox(&other, "sent").await;
    for id in &ids[1..] {
        let row = world.db.outbox(id).await;
        let head = world.db.outbox(&ids[0]).await;
        // The head may have been sent by now on a machine that is slow; then nothing can be said here.
        if text(&head, "state") == "pending" {
            assert_eq!((text(&row, "state"), number(&row, "attempt")), ("pending", 0));
        }
    }
    world.db.wait_states("outbox", &[("sent", 4)]).await;
    let requests = world.receiver.requests();
    assert_eq!(by_key(&requests)["troubled"], [1, 1, 2, 3]);
    for id in &ids[1..] {
        assert_eq!(number(&world.db.outbox(id).await, "attempt"), 0);
    }
    let position = |key: &str, n: i64| {
        let fits =
            |r: &Recorded| r.header("x-message-key") == key && r.json()["n"] == n && r.header("x-attempt") != "0";
        requests.iter().position(fits)
    };
    let other_at = requests.iter().position(|r| r.header("x-message-key") == "other").unwrap();
    assert!(other_at < position("troubled", 1).unwrap(), "the other key waited for the retry");
    world.finish().await;
}

async fn dead_head_releases_its_key(kind: Kind) {
    let world = World::on(kind).await;
    world.receiver.answer_with(|request| Answer::status(if request.json()["n"] == 1 { 500 } else { 200 }));
    world.start().await;
    let ids = world
        .db
        .insert_all([OutboxRow::new("order", 1).key("k").max_attempts(2), OutboxRow::new("order", 2).key("k")])
        .await;
    world.db.wait_outbox(&ids[1], "sent").await;
    assert_eq!(text(&world.db.outbox(&ids[0]).await, "state"), "dead");
    assert_eq!(numbers(&world.receiver.requests()), [1, 1, 2]);
    world.finish().await;
}

async fn no_key_no_order(kind: Kind) {
    let world = World::on(kind).await;
    // Answers only while others are being answered: one after the other would never end.
    world.receiver.answer_with(|_| Answer::stall());
    world.start().await;
    world
        .db
        .insert_all(
            (1..=4).map(|n| OutboxRow::new("order", n)).chain((5..=8).map(|n| OutboxRow::new("order", n).key(""))),
        )
        .await;
    let requests = world.receiver.wait_for(8, PATIENCE).await;
    let first: Vec<&Recorded> = requests.iter().filter(|request| request.header("x-attempt") == "0").collect();
    assert_eq!(first.iter().map(|request| request.in_flight).max(), Some(8), "published one after the other");
    world.receiver.answer_always(Answer::ok());
    world.db.wait_states("outbox", &[("sent", 8)]).await;
    world.finish().await;
}

async fn claim_order_not_commit_order(kind: Kind) {
    let world = World::on(kind).await;
    world.start().await;
    let mut slow = world.db.begin().await;
    let first = slow.insert(OutboxRow::new("order", 1).key("k")).await;
    let second = world.db.insert(OutboxRow::new("order", 2).key("k")).await;
    world.db.wait_outbox(&second, "sent").await;
    slow.commit().await;
    world.db.wait_outbox(&first, "sent").await;
    assert_eq!(numbers(&world.receiver.requests()), [2, 1]);
    let sequence = async |id: &str| number(&world.db.outbox(id).await, "sequence");
    assert!(sequence(&first).await < sequence(&second).await);
    world.finish().await;
}

mod late_commit_is_never_skipped {
    use super::*;

    /// SQLite has one writer at a time, so there a number cannot commit after a higher one; the load is the same.
    #[tokio::test]
    async fn under_load_on_sqlite() {
        under_load(Kind::Sqlite, 4, 250).await;
    }

    #[tokio::test]
    async fn under_load_on_postgres() {
        under_load(Kind::Postgres, 50, 200).await;
    }

    /// Transactions of random length by many writers, a tenth of which is rolled back: all that was committed, once.
    async fn under_load(kind: Kind, writers: usize, each: usize) {
        // On SQLite the writers keep a worker waiting; a lease that ends meanwhile would be a repeat, which is another row.
        let world = World::on(kind).await.relay(json!({ "outbox": { "claimTimeout": "60s" } }));
        world.start().await;
        let write = async |writer: usize| {
            let mut committed = Vec::new();
            let mut written = 0;
            while written < each {
                let (rows, rolled_back, pause) = {
                    let mut rng = rand::rng();
                    (rng.random_range(1..=20).min(each - written), rng.random_bool(0.1), rng.random_range(0..30))
                };
                let mut tx = world.db.begin().await;
                let mut ids = Vec::new();
                for n in 0..rows {
                    ids.push(tx.insert(OutboxRow::new("order", n as i64).key(&format!("w{writer}-{}", n % 3))).await);
                }
                written += rows;
                if kind == Kind::Postgres {
                    // The point of it: numbers are taken, others commit higher ones meanwhile.
                    tokio::time::sleep(std::time::Duration::from_millis(pause)).await;
                }
                if rolled_back {
                    tx.rollback().await;
                } else {
                    tx.commit().await;
                    committed.extend(ids);
                }
            }
            committed
        };
        let all = futures::future::join_all((0..writers).map(write)).await;
        let committed: BTreeSet<String> = all.into_iter().flatten().collect();
        world.db.wait_states("outbox", &[("sent", committed.len() as i64)]).await;
        let requests = world.receiver.requests();
        let arrived: BTreeSet<String> = requests.iter().map(|r| r.header("x-message-id").to_owned()).collect();
        promise(arrived == committed, format_args!("others than the committed ones arrived"));
        assert_eq!(requests.len(), committed.len(), "each once");
        world.finish().await;
    }

    /// Behind a backlog larger than a batch the late row waits for the next walk at most, whose age is a gauge.
    #[tokio::test]
    async fn behind_a_backlog_on_postgres() {
        let world = World::on(Kind::Postgres).await.relay(json!({ "outbox": { "batchSize": 10 } }));
        let worker = world.start().await;
        let mut slow = world.db.begin().await;
        let late = slow.insert(OutboxRow::new("order", 0).key("late")).await;
        world.db.insert_all((1..=30).map(|n| OutboxRow::new("order", n))).await;
        world.db.wait_states("outbox", &[("sent", 30)]).await;
        // A backlog that cannot go: it is walked over again and again.
        let in_an_hour = world.db.in_seconds(3600);
        world.db.insert_all((31..=130).map(|n| OutboxRow::new("order", n).set("scheduled_at", &in_an_hour))).await;
        slow.commit().await;
        world.db.wait_outbox(&late, "sent").await;
        worker.wait_metric("queuebox_outbox_messages_pending", &[], |pending| pending == 100.0).await;
        let age = worker.metric("queuebox_outbox_walk_age_seconds", &[]).await;
        assert!((0.0..60.0).contains(&age), "{age}");
        assert!(worker.get("/metrics").await.body.contains("queuebox_outbox_walk_age_seconds"));
        world.finish().await;
    }
}

async fn aggregates_are_independent(kind: Kind) {
    let world = World::on(kind).await;
    // No answer: one after the other would never be two.
    world.receiver.answer_always(Answer::stall());
    world.start().await;
    world.db.insert_all([OutboxRow::new("order", 1).key("a"), OutboxRow::new("order", 2).key("b")]).await;
    let requests = world.receiver.wait_for(2, PATIENCE).await;
    assert_eq!(requests.iter().map(|request| request.in_flight).max(), Some(2), "not handed out together");
    world.receiver.answer_always(Answer::ok());
    world.db.wait_states("outbox", &[("sent", 2)]).await;
    world.finish().await;
}

async fn null_aggregate_is_free(kind: Kind) {
    let world = World::on(kind).await.source("tasks", json!({ "consumption": "pull", "topic": null }));
    // Sending: a key is busy with a request that is not answered.
    world.receiver.answer_with(|request| if request.json()["n"] == 1 { Answer::stall() } else { Answer::ok() });
    world.start().await;
    let busy = [OutboxRow::new("order", 1).key("busy"), OutboxRow::new("order", 2).key("busy")];
    let ids = world.db.insert_all(busy).await;
    world.receiver.wait_for(1, PATIENCE).await;
    let free = world.db.insert(OutboxRow::new("order", 3)).await;
    world.db.wait_outbox(&free, "sent").await;
    assert_eq!(text(&world.db.outbox(&ids[1]).await, "state"), "pending");
    assert_eq!(numbers(&world.receiver.requests()), [1, 3]);
    world.receiver.answer_always(Answer::ok());

    // Pull: an aggregate is busy with a claim whose lease lives.
    receive(&world.db, "tasks", &[Some("busy"), Some("busy"), None]).await;
    let numbers =
        |rows: &[serde_json::Value]| -> Vec<i64> { rows.iter().map(|row| number(&row["payload"], "n")).collect() };
    assert_eq!(numbers(&claim(&world.db, "tasks", 1).await), [0]);
    assert_eq!(numbers(&claim(&world.db, "tasks", 10).await), [2]);
    world.finish().await;
}

mod replayed_row_is_head_again {
    use super::*;

    async fn keeps_its_place(kind: Kind) {
        let world = World::on(kind).await;
        let worker = world.start().await;
        let ids = world.db.insert_all((1..=2).map(|n| OutboxRow::new("order", n).key("k"))).await;
        world.db.wait_states("outbox", &[("sent", 2)]).await;
        let before = number(&world.db.outbox(&ids[0]).await, "sequence");
        // A third that waits, so that the replayed one has somebody to go before.
        let third = OutboxRow::new("order", 3).key("k").set("scheduled_at", &world.db.in_seconds(3600));
        let third = world.db.insert(third).await;
        let replay = json!({ "ids": [ids[0]], "state": ["sent"] });
        assert_eq!(worker.admin("/admin/replay", replay).await.json()["moved"], 1);
        world.receiver.wait_for(3, PATIENCE).await;
        world.db.wait_outbox(&ids[0], "sent").await;
        let now = world.db.in_seconds(0);
        world.db.execute(&format!("UPDATE outbox SET scheduled_at = {now} WHERE id = '{third}'")).await;
        world.db.wait_states("outbox", &[("sent", 3)]).await;
        assert_eq!(numbers(&world.receiver.requests()), [1, 2, 1, 3]);
        assert_eq!(number(&world.db.outbox(&ids[0]).await, "sequence"), before);
        assert_eq!(world.receiver.requests()[2].header("x-message-id"), ids[0]);
        world.finish().await;
    }

    /// A replay holds the later rows of its key while it is tried.
    async fn holds_later_rows(kind: Kind) {
        let world = World::on(kind).await;
        world.receiver.answer_with(|request| Answer::status(if request.json()["n"] == 1 { 500 } else { 200 }));
        let worker = world.start().await;
        let first = world.db.insert(OutboxRow::new("order", 1).key("k").max_attempts(1)).await;
        world.db.wait_outbox(&first, "dead").await;
        world.receiver.answer_with(fails_first(1));
        let replay = json!({ "ids": [first] });
        assert_eq!(worker.admin("/admin/replay", replay).await.json()["moved"], 1);
        world.db.wait_outbox(&first, "dead").await;
        let due = world.db.in_seconds(0);
        let again = format!(
            "UPDATE outbox SET state = 'pending', attempt = 0, max_attempts = 5, last_error = NULL, scheduled_at = {due} \
             WHERE id = '{first}'"
        );
        world.db.execute(&again).await;
        // Once it has been read it is the head: what comes now waits for its retry.
        let row = format!("SELECT attempt FROM outbox WHERE id = '{first}'");
        world.db.wait_row(&row, |row| number(row, "attempt") == 1).await;
        world.db.insert(OutboxRow::new("order", 2).key("k")).await;
        world.db.wait_states("outbox", &[("sent", 2)]).await;
        assert_eq!(numbers(&world.receiver.requests()), [1, 1, 1, 1, 2]);
        world.finish().await;
    }

    /// What is replayed between publish and settle is not marked by that settle.
    async fn between_publish_and_settle(kind: Kind) {
        let world = World::on(kind).await;
        world.receiver.answer_next([Answer::ok().after(std::time::Duration::from_secs(2))]);
        world.start().await;
        let id = world.db.insert(OutboxRow::new("order", 1).key("k")).await;
        world.receiver.wait_for(1, PATIENCE).await;
        // The documented statement, by hand, on a row that somebody had marked dead meanwhile.
        let due = world.db.in_seconds(0);
        world.db.execute(&format!("UPDATE outbox SET state = 'dead' WHERE id = '{id}'")).await;
        let requeue = format!(
            "UPDATE outbox SET state = 'pending', attempt = 0, crashes = 0, scheduled_at = {due}, updated_at = {due}, \
             last_error = NULL, claimed_at = NULL, claim_token = NULL, lease_expires_at = NULL \
             WHERE id = '{id}' AND state = 'dead'"
        );
        assert_eq!(world.db.execute(&requeue).await, 1);
        let requests = world.receiver.wait_for(2, PATIENCE).await;
        world.db.wait_outbox(&id, "sent").await;
        assert_eq!(requests.iter().filter(|request| request.header("x-message-id") == id).count(), 2);
        world.finish().await;
    }

    on_every_database!(keeps_its_place, holds_later_rows, between_publish_and_settle);
}

async fn blocked_rows_hide_nobody(kind: Kind) {
    let world = World::on(kind)
        .await
        .relay(json!({ "outbox": { "batchSize": 50 } }))
        .routes(&[("held", &["held"]), ("**", &["receiver"])])
        .destination("held", json!({ "paused": true, "http": { "url": "http://127.0.0.1:9/" } }));
    world.migrate().await;
    let in_an_hour = world.db.in_seconds(3600);
    let later = (0..500).map(|n| OutboxRow::new("order", n).key(&format!("l{n}")).set("scheduled_at", &in_an_hour));
    world.db.insert_all(later).await;
    world.db.insert_all((0..500).map(|n| OutboxRow::new("held", n).key("one"))).await;
    world.db.insert_all((0..500).map(|n| OutboxRow::new("held", n))).await;
    let id = world.db.insert(OutboxRow::new("order", 1)).await;
    world.start().await;
    world.db.wait_outbox(&id, "sent").await;
    assert_eq!(world.receiver.count(), 1);
    world.finish().await;
}

on_every_database!(
    key_order_in_one_transaction,
    key_order_over_workers,
    failing_head_holds_its_key,
    dead_head_releases_its_key,
    no_key_no_order,
    aggregates_are_independent,
    null_aggregate_is_free,
    blocked_rows_hide_nobody,
);
on_postgres!(claim_order_not_commit_order);

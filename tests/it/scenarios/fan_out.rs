//! Section F: fan-out.

use std::collections::BTreeSet;

use queuebox_testkit::{Answer, Recorder};
use serde_json::json;

use crate::support::{Kind, OutboxRow, PATIENCE, World, number, on_every_database, on_postgres, text};

async fn fan_out_expands_once(kind: Kind) {
    let (second, third) = (Recorder::start().await, Recorder::start().await);
    let world = World::on(kind)
        .await
        .destination("second", json!({ "http": { "url": second.url() } }))
        .destination("third", json!({ "http": { "url": third.url() } }))
        .routes(&[("**", &["receiver", "second", "third"])]);
    world.start().await;
    world.start().await;
    world.spread_over(2).await;
    let ids = world.db.insert_all((0..10).map(|n| OutboxRow::new("order", n).key(&format!("k{n}")))).await;
    world.db.wait_states("outbox", &[("sent", 40)]).await;
    for id in &ids {
        let parent = world.db.outbox(id).await;
        assert!(parent["destination"].is_null());
        let children = world.db.rows(&format!("SELECT * FROM outbox WHERE parent_id = '{id}'")).await;
        let destinations: BTreeSet<&str> = children.iter().map(|child| text(child, "destination")).collect();
        assert_eq!((children.len(), destinations), (3, BTreeSet::from(["receiver", "second", "third"])));
        for child in &children {
            assert_ne!(text(child, "id"), id);
            for column in ["key", "topic", "payload", "sequence", "created_at"] {
                assert_eq!(child[column], parent[column], "{column}");
            }
        }
    }
    for receiver in [&world.receiver, &second, &third] {
        let requests = receiver.requests();
        let arrived: BTreeSet<&str> = requests.iter().map(|request| request.header("x-message-id")).collect();
        assert_eq!((requests.len(), arrived.len()), (10, 10));
        assert!(ids.iter().all(|id| !arrived.contains(id.as_str())), "a parent was sent");
    }
    world.finish().await;
}

async fn fan_out_keeps_order_per_destination(kind: Kind) {
    let troubled = Recorder::start().await;
    troubled.answer_always(Answer::status(500));
    let world = World::on(kind)
        .await
        .destination("troubled", json!({ "http": { "url": troubled.url() } }))
        .routes(&[("both", &["receiver", "troubled"]), ("**", &["troubled"])]);
    world.start().await;
    let rows =
        [("both", 1), ("both", 2), ("plain", 3)].map(|(topic, n)| OutboxRow::new(topic, n).key("k").max_attempts(1000));
    world.db.insert_all(rows).await;
    // At the one that works the key goes on past the child that waits at the other.
    world.receiver.wait_for(2, PATIENCE).await;
    troubled.wait_for(2, PATIENCE).await;
    assert!(troubled.requests().iter().all(|request| request.json()["n"] == 1), "the key did not wait");
    troubled.answer_always(Answer::ok());
    world.db.wait_states("outbox", &[("sent", 7)]).await;
    let numbers = |receiver: &Recorder| -> Vec<i64> {
        let mut numbers: Vec<i64> = receiver.requests().iter().map(|r| r.json()["n"].as_i64().unwrap()).collect();
        numbers.dedup();
        numbers
    };
    assert_eq!(numbers(&world.receiver), [1, 2]);
    assert_eq!(numbers(&troubled), [1, 2, 3]);
    world.finish().await;
}

async fn fan_out_replay(kind: Kind) {
    let troubled = Recorder::start().await;
    troubled.answer_always(Answer::status(500));
    let world = World::on(kind)
        .await
        .destination("troubled", json!({ "http": { "url": troubled.url() } }))
        .routes(&[("**", &["receiver", "troubled"])]);
    let worker = world.start().await;
    let id = world.db.insert(OutboxRow::new("order", 1).max_attempts(2)).await;
    world.db.wait_states("outbox", &[("sent", 2), ("dead", 1)]).await;
    let before = world.db.outbox(&id).await;
    troubled.answer_always(Answer::ok());
    let moved = worker.admin("/admin/replay", json!({ "ids": [id] })).await;
    assert_eq!(moved.json()["moved"], 1, "{moved:?}");
    world.db.wait_states("outbox", &[("sent", 3)]).await;
    // With the finished ones as well: the two children, never the parent.
    let moved = worker.admin("/admin/replay", json!({ "ids": [id], "state": ["sent", "dead"] })).await;
    assert_eq!(moved.json()["moved"], 2, "{moved:?}");
    troubled.wait_for(4, PATIENCE).await;
    world.receiver.wait_for(2, PATIENCE).await;
    world.db.wait_states("outbox", &[("sent", 3)]).await;
    assert_eq!(world.db.outbox(&id).await["updated_at"], before["updated_at"], "the parent was moved");
    assert_eq!(number(&before, "attempt"), 0);
    world.finish().await;
}

on_every_database!(fan_out_expands_once, fan_out_keeps_order_per_destination);
on_postgres!(fan_out_replay);

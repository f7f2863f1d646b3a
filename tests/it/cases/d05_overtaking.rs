//! D05: a later row of a key overtakes one that waits for its retry.

use queuebox_testkit::Answer;

use crate::support::{Kind, OutboxRow, World, number, on_every_database, text};

async fn backoff_of_the_head_holds_the_key(kind: Kind) {
    let world = World::on(kind).await;
    world.receiver.answer_with(|request| {
        let fails = request.json()["n"] == 1 && ["0", "1"].contains(&request.header("x-attempt"));
        Answer::status(if fails { 500 } else { 200 })
    });
    world.start().await;
    world.start().await;
    world.start().await;
    let earlier = world.db.in_seconds(-60);
    let rows = [
        OutboxRow::new("order", 1).key("k"),
        OutboxRow::new("order", 2).key("k").set("scheduled_at", &earlier),
        OutboxRow::new("order", 3).key("k"),
    ];
    let others = (10..30).map(|n| OutboxRow::new("order", n).key(&format!("other{n}")));
    let ids = world.db.insert_all(rows.into_iter().chain(others)).await;
    world.db.wait_states("outbox", &[("sent", 23)]).await;
    let arrivals: Vec<i64> = world
        .receiver
        .requests()
        .iter()
        .filter(|request| request.header("x-message-key") == "k")
        .map(|request| request.json()["n"].as_i64().unwrap())
        .collect();
    assert_eq!(arrivals, [1, 1, 1, 2, 3]);
    for id in &ids[1..] {
        let row = world.db.outbox(id).await;
        assert_eq!((text(&row, "state"), number(&row, "attempt")), ("sent", 0));
    }
    world.finish().await;
}

on_every_database!(backoff_of_the_head_holds_the_key);

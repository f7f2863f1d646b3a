//! Rows that the database refuses to write: each holds up itself and its key, and nobody else.

use queuebox_testkit::{Answer, Recorder, promise};
use serde_json::json;

use super::claims::by_id;
use crate::support::{Kind, OutboxRow, PATIENCE, World, number, on_every_database, text};

/// A trigger that refuses what `condition` says of the NEW row, and what takes it away again.
fn refusing(kind: Kind, name: &str, event: &str, condition: &str) -> (String, String) {
    match kind {
        Kind::Postgres => (
            format!(
                "CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS \
                 $$ BEGIN RAISE EXCEPTION 'refused by {name}'; END $$; \
                 CREATE TRIGGER {name} BEFORE {event} ON outbox FOR EACH ROW WHEN ({condition}) EXECUTE FUNCTION {name}()"
            ),
            format!("DROP TRIGGER {name} ON outbox"),
        ),
        Kind::Sqlite => (
            format!(
                "CREATE TRIGGER {name} BEFORE {event} ON outbox WHEN {condition} \
                 BEGIN SELECT RAISE(ABORT, 'refused by {name}'); END"
            ),
            format!("DROP TRIGGER {name}"),
        ),
    }
}

async fn refused_outcome_holds_nobody(kind: Kind) {
    let world = World::on(kind).await;
    world.migrate().await;
    let rows = (0..40).map(|n| OutboxRow::new("order", n).key(&format!("k{}", n % 8)));
    let ids = world.db.insert_all(rows).await;
    // One that is delivered and one that fails: neither outcome can be written.
    let (sent, failed) = (&ids[0], &ids[1]);
    world.receiver.answer_with(|request| Answer::status(if request.json()["n"] == 1 { 500 } else { 200 }));
    let (refuse, allow) = refusing(kind, "refuse_outcome", "UPDATE", &format!("NEW.id IN ('{sent}', '{failed}')"));
    world.db.execute(&refuse).await;
    let worker = world.start().await;
    // The key of the failed one waits for its outcome, the key of the delivered one goes on.
    world.db.wait_states("outbox", &[("pending", 6), ("sent", 34)]).await;
    let more = world.db.insert_all((40..60).map(|n| OutboxRow::new("order", n))).await;
    world.db.wait_states("outbox", &[("pending", 6), ("sent", 54)]).await;
    worker.process.wait_output(&format!("message_id={sent}"), PATIENCE).await;
    assert_eq!(worker.get("/readyz").await.status, 200, "{:?}", worker.get("/readyz").await);
    world.receiver.answer_always(Answer::ok());
    world.db.execute(&allow).await;
    world.db.wait_states("outbox", &[("sent", 60)]).await;
    assert_eq!(number(&world.db.outbox(failed).await, "attempt"), 1);
    let times = by_id(&world.receiver.requests());
    for id in ids.iter().chain(&more) {
        let expected = if id == failed { 2 } else { 1 };
        promise(times[id] == expected, format_args!("{id} was sent {} times", times[id]));
    }
    world.finish().await;
}

async fn refused_expansion_holds_nobody(kind: Kind) {
    let second = Recorder::start().await;
    let world = World::on(kind)
        .await
        .destination("second", json!({ "http": { "url": second.url() } }))
        .routes(&[("both", &["receiver", "second"]), ("**", &["receiver"])]);
    world.migrate().await;
    let mut rows: Vec<OutboxRow> = (0..10).map(|n| OutboxRow::new("both", n).key(&format!("b{n}"))).collect();
    rows.push(OutboxRow::new("both", 10));
    rows.extend((11..31).map(|n| OutboxRow::new("order", n).key(&format!("k{n}"))));
    let ids = world.db.insert_all(rows).await;
    // One with a key, one without.
    let condition = format!("NEW.parent_id IN ('{}', '{}')", ids[3], ids[10]);
    let (refuse, allow) = refusing(kind, "refuse_child", "INSERT", &condition);
    world.db.execute(&refuse).await;
    let worker = world.start().await;
    // Nine parents with two children each, and twenty plain rows.
    world.db.wait_states("outbox", &[("pending", 2), ("sent", 9 * 3 + 20)]).await;
    worker.process.wait_output(&format!("message_id={}", ids[3]), PATIENCE).await;
    worker.process.wait_output(&format!("message_id={}", ids[10]), PATIENCE).await;
    assert_eq!(worker.get("/readyz").await.status, 200);
    world.db.execute(&allow).await;
    world.db.wait_states("outbox", &[("sent", 11 * 3 + 20)]).await;
    assert_eq!((world.receiver.count(), second.count()), (31, 11));
    world.finish().await;
}

/// What a receiver says is written down in a form that each database takes.
async fn reason_with_control_characters(kind: Kind) {
    let world = World::on(kind).await;
    world.receiver.answer_with(|request| {
        if request.json()["n"] == 0 { Answer::status(500).body("no\u{0}thing\u{1b}[31m here") } else { Answer::ok() }
    });
    world.start().await;
    let id = world.db.insert(OutboxRow::new("order", 0).max_attempts(1)).await;
    let other = world.db.insert(OutboxRow::new("order", 1)).await;
    world.db.wait_outbox(&other, "sent").await;
    let row = world.db.wait_outbox(&id, "dead").await;
    assert!(text(&row, "last_error").contains("no\u{fffd}thing\u{fffd}[31m here"), "{row:#}");
    world.finish().await;
}

on_every_database!(refused_outcome_holds_nobody, refused_expansion_holds_nobody, reason_with_control_characters,);

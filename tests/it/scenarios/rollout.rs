//! Section R: two configurations alive.

use queuebox_testkit as testkit;

use crate::support::{Kind, OutboxRow, PATIENCE, Worker, World, on_postgres};

const OUTCOMES: &str = "queuebox_outbox_messages_total";

async fn has_half_of_the_lanes(worker: &Worker) {
    testkit::eventually("half of the lanes", PATIENCE, || async {
        (worker.get("/status").await.json()["lanes"]["outbox"] == 32).then_some(())
    })
    .await;
}

async fn old_config_does_not_kill_new_topics(kind: Kind) {
    const ROWS: usize = 200;
    let world = World::on(kind).await.routes(&[("order", &["receiver"])]);
    let older = world.start().await;
    let world = world.routes(&[("order", &["receiver"]), ("fresh", &["receiver"])]);
    let newer = world.start().await;
    for worker in [&older, &newer] {
        has_half_of_the_lanes(worker).await;
    }
    // Keys enough for every lane. What both know comes last: once it is through, both have passed everything else.
    let rows = ["fresh", "nowhere", "order"]
        .iter()
        .flat_map(|topic| (0..ROWS as i64).map(move |n| OutboxRow::new(topic, n).key(&format!("{topic}{n}"))));
    world.db.insert_all(rows).await;
    let of = |topic: &str, state: &str| {
        let select = format!("SELECT count(*) AS n FROM outbox WHERE topic = '{topic}' AND state = '{state}'");
        let db = world.db.clone();
        async move { db.count(&select).await }
    };
    testkit::eventually("what both route is sent", PATIENCE, || async {
        (of("order", "sent").await == ROWS as i64).then_some(())
    })
    .await;
    // The newer one sends what it routes and buries what nobody routes; the older one leaves both alone.
    let buried = newer.wait_metric(OUTCOMES, &[("status", "dead")], |n| n > 0.0).await;
    assert!(buried < ROWS as f64, "{buried}");
    assert_eq!(older.metric(OUTCOMES, &[("status", "dead")]).await, 0.0);
    assert_eq!(of("fresh", "dead").await, 0);
    assert!(
        of("fresh", "pending").await > 0 && of("nowhere", "pending").await > 0,
        "they are in the older one's lanes"
    );

    assert!(older.process.terminate(PATIENCE).await.success());
    world.db.wait_states("outbox", &[("sent", 2 * ROWS as i64), ("dead", ROWS as i64)]).await;
    assert_eq!((of("fresh", "sent").await, of("nowhere", "dead").await), (ROWS as i64, ROWS as i64));
    assert_eq!(world.receiver.count(), 2 * ROWS);
    world.finish().await;
}

on_postgres!(old_config_does_not_kill_new_topics);

//! D29: a slow receiver, a pool of three, and a server that ends sessions which sit idle in a transaction.

use std::time::Duration;

use queuebox_testkit::{self as testkit, Answer};
use serde_json::json;

use crate::support::{Db, World, number};

#[tokio::test]
async fn no_transaction_waits_for_a_receiver() {
    const ROWS: i64 = 24;
    // A server of its own, since its log is the witness.
    let server = testkit::private_postgres_with(&[("idle_in_transaction_session_timeout", "1s")]).await;
    let folder = tempfile::Builder::new().prefix("queuebox-world-").tempdir().unwrap();
    let world = World::with(Db::postgres(server.fresh_database().await).await, folder)
        .await
        .relay(json!({ "database": { "poolSize": 3 } }))
        .destination("receiver", json!({ "limits": { "maxInFlight": 8 }, "http": { "timeout": "60s" } }))
        .source("shop", json!({ "consumption": "pull", "topic": null }));
    // Longer than the lease of three seconds and than the server's patience.
    world.receiver.answer_with(|_| Answer::ok().after(Duration::from_secs(7)));
    let worker = world.start().await;
    let ids = world.db.insert_all((0..ROWS).map(|n| crate::support::OutboxRow::new("order", n))).await;
    let mut posts = 0;
    while world.receiver.count() < usize::try_from(ROWS).unwrap() {
        worker.post("shop", json!({ "id": format!("p{posts}") }).to_string()).await.accepted();
        posts += 1;
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    world.db.wait_states("outbox", &[("sent", ROWS)]).await;
    for id in &ids {
        assert_eq!(number(&world.db.outbox(id).await, "attempt"), 0);
    }
    assert_eq!(worker.metric("queuebox_claims_lost_total", &[]).await, 0.0, "renewals got a connection");
    assert_eq!(world.db.states("inbox").await.get("pending"), Some(&posts));
    let log = std::fs::read_to_string(server.log()).unwrap();
    assert!(!log.contains("idle-in-transaction"), "{log}");
    world.finish().await;
}

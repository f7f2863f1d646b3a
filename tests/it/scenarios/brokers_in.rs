//! Section B: brokers in, with the built program and a real database.

use queuebox_testkit::eventually;
use serde_json::json;

use crate::{
    brokers::{Broker, BrokerKind, Line, Message, on_every_broker},
    support::{Kind, PATIENCE, World, number, text},
};

/// A database and a source `events` on a line, without the relay: rows stay as they were stored.
async fn quiet(kind: Kind, line: &Line) -> World {
    let relay = json!({ "inbox": { "relay": { "enabled": false } } });
    World::on(kind).await.relay(relay).source("events", line.as_source())
}

/// Name of the source on `/health/ready`.
fn component(kind: BrokerKind) -> &'static str {
    match kind {
        BrokerKind::RabbitMq => "rabbitmq.events",
        BrokerKind::Kafka => "kafka.events",
        BrokerKind::Nats => "nats.events",
    }
}

async fn broker_message_is_stored(kind: BrokerKind) {
    let line = Broker::shared(kind).await.line().await;
    let world = quiet(Kind::Postgres, &line).await;
    world.start().await;
    line.publish(&[Message::new(r#"{"id":"m-1","amount":12}"#).header("x-kept", "yes")]).await;
    world.db.wait_states("inbox", &[("pending", 1)]).await;
    line.all_acknowledged().await;
    let row = world.db.row("SELECT * FROM inbox").await;
    assert_eq!((text(&row, "source"), text(&row, "idempotency_key")), ("events", "m-1"));
    assert_eq!(row["payload"], json!({ "id": "m-1", "amount": 12 }));
    assert_eq!((text(&row, "consumption"), text(&row, "topic")), ("push", "events"));
    assert_eq!(row["headers"]["x-kept"], "yes", "{row:#}");
    assert_eq!(number(&row, "attempt"), 0);
    world.finish().await;
}

async fn broker_repeat_is_one_row(kind: BrokerKind) {
    let line = Broker::shared(kind).await.line().await;
    let world = quiet(Kind::Sqlite, &line).await;
    let worker = world.start().await;
    // Once within a batch, and once more when the row is there.
    let same = Message::new(r#"{"id":"m-1"}"#);
    line.publish(&[same.clone(), same.clone()]).await;
    world.db.wait_states("inbox", &[("pending", 1)]).await;
    line.publish(&[same]).await;
    worker.wait_metric("queuebox_inbox_messages_total", &[("status", "duplicate")], |n| n == 2.0).await;
    line.all_acknowledged().await;
    assert_eq!(world.db.count("SELECT count(*) AS n FROM inbox").await, 1);
    assert_eq!(worker.metric("queuebox_inbox_messages_total", &[("status", "new")]).await, 1.0);
    world.finish().await;
}

on_every_broker!(broker_message_is_stored, broker_repeat_is_one_row);

mod broker_acknowledges_after_commit {
    use super::*;

    const WAITING: &str = "FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock' \
                           AND query LIKE '%INSERT INTO%inbox%' AND pid <> pg_backend_pid()";

    async fn insert_waits(world: &World) {
        world.db.wait_row(&format!("SELECT count(*) AS n {WAITING}"), |row| number(row, "n") > 0).await;
    }

    /// The insert waits for a lock when the worker is killed; it never commits.
    async fn killed_before_the_commit(kind: BrokerKind) {
        let line = Broker::shared(kind).await.line().await;
        let world = quiet(Kind::Postgres, &line).await;
        let worker = world.start().await;
        let mut lock = world.db.begin().await;
        lock.execute("LOCK TABLE inbox IN ACCESS EXCLUSIVE MODE").await;
        line.publish(&[Message::new(r#"{"id":"m-1"}"#)]).await;
        insert_waits(&world).await;
        assert_eq!(line.outstanding().await, 1, "acknowledged before the commit");
        worker.process.kill9().await;
        // The server does not notice that the client of a waiting statement is gone.
        world.db.rows(&format!("SELECT pg_terminate_backend(pid) {WAITING}")).await;
        world.db.wait_row(&format!("SELECT count(*) AS n {WAITING}"), |row| number(row, "n") == 0).await;
        lock.rollback().await;
        assert_eq!(world.db.count("SELECT count(*) AS n FROM inbox").await, 0);
        world.start().await;
        world.db.wait_states("inbox", &[("pending", 1)]).await;
        line.all_acknowledged().await;
        assert_eq!(world.db.count("SELECT count(*) AS n FROM inbox").await, 1);
        world.finish().await;
    }

    /// The row is there, the broker never hears of it, the worker is killed: the repeat is recognised.
    async fn killed_before_the_acknowledgement(kind: BrokerKind) {
        let broker = Broker::shared(kind).await;
        let line = broker.line().await;
        let (near, way) = broker.behind_a_proxy().await;
        let mut world = quiet(Kind::Postgres, &line.through(&near)).await;
        if kind == BrokerKind::Nats {
            // NATS does not take the end of a connection for a failure: it waits.
            world = world.source("events", json!({ "nats": { "ackWait": "3s" } }));
        }
        let worker = world.start().await;
        let mut lock = world.db.begin().await;
        lock.execute("LOCK TABLE inbox IN ACCESS EXCLUSIVE MODE").await;
        line.publish(&[Message::new(r#"{"id":"m-1"}"#)]).await;
        insert_waits(&world).await;
        way.set(queuebox_testkit::ProxyMode::Stall);
        lock.rollback().await;
        world.db.wait_states("inbox", &[("pending", 1)]).await;
        worker.process.kill9().await;
        // What was written and not passed on is lost with the proxy.
        drop(way);
        let world = world.source("events", line.as_source());
        let worker = world.start().await;
        worker.wait_metric("queuebox_inbox_messages_total", &[("status", "duplicate")], |n| n == 1.0).await;
        line.all_acknowledged().await;
        assert_eq!(world.db.count("SELECT count(*) AS n FROM inbox").await, 1);
        world.finish().await;
    }

    on_every_broker!(killed_before_the_commit, killed_before_the_acknowledgement);
}

/// Makes every insert into the inbox fail for a passing reason, and allows it again.
const REFUSE: &str = "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS \
                      $$ BEGIN RAISE EXCEPTION 'disk full' USING ERRCODE = '53100'; END $$; \
                      CREATE TRIGGER refuse BEFORE INSERT ON inbox FOR EACH ROW EXECUTE FUNCTION refuse()";
const ALLOW: &str = "DROP TRIGGER refuse ON inbox";

mod nats_negative_acknowledges_a_failed_store {
    use super::*;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn stored_once_after_the_fault() {
        let line = Broker::shared(BrokerKind::Nats).await.line().await;
        // Only a negative acknowledgement can bring a message back before ten minutes are over.
        let world = quiet(Kind::Postgres, &line)
            .await
            .source("events", json!({ "nats": { "ackWait": "10m" } }))
            .relay(json!({ "inbox": { "storeRetryWindow": "0s" } }));
        let worker = world.start().await;
        world.db.execute(REFUSE).await;
        line.publish(&Message::numbered(0..3)).await;
        let stream = line.broker.streams().await.get_stream(&line.name).await.unwrap();
        eventually("each message comes again twice", PATIENCE, || async {
            let info = stream.consumer_info("queuebox").await.ok()?;
            (info.delivered.consumer_sequence >= 9).then_some(())
        })
        .await;
        assert_eq!(line.outstanding().await, 3);
        world.db.execute(ALLOW).await;
        world.db.wait_states("inbox", &[("pending", 3)]).await;
        line.all_acknowledged().await;
        assert_eq!(worker.metric("queuebox_inbox_messages_total", &[("status", "new")]).await, 3.0);
        // Back-off between the rounds: a loop without it would have asked for them hundreds of times.
        let info = stream.consumer_info("queuebox").await.unwrap();
        assert!(info.delivered.consumer_sequence < 100, "{info:?}");
        world.finish().await;
    }

    #[tokio::test]
    async fn core_nats_is_no_source() {
        for (block, field) in [
            (json!({ "servers": "nats://127.0.0.1:1", "subject": "orders" }), "spec.nats.subject"),
            (json!({ "servers": "nats://127.0.0.1:1", "durable": "d" }), "spec.nats.stream"),
            (
                json!({ "servers": "nats://127.0.0.1:1", "stream": "s", "durable": "d", "jetStream": false }),
                "jetStream",
            ),
        ] {
            let world = World::on(Kind::Sqlite).await.source("events", json!({ "nats": block }));
            let folder = world.write_manifests(1, 2);
            let (status, out, log) = world.program(&["check", "-f", folder.to_str().unwrap()]).run(PATIENCE).await;
            assert!(!status.success() && format!("{out}{log}").contains(field), "{field}: {out}{log}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rabbitmq_requeues_a_failed_store() {
    let line = Broker::shared(BrokerKind::RabbitMq).await.line().await;
    let world = quiet(Kind::Postgres, &line).await.relay(json!({ "inbox": { "storeRetryWindow": "0s" } }));
    let worker = world.start().await;
    world.db.execute(REFUSE).await;
    line.publish(&Message::numbered(0..10)).await;
    let path = format!("/queues/{{vhost}}/{}", line.name);
    let redelivered = async || {
        let figures = line.broker.api("GET", &path, None).await;
        figures["message_stats"]["redeliver"].as_i64().unwrap_or(0)
    };
    eventually("each comes again twice", PATIENCE, || async { (redelivered().await >= 20).then_some(()) }).await;
    assert_eq!(line.outstanding().await, 10);
    world.db.execute(ALLOW).await;
    world.db.wait_states("inbox", &[("pending", 10)]).await;
    line.all_acknowledged().await;
    assert_eq!(worker.metric("queuebox_inbox_messages_total", &[("status", "new")]).await, 10.0);
    let count = redelivered().await;
    assert!(count < 100, "{count} redeliveries");
    world.finish().await;
}

mod broker_reconnects {
    use super::*;

    /// Stores what is published now.
    async fn receives(world: &World, line: &Line, id: &str) {
        line.publish(&[Message::new(json!({ "id": id }).to_string())]).await;
        let sql = format!("SELECT count(*) AS n FROM inbox WHERE idempotency_key = '{id}'");
        world.db.wait_row(&sql, |row| number(row, "n") == 1).await;
        line.all_acknowledged().await;
    }

    async fn after_a_restart(kind: BrokerKind) {
        let broker = Broker::private(kind).await;
        let line = broker.line().await;
        let world = quiet(Kind::Sqlite, &line).await;
        let worker = world.start().await;
        receives(&world, &line, "before").await;
        worker.wait_component(component(kind), "up").await;
        broker.kill9().await;
        let why = worker.wait_component(component(kind), "down").await;
        assert!(why.contains(&line.name), "{why}");
        broker.start().await;
        receives(&world, &line, "after").await;
        worker.wait_component(component(kind), "up").await;
        assert_eq!(world.db.count("SELECT count(*) AS n FROM inbox").await, 2);
        world.finish().await;
    }

    async fn after_the_object_was_made_again(kind: BrokerKind) {
        let line = Broker::shared(kind).await.line().await;
        let world = quiet(Kind::Sqlite, &line).await;
        let worker = world.start().await;
        receives(&world, &line, "before").await;
        line.remove().await;
        let why = worker.wait_component(component(kind), "down").await;
        assert!(why.contains(&line.name), "{why}");
        line.make().await;
        receives(&world, &line, "after").await;
        worker.wait_component(component(kind), "up").await;
        world.finish().await;
    }

    /// The consumer alone: RabbitMQ's by closing its connection, the durable of NATS.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn after_the_durable_was_deleted() {
        let line = Broker::shared(BrokerKind::Nats).await.line().await;
        let world = quiet(Kind::Sqlite, &line).await;
        world.start().await;
        receives(&world, &line, "before").await;
        let stream = line.broker.streams().await.get_stream(&line.name).await.unwrap();
        stream.delete_consumer("queuebox").await.unwrap();
        receives(&world, &line, "after").await;
        // The new durable begins at the beginning; what is stored is recognised.
        assert_eq!(world.db.count("SELECT count(*) AS n FROM inbox").await, 2);
        world.finish().await;
    }

    on_every_broker!(after_a_restart, after_the_object_was_made_again);
}

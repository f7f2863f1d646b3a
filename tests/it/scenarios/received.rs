//! Sections D and R: what was received is kept as it was received: its order within a batch, its identity, its topic.

use queuebox_testkit::eventually;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::{
    brokers::{Broker, BrokerKind, Message, on_every_broker},
    support::{Db, Kind, PATIENCE, Worker, World, number, on_every_database, text, time},
};

mod admit_batch_keeps_order {
    use super::*;

    const BATCH: usize = 500;
    /// Name of the durable.
    const READER: &str = "queuebox";

    /// While the table is locked everything gathers in the program: one batch.
    async fn of_a_broker(kind: Kind) {
        let line = Broker::shared(BrokerKind::Nats).await.line().await;
        let world = World::on(kind)
            .await
            // On SQLite nobody can renew while the table is locked.
            .relay(json!({ "outbox": { "claimTimeout": "60s" }, "inbox": { "relay": { "claimTimeout": "60s" } } }))
            .source("events", line.as_source())
            .source(
                "events",
                json!({ "topic": "order", "aggregateIdPath": "$.order", "nats": { "batchSize": 1_000 } }),
            );
        world.start().await;
        let mut lock = world.db.begin().await;
        if kind == Kind::Postgres {
            lock.execute("LOCK TABLE inbox IN ACCESS EXCLUSIVE MODE").await;
        }
        let message = |n: usize| Message::new(json!({ "id": n, "order": "o-1" }).to_string());
        line.publish(&(0..BATCH).map(message).collect::<Vec<_>>()).await;
        let stream = line.broker.streams().await.get_stream(&line.name).await.unwrap();
        eventually("all are handed out", PATIENCE, || async {
            (stream.consumer_info(READER).await.ok()?.num_ack_pending == BATCH).then_some(())
        })
        .await;
        lock.rollback().await;
        let all = i64::try_from(BATCH).unwrap();
        world.db.wait_states("inbox", &[("processed", all)]).await;
        world.db.wait_states("outbox", &[("sent", all)]).await;

        let rows = world.db.rows("SELECT * FROM inbox ORDER BY created_at").await;
        let numbered: Vec<usize> = (0..BATCH).collect();
        let of = |row: &serde_json::Value| row["payload"]["id"].as_u64().and_then(|n| usize::try_from(n).ok()).unwrap();
        assert_eq!(rows.iter().map(of).collect::<Vec<_>>(), numbered, "the order of receipt");
        let mut in_one_statement = 0;
        for pair in rows.windows(2) {
            for column in ["created_at", "scheduled_at"] {
                let step = time(&pair[1], column).duration_since(time(&pair[0], column)).as_micros();
                assert!(step > 0, "{column} does not rise: {pair:#?}");
                in_one_statement += i32::from(column == "created_at" && step == 1);
            }
        }
        // Neighbours of one statement are a microsecond apart.
        assert!(in_one_statement > 400, "it was no batch: {in_one_statement}");
        let rows = world.db.rows("SELECT * FROM outbox ORDER BY sequence").await;
        assert_eq!(rows.iter().map(of).collect::<Vec<_>>(), numbered, "the order of the forward");
        let arrived: Vec<usize> =
            world.receiver.requests().iter().map(|request| of(&json!({ "payload": request.json() }))).collect();
        assert_eq!(arrived, numbered, "the order of arrival");
        world.finish().await;
    }

    on_every_database!(of_a_broker);
}

mod sender_cannot_set_relay_headers {
    use super::*;

    /// Each in two spellings, all of them lies.
    const FORGED: [&str; 6] =
        ["x-inbox-id", "X-INBOX-ID", "x-source", "X-SOURCE", "x-idempotency-key", "X-Idempotency-Key"];

    /// The row of the outbox and the request bear each header once, with what is true.
    async fn says_the_truth(world: &World, source: &str) {
        world.db.wait_states("outbox", &[("sent", 1)]).await;
        let inbox = world.db.row("SELECT * FROM inbox").await;
        let outbox = world.db.row("SELECT headers FROM outbox").await;
        let request = world.receiver.requests().remove(0);
        for (name, truth) in
            [("x-inbox-id", text(&inbox, "id")), ("x-source", source), ("x-idempotency-key", "true-key")]
        {
            let all: Vec<_> = request.headers.get_all(name).iter().collect();
            assert_eq!(all, [truth], "{name} of the request");
            let stored = outbox["headers"].as_object().unwrap();
            let stored: Vec<_> = stored.iter().filter(|(stored, _)| stored.eq_ignore_ascii_case(name)).collect();
            assert_eq!(
                stored.iter().map(|(_, value)| value.as_str().unwrap()).collect::<Vec<_>>(),
                [truth],
                "{stored:?}"
            );
        }
        assert!(!format!("{:?}", request.headers).contains("forged"), "{:?}", request.headers);
        assert_eq!(request.header("x-kept"), "yes", "other headers travel");
    }

    /// As the bytes are written here, so that both spellings arrive.
    async fn post(worker: &Worker, body: &str) {
        let forged: String = FORGED.iter().map(|name| format!("{name}: forged\r\n")).collect();
        let request = format!(
            "POST /inbox/hooks HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-Kept: yes\r\n{forged}Content-Length: {}\r\n\r\n{body}",
            body.len()
        );
        let mut stream = tokio::net::TcpStream::connect(("127.0.0.1", worker.http)).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        tokio::time::timeout(PATIENCE, stream.read_to_string(&mut answer)).await.expect("an answer").unwrap();
        assert!(answer.starts_with("HTTP/1.1 202"), "{answer}");
    }

    async fn by_webhook(kind: Kind) {
        let world = World::on(kind).await.source("hooks", json!({}));
        let worker = world.start().await;
        post(&worker, r#"{"id":"true-key"}"#).await;
        says_the_truth(&world, "hooks").await;
        world.finish().await;
    }

    /// There the header with the key is one that a sender may set, unless it has another name.
    async fn by_broker(kind: BrokerKind) {
        let line = Broker::shared(kind).await.line().await;
        let mut source = line.as_source();
        let block = source.as_object_mut().unwrap().values_mut().next().unwrap();
        block["attributeHeaders"] = json!({ "idempotencyKey": "x-own-key" });
        let world = World::on(Kind::Sqlite).await.source("events", source);
        world.start().await;
        let kept = Message::new(r#"{"id":"true-key"}"#).header("x-kept", "yes");
        line.publish(&[FORGED.into_iter().fold(kept, |message, name| message.header(name, "forged"))]).await;
        says_the_truth(&world, "events").await;
        line.all_acknowledged().await;
        world.finish().await;
    }

    on_every_database!(by_webhook);
    on_every_broker!(by_broker);
}

mod empty_topic_is_dead {
    use super::*;

    /// Stored with its topic, which needs its source no more: that one is taken out of the manifests before the row is forwarded.
    async fn a_stored_topic_outlives_its_source(kind: Kind) {
        let with = World::on(kind)
            .await
            .source("hooks", json!({ "topic": "{{ eventType }}", "eventTypePath": "$.type" }))
            .relay(json!({ "inbox": { "relay": { "enabled": false } } }));
        let worker = with.start().await;
        let inbox = worker.post("hooks", r#"{"id":"1","type":"order.paid"}"#).await.accepted();
        assert!(worker.process.terminate(PATIENCE).await.success());
        let db = match kind {
            Kind::Postgres => Db::postgres(with.db.address.clone()).await,
            Kind::Sqlite => Db::sqlite(std::path::Path::new(&with.db.address)).await,
        };
        let folder = tempfile::Builder::new().prefix("queuebox-world-").tempdir().unwrap();
        let without = World::with(db, folder).await;
        let worker = without.start().await;
        let request = without.receiver.wait_for(1, PATIENCE).await.remove(0);
        assert_eq!((request.header("x-topic"), request.header("x-source")), ("order.paid", "hooks"));
        assert_eq!(request.header("x-inbox-id"), inbox);
        without.db.wait_states("inbox", &[("processed", 1)]).await;
        // One that was received before topics were stored has nobody left who could name it: it waits, and is told.
        without
            .db
            .execute("INSERT INTO inbox (source, idempotency_key, payload) VALUES ('hooks', 'older', '{}')")
            .await;
        worker.process.wait_output("because their source is not configured", PATIENCE).await;
        let older = without.db.row("SELECT * FROM inbox WHERE idempotency_key = 'older'").await;
        assert_eq!((text(&older, "state"), number(&older, "attempt")), ("pending", 0));
        without.finish().await;
        with.finish().await;
    }

    on_every_database!(a_stored_topic_outlives_its_source);
}

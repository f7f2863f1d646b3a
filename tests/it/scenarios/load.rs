//! Section R: what is too much, and what a receiver does with repeats.

use queuebox_testkit as testkit;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::support::{
    Bound, Kind, OutboxRow, PATIENCE, Statement, Tx, Worker, World, on_every_database, on_postgres, text,
};

/// Kilobytes of memory that a process has had at most.
fn peak_memory_kb(worker: &Worker) -> i64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", worker.process.pid())).unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// A JSON text of just this many bytes.
fn payload_of(bytes: usize, n: i64) -> String {
    let head = format!("{{\"n\": {n}, \"text\": \"");
    format!("{head}{}\"}}", "x".repeat(bytes - head.len() - 2))
}

async fn huge_row_hurts_only_itself(kind: Kind) {
    const LIMIT: usize = 256 << 10;
    // SQLite rewrites a row to mark it, in the worker's own process: there only the others are looked at.
    let huge: usize = if kind == Kind::Sqlite { 8 << 20 } else { 64 << 20 };
    let bounds = json!({ "maxPayloadSize": "256KiB", "maxInFlightBytes": "1MiB", "claimTimeout": "60s" });
    let world = World::on(kind).await.relay(json!({ "outbox": bounds }));
    let worker = world.start().await;
    let warm = world.db.insert(OutboxRow::new("order", 0)).await;
    world.db.wait_outbox(&warm, "sent").await;
    let before = peak_memory_kb(&worker);

    let row = |n: i64, key: &str, size: usize| OutboxRow::new("order", n).key(key).payload(&payload_of(size, n));
    // Before and behind it in its key, many of just the limit, and small ones.
    let mut rows = vec![row(1, "k", 100), row(2, "k", huge), row(3, "k", 100), row(4, "other", LIMIT + 1)];
    rows.extend((10..60).map(|n| row(n, &format!("k{n}"), LIMIT)));
    let ids = world.db.insert_all(rows).await;
    world.db.wait_states("outbox", &[("sent", 53), ("dead", 2)]).await;
    for id in [&ids[1], &ids[3]] {
        let select = format!("SELECT state, attempt, last_error FROM outbox WHERE id = '{id}'");
        let dead = world.db.row(&select).await;
        assert!(text(&dead, "last_error").starts_with("refused: "), "{dead:#}");
    }
    let requests = world.receiver.requests();
    assert_eq!(requests.len(), 53);
    let of_key: Vec<i64> = requests
        .iter()
        .filter(|request| request.header("x-message-key") == "k")
        .map(|request| request.json()["n"].as_i64().unwrap())
        .collect();
    assert_eq!(of_key, [1, 3]);
    // What a few requests take beside their payloads; the huge one alone would be twice that.
    let grown = peak_memory_kb(&worker) - before;
    assert!(kind == Kind::Sqlite || grown < 32 << 10, "{grown} kB more than before");
    world.finish().await;
}

/// Begins a request of this length and sends the first part of its body.
async fn begin(worker: &Worker, source: &str, length: usize, part: &[u8]) -> tokio::net::TcpStream {
    let mut stream = tokio::net::TcpStream::connect(("127.0.0.1", worker.http)).await.unwrap();
    let head =
        format!("POST /inbox/{source} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n");
    stream.write_all(head.as_bytes()).await.unwrap();
    stream.write_all(part).await.unwrap();
    stream.flush().await.unwrap();
    stream
}

async fn answer(mut stream: tokio::net::TcpStream) -> String {
    let mut answer = String::new();
    tokio::time::timeout(PATIENCE, stream.read_to_string(&mut answer)).await.expect("an answer").unwrap();
    answer
}

mod overload_is_refused_not_lost {
    use super::*;

    /// Bodies that are being read: beyond the bound 503, and those before it are not disturbed.
    async fn too_many_bytes(kind: Kind) {
        const LENGTH: usize = 700 << 10;
        let world = World::on(kind).await.source("hooks", json!({})).relay(json!({
            "inbox": { "maxBytesInFlight": "1MiB", "maxBodySize": "1MiB", "bodyTimeout": "120s" },
        }));
        let worker = world.start().await;
        worker.post("hooks", r#"{"id":"warm"}"#).await.accepted();
        let before = peak_memory_kb(&worker);
        let body = |id: String| {
            let head = format!("{{\"id\":\"{id}\",\"text\":\"");
            format!("{head}{}\"}}", "x".repeat(LENGTH - head.len() - 2)).into_bytes()
        };
        // Two together do not fit. Which of them is refused is a race until the first one has been read; then it is the second.
        let tries = std::cell::Cell::new(0);
        let (held_id, mut held, refused) = testkit::eventually("a second body is refused", PATIENCE, || async {
            tries.set(tries.get() + 1);
            let id = format!("held{}", tries.get());
            let held = begin(&worker, "hooks", LENGTH, &body(id.clone())[..LENGTH - 1]).await;
            let said = answer(begin(&worker, "hooks", LENGTH, &body(format!("beside{}", tries.get()))).await).await;
            said.starts_with("HTTP/1.1 503").then_some((id, held, said))
        })
        .await;
        assert!(refused.contains(r#"{"error":"Too many bytes in flight"}"#), "{refused}");
        let refuse = async |count: u32| {
            for n in 0..count {
                let said = answer(begin(&worker, "hooks", LENGTH, &body(format!("b{n}"))).await).await;
                assert!(said.starts_with("HTTP/1.1 503"), "{said}");
            }
        };
        // What the allocator keeps for the next body depends on which threads served the first ones; after that nothing is added.
        refuse(60).await;
        let settled = peak_memory_kb(&worker);
        refuse(180).await;
        let added = peak_memory_kb(&worker) - settled;
        assert!(added < 24 << 10, "{added} kB more after 180 refused bodies of 700 kB");
        held.write_all(&body(held_id.clone())[LENGTH - 1..]).await.unwrap();
        assert!(answer(held).await.starts_with("HTTP/1.1 202"));
        // Room again: what was refused is taken when it is sent again.
        let again = testkit::eventually("room again", PATIENCE, || async {
            let said = answer(begin(&worker, "hooks", LENGTH, &body("b2".into())).await).await;
            (!said.starts_with("HTTP/1.1 503")).then_some(said)
        })
        .await;
        assert!(again.starts_with("HTTP/1.1 202"), "{again}");
        let grown = peak_memory_kb(&worker) - before;
        // 240 bodies of 700 kB were refused.
        assert!(grown < 120 << 10, "{grown} kB more than before");
        let rows = world.db.rows("SELECT idempotency_key FROM inbox").await;
        let keys: std::collections::BTreeSet<&str> = rows.iter().map(|row| text(row, "idempotency_key")).collect();
        assert!(keys.contains(held_id.as_str()) && keys.contains("b2") && keys.contains("warm"), "{keys:?}");
        world.finish().await;
    }

    /// A store that takes too long: 500; sent again, it is one row.
    async fn slow_store(kind: Kind) {
        let world =
            World::on(kind).await.source("hooks", json!({})).relay(json!({ "inbox": { "storeTimeout": "1s" } }));
        let worker = world.start().await;
        let mut writer = world.db.begin().await;
        writer.execute("INSERT INTO inbox (source, idempotency_key, payload) VALUES ('hooks', 'slow', '{}')").await;
        let said = worker.post("hooks", r#"{"id":"slow"}"#).await;
        assert_eq!((said.status, said.json()), (500, json!({ "error": "Storage failed" })));
        writer.rollback().await;
        // Sent again until it is known to be there: whichever of them was stored, it is one row.
        testkit::eventually("a duplicate", PATIENCE, || async {
            let said = worker.post("hooks", r#"{"id":"slow"}"#).await;
            assert!([200, 202, 500].contains(&said.status), "{said:?}");
            (said.status == 200).then_some(())
        })
        .await;
        world.db.wait_states("outbox", &[("sent", 1)]).await;
        assert_eq!(world.db.count("SELECT count(*) FROM inbox").await, 1);
        assert_eq!(world.receiver.count(), 1);
        world.finish().await;
    }

    on_every_database!(too_many_bytes, slow_store);
}

mod overload_by_hostile_senders {
    use super::*;

    /// Source, headers, body, and the status that it gets.
    type Attack<'a> = (&'a str, &'a [(&'a str, &'a str)], &'a str, u16);

    /// Bodies that never end, too large, too deep, broken, packed and forged, without a pause: each gets the answer of the contract, and
    /// good senders are served while all of that is under way. A hundred of the slow ones are still open at the end.
    async fn beside_good_traffic(kind: Kind) {
        const SLOW: usize = 100;
        let hmac = json!({ "hmac": { "secretFrom": { "env": "SECRET" } } });
        let world = World::on(kind)
            .await
            .env("SECRET", testkit::CANARY)
            .source("hooks", json!({}))
            .source("signed", json!({ "http": { "path": "/signed", "auth": hmac } }))
            .relay(json!({ "inbox": { "maxBodySize": "64KiB", "bodyTimeout": "10m" } }));
        let worker = world.start().await;
        let mut slow = Vec::new();
        for n in 0..SLOW {
            slow.push(begin(&worker, "hooks", 60_000, format!(r#"{{"id":"slow-{n}","#).as_bytes()).await);
        }
        let (deep, large) = ("[".repeat(200) + &"]".repeat(200), payload_of(65 << 10, 1));
        let forged = ("x-signature", "sha256=0000000000000000000000000000000000000000000000000000000000000000");
        let attacks: [Attack<'_>; 6] = [
            ("hooks", &[], &large, 413),
            ("hooks", &[], &deep, 400),
            ("hooks", &[], "{\"id\":", 400),
            ("hooks", &[("content-encoding", "gzip")], "x", 415),
            ("signed", &[forged], r#"{"id":"forged"}"#, 401),
            // What was taken before, sent again.
            ("hooks", &[], r#"{"id":"replayed"}"#, 200),
        ];
        worker.post("hooks", r#"{"id":"replayed"}"#).await.accepted();
        let done = std::cell::Cell::new(false);
        let good = async {
            for n in 0..100 {
                worker.post("hooks", format!(r#"{{"id":"good-{n}"}}"#)).await.accepted();
            }
            world.db.wait_states("outbox", &[("sent", 101)]).await;
            done.set(true);
        };
        tokio::join!(attack(&worker, &attacks, &done), attack(&worker, &attacks, &done), good);
        assert_eq!(world.receiver.count(), 101);
        assert_eq!(world.db.count("SELECT count(*) FROM inbox").await, 101, "nothing of the rest left a row");
        for stream in &mut slow {
            // Still being read: neither answered nor cut off.
            let mut byte = [0];
            let heard = futures::FutureExt::now_or_never(stream.read(&mut byte));
            assert!(heard.is_none(), "{heard:?}");
        }
        drop(slow);
        world.finish().await;
    }

    async fn attack(worker: &Worker, attacks: &[Attack<'_>], done: &std::cell::Cell<bool>) {
        loop {
            for (source, headers, body, status) in attacks {
                let answer = worker.post_with(source, headers, *body).await;
                assert_eq!(answer.status, *status, "{source} {headers:?}: {answer:?}");
            }
            if done.get() {
                return;
            }
        }
    }

    on_every_database!(beside_good_traffic);
}

/// The SQL blocks of the guide's page on delivery.
fn recipes() -> Vec<String> {
    let page = std::fs::read_to_string(testkit::workspace_root().join("docs/guide/delivery.md")).unwrap();
    let blocks = page.split("```sql\n").skip(1).map(|block| block.split("```").next().unwrap());
    blocks.map(|block| block.trim().trim_end_matches(';').to_owned()).collect()
}

async fn receiver_recipe_is_idempotent(kind: Kind) {
    let [table, remember, newest] = recipes().try_into().unwrap();
    // A message goes through QueueBox twice, as after a replay; its receiver follows the page.
    let world = World::on(kind).await.source("shop", json!({ "topic": "paid" }));
    let db = &world.db;
    db.execute(&table).await;
    db.execute("CREATE TABLE account (balance INTEGER NOT NULL); INSERT INTO account VALUES (0)").await;
    db.execute("CREATE TABLE stock (sku VARCHAR(20) PRIMARY KEY, amount INTEGER NOT NULL, version INTEGER NOT NULL)")
        .await;
    let worker = world.start().await;
    let inbox = worker.post("shop", r#"{"id":"m-1","amount":5}"#).await.accepted();
    world.receiver.wait_for(1, PATIENCE).await;
    db.wait_states("outbox", &[("sent", 1)]).await;
    let moved = worker.admin("/admin/inbox/requeue", json!({ "ids": [inbox], "state": ["processed"] })).await;
    assert_eq!(moved.json()["moved"], 1);
    let requests = world.receiver.wait_for(2, PATIENCE).await;

    let remember = Statement::new(kind, &remember);
    let given = |source: &str, key: &str| [("source", Bound::from(source)), ("key", Bound::from(key))];
    let receive = async |source: &str, key: &str, body: &Value| {
        let mut tx = db.begin().await;
        if remember.run_in(&mut tx, &given(source, key)).await == 1 {
            tx.execute(&format!("UPDATE account SET balance = balance + {}", body["amount"])).await;
        }
        tx.commit().await;
    };
    for request in &requests {
        receive(request.header("x-source"), request.header("x-idempotency-key"), &request.json()).await;
    }
    assert_eq!(db.count("SELECT balance FROM account").await, 5, "twice has one effect");

    let body = requests[0].json();
    // Twice at once, many times over.
    let at_once = (0..40).map(|n| receive("own", ["a", "b"][n % 2], &body));
    let at_once: Vec<_> = at_once.map(Box::pin).collect();
    futures::future::join_all(at_once).await;
    assert_eq!(db.count("SELECT balance FROM account").await, 15);

    // The first of two is rolled back: the second is the first.
    let mut first = db.begin().await;
    assert_eq!(remember.run_in(&mut first, &given("own", "c")).await, 1);
    let second = receive("own", "c", &body);
    let end = async {
        tokio::time::sleep(std::time::Duration::from_millis(200)).await;
        Tx::rollback(first).await;
    };
    futures::future::join(second, end).await;
    assert_eq!(db.count("SELECT balance FROM account").await, 20);

    let newest = Statement::new(kind, &newest);
    let stock = async |amount: i64, version: i64| {
        newest.run(db, &[("sku", "s".into()), ("amount", amount.into()), ("version", version.into())]).await
    };
    let all = [(7, 1), (4, 3), (4, 3), (7, 1), (9, 2)];
    futures::future::join_all(all.map(|(amount, version)| Box::pin(stock(amount, version)))).await;
    for (amount, version) in all {
        assert_eq!(stock(amount, version).await, 0, "a repeat changes nothing");
    }
    let row = db.row("SELECT amount, version FROM stock").await;
    assert_eq!(row, json!({ "amount": 4, "version": 3 }));
    world.finish().await;
}

on_every_database!(huge_row_hurts_only_itself);
on_postgres!(receiver_recipe_is_idempotent);

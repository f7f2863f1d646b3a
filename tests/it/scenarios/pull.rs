//! Section I: pull, by the statements that the client libraries publish.

use std::{collections::BTreeSet, sync::Mutex, time::Duration};

use queuebox_testkit as testkit;
use serde_json::{Value, json};

use crate::support::{Bound, Db, Kind, PATIENCE, Statement, World, number, on_every_database, text, time};

/// The statement in `clients/sql`.
fn published(kind: Kind, name: &str) -> Statement {
    let folder = if kind == Kind::Postgres { "postgresql" } else { "sqlite" };
    let file = testkit::workspace_root().join(format!("clients/sql/{folder}/{name}.sql"));
    Statement::new(kind, &std::fs::read_to_string(&file).unwrap_or_else(|error| panic!("{error}: {}", file.display())))
}

/// Claims at most this many of a source for this long; the rows in the order in which a worker takes them.
async fn claim_for(db: &Db, source: &str, batch: i64, lease_ms: i64) -> Vec<Value> {
    let given = [
        ("source", source.into()),
        ("batch", batch.into()),
        ("lease_ms", lease_ms.into()),
        ("cand_limit", (3 * batch).clamp(50, 500).into()),
    ];
    let ids = published(db.kind, "claim").ids(db, &given).await;
    if ids.is_empty() {
        return Vec::new();
    }
    let list: Vec<String> = ids.iter().map(|id| format!("'{id}'")).collect();
    let rows = format!("SELECT * FROM inbox WHERE id IN ({}) ORDER BY scheduled_at, created_at, id", list.join(", "));
    db.rows(&rows).await
}

pub async fn claim(db: &Db, source: &str, batch: i64) -> Vec<Value> {
    claim_for(db, source, batch, 600_000).await
}

/// Parameters of the statements behind a claim: the row and its token, then what else the statement takes.
fn fenced(row: &Value, token: Bound, name: &str) -> Vec<(&'static str, Bound)> {
    let mut given = vec![("id", text(row, "id").into()), ("token", token)];
    match name {
        "renew" => given.push(("lease_ms", 600_000.into())),
        "retry" => given.extend([("delay_ms", 0.into()), ("error", "handler: no".into())]),
        "dead" => given.push(("error", "handler: no".into())),
        _ => {}
    }
    given
}

/// Runs a statement for a claimed row with the token of its claim.
async fn settle(db: &Db, name: &str, row: &Value) -> u64 {
    published(db.kind, name).run(db, &fenced(row, text(row, "claim_token").into(), name)).await
}

async fn inbox(db: &Db, row: &Value) -> Value {
    db.row(&format!("SELECT * FROM inbox WHERE id = '{}'", text(row, "id"))).await
}

/// Inserts pull messages of a source; `None` is a message without an aggregate.
pub async fn receive(db: &Db, source: &str, aggregates: &[Option<&str>]) {
    let mut tx = db.begin().await;
    for (n, aggregate) in aggregates.iter().enumerate() {
        let aggregate = aggregate.map_or("NULL".to_owned(), |aggregate| format!("'{aggregate}'"));
        // One after the other: the time of receipt is part of the order.
        let at = match db.kind {
            Kind::Postgres => format!("clock_timestamp() - interval '1 second' + {n} * interval '1 microsecond'"),
            Kind::Sqlite => format!("strftime('%Y-%m-%dT%H:%M:%f', 'now', '-1 seconds') || printf('%03dZ', {n})"),
        };
        tx.execute(&format!(
            "INSERT INTO inbox (source, idempotency_key, aggregate_id, payload, consumption, created_at, scheduled_at) \
             VALUES ('{source}', 'k{n}', {aggregate}, '{{\"n\":{n}}}', 'pull', {at}, {at})"
        ))
        .await;
    }
    tx.commit().await;
}

/// `n` of each payload.
fn numbers(rows: &[Value]) -> Vec<i64> {
    rows.iter().map(|row| row["payload"]["n"].as_i64().unwrap()).collect()
}

/// Ends the lease of everything that is claimed.
async fn expire(db: &Db) {
    db.execute(&format!("UPDATE inbox SET lease_expires_at = {} WHERE state = 'processing'", db.in_seconds(-60))).await;
}

/// A world with tables and no worker: pull needs the database only.
async fn tables(kind: Kind) -> World {
    let world = World::on(kind).await;
    world.migrate().await;
    world
}

async fn pull_one_in_flight_per_aggregate(kind: Kind) {
    let world = tables(kind).await;
    let db = &world.db;
    receive(db, "tasks", &[Some("a"), Some("a"), Some("a"), Some("b"), None, None]).await;
    let first = claim(db, "tasks", 10).await;
    assert_eq!(numbers(&first), [0, 3, 4, 5], "one of each aggregate, and every message without one");
    assert!(claim(db, "tasks", 10).await.is_empty(), "the rest of its aggregate waits");
    assert_eq!(settle(db, "complete", &first[0]).await, 1);
    assert_eq!(numbers(&claim(db, "tasks", 10).await), [1]);
    // An ended lease makes the aggregate free again; its oldest message comes first, also if it was claimed before.
    expire(db).await;
    assert_eq!(numbers(&claim(db, "tasks", 10).await), [1, 3, 4, 5]);
    world.finish().await;
}

async fn pull_sources_do_not_block(kind: Kind) {
    let world = tables(kind).await;
    receive(&world.db, "one", &[Some("a"), Some("a")]).await;
    receive(&world.db, "two", &[Some("a"), Some("a")]).await;
    for source in ["one", "two"] {
        let claimed = claim(&world.db, source, 10).await;
        assert_eq!((claimed.len(), text(&claimed[0], "source")), (1, source));
    }
    world.finish().await;
}

async fn pull_and_push_are_apart(kind: Kind) {
    let pull = json!({ "consumption": "pull", "topic": null, "aggregateIdPath": "$.order" });
    let world = World::on(kind).await.source("pulled", pull).source("pushed", json!({ "aggregateIdPath": "$.order" }));
    let worker = world.start().await;
    // One source had been push before: what it stored then is still pushed.
    worker.post("pulled", r#"{"id":1,"order":"o"}"#).await.accepted();
    let claimed = claim(&world.db, "pulled", 10).await;
    assert_eq!(claimed.len(), 1);
    worker.post("pushed", r#"{"id":2,"order":"o"}"#).await.accepted();
    world.db.wait_states("outbox", &[("sent", 1)]).await;
    worker.process.terminate(PATIENCE).await;
    // Without a relay: a push row that lies there is none for a pull worker, whatever its source.
    world
        .db
        .execute("INSERT INTO inbox (source, idempotency_key, payload, topic) VALUES ('pulled', 'push', '{}', 'order')")
        .await;
    assert!(claim(&world.db, "pulled", 10).await.is_empty());
    assert!(claim(&world.db, "pushed", 10).await.is_empty());
    // The relay leaves a claimed row alone, also when its lease has ended.
    expire(&world.db).await;
    let before = inbox(&world.db, &claimed[0]).await;
    world.start().await;
    world.db.wait_states("inbox", &[("processing", 1), ("processed", 2)]).await;
    assert_eq!(inbox(&world.db, &claimed[0]).await, before);
    world.finish().await;
}

mod pull_claims_are_disjoint {
    use super::*;

    /// Claimers at once that commit at once: every message to one of them, no two of an aggregate at a time.
    async fn fast_commits(kind: Kind) {
        let world = tables(kind).await;
        let aggregates: Vec<String> = (0..240).map(|n| format!("a{}", n % 30)).collect();
        let aggregates: Vec<Option<&str>> =
            aggregates.iter().enumerate().map(|(n, name)| (n % 4 > 0).then_some(name.as_str())).collect();
        receive(&world.db, "tasks", &aggregates).await;
        let in_flight = Mutex::new(BTreeSet::new());
        let worker = async || {
            let mut handled = Vec::new();
            while world.db.count("SELECT count(*) FROM inbox WHERE state <> 'processed'").await > 0 {
                let rows = claim(&world.db, "tasks", 3).await;
                let named = |row: &Value| row["aggregate_id"].as_str().map(str::to_owned);
                for aggregate in rows.iter().filter_map(named) {
                    assert!(in_flight.lock().unwrap().insert(aggregate.clone()), "{aggregate} twice at a time");
                }
                for row in rows {
                    if let Some(aggregate) = named(&row) {
                        in_flight.lock().unwrap().remove(&aggregate);
                    }
                    assert_eq!(settle(&world.db, "complete", &row).await, 1);
                    handled.push(text(&row, "id").to_owned());
                }
            }
            handled
        };
        let handled = futures::future::join_all((0..8).map(|_| worker())).await.concat();
        let distinct: BTreeSet<&String> = handled.iter().collect();
        assert_eq!((handled.len(), distinct.len()), (240, 240));
        world.finish().await;
    }

    /// Rows that a transaction of somebody else holds are passed over, and taken when it ends.
    async fn delayed_locks(kind: Kind) {
        let world = tables(kind).await;
        receive(&world.db, "tasks", &[None, None, Some("a"), Some("a")]).await;
        let mut other = world.db.begin().await;
        other.execute("UPDATE inbox SET headers = '{\"held\":\"yes\"}' WHERE idempotency_key IN ('k0', 'k2')").await;
        if kind == Kind::Postgres {
            assert_eq!(numbers(&claim(&world.db, "tasks", 10).await), [1], "k3 is not the head of its aggregate");
        }
        // On SQLite the claim waits for the writer.
        let waiting = {
            let db = world.db.clone();
            tokio::spawn(async move { claim(&db, "tasks", 10).await })
        };
        tokio::time::sleep(Duration::from_millis(200)).await;
        other.commit().await;
        let mut all = numbers(&waiting.await.unwrap());
        all.extend(numbers(&claim(&world.db, "tasks", 10).await));
        all.sort_unstable();
        let expected: &[i64] = if kind == Kind::Postgres { &[0, 2] } else { &[0, 1, 2] };
        assert_eq!(all, expected);
        world.finish().await;
    }

    on_every_database!(fast_commits, delayed_locks);
}

const BEHIND_A_CLAIM: [&str; 5] = ["renew", "complete", "retry", "dead", "release"];

async fn pull_fence(kind: Kind) {
    let world = tables(kind).await;
    let db = &world.db;
    for name in BEHIND_A_CLAIM {
        receive(db, name, &[None]).await;
        let first = claim(db, name, 1).await.remove(0);
        for wrong in [Bound::Null, "22222222-2222-4222-8222-222222222222".into()] {
            assert_eq!(published(kind, name).run(db, &fenced(&first, wrong, name)).await, 0, "{name}");
        }
        expire(db).await;
        if kind == Kind::Postgres {
            // SQLite needs no lease in its fence: nobody else has written, so nobody else has it.
            assert_eq!(settle(db, name, &first).await, 0, "{name} after the lease");
        }
        let second = claim(db, name, 1).await.remove(0);
        assert_eq!(text(&second, "id"), text(&first, "id"));
        assert_ne!(text(&second, "claim_token"), text(&first, "claim_token"));
        assert_eq!(settle(db, name, &first).await, 0, "{name} with a token that was taken over");
        assert_eq!(inbox(db, &second).await, second);
        assert_eq!(settle(db, name, &second).await, 1);
        if name != "renew" {
            assert_eq!(settle(db, name, &second).await, 0, "{name} twice");
        }
    }
    world.finish().await;
}

async fn pull_completion_is_atomic(kind: Kind) {
    let world = tables(kind).await;
    let db = &world.db;
    db.execute("CREATE TABLE effects (message TEXT NOT NULL)").await;
    receive(db, "tasks", &[None]).await;
    let row = claim(db, "tasks", 1).await.remove(0);
    let given = fenced(&row, text(&row, "claim_token").into(), "complete");
    let complete = published(kind, "complete");
    let effect = format!("INSERT INTO effects VALUES ('{}')", text(&row, "id"));

    let mut tx = db.begin().await;
    tx.execute(&effect).await;
    assert_eq!(complete.run_in(&mut tx, &given).await, 1);
    tx.rollback().await;
    assert_eq!(db.count("SELECT count(*) FROM effects").await, 0);
    assert_eq!(inbox(db, &row).await, row);

    let mut tx = db.begin().await;
    tx.execute(&effect).await;
    assert_eq!(complete.run_in(&mut tx, &given).await, 1);
    tx.commit().await;
    assert_eq!(db.count("SELECT count(*) FROM effects").await, 1);
    let done = inbox(db, &row).await;
    assert_eq!(text(&done, "state"), "processed");
    assert!(!done["processed_at"].is_null() && done["claim_token"].is_null() && done["lease_expires_at"].is_null());
    world.finish().await;
}

mod pull_statements_are_the_published_ones {
    use super::*;

    /// Every file has just the parameters of contract 5.3.
    #[test]
    fn parameters() {
        let of =
            |kind: Kind, name: &str| -> BTreeSet<String> { published(kind, name).parameters.into_iter().collect() };
        let table: [(&str, &[&str]); 7] = [
            ("claim", &["source", "batch", "lease_ms", "cand_limit"]),
            ("renew", &["id", "token", "lease_ms"]),
            ("complete", &["id", "token"]),
            ("retry", &["id", "token", "delay_ms", "error"]),
            ("dead", &["id", "token", "error"]),
            ("release", &["id", "token"]),
            ("bury", &["source", "max_crashes"]),
        ];
        for (name, parameters) in table {
            let parameters: BTreeSet<String> = parameters.iter().map(|name| (*name).to_owned()).collect();
            for kind in [Kind::Postgres, Kind::Sqlite] {
                assert_eq!(of(kind, name), parameters, "{name} on {kind:?}");
            }
        }
    }

    async fn effects(kind: Kind) {
        let world = tables(kind).await;
        let db = &world.db;
        let fresh = async |source: &str| {
            receive(db, source, &[None]).await;
            claim_for(db, source, 1, 3_600_000).await.remove(0)
        };

        let row = fresh("claim").await;
        assert_eq!((text(&row, "state"), number(&row, "crashes"), number(&row, "attempt")), ("processing", 0, 0));
        let lease = time(&row, "lease_expires_at").duration_since(time(&row, "claimed_at")).as_secs();
        assert!((3590..=3601).contains(&lease), "{lease}");
        assert_eq!(settle(db, "renew", &row).await, 1);
        let renewed = inbox(db, &row).await;
        assert!(time(&renewed, "lease_expires_at") < time(&row, "lease_expires_at"), "ten minutes from now");
        assert_eq!(renewed["claim_token"], row["claim_token"]);

        let row = fresh("retry").await;
        let mut given = fenced(&row, text(&row, "claim_token").into(), "retry");
        given[2] = ("delay_ms", 3_600_500.into());
        assert_eq!(published(kind, "retry").run(db, &given).await, 1);
        let waiting = inbox(db, &row).await;
        assert_eq!((text(&waiting, "state"), number(&waiting, "attempt")), ("pending", 1));
        assert_eq!(text(&waiting, "last_error"), "handler: no");
        let delay = time(&waiting, "scheduled_at").duration_since(time(&row, "claimed_at")).as_secs();
        assert!((3600..=3700).contains(&delay), "{delay}");
        assert!(claim(db, "retry", 1).await.is_empty(), "not before its time");

        let row = fresh("dead").await;
        assert_eq!(settle(db, "dead", &row).await, 1);
        let dead = inbox(db, &row).await;
        assert_eq!((text(&dead, "state"), number(&dead, "attempt")), ("dead", 0));
        assert!(claim(db, "dead", 1).await.is_empty());

        let row = fresh("release").await;
        assert_eq!(settle(db, "release", &row).await, 1);
        let released = inbox(db, &row).await;
        assert_eq!((text(&released, "state"), number(&released, "attempt")), ("pending", 0));
        assert_eq!(released["scheduled_at"], row["scheduled_at"]);
        assert_eq!(claim(db, "release", 1).await.len(), 1);

        let row = fresh("bury").await;
        let bury =
            async || published(kind, "bury").run(db, &[("source", "bury".into()), ("max_crashes", 3.into())]).await;
        for crashes in 1..=2 {
            expire(db).await;
            assert_eq!(bury().await, 0);
            assert_eq!(number(&claim(db, "bury", 1).await[0], "crashes"), crashes, "a takeover is a crash");
        }
        assert_eq!(bury().await, 0, "its lease lives");
        expire(db).await;
        assert_eq!(bury().await, 1);
        let buried = inbox(db, &row).await;
        assert_eq!((text(&buried, "state"), number(&buried, "crashes")), ("dead", 3));
        assert!(text(&buried, "last_error").starts_with("crashes: "), "{buried:#}");

        // An outcome that was written ends the count.
        let row = fresh("mended").await;
        expire(db).await;
        let again = claim(db, "mended", 1).await.remove(0);
        assert_eq!(number(&again, "crashes"), 1);
        assert_eq!(settle(db, "complete", &again).await, 1);
        assert_eq!(number(&inbox(db, &row).await, "crashes"), 0);
        world.finish().await;
    }

    on_every_database!(effects);
}

on_every_database!(
    pull_one_in_flight_per_aggregate,
    pull_sources_do_not_block,
    pull_and_push_are_apart,
    pull_fence,
    pull_completion_is_atomic,
);

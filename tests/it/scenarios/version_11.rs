//! Section S: tables as a classic installation left them, at version 11: the built program on them without a migration, and the migration
//! beside the clients of a queue.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    time::Duration,
};

use queuebox_testkit::{self as testkit, Answer, CLASSIC_VERSION};
use serde_json::{Value, json};

use super::start::refused;
use crate::support::{Bound, Db, Kind, OutboxRow, PATIENCE, Statement, Worker, World, number, text};

/// A world on tables of version 11 with their classic history.
async fn classic() -> World {
    let world = World::on(Kind::Postgres).await;
    for sql in [testkit::classic_tables(0, CLASSIC_VERSION), testkit::classic_history(CLASSIC_VERSION)].concat() {
        world.db.execute(&sql).await;
    }
    world
}

mod version_11_is_served {
    use super::*;

    const KEYS: i64 = 12;
    const ROWS: i64 = 240;
    const WEBHOOKS: i64 = 40;

    /// What a start says about each feature that these tables cannot have.
    const OFF: [&str; 6] = [
        "fan-out is off; it needs",
        "crash counting is off; it needs",
        "stored topics are off; it needs",
        "stored trace context is off; it needs",
        "lanes are off and rows are claimed instead",
        "wake-up is off, so workers poll",
    ];

    /// Without migrations, with a lease, a webhook source whose topic is made at the forward, and a receiver that fails one head once.
    async fn unmigrated(lease: &str) -> World {
        let world = classic()
            .await
            .relay(json!({ "database": { "migrate": "Off" }, "outbox": { "claimTimeout": lease } }))
            .source(
                "hooks",
                json!({ "topic": "hook.{{ eventType }}", "eventTypePath": "$.type", "aggregateIdPath": "$.order" }),
            );
        world.receiver.answer_with(|request| {
            let fails = request.json()["n"] == 0 && request.header("x-attempt") == "0";
            if fails { Answer::status(500) } else { Answer::ok().after(Duration::from_millis(20)) }
        });
        world
    }

    fn rows() -> impl Iterator<Item = OutboxRow> {
        (0..ROWS).map(|n| OutboxRow::new("order", n).key(&format!("k{}", n % KEYS)))
    }

    fn says_what_is_off(worker: &Worker) {
        let log = worker.process.output();
        for feature in OFF {
            assert_eq!(log.matches(feature).count(), 1, "{feature}: {log}");
        }
    }

    async fn post(worker: &Worker, n: i64) {
        let body = json!({ "id": n, "type": "paid", "order": format!("o{}", n % 4), "n": 1_000 + n });
        worker.post("hooks", body.to_string()).await.accepted();
    }

    /// Every message came, those of a key in order. Returns how often each attempt of each message came, where it was more than once.
    fn judge(world: &World, ids: &[String]) -> BTreeMap<(String, String), u32> {
        let requests = world.receiver.requests();
        let mut keys: BTreeMap<&str, Vec<i64>> = BTreeMap::new();
        let mut times: BTreeMap<(String, String), u32> = BTreeMap::new();
        for request in &requests {
            let n = request.json()["n"].as_i64().unwrap();
            let seen = keys.entry(request.header("x-message-key")).or_default();
            if !seen.contains(&n) {
                seen.push(n);
            }
            let attempt = (request.header("x-message-id").to_owned(), request.header("x-attempt").to_owned());
            *times.entry(attempt).or_default() += 1;
        }
        for (key, numbers) in &keys {
            assert!(numbers.is_sorted(), "{key}: {numbers:?}");
        }
        let arrived: BTreeSet<&String> = times.keys().map(|(id, _)| id).collect();
        assert!(ids.iter().all(|id| arrived.contains(id)), "lost");
        let hooks = requests.iter().filter(|request| request.header("x-topic") == "hook.paid");
        let hooks: BTreeSet<&str> = hooks.map(|request| request.header("x-idempotency-key")).collect();
        assert_eq!(
            hooks.len(),
            usize::try_from(WEBHOOKS).unwrap(),
            "a topic that is not stored is made at the forward"
        );
        // The head that failed held its key until it was sent.
        let of_the_head = requests.iter().filter(|request| request.header("x-message-key") == "k0").take(2);
        assert_eq!(of_the_head.map(|request| request.json()["n"].clone()).collect::<Vec<_>>(), [0, 0]);
        times.retain(|_, times| *times > 1);
        times
    }

    async fn all_sent(world: &World, ids: &[String]) {
        world.db.wait_states("outbox", &[("sent", ROWS + WEBHOOKS)]).await;
        world.db.wait_states("inbox", &[("processed", WEBHOOKS)]).await;
        assert_eq!(number(&world.db.outbox(&ids[0]).await, "attempt"), 1);
        let others = format!("SELECT count(*) FROM outbox WHERE attempt <> 0 AND id <> '{}'", ids[0]);
        assert_eq!(world.db.count(&others).await, 0, "nothing but the failure cost an attempt");
    }

    #[tokio::test]
    async fn beside_a_worker_that_is_killed() {
        let world = unmigrated("5s").await;
        let (victim, other) = (world.start().await, world.start().await);
        says_what_is_off(&victim);
        says_what_is_off(&other);
        let ids = world.db.insert_all(rows()).await;
        for n in 0..WEBHOOKS / 2 {
            post(if n % 2 == 0 { &victim } else { &other }, n).await;
        }
        world.receiver.wait_for(60, PATIENCE).await;
        victim.process.kill9().await;
        let claimed = world.db.rows("SELECT CAST(id AS text) AS id FROM outbox WHERE state = 'processing'").await;
        let claimed: BTreeSet<&str> = claimed.iter().map(|row| text(row, "id")).collect();
        for n in WEBHOOKS / 2..WEBHOOKS {
            post(&other, n).await;
        }
        all_sent(&world, &ids).await;
        let said = world.claims_lost();
        for ((id, attempt), times) in judge(&world, &ids) {
            let excused = u32::from(claimed.contains(id.as_str())) + said.get(&id).copied().unwrap_or(0);
            assert!(times <= 1 + excused, "{id} came {times} times at attempt {attempt}");
        }
        assert!(other.process.terminate(PATIENCE).await.success());
        world.finish().await;
    }

    /// A lease that outlasts the patience of the test: whoever takes the rest has been given it.
    #[tokio::test]
    async fn beside_a_worker_that_is_stopped() {
        let world = unmigrated("15m").await;
        let (stopped, other) = (world.start().await, world.start().await);
        let ids = world.db.insert_all(rows()).await;
        for n in 0..WEBHOOKS {
            post(&stopped, n).await;
        }
        world.receiver.wait_for(60, PATIENCE).await;
        assert!(stopped.process.terminate(PATIENCE).await.success());
        all_sent(&world, &ids).await;
        assert_eq!(judge(&world, &ids), BTreeMap::new(), "a clean stop repeats nothing");
        assert!(other.process.terminate(PATIENCE).await.success());
        world.finish().await;
    }

    /// There is no place for the children of a message: the start says so, and what it says mends it.
    #[tokio::test]
    async fn a_route_with_several_destinations_is_refused() {
        let world = unmigrated("5s")
            .await
            .destination("second", json!({ "http": { "url": "http://127.0.0.1:9/" }, "paused": true }))
            .routes(&[("plain", &["receiver"]), ("both", &["receiver", "second"])]);
        let said = refused(&world).await;
        for part in ["spec.routes[1] (receiver, second)", "schema version 12", "queuebox migrate"] {
            assert!(said.contains(part), "{part}: {said}");
        }
        world.migrate().await;
        world.start().await;
        world.db.insert(OutboxRow::new("both", 1)).await;
        world.db.wait_states("outbox", &[("sent", 2), ("pending", 1)]).await;
        world.finish().await;
    }
}

mod version_11_works_unchanged {
    use super::*;

    /// The statements of a client, as they are published; below version 12 the lines that name `crashes` are left out.
    #[derive(Debug)]
    struct Client {
        claim: Statement,
        complete: Statement,
        retry: Statement,
    }

    impl Client {
        fn of(is_old: bool) -> Client {
            let statement = |name: &str| {
                let file = testkit::workspace_root().join(format!("clients/sql/postgresql/{name}.sql"));
                let published = std::fs::read_to_string(file).unwrap();
                let lines = published.lines().filter(|line| !is_old || !line.contains("crashes"));
                Statement::new(Kind::Postgres, &lines.collect::<Vec<_>>().join("\n"))
            };
            Client { claim: statement("claim"), complete: statement("complete"), retry: statement("retry") }
        }
    }

    #[derive(Debug)]
    struct Queue {
        db: Db,
        /// Nothing more comes.
        is_closed: AtomicBool,
        in_flight: Mutex<BTreeSet<String>>,
    }

    impl Queue {
        async fn effects(&self) -> i64 {
            self.db.count("SELECT count(*) FROM effects").await
        }

        /// Waits until so many more messages were handled.
        async fn handles(&self, more: i64) {
            let wanted = self.effects().await + more;
            testkit::eventually("messages are handled", PATIENCE, || async {
                (self.effects().await >= wanted).then_some(())
            })
            .await;
        }

        async fn unfinished(&self) -> i64 {
            self.db.count("SELECT count(*) FROM inbox WHERE state <> 'processed'").await
        }

        /// Puts messages in, never many at a time, until the queue is closed; returns how many there were.
        async fn feed(self: Arc<Self>) -> i64 {
            let mut fed = 0;
            while !self.is_closed.load(SeqCst) {
                if self.unfinished().await < 50 {
                    let rows: Vec<String> = (fed..fed + 10)
                        .map(|n| format!("('tasks', 'k{n}', 'a{}', '{{\"n\": {n}}}', 'pull')", n % 20))
                        .collect();
                    let into = "INSERT INTO inbox (source, idempotency_key, aggregate_id, payload, consumption) VALUES";
                    self.db.execute(&format!("{into} {}", rows.join(", "))).await;
                    fed += 10;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            fed
        }

        /// Claims and handles until the queue is closed and empty. Any error of a statement is a panic.
        async fn serve(self: Arc<Self>, client: Client) {
            while !self.is_closed.load(SeqCst) || self.unfinished().await > 0 {
                let given = [
                    ("source", "tasks".into()),
                    ("batch", 5.into()),
                    ("lease_ms", 600_000.into()),
                    ("cand_limit", 50.into()),
                ];
                let ids = client.claim.ids(&self.db, &given).await;
                if ids.is_empty() {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                    continue;
                }
                let list: Vec<String> = ids.iter().map(|id| format!("'{id}'")).collect();
                let rows = self.db.rows(&format!("SELECT * FROM inbox WHERE id IN ({})", list.join(", "))).await;
                for row in &rows {
                    let aggregate = text(row, "aggregate_id").to_owned();
                    assert!(self.in_flight.lock().unwrap().insert(aggregate), "two of an aggregate at a time: {row:#}");
                }
                for row in &rows {
                    self.in_flight.lock().unwrap().remove(text(row, "aggregate_id"));
                    self.handle(&client, row).await;
                }
            }
        }

        /// Every seventh message fails once.
        async fn handle(&self, client: &Client, row: &Value) {
            let mut given = vec![("id", Bound::from(text(row, "id"))), ("token", text(row, "claim_token").into())];
            if row["payload"]["n"].as_i64().unwrap() % 7 == 3 && number(row, "attempt") == 0 {
                given.extend([("delay_ms", 0.into()), ("error", "handler: no".into())]);
                assert_eq!(client.retry.run(&self.db, &given).await, 1);
                return;
            }
            let mut tx = self.db.begin().await;
            tx.execute(&format!("INSERT INTO effects VALUES ('{}')", text(row, "id"))).await;
            assert_eq!(client.complete.run_in(&mut tx, &given).await, 1);
            tx.commit().await;
        }
    }

    /// `queuebox migrate` from 11 to the newest version, while clients of before claim, complete and retry without a pause; afterwards
    /// clients of today work beside them.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn pull_clients_go_on_beside_the_upgrade() {
        let world = classic().await;
        world.db.execute("CREATE TABLE effects (message TEXT PRIMARY KEY)").await;
        let queue = Arc::new(Queue { db: world.db.clone(), is_closed: false.into(), in_flight: Mutex::default() });
        let feeding = tokio::spawn(queue.clone().feed());
        let mut clients: Vec<_> = (0..3).map(|_| tokio::spawn(queue.clone().serve(Client::of(true)))).collect();
        queue.handles(30).await;

        // An index that is built beside writers waits for every older snapshot: so the migration is met in the middle.
        let mut elder = world.db.begin().await;
        elder.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM pg_class").await;
        let folder = world.write_manifests(1, 2);
        let migrating = world.program(&["migrate", "-f", folder.to_str().unwrap()]).spawn();
        let building = "SELECT count(*) AS n FROM pg_stat_activity WHERE datname = current_database() \
                        AND query LIKE '%CREATE INDEX CONCURRENTLY%' AND wait_event_type = 'Lock' AND pid <> pg_backend_pid()";
        world.db.wait_row(building, |row| number(row, "n") > 0).await;
        queue.handles(60).await;
        assert!(migrating.is_running(), "nothing was handled beside the migration");
        elder.commit().await;
        assert!(migrating.wait(PATIENCE).await.success(), "{}", migrating.output());
        assert_eq!(world.db.count("SELECT max(version) AS n FROM queuebox_schema_history").await, 14);

        clients.extend((0..2).map(|_| tokio::spawn(queue.clone().serve(Client::of(false)))));
        queue.handles(60).await;
        queue.is_closed.store(true, SeqCst);
        let fed = feeding.await.unwrap();
        for client in clients {
            client.await.unwrap();
        }
        world.db.wait_states("inbox", &[("processed", fed)]).await;
        // The table of effects refuses a second one of a message.
        assert_eq!(queue.effects().await, fed);
        let failed = world.db.count("SELECT count(*) FROM inbox WHERE attempt = 1").await;
        assert_eq!(usize::try_from(failed).unwrap(), (0..fed).filter(|n| n % 7 == 3).count());
        world.finish().await;
    }
}

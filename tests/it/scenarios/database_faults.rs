//! Faults of the database under traffic. Each ends in recovery by itself: everything is delivered, no attempt is spent, nothing is dead, order
//! per key holds, and readiness has told the truth meanwhile.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex},
    time::Duration,
};

use queuebox_testkit::{self as testkit, Answer, Disk, PoolMode, Postgres, promise};
use serde_json::json;
use sqlx::{Connection, Executor};

use crate::support::{Db, Kind, OutboxRow, PATIENCE, Worker, World, number, text};

const HALF: i64 = 120;
const KEYS: i64 = 10;

/// Ends every other session of the database.
const CUT: &str = "SELECT count(pg_terminate_backend(pid)) AS n FROM pg_stat_activity \
                   WHERE datname = current_database() AND pid <> pg_backend_pid()";

/// A row that fills a quarter of a page, so that its settle needs room.
fn row(n: i64) -> OutboxRow {
    let text: String = std::iter::repeat_with(|| uuid::Uuid::new_v4().simple().to_string()).take(50).collect();
    OutboxRow::new("order", n).key(&format!("k{}", n % KEYS)).payload(&json!({ "n": n, "text": text }).to_string())
}

/// A worker, messages that flow while the fault begins, and a sender of webhooks that goes on all the time.
struct Scene {
    world: World,
    worker: Arc<Worker>,
    ids: Vec<String>,
    sender: Sender,
}

/// Posts one webhook after the other to a pull source, and notes each answer.
struct Sender {
    answers: Arc<Mutex<Vec<(String, u16)>>>,
    posting: tokio::task::JoinHandle<()>,
}

impl Sender {
    fn to(worker: Arc<Worker>) -> Sender {
        let answers = Arc::<Mutex<Vec<(String, u16)>>>::default();
        let noted = answers.clone();
        let posting = tokio::spawn(async move {
            for n in 0.. {
                let id = format!("hook-{n}");
                let answer = worker.post("hooks", json!({ "id": id, "n": n }).to_string()).await;
                noted.lock().unwrap().push((id, answer.status));
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        });
        Sender { answers, posting }
    }

    /// Waits until a webhook was refused: the fault has reached the inbox.
    async fn is_refused(&self) {
        testkit::eventually("a webhook is refused", PATIENCE, || async {
            self.answers.lock().unwrap().iter().any(|(_, status)| *status >= 500).then_some(())
        })
        .await;
    }

    /// Whatever was accepted is there, once; whatever was not got an error.
    async fn end(self, db: &Db) {
        let accepted = |answers: &[(String, u16)]| answers.iter().filter(|(_, status)| *status == 202).count();
        let before = accepted(&self.answers.lock().unwrap());
        testkit::eventually("webhooks are accepted again", PATIENCE, || async {
            (accepted(&self.answers.lock().unwrap()) > before + 2).then_some(())
        })
        .await;
        self.posting.abort();
        let _ = self.posting.await;
        let stored = db.rows("SELECT idempotency_key FROM inbox").await;
        let stored: BTreeSet<&str> = stored.iter().map(|row| text(row, "idempotency_key")).collect();
        let answers = self.answers.lock().unwrap();
        for (id, status) in answers.iter() {
            assert!([200, 202, 500, 503].contains(status), "{id}: {status}");
            promise(
                *status >= 500 || stored.contains(id.as_str()),
                format_args!("{id} was answered {status} and is lost"),
            );
        }
    }
}

impl Scene {
    async fn on(server: &Postgres) -> Scene {
        Scene::begin(Scene::world(Db::postgres(server.fresh_database().await).await).await).await
    }

    async fn world(db: Db) -> World {
        World::with(db, tempfile::Builder::new().prefix("queuebox-world-").tempdir().unwrap()).await
    }

    async fn begin(world: World) -> Scene {
        let world = world
            // A database that is away for longer than the lease costs the lease, and then messages may come twice: not here.
            .relay(json!({
                "outbox": { "claimTimeout": "60s" }, "database": { "connectTimeout": "5s" }, "inbox": { "storeTimeout": "2s" },
            }))
            .source("hooks", json!({ "consumption": "pull", "topic": null }))
            .destination("receiver", json!({ "limits": { "maxInFlight": 4 } }));
        // Slow enough that most of them are on their way when the fault comes.
        world.receiver.answer_with(|_| Answer::ok().after(Duration::from_millis(150)));
        let worker = world.start().await;
        let ids = world.db.insert_all((0..HALF).map(row)).await;
        world.receiver.wait_for(10, PATIENCE).await;
        let sender = Sender::to(worker.clone());
        Scene { world, worker, ids, sender }
    }

    /// Waits until `/health/ready` answers with this status.
    async fn readiness(&self, status: u16) {
        self.says(status, &[""]).await;
    }

    /// Waits until `/health/ready` answers with this status, and a text that contains one of these.
    async fn says(&self, status: u16, texts: &[&str]) {
        let until = tokio::time::Instant::now() + PATIENCE;
        loop {
            let answer = self.worker.get("/health/ready").await;
            if answer.status == status && texts.iter().any(|text| answer.body.contains(text)) {
                return;
            }
            let is_late = tokio::time::Instant::now() > until;
            assert!(!is_late, "waited for {status} with {texts:?}: {} {}", answer.status, answer.body);
            tokio::time::sleep(Duration::from_millis(30)).await;
        }
    }

    /// The fault is over: the rest is inserted, and everything arrives.
    async fn end(mut self) {
        self.world.receiver.answer_always(Answer::ok());
        self.readiness(200).await;
        testkit::eventually_ok("an application can insert again", PATIENCE, || self.world.db.try_execute("SELECT 1"))
            .await;
        let first = i64::try_from(self.ids.len()).unwrap();
        self.ids.extend(self.world.db.insert_all((first..first + HALF).map(row)).await);
        self.world.db.wait_states("outbox", &[("sent", first + HALF)]).await;
        for id in &self.ids {
            let row = self.world.db.outbox(id).await;
            assert_eq!(number(&row, "attempt"), 0, "a fault of the database cost an attempt: {row:#}");
        }
        let came = in_order(&self.world);
        promise(came == self.ids.len(), format_args!("lost: {came} of {} came", self.ids.len()));
        // The lease held: there was no cause for a repeat.
        let requests = self.world.receiver.count();
        promise(requests == self.ids.len(), format_args!("{requests} requests for {} messages", self.ids.len()));
        self.sender.end(&self.world.db).await;
        assert!(self.worker.process.is_running());
        self.world.finish().await;
    }
}

/// How many messages came; those of a key in the order of their numbers.
fn in_order(world: &World) -> usize {
    let mut seen: BTreeMap<String, Vec<i64>> = BTreeMap::new();
    for request in world.receiver.requests() {
        let numbers = seen.entry(request.header("x-message-key").to_owned()).or_default();
        let n = request.json()["n"].as_i64().unwrap();
        if !numbers.contains(&n) {
            numbers.push(n);
        }
    }
    promise(seen.values().all(|numbers| numbers.is_sorted()), format_args!("{seen:?}"));
    seen.values().map(Vec::len).sum()
}

#[tokio::test]
async fn a_restart_is_survived() {
    let server = testkit::private_postgres().await;
    let scene = Scene::on(&server).await;
    server.stop().await;
    scene.readiness(503).await;
    scene.sender.is_refused().await;
    server.start().await;
    scene.end().await;
}

#[tokio::test]
async fn a_kill_is_survived() {
    let server = testkit::private_postgres().await;
    let scene = Scene::on(&server).await;
    server.kill9().await;
    scene.readiness(503).await;
    scene.sender.is_refused().await;
    server.start().await;
    scene.end().await;
}

#[tokio::test]
async fn a_server_that_hangs_is_survived() {
    let server = testkit::private_postgres().await;
    let scene = Scene::on(&server).await;
    scene
        .world
        .db
        .execute("BEGIN; LOCK TABLE queuebox_worker, outbox IN ACCESS EXCLUSIVE MODE; SELECT pg_sleep(4); COMMIT")
        .await;
    scene.end().await;
}

#[tokio::test]
async fn connections_that_are_cut_are_opened_again() {
    let server = testkit::private_postgres().await;
    let scene = Scene::on(&server).await;
    for _ in 0..8 {
        scene.world.db.count(CUT).await;
        let at = scene.world.receiver.count();
        scene.world.receiver.wait_for((at + 4).min(usize::try_from(HALF).unwrap()), PATIENCE).await;
    }
    scene.end().await;
}

/// After a failover the address may lead to a standby: it answers, and takes no writes.
#[tokio::test]
async fn a_server_that_became_read_only_is_survived() {
    let server = testkit::private_postgres().await;
    let scene = Scene::on(&server).await;
    server.psql("postgres", "ALTER SYSTEM SET default_transaction_read_only = on").await;
    server.psql("postgres", "SELECT pg_reload_conf()").await;
    scene.says(503, &["read-only"]).await;
    scene.sender.is_refused().await;
    server.psql("postgres", "ALTER SYSTEM RESET default_transaction_read_only").await;
    server.psql("postgres", "SELECT pg_reload_conf()").await;
    scene.end().await;
}

mod time_outs_of_the_server_are_passing_faults {
    use super::*;

    /// The table is locked for longer than the server lets a statement wait.
    async fn pass(server: &Postgres, scene: Scene, setting: &str, said: &str) {
        let name = scene.world.db.address.rsplit('/').next().unwrap().to_owned();
        scene.world.db.execute(&format!("ALTER DATABASE {name} SET {setting} = '200ms'")).await;
        // New sessions have the setting.
        scene.world.db.count(CUT).await;
        let hold =
            "SET statement_timeout = 0; BEGIN; LOCK TABLE outbox IN ACCESS EXCLUSIVE MODE; SELECT pg_sleep(3); COMMIT";
        scene.world.db.execute(hold).await;
        let log = std::fs::read_to_string(server.log()).unwrap();
        assert!(log.contains(said), "nobody met the time-out");
        scene.world.db.execute(&format!("ALTER DATABASE {name} RESET {setting}")).await;
        scene.world.db.count(CUT).await;
        scene.end().await;
    }

    #[tokio::test]
    async fn of_a_lock() {
        let server = testkit::private_postgres().await;
        let scene = Scene::on(&server).await;
        pass(&server, scene, "lock_timeout", "lock timeout").await;
    }

    /// Behind a pooler nothing is set on a connection, so there the server's own limit counts.
    #[tokio::test]
    async fn of_a_statement() {
        let server = testkit::private_postgres().await;
        let pooler = testkit::pgbouncer(&server, PoolMode::Transaction).await;
        let scene = behind(&server, &pooler).await;
        pass(&server, scene, "statement_timeout", "statement timeout").await;
    }
}

async fn behind(server: &Postgres, pooler: &testkit::PgBouncer) -> Scene {
    let name = server.fresh_database_name().await;
    let world = Scene::world(Db::postgres(server.url_of(&name)).await).await;
    Scene::begin(world.env("DATABASE_URL", &pooler.url_of(&name))).await
}

/// The pooler goes away and comes back, then the server behind it.
#[tokio::test]
async fn a_pooler_in_transaction_mode_is_survived() {
    let server = testkit::private_postgres().await;
    let pooler = testkit::pgbouncer(&server, PoolMode::Transaction).await;
    let scene = behind(&server, &pooler).await;
    pooler.kill9().await;
    scene.readiness(503).await;
    pooler.start().await;
    scene.readiness(200).await;
    server.stop().await;
    scene.readiness(503).await;
    server.start().await;
    scene.end().await;
}

// ------------------------------------------------------------------------------------------------------ full disks

mod a_full_disk_is_survived {
    use super::*;

    /// Nothing can be settled, and the application cannot insert either; reading goes on.
    #[tokio::test]
    async fn of_the_tables() {
        let disk = Disk::new();
        let server = testkit::private_postgres_on(&disk, "base").await;
        let mut scene = Scene::on(&server).await;
        // More to settle than the server has set pages aside for.
        scene.ids.extend(scene.world.db.insert_all((HALF..HALF * 5).map(row)).await);
        // Somebody looks at an old state, so no settled row makes room for another one.
        let mut reader = scene.world.db.begin().await;
        reader.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM outbox").await;
        disk.fill();
        let refused = loop {
            let next = row(scene.ids.len().try_into().unwrap());
            match scene.world.db.try_execute(&next.sql()).await {
                Ok(_) => scene.ids.push(next.id),
                Err(refused) => break refused,
            }
        };
        assert_eq!(refused.as_database_error().and_then(|error| error.code()).as_deref(), Some("53100"), "{refused}");
        scene.says(503, &["No space left on device"]).await;
        disk.make_room();
        reader.commit().await;
        scene.end().await;
    }

    /// Without room for its log the server ends, and is started again when there is room.
    #[tokio::test]
    async fn of_the_log() {
        let disk = Disk::new();
        let server = testkit::private_postgres_on(&disk, "pg_wal").await;
        let scene = Scene::on(&server).await;
        disk.fill();
        testkit::eventually("the log needs another file", PATIENCE, || async {
            let write =
                "CREATE TABLE IF NOT EXISTS ballast (n int); INSERT INTO ballast VALUES (1); SELECT pg_switch_wal()";
            server.try_psql("postgres", write).await.err()
        })
        .await;
        scene.readiness(503).await;
        let log = std::fs::read_to_string(server.log()).unwrap();
        assert!(log.contains("No space left on device"), "{log}");
        server.kill9().await;
        disk.make_room();
        server.start().await;
        scene.end().await;
    }

    /// The file of the database is on the disk; the application writes elsewhere, as far as the disk is concerned.
    #[tokio::test]
    async fn of_a_sqlite_file() {
        let disk = Disk::new();
        let world = World::on(Kind::Sqlite).await;
        let environment = disk.environment(world.folder());
        let world = environment.iter().fold(world, |world, (name, value)| world.env(name, value));
        let scene = Scene::begin(world).await;
        disk.fill();
        scene.says(503, &["make room on the disk of the database file"]).await;
        disk.make_room();
        scene.end().await;
    }
}

/// Another writer of the file takes its time.
#[tokio::test]
async fn a_sqlite_file_that_is_locked_is_waited_for() {
    let scene = Scene::begin(World::on(Kind::Sqlite).await).await;
    let mut writer = scene.world.db.begin().await;
    writer.execute("CREATE TABLE elsewhere (n INTEGER)").await;
    // Everything that was read is sent meanwhile, and nothing of it can be settled.
    let sent = scene.world.receiver.count();
    scene.world.receiver.wait_for(sent + 8, PATIENCE).await;
    tokio::time::sleep(Duration::from_secs(4)).await;
    writer.commit().await;
    scene.end().await;
}

// ------------------------------------------------------------------------------------------------- held snapshots

mod a_snapshot_held_open {
    use super::*;

    const ROUND: i64 = 500;
    const ROUNDS: i64 = 10;

    /// Sends one round of messages and waits until they are settled; the worker is ready all the time.
    async fn flow(world: &World, worker: &Worker, round: i64) {
        let rows = (0..ROUND).map(|n| row(round * ROUND + n));
        world.db.insert_all(rows).await;
        world.db.wait_states("outbox", &[("sent", (round + 1) * ROUND)]).await;
        assert_eq!(worker.get("/health/ready").await.status, 200);
    }

    /// Blocks touched and calls of the statements whose text contains all of `with` and none of `without`, since the last look.
    async fn work(server: &Postgres, with: &[&str], without: &[&str]) -> (i64, i64) {
        let condition = |texts: &[&str], not: &str| -> String {
            texts.iter().map(|text| format!(" AND query {not} LIKE '%{text}%'")).collect()
        };
        let sql = format!(
            "SELECT coalesce(sum(shared_blks_hit + shared_blks_read), 0)::bigint, coalesce(sum(calls), 0)::bigint \
               FROM pg_stat_statements WHERE true{}{}",
            condition(with, ""),
            condition(without, "NOT")
        );
        let answer = server.psql("postgres", &sql).await;
        let (blocks, calls) = answer.split_once('|').unwrap();
        (blocks.parse().unwrap(), calls.parse().unwrap())
    }

    /// No dead entry of an index can be taken away while the snapshot is held, and every message leaves some. A poll that began at the
    /// oldest row would read all of them each time: the counts of the blocks it touches say whether it does. The transaction has written
    /// a message of its own: the last to arrive, and the lowest number of its key.
    #[tokio::test]
    async fn costs_a_poll_nothing() {
        let server =
            testkit::private_postgres_with(&[("shared_preload_libraries", "pg_stat_statements"), ("jit", "off")]).await;
        server.psql("postgres", "CREATE EXTENSION pg_stat_statements").await;
        let world = Scene::world(Db::postgres(server.fresh_database().await).await).await;
        let worker = world.start().await;
        let mut held = world.db.begin().await;
        held.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM outbox").await;
        let late = held.insert(OutboxRow::new("order", -1).key("late")).await;
        let mut per_poll = Vec::new();
        for round in 0..ROUNDS {
            server.psql("postgres", "SELECT pg_stat_statements_reset()").await;
            flow(&world, &worker, round).await;
            let (blocks, calls) = work(&server, &["late_floor"], &[]).await;
            assert!(calls > 0, "no poll looked behind its walk");
            per_poll.push(blocks / calls);
        }
        let dead = ROUND * ROUNDS;
        println!("blocks per poll, round by round: {per_poll:?}, with {dead} dead entries at the end");
        // The measure is one: who begins at the oldest row pays for each of them.
        server.psql("postgres", "SELECT pg_stat_statements_reset()").await;
        let (blocks, _) = testkit::eventually("a lap over everything", PATIENCE, || async {
            let (blocks, calls) = work(&server, &["lap_seen AS"], &["late_floor"]).await;
            (calls > 0).then(|| (blocks / calls, calls))
        })
        .await;
        println!("a lap over everything touches {blocks}");
        assert!(blocks > dead / 8, "a lap touches only {blocks} blocks");
        assert!(
            per_poll.iter().all(|polled| polled * 4 < blocks),
            "{per_poll:?}, a lap {blocks}: polls read what is dead"
        );

        held.commit().await;
        world.db.wait_outbox(&late, "sent").await;
        assert_eq!(in_order(&world), usize::try_from(dead + 1).unwrap());
        world.finish().await;
    }

    /// The log of the file cannot be written over while somebody reads an old state of it, and is as soon as nobody does.
    #[tokio::test]
    async fn of_a_sqlite_file_ends_with_its_reader() {
        let world = World::on(Kind::Sqlite).await;
        let worker = world.start().await;
        let mut reader = sqlx::SqliteConnection::connect(&format!("sqlite://{}", world.db.address)).await.unwrap();
        reader.execute("BEGIN; SELECT count(*) FROM outbox").await.unwrap();
        for round in 0..ROUNDS {
            flow(&world, &worker, round).await;
        }
        assert!(unwritten(&world.db).await > 0, "nobody held the log");
        let seen: i64 = sqlx::query_scalar("SELECT count(*) FROM outbox").fetch_one(&mut reader).await.unwrap();
        assert_eq!(seen, 0, "it reads the old state");
        reader.execute("COMMIT").await.unwrap();
        testkit::eventually("the whole log is in the file", PATIENCE, || async {
            (unwritten(&world.db).await == 0).then_some(())
        })
        .await;
        assert_eq!(in_order(&world), usize::try_from(ROUND * ROUNDS).unwrap());
        reader.close().await.unwrap();
        world.finish().await;
    }

    /// Pages of the log that cannot be written into the file yet.
    async fn unwritten(db: &Db) -> i64 {
        let found = db.row("PRAGMA wal_checkpoint(PASSIVE)").await;
        number(&found, "log") - number(&found, "checkpointed")
    }
}

//! What only SQLite has: one file, one writer, text for ids and times, other processes beside us.

use std::{
    collections::HashSet,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    },
    time::Duration,
};

use futures::FutureExt as _;
use queuebox_conformance::store::{Insert, Setup, StoreHarness as _, World, everything};
use queuebox_core::{
    Class, Uuid,
    message::State,
    ports::{
        Admitted, Inbox as _, Ledger as _, Outbox as _, Scope,
        ledger::{Direction, LedgerFilter},
        outbox::{Child, Expansion, Outcome, Settle},
        schema::{MigrateOptions, Schema as _},
    },
};
use queuebox_sqlite::{SqliteConfig, open};
use sqlx::{AssertSqlSafe, Connection as _, SqliteConnection};

use crate::harness::SqliteHarness;

async fn run(connection: &mut SqliteConnection, sql: &str) {
    sqlx::query(AssertSqlSafe(sql)).execute(connection).await.unwrap_or_else(|error| panic!("{sql}: {error}"));
}

/// Applications write and read for long, checkpoints run, the write lock is held: nothing is lost, doubled or counted.
mod d30_sqlite_read_to_write_upgrade {
    use super::*;

    const ROWS: usize = 200;

    async fn write(mut app: SqliteConnection, rows: Vec<String>) {
        for insert in rows {
            run(&mut app, "BEGIN IMMEDIATE").await;
            run(&mut app, &insert).await;
            tokio::task::yield_now().await;
            run(&mut app, "COMMIT").await;
        }
    }

    #[tokio::test]
    async fn every_row_once_beside_writers_readers_and_checkpoints() {
        let w = World::<SqliteHarness>::start().await;
        let fence = w.owner().await;
        let rows: Vec<_> = (0..ROWS).map(|n| Insert::key(&format!("k{}", n % 9))).collect();
        let expected: HashSet<_> = rows.iter().map(|row| row.id).collect();
        let mut reader = w.h.connect().await;
        run(&mut reader, "BEGIN").await;
        run(&mut reader, "SELECT count(*) FROM outbox").await;

        let writing = tokio::spawn(write(w.h.connect().await, rows.iter().map(|row| w.insert_sql(row)).collect()));
        let mut log = w.h.connect().await;
        let checkpoints = tokio::spawn(async move {
            for _ in 0..50 {
                // BUSY is an answer here, not an error: the long read keeps the log.
                run(&mut log, "PRAGMA wal_checkpoint(PASSIVE)").await;
            }
        });
        let (mut found, mut settles) = (Vec::new(), Vec::<Settle>::new());
        while found.len() < ROWS || !settles.is_empty() {
            let message = queuebox_conformance::store::inbox::message("s", &found.len().to_string());
            w.store.admit(&[message]).await.unwrap();
            let polled = w.store.poll(&fence, &settles, Some(&everything())).await.unwrap();
            assert!(polled.lost.is_empty());
            settles = polled
                .walk
                .iter()
                .map(|row| Settle { position: row.position(), stamp: row.stamp(), outcome: Outcome::Sent })
                .collect();
            found.extend(polled.walk.iter().map(|row| row.id));
        }
        writing.await.unwrap();
        checkpoints.await.unwrap();
        assert_eq!(found.len(), ROWS);
        assert_eq!(found.into_iter().collect::<HashSet<_>>(), expected);
        run(&mut reader, "ROLLBACK").await;
        run(&mut reader, "PRAGMA wal_checkpoint(TRUNCATE)").await;
        let row = w.row(rows[0].id).await;
        assert_eq!((row.state, row.attempt), (State::Sent, 0));
    }

    #[tokio::test]
    async fn a_held_write_lock_is_transient_and_stops_no_read() {
        let w = World::<SqliteHarness>::start().await;
        let store = open(SqliteConfig { busy_timeout: Duration::from_millis(50), ..SqliteConfig::new(w.h.path()) })
            .await
            .unwrap();
        let fence = w.owner().await;
        w.insert(Insert::default()).await;
        let held = w.h.begin().await;
        let message = || [queuebox_conformance::store::inbox::message("s", "k")];
        let fault = store.admit(&message()).await.unwrap_err();
        assert_eq!((fault.class, fault.code.as_ref()), (Class::Transient, "busy"));
        assert_eq!(store.poll(&fence, &[], Some(&everything())).await.unwrap().walk.len(), 1, "reads go on");
        held.rollback().await;
        assert!(matches!(store.admit(&message()).await.unwrap()[..], [Admitted::New(_)]));
    }

    #[tokio::test]
    async fn a_caller_that_gave_up_leaves_no_lock() {
        let w = World::<SqliteHarness>::start().await;
        let held = w.h.begin().await;
        let message = [queuebox_conformance::store::inbox::message("s", "k")];
        assert!(w.store.admit(&message).now_or_never().is_none(), "it waits for the lock");
        held.rollback().await;
        // Whatever became of the first call, the file is free and the message is stored at most once.
        w.store.admit(&message).await.unwrap();
        assert_eq!(w.count("inbox").await, 1);
        w.h.begin().await.rollback().await;
    }
}

/// Four processes that write without a pause leave turns for QueueBox. Counted in commits of theirs, so that a slow machine changes nothing:
/// with SQLite's own busy handler a write waited for hundreds of them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn writers_without_a_pause_leave_turns() {
    const TURNS: u64 = 40;
    let w = World::<SqliteHarness>::start().await;
    let stop = Arc::new(AtomicBool::new(false));
    let commits = Arc::new(AtomicU64::new(0));
    let mut writers = Vec::new();
    for _ in 0..4 {
        let (mut app, insert) = (w.h.connect().await, w.insert_sql(&Insert::default()));
        let insert = insert.replace("INSERT INTO", "INSERT OR REPLACE INTO");
        let (stop, commits) = (stop.clone(), commits.clone());
        writers.push(tokio::spawn(async move {
            while !stop.load(SeqCst) {
                run(&mut app, "BEGIN IMMEDIATE").await;
                run(&mut app, &insert).await;
                run(&mut app, "COMMIT").await;
                commits.fetch_add(1, SeqCst);
            }
        }));
    }
    for turn in 0..TURNS {
        let message = queuebox_conformance::store::inbox::message("s", &turn.to_string());
        w.store.admit(&[message]).await.unwrap();
    }
    let waited_for = commits.load(SeqCst) / TURNS;
    stop.store(true, SeqCst);
    for writer in writers {
        writer.await.unwrap();
    }
    println!("{waited_for} commits of others for each of ours");
    assert!(waited_for < 100, "each write waited for {waited_for} commits of others");
}

/// A wait for inserts ends when another connection commits and when this process forwards or replays, not for our own settles.
#[tokio::test]
async fn inserts_of_other_processes_wake() {
    let w = World::<SqliteHarness>::start().await;
    let store = w.h.open().await;
    store.check().await.unwrap();
    let fence = w.owner().await;
    let woken = async || tokio::time::timeout(Duration::from_secs(20), store.woken()).await.expect("woken");
    // What was committed before the first look is not known, so applications commit until somebody wakes.
    let inserts = async {
        loop {
            w.insert(Insert::default()).await;
        }
    };
    tokio::select! {
        () = woken() => {}
        () = inserts => {}
    }
    let quiet = async || tokio::time::timeout(Duration::from_millis(50), store.woken()).await.is_err();
    while !quiet().await {}
    let row = store.poll(&fence, &[], Some(&everything())).await.unwrap().walk.remove(0);
    let id = row.id;
    let settle = Settle { position: row.position(), stamp: row.stamp(), outcome: Outcome::Sent };
    assert!(store.poll(&fence, &[settle], None).await.unwrap().lost.is_empty());
    assert!(quiet().await, "our own settle wakes nobody");
    store.requeue(Scope::Outbox, &[id], &[State::Sent]).await.unwrap();
    woken().await;
    store.close().await;
}

/// Ids are compared by value: an application may write them in capitals (contract 2.3).
#[tokio::test]
async fn ids_in_capitals_are_the_same_ids() {
    let w = World::<SqliteHarness>::start().await;
    let fence = w.owner().await;
    let id = Uuid::new_v4();
    let capitals = id.to_string().to_uppercase();
    w.h.execute(&format!("INSERT INTO outbox (id, topic, payload) VALUES ('{capitals}', 't', '1')")).await;
    let row = w.read_row(&fence, id).await;
    let child = Child { id: Uuid::new_v4(), destination: "d".into() };
    let expansion = Expansion { parent: row.position(), stamp: row.stamp(), children: vec![child.clone()] };
    assert!(w.store.expand(&fence, &[expansion]).await.unwrap().is_empty());
    assert_eq!(w.row(child.id).await.parent_id, Some(id));
    assert!(w.store.requeue(Scope::Outbox, &[id], &[State::Sent]).await.unwrap().is_empty(), "an expanded parent");
    let settle = w.settle_of(&fence, child.id, Outcome::Sent).await;
    assert!(w.settle(&fence, &[settle]).await.is_empty());
    let again = format!("INSERT OR IGNORE INTO outbox (id, topic, payload) VALUES ('{id}', 't', '1')");
    assert_eq!(w.h.execute(&again).await, 0, "the id is taken");
}

/// What the file refuses from an application, with a text that says what is expected.
#[tokio::test]
async fn bad_values_fail_the_insert_that_writes_them() {
    let w = World::<SqliteHarness>::start().await;
    let mut app = w.h.connect().await;
    let cases = [
        ("scheduled_at", "'2026-01-01 10:00:00'", "YYYY-MM-DDThh:mm:ss.ffffffZ"),
        ("scheduled_at", "'2026-02-30T10:00:00.000000Z'", "YYYY-MM-DDThh:mm:ss.ffffffZ"),
        ("scheduled_at", "'2026-01-01T24:00:00.000000Z'", "YYYY-MM-DDThh:mm:ss.ffffffZ"),
        ("scheduled_at", "1767225600", "YYYY-MM-DDThh:mm:ss.ffffffZ"),
        ("id", "'7'", "UUID"),
        ("id", "'0af7651916cd43dd8448eb211c80319c7777'", "UUID"),
        ("payload", "'{'", "JSON"),
        ("headers", "'{a}'", "JSON"),
        ("headers", "NULL", "NOT NULL"),
        ("\"key\"", "printf('%256s', 'x')", "255"),
    ];
    for (column, value, expected) in cases {
        let more = if column == "payload" { "" } else { ", payload" };
        let rest = if column == "payload" { "" } else { ", '1'" };
        let sql = format!("INSERT INTO outbox (topic, {column}{more}) VALUES ('t', {value}{rest})");
        let error = sqlx::query(AssertSqlSafe(sql)).execute(&mut app).await.unwrap_err().to_string();
        assert!(error.contains(expected), "{column} = {value}: {error}");
    }
    let ok = "INSERT INTO outbox (topic, payload, scheduled_at) VALUES ('t', '1', '2026-01-01T23:59:59.999999Z')";
    run(&mut app, ok).await;
    let id: String = sqlx::query_scalar("SELECT id FROM outbox").fetch_one(&mut app).await.unwrap();
    assert_eq!(id.parse::<Uuid>().unwrap().get_version_num(), 4, "the default is a UUID: {id}");
}

/// Drivers bind byte strings as BLOB: such a payload is sent as it is.
#[tokio::test]
async fn a_payload_of_bytes_is_read() {
    let w = World::<SqliteHarness>::start().await;
    let fence = w.owner().await;
    w.h.execute("INSERT INTO outbox (topic, payload) VALUES ('t', CAST('{\"n\": 7}' AS BLOB))").await;
    let rows = w.read(&fence).await.walk;
    assert!(
        matches!(&rows[0].payload, queuebox_core::message::Payload::Loaded(bytes) if bytes.as_ref() == b"{\"n\": 7}")
    );
}

/// A column that ignores case is told at the start, and its conflicts are never taken for duplicates (contract 2.4).
#[tokio::test]
async fn a_merging_collation_is_a_failure_not_a_duplicate() {
    let h = SqliteHarness::start(Setup { empty: true, ..Setup::default() }).await;
    let file = include_str!("../../migrations/0014_create.sql")
        .replace("{i.idempotency_key} TEXT NOT NULL", "{i.idempotency_key} TEXT NOT NULL COLLATE NOCASE");
    h.create_by_hand(&file).await;
    let store = h.open().await;
    let report = store.check().await.unwrap();
    assert!(
        report.notes.iter().any(|note| note.contains("idempotency_key compares with NOCASE")),
        "{:?}",
        report.notes
    );
    let message = queuebox_conformance::store::inbox::message;
    let answers = store.admit(&[message("s", "key"), message("s", "KEY"), message("s", "key")]).await.unwrap();
    assert!(matches!(answers[..], [Admitted::New(_), Admitted::Collision(_), Admitted::Duplicate]), "{answers:?}");
}

/// A trigger of the application raises for one row. It may be taken away again, so nothing of the batch is stored: later messages of
/// the aggregate must not go ahead. The engine then tries them one by one.
#[tokio::test]
async fn a_row_that_a_trigger_refuses_is_no_refusal() {
    let w = World::<SqliteHarness>::start().await;
    let mut app = w.h.connect().await;
    run(
        &mut app,
        "CREATE TRIGGER refuse BEFORE INSERT ON inbox WHEN NEW.idempotency_key = 'b' BEGIN SELECT RAISE(ABORT, 'no'); END",
    )
    .await;
    let message = queuebox_conformance::store::inbox::message;
    let batch = [message("s", "a"), message("s", "b"), message("s", "c")];
    let fault = w.store.admit(&batch).await.unwrap_err();
    assert_eq!((fault.class, fault.code.as_ref()), (Class::Transient, "raised"));
    assert_eq!(w.store.admit(&batch[..1]).await.unwrap(), [Admitted::New(batch[0].id)], "it was not stored before");
    run(&mut app, "DROP TRIGGER refuse").await;
    let answers = w.store.admit(&batch).await.unwrap();
    assert_eq!(answers, [Admitted::Duplicate, Admitted::New(batch[1].id), Admitted::New(batch[2].id)]);
}

/// contract 2.1: an application may write any `max_attempts`, and SQLite's integers have 64 bits.
#[tokio::test]
async fn a_huge_max_attempts_is_clamped() {
    let w = World::<SqliteHarness>::start().await;
    let fence = w.owner().await;
    let first = w.insert(Insert::key("k").with("max_attempts", "9223372036854775807")).await;
    let second = w.insert(Insert::key("k").with("max_attempts", "-2147483649")).await;
    let walk = w.read(&fence).await.walk;
    let seen: Vec<_> = walk.iter().map(|row| (row.id, row.max_attempts)).collect();
    assert_eq!(seen, [(first, i32::MAX), (second, i32::MIN)], "in order");
    let settle = w.settle_of(&fence, first, Outcome::Sent).await;
    assert!(w.settle(&fence, &[settle]).await.is_empty());
    let filter = LedgerFilter { ids: vec![first, second], ..LedgerFilter::default() };
    let page = w.store.page(Scope::Outbox, &filter, Direction::OldestFirst, None, 10).await.unwrap();
    assert_eq!(page.iter().map(|row| row.max_attempts).collect::<Vec<_>>(), [Some(i32::MAX), Some(i32::MIN)]);
}

/// In tables without our checks, a row that cannot be read ends dead, stops nobody, and is not overtaken before.
#[tokio::test]
async fn an_unreadable_row_hurts_only_itself() {
    let w = World::<SqliteHarness>::start().await;
    let fence = w.owner().await;
    let mut app = w.h.connect().await;
    run(&mut app, "PRAGMA ignore_check_constraints = ON").await;
    run(&mut app, "INSERT INTO outbox (topic, key, payload, created_at) VALUES ('t', 'k', '1', 'yesterday')").await;
    run(&mut app, "INSERT INTO outbox (topic, key, payload, attempt) VALUES ('t', 'k', '1', 4294967296)").await;
    let good = w.insert(Insert::key("k")).await;
    let polled = w.read(&fence).await;
    assert_eq!(polled.walk.iter().map(|row| row.id).collect::<Vec<_>>(), [good]);
    let dead = w.h.query("SELECT last_error FROM outbox WHERE state = 'dead' ORDER BY row_no").await;
    let dead: Vec<_> = dead.into_iter().map(|mut row| row.remove(0).unwrap()).collect();
    assert!(dead[0].starts_with("refused: ") && dead[0].contains("yesterday"), "{dead:?}");
    assert!(dead[1].starts_with("refused: ") && dead[1].contains("32 bits"), "{dead:?}");
    // In a call that settles as well.
    run(&mut app, "INSERT INTO outbox (topic, key, payload, created_at) VALUES ('t', 'k', '1', 'today')").await;
    let settle = w.settle_of(&fence, good, Outcome::Sent).await;
    let read = everything();
    assert!(w.store.poll(&fence, &[settle], Some(&read)).await.unwrap().walk.is_empty());
    assert_eq!(
        w.h.query("SELECT CAST(count(*) AS TEXT) FROM outbox WHERE state = 'dead'").await[0][0].as_deref(),
        Some("3")
    );
}

/// Commits are flushed, the log is on, and `doctor` says so.
#[tokio::test]
async fn commits_are_flushed() {
    let w = World::<SqliteHarness>::start().await;
    let findings = w.store.examine().await.unwrap();
    let detail = |check: &str| findings.iter().find(|finding| finding.check == check).unwrap().detail.clone();
    assert_eq!((detail("journal").as_str(), detail("flush").as_str()), ("mode wal", "synchronous FULL"));
}

/// What cannot be opened is named.
#[tokio::test]
async fn a_file_that_cannot_be_opened_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let missing = folder.path().join("nowhere").join("queuebox.db");
    let fault = open(SqliteConfig::new(&missing)).await.unwrap_err();
    assert_eq!((fault.class, fault.code.as_ref()), (Class::Misconfigured, "cannot_open"));
    assert!(fault.detail.contains("nowhere"), "{}", fault.detail);
    let text = folder.path().join("text.db");
    std::fs::write(
        &text,
        "this is no database, whatever its name says; it is only long enough to be read as one. ".repeat(9),
    )
    .unwrap();
    let fault = open(SqliteConfig::new(&text)).await.unwrap_err();
    assert_eq!((fault.class, fault.code.as_ref()), (Class::Misconfigured, "corrupt"));
    let fault = open(SqliteConfig::new(":memory:")).await.unwrap_err();
    assert_eq!(fault.class, Class::Misconfigured);
}

/// A file that may not be written is refused at once; SQLite itself would open it and refuse every write later.
#[tokio::test]
async fn a_file_that_may_not_be_written_is_refused() {
    // Nobody may write there, not even root.
    let fault = open(SqliteConfig::new("/sys/kernel/uevent_seqnum")).await.unwrap_err();
    assert_eq!((fault.class, fault.code.as_ref()), (Class::Misconfigured, "read_only"), "{fault}");
    assert!(fault.detail.contains("uevent_seqnum") && fault.detail.contains("needs to write"), "{fault}");
}

/// A file that was removed or replaced takes nothing any more: what is written to it would be gone with the process.
#[tokio::test]
async fn a_file_that_is_gone_is_told() {
    let h = SqliteHarness::start(Setup::default()).await;
    let store = h.open().await;
    store.check().await.unwrap();
    let path = h.path();
    let kept = path.with_extension("kept");
    std::fs::rename(&path, &kept).unwrap();
    let message = queuebox_conformance::store::inbox::message;
    for replaced in [false, true] {
        if replaced {
            std::fs::write(&path, "").unwrap();
        }
        let fault = store.ping().await.unwrap_err();
        assert_eq!((fault.class, fault.code.as_ref()), (Class::Transient, "file_gone"), "{fault}");
        assert!(fault.detail.contains("removed or replaced") && fault.detail.contains("restart"), "{fault}");
        assert!(
            !matches!(store.admit(&[message("s", "key")]).await, Ok(answers) if matches!(answers[..], [Admitted::New(_)]))
        );
    }
    std::fs::rename(&kept, &path).unwrap();
    store.ping().await.unwrap();
}

/// A start without tables names the migration and prints every statement; run by hand they make a database that works.
#[tokio::test]
async fn the_printed_statements_make_a_database() {
    let h = SqliteHarness::start(Setup { empty: true, ..Setup::default() }).await;
    let store = h.open().await;
    let fault = store.check().await.unwrap_err();
    assert!(fault.detail.contains("queuebox migrate") && fault.detail.contains("queuebox_lane"), "{}", fault.detail);
    let (_, statements) = fault.detail.split_once('\n').unwrap();
    let mut app = h.connect().await;
    sqlx::raw_sql(AssertSqlSafe(statements)).execute(&mut app).await.unwrap();
    app.close().await.unwrap();
    store.check().await.unwrap();
    // They are the tables of the migration: a baseline takes them on.
    store.migrate(MigrateOptions { baseline: Some(14), ..MigrateOptions::default() }).await.unwrap();
    assert!(store.migrate(MigrateOptions::default()).await.unwrap().applied.is_empty());
}

/// Processes that start together on a file that is not there yet: all of them open it, one makes the tables.
#[tokio::test]
async fn a_new_file_is_opened_by_many_at_once() {
    for _ in 0..4 {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("queuebox.db");
        let start = async || {
            let store = open(SqliteConfig::new(&path)).await.unwrap();
            let migrated = store.migrate(MigrateOptions::default()).await.unwrap();
            store.check().await.unwrap();
            store.close().await;
            migrated.applied.len()
        };
        let applied = futures::future::join_all((0..6).map(|_| start())).await;
        assert_eq!(applied.iter().sum::<usize>(), 1, "{applied:?}");
    }
}

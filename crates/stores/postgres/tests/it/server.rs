//! What the server, its role or a pooler do to us.

use std::{collections::BTreeSet, time::Duration};

use queuebox_conformance::store::{Setup, StoreHarness};
use queuebox_core::{
    Class, Uuid,
    message::{Consumption, NewInboxRow},
    ports::{
        Inbox, Lanes, Outbox,
        inbox::Admitted,
        schema::{MigrateOptions, Schema},
    },
};
use queuebox_postgres::{Capture, PostgresConfig, PostgresStore, WakeState};
use queuebox_testkit::{PoolMode, eventually_ok, pgbouncer};
use sqlx::{Executor, postgres::PgListener};

use crate::{
    harness::PostgresHarness,
    worker::{Cursor, owner, read, sent},
};

const SOON: Duration = Duration::from_secs(30);

async fn insert(h: &PostgresHarness) -> Uuid {
    h.one("INSERT INTO outbox (topic, payload) VALUES ('t', '1') RETURNING id::text").await.parse().unwrap()
}

mod d27_read_only_after_failover {
    use super::*;

    #[tokio::test]
    async fn connections_are_closed_and_nothing_is_written_or_read() {
        let server = queuebox_testkit::private_postgres().await;
        let h = PostgresHarness::on(server).await;
        let migrator = h.open();
        migrator.migrate(MigrateOptions::default()).await.unwrap();
        migrator.close().await;
        let store =
            PostgresStore::open(PostgresConfig { pool_size: 1, capture: Capture::Polling, ..h.config() }).unwrap();
        store.check().await.unwrap();
        let worker = owner(&store).await;
        let id = insert(&h).await;
        let row = store.poll(&worker, &[], Some(&read(10))).await.unwrap().walk.remove(0);
        let pids = async || {
            h.column_of("SELECT pid::text FROM pg_stat_activity WHERE application_name = 'queuebox'")
                .await
                .into_iter()
                .collect::<BTreeSet<_>>()
        };
        let before = pids().await;

        h.server.psql("postgres", "ALTER SYSTEM SET default_transaction_read_only = on").await;
        h.server.psql("postgres", "SELECT pg_reload_conf()").await;
        let fault =
            queuebox_testkit::eventually("the server is read-only", SOON, async || store.ping().await.err()).await;
        assert_eq!((fault.class, fault.code.as_ref()), (Class::Transient, "read_only"));
        let settle = sent(&row);
        let fault = store.poll(&worker, std::slice::from_ref(&settle), Some(&read(10))).await.unwrap_err();
        assert_eq!((fault.class, fault.code.as_ref()), (Class::Transient, "read_only"));
        let fault = store.poll(&worker, &[], Some(&read(10))).await.unwrap_err();
        assert_eq!(fault.code.as_ref(), "read_only", "a read alone would lead to a publish that cannot be marked");

        h.server.psql("postgres", "ALTER SYSTEM RESET default_transaction_read_only").await;
        h.server.psql("postgres", "SELECT pg_reload_conf()").await;
        eventually_ok("writes again", SOON, async || store.ping().await).await;
        assert!(store.poll(&worker, &[settle], None).await.unwrap().lost.is_empty());
        assert_eq!(h.one(&format!("SELECT state || attempt FROM outbox WHERE id = '{id}'")).await, "sent0");
        assert!(pids().await.is_disjoint(&before), "each connection that was read-only is gone");
    }
}

#[tokio::test]
async fn a_restart_of_the_server_is_survived() {
    let server = queuebox_testkit::private_postgres().await;
    let h = PostgresHarness::on(server).await;
    let store = h.open();
    store.migrate(MigrateOptions::default()).await.unwrap();
    store.check().await.unwrap();
    let worker = owner(&store).await;
    h.execute("SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = 'queuebox'")
        .await;
    insert(&h).await;
    let polled = eventually_ok("polls again", SOON, async || store.poll(&worker, &[], Some(&read(10))).await).await;
    assert_eq!(polled.walk.len(), 1);
}

mod capture_wakes {
    use super::*;

    async fn listening(store: &PostgresStore) {
        let mut state = store.wake_state();
        tokio::select! {
            () = store.woken() => {}
            () = async { while state != WakeState::Listening { state = store.wake_state_changed(&state).await; } } => {}
        }
        while store.wake_state() != WakeState::Listening {
            state = store.wake_state_changed(&state).await;
        }
    }

    /// An application that may insert, and nothing else, wakes an idle worker; a busy one is left alone.
    #[tokio::test]
    async fn only_an_idle_worker_is_notified() {
        let h = PostgresHarness::start(Setup::default()).await;
        let store = h.open();
        store.check().await.unwrap();
        let worker = owner(&store).await;
        let role = h.database.clone();
        for sql in [
            "CREATE ROLE {} LOGIN PASSWORD 'p'",
            "GRANT INSERT ON outbox TO {}",
            "GRANT USAGE ON SEQUENCE outbox_sequence_seq TO {}",
        ] {
            h.execute(&sql.replace("{}", &role)).await;
        }
        let mut app = h.connect().await;
        app.execute(sqlx::AssertSqlSafe(format!("SET ROLE {role}"))).await.unwrap();
        let mut other = PgListener::connect(&h.url()).await.unwrap();
        other.listen("queuebox_outbox").await.unwrap();
        let insert = "INSERT INTO outbox (topic, payload) VALUES ('t', '1')";

        app.execute(insert).await.unwrap();
        listening(&store).await;
        // The first signal only says that LISTEN stands.
        tokio::time::timeout(SOON, store.woken()).await.ok();
        store.set_idle(&worker, true).await.unwrap();
        app.execute(insert).await.unwrap();
        tokio::time::timeout(SOON, store.woken()).await.expect("woken");
        store.set_idle(&worker, false).await.unwrap();
        app.execute(insert).await.unwrap();
        app.execute("RESET ROLE").await.unwrap();
        app.execute("UPDATE outbox SET max_attempts = 6").await.unwrap();
        app.execute("SELECT pg_notify('queuebox_outbox', 'end')").await.unwrap();
        let mut payloads = vec![other.recv().await.unwrap().payload().to_owned()];
        while payloads.last().unwrap() != "end" {
            payloads.push(other.recv().await.unwrap().payload().to_owned());
        }
        assert_eq!(payloads, ["public", "end"], "one insert of three, no update");
        drop((app, other));
        store.close().await;
        h.execute(&format!("DROP OWNED BY {role}")).await;
        h.execute(&format!("DROP ROLE {role}")).await;
    }

    #[tokio::test]
    async fn a_cut_listen_comes_back_and_says_so() {
        let h = PostgresHarness::start(Setup::default()).await;
        let store = h.open();
        store.check().await.unwrap();
        let worker = owner(&store).await;
        listening(&store).await;
        h.execute("SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'LISTEN%'").await;
        let state = tokio::time::timeout(SOON, store.wake_state_changed(&WakeState::Listening)).await.unwrap();
        assert!(matches!(state, WakeState::Down(_)), "{state:?}");
        assert!(store.poll(&worker, &[], Some(&read(10))).await.is_ok(), "nothing else suffers");
        listening(&store).await;
        store.set_idle(&worker, true).await.unwrap();
        insert(&h).await;
        tokio::time::timeout(SOON, store.woken()).await.expect("woken again");
    }

    #[tokio::test]
    async fn the_trigger_never_fails_an_insert() {
        let h = PostgresHarness::start(Setup::default()).await;
        h.execute("DROP TABLE queuebox_worker").await;
        insert(&h).await;
    }

    #[tokio::test]
    async fn polling_opens_no_listener() {
        let h = PostgresHarness::start(Setup::default()).await;
        let config = PostgresConfig { capture: Capture::Polling, ..h.config() };
        let store = PostgresStore::open(config).unwrap();
        store.check().await.unwrap();
        assert!(matches!(store.wake_state(), WakeState::Polling(_)));
    }
}

mod d28_pgbouncer_in_transaction_mode {
    use super::*;

    fn config(url: &str) -> PostgresConfig {
        PostgresConfig { pool_size: 3, ..PostgresConfig::from_url(url).unwrap() }
    }

    #[tokio::test]
    async fn pooler_in_transaction_mode() {
        let h = PostgresHarness::on(queuebox_testkit::postgres().await).await;
        let pooler = pgbouncer(&h.server, PoolMode::Transaction).await;
        let store = PostgresStore::open(config(&pooler.url_of(&h.database))).unwrap();
        let migrated = store.migrate(MigrateOptions::default()).await.unwrap();
        assert_eq!(migrated.to, 14);
        let report = store.check().await.unwrap();
        assert_eq!(report.notes.len(), 1, "{:?}", report.notes);
        assert!(report.notes[0].contains("pooler") && matches!(store.wake_state(), WakeState::Polling(_)));
        let worker = owner(&store).await;
        for _ in 0..30 {
            insert(&h).await;
        }
        let mut cursor = Cursor::new(worker, 10);
        while cursor.step(&store).await > 0 {}
        assert_eq!(h.one("SELECT count(*)::text FROM outbox WHERE state = 'sent'").await, "30");
        let left = "SELECT count(*)::text FROM pg_locks WHERE locktype = 'advisory' AND database = \
                    (SELECT oid FROM pg_database WHERE datname = current_database())";
        assert_eq!(h.one(left).await, "0");
    }

    #[tokio::test]
    async fn a_direct_connection_wakes_past_the_pooler() {
        let h = PostgresHarness::start(Setup::default()).await;
        let pooler = pgbouncer(&h.server, PoolMode::Transaction).await;
        let direct = h.config().target;
        let config =
            PostgresConfig { capture: Capture::Auto(Some(Box::new(direct))), ..config(&pooler.url_of(&h.database)) };
        let store = PostgresStore::open(config).unwrap();
        store.check().await.unwrap();
        let worker = owner(&store).await;
        tokio::time::timeout(SOON, store.woken()).await.expect("LISTEN stands");
        store.set_idle(&worker, true).await.unwrap();
        insert(&h).await;
        tokio::time::timeout(SOON, store.woken()).await.expect("woken");
    }

    #[tokio::test]
    async fn statement_mode_is_refused_and_names_the_setting() {
        let h = PostgresHarness::start(Setup::default()).await;
        let pooler = pgbouncer(&h.server, PoolMode::Statement).await;
        let store = PostgresStore::open(config(&pooler.url_of(&h.database))).unwrap();
        let fault = store.check().await.unwrap_err();
        assert_eq!(fault.class, Class::Misconfigured);
        assert!(fault.detail.contains("pool_mode"), "{fault}");
    }
}

fn message(key: &str) -> NewInboxRow {
    NewInboxRow {
        id: Uuid::new_v4(),
        source: "s".into(),
        idempotency_key: key.into(),
        aggregate_id: None,
        event_type: None,
        payload: "{}".into(),
        headers: "{}".into(),
        correlation_id: None,
        consumption: Consumption::Push,
        topic: None,
        trace_parent: None,
        delay_us: 0,
        published_at_us: None,
        dead: None,
    }
}

/// Flushes of several workers with the same keys in different orders: no deadlock, each key new once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_admits_do_not_deadlock() {
    let h = PostgresHarness::start(Setup::default()).await;
    let stores = [h.open(), h.open(), h.open()];
    for store in &stores {
        store.check().await.unwrap();
    }
    for round in 0..10 {
        let flush = async |worker: usize, store: &PostgresStore| {
            let mut batch: Vec<NewInboxRow> = (0..60).map(|n| message(&format!("{round}/{n}"))).collect();
            if worker % 2 == 1 {
                batch.reverse();
            }
            batch.rotate_left(worker * 7);
            let admitted = store.admit(&batch).await.expect("no deadlock");
            admitted.iter().filter(|answer| matches!(answer, Admitted::New(_))).count()
        };
        let new = futures::future::join_all((0..9).map(|worker| flush(worker, &stores[worker % 3]))).await;
        assert_eq!(new.into_iter().sum::<usize>(), 60, "round {round}");
    }
}

/// A trigger of the application raises for one row. It may be taken away again, so nothing of the batch is stored: later messages of
/// the aggregate must not go ahead. The engine then tries them one by one.
#[tokio::test]
async fn a_row_that_a_trigger_refuses_is_no_refusal() {
    let h = PostgresHarness::start(Setup::default()).await;
    let store = h.open();
    store.check().await.unwrap();
    h.execute(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.idempotency_key = '13' THEN RAISE 'no'; END IF; \
         RETURN NEW; END $$",
    )
    .await;
    h.execute("CREATE TRIGGER refuse BEFORE INSERT ON inbox FOR EACH ROW EXECUTE FUNCTION refuse()").await;
    let batch: Vec<_> = (0..20).map(|n| message(&n.to_string())).collect();
    let fault = store.admit(&batch).await.unwrap_err();
    assert_eq!((fault.class, fault.code.as_ref()), (Class::Transient, "raised"));
    assert_eq!(h.one("SELECT count(*)::text FROM inbox").await, "0");
    assert_eq!(store.admit(&batch[12..13]).await.unwrap(), [Admitted::New(batch[12].id)]);
    // A value that is refused for good sends the batch into halves; the trigger ends it where it is met.
    let mut mixed = vec![batch[0].clone(), message("nul"), batch[13].clone(), batch[14].clone()];
    mixed[1].payload = br#"{"a": "\u0000"}"#.as_slice().into();
    let answers = store.admit(&mixed).await.unwrap();
    assert_eq!(answers[0], Admitted::New(batch[0].id));
    let classes: Vec<_> = answers[1..]
        .iter()
        .map(|a| match a {
            Admitted::Refused(f) => Some(f.class),
            _ => None,
        })
        .collect();
    assert_eq!(classes, [Some(Class::Refused), Some(Class::Transient), Some(Class::Transient)]);
    h.execute("DROP TRIGGER refuse ON inbox").await;
    assert_eq!(store.admit(&batch[13..14]).await.unwrap(), [Admitted::New(batch[13].id)]);
}

/// A statement that waits too long is given up on both sides: no server process is left waiting behind a connection that we closed.
#[tokio::test]
async fn a_waiting_statement_is_given_up_on_both_sides() {
    let h = PostgresHarness::start(Setup::default()).await;
    let config = PostgresConfig { statement_timeout: Duration::from_millis(500), ..h.config() };
    let store = PostgresStore::open(config).unwrap();
    store.check().await.unwrap();
    let mut open = h.begin().await;
    open.execute("LOCK TABLE inbox IN ACCESS EXCLUSIVE MODE").await;
    let fault = store.admit(&[message("1")]).await.unwrap_err();
    assert_eq!(fault.class, Class::Transient, "{fault}");
    let waiting = "SELECT count(*)::text FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'queuebox' \
                   AND wait_event_type = 'Lock'";
    queuebox_testkit::eventually("nobody waits", SOON, async || (h.one(waiting).await == "0").then_some(())).await;
    open.rollback().await;
    assert!(matches!(store.admit(&[message("1")]).await.unwrap()[..], [Admitted::New(_)]));
}

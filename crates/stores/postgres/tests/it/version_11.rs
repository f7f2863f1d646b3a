//! A classic installation: tables at version 11, with and without the migrations behind it (contract 2.5, 14).

use queuebox_core::{
    Class, LaneSet, Uuid,
    message::{Forward, NewInboxRow, Stamp},
    pattern::Pattern,
    ports::{
        Inbox, Lanes, Outbox, Scope,
        inbox::Admitted,
        outbox::{Child, Expansion, Outcome, Read, Settle},
        schema::{MigrateOptions, Schema},
    },
};
use queuebox_postgres::{PostgresConfig, PostgresStore, RouteTarget};
use queuebox_testkit::{classic_history, classic_tables};
use sqlx::{AssertSqlSafe, Executor, PgConnection};

use crate::{
    harness::PostgresHarness,
    worker::{fence, read, register},
};
use queuebox_conformance::store::StoreHarness;

const LEASE_MS: u64 = 600_000;

/// Runs the files up to `version`, as the classic program did.
async fn classic(app: &mut PgConnection, from: u32, version: u32) {
    for sql in classic_tables(from, version) {
        app.execute(sqlx::raw_sql(AssertSqlSafe(sql))).await.unwrap();
    }
}

async fn at_11() -> PostgresHarness {
    let h = PostgresHarness::on(queuebox_testkit::postgres().await).await;
    classic(&mut h.connect().await, 0, 11).await;
    h
}

async fn flyway(h: &PostgresHarness, version: u32) {
    for sql in classic_history(version) {
        h.execute(&sql).await;
    }
}

async fn insert(h: &PostgresHarness, key: &str) -> Uuid {
    let sql =
        format!("INSERT INTO outbox (topic, key, payload) VALUES ('t', '{key}', '{{\"n\": 1}}') RETURNING id::text");
    h.one(&sql).await.parse().unwrap()
}

fn message(key: &str) -> NewInboxRow {
    NewInboxRow {
        id: Uuid::new_v4(),
        source: "s".into(),
        idempotency_key: key.into(),
        aggregate_id: Some("a".into()),
        event_type: None,
        payload: "{}".into(),
        headers: "{}".into(),
        correlation_id: None,
        consumption: queuebox_core::message::Consumption::Push,
        topic: Some("t".into()),
        trace_parent: Some("00-1-2-01".into()),
        delay_us: 0,
        published_at_us: None,
        dead: None,
    }
}

#[tokio::test]
async fn version_11_works_unchanged() {
    let h = at_11().await;
    let store = h.open();
    let report = store.check().await.unwrap();
    assert_eq!(report.version, 11);
    assert_eq!(report.notes.len(), 6, "one line per feature that is off: {:#?}", report.notes);
    assert!(!store.fans_out());
    assert!(!store.has_lanes());
    let worker = register(&store).await;
    store.renew(&worker, LEASE_MS).await.unwrap();
    let (first, second, other) = (insert(&h, "k").await, insert(&h, "k").await, insert(&h, "").await);

    let polled = store.poll(&worker, &[], Some(&read(10))).await.unwrap();
    assert_eq!(polled.walk.iter().map(|row| row.id).collect::<Vec<_>>(), [first, other], "the head of each key");
    let rows: Vec<_> = polled.walk.iter().map(|row| (row.position(), row.stamp())).collect();
    let marked = store.mark(&worker, &rows, LEASE_MS).await.unwrap();
    assert_eq!(marked.len(), 2);
    // Another worker finds nothing of that key, and cannot claim what it saw before.
    let rival = fence();
    assert!(store.poll(&rival, &[], Some(&read(10))).await.unwrap().walk.is_empty());
    assert!(store.mark(&rival, &rows, LEASE_MS).await.unwrap().is_empty());
    let settle = |index: usize, outcome| Settle {
        position: rows[index].0,
        stamp: Stamp { marked: true, ..rows[index].1 },
        outcome,
    };
    assert_eq!(
        store.poll(&rival, &[settle(0, Outcome::Sent)], None).await.unwrap().lost,
        [first],
        "the token is the fence"
    );
    let polled =
        store.poll(&worker, &[settle(0, Outcome::Sent), settle(1, Outcome::Release)], Some(&read(10))).await.unwrap();
    assert!(polled.lost.is_empty());
    let polled = store.poll(&worker, &[], Some(&read(10))).await.unwrap();
    assert_eq!(polled.walk.iter().map(|row| row.id).collect::<Vec<_>>(), [second, other]);

    // The first one is replayed after the second was read, and after it was claimed: one of a key at a time, in both cases.
    let seen = (polled.walk[0].position(), polled.walk[0].stamp());
    let replay = format!(
        "UPDATE outbox SET state = 'pending', claim_token = NULL, lease_expires_at = NULL WHERE id = '{first}'"
    );
    h.execute(&replay).await;
    assert!(store.mark(&worker, &[seen], LEASE_MS).await.unwrap().is_empty(), "it is not the head any more");
    let stamped = store.poll(&worker, &[], Some(&read(10))).await.unwrap().walk;
    assert_eq!(stamped.iter().map(|row| row.id).collect::<Vec<_>>(), [first, other]);
    h.execute(&format!("UPDATE outbox SET state = 'sent' WHERE id = '{first}'")).await;
    assert_eq!(store.mark(&worker, &[seen], LEASE_MS).await.unwrap(), [second]);
    h.execute(&replay).await;
    let found = store.poll(&rival, &[], Some(&read(10))).await.unwrap().walk;
    assert_eq!(found.iter().map(|row| row.id).collect::<Vec<_>>(), [other], "a later row of its key is under way");
    let head = (stamped[0].position(), stamped[0].stamp());
    assert!(store.mark(&rival, &[head], LEASE_MS).await.unwrap().is_empty());
}

#[tokio::test]
async fn version_11_recovers_forwards_and_refuses_fan_out() {
    let h = at_11().await;
    let store = h.open();
    store.check().await.unwrap();
    let worker = register(&store).await;
    let id = insert(&h, "k").await;
    h.execute("UPDATE outbox SET state = 'processing', claim_token = gen_random_uuid(), lease_expires_at = now() - interval '1 s'").await;
    let recovered = store.recover(&worker, LaneSet::first(64), 5).await.unwrap();
    assert_eq!((recovered.pending, recovered.dead.len()), (1, 0));
    let row = store.poll(&worker, &[], Some(&read(10))).await.unwrap().walk.remove(0);
    assert_eq!((row.id, row.crashes, row.parent_id), (id, 0, None));
    let children = vec![Child { id: Uuid::new_v4(), destination: "d".into() }];
    let expansion = Expansion { parent: row.position(), stamp: row.stamp(), children };
    assert_eq!(store.expand(&worker, &[expansion]).await.unwrap_err().class, Class::Misconfigured);

    let (one, two, again) = (message("1"), message("2"), message("1"));
    let admitted = store.admit(&[one.clone(), two.clone(), again]).await.unwrap();
    assert_eq!(admitted, [Admitted::New(one.id), Admitted::New(two.id), Admitted::Duplicate]);
    let waiting = store.waiting(&worker, LaneSet::first(64), 10, &[]).await.unwrap();
    assert_eq!(waiting.iter().map(|row| row.id).collect::<Vec<_>>(), [one.id, two.id]);
    assert_eq!(waiting[0].topic, None, "there is no such column");
    let forward = |row: &NewInboxRow| Forward {
        inbox_id: row.id,
        outbox_id: Uuid::new_v4(),
        topic: "t".into(),
        headers: "{}".into(),
    };
    let waits = store.forward(&worker, &[forward(&two)], 5).await.unwrap();
    assert_eq!(
        (waits.held, waits.lost),
        (vec![two.id], vec![]),
        "behind the earlier row of its aggregate; nobody took it"
    );
    assert!(!store.counts_refusals());
    assert!(store.forward(&worker, &[forward(&one), forward(&two)], 5).await.unwrap().lost.is_empty());
    assert_eq!(store.forward(&worker, &[forward(&two)], 5).await.unwrap().lost, [two.id], "it is gone");
    assert!(store.set_aside(&worker, two.id, Some("forward: no"), 0).await.is_ok_and(|moved| !moved));
    assert_eq!(store.outbox_backlog(10).await.unwrap().pending, 3);
    assert!(store.inbox_backlog(10).await.unwrap().iter().all(|source| source.pending == 0));
    store.retire(&worker, LaneSet::EMPTY).await.unwrap();
}

/// What is decided without a claim: a row without a route is dead, a parent is expanded (its columns came with version 12).
#[tokio::test]
async fn below_version_14_rows_are_settled_and_expanded_without_a_claim() {
    let h = at_11().await;
    classic(&mut h.connect().await, 11, 13).await;
    let store = h.open();
    store.check().await.unwrap();
    assert!(!store.has_lanes() && store.fans_out());
    let worker = register(&store).await;
    let (lost, parent) = (insert(&h, "k").await, insert(&h, "").await);
    let polled = store.poll(&worker, &[], Some(&read(10))).await.unwrap();
    let rows: Vec<_> = polled.walk.iter().map(|row| (row.position(), row.stamp())).collect();
    assert_eq!(rows.iter().map(|(position, _)| position.id).collect::<Vec<_>>(), [lost, parent]);

    let outcome = Outcome::Dead { error: "no_route: x".to_owned(), counted: false };
    let settle = Settle { position: rows[0].0, stamp: rows[0].1, outcome };
    assert!(store.poll(&worker, std::slice::from_ref(&settle), None).await.unwrap().lost.is_empty());
    assert_eq!(h.one(&format!("SELECT state FROM outbox WHERE id = '{lost}'")).await, "dead");
    assert_eq!(store.poll(&worker, &[settle], None).await.unwrap().lost, [lost], "once");

    let children = ["one", "two"].map(|name| Child { id: Uuid::new_v4(), destination: name.to_owned() }).to_vec();
    let expansion = Expansion { parent: rows[1].0, stamp: rows[1].1, children };
    assert!(store.expand(&worker, std::slice::from_ref(&expansion)).await.unwrap().is_empty());
    assert_eq!(store.expand(&fence(), &[expansion]).await.unwrap(), [parent], "once");
    let children = format!("SELECT count(*)::text FROM outbox WHERE parent_id = '{parent}' AND state = 'pending'");
    assert_eq!(h.one(&children).await, "2");
}

/// contract 4.3 where rows are claimed: a failing destination does not hold the key at the others.
#[tokio::test]
async fn below_version_14_the_unit_of_order_is_destination_and_key() {
    let h = at_11().await;
    classic(&mut h.connect().await, 11, 13).await;
    let route = |topic: &str, destination: Option<&str>| RouteTarget {
        topics: vec![Pattern::parse(topic).unwrap()],
        destination: destination.map(str::to_owned),
    };
    // The names must survive the statement as they are.
    let (one, two) = ("it's {outbox} --if lanes", "two\\");
    let routes = vec![route("both", None), route("{o.key}'-?.*", Some(one)), route("**", Some(two))];
    let config = PostgresConfig { routes, ..h.config() };
    let store = PostgresStore::open(config).unwrap();
    store.check().await.unwrap();
    let worker = register(&store).await;
    let row = async |topic: &str, destination: Option<&str>| {
        let topic = topic.replace('\'', "''");
        let destination = destination.map_or("NULL".to_owned(), |name| format!("'{}'", name.replace('\'', "''")));
        let sql = format!(
            "INSERT INTO outbox (topic, key, payload, destination) VALUES ('{topic}', 'k', '1', {destination}) RETURNING id::text"
        );
        h.one(&sql).await.parse::<Uuid>().unwrap()
    };
    let seen = async || {
        let walk = store.poll(&worker, &[], Some(&read(20))).await.unwrap().walk;
        walk.into_iter().map(|row| row.id).collect::<Vec<_>>()
    };
    let set = async |id: Uuid, state: &str| {
        h.execute(&format!("UPDATE outbox SET state = '{state}' WHERE id = '{id}'")).await
    };

    let (child_one, child_two) = (row("both", Some(one)).await, row("both", Some(two)).await);
    let plain_one = row("{o.key}'-?.x", None).await;
    let (later_one, later_two) = (row("both", Some(one)).await, row("both", Some(two)).await);
    assert_eq!(seen().await, [child_one, child_two], "the head of each unit");
    // `one` fails on; `two` has taken its row: the plain row is for `one`, so it waits, and everything waits behind it.
    set(child_two, "sent").await;
    assert_eq!(seen().await, [child_one]);
    // The plain row is for `two` in this order of rows: it waits for no child of `one`.
    set(plain_one, "sent").await;
    let plain_two = row("anything", None).await;
    assert_eq!(seen().await, [child_one, later_two]);
    set(later_two, "sent").await;
    assert_eq!(seen().await, [child_one, plain_two]);

    // The same while a row is under way, also one behind the replayed head.
    let polled = store.poll(&worker, &[], Some(&read(20))).await.unwrap().walk;
    let stamps: Vec<_> = polled.iter().map(|row| (row.position(), row.stamp())).collect();
    assert_eq!(store.mark(&worker, &stamps, LEASE_MS).await.unwrap().len(), 2);
    set(child_two, "pending").await;
    assert!(seen().await.is_empty(), "a plain row under way holds every child of its key");
    set(plain_two, "sent").await;
    assert_eq!(seen().await, [child_two], "a child under way holds its own destination");
    set(plain_one, "pending").await;
    assert_eq!(seen().await, [child_two]);
    set(child_one, "sent").await;
    set(child_two, "sent").await;
    assert_eq!(seen().await, [plain_one]);
    set(plain_one, "sent").await;
    assert_eq!(seen().await, [later_one]);
}

#[tokio::test]
async fn version_11_is_upgraded_and_keeps_its_indexes() {
    let h = at_11().await;
    flyway(&h, 11).await;
    let id = insert(&h, "k").await;
    h.execute("CREATE ROLE upgrade_app NOLOGIN").await;
    h.execute("GRANT SELECT, UPDATE ON outbox TO upgrade_app").await;
    let before = h.column_of("SELECT indexname::text FROM pg_indexes WHERE schemaname = 'public' ORDER BY 1").await;
    // An earlier try was interrupted in the middle of an index.
    h.execute("CREATE INDEX idx_outbox_parent ON outbox (id)").await;
    h.execute("UPDATE pg_index SET indisvalid = FALSE WHERE indexrelid = 'idx_outbox_parent'::regclass").await;

    let store = h.open();
    let migrated = store.migrate(MigrateOptions::default()).await.unwrap();
    assert_eq!((migrated.from, migrated.to, migrated.adopted), (Some(11), 14, Some(11)));
    assert_eq!(migrated.applied.len(), 3, "{:?}", migrated.applied);
    let report = store.check().await.unwrap();
    assert_eq!((report.version, report.notes), (14, Vec::new()));
    let after = h.column_of("SELECT indexname::text FROM pg_indexes WHERE schemaname = 'public' ORDER BY 1").await;
    assert!(before.iter().all(|index| after.contains(index)), "{after:?}");
    for index in ["idx_outbox_pending", "idx_outbox_dead", "idx_outbox_parent", "idx_inbox_pull_expired"] {
        assert!(after.iter().any(|name| name == index), "{index}: {after:?}");
    }
    assert_eq!(h.one("SELECT (pg_get_indexdef('idx_outbox_parent'::regclass) LIKE '%parent_id%')::text").await, "true");
    let granted = "SELECT bool_and(has_table_privilege('upgrade_app', t, 'SELECT, INSERT, UPDATE, DELETE'))::text \
                   FROM unnest(ARRAY['queuebox_worker', 'queuebox_lane']) t";
    assert_eq!(h.one(granted).await, "true");
    assert_eq!(h.one("SELECT count(*)::text FROM flyway_schema_history").await, "11", "left alone");

    let worker = crate::worker::owner(&store).await;
    let polled = store.poll(&worker, &[], Some(&read(10))).await.unwrap();
    assert_eq!(polled.walk.iter().map(|row| row.id).collect::<Vec<_>>(), [id]);
    // Without the default that the floor needs, the look behind the walk begins at the start.
    let again = Read { walk_after: polled.walk.last().map(|row| row.position()), lap_limit: 10, ..read(10) };
    assert_eq!(store.poll(&worker, &[], Some(&again)).await.unwrap().lap.len(), 1);
    assert!(store.survey(Scope::Outbox).await.unwrap().lanes.iter().all(|lane| lane.worker.is_some()));
    h.execute("DROP OWNED BY upgrade_app").await;
    h.execute("DROP ROLE upgrade_app").await;
}

#[tokio::test]
async fn classic_history_is_adopted_only_when_the_tables_have_it() {
    let h = PostgresHarness::on(queuebox_testkit::postgres().await).await;
    classic(&mut h.connect().await, 0, 9).await;
    flyway(&h, 11).await;
    let store = h.open();
    let fault = store.migrate(MigrateOptions::default()).await.unwrap_err();
    assert!(fault.detail.contains("--baseline"), "{fault}");
    let migrated = store.migrate(MigrateOptions { baseline: Some(9), ..MigrateOptions::default() }).await.unwrap();
    assert_eq!(migrated.applied.len(), 5, "{:?}", migrated.applied);
    store.check().await.unwrap();
}

#[tokio::test]
async fn sequence_backfill_order() {
    let h = PostgresHarness::on(queuebox_testkit::postgres().await).await;
    let mut app = h.connect().await;
    classic(&mut app, 0, 10).await;
    for (n, age) in [(1, 5), (2, 9), (3, 1), (4, 9)] {
        let sql = format!(
            "INSERT INTO outbox (id, topic, payload, created_at) VALUES ('00000000-0000-0000-0000-00000000000{n}', 't', '1', \
             timestamptz '2026-01-01 12:00 UTC' - interval '{age} min')"
        );
        app.execute(AssertSqlSafe(sql)).await.unwrap();
    }
    for _ in 0..2 {
        classic(&mut app, 10, 11).await;
        let order = h.column_of("SELECT right(id::text, 1) FROM outbox ORDER BY sequence").await;
        assert_eq!(order, ["2", "4", "1", "3"]);
    }
    assert_eq!(h.one("INSERT INTO outbox (topic, payload) VALUES ('t', '1') RETURNING sequence::text").await, "5");
}

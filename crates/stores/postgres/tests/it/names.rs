//! Own tables and columns (contract 2.6), and workers whose role owns nothing (contract 2.7).

use queuebox_conformance::store::{Setup, StoreHarness};
use queuebox_core::{
    Class, LaneSet, Uuid,
    message::{Consumption, Forward, NewInboxRow, State},
    ports::{
        Inbox, Lanes, Ledger, Outbox, Scope,
        lanes::Take,
        ledger::{Direction, LedgerFilter},
        outbox::PruneRule,
        schema::{MigrateOptions, Schema},
    },
};
use queuebox_postgres::{CATALOG, PostgresConfig, PostgresStore};
use queuebox_sql::{Migration, Names, Quote, TableNames};

use crate::{
    harness::PostgresHarness,
    worker::{Cursor, owner, read, sent},
};

fn renamed() -> TableNames {
    let mut names = TableNames {
        outbox_table_name: "Messages".into(),
        inbox_table_name: "received".into(),
        ..TableNames::default()
    };
    for (key, name) in [("key", "partition"), ("scheduledAt", "due"), ("state", "status")] {
        names.column_mapping.outbox.insert(key.into(), name.into());
    }
    for (key, name) in [("idempotencyKey", "dedup"), ("createdAt", "received_at"), ("state", "status")] {
        names.column_mapping.inbox.insert(key.into(), name.into());
    }
    names
}

/// The tables of the newest version under other names, without what is made by hand beside them.
async fn make_renamed(h: &PostgresHarness, names: &TableNames) {
    let checked = Names::check(names, Quote::Double, None).unwrap();
    let mut sql = CATALOG.fresh.sql.to_owned();
    for (standard, own) in &names.column_mapping.outbox {
        let column = if standard == "scheduledAt" { "scheduled_at" } else { standard };
        sql = rename_within(&sql, "{outbox}", column, own);
    }
    for (standard, own) in &names.column_mapping.inbox {
        let column = match standard.as_str() {
            "idempotencyKey" => "idempotency_key",
            "createdAt" => "created_at",
            other => other,
        };
        sql = rename_within(&sql, "{inbox}", column, own);
    }
    let rendered = checked.render(&sql, &[]);
    for (_, statement) in Migration::statements(&rendered) {
        if !statement.contains("queuebox_") {
            h.execute(statement).await;
        }
    }
}

/// Renames a column in the statements about one table.
fn rename_within(sql: &str, table: &str, column: &str, own: &str) -> String {
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let rename = |statement: &str| {
        let mut out = String::new();
        let mut rest = statement;
        while let Some(at) = rest.find(column) {
            let whole = !rest[..at].ends_with(is_word) && !rest[at + column.len()..].starts_with(is_word);
            out.push_str(&rest[..at]);
            out.push_str(if whole { own } else { column });
            rest = &rest[at + column.len()..];
        }
        out + rest
    };
    sql.split("\n---\n")
        .map(|part| if part.contains(table) { rename(part) } else { part.to_owned() })
        .collect::<Vec<_>>()
        .join("\n---\n")
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
        consumption: Consumption::Push,
        topic: Some("t".into()),
        trace_parent: None,
        delay_us: 0,
        published_at_us: None,
        dead: None,
    }
}

#[tokio::test]
async fn renamed_tables_work_and_exclude_migrations() {
    let h = PostgresHarness::on(queuebox_testkit::postgres().await).await;
    let names = renamed();
    make_renamed(&h, &names).await;
    let store = PostgresStore::open(PostgresConfig { names, ..h.config() }).unwrap();
    let fault = store.migrate(MigrateOptions::default()).await.unwrap_err();
    assert_eq!(fault.class, Class::Misconfigured);
    for key in
        ["outboxTableName", "inboxTableName", "columnMapping.outbox.scheduledAt", "columnMapping.inbox.idempotencyKey"]
    {
        assert!(fault.detail.contains(key), "{key}: {fault}");
    }

    let report = store.check().await.unwrap();
    assert!(!store.has_lanes());
    let note = report.notes.iter().find(|note| note.starts_with("lanes are off")).unwrap();
    let statements = note.split_once("these statements make them:\n").unwrap().1;
    for statement in statements.lines() {
        h.execute(statement).await;
    }
    assert_eq!(store.check().await.unwrap().notes, Vec::<String>::new(), "also the trigger");
    assert!(store.has_lanes());
    h.execute("DROP TRIGGER queuebox_wake ON \"Messages\"").await;
    let notes = store.check().await.unwrap().notes;
    assert_eq!(notes.len(), 1, "{notes:?}");
    for statement in notes[0].split_once("these statements make them:\n").unwrap().1.lines() {
        h.execute(statement).await;
    }
    assert_eq!(store.check().await.unwrap().notes, Vec::<String>::new());

    let worker = owner(&store).await;
    h.execute("INSERT INTO \"Messages\" (topic, partition, payload) VALUES ('t', 'k', '1'), ('t', 'k', '2')").await;
    let row = message("1");
    assert_eq!(store.admit(&[row.clone(), message("1")]).await.unwrap().len(), 2);
    let taken: Vec<_> = (0..64).map(|lane| Take { lane, owner: None, term: 0 }).collect();
    assert_eq!(store.take(&worker, Scope::Inbox, &taken).await.unwrap().len(), 64);
    assert_eq!(store.waiting(&worker, LaneSet::first(64), 10, &[]).await.unwrap().len(), 1);
    let forward = Forward { inbox_id: row.id, outbox_id: Uuid::new_v4(), topic: "t".into(), headers: "{}".into() };
    assert_eq!(store.forward(&worker, &[forward], 5).await.unwrap(), Default::default());
    let mut cursor = Cursor::new(worker.clone(), 2);
    while cursor.step(&store).await > 0 {}
    assert_eq!(h.column_of("SELECT status::text FROM \"Messages\" ORDER BY sequence").await, ["sent"; 3]);
    let filter = LedgerFilter { states: vec![State::Sent], key: Some("k".into()), ..LedgerFilter::default() };
    assert_eq!(store.page(Scope::Outbox, &filter, Direction::NewestFirst, None, 10).await.unwrap().len(), 2);
    store.retire(&worker, LaneSet::EMPTY).await.unwrap();
}

/// contract 2.6: one error names everything that is missing, with the statements that add it.
#[tokio::test]
async fn the_printed_statements_make_renamed_tables() {
    let mut names = renamed();
    // Words that are also types, functions, or parts of other words in the file.
    for (key, name) in
        [("sequence", "no"), ("id", "uid"), ("crashes", "falls"), ("createdAt", "made"), ("headers", "meta")]
    {
        names.column_mapping.outbox.insert(key.into(), name.into());
    }
    names.column_mapping.inbox.insert("source".into(), "origin".into());
    for present in ["", "CREATE TABLE received (note TEXT)"] {
        let h = PostgresHarness::on(queuebox_testkit::postgres().await).await;
        if !present.is_empty() {
            h.execute(present).await;
        }
        let store = PostgresStore::open(PostgresConfig { names: names.clone(), ..h.config() }).unwrap();
        let fault = store.check().await.unwrap_err();
        assert!(fault.detail.contains("there is no table \"Messages\""), "{fault}");
        assert_eq!(fault.detail.contains("there is no table \"received\""), present.is_empty(), "{fault}");
        assert!(!fault.detail.contains("queuebox migrate"), "it is forbidden beside renamed tables: {fault}");
        for statement in fault.detail.lines().skip(1) {
            h.execute(statement).await;
        }
        let report = store.check().await.unwrap();
        let off = if present.is_empty() { 0 } else { 3 };
        assert_eq!(report.notes.len(), off, "what came with version 12 is optional: {:?}", report.notes);
        assert!(store.has_lanes());
        let worker = owner(&store).await;
        h.execute("INSERT INTO \"Messages\" (topic, partition, payload) VALUES ('t', 'k', '1')").await;
        assert_eq!(store.poll(&worker, &[], Some(&read(10))).await.unwrap().walk.len(), 1);
        store.admit(&[message("1")]).await.unwrap();
    }
}

#[tokio::test]
async fn a_worker_whose_role_owns_nothing_can_work() {
    let h = PostgresHarness::start(Setup::default()).await;
    let role = h.database.clone();
    h.execute(&format!("CREATE ROLE {role} LOGIN PASSWORD 'p'")).await;
    let admin = h.open();
    for grant in admin.grants(&role) {
        h.execute(&grant).await;
    }
    let mut config = h.config();
    config.target.username = role.clone();
    config.target.password = Some(queuebox_core::Secret::fixed("p"));
    let store = PostgresStore::open(config).unwrap();
    assert_eq!(store.migrate(MigrateOptions::default()).await.unwrap().applied, Vec::<String>::new());
    assert_eq!(store.check().await.unwrap().notes, Vec::<String>::new());
    let worker = owner(&store).await;
    h.execute("INSERT INTO outbox (topic, key, payload) VALUES ('t', 'k', '1')").await;
    let row = store.poll(&worker, &[], Some(&read(10))).await.unwrap().walk.remove(0);
    assert!(store.poll(&worker, &[sent(&row)], None).await.unwrap().lost.is_empty());
    store.admit(&[message("1")]).await.unwrap();
    store.set_idle(&worker, true).await.unwrap();
    let mut gone = 0;
    loop {
        let step = store.prune(Scope::Outbox, State::Sent, PruneRule::Beyond(0), 10).await.unwrap();
        gone += step.rows;
        if !step.more {
            break;
        }
    }
    assert_eq!(gone, 1);
    assert!(store.examine().await.unwrap().iter().all(|finding| finding.level != "error"));
    store.retire(&worker, LaneSet::EMPTY).await.unwrap();
    store.close().await;
    h.execute(&format!("DROP OWNED BY {role}")).await;
    h.execute(&format!("DROP ROLE {role}")).await;
}

/// Another password in the same place is used for the next connection (case D36).
#[tokio::test]
async fn a_rotated_password_is_read_again() {
    let h = PostgresHarness::start(Setup::default()).await;
    let role = h.database.clone();
    h.execute(&format!("CREATE ROLE {role} LOGIN PASSWORD 'old'")).await;
    h.execute(&format!("GRANT SELECT ON outbox TO {role}")).await;
    let password = std::sync::Arc::new(std::sync::Mutex::new("old".to_owned()));
    let mut config = h.config();
    config.target.username = role.clone();
    let source = password.clone();
    config.target.password = Some(queuebox_core::Secret::from_fn(move || Ok(source.lock().unwrap().as_str().into())));
    let store = PostgresStore::open(config).unwrap();
    store.ping().await.unwrap();
    h.execute(&format!("ALTER ROLE {role} PASSWORD 'new'")).await;
    h.execute("SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()").await;
    let mut fault = store.ping().await.unwrap_err();
    while fault.code == "connection" {
        fault = store.ping().await.unwrap_err();
    }
    assert_eq!((fault.class, fault.code.as_ref()), (Class::Misconfigured, "login"));
    *password.lock().unwrap() = "new".to_owned();
    store.ping().await.unwrap();
    store.close().await;
    h.execute(&format!("DROP OWNED BY {role}")).await;
    h.execute(&format!("DROP ROLE {role}")).await;
}

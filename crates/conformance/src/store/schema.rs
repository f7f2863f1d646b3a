//! Migrations and the check at start (contract 2.2, 2.5, 2.6; laws in `queuebox_core::ports::schema`).

use futures::future::join_all;
use queuebox_core::{Class, ports::schema::MigrateOptions};

use super::{Insert, Setup, StoreHarness, World};

const HISTORY: &str = "queuebox_schema_history";

async fn empty<H: StoreHarness>() -> World<H> {
    World::start_with(Setup { empty: true, ..Setup::default() }).await
}

fn baseline(version: u32) -> MigrateOptions {
    MigrateOptions { baseline: Some(version), ..MigrateOptions::default() }
}

/// The first run makes everything, the second nothing.
pub async fn migrate_twice<H: StoreHarness>() {
    let w = empty::<H>().await;
    let first = w.store.migrate(MigrateOptions::default()).await.unwrap();
    assert_eq!((first.from, first.adopted), (None, None));
    assert!(first.to >= 14 && !first.applied.is_empty());
    let second = w.store.migrate(MigrateOptions::default()).await.unwrap();
    assert_eq!((second.from, second.to), (Some(first.to), first.to));
    assert!(second.applied.is_empty());
    assert_eq!(w.count(HISTORY).await, first.applied.len());
}

/// Migrators that start together: one works, the others wait and find nothing to do.
pub async fn migrators_wait_for_each_other<H: StoreHarness>() {
    let w = empty::<H>().await;
    let mut stores = vec![w.store.clone()];
    for _ in 0..3 {
        stores.push(w.h.store().await);
    }
    let runs = join_all(stores.iter().map(|store| store.migrate(MigrateOptions::default()))).await;
    let runs: Vec<_> = runs.into_iter().map(|run| run.unwrap()).collect();
    assert_eq!(runs.iter().filter(|run| !run.applied.is_empty()).count(), 1, "{runs:?}");
    assert!(runs.iter().all(|run| run.to == runs[0].to));
    w.store.check().await.unwrap();
}

/// A database that was just made passes without a note, and works.
pub async fn a_migrated_database_passes_the_check<H: StoreHarness>() {
    let w = empty::<H>().await;
    let migrated = w.store.migrate(MigrateOptions::default()).await.unwrap();
    let report = w.store.check().await.unwrap();
    assert_eq!(report.version, migrated.to);
    assert!(report.notes.is_empty(), "{:?}", report.notes);
    w.store.ping().await.unwrap();
    let fence = w.owner().await;
    w.insert(Insert::default()).await;
    assert_eq!(w.read(&fence).await.walk.len(), 1);
    let findings = w.store.examine().await.unwrap();
    assert!(findings.iter().all(|finding| finding.level != "error"), "{findings:?}");
}

async fn without_history<H: StoreHarness>() -> (World<H>, u32) {
    let w = empty::<H>().await;
    let version = w.store.migrate(MigrateOptions::default()).await.unwrap().to;
    w.h.execute(&format!("DROP TABLE {}", w.h.table(HISTORY))).await;
    (w, version)
}

/// Tables that nobody recorded stop the migration, which names `--baseline`.
pub async fn tables_without_history_need_a_baseline<H: StoreHarness>() {
    let (w, _) = without_history::<H>().await;
    let fault = w.store.migrate(MigrateOptions::default()).await.unwrap_err();
    assert_eq!(fault.class, Class::Misconfigured);
    assert!(fault.detail.contains("--baseline"), "{}", fault.detail);
}

/// A baseline records versions without running them; a second one is refused.
pub async fn a_baseline_is_recorded_once<H: StoreHarness>() {
    let (w, version) = without_history::<H>().await;
    let migrated = w.store.migrate(baseline(version)).await.unwrap();
    assert_eq!(migrated.to, version);
    assert!(migrated.applied.is_empty());
    w.store.check().await.unwrap();
    let fault = w.store.migrate(baseline(version)).await.unwrap_err();
    assert_eq!(fault.class, Class::Misconfigured);
    assert!(fault.detail.contains("history"), "{}", fault.detail);
    assert!(w.store.migrate(MigrateOptions::default()).await.unwrap().applied.is_empty());
}

/// A baseline of what the database does not have would leave a history that nothing can mend.
pub async fn a_baseline_needs_its_tables<H: StoreHarness>() {
    let w = empty::<H>().await;
    let fault = w.store.migrate(baseline(14)).await.unwrap_err();
    assert_eq!(fault.class, Class::Misconfigured);
    assert!(fault.detail.contains("--baseline"), "{}", fault.detail);
    w.store.migrate(MigrateOptions::default()).await.unwrap();
    w.store.check().await.unwrap();

    let (w, version) = without_history::<H>().await;
    let (table, column) = (w.h.table("outbox"), w.h.column("outbox", "destination"));
    w.h.execute(&format!("ALTER TABLE {table} DROP COLUMN {column}")).await;
    let fault = w.store.migrate(baseline(version)).await.unwrap_err();
    assert_eq!(fault.class, Class::Misconfigured);
    assert!(fault.detail.contains("--baseline") && fault.detail.contains("destination"), "{}", fault.detail);
    assert!(w.store.migrate(MigrateOptions::default()).await.is_err(), "nothing was recorded");
}

async fn edit_history<H: StoreHarness>(w: &World<H>, sets: &str) {
    assert!(w.h.execute(&format!("UPDATE {} SET {sets}", w.h.table(HISTORY))).await > 0);
}

/// A migration whose text is another than the recorded one is an error.
pub async fn a_changed_migration_is_an_error<H: StoreHarness>() {
    let w = World::<H>::start().await;
    edit_history(&w, "checksum = 'something else'").await;
    let fault = w.store.migrate(MigrateOptions::default()).await.unwrap_err();
    assert_eq!(fault.class, Class::Misconfigured);
    assert!(fault.detail.contains("checksum"), "{}", fault.detail);
}

/// A newer schema is accepted with a note, unless its `min_reader` is above what this binary knows.
pub async fn a_database_of_a_later_release<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let newer = format!(
        "INSERT INTO {} (version, name, checksum, applied_at, min_reader) VALUES (9001, 'later', 'x', {}, 14)",
        w.h.table(HISTORY),
        w.h.now_plus(0)
    );
    w.h.execute(&newer).await;
    assert!(w.store.migrate(MigrateOptions::default()).await.unwrap().applied.is_empty());
    let report = w.store.check().await.unwrap();
    assert_eq!(report.version, 9001);
    assert!(report.notes.iter().any(|note| note.contains("9001")), "{:?}", report.notes);
    w.h.execute(&format!("UPDATE {} SET min_reader = 9001 WHERE version = 9001", w.h.table(HISTORY))).await;
    for fault in [w.store.check().await.unwrap_err(), w.store.migrate(MigrateOptions::default()).await.unwrap_err()] {
        assert_eq!(fault.class, Class::Misconfigured);
        assert!(fault.detail.contains("9001"), "{}", fault.detail);
    }
}

/// conformance 127: one error names every missing column, with statements (one a line, ended by `;`) that mend it.
pub async fn a_missing_column_is_named<H: StoreHarness>() {
    let w = World::<H>::start().await;
    for (table, column) in [("inbox", "correlation_id"), ("outbox", "aggregate_type")] {
        let (table, column) = (w.h.table(table), w.h.column(table, column));
        w.h.execute(&format!("ALTER TABLE {table} DROP COLUMN {column}")).await;
    }
    let fault = w.store.check().await.unwrap_err();
    assert_eq!(fault.class, Class::Misconfigured);
    let statements: Vec<_> = fault
        .detail
        .lines()
        .filter_map(|line| line.trim().strip_suffix(';').filter(|line| line.starts_with("ALTER TABLE")))
        .collect();
    assert_eq!(statements.len(), 2, "{}", fault.detail);
    for (table, column) in [("inbox", "correlation_id"), ("outbox", "aggregate_type")] {
        let column = w.h.column(table, column);
        let name = column.trim_matches(['"', '`', '[', ']']);
        assert!(fault.detail.contains(name), "{}", fault.detail);
    }
    for statement in statements {
        w.h.execute(statement).await;
    }
    w.store.check().await.unwrap();
}

/// An inbox without its unique constraint is an error with the statement (contract 2.2).
pub async fn the_identity_of_a_message_is_required<H: StoreHarness>() {
    let w = World::<H>::start().await;
    w.h.execute(&w.h.drop_identity()).await;
    let fault = w.store.check().await.unwrap_err();
    assert_eq!(fault.class, Class::Misconfigured);
    assert!(fault.detail.contains("uq_inbox_source_idempotency"), "{}", fault.detail);
    assert!(fault.detail.contains("UNIQUE"), "{}", fault.detail);
}

/// conformance 129: a rename together with `migrate` is refused and names each renamed key.
pub async fn renames_exclude_migrations<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let fault = w.store.migrate(MigrateOptions::default()).await.unwrap_err();
    assert_eq!(fault.class, Class::Misconfigured);
    for (table, plain) in [("outbox", "outboxTableName"), ("inbox", "inboxTableName")] {
        if w.h.table(table).trim_matches(['"', '`', '[', ']']) != table {
            assert!(fault.detail.contains(plain), "{}", fault.detail);
        }
    }
    if w.h.column("outbox", "scheduled_at").trim_matches(['"', '`', '[', ']']) != "scheduled_at" {
        assert!(fault.detail.contains("columnMapping.outbox.scheduledAt"), "{}", fault.detail);
    }
    w.store.check().await.unwrap();
}

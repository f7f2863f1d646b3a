//! `queuebox doctor`: each finding with its fix.

use queuebox_testkit as testkit;
use serde_json::{Value, json};

use crate::support::{Db, Kind, PATIENCE, World, on_every_database, text};

async fn examine(world: &World) -> (Option<i32>, Vec<Value>) {
    let folder = world.write_manifests(1, 2);
    let program = world.program(&["doctor", "-f", folder.to_str().unwrap(), "--output", "json"]);
    let (status, out, log) = program.run(PATIENCE).await;
    let findings = serde_json::from_str(&out).unwrap_or_else(|error| panic!("{error}\n{out}{log}"));
    (status.code(), findings)
}

/// The one finding of `check`: its level and what mends it.
fn told<'a>(findings: &'a [Value], check: &str) -> (&'a str, &'a str) {
    let finding = findings.iter().find(|finding| text(finding, "check") == check);
    finding.map_or(("", ""), |finding| (text(finding, "level"), finding["fix"].as_str().unwrap_or_default()))
}

/// Every finding that is not `ok` names its level and its fix.
fn complaints(findings: &[Value]) -> Vec<(&str, &str, &str)> {
    let wrong = findings.iter().filter(|finding| text(finding, "level") != "ok");
    wrong.map(|f| (text(f, "check"), text(f, "level"), f["fix"].as_str().unwrap_or_default())).collect()
}

fn level<'a>(findings: &'a [Value], check: &str) -> &'a str {
    findings.iter().find(|finding| text(finding, "check") == check).map_or("", |finding| text(finding, "level"))
}

async fn doctor_finds_nothing_wrong_with_a_new_database(kind: Kind) {
    let world = World::on(kind).await;
    world.migrate().await;
    let (status, findings) = examine(&world).await;
    assert_eq!(status, Some(0), "{findings:?}");
    assert!(findings.iter().all(|finding| text(finding, "level") == "ok"), "{findings:?}");
    assert!(findings.len() > 3, "{findings:?}");
    world.finish().await;
}

async fn doctor_names_what_is_missing(kind: Kind) {
    let amqp = json!({ "rabbitmq": { "urlFrom": { "env": "AMQP_URL" }, "exchange": "e" }, "http": null });
    let url = format!("amqp://guest:canary-7731@127.0.0.1:{}/%2f", testkit::free_port());
    let world = World::on(kind).await.destination("bus", amqp).env("AMQP_URL", &url);
    let world = world.routes(&[("order.*", &["receiver"]), ("**", &["bus"])]);
    // No tables yet, and nobody listens where the broker should be.
    let (status, findings) = examine(&world).await;
    assert_eq!(status, Some(1), "{findings:?}");
    assert_eq!(level(&findings, "destination bus"), "error", "{findings:?}");
    assert_eq!(level(&findings, "destination receiver"), "ok", "{findings:?}");
    let schema = if kind == Kind::Sqlite { "schema" } else { "tables" };
    assert_eq!(level(&findings, schema), "error", "{findings:?}");
    for finding in findings.iter().filter(|finding| text(finding, "level") == "error") {
        assert!(!text(finding, "fix").is_empty(), "{finding}");
        assert!(!finding.to_string().contains("canary"), "{finding}");
    }
    world.finish().await;
}

on_every_database!(doctor_finds_nothing_wrong_with_a_new_database, doctor_names_what_is_missing);

/// What a PostgreSQL server can have in the way.
mod doctor_examines_the_server {
    use super::*;

    #[tokio::test]
    async fn plans() {
        let world = World::on(Kind::Postgres).await;
        world.migrate().await;
        let filler =
            "INSERT INTO outbox (topic, payload, state) SELECT 't', '{}', 'pending' FROM generate_series(1, 20000)";
        world.db.execute(filler).await;
        world.db.execute("DROP INDEX idx_outbox_pending").await;
        world.db.execute("DROP INDEX idx_outbox_key").await;
        world.db.execute("ANALYZE outbox").await;
        let (status, findings) = examine(&world).await;
        assert_eq!((status, level(&findings, "plans")), (Some(0), "warning"), "{findings:?}");
        assert!(told(&findings, "plans").1.contains("create the indexes"), "{findings:?}");
        for check in ["pooler", "rights", "writes", "isolation", "clocks", "connections", "transactions", "indexes"] {
            assert_eq!(level(&findings, check), "ok", "{check}: {findings:?}");
        }
        world.finish().await;
    }

    /// One thing after another, each told with what mends it, and nothing else told.
    #[tokio::test]
    async fn settings() {
        // A server of its own: one of the findings is about all of it.
        let server = testkit::private_postgres().await;
        let name = server.fresh_database_name().await;
        let folder = tempfile::Builder::new().prefix("queuebox-world-").tempdir().unwrap();
        let world = World::with(Db::postgres(server.url_of(&name)).await, folder).await;
        world.migrate().await;
        for (check, what, fix, broken, mended) in [
            (
                "autovacuum",
                "warning",
                "switch it on",
                "ALTER TABLE outbox SET (autovacuum_enabled = false)".to_owned(),
                "ALTER TABLE outbox RESET (autovacuum_enabled)".to_owned(),
            ),
            (
                "indexes",
                "warning",
                "queuebox migrate",
                "UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'idx_outbox_parent'::regclass".to_owned(),
                "UPDATE pg_index SET indisvalid = true WHERE indexrelid = 'idx_outbox_parent'::regclass".to_owned(),
            ),
            (
                "replication slots",
                "warning",
                "pg_drop_replication_slot",
                "SELECT pg_create_physical_replication_slot('queuebox_old')".to_owned(),
                "SELECT pg_drop_replication_slot('queuebox_old')".to_owned(),
            ),
            (
                "features",
                "warning",
                "queuebox migrate",
                "ALTER TABLE inbox RENAME COLUMN trace_parent TO elsewhere".to_owned(),
                "ALTER TABLE inbox RENAME COLUMN elsewhere TO trace_parent".to_owned(),
            ),
            (
                "writes",
                "error",
                "connect to the primary",
                format!("ALTER DATABASE {name} SET default_transaction_read_only = on"),
                format!(
                    "SET default_transaction_read_only = off; ALTER DATABASE {name} RESET default_transaction_read_only"
                ),
            ),
        ] {
            world.db.execute(&broken).await;
            let (status, findings) = examine(&world).await;
            assert_eq!(status, Some(i32::from(what == "error")), "{check}: {findings:?}");
            let told = complaints(&findings);
            assert!(
                matches!(told[..], [(of, level, mend)] if (of, level) == (check, what) && mend.contains(fix)),
                "{findings:?}"
            );
            world.db.execute(&mended).await;
        }
        let world = world.relay(json!({ "database": { "poolSize": 250 } }));
        let (status, findings) = examine(&world).await;
        assert_eq!(status, Some(0), "{findings:?}");
        let (level, fix) = told(&findings, "connections");
        assert!(level == "warning" && fix.contains("max_connections"), "{findings:?}");
        world.finish().await;
    }

    /// A role that may not do everything, and the statements that mend it.
    #[tokio::test]
    async fn rights() {
        let server = testkit::postgres().await;
        let name = server.fresh_database_name().await;
        let folder = tempfile::Builder::new().prefix("queuebox-world-").tempdir().unwrap();
        let world = World::with(Db::postgres(server.url_of(&name)).await, folder).await;
        world.migrate().await;
        let role = format!("examined_{}", uuid::Uuid::new_v4().simple());
        world.db.execute(&format!("CREATE ROLE {role} LOGIN PASSWORD 'w'")).await;
        let folder = world.write_manifests(1, 2);
        let url = server.url_of(&name);
        let (head, tail) = (url.find("://").unwrap() + 3, url.find('@').unwrap());
        let url = format!("{}{role}:w{}", &url[..head], &url[tail..]);
        let grants = world.program(&["migrate", "--print-grants", &role, "-f", folder.to_str().unwrap()]);
        let (status, grants, log) = grants.run(PATIENCE).await;
        assert!(status.success(), "{log}");
        let world = world.env("DATABASE_URL", &url);
        // It sees the tables and may do nothing with them.
        world.db.execute(&format!("GRANT USAGE ON SCHEMA public TO {role}")).await;
        let (status, findings) = examine(&world).await;
        assert_eq!((status, level(&findings, "rights")), (Some(1), "error"), "{findings:?}");
        assert!(told(&findings, "rights").1.contains("queuebox migrate --print-grants"), "{findings:?}");
        world.db.execute(&grants).await;
        let (status, findings) = examine(&world).await;
        assert_eq!((status, level(&findings, "rights")), (Some(0), "ok"), "{findings:?}");
        world.db.execute(&format!("DROP OWNED BY {role}; DROP ROLE {role}")).await;
        world.finish().await;
    }

    #[tokio::test]
    async fn write_lock_of_sqlite() {
        let world = World::on(Kind::Sqlite).await;
        world.migrate().await;
        let world = world.relay(json!({ "database": { "sqlite": { "busyTimeout": "200ms" } } }));
        let writer = world.db.begin().await;
        let (status, findings) = examine(&world).await;
        assert_eq!((status, level(&findings, "write lock")), (Some(1), "error"), "{findings:?}");
        assert_eq!(told(&findings, "write lock").1, "end the transaction that holds it");
        writer.rollback().await;
        let (status, findings) = examine(&world).await;
        assert_eq!((status, level(&findings, "write lock")), (Some(0), "ok"), "{findings:?}");
        world.finish().await;
    }

    /// A pooler in transaction mode works and is told, one that gives its connection away after each statement is refused; behind it
    /// also the server's own isolation counts.
    #[tokio::test]
    async fn pooler() {
        let server = testkit::postgres().await;
        let name = server.fresh_database_name().await;
        let folder = tempfile::Builder::new().prefix("queuebox-world-").tempdir().unwrap();
        let world = World::with(Db::postgres(server.url_of(&name)).await, folder).await;
        world.migrate().await;
        let isolation = format!("ALTER DATABASE {name} SET default_transaction_isolation = 'serializable'");
        world.db.execute(&isolation).await;
        let transactions = testkit::pgbouncer(&server, testkit::PoolMode::Transaction).await;
        let world = world.env("DATABASE_URL", &transactions.url_of(&name));
        let (status, findings) = examine(&world).await;
        assert_eq!(status, Some(0), "{findings:?}");
        let wrong = complaints(&findings);
        assert!(
            matches!(wrong[..], [("pooler", "warning", pooler), ("isolation", "warning", isolation)]
                if pooler.contains("capture.connection") && isolation.contains("'read committed'")),
            "{findings:?}"
        );
        // Whoever polls anyway misses nothing.
        let world = world.relay(json!({ "capture": { "mode": "Polling" } }));
        let (status, findings) = examine(&world).await;
        assert_eq!((status, level(&findings, "pooler")), (Some(0), "ok"), "{findings:?}");
        let statements = testkit::pgbouncer(&server, testkit::PoolMode::Statement).await;
        let world = world.env("DATABASE_URL", &statements.url_of(&name));
        let (status, findings) = examine(&world).await;
        assert_eq!(status, Some(1), "{findings:?}");
        assert!(
            matches!(complaints(&findings)[..], [("pooler", "error", fix)] if fix.contains("pool_mode to transaction")),
            "{findings:?}"
        );
        world.finish().await;
    }

    /// A log that nobody resets, and a file that was damaged.
    #[tokio::test]
    async fn file_of_sqlite() {
        let world = World::on(Kind::Sqlite).await;
        world.migrate().await;
        // The log is there for as long as somebody has the file open and wrote to it.
        world.db.execute("INSERT INTO outbox (topic, payload, state) VALUES ('order', '1', 'sent')").await;
        let log = format!("{}-wal", world.db.address);
        let open = |path: &str| std::fs::OpenOptions::new().write(true).open(path).unwrap();
        open(&log).set_len(300 << 20).unwrap();
        let (status, findings) = examine(&world).await;
        assert_eq!(status, Some(0), "{findings:?}");
        assert!(
            matches!(complaints(&findings)[..], [("log", "warning", fix)] if fix.contains("keeps a transaction open")),
            "{findings:?}"
        );
        world.db.execute("PRAGMA wal_checkpoint(TRUNCATE)").await;
        let (status, findings) = examine(&world).await;
        assert_eq!((status, complaints(&findings).len()), (Some(0), 0), "{findings:?}");
        // A page of an index that says of itself what cannot be.
        let page = world.db.row("SELECT rootpage, (SELECT page_size FROM pragma_page_size) AS size FROM sqlite_master WHERE name = 'idx_outbox_dead'").await;
        let start = (page["rootpage"].as_u64().unwrap() - 1) * page["size"].as_u64().unwrap();
        std::os::unix::fs::FileExt::write_all_at(&open(&world.db.address), &[0xff; 64], start).unwrap();
        let (status, findings) = examine(&world).await;
        assert_eq!(status, Some(1), "{findings:?}");
        assert!(
            matches!(complaints(&findings)[..], [("file", "error", fix)] if fix.contains("restore the file from a backup")),
            "{findings:?}"
        );
    }
}

//! Section N: tables of one's own, migrations, a classic installation.

use std::{collections::BTreeSet, process::ExitStatus};

use queuebox_testkit as testkit;
use serde_json::{Value, json};

use super::start::refused;
use crate::support::{
    Db, Kind, OutboxRow, PATIENCE, Worker, World, merge, number, on_every_database, on_postgres, text,
};

/// A world on tables with names of their own, and what takes this column away from one of them.
async fn custom(kind: Kind, database: Value, statements: &[&str]) -> World {
    let world = World::on(kind).await;
    world.migrate().await;
    for statement in statements {
        world.db.execute(statement).await;
    }
    world.relay(json!({ "database": database }))
}

/// The statements that a refused start printed.
fn printed(said: &str) -> Vec<String> {
    let unescaped = said.replace("\\n", "\n").replace("\\\"", "\"");
    let mut statements: Vec<String> = unescaped
        .lines()
        .map(str::trim)
        .filter(|line| line.starts_with("ALTER TABLE") || line.starts_with("CREATE "))
        .map(|line| line.split_inclusive(';').next().unwrap().to_owned())
        .collect();
    assert!(!statements.is_empty(), "{said}");
    // The log and the last words of the program say the same.
    let mut seen = BTreeSet::new();
    statements.retain(|statement| seen.insert(statement.clone()));
    statements
}

/// The start names the column; its own statements mend it, and then a message goes through.
async fn is_mended(world: World, column: &str) {
    let said = refused(&world).await;
    assert!(said.contains(column), "{said}");
    for statement in printed(&said) {
        world.db.execute(&statement).await;
    }
    world.start().await;
    let insert = OutboxRow::new("order", 1).sql().replacen("INTO outbox", "INTO letters", 1);
    world.db.execute(&insert).await;
    world.receiver.wait_for(1, PATIENCE).await;
    world.finish().await;
}

async fn missing_outbox_sequence_column(kind: Kind) {
    let columns = json!({ "outbox": { "sequence": "place" } });
    let database = json!({ "migrate": "Off", "outboxTableName": "letters", "columnMapping": columns });
    let mut statements = vec!["ALTER TABLE outbox RENAME TO letters"];
    if kind == Kind::Sqlite {
        // A column with an index cannot be dropped there.
        statements.extend(["DROP INDEX idx_outbox_pending", "DROP INDEX idx_outbox_key"]);
    }
    statements.push("ALTER TABLE letters DROP COLUMN sequence");
    let world = custom(kind, database, &statements).await;
    is_mended(world, "place").await;
}

async fn missing_inbox_headers_column(kind: Kind) {
    let columns = json!({ "inbox": { "headers": "envelope" } });
    let database = json!({ "migrate": "Off", "inboxTableName": "mail", "columnMapping": columns });
    let statements = ["ALTER TABLE inbox RENAME TO mail", "ALTER TABLE mail DROP COLUMN headers"];
    let world = custom(kind, database, &statements).await.source("hooks", json!({}));
    let said = refused(&world).await;
    assert!(said.contains("mail") && said.contains("envelope"), "{said}");
    for statement in printed(&said) {
        world.db.execute(&statement).await;
    }
    let worker = world.start().await;
    worker.post_with("hooks", &[("x-tenant", "a")], r#"{"id":1}"#).await.accepted();
    world.receiver.wait_for(1, PATIENCE).await;
    // The test's helpers know JSON by the usual names of its columns.
    let row = world.db.row("SELECT envelope AS headers FROM mail").await;
    assert_eq!(text(&row["headers"], "x-tenant"), "a");
    world.finish().await;
}

/// The columns of a table that the contract names.
async fn columns(db: &Db, table: &str) -> Vec<String> {
    let rows = match db.kind {
        Kind::Postgres => {
            db.rows(&format!("SELECT column_name AS name FROM information_schema.columns WHERE table_name = '{table}'"))
                .await
        }
        Kind::Sqlite => {
            let own = "'row_no', 'parent_sequence'";
            db.rows(&format!("SELECT name FROM pragma_table_xinfo('{table}') WHERE name NOT IN ({own})")).await
        }
    };
    assert_eq!(rows.len(), 21);
    rows.iter().map(|row| text(row, "name").to_owned()).collect()
}

/// `max_attempts` as a key of `columnMapping`.
fn camel_case(column: &str) -> String {
    let mut words = column.split('_');
    let first = words.next().unwrap().to_owned();
    words.fold(first, |key, word| key + &word[..1].to_uppercase() + &word[1..])
}

/// A worker on the tables `Letters` and `mail`, every column of which has another name.
async fn every_column_has_another_name(kind: Kind) {
    let world = World::on(kind).await;
    world.migrate().await;
    let mut mapping = json!({});
    for (table, own) in [("outbox", "Letters"), ("inbox", "mail")] {
        for column in columns(&world.db, table).await {
            let name = format!("My_{column}");
            world.db.execute(&format!("ALTER TABLE {table} RENAME COLUMN \"{column}\" TO \"{name}\"")).await;
            mapping[table][camel_case(&column)] = json!(name);
        }
        world.db.execute(&format!("ALTER TABLE {table} RENAME TO \"{own}\"")).await;
    }
    let names =
        json!({ "migrate": "Off", "outboxTableName": "Letters", "inboxTableName": "mail", "columnMapping": mapping });
    let world = world.relay(json!({ "database": names })).source("hooks", json!({}));
    let insert = |id: &str| {
        format!(
            "INSERT INTO \"Letters\" (\"My_id\", \"My_topic\", \"My_key\", \"My_payload\") VALUES ('{id}', 'order', 'k', '1')"
        )
    };
    let states = "SELECT \"My_state\" AS state, count(*) AS n FROM \"Letters\" GROUP BY \"My_state\"";
    let sent = |n: i64| move |row: &Value| text(row, "state") == "sent" && number(row, "n") == n;

    let worker = world.start().await;
    worker.post("hooks", r#"{"id":1}"#).await.accepted();
    assert_eq!(worker.post("hooks", r#"{"id":1}"#).await.status, 200, "a duplicate");
    let id = uuid::Uuid::new_v4().to_string();
    world.db.execute(&insert(&id)).await;
    world.db.wait_row(states, sent(2)).await;
    assert_eq!(world.receiver.wait_for(2, PATIENCE).await.len(), 2);
    let moved = worker.admin("/admin/outbox/requeue", json!({ "ids": [id], "state": ["sent"] })).await;
    assert_eq!(moved.json(), json!({ "moved": 1 }));
    world.receiver.wait_for(3, PATIENCE).await;
    world.db.wait_row(states, sent(2)).await;
    assert!(worker.process.terminate(PATIENCE).await.success());

    // The same mapping in a classic file.
    let database = match kind {
        Kind::Postgres => json!({ "type": "postgresql", "connectionUrl": world.db.address }),
        Kind::Sqlite => json!({ "type": "sqlite", "path": world.db.address }),
    };
    let (port, path) = (testkit::free_port(), world.folder().join("queuebox.yml"));
    let mut file = json!({
        "server": { "httpPort": port },
        "database": database,
        "routes": [{ "topicPattern": "**", "destination": "receiver" }],
        "destinations": { "receiver": { "type": "http", "baseUrl": world.receiver.url_for("/events") } },
        "sources": { "hooks": { "path": "/hooks", "idempotencyKeyPath": "$.id", "topic": "hooks" } },
    });
    merge(&mut file["database"], names);
    file["database"]["migrate"] = json!(false);
    std::fs::write(&path, file.to_string()).unwrap();
    let process = world.program(&["run", "--config", path.to_str().unwrap()]).spawn();
    let worker = Worker::of(process, port, port);
    worker.ready().await;
    worker.post("hooks", r#"{"id":2}"#).await.accepted();
    world.db.execute(&insert(&uuid::Uuid::new_v4().to_string())).await;
    world.db.wait_row(states, sent(4)).await;
    assert!(worker.process.terminate(PATIENCE).await.success());
    world.finish().await;
}

/// `queuebox migrate` with these arguments behind the manifests: exit code and everything it said.
async fn migrate(world: &World, arguments: &[&str]) -> (ExitStatus, String) {
    let folder = world.write_manifests(1, 2);
    let all = [&["migrate", "-f", folder.to_str().unwrap()], arguments].concat();
    let (status, out, log) = world.program(&all).run(PATIENCE).await;
    (status, format!("{out}{log}"))
}

mod migrate_command {
    use super::*;

    async fn exit_codes_and_baseline(kind: Kind) {
        let world = World::on(kind).await;
        let (status, said) = migrate(&world, &["--no-such-option"]).await;
        assert_eq!(status.code(), Some(2), "{said}");
        let (status, said) = migrate(&world, &[]).await;
        assert_eq!(status.code(), Some(0), "{said}");
        let (status, said) = migrate(&world, &[]).await;
        assert_eq!(status.code(), Some(0), "a second time there is nothing to do: {said}");
        let (status, said) = migrate(&world, &["--baseline", "14"]).await;
        assert_eq!(status.code(), Some(1), "{said}");
        assert!(said.contains("history"), "a baseline on a history: {said}");

        // Tables whose history nobody knows.
        world.db.execute("DROP TABLE queuebox_schema_history").await;
        let (status, said) = migrate(&world, &[]).await;
        assert_eq!(status.code(), Some(1), "{said}");
        assert!(said.contains("--baseline"), "{said}");
        assert!(refused(&world).await.contains("--baseline"));
        let (status, said) = migrate(&world, &["--baseline", "14"]).await;
        assert_eq!(status.code(), Some(0), "{said}");
        assert_eq!(world.db.count("SELECT max(version) AS n FROM queuebox_schema_history").await, 14);
        world.start().await;
        let id = world.db.insert(OutboxRow::new("order", 1)).await;
        world.db.wait_outbox(&id, "sent").await;
        world.finish().await;
    }

    /// Several at once: one migrates, the others wait and find nothing to do.
    async fn concurrent_migrators_wait(kind: Kind) {
        let world = World::on(kind).await;
        let folder = world.write_manifests(1, 2);
        let one = async || {
            let (status, out, log) = world.program(&["migrate", "-f", folder.to_str().unwrap()]).run(PATIENCE).await;
            (status, format!("{out}{log}"))
        };
        let all = futures::future::join_all((0..4).map(|_| one())).await;
        for (status, said) in &all {
            assert_eq!(status.code(), Some(0), "{said}");
        }
        let applied = all.iter().filter(|(_, said)| said.lines().any(|line| line.starts_with("Applied"))).count();
        assert_eq!(applied, 1, "{all:?}");
        assert_eq!(world.db.count("SELECT count(*) AS n FROM queuebox_schema_history").await, 1);
        world.finish().await;
    }

    on_every_database!(exit_codes_and_baseline, concurrent_migrators_wait);

    /// A worker whose role owns nothing works with the grants that are printed.
    #[tokio::test]
    async fn another_role_on_postgres() {
        let server = testkit::postgres().await;
        let name = server.fresh_database_name().await;
        let folder = tempfile::Builder::new().prefix("queuebox-world-").tempdir().unwrap();
        let owner = World::with(Db::postgres(server.url_of(&name)).await, folder).await;
        let role = format!("worker_{}", uuid::Uuid::new_v4().simple());
        owner.db.execute(&format!("CREATE ROLE {role} LOGIN PASSWORD 'w'")).await;
        owner.migrate().await;
        let (status, grants) = migrate(&owner, &["--print-grants", &role]).await;
        assert!(status.success(), "{grants}");
        for grant in grants.lines().filter(|line| line.starts_with("GRANT")) {
            owner.db.execute(grant).await;
        }
        let url = server.url_of(&name);
        let (head, tail) = (url.find("://").unwrap() + 3, url.find('@').unwrap());
        let world = owner.env("DATABASE_URL", &format!("{}{role}:w{}", &url[..head], &url[tail..]));
        let world = world.source("hooks", json!({}));
        let worker = world.start().await;
        worker.post("hooks", r#"{"id":1}"#).await.accepted();
        world.db.insert(OutboxRow::new("order", 1)).await;
        world.db.wait_states("outbox", &[("sent", 2)]).await;
        let used = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND usename = '";
        assert!(world.db.count(&format!("{used}{role}'")).await > 0, "it worked with the owner's role");
        worker.process.terminate(PATIENCE).await;
        world.db.execute(&format!("DROP OWNED BY {role}; DROP ROLE {role}")).await;
        world.finish().await;
    }
}

async fn classic_history_is_adopted(kind: Kind) {
    let world = World::on(kind).await;
    let db = &world.db;
    for sql in [testkit::classic_tables(0, 11), testkit::classic_history(11)].concat() {
        db.execute(&sql).await;
    }
    let waiting = db.insert(OutboxRow::new("order", 1).key("k")).await;
    let before = db.rows("SELECT * FROM flyway_schema_history ORDER BY installed_rank").await;
    // No baseline is asked for: a start takes it over and serves what was waiting.
    world.start().await;
    db.wait_outbox(&waiting, "sent").await;
    let rows = db.rows("SELECT version, checksum FROM queuebox_schema_history ORDER BY version").await;
    let versions: Vec<i64> = rows.iter().map(|row| number(row, "version")).collect();
    assert_eq!(versions.iter().max(), Some(&14));
    assert!(rows.iter().filter(|row| number(row, "version") <= 11).all(|row| text(row, "checksum").is_empty()));
    assert_eq!(db.rows("SELECT * FROM flyway_schema_history ORDER BY installed_rank").await, before);
    world.finish().await;
}

on_every_database!(every_column_has_another_name, missing_inbox_headers_column, missing_outbox_sequence_column);
on_postgres!(classic_history_is_adopted);

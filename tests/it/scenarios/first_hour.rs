//! Section T: what somebody meets in the first hour. Every error says what to do; nothing is destroyed, and nothing is silent.

use queuebox_testkit::{self as testkit, Answer, Process};
use serde_json::json;

use super::start::refused;
use crate::support::{Db, Kind, OutboxRow, PATIENCE, Worker, World, on_every_database};

/// Words of the command line that are wrong in a usual way: exit 2, or 1 where the words were right, and what to write.
#[tokio::test]
async fn wrong_words_say_the_right_ones() {
    let world = World::on(Kind::Sqlite).await;
    let worker = world.start().await;
    let manifests = world.write_manifests(worker.http, worker.management);
    let f = manifests.to_str().unwrap();
    let bare = format!("127.0.0.1:{}", worker.management);
    let with_scheme = format!("write http://{bare}");
    let data_port = worker.url("");
    let folder = world.folder().to_str().unwrap();
    type Line<'a> = (&'a [&'a str], i32, &'a [&'a str]);
    let lines: [Line<'_>; 18] = [
        (&["run", "shop.yaml"], 2, &["-f shop.yaml"]),
        (&["check", f], 2, &["-f "]),
        (&["check", "-f", f, "--log", "inof"], 2, &["\"inof\"", "error, warn, info"]),
        (&["check", "-f", f, "--log", "queuebox_engine=all"], 2, &["\"all\"", "error, warn, info"]),
        (&["status", "--url", &bare], 2, &[&with_scheme]),
        (&["explain", "--url", &bare], 2, &[&with_scheme]),
        (&["tail", "--url", &bare], 2, &[&with_scheme]),
        (&["probe", &bare], 2, &[&with_scheme]),
        (&["status", "--url", &data_port], 1, &["managementPort", "not the data port"]),
        (&["tail", "--url", &data_port], 1, &["managementPort"]),
        (&["dead", "list", "-f", f, "--source", "payments"], 2, &["--source goes with --table inbox"]),
        (&["dead", "list", "-f", f, "--table", "inbox", "--topic", "order"], 2, &["--topic goes with --table outbox"]),
        (&["dead", "requeue", "-f", f, "--topic", "a", "--state", "sent"], 2, &["--state"]),
        (&["dead", "discard", "-f", f, "--topic", "a", "--state", "sent"], 2, &["--state"]),
        (&["convert"], 2, &["queuebox convert queuebox.yml", "QUEUEBOX_CONFIG_FILE"]),
        (&["convert", folder], 2, &["is a folder"]),
        (&["lab", "dual-write", "--database-url", "foo"], 1, &["--database-url", "sqlite:PATH"]),
        (&["lab", "dual-write", "--database-url", "postgres://127.0.0.1:1/x"], 1, &["--database-url", "refused"]),
    ];
    for (arguments, code, parts) in lines {
        let (status, out, log) = world.program(arguments).run(PATIENCE).await;
        let said = format!("{out}{log}");
        assert_eq!(status.code(), Some(code), "{arguments:?}: {said}");
        for part in parts {
            assert!(said.contains(part), "{arguments:?}: {part}\n{said}");
        }
        assert!(said.matches("refused").count() < 2, "{arguments:?} says it twice: {said}");
    }
    assert!(!world.folder().join("foo").exists());

    // Manifests that are right, and of which nothing would run.
    let destination = "apiVersion: queuebox.io/v1alpha1\nkind: Destination\nmetadata: {name: d}\nspec: {http: {url: \"http://h/\"}}\n";
    for (name, text) in [("empty.yaml", ""), ("comments.yaml", "# nothing yet\n"), ("destination.yaml", destination)] {
        let file = world.folder().join(name);
        std::fs::write(&file, text).unwrap();
        for more in [&[][..], &["--output", "json"]] {
            let check = [&["check", "-f", file.to_str().unwrap()], more].concat();
            let (status, out, log) = world.program(&check).run(PATIENCE).await;
            assert_eq!(status.code(), Some(1), "{name}: {out}{log}");
            assert!(log.contains("there is no Relay") && !out.contains("No problems"), "{name}: {out}{log}");
        }
    }
    let (status, out, log) = world.program(&["check", "-f", f, "--relay", "zzz"]).run(PATIENCE).await;
    assert_eq!(status.code(), Some(1), "{out}{log}");
    assert!(log.contains("no Relay called \"zzz\"; there is shop"), "{log}");
    world.finish().await;
}

/// Whoever has read enough ends the pipe: that is no failure, and no panic.
#[tokio::test]
async fn a_reader_that_leaves_is_no_failure() {
    let program = testkit::queuebox_binary();
    let pipe = format!("set -o pipefail; '{}' generate crds | head -1", program.display());
    let (status, out, log) = Process::program("/bin/bash").args(["-c", &pipe]).run(PATIENCE).await;
    assert!(status.success() && log.is_empty(), "{status}: {log}");
    assert_eq!(out.lines().count(), 1, "{out}");
}

/// Commands that only look make no database: an empty file would hide that they look in the wrong place.
#[tokio::test]
async fn looking_makes_no_file() {
    let world = World::on(Kind::Sqlite).await;
    let world = world.relay(json!({ "database": { "sqlite": { "path": "elsewhere.db" } } }));
    let folder = world.write_manifests(1, 2);
    let f = folder.to_str().unwrap();
    let nil = uuid::Uuid::nil().to_string();
    let commands: [&[&str]; 7] = [
        &["dead", "list", "-f", f],
        &["dead", "show", "-f", f, &nil],
        &["dead", "requeue", "-f", f, "--topic", "a"],
        &["dead", "discard", "-f", f, "--topic", "a"],
        &["replay", "-f", f, "--code", "attempts"],
        &["migrate", "-f", f, "--print-grants", "worker"],
        &["doctor", "-f", f],
    ];
    for command in commands {
        let (status, out, log) = world.program(command).run(PATIENCE).await;
        let said = format!("{out}{log}");
        assert_eq!(status.code(), Some(1), "{command:?}: {said}");
        // A table breaks its lines.
        let words = said.split_whitespace().filter(|word| *word != "|").collect::<Vec<_>>().join(" ");
        for part in ["elsewhere.db does not exist", "relative", "queuebox run"] {
            assert!(words.contains(part) || said.contains(part), "{command:?}: {part}\n{said}");
        }
        assert!(!world.folder().join("elsewhere.db").exists(), "{command:?} made it");
    }
    world.finish().await;
}

/// What a command prints for somebody to run is whole.
#[tokio::test]
async fn statements_are_never_cut() {
    let world = World::on(Kind::Postgres).await;
    let outbox = "CREATE TABLE outbox (topic TEXT, payload JSONB, state TEXT)";
    world.db.execute(outbox).await;
    world
        .db
        .execute("CREATE TABLE inbox (id UUID, source TEXT, idempotency_key TEXT, payload JSONB, state TEXT)")
        .await;
    let world = world.relay(json!({ "database": { "migrate": "Off" } }));
    let folder = world.write_manifests(testkit::free_port(), testkit::free_port());
    let (status, out, log) = world.program(&["run", "-f", folder.to_str().unwrap()]).run(PATIENCE).await;
    let said = format!("{out}{log}");
    assert_eq!(status.code(), Some(1), "{said}");
    assert!(said.chars().count() > 2_000 && !said.contains("truncated"), "{said}");
    assert!(said.contains("claim_token"), "{said}");
    world.finish().await;
}

/// What `explain` or `status` says, asked until it says `part`.
async fn said(world: &World, worker: &Worker, command: &str, part: &str) -> String {
    let url = worker.management_url("");
    testkit::eventually_ok(&format!("{command} says {part:?}"), PATIENCE, || async {
        let (_, out, log) = world.program(&[command, "--url", &url]).run(PATIENCE).await;
        let said = format!("{out}{log}");
        if said.contains(part) { Ok(said) } else { Err(said) }
    })
    .await
}

/// Attempts that all fail, long before the breaker opens, or where it never does.
async fn failing_attempts_are_said(kind: Kind) {
    let world = World::on(kind).await.destination("receiver", json!({ "breaker": null }));
    world.receiver.answer_always(Answer::status(404));
    let worker = world.start().await;
    let id = world.db.insert(OutboxRow::new("order", 1).max_attempts(1_000)).await;
    let explained = said(&world, &worker, "explain", "HTTP 404").await;
    assert!(
        explained.contains("Destination receiver: the last ") && explained.contains("It is tried again"),
        "{explained}"
    );
    assert!(!explained.contains("Nothing keeps it"), "{explained}");
    let status = said(&world, &worker, "status", "Failing").await;
    assert!(status.contains("failed in a row"), "{status}");
    // A figure that is none is not printed, and the others say how old they are.
    assert!(!status.contains("since 0.0 s") && status.contains("counted"), "{status}");
    world.receiver.answer_always(Answer::ok());
    world.db.wait_outbox(&id, "sent").await;
    let status = said(&world, &worker, "status", " Up ").await;
    assert!(!status.contains("Failing"), "{status}");
    said(&world, &worker, "explain", "Nothing keeps it from delivering").await;
    world.finish().await;
}

/// A secret that is not there ends a local start, with everything that is missing at once.
#[tokio::test]
async fn a_missing_secret_ends_the_start() {
    let auth = json!({ "bearer": { "tokenFrom": { "env": "QB_TEST_NOT_SET" } } });
    let github = json!({ "github": { "secretFrom": { "file": "/nowhere/secret" } } });
    let keyed = json!({ "bearer": { "tokenFrom": { "secretKeyRef": { "name": "shop", "key": "token" } } } });
    let world = World::on(Kind::Sqlite)
        .await
        .destination("receiver", json!({ "http": { "auth": auth } }))
        .source("hooks", json!({ "http": { "auth": github } }))
        .source("keyed", json!({ "http": { "auth": keyed } }));
    let said = refused(&world).await;
    for part in [
        "Destination/receiver: spec.http.auth.bearer.tokenFrom: cannot read env QB_TEST_NOT_SET, the variable is not set",
        "Source/hooks: spec.http.auth.github.secretFrom: cannot read file /nowhere/secret",
        "Source/keyed: spec.http.auth.bearer.tokenFrom: cannot read secretKeyRef shop/token, no Secret manifest",
    ] {
        assert!(said.contains(part), "{part}\n{said}");
    }
    world.finish().await;
}

/// A connection that does not come about: to where, and the field or the statement that mends it.
#[tokio::test]
async fn connection_errors_say_where_and_what() {
    let server = testkit::postgres().await;
    let name = server.fresh_database_name().await;
    let folder = tempfile::Builder::new().prefix("queuebox-world-").tempdir().unwrap();
    let mut world = World::with(Db::postgres(server.url_of(&name)).await, folder).await;
    let parts = json!({ "urlFrom": null, "host": "127.0.0.1", "port": server.port(), "database": name,
        "username": server.user(), "passwordFrom": { "env": "SHOP_PASSWORD" } });
    world = world.relay(json!({ "database": { "connectTimeout": "2s", "startupTimeout": "2s", "postgres": parts } }));
    let place = format!("127.0.0.1:{}/{name}", server.port());
    let (free, absent) = (testkit::free_port(), format!("{name}_absent"));
    let somebody = format!("{name}_nobody");
    let cases = [
        (json!({}), None, vec!["Relay.spec.database.postgres.passwordFrom: cannot read env SHOP_PASSWORD".to_owned()]),
        (
            json!({ "port": free }),
            Some("x"),
            vec![format!("127.0.0.1:{free}/{name}"), "postgres.host and port".to_owned()],
        ),
        (
            json!({ "port": server.port(), "database": absent }),
            Some(server.password()),
            vec![format!("CREATE DATABASE \"{absent}\""), "postgres.database".to_owned()],
        ),
        (
            json!({ "database": name, "username": somebody }),
            Some("wrong"),
            vec![place, format!("\"{somebody}\""), "postgres.username".to_owned()],
        ),
    ];
    for (patch, password, parts) in cases {
        world = world.relay(json!({ "database": { "postgres": patch } }));
        if let Some(password) = password {
            world = world.env("SHOP_PASSWORD", password);
        }
        let manifests = world.write_manifests(1, 2);
        let (status, out, log) = world.program(&["migrate", "-f", manifests.to_str().unwrap()]).run(PATIENCE).await;
        let said = format!("{out}{log}");
        assert_eq!(status.code(), Some(1), "{said}");
        for part in parts {
            assert!(said.contains(&part), "{part}\n{said}");
        }
    }
    world.finish().await;
}

/// While the database is away, that is what is said first, with how long.
#[tokio::test]
async fn a_database_that_is_away_is_said_first() {
    let (world, proxy) = super::start::behind_a_proxy().await;
    let worker = world.start().await;
    proxy.set(testkit::ProxyMode::Refuse);
    proxy.cut();
    let explained = said(&world, &worker, "explain", "does not answer, or refuses, since").await;
    assert!(explained.starts_with("1. Database postgres"), "{explained}");
    let status = said(&world, &worker, "status", "does not answer, or refuses, since").await;
    assert!(status.starts_with("Database postgres"), "{status}");
    proxy.set(testkit::ProxyMode::Pass);
    said(&world, &worker, "explain", "Nothing keeps it from delivering").await;
    worker.process.terminate(PATIENCE).await;
    let log = worker.process.output();
    assert!(!log.contains("before_acquire") && !log.contains("acquired connection"), "{log}");
    world.finish().await;
}

/// Somebody's own table of that name is told as such; neither a baseline nor statements that would change it.
async fn a_table_of_somebody_else_is_left_alone(kind: Kind) {
    let world = World::on(kind).await;
    world.db.execute("CREATE TABLE outbox (id INTEGER, body VARCHAR(20))").await;
    let refused = refused(&world).await;
    for part in ["outbox is not QueueBox's", "body, id", "outboxTableName"] {
        assert!(refused.contains(part), "{part}\n{refused}");
    }
    assert!(!refused.contains("--baseline") && !refused.contains("ALTER TABLE"), "{refused}");
    let folder = world.write_manifests(1, 2);
    let doctor = world.program(&["doctor", "-f", folder.to_str().unwrap(), "--output", "json"]);
    let (status, out, log) = doctor.run(PATIENCE).await;
    assert_eq!(status.code(), Some(1), "{out}{log}");
    assert!(out.contains("is not QueueBox's"), "{out}{log}");
    let columns = if kind == Kind::Sqlite {
        "SELECT count(*) AS n FROM pragma_table_info('outbox')"
    } else {
        "SELECT count(*) AS n FROM information_schema.columns WHERE table_name = 'outbox'"
    };
    assert_eq!(world.db.count(columns).await, 2, "the table is as it was");
    world.finish().await;
}

/// A state that is none is refused by new tables, and told where older ones took it.
async fn a_state_that_is_none_is_told(kind: Kind) {
    let world = World::on(kind).await;
    world.migrate().await;
    let insert = "INSERT INTO outbox (topic, payload, state) VALUES ('order', '{}', 'NEW')";
    assert!(world.db.try_execute(insert).await.is_err());
    let without = match kind {
        Kind::Sqlite => "PRAGMA ignore_check_constraints = ON",
        Kind::Postgres => "ALTER TABLE outbox DROP CONSTRAINT outbox_state_check",
    };
    world.db.execute(&format!("{without}; {insert}")).await;
    let folder = world.write_manifests(1, 2);
    let doctor = world.program(&["doctor", "-f", folder.to_str().unwrap(), "--output", "json"]);
    let (status, out, log) = doctor.run(PATIENCE).await;
    // SQLite's own look at the file finds the check that was passed over.
    assert_eq!(status.code(), Some(i32::from(kind == Kind::Sqlite)), "{out}{log}");
    assert!(out.contains("1 row(s) of outbox have the state \\\"NEW\\\""), "{out}{log}");
    world.finish().await;
}

/// A history that asks for a newer release, and a role that may not make tables.
async fn doctor_says_what_mends_a_schema(kind: Kind) {
    let world = World::on(kind).await;
    let doctor = async |world: &World| {
        let folder = world.write_manifests(1, 2);
        let doctor = world.program(&["doctor", "-f", folder.to_str().unwrap(), "--output", "json"]);
        let (status, out, log) = doctor.run(PATIENCE).await;
        assert_eq!(status.code(), Some(1), "{out}{log}");
        out
    };
    if kind == Kind::Postgres {
        let role = format!("newcomer_{}", uuid::Uuid::new_v4().simple());
        world
            .db
            .execute(&format!("REVOKE CREATE ON SCHEMA public FROM PUBLIC; CREATE ROLE {role} LOGIN PASSWORD 'w'"))
            .await;
        let url = world.db.address.clone();
        let (head, tail) = (url.find("://").unwrap() + 3, url.find('@').unwrap());
        let world = world.env("DATABASE_URL", &format!("{}{role}:w{}", &url[..head], &url[tail..]));
        let out = doctor(&world).await;
        let grant = format!("GRANT USAGE, CREATE ON SCHEMA \\\"public\\\" TO \\\"{role}\\\"");
        assert!(out.contains(&grant) && !out.contains("see the statements"), "{out}");
        let world = world.env("DATABASE_URL", &url);
        newer(&world, doctor).await;
        world.db.execute(&format!("DROP OWNED BY {role}; DROP ROLE {role}")).await;
        world.finish().await;
    } else {
        newer(&world, doctor).await;
        world.finish().await;
    }
}

async fn newer(world: &World, doctor: impl AsyncFn(&World) -> String) {
    world.migrate().await;
    world.db.execute("UPDATE queuebox_schema_history SET min_reader = 99").await;
    let out = doctor(world).await;
    assert!(out.contains("knows schema version 99") && out.contains("run a release of QueueBox"), "{out}");
}

on_every_database!(
    failing_attempts_are_said,
    a_table_of_somebody_else_is_left_alone,
    a_state_that_is_none_is_told,
    doctor_says_what_mends_a_schema
);

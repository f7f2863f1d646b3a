//! The classic file: the published fragment, a full one, and its variables.

use queuebox_api::{
    Report, Target, check, checked,
    classic::{self, Classic, Variables},
};

fn variables(pairs: &[(&str, &str)]) -> Variables {
    Variables::new(pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())))
}

fn read(text: &str, pairs: &[(&str, &str)]) -> Classic {
    classic::read("queuebox.yml", text, &variables(pairs))
}

fn report(classic: &Classic) -> Report {
    check(&classic.manifests, Target::Local)
}

fn problems(classic: &Classic) -> Vec<String> {
    report(classic).problems.iter().map(ToString::to_string).collect()
}

/// As published: a fragment of a file.
const FRAGMENT: &str = "
# fragment
sources:
  orders:
    type: http
    path: /orders
    idempotencyKeyPath: $.id
    consumption: pull   # default: push
";

#[test]
fn the_published_fragment_starts_unchanged() {
    let classic = read(FRAGMENT, &[]);
    let relay = report(&classic).into_relay(None).unwrap();
    assert_eq!(relay.database.server.kind(), "sqlite");
    assert_eq!(relay.http.management_port, relay.http.port);
    let source = &relay.sources[0];
    assert_eq!((source.name.as_str(), source.consumption.as_str()), ("orders", "pull"));
    assert_eq!(source.idempotency_key.paths, ["$.id"]);
}

const FULL: &str = r#"
server: {http_port: 8088, management-port: 9099, shutdownTimeoutMs: 20000}
database:
  type: postgresql
  host: db
  database: shop
  username: app
  password: ${DB_PASSWORD}
  schema: queue
  poolSize: 8
  migrate: false
  outboxTableName: outbox_messages
  columnMapping: {outbox: {lastError: problem}}
outbox:
  pollIntervalMs: 250
  batchSize: 100
  concurrency: 16
  maxAttempts: 7
  retryBaseDelayMs: 2000
  retryMaxDelayMs: 120000
  claimTimeoutMs: 45000
  capture: {enabled: true, mode: cdc, slotName: s, publicationName: p, connection: {host: direct}}
inbox: {basePath: /hooks, maxBodyBytes: 2097152, relay: {pollIntervalMs: 500}}
http: {blockPrivateAddresses: true, maxErrorBodyBytes: 4096}
admin: {enabled: true, auth: {type: bearer, token: canary-admin}}
retention:
  cleanupIntervalMs: 60000
  outbox: {enabled: true, policy: age, maxAge: 7d, maxCount: 5}
  inbox: {enabled: false, maxAge: 30d}
routes:
  - {topicPattern: order.*, destination: warehouse}
  - topicPattern: "**"
    destinations: [events, bus]
    routingKeyTemplate: "{{ payload.region }}"
    routingKeyMissingFieldDefault: none
    transform: {expression: "{ 'a': b }", timeoutMs: 50, onError: skip}
destinations:
  warehouse:
    type: http
    baseUrl: https://wh.example/
    path: /events
    timeoutMs: 5000
    headers: {X-Team: 5}
    auth: {type: oauth2, clientId: c, clientSecret: canary-oauth, tokenUrl: "https://id.example/token"}
  events: {type: KAFKA, bootstrapServers: "k1:9092", topic: "e.{{ topic }}", securityProtocol: sasl_ssl, sasl: {mechanism: PLAIN, username: u, password: canary-kafka}}
  bus: {type: rabbitmq, url: "amqp://u:canary-rabbit@mq/", exchangeFrom: aggregate_type}
sources:
  orderEvents: {type: kafka, bootstrap_servers: "k1:9092", groupId: g, topics: "a, b", maxPollRecords: 10}
  stripe:
    path: /stripe
    idempotencyKeyPath: $.id
    topic: "stripe.{{ source }}"
    initialDelay: 5s
    auth: {type: hmac, secret: "file:/run/secrets/hmac", algorithm: hmacsha512, timestampHeader: X-At, signaturePayloadFormat: timestamp-dot-body}
"#;

#[test]
fn a_full_file_becomes_a_relay() {
    let classic = read(
        FULL,
        &[
            ("DB_PASSWORD", "canary-db"),
            ("QUEUEBOX_OUTBOX_BATCHSIZE", "50"),
            ("QUEUEBOX_SERVICE_HOST", "10.0.0.1"),
            ("QUEUEBOX_DATABASE_SERVICE_PORT", "1"),
        ],
    );
    assert_eq!(problems(&classic), [""; 0]);
    let warnings: Vec<String> = classic.manifests.warnings.iter().map(ToString::to_string).collect();
    assert_eq!(
        warnings,
        [
            "queuebox.yml: outbox.capture: slotName, publicationName are not used any more: idle workers are woken by a trigger",
        ]
    );
    let relay = report(&classic).into_relay(None).unwrap();
    insta::assert_debug_snapshot!("classic_full", relay);
}

/// contract 14.7: a file that names every column anew, and a lease of the forward as it was.
#[test]
fn renamed_columns_and_the_lease_of_the_forward_are_taken() {
    let classic = read(
        "database: {migrate: false, columnMapping: {outbox: {maxAttempts: a, scheduled_at: b}, inbox: {IdempotencyKey: c}}}\n\
         inbox: {relay: {claimTimeoutMs: 500}}\n",
        &[],
    );
    assert_eq!(problems(&classic), [""; 0]);
    let report = report(&classic);
    assert!(
        report.warnings.iter().any(|warning| warning.to_string().contains("has no effect")),
        "{:?}",
        report.warnings
    );
    let database = report.into_relay(None).unwrap().database;
    let pairs = |columns: &std::collections::BTreeMap<String, String>| {
        columns.iter().map(|(column, name)| format!("{column} {name}")).collect::<Vec<_>>()
    };
    assert_eq!(pairs(&database.outbox_columns), ["max_attempts a", "scheduled_at b"]);
    assert_eq!(pairs(&database.inbox_columns), ["idempotency_key c"]);
}

/// conformance 134, the part without a database
#[test]
fn converted_manifests_say_the_same_and_no_secret() {
    let mut classic = read(FULL, &[("DB_PASSWORD", "canary-db")]);
    let text = classic.write();
    assert!(!text.contains("canary"), "{text}");
    assert!(!format!("{classic:?}").contains("canary"));
    insta::assert_snapshot!("converted", text);
    insta::assert_debug_snapshot!("converted_notes", (&classic.keys, &classic.notes));
    // Written manifests give the same checked values, but for the names that Kubernetes refuses.
    let mut written = queuebox_api::Manifests::default();
    written.add_text("converted.yaml", &text);
    let from_file = report(&classic).into_relay(None).unwrap();
    let from_manifests = check(&written, Target::Local).into_relay(None).unwrap();
    assert_eq!(from_file.outbox, from_manifests.outbox);
    assert_eq!(from_file.routes, from_manifests.routes);
    assert_eq!(from_file.destinations, from_manifests.destinations);
    assert_eq!(from_file.database, from_manifests.database);
    assert_eq!(
        from_manifests.sources.iter().map(|it| it.name.as_str()).collect::<Vec<_>>(),
        ["order-events", "stripe"]
    );
}

#[test]
fn unknown_keys_and_variables_are_errors() {
    let classic = read(
        "outbox: {batchSzie: 5, pollIntervalMs: fast}\nsorces: {}\ndestinations: {a: {baseUrl: x, queueName: q}, b: {}, c: {type: ftp}}\nserver:\n  httpPort: ${NOT_SET}\n",
        &[
            ("QUEUEBOX_OUTBOX_CONCURENCY", "5"),
            ("QUEUEBOX_PORT", "tcp://10.0.0.1:80"),
            ("QUEUEBOX_INBOX_MAXBODYBYTES", "many"),
        ],
    );
    insta::assert_snapshot!("classic_problems", problems(&classic).join("\n"));
}

#[test]
fn a_database_url_is_taken_apart_or_kept_secret() {
    let login = |text: &str| {
        let classic = read(text, &[]);
        assert_eq!(problems(&classic), [""; 0], "{text}");
        let secrets: Vec<String> =
            classic.manifests.secrets.secrets.values().map(|it| it.expose().to_owned()).collect();
        let relay = report(&classic).into_relay(None).unwrap();
        (relay.database.server, secrets)
    };
    let (server, secrets) = login("database: {url: \"jdbc:postgresql://db:5433/shop\", username: u, password: p}");
    let checked::DatabaseServer::Postgres(server) = server else { panic!("{server:?}") };
    let checked::DatabaseLogin::Parts { host, port, database, username, .. } = server.login else {
        panic!("{server:?}")
    };
    assert_eq!((host.as_str(), port, database.as_str(), username.as_str()), ("db", 5433, "shop", "u"));
    assert_eq!(secrets, ["p"]);
    let (server, secrets) = login("database: {connectionUrl: \"postgres://u:p@db/shop\"}");
    assert!(matches!(
        server,
        checked::DatabaseServer::Postgres(checked::Server { login: checked::DatabaseLogin::Url(_), .. })
    ));
    assert_eq!(secrets, ["postgres://u:p@db/shop"]);
    let (_, secrets) =
        login("database: {jdbcUrl: \"jdbc:postgresql://db/shop?sslmode=require\", username: u, password: \"p@/\"}");
    assert_eq!(secrets, ["postgresql://u:p%40%2F@db/shop?sslmode=require"]);
    let (server, _) = login("database: {type: sqlite, path: /data/q.db}");
    assert!(matches!(server, checked::DatabaseServer::Sqlite { path, .. } if path == "/data/q.db"));
    let (server, _) = login("database: {poolSize: 4}");
    assert_eq!(server.kind(), "sqlite");
}

#[test]
fn the_file_is_looked_for_in_three_places() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("queuebox.yml");
    std::fs::write(&path, FRAGMENT).unwrap();
    assert_eq!(classic::find_file(Some(&path), Some("/nowhere")), Ok(path.clone()));
    assert_eq!(classic::find_file(None, path.to_str()), Ok(path));
    let missing = classic::find_file(None, Some("/nowhere/q.yml")).unwrap_err();
    assert_eq!(missing.to_string(), "/nowhere/q.yml: there is no such file");
    if !std::path::Path::new(classic::DEFAULT_FILE).exists() {
        let none = classic::find_file(None, None).unwrap_err().to_string();
        assert!(
            none.contains("--config") && none.contains("QUEUEBOX_CONFIG_FILE") && none.contains(classic::DEFAULT_FILE),
            "{none}"
        );
    }
}

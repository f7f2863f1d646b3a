//! Good manifests give values with every default; bad ones give all their problems at once.

use queuebox_api::{Manifests, Report, Target, check};

fn report(text: &str, target: Target) -> Report {
    let mut manifests = Manifests::default();
    manifests.add_text("m.yaml", text);
    check(&manifests, target)
}

fn problems(text: &str) -> Vec<String> {
    report(text, Target::Local).problems.iter().map(ToString::to_string).collect()
}

/// The sample of the design, all of it.
const SAMPLE: &str = r#"
apiVersion: queuebox.io/v1alpha1
kind: Relay
metadata: {name: shop}
spec:
  database:
    postgres:
      host: shop-db.data.svc
      database: shop
      username: queuebox
      passwordFrom: {secretKeyRef: {name: shop-db, key: password}}
      tls: {mode: VerifyFull, caFrom: {configMapKeyRef: {name: shop-db-ca, key: ca.crt}}}
    migrate: Auto
  routes:
    - topics: ["order.*"]
      destinations: [warehouse]
    - topics: ["**"]
      destinations: [audit-log, analytics]
  outbox: {maxAttempts: 5, backoff: {initial: 1s, max: 60s}, claimTimeout: 30s, maxInFlight: 512}
  retention: {outbox: {maxAge: 7d}, inbox: {maxAge: 30d}}
  autoscaling: {minReplicas: 1, maxReplicas: 10, targetPending: 5000, targetOldestAge: 30s}
---
apiVersion: queuebox.io/v1alpha1
kind: Destination
metadata: {name: warehouse}
spec:
  http: {url: "https://warehouse.example/events", timeout: 10s, auth: {bearer: {tokenFrom: {secretKeyRef: {name: wh, key: token}}}}}
  limits: {maxInFlight: 64, requestsPerSecond: 500}
  retryAfterMax: 5m
---
apiVersion: queuebox.io/v1alpha1
kind: Destination
metadata: {name: audit-log}
spec:
  kafka: {bootstrapServers: "k1:9092,k2:9092", topic: "audit.{{ topic }}"}
---
apiVersion: queuebox.io/v1alpha1
kind: Destination
metadata: {name: analytics}
spec:
  rabbitmq: {url: "amqp://mq:5672/", username: app, passwordFrom: {env: MQ_PASSWORD}, exchangeFrom: aggregate_type}
---
apiVersion: queuebox.io/v1alpha1
kind: Source
metadata: {name: stripe}
spec:
  relayRef: {name: shop}
  consumption: pull
  idempotencyKeyPath: $.id
  http: {path: /stripe, auth: {stripe: {secretFrom: {secretKeyRef: {name: stripe, key: whsec}}}}}
"#;

#[test]
fn the_sample_is_valid() {
    let report = report(SAMPLE, Target::Local);
    assert!(report.warnings.is_empty(), "{:?}", report.warnings);
    let relay = report.into_relay(None).unwrap();
    insta::assert_debug_snapshot!("sample", relay);
}

fn manifest(kind: &str, name: &str, spec: &str) -> String {
    format!("apiVersion: queuebox.io/v1alpha1\nkind: {kind}\nmetadata: {{name: {name}}}\nspec: {spec}\n")
}

/// One Relay `shop`, one Destination `out`, and the rest.
fn around(rest: &[(&str, &str, &str)]) -> String {
    let has = |kind: &str, name: &str| rest.iter().any(|(k, n, _)| *k == kind && *n == name);
    let mut all = Vec::new();
    if !has("Relay", "shop") {
        all.push(manifest("Relay", "shop", "{routes: [{topics: [\"**\"], destinations: [out]}]}"));
    }
    if !has("Destination", "out") {
        all.push(manifest("Destination", "out", "{http: {url: \"https://out.example/\"}}"));
    }
    all.extend(rest.iter().map(|(kind, name, spec)| manifest(kind, name, spec)));
    all.join("---\n")
}

/// What is wrong with one object, without file and object in front.
fn wrong(kind: &str, spec: &str) -> Vec<String> {
    let name = match kind {
        "Relay" => "shop",
        "Destination" => "out",
        _ => "in",
    };
    let prefix = format!("m.yaml: {kind}/{name}: ");
    problems(&around(&[(kind, name, spec)]))
        .into_iter()
        .map(|problem| problem.strip_prefix(&prefix).map(str::to_owned).unwrap_or(problem))
        .collect()
}

fn assert_wrong(kind: &str, cases: &[(&str, &[&str])]) {
    for (spec, expected) in cases {
        assert_eq!(wrong(kind, spec), *expected, "{spec}");
    }
}

const SECRET: &str = "{secretKeyRef: {name: s, key: k}}";

#[test]
fn sources_that_are_wrong() {
    let head = "relayRef: {name: shop}";
    let http = "idempotencyKeyPath: $.id, topic: t";
    let case = |rest: &str| format!("{{{head}, {rest}}}");
    let http_case = |rest: &str| format!("{{{head}, {http}, {rest}}}");
    let rabbit = |rest: &str| case(&format!("rabbitmq: {{queueName: q, url: \"amqp://mq/\"{rest}}}"));
    let kafka = |rest: &str| case(&format!("kafka: {{bootstrapServers: \"k:9092\", groupId: g, topics: [t]{rest}}}"));
    let nats = |rest: &str| case(&format!("nats: {{servers: \"n:4222\", stream: s, durable: d{rest}}}"));
    let cases: Vec<(String, Vec<&str>)> = vec![
        (case("http: {path: /a}, idempotencyKeyPath: $.id, eventTypePath: $.type"), vec![]),
        (rabbit(""), vec![]),
        (kafka(""), vec![]),
        (nats(""), vec![]),
        ("{}".into(), vec!["spec.relayRef: is missing", "spec: give exactly one of http, rabbitmq, kafka, nats"]),
        (
            http_case("http: {path: /a}, nats: {servers: \"n:4222\", stream: s, durable: d}"),
            vec!["spec: give exactly one of http, rabbitmq, kafka, nats; there are http and nats"],
        ),
        (
            "{relayRef: {name: shp}, idempotencyKeyPath: $.id, topic: t, http: {path: /a}}".into(),
            vec!["spec.relayRef.name: there is no Relay called \"shp\" in namespace default (did you mean shop?)"],
        ),
        (
            case("http: {path: /a}"),
            vec![
                "spec: the idempotency key has no origin (give idempotencyKeyPath (such as $.id), idempotencyKeyExpression or \
             http.idempotencyKeyHeader)",
                "spec.topic: is {{ eventType }} where nothing is said, and the event type has no origin (give eventTypePath, \
             eventTypeExpression or http.eventTypeHeader, or write a topic without eventType)",
            ],
        ),
        (case("http: {path: /a}, idempotencyKeyPath: $.id, consumption: pull"), vec![]),
        (
            http_case("http: {path: /café}"),
            vec![
                "spec.http.path: must be ASCII: senders percent-encode everything else, and a path is taken literally (write \
                 /caf%C3%A9)",
            ],
        ),
        (
            http_case("consumption: pull, http: {path: /a}"),
            vec!["spec.topic: a pull Source has no topic (leave it out, or write consumption: push)"],
        ),
        (
            http_case("consumption: Pull, http: {path: /a}"),
            vec!["spec.consumption: \"Pull\" is none of push, pull (did you mean pull?)"],
        ),
        (
            rabbit("").replace("rabbitmq", "topic: \"{{ eventType }}\", rabbitmq"),
            vec![
                "spec.topic: uses the event type, which has no origin (give eventTypePath, eventTypeExpression or \
             eventTypeFromHeader: true, or write a topic without eventType)",
            ],
        ),
        (rabbit(", eventTypeFromHeader: true").replace("rabbitmq", "topic: \"{{ eventType }}\", rabbitmq"), vec![]),
        (
            rabbit("").replace("rabbitmq", "topic: \"{{ topic }}\", rabbitmq"),
            vec!["spec.topic: unknown placeholder \"{{ topic }}\"; known here: source and eventType"],
        ),
        (http_case("http: {path: a}"), vec!["spec.http.path: \"a\" must begin with \"/\""]),
        (
            http_case("http: {path: \"/a/../b?c\"}"),
            vec![
                "spec.http.path: must not hold \"?\", \"#\" or blanks",
                "spec.http.path: must not hold empty, \".\" or \"..\" segments",
            ],
        ),
        (
            case("topic: t, idempotencyKeyPath: \"$..id\", http: {path: /a}"),
            vec![
                "spec.idempotencyKeyPath: \"$..id\" may name several values: use names and positions from 0 only, such as $.data.id \
             or $.items[0]",
            ],
        ),
        (
            case("topic: t, idempotencyKeyPath: [$.id, \"$[-1]\", \"$.a['b[-1]'][0]\", \"$.a[*]\"], http: {path: /a}"),
            vec![
                "spec.idempotencyKeyPath[1]: \"$[-1]\" may name several values: use names and positions from 0 only, such as \
             $.data.id or $.items[0]",
                "spec.idempotencyKeyPath[3]: \"$.a[*]\" may name several values: use names and positions from 0 only, such as \
             $.data.id or $.items[0]",
            ],
        ),
        (
            case("topic: t, idempotencyKeyPath: [], http: {path: /a}"),
            vec!["spec.idempotencyKeyPath: the list is empty"],
        ),
        (
            case("topic: t, idempotencyKeyPath: 5, http: {path: /a}"),
            vec!["spec.idempotencyKeyPath: expected a text or a list of texts"],
        ),
        (
            http_case("scheduledAtHeader: x-at, http: {path: /a}"),
            vec![
                "spec.scheduledAtHeader: needs initialDelay above zero (messages are put in order of publishing within that delay)",
            ],
        ),
        (
            http_case("scheduledAtPath: $.at, initialDelay: 0s, http: {path: /a}"),
            vec![
                "spec.scheduledAtPath: needs initialDelay above zero (messages are put in order of publishing within that delay)",
            ],
        ),
        (
            http_case("http: {path: /a, eventTypeHeader: authorization, aggregateIdHeader: \"a b\"}"),
            vec![
                "spec.http.eventTypeHeader: authorization is a secret header, which is neither stored nor read for this",
                "spec.http.aggregateIdHeader: \"a b\" is no header name",
            ],
        ),
        (
            http_case(&format!(
                "http: {{path: /a, eventTypeHeader: x-key, auth: {{apiKey: {{keyFrom: {SECRET}, headerName: X-Key}}}}}}"
            )),
            vec!["spec.http.eventTypeHeader: x-key is a secret header, which is neither stored nor read for this"],
        ),
        (
            http_case(&format!(
                "http: {{path: /a, auth: {{bearer: {{tokenFrom: {SECRET}}}, github: {{secretFrom: {SECRET}}}}}}}"
            )),
            vec![
                "spec.http.auth: give exactly one of bearer, apiKey, hmac, standardWebhooks, stripe, github; there are bearer and github",
            ],
        ),
        (
            http_case("http: {path: /a, auth: {}}"),
            vec!["spec.http.auth: give exactly one of bearer, apiKey, hmac, standardWebhooks, stripe, github"],
        ),
        (
            http_case("http: {path: /a, auth: {bearer: {token: canary}}}"),
            vec![
                "spec.http.auth.bearer.token - unknown field (secrets are given by reference: write tokenFrom with secretKeyRef, env or file)",
                "spec.http.auth.bearer.tokenFrom: is missing",
                "spec.http.auth.bearer.tokenFrom: give exactly one of secretKeyRef, env, file",
            ],
        ),
        (
            http_case("http: {path: /a, auth: {bearer: {tokenFrom: canary}}}"),
            vec![
                "spec.http.auth.bearer.tokenFrom: expected a block, found a text",
                "spec.http.auth.bearer.tokenFrom: give exactly one of secretKeyRef, env, file",
            ],
        ),
        (
            http_case("http: {path: /a, auth: {bearer: {tokenFrom: {env: A, file: /b}}}}"),
            vec![
                "spec.http.auth.bearer.tokenFrom: give exactly one of secretKeyRef, env, file; there are env and file",
            ],
        ),
        (
            http_case(&format!(
                "http: {{path: /a, auth: {{hmac: {{secretFrom: {SECRET}, signaturePayloadFormat: TIMESTAMP_DOT_BODY, algorithm: sha256}}}}}}"
            )),
            vec![
                "spec.http.auth.hmac.algorithm: \"sha256\" is none of HmacSHA256, HmacSHA512",
                "spec.http.auth.hmac.signaturePayloadFormat: TIMESTAMP_DOT_BODY needs timestampHeader",
            ],
        ),
        (
            http_case("http: {path: /a, rateLimit: {requestsPerMinute: 0}}"),
            vec!["spec.http.rateLimit.requestsPerMinute: 0 is not between 1 and 100000000"],
        ),
        (
            http_case("http: {path: /a}, transform: {expression: \"(1 +\", timeout: 0ms, onError: fail}"),
            vec![
                "spec.transform.timeout: must be above zero",
                "spec.transform.onError: \"fail\" is none of Fail, Skip, Dead (did you mean Fail?)",
                "spec.transform.expression: is no JSONata: S0207: Unexpected end of expression",
            ],
        ),
        (
            http_case(
                "http: {path: /a}, filter: {require: [{header: a}, {header: b, equals: x, in: [y]}, {header: c, matches: \"***\"}, {header: d, exists: false}]}",
            ),
            vec![
                "spec.filter.require[3].exists: cannot be false",
                "spec.filter.require[0]: give exactly one of equals, in, matches, exists",
                "spec.filter.require[1]: give exactly one of equals, in, matches, exists; there are equals and in",
                "spec.filter.require[2].matches: \"***\" is not a pattern; use \"*\" for one segment or \"**\" for any text",
                "spec.filter.require[3]: give exactly one of equals, in, matches, exists",
            ],
        ),
        (
            case("rabbitmq: {queueName: q, url: \"amqp://u:canary@mq/\"}"),
            vec!["spec.rabbitmq.url: holds credentials (write username and passwordFrom, or urlFrom for all)"],
        ),
        (
            case("rabbitmq: {queueName: q, url: \"http://mq/\", username: u, prefetchCount: 70000}"),
            vec![
                "spec.rabbitmq.prefetchCount: 70000 is not between 1 and 65535",
                "spec.rabbitmq: username and passwordFrom go together",
                "spec.rabbitmq.url: must begin with amqp:// or amqps://",
            ],
        ),
        (
            case("rabbitmq: {queueName: q, prefetchCount: -1}"),
            vec![
                "spec.rabbitmq.prefetchCount: -1 is not between 1 and 65535",
                "spec.rabbitmq: give exactly one of url, urlFrom",
            ],
        ),
        (
            rabbit(", idempotencyKeyFallback: position"),
            vec!["spec.rabbitmq.idempotencyKeyFallback: RabbitMQ messages have no position; write digest"],
        ),
        (
            kafka(", securityProtocol: SASL_SSL, saslMechanism: GSSAPI"),
            vec![
                "spec.kafka.saslMechanism: \"GSSAPI\" is none of PLAIN, SCRAM-SHA-256, SCRAM-SHA-512",
                "spec.kafka.saslUsername: is missing: SASL_SSL needs it",
                "spec.kafka.saslPasswordFrom: is missing: SASL_SSL needs it",
            ],
        ),
        (
            case("kafka: {bootstrapServers: \"k,\", groupId: g, topics: [a, a, \"b c\", \"\"]}"),
            vec![
                "spec.kafka.topics[3]: is empty",
                "spec.kafka.topics[1]: \"a\" stands twice",
                "spec.kafka.topics[2]: \"b c\" is no Kafka topic: write letters, digits, \".\", \"_\" and \"-\"",
                "spec.kafka.bootstrapServers: write host:port, comma separated",
                "spec.kafka.bootstrapServers: has an empty entry",
            ],
        ),
        (
            nats(&format!(", username: u, tokenFrom: {SECRET}")),
            vec![
                "spec.nats: username and passwordFrom go together",
                "spec.nats: give username and passwordFrom, or tokenFrom, not both",
            ],
        ),
        (
            case("nats: {servers: \"nats://u:canary@n\", stream: a.b, durable: d, ackWait: 30, batchSize: 1.5}"),
            vec![
                "spec.nats.ackWait: expected a duration such as \"30s\", found the number 30",
                "spec.nats.batchSize: expected a whole number, found the number 1.5",
                "spec.nats.stream: \"a.b\" must not hold blanks, \".\", \"*\", \">\" or slashes",
                "spec.nats.servers: holds credentials: write username and passwordFrom, or tokenFrom",
            ],
        ),
        (nats(&format!(", tls: {{certFrom: {SECRET}}}")), vec!["spec.nats.tls: certFrom and keyFrom go together"]),
    ];
    for (spec, expected) in &cases {
        let mut found = wrong("Source", spec);
        let mut expected: Vec<String> = expected.iter().map(ToString::to_string).collect();
        found.sort();
        expected.sort();
        assert_eq!(found, expected, "{spec}");
        assert!(!found.join("").contains("canary"));
    }
}

#[test]
fn destinations_that_are_wrong() {
    assert_wrong(
        "Destination",
        &[
            ("{}", &["spec: give exactly one of http, rabbitmq, kafka, nats"]),
            ("{http: {}}", &["spec.http.url: is missing"]),
            (
                "{http: {url: wh.example}}",
                &["spec.http.url: is no absolute URL (did you forget http://? Write http://wh.example)"],
            ),
            ("{http: {url: \"ftp://wh/\"}}", &["spec.http.url: must begin with http:// or https://"]),
            (
                "{http: {url: \"https://u:canary@wh/\"}}",
                &["spec.http.url: holds credentials (write them as auth.basic, with passwordFrom)"],
            ),
            ("{http: {url: \"https://wh/a/%2e%2E/b\"}}", &["spec.http.url: must not hold \".\" or \"..\" segments"]),
            ("{http: {url: \"https://wh/a?x=../b\"}}", &[]),
            (
                "{http: {url: \"https://wh/\", timeout: 0s, permanentStatuses: [404, 4xx, 5xx, 200, 3xx, 408, 1.5]}}",
                &[
                    "spec.http.timeout: must be above zero",
                    "spec.http.permanentStatuses[6]: expected a whole number or a text, found the number 1.5",
                    "spec.http.permanentStatuses[3]: write a number from 300 to 599, \"4xx\" or \"5xx\"",
                    "spec.http.permanentStatuses[4]: write a number from 300 to 599, \"4xx\" or \"5xx\"",
                    "spec.http.permanentStatuses[6]: write a number from 300 to 599, \"4xx\" or \"5xx\"",
                ],
            ),
            (
                "{http: {url: \"https://wh/\"}, headers: {\"a b\": x, c: \"d\\r\\ne\", f: 5}}",
                &[
                    "spec.headers.f: expected a text, found a number or switch (put it in quotes)",
                    "spec.headers.a b: \"a b\" is no header name",
                    "spec.headers.c: holds control characters",
                ],
            ),
            (
                "{http: {url: \"https://wh/\"}, limits: {burst: 5}, backoff: {initial: 2m}, breaker: {mode: false}}",
                &[
                    "spec.breaker.mode: found false (write \"Off\" in quotes)",
                    "spec.limits.burst: needs requestsPerSecond",
                    "spec.backoff: initial (2m) is above max (1m)",
                ],
            ),
            ("{http: {url: \"https://wh/\"}, breaker: {mode: Off}}", &[]),
            (
                "{http: {url: \"https://wh/\", auth: {oauth2: {clientId: a, tokenUrl: x}}}}",
                &[
                    "spec.http.auth.oauth2.clientSecretFrom: is missing",
                    "spec.http.auth.oauth2.clientSecretFrom: give exactly one of secretKeyRef, env, file",
                    "spec.http.auth.oauth2.tokenUrl: is no absolute URL (did you forget http://? Write http://x)",
                ],
            ),
            (
                "{http: {url: \"https://wh/\", queueName: x, ulr: y, path: z}}",
                &[
                    "spec.http.queueName: unknown field (it belongs to Source.spec.rabbitmq)",
                    "spec.http.ulr: unknown field (did you mean url?)",
                    "spec.http.path: unknown field (it belongs to Source.spec.http)",
                ],
            ),
            (
                "{rabbitmq: {url: \"amqp://mq/\", exchange: \"{{ tpoic }}\", exchangeType: headers}}",
                &[
                    "spec.rabbitmq.exchangeType: \"headers\" is none of topic, direct, fanout",
                    "spec.rabbitmq.exchange: unknown placeholder \"{{ tpoic }}\"; known here: topic, key, aggregateType and payload.<name>",
                ],
            ),
            ("{rabbitmq: {url: \"amqp://mq/\"}}", &["spec.rabbitmq: give exchange or exchangeFrom"]),
            ("{rabbitmq: {url: \"amqp://mq/\", exchangeFrom: topic, routingKey: \"{{ what }}\"}}", &[]),
            (
                "{kafka: {bootstrapServers: \"k:9092\", topicFrom: aggregateType, timeout: 1s, keyTemplate: \"{{ payload.a }}\"}}",
                &[
                    "spec.kafka.topicFrom: \"aggregateType\" is none of aggregate_type, topic, key (did you mean aggregate_type?)",
                    "spec.kafka: give topic or topicFrom",
                    "spec.kafka.keyTemplate: unknown placeholder \"{{ payload.a }}\"; known here: key and topic",
                    "spec.kafka.timeout: must be 2s or more",
                ],
            ),
            (
                "{nats: {servers: \"http://n\", subject: s}}",
                &["spec.nats.servers: write host:port, or a URL that begins with nats:// or tls://"],
            ),
        ],
    );
}

#[test]
fn relays_that_are_wrong() {
    let server = "host: h, database: d, username: u";
    let cases: Vec<(String, Vec<&str>)> = vec![
        ("{}".into(), vec![]),
        (format!("{{database: {{postgres: {{{server}}}, sqlite: {{path: a}}}}}}"), vec![
            "spec.database: give exactly one of postgres, sqlserver, mysql, sqlite; there are postgres and sqlite",
        ]),
        (format!("{{database: {{mysql: {{{server}, schema: x}}}}}}"), vec![
            "spec.database.mysql.schema: unknown field (it belongs to Relay.spec.database.postgres)",
            "spec.database.mysql: is not supported by this release (postgres and sqlite are)",
        ]),
        (format!("{{database: {{sqlserver: {{{server}}}}}, retention: {{outbox: {{maxAge: 1d, batchSize: 5000}}}}}}"), vec![
            "spec.database.sqlserver: is not supported by this release (postgres and sqlite are)",
            "spec.retention.outbox.batchSize: must be below 5000 on SQL Server, which locks the whole table from there on",
        ]),
        ("{database: {postgres: {host: h}}}".into(), vec![
            "spec.database.postgres.database: is missing (give host, database and username, or one urlFrom for all)",
            "spec.database.postgres.username: is missing (give host, database and username, or one urlFrom for all)",
        ]),
        (format!("{{database: {{postgres: {{urlFrom: {SECRET}, {server}, password: canary}}}}}}"), vec![
            "spec.database.postgres.password - unknown field (secrets are given by reference: write passwordFrom with \
             secretKeyRef, env or file)",
            "spec.database.postgres: urlFrom holds everything; leave host, database, username out",
        ]),
        (format!("{{database: {{postgres: {{{server}, port: 70000, tls: {{mode: verifyFull}}}}, poolSize: 2}}}}"), vec![
            "spec.database.postgres.port: 70000 is not between 1 and 65535",
            "spec.database.postgres.tls.mode: \"verifyFull\" is none of Disable, Prefer, Require, VerifyCA, VerifyFull (did you \
             mean VerifyFull?)",
            "spec.database.poolSize: 2 is not between 3 and 1000",
        ]),
        ("{database: {outboxTableName: my_outbox, columnMapping: {outbox: {maxAttempts: tries, topic: topic}, inbox: {id: \"a-b\", evenType: x}}}}".into(), vec![
            "spec.database.columnMapping.inbox.id: \"a-b\" is no name: write a letter or \"_\", then letters, digits and \"_\"",
            "spec.database.columnMapping.inbox.evenType: unknown field (did you mean eventType?)",
            "spec.database.migrate: migrations know the default names only, and outboxTableName, \
             columnMapping.outbox.maxAttempts rename (write migrate: \"Off\" and change the tables yourself)",
        ]),
        ("{database: {migrate: Off, outboxTableName: inbox, columnMapping: {outbox: {key: topic}}}}".into(), vec![
            "spec.database.inboxTableName: must differ from outboxTableName",
            "spec.database.columnMapping.outbox.key: \"topic\" is the name of topic already",
        ]),
        ("{routes: [{topics: [a, \"a.***\"], destinations: [out, out, uot]}, {}]}".into(), vec![
            "spec.routes[1].destinations: is missing",
            "spec.routes[1].topics: is missing",
            "spec.routes[0].topics[1]: \"***\" is not a pattern; use \"*\" for one segment or \"**\" for any text",
            "spec.routes[0].destinations[1]: \"out\" stands twice",
            "spec.routes[0].destinations[2]: there is no Destination called \"uot\" in namespace default (did you mean out?)",
        ]),
        ("{routes: [{topics: [], destinations: []}]}".into(), vec![
            "spec.routes[0].topics: the list is empty",
            "spec.routes[0].destinations: the list is empty",
        ]),
        ("{routes: [{topics: [a], destinations: [out], routingKey: \"{{ a\"}]}".into(), vec![
            "spec.routes[0].routingKey: \"{{\" at character 1 is never closed by \"}}\"",
        ]),
        ("{outbox: {claimTimeout: 2s, backoff: {initial: 2m}, maxPayloadSize: 128MiB, pollInterval: 100, batchSize: many}}".into(), vec![
            "spec.outbox.pollInterval: expected a duration such as \"30s\", found the number 100",
            "spec.outbox.batchSize: expected a whole number, found a text",
            "spec.outbox.backoff: initial (2m) is above max (1m)",
            "spec.outbox.claimTimeout: must be 3s or more",
            "spec.outbox.maxPayloadSize: (128MiB) is above maxInFlightBytes (64MiB)",
        ]),
        ("{database: {postgres: {host: h, database: d, username: u, schema: my-schema}}}".into(), vec![
            "spec.database.postgres.schema: \"my-schema\" is no name: write a letter or \"_\", then letters, digits and \"_\"",
        ]),
        ("{database: {sqlite: {path: \":memory:\"}}}".into(), vec![
            "spec.database.sqlite.path: \":memory:\" names no file (give the path of a file; a database in memory would be another \
             one for each connection)",
        ]),
        ("{database: {sqlite: {path: \"file:a.db\"}}}".into(), vec![
            "spec.database.sqlite.path: \"file:a.db\" names no file (give the path of a file; a database in memory would be \
             another one for each connection)",
        ]),
        ("{inbox: {basePath: /entrées}}".into(), vec![
            "spec.inbox.basePath: must be ASCII: senders percent-encode everything else, and a path is taken literally (write \
             /entr%C3%A9es)",
        ]),
        ("{inbox: {maxBodySize: 128MiB, basePath: inbox, storeRetryWindow: 0s, storeTimeout: 0s}}".into(), vec![
            "spec.inbox.basePath: \"inbox\" must begin with \"/\"",
            "spec.inbox.storeTimeout: must be above zero",
            "spec.inbox.maxBytesInFlight: (64MiB) is below maxBodySize (128MiB)",
        ]),
        ("{retention: {outbox: {maxAge: 7d, maxCount: 5}, inbox: {maxCount: 5}}}".into(), vec![
            "spec.retention.inbox.maxCount: unknown field (it belongs to Relay.spec.retention.outbox)",
            "spec.retention.outbox: give an age or a count, not both",
        ]),
        ("{http: {port: 9090}, drainTimeout: 16m}".into(), vec![
            "spec.drainTimeout: must be at most 15m",
            "spec.http.managementPort: (9090) must differ from port",
        ]),
        ("{http: {shutdownDelay: 30s}}".into(), vec!["spec.http.shutdownDelay: (30s) must be below drainTimeout (30s)"]),
        ("{admin: {enabled: true}}".into(), vec![
            "spec.admin.auth: is missing (the admin API needs it, or insecure: true for local tests)",
        ]),
        ("{autoscaling: {minReplicas: 5, maxReplicas: 2}, replicas: -1}".into(), vec![
            "spec.replicas: -1 is not between 0 and 1000",
            "spec.autoscaling: minReplicas is above maxReplicas",
        ]),
        ("{pod: {extraVolumes: [{name: a, hostPath: {path: /}}], resources: {limits: 5}, tolerations: {}}}".into(), vec![
            "spec.pod.tolerations: expected a list, found a block",
            "spec.pod.resources: is not as in a pod: invalid type: number, expected a map",
            "spec.pod.extraVolumes[0]: must be secret, configMap, csi, projected or emptyDir",
        ]),
        ("[]".into(), vec!["spec: expected a block, found a list"]),
    ];
    for (spec, expected) in &cases {
        let mut found = wrong("Relay", spec);
        let mut expected: Vec<String> = expected.iter().map(ToString::to_string).collect();
        found.sort();
        expected.sort();
        assert_eq!(found, expected, "{spec}");
        assert!(!found.join("").contains("canary"));
    }
}

/// conformance 126
#[test]
fn all_errors_at_once() {
    let text = around(&[
        ("Source", "a", "{relayRef: {name: shop}, idempotencyKeyPath: $.id, topic: t, http: {path: /x, queueName: q}}"),
        (
            "Source",
            "b",
            "{relayRef: {name: shop}, idempotencyKeyPaht: $.id, topic: t, idempotencyKeyPath: $.id, http: {path: /x}}",
        ),
        ("Destination", "c", "{}"),
        ("Destinaton", "d", "{}"),
    ]);
    let text =
        format!("{text}---\nkind: [\n---\n{}", manifest("Source", "E", "{relayRef: {name: shop}, nats: {}, nats: {}}"));
    insta::assert_snapshot!(problems(&text).join("\n"));
}

/// conformance 135
#[test]
fn unknown_route_target_is_refused() {
    let found = wrong("Relay", "{routes: [{topics: [\"**\"], destinations: [warehose]}]}");
    assert_eq!(
        found,
        [
            "spec.routes[0].destinations[0]: there is no Destination called \"warehose\" in namespace default (there is out)"
        ]
    );
}

/// conformance 129
#[test]
fn renames_exclude_migrations() {
    let found =
        wrong("Relay", "{database: {inboxTableName: messages_in, columnMapping: {inbox: {lastError: problem}}}}");
    assert_eq!(
        found,
        [
            "spec.database.migrate: migrations know the default names only, and inboxTableName, columnMapping.inbox.lastError rename \
         (write migrate: \"Off\" and change the tables yourself)"
        ]
    );
}

#[test]
fn a_cluster_has_no_sqlite_no_default_and_no_local_files() {
    let source = "{relayRef: {name: shop}, consumption: pull, idempotencyKeyPath: $.id, http: {path: /a, auth: {bearer: {tokenFrom: {env: TOKEN}, previousTokenFrom: {file: /run/t}}}}}";
    let all = |relay: &str| {
        let text = around(&[("Relay", "shop", relay), ("Source", "in", source)]);
        report(&text, Target::Cluster).problems.iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    let postgres = "database: {postgres: {host: h, database: d, username: u}}";
    assert_eq!(
        all(&format!("{{{postgres}}}")),
        [
            "m.yaml: Source/in: spec.http.auth.bearer.tokenFrom: Relay shop does not supply the variable TOKEN (write secretKeyRef, or \
         supply it by the Relay's spec.pod)",
            "m.yaml: Source/in: spec.http.auth.bearer.previousTokenFrom: Relay shop does not supply the file /run/t (write \
         secretKeyRef, or supply it by the Relay's spec.pod)",
        ]
    );
    let pod = "pod: {env: [{name: TOKEN, value: x}], extraVolumes: [{name: v, secret: {secretName: s}}], extraVolumeMounts: [{name: v, mountPath: /run}]}";
    assert!(all(&format!("{{{postgres}, {pod}}}")).is_empty());
    assert_eq!(
        all(&format!("{{database: {{sqlite: {{path: /a}}}}, {pod}}}")),
        [
            "m.yaml: Relay/shop: spec.database.sqlite: is for local runs only (several pods cannot share a file; give postgres)",
        ]
    );
    assert_eq!(
        all(&format!("{{{pod}}}")),
        ["m.yaml: Relay/shop: spec.database: is missing (give exactly one of postgres, sqlserver, mysql, sqlite)",]
    );
}

#[test]
fn one_bad_object_leaves_the_others() {
    let text = around(&[
        ("Source", "good", "{relayRef: {name: shop}, consumption: pull, idempotencyKeyPath: $.id, http: {path: /a}}"),
        ("Source", "bad", "{relayRef: {name: shop}, consumption: pull, idempotencyKeyPath: $.id, http: {path: b}}"),
        ("Source", "twin", "{relayRef: {name: shop}, consumption: pull, idempotencyKeyPath: $.id, http: {path: /a}}"),
    ]);
    let report = report(&text, Target::Local);
    let sources: Vec<&str> = report.relays[0].sources.iter().map(|source| source.name.as_str()).collect();
    assert_eq!(sources, ["good"]);
    let reasons: Vec<&str> = report.problems.iter().map(|problem| problem.reason.as_str()).collect();
    assert_eq!(reasons, ["InvalidSpec", "PathConflict"]);
    assert_eq!(report.problems_of(queuebox_api::Kind::Source, "default", "twin").count(), 1);
}

#[test]
fn what_can_never_work_is_a_warning() {
    let text = around(&[(
        "Relay",
        "shop",
        "{routes: [{topics: [\"order.**\"], destinations: [out]}, {topics: [order.created, \"**\"], destinations: [out]}]}",
    )]);
    let warnings: Vec<String> = report(&text, Target::Local).warnings.iter().map(ToString::to_string).collect();
    assert_eq!(
        warnings,
        ["m.yaml: Relay/shop: spec.routes[1].topics[0]: never matches: spec.routes[0] takes \"order.**\" before",]
    );
}

/// contract 13.4, 14.7: what classic files say of the lease of the forward is taken, whatever it is.
#[test]
fn the_lease_of_the_forward_has_no_effect() {
    let text = around(&[("Relay", "shop", "{inbox: {relay: {claimTimeout: 1ms}}}")]);
    let report = report(&text, Target::Local);
    assert!(report.problems.is_empty(), "{:?}", report.problems);
    let warnings: Vec<String> = report.warnings.iter().map(ToString::to_string).collect();
    let said = "spec.inbox.relay.claimTimeout: has no effect: push rows are forwarded under the lease of the worker, outbox.claimTimeout";
    assert_eq!(warnings, [format!("m.yaml: Relay/shop: {said}")]);
    let refused = problems(&around(&[("Relay", "shop", "{inbox: {relay: {claimTimeout: 0s}}}")]));
    assert_eq!(refused, ["m.yaml: Relay/shop: spec.inbox.relay.claimTimeout: must be above zero"]);
}

#[test]
fn a_run_serves_one_relay() {
    let none = manifest("Destination", "out", "{http: {url: \"https://out.example/\"}}");
    let message =
        |text: &str, name: Option<&str>| report(text, Target::Local).into_relay(name).unwrap_err().to_string();
    assert_eq!(message(&none, None), "there is no Relay (a run needs exactly one, with the routes of your messages)");
    let two = around(&[("Relay", "two", "{}")]);
    assert_eq!(
        message(&two, None),
        "there are several Relays: shop, two (a run serves one: choose it with --relay NAME)"
    );
    assert_eq!(message(&two, Some("shpo")), "there is no Relay called \"shpo\" (did you mean shop?)");
    assert_eq!(report(&two, Target::Local).into_relay(Some("two")).unwrap().name, "two");
}

#[test]
fn defaults_are_those_of_the_contract() {
    let text = around(&[(
        "Source",
        "in",
        "{relayRef: {name: shop}, kafka: {bootstrapServers: \"k:1\", groupId: g, topics: [t]}}",
    )]);
    insta::assert_debug_snapshot!("defaults", report(&text, Target::Local).into_relay(None).unwrap());
}

/// Everything that is printed passes redaction; what a problem says must survive that.
#[test]
fn problems_survive_redaction() {
    let text = around(&[
        (
            "Source",
            "in",
            "{relayRef: {name: shop}, consumption: pull, idempotencyKeyPath: $.id, http: {path: /a, auth: {bearer: {token: canary}, apiKey: 5}}}",
        ),
        ("Relay", "shop", "{database: {columnMapping: {outbox: {claimToken: \"a-b\"}}}}"),
    ]);
    for problem in problems(&text) {
        assert_eq!(queuebox_core::redact::redact(&problem), problem);
        assert!(!problem.contains("canary"), "{problem}");
    }
}

#[test]
fn hostile_texts_are_refused_and_break_nothing() {
    let deep = |open: &str, close: &str, n: usize| format!("{}{}", open.repeat(n), close.repeat(n));
    let source = |field: &str, text: &str| {
        let text = serde_json::to_string(text).unwrap();
        format!("{{relayRef: {{name: shop}}, topic: t, idempotencyKeyPath: $.id, {field}: {text}, http: {{path: /a}}}}")
    };
    for (field, text) in [
        ("eventTypeExpression", deep("(", ")", 8_000)),
        ("eventTypeExpression", deep("[", "]", 8_000)),
        ("eventTypeExpression", deep("function(){", "}", 1_000)),
        ("eventTypePath", format!("$[?{}@.a{}]", "(".repeat(900), ")".repeat(900))),
        ("eventTypePath", format!("$[?{}@.a]", "!".repeat(1_900))),
        ("eventTypePath", "$[?@".repeat(400)),
        ("topic", "{{".repeat(8_000)),
        ("initialDelay", "9".repeat(5_000)),
    ] {
        assert!(!wrong("Source", &source(field, &text)).is_empty(), "{field}");
    }
    for text in [
        deep("[", "]", 100_000),
        deep("{a: ", "}", 100_000),
        "- ".repeat(100_000),
        "a: &a [*a]".to_owned(),
        "\u{feff}\u{0}".to_owned(),
    ] {
        assert!(!problems(&text).is_empty());
    }
    let bomb = "a: &a [x, x, x, x, x, x, x, x]\nb: &b [*a, *a, *a, *a, *a, *a, *a, *a]\nc: &c [*b, *b, *b, *b, *b, *b, *b, *b]\nd: &d [*c, *c, *c, *c, *c, *c, *c, *c]\ne: &e [*d, *d, *d, *d, *d, *d, *d, *d]\nf: &f [*e, *e, *e, *e, *e, *e, *e, *e]\ng: [*f, *f, *f, *f, *f, *f, *f, *f]\n";
    assert!(!problems(bomb).is_empty());
}

/// What people write first, with what to write in its place.
#[test]
fn usual_mistakes_say_what_to_write() {
    let relay = "{routes: [{topics: [\"order.*\"], destinations: [d]}]}";
    let text = |relay: &str, source: &str, url: &str| {
        [
            manifest("Relay", "shop", relay),
            manifest("Source", "s", source),
            manifest("Destination", "d", &format!("{{http: {{url: \"{url}\"}}}}")),
        ]
        .join("---\n")
    };
    let said = problems(&text(
        relay,
        "{relayRef: shop, topic: order.a, idempotencyKeyPath: id, http: {path: /a}}",
        "127.0.0.1:8099",
    ));
    for part in [
        "spec.relayRef: expected a block, found a text (write {name: shop})",
        "spec.idempotencyKeyPath: \"id\" is no JSONPath: it begins with $; write $.id",
        "spec.http.url: is no absolute URL (did you forget http://? Write http://127.0.0.1:8099)",
    ] {
        assert!(said.iter().any(|problem| problem.contains(part)), "{part}: {said:#?}");
    }
    let warnings = |topic: &str| {
        let source =
            format!("{{relayRef: {{name: shop}}, topic: {topic}, idempotencyKeyPath: $.id, http: {{path: /a}}}}");
        let report = report(&text(relay, &source, "http://h/p"), Target::Local);
        assert!(report.problems.is_empty(), "{:?}", report.problems);
        report.warnings.iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    assert!(warnings("order.paid").is_empty());
    assert!(warnings("\"{{ source }}\"").is_empty(), "only a run knows");
    assert!(warnings("invoice.paid")[0].contains("none takes \"invoice.paid\", the topic of Source s"));
}

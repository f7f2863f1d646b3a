//! Good manifests give values with every default; bad ones give all their problems at once.

use queuebox_api::{Manifests, Report, Target, check, checked};

pub fn report(text: &str, target: Target) -> Report {
    let mut manifests = Manifests::default();
    manifests.add_text("m.yaml", text);
    check(&manifests, target)
}

pub fn problems(text: &str) -> Vec<String> {
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

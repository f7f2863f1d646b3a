use std::{
    future,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
};

use async_trait::async_trait;
use axum::{
    Router,
    body::{Body, to_bytes},
    http::{Method, Request, StatusCode, header},
};
use queuebox_api::{Manifests, Target, check, checked::Relay};
use queuebox_core::{
    Fault, Uuid,
    message::State,
    ports::{
        Fence, Scope,
        ledger::LedgerRow,
        schema::{Finding, MigrateOptions, Migrated, Schema, SchemaReport},
    },
};
use queuebox_engine::{
    metrics::Metrics,
    outbox::DestinationState,
    tail::{Outcome, Status},
    worker::WorkerState,
};
use serde_json::{Value, json};
use tokio::sync::{Semaphore, watch};
use tower::ServiceExt;

use super::*;
use crate::memory::{Memory, id, outbox_row};

const MANIFESTS: &str = r#"
apiVersion: queuebox.io/v1alpha1
kind: Relay
metadata: {name: shop}
spec:
  database: {sqlite: {path: /tmp/queuebox.db}}
  inbox: {relay: {enabled: true}}
  retention: {outbox: {maxAge: 7d}}
  routes:
    - {topics: ["order.*"], destinations: [events]}
    - {topics: ["**"], destinations: [hook]}
  admin: {enabled: true, insecure: true, maxPayloadSize: 1KiB}
---
apiVersion: queuebox.io/v1alpha1
kind: Destination
metadata: {name: events}
spec: {nats: {servers: "nats://127.0.0.1:4222", subject: "{{ topic }}"}}
---
apiVersion: queuebox.io/v1alpha1
kind: Destination
metadata: {name: hook}
spec: {http: {url: "https://receiver.example/in"}}
---
apiVersion: queuebox.io/v1alpha1
kind: Source
metadata: {name: orders}
spec: {relayRef: {name: shop}, topic: orders, nats: {servers: "nats://127.0.0.1:4222", stream: ORDERS, durable: queuebox}}
---
apiVersion: queuebox.io/v1alpha1
kind: Source
metadata: {name: stripe}
spec: {relayRef: {name: shop}, topic: payments, idempotencyKeyPath: $.id, http: {path: /stripe}}
"#;

fn relay(text: &str) -> Arc<Relay> {
    let mut manifests = Manifests::default();
    manifests.add_text("m.yaml", text);
    Arc::new(check(&manifests, Target::Local).into_relay(None).unwrap())
}

/// A database that is there, refuses, or never answers.
#[derive(Default)]
struct Database {
    pings: AtomicUsize,
    failing: OnceLock<String>,
    silent: OnceLock<()>,
    gate: OnceLock<Semaphore>,
}

#[async_trait]
impl Schema for Database {
    fn kind(&self) -> &'static str {
        "sqlite"
    }

    async fn ping(&self) -> Result<(), Fault> {
        self.pings.fetch_add(1, Ordering::SeqCst);
        if let Some(gate) = self.gate.get() {
            gate.acquire().await.unwrap().forget();
        }
        match (self.failing.get(), self.silent.get()) {
            (_, Some(())) => future::pending().await,
            (Some(why), _) => Err(Fault::transient("away", why.clone())),
            _ => Ok(()),
        }
    }

    async fn migrate(&self, _: MigrateOptions) -> Result<Migrated, Fault> {
        unreachable!()
    }

    async fn check(&self) -> Result<SchemaReport, Fault> {
        unreachable!()
    }

    fn grants(&self, _: &str) -> Vec<String> {
        unreachable!()
    }

    async fn examine(&self) -> Result<Vec<Finding>, Fault> {
        unreachable!()
    }

    fn pool(&self) -> (u32, u32, u32) {
        (0, 0, 0)
    }

    async fn close(&self) {}
}

/// A worker that is ready, and what tests change of it.
struct World {
    parts: ManagementParts,
    database: Arc<Database>,
    memory: Arc<Memory>,
    readiness: watch::Sender<Readiness>,
}

impl World {
    fn new() -> Self {
        Self::with(MANIFESTS, working)
    }

    fn with(manifests: &str, state: impl Fn() -> WorkerState + Send + Sync + 'static) -> Self {
        let (database, memory) = (Arc::new(Database::default()), Arc::new(Memory::default()));
        let (readiness, seen) = watch::channel(Readiness::Ready);
        let up = SourceStatus { name: "orders".to_owned(), kind: "nats", up: true, detail: None };
        let parts = ManagementParts {
            state: Arc::new(state),
            ledger: memory.clone(),
            schema: database.clone(),
            schema_report: Arc::new(OnceLock::from(SchemaReport { version: 14, notes: Vec::new() })),
            metrics: Arc::new(Metrics::new("1.2.3").unwrap()),
            relay: relay(manifests),
            sources: Arc::new(move || vec![up.clone()]),
            capture: Arc::new(|| None),
            missing: Arc::new(Vec::new),
            readiness: seen,
            tail: Tail::default(),
            troubles: Troubles::default(),
            admin_auth: None,
            version: "1.2.3",
            config: "7/0123456789".to_owned(),
        };
        Self { parts, database, memory, readiness }
    }

    fn router(&self) -> Router {
        router(self.parts.clone())
    }

    async fn get(&self, path: &str) -> (StatusCode, Value) {
        ask(self.router(), Method::GET, path, Body::empty()).await
    }

    async fn post(&self, path: &str, body: impl Into<Body>) -> (StatusCode, Value) {
        ask(self.router(), Method::POST, path, body.into()).await
    }

    fn add(&self, rows: impl IntoIterator<Item = LedgerRow>) {
        rows.into_iter().for_each(|row| self.memory.add(Scope::Outbox, row));
    }
}

fn working() -> WorkerState {
    let mut state = WorkerState::default();
    state.keeper.fence = Some(Fence { worker: "pod-1".to_owned(), token: Uuid::nil() });
    state
}

async fn ask(router: Router, method: Method, path: &str, body: Body) -> (StatusCode, Value) {
    let request = Request::builder().method(method).uri(path).body(body).unwrap();
    let response = router.oneshot(request).await.unwrap();
    let status = response.status();
    let body = to_bytes(response.into_body(), usize::MAX).await.unwrap();
    (status, serde_json::from_slice(&body).unwrap_or_else(|_| String::from_utf8_lossy(&body).into_owned().into()))
}

#[tokio::test]
async fn liveness_touches_nothing() {
    let world = World::with(MANIFESTS, || panic!("the worker was looked at"));
    for path in ["/livez", "/health/live"] {
        let (status, body) = world.get(path).await;
        assert_eq!(status, StatusCode::OK);
        assert_eq!(body, json!({"status": "healthy", "components": {"process": {"status": "up"}}}));
    }
    assert_eq!(world.database.pings.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn readiness_of_a_pod_is_sticky_until_it_stops() {
    let world = World::new();
    world.database.failing.set("away".to_owned()).unwrap();
    for (readiness, expected) in [
        (Readiness::Starting, StatusCode::SERVICE_UNAVAILABLE),
        (Readiness::Ready, StatusCode::OK),
        (Readiness::Stopping, StatusCode::SERVICE_UNAVAILABLE),
    ] {
        world.readiness.send_replace(readiness);
        assert_eq!(world.get("/readyz").await.0, expected);
        assert_eq!(world.get("/startupz").await.0, expected);
    }
    assert_eq!(world.get("/readyz").await.1["components"]["process"]["detail"], "stopping");
}

#[tokio::test]
async fn every_component_is_named() {
    let world = World::new();
    let (status, body) = world.get("/health").await;
    assert_eq!(status, StatusCode::OK, "{body}");
    assert_eq!(body["status"], "healthy");
    let names: Vec<_> = body["components"].as_object().unwrap().keys().collect();
    let expected =
        ["database", "outbox-poller", "inbox-relay", "retention-service", "nats.orders", "destination.events"];
    assert_eq!(names, expected);
    assert_eq!(world.get("/health/ready").await.1, body);

    world.readiness.send_replace(Readiness::Stopping);
    assert_eq!(world.get("/health/ready").await.0, StatusCode::SERVICE_UNAVAILABLE);
}

#[tokio::test]
async fn what_is_down_says_why_without_a_secret() {
    let mut world = World::with(MANIFESTS, || {
        let mut state = working();
        state.driver.destinations.push(DestinationState {
            name: "events".to_owned(),
            queued: 0,
            in_flight: 0,
            breaker: 0,
            failing: None,
            held_because: Some("not connected: nats://app:canary-7731@broker:4222 refused".to_owned()),
        });
        state
    });
    world.database.failing.set("cannot reach postgres://app:canary-7731@db/shop".to_owned()).unwrap();
    world.parts.sources = Arc::new(Vec::new);
    for path in ["/health/ready", "/status"] {
        let (_, body) = world.get(path).await;
        assert!(!body.to_string().contains("canary-7731"), "{body}");
    }
    let (status, body) = world.get("/health/ready").await;
    assert_eq!((status, &body["status"]), (StatusCode::SERVICE_UNAVAILABLE, &json!("unhealthy")));
    let components = &body["components"];
    assert_eq!(components["database"]["detail"], "cannot reach postgres://***@db/shop");
    for down in ["database", "nats.orders", "destination.events"] {
        assert_eq!(components[down]["status"], "down", "{down}");
    }
    assert_eq!(components["outbox-poller"]["status"], "up");
}

#[tokio::test]
async fn standing_by_is_shown_and_healthy() {
    let world = World::with(MANIFESTS, || {
        let mut state = working();
        state.keeper.stand_by = Some("another Relay works these tables".to_owned());
        state
    });
    let (status, body) = world.get("/health/ready").await;
    assert_eq!(status, StatusCode::OK);
    let detail = "standing by: another Relay works these tables";
    assert_eq!(body["components"]["outbox-poller"], json!({"status": "up", "detail": detail}));
    assert_eq!(world.get("/status").await.1["standBy"], "another Relay works these tables");
}

#[tokio::test]
async fn capture_is_shown_and_never_a_reason() {
    let mut world = World::new();
    world.parts.capture = Arc::new(|| Some(CaptureStatus { up: false, detail: Some("cut".to_owned()) }));
    let (status, body) = world.get("/health/ready").await;
    assert_eq!(status, StatusCode::OK);
    assert_eq!(body["components"]["outbox-capture"], json!({"status": "down", "detail": "cut"}));
}

#[tokio::test(start_paused = true)]
async fn a_silent_database_is_down_after_three_seconds() {
    let world = World::new();
    world.database.silent.set(()).unwrap();
    let asked_at = tokio::time::Instant::now();
    let (status, body) = world.get("/health/ready").await;
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(body["components"]["database"]["detail"], "no answer within 3 s");
    assert_eq!(asked_at.elapsed().as_secs(), 3);
}

#[tokio::test]
async fn probes_that_wait_share_one_round_trip() {
    let world = World::new();
    world.database.gate.set(Semaphore::new(0)).unwrap();
    let router = world.router();
    let ask_all = async {
        let requests = (0..20).map(|_| ask(router.clone(), Method::GET, "/health", Body::empty()));
        futures::future::join_all(requests).await
    };
    let open = async { world.database.gate.get().unwrap().add_permits(1) };
    let (answers, ()) = tokio::join!(ask_all, open);
    assert!(answers.iter().all(|(status, _)| *status == StatusCode::OK));
    assert_eq!(world.database.pings.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn status_has_backlog_ages_and_states() {
    let world = World::with(MANIFESTS, || {
        let mut state = working();
        state.backlog.counted_at = Some(tokio::time::Instant::now());
        state.backlog.outbox.pending = 3;
        state.backlog.outbox.oldest_due_age_us = 1_500_000;
        state
    });
    let (status, body) = world.get("/status").await;
    assert_eq!(status, StatusCode::OK);
    assert_eq!(body["version"], "1.2.3");
    assert_eq!(body["config"], "7/0123456789");
    assert_eq!(body["noRoutePerMinute"], 0);
    assert_eq!(body["relay"], json!({"namespace": "default", "name": "shop", "uid": "local/default/shop"}));
    assert_eq!(body["database"]["schemaVersion"], 14);
    let outbox = json!({
        "pending": 3, "dead": 0, "oldestPendingAgeSeconds": 0.0, "oldestDueAgeSeconds": 1.5,
        "startable": {"rows": 0, "lanes": 0, "oldestAgeSeconds": 0.0, "more": false},
    });
    assert_eq!(body["backlog"]["outbox"], outbox);
    let states = |of: &str| -> Vec<_> {
        let all = body[of].as_array().unwrap().iter();
        all.map(|one| format!("{} {}", one["name"].as_str().unwrap(), one["state"].as_str().unwrap())).collect()
    };
    assert_eq!(states("sources"), ["orders Up", "stripe Up"]);
    assert_eq!(states("destinations"), ["events Up", "hook Up"]);
    let unknown = World::new().get("/status").await.1;
    assert_eq!(unknown["backlog"], Value::Null);
}

#[tokio::test]
async fn metrics_are_classic_text() {
    let request = Request::builder().uri("/metrics").body(Body::empty()).unwrap();
    let response = World::new().router().oneshot(request).await.unwrap();
    assert_eq!(response.headers()[header::CONTENT_TYPE], "text/plain; version=0.0.4; charset=utf-8");
    let text = to_bytes(response.into_body(), usize::MAX).await.unwrap();
    assert!(String::from_utf8_lossy(&text).contains("queuebox_info{version=\"1.2.3\"} 1"));
}

#[tokio::test]
async fn the_admin_api_is_404_when_it_is_off() {
    let off = MANIFESTS.replace("admin: {enabled: true,", "admin: {enabled: false,");
    let world = World::with(&off, working);
    for path in ["/admin", "/admin/outbox", "/admin/nothing", "/nothing"] {
        assert_eq!(world.get(path).await, (StatusCode::NOT_FOUND, json!({"error": "Not found"})), "{path}");
    }
    assert_eq!(world.post("/admin/replay", "{}").await.0, StatusCode::NOT_FOUND);
}

fn with_token(world: &mut World) {
    world.parts.admin_auth = Some(Arc::new(|headers, body| {
        let is_right =
            headers.get(header::AUTHORIZATION).is_some_and(|token| token == "Bearer right") && body != b"bad";
        if is_right { Ok(()) } else { Err("bearer token does not match".to_owned()) }
    }));
}

#[tokio::test]
async fn replay_without_credentials_is_401() {
    let mut world = World::new();
    with_token(&mut world);
    world.add([outbox_row(1, State::Dead, "a")]);
    let error = json!({"error": "bearer token does not match"});
    for path in ["/admin/replay", "/admin/outbox/requeue", "/admin/inbox/discard", "/admin/nothing"] {
        let (status, body) = world.post(path, r#"{"topic":"a"}"#).await;
        assert_eq!((status, &body), (StatusCode::UNAUTHORIZED, &error), "{path}");
    }
    assert_eq!(world.get("/admin/outbox").await, (StatusCode::UNAUTHORIZED, error.clone()));
    assert_eq!(world.get("/admin/tail").await, (StatusCode::UNAUTHORIZED, error));
    let (status, body) = world.post("/admin/transform/test", "{}").await;
    let test_error = json!({"success": false, "error": "bearer token does not match"});
    assert_eq!((status, body), (StatusCode::UNAUTHORIZED, test_error));
    assert_eq!(world.memory.states(), [State::Dead]);

    let request = Request::builder().method(Method::POST).uri("/admin/replay").header("Authorization", "Bearer right");
    let response = world.router().oneshot(request.body(Body::from(r#"{"topic":"a"}"#)).unwrap()).await.unwrap();
    assert_eq!(response.status(), StatusCode::OK);
    assert_eq!(world.memory.states(), [State::Pending]);
}

#[tokio::test]
async fn requests_that_are_wrong_move_nothing() {
    let world = World::new();
    world.add([outbox_row(1, State::Dead, "a")]);
    let no_filter = "A replay needs at least one filter.";
    for (path, body, expected) in [
        ("/admin/replay", "{}", no_filter),
        ("/admin/replay", "", no_filter),
        ("/admin/replay", "[]", "Invalid request: the body is no JSON object"),
        ("/admin/replay", "{", "Invalid request: the body is no JSON: "),
        ("/admin/replay", r#"{"topik":"a"}"#, "Invalid request: unknown field \"topik\"; did you mean \"topic\"?"),
        ("/admin/replay?dryRun=true", r#"{"topic":"a"}"#, "Invalid request: a POST takes no parameters"),
        ("/admin/outbox/discard", "{}", "A discard needs at least one filter."),
    ] {
        let (status, answer) = world.post(path, body).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{path} {body}");
        assert!(answer["error"].as_str().unwrap().starts_with(expected), "{path} {body}: {answer}");
    }
    let long = format!(r#"{{"topic":"{}"}}"#, "a".repeat(1_100));
    let too_long = json!({"error": "Request body exceeds 1024 bytes"});
    assert_eq!(world.post("/admin/replay", long.clone()).await, (StatusCode::PAYLOAD_TOO_LARGE, too_long));
    let (status, answer) = world.post("/admin/transform/test", long).await;
    assert_eq!((status, &answer["success"]), (StatusCode::PAYLOAD_TOO_LARGE, &json!(false)));
    assert_eq!(world.get("/admin/replay").await.0, StatusCode::METHOD_NOT_ALLOWED);
    assert_eq!(world.post("/admin/outbox", "{}").await.0, StatusCode::METHOD_NOT_ALLOWED);
    for (path, expected) in [
        ("/admin/outbox?stat=dead", "Invalid request: unknown field \"stat\"; did you mean \"state\"?"),
        ("/admin/outbox?limit=2000", "Invalid request: limit: is no whole number from 1 to 1000"),
        ("/admin/outbox?key=a&key=b", "Invalid request: key: is given twice"),
        ("/admin/outbox/1", "Invalid request: \"1\" is no UUID"),
        (
            "/admin/outbox/00000000-0000-0000-0000-000000000001?a=b",
            "Invalid request: a: unknown parameter; there are none here",
        ),
    ] {
        assert_eq!(world.get(path).await, (StatusCode::BAD_REQUEST, json!({"error": expected})), "{path}");
    }
    assert_eq!(world.memory.states(), [State::Dead]);
}

#[tokio::test]
async fn rows_are_listed_shown_moved_and_discarded() {
    let world = World::new();
    world.add((1..=4).map(|number| outbox_row(number, State::Dead, "order.paid")));
    world.add([outbox_row(5, State::Sent, "other"), outbox_row(6, State::Dead, "other")]);

    let (_, page) = world.get("/admin/outbox?limit=2&destination=events").await;
    let ids = |page: &Value| -> Vec<Value> {
        page["items"].as_array().unwrap().iter().map(|item| item["id"].clone()).collect()
    };
    assert_eq!(ids(&page), [json!(id(4)), json!(id(3))]);
    assert!(page["items"][0].get("payload").is_none());
    let next = page["next"].as_str().unwrap();
    let (_, page) = world.get(&format!("/admin/outbox?limit=2&destination=events&cursor={next}")).await;
    assert_eq!((ids(&page), &page["next"]), (vec![json!(id(2)), json!(id(1))], &Value::Null));
    let (_, page) = world.get("/admin/outbox?state=sent,dead&topics=other&topics=none").await;
    assert_eq!(ids(&page), [json!(id(6)), json!(id(5))]);

    let (status, row) = world.get(&format!("/admin/outbox/{}", id(1))).await;
    assert_eq!((status, &row["topic"]), (StatusCode::OK, &json!("order.paid")));
    assert!(row.get("payload").is_some());
    assert_eq!(world.get(&format!("/admin/inbox/{}", id(1))).await.0, StatusCode::NOT_FOUND);

    let (_, dry_run) = world.post("/admin/outbox/requeue", r#"{"topic":"order.*","dryRun":true}"#).await;
    assert_eq!((&dry_run["moved"], &dry_run["matched"]), (&json!(0), &json!(4)));
    let (_, moved) = world.post("/admin/outbox/requeue", r#"{"topic":"order.*"}"#).await;
    assert_eq!(moved, json!({"moved": 4}));
    let (_, gone) = world.post("/admin/outbox/discard", r#"{"topic":"other"}"#).await;
    assert_eq!(gone, json!({"discarded": 1}));
    assert_eq!(world.memory.states().len(), 5);
}

#[tokio::test]
async fn a_transform_is_tried_on_a_payload() {
    let world = World::new();
    let body = r#"{"expression":"{\"a\": n, \"t\": $topic, \"s\": $source}","payload":{"n":7},"mockSource":"stripe"}"#;
    let (status, answer) = world.post("/admin/transform/test", body).await;
    assert_eq!(status, StatusCode::OK, "{answer}");
    assert_eq!(answer["success"], true);
    assert_eq!(answer["result"], json!({"a": 7, "t": "test.topic", "s": "stripe"}));
    assert_eq!((&answer["context"]["topic"], &answer["context"]["attempt"]), (&json!("test.topic"), &json!(0)));
    assert!(Uuid::parse_str(answer["context"]["messageId"].as_str().unwrap()).is_ok());

    for (body, expected) in [
        (r#"{"expression":"(","payload":1}"#, "Invalid expression: "),
        (r#"{"expression":"1"}"#, "Invalid request: payload: is missing"),
        (r#"{"payload":1}"#, "Invalid request: expression: is missing"),
        (r#"{"expression":"1","payload":1,"topic":"a"}"#, "Invalid request: unknown field \"topic\""),
        (
            r#"{"expression":"1","payload":1,"timeoutMs":5000}"#,
            "Invalid request: timeoutMs: is no whole number from 1 to 1000",
        ),
        (r#"{"expression":"1","payload":1,"timeoutMs":"9"}"#, "Invalid request: timeoutMs: is no whole number"),
        ("[]", "Invalid request: the body is no JSON object"),
        (r#"{"expression":"$error(\"no\")","payload":1}"#, ""),
    ] {
        let (status, answer) = world.post("/admin/transform/test", body).await;
        assert_eq!((status, &answer["success"]), (StatusCode::BAD_REQUEST, &json!(false)), "{body}");
        assert!(answer["error"].as_str().unwrap().starts_with(expected), "{body}: {answer}");
    }
}

/// An outcome of the worker.
fn outcome(number: u32, topic: &str, status: Status) -> Outcome {
    Outcome {
        at_us: 1_790_000_000_500_000,
        status,
        message_id: id(number),
        topic: Some(topic.to_owned()),
        key: Some("k".to_owned()),
        destination: Some("events".to_owned()),
        attempt: 0,
        created_at_us: Some(1_790_000_000_000_000),
        error: (status != Status::Sent).then(|| "401 for https://u:canary-7731@wh.example".to_owned()),
    }
}

#[tokio::test]
async fn outcomes_are_followed() {
    let world = World::new();
    for bad in ["/admin/tail?topik=a", "/admin/tail?status=gone", "/admin/tail?topic=***"] {
        let (status, body) = world.get(bad).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{bad}: {body}");
    }
    assert!(!world.parts.tail.is_watched(), "a wrong request watches nothing");
    let request = Request::get("/admin/tail?topic=order.*&status=sent,dead&destination=events&key=k");
    let response = world.router().oneshot(request.body(Body::empty()).unwrap()).await.unwrap();
    assert_eq!(response.status(), StatusCode::OK);
    assert_eq!(response.headers()["content-type"], "application/x-ndjson");
    for (number, topic, status) in [
        (1, "order.made", Status::Sent),
        (2, "other", Status::Sent),
        (3, "order.made", Status::Failed),
        (4, "order.paid", Status::Dead),
    ] {
        world.parts.tail.tell(outcome(number, topic, status));
    }
    let stop = world.readiness.clone();
    let mut lines = Vec::new();
    let mut body = response.into_body().into_data_stream();
    while let Some(chunk) = futures::StreamExt::next(&mut body).await {
        lines.push(String::from_utf8(chunk.unwrap().to_vec()).unwrap());
        if lines.len() == 3 {
            stop.send_replace(Readiness::Stopping);
        }
    }
    assert_eq!(lines.remove(0), "\n", "it has begun");
    let lines: Vec<Value> = lines.iter().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(
        lines[0],
        json!({
            "at": "2026-09-21T14:13:20.5Z", "status": "sent", "messageId": id(1).to_string(), "topic": "order.made", "key": "k",
            "destination": "events", "attempt": 0, "ageMs": 500, "error": null,
        })
    );
    assert_eq!((&lines[1]["status"], &lines[1]["topic"]), (&json!("dead"), &json!("order.paid")));
    assert_eq!(lines[1]["error"], "401 for https://***@wh.example");
    drop(body);
    assert!(!world.parts.tail.is_watched(), "who has gone watches no more");
}

#[tokio::test]
async fn without_credentials_neither_key_nor_topic_is_told() {
    let world = World::with(&MANIFESTS.replace("admin: {enabled: true,", "admin: {enabled: false,"), working);
    for bad in ["/tail?topic=order.*", "/tail?key=k"] {
        assert_eq!(world.get(bad).await.0, StatusCode::BAD_REQUEST, "{bad}");
    }
    let request = Request::get("/tail?status=dead").body(Body::empty()).unwrap();
    let response = world.router().oneshot(request).await.unwrap();
    world.parts.tail.tell(outcome(1, "order.made", Status::Sent));
    world.parts.tail.tell(outcome(2, "order.made", Status::Dead));
    let mut body = response.into_body().into_data_stream();
    let begun = futures::StreamExt::next(&mut body).await.unwrap().unwrap();
    assert_eq!(&begun[..], b"\n");
    let line = futures::StreamExt::next(&mut body).await.unwrap().unwrap();
    let line: Value = serde_json::from_slice(&line).unwrap();
    assert_eq!((&line["status"], &line["messageId"]), (&json!("dead"), &json!(id(2).to_string())));
    assert!(line.get("key").is_none() && line.get("topic").is_none() && !line.to_string().contains("canary"), "{line}");
}

//! One source, from the received message to the row.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use queuebox_core::{
    Fault,
    message::{Consumption, NewInboxRow, State},
    pattern::Pattern,
    ports::{Admission, Admitted, Intake, Received, source::Refusal},
    template::{Template, Vocabulary},
};
use queuebox_engine::{
    expression::{Bounds, Expression},
    filter::{Filter, Rule, Test},
    ids::Ids,
    intake::{
        AdmissionLimits, Admissions, IntakeParts, KeyFallback, Origins, PublishTime, SourceConfig, SourceIntake,
        SourceKind, StoreLimits,
    },
    json::Path,
    transform::{OnError, Transform},
};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use crate::fake::{Counted, FakeInbox, RefuseHook};

/// A source with the paths `$.id`, `$.key` and `$.type`, and the attribute headers of its kind.
pub fn source(kind: SourceKind) -> SourceConfig {
    let origins = |header: &str, path: &str| Origins {
        header: Some(header.to_owned()),
        expression: None,
        paths: vec![Path::parse(path).unwrap()],
    };
    SourceConfig {
        name: "orders".into(),
        kind,
        consumption: Consumption::Push,
        topic: Template::parse("{{ eventType }}", Vocabulary::SourceTopic).unwrap(),
        idempotency_key: origins("x-idempotency-key", "$.id"),
        aggregate_id: origins("x-aggregate-id", "$.key"),
        event_type: origins("x-event-type", "$.type"),
        idempotency_from_record_key: false,
        key_fallback: KeyFallback::Digest,
        initial_delay: Duration::ZERO,
        published_at: None,
        filter: Filter::default(),
        transform: None,
        expression_bounds: Bounds::default(),
        store_within: if kind.is_broker() { Duration::from_secs(30) } else { Duration::from_secs(5) },
        limits: StoreLimits::default(),
    }
}

pub struct World {
    pub inbox: Arc<FakeInbox>,
    pub counted: Arc<Counted>,
    pub stop: CancellationToken,
    pub intake: SourceIntake,
}

pub fn world(config: SourceConfig) -> World {
    let inbox = FakeInbox::new();
    let counted = Arc::new(Counted::default());
    let stop = CancellationToken::new();
    let parts = IntakeParts {
        admissions: Admissions::start(inbox.clone(), AdmissionLimits::default(), Arc::new(Notify::new())),
        ids: Arc::new(Ids::new(1, 1_790_000_000_000_000)),
        observer: counted.clone(),
        tracer: None,
        stop: stop.clone(),
    };
    World { inbox, counted, stop, intake: SourceIntake::new(config, parts) }
}

pub fn message(body: impl Into<Bytes>) -> Received {
    Received { body: body.into(), ..Received::default() }
}

pub fn with_headers(body: &str, headers: &[(&str, &str)]) -> Received {
    let headers = headers.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    Received { headers, ..message(body.to_owned()) }
}

impl World {
    pub async fn admit(&self, received: Received) -> Admission {
        self.intake.admit(vec![received]).await.remove(0)
    }
}

fn transform(source: &str, on_error: OnError) -> Option<Transform> {
    Some(Transform { expression: Expression::compile(source).unwrap(), bounds: Bounds::default(), on_error })
}

#[tokio::test(start_paused = true)]
async fn webhook_is_stored() {
    let world = world(source(SourceKind::Http));
    let body = r#"{"id": "e-1", "key": 7, "type": "order.created", "n": 1.10}"#;
    let received = Received {
        correlation_id: Some("c-1".into()),
        ..with_headers(body, &[("A", "1"), ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")])
    };
    let answer = world.admit(received).await;
    let stored = world.inbox.only_row();
    assert_eq!(answer, Admission::Stored(stored.row.id));
    assert_eq!(stored.state, State::Pending);
    assert_eq!(stored.row.source, "orders");
    assert_eq!(stored.row.idempotency_key, "e-1");
    assert_eq!(stored.row.aggregate_id.as_deref(), Some("7"));
    assert_eq!(stored.row.event_type.as_deref(), Some("order.created"));
    assert_eq!(stored.row.topic.as_deref(), Some("order.created"));
    assert_eq!(stored.row.payload, body, "as received");
    assert_eq!(stored.row.correlation_id.as_deref(), Some("c-1"));
    assert!(stored.row.trace_parent.is_some());
    assert!(stored.row.headers.starts_with(r#"{"A":"1","traceparent":"#));
}

#[tokio::test(start_paused = true)]
async fn webhook_repeat_is_a_duplicate() {
    let world = world(source(SourceKind::Http));
    assert!(matches!(world.admit(message(r#"{"id":1}"#)).await, Admission::Stored(_)));
    assert_eq!(world.admit(message(r#"{"id":1}"#)).await, Admission::Duplicate);
    world.inbox.only_row();
    assert_eq!(world.counted.all(), ["Stored", "Duplicate"]);
}

#[tokio::test(start_paused = true)]
async fn webhook_invalid_json_is_400() {
    let world = world(source(SourceKind::Http));
    for body in ["", "{", "{'id':1}", "\u{feff}{}"] {
        let expected = Admission::Refused { kind: Refusal::NotJson, reason: "Invalid JSON".into() };
        assert_eq!(world.admit(message(body)).await, expected, "{body:?}");
    }
    for (body, reason) in [(r#"{"id":"a\u0000"}"#, "U+0000"), (r#"{"id":"\ud800"}"#, "surrogate")] {
        match world.admit(message(body)).await {
            Admission::Refused { kind: Refusal::BadAttribute, reason: said } => {
                assert!(said.contains(reason), "{said}")
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(world.inbox.rows().len(), 0);
    assert_eq!(world.counted.count("extraction_failed"), 6);
}

#[tokio::test(start_paused = true)]
async fn webhook_without_key_is_400() {
    let world = world(source(SourceKind::Http));
    for body in ["{}", r#"{"id":" "}"#, r#"{"id":{}}"#, r#"{"id":null}"#] {
        match world.admit(message(body)).await {
            Admission::Refused { kind: Refusal::BadAttribute, reason } => {
                assert_eq!(reason, "No idempotency key: nothing found in header x-idempotency-key, path $.id");
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(world.inbox.rows().len(), 0);
}

#[tokio::test(start_paused = true)]
async fn webhook_key_header_wins() {
    let world = world(source(SourceKind::Http));
    let body = r#"{"id":"path"}"#;
    world.admit(with_headers(body, &[("X-Idempotency-Key", "first"), ("x-idempotency-key", " header ")])).await;
    world.admit(with_headers(body, &[("X-Idempotency-Key", "  ")])).await;
    assert_eq!(world.admit(message(body)).await, Admission::Duplicate);
    assert_eq!(world.inbox.keys(), ["header", "path"]);
}

#[tokio::test(start_paused = true)]
async fn keys_never_merge() {
    let world = world(source(SourceKind::Http));
    for id in ["a", "A", "á", "a\u{301}", "a ", " a"] {
        let answer = world.admit(message(serde_json::json!({ "id": id }).to_string())).await;
        assert!(matches!(answer, Admission::Stored(_)), "{id:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn long_key_is_refused() {
    let http = world(source(SourceKind::Http));
    let body = |key: &str| message(format!(r#"{{"id":"{key}"}}"#));
    assert!(matches!(http.admit(body(&"é".repeat(255))).await, Admission::Stored(_)));
    let answer = http.admit(body(&"é".repeat(256))).await;
    assert!(matches!(answer, Admission::Refused { kind: Refusal::BadAttribute, .. }), "{answer:?}");
    let answer = http.admit(message(format!(r#"{{"id":1,"key":"{}"}}"#, "k".repeat(256)))).await;
    assert!(matches!(answer, Admission::Refused { kind: Refusal::BadAttribute, .. }), "{answer:?}");

    let broker = world(source(SourceKind::Kafka));
    assert!(matches!(broker.admit(body(&"k".repeat(256))).await, Admission::Stored(_)));
    assert_eq!(broker.admit(body(&"k".repeat(256))).await, Admission::Duplicate, "acknowledged again");
    let dead = broker.inbox.only_row();
    assert_eq!(dead.state, State::Dead);
    assert!(dead.last_error.unwrap().starts_with("bad_key: the idempotency key has 256 characters"));
    assert!(dead.row.idempotency_key.starts_with("sha256:") && dead.row.idempotency_key.len() == 71);

    broker.admit(message(format!(r#"{{"id":1,"key":"{}","type":"t"}}"#, "k".repeat(256)))).await;
    let dead = broker.inbox.rows().remove(1);
    assert_eq!((dead.state, dead.row.aggregate_id, dead.row.event_type), (State::Dead, None, Some("t".into())));
    assert_eq!(dead.row.idempotency_key, "1");
}

#[tokio::test(start_paused = true)]
async fn broker_not_json_is_one_dead_row() {
    let world = world(source(SourceKind::RabbitMq));
    let bodies: [(&[u8], &str); 4] = [
        (b"hello \"you\"", r#"{"raw":"hello \"you\""}"#),
        (b"a\0b", r#"{"rawBase64":"YQBi"}"#),
        (b"\xff\xfe", r#"{"rawBase64":"//4="}"#),
        (br#"{"id":"a\u0000b"}"#, r#"{"raw":"{\"id\":\"a\\u0000b\"}"}"#),
    ];
    for (index, (body, payload)) in bodies.into_iter().enumerate() {
        assert!(matches!(world.admit(message(Bytes::from_static(body))).await, Admission::Stored(_)));
        let dead = world.inbox.rows().remove(index);
        assert_eq!(dead.row.payload, payload);
        assert!(dead.last_error.unwrap().starts_with("not_json: "), "{body:?}");
        assert_eq!(world.admit(message(Bytes::from_static(body))).await, Admission::Duplicate);
    }
    assert!(matches!(world.admit(message(r#"{"id":1}"#)).await, Admission::Stored(_)), "the next one is stored");
    assert_eq!(world.inbox.rows().last().unwrap().state, State::Pending);
    assert_eq!(world.counted.count("extraction_failed"), 4);
    assert_eq!(world.counted.count("Stored"), 1, "dead rows are not counted as new");
}

#[tokio::test(start_paused = true)]
async fn filtered_message_leaves_no_row() {
    let mut config = source(SourceKind::Http);
    config
        .filter
        .require
        .push(Rule { header: "X-Event".into(), test: Test::Matches(Pattern::parse("order.*").unwrap()) });
    let world = world(config);
    assert_eq!(world.admit(with_headers("not even JSON", &[("x-event", "ping")])).await, Admission::Filtered);
    assert!(matches!(
        world.admit(with_headers(r#"{"id":1}"#, &[("x-event", "order.created")])).await,
        Admission::Stored(_)
    ));
    assert_eq!(world.inbox.rows().len(), 1);
    assert_eq!(world.counted.count("Filtered { source: \"orders\" }"), 1);
}

#[tokio::test(start_paused = true)]
async fn aggregate_expression_splits_a_value() {
    let mut config = source(SourceKind::Http);
    config.aggregate_id.expression = Some(Expression::compile("$substringBefore(ref, \"-\")").unwrap());
    let world = world(config);
    world.admit(message(r#"{"id":1,"ref":"a-7","key":"path"}"#)).await;
    world.admit(message(r#"{"id":2,"ref":5,"key":"path"}"#)).await;
    let aggregates: Vec<_> = world.inbox.rows().into_iter().map(|stored| stored.row.aggregate_id.unwrap()).collect();
    assert_eq!(aggregates, ["a", "path"], "an expression that fails gives no value");
}

#[tokio::test(start_paused = true)]
async fn publish_time_order() {
    let mut config = source(SourceKind::Kafka);
    config.initial_delay = Duration::from_secs(30);
    config.published_at =
        Some(PublishTime { header: Some("published".into()), paths: vec![Path::parse("$.at").unwrap()] });
    let world = world(config);
    tokio::time::advance(Duration::from_secs(100)).await;
    let received = |id: u32, header: &[(&str, &str)], at: &str, record_time| Received {
        published_at_us: record_time,
        ..with_headers(&format!(r#"{{"id":{id},"at":{at}}}"#), header)
    };
    let batch = vec![
        received(0, &[("published", "50")], "60", Some(70_000_000)),
        received(1, &[], "60", Some(70_000_000)),
        received(2, &[], "null", Some(70_000_000)),
        received(3, &[], "null", None),
        received(4, &[("published", "junk")], "60", Some(70_000_000)),
        received(5, &[("published", "4000000000")], "60", None),
    ];
    world.intake.admit(batch).await;
    let due: Vec<_> = world.inbox.rows().into_iter().map(|stored| stored.scheduled_at_us / 1_000_000).collect();
    assert_eq!(due, [80, 90, 100, 130, 130, 130]);
}

#[tokio::test(start_paused = true)]
async fn transform_failure_matrix() {
    for (kind, on_error) in [SourceKind::Http, SourceKind::RabbitMq]
        .into_iter()
        .flat_map(|kind| [OnError::Fail, OnError::Skip, OnError::Dead].map(|on_error| (kind, on_error)))
    {
        let mut config = source(kind);
        config.transform = transform("$error(\"no such thing\")", on_error);
        let world = world(config);
        let answer = world.admit(message(r#"{"id": 1}"#)).await;
        match (kind.is_broker(), on_error) {
            (_, OnError::Skip) => {
                let stored = world.inbox.only_row();
                assert_eq!((stored.state, stored.row.payload), (State::Pending, Bytes::from(r#"{"id": 1}"#)));
            }
            (false, _) => {
                let expected = Admission::Refused { kind: Refusal::Transform, reason: "D3137: no such thing".into() };
                assert_eq!(answer, expected);
                assert_eq!(world.inbox.rows().len(), 0);
                assert_eq!(world.counted.all(), ["transform_failed"]);
            }
            (true, _) => {
                let dead = world.inbox.only_row();
                assert_eq!((dead.state, dead.row.payload), (State::Dead, Bytes::from(r#"{"id": 1}"#)));
                assert_eq!(dead.last_error.unwrap(), "rejected: D3137: no such thing");
                assert_eq!(world.counted.all(), ["transform_failed"]);
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn transform_variables() {
    let mut config = source(SourceKind::Http);
    let expression = r#"{"id": $messageId, "t": $topic, "n": $attempt, "at": $timestamp, "s": $source, "h": $headers."X-A",
        "k": $idempotencyKey, "e": $eventType}"#;
    config.transform = transform(expression, OnError::Fail);
    let world = world(config);
    world.admit(with_headers(r#"{"id":"k","type":"created"}"#, &[("X-A", "1")])).await;
    let stored = world.inbox.only_row();
    let expected = format!(
        r#"{{"id":"{}","t":"created","n":0,"at":"2026-09-21T14:13:20.000000Z","s":"orders","h":"1","k":"k","e":"created"}}"#,
        stored.row.id
    );
    assert_eq!(stored.row.payload, expected);

    world.admit(with_headers(r#"{"id":"k2"}"#, &[])).await;
    let payload = world.inbox.rows().remove(1).row.payload;
    assert!(payload.ends_with(br#""s":"orders","k":"k2","e":null}"#), "{payload:?}");
}

#[tokio::test(start_paused = true)]
async fn failing_transform_repeat_is_422() {
    let mut config = source(SourceKind::Http);
    config.transform = transform("$number(n)", OnError::Fail);
    let world = world(config);
    assert!(matches!(world.admit(message(r#"{"id":1,"n":"5"}"#)).await, Admission::Stored(_)));
    let again = world.admit(message(r#"{"id":1,"n":"five"}"#)).await;
    assert!(matches!(again, Admission::Refused { kind: Refusal::Transform, .. }), "{again:?}");
}

#[tokio::test(start_paused = true)]
async fn pull_rows_have_no_topic_and_bad_topics_are_left_to_the_relay() {
    let mut config = source(SourceKind::Http);
    config.consumption = Consumption::Pull;
    let pull = world(config);
    pull.admit(message(r#"{"id":1,"type":"t"}"#)).await;
    assert_eq!((pull.inbox.only_row().row.topic, pull.inbox.only_row().row.consumption), (None, Consumption::Pull));
    let push = world(source(SourceKind::Http));
    push.admit(message(r#"{"id":1}"#)).await;
    assert_eq!(push.inbox.only_row().row.topic, None);
}

/// case D11, as far as the intake goes
#[tokio::test(start_paused = true)]
async fn one_bad_record_fails_alone() {
    let world = world(source(SourceKind::Kafka));
    *world.inbox.on_admit.lock().unwrap() = Some(Box::new(|batch| {
        let is_bad = batch.iter().any(|row| row.idempotency_key == "4");
        if is_bad { Err(Fault::transient("raised", "a trigger says no")) } else { Ok(()) }
    }));
    let batch = |range: std::ops::Range<u32>| range.map(|n| message(format!(r#"{{"id":{n}}}"#))).collect::<Vec<_>>();
    let before = tokio::time::Instant::now();
    let answers = world.intake.admit(batch(0..10)).await;
    for (n, answer) in answers.iter().enumerate() {
        assert_eq!(matches!(answer, Admission::Failed(fault) if fault.code == "raised"), n == 4, "{n}: {answer:?}");
    }
    assert!(before.elapsed() > Duration::from_secs(15), "it was tried again in place: {:?}", before.elapsed());
    assert_eq!(world.counted.count("storage_failed"), 1);
    *world.inbox.on_admit.lock().unwrap() = None;
    assert!(matches!(world.intake.admit(batch(4..5)).await[0], Admission::Stored(_)));
    assert!(world.inbox.rows().iter().all(|stored| stored.state == State::Pending), "never a dead row");
}

#[tokio::test(start_paused = true)]
async fn a_broker_store_is_tried_again_until_it_works() {
    let world = world(source(SourceKind::Nats));
    *world.inbox.on_admit.lock().unwrap() = Some(Box::new(|_| Err(Fault::transient("io", "gone"))));
    let (answers, ()) = tokio::join!(world.intake.admit(vec![message(r#"{"id":1}"#), message(r#"{"id":2}"#)]), async {
        tokio::time::sleep(Duration::from_secs(8)).await;
        *world.inbox.on_admit.lock().unwrap() = None;
    });
    assert!(answers.iter().all(|answer| matches!(answer, Admission::Stored(_))), "{answers:?}");
    assert_eq!(world.inbox.keys(), ["1", "2"], "in order");
    assert!(world.inbox.batches.lock().unwrap().len() < 20, "with pauses");
}

#[tokio::test(start_paused = true)]
async fn a_stop_ends_the_tries() {
    let world = world(source(SourceKind::Nats));
    *world.inbox.on_admit.lock().unwrap() = Some(Box::new(|_| Err(Fault::transient("io", "gone"))));
    let before = tokio::time::Instant::now();
    let (answer, ()) = tokio::join!(world.admit(message(r#"{"id":1}"#)), async {
        tokio::time::sleep(Duration::from_secs(1)).await;
        world.stop.cancel();
    });
    assert!(matches!(answer, Admission::Failed(_)));
    assert!(before.elapsed() < Duration::from_secs(2));
}

/// conformance 158, as far as the intake goes
#[tokio::test(start_paused = true)]
async fn a_sender_is_answered_within_the_store_timeout() {
    let world = world(source(SourceKind::Http));
    *world.inbox.hanging_key.lock().unwrap() = Some(("1".to_owned(), Arc::new(Notify::new())));
    let before = tokio::time::Instant::now();
    assert!(matches!(world.admit(message(r#"{"id":1}"#)).await, Admission::Failed(_)));
    assert_eq!(before.elapsed(), Duration::from_secs(5));
    *world.inbox.hanging_key.lock().unwrap() = None;
    assert!(matches!(world.admit(message(r#"{"id":1}"#)).await, Admission::Stored(_)), "a repeat gives one row");
    world.inbox.only_row();
}

/// Refuses rows of which `is_bad` says so.
fn refuse(is_bad: impl Fn(&NewInboxRow) -> bool + Send + Sync + 'static) -> Option<RefuseHook> {
    let fault = || Fault::refused("value", "the database says no");
    Some(Box::new(move |row| is_bad(row).then(|| Admitted::Refused(fault()))))
}

#[tokio::test(start_paused = true)]
async fn what_the_database_refuses_is_told_to_a_sender() {
    let world = world(source(SourceKind::Http));
    *world.inbox.on_row.lock().unwrap() = refuse(|_| true);
    let expected = Admission::Refused { kind: Refusal::BadAttribute, reason: "the database says no".into() };
    assert_eq!(world.admit(message(r#"{"id":1}"#)).await, expected);
}

#[tokio::test(start_paused = true)]
async fn what_the_database_refuses_from_a_broker_is_one_dead_row() {
    let mut config = source(SourceKind::Kafka);
    config.store_within = Duration::ZERO;
    let body = world(config.clone());
    *body.inbox.on_row.lock().unwrap() = refuse(|row| row.payload.starts_with(b"{\"id\""));
    let before = tokio::time::Instant::now();
    assert!(matches!(body.admit(message(r#"{"id":1}"#)).await, Admission::Stored(_)));
    assert_eq!(before.elapsed(), Duration::ZERO, "at once, whatever the window for retries");
    let dead = body.inbox.only_row();
    assert_eq!(dead.last_error.unwrap(), "not_json: the database says no");
    assert_eq!(dead.row.payload, r#"{"raw":"{\"id\":1}"}"#);

    let key = world(config.clone());
    *key.inbox.on_row.lock().unwrap() = refuse(|row| row.idempotency_key == "1");
    assert!(matches!(key.admit(message(r#"{"id":1}"#)).await, Admission::Stored(_)));
    let dead = key.inbox.only_row();
    assert_eq!(dead.last_error.unwrap(), "bad_key: the database says no");
    assert!(dead.row.idempotency_key.starts_with("sha256:"));

    let all = world(config);
    *all.inbox.on_row.lock().unwrap() = refuse(|_| true);
    assert!(matches!(all.admit(message(r#"{"id":1}"#)).await, Admission::Failed(_)), "and never a loop");
}

/// case D11: the fault of one row that may pass makes no dead row
#[tokio::test(start_paused = true)]
async fn a_row_refused_for_a_passing_reason_is_tried_again() {
    let world = world(source(SourceKind::Kafka));
    *world.inbox.on_row.lock().unwrap() = Some(Box::new(|row| {
        (row.idempotency_key == "1").then(|| Admitted::Refused(Fault::transient("raised", "a trigger says no")))
    }));
    let (answers, ()) = tokio::join!(world.intake.admit(vec![message(r#"{"id":1}"#), message(r#"{"id":2}"#)]), async {
        tokio::time::sleep(Duration::from_secs(5)).await;
        *world.inbox.on_row.lock().unwrap() = None;
    });
    assert!(answers.iter().all(|answer| matches!(answer, Admission::Stored(_))), "{answers:?}");
    assert!(world.inbox.rows().iter().all(|stored| stored.state == State::Pending));
}

/// conformance 13, as far as the intake goes
#[tokio::test(start_paused = true)]
async fn existing_collation_never_loses() {
    let world = world(source(SourceKind::Http));
    *world.inbox.on_row.lock().unwrap() =
        Some(Box::new(|_| Some(Admitted::Collision(Fault::misconfigured("collation", "the column merges keys")))));
    assert!(
        matches!(world.admit(message(r#"{"id":"A"}"#)).await, Admission::Failed(fault) if fault.code == "collation")
    );
}

/// conformance 151, as far as the intake goes
#[tokio::test(start_paused = true)]
async fn admit_batch_keeps_order() {
    let mut config = source(SourceKind::Kafka);
    config.transform = transform("$", OnError::Fail);
    let world = world(config);
    let batch: Vec<_> = (0..1200).map(|n| message(format!(r#"{{"id":{n},"key":"k"}}"#))).collect();
    let answers = world.intake.admit(batch).await;
    assert!(answers.iter().all(|answer| matches!(answer, Admission::Stored(_))));
    assert_eq!(world.inbox.keys(), (0..1200).map(|n| n.to_string()).collect::<Vec<_>>());
    assert_eq!(*world.inbox.batches.lock().unwrap(), [500, 500, 200]);
}

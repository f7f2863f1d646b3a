//! Section S: what the command line prints, and how it ends; what becomes of messages, followed and traced.

use std::{collections::BTreeSet, sync::Arc};

use opentelemetry_proto::tonic::{
    collector::trace::v1::ExportTraceServiceRequest, common::v1::any_value, trace::v1::Span,
};
use prost::Message as _;
use queuebox_testkit::{self as testkit, Answer, CANARY, Process, Recorder};
use serde_json::{Value, json};

use crate::support::{Kind, OutboxRow, PATIENCE, Worker, World, on_every_database, text};

/// Statuses that were told, with topic and destination.
fn told(tail: &Process) -> BTreeSet<(String, String, String)> {
    let outcomes = tail.stdout();
    let outcomes = outcomes.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let word = |outcome: &Value, field: &str| outcome[field].as_str().unwrap_or_default().to_owned();
    outcomes.map(|it| (word(&it, "status"), word(&it, "topic"), word(&it, "destination"))).collect()
}

async fn tail_follows_outcomes(kind: Kind) {
    let broken = Recorder::start().await;
    broken.answer_always(Answer::status(500));
    let auth = json!({ "bearer": { "tokenFrom": { "env": "ADMIN_TOKEN" } } });
    let world = World::on(kind)
        .await
        .env("ADMIN_TOKEN", CANARY)
        .destination("second", json!({ "http": { "url": broken.url() } }))
        .routes(&[("order.*", &["receiver"]), ("both", &["receiver", "second"])])
        .relay(json!({ "admin": { "insecure": null, "auth": auth } }));
    let worker = world.start().await;
    let manifests = world.write_manifests(worker.http, worker.management);
    let tail = |more: &[&str]| world.program(&[&["tail", "-f", manifests.to_str().unwrap()], more].concat()).separate();
    let all = tail(&["--output", "json", "--limit", "6"]);
    let some =
        tail(&["--topic", "order.*", "--status", "sent", "--destination", "receiver", "--key", "k", "--limit", "1"]);
    for tail in [&all, &some] {
        tail.wait_output("Following", PATIENCE).await;
    }
    let row = OutboxRow::new("order.made", 1).key("k");
    let id = world.db.insert(row).await;
    world.db.insert(OutboxRow::new("both", 2).max_attempts(2)).await;
    world.db.insert(OutboxRow::new("nowhere", 3)).await;
    assert!(all.wait(PATIENCE).await.success(), "{}", all.output());
    let wanted = [
        ("sent", "order.made", "receiver"),
        ("expanded", "both", ""),
        ("sent", "both", "receiver"),
        ("failed", "both", "second"),
        ("dead", "both", "second"),
        ("dead", "nowhere", ""),
    ];
    let wanted: BTreeSet<_> = wanted.map(|(a, b, c)| (a.to_owned(), b.to_owned(), c.to_owned())).into();
    assert_eq!(told(&all), wanted);
    assert!(some.wait(PATIENCE).await.success(), "{}", some.output());
    let line = some.stdout();
    assert_eq!(line.lines().count(), 1, "{line}");
    assert!(line.contains(&id) && line.contains("order.made") && line.contains("-> receiver"), "{line}");

    // A row that the death of a worker too many left behind: nobody had it in memory.
    let buried = tail(&["--output", "json", "--limit", "1", "--destination", "receiver", "--status", "dead"]);
    buried.wait_output("Following", PATIENCE).await;
    let ended = world.db.in_seconds(-1);
    let row = OutboxRow::new("order.fatal", 5).key("k").set("state", "'processing'").set("crashes", "4");
    world.db.insert(row.set("lease_expires_at", &ended)).await;
    assert!(buried.wait(PATIENCE).await.success(), "{}", buried.output());
    assert_eq!(told(&buried), [("dead".to_owned(), "order.fatal".to_owned(), "receiver".to_owned())].into());
    assert!(buried.stdout().contains("crashes:"), "{}", buried.stdout());

    // It ends after a time, when the worker ends, and not at all without the right to follow.
    let (status, out, log) = tail(&["--for", "200ms"]).ended().await;
    assert!(status.success() && out.is_empty(), "{out}{log}");
    let (url, wrong) = (worker.management_url(""), world.env("ADMIN_TOKEN", "wrong"));
    let (status, out, log) = wrong.program(&["tail", "-f", manifests.to_str().unwrap()]).run(PATIENCE).await;
    assert_eq!((status.code(), out.as_str()), (Some(1), ""), "{log}");
    assert!(log.contains("401"), "{log}");
    let world = wrong.env("ADMIN_TOKEN", CANARY);
    // Without manifests there are neither topics nor keys.
    let (status, _, log) = world.program(&["tail", "--url", &url, "--key", "k"]).run(PATIENCE).await;
    assert_eq!(status.code(), Some(2), "{log}");
    let bare = world.program(&["tail", "--url", &url, "--limit", "1", "--output", "json"]).separate();
    bare.wait_output("Following", PATIENCE).await;
    let id = world.db.insert(OutboxRow::new("order.made", 4).key("k")).await;
    let (status, out, log) = bare.ended().await;
    assert!(
        status.success() && out.contains(&id) && !out.contains("order.made") && !out.contains("\"key\""),
        "{out}{log}"
    );
    let tail = |more: &[&str]| world.program(&[&["tail", "-f", manifests.to_str().unwrap()], more].concat()).separate();
    let last = tail(&[]);
    last.wait_output("Following", PATIENCE).await;
    worker.process.terminate(PATIENCE).await;
    assert!(last.wait(PATIENCE).await.success(), "{}", last.output());
    world.finish().await;
}

/// What is left of a program that runs.
trait Ended {
    async fn ended(self) -> (std::process::ExitStatus, String, String);
}

impl Ended for Process {
    async fn ended(self) -> (std::process::ExitStatus, String, String) {
        let status = self.wait(PATIENCE).await;
        (status, self.stdout(), self.output())
    }
}

/// Every command that prints a result: `--output json` gives one JSON value, and the exit code is 0, 1 or 2.
#[tokio::test]
async fn commands_print_json_and_exit_codes() {
    let world = World::on(Kind::Sqlite).await.routes(&[("order", &["receiver"])]);
    let worker = world.start().await;
    let manifests = world.write_manifests(worker.http, worker.management);
    let f = manifests.to_str().unwrap();
    let wrong = world.folder().join("wrong.yaml");
    std::fs::write(&wrong, "apiVersion: queuebox.io/v1alpha1\nkind: Relay\nmetadata: {name: a}\nspec: {rutes: []}\n")
        .unwrap();
    let wrong = wrong.to_str().unwrap();
    let classic = world.folder().join("queuebox.yml");
    std::fs::write(&classic, "outbox:\n  pollIntervalMs: 100\n").unwrap();
    let classic = classic.to_str().unwrap();
    let dead = |n: i64| OutboxRow::new("dead", n).set("state", "'dead'").set("last_error", "'attempts: HTTP 500'");
    let ids = world.db.insert_all([dead(1), dead(2)]).await;
    let (first, second) = (ids[0].as_str(), ids[1].as_str());
    let (url, ready, gone) =
        (worker.management_url(""), worker.management_url("/readyz"), worker.management_url("/nothing"));
    let nobody = format!("http://127.0.0.1:{}", testkit::free_port());
    let nil = uuid::Uuid::nil().to_string();

    type Line<'a> = (&'a [&'a str], i32, fn(&Value) -> bool);
    let lines: [Line<'_>; 30] = [
        (&["check", "-f", f], 0, |it| it["relays"][0]["name"] == "shop" && it["problems"] == json!([])),
        (&["check", "-f", wrong], 1, |it| it["problems"][0]["path"] == "spec.rutes"),
        (&["check", "-f", f, "--explain", "order"], 0, |it| {
            it["route"] == 0 && it["destinations"][0]["kind"] == "http"
        }),
        (&["check", "-f", f, "--explain", "nowhere"], 1, |it| it["route"].is_null()),
        (&["migrate", "-f", f], 0, |it| it["to"] == 14 && it["applied"] == json!([])),
        (&["migrate", "-f", f, "--print-grants", "worker"], 0, |it| *it == json!([])),
        (&["migrate", "-f", f, "--baseline", "14"], 1, Value::is_null),
        (&["doctor", "-f", f], 0, |it| it.as_array().is_some_and(|findings| findings.len() > 3)),
        (&["dead", "list", "-f", f], 0, |it| it["items"].as_array().is_some_and(|items| items.len() == 2)),
        (&["dead", "list", "-f", f, "--limit", "0"], 2, Value::is_null),
        (&["dead", "show", "-f", f, first], 0, |it| it["topic"] == "dead" && it["payload"].is_object()),
        (&["dead", "show", "-f", f, &nil], 1, Value::is_null),
        (&["dead", "show", "-f", f, "no-id"], 2, Value::is_null),
        (&["dead", "requeue", "-f", f, "--id", first, "--dry-run"], 0, |it| it["matched"] == 1 && it["moved"] == 0),
        (&["dead", "requeue", "-f", f, "--id", first], 0, |it| it["moved"] == 1),
        (&["dead", "discard", "-f", f, "--id", second], 0, |it| it["discarded"] == 1),
        (&["dead", "discard", "-f", f], 2, Value::is_null),
        (&["replay", "-f", f, "--topic", "none"], 0, |it| it["moved"] == 0),
        (&["replay", "-f", f, "--created-after", "noon"], 2, Value::is_null),
        (&["replay", "-f", f], 2, Value::is_null),
        (&["status", "--url", &url], 0, |it| it["readiness"] == "Ready"),
        (&["status", "--url", &nobody], 1, Value::is_null),
        (&["explain", "--url", &url], 0, Value::is_array),
        (&["probe", &ready], 0, |it| it["status"] == 200 && it["body"]["status"] == "healthy"),
        (&["probe", &gone], 1, |it| it["status"] == 404),
        (&["convert", classic], 0, |it| it["manifests"].as_str().is_some_and(|it| it.contains("kind: Relay"))),
        (&["convert", wrong], 1, |it| it.is_null() || it["manifests"].is_string()),
        (&["lab", "dual-write", "--orders", "20"], 0, |it| it[0]["delivered"].is_number()),
        (&["tail", "-f", f, "--for", "100ms"], 0, Value::is_null),
        (&["tail", "--url", &nobody], 1, Value::is_null),
    ];
    for (arguments, code, is_right) in lines {
        let all = [arguments, &["--output", "json"]].concat();
        let (status, out, log) = world.program(&all).run(PATIENCE).await;
        assert_eq!(status.code(), Some(code), "{arguments:?}: {out}{log}");
        let values: Vec<Value> = out.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
        assert!(values.len() <= 1, "{arguments:?}: {out}");
        let value = values.into_iter().next().unwrap_or(Value::Null);
        assert!(is_right(&value), "{arguments:?}: {value:#}");
        assert_eq!(code == 0, !log.contains("queuebox: ") && !log.contains("error: "), "{arguments:?}: {log}");
    }
    for (arguments, code) in [
        (&["help"][..], 0),
        (&["--version"], 0),
        (&["check", "--help"], 0),
        (&[], 2),
        (&["bogus"], 2),
        (&["check", "--bogus"], 2),
        (&["run"], 2),
    ] {
        let (status, out, log) = world.program(arguments).run(PATIENCE).await;
        assert_eq!(status.code(), Some(code), "{arguments:?}: {out}{log}");
    }
    world.finish().await;
}

/// Long work shows how far it is to somebody at a terminal, and to nobody else.
#[tokio::test]
async fn progress_is_shown_on_a_terminal_only() {
    let world = World::on(Kind::Sqlite).await;
    let folder = world.write_manifests(1, 2);
    let migrate = ["migrate", "-f", folder.to_str().unwrap()];
    let command = format!("{} {}", testkit::queuebox_binary().display(), migrate.join(" "));
    // A terminal of its own.
    let at_a_terminal = async |more: &str| {
        let command = format!("{command}{more}");
        let (status, out, log) = Process::program("script").args(["-qefc", &command, "/dev/null"]).run(PATIENCE).await;
        assert!(status.success(), "{out}{log}");
        out + &log
    };
    let seen = at_a_terminal("").await;
    assert!(seen.contains("Migrating") && seen.contains("The schema is at version"), "{seen}");
    let json = at_a_terminal(" --output json").await;
    assert!(!json.contains("Migrating") && serde_json::from_str::<Value>(json.trim()).is_ok(), "{json}");
    let (status, out, log) = world.program(&migrate).run(PATIENCE).await;
    assert!(status.success() && !format!("{out}{log}").contains("Migrating"), "{out}{log}");
    world.finish().await;
}

/// Every line of a JSON log is an object, and what is said of a message carries its id.
async fn json_log_has_message_ids(kind: Kind) {
    let world = World::on(kind).await.source("hooks", json!({ "topic": "{{ eventType }}", "eventTypePath": "$.type" }));
    world.receiver.answer_always(Answer::status(500));
    let worker = world.spawn_with(&["--log-format", "json", "--log", "queuebox_engine=debug,info"]);
    worker.ready().await;
    let id = world.db.insert(OutboxRow::new("order", 1).max_attempts(2)).await;
    let dead = worker.post("hooks", r#"{"id":1}"#).await.accepted();
    world.db.wait_outbox(&id, "dead").await;
    world.db.wait_row("SELECT state FROM inbox", |row| text(row, "state") == "dead").await;
    worker.process.terminate(PATIENCE).await;
    let log = worker.process.output();
    let lines: Vec<Value> =
        log.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"))).collect();
    let about = |field: &str, id: &str, part: &str| {
        lines.iter().any(|line| line[field] == id && line["message"].as_str().is_some_and(|said| said.contains(part)))
    };
    assert!(about("message_id", &id, "will be tried again") && about("message_id", &id, "is dead"), "{log}");
    assert!(about("inbox_id", &dead, "is dead"), "{log}");
    world.finish().await;
}

on_every_database!(tail_follows_outcomes, json_log_has_message_ids);

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const PARENT: &str = "00f067aa0ba902b7";

/// Spans that a collector was given.
fn spans(collector: &Recorder) -> Vec<Span> {
    let requests = collector.requests();
    let exports = requests.iter().map(|request| {
        assert_eq!((request.path(), request.header("content-type")), ("/v1/traces", "application/x-protobuf"));
        ExportTraceServiceRequest::decode(request.body.clone()).unwrap()
    });
    exports.flat_map(|export| export.resource_spans).flat_map(|it| it.scope_spans).flat_map(|it| it.spans).collect()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn attribute(span: &Span, name: &str) -> Option<String> {
    let found = span.attributes.iter().find(|attribute| attribute.key == name)?;
    match found.value.clone()?.value? {
        any_value::Value::StringValue(text) => Some(text),
        any_value::Value::IntValue(number) => Some(number.to_string()),
        other => panic!("{name}: {other:?}"),
    }
}

mod export_shows_one_trace {
    use super::*;

    async fn traced(kind: Kind, collector: &Recorder) -> (World, Arc<Worker>) {
        let world = World::on(kind)
            .await
            .source("hooks", json!({ "topic": "order.made" }))
            .env("OTEL_EXPORTER_OTLP_ENDPOINT", &collector.url())
            .env("OTEL_BSP_SCHEDULE_DELAY", "100");
        let worker = world.start().await;
        (world, worker)
    }

    /// Spans of this trace, once there are so many.
    async fn of_trace(collector: &Recorder, trace: &str, count: usize) -> Vec<Span> {
        testkit::eventually("the spans", PATIENCE, || async {
            let mut found = spans(collector);
            found.retain(|span| hex(&span.trace_id) == trace);
            (found.len() >= count).then_some(found)
        })
        .await
    }

    async fn from_receipt_to_delivery(kind: Kind) {
        let collector = Recorder::start().await;
        let (world, worker) = traced(kind, &collector).await;
        world.receiver.answer_next([Answer::status(503)]);
        let context = format!("00-{TRACE}-{PARENT}-01");
        let inbox_id = worker.post_with("hooks", &[("traceparent", &context)], r#"{"id":1}"#).await.accepted();
        let requests = world.receiver.wait_for(2, PATIENCE).await;
        let found = of_trace(&collector, TRACE, 4).await;
        let named = |name: &str| found.iter().filter(|span| span.name == name).collect::<Vec<_>>();
        let (received, forwarded) = (named("receive hooks"), named("forward hooks"));
        let ([receive], [_]) = (&received[..], &forwarded[..]) else { panic!("{found:#?}") };
        let deliveries = named("deliver receiver");
        assert_eq!((found.len(), deliveries.len()), (4, 2), "{found:#?}");
        assert_eq!(hex(&receive.parent_span_id), PARENT);
        for span in [&forwarded[..], &deliveries[..]].concat() {
            assert_eq!(span.parent_span_id, receive.span_id, "{span:#?}");
        }
        assert_eq!(attribute(receive, "messaging.message.id"), Some(inbox_id));
        assert_eq!(attribute(receive, "queuebox.topic").as_deref(), Some("order.made"));
        for span in &found {
            assert!(span.end_time_unix_nano >= span.start_time_unix_nano, "{span:#?}");
        }
        // Each request carries the context of its own attempt, and the failed one says why.
        for (attempt, request) in requests.iter().enumerate() {
            let span = deliveries
                .iter()
                .find(|span| attribute(span, "queuebox.attempt") == Some(attempt.to_string()))
                .unwrap_or_else(|| panic!("{deliveries:#?}"));
            assert_eq!(request.header("traceparent"), format!("00-{TRACE}-{}-01", hex(&span.span_id)));
            let failure = span.status.as_ref().map(|status| status.message.clone()).unwrap_or_default();
            assert_eq!(failure.contains("503"), attempt == 0, "{failure}");
        }
        world.finish().await;
    }

    on_every_database!(from_receipt_to_delivery);

    /// A row of an application has a trace of its own unless it names one; who does not sample is respected; what is left is exported at
    /// the end.
    #[tokio::test]
    async fn of_rows() {
        let collector = Recorder::start().await;
        let (world, worker) = traced(Kind::Sqlite, &collector).await;
        let alone = world.db.insert(OutboxRow::new("order", 1)).await;
        let context = format!("00-{TRACE}-{PARENT}-01");
        let named = world.db.insert(OutboxRow::new("order", 2).headers(json!({ "traceparent": context }))).await;
        let unsampled = format!("00-{}-{PARENT}-00", TRACE.replace('4', "5"));
        let silent = world.db.insert(OutboxRow::new("order", 3).set("trace_parent", &format!("'{unsampled}'"))).await;
        let requests = world.receiver.wait_for(3, PATIENCE).await;
        world.db.wait_states("outbox", &[("sent", 3)]).await;
        assert!(worker.process.terminate(PATIENCE).await.success());
        let found = spans(&collector);
        let of = |id: &str| found.iter().find(|span| attribute(span, "messaging.message.id").as_deref() == Some(id));
        let (alone, named) = (of(&alone).unwrap(), of(&named).unwrap());
        assert!(alone.parent_span_id.is_empty() && hex(&alone.trace_id) != TRACE);
        assert_eq!((hex(&named.trace_id).as_str(), hex(&named.parent_span_id).as_str()), (TRACE, PARENT));
        assert!(of(&silent).is_none(), "{found:#?}");
        let header =
            requests.iter().find(|request| request.header("x-message-id") == silent).unwrap().header("traceparent");
        assert!(header.starts_with(&unsampled[..35]) && header.ends_with("-00"), "{header}");
        world.finish().await;
    }

    /// A collector that is away delays nothing and is said once.
    #[tokio::test]
    async fn to_nobody() {
        let collector = Recorder::start().await;
        collector.stop().await;
        let (world, worker) = traced(Kind::Sqlite, &collector).await;
        world.db.insert_all((0..20).map(|n| OutboxRow::new("order", n))).await;
        world.receiver.wait_for(20, PATIENCE).await;
        worker.process.wait_output("Spans cannot be exported", PATIENCE).await;
        assert!(worker.process.terminate(PATIENCE).await.success());
        assert_eq!(worker.process.output().matches("Spans cannot be exported").count(), 1);
        world.finish().await;
    }
}

//! Real input: the sample payloads that GitHub publishes of its webhooks, sent as GitHub sends them.
//!
//! `./dev packages` fetches them; they are not part of the repository.

use std::{collections::BTreeMap, time::Duration};

use queuebox_testkit::{self as testkit, Answer, Recorded, promise};
use serde_json::{Value, json};

use super::inbound::{github, github_signature};
use crate::support::{Answered, Kind, Worker, World, on_every_database};

/// A delivery: event and body.
struct Sample {
    event: String,
    body: String,
}

/// All samples, in the order of the package.
fn samples() -> Vec<Sample> {
    let file = testkit::cache_dir().join("webhooks/package/api.github.com/index.json");
    let text = std::fs::read_to_string(&file)
        .unwrap_or_else(|error| panic!("{}: {error}; run `./dev packages` once", file.display()));
    let events: Vec<Value> = serde_json::from_str(&text).unwrap();
    let of_event = |event: &Value| -> Vec<Sample> {
        let name = event["name"].as_str().unwrap().to_owned();
        let bodies = event["examples"].as_array().unwrap().iter();
        bodies.map(|body| Sample { event: name.clone(), body: body.to_string() }).collect()
    };
    events.iter().flat_map(of_event).collect()
}

fn delivery_id(n: usize) -> String {
    format!("00000000-0000-11f0-8000-{n:012}")
}

/// Posts a sample with the headers of GitHub.
async fn deliver(worker: &Worker, n: usize, sample: &Sample) -> Answered {
    let (delivery, signature) = (delivery_id(n), github_signature(&sample.body));
    let headers = [
        ("user-agent", "GitHub-Hookshot/044aadd"),
        ("content-type", "application/json"),
        ("x-github-hook-id", "292430182"),
        ("x-github-event", sample.event.as_str()),
        ("x-github-delivery", delivery.as_str()),
        ("x-hub-signature-256", signature.as_str()),
    ];
    worker.post_with("github", &headers, sample.body.as_str()).await
}

fn number_of(request: &Recorded) -> usize {
    request.header("x-idempotency-key").rsplit('-').next().unwrap().parse().unwrap()
}

/// What the receiver does to the first attempts: some connections drop, some are not answered, some answers are slow, some are failures.
fn rough(request: &Recorded) -> Answer {
    let n = number_of(request);
    match (request.header("x-attempt"), n % 9) {
        ("0", 8) if n % 108 == 8 => Answer::stall(),
        ("0", 1) => Answer::close(),
        ("0", 3) => Answer::status(500).body("out of order"),
        ("0", 5) => Answer::status(503).header("retry-after", "0"),
        ("1", 1) => Answer::status(502),
        (_, 7) => Answer::ok().after(Duration::from_millis(40)),
        _ => Answer::ok(),
    }
}

/// Attempts that such a receiver takes; only the last one is answered well.
fn attempts(n: usize) -> usize {
    match n % 9 {
        1 => 3,
        3 | 5 => 2,
        _ if n % 108 == 8 => 2,
        _ => 1,
    }
}

async fn github_samples_arrive_unchanged(kind: Kind) {
    let samples = samples();
    assert!(samples.len() > 300, "only {} samples", samples.len());
    let world = github(World::on(kind).await).relay(json!({
        "outbox": { "backoff": { "initial": "50ms", "max": "100ms" } },
    }));
    world.receiver.answer_with(rough);
    let worker = world.start().await;
    // One after the other, as one repository's deliveries come; every seventh is sent again at once, as after a lost answer.
    for (n, sample) in samples.iter().enumerate() {
        deliver(&worker, n, sample).await.accepted();
        if n % 7 == 0 {
            let repeat = deliver(&worker, n, sample).await;
            assert_eq!((repeat.status, repeat.json()), (200, json!({ "status": "duplicate" })));
        }
    }
    let all = samples.len().try_into().unwrap();
    world.db.wait_states("inbox", &[("processed", all)]).await;
    world.db.wait_states("outbox", &[("sent", all)]).await;

    // By identity, as a receiver is told to (contract 8); the answered ones are those that it has for good.
    let requests = world.receiver.requests();
    let mut arrived: BTreeMap<&str, Vec<&Recorded>> = BTreeMap::new();
    let mut order: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for request in &requests {
        assert_eq!(request.header("x-source"), "github");
        let identity = request.header("x-idempotency-key");
        let of_identity = arrived.entry(identity).or_default();
        if of_identity.is_empty() {
            order.entry(request.header("x-message-key")).or_default().push(identity);
        }
        of_identity.push(request);
    }
    promise(arrived.len() == samples.len(), format_args!("lost: {} of {} came", arrived.len(), samples.len()));
    for (n, sample) in samples.iter().enumerate() {
        let of_identity = &arrived[delivery_id(n).as_str()];
        // Not one attempt less: a failure of any kind is no delivery. Not one more: a delivery is not repeated.
        let numbers: Vec<String> = of_identity.iter().map(|request| request.header("x-attempt").to_owned()).collect();
        let expected: Vec<String> = (0..attempts(n)).map(|attempt| attempt.to_string()).collect();
        assert_eq!(numbers, expected, "{} {n}", sample.event);
        // Numbers are compared as they are written.
        let sent: Value = serde_json::from_str(&sample.body).unwrap();
        for request in of_identity {
            assert_eq!(request.json(), sent, "{} {n}", sample.event);
            if kind == Kind::Sqlite {
                // PostgreSQL may write the same value in another way; here the text itself is kept.
                assert_eq!(request.text(), sample.body, "{} {n}", sample.event);
            }
            assert_eq!(request.header("x-message-id"), of_identity[0].header("x-message-id"));
            assert_eq!(request.header("x-topic"), sample.event);
            assert_eq!(request.header("x-github-event"), sample.event);
            assert_eq!(request.header("x-message-key"), sent["repository"]["full_name"].as_str().unwrap_or_default());
        }
    }
    for (repository, identities) in order.iter().filter(|(repository, _)| !repository.is_empty()) {
        promise(identities.is_sorted(), format_args!("{repository}: {identities:?}"));
    }
    world.finish().await;
}

on_every_database!(github_samples_arrive_unchanged);

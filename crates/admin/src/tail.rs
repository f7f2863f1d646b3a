//! `GET /tail` and `GET /admin/tail`: what becomes of messages, as it happens, one JSON object a line (contract 12.1, 12.3).
//!
//! Invariants: nothing is kept for a client that does not read, it is told how many outcomes it missed; no payload and no header is
//! shown, and without credentials neither key nor topic; the stream ends when the worker stops.

use std::{convert::Infallible, sync::Arc, time::Duration};

use axum::{
    body::Body,
    extract::{Query, State},
    http::{StatusCode, Uri, header},
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use futures::{StreamExt as _, stream};
use queuebox_core::{pattern::Pattern, redact::redact};
use queuebox_engine::tail::{Outcome, Seen, Status, Tail, Watch};
use serde_json::{Value, json};
use tokio::{sync::watch, time::Instant};

use crate::{Readiness, admin::Admin, answer::Failure};

/// An empty line is sent after so long without an outcome, so that a client that has gone is noticed.
const HEARTBEAT: Duration = Duration::from_secs(10);

/// Which outcomes; all that are given hold.
#[derive(Debug, Default)]
struct Filter {
    topic: Option<Pattern>,
    destination: Option<String>,
    key: Option<String>,
    status: Vec<Status>,
}

impl Filter {
    fn parse(uri: &Uri) -> Result<Self, Failure> {
        let Query(pairs) = Query::<Vec<(String, String)>>::try_from_uri(uri).map_err(Failure::invalid)?;
        let mut filter = Self::default();
        for (name, value) in pairs {
            match name.as_str() {
                "topic" => {
                    let pattern = Pattern::parse(&value);
                    filter.topic = Some(pattern.map_err(|error| Failure::invalid(format!("topic: {error}")))?);
                }
                "destination" => filter.destination = Some(value),
                "key" => filter.key = Some(value),
                "status" => {
                    for word in value.split(',') {
                        filter.status.push(status(word)?);
                    }
                }
                _ => {
                    let known = "topic, destination, key, status";
                    return Err(Failure::invalid(format!("{name}: unknown parameter; there are {known}")));
                }
            }
        }
        Ok(filter)
    }

    /// It asks for what only the admin API tells.
    fn is_private(&self) -> bool {
        self.topic.is_some() || self.key.is_some()
    }

    fn takes(&self, outcome: &Outcome) -> bool {
        let same = |wanted: &Option<String>, found: &Option<String>| wanted.is_none() || wanted == found;
        (self.status.is_empty() || self.status.contains(&outcome.status))
            && same(&self.destination, &outcome.destination)
            && same(&self.key, &outcome.key)
            && self.topic.as_ref().is_none_or(|pattern| outcome.topic.as_ref().is_some_and(|it| pattern.matches(it)))
    }
}

fn status(word: &str) -> Result<Status, Failure> {
    Status::ALL.into_iter().find(|status| status.as_str() == word).ok_or_else(|| {
        let known = Status::ALL.map(Status::as_str).join(", ");
        Failure::invalid(format!("status: {word:?} is none of {known}"))
    })
}

/// One line for people and programs; `all` = with topic and key.
fn line(outcome: &Outcome, all: bool) -> Value {
    let time = |us: i64| jiff::Timestamp::from_microsecond(us).ok().map(|time| time.to_string());
    let mut line = json!({
        "at": time(outcome.at_us),
        "status": outcome.status.as_str(),
        "messageId": outcome.message_id.to_string(),
        "topic": outcome.topic,
        "key": outcome.key,
        "destination": outcome.destination,
        "attempt": outcome.attempt,
        "ageMs": outcome.created_at_us.map(|created| (outcome.at_us - created).max(0) / 1_000),
        "error": outcome.error.as_deref().map(redact),
    });
    if let Some(line) = line.as_object_mut().filter(|_| !all) {
        line.retain(|field, _| field != "topic" && field != "key");
    }
    line
}

struct Follower {
    watch: Watch,
    filter: Filter,
    all: bool,
    readiness: watch::Receiver<Readiness>,
}

impl Follower {
    /// The next line; `None` = the worker stops.
    async fn next(&mut self) -> Option<String> {
        let heartbeat = Instant::now() + HEARTBEAT;
        let stopping = async {
            let _ = self.readiness.wait_for(|readiness| *readiness == Readiness::Stopping).await;
        };
        tokio::pin!(stopping);
        loop {
            let seen = tokio::select! {
                seen = self.watch.next() => seen?,
                () = &mut stopping => return None,
                () = tokio::time::sleep_until(heartbeat) => return Some("\n".to_owned()),
            };
            match seen {
                Seen::Missed(count) => return Some(format!("{}\n", json!({ "missed": count }))),
                Seen::Outcome(outcome) if self.filter.takes(&outcome) => {
                    return Some(format!("{}\n", line(&outcome, self.all)));
                }
                Seen::Outcome(_) => {}
            }
        }
    }
}

/// `/admin/tail`.
pub(crate) async fn follow(State(admin): State<Arc<Admin>>, uri: Uri) -> Result<Response, Failure> {
    stream(&admin.tail, &admin.readiness, Filter::parse(&uri)?, true)
}

/// `/tail`, for everybody who reaches the port.
pub(crate) fn open(tail: &Tail, readiness: &watch::Receiver<Readiness>, uri: &Uri) -> Result<Response, Failure> {
    let filter = Filter::parse(uri)?;
    if filter.is_private() {
        return Err(Failure::invalid("topic and key are told by /admin/tail only; set Relay.spec.admin"));
    }
    stream(tail, readiness, filter, false)
}

/// Streams until the client goes, or the worker stops.
fn stream(tail: &Tail, readiness: &watch::Receiver<Readiness>, filter: Filter, all: bool) -> Result<Response, Failure> {
    let Some(watch) = tail.watch() else {
        return Err(Failure::new(StatusCode::SERVICE_UNAVAILABLE, "Too many clients follow this worker already"));
    };
    let follower = Follower { watch, filter, all, readiness: readiness.clone() };
    let lines = stream::unfold(follower, |mut follower| async move {
        let line = follower.next().await?;
        Some((Ok::<_, Infallible>(Bytes::from(line)), follower))
    });
    // The first line says that it has begun: what happens from here on is shown.
    let begun = stream::iter([Ok(Bytes::from_static(b"\n"))]);
    let body = Body::from_stream(begun.chain(lines));
    Ok(([(header::CONTENT_TYPE, "application/x-ndjson")], body).into_response())
}

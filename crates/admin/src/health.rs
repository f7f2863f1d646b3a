//! Probes and components (contract 12.1): what is up, what is not, and why.
//!
//! Invariants: liveness touches nothing; no check takes longer than three seconds; readiness for pods is sticky, so that a
//! database that goes away later never takes every pod out of the Service at once.

use std::{sync::Arc, time::Duration};

use axum::{
    Json,
    http::StatusCode,
    response::{IntoResponse, Response},
};
use queuebox_api::checked;
use queuebox_core::{Fault, ports::schema::Schema, redact::redact};
use queuebox_engine::worker::WorkerState;
use serde::Serialize;
use serde_json::{Map, Value, json};
use tokio::{sync::Mutex, time::Instant};

use crate::{ManagementParts, Readiness, SourceStatus};

/// No check takes longer.
const CHECK_MAX: Duration = Duration::from_secs(3);

/// One line of the answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Component {
    status: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    detail: Option<String>,
}

impl Component {
    fn up(detail: Option<String>) -> Self {
        Self { status: "up", detail: detail.as_deref().map(redact) }
    }

    fn down(detail: impl AsRef<str>) -> Self {
        Self { status: "down", detail: Some(redact(detail.as_ref())) }
    }

    /// Down with the detail, or up.
    fn unless(down: Option<String>) -> Self {
        down.map_or_else(|| Self::up(None), Self::down)
    }

    fn is_up(&self) -> bool {
        self.status == "up"
    }
}

/// `/livez`: the process answers, that is all.
pub(crate) async fn live() -> Response {
    process(Component::up(None))
}

/// `/readyz` and `/startupz`.
pub(crate) fn ready_for_pods(readiness: Readiness) -> Response {
    process(match readiness {
        Readiness::Ready => Component::up(None),
        Readiness::Starting => Component::down("starting"),
        Readiness::Stopping => Component::down("stopping"),
    })
}

fn process(process: Component) -> Response {
    let is_up = process.is_up();
    answer(is_up, &json!({ "process": process }))
}

fn answer(is_healthy: bool, components: &Value) -> Response {
    let (status, word) =
        if is_healthy { (StatusCode::OK, "healthy") } else { (StatusCode::SERVICE_UNAVAILABLE, "unhealthy") };
    (status, Json(json!({ "status": word, "components": components }))).into_response()
}

/// The round trip to the database, made once for all who wait for it: probes must not use up the pool.
pub(crate) struct DatabaseCheck {
    schema: Arc<dyn Schema>,
    last: Mutex<Option<(Instant, Result<(), Fault>)>>,
}

impl DatabaseCheck {
    pub fn new(schema: Arc<dyn Schema>) -> Self {
        Self { schema, last: Mutex::new(None) }
    }

    async fn run(&self) -> Component {
        match tokio::time::timeout(CHECK_MAX, self.ping(Instant::now())).await {
            Ok(Ok(())) => Component::up(None),
            Ok(Err(fault)) => Component::down(fault.detail),
            Err(_) => Component::down(format!("no answer within {} s", CHECK_MAX.as_secs())),
        }
    }

    /// A result that came in after we were asked is as good as our own.
    async fn ping(&self, asked_at: Instant) -> Result<(), Fault> {
        let mut last = self.last.lock().await;
        if let Some((at, result)) = &*last
            && *at > asked_at
        {
            return result.clone();
        }
        let result = self.schema.ping().await;
        *last = Some((Instant::now(), result.clone()));
        result
    }
}

/// `/health/ready`: every component, and 503 if one that counts is down.
pub(crate) async fn ready(parts: &ManagementParts, database: &DatabaseCheck) -> Response {
    let readiness = *parts.readiness.borrow();
    let state = (parts.state)();
    let mut components = Map::new();
    let mut is_healthy = readiness == Readiness::Ready;
    let mut add = |name: String, component: Component| {
        is_healthy &= component.is_up();
        components.insert(name, json!(component));
    };
    match readiness {
        Readiness::Ready => {}
        Readiness::Starting => add("process".to_owned(), Component::down("starting")),
        Readiness::Stopping => add("process".to_owned(), Component::down("stopping")),
    }
    add("database".to_owned(), database.run().await);
    add("outbox-poller".to_owned(), poller(&state));
    if parts.relay.inbox.relay.is_some() {
        add(
            "inbox-relay".to_owned(),
            Component::unless(state.forward.as_ref().and_then(|forward| forward.failure.clone())),
        );
    }
    if parts.relay.retention != checked::Retention::default() {
        let failures = &state.retention_failures;
        add("retention-service".to_owned(), Component::unless((!failures.is_empty()).then(|| failures.join("; "))));
    }
    let known = (parts.sources)();
    for source in parts.relay.sources.iter().filter(|source| source.connector.kind() != "http") {
        add(format!("{}.{}", source.connector.kind(), source.name), source_component(source, &known));
    }
    for destination in parts.relay.destinations.iter().filter(|destination| destination.connector.kind() != "http") {
        add(format!("destination.{}", destination.name), destination_component(destination, &state));
    }
    if let Some(capture) = (parts.capture)() {
        // Without it rows are found by polling: shown, but never a reason for 503.
        let component = if capture.up {
            Component::up(capture.detail)
        } else {
            Component::down(capture.detail.unwrap_or_else(|| "not listening; polling goes on".to_owned()))
        };
        components.insert("outbox-capture".to_owned(), json!(component));
    }
    answer(is_healthy, &Value::Object(components))
}

/// A worker that stands by is healthy: another one does the work.
fn poller(state: &WorkerState) -> Component {
    match (&state.keeper.failing, &state.driver.failing, &state.keeper.stand_by) {
        (Some(failing), ..) | (None, Some(failing), _) => Component::down(failing),
        (None, None, Some(reason)) => Component::up(Some(format!("standing by: {reason}"))),
        (None, None, None) if state.keeper.fence.is_none() => Component::down("not registered in the database yet"),
        (None, None, None) => Component::up(None),
    }
}

fn source_component(source: &checked::Source, known: &[SourceStatus]) -> Component {
    if source.paused {
        return Component::up(Some(PAUSED.to_owned()));
    }
    match known.iter().find(|status| status.name == source.name) {
        Some(status) if status.up => Component::up(status.detail.clone()),
        Some(status) => Component::down(status.detail.as_deref().unwrap_or("not receiving")),
        None => Component::down("not started yet"),
    }
}

fn destination_component(destination: &checked::Destination, state: &WorkerState) -> Component {
    if destination.paused {
        return Component::up(Some(PAUSED.to_owned()));
    }
    // A destination that nothing was sent to yet is not in the list, or not held.
    let found = state.driver.destinations.iter().find(|found| found.name == destination.name);
    Component::unless(found.and_then(|found| found.held_because.clone()))
}

/// The detail of what a manifest holds on purpose.
pub(crate) const PAUSED: &str = "paused by its manifest";

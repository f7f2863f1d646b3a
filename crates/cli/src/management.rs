//! The management port of a local run: health, metrics, status (contract 12).

use std::{
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering},
    },
    time::Duration,
};

use axum::{
    Json, Router,
    extract::State,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
    routing::get,
};
use queuebox_api::{SecretResolver, checked};
use queuebox_core::{
    ports::{Source, Store, source::SourceHealth},
    redact::redact,
};
use queuebox_engine::{metrics::Metrics, worker::WorkerView};
use serde_json::{Map, Value, json};

const STARTING: u8 = 0;
const READY: u8 = 1;
const STOPPING: u8 = 2;
/// Each check of a component ends within this (contract 12.1).
const CHECK_MAX: Duration = Duration::from_secs(3);

/// Sticky readiness for pods.
#[derive(Debug, Clone, Default)]
pub struct Ready(Arc<AtomicU8>);

impl Ready {
    /// Configuration loaded, database reached.
    pub fn set(&self) {
        self.0.store(READY, Ordering::SeqCst);
    }

    /// Stopping has begun.
    pub fn stopping(&self) {
        self.0.store(STOPPING, Ordering::SeqCst);
    }

    fn is(&self, state: u8) -> bool {
        self.0.load(Ordering::SeqCst) == state
    }
}

/// What the port shows.
#[derive(Clone)]
pub struct Parts {
    /// The Relay.
    pub relay: Arc<checked::Relay>,
    /// The database.
    pub store: Arc<dyn Store>,
    /// For a scrape.
    pub metrics: Arc<Metrics>,
    /// The worker.
    pub state: WorkerView,
    /// Broker sources by name.
    pub pollers: Vec<(String, Arc<dyn Source>)>,
    /// For the admin API's credentials.
    pub secrets: Arc<dyn SecretResolver>,
}

#[derive(Clone)]
struct Shared {
    parts: Parts,
    ready: Ready,
}

/// The routes, and the switch of readiness.
///
/// # Errors
/// An admin API that cannot be built.
pub fn router(parts: Parts) -> anyhow::Result<(Router, Ready)> {
    let ready = Ready::default();
    let shared = Arc::new(Shared { parts, ready: ready.clone() });
    let live = || async { Json(json!({"status": "healthy", "components": {"process": {"status": "up"}}})) };
    let router = Router::new()
        .route("/livez", get(live))
        .route("/health/live", get(live))
        .route("/readyz", get(readyz))
        .route("/startupz", get(readyz))
        .route("/health", get(health))
        .route("/health/ready", get(health))
        .route("/metrics", get(metrics))
        .route("/status", get(status))
        .with_state(shared);
    Ok((router, ready))
}

async fn readyz(State(shared): State<Arc<Shared>>) -> Response {
    let (status, word) = match () {
        () if shared.ready.is(READY) => (StatusCode::OK, "ready"),
        () if shared.ready.is(STARTING) => (StatusCode::SERVICE_UNAVAILABLE, "starting"),
        () => (StatusCode::SERVICE_UNAVAILABLE, "stopping"),
    };
    (status, Json(json!({"status": word}))).into_response()
}

async fn metrics(State(shared): State<Arc<Shared>>) -> Response {
    for (name, source) in &shared.parts.pollers {
        let up = i64::from(source.health() == SourceHealth::Up);
        shared.parts.metrics.source_up.with_label_values(&[name.as_str()]).set(up);
    }
    let kind = "text/plain; version=0.0.4; charset=utf-8";
    ([(header::CONTENT_TYPE, kind)], shared.parts.metrics.encode()).into_response()
}

async fn health(State(shared): State<Arc<Shared>>) -> Response {
    let mut components = Map::new();
    let mut add = |name: String, detail: Option<String>| {
        let value = match &detail {
            None => json!({"status": "up"}),
            Some(detail) => json!({"status": "down", "detail": redact(detail)}),
        };
        components.insert(name, value);
        detail.is_none()
    };
    let mut healthy = !shared.ready.is(STOPPING);
    let ping = tokio::time::timeout(CHECK_MAX, shared.parts.store.ping()).await;
    let database = match ping {
        Ok(answer) => answer.err().map(|fault| fault.detail),
        Err(_) => Some("no answer within 3 s".to_owned()),
    };
    healthy &= add("database".to_owned(), database);
    let state = shared.parts.state.state();
    let poller = state
        .keeper
        .failing
        .or(state.driver.failing)
        .or(state.keeper.stand_by.map(|why| format!("standing by: {why}")));
    healthy &= add("outbox-poller".to_owned(), poller);
    if let Some(forward) = state.forward {
        healthy &= add("inbox-relay".to_owned(), forward.failure);
    }
    for (name, source) in &shared.parts.pollers {
        let detail = match source.health() {
            SourceHealth::Up => None,
            SourceHealth::Down(why) => Some(why),
        };
        healthy &= add(format!("{}.{name}", source.kind()), detail);
    }
    for destination in &shared.parts.relay.destinations {
        if destination.connector.kind() != "http" {
            let held = state.driver.destinations.iter().find(|seen| seen.name == destination.name);
            let detail = held.and_then(|seen| seen.held_because.clone()).filter(|_| !destination.paused);
            healthy &= add(format!("destination.{}", destination.name), detail);
        }
    }
    let status = if healthy { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let word = if healthy { "healthy" } else { "unhealthy" };
    (status, Json(json!({"status": word, "components": components}))).into_response()
}

async fn status(State(shared): State<Arc<Shared>>) -> Json<Value> {
    let state = shared.parts.state.state();
    let outbox = state.backlog.outbox;
    let destinations: Vec<Value> = state
        .driver
        .destinations
        .iter()
        .map(|destination| {
            json!({"name": destination.name, "queued": destination.queued, "inFlight": destination.in_flight,
                   "heldBecause": destination.held_because})
        })
        .collect();
    let sources: Vec<Value> = shared
        .parts
        .pollers
        .iter()
        .map(|(name, source)| match source.health() {
            SourceHealth::Up => json!({"name": name, "kind": source.kind(), "up": true}),
            SourceHealth::Down(why) => {
                json!({"name": name, "kind": source.kind(), "up": false, "detail": redact(&why)})
            }
        })
        .collect();
    Json(json!({
        "version": env!("CARGO_PKG_VERSION"),
        "relay": {"namespace": shared.parts.relay.namespace, "name": shared.parts.relay.name},
        "worker": state.keeper.fence.map(|fence| fence.worker),
        "standBy": state.keeper.stand_by,
        "workers": state.keeper.workers,
        "lanes": {"outbox": state.keeper.lanes.0, "inbox": state.keeper.lanes.1},
        "outbox": {"pending": outbox.pending, "dead": outbox.dead,
                   "oldestPendingAgeMs": outbox.oldest_pending_age_us / 1000, "oldestDueAgeMs": outbox.oldest_due_age_us / 1000},
        "inbox": state.backlog.inbox.iter().map(|source| json!({
            "source": source.source, "consumption": source.consumption, "pending": source.pending, "dead": source.dead,
            "oldestPendingAgeMs": source.oldest_pending_age_us / 1000})).collect::<Vec<_>>(),
        "destinations": destinations,
        "sources": sources,
    }))
}

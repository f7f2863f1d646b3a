//! The operator's own port: probes, metrics, and the backlog of a Relay for KEDA's metrics-api scaler.

use axum::{
    Json, Router,
    extract::{Path, State},
    http::{StatusCode, header},
    response::{IntoResponse, Response},
    routing::get,
};
use jiff::Timestamp;
use queuebox_api::Kind;
use serde_json::json;

use super::{
    cache::{Cache, Watched},
    metrics::Metrics,
    poll::Samples,
};
use crate::plan;

/// What the port shows.
#[derive(Clone)]
pub struct Parts {
    /// The objects.
    pub cache: Cache,
    /// What the workers said.
    pub samples: Samples,
    /// Counts.
    pub metrics: Metrics,
}

/// All routes.
pub fn router(parts: Parts) -> Router {
    Router::new()
        .route("/livez", get(|| async { Json(json!({"status": "healthy"})) }))
        .route("/readyz", get(ready))
        .route("/metrics", get(metrics))
        .route("/v1/namespaces/{namespace}/relays/{name}/backlog", get(backlog))
        .fallback(|| async { error(StatusCode::NOT_FOUND, "Not found") })
        .with_state(parts)
}

fn error(status: StatusCode, text: &str) -> Response {
    (status, Json(json!({"error": text}))).into_response()
}

/// Ready when everything was seen once; a replica that stands by is as ready as the leader.
async fn ready(State(parts): State<Parts>) -> Response {
    if parts.metrics.was_synced() {
        Json(json!({"status": "healthy"})).into_response()
    } else {
        error(StatusCode::SERVICE_UNAVAILABLE, "the API server has not shown everything yet")
    }
}

async fn metrics(State(parts): State<Parts>) -> Response {
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], parts.metrics.encode()).into_response()
}

/// A replica that stands by asks the workers itself. A count that is not fresh is an error: the scaler holds then.
async fn backlog(State(parts): State<Parts>, Path((namespace, name)): Path<(String, String)>) -> Response {
    let relays = parts.cache.list(&namespace, Watched::User(Kind::Relay));
    let Some(relay) = relays.iter().find(|relay| relay.name() == name) else {
        return error(StatusCode::NOT_FOUND, "there is no such Relay in a namespace that this operator watches");
    };
    let now = || Timestamp::now();
    let known = |samples: &Samples| samples.of(&namespace).remove(relay.uid()).and_then(|it| plan::backlog(&it, now()));
    let mut answer = known(&parts.samples);
    if answer.is_none() {
        parts.samples.ask_namespace(&namespace).await;
        answer = known(&parts.samples);
    }
    match answer {
        Some(answer) => Json(answer).into_response(),
        None => error(StatusCode::SERVICE_UNAVAILABLE, "no worker has reported a count in the last 30 s"),
    }
}

//! What a management port answers before the database has been reached: it is alive, and not ready (contract 12.1, 12.4).
//!
//! Pods are probed from their first second on. A worker that waits for its database must look alive, or it would be restarted
//! for what a restart cannot mend.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use axum::{Json, Router, extract::Request, http::StatusCode, response::IntoResponse, routing::get};
use queuebox_core::redact::redact;
use serde_json::{Value, json};
use tower::ServiceExt as _;

use crate::{Readiness, answer::Failure, health};

/// A router that answers probes at once and everything else from when it is opened.
#[derive(Clone, Default)]
pub struct Door {
    behind: Arc<OnceLock<Router>>,
    waiting: Arc<Mutex<Option<Value>>>,
}

impl Door {
    /// Lets requests through to `router`. The first call counts.
    pub fn open(&self, router: Router) {
        let _ = self.behind.set(router);
    }

    /// What `/status` answers before the door is opened: why the worker waits for its database, and what it misses.
    pub fn wait_for_database(&self, why: &str, missing: &[String]) {
        let status = json!({
            "readiness": "Starting",
            "database": {"failing": redact(why), "missing": missing},
            "backlog": null,
            "sources": [],
            "destinations": [],
        });
        *self.waiting.lock().unwrap_or_else(PoisonError::into_inner) = Some(status);
    }

    /// The routes. Closed: `/livez` and `/health/live` answer 200, `/status` once there is something to say, everything else 503.
    pub fn router(&self) -> Router {
        let waiting = self.waiting.clone();
        let starting = Router::new()
            .route(
                "/status",
                get(move || async move {
                    let status = waiting.lock().unwrap_or_else(PoisonError::into_inner).clone();
                    match status {
                        Some(status) => Json(status).into_response(),
                        None => Failure::new(StatusCode::SERVICE_UNAVAILABLE, "Starting").into_response(),
                    }
                }),
            )
            .route("/livez", get(health::live))
            .route("/health/live", get(health::live))
            .route("/readyz", get(not_ready))
            .route("/startupz", get(not_ready))
            .route("/health", get(not_ready))
            .route("/health/ready", get(not_ready))
            .fallback(|| async { Failure::new(StatusCode::SERVICE_UNAVAILABLE, "Starting") });
        let behind = self.behind.clone();
        Router::new().fallback(move |request: Request| {
            let router = behind.get().unwrap_or(&starting).clone();
            async move { router.oneshot(request).await }
        })
    }
}

async fn not_ready() -> axum::response::Response {
    health::ready_for_pods(Readiness::Starting)
}

#[cfg(test)]
mod tests {
    use axum::{body::Body, http::StatusCode};

    use super::*;

    async fn status(door: &Door, path: &str) -> StatusCode {
        let request = Request::get(path).body(Body::empty()).unwrap();
        door.router().oneshot(request).await.unwrap().status()
    }

    #[tokio::test]
    async fn alive_and_not_ready_until_it_is_opened() {
        let door = Door::default();
        assert_eq!(status(&door, "/livez").await, StatusCode::OK);
        assert_eq!(status(&door, "/health/live").await, StatusCode::OK);
        for path in ["/readyz", "/startupz", "/health", "/health/ready", "/status", "/metrics", "/admin/outbox"] {
            assert_eq!(status(&door, path).await, StatusCode::SERVICE_UNAVAILABLE, "{path}");
        }
        door.wait_for_database("refused", &["secretKeyRef db/password".to_owned()]);
        assert_eq!(status(&door, "/status").await, StatusCode::OK, "why it waits can be asked");
        door.open(Router::new().route("/status", get(|| async { "here" })));
        assert_eq!(status(&door, "/status").await, StatusCode::OK);
        assert_eq!(status(&door, "/livez").await, StatusCode::NOT_FOUND, "it is the opened router that answers");
    }
}

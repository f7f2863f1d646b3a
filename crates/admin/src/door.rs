//! What a management port answers before the database has been reached: it is alive, and not ready (contract 12.1, 12.4).
//!
//! Pods are probed from their first second on. A worker that waits for its database must look alive, or it would be restarted
//! for what a restart cannot mend.

use std::sync::{Arc, OnceLock};

use axum::{Router, extract::Request, routing::get};
use tower::ServiceExt as _;

use crate::{Readiness, answer::Failure, health};

/// A router that answers probes at once and everything else from when it is opened.
#[derive(Clone, Default)]
pub struct Door {
    behind: Arc<OnceLock<Router>>,
}

impl Door {
    /// Lets requests through to `router`. The first call counts.
    pub fn open(&self, router: Router) {
        let _ = self.behind.set(router);
    }

    /// The routes. Closed: `/livez` and `/health/live` answer 200, everything else 503.
    pub fn router(&self) -> Router {
        let starting = Router::new()
            .route("/livez", get(health::live))
            .route("/health/live", get(health::live))
            .route("/readyz", get(not_ready))
            .route("/startupz", get(not_ready))
            .route("/health", get(not_ready))
            .route("/health/ready", get(not_ready))
            .fallback(|| async { Failure::new(axum::http::StatusCode::SERVICE_UNAVAILABLE, "Starting") });
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
        door.open(Router::new().route("/status", get(|| async { "here" })));
        assert_eq!(status(&door, "/status").await, StatusCode::OK);
        assert_eq!(status(&door, "/livez").await, StatusCode::NOT_FOUND, "it is the opened router that answers");
    }
}

//! The management port of a worker: health, metrics, status, and the admin API (contract 12), as a router that the binary
//! serves on a listener of its own, or behind the inbox routes of a classic single port.
//!
//! ```text
//!   /livez /readyz /health …  ── health ──┐
//!   /status                   ── status ──┼── snapshots of the worker, one round trip for `database`
//!   /metrics                  ────────────┘
//!   /tail                     ── tail ────── outcomes of the worker as they happen
//!   /admin/…  ── credentials ── admin ── replay ── the finished rows of the database
//! ```
//!
//! Invariants:
//! - A scrape and a probe never wait for a lock of the worker: they read snapshots that it publishes.
//! - Everything that is answered is redacted, but for payloads, which only the admin API shows.
//! - [`replay`] knows no HTTP: the command line calls it as well.

mod admin;
mod answer;
mod door;
mod health;
pub mod replay;
mod status;
mod tail;
mod transform_test;
mod troubles;

use std::sync::{Arc, OnceLock};

use axum::{
    Json, Router,
    http::{StatusCode, header},
    response::IntoResponse,
    routing::get,
};
use queuebox_api::checked::{Relay, UsedReference};
use queuebox_core::ports::{
    Ledger,
    schema::{Schema, SchemaReport},
};
use queuebox_engine::{metrics::Metrics, tail::Tail, worker::WorkerState};
use tokio::sync::watch;

use crate::{admin::Admin, answer::Failure, health::DatabaseCheck, transform_test::TransformTest};
pub use crate::{admin::AdminAuth, door::Door, troubles::Troubles};

/// Where the worker stands in its life (contract 12.4).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Readiness {
    /// The configuration is not loaded yet, or the database was not reached yet.
    #[default]
    Starting,
    /// Both happened once.
    Ready,
    /// The stop signal came.
    Stopping,
}

/// State of a source, as the binary that runs it knows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourceStatus {
    /// Name.
    pub name: String,
    /// `http`, `rabbitmq`, `kafka`, `nats`.
    pub kind: &'static str,
    /// Receiving.
    pub up: bool,
    /// Why it is not, or what people should know.
    pub detail: Option<String>,
}

/// State of the wake-up by the database (contract 5.5).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CaptureStatus {
    /// Listening.
    pub up: bool,
    /// Why it is not.
    pub detail: Option<String>,
}

/// What the management port shows, and whom it lets in.
#[derive(Clone)]
pub struct ManagementParts {
    /// A snapshot of the worker; default values before it has started.
    pub state: Arc<dyn Fn() -> WorkerState + Send + Sync>,
    /// Finished rows of the database.
    pub ledger: Arc<dyn Ledger>,
    /// The database, for its health.
    pub schema: Arc<dyn Schema>,
    /// What the check at start found, once it has run.
    pub schema_report: Arc<OnceLock<SchemaReport>>,
    /// Counts.
    pub metrics: Arc<Metrics>,
    /// The Relay with its Sources and Destinations.
    pub relay: Arc<Relay>,
    /// State of each source that was started.
    pub sources: Arc<dyn Fn() -> Vec<SourceStatus> + Send + Sync>,
    /// State of the wake-up; `None` = it is not used.
    pub capture: Arc<dyn Fn() -> Option<CaptureStatus> + Send + Sync>,
    /// References that have no value at this moment; empty where nobody looks.
    pub missing: Arc<dyn Fn() -> Vec<UsedReference> + Send + Sync>,
    /// Where the worker stands.
    pub readiness: watch::Receiver<Readiness>,
    /// What becomes of its messages.
    pub tail: Tail,
    /// What goes wrong, since when and why; [followed](Troubles::follow) by whoever serves the router.
    pub troubles: Troubles,
    /// Who may use the admin API; `None` = anyone, which only `admin.insecure` may mean. Without `relay.admin` there is no
    /// admin API, whatever this is.
    pub admin_auth: Option<AdminAuth>,
    /// Version of this binary.
    pub version: &'static str,
    /// `<number>/<content hash>` of the configuration that runs.
    pub config: String,
}

/// Everything of contract 12.1 and 12.3 below one router. Served with connect info of `SocketAddr`, the log of replays names the
/// peer.
pub fn router(parts: ManagementParts) -> Router {
    let admin = parts.relay.admin.as_ref().map(|admin| {
        Arc::new(Admin {
            relay: parts.relay.clone(),
            ledger: parts.ledger.clone(),
            auth: parts.admin_auth.clone(),
            tail: parts.tail.clone(),
            readiness: parts.readiness.clone(),
            max_payload_bytes: bytes(admin.max_payload_bytes),
            transform_test: TransformTest {
                timeout_max: admin.max_transform_timeout,
                result_bytes_max: bytes(parts.relay.outbox.max_payload_bytes),
            },
        })
    });
    let mut router = watching(Arc::new(parts));
    if let Some(admin) = admin {
        if admin.auth.is_none() {
            tracing::warn!("The admin API has no auth: anyone who reaches the management port may replay and discard.");
        }
        router = router.nest("/admin", admin::router(admin));
    }
    router
        .fallback(|| async { Failure::not_found() })
        .method_not_allowed_fallback(|| async { Failure::new(StatusCode::METHOD_NOT_ALLOWED, "Method not allowed") })
}

/// The routes that only look.
fn watching(parts: Arc<ManagementParts>) -> Router {
    let database = Arc::new(DatabaseCheck::new(parts.schema.clone()));
    let pods = {
        let readiness = parts.readiness.clone();
        get(move || async move { health::ready_for_pods(*readiness.borrow()) })
    };
    let ready = {
        let parts = parts.clone();
        get(move || async move { health::ready(&parts, &database).await })
    };
    let metrics = {
        let (metrics, sources) = (parts.metrics.clone(), parts.sources.clone());
        get(move || async move {
            for source in sources() {
                metrics.source_up.with_label_values(&[source.name.as_str()]).set(i64::from(source.up));
            }
            ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], metrics.encode()).into_response()
        })
    };
    let tail = {
        let (tail, readiness) = (parts.tail.clone(), parts.readiness.clone());
        get(move |uri| async move { tail::open(&tail, &readiness, &uri) })
    };
    Router::new()
        .route("/tail", tail)
        .route("/livez", get(health::live))
        .route("/health/live", get(health::live))
        .route("/readyz", pods.clone())
        .route("/startupz", pods)
        .route("/health", ready.clone())
        .route("/health/ready", ready)
        .route("/metrics", metrics)
        .route("/status", get(move || async move { Json(status::status(&parts)) }))
}

/// A size of a manifest as this machine counts; more than it can hold is no limit.
fn bytes(size: u64) -> usize {
    usize::try_from(size).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod memory;
#[cfg(test)]
mod tests;

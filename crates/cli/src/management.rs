//! Puts the management port together: health, metrics, status, admin API (contract 12).

use std::sync::{Arc, OnceLock};

use axum::Router;
use queuebox_admin::{AdminAuth, CaptureStatus, ManagementParts, Readiness, SourceStatus, Troubles};
use queuebox_api::{
    SecretResolver,
    checked::{self, UsedReference},
};
use queuebox_catalog::{Opened, inbound_auth};
use queuebox_core::{
    ports::{Source, schema::SchemaReport, source::SourceHealth},
    redact::redact,
};
use queuebox_engine::{metrics::Metrics, tail::Tail, worker::WorkerView};
use queuebox_http::Authenticator;
use tokio::sync::watch;

/// What the port shows.
pub struct Parts {
    /// The Relay.
    pub relay: Arc<checked::Relay>,
    /// The database.
    pub database: Opened,
    /// What the check at start found.
    pub schema: SchemaReport,
    /// For a scrape.
    pub metrics: Arc<Metrics>,
    /// The worker.
    pub worker: WorkerView,
    /// What becomes of its messages.
    pub tail: Tail,
    /// Broker sources by name.
    pub pollers: Vec<(String, Arc<dyn Source>)>,
    /// For the admin API's credentials.
    pub secrets: Arc<dyn SecretResolver>,
    /// Everything that the manifests refer to.
    pub references: Vec<UsedReference>,
    /// `<number>/<content hash>` of the configuration.
    pub config: String,
}

/// The routes, and the switch of readiness.
///
/// # Errors
/// An admin API that cannot be built.
pub fn router(parts: Parts) -> anyhow::Result<(Router, watch::Sender<Readiness>)> {
    let (ready, readiness) = watch::channel(Readiness::Starting);
    let capture = parts.database.capture.clone();
    let schema_report = Arc::new(OnceLock::new());
    let _ = schema_report.set(parts.schema);
    let sources = sources(&parts.relay, parts.pollers);
    let troubles = Troubles::default();
    // Ends with the worker.
    tokio::spawn(troubles.clone().follow(parts.worker.clone(), parts.tail.clone()));
    let router = queuebox_admin::router(ManagementParts {
        state: Arc::new(move || parts.worker.state()),
        ledger: parts.database.store.clone(),
        schema: parts.database.store,
        schema_report,
        metrics: parts.metrics,
        admin_auth: admin_auth(&parts.relay, &parts.secrets)?,
        tail: parts.tail,
        troubles,
        relay: parts.relay,
        sources: Arc::new(sources),
        capture: Arc::new(move || {
            capture().map(|state| CaptureStatus { up: state.is_ok(), detail: state.err().map(|why| redact(&why)) })
        }),
        missing: {
            let (references, secrets) = (parts.references, parts.secrets);
            Arc::new(move || missing(&references, &secrets))
        },
        readiness,
        version: env!("CARGO_PKG_VERSION"),
        config: parts.config,
    });
    Ok((router, ready))
}

/// References that have no value at this moment.
pub fn missing(references: &[UsedReference], secrets: &Arc<dyn SecretResolver>) -> Vec<UsedReference> {
    references.iter().filter(|used| secrets.resolve(&used.reference).is_err()).cloned().collect()
}

/// States of the sources; broker sources are asked, HTTP sources receive as long as the process does.
fn sources(
    relay: &checked::Relay,
    pollers: Vec<(String, Arc<dyn Source>)>,
) -> impl Fn() -> Vec<SourceStatus> + Send + Sync + 'static {
    let fixed: Vec<SourceStatus> = relay
        .sources
        .iter()
        .filter(|source| source.connector.kind() == "http" || source.paused)
        .map(|source| SourceStatus {
            name: source.name.clone(),
            kind: source.connector.kind(),
            up: !source.paused,
            detail: source.paused.then(|| "paused by its manifest".to_owned()),
        })
        .collect();
    move || {
        let polled = pollers.iter().map(|(name, source)| {
            let detail = match source.health() {
                SourceHealth::Up => None,
                SourceHealth::Down(why) => Some(redact(&why)),
            };
            SourceStatus { name: name.clone(), kind: source.kind(), up: detail.is_none(), detail }
        });
        fixed.iter().cloned().chain(polled).collect()
    }
}

fn admin_auth(relay: &checked::Relay, secrets: &Arc<dyn SecretResolver>) -> anyhow::Result<Option<AdminAuth>> {
    let Some(auth) = relay.admin.as_ref().and_then(|admin| admin.auth.as_ref()) else {
        return Ok(None);
    };
    let auth = inbound_auth(auth, secrets).map_err(|reason| anyhow::anyhow!("Relay.spec.admin.auth: {reason}"))?;
    let authenticator = Authenticator::new(auth);
    Ok(Some(Arc::new(move |headers, body| {
        // Signature windows are the one place where the local clock decides (contract 10.1).
        authenticator.check(headers, body, jiff::Timestamp::now()).map_err(|error| error.to_string())
    })))
}

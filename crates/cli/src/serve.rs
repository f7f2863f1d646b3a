//! `queuebox run`: one Relay in one process, from the check of its manifests to a clean stop (contract 12.4).

use std::{net::SocketAddr, sync::Arc, time::Duration};

use anyhow::{Context, bail};
use queuebox_admin::{Door, Readiness};
use queuebox_api::{
    Target,
    checked::{DatabaseLogin, DatabaseServer, UsedReference},
};
use queuebox_catalog::{BrokerSource, Catalog, HttpSourceParts, Opened, open_store, refuse_fan_out};
use queuebox_core::{
    Class, Fault,
    ports::{
        Source, Store,
        schema::{MigrateOptions, SchemaReport},
    },
};
use queuebox_engine::{
    metrics::Metrics,
    worker::{Worker, keeper::fresh_seed},
};
use queuebox_http::DataPort;
use tokio::{net::TcpListener, sync::watch, task::JoinHandle, time::Instant};
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};

use crate::{
    management,
    manifests::{self, Loaded, RunOptions},
    traces::Traces,
};

/// First pause before the database is tried again at start; doubles up to [`DATABASE_PAUSE_MAX`].
const DATABASE_PAUSE: Duration = Duration::from_millis(200);
/// How often a missing secret is looked for.
const SECRET_PAUSE: Duration = Duration::from_secs(1);
const DATABASE_PAUSE_MAX: Duration = Duration::from_secs(5);

/// Serves until SIGTERM or an interrupt.
///
/// # Errors
/// Manifests that are wrong, a database that never came, a port that is taken.
pub async fn run(options: &RunOptions) -> anyhow::Result<()> {
    let target = if options.cluster { Target::Cluster } else { Target::Local };
    let mut loaded = manifests::load_for(&options.given, target)?;
    if let Some(version) = &options.config_version {
        loaded.version.clone_from(version);
    }
    let mut signals = Signals::new()?;
    let server = tokio::select! {
        server = Server::start(loaded) => server?,
        () = signals.next() => bail!("stopped before it was ready"),
    };
    tracing::info!(
        "Ready. Inbox on port {}, health and metrics on port {}. Stop with Ctrl-C.",
        server.data_port(),
        server.management_port()
    );
    signals.next().await;
    tracing::info!("Stopping: what is in flight finishes, lanes are given back. A second signal ends it at once.");
    tokio::select! {
        () = server.stop() => tracing::info!("Stopped."),
        () = signals.next() => tracing::warn!("Stopped at once; what was in flight is left to its lease."),
    }
    Ok(())
}

/// A running Relay.
pub struct Server {
    worker: Worker,
    store: Arc<dyn Store>,
    drain: Drain,
    data_port: SocketAddr,
    management_port: SocketAddr,
    stop_receiving: CancellationToken,
    ready: watch::Sender<Readiness>,
    traces: Option<Traces>,
    tasks: Vec<JoinHandle<()>>,
    management: Option<AbortOnDropHandle<()>>,
}

#[derive(Debug, Clone, Copy)]
struct Drain {
    shutdown_delay: Duration,
    timeout: Duration,
}

impl Server {
    /// Waits for the database, migrates, checks the schema, then serves.
    ///
    /// # Errors
    /// See [`run`].
    pub async fn start(loaded: Loaded) -> anyhow::Result<Self> {
        let Loaded { relay, secrets, references, waits_for_secrets, version } = loaded;
        if waits_for_secrets {
            // Those of the database are waited for below.
            let others = references.iter().filter(|used| used.kind != queuebox_api::Kind::Relay).cloned();
            for text in without_value(&relay, &others.collect::<Vec<_>>(), &secrets) {
                tracing::warn!("{text}; until it is there, what needs it waits.");
            }
        } else {
            manifests::refuse_without_value(&without_value(&relay, &references, &secrets))?;
        }
        let catalog = Catalog::new(&relay, secrets.clone());
        // Ports first: a port that is taken is found before anything is done to the database.
        let data = listen(relay.http.port, "http.port").await?;
        let (door, data_port) = (Door::default(), data.local_addr()?);
        let (management, management_port) = if one_port(&relay) {
            (None, data_port)
        } else {
            let listener = listen(relay.http.management_port, "http.managementPort").await?;
            let port = listener.local_addr()?;
            // Probes are answered while the database is waited for.
            (Some(AbortOnDropHandle::new(tokio::spawn(serve_management(listener, door.router())))), port)
        };
        let mut sources = catalog.sources()?;
        if one_port(&relay) {
            sources.port.fallback = Some(door.router());
        }
        let mut worker_config = catalog.worker(version.clone(), host_name())?;
        let traces = Traces::of_environment(&relay, &host_name())?;
        worker_config.tracer = traces.as_ref().map(Traces::spans);
        let metrics = Arc::new(Metrics::new(env!("CARGO_PKG_VERSION"))?);
        if waits_for_secrets {
            wait_for_secrets(&relay, &references, &secrets, &door).await;
        }
        let (database, schema) = database(&relay, &secrets, &door).await?;
        let store = database.store.clone();

        let worker = Worker::start(worker_config, store.clone(), metrics.clone(), fresh_seed());
        let stop_receiving = CancellationToken::new();
        let mut tasks = Vec::new();
        let pollers = start_pollers(sources.brokers, &worker, &stop_receiving, &mut tasks);

        let routes =
            sources.http.into_iter().map(|HttpSourceParts { route, intake }| (route, worker.intake(intake))).collect();
        let port = Arc::new(DataPort::new(sources.port, routes)?);
        let shutdown_delay = relay.http.shutdown_delay;
        let stop = stop_receiving.clone();
        tasks.push(tokio::spawn(port.serve(data, async move { stop.cancelled().await }, shutdown_delay)));

        let (router, ready) = management::router(management::Parts {
            relay: relay.clone(),
            database,
            schema,
            metrics,
            worker: worker.watch(),
            tail: worker.tail(),
            pollers,
            secrets,
            references,
            config: version,
        })?;
        door.open(router);
        ready.send_replace(Readiness::Ready);
        Ok(Self {
            worker,
            store,
            drain: Drain { shutdown_delay, timeout: relay.drain_timeout },
            data_port,
            management_port,
            stop_receiving,
            ready,
            traces,
            tasks,
            management,
        })
    }

    /// Port of the inbox routes.
    pub fn data_port(&self) -> u16 {
        self.data_port.port()
    }

    /// Port of health and metrics.
    pub fn management_port(&self) -> u16 {
        self.management_port.port()
    }

    /// Ends everything within the drain time-out, in the order of contract 12.4.
    pub async fn stop(self) {
        let deadline = Instant::now() + self.drain.timeout;
        self.ready.send_replace(Readiness::Stopping);
        self.stop_receiving.cancel();
        // Claims end at once; requests are still accepted for a while, since routers lag behind.
        let left = self.drain.timeout.saturating_sub(Duration::from_millis(500));
        let receiving = async {
            for mut task in self.tasks {
                if tokio::time::timeout_at(deadline, &mut task).await.is_err() {
                    task.abort();
                }
            }
        };
        tokio::join!(self.worker.stop(left), receiving);
        tracing::debug!(delay = ?self.drain.shutdown_delay, "Receiving has ended.");
        if let Some(traces) = self.traces {
            traces.end().await;
        }
        self.store.close().await;
        drop(self.management);
    }
}

/// A classic file without `server.managementPort` has everything on the data port (contract 12.1).
fn one_port(relay: &queuebox_api::checked::Relay) -> bool {
    relay.http.port == relay.http.management_port
}

async fn serve_management(listener: TcpListener, router: axum::Router) {
    let service = router.into_make_service_with_connect_info::<SocketAddr>();
    if let Err(error) = axum::serve(listener, service).await {
        tracing::error!(%error, "The management port ended.");
    }
}

fn start_pollers(
    brokers: Vec<BrokerSource>,
    worker: &Worker,
    stop: &CancellationToken,
    tasks: &mut Vec<JoinHandle<()>>,
) -> Vec<(String, Arc<dyn Source>)> {
    let mut pollers = Vec::new();
    for BrokerSource { source, intake, paused } in brokers {
        let name = intake.name.clone();
        if paused {
            tracing::info!(source = name, "Paused by its manifest.");
            continue;
        }
        let intake = worker.intake(intake);
        pollers.push((name, source.clone()));
        let stop = stop.clone();
        tasks.push(tokio::spawn(async move { source.run(intake, Box::pin(stop.cancelled_owned())).await }));
    }
    pollers
}

async fn listen(port: u16, field: &str) -> anyhow::Result<TcpListener> {
    TcpListener::bind(("0.0.0.0", port))
        .await
        .with_context(|| format!("cannot listen on port {port}; is it taken? Choose another with Relay.spec.{field}"))
}

/// The name of this host, in a cluster that of the pod.
pub fn host_name() -> String {
    std::env::var("HOSTNAME")
        .ok()
        .filter(|name| !name.is_empty())
        .or_else(|| std::fs::read_to_string("/proc/sys/kernel/hostname").ok().map(|name| name.trim().to_owned()))
        .unwrap_or_else(|| "queuebox".to_owned())
}

/// References of this Relay and its parts that have no value, each with manifest, field and reason.
fn without_value(
    relay: &queuebox_api::checked::Relay,
    references: &[UsedReference],
    secrets: &Arc<dyn queuebox_api::SecretResolver>,
) -> Vec<String> {
    references
        .iter()
        .filter(|used| manifests::belongs(relay, used))
        // The last value of a rotation is gone one day.
        .filter(|used| !used.path.contains("previous"))
        .filter_map(|used| {
            let error = secrets.resolve(&used.reference).err()?;
            Some(format!("{}/{}: {}: {error}", used.kind, used.name, used.path))
        })
        .collect()
}

/// In a cluster a Secret may come after the pod that needs it: whoever is not there is waited for, alive and not ready.
async fn wait_for_secrets(
    relay: &queuebox_api::checked::Relay,
    references: &[UsedReference],
    secrets: &Arc<dyn queuebox_api::SecretResolver>,
    door: &Door,
) {
    let own: Vec<UsedReference> = references
        .iter()
        .filter(|used| used.kind == queuebox_api::Kind::Relay && used.name == relay.name)
        .cloned()
        .collect();
    let mut said = Vec::new();
    loop {
        let missing: Vec<String> =
            management::missing(&own, secrets).iter().map(|used| used.reference.to_string()).collect();
        if missing.is_empty() {
            return;
        }
        let text = format!("waiting for {}", missing.join(", "));
        door.wait_for_database(&text, &missing);
        if missing != said {
            tracing::warn!("Not ready yet, {text}.");
            said = missing;
        }
        tokio::time::sleep(SECRET_PAUSE).await;
    }
}

/// Opens the database, waiting for it up to `startupTimeout`; then it is migrated and checked.
async fn database(
    relay: &queuebox_api::checked::Relay,
    secrets: &Arc<dyn queuebox_api::SecretResolver>,
    door: &Door,
) -> anyhow::Result<(Opened, SchemaReport)> {
    let begun = Instant::now();
    let mut pause = DATABASE_PAUSE;
    loop {
        let fault = match open_database(relay, secrets).await {
            Ok(opened) => return Ok(opened),
            Err(fault) => fault,
        };
        if fault.class == Class::Misconfigured {
            bail!("{}", fault.detail);
        }
        let limit = relay.database.startup_timeout;
        if begun.elapsed() + pause >= limit {
            bail!(
                "the database did not answer within database.startupTimeout ({}): {}",
                queuebox_api::format_duration(limit),
                fault.detail
            );
        }
        door.wait_for_database(&fault.detail, &[]);
        let what = match fault.code.as_ref() {
            "read_only" => "takes no writes",
            "busy" | "lock" => "is locked by somebody else",
            _ => "is not there yet",
        };
        tracing::warn!("The database {what}, trying again: {}", fault.detail);
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(DATABASE_PAUSE_MAX);
    }
}

async fn open_database(
    relay: &queuebox_api::checked::Relay,
    secrets: &Arc<dyn queuebox_api::SecretResolver>,
) -> Result<(Opened, SchemaReport), Fault> {
    let database = open_store(relay, secrets).await?;
    let store = database.store.clone();
    let opened = async {
        store.ping().await?;
        if relay.database.migrate {
            let done = store.migrate(MigrateOptions::default()).await?;
            for name in &done.applied {
                tracing::info!("Applied migration {name}.");
            }
        }
        let report = store.check().await?;
        refuse_fan_out(relay, store.fans_out())?;
        Ok(report)
    };
    match opened.await {
        Ok(report) => {
            for note in &report.notes {
                tracing::info!("{note}");
            }
            Ok((database, report))
        }
        Err(fault) => {
            store.close().await;
            Err(with_the_field(relay, fault))
        }
    }
}

/// A login that the server refuses: the text says so, and this where the login is written.
fn with_the_field(relay: &queuebox_api::checked::Relay, mut fault: Fault) -> Fault {
    let DatabaseServer::Postgres(server) = &relay.database.server else { return fault };
    if fault.code == "login" {
        let field = match &server.login {
            DatabaseLogin::Url(_) => "urlFrom",
            DatabaseLogin::Parts { .. } => "username and passwordFrom",
        };
        fault.detail = format!("{}; look at Relay.spec.database.postgres.{field}", fault.detail);
    }
    fault
}

/// SIGTERM and the interrupt key.
pub struct Signals {
    terminate: tokio::signal::unix::Signal,
    interrupt: tokio::signal::unix::Signal,
}

impl Signals {
    /// Listens from now on.
    ///
    /// # Errors
    /// The signals cannot be caught.
    pub fn new() -> anyhow::Result<Self> {
        use tokio::signal::unix::{SignalKind, signal};
        Ok(Self { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    /// The next one.
    pub async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

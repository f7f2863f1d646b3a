//! Carries plans out: watches, asks workers, writes what differs, as long as this process leads.
//!
//! ```text
//!   cache ──changed──► queue of namespaces ──► reconcile ──► gate ──► API server
//!   poll  ──changed──┘                            │ failed: again, with growing pauses
//! ```

pub mod cache;
pub mod gate;
pub mod lease;
pub mod metrics;
pub mod poll;
mod queue;
mod reconcile;
mod rollouts;
pub mod serve;
pub mod write;

use std::{net::SocketAddr, sync::Arc, time::Duration};

use kube::client::ClientBuilder;
use tokio::{
    net::TcpListener,
    sync::{mpsc, watch},
    task::JoinSet,
    time::Instant,
};
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};

use self::{
    cache::Cache, gate::Gate, lease::Election, metrics::Metrics, poll::Samples, queue::Queue, reconcile::Reconciler,
    write::Writer,
};
use crate::plan::Settings;

/// Namespaces that are reconciled at the same time.
const AT_ONCE: usize = 4;
/// Changes of a namespace are gathered for so long.
const GATHER: Duration = Duration::from_millis(200);

/// What the operator is started with.
#[derive(Debug, Clone)]
pub struct Options {
    /// Watched; none = the whole cluster.
    pub namespaces: Vec<String>,
    /// What shapes workers.
    pub settings: Settings,
    /// Several replicas elect a leader. Without, this process must be the only one.
    pub leader_election: bool,
    /// Where the Lease is.
    pub lease_namespace: String,
    /// Its name.
    pub lease_name: String,
    /// Who this is, unique among the replicas.
    pub identity: String,
    /// Probes, metrics, backlog.
    pub listen: SocketAddr,
    /// How often workers are asked, and time-dependent decisions are made anew.
    pub poll_interval: Duration,
}

/// The operator cannot run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The port is taken.
    #[error("cannot listen on {0}: {1}; choose another with --listen")]
    Listen(SocketAddr, std::io::Error),
    /// No client.
    #[error("cannot reach the Kubernetes API: {0}")]
    Kube(#[from] kube::Error),
    /// Neither a pod's service account nor a kubeconfig.
    #[error("cannot find the Kubernetes API: {0}; run it in a pod, or set KUBECONFIG")]
    Config(#[from] kube::config::InferConfigError),
    /// No client.
    #[error("cannot ask workers: {0}")]
    Http(#[from] reqwest::Error),
    /// A metric.
    #[error("cannot count: {0}")]
    Metrics(#[from] prometheus::Error),
}

/// Runs in the cluster of the pod, or of the kubeconfig, until stopped; the Lease is given back at the end.
///
/// # Errors
/// See [`Error`]. An API server that is away is none: it is tried again.
pub async fn run(options: Options, stop: CancellationToken) -> Result<(), Error> {
    run_in(kube::Config::infer().await?, options, stop).await
}

/// [`run`] with a configuration of the client.
///
/// # Errors
/// See [`run`].
pub async fn run_in(config: kube::Config, options: Options, stop: CancellationToken) -> Result<(), Error> {
    let listener = TcpListener::bind(options.listen).await.map_err(|error| Error::Listen(options.listen, error))?;
    let gate = if options.leader_election { Gate::closed() } else { Gate::open() };
    let client = kube::Client::try_from(config.clone())?;
    let writing = ClientBuilder::try_from(config)?.with_layer(&gate).build();
    let metrics = Metrics::new(env!("CARGO_PKG_VERSION"))?;
    let (changed, changes) = mpsc::unbounded_channel();
    let cache = Cache::new(changed.clone());
    let samples = Samples::new(cache.clone())?;
    let parts = serve::Parts { cache: cache.clone(), samples: samples.clone(), metrics: metrics.clone() };

    let mut tasks = JoinSet::new();
    let router = serve::router(parts);
    let served = stop.clone();
    tasks.spawn(async move {
        let ended = axum::serve(listener, router).with_graceful_shutdown(served.cancelled_owned()).await;
        if let Err(error) = ended {
            tracing::error!(%error, "The operator's port ended.");
        }
    });
    let (leading, leads) = watch::channel(!options.leader_election);
    let mut election = options.leader_election.then(|| {
        let (namespace, name) = (&options.lease_namespace, &options.lease_name);
        Election::new(client.clone(), namespace, name, &options.identity, gate.clone(), leading)
    });
    let competing = CancellationToken::new();
    let election = {
        let competing = competing.clone();
        AbortOnDropHandle::new(tokio::spawn(async move {
            if let Some(election) = &mut election {
                election.run(competing).await;
            }
            election
        }))
    };
    let reconciler = Arc::new(Reconciler::new(
        cache.clone(),
        samples.clone(),
        Writer::new(writing, &options.identity),
        options.settings.clone(),
        metrics.clone(),
        gate,
    ));
    let operator = Operator { client, options, cache, samples, metrics, reconciler, leads };
    operator.work(changes, &changed, &stop).await;
    // Whoever leads next must not meet a write of ours: the Lease goes last.
    competing.cancel();
    if let Ok(Some(election)) = election.await {
        election.give_back().await;
    }
    tasks.shutdown().await;
    Ok(())
}

struct Operator {
    client: kube::Client,
    options: Options,
    cache: Cache,
    samples: Samples,
    metrics: Metrics,
    reconciler: Arc<Reconciler>,
    leads: watch::Receiver<bool>,
}

impl Operator {
    /// The main loop. Everything under way has ended when it returns.
    async fn work(
        mut self,
        mut changes: mpsc::UnboundedReceiver<String>,
        changed: &mpsc::UnboundedSender<String>,
        stop: &CancellationToken,
    ) {
        let mut watches = self.cache.start(&self.client, &self.options.namespaces);
        let mut synced = self.cache.synced();
        let mut queue = Queue::default();
        let mut running: JoinSet<(String, Result<bool, reconcile::Failed>)> = JoinSet::new();
        let mut has_led = false;
        let mut leading = false;
        let mut polling: Option<tokio::task::JoinHandle<()>> = None;
        let mut poll_at = Instant::now();
        loop {
            let may_work = leading && *synced.borrow();
            while may_work && running.len() < AT_ONCE {
                let Some(namespace) = queue.take(Instant::now()) else { break };
                let reconciler = self.reconciler.clone();
                running.spawn(async move {
                    let outcome = reconciler.reconcile(&namespace).await;
                    (namespace, outcome)
                });
            }
            if may_work
                && polling.as_ref().is_none_or(tokio::task::JoinHandle::is_finished)
                && Instant::now() >= poll_at
            {
                poll_at = Instant::now() + self.options.poll_interval;
                polling = Some(self.poll(changed.clone()));
            }
            let wake = if may_work && running.len() < AT_ONCE {
                queue.next().map_or(poll_at, |at| at.min(poll_at))
            } else {
                poll_at
            };
            let wake = wake.max(Instant::now() + Duration::from_millis(20));
            tokio::select! {
                Some(namespace) = changes.recv() => {
                    queue.changed(namespace, Instant::now() + GATHER);
                    while let Ok(namespace) = changes.try_recv() {
                        queue.changed(namespace, Instant::now() + GATHER);
                    }
                }
                Some(done) = running.join_next() => {
                    if let Ok((namespace, outcome)) = done {
                        self.settle(&mut queue, namespace, outcome);
                    }
                }
                Ok(()) = self.leads.changed(), if !stop.is_cancelled() => {
                    leading = *self.leads.borrow_and_update();
                    self.metrics.leader.set(i64::from(leading));
                    if leading && has_led {
                        // Nothing may be written with what was known before somebody else led.
                        watches = self.cache.start(&self.client, &self.options.namespaces);
                    }
                    has_led |= leading;
                    for namespace in self.cache.namespaces() {
                        queue.changed(namespace, Instant::now());
                    }
                }
                Ok(()) = synced.changed() => {
                    if *synced.borrow_and_update() {
                        self.metrics.set_synced();
                    }
                }
                () = tokio::time::sleep_until(wake) => {}
                () = stop.cancelled() => break,
            }
            if !leading && !self.options.leader_election {
                leading = true;
                self.metrics.leader.set(1);
            }
        }
        watches.shutdown().await;
        if let Some(polling) = polling {
            polling.abort();
        }
        while running.join_next().await.is_some() {}
    }

    fn settle(&self, queue: &mut Queue, namespace: String, outcome: Result<bool, reconcile::Failed>) {
        match outcome {
            Ok(again_soon) => {
                self.metrics.reconciles.with_label_values(&["ok"]).inc();
                queue.done(&namespace, again_soon, self.options.poll_interval, Instant::now());
            }
            Err(failed) => {
                self.metrics.reconciles.with_label_values(&["error"]).inc();
                let pause = queue.failed(&namespace, Instant::now());
                tracing::warn!(namespace, ?pause, "Reconciling failed and is tried again: {failed}");
            }
        }
    }

    /// Asks all workers beside the main loop, so that one that hangs delays nothing.
    fn poll(&self, changed: mpsc::UnboundedSender<String>) -> tokio::task::JoinHandle<()> {
        let samples = self.samples.clone();
        let metrics = self.metrics.clone();
        tokio::spawn(async move {
            for namespace in samples.ask_all().await {
                let _ = changed.send(namespace);
            }
            metrics.polls.inc();
        })
    }
}

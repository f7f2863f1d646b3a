//! `queuebox operator`: runs Relays in a Kubernetes cluster.

use std::{net::SocketAddr, time::Duration};

use clap::Args;
use queuebox_operator::Settings;
use tokio_util::sync::CancellationToken;

use crate::serve::Signals;

/// How often workers are asked how they fare.
const POLL_INTERVAL: Duration = Duration::from_secs(10);

/// Options of the operator.
#[derive(Debug, Args)]
pub struct Options {
    /// Namespace to watch; may be repeated, in the variable separated by commas. None = the whole cluster.
    #[arg(long, value_name = "NS", env = "QUEUEBOX_WATCH_NAMESPACES", value_delimiter = ',', num_args = 1)]
    namespace: Vec<String>,

    /// Image of the workers, where Relay.spec.pod.image says nothing.
    #[arg(long, value_name = "IMAGE", env = "QUEUEBOX_WORKER_IMAGE")]
    worker_image: String,

    /// When the image of the workers is pulled.
    #[arg(
        long,
        value_name = "POLICY",
        env = "QUEUEBOX_WORKER_IMAGE_PULL_POLICY",
        default_value = "IfNotPresent",
        value_parser = ["Always", "IfNotPresent", "Never"]
    )]
    worker_image_pull_policy: String,

    /// Secret for pulling the image of the workers; may be repeated, in the variable separated by commas.
    #[arg(long, value_name = "NAME", env = "QUEUEBOX_WORKER_IMAGE_PULL_SECRETS", value_delimiter = ',', num_args = 1)]
    worker_image_pull_secret: Vec<String>,

    /// Replicas elect a leader. Without it this process must be the only operator.
    #[arg(
        long,
        value_name = "BOOL",
        env = "QUEUEBOX_LEADER_ELECTION",
        default_value_t = true,
        action = clap::ArgAction::Set
    )]
    leader_election: bool,

    /// Namespace of the Lease that the leader holds.
    #[arg(long, value_name = "NS", env = "POD_NAMESPACE", default_value = "default")]
    lease_namespace: String,

    /// Name of the Lease that the leader holds.
    #[arg(long, value_name = "NAME", env = "QUEUEBOX_LEASE_NAME", default_value = "queuebox-operator")]
    lease_name: String,

    /// Who this is, unique among the replicas. Default: the name of the host.
    #[arg(long, value_name = "NAME", env = "POD_NAME")]
    identity: Option<String>,

    /// Where probes, metrics and the backlog of Relays are served.
    #[arg(long, value_name = "ADDR", env = "QUEUEBOX_OPERATOR_LISTEN", default_value = "0.0.0.0:8080")]
    listen: SocketAddr,
}

/// Runs until SIGTERM or an interrupt.
///
/// # Errors
/// The Kubernetes API cannot be found, or the port is taken.
pub async fn run(options: Options) -> anyhow::Result<()> {
    let mut signals = Signals::new()?;
    let stop = CancellationToken::new();
    let filled = |names: Vec<String>| {
        names.into_iter().map(|name| name.trim().to_owned()).filter(|name| !name.is_empty()).collect()
    };
    let options = queuebox_operator::Options {
        namespaces: filled(options.namespace),
        settings: Settings {
            worker_image: options.worker_image,
            worker_image_pull_policy: options.worker_image_pull_policy,
            image_pull_secrets: filled(options.worker_image_pull_secret),
            operator_namespace: options.lease_namespace.clone(),
        },
        leader_election: options.leader_election,
        lease_namespace: options.lease_namespace,
        lease_name: options.lease_name,
        identity: options.identity.unwrap_or_else(crate::serve::host_name),
        listen: options.listen,
        poll_interval: POLL_INTERVAL,
    };
    let running = queuebox_operator::run(options, stop.clone());
    tokio::pin!(running);
    tokio::select! {
        ended = &mut running => return Ok(ended?),
        () = signals.next() => {}
    }
    tracing::info!("Stopping: what is being written ends, then the Lease is given back.");
    stop.cancel();
    tokio::select! {
        ended = running => Ok(ended?),
        () = signals.next() => Ok(()),
    }
}

//! Whatever the broker does, every publish ends, and messages flow again when it is back.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    time::Duration,
};

use futures::future::join_all;
use queuebox_core::{Class, Fault, Uuid, ports::Destination};
use queuebox_rabbitmq::{DestinationConfig, RabbitDestination};
use queuebox_testkit::{RabbitMq, eventually, eventually_ok, private_rabbitmq};
use tokio::time::{Instant, timeout};

use crate::support::{self, Client};

/// Room for a machine that also compiles.
const BACK: Duration = Duration::from_secs(60);

type Outcomes = Vec<(Uuid, Result<(), Fault>)>;

/// Publishes until told to stop; every call must end by itself.
struct Flow {
    stop: Arc<AtomicBool>,
    tasks: Vec<tokio::task::JoinHandle<Outcomes>>,
}

impl Flow {
    fn start(destination: Arc<dyn Destination>) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let tasks = (0..16).map(|_| {
            let (stop, destination) = (stop.clone(), destination.clone());
            tokio::spawn(async move {
                let mut outcomes = Vec::new();
                while !stop.load(SeqCst) {
                    let row = support::row(0, "t");
                    let id = row.id;
                    // The destination's time-out is 5 s; several times that is a hang.
                    let outcome = timeout(Duration::from_secs(30), destination.publish(row)).await.expect("hangs");
                    if outcome.is_err() {
                        tokio::time::sleep(Duration::from_millis(50)).await;
                    }
                    outcomes.push((id, outcome));
                }
                outcomes
            })
        });
        Self { tasks: tasks.collect(), stop }
    }

    async fn end(self) -> Outcomes {
        self.stop.store(true, SeqCst);
        join_all(self.tasks).await.into_iter().flat_map(|outcomes| outcomes.expect("no panic")).collect()
    }
}

async fn flows_again(destination: &Arc<dyn Destination>) {
    eventually_ok("messages flow again", BACK, || destination.publish(support::row(0, "t"))).await;
}

async fn connections(broker: &RabbitMq) -> usize {
    let all = broker.try_api("GET", "/connections", None).await.unwrap_or_default();
    let ours = |one: &&serde_json::Value| one["client_properties"]["connection_name"] == "queuebox test";
    all.as_array().map_or(0, |all| all.iter().filter(ours).count())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_lost_and_nothing_hangs_through_every_trouble() {
    let broker = private_rabbitmq().await;
    let client = Client::connect(&broker.url()).await;
    client.declare_exchange("ex").await;
    client.declare_queue("q").await;
    client.bind("q", "ex", "#").await;
    let config = DestinationConfig { timeout: Duration::from_secs(5), ..support::destination(&broker.url()) };
    let destination: Arc<dyn Destination> = Arc::new(RabbitDestination::new(config));
    let flow = Flow::start(destination.clone());
    flows_again(&destination).await;

    // An operator closes the connections.
    for one in broker.api("GET", "/connections", None).await.as_array().unwrap() {
        if one["client_properties"]["connection_name"] == "queuebox test" {
            let name = one["name"].as_str().unwrap().replace(' ', "%20").replace('>', "%3E");
            let _ = broker.try_api("DELETE", &format!("/connections/{name}"), None).await;
        }
    }
    flows_again(&destination).await;

    // The exchange goes away and is declared anew; what was bound to it is gone with it, so messages come back.
    let exchange = "/exchanges/%2f/ex";
    broker.api("DELETE", exchange, None).await;
    let fault = eventually("unroutable, no longer missing", BACK, || async {
        destination.publish(support::row(0, "t")).await.err().filter(|fault| fault.code == "unroutable")
    });
    assert_eq!(fault.await.class, Class::Transient);
    let binding = "/bindings/%2f/e/ex/q/q";
    broker.api("POST", binding, Some(serde_json::json!({"routing_key": "#"}))).await;
    flows_again(&destination).await;

    // The broker stands still.
    broker.pause().await;
    let fault = eventually("a failure", BACK, || async { destination.publish(support::row(0, "t")).await.err() }).await;
    assert!(matches!(fault.class, Class::Ambiguous | Class::NotConnected), "{fault}");
    broker.cont().await;
    flows_again(&destination).await;

    // The broker is killed and starts again.
    broker.kill9().await;
    let fault = eventually("not connected", BACK, || async {
        destination.probe().await.err().filter(|fault| fault.class == Class::NotConnected)
    });
    assert!(fault.await.detail.contains("127.0.0.1"));
    broker.start().await;
    flows_again(&destination).await;

    let outcomes = flow.end().await;
    let client = Client::connect(&broker.url()).await;
    let there: std::collections::HashSet<_> = client.take_all("q").await.into_iter().filter_map(|one| one.id).collect();
    let lost = outcomes.iter().filter(|(id, outcome)| outcome.is_ok() && !there.contains(id)).count();
    let never_offered = |fault: &Fault| fault.class == Class::NotConnected;
    let wrong =
        outcomes.iter().filter(|(id, outcome)| outcome.as_ref().is_err_and(never_offered) && there.contains(id));
    assert_eq!((lost, wrong.count()), (0, 0), "confirmed and not there; not offered and yet there");

    eventually("one connection is left", BACK, || async { (connections(&broker).await == 1).then_some(()) }).await;
    destination.close().await;
    eventually("none is left", BACK, || async { (connections(&broker).await == 0).then_some(()) }).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_that_says_nothing_and_a_missing_virtual_host_are_not_connected() {
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = silent.local_addr().unwrap().port();
    let url = format!("amqp://guest:guest@127.0.0.1:{port}/%2f");
    let config = DestinationConfig { timeout: Duration::from_secs(1), ..support::destination(&url) };
    let destination = RabbitDestination::new(config);
    let begun = Instant::now();
    let fault = destination.publish(support::row(0, "t")).await.expect_err("nobody answers");
    assert_eq!(fault.class, Class::NotConnected, "{fault}");
    let fault =
        timeout(Duration::from_secs(40), destination.probe()).await.expect("hangs").expect_err("nobody answers");
    assert_eq!(fault.class, Class::NotConnected, "{fault}");
    assert!(begun.elapsed() >= Duration::from_secs(1));
    // The connection that was given up is closed, not left to wait for an answer.
    let (mut socket, _) = silent.accept().await.unwrap();
    let mut all = Vec::new();
    let end = tokio::io::AsyncReadExt::read_to_end(&mut socket, &mut all);
    timeout(Duration::from_secs(60), end).await.expect("the socket stays open").expect("closed in order");

    let broker = support::broker().await;
    let destination = RabbitDestination::new(support::destination(&broker.url_of("no-such-vhost")));
    let fault = destination.probe().await.expect_err("there is no such virtual host");
    assert_eq!((fault.class, fault.code.as_ref()), (Class::NotConnected, "login"), "{fault}");
    assert!(fault.detail.contains("no-such-vhost"), "{fault}");
}

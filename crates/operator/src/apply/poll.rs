//! Asks workers on their management port how they fare. No answer is no error: it is simply not known then.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use futures::{StreamExt, stream};
use jiff::Timestamp;
use queuebox_api::Kind;
use serde_json::Value;

use super::cache::{Cache, Watched};
use crate::plan::{
    names,
    sample::{Sample, WorkerStatus},
    seen::Seen,
};

/// Longest wait for one worker.
const ANSWER_WITHIN: Duration = Duration::from_secs(3);
/// Workers that are asked at the same time.
const AT_ONCE: usize = 64;
/// A larger answer is none of a worker.
const ANSWER_BYTES_MAX: usize = 1 << 20;

/// What the workers of one namespace said, by the UID of the Relay.
pub type OfNamespace = BTreeMap<String, Vec<Sample>>;

/// What the workers said last, by namespace and UID of the Relay.
#[derive(Clone)]
pub struct Samples {
    cache: Cache,
    http: reqwest::Client,
    known: Arc<Mutex<HashMap<String, OfNamespace>>>,
}

/// Where a worker is asked.
struct Address {
    relay: String,
    pod: String,
    url: String,
}

impl Samples {
    /// Nothing is known yet.
    ///
    /// # Errors
    /// The HTTP client cannot be built.
    pub fn new(cache: Cache) -> Result<Self, reqwest::Error> {
        // A worker is asked directly, whatever proxy the environment names.
        let http = reqwest::Client::builder().no_proxy().timeout(ANSWER_WITHIN).build()?;
        Ok(Self { cache, http, known: Arc::default() })
    }

    /// What is known of a namespace.
    pub fn of(&self, namespace: &str) -> OfNamespace {
        self.known.lock().unwrap_or_else(PoisonError::into_inner).get(namespace).cloned().unwrap_or_default()
    }

    /// Asks all workers of all namespaces; afterwards only what is still there is known. Returns the namespaces that have workers.
    pub async fn ask_all(&self) -> Vec<String> {
        let namespaces = self.cache.namespaces();
        self.known.lock().unwrap_or_else(PoisonError::into_inner).retain(|namespace, _| namespaces.contains(namespace));
        let addresses: Vec<(String, Address)> = namespaces
            .iter()
            .flat_map(|namespace| self.addresses(namespace).into_iter().map(move |it| (namespace.clone(), it)))
            .collect();
        let mut asked: Vec<String> = addresses.iter().map(|(namespace, _)| namespace.clone()).collect();
        asked.dedup();
        stream::iter(addresses)
            .for_each_concurrent(AT_ONCE, |(namespace, address)| async move { self.ask(&namespace, address).await })
            .await;
        for namespace in &namespaces {
            self.forget_gone(namespace);
        }
        asked
    }

    /// Asks the workers of one namespace, for a question that cannot wait.
    pub async fn ask_namespace(&self, namespace: &str) {
        stream::iter(self.addresses(namespace))
            .for_each_concurrent(AT_ONCE, |address| async move { self.ask(namespace, address).await })
            .await;
    }

    fn addresses(&self, namespace: &str) -> Vec<Address> {
        let relays = self.cache.list(namespace, Watched::User(Kind::Relay));
        let relays: HashMap<String, &Seen> = relays.iter().map(|relay| (names::short(relay.name()), relay)).collect();
        let pods = self.cache.list(namespace, Watched::Pod);
        let address = |pod: &Seen| {
            let relay = relays.get(pod.label(names::RELAY_LABEL)?)?;
            let ip: std::net::IpAddr = pod.text("/status/podIP").parse().ok()?;
            let port = management_port(pod)?;
            (!pod.is_deleting() && pod.text("/status/phase") == "Running").then(|| Address {
                relay: relay.uid().to_owned(),
                pod: pod.name().to_owned(),
                url: format!("http://{}/status", std::net::SocketAddr::new(ip, port)),
            })
        };
        pods.iter().filter_map(address).collect()
    }

    async fn ask(&self, namespace: &str, address: Address) {
        let answer = async {
            let answer = self.http.get(&address.url).send().await.ok()?.error_for_status().ok()?;
            if answer.content_length().is_some_and(|length| length > ANSWER_BYTES_MAX as u64) {
                return None;
            }
            let body = answer.bytes().await.ok().filter(|body| body.len() <= ANSWER_BYTES_MAX)?;
            serde_json::from_slice::<WorkerStatus>(&body).ok()
        };
        let Some(status) = answer.await else { return };
        let sample = Sample { pod: address.pod, at: Timestamp::now(), status };
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let of_relay = known.entry(namespace.to_owned()).or_default().entry(address.relay).or_default();
        of_relay.retain(|other| other.pod != sample.pod);
        of_relay.push(sample);
    }

    fn forget_gone(&self, namespace: &str) {
        let pods: Vec<String> =
            self.cache.list(namespace, Watched::Pod).iter().map(|pod| pod.name().to_owned()).collect();
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(relays) = known.get_mut(namespace) {
            for samples in relays.values_mut() {
                samples.retain(|sample| pods.contains(&sample.pod));
            }
            relays.retain(|_, samples| !samples.is_empty());
        }
    }
}

fn management_port(pod: &Seen) -> Option<u16> {
    let ports = pod.at("/spec/containers/0/ports").as_array()?;
    let port = ports.iter().find(|port| port.get("name").and_then(Value::as_str) == Some("management"))?;
    port.get("containerPort").and_then(Value::as_u64).and_then(|port| u16::try_from(port).ok())
}

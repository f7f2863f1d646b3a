//! A counting prober: it writes and posts numbered messages of several keys, and judges what has arrived.
//!
//! A message is accepted when its row has committed, or its request was answered 200 or 202. A message whose fate is not known (the
//! database or the pod went away) is given again, under the same id, before the next of its key: so the numbers of a key have no gaps and
//! the order in which they are accepted is theirs.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::atomic::{AtomicUsize, Ordering},
    sync::{Arc, Mutex},
    time::Duration,
};

use queuebox_testkit::{self as testkit, Recorded, Recorder};
use serde_json::json;
use tokio::{sync::watch, task::JoinHandle};

use crate::support::{Db, OutboxRow};

/// Keys of rows, and as many of requests.
const KEYS: usize = 5;
/// Between two messages of one key.
const PAUSE: Duration = Duration::from_millis(80);

/// What became of the messages.
#[derive(Debug, Default)]
pub struct Verdict {
    pub accepted: usize,
    /// Accepted, and never seen by the receiver.
    pub lost: usize,
    /// Seen more often than once.
    pub duplicates: usize,
    /// First seen before an earlier one of their key.
    pub disorder: usize,
    /// Some of the lost and the disordered.
    pub examples: Vec<String>,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Verdict { accepted, lost, duplicates, disorder, .. } = self;
        write!(f, "accepted {accepted}, lost {lost}, duplicates {duplicates}, out of order {disorder}")
    }
}

/// A running load.
#[derive(Debug)]
pub struct Prober {
    receiver: Arc<Recorder>,
    stop: watch::Sender<bool>,
    accepted: Arc<AtomicUsize>,
    /// Why the last message of a key was not accepted, while it is not.
    troubles: Troubles,
    writers: Vec<(String, JoinHandle<u64>)>,
}

type Troubles = Arc<Mutex<BTreeMap<String, String>>>;

impl Prober {
    /// Begins to write rows and to post to `source`.
    pub fn start(db: Db, receiver: Arc<Recorder>, source: String) -> Prober {
        let (stop, stopped) = watch::channel(false);
        let accepted = Arc::new(AtomicUsize::new(0));
        let troubles = Troubles::default();
        let client = reqwest::Client::builder().timeout(Duration::from_secs(10)).build().unwrap();
        let mut writers = Vec::new();
        for index in 0..KEYS {
            let key = format!("row-{index}");
            let count = (accepted.clone(), troubles.clone());
            let task = tokio::spawn(write(db.clone(), key.clone(), stopped.clone(), count));
            writers.push((key, task));
            let key = format!("hook-{index}");
            let count = (accepted.clone(), troubles.clone());
            let task = tokio::spawn(post(client.clone(), source.clone(), key.clone(), stopped.clone(), count));
            writers.push((key, task));
        }
        Prober { receiver, stop, accepted, troubles, writers }
    }

    /// Waits until so many more messages were accepted.
    pub async fn more(&self, count: usize) {
        let wanted = self.accepted.load(Ordering::SeqCst) + count;
        let what = format!("{count} more accepted messages");
        testkit::eventually(&what, super::node::PATIENCE, || async {
            (self.accepted.load(Ordering::SeqCst) >= wanted).then_some(())
        })
        .await;
    }

    /// Waits until so many more requests have reached the receiver.
    pub async fn delivered(&self, count: usize) {
        let wanted = self.receiver.count() + count;
        let waiting = self.receiver.wait_for(wanted, 2 * super::node::PATIENCE);
        if tokio::time::timeout(super::node::PATIENCE, waiting).await.is_err() {
            panic!(
                "{} of {wanted} requests have arrived; {} messages were accepted; not accepted: {:?}",
                self.receiver.count(),
                self.accepted.load(Ordering::SeqCst),
                self.troubles.lock().unwrap()
            );
        }
    }

    /// Stops, waits for what is still on its way, and judges.
    pub async fn finish(self, patience: Duration) -> Verdict {
        self.stop.send_replace(true);
        let mut accepted = BTreeMap::new();
        for (key, writer) in self.writers {
            // A writer ends with its last message accepted, for a refused one may be stored all the same.
            let Ok(written) = tokio::time::timeout(patience, writer).await else {
                panic!("not accepted for {patience:?}: {:?}", self.troubles.lock().unwrap());
            };
            accepted.insert(key, written.unwrap());
        }
        let total: u64 = accepted.values().sum();
        let all_there =
            |requests: &[Recorded]| seen(requests).values().map(|numbers| numbers.len() as u64).sum::<u64>() >= total;
        let waiting = async {
            loop {
                if all_there(&self.receiver.requests()) {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
        };
        let _ = tokio::time::timeout(patience, waiting).await;
        let arrivals: Vec<(String, u64)> = self.receiver.requests().iter().map(numbered).collect();
        judge(&accepted, &arrivals)
    }
}

/// Key and number of a request.
fn numbered(request: &Recorded) -> (String, u64) {
    let body = request.json();
    (body["key"].as_str().unwrap().to_owned(), body["n"].as_u64().unwrap())
}

fn seen(requests: &[Recorded]) -> BTreeMap<String, BTreeSet<u64>> {
    let mut seen: BTreeMap<String, BTreeSet<u64>> = BTreeMap::new();
    for request in requests {
        let (key, number) = numbered(request);
        seen.entry(key).or_default().insert(number);
    }
    seen
}

/// `accepted`: for each key how many, numbered from 1. `arrivals`: key and number in the order in which they came.
fn judge(accepted: &BTreeMap<String, u64>, arrivals: &[(String, u64)]) -> Verdict {
    let mut verdict = Verdict::default();
    for (key, count) in accepted {
        verdict.accepted += usize::try_from(*count).unwrap();
        let mut known = BTreeSet::new();
        for (_, number) in arrivals.iter().filter(|(of, _)| of == key) {
            if known.contains(number) {
                verdict.duplicates += 1;
                continue;
            }
            if known.last().is_some_and(|last| last > number) {
                verdict.disorder += 1;
                verdict.examples.push(format!("{key}/{number} came late"));
            }
            known.insert(*number);
        }
        for number in (1..=*count).filter(|number| !known.contains(number)) {
            verdict.lost += 1;
            verdict.examples.push(format!("{key}/{number} is lost"));
        }
    }
    verdict.examples.truncate(20);
    verdict
}

/// Rows of one key, one transaction each.
async fn write(
    db: Db,
    key: String,
    stopped: watch::Receiver<bool>,
    (accepted, troubles): (Arc<AtomicUsize>, Troubles),
) -> u64 {
    let mut number = 0;
    while !*stopped.borrow() {
        let payload = json!({"key": key, "n": number + 1}).to_string();
        let row = OutboxRow::new("order.changed", 0).key(&key).payload(&payload).max_attempts(1000);
        let insert = format!("{} ON CONFLICT (id) DO NOTHING", row.sql());
        while let Err(error) = db.try_execute(&insert).await {
            troubles.lock().unwrap().insert(key.clone(), error.to_string());
            tokio::time::sleep(PAUSE).await;
        }
        troubles.lock().unwrap().remove(&key);
        number += 1;
        accepted.fetch_add(1, Ordering::SeqCst);
        tokio::time::sleep(PAUSE).await;
    }
    number
}

/// Requests of one key, as a sender of webhooks makes them.
async fn post(
    client: reqwest::Client,
    url: String,
    key: String,
    stopped: watch::Receiver<bool>,
    (accepted, troubles): (Arc<AtomicUsize>, Troubles),
) -> u64 {
    let mut number = 0;
    while !*stopped.borrow() {
        let body = json!({"id": format!("{key}-{}", number + 1), "key": key, "n": number + 1}).to_string();
        loop {
            let trouble = match client.post(&url).body(body.clone()).send().await {
                Ok(answer) if answer.status().is_success() => break,
                Ok(answer) => answer.status().to_string(),
                Err(error) => format!("{error:?}"),
            };
            troubles.lock().unwrap().insert(key.clone(), trouble);
            tokio::time::sleep(PAUSE).await;
        }
        troubles.lock().unwrap().remove(&key);
        number += 1;
        accepted.fetch_add(1, Ordering::SeqCst);
        tokio::time::sleep(PAUSE).await;
    }
    number
}

#[test]
fn the_prober_sees_loss_repeats_and_disorder() {
    let accepted = BTreeMap::from([("a".to_owned(), 4), ("b".to_owned(), 2)]);
    let arrivals =
        [("a", 1), ("b", 1), ("a", 3), ("a", 2), ("a", 2), ("b", 2)].map(|(key, number)| (key.to_owned(), number));
    let verdict = judge(&accepted, &arrivals);
    assert_eq!(verdict.to_string(), "accepted 6, lost 1, duplicates 1, out of order 1");
    assert_eq!(verdict.examples, ["a/2 came late", "a/4 is lost"]);
}

//! What stands where a destination stands: counts, judges the order of each key, and passes on to the real connector, if there is one.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use anyhow::{bail, ensure};
use async_trait::async_trait;
use queuebox_core::{
    Fault,
    ports::{Delivery, Destination},
};
use tokio::sync::Notify;

/// Counts deliveries. `inner` = `None` is the null sink.
pub struct Sink {
    inner: Option<Arc<dyn Destination>>,
    /// What was seen.
    pub seen: Arc<Seen>,
}

/// What a sink has seen.
pub struct Seen {
    expected: u64,
    state: Mutex<State>,
    failures: AtomicU64,
    complete: Notify,
}

#[derive(Default)]
struct State {
    /// Highest number of each key.
    last: HashMap<String, u64>,
    count: u64,
    repeated: u64,
    disorder: Option<String>,
    first: Option<Instant>,
    end: Option<Instant>,
    /// When each number arrived, where that is asked for.
    arrivals: Option<HashMap<u64, Instant>>,
}

impl Seen {
    /// Is complete after `expected` messages; `keep_arrivals`: remembers when each came.
    pub fn new(expected: u64, keep_arrivals: bool) -> Arc<Self> {
        let state = State { arrivals: keep_arrivals.then(HashMap::new), ..State::default() };
        Arc::new(Self { expected, state: Mutex::new(state), failures: AtomicU64::new(0), complete: Notify::new() })
    }

    fn take(&self, key: Option<String>, number: u64) {
        let now = Instant::now();
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let state = &mut *state;
        if let Some(key) = key {
            match state.last.get_mut(&key) {
                Some(last) if *last == number => {
                    state.repeated += 1;
                    return;
                }
                Some(last) if *last > number => {
                    state.disorder.get_or_insert_with(|| format!("{key}: {number} came after {last}"));
                }
                Some(last) => *last = number,
                None => {
                    state.last.insert(key, number);
                }
            }
        }
        state.first.get_or_insert(now);
        state.count += 1;
        if let Some(arrivals) = &mut state.arrivals {
            arrivals.insert(number, now);
        }
        if state.count == self.expected {
            state.end = Some(now);
            self.complete.notify_one();
        }
    }

    /// Waits for the last expected message.
    ///
    /// # Errors
    /// Nothing has arrived for `patience`.
    pub async fn complete(&self, patience: Duration) -> anyhow::Result<()> {
        let mut before = 0;
        loop {
            if tokio::time::timeout(patience, self.complete.notified()).await.is_ok() {
                return Ok(());
            }
            let count = self.state.lock().unwrap_or_else(PoisonError::into_inner).count;
            if count == before {
                let failures = self.failures.load(Relaxed);
                bail!(
                    "{count} of {} messages arrived, then nothing for {patience:?}; {failures} publishes failed",
                    self.expected
                );
            }
            before = count;
        }
    }

    /// From the first message to the last expected one.
    ///
    /// # Errors
    /// Messages came twice or out of order: such a run has no figure.
    pub fn verdict(&self) -> anyhow::Result<Duration> {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(disorder) = &state.disorder {
            bail!("the order was broken; {disorder}");
        }
        ensure!(state.repeated == 0, "{} messages came twice", state.repeated);
        match (state.first, state.end) {
            (Some(first), Some(end)) => Ok(end - first),
            _ => bail!("{} of {} messages arrived", state.count, self.expected),
        }
    }

    /// When each message arrived.
    pub fn arrivals(&self) -> HashMap<u64, Instant> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).arrivals.take().unwrap_or_default()
    }
}

impl Sink {
    /// In front of a connector, or of nothing.
    pub fn new(inner: Option<Arc<dyn Destination>>, seen: Arc<Seen>) -> Self {
        Self { inner, seen }
    }
}

#[async_trait]
impl Destination for Sink {
    fn kind(&self) -> &'static str {
        self.inner.as_ref().map_or("null", |inner| inner.kind())
    }

    async fn publish(&self, delivery: Delivery) -> Result<(), Fault> {
        let number = number(&delivery.payload);
        let key = delivery.key.clone();
        if let Some(inner) = &self.inner
            && let Err(fault) = inner.publish(delivery).await
        {
            self.seen.failures.fetch_add(1, Relaxed);
            return Err(fault);
        }
        self.seen.take(key, number);
        Ok(())
    }

    async fn probe(&self) -> Result<(), Fault> {
        match &self.inner {
            Some(inner) => inner.probe().await,
            None => Ok(()),
        }
    }

    async fn close(&self) {
        if let Some(inner) = &self.inner {
            inner.close().await;
        }
    }
}

/// The number in `{"n": 17, …}`; names of `jsonb` come shortest first, so it is at the beginning.
fn number(payload: &[u8]) -> u64 {
    let digits = payload.iter().skip_while(|byte| !byte.is_ascii_digit()).take_while(|byte| byte.is_ascii_digit());
    digits.fold(0, |number, digit| number * 10 + u64::from(digit - b'0'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_run_that_broke_the_order_or_lost_a_message_has_no_figure() {
        let seen = Seen::new(3, false);
        seen.take(Some("a".into()), 1);
        seen.take(Some("a".into()), 2);
        assert!(seen.complete(Duration::from_millis(1)).await.unwrap_err().to_string().contains("2 of 3"));
        assert!(seen.verdict().is_err());
        seen.take(Some("b".into()), 3);
        seen.complete(Duration::from_secs(60)).await.unwrap();
        seen.verdict().unwrap();
        seen.take(Some("a".into()), 1);
        assert!(seen.verdict().unwrap_err().to_string().contains("a: 1 came after 2"));
    }

    #[test]
    fn the_number_of_a_payload_is_found_at_its_beginning() {
        assert_eq!(number(br#"{"n": 1204, "fill": "99"}"#), 1204);
        assert_eq!(number(b"{}"), 0);
    }
}

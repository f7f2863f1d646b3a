//! What goes wrong at this moment, since when, and why: what a snapshot of the worker does not say by itself.
//!
//! Invariants: outcomes are listened to only while a destination fails, so that a healthy worker pays nothing; a reason goes with the
//! success that ends its failures.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use queuebox_core::redact::redact;
use queuebox_engine::{
    tail::{Outcome, Seen, Status, Tail, Watch},
    worker::{WorkerState, WorkerView},
};
use tokio::time::Instant;

/// See the module. Cloning shares it.
#[derive(Debug, Clone, Default)]
pub struct Troubles(Arc<Mutex<Known>>);

#[derive(Debug, Default)]
struct Known {
    database_since: Option<Instant>,
    /// Why the last attempt of a destination failed.
    reasons: BTreeMap<String, String>,
}

impl Troubles {
    /// Follows a worker until it is gone.
    pub async fn follow(self, mut view: WorkerView, tail: Tail) {
        let mut watch: Option<Watch> = None;
        loop {
            let is_failing = self.look(&view.state());
            watch = if is_failing { watch.or_else(|| tail.watch()) } else { None };
            tokio::select! {
                alive = view.changed() => if !alive { return },
                seen = next(&mut watch) => match seen {
                    Some(Seen::Outcome(outcome)) => self.note(&outcome),
                    Some(Seen::Missed(_)) => {}
                    None => return,
                },
            }
        }
    }

    /// Takes a snapshot in; true = a destination fails.
    fn look(&self, state: &WorkerState) -> bool {
        let mut known = self.known();
        known.database_since =
            failing(state).and(known.database_since.or_else(|| failing(state).map(|_| Instant::now())));
        let fails = |name: &str| state.driver.destinations.iter().any(|it| it.name == name && it.failing.is_some());
        known.reasons.retain(|name, _| fails(name));
        state.driver.destinations.iter().any(|it| it.failing.is_some())
    }

    fn note(&self, outcome: &Outcome) {
        let (Some(destination), Some(error)) = (&outcome.destination, &outcome.error) else { return };
        if matches!(outcome.status, Status::Failed | Status::Dead) {
            self.known().reasons.insert(destination.clone(), redact(error));
        }
    }

    /// For how long the database has not done what it is asked.
    pub fn database_failing_for(&self) -> Option<Duration> {
        self.known().database_since.map(|since| since.elapsed())
    }

    /// Why the last attempt of this destination failed, if it is known.
    pub fn reason(&self, destination: &str) -> Option<String> {
        self.known().reasons.get(destination).cloned()
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Why the database does not do what it is asked, while it does not.
pub(crate) fn failing(state: &WorkerState) -> Option<&str> {
    state.keeper.failing.as_deref().or(state.driver.failing.as_deref())
}

async fn next(watch: &mut Option<Watch>) -> Option<Seen> {
    match watch {
        Some(watch) => watch.next().await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use queuebox_core::Uuid;
    use queuebox_engine::outbox::DestinationState;

    use super::*;

    fn failed(status: Status) -> Outcome {
        Outcome {
            at_us: 0,
            status,
            message_id: Uuid::nil(),
            topic: None,
            key: None,
            destination: Some("hook".to_owned()),
            attempt: 1,
            created_at_us: None,
            error: Some("HTTP 404, password: canary".to_owned()),
        }
    }

    #[tokio::test]
    async fn reasons_and_times_end_with_the_trouble() {
        let troubles = Troubles::default();
        let mut state = WorkerState::default();
        assert!(!troubles.look(&state));
        state.driver.destinations = vec![DestinationState {
            name: "hook".to_owned(),
            queued: 0,
            in_flight: 0,
            breaker: 0,
            held_because: None,
            failing: Some((2, Instant::now())),
        }];
        state.driver.failing = Some("away".to_owned());
        assert!(troubles.look(&state));
        assert!(troubles.database_failing_for().is_some());
        troubles.note(&failed(Status::Sent));
        assert_eq!(troubles.reason("hook"), None);
        troubles.note(&failed(Status::Failed));
        assert_eq!(troubles.reason("hook").as_deref(), Some("HTTP 404, password=[REDACTED]"));
        state.driver.destinations[0].failing = None;
        state.driver.failing = None;
        assert!(!troubles.look(&state));
        assert_eq!((troubles.reason("hook"), troubles.database_failing_for()), (None, None));
    }
}

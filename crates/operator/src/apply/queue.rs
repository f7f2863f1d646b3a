//! Which namespace is reconciled when: soon after a change, again after a while, and with growing pauses after a failure.
//!
//! Invariant: a namespace is reconciled once at a time; what changes meanwhile brings it back.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use tokio::time::Instant;

/// First pause after a failure; doubles.
const PAUSE: Duration = Duration::from_millis(500);
/// Longest pause after a failure.
const PAUSE_MAX: Duration = Duration::from_secs(300);
/// Everything is looked at again that often, whatever happens.
const RESYNC: Duration = Duration::from_secs(600);

/// The queue.
#[derive(Debug, Default)]
pub struct Queue {
    due: BTreeMap<String, Instant>,
    failures: BTreeMap<String, u32>,
    running: BTreeSet<String>,
}

impl Queue {
    /// Something of it changed. After a failure the pause stays.
    pub fn changed(&mut self, namespace: String, at: Instant) {
        if self.failures.contains_key(&namespace) && self.due.contains_key(&namespace) {
            return;
        }
        let due = self.due.entry(namespace).or_insert(at);
        *due = (*due).min(at);
    }

    /// One that is due and not under way.
    pub fn take(&mut self, now: Instant) -> Option<String> {
        let namespace = self.due.iter().filter(|(name, at)| **at <= now && !self.running.contains(*name));
        let namespace = namespace.min_by_key(|(_, at)| **at).map(|(name, _)| name.clone())?;
        self.due.remove(&namespace);
        self.running.insert(namespace.clone());
        Some(namespace)
    }

    /// When the next one is due.
    pub fn next(&self) -> Option<Instant> {
        self.due.iter().filter(|(name, _)| !self.running.contains(*name)).map(|(_, at)| *at).min()
    }

    /// It went well.
    pub fn done(&mut self, namespace: &str, again_soon: bool, soon: Duration, now: Instant) {
        self.running.remove(namespace);
        self.failures.remove(namespace);
        let at = now + if again_soon { soon } else { RESYNC };
        let due = self.due.entry(namespace.to_owned()).or_insert(at);
        *due = (*due).min(at);
    }

    /// It did not. Returns the pause.
    pub fn failed(&mut self, namespace: &str, now: Instant) -> Duration {
        self.running.remove(namespace);
        let failures = self.failures.entry(namespace.to_owned()).or_default();
        let pause = (PAUSE * 2_u32.saturating_pow(*failures)).min(PAUSE_MAX);
        *failures += 1;
        self.due.insert(namespace.to_owned(), now + pause);
        pause
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_and_a_change_does_not_cut_them_short() {
        let now = Instant::now();
        let mut queue = Queue::default();
        queue.changed("a".into(), now);
        let mut pauses = Vec::new();
        for _ in 0..12 {
            let at = queue.next().unwrap();
            assert_eq!(queue.take(at).as_deref(), Some("a"));
            pauses.push(queue.failed("a", at));
            queue.changed("a".into(), at);
            assert!(queue.take(at).is_none());
        }
        assert!(pauses.windows(2).all(|pair| pair[1] >= pair[0]) && pauses[1] > pauses[0]);
        assert_eq!(*pauses.last().unwrap(), PAUSE_MAX);
    }

    #[test]
    fn one_at_a_time_and_changes_bring_it_back() {
        let now = Instant::now();
        let mut queue = Queue::default();
        queue.changed("a".into(), now);
        assert!(queue.take(now).is_some());
        queue.changed("a".into(), now);
        assert!(queue.take(now).is_none(), "it is under way");
        queue.done("a", false, Duration::ZERO, now);
        assert!(queue.take(now).is_some());
        queue.done("a", false, Duration::ZERO, now);
        assert!(queue.take(now).is_none());
        assert_eq!(queue.next(), Some(now + RESYNC));
    }
}

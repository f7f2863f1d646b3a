//! What became of messages, told to whoever watches (`GET /admin/tail`, `queuebox tail`).
//!
//! Invariants:
//! - While nobody watches, an outcome costs one load.
//! - A watcher never holds a worker up: who is slow loses the oldest outcomes and is told how many.
//! - At most [`WATCHERS_MAX`] watch at a time, and nothing here holds a payload.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use queuebox_core::Uuid;
use tokio::sync::broadcast::{self, error::RecvError};

/// So many may watch one worker.
pub const WATCHERS_MAX: usize = 16;

/// Outcomes that wait for the slowest watcher.
const KEPT: usize = 1024;

/// The words of `queuebox_outbox_messages_total`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// Delivered.
    Sent,
    /// Will be tried again.
    Failed,
    /// Gets no further attempt by itself.
    Dead,
    /// Has one row for each destination now.
    Expanded,
}

impl Status {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Sent, Self::Failed, Self::Dead, Self::Expanded];

    /// As in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Sent => "sent",
            Self::Failed => "failed",
            Self::Dead => "dead",
            Self::Expanded => "expanded",
        }
    }
}

/// What became of one message.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// Microseconds since 1970 by the clock of this machine.
    pub at_us: i64,
    /// What.
    pub status: Status,
    /// Outbox id.
    pub message_id: Uuid,
    /// Its topic; `None` = it was not in memory any more.
    pub topic: Option<String>,
    /// Its key, if it has one.
    pub key: Option<String>,
    /// Where it went, or should have gone.
    pub destination: Option<String>,
    /// Failed attempts before this one, as in `X-Attempt`.
    pub attempt: i32,
    /// `created_at`, in microseconds since 1970.
    pub created_at_us: Option<i64>,
    /// Why it failed, or is dead.
    pub error: Option<String>,
}

/// The place where outcomes are told. Cloning shares it.
#[derive(Debug, Clone)]
pub struct Tail {
    sender: broadcast::Sender<Arc<Outcome>>,
    watchers: Arc<AtomicUsize>,
}

impl Default for Tail {
    fn default() -> Self {
        Self { sender: broadcast::Sender::new(KEPT), watchers: Arc::default() }
    }
}

impl Tail {
    /// Somebody watches: it is worth the while to tell.
    pub fn is_watched(&self) -> bool {
        self.watchers.load(Ordering::Relaxed) > 0
    }

    /// Tells those who watch.
    pub fn tell(&self, outcome: Outcome) {
        // Nobody there: the last one has just left.
        let _ = self.sender.send(Arc::new(outcome));
    }

    /// Watches from now on; `None` = too many do.
    pub fn watch(&self) -> Option<Watch> {
        let room = |watchers: usize| (watchers < WATCHERS_MAX).then_some(watchers + 1);
        self.watchers.fetch_update(Ordering::Relaxed, Ordering::Relaxed, room).ok()?;
        Some(Watch { receiver: self.sender.subscribe(), watchers: self.watchers.clone() })
    }
}

/// What a watcher sees.
#[derive(Debug, Clone)]
pub enum Seen {
    /// An outcome.
    Outcome(Arc<Outcome>),
    /// So many were missed, because this watcher was slow.
    Missed(u64),
}

/// Someone who watches, until it is dropped.
#[derive(Debug)]
pub struct Watch {
    receiver: broadcast::Receiver<Arc<Outcome>>,
    watchers: Arc<AtomicUsize>,
}

impl Watch {
    /// The next thing to see; `None` = the worker is gone.
    pub async fn next(&mut self) -> Option<Seen> {
        match self.receiver.recv().await {
            Ok(outcome) => Some(Seen::Outcome(outcome)),
            Err(RecvError::Lagged(missed)) => Some(Seen::Missed(missed)),
            Err(RecvError::Closed) => None,
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.watchers.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(number: u128) -> Outcome {
        Outcome {
            at_us: 0,
            status: Status::Sent,
            message_id: Uuid::from_u128(number),
            topic: None,
            key: None,
            destination: None,
            attempt: 0,
            created_at_us: None,
            error: None,
        }
    }

    #[tokio::test]
    async fn a_slow_watcher_is_told_what_it_missed() {
        let tail = Tail::default();
        assert!(!tail.is_watched());
        let mut watch = tail.watch().unwrap();
        assert!(tail.is_watched());
        let kept = KEPT as u128;
        (0..kept + 10).for_each(|number| tail.tell(outcome(number)));
        let Some(Seen::Missed(missed)) = watch.next().await else { panic!("nothing was missed") };
        let Some(Seen::Outcome(next)) = watch.next().await else { panic!("nothing came") };
        assert_eq!(next.message_id, Uuid::from_u128(u128::from(missed)), "it goes on with the oldest that is kept");
        drop(watch);
        assert!(!tail.is_watched());
    }

    #[test]
    fn not_everybody_may_watch() {
        let tail = Tail::default();
        let watching: Vec<_> = (0..WATCHERS_MAX).map(|_| tail.watch().unwrap()).collect();
        assert!(tail.watch().is_none());
        drop(watching);
        assert!(tail.watch().is_some());
    }
}

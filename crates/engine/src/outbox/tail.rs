//! Outcomes as they happen, for whoever follows them. While nobody does they cost nothing; whoever is too slow misses some and is
//! told how many.

use queuebox_core::Uuid;
use tokio::sync::broadcast;

/// Outcomes that wait for a follower.
const WAITING_MAX: usize = 1_024;

/// What became of one publish. No payload and no key.
#[derive(Debug, Clone, PartialEq)]
pub struct Delivery {
    /// The row.
    pub id: Uuid,
    /// Where it was sent; empty where no destination had a part in it.
    pub destination: String,
    /// What became of it.
    pub ending: Ending,
}

/// See [`Delivery`].
#[derive(Debug, Clone, PartialEq)]
pub enum Ending {
    /// It was taken.
    Sent {
        /// Seconds from its insert, by the clocks of two machines.
        latency_seconds: f64,
    },
    /// It is tried again.
    Failed {
        /// Attempts so far.
        attempt: i32,
        /// Why.
        error: String,
    },
    /// It is given up.
    Dead {
        /// Why.
        error: String,
    },
}

/// Where outcomes are told. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Tail(broadcast::Sender<Delivery>);

impl Default for Tail {
    fn default() -> Self {
        Self(broadcast::Sender::new(WAITING_MAX))
    }
}

impl Tail {
    /// All outcomes from now on.
    pub fn follow(&self) -> broadcast::Receiver<Delivery> {
        self.0.subscribe()
    }

    /// Tells one, if anybody follows.
    pub fn tell(&self, delivery: impl FnOnce() -> Delivery) {
        if self.0.receiver_count() > 0 {
            let _ = self.0.send(delivery());
        }
    }
}

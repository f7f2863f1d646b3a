//! New identities, and the local idea of the time that goes into them.
//!
//! Ids are UUIDs of version 7, so that rows written together lie together in an index. Nothing relies on their order. The
//! randomness comes from a generator that is handed in and the time from tokio's clock, so a simulation repeats itself.

use std::sync::{Mutex, PoisonError};

use queuebox_core::Uuid;
use rand::{RngExt, SeedableRng, rngs::StdRng};
use tokio::time::Instant;

/// Makes ids. Shared by everything in a worker that makes rows.
#[derive(Debug)]
pub struct Ids {
    rng: Mutex<StdRng>,
    started: Instant,
    started_us: i64,
}

impl Ids {
    /// With the seed of the random part and the wall clock's time now, in microseconds since 1970.
    pub fn new(seed: u64, now_us: i64) -> Self {
        Self { rng: Mutex::new(StdRng::seed_from_u64(seed)), started: Instant::now(), started_us: now_us }
    }

    /// With a random seed and the machine's clock.
    pub fn from_environment() -> Self {
        Self::new(rand::random(), jiff::Timestamp::now().as_microsecond())
    }

    /// A new id.
    pub fn next(&self) -> Uuid {
        let mut random = [0; 10];
        self.with_rng(|rng| rng.fill(&mut random));
        let ms = u64::try_from(self.now_us() / 1000).unwrap_or(0);
        uuid::Builder::from_unix_timestamp_millis(ms, &random).into_uuid()
    }

    /// The wall clock's time, in microseconds since 1970: as given at the start, plus what has passed. Good enough for what a
    /// person reads; leases and due times are the database's.
    pub fn now_us(&self) -> i64 {
        self.started_us.saturating_add(i64::try_from(self.started.elapsed().as_micros()).unwrap_or(i64::MAX))
    }

    /// A number between 0 and 1, for jitter.
    pub fn jitter(&self) -> f64 {
        self.with_rng(|rng| rng.random())
    }

    /// Lends the generator.
    pub fn with_rng<T>(&self, draw: impl FnOnce(&mut StdRng) -> T) -> T {
        draw(&mut self.rng.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn ids_repeat_with_their_seed_and_rise_with_time() {
        let (one, two) = (Ids::new(7, 1_790_000_000_000_000), Ids::new(7, 1_790_000_000_000_000));
        let first = one.next();
        assert_eq!(first, two.next());
        assert_ne!(first, one.next());
        tokio::time::advance(Duration::from_millis(2)).await;
        assert!(one.next() > first);
        assert_eq!(first.get_version_num(), 7);
        assert_eq!(one.now_us(), 1_790_000_000_002_000);
    }
}

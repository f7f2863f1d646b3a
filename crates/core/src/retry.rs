//! When a failed delivery is tried again (contract 7.6), and how long a connector pauses (6.7, 7.5).

use std::time::Duration;

use rand::{Rng, RngExt};

/// Exponential back-off with jitter, and the ceiling for a receiver's `Retry-After`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RetrySchedule {
    /// Delay before the second attempt.
    pub initial: Duration,
    /// No delay is longer, `Retry-After` excepted.
    pub max: Duration,
    /// Ceiling of `Retry-After`; zero = the header is ignored.
    pub retry_after_max: Duration,
}

impl Default for RetrySchedule {
    fn default() -> Self {
        Self {
            initial: Duration::from_secs(1),
            max: Duration::from_secs(60),
            retry_after_max: Duration::from_secs(300),
        }
    }
}

impl RetrySchedule {
    /// `min(max, e + r)`, `e = initial × 2^min(attempt, 20)`, `r` uniform in `[0, e / 4]`; `attempt` is the value before
    /// the increment. With a `retry_after` the larger of both, which is itself capped. Never overflows.
    pub fn delay(&self, attempt: i32, retry_after: Option<Duration>, rng: &mut impl Rng) -> Duration {
        let exponent = attempt.clamp(0, 20).unsigned_abs();
        let base = self.initial.saturating_mul(1 << exponent);
        let jitter_us = u64::try_from(base.as_micros() / 4).unwrap_or(u64::MAX);
        let jitter = Duration::from_micros(rng.random_range(0..=jitter_us));
        let own = base.saturating_add(jitter).min(self.max);
        match retry_after {
            Some(asked) => own.max(asked.min(self.retry_after_max)),
            None => own,
        }
    }
}

/// Pauses that double, with jitter: between connections to a peer, and after a failed store.
#[derive(Debug, Clone)]
pub struct Backoff {
    first: Duration,
    longest: Duration,
    failures: u32,
}

impl Backoff {
    /// Between connections. The contract allows up to 30 s (7.5); 10 s is chosen so that messages flow again within 15 s
    /// after the peer is back, however long it was away.
    pub const fn connecting() -> Self {
        Self { first: Duration::from_secs(1), longest: Duration::from_secs(10), failures: 0 }
    }

    /// After a failed store: 1 s doubling to 60 s (contract 6.7).
    pub const fn storing() -> Self {
        Self { first: Duration::from_secs(1), longest: Duration::from_secs(60), failures: 0 }
    }

    /// The pause after one more failure: up to a quarter longer than its nominal length, never above the longest.
    pub fn pause(&mut self) -> Duration {
        let nominal = self.first.saturating_mul(1 << self.failures.min(16));
        self.failures = self.failures.saturating_add(1);
        nominal.mul_f64(1.0 + rand::rng().random_range(0.0..=0.25)).min(self.longest)
    }

    /// After a success.
    pub fn reset(&mut self) {
        self.failures = 0;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rand::{SeedableRng, rngs::StdRng};

    use super::*;

    #[test]
    fn the_default_schedule_is_about_1_2_4_8_seconds() {
        let mut rng = StdRng::seed_from_u64(1);
        for (attempt, seconds) in [(0, 1.0), (1, 2.0), (2, 4.0), (3, 8.0)] {
            let delay = RetrySchedule::default().delay(attempt, None, &mut rng).as_secs_f64();
            assert!((seconds..=seconds * 1.25).contains(&delay), "attempt {attempt}: {delay}");
        }
    }

    #[test]
    fn retry_after_only_ever_lengthens_and_is_capped() {
        let schedule = RetrySchedule::default();
        let mut rng = StdRng::seed_from_u64(1);
        assert_eq!(schedule.delay(0, Some(Duration::from_secs(100)), &mut rng), Duration::from_secs(100));
        assert_eq!(schedule.delay(0, Some(Duration::from_secs(1_000_000)), &mut rng), Duration::from_secs(300));
        assert!(schedule.delay(3, Some(Duration::from_secs(1)), &mut rng) >= Duration::from_secs(8));
        let ignoring = RetrySchedule { retry_after_max: Duration::ZERO, ..schedule };
        assert!(ignoring.delay(0, Some(Duration::from_secs(100)), &mut rng) < Duration::from_secs(2));
    }

    #[test]
    fn pauses_double_up_to_the_longest() {
        let mut backoff = Backoff::storing();
        for nominal in [1, 2, 4, 8, 16, 32] {
            let pause = backoff.pause().as_secs_f64();
            assert!((f64::from(nominal)..=f64::from(nominal) * 1.25).contains(&pause), "{nominal}: {pause}");
        }
        for _ in 0..100 {
            assert_eq!(backoff.pause(), Duration::from_secs(60));
        }
        backoff.reset();
        assert!(backoff.pause() < Duration::from_secs(2));
    }

    proptest! {
        #[test]
        fn no_attempt_number_overflows(attempt: i32, initial_ms: u32, max_ms: u32, seed: u64) {
            let schedule = RetrySchedule {
                initial: Duration::from_millis(initial_ms.into()),
                max: Duration::from_millis(max_ms.into()),
                retry_after_max: Duration::MAX,
            };
            let delay = schedule.delay(attempt, None, &mut StdRng::seed_from_u64(seed));
            prop_assert!(delay <= schedule.max);
        }
    }
}

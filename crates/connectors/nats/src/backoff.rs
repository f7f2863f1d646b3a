//! Pauses that double, with jitter: between connections, and after a failed store.

use std::time::Duration;

use rand::RngExt;

/// Pauses from `first`, doubling up to `longest`.
#[derive(Debug, Clone)]
pub(crate) struct Backoff {
    first: Duration,
    longest: Duration,
    failures: u32,
}

impl Backoff {
    /// Between connections. The contract allows up to 30 s (7.5); 10 s is chosen so that messages flow again within 15 s
    /// after the broker is back, however long it was away.
    pub(crate) const fn connecting() -> Self {
        Self { first: Duration::from_secs(1), longest: Duration::from_secs(10), failures: 0 }
    }

    /// After a failed store: 1 s doubling to 60 s (contract 6.7).
    pub(crate) const fn storing() -> Self {
        Self { first: Duration::from_secs(1), longest: Duration::from_secs(60), failures: 0 }
    }

    /// The next pause, up to a quarter longer than its nominal length but never above `longest`.
    pub(crate) fn next(&mut self) -> Duration {
        let nominal = self.first.saturating_mul(1 << self.failures.min(16));
        self.failures = self.failures.saturating_add(1);
        nominal.mul_f64(1.0 + rand::rng().random_range(0.0..=0.25)).min(self.longest)
    }

    /// After a success.
    pub(crate) fn reset(&mut self) {
        self.failures = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_longest() {
        let mut backoff = Backoff::storing();
        for nominal in [1, 2, 4, 8, 16, 32] {
            let pause = backoff.next().as_secs_f64();
            assert!((f64::from(nominal)..=f64::from(nominal) * 1.25).contains(&pause), "{nominal}: {pause}");
        }
        for _ in 0..100 {
            assert_eq!(backoff.next(), Duration::from_secs(60));
        }
        backoff.reset();
        assert!(backoff.next() < Duration::from_secs(2));
    }
}

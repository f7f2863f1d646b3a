//! How often something happened within the last minute, in a few numbers whatever the rate.

use std::time::Duration;

use tokio::time::Instant;

const BUCKETS: usize = 12;
const BUCKET: Duration = Duration::from_secs(5);

/// Counts per five seconds, the newest first.
#[derive(Debug, Clone)]
pub struct PerMinute {
    counts: [u64; BUCKETS],
    /// When the newest began.
    began: Instant,
}

impl PerMinute {
    pub fn new(now: Instant) -> Self {
        Self { counts: [0; BUCKETS], began: now }
    }

    /// It happened once more.
    pub fn count(&mut self, now: Instant) {
        self.turn(now);
        self.counts[0] += 1;
    }

    /// Within the last 55 to 60 seconds.
    pub fn sum(&mut self, now: Instant) -> u64 {
        self.turn(now);
        self.counts.iter().sum()
    }

    fn turn(&mut self, now: Instant) {
        let passed = now.saturating_duration_since(self.began).as_secs() / BUCKET.as_secs();
        let turns = usize::try_from(passed).unwrap_or(BUCKETS).min(BUCKETS);
        self.counts.rotate_right(turns);
        self.counts[..turns].fill(0);
        self.began += BUCKET * u32::try_from(passed).unwrap_or(u32::MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_minute_later_nothing_is_left() {
        let begun = Instant::now();
        let at = |second: u64| begun + Duration::from_secs(second);
        let mut rate = PerMinute::new(begun);
        rate.count(at(1));
        rate.count(at(4));
        rate.count(at(31));
        assert_eq!(rate.sum(at(31)), 3);
        assert_eq!(rate.sum(at(59)), 3);
        assert_eq!(rate.sum(at(66)), 1);
        assert_eq!(rate.sum(at(95)), 0);
        rate.count(at(10_000));
        assert_eq!(rate.sum(at(10_001)), 1);
    }
}

//! `rateLimit`: a token bucket per source and process (contract 6.8).

use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

/// Holds at most a minute's worth of requests.
pub(super) struct RateLimit {
    per_minute: f64,
    bucket: Mutex<Bucket>,
}

struct Bucket {
    tokens: f64,
    filled: Instant,
}

impl RateLimit {
    pub(super) fn new(per_minute: u32) -> Self {
        let per_minute = f64::from(per_minute);
        Self { per_minute, bucket: Mutex::new(Bucket { tokens: per_minute, filled: Instant::now() }) }
    }

    /// Takes a token, or says after what time there will be one.
    pub(super) fn take(&self) -> Result<(), Duration> {
        let per_second = self.per_minute / 60.0;
        let now = Instant::now();
        let mut bucket = self.bucket.lock().unwrap_or_else(PoisonError::into_inner);
        let grown = now.saturating_duration_since(bucket.filled).as_secs_f64() * per_second;
        bucket.tokens = (bucket.tokens + grown).min(self.per_minute);
        bucket.filled = now;
        if bucket.tokens >= 1.0 {
            bucket.tokens -= 1.0;
            return Ok(());
        }
        Err(Duration::try_from_secs_f64((1.0 - bucket.tokens) / per_second).unwrap_or(Duration::from_secs(60)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_bucket_fills_again() {
        let limit = RateLimit::new(2);
        assert_eq!((limit.take(), limit.take()), (Ok(()), Ok(())));
        let pause = limit.take().unwrap_err();
        assert!(pause > Duration::from_secs(29) && pause <= Duration::from_secs(30), "{pause:?}");
        tokio::time::advance(pause + Duration::from_millis(1)).await;
        assert_eq!(limit.take(), Ok(()));
        assert!(limit.take().is_err());
        tokio::time::advance(Duration::from_secs(3600)).await;
        assert_eq!((limit.take(), limit.take()), (Ok(()), Ok(())));
        assert!(limit.take().is_err(), "no more than a minute's worth is saved up");
    }
}

//! Kept connections of one origin, the last used first, so that surplus ones grow old and go.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use bytes::Bytes;
use http::HeaderMap;
use http_body_util::Full;
use hyper::client::conn::http1::SendRequest;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use super::{connect::Opener, progress::Traffic};

/// A connection without a request for this long is closed. Many servers close after 60 s or 75 s; being first avoids the
/// race in which a request meets a closing connection.
const IDLE_MAX: Duration = Duration::from_secs(45);
/// A connection is not used beyond this age, so that a receiver's new addresses are found.
const AGE_MAX: Duration = Duration::from_secs(300);

/// One open connection. Dropping it closes it at once.
pub(super) struct Connection {
    pub(super) sender: SendRequest<Full<Bytes>>,
    pub(super) traffic: Arc<Traffic>,
    generation: u64,
    opened: Instant,
    free_until: Instant,
    _driver: AbortOnDropHandle<()>,
}

impl Connection {
    pub(super) fn new(
        sender: SendRequest<Full<Bytes>>,
        traffic: Arc<Traffic>,
        generation: u64,
        driver: AbortOnDropHandle<()>,
    ) -> Self {
        let opened = Instant::now();
        Self { sender, traffic, generation, opened, free_until: opened, _driver: driver }
    }

    fn is_usable(&self, generation: u64, now: Instant) -> bool {
        self.generation == generation && now < self.free_until && !self.sender.is_closed()
    }
}

pub(super) struct Pool {
    idle: Mutex<Vec<Connection>>,
    idle_max: usize,
    closed: AtomicBool,
}

impl Pool {
    pub(super) fn new(idle_max: usize) -> Self {
        Self { idle: Mutex::new(Vec::new()), idle_max, closed: AtomicBool::new(false) }
    }

    /// The connection that was used last, if one is still good.
    pub(super) fn take(&self, generation: u64) -> Option<Connection> {
        let now = Instant::now();
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        while let Some(connection) = idle.pop() {
            if connection.is_usable(generation, now) {
                return Some(connection);
            }
        }
        None
    }

    /// Keeps `connection` for the next request, unless the answer's headers or its state speak against it.
    pub(super) fn give_back(&self, mut connection: Connection, answer: &HeaderMap, opener: &Opener) {
        let now = Instant::now();
        // A stalled write means that the peer answered before it had read the request: the rest is still in our buffer.
        if connection.sender.is_closed() || connection.traffic.is_stalled() || self.closed.load(Relaxed) {
            return;
        }
        connection.free_until = (now + idle_limit(answer)).min(connection.opened + AGE_MAX);
        if !connection.is_usable(opener.generation(), now) {
            return;
        }
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if idle.len() < self.idle_max {
            idle.push(connection);
        }
    }

    /// Drops connections that nobody will use again.
    pub(super) fn prune(&self, generation: u64) {
        let now = Instant::now();
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        idle.retain(|connection| connection.is_usable(generation, now));
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Relaxed)
    }

    pub(super) fn close(&self) {
        self.closed.store(true, Relaxed);
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

/// How long the server keeps the connection, by its `Keep-Alive: timeout=<seconds>`, less a second for the way.
fn idle_limit(answer: &HeaderMap) -> Duration {
    let stated = answer
        .get("keep-alive")
        .and_then(|value| value.to_str().ok())
        .and_then(|value| value.split(',').find_map(|part| part.trim().strip_prefix("timeout=")?.parse::<u64>().ok()));
    match stated {
        Some(seconds) => Duration::from_secs(seconds.saturating_sub(1)).min(IDLE_MAX),
        None => IDLE_MAX,
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    #[test]
    fn the_servers_own_limit_is_kept() {
        let mut answer = HeaderMap::new();
        assert_eq!(idle_limit(&answer), IDLE_MAX);
        answer.insert("keep-alive", HeaderValue::from_static("timeout=5, max=100"));
        assert_eq!(idle_limit(&answer), Duration::from_secs(4));
        answer.insert("keep-alive", HeaderValue::from_static("timeout=600"));
        assert_eq!(idle_limit(&answer), IDLE_MAX);
    }
}

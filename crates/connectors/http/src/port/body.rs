//! Reads a body under its three bounds: size, time, and the bytes of all bodies together.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use http::{header, request::Parts};
use http_body_util::BodyExt;
use hyper::body::{Body, Incoming};

use super::answer::Answer;

/// So much of a refused body is still taken in, so that its sender gets to read the answer instead of a reset.
const DRAIN_BYTES_MAX: usize = 1 << 20;
const DRAIN_TIME_MAX: Duration = Duration::from_secs(2);

/// Bounds the bytes of all bodies that are being read or stored. Clones share the bound.
#[derive(Debug, Clone)]
pub struct ByteBudget(Arc<Bytesmeter>);

#[derive(Debug)]
struct Bytesmeter {
    limit: usize,
    used: AtomicUsize,
}

impl ByteBudget {
    /// At most `limit` bytes at a time.
    pub fn new(limit: usize) -> Self {
        Self(Arc::new(Bytesmeter { limit, used: AtomicUsize::new(0) }))
    }

    /// Bytes in use.
    pub fn used(&self) -> usize {
        self.0.used.load(Relaxed)
    }

    fn take(&self, bytes: usize) -> bool {
        let grown = |used: usize| used.checked_add(bytes).filter(|used| *used <= self.0.limit);
        self.0.used.fetch_update(Relaxed, Relaxed, grown).is_ok()
    }

    fn give_back(&self, bytes: usize) {
        self.0.used.fetch_sub(bytes, Relaxed);
    }
}

/// A whole body; its bytes count until it is dropped.
pub(super) struct Held {
    bytes: Bytes,
    taken: Taken,
}

struct Taken {
    budget: ByteBudget,
    bytes: usize,
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.budget.give_back(self.bytes);
    }
}

impl Held {
    pub(super) fn bytes(&self) -> &Bytes {
        debug_assert_eq!(self.taken.bytes, self.bytes.len(), "every byte is accounted for");
        &self.bytes
    }
}

/// Reads `body` to its end, or says why not.
pub(super) async fn read(
    body: &mut Incoming,
    limit: usize,
    within: Duration,
    budget: &ByteBudget,
) -> Result<Held, Answer> {
    let taken = Taken { budget: budget.clone(), bytes: 0 };
    tokio::time::timeout(within, collect(body, limit, taken)).await.unwrap_or(Err(Answer::TimedOut))
}

async fn collect(body: &mut Incoming, limit: usize, mut taken: Taken) -> Result<Held, Answer> {
    let mut first = Bytes::new();
    let mut rest = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| {
            tracing::debug!(error = %crate::client::chain(&error), "request body broke off");
            Answer::BadRequest("Request body is malformed".to_owned())
        })?;
        let Ok(data) = frame.into_data() else { continue };
        if taken.bytes + data.len() > limit {
            return Err(Answer::TooLarge(limit));
        }
        if !taken.budget.take(data.len()) {
            return Err(Answer::TooManyBytes);
        }
        taken.bytes += data.len();
        if first.is_empty() && rest.is_empty() {
            // Most bodies come in one piece and are never copied.
            first = data;
        } else {
            if rest.is_empty() {
                rest.extend_from_slice(&std::mem::take(&mut first));
            }
            rest.extend_from_slice(&data);
        }
    }
    let bytes = if rest.is_empty() { first } else { rest.freeze() };
    Ok(Held { bytes, taken })
}

/// Takes in what is left of a refused body, within bounds, while the answer is under way.
pub(super) fn drain_in_background(head: &Parts, mut body: Incoming) {
    // A client that waits for "100 Continue" sends nothing after a refusal.
    if body.is_end_stream() || head.headers.contains_key(header::EXPECT) {
        return;
    }
    tokio::spawn(tokio::time::timeout(DRAIN_TIME_MAX, async move {
        let mut drained = 0;
        while let Some(Ok(frame)) = body.frame().await {
            drained += frame.data_ref().map_or(0, Bytes::len);
            if drained > DRAIN_BYTES_MAX {
                return;
            }
        }
    }));
}

//! Where an attempt stands: which phase it is in, and whether a byte of the request has left. The two decide what a
//! time-out or a lost connection means (contract 7.5).

use std::{
    fmt,
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    task::{Context, Poll},
};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// A part of an attempt, in words for `last_error`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    Preparing,
    FetchingToken,
    Resolving,
    Connecting,
    Handshake,
    Sending,
    Waiting,
    Reading,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Preparing => "preparing the request",
            Self::FetchingToken => "fetching the access token",
            Self::Resolving => "resolving the host name",
            Self::Connecting => "connecting",
            Self::Handshake => "the TLS handshake",
            Self::Sending => "sending the request",
            Self::Waiting => "waiting for the answer",
            Self::Reading => "reading the answer",
        })
    }
}

/// What a connection has carried so far. Shared by the connection's socket and the attempt that uses it.
#[derive(Debug, Default)]
pub(crate) struct Traffic {
    written: AtomicU64,
    read: AtomicU64,
    /// The last write could not go on: the peer does not read.
    stalled: AtomicBool,
}

impl Traffic {
    pub(crate) fn is_stalled(&self) -> bool {
        self.stalled.load(Relaxed)
    }
}

/// Follows one attempt.
#[derive(Debug)]
pub(crate) struct Progress(Mutex<Stand>);

#[derive(Debug)]
struct Stand {
    /// Before the request is handed to a connection.
    phase: Phase,
    exchange: Option<Exchange>,
}

#[derive(Debug)]
struct Exchange {
    traffic: Arc<Traffic>,
    written_before: u64,
    read_before: u64,
}

impl Exchange {
    fn began(&self) -> bool {
        self.traffic.written.load(Relaxed) > self.written_before
    }

    fn phase(&self) -> Phase {
        if self.traffic.read.load(Relaxed) > self.read_before {
            Phase::Reading
        } else if self.traffic.is_stalled() || !self.began() {
            Phase::Sending
        } else {
            Phase::Waiting
        }
    }
}

impl Progress {
    pub(crate) fn new() -> Self {
        Self(Mutex::new(Stand { phase: Phase::Preparing, exchange: None }))
    }

    fn lock(&self) -> MutexGuard<'_, Stand> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enters a phase before the request is handed to a connection.
    pub(crate) fn enter(&self, phase: Phase) {
        self.lock().phase = phase;
    }

    /// The request is handed to the connection that `traffic` belongs to.
    pub(crate) fn begin(&self, traffic: &Arc<Traffic>) {
        self.lock().exchange = Some(Exchange {
            traffic: traffic.clone(),
            written_before: traffic.written.load(Relaxed),
            read_before: traffic.read.load(Relaxed),
        });
    }

    /// The connection gave the request back unsent.
    pub(crate) fn unsent(&self) {
        self.lock().exchange = None;
    }

    /// Has a byte of the request been written? From then on it may have arrived.
    pub(crate) fn began(&self) -> bool {
        self.lock().exchange.as_ref().is_some_and(Exchange::began)
    }

    pub(crate) fn phase(&self) -> Phase {
        let stand = self.lock();
        stand.exchange.as_ref().map_or(stand.phase, Exchange::phase)
    }
}

/// A stream that counts.
pub(crate) struct Metered<S> {
    inner: S,
    traffic: Arc<Traffic>,
}

impl<S> Metered<S> {
    pub(crate) fn new(inner: S, traffic: Arc<Traffic>) -> Self {
        Self { inner, traffic }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Metered<S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<std::io::Result<()>> {
        let this = self.get_mut();
        let before = buf.filled().len();
        let polled = Pin::new(&mut this.inner).poll_read(cx, buf);
        this.traffic.read.fetch_add((buf.filled().len() - before) as u64, Relaxed);
        polled
    }
}

impl<S: AsyncWrite + Unpin> Metered<S> {
    fn count(&self, polled: Poll<std::io::Result<usize>>) -> Poll<std::io::Result<usize>> {
        if let Poll::Ready(Ok(written)) = &polled {
            self.traffic.written.fetch_add(*written as u64, Relaxed);
        }
        self.traffic.stalled.store(polled.is_pending(), Relaxed);
        polled
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Metered<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<std::io::Result<usize>> {
        let this = self.get_mut();
        let polled = Pin::new(&mut this.inner).poll_write(cx, buf);
        this.count(polled)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[std::io::IoSlice<'_>],
    ) -> Poll<std::io::Result<usize>> {
        let this = self.get_mut();
        let polled = Pin::new(&mut this.inner).poll_write_vectored(cx, bufs);
        this.count(polled)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        let this = self.get_mut();
        let polled = Pin::new(&mut this.inner).poll_flush(cx);
        // A TLS stream takes bytes into its own buffer and shows only here that the socket is full.
        this.traffic.stalled.store(polled.is_pending(), Relaxed);
        polled
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.get_mut().inner).poll_shutdown(cx)
    }
}

//! How the names of received headers were written.
//!
//! hyper hands names on in lower case, but transforms see them as received (contract 9). So the bytes of each head are
//! kept until it is parsed, and only the spelling is taken from them: a name counts if it equals a parsed one in any
//! case. Nothing else is ever read out of these bytes, so a mistake here could change no more than a letter's case.

use std::{
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll},
};

use http::HeaderName;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::serve::HEAD_BYTES_MAX;

/// The bytes that one connection has received since the last request ended.
#[derive(Clone, Default)]
pub(super) struct HeadLog(Arc<Mutex<Log>>);

#[derive(Default)]
struct Log {
    bytes: Vec<u8>,
    /// While a body is being received nothing is kept.
    asleep: bool,
}

impl HeadLog {
    fn lock(&self) -> MutexGuard<'_, Log> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The head of the request that was just parsed; nothing is kept until [`HeadLog::wake`].
    pub(super) fn take(&self) -> Spelling {
        let mut log = self.lock();
        log.asleep = true;
        Spelling(std::mem::take(&mut log.bytes))
    }

    /// The next bytes are those of a new head. `spent` is the buffer of the last one.
    pub(super) fn wake(&self, spent: Spelling) {
        let mut log = self.lock();
        log.asleep = false;
        log.bytes = spent.0;
        log.bytes.clear();
    }

    /// A head has begun to arrive and is not complete: there is no request yet.
    pub(super) fn holds_half_a_head(&self) -> bool {
        let log = self.lock();
        !log.asleep && !log.bytes.is_empty()
    }

    fn keep(&self, read: &[u8]) {
        let mut log = self.lock();
        if !log.asleep {
            let room = HEAD_BYTES_MAX.saturating_sub(log.bytes.len()).min(read.len());
            log.bytes.extend_from_slice(&read[..room]);
        }
    }
}

/// A head as it was written.
pub(super) struct Spelling(Vec<u8>);

impl Spelling {
    /// The names of the head in order.
    pub(super) fn names(&self) -> Vec<&str> {
        let lines = self.0.split(|byte| *byte == b'\n').skip(1);
        lines
            .map(<[u8]>::trim_ascii_end)
            .take_while(|line| !line.is_empty())
            .filter_map(|line| std::str::from_utf8(&line[..line.iter().position(|byte| *byte == b':')?]).ok())
            .collect()
    }
}

/// `name` as it stands among `names`, else in lower case.
pub(super) fn spelled(names: &[&str], name: &HeaderName) -> String {
    let found = names.iter().find(|given| given.eq_ignore_ascii_case(name.as_str()));
    found.map_or_else(|| name.as_str().to_owned(), |given| (*given).to_owned())
}

/// A stream that tells a [`HeadLog`] what it reads.
pub(super) struct Logged<S> {
    inner: S,
    log: HeadLog,
}

impl<S> Logged<S> {
    pub(super) fn new(inner: S, log: HeadLog) -> Self {
        Self { inner, log }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Logged<S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<std::io::Result<()>> {
        let this = self.get_mut();
        let before = buf.filled().len();
        let polled = Pin::new(&mut this.inner).poll_read(cx, buf);
        this.log.keep(&buf.filled()[before..]);
        polled
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Logged<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.get_mut().inner).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[std::io::IoSlice<'_>],
    ) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.get_mut().inner).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.get_mut().inner).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.get_mut().inner).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_spelled_as_they_came() {
        let log = HeadLog::default();
        log.keep(b"POST /inbox/x HTTP/1.1\r\nHost: a\r\nX-GitHub-Event: push\r\nx-a:b:c\r\n\r\nX-Body: no\r\n");
        let spelling = log.take();
        let names = spelling.names();
        assert_eq!(names, ["Host", "X-GitHub-Event", "x-a"]);
        assert_eq!(spelled(&names, &HeaderName::from_static("x-github-event")), "X-GitHub-Event");
        assert_eq!(spelled(&names, &HeaderName::from_static("x-body")), "x-body");
        log.keep(b"body bytes");
        log.wake(spelling);
        log.keep(b"POST / HTTP/1.1\r\nX-Next: 1\r\n\r\n");
        assert_eq!(log.take().names(), ["X-Next"]);
    }
}

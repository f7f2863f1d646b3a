//! Connections of the data port, and how it stops (contract 12.4).
//!
//! ```text
//!   serving ──stop──► still accepting (shutdownDelay) ──► new requests get 503, those in progress finish ──► closed
//! ```

use std::{convert::Infallible, future::Future, sync::Arc, sync::atomic::Ordering::Relaxed, time::Duration};

use axum::extract::ConnectInfo;
use hyper::{Request, body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore},
    task::JoinSet,
};
use tokio_util::sync::CancellationToken;

use super::{
    DataPort,
    spelling::{HeadLog, Logged},
};

/// A header block beyond this is answered 431 (contract 6.8).
pub(super) const HEAD_BYTES_MAX: usize = 64 * 1024;
/// Also 431; the parser needs a number.
const HEADERS_MAX: usize = 256;
/// A connection without a whole request head for this long is closed. Proxies close idle connections after 60 s by custom;
/// being later than they are avoids the race in which a request meets a closing connection.
const HEAD_TIME_MAX: Duration = Duration::from_secs(75);
/// At the end, a client that does not take its answer within this time does not get it.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(2);
/// A failed accept (no file descriptor left) is tried again after this.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

impl DataPort {
    /// Serves `listener` until `stop` resolves; then for `shutdown_delay` as before, since routers lag behind; then
    /// answers new requests with 503 and returns when those in progress have finished. Dropping the future cuts off
    /// what is left.
    pub async fn serve(
        self: Arc<Self>,
        listener: TcpListener,
        stop: impl Future<Output = ()> + Send,
        shutdown_delay: Duration,
    ) {
        let closing = CancellationToken::new();
        let permits = Arc::new(Semaphore::new(self.config.connections_max));
        let mut connections = JoinSet::new();
        let drained = self.drained(stop, shutdown_delay);
        tokio::pin!(drained);
        loop {
            tokio::select! {
                () = &mut drained => break,
                Some(_) = connections.join_next() => {}
                (stream, permit) = accept(&listener, &permits) => {
                    connections.spawn(self.clone().connection(stream, closing.clone(), permit));
                }
            }
        }
        drop(listener);
        closing.cancel();
        while connections.join_next().await.is_some() {}
    }

    async fn drained(&self, stop: impl Future<Output = ()> + Send, shutdown_delay: Duration) {
        stop.await;
        tokio::time::sleep(shutdown_delay).await;
        self.refusing.store(true, Relaxed);
        self.requests.close();
        self.requests.wait().await;
    }

    async fn connection(self: Arc<Self>, stream: TcpStream, closing: CancellationToken, _permit: OwnedSemaphorePermit) {
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%error, "TCP_NODELAY cannot be set");
        }
        let peer = stream.peer_addr().ok();
        let log = HeadLog::default();
        let (stream, half_read) = (Logged::new(stream, log.clone()), log.clone());
        let service = service_fn(move |mut request: Request<Incoming>| {
            let (port, log) = (self.clone(), log.clone());
            // For the log of the admin API, where it is on this port.
            if let (Some(peer), true) = (peer, port.config.fallback.is_some()) {
                request.extensions_mut().insert(ConnectInfo(peer));
            }
            async move {
                let spelling = log.take();
                let response = port.handle(request, &spelling).await;
                log.wake(spelling);
                Ok::<_, Infallible>(response)
            }
        });
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(HEAD_TIME_MAX)
            .max_header_size(HEAD_BYTES_MAX)
            .max_headers(HEADERS_MAX)
            .serve_connection(TokioIo::new(stream), service);
        tokio::pin!(connection);
        let ended = tokio::select! {
            ended = connection.as_mut() => ended,
            // No request is lost with it, and its rest may never come.
            () = closing.cancelled() => if half_read.holds_half_a_head() {
                Ok(())
            } else {
                connection.as_mut().graceful_shutdown();
                // What is left is an answer on its way out.
                tokio::time::timeout(ANSWER_TIME_MAX, connection).await.unwrap_or(Ok(()))
            }
        };
        if let Err(error) = ended {
            tracing::debug!(error = %crate::client::chain(&error), "connection to the data port ended");
        }
    }
}

async fn accept(listener: &TcpListener, permits: &Arc<Semaphore>) -> (TcpStream, OwnedSemaphorePermit) {
    loop {
        // The semaphore is never closed.
        let Ok(permit) = permits.clone().acquire_owned().await else { return std::future::pending().await };
        match listener.accept().await {
            Ok((stream, _)) => return (stream, permit),
            Err(error) => {
                tracing::warn!(%error, "the data port cannot accept a connection");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

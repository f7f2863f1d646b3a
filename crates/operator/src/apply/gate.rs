//! No write leaves this process without the Lease: a layer below the Kubernetes client that refuses what would change something.
//!
//! The Lease ends by the clock of this process, counted from before its renewal was sent, so a process that was stopped for a
//! minute finds the gate closed before it does anything else.

use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll},
};

use http::{Method, Request};
use tokio::time::{Duration, Instant};
use tower::{BoxError, Layer, Service};

/// Until when writes may leave.
#[derive(Debug, Clone)]
pub struct Gate {
    base: Instant,
    /// Milliseconds from `base`; 0 = closed.
    until_ms: Arc<AtomicU64>,
}

/// A write was refused, since the Lease is not ours.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not the leader: nothing is written")]
pub struct NotLeader;

impl Gate {
    /// Closed.
    pub fn closed() -> Self {
        Self { base: Instant::now(), until_ms: Arc::default() }
    }

    /// Open for ever, for an operator that runs alone.
    pub fn open() -> Self {
        let gate = Self::closed();
        gate.until_ms.store(u64::MAX, Ordering::SeqCst);
        gate
    }

    /// Open until then.
    pub fn open_until(&self, until: Instant) {
        let ms = u64::try_from(until.saturating_duration_since(self.base).as_millis()).unwrap_or(u64::MAX);
        self.until_ms.store(ms, Ordering::SeqCst);
    }

    /// Closed from now on.
    pub fn close(&self) {
        self.until_ms.store(0, Ordering::SeqCst);
    }

    /// Writes may leave.
    pub fn is_open(&self) -> bool {
        self.left() > Duration::ZERO
    }

    /// For so long.
    pub fn left(&self) -> Duration {
        let until = Duration::from_millis(self.until_ms.load(Ordering::SeqCst));
        until.saturating_sub(self.base.elapsed())
    }
}

impl<S> Layer<S> for Gate {
    type Service = Gated<S>;

    fn layer(&self, inner: S) -> Gated<S> {
        Gated { inner, gate: self.clone() }
    }
}

/// A service behind the gate.
#[derive(Debug, Clone)]
pub struct Gated<S> {
    inner: S,
    gate: Gate,
}

impl<S, B> Service<Request<B>> for Gated<S>
where
    S: Service<Request<B>>,
    S::Future: Send + 'static,
    S::Error: Into<BoxError>,
    S::Response: 'static,
{
    type Response = S::Response;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<S::Response, BoxError>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.poll_ready(context).map_err(Into::into)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        if request.method() == Method::GET {
            let answer = self.inner.call(request);
            return Box::pin(async move { answer.await.map_err(Into::into) });
        }
        let left = self.gate.left();
        if left.is_zero() {
            return Box::pin(async { Err(NotLeader.into()) });
        }
        let answer = self.inner.call(request);
        Box::pin(async move {
            // What has not been answered by then is given up: it may still be waiting to be sent.
            match tokio::time::timeout(left, answer).await {
                Ok(answer) => answer.map_err(Into::into),
                Err(_) => Err(NotLeader.into()),
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tower::{ServiceExt, service_fn};

    async fn send(gate: &Gate, method: Method) -> Result<(), BoxError> {
        let inner = service_fn(|_: Request<()>| async { Ok::<(), BoxError>(()) });
        let request = Request::builder().method(method).uri("/").body(())?;
        gate.layer(inner).oneshot(request).await
    }

    #[tokio::test(start_paused = true)]
    async fn only_reads_pass_a_closed_gate() {
        let gate = Gate::closed();
        assert!(send(&gate, Method::GET).await.is_ok());
        assert!(send(&gate, Method::PATCH).await.unwrap_err().is::<NotLeader>());
        gate.open_until(Instant::now() + Duration::from_secs(10));
        assert!(send(&gate, Method::PATCH).await.is_ok());
        tokio::time::advance(Duration::from_secs(10)).await;
        assert!(send(&gate, Method::DELETE).await.is_err(), "time closes it");
        gate.open_until(Instant::now() + Duration::from_secs(10));
        gate.close();
        assert!(send(&gate, Method::POST).await.is_err());
        assert!(send(&Gate::open(), Method::POST).await.is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn an_unanswered_write_is_given_up_when_the_gate_closes() {
        let gate = Gate::closed();
        gate.open_until(Instant::now() + Duration::from_secs(10));
        let inner = service_fn(|_: Request<()>| std::future::pending::<Result<(), BoxError>>());
        let request = Request::builder().method(Method::PATCH).uri("/").body(()).unwrap();
        assert!(gate.layer(inner).oneshot(request).await.unwrap_err().is::<NotLeader>());
    }
}

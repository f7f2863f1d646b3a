//! Waiting for something that another process does.

use std::fmt::Display;
use std::future::Future;
use std::time::{Duration, Instant};

/// Pause between two looks; short beside any bound that a test states, long beside a look at a database.
const PAUSE: Duration = Duration::from_millis(20);

/// Looks again and again until `look` returns `Some`, and returns its value.
///
/// Panics with `what` when `timeout` has passed. It is the one place where tests poll: use it for what only another
/// process knows, and a channel or a `Notify` for everything inside the test.
pub async fn eventually<T, F, Fut>(what: &str, timeout: Duration, mut look: F) -> T
where
    F: FnMut() -> Fut,
    Fut: Future<Output = Option<T>>,
{
    let started = Instant::now();
    loop {
        if let Some(value) = look().await {
            return value;
        }
        assert!(started.elapsed() < timeout, "did not happen within {timeout:?}: {what}");
        tokio::time::sleep(PAUSE).await;
    }
}

/// Like [`eventually`] for a look that fails until the time has come; the panic shows the last error.
pub async fn eventually_ok<T, E, F, Fut>(what: &str, timeout: Duration, mut look: F) -> T
where
    E: Display,
    F: FnMut() -> Fut,
    Fut: Future<Output = Result<T, E>>,
{
    let started = Instant::now();
    loop {
        match look().await {
            Ok(value) => return value,
            Err(error) if started.elapsed() >= timeout => {
                panic!("did not happen within {timeout:?}: {what}: {error:#}")
            }
            Err(_) => tokio::time::sleep(PAUSE).await,
        }
    }
}

/// Makes aws-lc the TLS provider of this process, as the binary's `main` does. Every peer and helper calls it; a test
/// that opens TLS without them calls it itself. Repeats do nothing.
pub fn init() {
    // The error only says that another test of this process was first.
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
}

/// Blocking variant of [`eventually_ok`] for start-up code.
pub(crate) fn until<T>(timeout: Duration, mut look: impl FnMut() -> anyhow::Result<T>) -> anyhow::Result<T> {
    let started = Instant::now();
    let mut pause = PAUSE;
    loop {
        match look() {
            Ok(value) => return Ok(value),
            Err(error) if started.elapsed() >= timeout || error.is::<Hopeless>() => return Err(error),
            Err(_) => std::thread::sleep(pause),
        }
        // A look may start a program, and servers that take long start beside others.
        pause = (pause * 5 / 4).min(Duration::from_millis(200));
    }
}

/// An error that waiting longer cannot cure, such as the end of the process that is waited for.
#[derive(Debug)]
pub(crate) struct Hopeless(pub String);

impl Display for Hopeless {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Hopeless {}

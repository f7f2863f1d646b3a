//! Wake-up by LISTEN, on a connection of its own (contract 5.5).
//!
//! Invariants: losing a signal costs latency only, because the engine always has a timer beside it. A fault of LISTEN is reported
//! and retried with back-off from 1 s to 30 s; it never makes the worker unready.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use rand::RngExt;
use sqlx::{
    ConnectOptions, Executor,
    postgres::{PgConnectOptions, PgListener, PgPoolOptions},
};
use tokio::sync::{Notify, watch};

use crate::error::Error;

/// The channel on which the trigger notifies.
const CHANNEL: &str = "queuebox_outbox";
const BACKOFF_FIRST: Duration = Duration::from_secs(1);
const BACKOFF_MAX: Duration = Duration::from_secs(30);

/// After so long without a signal the peer is asked whether it is still there.
const QUIET: Duration = Duration::from_secs(30);
/// It has so long to answer.
const ANSWER: Duration = Duration::from_secs(10);

/// Whether this worker is woken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WakeState {
    /// `capture.mode: Polling`, no trigger, or a pooler without `capture.connection`: the reason.
    Polling(String),
    /// LISTEN stands.
    Listening,
    /// LISTEN failed and is tried again: the redacted reason.
    Down(String),
}

/// Makes connection options, secrets read anew.
pub type MakeOptions = Arc<dyn Fn() -> Result<PgConnectOptions, Error> + Send + Sync>;

/// The listener and its listeners.
pub struct Wake {
    notify: Arc<Notify>,
    state: watch::Sender<WakeState>,
    task: Mutex<Option<tokio::task::JoinHandle<()>>>,
    options: Mutex<Option<MakeOptions>>,
}

impl Wake {
    /// Not listening yet.
    pub fn new() -> Self {
        let (state, _) = watch::channel(WakeState::Polling("not started".to_owned()));
        Self { notify: Arc::new(Notify::new()), state, task: Mutex::new(None), options: Mutex::new(None) }
    }

    /// State now.
    pub fn state(&self) -> WakeState {
        self.state.borrow().clone()
    }

    /// States to come.
    pub fn watch(&self) -> watch::Receiver<WakeState> {
        self.state.subscribe()
    }

    /// Resolves when rows may have been inserted. A signal that came while nobody waited is kept. The first call begins to
    /// listen, so that commands which never wait open no further connection.
    pub async fn woken(&self) {
        self.listen_if_wanted();
        self.notify.notified().await;
    }

    /// Never listens, for this reason.
    pub fn poll_only(&self, reason: &str) {
        *lock(&self.options) = None;
        self.stop();
        self.state.send_replace(WakeState::Polling(reason.to_owned()));
    }

    /// Listens from the first call of [`Wake::woken`] on.
    pub fn want(&self, options: MakeOptions) {
        *lock(&self.options) = Some(options);
    }

    fn listen_if_wanted(&self) {
        let Some(options) = lock(&self.options).clone() else { return };
        let mut task = lock(&self.task);
        if task.as_ref().is_none_or(tokio::task::JoinHandle::is_finished) {
            *task = Some(tokio::spawn(listen(options, self.notify.clone(), self.state.clone())));
        }
    }

    /// Stops listening.
    pub fn stop(&self) {
        if let Some(task) = lock(&self.task).take() {
            task.abort();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Drop for Wake {
    fn drop(&mut self) {
        self.stop();
    }
}

async fn listen(options: MakeOptions, notify: Arc<Notify>, state: watch::Sender<WakeState>) {
    let mut pause = BACKOFF_FIRST;
    loop {
        let error = match connect(&options).await {
            Ok(mut listener) => {
                if state.send_replace(WakeState::Listening) != WakeState::Listening {
                    tracing::info!(channel = CHANNEL, "listening for inserted outbox rows");
                }
                pause = BACKOFF_FIRST;
                // What was inserted while nobody listened.
                notify.notify_one();
                loop {
                    match tokio::time::timeout(QUIET, listener.try_recv()).await {
                        Ok(Ok(Some(_))) => notify.notify_one(),
                        Ok(Ok(None)) => break Error::Sql(sqlx::Error::Io(std::io::ErrorKind::ConnectionReset.into())),
                        Ok(Err(error)) => break error.into(),
                        Err(_) => {
                            if let Err(error) = ask(&mut listener).await {
                                break error;
                            }
                        }
                    }
                }
            }
            Err(error) => error,
        };
        let reason = queuebox_core::redact::redact(&error.to_string());
        tracing::warn!(reason, retry_s = pause.as_secs(), "LISTEN failed; rows are found by polling meanwhile");
        state.send_replace(WakeState::Down(reason));
        let share = rand::rng().random_range(0.75..1.0);
        tokio::time::sleep(pause.mul_f64(share)).await;
        pause = (pause * 2).min(BACKOFF_MAX);
    }
}

/// A listener needs a pool; this one has the one connection.
async fn connect(options: &MakeOptions) -> Result<PgListener, Error> {
    let pool = PgPoolOptions::new()
        .max_connections(1)
        .acquire_timeout(Duration::from_secs(10))
        .max_lifetime(None)
        .idle_timeout(None)
        .connect_lazy_with(options()?.disable_statement_logging());
    let mut listener = PgListener::connect_with(&pool).await?;
    listener.eager_reconnect(false);
    listener.listen(CHANNEL).await?;
    Ok(listener)
}

/// A peer that is gone is noticed only when something is sent to it.
async fn ask(listener: &mut PgListener) -> Result<(), Error> {
    let answer = tokio::time::timeout(ANSWER, listener.execute("SELECT 1")).await;
    answer.map_err(|_| Error::Timeout(ANSWER))?.map(drop).map_err(Error::from)
}

//! What workers say of themselves on their management port (`GET /status`).

use std::time::Duration;

use jiff::Timestamp;
use serde::Deserialize;

/// An older answer says nothing about now.
pub const FRESH: Duration = Duration::from_secs(30);

/// One answer of one pod.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    /// The pod.
    pub pod: String,
    /// When it was asked.
    pub at: Timestamp,
    /// What it said.
    pub status: WorkerStatus,
}

impl Sample {
    /// It says something about now.
    pub fn is_fresh(&self, now: Timestamp) -> bool {
        age(self.at, now) <= FRESH
    }
}

/// Time from `then` to `now`; zero where the clock went back.
pub fn age(then: Timestamp, now: Timestamp) -> Duration {
    Duration::try_from(now.duration_since(then)).unwrap_or_default()
}

/// The part of `/status` that the operator reads. What is missing is as if nothing was said.
#[derive(Debug, Clone, PartialEq, Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
pub struct WorkerStatus {
    /// `Starting`, `Ready`, `Stopping`.
    pub readiness: String,
    /// `<number>/<content hash>` of what it runs.
    pub config: Option<String>,
    /// The database.
    pub database: DatabaseState,
    /// Counts; `None` = not counted yet.
    pub backlog: Option<BacklogState>,
    /// Sources.
    pub sources: Vec<SourceState>,
    /// Destinations.
    pub destinations: Vec<DestinationState>,
}

/// State of the database.
#[derive(Debug, Clone, PartialEq, Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
pub struct DatabaseState {
    /// Why it does not answer, while it does not.
    pub failing: Option<String>,
    /// Keys of Secrets that the connection needs and that are not there.
    pub missing: Vec<String>,
}

/// How much waits.
#[derive(Debug, Clone, PartialEq, Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
pub struct BacklogState {
    /// Of the outbox.
    pub outbox: OutboxState,
}

/// How much waits in the outbox.
#[derive(Debug, Clone, PartialEq, Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
pub struct OutboxState {
    /// Pending rows.
    pub pending: i64,
    /// Dead rows.
    pub dead: i64,
    /// Seconds since the row that has been due longest has been due.
    pub oldest_due_age_seconds: f64,
    /// Rows that could start now, were there somebody to carry them.
    pub startable: Option<i64>,
    /// Seconds since the oldest of them could start.
    pub oldest_startable_age_seconds: Option<f64>,
    /// Lanes that have such a row.
    pub startable_lanes: Option<u32>,
    /// Rows without a route in the last minute.
    pub no_route_per_minute: Option<i64>,
}

/// State of a Source in one worker.
#[derive(Debug, Clone, PartialEq, Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
pub struct SourceState {
    /// Name.
    pub name: String,
    /// `Up`, `Down`, `Paused`.
    pub state: String,
    /// Why.
    pub detail: Option<String>,
    /// Keys of Secrets that it needs and that are not there.
    pub missing: Vec<String>,
}

/// State of a Destination in one worker.
#[derive(Debug, Clone, PartialEq, Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
pub struct DestinationState {
    /// Name.
    pub name: String,
    /// `Up`, `Down`, `Paused`, `BreakerOpen`.
    pub state: String,
    /// Why.
    pub detail: Option<String>,
    /// Keys of Secrets that it needs and that are not there.
    pub missing: Vec<String>,
    /// Failures since the last success.
    pub failures: Option<i64>,
    /// Seconds since it last succeeded, or since the worker began.
    pub since_success_seconds: Option<f64>,
}

/// The freshest count among workers.
pub fn freshest<'s>(samples: &'s [Sample], now: Timestamp) -> Option<(&'s Sample, &'s OutboxState)> {
    let counted = samples.iter().filter(|sample| sample.is_fresh(now));
    let counted = counted.filter_map(|sample| Some((sample, &sample.status.backlog.as_ref()?.outbox)));
    counted.max_by_key(|(sample, _)| sample.at)
}

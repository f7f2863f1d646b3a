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
    /// Rows of the last minute that matched no route.
    pub no_route_per_minute: i64,
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
    /// What this worker has to do right now; `None` = it does not say.
    pub startable: Option<StartableState>,
}

/// What one worker has to do right now, of its own lanes.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
pub struct StartableState {
    /// Rows in its memory that could start, or have started.
    pub rows: i64,
    /// Lanes that have one.
    pub lanes: u32,
    /// Seconds since the one that has been there longest was read.
    pub oldest_age_seconds: f64,
    /// It has not seen everything yet: there may be more in the table.
    pub more: bool,
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
    pub failures: i64,
    /// Seconds since the first of them.
    pub failing_for_seconds: f64,
}

/// What all workers of a Relay have to do together.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Work {
    /// Rows that could start.
    pub rows: i64,
    /// Seconds since the oldest of them could.
    pub oldest_age_seconds: f64,
    /// Lanes that have one.
    pub lanes: u32,
}

/// Adds up what the workers say. Rows that are held for any reason are in none of their numbers; only while a worker has not seen
/// everything does the count of the table stand in, and then the number of lanes still bounds what is made of it. `None` where
/// nobody has counted lately.
pub fn work(samples: &[Sample], now: Timestamp) -> Option<Work> {
    let (_, counted) = freshest(samples, now)?;
    let mut work = Work { rows: 0, oldest_age_seconds: 0.0, lanes: 0 };
    let mut more = false;
    for sample in samples.iter().filter(|sample| sample.is_fresh(now)) {
        let startable = sample.status.backlog.as_ref().and_then(|backlog| backlog.outbox.startable).unwrap_or_default();
        work.rows += startable.rows;
        work.lanes += startable.lanes;
        work.oldest_age_seconds = work.oldest_age_seconds.max(startable.oldest_age_seconds);
        more |= startable.more && startable.rows > 0;
    }
    if more {
        work.rows = work.rows.max(counted.pending);
        work.oldest_age_seconds = work.oldest_age_seconds.max(counted.oldest_due_age_seconds);
    }
    Some(work)
}

/// The freshest count among workers.
pub fn freshest(samples: &[Sample], now: Timestamp) -> Option<(&Sample, &OutboxState)> {
    let counted = samples.iter().filter(|sample| sample.is_fresh(now));
    let counted = counted.filter_map(|sample| Some((sample, &sample.status.backlog.as_ref()?.outbox)));
    counted.max_by_key(|(sample, _)| sample.at)
}

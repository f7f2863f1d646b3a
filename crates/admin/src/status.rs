//! `/status`: how much waits, for how long, and the state of each source and destination. Read by people and by the operator;
//! no secret, no payload, no key (contract 12.1).

use queuebox_api::{
    Kind,
    checked::{self, UsedReference},
};
use queuebox_core::redact::redact;
use queuebox_engine::worker::WorkerState;
use serde_json::{Value, json};

use crate::{ManagementParts, Readiness, SourceStatus, troubles::failing};

/// The whole answer. Ages are seconds; what is not known yet is null.
pub(crate) fn status(parts: &ManagementParts) -> Value {
    let state = (parts.state)();
    let relay = &parts.relay;
    let schema = parts.schema_report.get();
    let missing = (parts.missing)();
    let failing = failing(&state);
    json!({
        "version": parts.version,
        "config": parts.config,
        "readiness": match *parts.readiness.borrow() {
            Readiness::Starting => "Starting",
            Readiness::Ready => "Ready",
            Readiness::Stopping => "Stopping",
        },
        "relay": { "namespace": relay.namespace, "name": relay.name, "uid": relay.uid() },
        "worker": state.keeper.fence.as_ref().map(|fence| fence.worker.as_str()),
        "workers": state.keeper.workers,
        "standBy": state.keeper.stand_by.as_deref().map(redact),
        "database": {
            "kind": relay.database.server.kind(),
            "address": address(&relay.database.server),
            "schemaVersion": schema.map(|report| report.version),
            "notes": schema.map(|report| report.notes.iter().map(|note| redact(note)).collect::<Vec<_>>()),
            "failing": failing.map(redact),
            "failingForSeconds": failing.and(parts.troubles.database_failing_for()).map_or(0.0, rounded),
            "missing": missing_of(&missing, Kind::Relay, &relay.name),
        },
        "noRoutePerMinute": state.driver.no_route_per_minute,
        "lanes": { "outbox": state.keeper.lanes.0, "inbox": state.keeper.lanes.1 },
        "backlog": backlog(&state),
        "missing": missing.iter().map(|it| it.reference.to_string()).collect::<Vec<_>>(),
        "forward": state.forward.as_ref().map(|forward| json!({
            "failing": forward.failure.as_deref().map(redact),
            "unknownSources": forward.unknown_sources,
        })),
        "sources": sources(parts, &missing),
        "destinations": destinations(parts, &state, &missing),
    })
}

/// Where the database is; `None` where a secret says so.
fn address(server: &checked::DatabaseServer) -> Option<String> {
    match server {
        checked::DatabaseServer::Sqlite { path, .. } => Some(path.clone()),
        checked::DatabaseServer::Postgres(server) => match &server.login {
            checked::DatabaseLogin::Parts { host, port, database, .. } => Some(format!("{host}:{port}/{database}")),
            checked::DatabaseLogin::Url(_) => None,
        },
        _ => None,
    }
}

/// References of one object that have no value.
fn missing_of(missing: &[UsedReference], kind: Kind, name: &str) -> Vec<String> {
    let own = missing.iter().filter(|used| used.kind == kind && used.name == name);
    own.map(|used| used.reference.to_string()).collect()
}

fn backlog(state: &WorkerState) -> Value {
    let backlog = &state.backlog;
    let Some(counted_at) = backlog.counted_at else {
        return Value::Null;
    };
    let startable = &state.driver.startable;
    let inbox: Vec<Value> = backlog
        .inbox
        .iter()
        .map(|source| {
            json!({
                "source": source.source,
                "consumption": source.consumption,
                "pending": source.pending,
                "dead": source.dead,
                "oldestPendingAgeSeconds": seconds(source.oldest_pending_age_us),
            })
        })
        .collect();
    json!({
        "outbox": {
            "pending": backlog.outbox.pending,
            "dead": backlog.outbox.dead,
            "oldestPendingAgeSeconds": seconds(backlog.outbox.oldest_pending_age_us),
            "oldestDueAgeSeconds": seconds(backlog.outbox.oldest_due_age_us),
            "startable": {
                "rows": startable.rows,
                "lanes": startable.lanes,
                "oldestAgeSeconds": startable.oldest_read.map_or(0.0, |at| rounded(at.elapsed())),
                "more": startable.more,
            },
        },
        "inbox": inbox,
        "countedSecondsAgo": rounded(counted_at.elapsed()),
    })
}

fn sources(parts: &ManagementParts, missing: &[UsedReference]) -> Vec<Value> {
    let known = (parts.sources)();
    let view = |source: &queuebox_api::checked::Source| {
        let status = known.iter().find(|status| status.name == source.name);
        let (state, detail) = match status {
            _ if source.paused => ("Paused", None),
            Some(SourceStatus { up: true, detail, .. }) => ("Up", detail.as_deref()),
            Some(SourceStatus { detail, .. }) => ("Down", detail.as_deref()),
            // Routes of the data port are there as soon as the port is.
            None if source.connector.kind() == "http" => ("Up", None),
            None => ("Down", Some("not started yet")),
        };
        json!({
            "name": source.name,
            "kind": source.connector.kind(),
            "consumption": source.consumption,
            "state": state,
            "detail": detail.map(redact),
            "missing": missing_of(missing, Kind::Source, &source.name),
        })
    };
    parts.relay.sources.iter().map(view).collect()
}

fn destinations(parts: &ManagementParts, state: &WorkerState, missing: &[UsedReference]) -> Vec<Value> {
    let view = |destination: &queuebox_api::checked::Destination| {
        let found = state.driver.destinations.iter().find(|found| found.name == destination.name);
        let held = found.and_then(|found| found.held_because.as_deref());
        let breaker = found.map_or(0, |found| found.breaker);
        let failing = found.and_then(|found| found.failing);
        let state = match held {
            _ if destination.paused => "Paused",
            // Every attempt since the last success failed: rows are tried, and none gets through.
            None if failing.is_some() => "Failing",
            None => "Up",
            Some(_) if breaker == 0 => "Down",
            Some(_) => "BreakerOpen",
        };
        json!({
            "name": destination.name,
            "kind": destination.connector.kind(),
            "state": state,
            "detail": held.map(redact).or_else(|| failing.and_then(|_| parts.troubles.reason(&destination.name))),
            "lastError": parts.troubles.reason(&destination.name),
            "failures": failing.map_or(0, |(failures, _)| failures),
            "failingForSeconds": failing.map_or(0.0, |(_, since)| rounded(since.elapsed())),
            "missing": missing_of(missing, Kind::Destination, &destination.name),
            "queued": found.map_or(0, |found| found.queued),
            "inFlight": found.map_or(0, |found| found.in_flight),
            "breaker": match breaker { 0 => "Closed", 1 => "HalfOpen", _ => "Open" },
        })
    };
    parts.relay.destinations.iter().map(view).collect()
}

/// Seconds with three decimals.
fn rounded(duration: std::time::Duration) -> f64 {
    seconds(i64::try_from(duration.as_micros()).unwrap_or(i64::MAX))
}

/// Microseconds as seconds, with three decimals.
fn seconds(us: i64) -> f64 {
    #[allow(clippy::cast_precision_loss, reason = "ages far below 2^53 ms")]
    let ms = (us / 1_000) as f64;
    ms / 1_000.0
}

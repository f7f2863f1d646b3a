//! The relay: moves push rows from the inbox into the outbox (contract 4.5, 5.2, 8).
//!
//! ```text
//!             due push rows of my lanes
//!   waiting ──────────────────────────────► topic and headers ──► forward ──► outbox row + `processed`
//!                                              │                    │
//!                             empty_topic,     │                    ├─ lost: somebody else moved it, nothing written
//!                             bad_topic: dead ◄┘                    └─ refused by the database: put off alone, in the end dead
//! ```
//!
//! Invariants:
//! - One batch at a time and in order, so at most one message of an aggregate is on its way, across all sources.
//! - The outbox row and the mark of the inbox row are one transaction. Nothing is kept in memory between two batches but what
//!   to leave alone for a while.
//! - A lane that is about to be given away has nothing in flight: see [`Relay::lanes_in_use`].
//! - Pull rows are never touched.

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use queuebox_core::{
    Fault, LaneSet, Uuid,
    headers::RELAY_HEADERS,
    message::{DeadCode, Forward, PushRow},
    ports::{Fence, Inbox},
    retry::RetrySchedule,
    template::Template,
};
use serde_json::{Map, Value};
use tokio::{
    sync::{Notify, watch},
    time::Instant,
};
use tokio_util::sync::CancellationToken;

use crate::{
    attributes::{KEY_CHARACTERS_MAX, Warnings},
    ids::Ids,
    inbox_observer::{InboxEvent, InboxObserver},
    intake::render_topic,
    json,
    spans::{self, Begin, Span, Step, Tracer},
};

/// What this worker owns of the inbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holding {
    /// Proof of the worker's registration.
    pub fence: Fence,
    /// Its lanes.
    pub lanes: LaneSet,
    /// The local idea of the end of its lease; nothing begins behind it.
    pub lease_until: Instant,
}

/// How the relay works.
#[derive(Debug, Clone)]
pub struct RelayConfig {
    /// Longest idle wait.
    pub poll_interval: Duration,
    /// Rows of one transaction.
    pub batch_size: u32,
    /// Stamped on forwarded rows.
    pub max_attempts: i32,
    /// So often the database may refuse a row, alone, before it is dead.
    pub max_crashes: i32,
    /// Topic templates of the configured sources, for rows without a stored topic.
    pub topics: HashMap<String, Template>,
}

/// What the relay works with.
pub struct RelayParts {
    /// The table.
    pub inbox: Arc<dyn Inbox>,
    /// What we own; `None` = nothing at the moment.
    pub holding: watch::Receiver<Option<Holding>>,
    /// Push rows were stored by this worker.
    pub stored: Arc<Notify>,
    /// To be told that the outbox has new rows.
    pub forwarded: Arc<Notify>,
    /// Makes ids.
    pub ids: Arc<Ids>,
    /// Counts.
    pub observer: Arc<dyn InboxObserver>,
    /// Where spans go.
    pub tracer: Tracer,
    /// Ends the relay behind the batch under way.
    pub stop: CancellationToken,
}

/// How the relay is, for health and status.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RelayHealth {
    /// Why the last pass failed; `None` = it did not.
    pub failure: Option<String>,
    /// Sources that are not configured any more, of which rows without a stored topic stay `pending`.
    pub unknown_sources: BTreeSet<String>,
}

/// First wait after activity; doubles up to the poll interval.
const QUICK: Duration = Duration::from_millis(5);

/// Longest wait while the database fails.
const FAILING_WAIT_MAX: Duration = Duration::from_secs(30);

/// Rows without a topic that are left alone at most; behind so many of them a pass may find nothing else.
const PARKED_MAX: usize = 20_000;

/// Parked rows are looked at again after this time.
const PARKED_FOR: Duration = Duration::from_secs(60);

/// The relay of one worker. Run it with [`Relay::run`].
pub struct Relay {
    config: RelayConfig,
    parts: RelayParts,
    in_use: watch::Sender<LaneSet>,
    health: watch::Sender<RelayHealth>,
    warnings: Warnings,
    parked: Parked,
    /// How often the database refused a row, where the row cannot say so itself.
    refusals: HashMap<Uuid, i32>,
}

/// Rows that cannot be forwarded as things are, and those that wait behind one of them: a row that is held holds the later ones of
/// its aggregate, and nothing else (contract 4).
#[derive(Debug, Default)]
struct Parked {
    ids: Vec<Uuid>,
    aggregates: HashSet<String>,
    since: Option<Instant>,
}

impl Parked {
    /// An earlier row of its aggregate is held. Rows are read in order, so the earlier one is always met first.
    fn holds(&self, row: &PushRow) -> bool {
        row.aggregate_id.as_deref().is_some_and(|aggregate| self.aggregates.contains(aggregate))
    }

    /// False when there is no room to leave the row alone.
    fn add(&mut self, row: &PushRow) -> bool {
        self.since.get_or_insert_with(Instant::now);
        self.aggregates.extend(row.aggregate_id.clone().filter(|aggregate| !aggregate.is_empty()));
        if self.ids.len() < PARKED_MAX {
            self.ids.push(row.id);
            return true;
        }
        false
    }
}

/// How a pass went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pass {
    /// There may be more.
    Moved,
    /// Nothing was due.
    Idle,
    /// We own nothing, or not any more.
    Nothing,
}

impl Relay {
    /// A relay that has not begun.
    pub fn new(config: RelayConfig, parts: RelayParts) -> Self {
        let (in_use, health) = (watch::Sender::new(LaneSet::EMPTY), watch::Sender::new(RelayHealth::default()));
        Self {
            config,
            parts,
            in_use,
            health,
            warnings: Warnings::default(),
            parked: Parked::default(),
            refusals: HashMap::new(),
        }
    }

    /// The lanes of the batch under way, empty between batches. Who wants to give a lane away first takes it out of the
    /// holding, then waits until it is in here no longer: a batch begins only with lanes that are in both.
    pub fn lanes_in_use(&self) -> watch::Receiver<LaneSet> {
        self.in_use.subscribe()
    }

    /// How the relay is.
    pub fn health(&self) -> watch::Receiver<RelayHealth> {
        self.health.subscribe()
    }

    /// Forwards until `stop` is cancelled.
    pub async fn run(mut self) {
        let stop = self.parts.stop.clone();
        let mut quick = QUICK;
        let mut failing = self.config.poll_interval.max(QUICK);
        while !stop.is_cancelled() {
            let pass = self.pass().await;
            self.in_use.send_replace(LaneSet::EMPTY);
            let wait = match pass {
                Ok(Pass::Moved) => {
                    quick = QUICK;
                    continue;
                }
                Ok(Pass::Idle) => {
                    let wait = quick.min(self.config.poll_interval);
                    quick = (quick * 2).min(self.config.poll_interval);
                    self.until_due(wait).await
                }
                // Until something changes; the timer is for leases that end unseen.
                Ok(Pass::Nothing) => self.config.poll_interval.max(Duration::from_secs(1)),
                Err(fault) => {
                    self.failed(&fault);
                    let wait = failing;
                    failing = (failing * 2).min(FAILING_WAIT_MAX);
                    self.wait(wait, &stop, false).await;
                    continue;
                }
            };
            failing = self.config.poll_interval.max(QUICK);
            self.wait(wait, &stop, true).await;
        }
    }

    fn failed(&self, fault: &Fault) {
        self.parts.observer.observe(&InboxEvent::ForwardFailed { fault });
        if self.warnings.may("pass") {
            tracing::warn!(%fault, "the relay could not forward; it tries again");
        }
        self.health.send_if_modified(|health| {
            let failure = Some(fault.to_string());
            let changed = health.failure != failure;
            health.failure = failure;
            changed
        });
    }

    /// Waits with jitter, shorter when there is work or what we own changes.
    async fn wait(&mut self, wait: Duration, stop: &CancellationToken, wakes: bool) {
        let wait = wait.mul_f64(0.75 + self.parts.ids.jitter() / 4.0);
        let holding = &mut self.parts.holding;
        tokio::select! {
            () = stop.cancelled() => {}
            () = tokio::time::sleep(wait) => {}
            () = self.parts.stored.notified(), if wakes => {}
            // Without a sender nothing changes any more.
            Ok(()) = holding.changed() => {}
        }
    }

    /// The wait until the nearest row comes due, but no longer than `wait`. Worth a query only behind a long interval.
    async fn until_due(&self, wait: Duration) -> Duration {
        if wait < Duration::from_millis(500) {
            return wait;
        }
        let lanes = self.parts.holding.borrow().as_ref().map_or(LaneSet::EMPTY, |holding| holding.lanes);
        match self.parts.inbox.next_push_due_in_us(lanes).await {
            // A parked row is due all the time.
            Ok(Some(us)) if us > 0 || self.parked.ids.is_empty() => {
                wait.min(Duration::from_micros(u64::try_from(us).unwrap_or(0))).max(QUICK)
            }
            _ => wait,
        }
    }

    /// One batch.
    async fn pass(&mut self) -> Result<Pass, Fault> {
        let Some(holding) = self.begin() else { return Ok(Pass::Nothing) };
        self.unpark();
        let inbox = Arc::clone(&self.parts.inbox);
        let rows = match inbox.waiting(&holding.fence, holding.lanes, self.config.batch_size, &self.parked.ids).await {
            Err(fault) if fault.is_fenced() => return Ok(Pass::Nothing),
            other => other?,
        };
        if rows.is_empty() {
            self.healthy();
            return Ok(Pass::Idle);
        }
        let mut batch = Vec::with_capacity(rows.len());
        let mut moved = false;
        for row in &rows {
            if self.parked.holds(row) {
                moved |= self.park(row);
                continue;
            }
            match self.topic(row) {
                Topic::Is(topic) => batch.push(Forward {
                    inbox_id: row.id,
                    outbox_id: self.parts.ids.next(),
                    topic,
                    headers: forwarded_headers(row),
                }),
                Topic::Unusable(code, reason) => {
                    moved |= self.bury(&holding, row, code, &reason).await?;
                }
                Topic::Unknown => {
                    self.tell_unknown(row);
                    moved |= self.park(row);
                }
            }
        }
        moved |= self.forward(&holding, &rows, &batch).await?;
        self.healthy();
        Ok(if moved { Pass::Moved } else { Pass::Idle })
    }

    /// Announces the lanes of the batch, then looks whether they are still ours.
    fn begin(&mut self) -> Option<Holding> {
        let announced = self.parts.holding.borrow_and_update().as_ref().map_or(LaneSet::EMPTY, |holding| holding.lanes);
        self.in_use.send_replace(announced);
        let mut holding = self.parts.holding.borrow().clone()?;
        holding.lanes = holding.lanes.intersect(announced);
        (!holding.lanes.is_empty() && Instant::now() < holding.lease_until).then_some(holding)
    }

    /// Forwards `batch`; true when a row moved.
    async fn forward(&mut self, holding: &Holding, rows: &[PushRow], batch: &[Forward]) -> Result<bool, Fault> {
        if batch.is_empty() {
            return Ok(false);
        }
        let spans = self.spans(rows, batch);
        let done = match self.parts.inbox.forward(&holding.fence, batch, self.config.max_attempts).await {
            // Nothing was written. What we own is about to change.
            Err(fault) if fault.is_fenced() => {
                self.parts.observer.observe(&InboxEvent::ClaimsLost { rows: batch.len() });
                return Ok(false);
            }
            other => other?,
        };
        for (id, span) in spans {
            let refused =
                done.refused.iter().find(|(refused, _)| *refused == id).map(|(_, fault)| fault.detail.as_str());
            let lost = done.lost.contains(&id).then_some("somebody else moved the row");
            let held = done.held.contains(&id).then_some("an earlier row of its aggregate waits");
            spans::end(Some(span), refused.or(lost).or(held));
        }
        let forwarded = batch.len().saturating_sub(done.lost.len() + done.held.len() + done.refused.len());
        if !self.refusals.is_empty() {
            batch.iter().filter(|row| done.refused.iter().all(|(refused, _)| *refused != row.inbox_id)).for_each(
                |row| {
                    self.refusals.remove(&row.inbox_id);
                },
            );
        }
        if forwarded > 0 {
            self.parts.observer.observe(&InboxEvent::Forwarded { rows: forwarded });
            self.parts.forwarded.notify_one();
        }
        if !done.lost.is_empty() {
            self.parts.observer.observe(&InboxEvent::ClaimsLost { rows: done.lost.len() });
        }
        let mut put_off = false;
        for (id, fault) in &done.refused {
            self.parts.observer.observe(&InboxEvent::ForwardFailed { fault });
            if let Some(row) = rows.iter().find(|row| row.id == *id) {
                put_off |= self.put_off(holding, row, fault).await?;
            }
        }
        Ok(forwarded > 0 || put_off)
    }

    /// Begins the spans of a batch; those of one that fails as a whole end with it.
    fn spans(&self, rows: &[PushRow], batch: &[Forward]) -> Vec<(Uuid, Box<dyn Span>)> {
        let Some(tracer) = &self.parts.tracer else { return Vec::new() };
        let begin = |one: &Forward| {
            let row = rows.iter().find(|row| row.id == one.inbox_id)?;
            let span = tracer.begin(Begin {
                step: Step::Forward,
                peer: &row.source,
                kind: "",
                parent: row.trace_parent.as_deref(),
                message_id: row.id,
                topic: Some(&one.topic),
                attempt: 0,
                began_at_us: None,
            });
            Some((row.id, span))
        };
        batch.iter().filter_map(begin).collect()
    }

    /// A row that the database refused, alone: later again, and dead in the end.
    ///
    /// Below version 12 the table cannot count, so the row is never buried; the back-off grows by what this worker remembers.
    async fn put_off(&mut self, holding: &Holding, row: &PushRow, fault: &Fault) -> Result<bool, Fault> {
        let mut refusals = row.crashes;
        if self.parts.inbox.counts_refusals() {
            if row.crashes + 1 >= self.config.max_crashes {
                return self.bury(holding, row, DeadCode::Forward, &fault.detail).await;
            }
        } else {
            refusals = self.refusals.get(&row.id).copied().unwrap_or(0);
            if self.refusals.len() < PARKED_MAX || refusals > 0 {
                self.refusals.insert(row.id, refusals.saturating_add(1));
            }
        }
        let delay = self.parts.ids.with_rng(|rng| RetrySchedule::default().delay(refusals, None, rng));
        if self.warnings.may("refused") {
            tracing::warn!(inbox_id = %row.id, source = row.source, %fault, "the database refused an outbox row; it is tried again");
        }
        let delay_us = i64::try_from(delay.as_micros()).unwrap_or(i64::MAX);
        self.set_aside(holding, row.id, None, delay_us).await
    }

    async fn bury(&self, holding: &Holding, row: &PushRow, code: DeadCode, reason: &str) -> Result<bool, Fault> {
        tracing::warn!(inbox_id = %row.id, source = row.source, code = code.as_str(), reason, "an inbox row is dead");
        self.set_aside(holding, row.id, Some(&code.because(reason)), 0).await
    }

    async fn set_aside(&self, holding: &Holding, id: Uuid, error: Option<&str>, delay_us: i64) -> Result<bool, Fault> {
        match self.parts.inbox.set_aside(&holding.fence, id, error, delay_us).await {
            Err(fault) if fault.is_fenced() => Ok(false),
            other => other,
        }
    }

    /// The stored topic, else the template's of the row's source.
    fn topic(&self, row: &PushRow) -> Topic {
        if let Some(topic) = &row.topic {
            return Topic::Is(topic.clone());
        }
        let Some(template) = self.config.topics.get(&row.source) else { return Topic::Unknown };
        let topic = render_topic(template, &row.source, row.event_type.as_deref());
        match topic.chars().count() {
            0 => Topic::Unusable(
                DeadCode::EmptyTopic,
                format!("the topic template {:?} of source {} gave nothing", template.as_str(), row.source),
            ),
            length if length > KEY_CHARACTERS_MAX => Topic::Unusable(
                DeadCode::BadTopic,
                format!("the topic has {length} characters; at most {KEY_CHARACTERS_MAX} can be stored"),
            ),
            _ if topic.contains('\0') => {
                Topic::Unusable(DeadCode::BadTopic, "the topic holds the character U+0000".to_owned())
            }
            _ => Topic::Is(topic),
        }
    }

    /// Leaves a row alone for a while; true when others may be read in its place.
    fn park(&mut self, row: &PushRow) -> bool {
        let parked = self.parked.add(row);
        if !parked && self.warnings.may("parked") {
            tracing::error!(
                rows = PARKED_MAX,
                "so many rows of unknown sources, and behind them in their aggregates, are pending that others may wait behind them"
            );
        }
        parked
    }

    fn tell_unknown(&self, row: &PushRow) {
        self.health.send_if_modified(|health| health.unknown_sources.insert(row.source.clone()));
        if self.warnings.may("unknown source") {
            tracing::warn!(
                source = row.source,
                "push rows without a stored topic stay pending and hold the later rows of their aggregates, because their source is not \
                 configured; configure it, or set their state to dead"
            );
        }
    }

    fn unpark(&mut self) {
        if self.parked.since.is_some_and(|since| since.elapsed() >= PARKED_FOR) {
            self.parked = Parked::default();
            self.health.send_if_modified(|health| !std::mem::take(&mut health.unknown_sources).is_empty());
        }
    }

    fn healthy(&self) {
        self.health.send_if_modified(|health| health.failure.take().is_some());
    }
}

enum Topic {
    Is(String),
    Unusable(DeadCode, String),
    Unknown,
}

/// The stored headers, then the four that only the relay sets (contract 8). Stored values that are no text go as JSON text,
/// null ones not at all; what is no object at all counts as none.
fn forwarded_headers(row: &PushRow) -> String {
    let stored: Map<String, Value> = serde_json::from_str(&row.headers).unwrap_or_default();
    let is_ours = |name: &str| RELAY_HEADERS.iter().any(|ours| ours.eq_ignore_ascii_case(name));
    let mut headers: Vec<(String, String)> = stored
        .into_iter()
        .filter(|(name, value)| !is_ours(name) && !value.is_null())
        .map(|(name, value)| match value {
            Value::String(text) => (name, text),
            other => (name, other.to_string()),
        })
        .collect();
    let [inbox_id, source, idempotency_key, correlation_id] = RELAY_HEADERS.map(str::to_owned);
    headers.push((inbox_id, row.id.to_string()));
    headers.push((source, row.source.clone()));
    headers.push((idempotency_key, row.idempotency_key.clone()));
    headers.extend(row.correlation_id.clone().map(|id| (correlation_id, id)));
    json::object_of_strings(&headers)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// conformance 36
    #[test]
    fn sender_cannot_set_relay_headers() {
        let row = PushRow {
            id: Uuid::nil(),
            source: "github".into(),
            idempotency_key: "d-42".into(),
            aggregate_id: None,
            event_type: None,
            topic: None,
            headers: r#"{"a":"1","X-Inbox-ID":"evil","X-SOURCE":"evil","x-idempotency-key":"evil","x-correlation-id":"evil","n":5,"z":null}"#
                .into(),
            correlation_id: Some("c".into()),
            trace_parent: None,
            crashes: 0,
        };
        let id = Uuid::nil();
        assert_eq!(
            forwarded_headers(&row),
            format!(
                r#"{{"a":"1","n":"5","x-inbox-id":"{id}","x-source":"github","x-idempotency-key":"d-42","X-Correlation-Id":"c"}}"#
            )
        );
        let bare = PushRow { headers: "[]".into(), correlation_id: None, ..row };
        assert_eq!(
            forwarded_headers(&bare),
            format!(r#"{{"x-inbox-id":"{id}","x-source":"github","x-idempotency-key":"d-42"}}"#)
        );
    }
}

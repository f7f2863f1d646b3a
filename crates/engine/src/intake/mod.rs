//! The way in, the same for HTTP and brokers: filter → attributes → transform → store (contract 6.1, steps 6 to 10).
//!
//! ```text
//!   Received ──filter──► attributes ──transform──► NewInboxRow ──Admissions──► Inbox
//!               │            │            │                          │
//!            Filtered     Refused      Refused                 Stored, Duplicate, Failed
//!                         (HTTP)       (HTTP)                   (tried again in place)
//! ```
//!
//! Invariants:
//! - An answer of `Stored` or `Duplicate` comes after the commit of the row that it speaks of.
//! - A broker message is answered with a row, or not at all: one that cannot be used becomes one dead row.
//! - Rows are stored in the order of the batch; behind one that cannot be stored now, those of its aggregate wait.

pub mod admissions;
pub mod config;
mod prepare;

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use futures::StreamExt as _;
use queuebox_core::{
    Fault,
    message::{DeadCode, NewInboxRow},
    ports::{Admission, Admitted, Intake, Received, source::Refusal},
};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

pub(crate) use self::prepare::render_topic;
use self::{admissions::Answered, prepare::Prepared};
pub use self::{
    admissions::{AdmissionLimits, Admissions},
    config::{KeyFallback, KeyRule, Origins, PublishTime, SourceConfig, SourceKind, StoreLimits},
};
use crate::{
    attributes::{Reader, Warnings},
    ids::Ids,
    inbox_observer::{InboxEvent, InboxObserver, Rejection},
    spans::{self, Begin, Span, Step, Tracer},
};

/// So many messages of a batch are read and transformed at the same time.
const PREPARED_AT_ONCE: usize = 16;

/// Pauses between tries of a broker's store (contract 6.7).
const BROKER_PAUSE: Pause = Pause { first: Duration::from_millis(500), last: Duration::from_secs(10) };

/// Pauses between tries while an HTTP sender waits.
const HTTP_PAUSE: Pause = Pause { first: Duration::from_millis(50), last: Duration::from_millis(500) };

#[derive(Debug, Clone, Copy)]
struct Pause {
    first: Duration,
    last: Duration,
}

/// What the sources of a worker share.
#[derive(Clone)]
pub struct IntakeParts {
    /// The queue in front of the inbox.
    pub admissions: Admissions,
    /// Makes ids.
    pub ids: Arc<Ids>,
    /// Counts.
    pub observer: Arc<dyn InboxObserver>,
    /// Where spans go.
    pub tracer: Tracer,
    /// When it is cancelled, a store that fails is not tried again.
    pub stop: CancellationToken,
}

/// The intake of one source.
pub struct SourceIntake {
    config: SourceConfig,
    reader: Reader,
    /// There is an expression or a transform.
    evaluates: bool,
    parts: IntakeParts,
    warnings: Warnings,
}

impl SourceIntake {
    /// The intake of the source that `config` describes.
    pub fn new(mut config: SourceConfig, parts: IntakeParts) -> Self {
        // What the stage makes is stored, so it has to be storable.
        if let Some(transform) = &mut config.transform {
            transform.bounds.json = config.limits.json;
        }
        let origins = [&config.idempotency_key, &config.aggregate_id, &config.event_type];
        let evaluates = config.transform.is_some() || origins.iter().any(|origins| origins.expression.is_some());
        Self { reader: Reader::new(&config), config, evaluates, parts, warnings: Warnings::default() }
    }

    /// The source as configured.
    pub fn config(&self) -> &SourceConfig {
        &self.config
    }

    /// Prepares a batch in order. Only what waits for expressions is worth doing side by side.
    async fn prepare_all(&self, batch: Vec<Received>) -> Vec<Prepared> {
        if self.evaluates && batch.len() > 1 {
            let prepared = futures::stream::iter(batch).map(|received| self.prepare(received));
            return prepared.buffered(PREPARED_AT_ONCE).collect().await;
        }
        let mut prepared = Vec::with_capacity(batch.len());
        for received in batch {
            prepared.push(self.prepare(received).await);
        }
        prepared
    }

    /// Begins the spans of rows; what is stored with a row is the context of its receipt.
    fn spans(&self, rows: &mut [NewInboxRow], began_at_us: Option<i64>) -> Vec<Box<dyn Span>> {
        let Some(tracer) = &self.parts.tracer else { return Vec::new() };
        let begin = |row: &mut NewInboxRow| {
            let span = tracer.begin(Begin {
                step: Step::Receive,
                peer: &self.config.name,
                kind: self.config.kind.as_str(),
                parent: row.trace_parent.as_deref(),
                message_id: row.id,
                topic: row.topic.as_deref(),
                attempt: 0,
                began_at_us,
            });
            row.trace_parent = Some(span.context());
            span
        };
        rows.iter_mut().map(begin).collect()
    }

    fn count(&self, event: &InboxEvent<'_>) {
        self.parts.observer.observe(event);
    }

    /// Stores `rows` in chunks that fit into a flush. After a chunk with a failure the rest is not tried: it must not
    /// overtake.
    async fn store(&self, mut rows: Vec<NewInboxRow>) -> Vec<Admission> {
        let deadline = Instant::now() + self.config.store_within;
        let mut admissions = Vec::with_capacity(rows.len());
        let mut failed: Option<Fault> = None;
        while !rows.is_empty() {
            let rest = rows.split_off(self.chunk(&rows));
            if let Some(fault) = &failed {
                admissions.extend(rows.iter().map(|_| Admission::Failed(fault.clone())));
            } else {
                let stored = self.store_chunk(rows, deadline).await;
                failed = stored.iter().find_map(|admission| match admission {
                    Admission::Failed(fault) => Some(fault.clone()),
                    _ => None,
                });
                admissions.extend(stored);
            }
            rows = rest;
        }
        for _ in admissions.iter().filter(|admission| matches!(admission, Admission::Failed(_))) {
            self.count(&InboxEvent::Rejected(Rejection::StorageFailed));
        }
        admissions
    }

    /// How many of `rows` make the next flush: one at least.
    fn chunk(&self, rows: &[NewInboxRow]) -> usize {
        let limits = self.parts.admissions.limits();
        let mut bytes = 0;
        let fitting = rows.iter().take(limits.flush_rows_max).take_while(|row| {
            bytes += admissions::weight(row);
            bytes <= limits.flush_bytes_max
        });
        fitting.count().clamp(1, rows.len())
    }

    /// Stores one chunk, and tries what failed again until `deadline`.
    async fn store_chunk(&self, rows: Vec<NewInboxRow>, deadline: Instant) -> Vec<Admission> {
        let mut results: Vec<Option<Admission>> = vec![None; rows.len()];
        let mut open: Vec<Placed> = rows.into_iter().enumerate().collect();
        let pauses = if self.config.kind.is_broker() { BROKER_PAUSE } else { HTTP_PAUSE };
        let mut pause = pauses.first;
        loop {
            let Some(round) = self.try_once(open, &mut results, deadline).await else { break };
            open = round.at_once;
            if !open.is_empty() {
                open.extend(round.later);
                continue;
            }
            open = round.later;
            let wait = pause.mul_f64(1.0 + self.parts.ids.jitter() / 4.0);
            if open.is_empty() || Instant::now() + wait > deadline || self.parts.stop.is_cancelled() {
                break;
            }
            tokio::select! {
                () = tokio::time::sleep(wait) => {}
                () = self.parts.stop.cancelled() => break,
            }
            pause = (pause * 2).min(pauses.last);
        }
        let late = || Fault::transient("store_timeout", "the inbox did not answer in time; sending again is safe");
        results.into_iter().map(|result| result.unwrap_or_else(|| Admission::Failed(late()))).collect()
    }

    /// One try. Writes what is decided into `results`; `None` when time is up.
    async fn try_once(&self, open: Vec<Placed>, results: &mut [Option<Admission>], deadline: Instant) -> Option<Round> {
        let (places, rows): (Vec<usize>, Vec<NewInboxRow>) = open.into_iter().unzip();
        let answers = self.parts.admissions.admit(rows);
        // A broker waits for the database as long as it takes; a sender of HTTP has gone by then.
        let answers = if self.config.kind.is_broker() {
            answers.await
        } else {
            tokio::time::timeout_at(deadline, answers).await.ok()?
        };
        let mut round = Round::default();
        let mut suspects = Vec::new();
        for (place, Answered { row, answer }) in places.into_iter().zip(answers) {
            match answer {
                Ok(Admitted::Refused(fault)) => self.refused(place, row, fault, &mut results[place], &mut round),
                Ok(admitted) => results[place] = Some(self.admitted(&row, admitted)),
                Err(missed) => {
                    if self.warnings.may("store") {
                        tracing::warn!(source = self.config.name, fault = %missed.fault, "a message was not stored");
                    }
                    results[place] = Some(Admission::Failed(missed.fault));
                    let group = if missed.is_suspect { &mut suspects } else { &mut round.later };
                    group.push((place, row));
                }
            }
        }
        // What may be the cause goes last, so that it keeps nothing else out again.
        round.later.append(&mut suspects);
        Some(round)
    }

    fn admitted(&self, row: &NewInboxRow, admitted: Admitted) -> Admission {
        match admitted {
            Admitted::New(id) => {
                self.count(&row.dead.as_deref().map_or(InboxEvent::Stored, rejection_of));
                Admission::Stored(id)
            }
            Admitted::Duplicate => {
                self.count(&InboxEvent::Duplicate);
                Admission::Duplicate
            }
            Admitted::Collision(fault) => {
                tracing::error!(source = self.config.name, %fault, "the inbox's collation merges keys that differ");
                Admission::Failed(fault)
            }
            Admitted::Refused(fault) => Admission::Failed(fault),
        }
    }

    /// A row that this database will never take: told to a sender of HTTP; of a broker's message ever less is stored, until it
    /// is taken.
    fn refused(&self, place: usize, row: NewInboxRow, fault: Fault, result: &mut Option<Admission>, round: &mut Round) {
        if !self.config.kind.is_broker() {
            self.count(&InboxEvent::Rejected(Rejection::ExtractionFailed));
            *result = Some(Admission::Refused { kind: Refusal::BadAttribute, reason: fault.detail });
            return;
        }
        match prepare::reduced(row, &fault) {
            Some(row) => round.at_once.push((place, row)),
            None => *result = Some(Admission::Failed(fault)),
        }
    }
}

/// A row, and its place in the batch.
type Placed = (usize, NewInboxRow);

/// What a try leaves open.
#[derive(Default)]
struct Round {
    /// Refused as they were, reduced since.
    at_once: Vec<Placed>,
    /// Not stored for a reason that may pass.
    later: Vec<Placed>,
}

/// How a row that is stored dead is counted.
fn rejection_of(error: &str) -> InboxEvent<'static> {
    let is_transform = error.starts_with(DeadCode::Rejected.as_str());
    InboxEvent::Rejected(if is_transform { Rejection::TransformFailed } else { Rejection::ExtractionFailed })
}

/// Why a message was not taken.
fn failure(admission: &Admission) -> Option<&str> {
    match admission {
        Admission::Failed(fault) => Some(&fault.detail),
        Admission::Refused { reason, .. } => Some(reason),
        Admission::Stored(_) | Admission::Duplicate | Admission::Filtered => None,
    }
}

#[async_trait]
impl Intake for SourceIntake {
    async fn admit(&self, batch: Vec<Received>) -> Vec<Admission> {
        let began_at_us = self.parts.tracer.as_ref().map(|_| self.parts.ids.now_us());
        let prepared = self.prepare_all(batch).await;
        let mut rows = Vec::with_capacity(prepared.len());
        let mut answers = Vec::with_capacity(prepared.len());
        for prepared in prepared {
            match prepared {
                Prepared::Answered(admission) => answers.push(Some(admission)),
                Prepared::Row(row) => {
                    rows.push(*row);
                    answers.push(None);
                }
            }
        }
        let spans = self.spans(&mut rows, began_at_us);
        let stored = self.store(rows).await;
        for (span, admission) in spans.into_iter().zip(&stored) {
            spans::end(Some(span), failure(admission));
        }
        let mut stored = stored.into_iter();
        answers.into_iter().filter_map(|answer| answer.or_else(|| stored.next())).collect()
    }
}

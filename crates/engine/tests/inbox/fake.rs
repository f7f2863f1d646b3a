//! An inbox, an outbox and finished rows in memory, with faults on demand.

use std::{
    collections::HashSet,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use queuebox_core::{
    Fault, LaneSet, Uuid,
    message::{Consumption, Forward, NewInboxRow, PushRow, State},
    ports::{
        Admitted, Fence, Inbox, Ledger, Scope,
        inbox::{Forwarded, SourceBacklog},
        ledger::{Direction, LedgerCursor, LedgerEntry, LedgerFilter, LedgerRow, Pruned},
        outbox::PruneRule,
    },
};
use queuebox_engine::inbox_observer::{InboxEvent, InboxObserver};
use tokio::{sync::Notify, time::Instant};

/// A stored row.
#[derive(Debug, Clone)]
pub struct Stored {
    pub row: NewInboxRow,
    pub state: State,
    pub created_at_us: i64,
    pub scheduled_at_us: i64,
    pub crashes: i32,
    pub last_error: Option<String>,
}

type AdmitHook = Box<dyn Fn(&[NewInboxRow]) -> Result<(), Fault> + Send + Sync>;
pub type RefuseHook = Box<dyn Fn(&NewInboxRow) -> Option<Admitted> + Send + Sync>;

/// The database.
#[derive(Default)]
pub struct FakeInbox {
    rows: Mutex<Vec<Stored>>,
    outbox: Mutex<Vec<(Forward, i32)>>,
    /// Sizes of the batches that were asked for.
    pub batches: Mutex<Vec<usize>>,
    /// Fails whole batches.
    pub on_admit: Mutex<Option<AdmitHook>>,
    /// Answers single rows.
    pub on_row: Mutex<Option<RefuseHook>>,
    /// How long an insert takes.
    pub admit_takes: Mutex<Duration>,
    /// Inserts of this key wait until it is notified.
    pub hanging_key: Mutex<Option<(String, Arc<Notify>)>>,
    pub busy: AtomicUsize,
    pub busiest: AtomicUsize,
    /// The outbox refuses this topic.
    pub refused_topic: Mutex<Option<String>>,
    /// Every call of the relay fails with this.
    pub relay_fault: Mutex<Option<Fault>>,
    /// These rows are taken by somebody else between read and mark.
    pub stolen: Mutex<HashSet<Uuid>>,
    /// Held by every forward.
    pub forward_gate: Mutex<Option<Arc<Notify>>>,
    pub waiting_calls: AtomicUsize,
    /// A table without the column `crashes`.
    pub counts_nothing: AtomicBool,
    started: Mutex<Option<Instant>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap()
}

impl FakeInbox {
    pub fn new() -> Arc<Self> {
        let inbox = Self::default();
        *lock(&inbox.started) = Some(Instant::now());
        Arc::new(inbox)
    }

    pub fn now_us(&self) -> i64 {
        lock(&self.started).unwrap().elapsed().as_micros() as i64
    }

    pub fn rows(&self) -> Vec<Stored> {
        lock(&self.rows).clone()
    }

    pub fn only_row(&self) -> Stored {
        let rows = self.rows();
        assert_eq!(rows.len(), 1, "{rows:#?}");
        rows[0].clone()
    }

    pub fn keys(&self) -> Vec<String> {
        self.rows().into_iter().map(|stored| stored.row.idempotency_key).collect()
    }

    pub fn outbox(&self) -> Vec<(Forward, i32)> {
        lock(&self.outbox).clone()
    }

    /// Inserts as a statement by hand would.
    pub fn insert(&self, row: NewInboxRow) {
        let now = self.now_us();
        lock(&self.rows).push(Stored {
            scheduled_at_us: now + row.delay_us,
            row,
            state: State::Pending,
            created_at_us: now,
            crashes: 0,
            last_error: None,
        });
    }

    /// Ends the row with this key, as a statement by hand would.
    pub fn bury(&self, key: &str) {
        let mut rows = lock(&self.rows);
        rows.iter_mut().find(|stored| stored.row.idempotency_key == key).unwrap().state = State::Dead;
    }

    fn relay_fault(&self, fence: &Fence) -> Result<(), Fault> {
        if fence.worker != "me" {
            return Err(Fault::fenced("not registered"));
        }
        lock(&self.relay_fault).clone().map_or(Ok(()), Err)
    }
}

/// A pushed row without anything special.
pub fn push_row(key: &str) -> NewInboxRow {
    NewInboxRow {
        id: Uuid::now_v7(),
        source: "orders".into(),
        idempotency_key: key.into(),
        aggregate_id: None,
        event_type: None,
        payload: "{}".into(),
        headers: "{}".into(),
        correlation_id: None,
        consumption: Consumption::Push,
        topic: Some("t".into()),
        trace_parent: None,
        delay_us: 0,
        published_at_us: None,
        dead: None,
    }
}

#[async_trait]
impl Inbox for FakeInbox {
    async fn admit(&self, batch: &[NewInboxRow]) -> Result<Vec<Admitted>, Fault> {
        lock(&self.batches).push(batch.len());
        let busy = self.busy.fetch_add(1, Ordering::SeqCst) + 1;
        self.busiest.fetch_max(busy, Ordering::SeqCst);
        let takes = *lock(&self.admit_takes);
        if !takes.is_zero() {
            tokio::time::sleep(takes).await;
        }
        let hanging = lock(&self.hanging_key).clone();
        if let Some((_, until)) = hanging.filter(|(key, _)| batch.iter().any(|row| row.idempotency_key == *key)) {
            until.notified().await;
        }
        self.busy.fetch_sub(1, Ordering::SeqCst);
        if let Some(hook) = &*lock(&self.on_admit) {
            hook(batch)?;
        }
        let now = self.now_us();
        let mut rows = lock(&self.rows);
        let mut answers = Vec::new();
        for (index, row) in batch.iter().enumerate() {
            let special = lock(&self.on_row).as_ref().and_then(|hook| hook(row));
            let is_stored = |stored: &Stored| {
                (&stored.row.source, &stored.row.idempotency_key) == (&row.source, &row.idempotency_key)
            };
            answers.push(match special {
                Some(answer) => answer,
                None if rows.iter().any(is_stored) => Admitted::Duplicate,
                None => {
                    let receipt = now + index as i64;
                    rows.push(Stored {
                        row: row.clone(),
                        state: if row.dead.is_some() { State::Dead } else { State::Pending },
                        created_at_us: receipt,
                        scheduled_at_us: row.published_at_us.map_or(receipt, |time| time.min(receipt)) + row.delay_us,
                        crashes: 0,
                        last_error: row.dead.clone(),
                    });
                    Admitted::New(row.id)
                }
            });
        }
        Ok(answers)
    }

    async fn waiting(
        &self,
        fence: &Fence,
        lanes: LaneSet,
        limit: u32,
        exclude: &[Uuid],
    ) -> Result<Vec<PushRow>, Fault> {
        self.waiting_calls.fetch_add(1, Ordering::SeqCst);
        self.relay_fault(fence)?;
        assert!(!lanes.is_empty(), "nobody asks for nothing");
        let now = self.now_us();
        let mut due: Vec<Stored> = self.rows();
        due.retain(|stored| {
            stored.state == State::Pending
                && stored.row.consumption == Consumption::Push
                && stored.scheduled_at_us <= now
                && !exclude.contains(&stored.row.id)
        });
        due.sort_by_key(|stored| (stored.scheduled_at_us, stored.created_at_us, stored.row.id));
        due.truncate(limit as usize);
        Ok(due
            .into_iter()
            .map(|stored| PushRow {
                id: stored.row.id,
                source: stored.row.source,
                idempotency_key: stored.row.idempotency_key,
                aggregate_id: stored.row.aggregate_id,
                event_type: stored.row.event_type,
                topic: stored.row.topic,
                headers: stored.row.headers,
                correlation_id: stored.row.correlation_id,
                trace_parent: stored.row.trace_parent,
                crashes: if self.counts_refusals() { stored.crashes } else { 0 },
            })
            .collect())
    }

    async fn forward(&self, fence: &Fence, batch: &[Forward], max_attempts: i32) -> Result<Forwarded, Fault> {
        let gate = lock(&self.forward_gate).clone();
        if let Some(gate) = gate {
            gate.notified().await;
        }
        self.relay_fault(fence)?;
        let mut done = Forwarded::default();
        let mut rows = lock(&self.rows);
        for forward in batch {
            let stolen = lock(&self.stolen).contains(&forward.inbox_id);
            let row =
                rows.iter_mut().find(|stored| stored.row.id == forward.inbox_id && stored.state == State::Pending);
            match row {
                _ if lock(&self.refused_topic).as_deref() == Some(&forward.topic) => {
                    done.refused.push((forward.inbox_id, Fault::refused("check_violation", "the outbox says no")));
                }
                Some(stored) if !stolen => {
                    stored.state = State::Processed;
                    lock(&self.outbox).push((forward.clone(), max_attempts));
                }
                Some(stored) => {
                    stored.state = State::Processed;
                    done.lost.push(forward.inbox_id);
                }
                None => done.lost.push(forward.inbox_id),
            }
        }
        Ok(done)
    }

    fn counts_refusals(&self) -> bool {
        !self.counts_nothing.load(Ordering::SeqCst)
    }

    async fn set_aside(&self, fence: &Fence, id: Uuid, error: Option<&str>, delay_us: i64) -> Result<bool, Fault> {
        self.relay_fault(fence)?;
        let now = self.now_us();
        let mut rows = lock(&self.rows);
        let Some(stored) = rows.iter_mut().find(|stored| stored.row.id == id && stored.state == State::Pending) else {
            return Ok(false);
        };
        match error {
            Some(error) => {
                stored.state = State::Dead;
                stored.last_error = Some(error.to_owned());
            }
            None => {
                stored.crashes += 1;
                stored.scheduled_at_us = now + delay_us;
            }
        }
        Ok(true)
    }

    async fn inbox_backlog(&self, _: u64) -> Result<Vec<SourceBacklog>, Fault> {
        Ok(Vec::new())
    }

    async fn next_push_due_in_us(&self, _: LaneSet) -> Result<Option<i64>, Fault> {
        let now = self.now_us();
        let pending = self.rows().into_iter().filter(|stored| stored.state == State::Pending);
        Ok(pending.map(|stored| (stored.scheduled_at_us - now).max(0)).min())
    }
}

/// Finished rows by state, with faults on demand.
#[derive(Default)]
pub struct FakeLedger {
    /// Calls: table, state, rule.
    pub calls: Mutex<Vec<(Scope, State, PruneRule)>>,
    /// Rows that are left, per call order of state.
    pub left: Mutex<Vec<(State, u64)>>,
    /// So many calls fail first.
    pub failures: AtomicUsize,
}

#[async_trait]
impl Ledger for FakeLedger {
    async fn page(
        &self,
        _: Scope,
        _: &LedgerFilter,
        _: Direction,
        _: Option<LedgerCursor>,
        _: u32,
    ) -> Result<Vec<LedgerRow>, Fault> {
        unimplemented!("not used here")
    }

    async fn entry(&self, _: Scope, _: Uuid) -> Result<Option<LedgerEntry>, Fault> {
        unimplemented!("not used here")
    }

    async fn requeue(&self, _: Scope, _: &[Uuid], _: &[State]) -> Result<Vec<Uuid>, Fault> {
        unimplemented!("not used here")
    }

    async fn discard(&self, _: Scope, _: &[Uuid]) -> Result<Vec<Uuid>, Fault> {
        unimplemented!("not used here")
    }

    async fn prune(&self, table: Scope, state: State, rule: PruneRule, batch: u32) -> Result<Pruned, Fault> {
        if self.failures.load(Ordering::SeqCst) > 0 {
            self.failures.fetch_sub(1, Ordering::SeqCst);
            return Err(Fault::transient("deadlock", "chosen as the victim"));
        }
        lock(&self.calls).push((table, state, rule));
        let mut left = lock(&self.left);
        let Some((_, rows)) = left.iter_mut().find(|(of, _)| *of == state) else { return Ok(Pruned::default()) };
        let gone = (*rows).min(u64::from(batch));
        *rows -= gone;
        Ok(Pruned { rows: gone, more: *rows > 0 })
    }
}

/// Remembers what was counted, as text.
#[derive(Default)]
pub struct Counted(Mutex<Vec<String>>);

impl InboxObserver for Counted {
    fn observe(&self, event: &InboxEvent<'_>) {
        lock(&self.0).push(match event {
            InboxEvent::Rejected(rejection) => rejection.as_str().to_owned(),
            InboxEvent::ForwardFailed { fault } => format!("forward failed: {}", fault.code),
            InboxEvent::Cleaned { table, .. } => format!("cleaned {table:?}"),
            other => format!("{other:?}"),
        });
    }
}

impl Counted {
    pub fn count(&self, of: &str) -> usize {
        lock(&self.0).iter().filter(|event| event.starts_with(of)).count()
    }

    pub fn all(&self) -> Vec<String> {
        lock(&self.0).clone()
    }
}

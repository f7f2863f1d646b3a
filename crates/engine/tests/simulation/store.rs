//! The store port of one worker: the shared database, reached over a line on which requests and replies get lost.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use queuebox_core::{
    Fault, LaneSet, Uuid,
    message::{Forward, NewInboxRow, Position, PushRow, Stamp, State},
    ports::{
        Fence, Inbox, Lanes, Ledger, Outbox, Scope,
        inbox::{Admitted, Forwarded, SourceBacklog},
        lanes::{Registration, Survey, Take},
        ledger::{Direction, LedgerCursor, LedgerEntry, LedgerFilter, LedgerRow, Pruned},
        outbox::{Expansion, OutboxBacklog, Polled, PruneRule, Read, Recovered, Settle},
        schema::{Finding, MigrateOptions, Migrated, Schema, SchemaReport},
    },
};
use rand::{RngExt, SeedableRng, rngs::StdRng};

use crate::{database::Database, faults::Weather};

/// Settles that were written while their worker read, in all worlds of this process: where there are none, the worlds say nothing
/// about them.
pub static SETTLED_BESIDE: AtomicU64 = AtomicU64::new(0);

pub struct Line {
    database: Arc<Database>,
    reads: AtomicBool,
    weather: Weather,
    rng: Mutex<StdRng>,
    /// After this nothing goes wrong any more.
    pub calm: Arc<AtomicBool>,
    /// The process behind this line is dead: its calls never come back.
    pub dead: Arc<AtomicBool>,
}

impl Line {
    pub fn new(
        database: Arc<Database>,
        weather: Weather,
        seed: u64,
        calm: Arc<AtomicBool>,
        dead: Arc<AtomicBool>,
    ) -> Self {
        Self {
            database,
            reads: AtomicBool::new(false),
            weather,
            rng: Mutex::new(StdRng::seed_from_u64(seed)),
            calm,
            dead,
        }
    }

    async fn pause(&self) {
        let us = self.rng.lock().unwrap().random_range(100..4_000);
        tokio::time::sleep(Duration::from_micros(us)).await;
        if self.dead.load(Ordering::SeqCst) {
            std::future::pending::<()>().await;
        }
    }

    fn strikes(&self, chance: f64) -> bool {
        chance > 0.0 && !self.calm.load(Ordering::SeqCst) && self.rng.lock().unwrap().random_bool(chance)
    }

    /// The answer to a batch that holds a row which a trigger refuses.
    fn refused(&self, mut ids: impl Iterator<Item = Uuid>) -> Result<(), Fault> {
        let percent = u128::from(self.weather.refused);
        let is_refused = !self.calm.load(Ordering::SeqCst) && ids.any(|id| id.as_u128() % 100 < percent);
        if is_refused { Err(Fault::transient("raised", "a trigger refuses one of the rows")) } else { Ok(()) }
    }

    async fn call<T>(&self, work: impl Fn(&Database) -> Result<T, Fault>) -> Result<T, Fault> {
        self.pause().await;
        if self.strikes(self.weather.lost_request) {
            return Err(Fault::transient("lost_request", "the connection was lost"));
        }
        let mut result = work(&self.database);
        self.pause().await;
        if self.strikes(self.weather.doubled) {
            result = work(&self.database);
            self.pause().await;
        }
        if self.strikes(self.weather.lost_reply) {
            return Err(Fault::transient("lost_reply", "the connection was lost"));
        }
        result
    }
}

#[async_trait]
impl Outbox for Line {
    async fn poll(&self, fence: &Fence, settles: &[Settle], read: Option<&Read>) -> Result<Polled, Fault> {
        if read.is_some() {
            self.reads.store(true, Ordering::SeqCst);
        } else if self.reads.load(Ordering::SeqCst) {
            SETTLED_BESIDE.fetch_add(1, Ordering::SeqCst);
        }
        let answer = self
            .call(|database| {
                self.refused(settles.iter().map(|settle| settle.position.id))?;
                database.poll(fence, settles, read)
            })
            .await;
        if read.is_some() {
            self.reads.store(false, Ordering::SeqCst);
        }
        answer
    }

    /// Worlds with one lane are of a database that writes one statement after the other.
    fn settles_beside(&self) -> Option<usize> {
        (self.database.lane_count > 1).then_some(2)
    }

    async fn mark(&self, fence: &Fence, rows: &[(Position, Stamp)], lease_ms: u64) -> Result<Vec<Uuid>, Fault> {
        self.call(|database| {
            self.refused(rows.iter().map(|(position, _)| position.id))?;
            database.mark(fence, rows, lease_ms)
        })
        .await
    }

    async fn recover(&self, fence: &Fence, lanes: LaneSet, max_crashes: i32) -> Result<Recovered, Fault> {
        self.call(|database| database.recover(fence, lanes, max_crashes)).await
    }

    async fn expand(&self, fence: &Fence, parents: &[Expansion]) -> Result<Vec<Uuid>, Fault> {
        self.call(|database| {
            self.refused(parents.iter().map(|parent| parent.parent.id))?;
            database.expand(fence, parents)
        })
        .await
    }

    async fn outbox_backlog(&self, _: u64) -> Result<OutboxBacklog, Fault> {
        Ok(OutboxBacklog::default())
    }
}

#[async_trait]
impl Lanes for Line {
    fn lane_count(&self) -> u8 {
        self.database.lane_count
    }

    fn lane_hash(&self) -> &str {
        "sim"
    }

    fn has_lanes(&self) -> bool {
        self.database.has_lanes
    }

    async fn register(&self, new: &Registration) -> Result<(), Fault> {
        self.call(|database| {
            database.register(new);
            Ok(())
        })
        .await
    }

    async fn renew(&self, fence: &Fence, lease_ms: u64) -> Result<(), Fault> {
        self.call(|database| database.renew(fence, lease_ms)).await
    }

    async fn survey(&self, scope: Scope) -> Result<Survey, Fault> {
        self.call(|database| Ok(database.survey(scope))).await
    }

    async fn take(&self, fence: &Fence, scope: Scope, wanted: &[Take]) -> Result<LaneSet, Fault> {
        self.call(|database| database.take(fence, scope, wanted)).await
    }

    async fn give(&self, fence: &Fence, scope: Scope, lanes: LaneSet, to: Option<&str>) -> Result<LaneSet, Fault> {
        self.call(|database| database.give(fence, scope, lanes, to)).await
    }

    async fn retire(&self, fence: &Fence, careful: LaneSet) -> Result<(), Fault> {
        self.call(|database| database.retire(fence, careful)).await
    }

    async fn set_idle(&self, _: &Fence, _: bool) -> Result<(), Fault> {
        Ok(())
    }
}

/// The worlds here are about the outbox: the inbox is empty.
#[async_trait]
impl Inbox for Line {
    async fn admit(&self, batch: &[NewInboxRow]) -> Result<Vec<Admitted>, Fault> {
        Ok(batch.iter().map(|row| Admitted::New(row.id)).collect())
    }

    async fn waiting(&self, _: &Fence, _: LaneSet, _: u32, _: &[Uuid]) -> Result<Vec<PushRow>, Fault> {
        Ok(Vec::new())
    }

    async fn forward(&self, _: &Fence, _: &[Forward], _: i32) -> Result<Forwarded, Fault> {
        Ok(Forwarded::default())
    }

    async fn set_aside(&self, _: &Fence, _: Uuid, _: Option<&str>, _: i64) -> Result<bool, Fault> {
        Ok(false)
    }

    async fn inbox_backlog(&self, _: u64) -> Result<Vec<SourceBacklog>, Fault> {
        Ok(Vec::new())
    }

    async fn next_push_due_in_us(&self, _: LaneSet) -> Result<Option<i64>, Fault> {
        Ok(None)
    }
}

#[async_trait]
impl Ledger for Line {
    async fn page(
        &self,
        _: Scope,
        _: &LedgerFilter,
        _: Direction,
        _: Option<LedgerCursor>,
        _: u32,
    ) -> Result<Vec<LedgerRow>, Fault> {
        Ok(Vec::new())
    }

    async fn entry(&self, _: Scope, _: Uuid) -> Result<Option<LedgerEntry>, Fault> {
        Ok(None)
    }

    async fn requeue(&self, _: Scope, _: &[Uuid], _: &[State]) -> Result<Vec<Uuid>, Fault> {
        Ok(Vec::new())
    }

    async fn discard(&self, _: Scope, _: &[Uuid]) -> Result<Vec<Uuid>, Fault> {
        Ok(Vec::new())
    }

    async fn prune(&self, _: Scope, _: State, _: PruneRule, _: u32) -> Result<Pruned, Fault> {
        Ok(Pruned::default())
    }
}

#[async_trait]
impl Schema for Line {
    fn kind(&self) -> &'static str {
        "memory"
    }

    async fn ping(&self) -> Result<(), Fault> {
        Ok(())
    }

    async fn migrate(&self, _: MigrateOptions) -> Result<Migrated, Fault> {
        Ok(Migrated::default())
    }

    async fn check(&self) -> Result<SchemaReport, Fault> {
        Ok(SchemaReport::default())
    }

    fn grants(&self, _: &str) -> Vec<String> {
        Vec::new()
    }

    async fn examine(&self) -> Result<Vec<Finding>, Fault> {
        Ok(Vec::new())
    }

    fn pool(&self) -> (u32, u32, u32) {
        (0, 0, 0)
    }

    async fn close(&self) {}
}

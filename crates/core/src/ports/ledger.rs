//! Finished rows: list, show, replay, discard, retention (contract 11). Used by the admin API, the command line and the
//! retention task, never by the hot path.

use async_trait::async_trait;
use uuid::Uuid;

use super::{lanes::Scope, outbox::PruneRule};
use crate::{
    Fault,
    message::{Consumption, State},
};

/// What the database itself filters by. Patterns and routes are applied by the caller on the rows of a page.
#[derive(Debug, Clone, Default)]
pub struct LedgerFilter {
    /// One of these states.
    pub states: Vec<State>,
    /// One of these ids; empty = any. The same for the other lists.
    pub ids: Vec<Uuid>,
    /// Outbox: exact topics.
    pub topics: Vec<String>,
    /// Outbox: `key`. Inbox: `aggregate_id`.
    pub key: Option<String>,
    /// Inbox: sources.
    pub sources: Vec<String>,
    /// Inbox: event type.
    pub event_type: Option<String>,
    /// Inbox: consumption.
    pub consumption: Option<Consumption>,
    /// `last_error` begins with this code and a colon.
    pub code: Option<String>,
    /// `created_at` is later, microseconds since 1970.
    pub created_after_us: Option<i64>,
    /// `created_at` is earlier, microseconds since 1970.
    pub created_before_us: Option<i64>,
    /// Outbox: children of this parent.
    pub parent_id: Option<Uuid>,
}

/// A place in the order of `(created_at, id)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LedgerCursor {
    /// `created_at` in ticks that only the store understands.
    pub created_at: i64,
    /// `id`.
    pub id: Uuid,
}

/// A row of either table without payload and headers.
#[derive(Debug, Clone, serde::Serialize)]
#[serde(rename_all = "camelCase")]
pub struct LedgerRow {
    /// `id`.
    pub id: Uuid,
    /// State.
    pub state: State,
    /// Outbox: topic. Inbox: stored topic.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub topic: Option<String>,
    /// Outbox: `key`. Inbox: `aggregate_id`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// Outbox: of a child.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub destination: Option<String>,
    /// Outbox: of a child.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parent_id: Option<Uuid>,
    /// Outbox.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sequence: Option<i64>,
    /// Outbox.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_attempts: Option<i32>,
    /// Inbox.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source: Option<String>,
    /// Inbox.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub idempotency_key: Option<String>,
    /// Inbox.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub event_type: Option<String>,
    /// Inbox.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub consumption: Option<Consumption>,
    /// Failed attempts.
    pub attempt: i32,
    /// Crashes counted.
    pub crashes: i32,
    /// Reason of the last failure.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_error: Option<String>,
    /// `created_at`, microseconds since 1970.
    pub created_at_us: i64,
    /// `scheduled_at`, microseconds since 1970.
    pub scheduled_at_us: i64,
    /// Outbox: `updated_at`. Inbox: `processed_at`. Microseconds since 1970.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub finished_at_us: Option<i64>,
    /// Place in the order.
    #[serde(skip)]
    pub cursor: LedgerCursor,
}

/// A row with payload and headers, both as JSON text.
#[derive(Debug, Clone)]
pub struct LedgerEntry {
    /// The row.
    pub row: LedgerRow,
    /// JSON text.
    pub payload: String,
    /// JSON text.
    pub headers: String,
}

/// Order of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// For lists.
    NewestFirst,
    /// For replay and discard.
    OldestFirst,
}

/// What a step of [`Ledger::prune`] did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Pruned {
    /// Rows that went.
    pub rows: u64,
    /// The pass is not over: take the next step.
    pub more: bool,
}

/// Finished rows of one database.
#[async_trait]
pub trait Ledger: Send + Sync + 'static {
    /// A page of rows in the order `(created_at, id)`, behind `after`.
    async fn page(
        &self,
        table: Scope,
        filter: &LedgerFilter,
        direction: Direction,
        after: Option<LedgerCursor>,
        limit: u32,
    ) -> Result<Vec<LedgerRow>, Fault>;

    /// One row whole.
    async fn entry(&self, table: Scope, id: Uuid) -> Result<Option<LedgerEntry>, Fault>;

    /// Moves rows that are in one of `states` (never `pending` or `processing`) and are no expanded parent back to `pending`, as
    /// contract 3.1 says. Returns the ids that moved. At most 1,000 ids a call, one transaction.
    async fn requeue(&self, table: Scope, ids: &[Uuid], states: &[State]) -> Result<Vec<Uuid>, Fault>;

    /// Deletes rows that are dead. Returns the ids that went. At most 1,000 ids a call.
    async fn discard(&self, table: Scope, ids: &[Uuid]) -> Result<Vec<Uuid>, Fault>;

    /// One step of deleting rows in the finished state `state` under `rule`, at most `batch` of them. Age is by `updated_at` in the
    /// outbox and by `created_at` in the inbox. A parent with open children stays. A step is short whatever the size of the table,
    /// so it may find nothing although there is more to do; the store remembers where it stopped.
    async fn prune(&self, table: Scope, state: State, rule: PruneRule, batch: u32) -> Result<Pruned, Fault>;
}

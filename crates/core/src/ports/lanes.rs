//! Who owns what: workers, their leases, and the lanes that they own (contract 2.7, 5.2).
//!
//! ```text
//!            take (free)                 give (to a joining worker)
//!   free ───────────────► owned by A ───────────────────────────────► owned by B
//!    ▲                       │   │                                       ▲
//!    └──── give (clean) ─────┘   └── lease of A ended, take by B ────────┘  B works the lane *carefully*
//! ```
//!
//! A worker is one row. Its lease is renewed by one update of that row, with everything that it owns. A worker whose lease
//! has ended never comes back: it registers anew, under a new name and token.

use async_trait::async_trait;
use uuid::Uuid;

use crate::{Fault, Lane, LaneSet};

/// The table whose lanes are meant. Stored as the table's own name, so that renamed tables never collide.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Scope {
    /// The outbox.
    Outbox,
    /// The inbox.
    Inbox,
}

/// Proof of a live registration, repeated by every write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fence {
    /// `queuebox_worker.worker`.
    pub worker: String,
    /// `queuebox_worker.token`; also the `claim_token` of rows that this worker has marked.
    pub token: Uuid,
}

/// A new worker.
#[derive(Debug, Clone)]
pub struct Registration {
    /// Name and token, both new.
    pub fence: Fence,
    /// UID of the Relay that it serves; in local runs `local/<namespace>/<name>`.
    pub relay_uid: String,
    /// `<number>/<content hash>` of its configuration.
    pub config: String,
    /// Length of its lease in milliseconds.
    pub lease_ms: u64,
}

/// Another worker, as seen in the database.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkerRow {
    /// Name.
    pub worker: String,
    /// UID of its Relay.
    pub relay_uid: String,
    /// `<number>/<content hash>` of its configuration.
    pub config: String,
    /// Name of the hash that it computes lanes with.
    pub lane_hash: String,
    /// Its lease has not ended, by the database's clock.
    pub live: bool,
}

/// A lane, as seen in the database.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LaneRow {
    /// Number.
    pub lane: Lane,
    /// Name of its owner; `None` = given back clean.
    pub worker: Option<String>,
    /// Counts the moves.
    pub term: i64,
}

/// Workers and lanes of one scope, read in one statement. A lane that has no row yet is free with term 0.
#[derive(Debug, Clone, Default)]
pub struct Survey {
    /// All registered workers, dead ones that still own a lane included.
    pub workers: Vec<WorkerRow>,
    /// All lanes that have a row.
    pub lanes: Vec<LaneRow>,
}

/// A lane that a worker wants, with what it saw of it. The take changes nothing where the lane has moved since.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Take {
    /// Number.
    pub lane: Lane,
    /// The owner as seen; `None` = free. An owner must have an ended lease, or no row at all.
    pub owner: Option<String>,
    /// The term as seen.
    pub term: i64,
}

/// Registration, renewal and movement of lanes.
///
/// Laws (tested by `queuebox_conformance::store`):
/// - Every method that takes a [`Fence`] fails with [`crate::Class::Fenced`] and changes nothing unless the worker's row has
///   that token and an unexpired lease.
/// - `take` of a lane with an owner locks the owner's row, checks that its lease has ended, raises the term, and commits
///   before it returns. Whatever the old owner's statements were doing either committed before or fails fenced.
/// - Locks are taken in the order worker, lanes, rows by `sequence`.
#[async_trait]
pub trait Lanes: Send + Sync + 'static {
    /// Number of lanes: 64, or 1 on SQLite.
    fn lane_count(&self) -> u8;

    /// Name of the hash and the number of lanes, such as `crc32/64`.
    fn lane_hash(&self) -> &str;

    /// False below schema version 14 (PostgreSQL, SQL Server): there are no lane tables, rows are claimed instead. The
    /// engine then works every lane carefully, and `register`, `renew`, `retire` know only the rows marked with the token.
    fn has_lanes(&self) -> bool {
        true
    }

    /// Adds the worker's row, and removes rows of workers whose lease has ended and whom no lane names.
    async fn register(&self, new: &Registration) -> Result<(), Fault>;

    /// Extends the worker's lease, and that of each outbox row it has marked, to now + `lease_ms`. An ended lease is never
    /// renewed: [`crate::Class::Fenced`].
    async fn renew(&self, fence: &Fence, lease_ms: u64) -> Result<(), Fault>;

    /// All workers and the lanes of `scope`.
    async fn survey(&self, scope: Scope) -> Result<Survey, Fault>;

    /// Takes free lanes and lanes of dead owners. Returns those that are ours now. Takes nothing while a lane of the scope names
    /// a live worker of another Relay, or with another lane hash; two takers of one scope are serialised, so that two Relays
    /// that start together cannot both get lanes.
    async fn take(&self, fence: &Fence, scope: Scope, wanted: &[Take]) -> Result<LaneSet, Fault>;

    /// Gives lanes that are ours to `to`, or back to the free ones. The caller has nothing of them in flight. Returns
    /// those that moved; a lane is not moved to a worker whose lease has ended.
    async fn give(&self, fence: &Fence, scope: Scope, lanes: LaneSet, to: Option<&str>) -> Result<LaneSet, Fault>;

    /// Leaves: releases marked rows (state as before, nothing counted), gives all lanes back but those in `careful` of the
    /// outbox scope, which keep our name so that their next owner is careful as well, and removes the worker's row.
    async fn retire(&self, fence: &Fence, careful: LaneSet) -> Result<(), Fault>;

    /// Writes whether the worker waits to be woken (contract 5.5). Does nothing where the database cannot wake.
    async fn set_idle(&self, fence: &Fence, idle: bool) -> Result<(), Fault>;
}

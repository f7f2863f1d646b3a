//! The outbox: read without writing, settle in the same round trip as the next read.

use async_trait::async_trait;
use uuid::Uuid;

use super::lanes::Fence;
use crate::{
    Fault, LaneSet,
    message::{OutboxRow, Position, Stamp},
};

/// What became of a row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// The destination took responsibility: `sent` (or deleted, with `onSent: Delete`), `crashes` 0.
    Sent,
    /// Failed, attempts left: `pending`, `attempt` + 1, `scheduled_at` = now + `delay_us`, `crashes` 0.
    Retry {
        /// Microseconds from now.
        delay_us: i64,
        /// `last_error`, redacted.
        error: String,
    },
    /// No further attempts. `counted` adds one to `attempt` (a failed delivery); otherwise it stays (never tried).
    Dead {
        /// `last_error`, code first, redacted.
        error: String,
        /// A delivery was tried and failed.
        counted: bool,
    },
    /// A marked row goes back to `pending`, nothing counted.
    Release,
}

/// The outcome of one row, with what the row looked like when it was read. Marked rows are matched by the claim token, all
/// others by `pending`, `attempt` and `scheduled_at` as read.
#[derive(Debug, Clone)]
pub struct Settle {
    /// The row.
    pub position: Position,
    /// The condition.
    pub stamp: Stamp,
    /// What to write.
    pub outcome: Outcome,
}

impl Settle {
    /// Whether it was delivered.
    pub fn is_sent(&self) -> bool {
        self.outcome == Outcome::Sent
    }
}

/// The rows of one key, from a sequence on, lowest first. Reads through `(key, sequence)` where pending.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct KeyRead {
    /// Never empty.
    pub key: String,
    /// Rows with this `sequence` and later.
    pub from: i64,
}

/// The rows *without a key* of one destination alone, from a position on: rows of its topics without a destination, and its
/// children. (Rows with a key that were left behind are read by [`KeyRead`], which alone can keep their order.)
#[derive(Debug, Clone)]
pub struct DestinationRead {
    /// Value of the `destination` column of its children.
    pub destination: String,
    /// Exact topics that are routed to it, as far as they have been met.
    pub topics: Vec<String>,
    /// Rows behind this position; `None` = from the start.
    pub after: Option<Position>,
    /// At most this many rows.
    pub limit: u32,
}

/// One poll's wishes. All parts are bounded; a part that is empty costs nothing.
#[derive(Debug, Clone, Default)]
pub struct Read {
    /// Only rows of these lanes.
    pub lanes: LaneSet,
    /// The walk at the front: pending rows behind this position, in order.
    pub walk_after: Option<Position>,
    /// At most this many rows from the walk.
    pub walk_limit: u32,
    /// The lap: pending rows behind this position, but not behind `walk_after` (none at all while that is `None`).
    ///
    /// `None` asks for the rows that may have become visible since this worker's last poll, because their transaction committed late:
    /// all of them, in the snapshot of the walk, for a transaction may bring rows of one key on both sides of the walk's place, and only
    /// together with this part is the walk in order. A superset is fine: PostgreSQL begins at its safe floor, a store without a floor
    /// begins at the oldest row, SQLite, where rows commit in the order of `sequence`, returns nothing. When there are more than
    /// `lap_limit`, `lap_ended` is false and the engine reads the keys of the walk's rows one by one instead of trusting their order.
    ///
    /// `Some` asks for a step over everything that is pending, whatever the floor: the safety net.
    ///
    /// Rows of a lap always come with [`crate::message::Payload::Omitted`]: nearly all of them are known already, the others are read
    /// again by key or destination, so that a lap stays cheap behind any backlog.
    pub lap_after: Option<Position>,
    /// At most this many rows from the lap; 0 = no lap in this poll.
    pub lap_limit: u32,
    /// Keys to read again.
    pub keys: Vec<KeyRead>,
    /// At most this many rows of each key.
    pub key_limit: u32,
    /// Rows whose `scheduled_at` is later than `created_at` and has come: retries, scheduled and replayed rows. At most
    /// this many, longest due first. Rows of `omit_topics` and `omit_destinations` are left out: the destination cannot take
    /// them, and they must not hide others.
    pub later_limit: u32,
    /// Destinations to read for alone.
    pub destinations: Vec<DestinationRead>,
    /// Rows in memory: never returned. Rows settled in the same call are never returned either.
    pub exclude: Vec<Uuid>,
    /// In the walk, rows of these exact topics (without a destination), and children of `omit_destinations`, come with
    /// [`crate::message::Payload::Omitted`], since their destination is full or held. Does not apply to `keys`.
    pub omit_topics: Vec<String>,
    /// See `omit_topics`.
    pub omit_destinations: Vec<String>,
    /// Stop after the row that reaches this sum of payload bytes, in each part of the read; at least one row is returned. A
    /// part that stopped for this reason has not ended.
    pub bytes_max: u64,
    /// A larger payload is never loaded.
    pub payload_max: u64,
}

/// Answer of a poll.
#[derive(Debug, Clone, Default)]
pub struct Polled {
    /// Settles that changed no row: it was replayed, edited by hand or taken over in between.
    pub lost: Vec<Uuid>,
    /// What the walk found, in order. Parts may overlap; the engine drops repeats by id.
    pub walk: Vec<OutboxRow>,
    /// The walk reached the end of the pending rows.
    pub walk_ended: bool,
    /// What the lap found, in order.
    pub lap: Vec<OutboxRow>,
    /// The lap reached the walk's place.
    pub lap_ended: bool,
    /// Rows of `keys`, each key's in order. For each key that has more rows than `key_limit` (or hit the byte bound) the
    /// last row returned is not its last.
    pub keys: Vec<OutboxRow>,
    /// Later rows that have come due, longest due first.
    pub later: Vec<OutboxRow>,
    /// Rows of `destinations`, in the order asked, each in order.
    pub destinations: Vec<OutboxRow>,
    /// Microseconds until the nearest later row of my lanes comes due, if there is one. Asked for only with `later_limit` > 0.
    pub next_due_in_us: Option<i64>,
}

/// A child of a fan-out parent.
#[derive(Debug, Clone)]
pub struct Child {
    /// Its own id.
    pub id: Uuid,
    /// Its destination.
    pub destination: String,
}

/// A parent to be expanded: children inserted, parent `sent`, in one transaction.
#[derive(Debug, Clone)]
pub struct Expansion {
    /// The parent.
    pub parent: Position,
    /// Its condition, as for a settle.
    pub stamp: Stamp,
    /// One per destination.
    pub children: Vec<Child>,
}

/// What a recovery found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Recovered {
    /// Rows put back to `pending`, `crashes` + 1.
    pub pending: u64,
    /// Rows that reached `max_crashes` and are `dead`, code `crashes`.
    pub dead: Vec<Buried>,
    /// Rows of the lanes that are still `processing` and not ours: under somebody else's token and a lease that has not ended, or
    /// beyond the bound of one call.
    pub unexpired: u64,
    /// The lanes of these rows. They hold the later rows of their keys, so such a lane is not worked yet; the others are.
    pub waiting: LaneSet,
}

/// A row that is dead because the lease of its claim ended too often.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Buried {
    /// Its id.
    pub id: Uuid,
    /// Its topic.
    pub topic: String,
    /// Its key; `None` = none, or an empty one.
    pub key: Option<String>,
    /// Of a child: where it should have gone.
    pub destination: Option<String>,
    /// Failed attempts.
    pub attempt: i32,
    /// `created_at`, in microseconds since 1970.
    pub created_at_us: i64,
    /// `last_error`, code first.
    pub error: String,
}

/// Gauges of the table, counted up to a bound.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct OutboxBacklog {
    /// Pending rows, up to the bound.
    pub pending: u64,
    /// Dead rows, up to the bound.
    pub dead: u64,
    /// Age of the oldest pending row by `created_at`, due or not, in microseconds; 0 = none.
    pub oldest_pending_age_us: i64,
    /// For how long the row that has been due longest has been due, in microseconds; 0 = none.
    pub oldest_due_age_us: i64,
}

/// Finished rows to delete.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PruneRule {
    /// Rows that finished longer ago than this, in milliseconds.
    OlderThan(u64),
    /// All but the newest so many of each finished state.
    Beyond(u64),
}

/// The outbox of one database.
///
/// Laws (tested by `queuebox_conformance::store`):
/// - `poll` fences, settles and reads in that order, in one transaction, and in one statement where the database can do it. It
///   takes no lock that an application's insert could wait for.
/// - A settle changes a row only under its whole condition; it never undoes a newer state.
/// - The read returns pending rows of the given lanes only, never one of `exclude`, never one settled in the call.
/// - No row is skipped because it committed late: every part reads what is pending *now*.
#[async_trait]
pub trait Outbox: Send + Sync + 'static {
    /// Settles, then reads.
    async fn poll(&self, fence: &Fence, settles: &[Settle], read: Option<&Read>) -> Result<Polled, Fault>;

    /// From how many deliveries on it is worth settling them by a call of [`poll`](Self::poll) of their own while another one reads.
    /// `None`: never, since this database writes one statement after the other.
    fn settles_beside(&self) -> Option<usize> {
        None
    }

    /// Writes rows `processing` with our token, until the end of the worker's own lease (where there are no worker rows: for
    /// `lease_ms`), so that whoever takes the lane over finds them ended. Returns those that are marked now, rows that bear our token
    /// already included: the reply of an earlier try may have been lost.
    async fn mark(&self, fence: &Fence, rows: &[(Position, Stamp)], lease_ms: u64) -> Result<Vec<Uuid>, Fault>;

    /// Recovers `processing` rows of `lanes` whose lease has ended or is null: back to `pending` with `crashes` + 1, or dead
    /// when that reaches `max_crashes`. At most a few thousand rows a call.
    async fn recover(&self, fence: &Fence, lanes: LaneSet, max_crashes: i32) -> Result<Recovered, Fault>;

    /// Expands parents. Returns the parents that were *not* expanded, because their condition did not hold any more.
    async fn expand(&self, fence: &Fence, parents: &[Expansion]) -> Result<Vec<Uuid>, Fault>;

    /// Gauges, each count up to `bound`.
    async fn outbox_backlog(&self, bound: u64) -> Result<OutboxBacklog, Fault>;

    /// Resolves when rows may have been inserted (a hint; may come without cause). Pends for ever where the database cannot
    /// wake (contract 5.5): the engine always has a timer beside it.
    async fn woken(&self) {
        std::future::pending::<()>().await;
    }
}

//! Rows of the two tables as the engine sees them. Column meanings are in `docs/contract.md` sections 2 and 3.

use bytes::Bytes;
use uuid::Uuid;

use crate::lane::Lane;

/// States of both tables. `processed` is the inbox's word for finished, `sent` the outbox's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// Waits for its turn.
    Pending,
    /// Claimed, under a lease.
    Processing,
    /// Outbox: the destination took responsibility.
    Sent,
    /// Inbox: forwarded (push) or finished by the application (pull).
    Processed,
    /// Gets no further attempts by itself.
    Dead,
}

impl State {
    /// The word in the `state` column.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Processing => "processing",
            Self::Sent => "sent",
            Self::Processed => "processed",
            Self::Dead => "dead",
        }
    }

    /// Reads the word of the `state` column.
    pub fn parse(word: &str) -> Option<Self> {
        Some(match word {
            "pending" => Self::Pending,
            "processing" => Self::Processing,
            "sent" => Self::Sent,
            "processed" => Self::Processed,
            "dead" => Self::Dead,
            _ => return None,
        })
    }
}

/// How an inbox row leaves: forwarded by the relay, or handled by the application's own worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Consumption {
    /// The relay forwards it into the outbox.
    #[default]
    Push,
    /// The application's worker claims it.
    Pull,
}

impl Consumption {
    /// The word in the `consumption` column.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Push => "push",
            Self::Pull => "pull",
        }
    }
}

/// What a store writes into `last_error` of a parent when it is expanded (contract 7.2): so it is known for one, and never moved, when its
/// children are gone.
pub const EXPANDED: &str = "expanded: the rows for its destinations have its id in parent_id";

/// How [`EXPANDED`] begins, for statements.
pub const EXPANDED_PREFIX: &str = "expanded:";

/// Why a row is dead: the word before the colon in `last_error` (contract 3.3).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DeadCode {
    /// `attempt` reached `max_attempts`.
    Attempts,
    /// No route matches.
    NoRoute,
    /// A transform with `onError: Dead` failed.
    Transform,
    /// This message can never be taken.
    Refused,
    /// Its lease ended `maxCrashes` times without an outcome.
    Crashes,
    /// The topic template gave nothing.
    EmptyTopic,
    /// The topic template gave more than 255 characters.
    BadTopic,
    /// The database itself refused the outbox row.
    Forward,
    /// A broker body that is not usable JSON.
    NotJson,
    /// A broker message whose source transform failed.
    Rejected,
    /// A broker message with a key value that is too long or cannot be stored.
    BadKey,
    /// A pull worker gave up.
    Handler,
}

impl DeadCode {
    /// Every code, in the order of the contract.
    pub const ALL: [Self; 12] = [
        Self::Attempts,
        Self::NoRoute,
        Self::Transform,
        Self::Refused,
        Self::Crashes,
        Self::EmptyTopic,
        Self::BadTopic,
        Self::Forward,
        Self::NotJson,
        Self::Rejected,
        Self::BadKey,
        Self::Handler,
    ];

    /// The code as it stands in `last_error`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Attempts => "attempts",
            Self::NoRoute => "no_route",
            Self::Transform => "transform",
            Self::Refused => "refused",
            Self::Crashes => "crashes",
            Self::EmptyTopic => "empty_topic",
            Self::BadTopic => "bad_topic",
            Self::Forward => "forward",
            Self::NotJson => "not_json",
            Self::Rejected => "rejected",
            Self::BadKey => "bad_key",
            Self::Handler => "handler",
        }
    }

    /// `code: text`, redacted and cut as every stored error is.
    pub fn because(self, text: &str) -> String {
        crate::redact::redact(&format!("{}: {text}", self.as_str()))
    }
}

/// A payload as read, within the bounds of the read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Payload {
    /// The JSON text as the database returns it.
    Loaded(Bytes),
    /// Left out on request, because the row is only walked over.
    Omitted,
    /// Larger than `maxPayloadSize`: never loaded. Its size in bytes.
    TooLarge(u64),
}

/// A place in the order of the outbox. `sequence` is not unique (children carry their parent's), so the id decides ties.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Position {
    /// The `sequence` column.
    pub sequence: i64,
    /// The `id` column.
    pub id: Uuid,
}

/// What the row looked like when it was read; a settle repeats all of it, so that a row that a person changed in between
/// is left alone (contract 5.1.5).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stamp {
    /// `attempt` as read.
    pub attempt: i32,
    /// `scheduled_at` as read, in ticks that only the store understands.
    pub scheduled_at: i64,
    /// The row was written `processing` by this worker (careful lanes, suspects, row claims).
    pub marked: bool,
}

/// A pending row of the outbox, as read.
#[derive(Debug, Clone)]
pub struct OutboxRow {
    /// `id`; on the wire `X-Message-Id`.
    pub id: Uuid,
    /// `sequence`: the order within a key.
    pub sequence: i64,
    /// Computed by the statement from `coalesce(nullif(key, ''), parent_id, id)`.
    pub lane: Lane,
    /// The only input of routing.
    pub topic: String,
    /// The unit of order; `None` for null and empty.
    pub key: Option<String>,
    /// Set on children only.
    pub destination: Option<String>,
    /// Set on children only.
    pub parent_id: Option<Uuid>,
    /// JSON text.
    pub payload: Payload,
    /// JSON text of the `headers` column, unchecked.
    pub headers: String,
    /// For address templates.
    pub aggregate_type: Option<String>,
    /// W3C trace context, if stored.
    pub trace_parent: Option<String>,
    /// Failed attempts so far.
    pub attempt: i32,
    /// Ceiling of `attempt`.
    pub max_attempts: i32,
    /// Crashes counted; above 0 the row is a suspect.
    pub crashes: i32,
    /// `scheduled_at` as read, in ticks that only the store understands.
    pub scheduled_at: i64,
    /// Microseconds until the row is due, by the database's clock; 0 or less = due.
    pub due_in_us: i64,
    /// `created_at` in microseconds since 1970.
    pub created_at_us: i64,
}

impl OutboxRow {
    /// Where the row stands in the order.
    pub fn position(&self) -> Position {
        Position { sequence: self.sequence, id: self.id }
    }

    /// The condition of its settle, as long as the row was not marked.
    pub fn stamp(&self) -> Stamp {
        Stamp { attempt: self.attempt, scheduled_at: self.scheduled_at, marked: false }
    }
}

/// A message that the intake has accepted, ready for the inbox. The store computes the receipt (contract 2.3).
#[derive(Debug, Clone)]
pub struct NewInboxRow {
    /// `id`, made by QueueBox.
    pub id: Uuid,
    /// Name of the source.
    pub source: String,
    /// With `source` the identity of the message.
    pub idempotency_key: String,
    /// Unit of order; becomes the key of the forwarded row.
    pub aggregate_id: Option<String>,
    /// For the topic template.
    pub event_type: Option<String>,
    /// JSON text.
    pub payload: Bytes,
    /// JSON text of an object of strings.
    pub headers: String,
    /// Given or new.
    pub correlation_id: Option<String>,
    /// Fixed at receipt.
    pub consumption: Consumption,
    /// Rendered at receipt; push rows only.
    pub topic: Option<String>,
    /// W3C trace context.
    pub trace_parent: Option<String>,
    /// `initialDelay` in microseconds; `scheduled_at` = min(publish time, receipt) + delay.
    pub delay_us: i64,
    /// Publish time in microseconds since 1970, where a source reads one.
    pub published_at_us: Option<i64>,
    /// Stored in state `dead` with this `last_error` (code first) instead of `pending`.
    pub dead: Option<String>,
}

/// A due push row of the inbox, without its payload, which never leaves the database when it is forwarded.
#[derive(Debug, Clone)]
pub struct PushRow {
    /// `id`; on the wire `x-inbox-id`.
    pub id: Uuid,
    /// Name of the source.
    pub source: String,
    /// With `source` the identity of the message.
    pub idempotency_key: String,
    /// Becomes the key.
    pub aggregate_id: Option<String>,
    /// For the topic template of rows without a stored topic.
    pub event_type: Option<String>,
    /// Rendered at receipt; null in older rows.
    pub topic: Option<String>,
    /// JSON text of the stored headers.
    pub headers: String,
    /// Sent on as `X-Correlation-Id`.
    pub correlation_id: Option<String>,
    /// W3C trace context, if stored.
    pub trace_parent: Option<String>,
    /// Crashes counted so far (used for refused forwards, code `forward`).
    pub crashes: i32,
}

/// A push row on its way into the outbox. The payload, aggregate and trace context are copied inside the database.
#[derive(Debug, Clone)]
pub struct Forward {
    /// The inbox row.
    pub inbox_id: Uuid,
    /// Id of the new outbox row.
    pub outbox_id: Uuid,
    /// Its topic.
    pub topic: String,
    /// Its headers, JSON text, with the four relay headers set.
    pub headers: String,
}

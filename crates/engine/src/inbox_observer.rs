//! What happens on the inbox's side, told to whoever counts it (contract 12.2).

use std::time::Duration;

use queuebox_core::{Fault, ports::Scope};

/// Why a message was not stored as it came: the label `reason` of `queuebox_inbox_rejections_total`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Rejection {
    /// No JSON, no key, or a value that cannot be stored.
    ExtractionFailed,
    /// The source's transform.
    TransformFailed,
    /// The database did not take it in time.
    StorageFailed,
}

impl Rejection {
    /// The word of the label.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::ExtractionFailed => "extraction_failed",
            Self::TransformFailed => "transform_failed",
            Self::StorageFailed => "storage_failed",
        }
    }
}

/// Something that is counted.
#[derive(Debug, Clone, PartialEq)]
pub enum InboxEvent<'a> {
    /// A message is stored and pending: `queuebox_inbox_messages_total{status="new"}`.
    Stored,
    /// It was stored before: `queuebox_inbox_messages_total{status="duplicate"}`.
    Duplicate,
    /// Rejected by HTTP, or stored dead from a broker: `queuebox_inbox_rejections_total`.
    Rejected(Rejection),
    /// Dropped by the filter: `queuebox_inbox_filtered_total`.
    Filtered {
        /// Name of the source.
        source: &'a str,
    },
    /// Rows moved into the outbox: `queuebox_inbox_messages_total{status="forwarded"}`.
    Forwarded {
        /// How many.
        rows: usize,
    },
    /// A pass or a row of the relay failed: `queuebox_inbox_relay_errors_total`.
    ForwardFailed {
        /// Why.
        fault: &'a Fault,
    },
    /// Rows that somebody else moved first: `queuebox_claims_lost_total{component="inbox"}`.
    ClaimsLost {
        /// How many.
        rows: usize,
    },
    /// Retention deleted a batch: `queuebox_cleanup_messages_deleted_total`.
    Deleted {
        /// From this table.
        table: Scope,
        /// How many.
        rows: u64,
    },
    /// Retention went through a table: `queuebox_cleanup_duration_seconds`, `queuebox_cleanup_last_run_timestamp`.
    Cleaned {
        /// This table.
        table: Scope,
        /// How long it took.
        took: Duration,
        /// The wall clock's time at the end, microseconds since 1970.
        ended_at_us: i64,
    },
}

/// Counts. Called on hot paths: never blocks.
pub trait InboxObserver: Send + Sync + 'static {
    /// Something happened.
    fn observe(&self, event: &InboxEvent<'_>);
}

/// Counts nothing.
impl InboxObserver for () {
    fn observe(&self, _: &InboxEvent<'_>) {}
}

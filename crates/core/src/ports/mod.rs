//! The ports: what the engine asks of databases, brokers and receivers.
//!
//! All of them are shaped for four databases and four kinds of peer at once: batch-first (one round trip per call), no SQL
//! type in a signature, every lease and due time computed by the database. Each backend runs the same suite of
//! `queuebox-conformance` against its real peer.

pub mod destination;
pub mod inbox;
pub mod lanes;
pub mod ledger;
pub mod outbox;
pub mod schema;
pub mod source;

pub use destination::{Delivery, Destination};
pub use inbox::{Admitted, Inbox};
pub use lanes::{Fence, Lanes, Scope};
pub use ledger::Ledger;
pub use outbox::Outbox;
pub use source::{Admission, Intake, Received, Source};

/// A whole database of QueueBox: both tables, the lanes of its workers, and its finished rows.
pub trait Store: Outbox + Inbox + Lanes + Ledger + schema::Schema {}

impl<T: Outbox + Inbox + Lanes + Ledger + schema::Schema> Store for T {}

//! The nouns and laws of QueueBox: messages, keys, lanes, leases, faults, schedules, and the ports behind which every
//! database, broker and clock of the product lives.
//!
//! This crate does no I/O, knows no async runtime and reads no clock. It depends on nothing of QueueBox; everything else
//! depends on it. Start with [`ports`]: the traits there are the seams of the whole house.
//!
//! ```text
//!              receive                forward                 deliver
//!   Source ──────────────► Inbox ─────────────────► Outbox ──────────────► Destination
//!             (Intake)              (one transaction)         (lanes, settle)
//! ```

pub mod fault;
pub mod headers;
pub mod lane;
pub mod message;
pub mod pattern;
pub mod ports;
pub mod redact;
pub mod retry;
pub mod secret;
pub mod template;

pub use fault::{Class, Fault};
pub use lane::{Lane, LaneSet};
pub use secret::{Secret, SecretError};
pub use uuid::Uuid;

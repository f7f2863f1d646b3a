//! Finished rows in people's hands: find, show, replay, discard (contract 11). The admin API and the command line call the
//! same functions, so that both know the same fields, refuse the same mistakes and move the same rows.
//!
//! Invariants:
//! - Nothing moves or goes away without a filter; a field that is not known is refused, never ignored.
//! - `pending` and `processing` rows and expanded parents are never touched; the database repeats that condition in each
//!   statement, whatever was read before.
//! - A dry run counts with the same walk that moves rows for real.

mod cursor;
mod entry;
mod matching;
mod request;
mod walk;

use queuebox_core::{Fault, redact::redact};

pub(crate) use self::request::unknown_field;
pub use self::{
    cursor::Cursor,
    entry::{Entry, Item, Page, list, show},
    request::{Filter, Request, Verb},
    walk::{Caller, DryRun, Outcome, Progress, discard, replay},
};

/// Rows of a page of a walk, and ids of one statement (contract 11, rule 5).
const BATCH: u32 = 1_000;

/// Why nothing was done, or not everything.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// No filter at all: the whole table would be meant.
    #[error("A {} needs at least one filter.", .0.noun())]
    NoFilter(Verb),
    /// A field is wrong; the text names it.
    #[error("Invalid request: {0}")]
    Invalid(String),
    /// The database failed. Earlier batches are committed.
    #[error("The database failed: {}{}", redact(&fault.detail), so_far(*.done))]
    Database {
        /// Rows that had moved or gone by then.
        done: u64,
        /// Why it failed.
        fault: Fault,
    },
}

fn so_far(done: u64) -> String {
    if done == 0 { String::new() } else { format!(" ({done} rows were done before; the same request goes on)") }
}

impl From<Fault> for RequestError {
    fn from(fault: Fault) -> Self {
        Self::Database { done: 0, fault }
    }
}

#[cfg(test)]
mod tests;

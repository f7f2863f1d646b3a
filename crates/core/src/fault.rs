//! What can go wrong behind a port, reduced to the few classes on which the engine decides.
//!
//! A backend turns each of its errors into a [`Fault`] in one place (`classify` in its crate). What happens to a message is
//! decided by [`Class`] alone (contract 7.5), never by the text.

use std::{borrow::Cow, fmt, time::Duration};

/// What a fault means for the message, or for the port as a whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Class {
    /// It may work next time; nothing was delivered.
    Transient,
    /// The peer asked for a pause. Treated as [`Class::Transient`] with [`Fault::retry_after`].
    Throttled,
    /// This message can never be taken. It is dead at once.
    Refused,
    /// It may have arrived; nobody can know. It is tried again, and a duplicate is possible.
    Ambiguous,
    /// The lease under which we acted is lost. Nothing may be written any more.
    Fenced,
    /// The peer works, but not as the manifest says (missing table, wrong collation, a pooler in the way).
    Misconfigured,
    /// A broker that cannot be reached, refuses the login, or lacks a declared object: the message was never offered to
    /// it. Costs no attempt; the destination is held until its probe succeeds.
    NotConnected,
}

/// A failure of a port: its class, a stable code, and a sentence that says what happened and what would fix it.
///
/// `detail` never holds a secret: connectors redact what peers answer before they build a fault.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// Decides what happens next.
    pub class: Class,
    /// Stable, for tests and metrics, such as `http_status` or `unique_violation`.
    pub code: Cow<'static, str>,
    /// For people.
    pub detail: String,
    /// The pause that the peer asked for, already validated (contract 7.6).
    pub retry_after: Option<Duration>,
    /// Counts as a failure for the breaker of a destination (contract 7.6): lost and refused connections, time-outs,
    /// nacks, 429 and 5xx.
    pub trips_breaker: bool,
}

impl Fault {
    /// A fault of `class` with a stable `code` and a sentence for people.
    pub fn new(class: Class, code: impl Into<Cow<'static, str>>, detail: impl Into<String>) -> Self {
        Self { class, code: code.into(), detail: detail.into(), retry_after: None, trips_breaker: false }
    }

    /// [`Class::Transient`].
    pub fn transient(code: &'static str, detail: impl Into<String>) -> Self {
        Self::new(Class::Transient, code, detail)
    }

    /// [`Class::Refused`].
    pub fn refused(code: &'static str, detail: impl Into<String>) -> Self {
        Self::new(Class::Refused, code, detail)
    }

    /// [`Class::Ambiguous`].
    pub fn ambiguous(code: &'static str, detail: impl Into<String>) -> Self {
        Self::new(Class::Ambiguous, code, detail)
    }

    /// [`Class::Fenced`].
    pub fn fenced(detail: impl Into<String>) -> Self {
        Self::new(Class::Fenced, "fenced", detail)
    }

    /// [`Class::Misconfigured`].
    pub fn misconfigured(code: &'static str, detail: impl Into<String>) -> Self {
        Self::new(Class::Misconfigured, code, detail)
    }

    /// [`Class::NotConnected`].
    pub fn not_connected(code: &'static str, detail: impl Into<String>) -> Self {
        Self::new(Class::NotConnected, code, detail)
    }

    /// The same fault, counted by the breaker.
    #[must_use]
    pub fn tripping(mut self) -> Self {
        self.trips_breaker = true;
        self
    }

    /// The same fault with the pause that the peer asked for.
    #[must_use]
    pub fn after(mut self, pause: Duration) -> Self {
        self.retry_after = Some(pause);
        self
    }

    /// The fault lies in a value or a trigger of one row: the others of its batch may be written without it. A store says so by
    /// [`Class::Refused`], or by the code `raised` for a trigger, which may be taken away again.
    pub fn is_of_one_row(&self) -> bool {
        self.class == Class::Refused || self.code == "raised"
    }

    /// True for [`Class::Fenced`].
    pub fn is_fenced(&self) -> bool {
        self.class == Class::Fenced
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.detail)
    }
}

impl std::error::Error for Fault {}

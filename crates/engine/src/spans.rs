//! The way of a message as spans of a trace: received, forwarded, delivered. The port behind which a tracer lives.
//!
//! Invariants:
//! - Without a tracer nothing of this runs: each place asks an `Option` and goes on.
//! - A span never decides anything; one that cannot be exported is lost and nothing else.
//! - What a span says of a failure is redacted, and it holds neither keys nor payloads.

use std::sync::Arc;

use queuebox_core::{Uuid, redact::redact};

/// A step on the way of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// From the first byte that was read of it to the commit of its inbox row.
    Receive,
    /// From the inbox into the outbox.
    Forward,
    /// One attempt at a destination.
    Deliver,
}

impl Step {
    /// `receive`, `forward`, `deliver`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Receive => "receive",
            Self::Forward => "forward",
            Self::Deliver => "deliver",
        }
    }
}

/// What a span begins with.
#[derive(Debug, Clone, Copy)]
pub struct Begin<'a> {
    /// Which step.
    pub step: Step,
    /// Name of the source, or of the destination.
    pub peer: &'a str,
    /// `http`, `rabbitmq`, `kafka`, `nats`; empty for a forward.
    pub kind: &'a str,
    /// W3C trace context of the step before, if there is one.
    pub parent: Option<&'a str>,
    /// Id of the row: inbox, or outbox.
    pub message_id: Uuid,
    /// Topic, once it is known.
    pub topic: Option<&'a str>,
    /// Failed attempts so far.
    pub attempt: i32,
    /// When the step began, in microseconds since 1970; `None` = now.
    pub began_at_us: Option<i64>,
}

/// Makes spans.
pub trait Spans: Send + Sync + 'static {
    /// Begins one. It ends when it is told to, or dropped.
    fn begin(&self, begin: Begin<'_>) -> Box<dyn Span>;
}

/// A step under way.
pub trait Span: Send {
    /// W3C trace context of this step, for the next one.
    fn context(&self) -> String;
    /// The step is over; `failure` says why it did not do what it was for.
    fn end(self: Box<Self>, failure: Option<&str>);
}

/// Where spans go; `None` = nowhere.
pub type Tracer = Option<Arc<dyn Spans>>;

/// Ends a span, if there is one, with what is to be known of the failure.
pub fn end(span: Option<Box<dyn Span>>, failure: Option<&str>) {
    if let Some(span) = span {
        span.end(failure.map(redact).as_deref());
    }
}

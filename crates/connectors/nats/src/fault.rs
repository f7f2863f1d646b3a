//! What can go wrong with NATS, and what it means for a message. The table is in this folder's README.

use std::time::Duration;

use queuebox_core::{Class, Fault, redact::redact};

/// Every failure of this connector. Texts name the server and the object, never a credential.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A referenced secret gives no value.
    #[error("{field}: {reason}")]
    Secret {
        /// The field that refers to it.
        field: &'static str,
        /// The sentence of the reference.
        reason: String,
    },
    /// `servers` cannot be used. Its text is left out: somebody may have put a password there.
    #[error("servers: {0}")]
    Servers(String),
    /// The `tls` block cannot be used.
    #[error("tls.{field}: {reason}")]
    Tls {
        /// The field in question.
        field: &'static str,
        /// What is wrong with it.
        reason: String,
    },
    /// No connection.
    #[error("NATS at {peer} cannot be reached: {reason}")]
    Unreachable {
        /// Host and port, of the last server tried.
        peer: String,
        /// What the system or the server said.
        reason: String,
    },
    /// The server refuses the login.
    #[error("NATS at {peer} refuses the login of {user}: {reason}")]
    Login {
        /// Host and port.
        peer: String,
        /// Who logs in.
        user: String,
        /// What the server said.
        reason: String,
    },
    /// The stream of a source is missing, or has no durable that can be used.
    #[error("stream \"{stream}\", durable \"{durable}\": {reason}")]
    Consumer {
        /// Name of the stream.
        stream: String,
        /// Name of the durable.
        durable: String,
        /// What happened.
        reason: String,
    },
    /// The template gave no subject.
    #[error("the subject of this message is empty")]
    EmptySubject,
    /// NATS cannot carry this value.
    #[error("NATS cannot carry {what}: {reason}")]
    Uncarriable {
        /// Such as `the subject`.
        what: String,
        /// Why.
        reason: String,
    },
    /// The message is larger than somebody takes.
    #[error("the message has {bytes} bytes ({header_bytes} of them headers), {limit}")]
    TooLarge {
        /// Payload and headers as written.
        bytes: usize,
        /// Headers as written.
        header_bytes: usize,
        /// Whose limit, and how much it is where that is known.
        limit: String,
    },
    /// No stream has this subject.
    #[error("no stream takes subject \"{subject}\" (or JetStream is off for this account)")]
    NoStream {
        /// Where it was sent.
        subject: String,
    },
    /// The user may not publish there.
    #[error("publishing to subject \"{subject}\" is forbidden: {reason}")]
    Forbidden {
        /// Where it was sent.
        subject: String,
        /// What the server said.
        reason: String,
    },
    /// The stream refused the message.
    #[error("the stream of subject \"{subject}\" refused the message: {reason}")]
    Nacked {
        /// Where it was sent.
        subject: String,
        /// What the server said.
        reason: String,
    },
    /// The connection ended before the acknowledgement.
    #[error("the message was sent to subject \"{subject}\", but not acknowledged: {reason}")]
    Lost {
        /// Where it was sent.
        subject: String,
        /// What happened.
        reason: String,
    },
    /// No acknowledgement in time.
    #[error("the message was sent to subject \"{subject}\", but not acknowledged within {} ms", .after.as_millis())]
    NoAck {
        /// Where it was sent.
        subject: String,
        /// The time that the message had.
        after: Duration,
    },
    /// The connection ended before the message was handed to it, or the destination is closed.
    #[error("not sent: {0}")]
    NotSent(String),
}

/// What an error means for the message (contract 7.5). Only an error that is certain to come before the first byte of the
/// message is [`Class::NotConnected`].
pub fn classify(error: &Error) -> Fault {
    let (class, code, trips) = match error {
        Error::Secret { .. } => (Class::NotConnected, "secret", false),
        Error::Servers(_) => (Class::NotConnected, "servers", false),
        Error::Tls { .. } => (Class::NotConnected, "tls", false),
        Error::Unreachable { .. } => (Class::NotConnected, "unreachable", false),
        Error::Login { .. } => (Class::NotConnected, "login", false),
        Error::Consumer { .. } => (Class::NotConnected, "consumer", false),
        Error::NotSent(_) => (Class::NotConnected, "not_sent", false),
        Error::EmptySubject => (Class::Transient, "empty_address", false),
        Error::NoStream { .. } => (Class::Transient, "no_stream", false),
        Error::Forbidden { .. } => (Class::Transient, "forbidden", false),
        Error::Nacked { .. } => (Class::Transient, "nack", true),
        Error::Uncarriable { .. } => (Class::Refused, "uncarriable", false),
        Error::TooLarge { .. } => (Class::Refused, "too_large", false),
        Error::Lost { .. } => (Class::Ambiguous, "connection_lost", true),
        Error::NoAck { .. } => (Class::Ambiguous, "timeout", true),
    };
    let fault = Fault::new(class, code, redact(&error.to_string()));
    if trips { fault.tripping() } else { fault }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_of_the_readme_is_what_classify_does() {
        let s = || "s".to_owned();
        let rows = [
            (Error::Secret { field: "passwordFrom", reason: s() }, Class::NotConnected, "secret", false),
            (Error::Servers(s()), Class::NotConnected, "servers", false),
            (Error::Tls { field: "caFrom", reason: s() }, Class::NotConnected, "tls", false),
            (Error::Unreachable { peer: s(), reason: s() }, Class::NotConnected, "unreachable", false),
            (Error::Login { peer: s(), user: s(), reason: s() }, Class::NotConnected, "login", false),
            (Error::Consumer { stream: s(), durable: s(), reason: s() }, Class::NotConnected, "consumer", false),
            (Error::NotSent(s()), Class::NotConnected, "not_sent", false),
            (Error::EmptySubject, Class::Transient, "empty_address", false),
            (Error::NoStream { subject: s() }, Class::Transient, "no_stream", false),
            (Error::Forbidden { subject: s(), reason: s() }, Class::Transient, "forbidden", false),
            (Error::Nacked { subject: s(), reason: s() }, Class::Transient, "nack", true),
            (Error::Uncarriable { what: s(), reason: s() }, Class::Refused, "uncarriable", false),
            (Error::TooLarge { bytes: 2, header_bytes: 1, limit: s() }, Class::Refused, "too_large", false),
            (Error::Lost { subject: s(), reason: s() }, Class::Ambiguous, "connection_lost", true),
            (Error::NoAck { subject: s(), after: Duration::from_secs(30) }, Class::Ambiguous, "timeout", true),
        ];
        let readme = include_str!("../README.md");
        for (error, class, code, trips) in rows {
            let fault = classify(&error);
            assert_eq!((fault.class, fault.code.as_ref(), fault.trips_breaker), (class, code, trips), "{error:?}");
            let row = format!("| `{code}` | {class:?} | {} |", if trips { "yes" } else { "no" });
            assert!(readme.contains(&row), "the README lacks: {row}");
        }
    }
}

//! What can go wrong with RabbitMQ, and what it means for a message. The table is in this folder's README.

use std::time::Duration;

use queuebox_core::{Class, Fault, redact::redact};

/// Every failure of this connector. Texts name the host and the object, never a credential.
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
    /// The URL cannot be used. The URL itself is left out: it may hold a password.
    #[error("the RabbitMQ URL cannot be used: {0}")]
    Url(String),
    /// The `tls` block cannot be used.
    #[error("tls.{field}: {reason}")]
    Tls {
        /// The field in question.
        field: &'static str,
        /// What is wrong with it.
        reason: String,
    },
    /// No connection, and in which phase it failed.
    #[error("RabbitMQ at {peer} cannot be reached, while {phase}: {reason}")]
    Unreachable {
        /// Host and port.
        peer: String,
        /// What was going on.
        phase: &'static str,
        /// What the system or the broker said.
        reason: String,
    },
    /// Refused login, missing virtual host, no permission on it.
    #[error("RabbitMQ at {peer} refuses user \"{user}\" on virtual host \"{vhost}\": {reason}")]
    Login {
        /// Host and port.
        peer: String,
        /// Who logs in.
        user: String,
        /// Where.
        vhost: String,
        /// What the broker said.
        reason: String,
    },
    /// The broker has stopped taking messages from publishers (memory or disk alarm).
    #[error("RabbitMQ at {peer} has blocked publishers (a memory or disk alarm); nothing was sent")]
    Blocked {
        /// Host and port.
        peer: String,
    },
    /// The exchange named by the manifest is missing or of another kind.
    #[error("exchange \"{exchange}\": {reason}")]
    Exchange {
        /// Its name.
        exchange: String,
        /// What the broker said.
        reason: String,
        /// The name is fixed in the manifest, so every message needs it.
        declared: bool,
    },
    /// The queue named by the manifest is missing, in exclusive use, or gone.
    #[error("queue \"{queue}\": {reason}")]
    Queue {
        /// Its name.
        queue: String,
        /// What happened.
        reason: String,
    },
    /// The template gave no exchange.
    #[error("the exchange of this message is empty")]
    EmptyExchange,
    /// AMQP has no room for this value.
    #[error("{what} has {bytes} bytes, AMQP carries at most {limit}")]
    TooLong {
        /// Such as `the routing key`.
        what: String,
        /// Its size.
        bytes: usize,
        /// The bound.
        limit: usize,
    },
    /// The broker takes no message of this size.
    #[error("the payload has {bytes} bytes, RabbitMQ at this installation takes at most {limit} (max_message_size)")]
    TooLarge {
        /// Size of the payload.
        bytes: usize,
        /// As the broker said.
        limit: usize,
    },
    /// The broker returned the message.
    #[error(
        "unroutable, returned by RabbitMQ with {code} {text}: no queue is bound to exchange \"{exchange}\" for routing key \"{routing_key}\""
    )]
    Returned {
        /// Reply code, 312 for no route.
        code: u16,
        /// Reply text.
        text: String,
        /// Where it was sent.
        exchange: String,
        /// With which key.
        routing_key: String,
    },
    /// The broker could not take responsibility.
    #[error("RabbitMQ could not store the message in a queue of exchange \"{exchange}\" (nack)")]
    Nacked {
        /// Where it was sent.
        exchange: String,
    },
    /// Channel or connection ended before the confirm.
    #[error("the message was sent to exchange \"{exchange}\", but not confirmed: {reason}")]
    Lost {
        /// Where it was sent.
        exchange: String,
        /// What ended the channel.
        reason: String,
    },
    /// No confirm in time.
    #[error("the message was sent to exchange \"{exchange}\", but not confirmed within {} ms", .after.as_millis())]
    NoConfirm {
        /// Where it was sent.
        exchange: String,
        /// The time that the message had.
        after: Duration,
    },
    /// The channel ended before the message was handed to it, or the destination is closed.
    #[error("not sent: {0}")]
    NotSent(String),
}

/// What an error means for the message (contract 7.5). Only an error that is certain to come before the first byte of the
/// message is [`Class::NotConnected`].
pub fn classify(error: &Error) -> Fault {
    let (class, code, trips) = match error {
        Error::Secret { .. } => (Class::NotConnected, "secret", false),
        Error::Url(_) => (Class::NotConnected, "url", false),
        Error::Tls { .. } => (Class::NotConnected, "tls", false),
        Error::Unreachable { .. } => (Class::NotConnected, "unreachable", false),
        Error::Login { .. } => (Class::NotConnected, "login", false),
        Error::Blocked { .. } => (Class::NotConnected, "blocked", false),
        Error::Exchange { declared: true, .. } => (Class::NotConnected, "exchange", false),
        Error::Exchange { declared: false, .. } => (Class::Transient, "exchange", false),
        Error::Queue { .. } => (Class::NotConnected, "queue", false),
        Error::NotSent(_) => (Class::NotConnected, "not_sent", false),
        Error::EmptyExchange => (Class::Transient, "empty_address", false),
        Error::Returned { .. } => (Class::Transient, "unroutable", false),
        Error::Nacked { .. } => (Class::Transient, "nack", true),
        Error::TooLong { .. } => (Class::Refused, "too_long", false),
        Error::TooLarge { .. } => (Class::Refused, "too_large", false),
        Error::Lost { .. } => (Class::Ambiguous, "connection_lost", true),
        Error::NoConfirm { .. } => (Class::Ambiguous, "timeout", true),
    };
    let fault = Fault::new(class, code, redact(&error.to_string()));
    if trips { fault.tripping() } else { fault }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_of_the_readme_is_what_classify_does() {
        let text = |text: &str| text.to_owned();
        let rows: Vec<(Error, Class, &str, bool)> = vec![
            (Error::Secret { field: "passwordFrom", reason: text("r") }, Class::NotConnected, "secret", false),
            (Error::Url(text("r")), Class::NotConnected, "url", false),
            (Error::Tls { field: "caFrom", reason: text("r") }, Class::NotConnected, "tls", false),
            (
                Error::Unreachable { peer: text("h:1"), phase: "connecting", reason: text("r") },
                Class::NotConnected,
                "unreachable",
                false,
            ),
            (
                Error::Login { peer: text("h:1"), user: text("u"), vhost: text("/"), reason: text("r") },
                Class::NotConnected,
                "login",
                false,
            ),
            (Error::Blocked { peer: text("h:1") }, Class::NotConnected, "blocked", false),
            (
                Error::Exchange { exchange: text("e"), reason: text("r"), declared: true },
                Class::NotConnected,
                "exchange",
                false,
            ),
            (
                Error::Exchange { exchange: text("e"), reason: text("r"), declared: false },
                Class::Transient,
                "exchange",
                false,
            ),
            (Error::Queue { queue: text("q"), reason: text("r") }, Class::NotConnected, "queue", false),
            (Error::NotSent(text("r")), Class::NotConnected, "not_sent", false),
            (Error::EmptyExchange, Class::Transient, "empty_address", false),
            (
                Error::Returned { code: 312, text: text("NO_ROUTE"), exchange: text("e"), routing_key: text("k") },
                Class::Transient,
                "unroutable",
                false,
            ),
            (Error::Nacked { exchange: text("e") }, Class::Transient, "nack", true),
            (
                Error::TooLong { what: text("the routing key"), bytes: 256, limit: 255 },
                Class::Refused,
                "too_long",
                false,
            ),
            (Error::TooLarge { bytes: 2, limit: 1 }, Class::Refused, "too_large", false),
            (Error::Lost { exchange: text("e"), reason: text("r") }, Class::Ambiguous, "connection_lost", true),
            (
                Error::NoConfirm { exchange: text("e"), after: Duration::from_secs(30) },
                Class::Ambiguous,
                "timeout",
                true,
            ),
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

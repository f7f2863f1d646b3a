//! What can go wrong with Kafka, and what each of it means for the message (contract 7.5).
//!
//! [`KafkaFault`] is what happened, [`classify`] is the only place that decides what it means. Its table stands in the
//! README of this folder.

use queuebox_core::{Class, Fault, redact::redact};
use rdkafka::{error::KafkaError, types::RDKafkaErrorCode};

/// A failure of the Kafka connector.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KafkaFault {
    /// The address gave nothing.
    #[error("the topic is empty: the destination's address gives no text for this row")]
    EmptyTopic,
    /// Kafka topics have 1 to 249 characters out of `[a-zA-Z0-9._-]`.
    #[error("{topic:?} is not a name for a Kafka topic: 1 to 249 letters, digits, '.', '_' and '-'")]
    InvalidTopic {
        /// As rendered.
        topic: String,
    },
    /// The message alone is larger than the topic takes.
    #[error("the message of {size} bytes is larger than topic {topic:?} takes{}", limit_text(*.limit))]
    TooLarge {
        /// Rendered topic.
        topic: String,
        /// Key, body and headers, in bytes.
        size: u64,
        /// `max.message.bytes` of the topic, where the cluster tells it.
        limit: Option<u64>,
    },
    /// No such topic.
    #[error("topic {topic:?} does not exist on {servers}; create it")]
    TopicMissing {
        /// Rendered topic.
        topic: String,
        /// Bootstrap servers.
        servers: String,
        /// The manifest names it without a placeholder.
        declared: bool,
    },
    /// The login may not write to the topic.
    #[error("the login may not write to topic {topic:?} on {servers}; allow it")]
    NotAuthorized {
        /// Rendered topic.
        topic: String,
        /// Bootstrap servers.
        servers: String,
        /// The manifest names it without a placeholder.
        declared: bool,
    },
    /// The cluster refuses the login.
    #[error("{servers} refuses the login: {reason}")]
    Login {
        /// Bootstrap servers.
        servers: String,
        /// As the client library says it.
        reason: String,
    },
    /// No connection, and so nothing was offered.
    #[error("{servers} cannot be reached: {reason}")]
    Unreachable {
        /// Bootstrap servers.
        servers: String,
        /// As the client library says it.
        reason: String,
    },
    /// The client cannot be made.
    #[error("the Kafka client for {servers} cannot be made: {reason}")]
    Client {
        /// Bootstrap servers.
        servers: String,
        /// The property and what is wrong with it, without its value.
        reason: String,
    },
    /// The client's own queue has no room, so the message was not taken.
    #[error("the client's queue for {servers} is full")]
    QueueFull {
        /// Bootstrap servers.
        servers: String,
    },
    /// The broker said no, nothing was stored, and it may say yes later.
    #[error("the broker did not store the message in topic {topic:?}: {reason}")]
    Rejected {
        /// Rendered topic.
        topic: String,
        /// As the client library says it.
        reason: String,
    },
    /// The broker will never store this message.
    #[error("the broker can not store this message in topic {topic:?}: {reason}")]
    Unstorable {
        /// Rendered topic.
        topic: String,
        /// As the client library says it.
        reason: String,
    },
    /// No answer in time, after the message was handed over.
    #[error("no acknowledgement for topic {topic:?} within {waited_ms} ms")]
    TimedOut {
        /// Rendered topic.
        topic: String,
        /// The budget that was used up.
        waited_ms: u64,
    },
    /// The connection or the client ended after the message was handed over.
    #[error("no acknowledgement for topic {topic:?}: {reason}")]
    Lost {
        /// Rendered topic.
        topic: String,
        /// As the client library says it.
        reason: String,
    },
    /// The destination was closed.
    #[error("the destination is closed")]
    Closed,
}

fn limit_text(limit: Option<u64>) -> String {
    limit.map_or_else(String::new, |limit| format!(" (max.message.bytes = {limit})"))
}

/// The one decision table.
pub fn classify(fault: &KafkaFault) -> Fault {
    use KafkaFault as F;
    let (class, code) = match fault {
        F::EmptyTopic => (Class::Transient, "empty_address"),
        F::InvalidTopic { .. } => (Class::Transient, "invalid_topic"),
        F::TooLarge { .. } => (Class::Refused, "too_large"),
        F::TopicMissing { declared: true, .. } => (Class::NotConnected, "topic_missing"),
        F::TopicMissing { declared: false, .. } => (Class::Transient, "topic_missing"),
        F::NotAuthorized { declared: true, .. } => (Class::NotConnected, "not_authorized"),
        F::NotAuthorized { declared: false, .. } => (Class::Transient, "not_authorized"),
        F::Login { .. } => (Class::NotConnected, "login_refused"),
        F::Unreachable { .. } => (Class::NotConnected, "unreachable"),
        F::Client { .. } => (Class::NotConnected, "client_config"),
        F::QueueFull { .. } => (Class::NotConnected, "queue_full"),
        F::Rejected { .. } => (Class::Transient, "rejected"),
        F::Unstorable { .. } => (Class::Refused, "unstorable"),
        F::TimedOut { .. } => (Class::Ambiguous, "timeout"),
        F::Lost { .. } => (Class::Ambiguous, "connection_lost"),
        F::Closed => (Class::NotConnected, "closed"),
    };
    let mut answer = Fault::new(class, code, redact(&fault.to_string()));
    answer.trips_breaker = matches!(fault, F::Rejected { .. } | F::TimedOut { .. } | F::Lost { .. });
    answer
}

/// How a message that was handed to the client failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Undelivered {
    /// What the client library reports.
    pub code: RDKafkaErrorCode,
    /// A partition was chosen; before that nothing can have been sent.
    pub assigned: bool,
    /// We stopped waiting; the library still holds the record.
    pub given_up: bool,
}

impl Undelivered {
    /// Other records of the same batch may be the cause, so it is worth sending the message alone.
    pub(crate) fn blames_the_batch(self) -> bool {
        matches!(
            self.code,
            RDKafkaErrorCode::MessageSizeTooLarge
                | RDKafkaErrorCode::MessageBatchTooLarge
                | RDKafkaErrorCode::InvalidDifferentRecord
                | RDKafkaErrorCode::InvalidRecord
        )
    }

    /// The broker may be gone without having said so.
    pub(crate) fn doubts_the_connection(self) -> bool {
        matches!(
            self.code,
            RDKafkaErrorCode::MessageTimedOut
                | RDKafkaErrorCode::BrokerTransportFailure
                | RDKafkaErrorCode::OperationTimedOut
                | RDKafkaErrorCode::Authentication
                | RDKafkaErrorCode::AllBrokersDown
        )
    }
}

/// What the broker, or the client on its behalf, said about one record.
pub(crate) fn from_delivery(failed: Undelivered, about: &About<'_>) -> KafkaFault {
    use RDKafkaErrorCode as C;
    let topic = about.topic.to_owned();
    let servers = about.servers.to_owned();
    let declared = about.declared;
    let reason = failed.code.to_string();
    match failed.code {
        C::MessageSizeTooLarge | C::MessageBatchTooLarge => {
            KafkaFault::TooLarge { topic, size: about.size, limit: None }
        }
        C::UnknownTopic | C::UnknownTopicOrPartition | C::UnknownPartition | C::UnknownTopicId => {
            KafkaFault::TopicMissing { topic, servers, declared }
        }
        C::InvalidTopic => KafkaFault::InvalidTopic { topic },
        C::TopicAuthorizationFailed | C::ClusterAuthorizationFailed => {
            KafkaFault::NotAuthorized { topic, servers, declared }
        }
        C::InvalidRecord | C::PolicyViolation | C::InvalidTimestamp | C::UnsupportedForMessageFormat => {
            KafkaFault::Unstorable { topic, reason }
        }
        C::QueueFull => KafkaFault::QueueFull { servers },
        C::Authentication | C::SaslAuthenticationFailed if !failed.assigned => KafkaFault::Login { servers, reason },
        C::MessageTimedOut if !failed.assigned => {
            KafkaFault::Unreachable { servers, reason: "no answer about the topic's partitions in time".into() }
        }
        C::MessageTimedOut => KafkaFault::TimedOut { topic, waited_ms: about.budget_ms },
        // Checked before the append, so that nothing is stored.
        C::NotEnoughReplicas | C::InvalidDifferentRecord | C::ThrottlingQuotaExceeded | C::InvalidRequiredAcks => {
            KafkaFault::Rejected { topic, reason }
        }
        _ => KafkaFault::Lost { topic, reason },
    }
}

/// What a fault's text is about.
#[derive(Debug, Clone, Copy)]
pub(crate) struct About<'a> {
    pub topic: &'a str,
    pub servers: &'a str,
    pub declared: bool,
    pub size: u64,
    pub budget_ms: u64,
}

/// The reason without the value of a property, which may be a secret.
pub(crate) fn reason_of(error: &KafkaError) -> String {
    match error {
        KafkaError::ClientConfig(_, description, property, _) => {
            // The library repeats a refused value in its description.
            let description = description.split(" for configuration").next().unwrap_or_default();
            let secret = ["password", "pem", "key", "secret", "token"].iter().any(|word| property.contains(word));
            if secret { format!("{property} is not usable") } else { format!("{property}: {description}") }
        }
        KafkaError::ClientCreation(description) => description.clone(),
        other => other.rdkafka_error_code().map_or_else(|| other.to_string(), |code| code.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn about() -> About<'static> {
        About { topic: "orders", servers: "k:9092", declared: true, size: 30_000, budget_ms: 30_000 }
    }

    fn class_of(code: RDKafkaErrorCode, assigned: bool, declared: bool) -> Class {
        classify(&from_delivery(Undelivered { code, assigned, given_up: false }, &About { declared, ..about() })).class
    }

    #[test]
    fn the_table_of_the_readme_holds() {
        use RDKafkaErrorCode as C;
        let sent = true;
        for (code, assigned, class) in [
            (C::MessageSizeTooLarge, sent, Class::Refused),
            (C::InvalidRecord, sent, Class::Refused),
            (C::UnknownTopicOrPartition, sent, Class::NotConnected),
            (C::TopicAuthorizationFailed, sent, Class::NotConnected),
            (C::InvalidTopic, !sent, Class::Transient),
            (C::NotEnoughReplicas, sent, Class::Transient),
            (C::NotEnoughReplicasAfterAppend, sent, Class::Ambiguous),
            (C::MessageTimedOut, !sent, Class::NotConnected),
            (C::MessageTimedOut, sent, Class::Ambiguous),
            (C::Authentication, !sent, Class::NotConnected),
            (C::BrokerTransportFailure, sent, Class::Ambiguous),
            (C::PurgeQueue, sent, Class::Ambiguous),
            (C::Fatal, sent, Class::Ambiguous),
            (C::QueueFull, !sent, Class::NotConnected),
        ] {
            assert_eq!(class_of(code, assigned, true), class, "{code:?}");
        }
    }

    #[test]
    fn a_missing_topic_holds_the_destination_only_when_the_manifest_names_it() {
        assert_eq!(class_of(RDKafkaErrorCode::UnknownTopic, false, true), Class::NotConnected);
        assert_eq!(class_of(RDKafkaErrorCode::UnknownTopic, false, false), Class::Transient);
    }

    #[test]
    fn a_refusal_for_size_names_size_and_limit() {
        let fault = classify(&KafkaFault::TooLarge { topic: "orders".into(), size: 30_000, limit: Some(20_000) });
        assert!(fault.detail.contains("30000") && fault.detail.contains("20000"), "{fault}");
        assert!(!fault.trips_breaker);
    }

    #[test]
    fn a_refused_property_never_shows_its_value() {
        use rdkafka::types::RDKafkaConfRes;
        let error = KafkaError::ClientConfig(
            RDKafkaConfRes::RD_KAFKA_CONF_INVALID,
            "Invalid value \"canary-7731\" for configuration property \"sasl.password\"".into(),
            "sasl.password".into(),
            "canary-7731".into(),
        );
        assert!(!reason_of(&error).contains("canary"), "{}", reason_of(&error));
    }
}

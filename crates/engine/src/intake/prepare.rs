//! From a received message to the row that stands for it.

use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use bytes::Bytes;
use queuebox_core::{
    Fault,
    message::{Consumption, DeadCode, NewInboxRow},
    ports::{Admission, Received, source::Refusal},
    template::{Template, TemplateContext},
};
use serde_json::{Map, Value};

use super::{SourceIntake, config::SourceConfig};
use crate::{
    attributes::{self, Attributes, DIGEST, KEY_CHARACTERS_MAX, Reader, digest, key_problem},
    inbox_observer::{InboxEvent, Rejection},
    json::{self, Unusable},
    transform::{self, Staged},
};

/// What is to be done with a message.
pub(super) enum Prepared {
    /// It leaves no row.
    Answered(Admission),
    /// It is stored, perhaps dead.
    Row(Box<NewInboxRow>),
}

impl SourceIntake {
    /// Steps 6 to 9 of contract 6.1.
    pub(super) async fn prepare(&self, received: Received) -> Prepared {
        let config = self.config();
        if !config.filter.takes(&received.headers) {
            tracing::debug!(source = config.name, "a message was dropped by the filter");
            self.count(&InboxEvent::Filtered { source: &config.name });
            return Prepared::Answered(Admission::Filtered);
        }
        match self.reader.read(config, &received).await {
            Ok(attributes) => self.with_attributes(received, attributes).await,
            Err(problem) => self.unusable(received, &problem),
        }
    }

    async fn with_attributes(&self, received: Received, mut attributes: Attributes) -> Prepared {
        let config = self.config();
        let Some(key) = attributes.idempotency_key.take() else {
            return self.refuse(Refusal::BadAttribute, Rejection::ExtractionFailed, no_key(config));
        };
        let bad_key = first_problem(config, &key, &attributes);
        if let Some(problem) = bad_key {
            if !config.kind.is_broker() {
                return self.refuse(Refusal::BadAttribute, Rejection::ExtractionFailed, problem);
            }
            let key = usable_key(config, key);
            let row = self.row(&received, key, fitting(config, attributes), received.body.clone());
            return dead(row, DeadCode::BadKey, &problem);
        }
        let mut row = self.row(&received, key, attributes, received.body.clone());
        let Some(transform) = &config.transform else { return Prepared::Row(row) };
        match transform.run(received.body.clone(), self.variables(&row, &received)).await {
            Staged::Output(output, error) => {
                if let Some(error) = error.filter(|_| self.warnings.may("transform")) {
                    tracing::warn!(source = config.name, %error, "the transform failed; the original body is stored");
                }
                row.payload = output;
                Prepared::Row(row)
            }
            Staged::Failed(error) | Staged::Dead(error) if !config.kind.is_broker() => {
                self.refuse(Refusal::Transform, Rejection::TransformFailed, error.to_string())
            }
            Staged::Failed(error) | Staged::Dead(error) => dead(row, DeadCode::Rejected, &error.to_string()),
        }
    }

    fn unusable(&self, received: Received, problem: &Unusable) -> Prepared {
        let config = self.config();
        if !config.kind.is_broker() {
            let (kind, reason) = match problem {
                Unusable::NotJson { .. } => (Refusal::NotJson, "Invalid JSON".to_owned()),
                _ => (Refusal::BadAttribute, problem.to_string()),
            };
            return self.refuse(kind, Rejection::ExtractionFailed, reason);
        }
        let mut attributes = Reader::without_body(config, &received);
        let key = attributes.idempotency_key.take().unwrap_or_else(|| digest(&received.body));
        let row = self.row(&received, usable_key(config, key), fitting(config, attributes), wrapped(&received.body));
        dead(row, DeadCode::NotJson, &problem.to_string())
    }

    fn refuse(&self, kind: Refusal, rejection: Rejection, reason: String) -> Prepared {
        self.count(&InboxEvent::Rejected(rejection));
        Prepared::Answered(Admission::Refused { kind, reason })
    }

    fn row(&self, received: &Received, key: String, attributes: Attributes, payload: Bytes) -> Box<NewInboxRow> {
        let config = self.config();
        let ids = &self.parts.ids;
        Box::new(NewInboxRow {
            id: ids.next(),
            source: config.name.clone(),
            idempotency_key: key,
            topic: stored_topic(config, attributes.event_type.as_deref()),
            aggregate_id: attributes.aggregate_id,
            event_type: attributes.event_type,
            payload,
            headers: json::object_of_strings(&attributes::stored_headers(received)),
            correlation_id: Some(attributes::correlation_id(config.kind, received, ids)),
            consumption: config.consumption,
            trace_parent: attributes::trace_parent(received),
            delay_us: i64::try_from(config.initial_delay.as_micros()).unwrap_or(i64::MAX),
            published_at_us: attributes.published_at_us,
            dead: None,
        })
    }

    /// The variables of the source stage (contract 9).
    fn variables(&self, row: &NewInboxRow, received: &Received) -> crate::expression::Variables {
        let headers: Map<String, Value> =
            attributes::stored_headers(received).into_iter().map(|(name, value)| (name, Value::from(value))).collect();
        let event_type = row.event_type.as_deref();
        transform::variables(row.id, event_type.unwrap_or_default(), 0, self.parts.ids.now_us())
            .with("source", row.source.as_str())
            .with("headers", headers)
            .with("idempotencyKey", row.idempotency_key.as_str())
            .with("eventType", event_type.map_or(Value::Null, Value::from))
    }
}

fn dead(mut row: Box<NewInboxRow>, code: DeadCode, reason: &str) -> Prepared {
    row.dead = Some(code.because(reason));
    Prepared::Row(row)
}

/// The dead row for a broker message that the database refused, for whatever it holds. First the body is wrapped up, then the
/// columns are emptied and the key is replaced by its digest. `None`: nothing is left that could be the cause.
pub(super) fn reduced(mut row: NewInboxRow, fault: &Fault) -> Option<NewInboxRow> {
    match row.dead.take() {
        None => {
            row.payload = wrapped(&row.payload);
            row.dead = Some(DeadCode::NotJson.because(&fault.detail));
        }
        Some(error) if row.idempotency_key.starts_with(DIGEST) && error.starts_with(DeadCode::BadKey.as_str()) => {
            return None;
        }
        Some(_) => {
            if !row.idempotency_key.starts_with(DIGEST) {
                row.idempotency_key = digest(row.idempotency_key.as_bytes());
            }
            row.aggregate_id = None;
            row.event_type = None;
            row.topic = None;
            row.correlation_id = None;
            row.trace_parent = None;
            row.dead = Some(DeadCode::BadKey.because(&fault.detail));
        }
    }
    Some(row)
}

fn first_problem(config: &SourceConfig, key: &str, attributes: &Attributes) -> Option<String> {
    let rule = config.limits.keys;
    let other = |name: &str, value: &Option<String>| value.as_deref().and_then(|value| key_problem(name, value, rule));
    key_problem("the idempotency key", key, rule)
        .or_else(|| other("the aggregate id", &attributes.aggregate_id))
        .or_else(|| other("the event type", &attributes.event_type))
}

/// The key itself, or the digest that stands for one that cannot be stored.
fn usable_key(config: &SourceConfig, key: String) -> String {
    match key_problem("", &key, config.limits.keys) {
        None => key,
        Some(_) => digest(key.as_bytes()),
    }
}

/// The same attributes without those that cannot be stored.
fn fitting(config: &SourceConfig, attributes: Attributes) -> Attributes {
    let fits = |value: &String| key_problem("", value, config.limits.keys).is_none();
    Attributes {
        aggregate_id: attributes.aggregate_id.filter(fits),
        event_type: attributes.event_type.filter(fits),
        ..attributes
    }
}

/// The topic as it is stored: `None` for pull rows, and for one that the relay will find fault with (contract 8).
fn stored_topic(config: &SourceConfig, event_type: Option<&str>) -> Option<String> {
    if config.consumption == Consumption::Pull {
        return None;
    }
    let topic = render_topic(&config.topic, &config.name, event_type);
    let fits = !topic.is_empty() && topic.chars().count() <= KEY_CHARACTERS_MAX && !topic.contains('\0');
    fits.then_some(topic)
}

/// A source's template, rendered and trimmed.
pub(crate) fn render_topic(template: &Template, source: &str, event_type: Option<&str>) -> String {
    template.render(&TemplateContext { source, event_type, ..TemplateContext::default() }).trim().to_owned()
}

/// A body that cannot be stored as it is (contract 6.4).
fn wrapped(body: &[u8]) -> Bytes {
    let (name, text) = match std::str::from_utf8(body) {
        Ok(text) if !text.contains('\0') => ("raw", text.to_owned()),
        _ => ("rawBase64", BASE64.encode(body)),
    };
    Bytes::from(json::object_of_strings(&[(name.to_owned(), text)]))
}

/// Names the places where a key was looked for.
fn no_key(config: &SourceConfig) -> String {
    let origins = &config.idempotency_key;
    let mut places = Vec::new();
    places.extend(origins.header.iter().map(|name| format!("header {name}")));
    places.extend(origins.expression.iter().map(|_| "idempotencyKeyExpression".to_owned()));
    places.extend(origins.paths.iter().map(|path| format!("path {}", path.as_str())));
    format!("No idempotency key: nothing found in {}", places.join(", "))
}

//! What is read out of a received message: keys, event type, correlation, trace context, publish time, stored headers
//! (contract 6.2, 6.3, 6.5).
//!
//! Invariants:
//! - The first origin that gives a value wins, in the order of the table for the kind of source.
//! - Values come from the original body and headers, never from what a transform made of them.
//! - Nothing is cut or changed to fit: a value that does not fit is an error of the message.

use std::{
    collections::HashMap,
    fmt::Write as _,
    ops::Range,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use bytes::Bytes;
use queuebox_core::{headers, ports::Received};
use sha2::{Digest as _, Sha256};
use tokio::time::Instant;

use crate::{
    expression::{Bounds, Expression},
    ids::Ids,
    intake::config::{KeyFallback, KeyRule, Origins, SourceConfig, SourceKind},
    json::{self, Path, Unusable},
    publish_time,
};

/// Longest key, aggregate, event type and topic, in characters.
pub const KEY_CHARACTERS_MAX: usize = 255;

/// Longest correlation id, in characters.
const CORRELATION_CHARACTERS_MAX: usize = 128;

/// What the digest of something begins with when it stands for a key.
pub(crate) const DIGEST: &str = "sha256:";

/// One kind of warning of one source comes at most this often.
const WARNING_EVERY: Duration = Duration::from_secs(60);

/// The values of one message, not yet checked for their length.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Attributes {
    /// `None`: HTTP without a key.
    pub(crate) idempotency_key: Option<String>,
    pub(crate) aggregate_id: Option<String>,
    pub(crate) event_type: Option<String>,
    pub(crate) published_at_us: Option<i64>,
}

/// Reads the attributes of one source's messages.
#[derive(Debug)]
pub(crate) struct Reader {
    /// The paths of all attributes, so that one pass over the body finds them all.
    paths: Vec<Path>,
    key_paths: Range<usize>,
    aggregate_paths: Range<usize>,
    event_paths: Range<usize>,
    time_paths: Range<usize>,
    warnings: Warnings,
}

impl Reader {
    pub(crate) fn new(config: &SourceConfig) -> Self {
        let mut paths = Vec::new();
        let mut add = |more: &[Path]| {
            let start = paths.len();
            paths.extend_from_slice(more);
            start..paths.len()
        };
        let key_paths = add(&config.idempotency_key.paths);
        let aggregate_paths = add(&config.aggregate_id.paths);
        let event_paths = add(&config.event_type.paths);
        let time_paths = add(config.published_at.as_ref().map_or(&[], |time| &time.paths));
        Self { paths, key_paths, aggregate_paths, event_paths, time_paths, warnings: Warnings::default() }
    }

    /// Checks the body and reads the attributes from it and from the headers.
    ///
    /// # Errors
    /// The body cannot be used.
    pub(crate) async fn read(&self, config: &SourceConfig, received: &Received) -> Result<Attributes, Unusable> {
        let mut found = json::values_at(&received.body, config.limits.json, &self.paths)?;
        let mut first = |range: &Range<usize>| found[range.clone()].iter_mut().find_map(Option::take);
        let (key, aggregate) = (first(&self.key_paths), first(&self.aggregate_paths));
        let (event, time) = (first(&self.event_paths), first(&self.time_paths));
        let header = |origins: &Origins| header(received, origins);
        let header_first = !config.kind.is_broker();

        let idempotency_key = match header(&config.idempotency_key) {
            Some(value) => Some(value),
            None => {
                self.expression_or(config, received, "idempotencyKeyExpression", &config.idempotency_key, key).await
            }
        };
        let idempotency_key = idempotency_key.or_else(|| fallback_key(config, received));

        let aggregate_id = match header(&config.aggregate_id).filter(|_| header_first) {
            Some(value) => Some(value),
            None => {
                self.expression_or(config, received, "aggregateIdExpression", &config.aggregate_id, aggregate).await
            }
        };
        let aggregate_id =
            aggregate_id.or_else(|| header(&config.aggregate_id)).or_else(|| record_key(config, received));

        let event_type = match header(&config.event_type).filter(|_| header_first) {
            Some(value) => Some(value),
            None => self.expression_or(config, received, "eventTypeExpression", &config.event_type, event).await,
        };
        let event_type = event_type.or_else(|| header(&config.event_type));

        let published_at_us = self.published_at_us(config, received, time);
        Ok(Attributes { idempotency_key, aggregate_id, event_type, published_at_us })
    }

    /// The attributes of a broker message whose body cannot be used: headers and the broker's own values only.
    pub(crate) fn without_body(config: &SourceConfig, received: &Received) -> Attributes {
        Attributes {
            idempotency_key: header(received, &config.idempotency_key).or_else(|| fallback_key(config, received)),
            aggregate_id: header(received, &config.aggregate_id).or_else(|| record_key(config, received)),
            event_type: header(received, &config.event_type),
            published_at_us: None,
        }
    }

    async fn expression_or(
        &self,
        config: &SourceConfig,
        received: &Received,
        field: &'static str,
        origins: &Origins,
        at_path: Option<String>,
    ) -> Option<String> {
        let by_expression = match &origins.expression {
            Some(expression) => self.by_expression(config, &received.body, field, expression).await,
            None => None,
        };
        by_expression.or(at_path)
    }

    /// An expression that fails gives no value and a warning.
    async fn by_expression(
        &self,
        config: &SourceConfig,
        body: &Bytes,
        field: &'static str,
        expression: &Expression,
    ) -> Option<String> {
        let bounds = Bounds { json: config.limits.json, ..config.expression_bounds };
        match expression.attribute(body.clone(), bounds).await {
            Ok(value) => value,
            Err(error) => {
                if self.warnings.may(field) {
                    tracing::warn!(source = config.name, field, %error, "an expression failed; the next origin is used");
                }
                None
            }
        }
    }

    /// Header → path → the broker's own time; `None` = the receipt.
    fn published_at_us(&self, config: &SourceConfig, received: &Received, at_path: Option<String>) -> Option<i64> {
        let origins = config.published_at.as_ref()?;
        let given = origins.header.as_deref().and_then(|name| headers::last(&received.headers, name));
        let Some(text) = given.map(str::to_owned).or(at_path) else { return received.published_at_us };
        let time = publish_time::parse(&text);
        if time.is_none() && self.warnings.may("scheduledAt") {
            let text: String = text.chars().take(60).collect();
            tracing::warn!(source = config.name, text, "not a publish time; the time of receipt is used");
        }
        time
    }
}

fn header(received: &Received, origins: &Origins) -> Option<String> {
    origins.header.as_deref().and_then(|name| headers::last(&received.headers, name)).map(str::to_owned)
}

fn not_blank(text: &Option<String>) -> Option<String> {
    text.clone().filter(|text| !text.trim().is_empty())
}

fn record_key(config: &SourceConfig, received: &Received) -> Option<String> {
    if config.kind == SourceKind::Kafka { not_blank(&received.record_key) } else { None }
}

/// The broker's id, Kafka's record key where it is asked for, position or digest. HTTP has none of them.
fn fallback_key(config: &SourceConfig, received: &Received) -> Option<String> {
    if !config.kind.is_broker() {
        return None;
    }
    not_blank(&received.message_id)
        .or_else(|| record_key(config, received).filter(|_| config.idempotency_from_record_key))
        .or_else(|| received.position.clone().filter(|_| config.key_fallback == KeyFallback::Position))
        .or_else(|| Some(digest(&received.body)))
}

/// `sha256:` and the lower-case hex digest.
pub(crate) fn digest(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().fold(String::from(DIGEST), |mut text, byte| {
        // Writing to a string never fails.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Why `value` cannot be a key on this database; `name` begins the sentence.
pub(crate) fn key_problem(name: &str, value: &str, rule: KeyRule) -> Option<String> {
    let (length, unit) = match rule {
        KeyRule::Characters => (value.chars().count(), "characters"),
        KeyRule::Utf16NoTrailingBlank => (value.encode_utf16().count(), "UTF-16 units"),
    };
    if length > KEY_CHARACTERS_MAX {
        return Some(format!("{name} has {length} {unit}; at most {KEY_CHARACTERS_MAX} can be stored"));
    }
    if value.contains('\0') {
        return Some(format!("{name} holds the character U+0000, which cannot be stored"));
    }
    if rule == KeyRule::Utf16NoTrailingBlank && value.ends_with(' ') {
        return Some(format!("{name} ends in a blank, which this database does not tell from a key without it"));
    }
    None
}

/// Given or new (contract 6.2).
pub(crate) fn correlation_id(kind: SourceKind, received: &Received, ids: &Ids) -> String {
    let header = || headers::last(&received.headers, "X-Correlation-Id").and_then(clean_correlation_id);
    let given = || received.correlation_id.as_deref().and_then(clean_correlation_id);
    // HTTP has answered with it already.
    let found = if kind.is_broker() { header().or_else(given) } else { given().or_else(header) };
    found.unwrap_or_else(|| ids.next().to_string())
}

fn clean_correlation_id(text: &str) -> Option<String> {
    let text: String = text.trim().chars().filter(|c| !c.is_control()).take(CORRELATION_CHARACTERS_MAX).collect();
    Some(text).filter(|text| !text.trim().is_empty())
}

/// The trace context, if it has the form of W3C's: anything else is of no use to a tracer, and the column is narrow.
pub(crate) fn trace_parent(received: &Received) -> Option<String> {
    let text = headers::last(&received.headers, "traceparent")?;
    let parts: Vec<&str> = text.split('-').collect();
    let lengths_fit = parts.len() >= 4 && [2, 32, 16, 2].iter().zip(&parts).all(|(length, part)| part.len() == *length);
    let is_hex = text.bytes().all(|byte| byte == b'-' || byte.is_ascii_hexdigit());
    (text.len() <= 64 && lengths_fit && is_hex).then(|| text.to_ascii_lowercase())
}

/// One value per name, the last one, names compared in any case. A value that no database stores is kept as its base64.
pub(crate) fn stored_headers(received: &Received) -> Vec<(String, String)> {
    let mut stored: Vec<(String, String)> = Vec::with_capacity(received.headers.len());
    for (name, value) in &received.headers {
        let name = name.replace('\0', "\u{fffd}");
        let value = if value.contains('\0') { format!("base64:{}", BASE64.encode(value)) } else { value.clone() };
        match stored.iter_mut().find(|(known, _)| known.eq_ignore_ascii_case(&name)) {
            Some(known) => *known = (name, value),
            None => stored.push((name, value)),
        }
    }
    stored
}

/// Keeps the log quiet: one warning of a kind a minute.
#[derive(Debug, Default)]
pub(crate) struct Warnings(Mutex<HashMap<&'static str, Instant>>);

impl Warnings {
    /// May a warning of this kind be logged now?
    pub(crate) fn may(&self, kind: &'static str) -> bool {
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let due = last.get(kind).is_none_or(|last| now.duration_since(*last) >= WARNING_EVERY);
        if due {
            last.insert(kind, now);
        }
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_are_of_the_bytes() {
        assert_eq!(digest(b""), "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    }

    #[test]
    fn keys_have_255_characters_at_most() {
        let (fits, long) = ("é".repeat(255), "é".repeat(256));
        assert_eq!(key_problem("the key", &fits, KeyRule::Characters), None);
        assert!(key_problem("the key", &long, KeyRule::Characters).unwrap().contains("256 characters"));
        assert_eq!(key_problem("the key", &"😀".repeat(255), KeyRule::Characters), None);
        assert!(
            key_problem("the key", &"😀".repeat(128), KeyRule::Utf16NoTrailingBlank).unwrap().contains("256 UTF-16")
        );
        assert!(key_problem("the key", "a\0", KeyRule::Characters).is_some());
        assert_eq!(key_problem("the key", "a ", KeyRule::Characters), None);
        assert!(key_problem("the key", "a ", KeyRule::Utf16NoTrailingBlank).is_some());
    }

    fn with_headers(pairs: &[(&str, &str)]) -> Received {
        let headers = pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        Received { headers, ..Received::default() }
    }

    #[test]
    fn only_trace_contexts_are_stored() {
        let good = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        assert_eq!(trace_parent(&with_headers(&[("TraceParent", good)])).as_deref(), Some(good));
        let future = format!("cc-{}-ext", &good[3..]);
        for junk in ["", "1", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331", future.as_str(), &"0".repeat(200)]
        {
            assert_eq!(trace_parent(&with_headers(&[("traceparent", junk)])), None, "{junk}");
        }
    }

    /// conformance 25
    #[test]
    fn stored_headers_are_complete() {
        let received = with_headers(&[("A", "1"), ("b", "x"), ("a", "2"), ("n", "a\0b")]);
        let stored = stored_headers(&received);
        let expected = [("a", "2"), ("b", "x"), ("n", "base64:YQBi")].map(|(n, v)| (n.to_owned(), v.to_owned()));
        assert_eq!(stored, expected);
    }

    #[tokio::test(start_paused = true)]
    async fn correlation_ids_are_clean() {
        let ids = Ids::new(1, 0);
        let given = with_headers(&[("x-correlation-id", " a\u{7}b\t ")]);
        assert_eq!(correlation_id(SourceKind::Kafka, &given, &ids), "ab");
        let long = with_headers(&[("x-correlation-id", &"é".repeat(200))]);
        assert_eq!(correlation_id(SourceKind::Nats, &long, &ids).chars().count(), 128);
        let property = Received { correlation_id: Some("p".into()), ..with_headers(&[("X-Correlation-Id", "\u{1}")]) };
        assert_eq!(correlation_id(SourceKind::RabbitMq, &property, &ids), "p");
        let both = Received { correlation_id: Some("p".into()), ..with_headers(&[("X-Correlation-Id", "h")]) };
        assert_eq!(correlation_id(SourceKind::RabbitMq, &both, &ids), "h");
        assert_eq!(correlation_id(SourceKind::Http, &Received::default(), &ids).len(), 36);
    }

    #[tokio::test(start_paused = true)]
    async fn one_warning_a_minute() {
        let warnings = Warnings::default();
        assert!(warnings.may("a") && !warnings.may("a") && warnings.may("b"));
        tokio::time::advance(WARNING_EVERY).await;
        assert!(warnings.may("a"));
    }
}

//! Tries an expression on a payload, within the bounds that it would have in a manifest (contract 9, 12.3).

use std::{collections::BTreeMap, time::Duration};

use axum::http::StatusCode;
use bytes::Bytes;
use queuebox_core::Uuid;
use queuebox_engine::{
    expression::{Bounds, Expression},
    transform::{iso_8601, variables},
};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Value, value::RawValue};

use crate::{answer::Failure, replay::unknown_field};

const FIELDS: [&str; 5] = ["expression", "payload", "mockTopic", "mockSource", "timeoutMs"];
const TOPIC_DEFAULT: &str = "test.topic";
const TIMEOUT_DEFAULT: Duration = Duration::from_millis(100);

/// Bounds of all tests.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TransformTest {
    /// `admin.maxTransformTimeout`.
    pub timeout_max: Duration,
    /// `outbox.maxPayloadSize`.
    pub result_bytes_max: usize,
}

/// A test that worked.
#[derive(Debug, Serialize)]
pub(crate) struct Tested {
    success: bool,
    result: Box<RawValue>,
    context: Context,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Context {
    message_id: Uuid,
    topic: String,
    attempt: i32,
    timestamp: String,
}

impl TransformTest {
    /// # Errors
    /// 400 with the reason.
    pub async fn run(&self, body: &[u8]) -> Result<Tested, Failure> {
        // Raw values: a payload keeps its digits, as the one in a table does.
        let fields: BTreeMap<String, Box<RawValue>> = serde_json::from_slice(body)
            .map_err(|error| Failure::invalid(format!("the body is no JSON object: {error}")))?;
        if let Some(name) = fields.keys().find(|name| !FIELDS.contains(&name.as_str())) {
            return Err(Failure::invalid(unknown_field(name, &FIELDS)));
        }
        let source: String = optional(&fields, "expression")?.ok_or_else(|| missing("expression"))?;
        let payload = fields.get("payload").ok_or_else(|| missing("payload"))?;
        let topic = optional(&fields, "mockTopic")?.unwrap_or_else(|| TOPIC_DEFAULT.to_owned());
        let mock_source: Option<String> = optional(&fields, "mockSource")?;
        let bounds = Bounds {
            timeout: self.timeout(optional(&fields, "timeoutMs")?)?,
            result_bytes_max: self.result_bytes_max,
            ..Bounds::default()
        };
        let expression = Expression::compile(&source).map_err(|error| {
            Failure::new(StatusCode::BAD_REQUEST, format!("Invalid expression: {}", error.reason()))
        })?;
        let (message_id, now_us) = (Uuid::now_v7(), jiff::Timestamp::now().as_microsecond());
        let given =
            variables(message_id, &topic, 0, now_us).with("source", mock_source.map_or(Value::Null, Value::from));
        let payload = Bytes::copy_from_slice(payload.get().as_bytes());
        let failed = |error: String| Failure::new(StatusCode::BAD_REQUEST, error);
        let result = expression.json(payload, given, bounds).await.map_err(|error| failed(error.to_string()))?;
        let result = serde_json::from_slice(&result).map_err(|error| failed(error.to_string()))?;
        let context = Context { message_id, topic, attempt: 0, timestamp: iso_8601(now_us) };
        Ok(Tested { success: true, result, context })
    }

    fn timeout(&self, asked_ms: Option<u64>) -> Result<Duration, Failure> {
        let Some(asked_ms) = asked_ms else { return Ok(TIMEOUT_DEFAULT.min(self.timeout_max)) };
        let asked = Duration::from_millis(asked_ms);
        if asked.is_zero() || asked > self.timeout_max {
            let max_ms = self.timeout_max.as_millis();
            return Err(Failure::invalid(format!("timeoutMs: is no whole number from 1 to {max_ms}")));
        }
        Ok(asked)
    }
}

fn missing(name: &str) -> Failure {
    Failure::invalid(format!("{name}: is missing"))
}

/// A field that may be absent or null.
fn optional<T: DeserializeOwned>(fields: &BTreeMap<String, Box<RawValue>>, name: &str) -> Result<Option<T>, Failure> {
    let Some(raw) = fields.get(name) else { return Ok(None) };
    serde_json::from_str(raw.get()).map_err(|_| {
        let what = if name == "timeoutMs" { "whole number" } else { "text" };
        Failure::invalid(format!("{name}: is no {what}"))
    })
}

//! A stage that reshapes a payload: at a source, a route or a destination (contract 9).
//!
//! The stage decides nothing about the message: [`Transform::run`] says what `onError` makes of a failure, and the caller,
//! intake or delivery, acts on it.

use bytes::Bytes;
use queuebox_core::Uuid;

use crate::expression::{Bounds, EvaluationError, Expression, Variables};

/// What happens to a message when its transform fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnError {
    /// The attempt fails; at a source the message is refused.
    #[default]
    Fail,
    /// The stage hands its input on.
    Skip,
    /// The row is dead at once; at a source as `Fail`.
    Dead,
}

impl OnError {
    /// The label `strategy` of `queuebox_transform_failures_total`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Fail => "Fail",
            Self::Skip => "Skip",
            Self::Dead => "Dead",
        }
    }
}

/// One stage. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Transform {
    /// What it computes.
    pub expression: Expression,
    /// Within which bounds.
    pub bounds: Bounds,
    /// What a failure means.
    pub on_error: OnError,
}

/// What a stage did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Staged {
    /// The payload for the next stage. With an error under `onError: Skip`, when it is the input unchanged.
    Output(Bytes, Option<EvaluationError>),
    /// `onError: Fail`.
    Failed(EvaluationError),
    /// `onError: Dead`.
    Dead(EvaluationError),
}

impl Transform {
    /// The result for `payload`, JSON text.
    ///
    /// # Errors
    /// Whatever keeps the stage from giving a result, without regard to `on_error`.
    pub async fn apply(&self, payload: Bytes, variables: Variables) -> Result<Bytes, EvaluationError> {
        self.expression.json(payload, variables, self.bounds).await
    }

    /// The result for `payload`, or what `on_error` makes of a failure.
    pub async fn run(&self, payload: Bytes, variables: Variables) -> Staged {
        match (self.apply(payload.clone(), variables).await, self.on_error) {
            (Ok(output), _) => Staged::Output(output, None),
            (Err(error), OnError::Skip) => Staged::Output(payload, Some(error)),
            (Err(error), OnError::Fail) => Staged::Failed(error),
            (Err(error), OnError::Dead) => Staged::Dead(error),
        }
    }
}

/// The variables of every stage. Times are microseconds since 1970; `topic` is the row's topic, at a source the event type or
/// empty text.
pub fn variables(message_id: Uuid, topic: &str, attempt: i32, timestamp_us: i64) -> Variables {
    Variables::default()
        .with("messageId", message_id.to_string())
        .with("topic", topic)
        .with("attempt", attempt)
        .with("timestamp", iso_8601(timestamp_us))
}

/// Microseconds since 1970 in ISO 8601, UTC, with six decimals. Times out of range become the nearest that is in it.
pub fn iso_8601(us: i64) -> String {
    let timestamp = jiff::Timestamp::from_microsecond(us).unwrap_or(if us < 0 {
        jiff::Timestamp::MIN
    } else {
        jiff::Timestamp::MAX
    });
    format!("{timestamp:.6}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn transform(source: &str, on_error: OnError) -> Transform {
        Transform { expression: Expression::compile(source).unwrap(), bounds: Bounds::default(), on_error }
    }

    /// conformance 97
    #[tokio::test]
    async fn transform_variables() {
        let stage = transform("[$messageId, $topic, $attempt, $timestamp, $source]", OnError::Fail);
        let given = variables(Uuid::nil(), "order.created", 2, 1_790_000_000_123_456);
        let output = stage.apply(Bytes::from_static(b"{}"), given).await.unwrap();
        let expected = r#"["00000000-0000-0000-0000-000000000000","order.created",2,"2026-09-21T14:13:20.123456Z"]"#;
        assert_eq!(output, expected);
    }

    /// conformance 95
    #[tokio::test]
    async fn transform_failure_matrix() {
        let input = Bytes::from_static(br#"{"a":1}"#);
        let run = |on_error| {
            let input = input.clone();
            async move { transform("$error(\"no\")", on_error).run(input, Variables::default()).await }
        };
        assert!(matches!(run(OnError::Fail).await, Staged::Failed(_)));
        assert!(matches!(run(OnError::Dead).await, Staged::Dead(_)));
        assert!(matches!(run(OnError::Skip).await, Staged::Output(output, Some(_)) if output == input));
    }
}

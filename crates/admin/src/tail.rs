//! `/tail`: one line of JSON per outcome, as long as the reader stays and the worker works (contract 12.1). No payload, no key.

use axum::{
    body::Body,
    http::header,
    response::{IntoResponse as _, Response},
};
use futures::{Stream, stream};
use queuebox_core::redact::redact;
use queuebox_engine::outbox::tail::{Delivery, Ending};
use serde_json::{Value, json};
use tokio::sync::{broadcast, watch};

use crate::Readiness;

/// The answer, which ends when the worker stops.
pub(crate) fn answer(deliveries: broadcast::Receiver<Delivery>, readiness: watch::Receiver<Readiness>) -> Response {
    ([(header::CONTENT_TYPE, "application/x-ndjson")], Body::from_stream(lines(deliveries, readiness))).into_response()
}

fn lines(
    deliveries: broadcast::Receiver<Delivery>,
    readiness: watch::Receiver<Readiness>,
) -> impl Stream<Item = Result<String, std::convert::Infallible>> {
    stream::unfold((deliveries, readiness), |(mut deliveries, mut readiness)| async move {
        let line = tokio::select! {
            told = deliveries.recv() => match told {
                Ok(delivery) => line(&delivery),
                Err(broadcast::error::RecvError::Lagged(missed)) => json!({"missed": missed}),
                Err(broadcast::error::RecvError::Closed) => return None,
            },
            _ = readiness.wait_for(|now| matches!(now, Readiness::Stopping)) => return None,
        };
        Some((Ok(format!("{line}\n")), (deliveries, readiness)))
    })
}

fn line(delivery: &Delivery) -> Value {
    let mut line = json!({
        "at": jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%S.%3fZ").to_string(),
        "id": delivery.id.to_string(),
        "destination": delivery.destination,
    });
    match &delivery.ending {
        Ending::Sent { latency_seconds } => {
            line["outcome"] = json!("sent");
            line["latencySeconds"] = json!(latency_seconds);
        }
        Ending::Failed { attempt, error } => {
            line["outcome"] = json!("failed");
            line["attempt"] = json!(attempt);
            line["error"] = json!(redact(error));
        }
        Ending::Dead { error } => {
            line["outcome"] = json!("dead");
            line["error"] = json!(redact(error));
        }
    }
    line
}

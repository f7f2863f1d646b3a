//! Carries out publishes of one destination, many at a time: parses the row's headers, runs the transforms, hands the message to
//! the connector, and reports each outcome. Decides nothing: that is the window's.
//!
//! One task per destination, so that a busy one cannot keep another from being polled. Its queue is bounded by the window, which
//! starts no more than the destination's limit.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use futures::{StreamExt, stream::FuturesUnordered};
use queuebox_core::{
    Fault, Uuid, headers,
    message::{OutboxRow, Payload},
    ports::{Delivery, Destination},
    template::Template,
};
use tokio::{sync::mpsc, time::Instant};

use super::{routing::DestinationIndex, window::Published};
use crate::{
    metrics::Metrics,
    spans::{self, Begin, Span, Step, Tracer},
    tail::Tail,
    transform::{self, Staged, Transform},
};

/// The lease is renewed while a publish runs, and the driver drops it when the lease ends; so a publish is bounded by its
/// destination's own time-out. This is only the ceiling handed to connectors.
const PUBLISH_MAX: Duration = Duration::from_secs(15 * 60);

/// What a destination is asked to do.
pub enum Command {
    /// Publish a row.
    Publish(Box<Job>),
    /// Look whether the peer is there.
    Probe,
    /// Drop everything that is under way: the lease is lost, or the time to stop is over.
    Abort,
}

/// A row on its way out.
pub struct Job {
    /// The row.
    pub row: OutboxRow,
    /// The route's transform.
    pub route_transform: Option<Arc<Transform>>,
    /// The route's routing key.
    pub routing_key: Option<Arc<Template>>,
    /// Counts the registrations of the worker: an outcome of an older one means nothing any more.
    pub epoch: u64,
}

/// Topic and key of a row that somebody may want to see.
pub type Told = Option<Box<(String, Option<String>)>>;

/// What a destination reports.
#[derive(Debug)]
pub enum Event {
    /// A publish ended.
    Published {
        /// Where.
        destination: DestinationIndex,
        /// Which row.
        id: Uuid,
        /// Of the job.
        epoch: u64,
        /// How.
        result: Published,
        /// Topic and key, while somebody follows: the window has given them away.
        told: Told,
    },
    /// A probe ended.
    Probed {
        /// Of which destination.
        destination: DestinationIndex,
        /// How; the reason is for people.
        result: Result<(), String>,
    },
}

/// The task of one destination.
pub struct Publisher {
    /// Its index.
    pub index: DestinationIndex,
    /// Its name.
    pub name: String,
    /// The connector.
    pub port: Arc<dyn Destination>,
    /// Runs after the route's.
    pub transform: Option<Arc<Transform>>,
    /// Counts and times publishes.
    pub metrics: Arc<Metrics>,
    /// Where spans go.
    pub tracer: Tracer,
    /// Told of outcomes.
    pub tail: Tail,
}

impl Publisher {
    /// Runs until the command channel closes; publishes in flight are dropped then.
    pub async fn run(self, mut commands: mpsc::UnboundedReceiver<Command>, events: mpsc::UnboundedSender<Event>) {
        let mut publishes = FuturesUnordered::new();
        let mut probe = FuturesUnordered::new();
        let mut batch = Vec::new();
        loop {
            tokio::select! {
                received = commands.recv_many(&mut batch, 64) => {
                    if received == 0 {
                        return;
                    }
                    for command in batch.drain(..) {
                        match command {
                            Command::Publish(job) => publishes.push(self.publish(job)),
                            Command::Probe => probe.push(self.port.probe()),
                            Command::Abort => publishes.clear(),
                        }
                    }
                }
                Some((id, epoch, result, told)) = publishes.next(), if !publishes.is_empty() => {
                    let _ = events.send(Event::Published { destination: self.index, id, epoch, result, told });
                }
                Some(result) = probe.next(), if !probe.is_empty() => {
                    let result = result.map_err(|fault| fault.detail);
                    let _ = events.send(Event::Probed { destination: self.index, result });
                }
            }
        }
    }

    async fn publish(&self, mut job: Box<Job>) -> (Uuid, u64, Published, Told) {
        let (id, epoch) = (job.row.id, job.epoch);
        let told = self.tail.is_watched().then(|| Box::new((job.row.topic.clone(), job.row.key.clone())));
        let span = self.span(&mut job.row);
        let result = match self.prepare(*job).await {
            Err(published) => published,
            Ok(delivery) => {
                let begun = Instant::now();
                let outcome = self.port.publish(delivery).await;
                self.metrics.publish_took(self.port.kind(), begun.elapsed());
                if let Some(class) = answered(self.port.kind(), &outcome) {
                    self.metrics.http_responses.with_label_values(&[class]).inc();
                }
                match outcome {
                    Ok(()) => Published::Done,
                    Err(fault) => Published::Failed(fault),
                }
            }
        };
        spans::end(span, failure(&result));
        (id, epoch, result, told)
    }

    /// Begins the span of an attempt, whose context goes out with the message.
    fn span(&self, row: &mut OutboxRow) -> Option<Box<dyn Span>> {
        let tracer = self.tracer.as_ref()?;
        let before = row.trace_parent.take().or_else(|| trace_header(&row.headers));
        let span = tracer.begin(Begin {
            step: Step::Deliver,
            peer: &self.name,
            kind: self.port.kind(),
            parent: before.as_deref(),
            message_id: row.id,
            topic: Some(&row.topic),
            attempt: row.attempt,
            began_at_us: None,
        });
        row.trace_parent = Some(span.context());
        Some(span)
    }

    async fn prepare(&self, job: Job) -> Result<Delivery, Published> {
        let row = job.row;
        let mut sent_headers =
            parse_headers(&row.headers).map_err(|why| Published::Failed(Fault::refused("headers", why)))?;
        if let Some(trace) = &row.trace_parent {
            headers::set(&mut sent_headers, "traceparent", trace.clone());
        }
        let mut payload = match row.payload {
            Payload::Loaded(bytes) => bytes,
            Payload::Omitted | Payload::TooLarge(_) => {
                return Err(Published::Failed(Fault::transient("not_loaded", "the payload was not loaded")));
            }
        };
        for stage in [&job.route_transform, &self.transform].into_iter().flatten() {
            let variables = transform::variables(row.id, &row.topic, row.attempt, row.created_at_us);
            // Boxed: most messages have no transform, and each would carry the room for one.
            payload = self.staged(Box::pin(stage.run(payload, variables)).await)?;
        }
        Ok(Delivery {
            id: row.id,
            topic: row.topic,
            key: row.key,
            aggregate_type: row.aggregate_type,
            payload,
            headers: sent_headers,
            attempt: row.attempt,
            routing_key: job.routing_key,
            time_left: PUBLISH_MAX,
        })
    }

    fn staged(&self, staged: Staged) -> Result<Bytes, Published> {
        match staged {
            Staged::Output(output, None) => Ok(output),
            Staged::Output(output, Some(_)) => {
                self.metrics.transform_failed("Skip");
                Ok(output)
            }
            Staged::Failed(error) => {
                self.metrics.transform_failed("Fail");
                Err(Published::Failed(Fault::transient("transform", format!("transform failed: {error}"))))
            }
            Staged::Dead(error) => {
                self.metrics.transform_failed("Dead");
                Err(Published::TransformDead(format!("transform failed: {error}")))
            }
        }
    }
}

/// Why a publish did not do what it was for.
fn failure(result: &Published) -> Option<&str> {
    match result {
        Published::Done => None,
        Published::Failed(fault) => Some(&fault.detail),
        Published::TransformDead(why) => Some(why),
    }
}

/// The trace context of a row that carries it among its headers (contract 7.4).
fn trace_header(stored: &str) -> Option<String> {
    let headers = parse_headers(stored).ok()?;
    headers::last(&headers, "traceparent").map(str::to_owned)
}

/// Class of the status that an HTTP receiver answered with; `None` without an answer. Only 2xx completes, and the code of any
/// other answer is `http_<status>`.
fn answered(kind: &str, outcome: &Result<(), Fault>) -> Option<&'static str> {
    if kind != "http" {
        return None;
    }
    let Err(fault) = outcome else { return Some("2xx") };
    Some(match fault.code.strip_prefix("http_")?.as_bytes() {
        [b'1', _, _] => "1xx",
        [b'2', _, _] => "2xx",
        [b'3', _, _] => "3xx",
        [b'4', _, _] => "4xx",
        [b'5', _, _] => "5xx",
        _ => "other",
    })
}

/// The `headers` column: an object of strings. A value of another type is sent as its JSON text, a null is left out.
///
/// # Errors
/// The text is no JSON object (contract 2.1: dead `refused`).
fn parse_headers(text: &str) -> Result<Vec<(String, String)>, String> {
    if text == "{}" {
        return Ok(Vec::new());
    }
    let parsed: serde_json::Value = serde_json::from_str(text)
        .map_err(|error| format!("the headers column is not JSON: {error}; it takes an object of strings"))?;
    let serde_json::Value::Object(map) = parsed else {
        return Err("the headers column is not a JSON object; it takes an object of strings".to_owned());
    };
    let pairs = map.into_iter().filter_map(|(name, value)| match value {
        serde_json::Value::Null => None,
        serde_json::Value::String(text) => Some((name, text)),
        other => Some((name, other.to_string())),
    });
    Ok(pairs.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_of_other_types_are_sent_as_json_text() {
        let parsed = parse_headers(r#"{"a":"x","n":12345678901234567890,"b":true,"o":{"k":[1]},"gone":null}"#).unwrap();
        let expected = [("a", "x"), ("n", "12345678901234567890"), ("b", "true"), ("o", r#"{"k":[1]}"#)];
        assert_eq!(parsed, expected.map(|(name, value)| (name.to_owned(), value.to_owned())));
        assert!(parse_headers("[]").is_err() && parse_headers("nonsense").is_err());
    }
}

//! The answers of contract 6.9, each with its exact body.

use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, Response, StatusCode, header};
use http_body_util::{Either, Full};
use queuebox_core::{
    Uuid,
    ports::{Admission, source::Refusal},
};

use super::CORRELATION_ID;

/// Our own answers are whole; those of the fallback router may stream.
pub(super) type PortBody = Either<Full<Bytes>, axum::body::Body>;

#[derive(Debug)]
pub(super) enum Answer {
    Running,
    Stored(Uuid),
    Filtered,
    Duplicate,
    BadRequest(String),
    Unauthorized(String),
    NotFound,
    OtherMethod,
    TimedOut,
    TooLarge(usize),
    Encoded,
    TransformFailed(String),
    RateLimited(Duration),
    StorageFailed,
    ShuttingDown,
    Paused,
    TooManyBytes,
    CannotCheck,
}

impl Answer {
    pub(super) fn of(admission: Admission, source: &str) -> Self {
        match admission {
            Admission::Stored(id) => Self::Stored(id),
            Admission::Duplicate => Self::Duplicate,
            Admission::Filtered => Self::Filtered,
            Admission::Refused { kind: Refusal::NotJson | Refusal::BadAttribute, reason } => Self::BadRequest(reason),
            Admission::Refused { kind: Refusal::Transform, reason } => Self::TransformFailed(reason),
            Admission::Failed(fault) => {
                tracing::warn!(source, code = %fault.code, error = %fault.detail, "webhook was not stored");
                Self::StorageFailed
            }
        }
    }

    /// `closing` asks the client to take its next request elsewhere.
    pub(super) fn response(self, correlation_id: Option<&str>, closing: bool) -> Response<PortBody> {
        let retry_after = match &self {
            Self::RateLimited(pause) => Some(whole_seconds(*pause)),
            _ => None,
        };
        let takes_post_only = matches!(self, Self::OtherMethod);
        let (status, json) = self.parts();
        let is_json = json.starts_with('{');
        let mut response = Response::new(Either::Left(Full::new(Bytes::from(json))));
        *response.status_mut() = status;
        let headers = response.headers_mut();
        if is_json {
            headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        }
        if let Some(id) = correlation_id.and_then(|id| HeaderValue::from_bytes(id.as_bytes()).ok()) {
            headers.insert(CORRELATION_ID, id);
        }
        if let Some(seconds) = retry_after {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if takes_post_only {
            headers.insert(header::ALLOW, HeaderValue::from_static("POST"));
        }
        if closing {
            headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        response
    }

    fn parts(self) -> (StatusCode, String) {
        match self {
            Self::Running => (StatusCode::OK, "QueueBox is running!".to_owned()),
            Self::Stored(id) => (StatusCode::ACCEPTED, format!(r#"{{"messageId":"{id}"}}"#)),
            Self::Filtered => (StatusCode::ACCEPTED, r#"{"status":"filtered"}"#.to_owned()),
            Self::Duplicate => (StatusCode::OK, r#"{"status":"duplicate"}"#.to_owned()),
            Self::BadRequest(reason) => (StatusCode::BAD_REQUEST, error(&reason)),
            Self::Unauthorized(reason) => (StatusCode::UNAUTHORIZED, error(&reason)),
            Self::NotFound => (StatusCode::NOT_FOUND, error("No source at this path")),
            Self::OtherMethod => (StatusCode::METHOD_NOT_ALLOWED, error("Only POST is taken here")),
            Self::TimedOut => (StatusCode::REQUEST_TIMEOUT, error("Request body was not received in time")),
            Self::TooLarge(limit) => {
                (StatusCode::PAYLOAD_TOO_LARGE, error(&format!("Request body exceeds {limit} bytes")))
            }
            Self::Encoded => (StatusCode::UNSUPPORTED_MEDIA_TYPE, error("Content-Encoding is not supported")),
            Self::TransformFailed(reason) => {
                (StatusCode::UNPROCESSABLE_ENTITY, error(&format!("Transform failed: {reason}")))
            }
            Self::RateLimited(_) => (StatusCode::TOO_MANY_REQUESTS, String::new()),
            Self::StorageFailed => (StatusCode::INTERNAL_SERVER_ERROR, error("Storage failed")),
            Self::ShuttingDown => (StatusCode::SERVICE_UNAVAILABLE, error("QueueBox is shutting down")),
            Self::Paused => (StatusCode::SERVICE_UNAVAILABLE, error("Source is paused")),
            Self::TooManyBytes => (StatusCode::SERVICE_UNAVAILABLE, error("Too many bytes in flight")),
            Self::CannotCheck => (StatusCode::SERVICE_UNAVAILABLE, error("Credentials cannot be checked")),
        }
    }
}

fn error(reason: &str) -> String {
    serde_json::json!({ "error": reason }).to_string()
}

/// Rounded up, at least one.
fn whole_seconds(pause: Duration) -> u64 {
    (pause.as_secs() + u64::from(pause.subsec_nanos() > 0)).max(1)
}

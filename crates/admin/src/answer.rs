//! Answers of the management port: JSON, `{"error":"…"}` for everything that went wrong (contract 12.3).

use axum::{
    Json,
    http::StatusCode,
    response::{IntoResponse, Response},
};
use queuebox_core::redact::redact;
use serde_json::{Value, json};

use crate::replay::RequestError;

/// An error for a client, redacted on its way out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Failure {
    pub status: StatusCode,
    pub error: String,
}

impl Failure {
    pub fn new(status: StatusCode, error: impl Into<String>) -> Self {
        Self { status, error: error.into() }
    }

    /// 400 with the words of the contract in front.
    pub fn invalid(problem: impl std::fmt::Display) -> Self {
        Self::new(StatusCode::BAD_REQUEST, format!("Invalid request: {problem}"))
    }

    pub fn not_found() -> Self {
        Self::new(StatusCode::NOT_FOUND, "Not found")
    }

    /// `{"success":false,"error":"…"}`: the transform test has answered so ever since.
    pub fn of_test(self) -> Response {
        let body = json!({ "success": false, "error": redact(&self.error) });
        (self.status, Json(body)).into_response()
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        (self.status, Json(json!({ "error": redact(&self.error) }))).into_response()
    }
}

impl From<RequestError> for Failure {
    fn from(error: RequestError) -> Self {
        let status = match error {
            RequestError::NoFilter(_) | RequestError::Invalid(_) => StatusCode::BAD_REQUEST,
            RequestError::Database { .. } => StatusCode::SERVICE_UNAVAILABLE,
        };
        Self::new(status, error.to_string())
    }
}

pub(crate) type Answer = Result<Json<Value>, Failure>;

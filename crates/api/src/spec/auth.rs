//! Who may come in, and what goes out with a request (contract 10).

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::common::SecretRef;
use crate::{
    crd::{at_most_one, exactly_one},
    value::{DurationText, POSITIVE_DURATION_PATTERN},
};

/// Check of incoming requests: exactly one block.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema, Default)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" =
    exactly_one(&["bearer", "apiKey", "hmac", "standardWebhooks", "stripe", "github"])))]
pub struct InboundAuthSpec {
    /// `Authorization: Bearer <token>`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bearer: Option<BearerSpec>,
    /// A header equals a key.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub api_key: Option<ApiKeySpec>,
    /// A header holds an HMAC of the body.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hmac: Option<HmacSpec>,
    /// Standard Webhooks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub standard_webhooks: Option<WebhookSecretSpec>,
    /// Stripe's `Stripe-Signature`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stripe: Option<WebhookSecretSpec>,
    /// GitHub's `X-Hub-Signature-256`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub github: Option<GithubSpec>,
}

/// A token.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct BearerSpec {
    /// The token.
    pub token_from: SecretRef,
    /// The token before, accepted while it is given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub previous_token_from: Option<SecretRef>,
}

/// A key in a header.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ApiKeySpec {
    /// The key.
    pub key_from: SecretRef,
    /// The key before, accepted while it is given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub previous_key_from: Option<SecretRef>,
    /// Name of the header. Default X-API-Key.
    #[schemars(length(min = 1, max = 255))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub header_name: Option<String>,
}

/// An HMAC over the body.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct HmacSpec {
    /// The secret.
    pub secret_from: SecretRef,
    /// The secret before, accepted while it is given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub previous_secret_from: Option<SecretRef>,
    /// Name of the header. Default X-Signature.
    #[schemars(length(min = 1, max = 255))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub header_name: Option<String>,
    /// Hash. Default HmacSHA256.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub algorithm: Option<HmacAlgorithm>,
    /// Stands before the hexadecimal digits; may be empty. Default sha256=.
    #[schemars(length(max = 64))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub signature_prefix: Option<String>,
    /// Header with the Unix time in milliseconds.
    #[schemars(length(min = 1, max = 255))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timestamp_header: Option<String>,
    /// Older or newer requests are refused. Default 5m.
    #[schemars(extend("pattern" = POSITIVE_DURATION_PATTERN))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timestamp_tolerance: Option<DurationText>,
    /// What is signed. Default TIMESTAMP_DOT_BODY with a timestamp header, else BODY.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub signature_payload_format: Option<SignaturePayloadFormat>,
}

/// Signs outgoing requests.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct HmacSigningSpec {
    /// The secret.
    pub secret_from: SecretRef,
    /// Name of the header. Default X-Signature.
    #[schemars(length(min = 1, max = 255))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub header_name: Option<String>,
    /// Hash. Default HmacSHA256.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub algorithm: Option<HmacAlgorithm>,
    /// Stands before the hexadecimal digits; may be empty. Default sha256=.
    #[schemars(length(max = 64))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub signature_prefix: Option<String>,
    /// Header that gets the Unix time in milliseconds.
    #[schemars(length(min = 1, max = 255))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timestamp_header: Option<String>,
    /// What is signed. Default TIMESTAMP_DOT_BODY with a timestamp header, else BODY.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub signature_payload_format: Option<SignaturePayloadFormat>,
}

/// Hash of an HMAC.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema, Default)]
pub enum HmacAlgorithm {
    /// SHA-256.
    #[default]
    #[serde(rename = "HmacSHA256")]
    HmacSha256,
    /// SHA-512.
    #[serde(rename = "HmacSHA512")]
    HmacSha512,
}

/// What an HMAC covers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum SignaturePayloadFormat {
    /// `<timestamp>.<body>`.
    TimestampDotBody,
    /// The body.
    Body,
}

/// A webhook secret with a tolerance in time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct WebhookSecretSpec {
    /// The secret.
    pub secret_from: SecretRef,
    /// The secret before, accepted while it is given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub previous_secret_from: Option<SecretRef>,
    /// Older or newer requests are refused. Default 5m.
    #[schemars(extend("pattern" = POSITIVE_DURATION_PATTERN))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tolerance: Option<DurationText>,
}

/// A GitHub webhook secret.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct GithubSpec {
    /// The secret.
    pub secret_from: SecretRef,
    /// The secret before, accepted while it is given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub previous_secret_from: Option<SecretRef>,
}

/// Credential of outgoing requests: at most one block.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema, Default)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = at_most_one(&["bearer", "basic", "header", "oauth2"])))]
pub struct OutboundAuthSpec {
    /// `Authorization: Bearer <token>`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bearer: Option<OutboundBearerSpec>,
    /// `Authorization: Basic …`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub basic: Option<BasicSpec>,
    /// A header of any name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub header: Option<HeaderAuthSpec>,
    /// OAuth 2 client credentials.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub oauth2: Option<OAuth2Spec>,
}

/// A token that is sent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct OutboundBearerSpec {
    /// The token.
    pub token_from: SecretRef,
}

/// User and password.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct BasicSpec {
    /// User.
    pub username: String,
    /// Password.
    pub password_from: SecretRef,
}

/// A header with a secret value.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct HeaderAuthSpec {
    /// Name of the header. Default Authorization.
    #[schemars(length(min = 1, max = 255))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Its value.
    pub value_from: SecretRef,
}

/// OAuth 2 client credentials.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct OAuth2Spec {
    /// Client.
    #[schemars(length(min = 1))]
    pub client_id: String,
    /// Secret of the client.
    pub client_secret_from: SecretRef,
    /// Where tokens are given out.
    #[schemars(length(min = 1))]
    pub token_url: String,
    /// Scope that is asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scope: Option<String>,
    /// Further form fields.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub extra_params: Option<std::collections::BTreeMap<String, String>>,
}

/// Signature of outgoing requests: at most one block.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema, Default)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = at_most_one(&["standardWebhooks", "hmac"])))]
pub struct SigningSpec {
    /// Standard Webhooks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub standard_webhooks: Option<WebhookSigningSpec>,
    /// An HMAC of the body.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hmac: Option<HmacSigningSpec>,
}

/// Standard Webhooks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct WebhookSigningSpec {
    /// The secret.
    pub secret_from: SecretRef,
    /// The secret before: adds a second signature while it is given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub previous_secret_from: Option<SecretRef>,
}

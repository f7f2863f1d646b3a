//! Signatures of what we send (contract 10.2): Standard Webhooks, or a plain HMAC as our own sources check it.

use std::sync::Arc;

use http::{HeaderMap, HeaderName, HeaderValue};
use queuebox_core::{Fault, Uuid};

use super::{secret_fault, values};
use crate::{
    Secret,
    signature::{self, Algorithm, PayloadFormat},
};

/// `Destination.spec.http.signing`.
#[derive(Debug, Clone)]
pub enum Signing {
    /// `standardWebhooks`: one `v1` entry for each secret, so that receivers can change theirs at leisure.
    StandardWebhooks {
        /// `secretFrom`, with or without `whsec_`.
        secret: Secret,
        /// `previousSecretFrom`.
        previous: Option<Secret>,
    },
    /// `hmac`.
    Hmac(HmacSigning),
}

/// `signing.hmac`.
#[derive(Debug, Clone)]
pub struct HmacSigning {
    /// `secretFrom`.
    pub secret: Secret,
    /// `headerName`.
    pub header: HeaderName,
    /// `algorithm`.
    pub algorithm: Algorithm,
    /// `signaturePrefix`, may be empty.
    pub prefix: String,
    /// `timestampHeader`, in milliseconds since 1970.
    pub timestamp_header: Option<HeaderName>,
    /// `signaturePayloadFormat`.
    pub format: PayloadFormat,
}

impl HmacSigning {
    /// The defaults of the manifest.
    pub fn new(secret: Secret) -> Self {
        Self {
            secret,
            header: HeaderName::from_static("x-signature"),
            algorithm: Algorithm::Sha256,
            prefix: "sha256=".to_owned(),
            timestamp_header: None,
            format: PayloadFormat::Body,
        }
    }
}

impl Signing {
    /// Adds the signature headers; they replace whatever the row brought under their names.
    pub(super) fn sign(&self, headers: &mut HeaderMap, id: &Uuid, body: &[u8]) -> Result<(), Fault> {
        let now = jiff::Timestamp::now();
        match self {
            Self::StandardWebhooks { secret, previous } => {
                standard_webhooks(headers, secret, previous.as_ref(), id, now, body)
            }
            Self::Hmac(hmac) => hmac.sign(headers, now, body),
        }
    }

    /// The secrets that every request needs can be read.
    pub(super) fn readable(&self) -> Result<(), Fault> {
        let secrets: Vec<&Secret> = match self {
            Self::StandardWebhooks { secret, previous } => std::iter::once(secret).chain(previous).collect(),
            Self::Hmac(hmac) => vec![&hmac.secret],
        };
        secrets.into_iter().try_for_each(|secret| secret.current().map(drop).map_err(|error| secret_fault(&error)))
    }

    pub(super) fn secrets(&self) -> Vec<Arc<str>> {
        match self {
            Self::StandardWebhooks { secret, previous } => values(std::iter::once(secret).chain(previous)),
            Self::Hmac(hmac) => values([&hmac.secret]),
        }
    }
}

fn standard_webhooks(
    headers: &mut HeaderMap,
    secret: &Secret,
    previous: Option<&Secret>,
    id: &Uuid,
    now: jiff::Timestamp,
    body: &[u8],
) -> Result<(), Fault> {
    let id = id.hyphenated().to_string();
    let timestamp = now.as_second().to_string();
    let mut entries = Vec::with_capacity(2);
    for secret in std::iter::once(secret).chain(previous) {
        let text = secret.current().map_err(|error| secret_fault(&error))?;
        let key = signature::standard_webhooks_key(&text).ok_or_else(|| {
            Fault::transient("secret", "the secret of signing.standardWebhooks is no base64 (with or without whsec_)")
        })?;
        let sum = signature::standard_webhooks(&key, id.as_bytes(), timestamp.as_bytes(), body);
        entries.push(format!("v1,{sum}"));
    }
    set(headers, HeaderName::from_static("webhook-id"), &id)?;
    set(headers, HeaderName::from_static("webhook-timestamp"), &timestamp)?;
    set(headers, HeaderName::from_static("webhook-signature"), &entries.join(" "))
}

impl HmacSigning {
    fn sign(&self, headers: &mut HeaderMap, now: jiff::Timestamp, body: &[u8]) -> Result<(), Fault> {
        let key = self.secret.current().map_err(|error| secret_fault(&error))?;
        let timestamp = now.as_millisecond().to_string();
        let sum = match self.format {
            PayloadFormat::Body => signature::mac(self.algorithm, key.as_bytes(), &[body]),
            PayloadFormat::TimestampDotBody => {
                signature::mac(self.algorithm, key.as_bytes(), &[timestamp.as_bytes(), b".", body])
            }
        };
        if let Some(name) = &self.timestamp_header {
            set(headers, name.clone(), &timestamp)?;
        }
        set(headers, self.header.clone(), &format!("{}{}", self.prefix, signature::hex(&sum)))
    }
}

fn set(headers: &mut HeaderMap, name: HeaderName, text: &str) -> Result<(), Fault> {
    let value = HeaderValue::from_str(text)
        .map_err(|_| Fault::transient("signing", format!("the signature cannot stand in the header {name}")))?;
    headers.insert(name, value);
    Ok(())
}

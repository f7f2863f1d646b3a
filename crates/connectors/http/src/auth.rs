//! Who may come in: the checks of contract 10.1, over the bytes as received, before anything is parsed.
//!
//! Invariants:
//! - Every comparison of a credential takes the same time wherever the two differ.
//! - A missing, repeated or malformed credential header is refused; no input can make a check panic.
//! - A refusal names the check that failed, never a credential.
//!
//! Used for sources here and for the admin API.

use http::{HeaderMap, HeaderName, header};
use sha2::{Digest, Sha256};
use subtle::{Choice, ConstantTimeEq};

use crate::{
    Secret, SecretError,
    signature::{self, Algorithm, BASE64, PayloadFormat},
};

pub use crate::signature::{Algorithm as HmacAlgorithm, PayloadFormat as HmacPayloadFormat};

const WEBHOOK_ID: HeaderName = HeaderName::from_static("webhook-id");
const WEBHOOK_TIMESTAMP: HeaderName = HeaderName::from_static("webhook-timestamp");
const WEBHOOK_SIGNATURE: HeaderName = HeaderName::from_static("webhook-signature");
const STRIPE_SIGNATURE: HeaderName = HeaderName::from_static("stripe-signature");
const GITHUB_SIGNATURE: HeaderName = HeaderName::from_static("x-hub-signature-256");

/// A secret and, while it is being changed, the one before. Either is accepted.
#[derive(Debug, Clone)]
pub struct Accepted {
    /// `…From`.
    pub current: Secret,
    /// `previous…From`.
    pub previous: Option<Secret>,
}

impl From<Secret> for Accepted {
    fn from(current: Secret) -> Self {
        Self { current, previous: None }
    }
}

/// An `auth` block.
#[derive(Debug, Clone)]
pub enum Auth {
    /// `bearer`.
    Bearer {
        /// `tokenFrom`.
        token: Accepted,
    },
    /// `apiKey`.
    ApiKey {
        /// `keyFrom`.
        key: Accepted,
        /// `headerName`, default `X-API-Key`.
        header: HeaderName,
    },
    /// `hmac`.
    Hmac(HmacAuth),
    /// `standardWebhooks`.
    StandardWebhooks {
        /// `secretFrom`, with or without `whsec_`.
        secret: Accepted,
        /// `tolerance` in seconds.
        tolerance_s: u64,
    },
    /// `stripe`.
    Stripe {
        /// `secretFrom`.
        secret: Accepted,
        /// `tolerance` in seconds.
        tolerance_s: u64,
    },
    /// `github`.
    GitHub {
        /// `secretFrom`.
        secret: Accepted,
    },
}

/// `auth.hmac`.
#[derive(Debug, Clone)]
pub struct HmacAuth {
    /// `secretFrom`.
    pub secret: Accepted,
    /// `headerName`.
    pub header: HeaderName,
    /// `algorithm`.
    pub algorithm: Algorithm,
    /// `signaturePrefix`, may be empty.
    pub prefix: String,
    /// `timestampHeader`: milliseconds since 1970.
    pub timestamp_header: Option<HeaderName>,
    /// `timestampTolerance` in milliseconds, in both directions of time.
    pub tolerance_ms: u64,
    /// `signaturePayloadFormat`.
    pub format: PayloadFormat,
}

impl HmacAuth {
    /// The defaults of the manifest.
    pub fn new(secret: impl Into<Accepted>) -> Self {
        Self {
            secret: secret.into(),
            header: HeaderName::from_static("x-signature"),
            algorithm: Algorithm::Sha256,
            prefix: "sha256=".to_owned(),
            timestamp_header: None,
            tolerance_ms: 300_000,
            format: PayloadFormat::Body,
        }
    }
}

/// Why somebody is not let in.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AuthError {
    /// The check that failed, for the answer. HTTP 401.
    #[error("{0}")]
    Refused(String),
    /// There is nothing to compare with; nobody is let in. Not the sender's fault: HTTP 503.
    #[error(transparent)]
    Secret(#[from] SecretError),
    /// The configured secret has the wrong form. As above.
    #[error("the secret of {0} is no base64 (with or without whsec_)")]
    SecretForm(&'static str),
}

/// Checks requests against one `auth` block.
#[derive(Debug, Clone)]
pub struct Authenticator {
    auth: Auth,
}

impl Authenticator {
    /// For one block.
    pub fn new(auth: Auth) -> Self {
        Self { auth }
    }

    /// Headers that carry the credential. They are secrets, and are neither stored nor handed on (contract 6.3). Ids and times
    /// that a signature covers are none: `webhook-id` is the idempotency key of Standard Webhooks.
    pub fn headers(&self) -> Vec<HeaderName> {
        match &self.auth {
            Auth::Bearer { .. } => vec![header::AUTHORIZATION],
            Auth::ApiKey { header, .. } => vec![header.clone()],
            Auth::Hmac(hmac) => vec![hmac.header.clone()],
            Auth::StandardWebhooks { .. } => vec![WEBHOOK_SIGNATURE],
            Auth::Stripe { .. } => vec![STRIPE_SIGNATURE],
            Auth::GitHub { .. } => vec![GITHUB_SIGNATURE],
        }
    }

    /// Is the request with these headers and this body, as received, let in at `now`?
    pub fn check(&self, headers: &HeaderMap, body: &[u8], now: jiff::Timestamp) -> Result<(), AuthError> {
        match &self.auth {
            Auth::Bearer { token } => bearer(token, headers),
            Auth::ApiKey { key, header } => {
                let given = single(headers, header)?;
                accept(any_of(key, |secret| Ok(eq_secret(secret, given)))?, || format!("{header} does not match"))
            }
            Auth::Hmac(hmac) => hmac.check(headers, body, now),
            Auth::StandardWebhooks { secret, tolerance_s } => {
                standard_webhooks(secret, *tolerance_s, headers, body, now)
            }
            Auth::Stripe { secret, tolerance_s } => stripe(secret, *tolerance_s, headers, body, now),
            Auth::GitHub { secret } => {
                let given = hex_signature(headers, &GITHUB_SIGNATURE, "sha256=")?;
                let sum = |key: &str| Ok(eq(&hex_mac(Algorithm::Sha256, key, &[body]), given));
                accept(any_of(secret, sum)?, || format!("{GITHUB_SIGNATURE} does not match the body"))
            }
        }
    }
}

fn bearer(token: &Accepted, headers: &HeaderMap) -> Result<(), AuthError> {
    let given = single(headers, &header::AUTHORIZATION)?;
    let (scheme, rest) = given.split_at(given.iter().position(|byte| *byte == b' ').unwrap_or(given.len()));
    let credential = rest.trim_ascii();
    if !scheme.eq_ignore_ascii_case(b"bearer") || credential.is_empty() {
        return Err(refused("Authorization is not of the form \"Bearer <token>\""));
    }
    accept(any_of(token, |secret| Ok(eq_secret(secret, credential)))?, || "the bearer token does not match".to_owned())
}

impl HmacAuth {
    fn check(&self, headers: &HeaderMap, body: &[u8], now: jiff::Timestamp) -> Result<(), AuthError> {
        let given = hex_signature(headers, &self.header, &self.prefix)?;
        let timestamp = match &self.timestamp_header {
            None => None,
            Some(name) => {
                let text = single(headers, name)?;
                within(text, now.as_millisecond(), self.tolerance_ms, || format!("{name}"), "milliseconds")?;
                Some(text)
            }
        };
        let prefix: &[&[u8]] = match (self.format, &timestamp) {
            (PayloadFormat::Body, _) => &[],
            (PayloadFormat::TimestampDotBody, Some(timestamp)) => &[timestamp, b"."],
            (PayloadFormat::TimestampDotBody, None) => {
                return Err(refused("TIMESTAMP_DOT_BODY needs a timestampHeader"));
            }
        };
        let signed = [prefix, &[body]].concat();
        let sum = |key: &str| Ok(eq(&hex_mac(self.algorithm, key, &signed), given));
        accept(any_of(&self.secret, sum)?, || format!("{} does not match the body", self.header))
    }
}

fn standard_webhooks(
    secret: &Accepted,
    tolerance_s: u64,
    headers: &HeaderMap,
    body: &[u8],
    now: jiff::Timestamp,
) -> Result<(), AuthError> {
    let id = single(headers, &WEBHOOK_ID)?;
    let timestamp = single(headers, &WEBHOOK_TIMESTAMP)?;
    let entries = single(headers, &WEBHOOK_SIGNATURE)?;
    within(timestamp, now.as_second(), tolerance_s, || WEBHOOK_TIMESTAMP.to_string(), "seconds")?;
    let matches = any_of(secret, |text| {
        let key = signature::standard_webhooks_key(text).ok_or(AuthError::SecretForm("standardWebhooks"))?;
        let sum = signature::mac(Algorithm::Sha256, &key, &[id, b".", timestamp, b".", body]);
        let mut found = Choice::from(0);
        for entry in entries.split(|byte| *byte == b' ').filter_map(|entry| entry.strip_prefix(b"v1,")) {
            if let Ok(given) = base64::Engine::decode(&BASE64, entry) {
                found |= eq(&sum, &given);
            }
        }
        Ok(found)
    })?;
    accept(matches, || "no v1 entry of webhook-signature matches".to_owned())
}

fn stripe(
    secret: &Accepted,
    tolerance_s: u64,
    headers: &HeaderMap,
    body: &[u8],
    now: jiff::Timestamp,
) -> Result<(), AuthError> {
    let given = single(headers, &STRIPE_SIGNATURE)?;
    let parts: Vec<(&[u8], &[u8])> = given
        .split(|byte| *byte == b',')
        .filter_map(|part| {
            let part = part.trim_ascii();
            let equals = part.iter().position(|byte| *byte == b'=')?;
            Some((&part[..equals], &part[equals + 1..]))
        })
        .collect();
    let values = |name: &'static [u8]| parts.iter().filter(move |(given, _)| *given == name).map(|(_, value)| *value);
    let mut times = values(b"t");
    let (Some(timestamp), None) = (times.next(), times.next()) else {
        return Err(refused("Stripe-Signature needs exactly one t=<seconds>"));
    };
    within(timestamp, now.as_second(), tolerance_s, || "t of Stripe-Signature".to_owned(), "seconds")?;
    let matches = any_of(secret, |key| {
        let sum = hex_mac(Algorithm::Sha256, key, &[timestamp, b".", body]);
        Ok(values(b"v1").fold(Choice::from(0), |found, given| found | eq(&sum, given)))
    })?;
    accept(matches, || "no v1 entry of Stripe-Signature matches".to_owned())
}

/// The one value of `name`, trimmed.
fn single<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Result<&'a [u8], AuthError> {
    let mut values = headers.get_all(name).iter();
    match (values.next(), values.next()) {
        (None, _) => Err(refused(format!("{name} is missing"))),
        (Some(_), Some(_)) => Err(refused(format!("{name} is given more than once"))),
        (Some(value), None) => match value.as_bytes().trim_ascii() {
            [] => Err(refused(format!("{name} is empty"))),
            bytes => Ok(bytes),
        },
    }
}

fn hex_signature<'a>(headers: &'a HeaderMap, name: &HeaderName, prefix: &str) -> Result<&'a [u8], AuthError> {
    single(headers, name)?
        .strip_prefix(prefix.as_bytes())
        .ok_or_else(|| refused(format!("{name} does not begin with {prefix:?}")))
}

fn hex_mac(algorithm: Algorithm, key: &str, parts: &[&[u8]]) -> Vec<u8> {
    signature::hex(&signature::mac(algorithm, key.as_bytes(), parts)).into_bytes()
}

/// Is the whole number `text` within `tolerance` of `now`, before or after? The unit is fixed, never guessed.
fn within(text: &[u8], now: i64, tolerance: u64, name: impl Fn() -> String, unit: &str) -> Result<(), AuthError> {
    let number = std::str::from_utf8(text)
        .ok()
        .filter(|text| text.len() <= 18 && text.bytes().all(|byte| byte.is_ascii_digit()))
        .and_then(|text| text.parse::<i64>().ok())
        .ok_or_else(|| refused(format!("{} is no whole number of {unit}", name())))?;
    if number.abs_diff(now) <= tolerance {
        Ok(())
    } else {
        Err(refused(format!("{} is outside the tolerance", name())))
    }
}

/// Compares with both secrets always, so that the time does not tell which one is in use.
fn any_of(accepted: &Accepted, matches: impl Fn(&str) -> Result<Choice, AuthError>) -> Result<bool, AuthError> {
    let (mut found, mut unreadable) = (Choice::from(0), None);
    for secret in std::iter::once(&accepted.current).chain(&accepted.previous) {
        // An empty secret is a mistake that would let everybody in.
        let matched = secret
            .current()
            .map_err(AuthError::from)
            .and_then(|value| if value.is_empty() { Ok(Choice::from(0)) } else { matches(&value) });
        match matched {
            Ok(choice) => found |= choice,
            Err(error) => unreadable = Some(error),
        }
    }
    match unreadable {
        // The other secret may have matched; then nothing is missing.
        Some(error) if !bool::from(found) => Err(error),
        _ => Ok(found.into()),
    }
}

fn eq(a: &[u8], b: &[u8]) -> Choice {
    a.ct_eq(b)
}

/// Of digests, so that not even the length of the secret shows in the time.
fn eq_secret(secret: &str, given: &[u8]) -> Choice {
    Sha256::digest(secret.as_bytes()).as_slice().ct_eq(Sha256::digest(given).as_slice())
}

fn accept(matches: bool, reason: impl FnOnce() -> String) -> Result<(), AuthError> {
    if matches { Ok(()) } else { Err(AuthError::Refused(reason())) }
}

fn refused(reason: impl Into<String>) -> AuthError {
    AuthError::Refused(reason.into())
}

//! Credentials of what we send (contract 10.2): bearer, basic, a header of one's own, OAuth2 client credentials.
//!
//! Access tokens are cached per client, URL, scope and parameters, fetched by one attempt at a time, and renewed before
//! their end. A 401 drops the cached token once: when the fresh one is refused as well, it is kept for a while, so that a
//! receiver that refuses everybody does not turn into a storm at the token endpoint.

use std::{
    collections::HashMap,
    sync::{Arc, LazyLock, Mutex, PoisonError},
    time::Duration,
};

use base64::Engine as _;
use bytes::Bytes;
use http::{HeaderName, HeaderValue, Method, Request, StatusCode, header};
use http_body_util::Full;
use queuebox_core::{Fault, redact::redact_with};
use tokio::time::Instant;
use url::{Url, form_urlencoded};

use super::{ConfigError, answer, classify, secret_fault, status_name, values};
use crate::{
    Secret,
    client::{
        Client, UrlError,
        progress::{Phase, Progress},
    },
};

/// A token is renewed this long before its end.
const RENEW_BEFORE: Duration = Duration::from_secs(30);
/// Life of a token whose answer names none.
const LIFE_DEFAULT: Duration = Duration::from_secs(3600);
/// A token that replaced a refused one is dropped again after this at the earliest.
const DROP_AGAIN_AFTER: Duration = Duration::from_secs(30);
/// Answers of token endpoints are read up to this.
const TOKEN_BYTES_MAX: usize = 64 * 1024;

/// `Destination.spec.http.auth`.
#[derive(Debug, Clone)]
pub enum OutboundAuth {
    /// `bearer.tokenFrom`.
    Bearer(Secret),
    /// `basic`.
    Basic {
        /// `username`.
        username: String,
        /// `passwordFrom`.
        password: Secret,
    },
    /// `header`.
    Header {
        /// `name`.
        name: HeaderName,
        /// `valueFrom`.
        value: Secret,
    },
    /// `oauth2`.
    OAuth2(OAuth2),
}

/// `auth.oauth2`: the client credentials grant.
#[derive(Debug, Clone)]
pub struct OAuth2 {
    /// `clientId`.
    pub client_id: String,
    /// `clientSecretFrom`.
    pub client_secret: Secret,
    /// `tokenUrl`.
    pub token_url: Url,
    /// `scope`.
    pub scope: Option<String>,
    /// `extraParams`, such as `audience`.
    pub extra_params: Vec<(String, String)>,
}

/// Access tokens of a process. Cheap to clone; clones share the tokens.
#[derive(Debug, Clone, Default)]
pub struct TokenCache(Arc<Mutex<HashMap<TokenKey, Arc<Slot>>>>);

type TokenKey = (String, String, Option<String>, Vec<(String, String)>);

#[derive(Debug, Default)]
struct Slot {
    /// Held while a token is fetched, so that others wait for that one.
    token: tokio::sync::Mutex<()>,
    state: Mutex<TokenState>,
}

#[derive(Default)]
struct TokenState {
    token: Option<Token>,
    /// The last token was refused with 401.
    refused: bool,
}

impl std::fmt::Debug for TokenState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TokenState").field("cached", &self.token.is_some()).finish_non_exhaustive()
    }
}

#[derive(Clone)]
struct Token {
    value: Arc<str>,
    header: HeaderValue,
    fetched: Instant,
    renew_at: Instant,
    /// Replaced one that was refused, and has not been accepted yet.
    on_trial: bool,
}

/// The credential of a destination.
#[derive(Debug)]
pub(super) enum Credential {
    None,
    Bearer(Secret),
    Basic { username: String, password: Secret },
    Header { name: HeaderName, value: Secret },
    OAuth2(Box<Grant>),
}

/// A credential as it was used for one request.
#[derive(Debug)]
pub(super) struct Used {
    header: Option<(HeaderName, HeaderValue)>,
}

impl Used {
    pub(super) fn header(&self) -> Option<&(HeaderName, HeaderValue)> {
        self.header.as_ref()
    }
}

impl Credential {
    pub(super) fn new(
        auth: Option<&OutboundAuth>,
        tokens: &TokenCache,
        client: impl FnOnce(Url) -> Result<Client, UrlError>,
    ) -> Result<Self, ConfigError> {
        Ok(match auth.cloned() {
            None => Self::None,
            Some(OutboundAuth::Bearer(token)) => Self::Bearer(token),
            Some(OutboundAuth::Basic { username, password }) => Self::Basic { username, password },
            Some(OutboundAuth::Header { name, value }) => Self::Header { name, value },
            Some(OutboundAuth::OAuth2(config)) => {
                let client = client(config.token_url.clone()).map_err(ConfigError::TokenUrl)?;
                let slot = tokens.slot(&config);
                Self::OAuth2(Box::new(Grant { config, client, slot }))
            }
        })
    }

    /// The header for the next request.
    pub(super) async fn current(&self, progress: &Progress) -> Result<Used, Fault> {
        let read = |secret: &Secret| secret.current().map_err(|error| secret_fault(&error));
        let header = match self {
            Self::None => None,
            Self::Bearer(token) => Some((header::AUTHORIZATION, sensitive(&format!("Bearer {}", read(token)?))?)),
            Self::Basic { username, password } => {
                Some((header::AUTHORIZATION, sensitive(&basic(username, &read(password)?))?))
            }
            Self::Header { name, value } => Some((name.clone(), sensitive(&read(value)?)?)),
            Self::OAuth2(grant) => Some((header::AUTHORIZATION, grant.current(progress).await?)),
        };
        Ok(Used { header })
    }

    /// The secret that every request needs can be read.
    pub(super) fn readable(&self) -> Result<(), Fault> {
        let secret = match self {
            Self::None => return Ok(()),
            Self::Bearer(secret) | Self::Header { value: secret, .. } | Self::Basic { password: secret, .. } => secret,
            Self::OAuth2(grant) => &grant.config.client_secret,
        };
        secret.current().map(drop).map_err(|error| secret_fault(&error))
    }

    /// Tells how the receiver took the credential.
    pub(super) fn answered(&self, used: &Used, status: StatusCode) {
        if let (Self::OAuth2(grant), Some((_, header))) = (self, &used.header) {
            grant.slot.answered(header, status == StatusCode::UNAUTHORIZED);
        }
    }

    /// Values that must not appear in any text.
    pub(super) fn secrets(&self) -> Vec<Arc<str>> {
        match self {
            Self::None => Vec::new(),
            Self::Bearer(secret) | Self::Header { value: secret, .. } => values([secret]),
            Self::Basic { username, password } => values([password])
                .into_iter()
                .flat_map(|password| [format!("{username}:{password}").into(), password])
                .collect(),
            Self::OAuth2(grant) => {
                let mut known = values([&grant.config.client_secret]);
                known.extend(grant.slot.lock().token.as_ref().map(|token| token.value.clone()));
                known
            }
        }
    }

    pub(super) fn close(&self) {
        if let Self::OAuth2(grant) = self {
            grant.client.close();
        }
    }
}

fn basic(username: &str, password: &str) -> String {
    format!("Basic {}", base64::engine::general_purpose::STANDARD.encode(format!("{username}:{password}")))
}

fn sensitive(text: &str) -> Result<HeaderValue, Fault> {
    let mut value = HeaderValue::from_str(text)
        .or_else(|_| HeaderValue::from_bytes(text.as_bytes()))
        .map_err(|_| Fault::transient("secret", "the credential has a character that no header can hold"))?;
    value.set_sensitive(true);
    Ok(value)
}

static PROCESS: LazyLock<TokenCache> = LazyLock::new(TokenCache::default);

impl TokenCache {
    /// The tokens of this process: one for all destinations with the same client, URL, scope and parameters.
    pub fn process() -> Self {
        PROCESS.clone()
    }

    fn slot(&self, config: &OAuth2) -> Arc<Slot> {
        let key =
            (config.client_id.clone(), config.token_url.to_string(), config.scope.clone(), config.extra_params.clone());
        self.0.lock().unwrap_or_else(PoisonError::into_inner).entry(key).or_default().clone()
    }
}

impl Slot {
    fn lock(&self) -> std::sync::MutexGuard<'_, TokenState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn usable(&self) -> Option<HeaderValue> {
        let state = self.lock();
        state.token.as_ref().filter(|token| Instant::now() < token.renew_at).map(|token| token.header.clone())
    }

    fn store(&self, value: &str, life: Duration) -> Result<HeaderValue, Fault> {
        let header = sensitive(&format!("Bearer {value}"))?;
        let now = Instant::now();
        // A token that lives for a minute or less would otherwise be renewed for every message.
        let keep = life.checked_sub(RENEW_BEFORE).filter(|keep| *keep >= RENEW_BEFORE).unwrap_or(life / 2);
        let mut state = self.lock();
        state.token = Some(Token {
            value: value.into(),
            header: header.clone(),
            fetched: now,
            renew_at: now + keep,
            on_trial: std::mem::take(&mut state.refused),
        });
        Ok(header)
    }

    /// A 401 drops the token that was used, once: not one that somebody else has fetched meanwhile, and not the fresh
    /// one that was fetched because of a 401.
    fn answered(&self, used: &HeaderValue, refused: bool) {
        let mut state = self.lock();
        let Some(token) = state.token.as_mut().filter(|token| token.header == *used) else { return };
        if !refused {
            token.on_trial = false;
        } else if !token.on_trial || token.fetched.elapsed() >= DROP_AGAIN_AFTER {
            state.token = None;
            state.refused = true;
        }
    }
}

/// The client credentials grant of one destination.
#[derive(Debug)]
pub(super) struct Grant {
    config: OAuth2,
    client: Client,
    slot: Arc<Slot>,
}

#[derive(serde::Deserialize)]
struct TokenAnswer {
    access_token: String,
    expires_in: Option<serde_json::Value>,
}

#[derive(serde::Deserialize)]
struct TokenRefusal {
    error: String,
}

impl Grant {
    async fn current(&self, progress: &Progress) -> Result<HeaderValue, Fault> {
        if let Some(header) = self.slot.usable() {
            return Ok(header);
        }
        progress.enter(Phase::FetchingToken);
        let _one_at_a_time = self.slot.token.lock().await;
        if let Some(header) = self.slot.usable() {
            return Ok(header);
        }
        self.fetch().await
    }

    async fn fetch(&self) -> Result<HeaderValue, Fault> {
        // Its own progress: the phase of the attempt stays "fetching the token", and no byte of the message has left.
        let progress = Progress::new();
        let mut answer = self.client.send(self.request()?, &progress).await.map_err(|error| {
            let fault = classify(&error);
            Fault::transient("token", format!("OAuth2 sign-in failed, {}", fault.detail)).tripping()
        })?;
        let body = answer::read(&mut answer.body, TOKEN_BYTES_MAX).await;
        let status = answer.head.status;
        let (text, is_whole) = (body.text(), body.is_whole);
        if is_whole {
            self.client.keep(answer);
        }
        if !status.is_success() {
            return Err(self.refusal(status, &text));
        }
        let token: TokenAnswer = serde_json::from_str(&text).map_err(|_| {
            let detail = "OAuth2 sign-in failed, the answer of the token endpoint is no JSON with an access_token";
            Fault::transient("token", detail)
        })?;
        self.slot.store(&token.access_token, life(token.expires_in.as_ref()))
    }

    fn request(&self) -> Result<Request<Full<Bytes>>, Fault> {
        let secret = self.config.client_secret.current().map_err(|error| secret_fault(&error))?;
        let mut form = form_urlencoded::Serializer::new(String::new());
        form.append_pair("grant_type", "client_credentials");
        form.append_pair("client_id", &self.config.client_id);
        form.append_pair("client_secret", &secret);
        if let Some(scope) = &self.config.scope {
            form.append_pair("scope", scope);
        }
        for (name, value) in &self.config.extra_params {
            form.append_pair(name, value);
        }
        let mut request = Request::new(Full::new(Bytes::from(form.finish())));
        *request.method_mut() = Method::POST;
        *request.uri_mut() = self.client.target().clone();
        let headers = request.headers_mut();
        headers.insert(header::HOST, self.client.host().clone());
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/x-www-form-urlencoded"));
        headers.insert(header::ACCEPT, HeaderValue::from_static("application/json"));
        Ok(request)
    }

    /// Only the error word of RFC 6749 5.2 is repeated: the rest of such answers may quote what was sent.
    fn refusal(&self, status: StatusCode, text: &str) -> Fault {
        let mut detail = format!("OAuth2 sign-in failed, the token endpoint answered {}", status_name(status));
        if let Ok(refusal) = serde_json::from_str::<TokenRefusal>(text) {
            detail.push_str(&format!(" ({})", refusal.error));
        }
        let known = values([&self.config.client_secret]);
        let known: Vec<&str> = known.iter().map(AsRef::as_ref).collect();
        let fault = Fault::transient("token", redact_with(&detail, &known));
        if status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS { fault.tripping() } else { fault }
    }
}

/// `expires_in` in seconds; some servers write the number as text.
fn life(expires_in: Option<&serde_json::Value>) -> Duration {
    let seconds = expires_in.and_then(|value| match value {
        serde_json::Value::String(text) => text.trim().parse::<f64>().ok(),
        other => other.as_f64(),
    });
    match seconds {
        Some(seconds) if seconds > 0.0 => {
            Duration::try_from_secs_f64(seconds.min(31_536_000.0)).unwrap_or(LIFE_DEFAULT)
        }
        _ => LIFE_DEFAULT,
    }
}

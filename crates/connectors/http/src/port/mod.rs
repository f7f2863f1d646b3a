//! The data port: webhooks in, in the order of work of contract 6.1.
//!
//! Steps 1 to 5 (stopping, sizes, time, credentials, rate) are here; filter, attributes, transform and store are the
//! engine's intake, the same for all sources.
//!
//! Invariants:
//! - A 2xx is answered only after the intake said so.
//! - A body is never held beyond its limits: per request, per time, and over all sources.
//! - Every answer of an inbox route carries `X-Correlation-Id`.

mod answer;
mod body;
mod rate;
mod serve;
mod spelling;

use std::{
    collections::HashMap,
    sync::{Arc, atomic::AtomicBool},
    time::Duration,
};

use http::{HeaderMap, HeaderName, Method, Request, Response, header, request::Parts};
use hyper::body::Incoming;
use queuebox_core::{
    Uuid,
    ports::{Intake, Received},
};
use tokio_util::task::TaskTracker;
use tower::ServiceExt;

use self::{
    answer::{Answer, PortBody},
    rate::RateLimit,
    spelling::{Spelling, spelled},
};
pub use body::ByteBudget;

use crate::auth::{Auth, AuthError, Authenticator};

const CORRELATION_ID: HeaderName = HeaderName::from_static("x-correlation-id");
const CORRELATION_ID_CHARS_MAX: usize = 128;

/// What the Relay says about the data port.
#[derive(Clone)]
pub struct DataPortConfig {
    /// `inbox.basePath`, such as `/inbox`.
    pub base_path: String,
    /// `inbox.maxBodySize` in bytes; a body of exactly this size is taken.
    pub body_bytes_max: usize,
    /// `inbox.bodyTimeout`: from the end of the headers to the end of the body.
    pub body_timeout: Duration,
    /// `inbox.maxBytesInFlight`, shared by all sources of the process.
    pub budget: ByteBudget,
    /// Connections open at the same time; more wait in the backlog of the socket.
    pub connections_max: usize,
    /// Answers everything that is neither `GET /` nor an inbox route: the management routes of a classic configuration.
    pub fallback: Option<axum::Router>,
}

impl Default for DataPortConfig {
    fn default() -> Self {
        Self {
            base_path: "/inbox".to_owned(),
            body_bytes_max: 1 << 20,
            body_timeout: Duration::from_secs(30),
            budget: ByteBudget::new(64 << 20),
            connections_max: 4096,
            fallback: None,
        }
    }
}

/// A checked `Source.spec.http`.
#[derive(Debug, Clone)]
pub struct HttpSource {
    /// Name of the source, for the log.
    pub name: String,
    /// `http.path`, begins with `/`.
    pub path: String,
    /// `paused`: every request is answered 503.
    pub paused: bool,
    /// `http.auth`; without one everybody is let in.
    pub auth: Option<Auth>,
    /// `http.rateLimit.requestsPerMinute`.
    pub requests_per_minute: Option<u32>,
}

impl HttpSource {
    /// A source that lets everybody in.
    pub fn new(name: impl Into<String>, path: impl Into<String>) -> Self {
        Self { name: name.into(), path: path.into(), paused: false, auth: None, requests_per_minute: None }
    }
}

/// Two sources have the same path.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the sources {first} and {second} have the same path {path}")]
pub struct SamePath {
    /// The path, with the base path.
    pub path: String,
    /// One source.
    pub first: String,
    /// The other.
    pub second: String,
}

/// The data port. Serve it with [`DataPort::serve`].
pub struct DataPort {
    config: DataPortConfig,
    routes: HashMap<String, Route>,
    refusing: AtomicBool,
    requests: TaskTracker,
}

struct Route {
    source: HttpSource,
    intake: Arc<dyn Intake>,
    authenticator: Option<Authenticator>,
    rate: Option<RateLimit>,
    /// Not handed on: credentials of every kind, and what the check reads.
    secret_headers: Vec<HeaderName>,
}

impl DataPort {
    /// Routes for `sources`, each with the intake that stores for it.
    pub fn new(config: DataPortConfig, sources: Vec<(HttpSource, Arc<dyn Intake>)>) -> Result<Self, SamePath> {
        let mut routes: HashMap<String, Route> = HashMap::new();
        for (source, intake) in sources {
            let path = format!("{}{}", config.base_path.trim_end_matches('/'), source.path);
            if source.auth.is_none() {
                tracing::warn!(source = %source.name, %path, "source has no auth: anyone who reaches it may post");
            }
            if let Some(other) = routes.get(&path) {
                return Err(SamePath { path, first: other.source.name.clone(), second: source.name });
            }
            routes.insert(path, Route::new(source, intake));
        }
        Ok(Self { config, routes, refusing: AtomicBool::new(false), requests: TaskTracker::new() })
    }

    async fn handle(&self, request: Request<Incoming>, spelling: &Spelling) -> Response<PortBody> {
        let Some(route) = self.route(request.uri().path()) else {
            return self.elsewhere(request).await;
        };
        // Counted from here on: a drain waits for it.
        let _in_progress = self.requests.token();
        let correlation_id = correlation_id(request.headers());
        let answer = if request.method() == Method::POST {
            route.receive(self, request, spelling, correlation_id.clone()).await
        } else {
            Answer::OtherMethod
        };
        answer.response(Some(&correlation_id), self.is_refusing())
    }

    /// The source of a path, which may be written with percent-encoded characters.
    fn route(&self, path: &str) -> Option<&Route> {
        let decoded = || percent_encoding::percent_decode_str(path).decode_utf8().ok();
        self.routes.get(path).or_else(|| self.routes.get(decoded()?.as_ref()))
    }

    async fn elsewhere(&self, request: Request<Incoming>) -> Response<PortBody> {
        if request.method() == Method::GET && request.uri().path() == "/" {
            return Answer::Running.response(None, self.is_refusing());
        }
        match &self.config.fallback {
            None => Answer::NotFound.response(None, self.is_refusing()),
            Some(router) => {
                let Ok(response) = router.clone().oneshot(request.map(axum::body::Body::new)).await;
                response.map(PortBody::Right)
            }
        }
    }

    fn is_refusing(&self) -> bool {
        self.refusing.load(std::sync::atomic::Ordering::Relaxed)
    }
}

impl Route {
    fn new(source: HttpSource, intake: Arc<dyn Intake>) -> Self {
        let authenticator = source.auth.clone().map(Authenticator::new);
        let mut secret_headers = vec![header::AUTHORIZATION, header::PROXY_AUTHORIZATION, header::COOKIE];
        secret_headers.extend(authenticator.iter().flat_map(Authenticator::headers));
        let rate = source.requests_per_minute.map(RateLimit::new);
        Self { source, intake, authenticator, rate, secret_headers }
    }

    async fn receive(
        &self,
        port: &DataPort,
        request: Request<Incoming>,
        spelling: &Spelling,
        correlation_id: String,
    ) -> Answer {
        let (head, mut body) = request.into_parts();
        let held = match self.read(port, &head, &mut body).await {
            Ok(held) => held,
            Err(answer) => {
                body::drain_in_background(&head, body);
                return answer;
            }
        };
        if let Err(answer) = self.let_in(&head.headers, held.bytes()) {
            return answer;
        }
        let received = Received {
            body: held.bytes().clone(),
            headers: self.headers(&head.headers, spelling),
            correlation_id: Some(correlation_id),
            ..Received::default()
        };
        let mut admissions = self.intake.admit(vec![received]).await;
        match admissions.pop() {
            Some(admission) => Answer::of(admission, &self.source.name),
            None => Answer::StorageFailed,
        }
    }

    /// Steps 1 to 3: what can be refused without knowing who asks.
    async fn read(&self, port: &DataPort, head: &Parts, body: &mut Incoming) -> Result<body::Held, Answer> {
        if port.is_refusing() {
            return Err(Answer::ShuttingDown);
        }
        if self.source.paused {
            return Err(Answer::Paused);
        }
        let limit = port.config.body_bytes_max;
        if declared_length(&head.headers).is_some_and(|length| length > limit as u64) {
            return Err(Answer::TooLarge(limit));
        }
        let encoded = head.headers.get_all(header::CONTENT_ENCODING).iter();
        if encoded.into_iter().any(|value| !value.as_bytes().trim_ascii().eq_ignore_ascii_case(b"identity")) {
            return Err(Answer::Encoded);
        }
        body::read(body, limit, port.config.body_timeout, &port.config.budget).await
    }

    /// Steps 4 and 5.
    fn let_in(&self, headers: &HeaderMap, body: &[u8]) -> Result<(), Answer> {
        if let Some(authenticator) = &self.authenticator {
            match authenticator.check(headers, body, jiff::Timestamp::now()) {
                Ok(()) => {}
                Err(AuthError::Refused(reason)) => return Err(Answer::Unauthorized(reason)),
                Err(error) => {
                    tracing::error!(source = %self.source.name, %error, "nobody can be let in");
                    return Err(Answer::CannotCheck);
                }
            }
        }
        match &self.rate {
            Some(rate) => rate.take().map_err(Answer::RateLimited),
            None => Ok(()),
        }
    }

    fn headers(&self, given: &HeaderMap, spelling: &Spelling) -> Vec<(String, String)> {
        let names = spelling.names();
        let open = given.iter().filter(|(name, _)| !self.secret_headers.contains(name));
        open.map(|(name, value)| (spelled(&names, name), text(value.as_bytes()))).collect()
    }
}

/// Header values are text by custom: UTF-8, or Latin-1 where they are not.
fn text(bytes: &[u8]) -> String {
    match std::str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => bytes.iter().copied().map(char::from).collect(),
    }
}

/// hyper has refused requests whose lengths contradict each other, and those that are no number.
fn declared_length(headers: &HeaderMap) -> Option<u64> {
    headers.get(header::CONTENT_LENGTH)?.to_str().ok()?.trim().parse().ok()
}

/// Given or new; without control characters, cut to 128 characters.
fn correlation_id(headers: &HeaderMap) -> String {
    let given = headers.get_all(CORRELATION_ID).iter().next_back().map(|value| text(value.as_bytes()));
    let clean = given.map(|given| {
        let kept: String = given.chars().filter(|c| !c.is_control()).collect();
        kept.trim().chars().take(CORRELATION_ID_CHARS_MAX).collect::<String>()
    });
    clean.filter(|id| !id.is_empty()).unwrap_or_else(|| Uuid::new_v4().hyphenated().to_string())
}

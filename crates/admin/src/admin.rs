//! The admin API (contract 12.3): who may use it, and the translation between HTTP and [`crate::replay`].
//!
//! Invariants: nothing under `/admin` is looked at before the credentials are checked, over the body as received; a parameter
//! or field that is not known is refused, so that a misspelt `dryRun` never moves a row.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use axum::{
    Extension, Json, Router,
    body::{Body, Bytes},
    extract::{ConnectInfo, DefaultBodyLimit, FromRequest, Path, Query, Request as HttpRequest, State},
    http::{HeaderMap, Method, StatusCode, Uri},
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use queuebox_api::checked::Relay;
use queuebox_core::{
    Uuid,
    ports::{Ledger, Scope},
};
use queuebox_engine::tail::Tail;
use serde_json::{Map, Value, json};
use tokio::sync::watch;

use crate::{
    Readiness,
    answer::{Answer, Failure},
    replay::{self, Caller, Request, Verb},
    tail,
    transform_test::TransformTest,
};

/// Checks the credentials of a request over its headers and its body as received. The error names the check that failed,
/// never a credential.
pub type AdminAuth = Arc<dyn Fn(&HeaderMap, &[u8]) -> Result<(), String> + Send + Sync>;

/// A body comes within this time or not at all.
const BODY_TIMEOUT: Duration = Duration::from_secs(30);

/// What the handlers share.
pub(crate) struct Admin {
    pub relay: Arc<Relay>,
    pub ledger: Arc<dyn Ledger>,
    pub auth: Option<AdminAuth>,
    pub tail: Tail,
    pub readiness: watch::Receiver<Readiness>,
    pub max_payload_bytes: usize,
    pub transform_test: TransformTest,
}

/// The routes below `/admin`.
pub(crate) fn router(admin: Arc<Admin>) -> Router {
    let limit = DefaultBodyLimit::max(admin.max_payload_bytes);
    let mut router = Router::new()
        .route("/replay", post(|shared, caller, body| act(shared, caller, body, Scope::Outbox, Verb::Replay)))
        .route("/tail", get(tail::follow))
        .route("/transform/test", post(test_transform));
    for (name, table) in [("outbox", Scope::Outbox), ("inbox", Scope::Inbox)] {
        router = router
            .route(&format!("/{name}"), get(move |shared, uri| list(shared, uri, table)))
            .route(&format!("/{name}/{{id}}"), get(move |shared, uri, id| show(shared, uri, id, table)))
            .route(
                &format!("/{name}/requeue"),
                post(move |shared, caller, body| act(shared, caller, body, table, Verb::Replay)),
            )
            .route(
                &format!("/{name}/discard"),
                post(move |shared, caller, body| act(shared, caller, body, table, Verb::Discard)),
            );
    }
    router
        .fallback(|| async { Failure::not_found() })
        .method_not_allowed_fallback(|| async { Failure::new(StatusCode::METHOD_NOT_ALLOWED, "Method not allowed") })
        .layer(middleware::from_fn_with_state(admin.clone(), guard))
        .layer(limit)
        .with_state(admin)
}

/// Size, credentials and parameters, in this order, for every path.
async fn guard(State(admin): State<Arc<Admin>>, request: HttpRequest, next: Next) -> Response {
    // Nested routes see their path without `/admin`.
    let is_test = request.uri().path().ends_with("/transform/test");
    match let_in(&admin, request).await {
        Ok(request) => next.run(request).await,
        Err(failure) if is_test => failure.of_test(),
        Err(failure) => failure.into_response(),
    }
}

async fn let_in(admin: &Admin, request: HttpRequest) -> Result<HttpRequest, Failure> {
    let (mut head, body) = request.into_parts();
    let mut unread = HttpRequest::new(body);
    // The limit of the layer travels in the extensions.
    unread.extensions_mut().clone_from(&head.extensions);
    let body = match tokio::time::timeout(BODY_TIMEOUT, Bytes::from_request(unread, &())).await {
        Ok(Ok(body)) => body,
        Ok(Err(rejection)) if rejection.status() == StatusCode::PAYLOAD_TOO_LARGE => {
            let error = format!("Request body exceeds {} bytes", admin.max_payload_bytes);
            return Err(Failure::new(StatusCode::PAYLOAD_TOO_LARGE, error));
        }
        Ok(Err(_)) => return Err(Failure::invalid("the body ended early")),
        Err(_) => return Err(Failure::new(StatusCode::REQUEST_TIMEOUT, "Request body was not received in time")),
    };
    if let Some(auth) = &admin.auth {
        auth(&head.headers, &body).map_err(|refusal| Failure::new(StatusCode::UNAUTHORIZED, refusal))?;
    }
    if head.method == Method::POST && head.uri.query().is_some_and(|query| !query.is_empty()) {
        return Err(Failure::invalid("a POST takes no parameters; put them into the body as fields"));
    }
    let from = head.extensions.get::<ConnectInfo<SocketAddr>>().map(|peer| format!(" from {}", peer.0));
    head.extensions.insert(Caller(format!("admin API{}", from.unwrap_or_default())));
    Ok(HttpRequest::from_parts(head, Body::from(body)))
}

type Shared = State<Arc<Admin>>;

async fn act(
    State(admin): Shared,
    Extension(caller): Extension<Caller>,
    body: Bytes,
    table: Scope,
    verb: Verb,
) -> Answer {
    let request = Request::parse(table, verb, &fields(&body)?)?;
    let (ledger, routes) = (admin.ledger.as_ref(), admin.relay.routes.as_slice());
    let outcome = match verb {
        Verb::Discard => replay::discard(ledger, routes, table, &request, &caller, &|_| {}).await,
        _ => replay::replay(ledger, routes, table, &request, &caller, &|_| {}).await,
    };
    Ok(Json(outcome?.to_json()))
}

/// The members of the body; nothing at all is an object without members.
fn fields(body: &[u8]) -> Result<Map<String, Value>, Failure> {
    if body.trim_ascii().is_empty() {
        return Ok(Map::new());
    }
    match serde_json::from_slice(body) {
        Ok(Value::Object(fields)) => Ok(fields),
        Ok(_) => Err(Failure::invalid("the body is no JSON object")),
        Err(error) => Err(Failure::invalid(format!("the body is no JSON: {error}"))),
    }
}

async fn list(State(admin): Shared, uri: Uri, table: Scope) -> Result<Json<replay::Page>, Failure> {
    let request = Request::parse(table, Verb::List, &parameters(&uri)?)?;
    Ok(Json(replay::list(admin.ledger.as_ref(), &admin.relay.routes, table, &request).await?))
}

async fn show(
    State(admin): Shared,
    uri: Uri,
    Path(id): Path<String>,
    table: Scope,
) -> Result<Json<replay::Entry>, Failure> {
    if let Some(name) = parameters(&uri)?.keys().next() {
        return Err(Failure::invalid(format!("{name}: unknown parameter; there are none here")));
    }
    let id = Uuid::parse_str(&id).map_err(|_| Failure::invalid(format!("{id:?} is no UUID")))?;
    let entry = replay::show(admin.ledger.as_ref(), table, id).await?;
    entry.map(Json).ok_or_else(|| Failure::new(StatusCode::NOT_FOUND, format!("There is no message {id}")))
}

/// Parameters as the fields of a body. Lists repeat their parameter; `state`, `ids` and `sources`, whose values have no commas,
/// may also be written with commas.
fn parameters(uri: &Uri) -> Result<Map<String, Value>, Failure> {
    let Query(pairs) = Query::<Vec<(String, String)>>::try_from_uri(uri).map_err(Failure::invalid)?;
    let mut fields = Map::new();
    for (name, value) in pairs {
        let values = match name.as_str() {
            "state" | "ids" | "sources" => value.split(',').map(Value::from).collect(),
            "topics" => vec![Value::from(value)],
            _ => {
                let value = if name == "limit" { number(&value) } else { Value::from(value) };
                if fields.insert(name.clone(), value).is_some() {
                    return Err(Failure::invalid(format!("{name}: is given twice")));
                }
                continue;
            }
        };
        match fields.entry(name).or_insert_with(|| json!([])) {
            Value::Array(all) => all.extend(values),
            other => *other = Value::Array(values),
        }
    }
    Ok(fields)
}

fn number(text: &str) -> Value {
    text.parse::<u64>().map_or_else(|_| Value::from(text), Value::from)
}

async fn test_transform(State(admin): Shared, body: Bytes) -> Response {
    match admin.transform_test.run(&body).await {
        Ok(answer) => Json(answer).into_response(),
        Err(failure) => failure.of_test(),
    }
}

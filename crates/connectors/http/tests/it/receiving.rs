//! HTTP as a source: the order of work of contract 6.1 and the answers of 6.9.

use std::time::Duration;

use queuebox_core::{
    Fault, Uuid,
    ports::{Admission, source::Refusal},
};
use queuebox_http::{Auth, DataPortConfig, HttpSource, Secret, port::ByteBudget};

use crate::peer::{Memory, Port, Reply, post};

fn source() -> HttpSource {
    HttpSource::new("orders", "/orders")
}

async fn port_answering(admission: Admission) -> Port {
    Port::start(DataPortConfig::default(), source(), Memory::new(move |_| admission.clone())).await
}

#[track_caller]
fn assert_answer(reply: &Reply, status: u16, body: &str) {
    assert_eq!((reply.status, reply.body.as_str()), (status, body));
    assert!(reply.header("X-Correlation-Id").is_some_and(|id| !id.is_empty()), "{reply:?}");
    let json = (!body.is_empty()).then_some("application/json");
    assert_eq!(reply.header("Content-Type"), json);
}

/// conformance 9, with an intake in place of a database
#[tokio::test]
async fn webhook_answers_match_the_table() {
    let id = Uuid::new_v4();
    let refused = |kind, reason: &str| Admission::Refused { kind, reason: reason.to_owned() };
    let table = [
        (Admission::Stored(id), 202, format!(r#"{{"messageId":"{id}"}}"#)),
        (Admission::Filtered, 202, r#"{"status":"filtered"}"#.to_owned()),
        (Admission::Duplicate, 200, r#"{"status":"duplicate"}"#.to_owned()),
        (refused(Refusal::NotJson, "Invalid JSON"), 400, r#"{"error":"Invalid JSON"}"#.to_owned()),
        (refused(Refusal::BadAttribute, r#"no "key""#), 400, r#"{"error":"no \"key\""}"#.to_owned()),
        (refused(Refusal::Transform, "T1"), 422, r#"{"error":"Transform failed: T1"}"#.to_owned()),
        (
            Admission::Failed(Fault::transient("connection", "the database is away")),
            500,
            r#"{"error":"Storage failed"}"#.to_owned(),
        ),
    ];
    for (admission, status, body) in table {
        let port = port_answering(admission).await;
        assert_answer(&port.post(&[], "{}").await, status, &body);
    }
    let port = port_answering(Admission::Stored(id)).await;
    let other = port.send("PUT /inbox/orders HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n").await;
    assert_answer(&other, 405, r#"{"error":"Only POST is taken here"}"#);
    assert_eq!(other.header("allow"), Some("POST"));
}

/// conformance 9: the refusals before the intake
#[tokio::test]
async fn refusals_before_the_intake_match_the_table() {
    let intake = Memory::storing();
    let config = DataPortConfig {
        body_bytes_max: 100,
        body_timeout: Duration::from_millis(200),
        budget: ByteBudget::new(50),
        ..DataPortConfig::default()
    };
    let port = Port::start(config.clone(), source(), intake.clone()).await;

    let too_large = r#"{"error":"Request body exceeds 100 bytes"}"#;
    assert_answer(&port.post(&[], "x".repeat(101)).await, 413, too_large);
    let chunked = "POST /inbox/orders HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n";
    assert_answer(&port.send(format!("{chunked}65\r\n{}\r\n0\r\n\r\n", "x".repeat(101))).await, 413, too_large);

    let late = r#"{"error":"Request body was not received in time"}"#;
    assert_answer(&port.send("POST /inbox/orders HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{").await, 408, late);
    assert_answer(&port.send(format!("{chunked}1\r\n{{\r\n")).await, 408, late);

    let encoded = r#"{"error":"Content-Encoding is not supported"}"#;
    assert_answer(&port.post(&[("Content-Encoding", "gzip")], "x").await, 415, encoded);
    assert_answer(&port.post(&[("Content-Encoding", "identity"), ("Content-Encoding", "br")], "x").await, 415, encoded);
    assert_answer(&port.post(&[], "x".repeat(51)).await, 503, r#"{"error":"Too many bytes in flight"}"#);
    let huge = format!("X-Huge: {}", "h".repeat(70 * 1024));
    assert_eq!(port.send(format!("POST /inbox/orders HTTP/1.1\r\nHost: x\r\n{huge}\r\n\r\n")).await.status, 431);
    let malformed = port.send(format!("{chunked}zz\r\n")).await;
    assert_answer(&malformed, 400, r#"{"error":"Request body is malformed"}"#);
    assert_eq!(intake.count(), 0);

    assert_eq!(port.post(&[("Content-Encoding", "Identity")], "{}").await.status, 202);
    let large = format!("X-Large: {}", "h".repeat(60 * 1024));
    let fits = format!("POST /inbox/orders HTTP/1.1\r\nHost: x\r\n{large}\r\nContent-Length: 2\r\n\r\n{{}}");
    assert_eq!(port.send(fits).await.status, 202);

    let paused = Port::start(config, HttpSource { paused: true, ..source() }, intake.clone()).await;
    assert_answer(&paused.post(&[], "{}").await, 503, r#"{"error":"Source is paused"}"#);
    assert_eq!(intake.count(), 2);
}

#[tokio::test]
async fn the_root_answers_and_nothing_else_does() {
    let port = port_answering(Admission::Duplicate).await;
    let root = port.send("GET / HTTP/1.1\r\nHost: x\r\n\r\n").await;
    assert_eq!((root.status, root.body.as_str()), (200, "QueueBox is running!"));
    let nowhere = r#"{"error":"No source at this path"}"#;
    for (method, path) in [("POST", "/inbox/other"), ("POST", "/orders"), ("GET", "/metrics"), ("POST", "/")] {
        let reply = port.send(format!("{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")).await;
        assert_eq!((reply.status, reply.body.as_str()), (404, nowhere), "{method} {path}");
    }
}

#[tokio::test]
async fn a_path_may_be_percent_encoded() {
    let intake = Memory::storing();
    let spaced = HttpSource { path: "/shop orders".to_owned(), ..source() };
    let port = Port::start(DataPortConfig::default(), spaced, intake.clone()).await;
    for path in ["/inbox/shop%20orders", "/inbox/%73hop%20orders"] {
        let reply = port.send(format!("POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{{}}")).await;
        assert_eq!(reply.status, 202, "{path}");
    }
    let reply = port.send("POST /inbox/shop%FForders HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}").await;
    assert_eq!(reply.status, 404);
    assert_eq!(intake.count(), 2);
}

#[tokio::test]
async fn management_routes_may_share_the_port() {
    let health = axum::Router::new().route("/health", axum::routing::get(|| async { "healthy" }));
    let config = DataPortConfig { fallback: Some(health), ..DataPortConfig::default() };
    let port = Port::start(config, source(), Memory::storing()).await;
    let reply = port.send("GET /health HTTP/1.1\r\nHost: x\r\n\r\n").await;
    assert_eq!((reply.status, reply.body.as_str()), (200, "healthy"));
    assert_eq!(port.send("GET / HTTP/1.1\r\nHost: x\r\n\r\n").await.body, "QueueBox is running!");
    assert_eq!(port.post(&[], "{}").await.status, 202);
}

#[test]
fn two_sources_cannot_have_one_path() {
    let sources = ["a", "b"].map(|name| (HttpSource::new(name, "/same"), Memory::storing() as _));
    let error = queuebox_http::DataPort::new(DataPortConfig::default(), sources.into()).err().unwrap();
    assert_eq!(error.to_string(), "the sources a and b have the same path /inbox/same");
}

/// contract 6.3, and what transforms see (9)
#[tokio::test]
async fn headers_are_handed_on_as_received_without_the_secret_ones() {
    let intake = Memory::storing();
    let auth = Auth::ApiKey { key: Secret::fixed("k").into(), header: "x-api-key".parse().unwrap() };
    let source = HttpSource { auth: Some(auth), ..source() };
    let port = Port::start(DataPortConfig::default(), source, intake.clone()).await;
    let headers = [
        ("X-GitHub-Event", "push"),
        ("Authorization", "Bearer t"),
        ("x-lower", " trimmed "),
        ("Cookie", "c=1"),
        ("X-API-KEY", "k"),
        ("Proxy-Authorization", "Basic x"),
        ("X-Twice", "1"),
        ("x-twice", "2"),
        ("X-Umlaut", "ü"),
    ];
    let mut client = port.connect().await;
    // The second request of a connection is spelled as it came, too.
    for _ in 0..2 {
        client.write(post("/inbox/orders?a=b", &headers, "{}")).await;
        assert_eq!(client.reply().await.unwrap().status, 202);
        let given = intake.last().headers;
        let given: Vec<_> = given.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        assert!(given.contains(&("X-GitHub-Event", "push")) && given.contains(&("x-lower", "trimmed")), "{given:?}");
        assert!(given.contains(&("X-Umlaut", "ü")), "{given:?}");
        let twice: Vec<_> = given.iter().filter(|(name, _)| name.eq_ignore_ascii_case("x-twice")).collect();
        assert_eq!(twice.iter().map(|(_, value)| *value).collect::<Vec<_>>(), ["1", "2"]);
        for secret in ["Authorization", "Cookie", "X-API-Key", "Proxy-Authorization"] {
            assert!(!given.iter().any(|(name, _)| name.eq_ignore_ascii_case(secret)), "{secret}");
        }
    }
}

/// conformance 100, 101: the connector's half
#[tokio::test]
async fn correlation_id_is_given_or_made() {
    let intake = Memory::storing();
    let port = Port::start(DataPortConfig::default(), source(), intake.clone()).await;
    let answered = async |headers: &[(&str, &str)]| {
        let reply = port.post(headers, "{}").await;
        let id = reply.header("X-Correlation-Id").unwrap().to_owned();
        assert_eq!(intake.last().correlation_id.as_deref(), Some(id.as_str()));
        id
    };
    assert_eq!(answered(&[("X-Correlation-Id", "c-1")]).await, "c-1");
    assert_eq!(answered(&[("x-correlation-id", "first"), ("X-CORRELATION-ID", "a\tb")]).await, "ab");
    assert_eq!(answered(&[("X-Correlation-Id", &"x".repeat(200))]).await, "x".repeat(128));
    let (made, other) = (answered(&[]).await, answered(&[("X-Correlation-Id", " ")]).await);
    assert!(made.parse::<Uuid>().is_ok() && other.parse::<Uuid>().is_ok() && made != other);
}

/// conformance 14
#[tokio::test]
async fn rate_limit_answers_429() {
    let intake = Memory::storing();
    let source = HttpSource {
        auth: Some(Auth::Bearer { token: Secret::fixed("t").into() }),
        requests_per_minute: Some(2),
        ..source()
    };
    let port = Port::start(DataPortConfig::default(), source, intake.clone()).await;
    for _ in 0..5 {
        assert_eq!(port.post(&[], "{}").await.status, 401, "unauthenticated calls do not use the limit up");
    }
    let authorized = [("Authorization", "Bearer t")];
    for _ in 0..2 {
        assert_eq!(port.post(&authorized, "{}").await.status, 202);
    }
    let reply = port.post(&authorized, "{}").await;
    assert_answer(&reply, 429, "");
    let pause: u64 = reply.header("Retry-After").unwrap().parse().unwrap();
    assert!((1..=30).contains(&pause), "{pause}");
    assert_eq!(intake.count(), 2);
}

/// Case D22
#[tokio::test]
async fn d22_body_limit() {
    let intake = Memory::storing();
    let config = DataPortConfig { body_timeout: Duration::from_millis(500), ..DataPortConfig::default() };
    let budget = config.budget.clone();
    let port = Port::start(config, source(), intake.clone()).await;
    let chunked = |sizes: &[usize]| {
        let mut request = b"POST /inbox/orders HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".to_vec();
        for size in sizes {
            request.extend(format!("{size:x}\r\n").bytes());
            request.extend(vec![b'1'; *size]);
            request.extend(b"\r\n");
        }
        request.extend(b"0\r\n\r\n");
        request
    };
    const LIMIT: usize = 1_048_576;
    assert_eq!(port.post(&[], "1".repeat(LIMIT)).await.status, 202);
    assert_eq!(port.send(chunked(&[LIMIT - 7, 7])).await.status, 202);
    assert_eq!(intake.last().body.len(), LIMIT);
    let too_large = format!(r#"{{"error":"Request body exceeds {LIMIT} bytes"}}"#);
    assert_answer(&port.post(&[], "1".repeat(LIMIT + 1)).await, 413, &too_large);
    assert_answer(&port.send(chunked(&[LIMIT, 1])).await, 413, &too_large);
    let nothing = "POST /inbox/orders HTTP/1.1\r\nHost: x\r\nContent-Length: 5000000000\r\n\r\n";
    assert_answer(&port.send(nothing).await, 413, &too_large);

    // A hundred megabytes are cut off long before their end.
    let mut client = port.connect().await;
    client.write("POST /inbox/orders HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n").await;
    let chunk = [format!("{:x}\r\n", 1 << 20).as_bytes(), &vec![b'1'; 1 << 20], b"\r\n"].concat();
    let mut sent = 0;
    while sent < 100 && client.try_write(&chunk).await {
        sent += 1;
    }
    // What the two sockets hold, and not more.
    assert!(sent < 20, "the port took {sent} MB of it");

    let digits = format!("{}\r\n", "1".repeat(10_000));
    let mut client = port.connect().await;
    client.write("POST /inbox/orders HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n").await;
    client.try_write(digits).await;
    let reply = client.reply().await;
    assert!(reply.is_none_or(|reply| reply.status == 400));

    // A slow upload is cut at the body time-out, and others go on meanwhile.
    let mut slow = port.connect().await;
    slow.write("POST /inbox/orders HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{").await;
    assert_eq!(port.post(&[], "{}").await.status, 202);
    assert_eq!(slow.reply().await.unwrap().status, 408);

    // So is one that keeps sending, a byte at a time.
    let mut drip = port.connect().await;
    drip.write("POST /inbox/orders HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n{").await;
    let mut drops = 0;
    while drops < 1_000 && drip.try_write(" ").await {
        drops += 1;
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!((10..1_000).contains(&drops), "cut after {drops} drops");
    assert_eq!((intake.count(), budget.used()), (3, 0), "no refused body is stored or held");
}

#[tokio::test]
async fn a_body_that_breaks_off_is_not_handed_on() {
    let intake = Memory::storing();
    let config = DataPortConfig::default();
    let budget = config.budget.clone();
    let port = Port::start(config, source(), intake.clone()).await;
    let mut client = port.connect().await;
    client.write("POST /inbox/orders HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{\"id\":").await;
    client.finish().await;
    assert!(client.reply().await.is_none_or(|reply| reply.status == 400));
    assert_eq!(port.post(&[], "{}").await.status, 202);
    assert_eq!((intake.count(), budget.used()), (1, 0));
}

/// conformance 158, the port's half: all sources share the bound.
#[tokio::test]
async fn bytes_in_flight_are_bounded() {
    let intake = Memory::gated();
    let config = DataPortConfig { budget: ByteBudget::new(1000), ..DataPortConfig::default() };
    let budget = config.budget.clone();
    let port = Port::start(config, source(), intake.clone()).await;
    let mut first = port.connect().await;
    first.write(post("/inbox/orders", &[], "1".repeat(600))).await;
    intake.reached.acquire().await.unwrap().forget();
    assert_eq!(budget.used(), 600);
    let refused = port.post(&[], "1".repeat(401)).await;
    assert_answer(&refused, 503, r#"{"error":"Too many bytes in flight"}"#);
    intake.gate.add_permits(10);
    assert_eq!(first.reply().await.unwrap().status, 202);
    assert_eq!(port.post(&[], "1".repeat(401)).await.status, 202);
    assert_eq!(budget.used(), 0);
}

/// conformance 84, case D03: the port's half
#[tokio::test]
async fn slow_request_survives_stop() {
    let intake = Memory::gated();
    let mut port = Port::start(DataPortConfig::default(), source(), intake.clone()).await;
    let mut handled = port.connect().await;
    handled.write(post("/inbox/orders", &[], "{}")).await;
    intake.reached.acquire().await.unwrap().forget();
    let mut upload = port.connect().await;
    upload.write("POST /inbox/orders HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{").await;
    let root = "GET / HTTP/1.1\r\nHost: x\r\n\r\n";
    let mut idle = port.connect().await;
    idle.write(root).await;
    assert_eq!(idle.reply().await.unwrap().header("Connection"), None);
    // By now the head of the upload has been read, since the port takes its connections in turn.
    port.stop();
    while port.send(root).await.header("Connection") != Some("close") {}
    idle.write(post("/inbox/orders", &[], "new")).await;
    let refused = idle.reply().await.unwrap();
    assert_answer(&refused, 503, r#"{"error":"QueueBox is shutting down"}"#);
    assert_eq!(refused.header("Connection"), Some("close"));
    assert!(!port.served.is_finished(), "requests in progress are waited for");
    upload.write("}").await;
    intake.gate.add_permits(10);
    assert_eq!(handled.reply().await.unwrap().status, 202);
    assert_eq!(upload.reply().await.unwrap().status, 202);
    (&mut port.served).await.unwrap();
    assert!(tokio::net::TcpStream::connect(port.address).await.is_err(), "the listener is closed");
}

/// contract 12.4: routers lag behind.
#[tokio::test]
async fn requests_are_accepted_during_the_shutdown_delay() {
    let intake = Memory::storing();
    let mut port =
        Port::start_with_delay(DataPortConfig::default(), source(), intake, Duration::from_millis(300)).await;
    port.stop();
    tokio::task::yield_now().await;
    assert_eq!(port.post(&[], "{}").await.status, 202);
    (&mut port.served).await.unwrap();
}

#[tokio::test]
async fn dropping_the_port_cuts_off_what_is_left() {
    let intake = Memory::gated();
    let port = Port::start(DataPortConfig::default(), source(), intake.clone()).await;
    let mut hanging = port.connect().await;
    hanging.write(post("/inbox/orders", &[], "{}")).await;
    intake.reached.acquire().await.unwrap().forget();
    port.served.abort();
    assert_eq!(hanging.reply().await, None);
}

/// A client may ask before it sends its body.
#[tokio::test]
async fn expect_continue_is_answered() {
    let port = Port::start(DataPortConfig::default(), source(), Memory::storing()).await;
    let head = |length: usize| {
        format!("POST /inbox/orders HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: {length}\r\n\r\n")
    };
    let mut client = port.connect().await;
    client.write(head(2)).await;
    assert_eq!(client.reply().await.unwrap().status, 100);
    client.write("{}").await;
    assert_eq!(client.reply().await.unwrap().status, 202);
    let mut client = port.connect().await;
    client.write(head(5_000_000)).await;
    assert_eq!(client.reply().await.unwrap().status, 413, "without asking for the body");
}

/// contract 12.4: whoever has sent half a head is not in progress.
#[tokio::test]
async fn half_a_head_does_not_hold_up_the_end() {
    let mut port = Port::start(DataPortConfig::default(), source(), Memory::storing()).await;
    let mut half = port.connect().await;
    half.write("POST /inbox/orders HTTP/1.1\r\nHost: ").await;
    port.stop();
    // Far below the time that a head may take, far above what a slow machine needs.
    tokio::time::timeout(Duration::from_secs(30), &mut port.served).await.expect("the end is held up").unwrap();
    assert_eq!(half.reply().await, None);
}

//! What an outcome means (contract 7.5, 7.6).

use std::{
    future::pending,
    net::SocketAddr,
    sync::{Arc, Mutex},
    time::Duration,
};

use async_trait::async_trait;
use bytes::Bytes;
use queuebox_core::{
    Class, Fault,
    ports::{Delivery, Destination},
};
use queuebox_http::{
    HttpDestination, Resolve, Secret,
    destination::{OAuth2, OutboundAuth, StatusRule},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpSocket, TcpStream},
    sync::oneshot,
};

use crate::peer::{Receiver, answer, delivery, destination, listen, publish, read_request};

/// conformance 52, case D17
#[tokio::test]
async fn only_2xx_completes() {
    for status in [200, 201, 202, 204, 206, 299] {
        let receiver = Receiver::start(vec![answer(status, &[], "")]).await;
        publish(&destination(&receiver.url(), |_| {})).await.unwrap();
        assert_eq!(receiver.seen().len(), 1);
    }
    for status in [304, 400, 401, 404, 408, 425, 500, 502] {
        let receiver = Receiver::start(vec![answer(status, &[], "")]).await;
        let fault = publish(&destination(&receiver.url(), |_| {})).await.unwrap_err();
        assert_eq!((fault.class, fault.code.into_owned()), (Class::Transient, format!("http_{status}")));
        assert_eq!((receiver.seen().len(), fault.trips_breaker), (1, status >= 500), "{status}");
    }
}

/// conformance 52, case D17
#[tokio::test]
async fn d17_redirects_are_not_followed() {
    let elsewhere = Receiver::start(vec![answer(200, &[], "")]).await;
    for status in [301, 302, 303, 307, 308] {
        let location = format!("http://user:canary-7731@{}/next?token=canary-7731", elsewhere.address);
        let receiver = Receiver::start(vec![answer(status, &[("Location", &location)], "")]).await;
        let destination = destination(&receiver.url(), |config| {
            config.auth = Some(OutboundAuth::Bearer(Secret::fixed("t0ken")));
        });
        let fault = publish(&destination).await.unwrap_err();
        assert_eq!((fault.class, fault.code.into_owned()), (Class::Transient, format!("http_{status}")));
        let shown = format!("http://{}/next", elsewhere.address);
        assert!(fault.detail.contains(&status.to_string()) && fault.detail.contains(&shown), "{}", fault.detail);
        assert!(!fault.detail.contains("canary-7731"), "{}", fault.detail);
        assert_eq!(receiver.seen()[0].header("Authorization"), Some("Bearer t0ken"));
    }
    assert_eq!(elsewhere.connections(), 0);
}

/// conformance 56, case D16: what the connector hands on; the ceiling and the back-off are the engine's.
#[tokio::test]
async fn retry_after() {
    let ahead = httpdate::fmt_http_date((jiff::Timestamp::now() + jiff::SignedDuration::from_secs(100)).into());
    for status in [429, 503] {
        let asked = async |headers: &[(&str, &str)]| {
            let receiver = Receiver::start(vec![answer(status, headers, "")]).await;
            let fault = publish(&destination(&receiver.url(), |_| {})).await.unwrap_err();
            assert_eq!((fault.class, fault.trips_breaker), (Class::Throttled, true));
            fault.retry_after
        };
        assert_eq!(asked(&[("Retry-After", "5")]).await, Some(Duration::from_secs(5)));
        assert_eq!(asked(&[("Retry-After", "3"), ("Retry-After", "8")]).await, Some(Duration::from_secs(8)));
        let until = asked(&[("Retry-After", &ahead)]).await.unwrap();
        assert!(until > Duration::from_secs(60) && until <= Duration::from_secs(101), "{until:?}");
        for ignored in ["0", "-1", "abc", "1e9", "Sun, 06 Nov 1994 08:49:37 GMT"] {
            assert_eq!(asked(&[("Retry-After", ignored)]).await, None, "{ignored}");
        }
        assert!(asked(&[("Retry-After", "99999999999999999999")]).await.unwrap() > Duration::from_secs(1 << 40));
    }
    let receiver = Receiver::start(vec![answer(200, &[("Retry-After", "5")], "")]).await;
    publish(&destination(&receiver.url(), |_| {})).await.unwrap();
}

/// conformance 57
#[tokio::test]
async fn permanent_status_is_dead() {
    let receiver = Receiver::start(vec![answer(410, &[], "gone for good")]).await;
    let rules = vec![StatusRule::Exactly(410), StatusRule::ServerErrors];
    let listed = destination(&receiver.url(), |config| config.permanent_statuses = rules.clone());
    let fault = publish(&listed).await.unwrap_err();
    assert_eq!((fault.class, fault.detail.as_str()), (Class::Refused, "HTTP 410 Gone: gone for good"));
    assert_eq!(receiver.seen().len(), 1);
    let outcome = async |status, rule| {
        let receiver = Receiver::start(vec![answer(status, &[], "")]).await;
        publish(&destination(&receiver.url(), |config| config.permanent_statuses = vec![rule])).await.unwrap_err().class
    };
    assert_eq!(outcome(503, StatusRule::ServerErrors).await, Class::Refused);
    assert_eq!(outcome(301, StatusRule::Exactly(301)).await, Class::Refused);
    assert_eq!(outcome(429, StatusRule::ClientErrors).await, Class::Throttled);
    assert_eq!(outcome(408, StatusRule::ClientErrors).await, Class::Transient);
    assert_eq!(outcome(429, StatusRule::Exactly(429)).await, Class::Refused);
}

fn hasty(url: &str) -> HttpDestination {
    destination(url, |config| config.timeout = Duration::from_millis(300))
}

fn assert_timed_out(fault: &Fault, class: Class, phase: &str) {
    assert_eq!((fault.class, fault.trips_breaker), (class, true), "{fault}");
    assert!(fault.detail.contains("within 300 ms") && fault.detail.ends_with(phase), "{fault}");
}

/// conformance 60, case D18
#[tokio::test]
async fn whole_attempt_has_a_deadline() {
    let trickle = async |answer: &'static str| {
        let address = listen(move |mut stream| async move {
            read_request(&mut stream).await;
            let _ = stream.write_all(answer.as_bytes()).await;
            while stream.write_all(b"x").await.is_ok() {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        })
        .await;
        publish(&hasty(&format!("http://{address}/"))).await.unwrap_err()
    };
    let fault = trickle("HTTP/1.1 200 OK\r\nX-Slow: ").await;
    assert_timed_out(&fault, Class::Ambiguous, "reading the answer");
    let fault = trickle("HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n").await;
    assert_timed_out(&fault, Class::Ambiguous, "reading the answer");
    let fault = trickle("HTTP/1.1 503 Later\r\nRetry-After: 7\r\nContent-Length: 100000\r\n\r\n").await;
    assert_eq!((fault.class, fault.retry_after), (Class::Throttled, Some(Duration::from_secs(7))), "{fault}");

    let silent = listen(|mut stream| async move {
        read_request(&mut stream).await;
        pending::<()>().await;
    })
    .await;
    let fault = publish(&hasty(&format!("http://{silent}/"))).await.unwrap_err();
    assert_timed_out(&fault, Class::Ambiguous, "waiting for the answer");

    let deaf = listen(|stream| async move {
        pending::<()>().await;
        drop(stream);
    })
    .await;
    let large = Delivery { payload: Bytes::from(vec![b'1'; 32 << 20]), ..delivery() };
    let fault = hasty(&format!("http://{deaf}/")).publish(large).await.unwrap_err();
    assert_timed_out(&fault, Class::Ambiguous, "sending the request");
    let fault = publish(&hasty(&format!("https://{deaf}/"))).await.unwrap_err();
    assert_timed_out(&fault, Class::Transient, "the TLS handshake");
}

/// conformance 60, case D18: before there is a connection
#[tokio::test]
async fn d18_names_the_phases_before_the_connection() {
    let lost = destination("http://receiver.test/", |config| {
        config.timeout = Duration::from_millis(300);
        config.resolver = Arc::new(Names(|| None));
    });
    assert_timed_out(&publish(&lost).await.unwrap_err(), Class::Transient, "resolving the host name");

    let (_full, address) = full_backlog().await;
    let fault = publish(&hasty(&format!("http://{address}/"))).await.unwrap_err();
    assert_eq!((fault.class, fault.code.as_ref()), (Class::Transient, "connect_timeout"), "{fault}");
    assert!(fault.detail.contains("within 150 ms") && fault.detail.ends_with("while connecting"), "{fault}");
}

/// The lease of the worker may end before the time-out of the destination.
#[tokio::test]
async fn an_attempt_ends_with_the_lease() {
    let silent = listen(|stream| async move {
        pending::<()>().await;
        drop(stream);
    })
    .await;
    let destination = destination(&format!("http://{silent}/"), |_| {});
    let fault = destination.publish(Delivery { time_left: Duration::from_millis(50), ..delivery() }).await.unwrap_err();
    assert!(fault.detail.contains("within 50 ms"), "{fault}");
}

/// A listener that lets no further connection in: its backlog is full.
async fn full_backlog() -> (Vec<TcpStream>, SocketAddr) {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let listener = socket.listen(1).unwrap();
    let address = listener.local_addr().unwrap();
    // Kept open for the rest of the process.
    std::mem::forget(listener);
    let mut held = Vec::new();
    while let Ok(stream) = tokio::time::timeout(Duration::from_millis(200), TcpStream::connect(address)).await {
        held.push(stream.unwrap());
    }
    (held, address)
}

#[tokio::test]
async fn only_what_may_have_left_is_ambiguous() {
    let closed = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = closed.local_addr().unwrap();
    drop(closed);
    let fault = publish(&destination(&format!("http://{address}/"), |_| {})).await.unwrap_err();
    assert_eq!((fault.class, fault.code.as_ref(), fault.trips_breaker), (Class::Transient, "connect", true), "{fault}");

    let receiver = Receiver::start(vec![String::new()]).await;
    let fault = publish(&destination(&receiver.url(), |_| {})).await.unwrap_err();
    assert_eq!((fault.class, fault.code.as_ref()), (Class::Ambiguous, "connection_lost"), "{fault}");
    assert!(fault.trips_breaker);
    assert_eq!(receiver.seen().len(), 1, "an attempt is one request");

    let receiver = Receiver::start(vec!["this is no HTTP\r\n\r\n".to_owned()]).await;
    let fault = publish(&destination(&receiver.url(), |_| {})).await.unwrap_err();
    assert_eq!(fault.class, Class::Ambiguous, "{fault}");
}

#[tokio::test]
async fn a_2xx_counts_although_its_body_breaks_off() {
    let address = listen(|mut stream| async move {
        read_request(&mut stream).await;
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf").await;
    })
    .await;
    publish(&destination(&format!("http://{address}/"), |_| {})).await.unwrap();
}

#[tokio::test]
async fn a_dropped_attempt_closes_its_connection() {
    let (closed, sees_close) = oneshot::channel();
    let closed = Arc::new(Mutex::new(Some(closed)));
    let (reached, is_reached) = oneshot::channel();
    let reached = Arc::new(Mutex::new(Some(reached)));
    let address = listen(move |mut stream| {
        let (closed, reached) = (closed.clone(), reached.clone());
        async move {
            read_request(&mut stream).await;
            reached.lock().unwrap().take().unwrap().send(()).unwrap();
            let _ = stream.read(&mut [0; 16]).await;
            closed.lock().unwrap().take().unwrap().send(()).unwrap();
        }
    })
    .await;
    let destination = destination(&format!("http://{address}/"), |_| {});
    tokio::select! {
        outcome = publish(&destination) => panic!("nobody answers: {outcome:?}"),
        reached = is_reached => reached.unwrap(),
    }
    sees_close.await.unwrap();
}

#[tokio::test]
async fn a_failed_answer_is_kept_up_to_its_bound() {
    let receiver = Receiver::start(vec![answer(500, &[], &"é".repeat(5000))]).await;
    let destination = destination(&receiver.url(), |config| config.error_body_bytes_max = 9);
    let fault = publish(&destination).await.unwrap_err();
    assert_eq!(fault.detail, "HTTP 500 Internal Server Error: éééé");
    publish(&destination).await.unwrap_err();
    assert_eq!(receiver.connections(), 1, "a small rest is read, so that the connection can be kept");
}

/// Answers from memory; `None` never answers.
struct Names<F>(F);

#[async_trait]
impl<F: Fn() -> Option<Vec<SocketAddr>> + Send + Sync + 'static> Resolve for Names<F> {
    async fn resolve(&self, _host: &str, _port: u16) -> std::io::Result<Vec<SocketAddr>> {
        match (self.0)() {
            Some(addresses) => Ok(addresses),
            None => pending().await,
        }
    }
}

fn assert_forbidden(fault: &Fault) {
    assert_eq!((fault.class, fault.code.as_ref()), (Class::Transient, "private_address"), "{fault}");
    assert!(fault.detail.contains("blockPrivateAddresses"), "{fault}");
}

/// conformance 61
#[tokio::test]
async fn private_addresses_are_refused() {
    let receiver = Receiver::start(vec![answer(200, &[], "")]).await;
    let port = receiver.address.port();
    for host in ["127.0.0.1", "2130706433", "0x7f.1", "[::1]", "[::ffff:127.0.0.1]", "0.0.0.0", "localhost"] {
        let destination = destination(&format!("http://{host}:{port}/"), |config| {
            config.block_private_addresses = true;
        });
        assert_forbidden(&publish(&destination).await.unwrap_err());
    }
    // The token endpoint is checked by the same rule.
    let destination = destination("http://receiver.test/", |config| {
        config.block_private_addresses = true;
        config.auth = Some(OutboundAuth::OAuth2(OAuth2 {
            client_id: "c".to_owned(),
            client_secret: Secret::fixed("s"),
            token_url: format!("http://127.0.0.1:{port}/token").parse().unwrap(),
            scope: None,
            extra_params: Vec::new(),
        }));
    });
    let fault = publish(&destination).await.unwrap_err();
    assert!(fault.detail.contains("blockPrivateAddresses"), "{fault}");
    assert_eq!(receiver.connections(), 0);
}

/// Case D43: a name whose addresses change after the start.
#[tokio::test]
async fn d43_each_connection_is_checked() {
    let receiver = Receiver::start(vec![answer(200, &[("Connection", "close")], "")]).await;
    let answers = Arc::new(Mutex::new(vec![vec![], vec!["127.0.0.1:1".parse().unwrap()]]));
    let names = answers.clone();
    let destination = destination(&format!("http://rebound.test:{}/", receiver.address.port()), |config| {
        config.block_private_addresses = true;
        config.resolver = Arc::new(Names(move || Some(names.lock().unwrap().remove(0))));
    });
    assert_eq!(publish(&destination).await.unwrap_err().code, "resolve");
    assert_forbidden(&publish(&destination).await.unwrap_err());
    assert!(answers.lock().unwrap().is_empty(), "every connection asks anew");
    assert_eq!(receiver.connections(), 0);
}

/// The address that was answered is the address that is used, whatever the name.
#[tokio::test]
async fn the_resolved_address_is_the_one_used() {
    let receiver = Receiver::start(vec![answer(200, &[], "")]).await;
    let address = receiver.address;
    let destination = destination("http://receiver.test/x?y=1", |config| {
        config.resolver = Arc::new(Names(move || Some(vec![address])));
    });
    publish(&destination).await.unwrap();
    let [request] = receiver.seen().try_into().unwrap();
    assert_eq!(request.line, "POST /x?y=1 HTTP/1.1");
    assert_eq!(request.header("Host"), Some("receiver.test"));
}

/// Case D40, this connector's part: a receiver that echoes what it was given.
#[tokio::test]
async fn an_echoing_receiver_reveals_no_secret() {
    let canary = "canary-7731 + more";
    let basic = "dXNlcjpjYW5hcnktNzczMSArIG1vcmU=";
    let echo = format!("no access for Authorization: Basic {basic}; {canary}; canary-7731%20%2B%20more; {basic}");
    let receiver = Receiver::start(vec![answer(401, &[], &echo)]).await;
    let destination = destination(&receiver.url(), |config| {
        config.auth =
            Some(OutboundAuth::Basic { username: "user".to_owned(), password: Secret::fixed("canary-7731 + more") });
    });
    let fault = publish(&destination).await.unwrap_err();
    for hidden in ["canary", "Y2FuYXJ5", "dXNlcjpj"] {
        assert!(!fault.detail.contains(hidden), "{fault}");
    }
    assert!(fault.detail.starts_with("HTTP 401 Unauthorized: no access"), "{fault}");
}

/// A secret that stands across the cut is not half shown.
#[tokio::test]
async fn a_cut_through_a_secret_shows_no_part_of_it() {
    let secret = "canary-7731-".repeat(20);
    for before in [0, 10, 40, 60, 63] {
        let receiver = Receiver::start(vec![answer(500, &[], &("x".repeat(before) + &secret.repeat(3)))]).await;
        let destination = destination(&receiver.url(), |config| {
            config.auth = Some(OutboundAuth::Bearer(Secret::fixed(secret.as_str())));
            config.error_body_bytes_max = 64;
        });
        let fault = publish(&destination).await.unwrap_err();
        assert!(!fault.detail.contains("canary"), "{fault}");
    }
}

/// conformance 63
#[tokio::test]
async fn header_precedence() {
    let receiver = Receiver::start(vec![answer(200, &[], "")]).await;
    let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
    let destination = destination(&receiver.url(), |config| {
        config.headers = vec![
            pair("X-Team", "manifest"),
            pair("X-Only-Manifest", "m"),
            pair("Authorization", "manifest"),
            pair("X-Topic", "manifest"),
        ];
        config.auth = Some(OutboundAuth::Bearer(Secret::fixed("t0ken")));
    });
    let rows = [
        ("x-team", "row"),
        ("X-TEAM", "row, later"),
        ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
        ("x-message-id", "forged"),
        ("content-type", "text/plain"),
        ("X-ATTEMPT", "99"),
        ("User-Agent", "GitHub-Hookshot/1"),
    ];
    let framing = [
        ("Host", "evil"),
        ("Content-Length", "1"),
        ("Transfer-Encoding", "chunked"),
        ("Connection", "close"),
        ("Keep-Alive", "timeout=1"),
        ("Proxy-Authorization", "Basic x"),
        ("Proxy-Connection", "close"),
        ("TE", "trailers"),
        ("Trailer", "x"),
        ("Upgrade", "h2c"),
        ("Expect", "100-continue"),
        ("Content-Encoding", "gzip"),
        ("Accept-Encoding", "gzip"),
    ];
    let headers = rows.iter().chain(&framing).map(|(name, value)| pair(name, value)).collect();
    let message = Delivery { headers, ..delivery() };
    destination.publish(message.clone()).await.unwrap();
    let [request] = receiver.seen().try_into().unwrap();
    assert_eq!(request.header("X-Team"), Some("row, later"));
    assert_eq!(request.header("X-Only-Manifest"), Some("m"));
    assert_eq!(request.header("Authorization"), Some("Bearer t0ken"));
    assert_eq!(request.header("traceparent"), Some(rows[2].1));
    assert_eq!(request.header("X-Message-Id"), Some(message.id.to_string().as_str()));
    assert_eq!(request.header("Content-Type"), Some("application/json"));
    assert_eq!(request.header("X-Attempt"), Some("0"));
    assert_eq!(request.header("X-Topic"), Some("order.created"));
    assert_eq!(request.header("User-Agent"), Some("GitHub-Hookshot/1"));
    assert_eq!(request.header("Host"), Some(receiver.address.to_string().as_str()));
    assert_eq!(request.header("Content-Length"), Some(message.payload.len().to_string().as_str()));
    for (name, _) in framing.iter().filter(|(name, _)| !["Host", "Content-Length"].contains(name)) {
        assert_eq!(request.header(name), None, "{name} is not sent on");
    }

    let message = Delivery { headers: vec![pair("Authorization", "of the row")], ..delivery() };
    destination.publish(message).await.unwrap();
    assert_eq!(receiver.seen()[1].header("Authorization"), Some("of the row"));
}

#[tokio::test]
async fn a_header_that_cannot_travel_is_refused() {
    let receiver = Receiver::start(vec![answer(200, &[], "")]).await;
    let destination = destination(&receiver.url(), |_| {});
    for (change, named) in [
        (Delivery { headers: vec![("X-A".to_owned(), "a\r\nX-B: c".to_owned())], ..delivery() }, "X-A"),
        (Delivery { headers: vec![("X A".to_owned(), "v".to_owned())], ..delivery() }, "X A"),
        (Delivery { key: Some("a\nb".to_owned()), ..delivery() }, "X-Message-Key"),
        (Delivery { topic: "a\u{7}".to_owned(), ..delivery() }, "X-Topic"),
    ] {
        let fault = destination.publish(change).await.unwrap_err();
        assert_eq!(fault.class, Class::Refused);
        assert!(fault.detail.contains(named), "{fault}");
    }
    assert!(receiver.seen().is_empty());
}

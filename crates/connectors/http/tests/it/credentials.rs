//! Credentials and signatures of what is sent (contract 10.2).

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use http::{HeaderMap, HeaderName, HeaderValue};
use queuebox_core::{Class, SecretError, ports::Destination as _};
use queuebox_http::{
    Auth, Authenticator, Secret, TlsFiles,
    auth::{HmacAuth, HmacPayloadFormat},
    destination::{OAuth2, OutboundAuth, Signing, signing::HmacSigning},
};

use crate::{
    peer::{Receiver, Seen, answer, destination, listen, publish},
    tls::{Authority, TlsReceiver, der},
};

/// A secret that a test changes.
fn changing(value: &str) -> (Secret, Arc<Mutex<String>>) {
    let value = Arc::new(Mutex::new(value.to_owned()));
    let shared = value.clone();
    (Secret::from_fn(move || Ok(shared.lock().unwrap().as_str().into())), value)
}

async fn authorization(auth: OutboundAuth) -> Option<String> {
    let receiver = Receiver::start(vec![answer(200, &[], "")]).await;
    publish(&destination(&receiver.url(), |config| config.auth = Some(auth))).await.unwrap();
    receiver.seen()[0].header("Authorization").map(str::to_owned)
}

/// A secret of our own that is not there costs no attempt: the destination is held until its probe can read it.
#[tokio::test]
async fn a_missing_secret_is_no_attempt() {
    let receiver = Receiver::start(vec![answer(200, &[], "")]).await;
    let found = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let secret = || {
        let found = found.clone();
        Secret::from_fn(move || match found.load(std::sync::atomic::Ordering::SeqCst) {
            true => Ok("c2VjcmV0".into()),
            false => {
                Err(SecretError { reference: "env TOKEN".to_owned(), reason: "the variable is not set".to_owned() })
            }
        })
    };
    let destinations = [
        destination(&receiver.url(), |config| config.auth = Some(OutboundAuth::Bearer(secret()))),
        destination(&receiver.url(), |config| {
            config.signing = Some(Signing::StandardWebhooks { secret: secret(), previous: None });
        }),
        destination(&receiver.url().replace("http://", "https://"), |config| {
            config.tls = TlsFiles { ca: Some(secret()), ..TlsFiles::default() }
        }),
    ];
    for destination in &destinations {
        for fault in [publish(destination).await.unwrap_err(), destination.probe().await.unwrap_err()] {
            assert_eq!((fault.class, fault.code.as_ref()), (Class::NotConnected, "secret"), "{fault}");
            assert!(fault.detail.contains("env TOKEN"), "{fault}");
        }
    }
    assert!(receiver.seen().is_empty());
    found.store(true, std::sync::atomic::Ordering::SeqCst);
    for destination in &destinations {
        destination.probe().await.unwrap();
    }
    publish(&destinations[0]).await.unwrap();
}

/// conformance 109
#[tokio::test]
async fn outbound_auth_and_signing() {
    let secret = Secret::fixed("open sesame");
    assert_eq!(authorization(OutboundAuth::Bearer(secret.clone())).await.as_deref(), Some("Bearer open sesame"));
    let basic = OutboundAuth::Basic { username: "Aladdin".to_owned(), password: secret.clone() };
    // The example of RFC 7617.
    assert_eq!(authorization(basic).await.as_deref(), Some("Basic QWxhZGRpbjpvcGVuIHNlc2FtZQ=="));
    let own = OutboundAuth::Header { name: HeaderName::from_static("authorization"), value: secret };
    assert_eq!(authorization(own).await.as_deref(), Some("open sesame"));

    let text = "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD";
    let signing = Signing::StandardWebhooks { secret: Secret::fixed(text), previous: Some(Secret::fixed("b2xk")) };
    let seen = signed(signing).await;
    assert_eq!(seen.header("webhook-id"), seen.header("X-Message-Id"));
    assert_eq!(seen.header("webhook-signature").unwrap().split(' ').count(), 2);
    for secret in [text, "b2xk"] {
        verify(Auth::StandardWebhooks { secret: Secret::fixed(secret).into(), tolerance_s: 300 }, &seen);
    }

    let mut signing = HmacSigning::new(Secret::fixed("k"));
    let mut check = HmacAuth::new(Secret::fixed("k"));
    verify(Auth::Hmac(check.clone()), &signed(Signing::Hmac(signing.clone())).await);
    signing.timestamp_header = Some(HeaderName::from_static("x-time"));
    signing.format = HmacPayloadFormat::TimestampDotBody;
    check.timestamp_header = signing.timestamp_header.clone();
    check.format = signing.format;
    verify(Auth::Hmac(check), &signed(Signing::Hmac(signing)).await);
}

async fn signed(signing: Signing) -> Seen {
    let receiver = Receiver::start(vec![answer(200, &[], "")]).await;
    publish(&destination(&receiver.url(), |config| config.signing = Some(signing))).await.unwrap();
    receiver.seen().remove(0)
}

fn verify(auth: Auth, seen: &Seen) {
    let headers: HeaderMap = seen
        .headers
        .iter()
        .map(|(name, value)| (name.parse::<HeaderName>().unwrap(), value.parse::<HeaderValue>().unwrap()))
        .collect();
    Authenticator::new(auth).check(&headers, &seen.body, jiff::Timestamp::now()).unwrap();
}

/// conformance 108, outbound
#[tokio::test]
async fn a_changed_secret_counts_at_once() {
    let (secret, value) = changing("old");
    let receiver = Receiver::start(vec![answer(200, &[], "")]).await;
    let destination = destination(&receiver.url(), |config| config.auth = Some(OutboundAuth::Bearer(secret)));
    publish(&destination).await.unwrap();
    *value.lock().unwrap() = "new".to_owned();
    publish(&destination).await.unwrap();
    let sent: Vec<_> = receiver.seen().iter().map(|seen| seen.header("Authorization").unwrap().to_owned()).collect();
    assert_eq!(sent, ["Bearer old", "Bearer new"]);
    assert_eq!(receiver.connections(), 1);
}

fn oauth2(endpoint: &Receiver) -> OAuth2 {
    OAuth2 {
        client_id: "client one".to_owned(),
        client_secret: Secret::fixed("canary-7731&"),
        token_url: format!("http://{}/token", endpoint.address).parse().unwrap(),
        scope: Some("orders:write".to_owned()),
        extra_params: vec![("audience".to_owned(), "https://receiver".to_owned())],
    }
}

fn token(value: &str, rest: &str) -> String {
    answer(200, &[], &format!(r#"{{"access_token":"{value}","token_type":"Bearer"{rest}}}"#))
}

fn tokens_used(receiver: &Receiver) -> Vec<String> {
    receiver.seen().iter().map(|seen| seen.header("Authorization").unwrap().to_owned()).collect()
}

/// conformance 109
#[tokio::test]
async fn oauth2_tokens_are_cached_and_renewed() {
    let endpoint = Receiver::start(vec![token("one", r#","expires_in":"90""#), token("two", "")]).await;
    let receiver = Receiver::start(vec![answer(200, &[], "")]).await;
    let same = |config: &mut queuebox_http::HttpDestinationConfig| {
        config.auth = Some(OutboundAuth::OAuth2(oauth2(&endpoint)));
    };
    let (first, second) = (destination(&receiver.url(), same), destination(&receiver.url(), same));
    let (a, b, c) = tokio::join!(publish(&first), publish(&second), publish(&first));
    assert_eq!((a, b, c), (Ok(()), Ok(()), Ok(())));
    let [request] = endpoint.seen().try_into().expect("one token for all");
    assert_eq!(request.header("Content-Type"), Some("application/x-www-form-urlencoded"));
    assert_eq!(
        String::from_utf8(request.body).unwrap(),
        "grant_type=client_credentials&client_id=client+one&client_secret=canary-7731%26&scope=orders%3Awrite\
         &audience=https%3A%2F%2Freceiver"
    );
    // 61 s later less than 30 s of the 90 are left.
    tokio::time::pause();
    tokio::time::advance(Duration::from_secs(61)).await;
    tokio::time::resume();
    publish(&first).await.unwrap();
    assert_eq!(tokens_used(&receiver), ["Bearer one", "Bearer one", "Bearer one", "Bearer two"]);
}

/// conformance 109
#[tokio::test]
async fn oauth2_a_401_drops_the_token_once() {
    let endpoint = Receiver::start(vec![token("one", ""), token("two", ""), token("three", "")]).await;
    let receiver = Receiver::start(vec![
        answer(401, &[], ""),
        answer(401, &[], ""),
        answer(401, &[], ""),
        answer(200, &[], ""),
        answer(401, &[], ""),
        answer(200, &[], ""),
    ])
    .await;
    let destination = destination(&receiver.url(), |config| {
        config.auth = Some(OutboundAuth::OAuth2(oauth2(&endpoint)));
    });
    for _ in 0..6 {
        let _ = publish(&destination).await;
    }
    // The second token is kept over two refusals, since it came fresh after one. Once accepted it may be dropped again.
    let expected = ["one", "two", "two", "two", "two", "three"].map(|token| format!("Bearer {token}"));
    assert_eq!(tokens_used(&receiver), expected);
    assert_eq!(endpoint.seen().len(), 3);
}

#[tokio::test]
async fn oauth2_a_failing_endpoint_fails_the_attempt() {
    let receiver = Receiver::start(vec![answer(200, &[], "")]).await;
    let refusals = [
        (answer(400, &[], r#"{"error":"invalid_client","error_description":"canary-7731&"}"#), "invalid_client", false),
        (answer(500, &[], "canary-7731&"), "HTTP 500", true),
        (answer(302, &[("Location", "http://127.0.0.1:9/")], ""), "HTTP 302", false),
        (answer(200, &[], "no json canary-7731&"), "no JSON with an access_token", false),
        (String::new(), "connection was lost", true),
    ];
    for (refusal, words, trips_breaker) in refusals {
        let endpoint = Receiver::start(vec![refusal]).await;
        let destination = destination(&receiver.url(), |config| {
            config.auth = Some(OutboundAuth::OAuth2(oauth2(&endpoint)));
        });
        let fault = publish(&destination).await.unwrap_err();
        assert_eq!((fault.class, fault.code.as_ref()), (Class::Transient, "token"));
        assert_eq!(fault.trips_breaker, trips_breaker, "{fault}");
        assert!(fault.detail.contains(words) && !fault.detail.contains("canary"), "{fault}");
    }
    let silent = listen(|stream| async move {
        std::future::pending::<()>().await;
        drop(stream);
    })
    .await;
    let token_url = format!("http://{silent}/").parse().unwrap();
    let endpoint = Receiver::start(vec![String::new()]).await;
    let slow = destination(&receiver.url(), |config| {
        config.timeout = Duration::from_millis(200);
        config.auth = Some(OutboundAuth::OAuth2(OAuth2 { token_url, ..oauth2(&endpoint) }));
    });
    let fault = publish(&slow).await.unwrap_err();
    assert_eq!((fault.class, fault.code.as_ref()), (Class::Transient, "timeout"), "the message has not left");
    assert!(fault.detail.ends_with("while fetching the access token"), "{fault}");
    assert!(receiver.seen().is_empty(), "without a token nothing is sent");
}

/// conformance 109
#[tokio::test]
async fn private_ca_and_client_certificate() {
    let (servers, clients) = (Authority::new(), Authority::new());
    let receiver = TlsReceiver::start(&servers.issue("localhost"), Some(&clients)).await;
    let identity = clients.issue("queuebox");
    let ca = Some(Secret::fixed(servers.pem()));
    let complete = TlsFiles {
        ca: ca.clone(),
        cert: Some(Secret::fixed(identity.cert.as_str())),
        key: Some(Secret::fixed(identity.key.as_str())),
    };
    publish(&destination(&receiver.url(), |config| config.tls = complete.clone())).await.unwrap();
    assert_eq!(*receiver.shown.lock().unwrap(), [Some(der(&identity.cert))]);

    let outcome =
        async |tls: TlsFiles, url: &str| publish(&destination(url, |config| config.tls = tls)).await.unwrap_err();
    outcome(TlsFiles { ca, ..TlsFiles::default() }, &receiver.url()).await;
    let unknown = outcome(TlsFiles { ca: None, ..complete.clone() }, &receiver.url()).await;
    assert_eq!((unknown.class, unknown.code.as_ref()), (Class::Transient, "tls"), "{unknown}");
    let other_name = outcome(complete.clone(), &format!("https://127.0.0.1:{}/", receiver.address.port())).await;
    assert_eq!(other_name.code, "tls", "{other_name}");
    let half = outcome(TlsFiles { key: None, ..complete.clone() }, &receiver.url()).await;
    assert!(half.detail.contains("tls.certFrom and tls.keyFrom"), "{half}");
    let junk = TlsFiles { key: Some(Secret::fixed("canary-7731")), ..complete };
    let junk = outcome(junk, &receiver.url()).await;
    assert!(junk.detail.contains("tls.keyFrom") && !junk.detail.contains("canary"), "{junk}");
    assert_eq!(receiver.shown.lock().unwrap().len(), 1);
}

/// conformance 108, 109: files that change
#[tokio::test]
async fn certificates_are_read_anew() {
    let (old, new) = (Authority::new(), Authority::new());
    let receiver = TlsReceiver::start(&old.issue("localhost"), Some(&old)).await;
    let (first, second) = (old.issue("queuebox"), old.issue("queuebox"));
    let (ca, ca_value) = changing(&new.pem());
    let (cert, cert_value) = changing(&first.cert);
    let (key, key_value) = changing(&first.key);
    let tls = TlsFiles { ca: Some(ca), cert: Some(cert), key: Some(key) };
    let destination = destination(&receiver.url(), |config| config.tls = tls);
    publish(&destination).await.unwrap_err();
    *ca_value.lock().unwrap() = old.pem() + &new.pem();
    publish(&destination).await.unwrap();
    (*cert_value.lock().unwrap(), *key_value.lock().unwrap()) = (second.cert.clone(), second.key.clone());
    publish(&destination).await.unwrap();
    assert_eq!(*receiver.shown.lock().unwrap(), [Some(der(&first.cert)), Some(der(&second.cert))]);
}

//! Who may come in (contract 10.1). Signatures that the schemes' own documents and libraries publish are used as they are;
//! the others were made with `openssl dgst -hmac`.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use http::{HeaderMap, HeaderName, HeaderValue};
use queuebox_http::{
    Auth, Authenticator, DataPortConfig, HttpSource, Secret, SecretError,
    auth::{Accepted, AuthError, HmacAlgorithm, HmacAuth, HmacPayloadFormat},
};

use crate::peer::{Memory, Port, post};

/// The signed body of case D20; the line end at its end counts.
const BODY: &str = "{\"id\": \"g1\", \"b\":1, \"a\":1.0, \"s\":\"\\u00e9\"}\n";
const BODY_SHA256: &str = "2f68c2feb08ac22e746c67d11c30586136744b5997c6355dca7ee275f18c378b";
const BODY_SHA512: &str = "7c336cbdec31eedfe61b293241cf3e6c3bd064b913d5c368d91c7bd4fa38fa54f24819d4d9e82cc6390f95ec9e4d2e3649a48e73aeb902a9943ed17f391268f4";
const SECRET: &str = "d20-secret";

fn secret(value: &str) -> Accepted {
    Secret::fixed(value).into()
}

fn headers(pairs: &[(&str, &str)]) -> HeaderMap {
    let parsed = |(name, value): &(&str, &str)| {
        (name.parse::<HeaderName>().unwrap(), HeaderValue::from_bytes(value.as_bytes()).unwrap())
    };
    let mut map = HeaderMap::new();
    for (name, value) in pairs.iter().map(parsed) {
        map.append(name, value);
    }
    map
}

fn at(second: i64) -> jiff::Timestamp {
    jiff::Timestamp::from_second(second).unwrap()
}

#[track_caller]
fn refused(result: Result<(), AuthError>) -> String {
    match result {
        Err(AuthError::Refused(reason)) => reason,
        other => panic!("must be refused: {other:?}"),
    }
}

fn hmac(change: impl FnOnce(&mut HmacAuth)) -> Auth {
    let mut auth = HmacAuth::new(secret(SECRET));
    change(&mut auth);
    Auth::Hmac(auth)
}

/// conformance 106: over the wire, each kind with its right and a wrong credential
#[tokio::test]
async fn inbound_auth_kinds() {
    let sha256 = format!("sha256={BODY_SHA256}");
    let now = jiff::Timestamp::now();
    let (seconds, milliseconds) = (now.as_second().to_string(), now.as_millisecond().to_string());
    let dotted = openssl(&["-sha512"], &format!("{milliseconds}.{BODY}"));
    let stripe = format!("t={seconds},v1={},v0=00", openssl(&["-sha256"], &format!("{seconds}.{BODY}")));
    let timed = |auth: &mut HmacAuth| {
        auth.algorithm = HmacAlgorithm::Sha512;
        auth.timestamp_header = Some("x-time".parse().unwrap());
        auth.format = HmacPayloadFormat::TimestampDotBody;
        auth.prefix = String::new();
    };
    let plain512 = |auth: &mut HmacAuth| {
        auth.algorithm = HmacAlgorithm::Sha512;
        auth.prefix = "v=".to_owned();
    };
    let kinds: Vec<(Auth, Vec<(&str, String)>)> = vec![
        (Auth::Bearer { token: secret("t") }, vec![("Authorization", "bEARER t".to_owned())]),
        (Auth::ApiKey { key: secret("k"), header: "x-api-key".parse().unwrap() }, vec![("X-API-Key", "k".to_owned())]),
        (hmac(|_| {}), vec![("X-Signature", sha256.clone())]),
        (hmac(plain512), vec![("X-Signature", format!("v={BODY_SHA512}"))]),
        (hmac(timed), vec![("X-Signature", dotted), ("X-Time", milliseconds)]),
        (Auth::GitHub { secret: secret(SECRET) }, vec![("X-Hub-Signature-256", sha256)]),
        (Auth::Stripe { secret: secret(SECRET), tolerance_s: 300 }, vec![("Stripe-Signature", stripe)]),
    ];
    for (auth, good) in kinds {
        let intake = Memory::storing();
        let source = HttpSource { auth: Some(auth.clone()), ..HttpSource::new("orders", "/orders") };
        let port = Port::start(DataPortConfig::default(), source, intake.clone()).await;
        let given: Vec<(&str, &str)> = good.iter().map(|(name, value)| (*name, value.as_str())).collect();
        assert_eq!(port.post(&given, BODY).await.status, 202, "{auth:?}");
        let stored = intake.last().headers;
        // What a signature covers, an id or a time, is no secret.
        let covered = ["webhook-id", "webhook-timestamp", "x-time"];
        let mut secrets =
            given.iter().map(|(name, _)| *name).filter(|name| !covered.contains(&name.to_lowercase().as_str()));
        assert!(secrets.all(|secret| !stored.iter().any(|(name, _)| name.eq_ignore_ascii_case(secret))));
        let wrong: Vec<(&str, String)> =
            good.iter().map(|(name, value)| (*name, value.replace(['t', 'k', '7'], "0"))).collect();
        let wrong: Vec<(&str, &str)> = wrong.iter().map(|(name, value)| (*name, value.as_str())).collect();
        let doubled = [given.clone(), given.clone()].concat();
        for headers in [&[][..], &wrong, &doubled] {
            let reply = port.post(headers, BODY).await;
            assert_eq!(reply.status, 401, "{auth:?}");
            assert!(reply.body.starts_with(r#"{"error":""#) && reply.header("X-Correlation-Id").is_some(), "{reply:?}");
            assert!(given.iter().all(|(_, credential)| !reply.body.contains(credential) || credential.len() == 1));
        }
        // Refused before anything is parsed: junk with a wrong credential is 401, never 400.
        assert_eq!(port.post(&wrong, "not json").await.status, 401);
        assert_eq!(intake.count(), 1, "nothing else reached the intake");
    }
}

/// What `openssl` says, where the time of the test is part of what is signed.
fn openssl(algorithm: &[&str], text: &str) -> String {
    use std::io::Write as _;
    let mut child = std::process::Command::new("openssl")
        .arg("dgst")
        .args(algorithm)
        .args(["-hmac", SECRET])
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .expect("openssl is installed");
    child.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    let output = String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap();
    output.trim().rsplit(' ').next().unwrap().to_owned()
}

/// The example of GitHub's own documentation on validating deliveries.
#[test]
fn github_published_vector() {
    let check = Authenticator::new(Auth::GitHub { secret: secret("It's a Secret to Everybody") });
    let good = "sha256=757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17";
    let body = b"Hello, World!";
    check.check(&headers(&[("X-Hub-Signature-256", good)]), body, at(0)).unwrap();
    for wrong in [&good[7..], &good.to_uppercase(), "sha256=", &good[..60], &format!("{good}0")] {
        refused(check.check(&headers(&[("X-Hub-Signature-256", wrong)]), body, at(0)));
    }
    refused(check.check(&headers(&[("X-Hub-Signature", good)]), body, at(0)));
    refused(check.check(&headers(&[("X-Hub-Signature-256", good)]), b"Hello, World!\n", at(0)));
}

/// The vector of the reference libraries of Standard Webhooks.
#[test]
fn standard_webhooks_published_vector() {
    let body = br#"{"email":"test@example.com","username":"test_user"}"#;
    let id = ("webhook-id", "msg_27UH4WbU6Z5A5EzD8u03UvzRbpk");
    let time = ("webhook-timestamp", "1649367553");
    let good = "v1,tZ1I4/hDygAJgO5TYxiSd6Sd0kDW6hPenDe+bTa3Kkw=";
    let now = at(1_649_367_553);
    for text in ["whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD", "C2FVsBQIhrscChlQIMV+b5sSYspob7oD"] {
        let check = Authenticator::new(Auth::StandardWebhooks { secret: secret(text), tolerance_s: 300 });
        let with = |signature: &str| check.check(&headers(&[id, time, ("webhook-signature", signature)]), body, now);
        with(good).unwrap();
        with(&format!("v1,AAAA v1a,{good} {good}")).unwrap();
        for wrong in ["v1,AAAA", &good[3..], &good.replace("v1", "v2"), "v1", "v1,", ",", &good.replace(',', " ")] {
            refused(with(wrong));
        }
        refused(check.check(&headers(&[time, ("webhook-signature", good)]), body, now));
        refused(check.check(&headers(&[id, time, ("webhook-signature", good)]), b"{}", now));
        let other = ("webhook-id", "msg_other");
        refused(check.check(&headers(&[other, time, ("webhook-signature", good)]), body, now));
    }
    let junk = Authenticator::new(Auth::StandardWebhooks { secret: secret("whsec_???"), tolerance_s: 300 });
    let result = junk.check(&headers(&[id, time, ("webhook-signature", good)]), body, now);
    assert_eq!(result, Err(AuthError::SecretForm("standardWebhooks")));
}

#[test]
fn stripe_any_v1_entry_and_exactly_one_time() {
    let check = Authenticator::new(Auth::Stripe { secret: secret("whsec_stripe"), tolerance_s: 300 });
    let body = br#"{"id":"evt_1"}"#;
    let good = "v1=551cd9a7cbe9dfb4fcbdabaf05acc405aeb3099125365c4de20eb4408f19bd6f";
    let with = |value: &str| check.check(&headers(&[("Stripe-Signature", value)]), body, at(1_492_774_577));
    with(&format!("t=1492774577,{good}")).unwrap();
    with(&format!("t=1492774577,v1=00,{good},v0=11")).unwrap();
    with(&format!("{good}, t=1492774577")).unwrap();
    for wrong in [
        good.to_owned(),
        "t=1492774577".to_owned(),
        format!("t=1492774578,{good}"),
        format!("t=1492774577,t=1492774577,{good}"),
        format!("t=,{good}"),
        format!("t=1492774577,v0{}", &good[2..]),
        format!("t=1492774577 {good}"),
        "=,=,".to_owned(),
    ] {
        refused(with(&wrong));
    }
}

/// Case D20
#[tokio::test]
async fn d20_hmac_over_the_bytes_as_received() {
    let intake = Memory::new(|received| match serde_json::from_slice::<serde_json::Value>(&received.body) {
        Ok(_) => queuebox_core::ports::Admission::Stored(queuebox_core::Uuid::nil()),
        Err(_) => queuebox_core::ports::Admission::Refused {
            kind: queuebox_core::ports::source::Refusal::NotJson,
            reason: "Invalid JSON".to_owned(),
        },
    });
    let source = HttpSource { auth: Some(hmac(|_| {})), ..HttpSource::new("orders", "/orders") };
    let port = Port::start(DataPortConfig::default(), source, intake.clone()).await;
    let good = format!("sha256={BODY_SHA256}");
    let signed = [("X-Signature", good.as_str())];
    assert_eq!(port.post(&signed, BODY).await.status, 202);
    let (first, second) = BODY.split_at(10);
    let chunked = format!(
        "POST /inbox/orders HTTP/1.1\r\nHost: x\r\nX-Signature: {good}\r\nTransfer-Encoding: chunked\r\n\r\n\
         {:x}\r\n{first}\r\n{:x}\r\n{second}\r\n0\r\n\r\n",
        first.len(),
        second.len()
    );
    assert_eq!(port.send(chunked).await.status, 202);
    assert_eq!(intake.last().body, BODY, "exactly as received");
    let minified = r#"{"id":"g1","b":1,"a":1.0,"s":"é"}"#;
    for changed in [BODY.trim_end(), minified, "not json", ""] {
        assert_eq!(port.post(&signed, changed).await.status, 401, "{changed}");
    }
    assert_eq!(port.post(&[signed[0], ("Content-Encoding", "gzip")], BODY).await.status, 415);
    assert_eq!(intake.count(), 2);
    let junk = "sha256=29212cb7bdb5552054120ce21b0938bcbf67c72474ad89185fdfc721781d23b1";
    assert_eq!(port.post(&[("X-Signature", junk)], "not json").await.status, 400);
}

/// conformance 107, case D24
#[test]
fn d24_signature_time_window() {
    const NOW: i64 = 1_700_000_000;
    let body = br#"{"id":"t1"}"#;
    let sha512 = "a941f9ec38284007b121f8e237c11e7d3b6b44e2f5e6edccc6f90893a7b5d8255b61b1b164ae6c63da87bff68843766a2dd0b204f5aabb4946beb6affededc11";
    let auth = HmacAuth {
        secret: secret("d24-secret"),
        algorithm: HmacAlgorithm::Sha512,
        prefix: String::new(),
        timestamp_header: Some("x-time".parse().unwrap()),
        format: HmacPayloadFormat::TimestampDotBody,
        ..HmacAuth::new(secret("d24-secret"))
    };
    let check = Authenticator::new(Auth::Hmac(auth));
    let signed = headers(&[("X-Signature", sha512), ("X-Time", "1700000000000")]);
    for inside in [-300, -299, 0, 299, 300] {
        check.check(&signed, body, at(NOW + inside)).unwrap();
    }
    for outside in [-301, 301, 86_400, -86_400] {
        assert_eq!(refused(check.check(&signed, body, at(NOW + outside))), "x-time is outside the tolerance");
    }
    let long = "1".repeat(40);
    for text in ["1700000000", "1.7e12", "-1700000000000", "", " ", &long, "9223372036854775808", "0x1", "+1"] {
        refused(check.check(&headers(&[("X-Signature", sha512), ("X-Time", text)]), body, at(NOW)));
    }
    refused(check.check(&headers(&[("X-Signature", sha512)]), body, at(NOW)));
    let twice = [("X-Signature", sha512), ("X-Time", "1700000000000"), ("X-Time", "1700000000000")];
    assert_eq!(refused(check.check(&headers(&twice), body, at(NOW))), "x-time is given more than once");
    // The signature covers the time: neither can be taken from another valid request.
    let moved = headers(&[("X-Signature", sha512), ("X-Time", "1700000000001")]);
    assert_eq!(refused(check.check(&moved, body, at(NOW))), "x-signature does not match the body");
    refused(check.check(&signed, br#"{"id":"t2"}"#, at(NOW)));
}

/// conformance 107: the schemes with seconds
#[test]
fn seconds_are_not_milliseconds() {
    let check = Authenticator::new(Auth::Stripe { secret: secret("whsec_stripe"), tolerance_s: 300 });
    let good = "v1=551cd9a7cbe9dfb4fcbdabaf05acc405aeb3099125365c4de20eb4408f19bd6f";
    let at_second = |second: i64| {
        let value = format!("t=1492774577,{good}");
        check.check(&headers(&[("Stripe-Signature", &value)]), br#"{"id":"evt_1"}"#, at(second))
    };
    at_second(1_492_774_877).unwrap();
    at_second(1_492_774_277).unwrap();
    refused(at_second(1_492_774_878));
    refused(at_second(1_492_774_276));
    let hooks = Auth::StandardWebhooks { secret: secret("C2FVsBQIhrscChlQIMV+b5sSYspob7oD"), tolerance_s: 300 };
    let wrong_unit = [
        ("webhook-id", "msg_27UH4WbU6Z5A5EzD8u03UvzRbpk"),
        ("webhook-timestamp", "1649367553000"),
        ("webhook-signature", "v1,tZ1I4/hDygAJgO5TYxiSd6Sd0kDW6hPenDe+bTa3Kkw="),
    ];
    let result = Authenticator::new(hooks).check(&headers(&wrong_unit), b"{}", at(1_649_367_553));
    assert_eq!(refused(result), "webhook-timestamp is outside the tolerance");
}

/// conformance 108
#[tokio::test]
async fn secret_rotation() {
    let (current, previous) = (Arc::new(Mutex::new("old".to_owned())), Arc::new(Mutex::new(String::new())));
    let reading = |value: &Arc<Mutex<String>>| {
        let value = value.clone();
        Secret::from_fn(move || Ok(value.lock().unwrap().as_str().into()))
    };
    let token = Accepted { current: reading(&current), previous: Some(reading(&previous)) };
    let source = HttpSource { auth: Some(Auth::Bearer { token }), ..HttpSource::new("orders", "/orders") };
    let port = Port::start(DataPortConfig::default(), source, Memory::storing()).await;
    let status = async |token: &str| port.post(&[("Authorization", &format!("Bearer {token}"))], "{}").await.status;
    assert_eq!((status("old").await, status("new").await), (202, 401));
    // An empty secret lets nobody in.
    assert_eq!(port.post(&[("Authorization", "Bearer ")], "{}").await.status, 401);
    (*current.lock().unwrap(), *previous.lock().unwrap()) = ("new".to_owned(), "old".to_owned());
    assert_eq!((status("old").await, status("new").await), (202, 202));
    previous.lock().unwrap().clear();
    assert_eq!((status("old").await, status("new").await), (401, 202));
}

#[tokio::test]
async fn a_secret_that_cannot_be_read_lets_nobody_in() {
    let gone =
        || Secret::from_fn(|| Err(SecretError { reference: "file: /gone".to_owned(), reason: "no file".to_owned() }));
    let intake = Memory::storing();
    let auth = Auth::Bearer { token: gone().into() };
    let source = HttpSource { auth: Some(auth), ..HttpSource::new("orders", "/orders") };
    let port = Port::start(DataPortConfig::default(), source, intake.clone()).await;
    let reply = port.post(&[("Authorization", "Bearer t")], "{}").await;
    assert_eq!((reply.status, reply.body.as_str()), (503, r#"{"error":"Credentials cannot be checked"}"#));
    assert_eq!(intake.count(), 0);
    // While one of two can be read, that one counts.
    let either = Auth::Bearer { token: Accepted { current: Secret::fixed("t"), previous: Some(gone()) } };
    let check = Authenticator::new(either);
    check.check(&headers(&[("Authorization", "Bearer t")]), b"", at(0)).unwrap();
    assert!(check.check(&headers(&[("Authorization", "Bearer u")]), b"", at(0)).is_err());
}

/// Not let in does not mean cut off: the connection serves the next request.
#[tokio::test]
async fn a_refused_sender_may_try_again() {
    let source = HttpSource { auth: Some(hmac(|_| {})), ..HttpSource::new("orders", "/orders") };
    let port = Port::start(DataPortConfig::default(), source, Memory::storing()).await;
    let mut client = port.connect().await;
    client.write(post("/inbox/orders", &[], BODY)).await;
    assert_eq!(client.reply().await.unwrap().status, 401);
    client.write(post("/inbox/orders", &[("X-Signature", &format!("sha256={BODY_SHA256}"))], BODY)).await;
    let reply = tokio::time::timeout(Duration::from_secs(30), client.reply()).await.unwrap();
    assert_eq!(reply.unwrap().status, 202);
}

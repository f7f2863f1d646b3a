//! TLS, client certificates, and secrets that change while the connector runs.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use queuebox_core::{Class, ports::Destination};
use queuebox_nats::{DestinationConfig, Login, NatsDestination, Secret, TlsConfig};
use queuebox_testkit::{Authority, eventually_ok, private_nats_with};

use crate::support;

fn secret(text: impl Into<String>) -> Option<Secret> {
    Some(Secret::fixed(text.into()))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tls_asks_for_our_certificate_and_checks_the_servers() {
    let authority = Authority::new();
    let identity = authority.server();
    let server = private_nats_with(&format!(
        "tls {{ cert_file: {:?}, key_file: {:?}, ca_file: {:?}, verify: true }}\n",
        identity.cert,
        identity.key,
        authority.ca_path()
    ))
    .await;
    let client = authority.client("app");
    let good =
        TlsConfig { ca: secret(authority.ca_pem()), cert: secret(client.cert_pem()), key: secret(client.key_pem()) };
    let to = |host: &str, tls: &TlsConfig| {
        let mut config = DestinationConfig { jetstream: false, ..support::destination(server.port(), "s") };
        config.connection.servers = format!("{host}:{}", server.port());
        config.connection.tls = tls.clone();
        NatsDestination::new(config)
    };
    for host in ["127.0.0.1", "tls://localhost"] {
        to(host, &good).probe().await.unwrap_or_else(|fault| panic!("{host}: {fault}"));
    }
    let stranger = Authority::new();
    for (what, tls) in [
        ("another authority", TlsConfig { ca: secret(stranger.ca_pem()), ..good.clone() }),
        ("the system's roots", TlsConfig { ca: None, ..good.clone() }),
        ("no certificate of ours", TlsConfig { cert: None, key: None, ..good.clone() }),
        ("half of a certificate", TlsConfig { key: None, ..good.clone() }),
        ("no PEM", TlsConfig { ca: secret("canary-7731"), ..good.clone() }),
    ] {
        let fault = to("127.0.0.1", &tls).probe().await.expect_err(what);
        assert_eq!(fault.class, Class::NotConnected, "{what}: {fault}");
        assert!(!fault.detail.contains("canary"), "{what}: {fault}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rotated_password_is_used_from_the_next_connection_on() {
    let server = private_nats_with("authorization { user: app, password: old }\n").await;
    let current = Arc::new(Mutex::new("wrong-canary-7731"));
    let read = current.clone();
    let mut config = DestinationConfig { jetstream: false, ..support::destination(server.port(), "s") };
    config.connection.login = Login::Password {
        username: "app".to_owned(),
        password: Secret::from_fn(move || Ok((*read.lock().unwrap()).into())),
    };
    let destination = NatsDestination::new(config);
    let fault = destination.probe().await.expect_err("the password is wrong");
    assert_eq!((fault.class, fault.code.as_ref()), (Class::NotConnected, "login"), "{fault}");
    assert!(fault.detail.contains("app") && !fault.detail.contains("canary"), "{fault}");
    *current.lock().unwrap() = "old";
    eventually_ok("the right password", Duration::from_secs(30), || destination.probe()).await;

    // The server comes back with another password.
    let file = server.folder().join("nats.conf");
    let text = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, text.replace("password: old", "password: new")).unwrap();
    *current.lock().unwrap() = "new";
    server.stop().await;
    server.start().await;
    eventually_ok("the new password", Duration::from_secs(60), || destination.publish(support::row(0))).await;
}

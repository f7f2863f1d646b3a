//! TLS, client certificates, refused logins, and secrets that change while the connector runs.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use queuebox_core::{Class, SecretError, ports::Destination};
use queuebox_rabbitmq::{BrokerUrl, ConnectionConfig, DestinationConfig, RabbitDestination, Secret, TlsConfig};
use queuebox_testkit::{Authority, RabbitMq, eventually_ok, free_port, private_rabbitmq_with, unique};
use serde_json::json;

use crate::support;

fn secret(text: impl Into<String>) -> Option<Secret> {
    Some(Secret::fixed(text.into()))
}

fn with(connection: ConnectionConfig) -> RabbitDestination {
    RabbitDestination::new(DestinationConfig { connection, ..support::destination("amqp://x") })
}

async fn tls_broker(authority: &Authority, port: u16) -> RabbitMq {
    let server = authority.server();
    private_rabbitmq_with(&format!(
        "listeners.ssl.1 = 127.0.0.1:{port}\nssl_options.cacertfile = {}\nssl_options.certfile = {}\nssl_options.keyfile = {}\n\
         ssl_options.verify = verify_peer\nssl_options.fail_if_no_peer_cert = true\nssl_cert_login_from = common_name\n\
         auth_mechanisms.1 = PLAIN\nauth_mechanisms.2 = EXTERNAL\n",
        authority.ca_path().display(),
        server.cert.display(),
        server.key.display(),
    ))
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tls_asks_for_our_certificate_and_checks_the_brokers() {
    let authority = Authority::new();
    let port = free_port();
    let broker = tls_broker(&authority, port).await;
    let client = authority.client("app");
    let good =
        TlsConfig { ca: secret(authority.ca_pem()), cert: secret(client.cert_pem()), key: secret(client.key_pem()) };
    let to = |host: &str, tls: &TlsConfig| {
        with(ConnectionConfig {
            tls: tls.clone(),
            ..support::connection(&format!("amqps://guest:guest@{host}:{port}"))
        })
    };
    for host in ["127.0.0.1", "localhost"] {
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

    // The certificate alone logs in, once the broker has the plugin and a user of its name.
    let plugins = "[rabbitmq_management,rabbitmq_auth_mechanism_ssl].\n";
    std::fs::write(broker.folder().join("data/enabled_plugins"), plugins).unwrap();
    broker.stop().await;
    broker.start().await;
    let all = json!({"configure": ".*", "write": ".*", "read": ".*"});
    for (at, body) in [("/users/app", json!({"password_hash": "", "tags": ""})), ("/permissions/%2F/app", all)] {
        eventually_ok("set up", Duration::from_secs(30), || broker.try_api("PUT", at, Some(body.clone()))).await;
    }
    let by_certificate = |tls: &TlsConfig| {
        let url = format!("amqps://127.0.0.1:{port}?auth_mechanism=external");
        with(ConnectionConfig { url: BrokerUrl::Plain(url), tls: tls.clone(), ..support::connection("") })
    };
    by_certificate(&good).probe().await.unwrap();
    let other = authority.client("nobody");
    let nobody = TlsConfig { cert: secret(other.cert_pem()), key: secret(other.key_pem()), ..good };
    let fault = by_certificate(&nobody).probe().await.expect_err("there is no such user");
    assert_eq!((fault.class, fault.code.as_ref()), (Class::NotConnected, "login"), "{fault}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rotated_password_is_used_from_the_next_connection_on() {
    let broker = support::broker().await;
    let user = unique("user");
    let set = async |password: &str| {
        let all = json!({"configure": ".*", "write": ".*", "read": ".*"});
        for (at, body) in [
            (format!("/users/{user}"), json!({"password": password, "tags": ""})),
            (format!("/permissions/%2F/{user}"), all),
        ] {
            eventually_ok("set up", Duration::from_secs(10), || broker.try_api("PUT", &at, Some(body.clone()))).await;
        }
    };
    set("old").await;
    let current = Arc::new(Mutex::new("wrong-canary-7731"));
    let read = current.clone();
    let destination = with(ConnectionConfig {
        url: BrokerUrl::Plain(format!("amqp://127.0.0.1:{}", broker.port())),
        username: Some(user.clone()),
        password: Some(Secret::from_fn(move || Ok((*read.lock().unwrap()).into()))),
        ..support::connection("")
    });
    let fault = destination.probe().await.expect_err("the password is wrong");
    assert_eq!((fault.class, fault.code.as_ref()), (Class::NotConnected, "login"), "{fault}");
    assert!(fault.detail.contains(&user) && !fault.detail.contains("canary"), "{fault}");
    *current.lock().unwrap() = "old";
    eventually_ok("the right password", Duration::from_secs(30), || destination.probe()).await;
    set("new").await;
    *current.lock().unwrap() = "new";
    destination.probe().await.expect("the open connection goes on");
    let another = with(ConnectionConfig {
        url: BrokerUrl::Plain(format!("amqp://127.0.0.1:{}", broker.port())),
        username: Some(user.clone()),
        password: Some(Secret::from_fn(|| {
            Err(SecretError { reference: "env RABBIT_PASSWORD".to_owned(), reason: "it is not set".to_owned() })
        })),
        ..support::connection("")
    });
    let fault = another.probe().await.expect_err("no password");
    assert!(fault.detail.contains("RABBIT_PASSWORD"), "{fault}");
}

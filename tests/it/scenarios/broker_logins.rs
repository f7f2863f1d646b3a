//! TLS, client certificates and logins as manifests state them, with the built program: each message goes out to the broker and comes
//! back in from it. What refuses whom is in the suites of the connectors.

use async_nats::jetstream;
use queuebox_testkit::{
    self as testkit, Authority, Identity, eventually_ok, private_kafka_with, private_nats_with, private_rabbitmq_with,
};
use serde_json::{Value, json};

use crate::{
    brokers::Broker,
    support::{Kind, PATIENCE, World},
};

/// With everything that URLs, shells and configuration files trip over.
const PASSWORD: &str = "p@s:s w%o#r?d&[]=%41";

/// The `tls` block for a client with a certificate.
fn tls(authority: &Authority, client: &Identity) -> Value {
    let file = |path: &std::path::Path| json!({ "file": path });
    json!({ "caFrom": file(authority.ca_path()), "certFrom": file(&client.cert), "keyFrom": file(&client.key) })
}

/// From a webhook through the broker to the receiver.
async fn out_and_back_in(destination: Value, source: Value) {
    let world = World::on(Kind::Sqlite)
        .await
        .env("PASSWORD", PASSWORD)
        .source("hooks", json!({ "topic": "out" }))
        .destination("broker", destination)
        .source("events", source)
        .routes(&[("out", &["broker"]), ("events", &["receiver"])]);
    let worker = world.start().await;
    worker.post("hooks", r#"{"id":"m-1"}"#).await.accepted();
    let requests = world.receiver.wait_for(1, PATIENCE).await;
    assert_eq!((requests[0].header("x-source"), requests[0].json()), ("events", json!({ "id": "m-1" })));
    world.finish().await;
}

mod broker_message_is_stored {
    use super::*;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn over_tls_of_rabbitmq() {
        let (authority, port) = (Authority::new(), testkit::free_port());
        let (server, client) = (authority.server(), authority.client("queuebox"));
        let config = format!(
            "listeners.ssl.1 = 127.0.0.1:{port}\nssl_options.cacertfile = {}\nssl_options.certfile = {}\n\
             ssl_options.keyfile = {}\nssl_options.verify = verify_peer\nssl_options.fail_if_no_peer_cert = true\n",
            authority.ca_path().display(),
            server.cert.display(),
            server.key.display(),
        );
        let broker = Broker::rabbitmq(private_rabbitmq_with(&config).await).await;
        let line = broker.line().await;
        let user = json!({ "password": PASSWORD, "tags": "" });
        broker.api("PUT", "/users/app", Some(user)).await;
        let all = json!({"configure": ".*", "write": ".*", "read": ".*"});
        broker.api("PUT", "/permissions/{vhost}/app", Some(all)).await;
        let vhost = broker.address.rsplit_once('/').unwrap().1;
        let login = json!({
            "url": format!("amqps://127.0.0.1:{port}/{vhost}"), "username": "app",
            "passwordFrom": { "env": "PASSWORD" }, "tls": tls(&authority, &client),
        });
        let with = |mut patch: Value| {
            patch["rabbitmq"].as_object_mut().unwrap().extend(login.as_object().unwrap().clone());
            patch
        };
        out_and_back_in(with(line.as_destination()), with(line.as_source())).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn over_tls_of_kafka() {
        let (authority, port) = (Authority::new(), testkit::free_port());
        let (server, client) = (authority.server(), authority.client("queuebox"));
        let keystore = server.cert.with_file_name("broker.pem");
        std::fs::write(&keystore, server.key_pem() + &server.cert_pem()).unwrap();
        let config = format!(
            "listeners={{listeners}},SAFE://127.0.0.1:{port}\n\
             advertised.listeners={{advertised.listeners}},SAFE://127.0.0.1:{port}\n\
             listener.security.protocol.map={{listener.security.protocol.map}},SAFE:SASL_SSL\n\
             listener.name.safe.sasl.enabled.mechanisms=PLAIN\n\
             listener.name.safe.plain.sasl.jaas.config=org.apache.kafka.common.security.plain.PlainLoginModule required \
             user_app=\"{PASSWORD}\";\n\
             listener.name.safe.ssl.keystore.type=PEM\nlistener.name.safe.ssl.keystore.location={}\n\
             listener.name.safe.ssl.truststore.type=PEM\nlistener.name.safe.ssl.truststore.location={}\n\
             listener.name.safe.ssl.client.auth=required\n",
            keystore.display(),
            authority.ca_path().display(),
        );
        let line = Broker::kafka(private_kafka_with(&config).await).line().await;
        let login = json!({
            "bootstrapServers": format!("127.0.0.1:{port}"), "securityProtocol": "SASL_SSL", "saslMechanism": "PLAIN",
            "saslUsername": "app", "saslPasswordFrom": { "env": "PASSWORD" }, "tls": tls(&authority, &client),
        });
        let with = |mut patch: Value| {
            patch["kafka"].as_object_mut().unwrap().extend(login.as_object().unwrap().clone());
            patch
        };
        out_and_back_in(with(line.as_destination()), with(line.as_source())).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn over_tls_of_nats() {
        let authority = Authority::new();
        let (server, client) = (authority.server(), authority.client("queuebox"));
        let nats = private_nats_with(&format!(
            "tls {{ cert_file: {:?}, key_file: {:?}, ca_file: {:?}, verify: true }}\n\
             authorization {{ user: \"app\", password: \"{PASSWORD}\" }}\n",
            server.cert,
            server.key,
            authority.ca_path(),
        ))
        .await;
        let servers = format!("tls://127.0.0.1:{}", nats.port());
        let direct = eventually_ok("a connection", PATIENCE, || {
            async_nats::ConnectOptions::with_user_and_password("app".into(), PASSWORD.into())
                .add_root_certificates(authority.ca_path().to_owned())
                .add_client_certificate(client.cert.clone(), client.key.clone())
                .connect(servers.clone())
        })
        .await;
        let stream = jetstream::stream::Config {
            name: "events".to_owned(),
            subjects: vec!["events.>".to_owned()],
            ..Default::default()
        };
        jetstream::new(direct).create_stream(stream).await.unwrap();
        let with = |own: Value| {
            let mut block = json!({
                "servers": servers, "username": "app", "passwordFrom": { "env": "PASSWORD" },
                "tls": tls(&authority, &client),
            });
            block.as_object_mut().unwrap().extend(own.as_object().unwrap().clone());
            json!({ "nats": block })
        };
        let destination = with(json!({ "subject": "events.{{ topic }}" }));
        out_and_back_in(destination, with(json!({ "stream": "events", "durable": "queuebox" }))).await;
    }
}

//! What arrives, and what is received.

use std::{sync::Arc, time::Duration};

use async_nats::HeaderMap;
use bytes::Bytes;
use futures::StreamExt;
use queuebox_conformance::source::{Answer, FakeIntake, Running};
use queuebox_core::{
    Class,
    ports::{Delivery, Destination},
};
use queuebox_nats::{DestinationConfig, NatsDestination, NatsSource};
use queuebox_testkit::{Proxy, ProxyMode, private_nats_with};

use crate::support::{self, Direct};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn subjects_and_headers_are_those_of_the_contract() {
    let server = support::server().await;
    let name = server.prefix();
    let direct = Direct::connect(&server.url()).await;
    direct.make_stream(&name).await;
    let config = DestinationConfig {
        headers: vec![("x-env".to_owned(), "prod".to_owned())],
        ..support::destination(server.port(), &format!("{name}.{{{{ topic }}}}"))
    };
    let destination = NatsDestination::new(config);
    let row = Delivery {
        attempt: 2,
        headers: vec![("Nats-Rollup".to_owned(), "all".to_owned()), ("traceparent".to_owned(), "00-a-b-01".to_owned())],
        ..support::row(1)
    };
    destination.publish(row.clone()).await.unwrap();
    let arrived = direct.messages(&name).await.remove(0);
    assert_eq!((arrived.id, arrived.body), (Some(row.id), row.payload.to_vec()));
    for (header, value) in [
        ("x-topic", "order.created"),
        ("x-attempt", "2"),
        ("x-message-key", "key-1"),
        ("x-env", "prod"),
        ("traceparent", "00-a-b-01"),
    ] {
        assert_eq!(arrived.headers.get(header).map(String::as_str), Some(value), "{header}");
    }
    assert!(!arrived.headers.contains_key("nats-rollup"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replay_is_delivered_within_the_duplicate_window_and_a_repeat_of_an_unknown_outcome_is_not() {
    let server = support::server().await;
    let name = server.prefix();
    let direct = Direct::connect(&server.url()).await;
    direct.make_stream(&name).await;
    let proxy = Proxy::to(server.port()).await;
    let config = DestinationConfig {
        timeout: Duration::from_secs(2),
        ..support::destination(proxy.port(), &format!("{name}.x"))
    };
    let destination = NatsDestination::new(config);
    let row = support::row(0);
    for deliveries in 1..=3 {
        destination.publish(row.clone()).await.unwrap();
        assert_eq!(direct.messages(&name).await.len(), deliveries, "each replay is one more delivery");
    }
    proxy.set(ProxyMode::HoldReplies);
    let fault = destination.publish(row.clone()).await.expect_err("the answer stays out");
    assert_eq!(fault.class, Class::Ambiguous);
    assert_eq!(direct.messages(&name).await.len(), 4, "it has arrived");
    proxy.cut();
    proxy.set(ProxyMode::Pass);
    // As the engine does it: every failure but "not connected" is an attempt.
    let mut attempt = 1;
    loop {
        match destination.publish(Delivery { attempt, ..row.clone() }).await {
            Ok(()) => break,
            Err(fault) if fault.class == Class::NotConnected => drop(destination.probe().await),
            Err(_) => attempt += 1,
        }
        assert!(attempt < 20, "it never works again");
    }
    assert_eq!(direct.messages(&name).await.len(), 4, "the stream knows it, and that is done");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_subject_without_a_stream_fails_its_row_until_there_is_one() {
    let server = support::server().await;
    let name = server.prefix();
    let destination = NatsDestination::new(support::destination(server.port(), &format!("{name}.x")));
    let fault = destination.publish(support::row(0)).await.expect_err("no stream");
    assert_eq!((fault.class, fault.code.as_ref()), (Class::Transient, "no_stream"), "{fault}");
    assert!(fault.detail.contains(&name), "{fault}");
    destination.probe().await.expect("the server is there");
    Direct::connect(&server.url()).await.make_stream(&name).await;
    destination.publish(support::row(0)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_jetstream_written_is_sent() {
    let server = support::server().await;
    let name = server.prefix();
    let direct = Direct::connect(&server.url()).await;
    let mut listening = direct.client.subscribe(format!("{name}.x")).await.unwrap();
    direct.client.flush().await.unwrap();
    let config = DestinationConfig { jetstream: false, ..support::destination(server.port(), &format!("{name}.x")) };
    let destination = NatsDestination::new(config);
    let row = support::row(0);
    destination.publish(row.clone()).await.unwrap();
    let got = listening.next().await.unwrap();
    assert_eq!(got.payload, row.payload);
    let headers = got.headers.unwrap();
    assert_eq!(headers.get("x-message-id").unwrap().as_str(), row.id.to_string());
    assert!(headers.get("Nats-Msg-Id").is_none());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_forbidden_subject_and_a_full_stream_fail_the_row_with_the_servers_words() {
    let permissions =
        "authorization { users: [ { user: app, password: x, permissions: { publish: { deny: [\"secret.>\"] } } } ] }\n";
    let server = private_nats_with(permissions).await;
    let login =
        queuebox_nats::Login::Password { username: "app".to_owned(), password: queuebox_nats::Secret::fixed("x") };
    let options = async_nats::ConnectOptions::with_user_and_password("app".to_owned(), "x".to_owned());
    let direct = Direct::on(options.connect(server.url()).await.unwrap());
    let full = async_nats::jetstream::stream::Config {
        name: "full".to_owned(),
        subjects: vec!["full.>".to_owned()],
        max_messages: 1,
        discard: async_nats::jetstream::stream::DiscardPolicy::New,
        ..Default::default()
    };
    direct.context.create_stream(full).await.unwrap();
    let to = |subject: &str| {
        let mut config =
            DestinationConfig { timeout: Duration::from_secs(2), ..support::destination(server.port(), subject) };
        config.connection.login = login.clone();
        NatsDestination::new(config)
    };
    let fault = to("secret.x").publish(support::row(0)).await.expect_err("forbidden");
    assert_eq!((fault.class, fault.code.as_ref()), (Class::Transient, "forbidden"), "{fault}");
    let destination = to("full.x");
    destination.publish(support::row(0)).await.unwrap();
    let fault = destination.publish(support::row(1)).await.expect_err("full");
    assert_eq!((fault.class, fault.code.as_ref(), fault.trips_breaker), (Class::Transient, "nack", true), "{fault}");
    assert!(fault.detail.contains("maximum messages"), "{fault}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failed_store_is_given_back_and_what_was_received_is_whole() {
    let server = support::server().await;
    let name = server.prefix();
    let direct = Direct::connect(&server.url()).await;
    direct.make_stream(&name).await;
    let mut headers = HeaderMap::new();
    headers.append("x-b", "1");
    headers.append("x-b", "2");
    headers.append("X-A", "a");
    headers.append("Nats-Msg-Id", "m-1");
    direct.publish(&format!("{name}.x"), headers, b"{}".to_vec()).await;
    let running = Running::start(Arc::new(NatsSource::new(support::source(server.port(), &name))), FakeIntake::new());
    running.intake.decide(|_| Answer::Fail);
    running.intake.answers(Answer::Fail, 2).await;
    assert!(running.is_down().await.contains("could not be stored"));
    running.intake.decide(|_| Answer::Take);
    running.intake.stores(1).await;
    let (_, got, _) = running.intake.log().pop().unwrap();
    assert_eq!(got.body, Bytes::from_static(b"{}"));
    let expected = [("Nats-Msg-Id", "m-1"), ("X-A", "a"), ("x-b", "2")];
    let expected: Vec<_> = expected.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
    assert_eq!(got.headers, expected, "the last value of a name");
    assert_eq!((got.message_id.as_deref(), got.position), (Some("m-1"), Some(format!("{name}/1"))));
    assert!(got.published_at_us.is_some_and(|at| at > 1_600_000_000_000_000));
    running.stop().await;
}

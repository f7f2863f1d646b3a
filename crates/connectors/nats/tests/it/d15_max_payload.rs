//! The server's limit counts headers, is taken from the server, and is never tried.

use std::time::Duration;

use bytes::Bytes;
use futures::future::join_all;
use queuebox_core::{
    Class,
    ports::{Delivery, Destination},
};
use queuebox_nats::NatsDestination;
use queuebox_testkit::{eventually_ok, private_nats_with};

use crate::support::{self, Direct};

fn sized(payload: usize, header: usize) -> Delivery {
    let headers = if header == 0 { Vec::new() } else { vec![("x-large".to_owned(), "h".repeat(header))] };
    Delivery { payload: Bytes::from("x".repeat(payload)), headers, ..support::row(0) }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_what_is_too_large_fails_and_the_connection_is_kept() {
    let server = private_nats_with("max_payload: 65536\n").await;
    let direct = Direct::connect(&server.url()).await;
    direct.make_stream("s").await;
    let destination = NatsDestination::new(support::destination(server.port(), "s.x"));
    let mut rows = vec![sized(60_000, 0), sized(60_000, 6_000), sized(70_000, 0)];
    rows.extend((0..100).map(support::row));
    let outcomes = join_all(rows.iter().map(|row| destination.publish(row.clone()))).await;
    for (n, outcome) in outcomes.into_iter().enumerate() {
        match (n, outcome) {
            (1 | 2, Err(fault)) => {
                assert_eq!((fault.class, fault.code.as_ref()), (Class::Refused, "too_large"), "{fault}");
                assert!(fault.detail.contains("65536") && fault.detail.contains("headers"), "{fault}");
            }
            (1 | 2, Ok(())) => panic!("row {n} is too large"),
            (_, outcome) => outcome.unwrap(),
        }
    }
    let log = std::fs::read_to_string(server.log()).unwrap();
    assert!(!log.to_lowercase().contains("maximum payload"), "the server saw a message that is too large");

    // The limit changes on the server; the next connection has the new one.
    let config = server.folder().join("nats.conf");
    let text = std::fs::read_to_string(&config).unwrap();
    std::fs::write(&config, text.replace("max_payload: 65536", "max_payload: 80000")).unwrap();
    server.stop().await;
    server.start().await;
    let within = Duration::from_secs(60);
    eventually_ok("the larger one passes", within, || destination.publish(sized(70_000, 0))).await;
    let fault = destination.publish(sized(79_990, 0)).await.expect_err("headers count");
    assert!(fault.class == Class::Refused && fault.detail.contains("80000"), "{fault}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_streams_own_limit_refuses_as_well() {
    let server = support::server().await;
    let name = server.prefix();
    let direct = Direct::connect(&server.url()).await;
    let config = async_nats::jetstream::stream::Config {
        name: name.clone(),
        subjects: vec![format!("{name}.>")],
        max_message_size: 1000,
        ..Default::default()
    };
    direct.context.create_stream(config).await.unwrap();
    let destination = NatsDestination::new(support::destination(server.port(), &format!("{name}.x")));
    let fault = destination.publish(sized(2_000, 0)).await.expect_err("too large for the stream");
    assert_eq!((fault.class, fault.code.as_ref()), (Class::Refused, "too_large"), "{fault}");
    assert!(fault.detail.contains("max_msg_size"), "{fault}");
    destination.publish(sized(100, 0)).await.unwrap();
}

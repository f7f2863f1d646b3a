//! A return must fail its own row, although the broker confirms the message as well.

use futures::future::join_all;
use queuebox_core::{Class, ports::Destination};
use queuebox_rabbitmq::RabbitDestination;

use crate::support::{self, Client};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn returned_rows_fail_and_exactly_the_routed_ones_are_in_the_queue() {
    let broker = support::broker().await;
    let url = broker.url_of(&support::fresh_vhost(&broker).await);
    let destination = RabbitDestination::new(support::destination(&url));
    let fault = destination.publish(support::row(0, "ok.0")).await.expect_err("no binding at all");
    assert_eq!(fault.class, Class::Transient);
    assert!(fault.detail.contains("312") && fault.detail.contains("NO_ROUTE"), "{fault}");

    let client = Client::connect(&url).await;
    client.declare_queue("q").await;
    client.bind("q", "ex", "ok.#").await;
    for round in 0..10 {
        let rows: Vec<_> = (0..500)
            .map(|n| support::row(n, &format!("{}.{round}", if n % 2 == 1 || n % 7 == 0 { "ok" } else { "no" })))
            .collect();
        let outcomes = join_all(rows.iter().map(|row| destination.publish(row.clone()))).await;
        let there = client.take_all("q").await;
        for (row, outcome) in rows.iter().zip(&outcomes) {
            let routed = row.topic.starts_with("ok");
            assert_eq!(outcome.is_ok(), routed, "{}: {outcome:?}", row.topic);
            assert_eq!(there.iter().filter(|arrived| arrived.id == Some(row.id)).count(), usize::from(routed));
        }
    }

    client.bind("q", "ex", "no.#").await;
    destination.publish(support::row(1, "no.1")).await.expect("bound by now");
    destination.close().await;
}

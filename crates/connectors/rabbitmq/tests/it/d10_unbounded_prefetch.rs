//! Never more unacknowledged messages than the prefetch says.

use std::sync::Arc;

use futures::future::join_all;
use queuebox_conformance::{
    destination::until,
    source::{FakeIntake, Running},
};
use queuebox_core::ports::Destination;
use queuebox_rabbitmq::{RabbitDestination, RabbitSource, SourceConfig};

use crate::support::{self, Client};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_rest_stays_with_the_broker() {
    let broker = support::broker().await;
    let vhost = support::fresh_vhost(&broker).await;
    let url = broker.url_of(&vhost);
    let client = Client::connect(&url).await;
    client.declare_exchange("ex").await;
    client.declare_queue("q").await;
    client.bind("q", "ex", "#").await;
    let destination = RabbitDestination::new(support::destination(&url));
    let rows: Vec<_> = (0..2_000).map(|n| support::row(n, "t")).collect();
    for chunk in rows.chunks(512) {
        for outcome in join_all(chunk.iter().map(|row| destination.publish(row.clone()))).await {
            outcome.unwrap();
        }
    }
    let config = SourceConfig { prefetch: 7, ..support::source(&url, "q") };
    let running = Running::start(Arc::new(RabbitSource::new(config)), FakeIntake::new());
    running.intake.hold();
    running.intake.holds(1).await;
    let figures = until("the broker has handed out a window", || async {
        let figures = support::queue_figures(&broker, &vhost, "q").await;
        (figures["messages_unacknowledged"].as_u64()? > 0).then_some(figures)
    })
    .await;
    assert_eq!(figures["messages_unacknowledged"], 7);
    assert_eq!(figures["messages_ready"], 1_993);
    running.intake.release();
    running.intake.stores(2_000).await;
    assert!(running.intake.inside_max() <= 7);
    running.stop().await;
}

//! A database that is away makes no storm of redeliveries.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    time::Duration,
};

use queuebox_conformance::source::{Answer, FakeIntake, Running};
use queuebox_rabbitmq::RabbitSource;
use tokio::time::Instant;

use crate::support::{self, Client};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_messages_are_redelivered_a_few_times_and_stored_once_each() {
    let broker = support::broker().await;
    let url = broker.url_of(&support::fresh_vhost(&broker).await);
    let client = Client::connect(&url).await;
    client.declare_queue("q").await;
    let running = Running::start(Arc::new(RabbitSource::new(support::source(&url, "q"))), FakeIntake::new());
    let away = Arc::new(AtomicBool::new(true));
    let seen = away.clone();
    running.intake.decide(move |_| if seen.load(SeqCst) { Answer::Fail } else { Answer::Take });
    let begun = Instant::now();
    for n in 0..10 {
        client.publish("q", format!("{n}").as_bytes(), Default::default()).await;
    }
    // Pauses of 1, 2 and 4 s lie between the first four rounds.
    running.intake.answers(Answer::Fail, 31).await;
    let rounds = running.intake.log().len().div_ceil(10);
    assert!(begun.elapsed() >= Duration::from_secs(6), "{rounds} rounds in {:?}", begun.elapsed());
    assert!(running.is_down().await.contains("could not be stored"));
    away.store(false, SeqCst);
    running.intake.stores(10).await;
    running.is_up().await;
    running.stop().await;
}

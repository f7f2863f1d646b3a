//! A run of every rung, small: the counts and the shape of its report. No figure is judged here; a busy machine has bad ones.
#![allow(clippy::unwrap_used, clippy::panic)]

use queuebox_bench::{Given, Measured, Options, Peer, Rung, run};
use queuebox_testkit as testkit;

const MESSAGES: u64 = 3_000;

async fn small(rungs: &[Rung], given: Given) -> Vec<Measured> {
    let options = Options {
        rungs: rungs.to_vec(),
        messages: MESSAGES,
        messages_few: 20,
        keys: 40,
        depths: vec![1_000, 6_000],
        held: 4_000,
        snapshot_seconds: 2,
        snapshot_rate: 400,
        given: Given { database_url: Some(testkit::postgres().await.url()), ..given },
        peers: Vec::new(),
    };
    let report = run(&options, |_| ()).await.unwrap_or_else(|error| panic!("{error:#}"));
    assert!(
        report.notes.iter().any(|note| note.contains("fsync")),
        "the shared server does not flush: {:?}",
        report.notes
    );
    let json: serde_json::Value = serde_json::from_str(&report.json().unwrap()).unwrap();
    assert_eq!(json["rungs"].as_array().unwrap().len(), report.rungs.len());
    report.rungs
}

fn assert_counted(measured: &[Measured], wanted: &[(&str, u64)]) {
    let counted: Vec<_> = measured.iter().map(|rung| (rung.rung.as_str(), rung.messages)).collect();
    assert_eq!(counted, wanted);
    for rung in measured {
        assert!(rung.messages_per_second > 0.0 && rung.log_bytes_per_message.unwrap() > 0.0, "{rung:?}");
    }
}

#[tokio::test]
async fn rungs_of_the_database_count_every_message() {
    let rungs = [
        Rung::Naive,
        Rung::ClaimBatch,
        Rung::Null,
        Rung::Delete,
        Rung::OneKey,
        Rung::Workers2,
        Rung::Depth,
        Rung::Held,
    ];
    let measured = small(&rungs, Given::default()).await;
    assert_counted(
        &measured,
        &[
            ("naive", 20),
            ("claim-batch", MESSAGES),
            ("null", MESSAGES),
            ("delete", MESSAGES),
            ("one-key", MESSAGES),
            ("workers-2", MESSAGES),
            ("depth-1000", 1_000),
            ("depth-6000", MESSAGES),
            ("held", MESSAGES),
        ],
    );
    // The one figure that does not depend on the machine: lanes write once where a claim writes twice.
    let log = |name: &str| measured.iter().find(|rung| rung.rung == name).unwrap().log_bytes_per_message.unwrap();
    assert!(log("null") < log("claim-batch"), "{measured:#?}");
}

#[tokio::test]
async fn rungs_of_http_and_waiting_have_quantiles() {
    let measured = small(&[Rung::Http, Rung::InboxHttp, Rung::Latency, Rung::Snapshot], Given::default()).await;
    assert_counted(
        &measured,
        &[
            ("http", MESSAGES),
            ("inbox-http", MESSAGES),
            ("latency", 20),
            ("snapshot-free", 800),
            ("snapshot-free-poll", 800),
            ("snapshot-held", 800),
            ("snapshot-held-poll", 800),
        ],
    );
    assert!(measured.iter().all(|rung| rung.p50_ms.unwrap() <= rung.p99_ms.unwrap()), "{measured:#?}");
}

#[tokio::test]
async fn rungs_of_brokers_count_both_ways() {
    let given = Given {
        rabbitmq_url: Some(testkit::rabbitmq().await.fresh_vhost().await),
        kafka_bootstrap: Some(testkit::kafka().await.bootstrap()),
        nats_url: Some(testkit::nats().await.url()),
        ..Given::default()
    };
    let rungs = [Rung::Nats, Rung::Kafka, Rung::RabbitMq, Rung::InboxNats, Rung::InboxKafka, Rung::InboxRabbitMq];
    let measured = small(&rungs, given).await;
    let wanted: Vec<(&str, u64)> = rungs.iter().map(|rung| (rung.name(), MESSAGES)).collect();
    assert_counted(&measured, &wanted);
}

#[tokio::test]
async fn another_program_is_a_rung() {
    let peers = vec!["other=test -n \"$BENCH_DATABASE_URL\" && test \"$BENCH_ROWS\" = 10".parse::<Peer>().unwrap()];
    let given = Given { database_url: Some(testkit::postgres().await.url()), ..Given::default() };
    let options = Options { rungs: Vec::new(), messages: 10, given, peers, ..Options::default() };
    let report = run(&options, |_| ()).await.unwrap_or_else(|error| panic!("{error:#}"));
    assert_eq!((report.rungs[0].rung.as_str(), report.rungs[0].messages), ("other", 10));
    let failing = Options { peers: vec!["other=exit 3".parse().unwrap()], ..options };
    assert!(format!("{:#}", run(&failing, |_| ()).await.unwrap_err()).contains("ended with"));
}

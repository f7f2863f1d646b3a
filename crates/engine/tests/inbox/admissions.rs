//! Group commit.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use futures::future::join_all;
use queuebox_core::{Fault, message::NewInboxRow, ports::Admitted};
use queuebox_engine::intake::{AdmissionLimits, Admissions};
use tokio::sync::Notify;

use crate::fake::{FakeInbox, push_row};

fn start(inbox: &Arc<FakeInbox>, limits: AdmissionLimits) -> (Admissions, Arc<Notify>) {
    let stored = Arc::new(Notify::new());
    (Admissions::start(inbox.clone(), limits, stored.clone()), stored)
}

fn is_new(answers: &[queuebox_engine::intake::admissions::Answered]) -> bool {
    answers.iter().all(|answered| matches!(answered.answer, Ok(Admitted::New(_))))
}

#[tokio::test(start_paused = true)]
async fn a_lone_message_waits_for_nobody() {
    let inbox = FakeInbox::new();
    let (admissions, stored) = start(&inbox, AdmissionLimits::default());
    let before = tokio::time::Instant::now();
    let answers = admissions.admit(vec![push_row("a")]).await;
    assert!(is_new(&answers));
    assert_eq!(before.elapsed(), Duration::ZERO);
    stored.notified().await;
}

#[tokio::test(start_paused = true)]
async fn what_gathers_during_an_insert_is_one_insert() {
    let inbox = FakeInbox::new();
    *inbox.admit_takes.lock().unwrap() = Duration::from_millis(10);
    let (admissions, _) = start(&inbox, AdmissionLimits::default());
    let answers = join_all((0..100).map(|n| admissions.admit(vec![push_row(&n.to_string())]))).await;
    assert!(answers.iter().all(|answers| is_new(answers)));
    let batches = inbox.batches.lock().unwrap().clone();
    assert!(batches.len() <= 2 && batches.iter().sum::<usize>() == 100, "{batches:?}");
    assert_eq!(inbox.keys(), (0..100).map(|n| n.to_string()).collect::<Vec<_>>(), "in the order of arrival");
}

#[tokio::test(start_paused = true)]
async fn flushes_are_bounded_and_requests_stay_whole() {
    let inbox = FakeInbox::new();
    *inbox.admit_takes.lock().unwrap() = Duration::from_millis(10);
    let limits = AdmissionLimits { flush_rows_max: 10, ..AdmissionLimits::default() };
    let (admissions, _) = start(&inbox, limits);
    let request =
        |name: &'static str, rows: usize| (0..rows).map(|n| push_row(&format!("{name}{n}"))).collect::<Vec<_>>();
    let requests = [request("a", 1), request("b", 6), request("c", 6), request("d", 4), request("e", 10)];
    let answers = join_all(requests.into_iter().map(|rows| admissions.admit(rows))).await;
    assert!(answers.iter().all(|answers| is_new(answers)));
    let batches = inbox.batches.lock().unwrap().clone();
    assert!(batches == [1, 6, 10, 10] || batches == [7, 10, 10], "{batches:?}");
}

#[tokio::test(start_paused = true)]
async fn flushes_are_bounded_by_bytes() {
    let inbox = FakeInbox::new();
    *inbox.admit_takes.lock().unwrap() = Duration::from_millis(10);
    let limits = AdmissionLimits { flush_bytes_max: 10_000, ..AdmissionLimits::default() };
    let (admissions, _) = start(&inbox, limits);
    let big = |key: &str| NewInboxRow { payload: vec![b'1'; 6_000].into(), ..push_row(key) };
    join_all(["a", "b", "c"].map(|key| admissions.admit(vec![big(key)]))).await;
    assert_eq!(*inbox.batches.lock().unwrap(), [1, 1, 1]);
}

#[tokio::test(start_paused = true)]
async fn whoever_comes_beyond_the_bound_of_bytes_waits() {
    let inbox = FakeInbox::new();
    *inbox.admit_takes.lock().unwrap() = Duration::from_secs(1);
    let limits = AdmissionLimits { queued_bytes_max: 7_000, flushes_max: 1, ..AdmissionLimits::default() };
    let (admissions, _) = start(&inbox, limits);
    let big = |key: &str, bytes| NewInboxRow { payload: vec![b'1'; bytes].into(), ..push_row(key) };
    let before = tokio::time::Instant::now();
    let times = join_all([("a", 6_000), ("b", 6_000), ("c", 1_000_000)].map(|(key, bytes)| {
        let admissions = admissions.clone();
        async move {
            assert!(is_new(&admissions.admit(vec![big(key, bytes)]).await));
            before.elapsed().as_secs()
        }
    }))
    .await;
    assert_eq!(times, [1, 2, 3], "also what is larger than the bound");
}

/// case D21: an insert that waits for somebody's open transaction holds nobody else.
#[tokio::test(start_paused = true)]
async fn a_hanging_insert_holds_nobody_else() {
    let inbox = FakeInbox::new();
    let released = Arc::new(Notify::new());
    *inbox.hanging_key.lock().unwrap() = Some(("held".to_owned(), released.clone()));
    let (admissions, _) = start(&inbox, AdmissionLimits::default());
    let hanging = tokio::spawn({
        let admissions = admissions.clone();
        async move { admissions.admit(vec![push_row("held")]).await }
    });
    tokio::time::sleep(Duration::from_millis(1)).await;
    let others = join_all((0..20).map(|n| admissions.admit(vec![push_row(&n.to_string())]))).await;
    assert!(others.iter().all(|answers| is_new(answers)));
    assert!(!hanging.is_finished());
    assert!(inbox.busiest.load(Ordering::SeqCst) <= AdmissionLimits::default().flushes_max);
    released.notify_one();
    assert!(is_new(&hanging.await.unwrap()));
}

#[tokio::test(start_paused = true)]
async fn an_insert_for_nobody_is_given_up() {
    let inbox = FakeInbox::new();
    *inbox.hanging_key.lock().unwrap() = Some(("held".to_owned(), Arc::new(Notify::new())));
    let (admissions, _) = start(&inbox, AdmissionLimits { flushes_max: 1, ..AdmissionLimits::default() });
    let timeout = tokio::time::timeout(Duration::from_secs(5), admissions.admit(vec![push_row("held")])).await;
    assert!(timeout.is_err());
    let other = tokio::time::timeout(Duration::from_secs(60), admissions.admit(vec![push_row("other")])).await;
    assert!(is_new(&other.expect("the only flush is free again")));
}

#[tokio::test(start_paused = true)]
async fn one_bad_row_harms_nobody_else() {
    let inbox = FakeInbox::new();
    *inbox.on_admit.lock().unwrap() = Some(Box::new(|batch| {
        let is_bad = batch.iter().any(|row| row.idempotency_key == "4");
        if is_bad { Err(Fault::transient("raised", "a trigger says no")) } else { Ok(()) }
    }));
    let (admissions, _) = start(&inbox, AdmissionLimits::default());
    let mut rows: Vec<_> = (0..10).map(|n| push_row(&n.to_string())).collect();
    for n in [4, 6] {
        rows[n].aggregate_id = Some("k".to_owned());
    }
    let answers = admissions.admit(rows).await;
    for (n, answered) in answers.iter().enumerate() {
        assert_eq!(answered.answer.is_err(), n == 4 || n == 6, "row {n}: {:?}", answered.answer);
        assert!(answered.answer.as_ref().err().is_none_or(|missed| missed.is_suspect));
    }
    assert_eq!(inbox.rows().len(), 8, "the bad row, and the one of its aggregate behind it, are not stored");
}

#[tokio::test(start_paused = true)]
async fn an_outage_is_not_tried_row_by_row_for_ever() {
    let inbox = FakeInbox::new();
    *inbox.on_admit.lock().unwrap() = Some(Box::new(|_| Err(Fault::transient("io", "connection reset"))));
    let (admissions, _) = start(&inbox, AdmissionLimits::default());
    let answers = admissions.admit((0..500).map(|n| push_row(&n.to_string())).collect()).await;
    assert!(answers.iter().all(|answered| answered.answer.is_err()));
    assert!(inbox.batches.lock().unwrap().len() <= 12);

    *inbox.admit_takes.lock().unwrap() = Duration::from_secs(2);
    inbox.batches.lock().unwrap().clear();
    admissions.admit((0..500).map(|n| push_row(&n.to_string())).collect()).await;
    assert_eq!(inbox.batches.lock().unwrap().len(), 1, "what fails slowly is the database");
}

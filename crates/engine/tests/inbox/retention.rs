//! Retention.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use queuebox_core::{
    message::State,
    ports::{Scope, outbox::PruneRule},
};
use queuebox_engine::{
    ids::Ids,
    retention::{Retention, TableRetention},
};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::fake::{Counted, FakeLedger};

fn start(
    table: Scope,
    rule: impl Into<Option<PruneRule>>,
    dead_rule: impl Into<Option<PruneRule>>,
) -> (Arc<FakeLedger>, Arc<Counted>, CancellationToken) {
    let (ledger, counted, _, stop) = start_seen(table, rule.into(), dead_rule.into());
    (ledger, counted, stop)
}

type Started = (Arc<FakeLedger>, Arc<Counted>, watch::Receiver<Option<String>>, CancellationToken);

fn start_seen(table: Scope, rule: Option<PruneRule>, dead_rule: Option<PruneRule>) -> Started {
    let (failure, seen) = watch::channel(None);
    let (ledger, counted, stop) =
        (Arc::new(FakeLedger::default()), Arc::new(Counted::default()), CancellationToken::new());
    let retention = Retention {
        table,
        keep: TableRetention { rule, dead_rule, cleanup_interval: Duration::from_secs(3600), batch_size: 1000 },
        ledger: ledger.clone(),
        ids: Arc::new(Ids::new(1, 0)),
        observer: counted.clone(),
        failure,
        stop: stop.clone(),
    };
    tokio::spawn(retention.run());
    (ledger, counted, seen, stop)
}

const WEEK: PruneRule = PruneRule::OlderThan(604_800_000);

/// conformance 121, as far as the task goes
#[tokio::test(start_paused = true)]
async fn retention_deletes_finished_only() {
    let (ledger, counted, _) = start(Scope::Outbox, PruneRule::Beyond(10), WEEK);
    *ledger.left.lock().unwrap() =
        vec![(State::Sent, 2500), (State::Dead, 1), (State::Pending, 9), (State::Processing, 9)];
    tokio::time::sleep(Duration::from_secs(60)).await;
    let calls = ledger.calls.lock().unwrap().clone();
    let sent = (Scope::Outbox, State::Sent, PruneRule::Beyond(10));
    assert_eq!(calls, [sent, sent, sent, (Scope::Outbox, State::Dead, WEEK)]);
    assert_eq!(counted.count("Deleted"), 4);
    assert_eq!(counted.count("cleaned Outbox"), 1);
    tokio::time::sleep(Duration::from_secs(3600)).await;
    assert_eq!(counted.count("cleaned Outbox"), 2, "every interval");
}

#[tokio::test(start_paused = true)]
async fn the_inbox_keeps_what_is_not_processed() {
    let (ledger, _, stop) = start(Scope::Inbox, WEEK, PruneRule::OlderThan(1));
    tokio::time::sleep(Duration::from_secs(60)).await;
    let calls = ledger.calls.lock().unwrap().clone();
    assert_eq!(calls, [(Scope::Inbox, State::Processed, WEEK), (Scope::Inbox, State::Dead, PruneRule::OlderThan(1))]);
    stop.cancel();
    tokio::time::sleep(Duration::from_secs(7200)).await;
    assert_eq!(ledger.calls.lock().unwrap().len(), 2);
}

/// contract 11: `deadMaxAge` alone
#[tokio::test(start_paused = true)]
async fn an_age_of_dead_rows_alone_touches_no_others() {
    for (table, rule, dead_rule, touched) in [
        (Scope::Outbox, None, Some(WEEK), State::Dead),
        (Scope::Inbox, None, Some(WEEK), State::Dead),
        (Scope::Inbox, Some(WEEK), None, State::Processed),
    ] {
        let (ledger, counted, _) = start(table, rule, dead_rule);
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert_eq!(*ledger.calls.lock().unwrap(), [(table, touched, WEEK)]);
        assert_eq!(counted.count("cleaned"), 1);
    }
}

/// case D31, as far as the task goes
#[tokio::test(start_paused = true)]
async fn deadlock_victims_try_again() {
    let (ledger, counted, _) = start(Scope::Inbox, WEEK, WEEK);
    ledger.failures.store(5, Ordering::SeqCst);
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(counted.count("cleaned Inbox"), 1);
}

#[tokio::test(start_paused = true)]
async fn a_database_that_is_away_is_left_alone_until_the_next_time() {
    let (ledger, counted, failure, _) = start_seen(Scope::Inbox, Some(WEEK), Some(WEEK));
    ledger.failures.store(1000, Ordering::SeqCst);
    tokio::time::sleep(Duration::from_secs(600)).await;
    assert_eq!(counted.count("cleaned"), 0);
    assert_eq!(1000 - ledger.failures.load(Ordering::SeqCst), 8);
    assert!(failure.borrow().is_some(), "health says so");
    ledger.failures.store(0, Ordering::SeqCst);
    tokio::time::sleep(Duration::from_secs(3600)).await;
    assert_eq!(*failure.borrow(), None, "until it works again");
}

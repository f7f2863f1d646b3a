//! What holds for any traffic and any faults.

use std::{
    collections::{BTreeMap, HashSet},
    sync::Arc,
    time::Duration,
};

use futures::future::join_all;
use proptest::prelude::*;
use queuebox_core::{
    Fault,
    message::{NewInboxRow, State},
    ports::{Admission, Admitted, Intake as _},
};
use queuebox_engine::intake::{AdmissionLimits, Admissions, SourceKind};
use tokio::sync::Notify;

use crate::{
    fake::{FakeInbox, push_row},
    intake::{message, source, world},
};

/// Runs one world under a paused clock.
fn simulate<T>(world: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap().block_on(world)
}

/// A request: when it comes, and its rows as (key, aggregate).
type Request = (u64, Vec<(u8, Option<u8>)>);

fn requests() -> impl Strategy<Value = Vec<Request>> {
    let row = (any::<u8>(), proptest::option::of(0u8..4));
    proptest::collection::vec((0u64..50, proptest::collection::vec(row, 1..8)), 1..20)
}

fn row(request: usize, key: u8, aggregate: Option<u8>) -> NewInboxRow {
    let aggregate_id = aggregate.map(|aggregate| format!("{request}/{aggregate}"));
    NewInboxRow { aggregate_id, ..push_row(&key.to_string()) }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Every row gets one answer; what is said to be stored is stored, once; nothing that the database takes is kept out by what
    /// it does not take; and within a request no row of an aggregate is stored before an earlier one.
    #[test]
    fn admissions_tell_the_truth(requests in requests(), poison in proptest::collection::hash_set(any::<u8>(), 0..3), takes_ms in 0u64..30) {
        simulate(async {
            let inbox = FakeInbox::new();
            *inbox.admit_takes.lock().unwrap() = Duration::from_millis(takes_ms);
            let poisoned: HashSet<String> = poison.iter().map(u8::to_string).collect();
            let bad = poisoned.clone();
            *inbox.on_admit.lock().unwrap() = Some(Box::new(move |batch| {
                let is_bad = batch.iter().any(|row| bad.contains(&row.idempotency_key));
                if is_bad { Err(Fault::transient("raised", "no")) } else { Ok(()) }
            }));
            let limits = AdmissionLimits { flush_rows_max: 16, ..AdmissionLimits::default() };
            let admissions = Admissions::start(inbox.clone(), limits, Arc::new(Notify::new()));
            let answers = join_all(requests.iter().enumerate().map(|(index, (at, rows))| {
                let admissions = &admissions;
                async move {
                    tokio::time::sleep(Duration::from_millis(*at)).await;
                    admissions.admit(rows.iter().map(|(key, aggregate)| row(index, *key, *aggregate)).collect()).await
                }
            }))
            .await;
            let mut new_ids = HashSet::new();
            for ((_, rows), answers) in requests.iter().zip(&answers) {
                assert_eq!(rows.len(), answers.len());
                let mut failed_aggregates: HashSet<u8> = HashSet::new();
                for ((key, aggregate), answered) in rows.iter().zip(answers) {
                    assert_eq!(answered.row.idempotency_key, key.to_string(), "in order");
                    match &answered.answer {
                        Ok(Admitted::New(id)) => {
                            assert!(new_ids.insert(*id));
                            assert!(aggregate.is_none_or(|aggregate| !failed_aggregates.contains(&aggregate)), "overtaken");
                        }
                        Ok(_) => {}
                        Err(_) => {
                            let is_bad = poisoned.contains(&key.to_string());
                            let is_behind = aggregate.is_some_and(|aggregate| failed_aggregates.contains(&aggregate));
                            assert!(is_bad || is_behind, "row {key} was kept out by another");
                            failed_aggregates.extend(aggregate);
                        }
                    }
                }
            }
            let stored: HashSet<_> = inbox.rows().into_iter().map(|stored| stored.row.id).collect();
            assert_eq!(stored, new_ids);
            let keys = inbox.keys();
            assert_eq!(keys.iter().collect::<HashSet<_>>().len(), keys.len(), "each key once");
        });
    }

    /// Whatever a broker sends is acknowledged, with one row of which the payload is JSON.
    #[test]
    fn a_broker_message_is_stored_whatever_it_is(
        bodies in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..40), 1..6),
        headers in proptest::collection::vec((any::<String>(), any::<String>()), 0..4),
        text in any::<String>(),
    ) {
        simulate(async {
            let world = world(source(SourceKind::Kafka));
            let json = serde_json::json!({ "id": text, "key": text, "type": text }).to_string();
            let bodies = bodies.into_iter().chain([text.into_bytes(), json.into_bytes()]);
            let batch = bodies.map(|body| queuebox_core::ports::Received { headers: headers.clone(), ..message(body) }).collect::<Vec<_>>();
            let sent = batch.len();
            let answers = world.intake.admit(batch).await;
            assert_eq!(answers.len(), sent);
            assert!(answers.iter().all(|answer| matches!(answer, Admission::Stored(_) | Admission::Duplicate)), "{answers:?}");
            for stored in world.inbox.rows() {
                let payload: &serde_json::value::RawValue = serde_json::from_slice(&stored.row.payload).unwrap();
                assert!(!payload.get().contains("\\u0000") || stored.state == State::Dead);
                let headers: BTreeMap<String, String> = serde_json::from_str(&stored.row.headers).unwrap();
                assert!(headers.iter().all(|(name, value)| !name.contains('\0') && !value.contains('\0')));
                assert!(stored.row.idempotency_key.chars().count() <= 255 && !stored.row.idempotency_key.is_empty());
            }
        });
    }
}

//! Admitting and forwarding (contract 2.2, 2.4, 4.5, 5.2, 6, 8; laws in `queuebox_core::ports::inbox`).

use std::collections::HashSet;

use bytes::Bytes;
use futures::future::join_all;
use queuebox_core::{
    Class, LaneSet, Uuid,
    message::{Consumption, Forward, NewInboxRow, Payload, PushRow, State},
    ports::{
        Admitted, Fence,
        outbox::{KeyRead, Outcome, Read, Settle},
    },
};

use super::{
    StoreHarness, World, everything,
    world::{json, literal},
};

const MINUTE_US: i64 = 60_000_000;

/// A push message.
pub fn message(source: &str, key: &str) -> NewInboxRow {
    NewInboxRow {
        id: Uuid::new_v4(),
        source: source.into(),
        idempotency_key: key.into(),
        aggregate_id: None,
        event_type: None,
        payload: Bytes::from_static(br#"{"n": 1}"#),
        headers: "{}".into(),
        correlation_id: None,
        consumption: Consumption::Push,
        topic: Some("t".into()),
        trace_parent: None,
        delay_us: 0,
        published_at_us: None,
        dead: None,
    }
}

/// Stores one message that must be new.
pub async fn admit_one<H: StoreHarness>(w: &World<H>, message: NewInboxRow) -> Uuid {
    let id = message.id;
    assert_eq!(w.store.admit(&[message]).await.unwrap(), [Admitted::New(id)]);
    id
}

/// State of an inbox row.
pub async fn state<H: StoreHarness>(w: &World<H>, id: Uuid) -> State {
    State::parse(inbox(w, id, "state").await.as_deref().unwrap()).unwrap()
}

async fn inbox<H: StoreHarness>(w: &World<H>, id: Uuid, column: &str) -> Option<String> {
    w.columns("inbox", id, &[column]).await.unwrap().remove(0)
}

async fn waiting<H: StoreHarness>(w: &World<H>, fence: &Fence) -> Vec<PushRow> {
    w.store.waiting(fence, w.all_lanes(), 1_000, &[]).await.unwrap()
}

fn push_ids(rows: &[PushRow]) -> Vec<Uuid> {
    rows.iter().map(|row| row.id).collect()
}

fn forward(inbox_id: Uuid) -> Forward {
    Forward { inbox_id, outbox_id: Uuid::new_v4(), topic: "t".into(), headers: "{}".into() }
}

/// The statement by which somebody else stores a message.
fn insert_sql<H: StoreHarness>(w: &World<H>, source: &str, key: &str) -> String {
    let columns = ["id", "source", "idempotency_key", "payload"].map(|name| w.h.column("inbox", name)).join(", ");
    let values = [Uuid::new_v4().to_string().as_str(), source, key, "{}"].map(literal).join(", ");
    format!("INSERT INTO {} ({columns}) VALUES ({values})", w.h.table("inbox"))
}

/// Every column of a new message is stored.
pub async fn a_message_is_admitted_whole<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    let mut new = message("stripe", "evt_1");
    new.aggregate_id = Some("order-7".into());
    new.event_type = Some("paid".into());
    new.payload = Bytes::from(r#"{"text": "Grüße 🚀 it's"}"#);
    new.headers = r#"{"X-A": "1"}"#.into();
    new.correlation_id = Some("corr".into());
    new.topic = Some("stripe.paid".into());
    new.trace_parent = Some(trace.into());
    let id = admit_one(&w, new).await;
    let names = [
        "source",
        "idempotency_key",
        "aggregate_id",
        "event_type",
        "correlation_id",
        "consumption",
        "state",
        "attempt",
        "crashes",
        "topic",
        "trace_parent",
        "last_error",
        "processed_at",
    ];
    let row = w.columns("inbox", id, &names).await.unwrap();
    let row: Vec<_> = row.iter().map(|value| value.as_deref().unwrap_or("NULL")).collect();
    let expected = [
        "stripe",
        "evt_1",
        "order-7",
        "paid",
        "corr",
        "push",
        "pending",
        "0",
        "0",
        "stripe.paid",
        trace,
        "NULL",
        "NULL",
    ];
    assert_eq!(row, expected);
    let payload: serde_json::Value = serde_json::from_str(&inbox(&w, id, "payload").await.unwrap()).unwrap();
    assert_eq!(payload["text"], "Grüße 🚀 it's");
    let headers: serde_json::Value = serde_json::from_str(&inbox(&w, id, "headers").await.unwrap()).unwrap();
    assert_eq!(headers["X-A"], "1");
    assert_eq!(inbox(&w, id, "created_at").await, inbox(&w, id, "scheduled_at").await);
    let mut pull = message("stripe", "evt_2");
    pull.consumption = Consumption::Pull;
    pull.topic = None;
    let id = admit_one(&w, pull).await;
    assert_eq!(inbox(&w, id, "consumption").await.as_deref(), Some("pull"));
    assert_eq!(inbox(&w, id, "topic").await, None);
}

/// Repeats within a batch and of stored rows; the first of a batch is new; the same key of another source is another one.
pub async fn a_repeat_is_a_duplicate<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let first = message("s", "a");
    let first_id = first.id;
    let batch = [message("s", "b"), first, message("s", "a"), message("other", "a"), message("s", "b")];
    let answers = w.store.admit(&batch).await.unwrap();
    let expected = [
        Admitted::New(batch[0].id),
        Admitted::New(first_id),
        Admitted::Duplicate,
        Admitted::New(batch[3].id),
        Admitted::Duplicate,
    ];
    assert_eq!(answers, expected);
    let again = [message("s", "a"), message("s", "c")];
    assert_eq!(w.store.admit(&again).await.unwrap(), [Admitted::Duplicate, Admitted::New(again[1].id)]);
    assert_eq!(w.count("inbox").await, 4);
    assert_eq!(w.store.admit(&[]).await.unwrap(), []);
}

/// A batch whose answer was lost can be sent again as it is.
pub async fn a_batch_sent_again_is_duplicate<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let batch = [message("s", "a"), message("s", "b")];
    assert!(w.store.admit(&batch).await.unwrap().iter().all(|answer| matches!(answer, Admitted::New(_))));
    assert_eq!(w.store.admit(&batch).await.unwrap(), [Admitted::Duplicate, Admitted::Duplicate]);
    assert_eq!(w.count("inbox").await, 2);
}

async fn ids_by_receipt<H: StoreHarness>(w: &World<H>) -> Vec<Uuid> {
    let [id, created] = ["id", "created_at"].map(|name| w.h.column("inbox", name));
    let sql = format!("SELECT {} FROM {} ORDER BY {created}, {id} DESC", w.h.text(&id), w.h.table("inbox"));
    w.h.query(&sql).await.into_iter().map(|mut row| row.remove(0).unwrap().parse().unwrap()).collect()
}

async fn distinct_receipts<H: StoreHarness>(w: &World<H>, column: &str) -> usize {
    let sql = format!(
        "SELECT {} FROM {}",
        w.h.text(&format!("count(DISTINCT {})", w.h.column("inbox", column))),
        w.h.table("inbox")
    );
    w.h.query(&sql).await[0][0].as_deref().unwrap().parse().unwrap()
}

/// conformance 151: `created_at` and `scheduled_at` rise by receipt within a batch, and from one batch to the next.
pub async fn receipts_rise_with_the_batch<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let mut sent = Vec::new();
    for batch in 0..3 {
        let messages: Vec<_> = (0..200)
            .map(|n| NewInboxRow {
                aggregate_id: Some("a".into()),
                // Keys in an order of their own: rows may be sorted by key inside, receipts follow the batch.
                ..message("s", &format!("{:03}-{batch}", (n * 71) % 200))
            })
            .collect();
        sent.extend(messages.iter().map(|message| message.id));
        let answers = w.store.admit(&messages).await.unwrap();
        assert!(answers.iter().zip(&messages).all(|(answer, message)| *answer == Admitted::New(message.id)));
    }
    assert_eq!(ids_by_receipt(&w).await, sent);
    assert_eq!(distinct_receipts(&w, "created_at").await, 600);
    assert_eq!(distinct_receipts(&w, "scheduled_at").await, 600);
    let fence = w.owner().await;
    // Receipts of a batch lie up to its size in microseconds ahead of now: the last may come due a moment later.
    let mut found = Vec::new();
    while found.len() < sent.len() {
        found = push_ids(&waiting(&w, &fence).await);
    }
    assert_eq!(found, sent);
}

/// A batch above a thousand keeps its order as well.
pub async fn more_than_a_thousand_in_one_batch<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let messages: Vec<_> = (0..2_300).map(|n| message("s", &format!("{}", (n * 7) % 2_300))).collect();
    let answers = w.store.admit(&messages).await.unwrap();
    assert!(answers.iter().zip(&messages).all(|(answer, message)| *answer == Admitted::New(message.id)));
    assert_eq!(distinct_receipts(&w, "created_at").await, 2_300);
    assert_eq!(ids_by_receipt(&w).await, messages.iter().map(|message| message.id).collect::<Vec<_>>());
}

async fn due<H: StoreHarness>(w: &World<H>, id: Uuid) -> i64 {
    w.us_until("inbox", id, "scheduled_at").await.unwrap()
}

/// `scheduled_at` = min(publish time, receipt) + delay.
pub async fn delay_and_publish_time<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let first = admit_one(&w, message("s", "now")).await;
    let now_us = {
        let row = w.store.entry(queuebox_core::ports::Scope::Inbox, first).await.unwrap().unwrap();
        row.row.created_at_us
    };
    let with = |key: &str, delay_us, published_at_us| NewInboxRow { delay_us, published_at_us, ..message("s", key) };
    let delayed = admit_one(&w, with("delayed", 10 * MINUTE_US, None)).await;
    let past = admit_one(&w, with("past", 10 * MINUTE_US, Some(now_us - 4 * MINUTE_US))).await;
    let future = admit_one(&w, with("future", 10 * MINUTE_US, Some(now_us + 100 * MINUTE_US))).await;
    assert!((9 * MINUTE_US..=10 * MINUTE_US).contains(&due(&w, delayed).await));
    assert!((5 * MINUTE_US..=6 * MINUTE_US).contains(&due(&w, past).await));
    assert!((9 * MINUTE_US..=10 * MINUTE_US).contains(&due(&w, future).await), "never later than receipt + delay");
    assert!(w.us_until("inbox", past, "created_at").await.unwrap() > -MINUTE_US, "receipt is the database's time");
}

/// A message that cannot be used is one dead row with its reason, is never forwarded, and counts for deduplication.
pub async fn an_unusable_message_is_stored_dead<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let fence = w.owner().await;
    let dead = NewInboxRow { dead: Some("not_json: byte 0".into()), ..message("s", "k") };
    let id = admit_one(&w, dead).await;
    assert_eq!(state(&w, id).await, State::Dead);
    assert_eq!(inbox(&w, id, "last_error").await.as_deref(), Some("not_json: byte 0"));
    assert!(waiting(&w, &fence).await.is_empty());
    assert_eq!(w.store.admit(&[message("s", "k")]).await.unwrap(), [Admitted::Duplicate]);
}

/// conformance 10: the outcome of another transaction with the same key decides.
pub async fn an_uncommitted_conflict_is_waited_for<H: StoreHarness>() {
    let w = World::<H>::start().await;
    for (commit, key) in [(true, "a"), (false, "b")] {
        let mut open = w.h.begin().await;
        open.execute(&insert_sql(&w, "s", key)).await;
        let messages = [message("s", key), message("s", &format!("{key}-other"))];
        let ids = messages.each_ref().map(|message| message.id);
        let store = w.store.clone();
        let admitting = tokio::spawn(async move { store.admit(&messages).await });
        tokio::task::yield_now().await;
        let answers = if commit {
            open.commit().await;
            [Admitted::Duplicate, Admitted::New(ids[1])]
        } else {
            open.rollback().await;
            [Admitted::New(ids[0]), Admitted::New(ids[1])]
        };
        assert_eq!(admitting.await.unwrap().unwrap(), answers);
    }
}

/// conformance 10: of 20 at once one is new; whole batches that overlap do not deadlock.
pub async fn one_of_many_at_once_is_new<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let other = w.other_process().await;
    let flushes = (0..20).map(|n| {
        let store = if n % 2 == 0 { w.store.clone() } else { other.clone() };
        let mut batch: Vec<_> = (0..10).map(|key| message("s", &key.to_string())).collect();
        batch.rotate_left(n % 10);
        async move { store.admit(&batch).await.unwrap() }
    });
    let answers: Vec<_> = join_all(flushes).await.into_iter().flatten().collect();
    let new = answers.iter().filter(|answer| matches!(answer, Admitted::New(_))).count();
    let duplicate = answers.iter().filter(|answer| **answer == Admitted::Duplicate).count();
    assert_eq!((new, duplicate), (10, 190));
    assert_eq!(w.count("inbox").await, 10);
}

/// conformance 11: case, accents, normal forms and trailing blanks count (contract 2.4).
pub async fn inbox_keys_never_merge<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let keys = ["key", "Key", "kéy", "ke\u{301}y", "key ", " key", "ｋey", "straße", "strasse", "007", "7", "7.0"];
    let batch: Vec<_> =
        keys.iter().flat_map(|key| [message("s", key), message("S", key), message("s ", key)]).collect();
    let answers = w.store.admit(&batch).await.unwrap();
    assert!(answers.iter().all(|answer| matches!(answer, Admitted::New(_))), "{answers:?}");
    assert_eq!(w.count("inbox").await, batch.len());
    let again = keys.map(|key| message("s", key));
    assert!(w.store.admit(&again).await.unwrap().iter().all(|answer| *answer == Admitted::Duplicate));
}

/// A row that the database refuses fails alone, for good; the others of its batch are stored.
pub async fn a_refused_row_harms_nobody<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let broken = NewInboxRow { payload: Bytes::from_static(b"{\"n\": "), ..message("s", "broken") };
    let batch = [message("s", "a"), broken, message("s", "b"), message("s", "a")];
    let answers = w.store.admit(&batch).await.unwrap();
    assert_eq!(answers[0], Admitted::New(batch[0].id));
    assert!(matches!(&answers[1], Admitted::Refused(fault) if fault.class == Class::Refused), "{answers:?}");
    assert_eq!(answers[2], Admitted::New(batch[2].id));
    assert_eq!(answers[3], Admitted::Duplicate);
    assert_eq!(w.count("inbox").await, 2);
    // Order of receipt holds here as well.
    assert_eq!(ids_by_receipt(&w).await, [batch[0].id, batch[2].id]);
}

/// 255 characters are stored, whatever their bytes; 256 are refused, never cut.
pub async fn long_values_are_refused_not_cut<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let (fits, long) = ("é".repeat(255), "é".repeat(256));
    let batch = [
        NewInboxRow { aggregate_id: Some(fits.clone()), ..message("s", &fits) },
        message("s", &long),
        NewInboxRow { aggregate_id: Some(long.clone()), ..message("s", "k") },
    ];
    let answers = w.store.admit(&batch).await.unwrap();
    assert_eq!(answers[0], Admitted::New(batch[0].id));
    assert!(answers[1..].iter().all(|answer| matches!(answer, Admitted::Refused(_))), "{answers:?}");
    assert_eq!(inbox(&w, batch[0].id, "idempotency_key").await, Some(fits));
    assert_eq!(w.count("inbox").await, 1);
}

/// conformance 105: numbers keep all of their digits through inbox, forward and outbox.
pub async fn inbox_payloads_keep_their_digits<H: StoreHarness>() {
    let w = World::<H>::start().await;
    if !w.h.capabilities().keeps_digits {
        return;
    }
    let fence = w.owner().await;
    let digits = "12345678901234567890123456789.123456789012345678";
    let payload = Bytes::from(format!(r#"{{"n": {digits}}}"#));
    let id = admit_one(&w, NewInboxRow { payload, ..message("s", "k") }).await;
    assert!(inbox(&w, id, "payload").await.unwrap().contains(digits));
    let forwarded = forward(id);
    assert_eq!(w.store.forward(&fence, std::slice::from_ref(&forwarded), 5).await.unwrap(), Default::default());
    match w.read_row(&fence, forwarded.outbox_id).await.payload {
        queuebox_core::message::Payload::Loaded(bytes) => {
            assert!(String::from_utf8(bytes.to_vec()).unwrap().contains(digits));
        }
        other => panic!("{other:?}"),
    }
}

/// Order `scheduled_at, created_at, id`; the limit, the lanes and the exclusion hold; all attributes arrive.
pub async fn push_rows_wait_in_order<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let fence = w.owner().await;
    let mut first = message("stripe", "evt_1");
    first.aggregate_id = Some("a".into());
    first.event_type = Some("paid".into());
    first.headers = r#"{"X-A": "1"}"#.into();
    first.correlation_id = Some("corr".into());
    let mut ids = vec![admit_one(&w, first).await];
    for n in 0..4 {
        ids.push(admit_one(&w, message("s", &n.to_string())).await);
    }
    // Three with one time: the id decides.
    let at = w.h.now_plus(-5 * MINUTE_US);
    let (pinned, rest) = ids.split_at_mut(3);
    let assign = format!("UPDATE {} SET {} = {at}", w.h.table("inbox"), w.h.column("inbox", "scheduled_at"));
    w.h.execute(&assign).await;
    let same = format!(
        "UPDATE {} SET {created} = (SELECT max({created}) FROM (SELECT {created} FROM {}) AS x) WHERE {} IN ({})",
        w.h.table("inbox"),
        w.h.table("inbox"),
        w.h.column("inbox", "id"),
        pinned.iter().map(|id| literal(&id.to_string())).collect::<Vec<_>>().join(", "),
        created = w.h.column("inbox", "created_at"),
    );
    w.h.execute(&same).await;
    let stripe = pinned[0];
    pinned.sort();
    let expected_tail: Vec<_> = pinned.to_vec();
    let rows = waiting(&w, &fence).await;
    let found = push_ids(&rows);
    assert_eq!(found.len(), 5);
    let tail: Vec<_> = found.iter().copied().filter(|id| expected_tail.contains(id)).collect();
    assert_eq!(tail, expected_tail);
    assert_eq!(found.iter().copied().filter(|id| rest.contains(id)).collect::<Vec<_>>(), rest.to_vec());
    let row = rows.iter().find(|row| row.id == stripe).unwrap();
    assert_eq!((row.source.as_str(), row.idempotency_key.as_str()), ("stripe", "evt_1"));
    assert_eq!((row.aggregate_id.as_deref(), row.event_type.as_deref()), (Some("a"), Some("paid")));
    assert_eq!((row.topic.as_deref(), row.correlation_id.as_deref(), row.crashes), (Some("t"), Some("corr"), 0));
    assert_eq!(serde_json::from_str::<serde_json::Value>(&row.headers).unwrap()["X-A"], "1");
    let limited = w.store.waiting(&fence, w.all_lanes(), 2, &found[..1]).await.unwrap();
    assert_eq!(push_ids(&limited), found[1..3]);
    assert!(w.store.waiting(&fence, LaneSet::EMPTY, 10, &[]).await.unwrap().is_empty());
    let mut by_lane = HashSet::new();
    for lane in w.all_lanes().iter() {
        let rows = w.store.waiting(&fence, [lane].into_iter().collect(), 10, &[]).await.unwrap();
        assert!(push_ids(&rows).into_iter().all(|id| by_lane.insert(id)), "a row is in one lane");
    }
    assert_eq!(by_lane.len(), 5);
}

/// Neither pull rows nor rows that are not due nor finished ones.
pub async fn only_due_push_rows_wait<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let fence = w.owner().await;
    admit_one(&w, NewInboxRow { consumption: Consumption::Pull, ..message("s", "pull") }).await;
    admit_one(&w, NewInboxRow { delay_us: 10 * MINUTE_US, ..message("s", "later") }).await;
    let done = admit_one(&w, message("s", "done")).await;
    w.edit("inbox", done, &[("state", "'processed'")]).await;
    let due = admit_one(&w, message("s", "due")).await;
    assert_eq!(push_ids(&waiting(&w, &fence).await), [due]);
}

/// The outbox row has the new id, the aggregate as key, payload and trace of the inbox row, and the stamped ceiling.
pub async fn a_forward_is_whole<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let fence = w.owner().await;
    let trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    let id = admit_one(
        &w,
        NewInboxRow {
            aggregate_id: Some("order-7".into()),
            payload: Bytes::from_static(br#"{"n": 42}"#),
            trace_parent: Some(trace.into()),
            ..message("s", "k")
        },
    )
    .await;
    // The database had refused it before: contract 3.3.
    assert!(w.store.set_aside(&fence, id, None, 0).await.unwrap());
    let one = Forward { topic: "out.topic".into(), headers: r#"{"x-source": "s"}"#.into(), ..forward(id) };
    assert_eq!(w.store.forward(&fence, std::slice::from_ref(&one), 7).await.unwrap(), Default::default());
    let row = w.read_row(&fence, one.outbox_id).await;
    assert_eq!((row.topic.as_str(), row.key.as_deref()), ("out.topic", Some("order-7")));
    assert_eq!(json(&row.payload)["n"], 42);
    assert_eq!(serde_json::from_str::<serde_json::Value>(&row.headers).unwrap()["x-source"], "s");
    assert_eq!(row.trace_parent.as_deref(), Some(trace));
    assert_eq!((row.attempt, row.max_attempts, row.destination), (0, 7, None));
    assert_eq!(state(&w, id).await, State::Processed);
    assert!(inbox(&w, id, "processed_at").await.is_some());
    assert_eq!(inbox(&w, id, "crashes").await.as_deref(), Some("0"));
    assert!(waiting(&w, &fence).await.is_empty());
}

/// `sequence` follows the order of the batch.
pub async fn forwards_keep_their_order<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let fence = w.owner().await;
    let messages: Vec<_> = (0..300).map(|n| message("s", &format!("{}", (n * 7) % 300))).collect();
    w.store.admit(&messages).await.unwrap();
    let batch: Vec<_> = messages.iter().map(|message| forward(message.id)).collect();
    // All receipts are due at most 300 microseconds after now; a forward of a row that is not due yet is lost, not wrong.
    let mut done = Vec::new();
    while done.len() < batch.len() {
        let rest: Vec<_> = batch.iter().filter(|one| !done.contains(&one.outbox_id)).cloned().collect();
        let ready = push_ids(&waiting(&w, &fence).await);
        let ready: Vec<_> = rest.into_iter().filter(|one| ready.contains(&one.inbox_id)).collect();
        assert_eq!(w.store.forward(&fence, &ready, 5).await.unwrap(), Default::default());
        done.extend(ready.iter().map(|one| one.outbox_id));
    }
    let sent: Vec<_> = w.read(&fence).await.walk.iter().map(|row| row.id).collect();
    assert_eq!(sent, batch.iter().map(|one| one.outbox_id).collect::<Vec<_>>());
}

/// Rows that somebody else moved are told as lost and leave no outbox row; the others of the batch are forwarded.
pub async fn a_moved_row_is_not_forwarded<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let fence = w.owner().await;
    let ids = [
        admit_one(&w, message("s", "processed")).await,
        admit_one(&w, message("s", "dead")).await,
        admit_one(&w, message("s", "gone")).await,
        admit_one(&w, message("s", "there")).await,
        admit_one(&w, NewInboxRow { consumption: Consumption::Pull, ..message("s", "pull") }).await,
    ];
    w.edit("inbox", ids[0], &[("state", "'processed'")]).await;
    w.edit("inbox", ids[1], &[("state", "'dead'")]).await;
    w.delete("inbox", ids[2]).await;
    let batch = ids.map(forward);
    let forwarded = w.store.forward(&fence, &batch, 5).await.unwrap();
    let lost: HashSet<_> = forwarded.lost.into_iter().collect();
    assert_eq!(lost, HashSet::from([ids[0], ids[1], ids[2], ids[4]]));
    assert!(forwarded.refused.is_empty());
    assert_eq!(w.count("outbox").await, 1);
    assert_eq!(w.read(&fence).await.walk[0].id, batch[3].outbox_id);
    // A second forward of the same row makes no second outbox row.
    assert_eq!(w.store.forward(&fence, &[forward(ids[3])], 5).await.unwrap().lost, [ids[3]]);
    assert_eq!(w.count("outbox").await, 1);
}

/// An outbox row that the database refuses fails alone, and its inbox row stays as it was.
pub async fn a_refused_forward_fails_alone<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let fence = w.owner().await;
    let mut ids = Vec::new();
    for key in ["a", "b", "c", "moved"] {
        ids.push(admit_one(&w, message("s", key)).await);
    }
    let mut batch: Vec<_> = ids.iter().copied().map(forward).collect();
    batch[1].topic = "x".repeat(300);
    w.edit("inbox", ids[3], &[("state", "'dead'")]).await;
    let forwarded = w.store.forward(&fence, &batch, 5).await.unwrap();
    assert_eq!(forwarded.lost, [ids[3]]);
    assert_eq!(forwarded.refused.len(), 1);
    assert_eq!(forwarded.refused[0].0, ids[1]);
    assert_eq!(state(&w, ids[1]).await, State::Pending);
    assert_eq!((state(&w, ids[0]).await, state(&w, ids[2]).await), (State::Processed, State::Processed));
    let sent: Vec<_> = w.read(&fence).await.walk.iter().map(|row| row.id).collect();
    assert_eq!(sent, [batch[0].outbox_id, batch[2].outbox_id]);
}

/// Put off with a crash counted, or dead with a reason; never a row that is not pending push.
pub async fn a_row_is_set_aside<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let fence = w.owner().await;
    let id = admit_one(&w, message("s", "k")).await;
    assert!(w.store.set_aside(&fence, id, None, 10 * MINUTE_US).await.unwrap());
    assert_eq!(state(&w, id).await, State::Pending);
    assert_eq!(inbox(&w, id, "crashes").await.as_deref(), Some("1"));
    assert!(w.us_until("inbox", id, "scheduled_at").await.unwrap() > 9 * MINUTE_US);
    assert!(w.store.set_aside(&fence, id, Some("forward: refused"), 0).await.unwrap());
    assert_eq!(state(&w, id).await, State::Dead);
    assert_eq!(inbox(&w, id, "last_error").await.as_deref(), Some("forward: refused"));
    assert!(!w.store.set_aside(&fence, id, Some("forward: again"), 0).await.unwrap());
    let pull = admit_one(&w, NewInboxRow { consumption: Consumption::Pull, ..message("s", "pull") }).await;
    assert!(!w.store.set_aside(&fence, pull, Some("forward: e"), 0).await.unwrap());
    assert_eq!(state(&w, pull).await, State::Pending);
}

/// Per source and consumption, counts up to the bound, age of the oldest pending row.
pub async fn the_inbox_backlog_is_bounded<H: StoreHarness>() {
    let w = World::<H>::start().await;
    assert_eq!(w.store.inbox_backlog(10).await.unwrap(), []);
    for n in 0..4 {
        admit_one(&w, message("push", &n.to_string())).await;
    }
    let pull = |key: &str| NewInboxRow { consumption: Consumption::Pull, ..message("pull", key) };
    let old = admit_one(&w, pull("old")).await;
    w.edit("inbox", old, &[("created_at", &w.h.now_plus(-7 * MINUTE_US))]).await;
    admit_one(&w, NewInboxRow { dead: Some("not_json: e".into()), ..message("push", "dead") }).await;
    let done = admit_one(&w, pull("done")).await;
    w.edit("inbox", done, &[("state", "'processed'")]).await;
    let mut backlog = w.store.inbox_backlog(100).await.unwrap();
    backlog.retain(|source| source.pending + source.dead > 0);
    backlog.sort_by(|a, b| a.source.cmp(&b.source));
    let counts: Vec<_> = backlog
        .iter()
        .map(|source| (source.source.as_str(), source.consumption, source.pending, source.dead))
        .collect();
    assert_eq!(counts, [("pull", Consumption::Pull, 1, 0), ("push", Consumption::Push, 4, 1)]);
    assert!((7 * MINUTE_US..8 * MINUTE_US).contains(&backlog[0].oldest_pending_age_us), "{backlog:?}");
    assert!((0..MINUTE_US).contains(&backlog[1].oldest_pending_age_us), "{backlog:?}");
    let bounded = w.store.inbox_backlog(3).await.unwrap();
    assert!(bounded.iter().all(|source| source.pending <= 3 && source.dead <= 3), "{bounded:?}");
    assert!(bounded.iter().any(|source| source.pending > 0));
}

/// None, now, or the time until the nearest row.
pub async fn the_nearest_push_row_is_told<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let lanes = w.all_lanes();
    admit_one(&w, NewInboxRow { consumption: Consumption::Pull, ..message("s", "pull") }).await;
    assert_eq!(w.store.next_push_due_in_us(lanes).await.unwrap(), None);
    admit_one(&w, NewInboxRow { delay_us: 10 * MINUTE_US, ..message("s", "later") }).await;
    let next = w.store.next_push_due_in_us(lanes).await.unwrap().unwrap();
    assert!((9 * MINUTE_US..=10 * MINUTE_US).contains(&next), "{next}");
    assert_eq!(w.store.next_push_due_in_us(LaneSet::EMPTY).await.unwrap(), None);
    let due = admit_one(&w, message("s", "due")).await;
    w.edit("inbox", due, &[("scheduled_at", &w.h.now_plus(-MINUTE_US))]).await;
    assert_eq!(w.store.next_push_due_in_us(lanes).await.unwrap(), Some(0));
}

/// Two processes that forward the same rows at once make one outbox row each (contract 5.2).
pub async fn two_forwards_at_once<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let other = w.other_process().await;
    let fence = w.owner().await;
    for round in 0..5 {
        let mut ids = Vec::new();
        for n in 0..5 {
            let id = admit_one(&w, message("s", &format!("{round}-{n}"))).await;
            w.edit("inbox", id, &[("scheduled_at", &w.h.now_plus(-MINUTE_US))]).await;
            ids.push(id);
        }
        let batch = || ids.iter().copied().map(forward).collect::<Vec<_>>();
        let (left, right) = (batch(), batch());
        let (a, b) = futures::join!(w.store.forward(&fence, &left, 5), other.forward(&fence, &right, 5));
        let (a, b) = (a.unwrap(), b.unwrap());
        assert!(a.refused.is_empty() && b.refused.is_empty());
        assert_eq!(a.lost.len() + b.lost.len(), 5, "each row is lost to one of them");
        assert_eq!(w.count("outbox").await, (round + 1) * 5);
    }
}

/// Quotes, backslashes, line ends, signs of patterns and characters beyond the basic plane come back as they went in, and are
/// told apart.
pub async fn strange_texts_survive<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let fence = w.owner().await;
    let strange = [
        "it's",
        "say \"x\"",
        "back\\slash",
        "line\nend\ttab",
        "100%_",
        "{a,b}",
        "NULL",
        "🚀é",
        "$1 ?1 :x @y",
        "\u{7f}",
    ];
    for text in strange {
        let new = NewInboxRow {
            aggregate_id: Some(text.into()),
            event_type: Some(text.into()),
            correlation_id: Some(text.into()),
            topic: Some(text.into()),
            headers: serde_json::json!({ text: text }).to_string(),
            payload: serde_json::json!({ text: text }).to_string().into(),
            ..message(text, text)
        };
        let id = admit_one(&w, new).await;
        assert_eq!(w.store.admit(&[message(text, text)]).await.unwrap(), [Admitted::Duplicate], "{text:?}");
        w.edit("inbox", id, &[("scheduled_at", &w.h.now_plus(-MINUTE_US))]).await;
        let rows = waiting(&w, &fence).await;
        let row = rows.iter().find(|row| row.id == id).unwrap();
        for value in [row.aggregate_id.as_deref(), row.event_type.as_deref(), row.correlation_id.as_deref()] {
            assert_eq!(value, Some(text));
        }
        assert_eq!((row.source.as_str(), row.idempotency_key.as_str(), row.topic.as_deref()), (text, text, Some(text)));
        let one = Forward { topic: text.into(), headers: row.headers.clone(), ..forward(id) };
        assert_eq!(w.store.forward(&fence, std::slice::from_ref(&one), 5).await.unwrap(), Default::default());
        let read =
            Read { walk_limit: 0, keys: vec![KeyRead { key: text.into(), from: 0 }], key_limit: 5, ..everything() };
        let found = w.store.poll(&fence, &[], Some(&read)).await.unwrap().keys;
        assert_eq!(found.iter().map(|row| row.id).collect::<Vec<_>>(), [one.outbox_id], "{text:?}");
        let row = &found[0];
        assert_eq!((row.topic.as_str(), row.key.as_deref()), (text, Some(text)));
        assert_eq!(json(&row.payload)[text], text);
        assert_eq!(serde_json::from_str::<serde_json::Value>(&row.headers).unwrap()[text], text);
        let outcome = Outcome::Retry { delay_us: MINUTE_US, error: text.into() };
        let settle = Settle { position: row.position(), stamp: row.stamp(), outcome };
        let held = Read { omit_topics: vec![text.into()], ..everything() };
        let polled = w.store.poll(&fence, &[settle], Some(&held)).await.unwrap();
        assert!(polled.lost.is_empty());
        assert_eq!(w.row(one.outbox_id).await.last_error.as_deref(), Some(text));
        let polled = w.store.poll(&fence, &[], Some(&held)).await.unwrap();
        let omitted = polled.walk.iter().filter(|row| row.payload == Payload::Omitted).map(|row| row.id);
        assert_eq!(omitted.collect::<Vec<_>>(), [one.outbox_id], "{text:?}");
    }
}

/// A call that its caller gives up leaves no lock and no half of its work, wherever it was (an HTTP time-out, a stop).
pub async fn a_dropped_call_leaves_nothing_half_done<H: StoreHarness>() {
    let w = World::<H>::start().await;
    let fence = w.owner().await;
    for depth in 0..12 {
        let key = format!("k{depth}");
        let batch = [message("s", &key), message("s", &format!("{key}-2"))];
        drop_after(depth, w.store.admit(&batch)).await;
        let answers = w.store.admit(&batch).await.unwrap();
        let both = answers.iter().all(|answer| matches!(answer, Admitted::New(_)))
            || answers.iter().all(|answer| *answer == Admitted::Duplicate);
        assert!(both, "depth {depth}: {answers:?}");
        let ids = batch.each_ref().map(|message| message.id);
        for id in ids {
            w.edit("inbox", id, &[("scheduled_at", &w.h.now_plus(-MINUTE_US))]).await;
        }
        let before = w.count("outbox").await;
        drop_after(depth, w.store.forward(&fence, &ids.map(forward), 5)).await;
        let forwarded = w.store.forward(&fence, &ids.map(forward), 5).await.unwrap();
        assert!(forwarded.lost.is_empty() || forwarded.lost.len() == 2, "depth {depth}: {forwarded:?}");
        assert_eq!(w.count("outbox").await, before + 2, "depth {depth}");
        let rows = w.read(&fence).await.walk;
        let settles: Vec<_> = rows
            .iter()
            .map(|row| Settle { position: row.position(), stamp: row.stamp(), outcome: Outcome::Sent })
            .collect();
        drop_after(depth, w.store.poll(&fence, &settles, Some(&everything()))).await;
        let lost = w.store.poll(&fence, &settles, None).await.unwrap().lost;
        assert!(lost.is_empty() || lost.len() == settles.len(), "depth {depth}: {lost:?}");
        for row in &rows {
            assert_eq!(w.row(row.id).await.state, State::Sent);
        }
        // Applications are not held up either.
        w.insert(super::Insert::default()).await;
        let rows = w.read(&fence).await.walk;
        assert_eq!(rows.len(), 1);
        let settle = Settle { position: rows[0].position(), stamp: rows[0].stamp(), outcome: Outcome::Sent };
        assert!(w.settle(&fence, &[settle]).await.is_empty());
    }
}

/// Polls a future a few times, as its peer makes progress, then drops it.
async fn drop_after<F: Future>(polls: usize, call: F) {
    let mut call = Box::pin(call);
    for _ in 0..polls {
        if futures::poll!(call.as_mut()).is_ready() {
            return;
        }
        // Lets the driver and the database get a little further.
        tokio::time::sleep(std::time::Duration::from_micros(300)).await;
    }
}

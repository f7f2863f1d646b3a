use std::sync::atomic::Ordering;

use queuebox_api::checked::Route;
use queuebox_core::{
    message::State,
    pattern::Pattern,
    ports::{Scope, ledger::LedgerRow},
};
use serde_json::{Value, json};

use super::*;
use crate::memory::{Memory, id, inbox_row, outbox_row};

fn request(table: Scope, verb: Verb, fields: &Value) -> Result<Request, String> {
    Request::parse(table, verb, fields.as_object().unwrap()).map_err(|error| error.to_string())
}

fn routes(of: &[(&str, &[&str])]) -> Vec<Route> {
    let route = |(pattern, destinations): &(&str, &[&str])| Route {
        topics: vec![Pattern::parse(pattern).unwrap()],
        destinations: destinations.iter().map(|name| (*name).to_owned()).collect(),
        transform: None,
        routing_key: None,
    };
    of.iter().map(route).collect()
}

async fn run(memory: &Memory, table: Scope, verb: Verb, routes: &[Route], fields: Value) -> Value {
    outcome(memory, table, verb, routes, fields).await.unwrap().to_json()
}

async fn outcome(
    memory: &Memory,
    table: Scope,
    verb: Verb,
    routes: &[Route],
    fields: Value,
) -> Result<Outcome, RequestError> {
    let request = request(table, verb, &fields).unwrap();
    let caller = Caller("test".to_owned());
    match verb {
        Verb::Discard => discard(memory, routes, table, &request, &caller, &|_| {}).await,
        _ => replay(memory, routes, table, &request, &caller, &|_| {}).await,
    }
}

fn outbox(rows: impl IntoIterator<Item = LedgerRow>) -> Memory {
    Memory::of(Scope::Outbox, rows)
}

#[tokio::test]
async fn without_a_filter_nothing_moves() {
    let memory = outbox([outbox_row(1, State::Dead, "a")]);
    for fields in [json!({}), json!({"state": ["dead"]}), json!({"limit": 5, "dryRun": true}), json!({"topic": null})] {
        let error = outcome(&memory, Scope::Outbox, Verb::Replay, &[], fields).await.unwrap_err();
        assert_eq!(error.to_string(), "A replay needs at least one filter.");
    }
    let error = outcome(&memory, Scope::Outbox, Verb::Discard, &[], json!({})).await.unwrap_err();
    assert_eq!(error.to_string(), "A discard needs at least one filter.");
    assert_eq!(memory.states(), [State::Dead]);
}

#[test]
fn wrong_fields_are_refused_by_name() {
    use Scope::{Inbox, Outbox};
    let cases = [
        (Outbox, Verb::Replay, json!({"topcis": ["a"]}), "unknown field \"topcis\"; did you mean \"topics\"?"),
        (Outbox, Verb::Replay, json!({"dryrun": true}), "unknown field \"dryrun\"; did you mean \"dryRun\"?"),
        (
            Outbox,
            Verb::Replay,
            json!({"source": "a"}),
            "unknown field \"source\"; known are state, ids, topic, topics, destination, key, code, createdAfter, createdBefore, limit, dryRun",
        ),
        (
            Outbox,
            Verb::Replay,
            json!({"includeRejected": true}),
            "unknown field \"includeRejected\"; known are state, ids, topic, topics, destination, key, code, createdAfter, createdBefore, limit, dryRun",
        ),
        (
            Outbox,
            Verb::List,
            json!({"dryRun": true}),
            "unknown field \"dryRun\"; known are state, ids, topic, topics, destination, key, code, createdAfter, createdBefore, limit, cursor",
        ),
        (Outbox, Verb::Replay, json!({"ids": []}), "ids: is empty; leave it out instead"),
        (Outbox, Verb::Replay, json!({"ids": "1"}), "ids: is no list"),
        (Outbox, Verb::Replay, json!({"ids": ["1"]}), "ids: \"1\" is no UUID"),
        (Outbox, Verb::Replay, json!({"key": ""}), "key: is empty; leave it out instead"),
        (Outbox, Verb::Replay, json!({"key": 7}), "key: is no text"),
        (Outbox, Verb::Replay, json!({"topics": ["a.***"]}), "topics: \"a.***\": "),
        (
            Outbox,
            Verb::Replay,
            json!({"state": "sended"}),
            "state: \"sended\" is none of pending, processing, sent, dead",
        ),
        (
            Outbox,
            Verb::Replay,
            json!({"state": ["processed"]}),
            "state: \"processed\" is none of pending, processing, sent, dead",
        ),
        (
            Outbox,
            Verb::Replay,
            json!({"state": ["pending"]}),
            "state: pending and processing rows are never moved; name dead or sent",
        ),
        (Inbox, Verb::Discard, json!({"state": ["dead", "processed"]}), "state: only dead rows can be discarded"),
        (Outbox, Verb::Replay, json!({"code": "no_rout"}), "code: \"no_rout\" is no code; did you mean \"no_route\"?"),
        (Inbox, Verb::Replay, json!({"consumption": "both"}), "consumption: \"both\" is none of push, pull"),
        (
            Outbox,
            Verb::Replay,
            json!({"createdAfter": "2026-01-01 08:00"}),
            "createdAfter: \"2026-01-01 08:00\" is no time in ISO 8601 with its offset, such as 2026-01-31T08:00:00Z",
        ),
        (Outbox, Verb::Replay, json!({"limit": 0}), "limit: is no whole number above 0"),
        (Outbox, Verb::List, json!({"limit": 1001}), "limit: is no whole number from 1 to 1000"),
        (Outbox, Verb::Replay, json!({"dryRun": "yes"}), "dryRun: is neither true nor false"),
        (Inbox, Verb::List, json!({"cursor": "o00"}), "cursor: is none of this table; take it from `next` of a page"),
    ];
    for (table, verb, fields, expected) in cases {
        let error = request(table, verb, &fields).unwrap_err();
        let found = error.strip_prefix("Invalid request: ").unwrap_or_default();
        assert!(found.starts_with(expected), "{fields}: {error}");
    }
}

#[tokio::test]
async fn dead_rows_move_unless_more_is_named() {
    let rows = || [State::Sent, State::Sent, State::Processing, State::Pending, State::Dead];
    let memory = || outbox(rows().into_iter().zip(1..).map(|(state, number)| outbox_row(number, state, "a")));

    let only_dead = memory();
    assert_eq!(run(&only_dead, Scope::Outbox, Verb::Replay, &[], json!({"topic": "a"})).await, json!({"moved": 1}));
    assert_eq!(only_dead.states(), [State::Sent, State::Sent, State::Processing, State::Pending, State::Pending]);

    let named = memory();
    let fields = json!({"topic": "a", "state": ["sent", "processing"]});
    assert_eq!(run(&named, Scope::Outbox, Verb::Replay, &[], fields).await, json!({"moved": 2}));
    assert_eq!(named.states(), [State::Pending, State::Pending, State::Processing, State::Pending, State::Dead]);
}

#[tokio::test]
async fn a_filter_means_rows_that_meet_all_of_it() {
    let keyed =
        |number, key: &str, topic| LedgerRow { key: Some(key.to_owned()), ..outbox_row(number, State::Dead, topic) };
    let no_route = LedgerRow { last_error: Some("no_route: none".to_owned()), ..keyed(4, "b", "order.created") };
    let rows =
        [keyed(1, "a", "order.created"), keyed(2, "a", "order.item.added"), keyed(3, "b", "order.paid"), no_route];
    let cases = [
        (json!({"topic": "order.created"}), vec![1, 4]),
        (json!({"topic": "order.*"}), vec![1, 3, 4]),
        (json!({"topics": ["order.paid", "order.item.added"]}), vec![2, 3]),
        (json!({"topics": ["order.paid", "order.item.*"]}), vec![2, 3]),
        (json!({"topic": "order.*", "topics": ["order.paid", "order.item.*"]}), vec![3]),
        (json!({"topic": "order.paid", "topics": ["order.created"]}), vec![]),
        (json!({"key": "a"}), vec![1, 2]),
        (json!({"key": "a", "topic": "order.*"}), vec![1]),
        (json!({"code": "no_route"}), vec![4]),
        (json!({"ids": [id(3), id(4), id(9)]}), vec![3, 4]),
        (json!({"createdAfter": "2026-01-01T00:00:02Z"}), vec![3, 4]),
        (json!({"createdBefore": "2026-01-01T00:00:02Z"}), vec![1]),
        (json!({"createdAfter": "2026-01-01T01:00:01+01:00", "createdBefore": "2026-01-01T00:00:04Z"}), vec![2, 3]),
        (json!({"topic": "order.**", "limit": 2}), vec![1, 2]),
    ];
    for (fields, expected) in cases {
        let memory = outbox(rows.clone());
        let counted = outcome(&memory, Scope::Outbox, Verb::Replay, &[], {
            let mut fields = fields.clone();
            fields["dryRun"] = true.into();
            fields
        });
        let expected: Vec<_> = expected.into_iter().map(id).collect();
        assert_eq!(counted.await.unwrap().dry_run.unwrap().sample, expected, "{fields}");
        assert!(memory.states().iter().all(|state| *state == State::Dead), "{fields}");

        let moved = outcome(&memory, Scope::Outbox, Verb::Replay, &[], fields.clone()).await.unwrap().done;
        let rows = memory.rows.lock().unwrap();
        let pending: Vec<_> =
            rows.iter().filter(|(_, entry)| entry.row.state == State::Pending).map(|(_, entry)| entry.row.id).collect();
        assert_eq!((moved as usize, pending), (expected.len(), expected), "{fields}");
    }
}

#[tokio::test]
async fn the_first_matching_route_says_where_a_row_goes() {
    let routes = routes(&[("order.paid", &["ledger"]), ("order.*", &["shop", "audit"]), ("**", &["rest"])]);
    let child = LedgerRow {
        destination: Some("audit".to_owned()),
        parent_id: Some(id(90)),
        ..outbox_row(5, State::Dead, "order.paid")
    };
    let rows = [
        outbox_row(1, State::Dead, "order.paid"),
        outbox_row(2, State::Dead, "order.created"),
        outbox_row(3, State::Dead, "order.sent"),
        outbox_row(4, State::Dead, "other.thing"),
        child,
    ];
    for (fields, expected) in [
        (json!({"destination": "ledger"}), 1),
        (json!({"destination": "shop"}), 2),
        (json!({"destination": "audit"}), 3),
        (json!({"destination": "rest"}), 1),
        (json!({"destination": "shop", "topics": ["order.sent", "other.*"]}), 1),
        (json!({"destination": "gone"}), 0),
    ] {
        let memory = outbox(rows.clone());
        let answer = run(&memory, Scope::Outbox, Verb::Replay, &routes, fields.clone()).await;
        assert_eq!(answer, json!({"moved": expected}), "{fields}");
    }
}

#[tokio::test]
async fn a_dry_run_counts_what_would_move() {
    let row = |number| LedgerRow {
        key: (number % 3 > 0).then(|| format!("k{}", number % 3)),
        ..outbox_row(number, State::Dead, "a")
    };
    let memory = outbox((1..=12).map(row));
    let answer = run(&memory, Scope::Outbox, Verb::Replay, &[], json!({"topic": "a", "dryRun": true})).await;
    let sample: Vec<_> = (1..=10).map(id).collect();
    assert_eq!(answer, json!({"moved": 0, "matched": 12, "keys": 2, "sample": sample}));
    assert_eq!(*memory.batches.lock().unwrap(), [0_usize; 0]);

    let answer =
        run(&memory, Scope::Outbox, Verb::Discard, &[], json!({"topic": "a", "limit": 3, "dryRun": true})).await;
    assert_eq!(answer, json!({"discarded": 0, "matched": 3, "keys": 2, "sample": [id(1), id(2), id(3)]}));
    assert_eq!(memory.states().len(), 12);
}

#[tokio::test]
async fn many_rows_move_in_batches() {
    let memory =
        outbox((1..=2_500).map(|number| outbox_row(number, State::Dead, if number % 2 == 0 { "a.b" } else { "c" })));
    assert_eq!(run(&memory, Scope::Outbox, Verb::Replay, &[], json!({"topic": "a.*"})).await, json!({"moved": 1_250}));
    assert!(memory.states().iter().filter(|state| **state == State::Pending).count() == 1_250);
    let limited = json!({"topic": "c", "limit": 1_001});
    assert_eq!(run(&memory, Scope::Outbox, Verb::Discard, &[], limited).await, json!({"discarded": 1_001}));
    assert_eq!(memory.states().len(), 2_500 - 1_001);
}

#[tokio::test]
async fn a_failure_says_what_was_done_before_it_and_no_secret() {
    let memory = outbox((1..=1_500).map(|number| outbox_row(number, State::Dead, "a")));
    memory.fails_at.store(2, Ordering::SeqCst);
    let error = outcome(&memory, Scope::Outbox, Verb::Replay, &[], json!({"topic": "a"})).await.unwrap_err();
    assert!(matches!(error, RequestError::Database { done: 1_000, .. }));
    let text = error.to_string();
    assert!(text.contains("1000 rows were done before") && text.contains("@db:5432"), "{text}");
    assert!(!text.contains("canary-7731"), "{text}");
}

#[tokio::test]
async fn the_id_of_a_parent_stands_for_its_children() {
    let child = |number, state, parent| LedgerRow {
        destination: Some(format!("d{number}")),
        parent_id: Some(id(parent)),
        ..outbox_row(number, state, "a")
    };
    let rows = [
        outbox_row(1, State::Sent, "a"),
        child(2, State::Dead, 1),
        child(3, State::Sent, 1),
        outbox_row(4, State::Sent, "a"),
        // Its parent was deleted when it was expanded.
        child(5, State::Dead, 77),
    ];
    let by_id = outbox(rows.clone());
    assert_eq!(run(&by_id, Scope::Outbox, Verb::Replay, &[], json!({"ids": [id(1)]})).await, json!({"moved": 1}));
    assert_eq!(by_id.states()[..3], [State::Sent, State::Pending, State::Sent]);
    assert_eq!(run(&by_id, Scope::Outbox, Verb::Replay, &[], json!({"ids": [id(77)]})).await, json!({"moved": 1}));

    // By other filters as well; the dry run counts the same.
    let fields = |dry_run: bool| json!({"topic": "a", "state": ["sent"], "dryRun": dry_run});
    let by_topic = outbox(rows);
    let counted = run(&by_topic, Scope::Outbox, Verb::Replay, &[], fields(true)).await;
    assert_eq!(counted["matched"], 2);
    assert_eq!(run(&by_topic, Scope::Outbox, Verb::Replay, &[], fields(false)).await, json!({"moved": 2}));
    assert_eq!(by_topic.states(), [State::Sent, State::Dead, State::Pending, State::Pending, State::Dead]);
}

#[tokio::test]
async fn what_was_never_accepted_moves_only_when_asked_for() {
    let rows = [
        inbox_row(1, State::Dead, "shop", "not_json"),
        inbox_row(2, State::Dead, "shop", "rejected"),
        inbox_row(3, State::Dead, "shop", "empty_topic"),
        inbox_row(4, State::Dead, "bank", "empty_topic"),
        inbox_row(5, State::Processed, "shop", "none"),
    ];
    let memory = Memory::of(Scope::Inbox, rows);
    let moved = outcome(&memory, Scope::Inbox, Verb::Replay, &[], json!({"source": "shop"})).await.unwrap();
    assert_eq!((moved.done, moved.left_rejected), (1, 2));
    let fields = json!({"sources": ["shop", "mint"], "includeRejected": true});
    assert_eq!(run(&memory, Scope::Inbox, Verb::Replay, &[], fields).await, json!({"moved": 2}));
    let fields = json!({"source": "bank", "sources": ["shop"]});
    assert_eq!(run(&memory, Scope::Inbox, Verb::Discard, &[], fields).await, json!({"discarded": 0}));
    assert_eq!(
        run(&memory, Scope::Inbox, Verb::Discard, &[], json!({"source": "bank"})).await,
        json!({"discarded": 1})
    );
    assert_eq!(memory.states(), [State::Pending, State::Pending, State::Pending, State::Processed]);
}

#[tokio::test]
async fn pages_show_each_row_once_while_rows_change() {
    for filter in [json!({"limit": 3}), json!({"limit": 3, "topics": ["a", "b.*"]})] {
        let memory = outbox((1..=10).map(|number| outbox_row(number, State::Dead, "a")));
        let (mut seen, mut cursor, mut added) = (Vec::new(), Value::Null, 100);
        loop {
            let mut fields = filter.clone();
            fields["cursor"] = cursor;
            let asked = request(Scope::Outbox, Verb::List, &fields).unwrap();
            let page = list(&memory, &[], Scope::Outbox, &asked).await.unwrap();
            assert!(page.items.len() <= 3);
            seen.extend(page.items.iter().map(|item| item.0.id));
            // One that was shown goes away, and a new one comes.
            memory.rows.lock().unwrap().retain(|(_, entry)| entry.row.id != seen[0]);
            memory.add(Scope::Outbox, outbox_row(added, State::Dead, "a"));
            added += 1;
            let Some(next) = page.next else { break };
            cursor = next.to_string().into();
        }
        assert_eq!(seen, (1..=10).rev().map(id).collect::<Vec<_>>(), "{filter}");
    }
}

#[tokio::test]
async fn a_page_ends_where_the_rows_end() {
    let memory = outbox((1..=3).map(|number| outbox_row(number, State::Dead, "a")));
    for filter in [json!({"limit": 3}), json!({"limit": 3, "topic": "*"})] {
        let asked = request(Scope::Outbox, Verb::List, &filter).unwrap();
        let page = list(&memory, &[], Scope::Outbox, &asked).await.unwrap();
        assert_eq!((page.items.len(), page.next), (3, None), "{filter}");
    }
    let two = request(Scope::Outbox, Verb::List, &json!({"limit": 2})).unwrap();
    assert!(list(&memory, &[], Scope::Outbox, &two).await.unwrap().next.is_some());
}

#[tokio::test]
async fn a_search_for_few_among_many_goes_on_behind_its_cursor() {
    let topic = |number| if number == 1 { "rare.one" } else { "a" };
    let memory = outbox((1..=25_000).map(|number| outbox_row(number, State::Dead, topic(number))));
    let first = request(Scope::Outbox, Verb::List, &json!({"topic": "rare.*"})).unwrap();
    let first = list(&memory, &[], Scope::Outbox, &first).await.unwrap();
    assert!(first.items.is_empty());
    let more = json!({"topic": "rare.*", "cursor": first.next.unwrap().to_string()});
    let second = list(&memory, &[], Scope::Outbox, &request(Scope::Outbox, Verb::List, &more).unwrap()).await.unwrap();
    assert_eq!((second.items.len(), second.next), (1, None));
}

#[tokio::test]
async fn a_row_is_shown_whole_with_its_payload_as_stored() {
    let mut parent = outbox_row(1, State::Sent, "a");
    parent.key = Some("k".to_owned());
    parent.last_error = Some("attempts: https://u:canary-7731@receiver/ said 500".to_owned());
    let memory = outbox([parent]);
    let mut child = outbox_row(2, State::Dead, "a");
    (child.parent_id, child.destination) = (Some(id(1)), Some("audit".to_owned()));
    memory.add(Scope::Outbox, child);
    memory.rows.lock().unwrap()[0].1.headers = r#"{"X-A":"b","Authorization":"canary-7731"}"#.to_owned();

    let entry = show(&memory, Scope::Outbox, id(1)).await.unwrap().unwrap();
    let text = serde_json::to_string(&entry).unwrap();
    assert!(text.contains(r#""payload":{"n":1.10}"#), "{text}");
    assert!(!text.contains("canary-7731"), "{text}");
    let value: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(value["headers"], json!({"X-A": "b", "Authorization": "[REDACTED]"}));
    assert_eq!(value["createdAt"], "2026-01-01T00:00:01.000000Z");
    assert_eq!(value["children"][0]["destination"], "audit");
    assert_eq!(value["children"][0]["code"], "attempts");
    assert!(show(&memory, Scope::Inbox, id(1)).await.unwrap().is_none());
}

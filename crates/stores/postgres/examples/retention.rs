//! Retention on a great many finished rows, beside a relay at work: the longest step, the rate of deletion, and what the polls of the
//! relay take before and meanwhile.
//!
//! `QUEUEBOX_TEST_POSTGRES_URL=… cargo run -p queuebox-postgres --example retention -- [age|count] [rows] [seconds]`
//! The database is filled up to `rows` sent rows first; a run that ends before everything is done goes on when it is started again.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::time::{Duration, Instant};

use queuebox_core::{
    LaneSet, Uuid,
    message::State,
    ports::{
        Fence, Lanes, Ledger, Outbox, Scope,
        lanes::{Registration, Take},
        outbox::{Outcome, PruneRule, Read, Settle},
        schema::{MigrateOptions, Schema},
    },
};
use queuebox_postgres::{PostgresConfig, PostgresStore};
use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection, Row};

const CHUNK: u64 = 500_000;

#[tokio::main]
async fn main() {
    let mut args = std::env::args().skip(1);
    let what = args.next().unwrap_or_else(|| "age".to_owned());
    let rows: u64 = args.next().map_or(10_000_000, |arg| arg.parse().expect("rows"));
    let seconds: u64 = args.next().map_or(200, |arg| arg.parse().expect("seconds"));
    let until = Instant::now() + Duration::from_secs(seconds);
    queuebox_testkit::init();
    let url = std::env::var("QUEUEBOX_TEST_POSTGRES_URL").expect("QUEUEBOX_TEST_POSTGRES_URL");
    let store = PostgresStore::open(PostgresConfig::from_url(&url).unwrap()).unwrap();
    store.migrate(MigrateOptions::default()).await.unwrap();
    store.check().await.unwrap();
    let mut app = PgConnection::connect(&url).await.unwrap();
    app.execute("CREATE TABLE IF NOT EXISTS filled (n bigint)").await.unwrap();
    let filled: i64 = app.fetch_one("SELECT coalesce(sum(n), 0)::bigint FROM filled").await.unwrap().get(0);
    for chunk in filled as u64 / CHUNK..rows / CHUNK {
        if Instant::now() > until {
            println!("filled {} of {rows}; start it again", chunk * CHUNK);
            return;
        }
        fill(&mut app, chunk * CHUNK, rows).await;
    }
    let rule = if what == "count" { PruneRule::Beyond(rows / 2) } else { PruneRule::OlderThan(86_400_000) };
    let alone = relay(&url, &store, Duration::from_secs(15)).await;
    let beside = async {
        let mut all = Vec::new();
        while Instant::now() < until {
            all.extend(relay(&url, &store, Duration::from_secs(5)).await);
        }
        all
    };
    let cleaner = PostgresStore::open(PostgresConfig::from_url(&url).unwrap()).unwrap();
    cleaner.check().await.unwrap();
    tokio::select! {
        beside = beside => println!("not done: polls {}", percentiles(beside)),
        () = clean(&cleaner, rule, until) => {}
    }
    println!("polls without retention {}", percentiles(alone));
}

/// Rows of a month, up to two days ago.
async fn fill(app: &mut PgConnection, from: u64, rows: u64) {
    let sql = format!(
        "BEGIN; SET LOCAL synchronous_commit = off; INSERT INTO filled VALUES ({CHUNK});
         INSERT INTO outbox (topic, key, payload, state, created_at, updated_at)
         SELECT 'order.created', 'k' || n % 10000, jsonb_build_object('text', repeat('x', 200)), 'sent', t, t
           FROM (SELECT n, now() - interval '2 days' - ({rows} - n) * interval '30 days' / {rows} AS t
                   FROM generate_series({from} + 1, {from} + {CHUNK}) n) s; COMMIT"
    );
    app.execute(AssertSqlSafe(sql)).await.unwrap();
}

/// Steps until the pass is over, with the engine's rests.
async fn clean(store: &PostgresStore, rule: PruneRule, until: Instant) {
    let (began, mut gone, mut steps) = (Instant::now(), 0, Vec::new());
    let mut searching = Vec::new();
    loop {
        let at = Instant::now();
        let step = store.prune(Scope::Outbox, State::Sent, rule, 1_000).await.unwrap();
        let took = at.elapsed();
        if step.rows == 0 {
            searching.push(took)
        } else {
            steps.push(took)
        }
        gone += step.rows;
        if !step.more || Instant::now() + Duration::from_secs(2) > until {
            let took = began.elapsed().as_secs_f64();
            println!(
                "{} {gone} rows in {took:.1} s = {:.0} rows/s",
                if step.more { "not done" } else { "done" },
                gone as f64 / took
            );
            println!("{} steps that searched {}", searching.len(), percentiles(searching));
            println!("{} steps that deleted {}", steps.len(), percentiles(steps));
            return tokio::time::sleep(Duration::from_secs(if step.more { 10 } else { 0 })).await;
        }
        tokio::time::sleep(took.min(Duration::from_secs(1))).await;
    }
}

/// Twenty messages every 50 ms at most, read and settled; what each poll took.
async fn relay(url: &str, store: &PostgresStore, time: Duration) -> Vec<Duration> {
    let fence = owner(store).await;
    let mut app = PgConnection::connect(url).await.unwrap();
    let (until, mut polls, mut settles) = (Instant::now() + time, Vec::new(), Vec::new());
    while Instant::now() < until {
        app.execute("INSERT INTO outbox (topic, key, payload) SELECT 'order.created', 'k' || n, '{}' FROM generate_series(1, 20) n")
            .await
            .unwrap();
        for _ in 0..2 {
            let at = Instant::now();
            let read = Read {
                lanes: LaneSet::first(64),
                walk_limit: 500,
                later_limit: 500,
                bytes_max: 64 << 20,
                payload_max: 16 << 20,
                ..Read::default()
            };
            let polled = store.poll(&fence, &std::mem::take(&mut settles), Some(&read)).await.unwrap();
            polls.push(at.elapsed());
            let sent = |row: &queuebox_core::message::OutboxRow| Settle {
                position: row.position(),
                stamp: row.stamp(),
                outcome: Outcome::Sent,
            };
            settles.extend(polled.walk.iter().map(sent));
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    store.poll(&fence, &settles, None).await.unwrap();
    store.retire(&fence, LaneSet::EMPTY).await.unwrap();
    polls
}

async fn owner(store: &PostgresStore) -> Fence {
    let fence = Fence { worker: format!("worker-{}", Uuid::new_v4()), token: Uuid::new_v4() };
    let new = Registration { fence: fence.clone(), relay_uid: "r".into(), config: "1/a".into(), lease_ms: 60_000 };
    store.register(&new).await.unwrap();
    let survey = store.survey(Scope::Outbox).await.unwrap();
    let take = |lane| {
        let row = survey.lanes.iter().find(|row| row.lane == lane);
        Take { lane, owner: row.and_then(|row| row.worker.clone()), term: row.map_or(0, |row| row.term) }
    };
    let wanted: Vec<Take> = (0..64).map(take).collect();
    assert_eq!(store.take(&fence, Scope::Outbox, &wanted).await.unwrap().len(), 64);
    fence
}

fn percentiles(mut times: Vec<Duration>) -> String {
    times.sort_unstable();
    let at =
        |share: f64| times.get(((times.len() as f64 - 1.0) * share) as usize).map_or(0.0, |t| t.as_secs_f64() * 1e3);
    format!("p50 {:.1} ms, p99 {:.1} ms, longest {:.1} ms ({})", at(0.5), at(0.99), at(1.0), times.len())
}

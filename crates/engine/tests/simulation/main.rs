//! Thousands of seeded worlds: the real engine, its ports in memory, tokio's paused clock, and an oracle.
//!
//! `QUEUEBOX_WORLDS=20000` runs more of them; `QUEUEBOX_SEED=17 QUEUEBOX_WORLD=kills` runs one with its trace.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs, reason = "tests end by panicking")]

mod database;
mod faults;
mod store;
mod world;

use faults::{Sabotage, Weather};
use world::{Plan, Summary};

const ROUGH: Weather = Weather {
    lost_request: 0.02,
    lost_reply: 0.02,
    publish_fails: 0.08,
    answer_lost: 0.02,
    publish_hangs: 0.002,
    kills: 2,
    stops: 1,
    clock_jumps: 1,
    outages: 2,
    replays: 2,
    ..Weather::CALM
};

/// Kinds of worlds by name.
fn kinds() -> Vec<(&'static str, Weather, bool)> {
    let failing = Weather { publish_fails: 0.15, outages: 3, ..Weather::CALM };
    let kills = Weather { kills: 4, ..Weather::CALM };
    let lines = Weather { lost_request: 0.05, lost_reply: 0.05, stops: 2, ..Weather::CALM };
    let clocks = Weather { clock_jumps: 3, publish_hangs: 0.004, ..Weather::CALM };
    vec![
        ("calm", Weather::CALM, true),
        ("failing", failing, false),
        ("kills", kills, false),
        ("lines", lines, true),
        ("clocks", clocks, false),
        ("replays", Weather { replays: 8, publish_fails: 0.05, ..Weather::CALM }, false),
        ("killers", Weather { killers: 3, ..Weather::CALM }, false),
        ("held", Weather { held: true, kills: 1, ..Weather::CALM }, false),
        ("rough", ROUGH, true),
    ]
}

fn plan(seed: u64, weather: Weather, fan_out: bool, sabotage: Sabotage) -> Plan {
    let pick = |modulus: u64, salt: u64| (seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(17) ^ salt) % modulus;
    Plan {
        seed,
        workers: 1 + usize::try_from(pick(4, 1)).unwrap(),
        messages: 60 + usize::try_from(pick(120, 2)).unwrap(),
        keys: 1 + u32::try_from(pick(8, 3)).unwrap(),
        lanes: if pick(5, 4) == 0 { 1 } else { 64 },
        fan_out,
        batch_size: [4, 16, 100, 500][usize::try_from(pick(4, 5)).unwrap()],
        max_crashes: if weather.killers > 0 { 1 + i32::try_from(pick(4, 6)).unwrap() } else { 1_000 },
        weather,
        sabotage,
    }
}

fn run(plan: Plan) -> Result<Summary, String> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    runtime.block_on(world::run(plan))
}

fn worlds() -> u64 {
    std::env::var("QUEUEBOX_WORLDS").ok().and_then(|count| count.parse().ok()).unwrap_or(2_100)
}

/// Runs the seeds `from, from + step, …` of one kind; the first failing one with its command.
fn run_kind(name: &str, weather: Weather, fan_out: bool, seeds: impl Iterator<Item = u64>) -> (u64, usize, usize) {
    let (mut count, mut committed, mut arrivals) = (0, 0, 0);
    for seed in seeds {
        match run(plan(seed, weather, fan_out, Sabotage::None)) {
            Ok(summary) => {
                count += 1;
                committed += summary.committed;
                arrivals += summary.arrivals;
            }
            Err(wrong) => panic!(
                "world {name}, seed {seed}:\n{wrong}\n\nrun it again: QUEUEBOX_SEED={seed} QUEUEBOX_WORLD={name} \
                 cargo test -p queuebox-engine --test simulation one_world -- --nocapture"
            ),
        }
    }
    (count, committed, arrivals)
}

#[test]
fn no_world_loses_reorders_or_invents_a_message() {
    let kinds = kinds();
    let each = worlds().div_ceil(kinds.len() as u64);
    let threads: Vec<_> = (0..2)
        .map(|half| {
            let kinds = kinds.clone();
            std::thread::spawn(move || {
                for (name, weather, fan_out) in kinds {
                    let (count, committed, arrivals) =
                        run_kind(name, weather, fan_out, (0..each).filter(|seed| seed % 2 == half));
                    println!("{name}: {count} worlds, {committed} messages committed, {arrivals} arrivals");
                }
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    }
}

/// One world by hand: `QUEUEBOX_SEED`, `QUEUEBOX_WORLD`.
#[test]
fn one_world() {
    let seed = std::env::var("QUEUEBOX_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1);
    let name = std::env::var("QUEUEBOX_WORLD").unwrap_or_else(|_| "rough".to_owned());
    let (name, weather, fan_out) = kinds().into_iter().find(|(kind, ..)| *kind == name).expect("a kind of world");
    run_kind(name, weather, fan_out, std::iter::once(seed));
}

/// A world in which a classic bug was put back is found out by some seed.
fn is_caught(sabotage: Sabotage, weather: Weather, fan_out: bool) {
    let caught = (0..400).find(|seed| run(plan(*seed, weather, fan_out, sabotage)).is_err());
    assert!(caught.is_some(), "{sabotage:?} went unnoticed in 400 worlds");
}

#[test]
fn a_cursor_that_skips_late_commits_is_caught() {
    is_caught(Sabotage::NoLap, Weather::CALM, false);
}

#[test]
fn a_settle_that_marks_a_replayed_row_is_caught() {
    is_caught(Sabotage::SettleIgnoresReplay, Weather { replays: 250, lost_reply: 0.2, ..Weather::CALM }, false);
}

#[test]
fn marking_before_sending_is_caught() {
    is_caught(Sabotage::MarkBeforeSend, Weather::CALM, false);
}

#[test]
fn a_settle_without_a_fence_is_caught() {
    is_caught(Sabotage::UnfencedSettle, Weather { clock_jumps: 3, publish_hangs: 0.004, ..Weather::CALM }, false);
}

#[test]
fn leases_of_waiting_rows_that_are_not_renewed_are_caught() {
    is_caught(Sabotage::RowLeaseNotRenewed, Weather { kills: 4, publish_hangs: 0.02, ..Weather::CALM }, false);
}

#[test]
fn held_rows_that_hide_free_ones_are_caught() {
    is_caught(Sabotage::HeldHidesFree, Weather { held: true, ..Weather::CALM }, false);
}

#[test]
fn a_takeover_that_reads_before_it_may_is_caught() {
    is_caught(Sabotage::TakeoverReadsEarly, Weather::CALM, false);
}

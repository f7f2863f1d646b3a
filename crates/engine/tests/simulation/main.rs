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

const LINES: Weather = Weather { lost_request: 0.05, lost_reply: 0.05, doubled: 0.05, stops: 2, ..Weather::CALM };

const ROUGH: Weather = Weather {
    lost_request: 0.02,
    lost_reply: 0.02,
    doubled: 0.02,
    publish_fails: 0.08,
    answer_lost: 0.02,
    publish_hangs: 0.002,
    kills: 2,
    stops: 1,
    clock_jumps: 1,
    outages: 2,
    replays: 2,
    edits: 3,
    ..Weather::CALM
};

/// A kind of world.
#[derive(Debug, Clone, Copy)]
struct Kind {
    name: &'static str,
    weather: Weather,
    fan_out: bool,
    /// False: tables below version 14.
    has_lanes: bool,
}

impl Kind {
    const fn new(name: &'static str, weather: Weather) -> Self {
        Self { name, weather, fan_out: false, has_lanes: true }
    }

    const fn with_fan_out(self) -> Self {
        Self { fan_out: true, ..self }
    }

    const fn without_lanes(self) -> Self {
        Self { has_lanes: false, ..self }
    }
}

const KINDS: [Kind; 16] = [
    Kind::new("calm", Weather::CALM).with_fan_out(),
    Kind::new("failing", Weather { publish_fails: 0.15, outages: 3, ..Weather::CALM }),
    Kind::new("kills", Weather { kills: 4, ..Weather::CALM }),
    Kind::new("lines", LINES).with_fan_out(),
    Kind::new("clocks", Weather { clock_jumps: 3, publish_hangs: 0.004, ..Weather::CALM }),
    Kind::new("replays", Weather { replays: 8, edits: 8, publish_fails: 0.05, ..Weather::CALM }),
    Kind::new("killers", Weather { killers: 3, ..Weather::CALM }),
    Kind::new("held", Weather { held: true, kills: 1, ..Weather::CALM }),
    Kind::new("refused", Weather { refused: 6, publish_fails: 0.05, ..Weather::CALM }).with_fan_out(),
    Kind::new("refused-rough", Weather { refused: 6, ..ROUGH }).with_fan_out(),
    Kind::new("rough", ROUGH).with_fan_out(),
    Kind::new("claims", Weather { publish_fails: 0.05, outages: 1, replays: 8, ..LINES }).without_lanes(),
    Kind::new("claims-rough", ROUGH).with_fan_out().without_lanes(),
    Kind::new("claims-killers", Weather { killers: 3, ..Weather::CALM }).without_lanes(),
    Kind::new("claims-refused", Weather { refused: 6, ..ROUGH }).without_lanes(),
    Kind::new("claims-held", Weather { held: true, ..Weather::CALM }).without_lanes(),
];

fn plan(seed: u64, kind: Kind, sabotage: Sabotage) -> Plan {
    let pick = |modulus: u64, salt: u64| (seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(17) ^ salt) % modulus;
    Plan {
        seed,
        workers: 1 + usize::try_from(pick(4, 1)).unwrap(),
        messages: 60 + usize::try_from(pick(120, 2)).unwrap(),
        keys: 1 + u32::try_from(pick(8, 3)).unwrap(),
        lanes: if pick(5, 4) == 0 { 1 } else { 64 },
        has_lanes: kind.has_lanes,
        fan_out: kind.fan_out,
        batch_size: [4, 16, 100, 500][usize::try_from(pick(4, 5)).unwrap()],
        max_crashes: if kind.weather.killers > 0 { 1 + i32::try_from(pick(4, 6)).unwrap() } else { 1_000 },
        weather: kind.weather,
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

/// Runs the given seeds of one kind; the first failing one with its command.
fn run_kind(kind: Kind, seeds: impl Iterator<Item = u64>) -> (u64, usize, usize) {
    let name = kind.name;
    let (mut count, mut committed, mut arrivals) = (0, 0, 0);
    for seed in seeds {
        match run(plan(seed, kind, Sabotage::None)) {
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
    let each = worlds().div_ceil(KINDS.len() as u64);
    let threads: Vec<_> = (0..2)
        .map(|half| {
            std::thread::spawn(move || {
                for kind in KINDS {
                    let (count, committed, arrivals) = run_kind(kind, (0..each).filter(|seed| seed % 2 == half));
                    println!("{}: {count} worlds, {committed} messages committed, {arrivals} arrivals", kind.name);
                }
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    }
    let beside = store::SETTLED_BESIDE.load(std::sync::atomic::Ordering::SeqCst);
    assert!(beside > 0, "no delivery was settled while its worker read");
    println!("{beside} times deliveries were settled while their worker read");
}

/// One world by hand: `QUEUEBOX_SEED`, `QUEUEBOX_WORLD`.
#[test]
fn one_world() {
    let seed = std::env::var("QUEUEBOX_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1);
    let name = std::env::var("QUEUEBOX_WORLD").unwrap_or_else(|_| "rough".to_owned());
    let kind = KINDS.into_iter().find(|kind| kind.name == name).expect("a kind of world");
    run_kind(kind, std::iter::once(seed));
}

/// A world in which a classic bug was put back is found out by some seed; and it is the bug that is found, for without it the same
/// world is all right.
fn is_caught(sabotage: Sabotage, kind: Kind) {
    let found = (0..400).find_map(|seed| run(plan(seed, kind, sabotage)).err().map(|wrong| (seed, wrong)));
    let Some((seed, wrong)) = found else { panic!("{sabotage:?} went unnoticed in 400 worlds") };
    println!("{sabotage:?}, seed {seed}: {}", wrong.lines().next().unwrap_or_default());
    if let Err(wrong) = run(plan(seed, kind, Sabotage::None)) {
        panic!("seed {seed} fails without {sabotage:?} as well:\n{wrong}");
    }
}

const CALM: Kind = Kind::new("calm", Weather::CALM);

#[test]
fn a_cursor_that_skips_late_commits_is_caught() {
    is_caught(Sabotage::NoLap, CALM);
}

#[test]
fn a_settle_that_marks_a_replayed_row_is_caught() {
    let weather = Weather { replays: 250, lost_reply: 0.2, ..Weather::CALM };
    is_caught(Sabotage::SettleIgnoresReplay, Kind::new("many replays", weather));
}

#[test]
fn marking_before_sending_is_caught() {
    is_caught(Sabotage::MarkBeforeSend, CALM);
}

#[test]
fn a_settle_without_a_fence_is_caught() {
    let weather = Weather { clock_jumps: 3, publish_hangs: 0.004, ..Weather::CALM };
    is_caught(Sabotage::UnfencedSettle, Kind::new("clocks", weather));
}

#[test]
fn leases_of_waiting_rows_that_are_not_renewed_are_caught() {
    let weather = Weather { kills: 4, publish_hangs: 0.02, ..Weather::CALM };
    is_caught(Sabotage::RowLeaseNotRenewed, Kind::new("hanging", weather));
}

#[test]
fn held_rows_that_hide_free_ones_are_caught() {
    is_caught(Sabotage::HeldHidesFree, Kind::new("held", Weather { held: true, ..Weather::CALM }));
}

#[test]
fn a_takeover_that_reads_before_it_may_is_caught() {
    is_caught(Sabotage::TakeoverReadsEarly, CALM);
}

#[test]
fn a_claim_without_the_head_rule_is_caught() {
    is_caught(Sabotage::ClaimWithoutHeadRule, CALM.without_lanes());
}

#[test]
fn a_claim_that_trusts_the_head_rule_of_its_read_is_caught() {
    let weather = Weather { replays: 250, ..Weather::CALM };
    is_caught(Sabotage::HeadRuleOnlyRead, Kind::new("many replays", weather).without_lanes());
}

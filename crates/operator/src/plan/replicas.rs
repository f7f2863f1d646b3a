//! How many workers a Relay gets: fixed, set from outside through `/scale`, or by the backlog.
//!
//! Rules of the last: the larger of two wishes, one by the number of startable rows and one by their age; 10 % tolerance; never more
//! workers than lanes that have something to do; up by at most 4 or to the double within a minute; down only after five minutes in
//! which less was wished for. Without a fresh count the number stays as it is.

use std::{collections::VecDeque, time::Duration};

use jiff::Timestamp;
use queuebox_api::spec::relay::AutoscalingSpec;

use super::sample::{Work, age};

/// Within this share of the target nothing changes.
const TOLERANCE: f64 = 0.1;
/// Window in which growth is bounded.
const UP_WINDOW: Duration = Duration::from_secs(60);
/// How long less has to be wished for.
const DOWN_WINDOW: Duration = Duration::from_secs(300);
/// Most workers that are added within [`UP_WINDOW`], where the double is not more.
const UP_STEP: i32 = 4;

/// What the scaling of one Relay remembers. Lost with the process: the next one waits its five minutes anew.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Memory {
    began: Option<Timestamp>,
    wishes: VecDeque<(Timestamp, i32)>,
    sizes: VecDeque<(Timestamp, i32)>,
}

/// Who sets the number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Setter {
    /// `spec.replicas`, by a person or through `/scale`.
    Fixed,
    /// The backlog.
    BuiltIn,
    /// Paused: there are none.
    Paused,
}

/// Why there are not more, or not fewer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Limit {
    /// `maxReplicas`.
    Maximum,
    /// So many lanes have something to do.
    Lanes(u32),
    /// Growth is bounded.
    Pace,
    /// Less is wished for, but not for five minutes yet.
    Stabilizing,
}

/// The number and its reasons.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decision {
    /// Workers.
    pub replicas: i32,
    /// Who set it.
    pub setter: Setter,
    /// What keeps it where it is.
    pub limit: Option<Limit>,
    /// There is no fresh count.
    pub metrics_lost: bool,
}

/// `spec.replicas`.
pub fn fixed(replicas: Option<i64>) -> Decision {
    let replicas = replicas.and_then(|it| i32::try_from(it).ok()).unwrap_or(1).max(0);
    Decision { replicas, setter: Setter::Fixed, limit: None, metrics_lost: false }
}

/// None.
pub fn paused() -> Decision {
    Decision { replicas: 0, setter: Setter::Paused, limit: None, metrics_lost: false }
}

/// By the backlog. `current` is what the Deployment asks for now, 0 where there is none yet.
pub fn built_in(
    spec: &AutoscalingSpec,
    current: i32,
    work: Option<Work>,
    memory: &mut Memory,
    now: Timestamp,
) -> Decision {
    let min = spec.min_replicas.unwrap_or(1).max(1);
    let max = spec.max_replicas.max(min);
    let in_bounds = current.clamp(min, max);
    let decide = |replicas, limit, metrics_lost| Decision { replicas, setter: Setter::BuiltIn, limit, metrics_lost };
    memory.remember_size(in_bounds, now);
    let Some(work) = work else {
        return decide(in_bounds, None, true);
    };
    let mut wish = wished(spec, in_bounds, work);
    let mut limit = None;
    if wish > in_lanes(work.lanes) {
        wish = in_lanes(work.lanes);
        limit = Some(Limit::Lanes(work.lanes));
    }
    if wish > max {
        limit = Some(Limit::Maximum);
    }
    let wish = wish.clamp(min, max);
    memory.remember_wish(wish, now);
    if wish > in_bounds {
        let base = memory.smallest(now);
        let allowed = (base + UP_STEP).max(base * 2);
        if wish > allowed {
            return decide(allowed.max(in_bounds), Some(Limit::Pace), false);
        }
        return decide(wish, limit, false);
    }
    let settled = memory.largest_wish(now);
    if wish < in_bounds && settled.is_none_or(|settled| settled > wish) {
        let held = settled.map_or(in_bounds, |settled| settled.min(in_bounds));
        return decide(held, Some(Limit::Stabilizing), false);
    }
    decide(wish, limit, false)
}

fn in_lanes(lanes: u32) -> i32 {
    i32::try_from(lanes).unwrap_or(i32::MAX).max(1)
}

/// The larger wish, before any bound.
#[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, reason = "counts and ages far below 2^53")]
fn wished(spec: &AutoscalingSpec, current: i32, work: Work) -> i32 {
    let target = spec.target_pending.unwrap_or(5_000).max(1) as f64;
    let age_target = spec.target_oldest_age.map_or(Duration::from_secs(30), |it| it.0).as_secs_f64();
    let rows = work.rows.max(0) as f64;
    let oldest = work.oldest_age_seconds.max(0.0);
    let by_rows = tolerated(rows / target, current);
    let by_age = if rows == 0.0 { 0 } else { tolerated(f64::from(current) * oldest / age_target, current) };
    by_rows.max(by_age)
}

/// The next whole number, or `current` where that is near enough.
#[allow(clippy::cast_possible_truncation, reason = "bounded before")]
fn tolerated(workers: f64, current: i32) -> i32 {
    let ratio = workers / f64::from(current.max(1));
    if (1.0 - TOLERANCE..=1.0 + TOLERANCE).contains(&ratio) {
        return current;
    }
    workers.ceil().clamp(0.0, 1_000_000.0) as i32
}

impl Memory {
    fn remember_size(&mut self, size: i32, now: Timestamp) {
        self.began.get_or_insert(now);
        forget(&mut self.sizes, UP_WINDOW, now);
        self.sizes.push_back((now, size));
    }

    fn remember_wish(&mut self, wish: i32, now: Timestamp) {
        forget(&mut self.wishes, DOWN_WINDOW, now);
        self.wishes.push_back((now, wish));
    }

    /// Fewest workers within the last minute.
    fn smallest(&self, now: Timestamp) -> i32 {
        let recent = self.sizes.iter().filter(|(at, _)| age(*at, now) <= UP_WINDOW);
        recent.map(|(_, size)| *size).min().unwrap_or(1).max(1)
    }

    /// Highest wish of the last five minutes; `None` = they are not over yet since the beginning.
    fn largest_wish(&self, now: Timestamp) -> Option<i32> {
        let watched = self.began.is_some_and(|began| age(began, now) >= DOWN_WINDOW);
        watched.then(|| self.wishes.iter().map(|(_, wish)| *wish).max()).flatten()
    }
}

/// Drops what is older than the window.
fn forget(list: &mut VecDeque<(Timestamp, i32)>, window: Duration, now: Timestamp) {
    while list.front().is_some_and(|(at, _)| age(*at, now) > window) {
        list.pop_front();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(min: i32, max: i32) -> AutoscalingSpec {
        AutoscalingSpec {
            min_replicas: Some(min),
            max_replicas: max,
            target_pending: Some(100),
            target_oldest_age: None,
        }
    }

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(1_800_000_000 + second).unwrap()
    }

    fn rows(rows: i64, oldest_age_seconds: f64) -> Work {
        Work { rows, oldest_age_seconds, lanes: 64 }
    }

    #[test]
    fn grows_by_the_larger_wish_at_the_allowed_pace() {
        let mut memory = Memory::default();
        let decision = built_in(&spec(1, 20), 1, Some(rows(1_200, 1.0)), &mut memory, at(0));
        assert_eq!((decision.replicas, decision.limit), (5, Some(Limit::Pace)));
        let decision = built_in(&spec(1, 20), 5, Some(rows(1_200, 1.0)), &mut memory, at(15));
        assert_eq!(decision.replicas, 5, "the minute is not over");
        let decision = built_in(&spec(1, 20), 5, Some(rows(1_200, 1.0)), &mut memory, at(80));
        assert_eq!(decision.replicas, 10);
        let decision = built_in(&spec(1, 20), 10, Some(rows(1_200, 1.0)), &mut memory, at(160));
        assert_eq!((decision.replicas, decision.limit), (12, None));
    }

    #[test]
    fn age_counts_as_well_as_number() {
        let mut memory = Memory::default();
        let decision = built_in(&spec(1, 20), 2, Some(rows(10, 60.0)), &mut memory, at(0));
        assert_eq!(decision.replicas, 4);
        let decision = built_in(&spec(1, 20), 2, Some(rows(0, 600.0)), &mut Memory::default(), at(0));
        assert_eq!(decision.replicas, 2, "an age without rows is none");
    }

    #[test]
    fn a_tenth_is_tolerated() {
        let decision = built_in(&spec(1, 20), 10, Some(rows(1_090, 1.0)), &mut Memory::default(), at(0));
        assert_eq!(decision.replicas, 10);
        let decision = built_in(&spec(1, 20), 10, Some(rows(1_120, 1.0)), &mut Memory::default(), at(0));
        assert_eq!(decision.replicas, 12);
    }

    #[test]
    fn shrinks_only_after_five_minutes_of_lower_wishes() {
        let mut memory = Memory::default();
        let mut current = 8;
        for second in (0..300).step_by(15) {
            let decision = built_in(&spec(1, 20), current, Some(rows(0, 0.0)), &mut memory, at(second));
            assert_eq!((decision.replicas, decision.limit), (8, Some(Limit::Stabilizing)), "{second}");
            current = decision.replicas;
        }
        // A higher wish on the way counts for its own five minutes.
        assert_eq!(built_in(&spec(1, 20), 8, Some(rows(300, 0.0)), &mut memory, at(300)).replicas, 3);
        assert_eq!(built_in(&spec(1, 20), 3, Some(rows(0, 0.0)), &mut memory, at(590)).replicas, 3);
        assert_eq!(built_in(&spec(1, 20), 3, Some(rows(0, 0.0)), &mut memory, at(601)).replicas, 1);
    }

    #[test]
    fn never_more_workers_than_lanes_with_something_to_do() {
        let hot = Work { lanes: 2, ..rows(100_000, 600.0) };
        let decision = built_in(&spec(1, 20), 1, Some(hot), &mut Memory::default(), at(0));
        assert_eq!((decision.replicas, decision.limit), (2, Some(Limit::Lanes(2))));
    }

    #[test]
    fn a_lost_metric_holds() {
        let mut memory = Memory::default();
        for second in [0, 400, 4_000] {
            let decision = built_in(&spec(1, 20), 7, None, &mut memory, at(second));
            assert_eq!((decision.replicas, decision.metrics_lost), (7, true));
        }
        assert_eq!(
            built_in(&spec(2, 20), 0, None, &mut Memory::default(), at(0)).replicas,
            2,
            "a start begins with the least"
        );
    }

    #[test]
    fn bounds_hold_at_once() {
        let decision = built_in(&spec(1, 3), 5, None, &mut Memory::default(), at(0));
        assert_eq!(decision.replicas, 3, "maxReplicas was lowered");
        let decision = built_in(&spec(1, 3), 1, Some(rows(100_000, 0.0)), &mut Memory::default(), at(0));
        assert_eq!((decision.replicas, decision.limit), (3, Some(Limit::Maximum)));
    }
}

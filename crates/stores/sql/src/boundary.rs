//! Where the newest so many rows of a table begin, found by reading the table window by window in bounded memory, for tables that
//! have no index by age (contract 11, `maxCount`).
//!
//! Rows are ordered by `(time, tie)`; what a tie is, is the store's affair. Each lap over the table counts the rows of a range in
//! buckets of equal width; the bucket that holds the boundary is the range of the next lap, until the boundary falls between two
//! buckets. Ten million rows of a month take two or three laps.
//!
//! Invariants
//! - At most [`BUCKETS`] counts are kept, whatever the times are: buckets grow until that holds.
//! - A row that is not counted (it committed late, it was in a window that had been passed) makes the boundary older, never newer:
//!   fewer rows go, not more. Rows newer than `until` are not counted at all, so that none is counted twice.

use std::{collections::BTreeMap, ops::RangeInclusive};

/// The most counts that are kept.
pub const BUCKETS: usize = 4_096;

/// Buckets of the first lap over the times, in powers of two microseconds: about a second. Finer ones would be merged at once.
const FIRST_TIMES: u32 = 20;

/// Rows of interest in a lap, and how they are put into buckets: a value belongs to bucket `value >> shift`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// Rows by time, `from` and `to` included.
    Times {
        /// The oldest.
        from: i64,
        /// The newest.
        to: i64,
        /// Width of a bucket, as a power of two.
        shift: u32,
    },
    /// Rows of one time, by tie, `from` and `to` included.
    Ties {
        /// The time.
        time: i64,
        /// The lowest tie.
        from: i64,
        /// The highest.
        to: i64,
        /// Width of a bucket, as a power of two.
        shift: u32,
    },
}

/// What a lap has shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lap {
    /// There are not more rows than may stay.
    NothingToDo,
    /// The boundary is in the part that [`Boundary::part`] names now: count that.
    Again,
    /// Rows up to `(time, tie)`, both included, are too many.
    Cutoff(i64, i64),
}

/// The search for a boundary.
#[derive(Debug, Clone)]
pub struct Boundary {
    keep: u64,
    /// Rows that are newer than the range.
    newer: u64,
    /// The time whose ties are counted; none while times are.
    time: Option<i64>,
    range: RangeInclusive<i64>,
    shift: u32,
    counts: BTreeMap<i64, u64>,
    ties: RangeInclusive<i64>,
}

impl Boundary {
    /// A search for the newest `keep` rows of those that are not newer than `until`. Ties of one time lie within `ties`.
    pub fn new(keep: u64, until: i64, ties: RangeInclusive<i64>) -> Self {
        Self { keep, newer: 0, time: None, range: i64::MIN..=until, shift: FIRST_TIMES, counts: BTreeMap::new(), ties }
    }

    /// The rows to count in this lap. Buckets may grow from window to window.
    pub fn part(&self) -> Part {
        let (from, to, shift) = (*self.range.start(), *self.range.end(), self.shift);
        match self.time {
            None => Part::Times { from, to, shift },
            Some(time) => Part::Ties { time, from, to, shift },
        }
    }

    /// Counts `rows` rows of the bucket that `value` lies in. Values out of the part are left out.
    pub fn add(&mut self, value: i64, rows: u64) {
        // The start of a bucket may lie before the part that begins within it.
        let bucket = value >> self.shift;
        if bucket < self.range.start() >> self.shift || value > *self.range.end() {
            return;
        }
        *self.counts.entry(bucket).or_default() += rows;
        while self.counts.len() > BUCKETS {
            self.shift += 1;
            for (bucket, rows) in std::mem::take(&mut self.counts) {
                *self.counts.entry(bucket >> 1).or_default() += rows;
            }
        }
    }

    /// The table has been passed.
    pub fn lap(&mut self) -> Lap {
        let counts = std::mem::take(&mut self.counts);
        for (bucket, rows) in counts.into_iter().rev() {
            if self.newer + rows > self.keep {
                return self.within(bucket);
            }
            self.newer += rows;
        }
        Lap::NothingToDo
    }

    /// The boundary is in `bucket`, or at its newer end.
    fn within(&mut self, bucket: i64) -> Lap {
        let from = (bucket << self.shift).max(*self.range.start());
        let last = bucket << self.shift | !(-1_i64 << self.shift);
        let to = last.min(*self.range.end());
        if self.newer == self.keep {
            return self.cutoff(to);
        }
        if self.shift > 0 {
            self.narrow(from..=to);
            return Lap::Again;
        }
        if self.time.is_none() {
            self.time = Some(from);
            self.narrow(self.ties.clone());
            return Lap::Again;
        }
        // Rows that cannot be told apart: they stay together.
        match from.checked_sub(1) {
            Some(below) => self.cutoff(below),
            None => Lap::NothingToDo,
        }
    }

    fn cutoff(&self, up_to: i64) -> Lap {
        match self.time {
            None => Lap::Cutoff(up_to, i64::MAX),
            Some(time) => Lap::Cutoff(time, up_to),
        }
    }

    fn narrow(&mut self, range: RangeInclusive<i64>) {
        let width = range.end().abs_diff(*range.start());
        self.shift = (0..63).find(|shift| width >> shift < BUCKETS as u64).unwrap_or(63);
        self.range = range;
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Searches `rows`, window by window, as a store does.
    fn search(rows: &[(i64, i64)], keep: u64, until: i64) -> (Option<(i64, i64)>, u32) {
        let mut boundary = Boundary::new(keep, until, 0..=i64::MAX);
        for laps in 1..64 {
            for window in rows.chunks(7) {
                let part = boundary.part();
                for &(time, tie) in window {
                    match part {
                        Part::Times { from, to, shift } if (from..=to).contains(&time) => {
                            boundary.add(time >> shift << shift, 1);
                        }
                        Part::Ties { time: of, from, to, .. } if of == time && (from..=to).contains(&tie) => {
                            boundary.add(tie, 1);
                        }
                        _ => {}
                    }
                }
                assert!(boundary.counts.len() <= BUCKETS);
            }
            match boundary.lap() {
                Lap::NothingToDo => return (None, laps),
                Lap::Cutoff(time, tie) => return (Some((time, tie)), laps),
                Lap::Again => {}
            }
        }
        panic!("no end");
    }

    fn kept(rows: &[(i64, i64)], cutoff: Option<(i64, i64)>) -> Vec<(i64, i64)> {
        let mut kept: Vec<_> = rows.iter().copied().filter(|row| cutoff.is_none_or(|cutoff| *row > cutoff)).collect();
        kept.sort_unstable();
        kept
    }

    fn times() -> impl Strategy<Value = i64> {
        let edges = prop::sample::select(vec![i64::MIN, i64::MAX, -1, 0, 1 << 20, (1 << 20) - 1]);
        prop_oneof![any::<i64>(), 0_i64..20, 0_i64..5_000_000_000, edges]
    }

    proptest! {
        /// Whatever the times are, exactly the newest stay, also where many rows have one time.
        #[test]
        fn exactly_the_newest_stay(
            times in prop::collection::vec(times(), 0..300),
            keep in 0_u64..320,
        ) {
            let rows: Vec<_> = times.iter().enumerate().map(|(tie, time)| (*time, tie as i64)).collect();
            let (cutoff, _) = search(&rows, keep, i64::MAX);
            let mut sorted = rows.clone();
            sorted.sort_unstable();
            let newest = sorted.split_off(rows.len().saturating_sub(keep as usize));
            prop_assert_eq!(kept(&rows, cutoff), newest);
        }
    }

    #[test]
    fn memory_is_bounded_and_the_laps_are_few() {
        let rows: Vec<_> = (0..200_000_i64).map(|n| (n * 13_000_000, n)).collect();
        let (cutoff, laps) = search(&rows, 50_000, i64::MAX);
        assert_eq!(kept(&rows, cutoff).len(), 50_000);
        assert!(laps <= 4, "{laps}");
    }

    #[test]
    fn rows_of_one_time_are_told_apart_by_their_ties() {
        let rows: Vec<_> = (0..20_000_i64).map(|n| (77, n * 1_000_003)).collect();
        let (cutoff, _) = search(&rows, 123, i64::MAX);
        assert_eq!(kept(&rows, cutoff).len(), 123);
        let twins = [(77, 5); 10];
        assert_eq!(kept(&twins, search(&twins, 3, i64::MAX).0).len(), 10, "what cannot be told apart stays");
    }

    /// What finished after the search began is newer than everything that is counted, and not counted twice.
    #[test]
    fn later_rows_are_not_counted() {
        let rows: Vec<_> = (0..100).map(|n| (n, n)).collect();
        assert_eq!(search(&rows, 10, 49).0, Some((39, i64::MAX)));
    }
}

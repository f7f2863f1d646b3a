//! The safe floor: from which `sequence` on may rows have become visible since this worker last looked?
//!
//! Rows commit in another order than that of their numbers, so whatever stands behind the walk's place may gain rows at any time
//! (contract 4.7). Reading from the oldest pending row finds them all, but walks the dead index entries that a held snapshot keeps,
//! without end. The floor is a number below which nothing new can have appeared:
//!
//! 1. Each poll's transaction has an id of its own, and reads the counter of `sequence` *before* that id is drawn. A transaction
//!    with a higher id draws its numbers later, so they are higher than that counter: every id has a *bound*.
//! 2. After a poll we keep what is covered, the ids that ran in its snapshot with their bounds, and the bound of the snapshot's
//!    xmax (ids at or above it are missing from the list).
//! 3. The next read starts at the least of what is covered, the bound of xmax, and the bounds of those listed ids that have ended
//!    *in that statement's own snapshot*.
//! 4. A part that was cut off at its limit covers up to its last row only.
//! 5. The column's default gives the transaction its id before it draws the number, and the counter does not cache. Tables of
//!    another making have no floor: the check at start looks (`Features::floor`).
//!
//! Simpler drafts lost or reordered rows under test: one that took the oldest running id alone (an id that ends between two
//! statements is in neither list), and one that judged the end of a transaction by another snapshot than that of the read.
//! The engine's lap over everything that is pending is the safety net, for edits by hand above all.

use std::collections::VecDeque;

use queuebox_core::{LaneSet, Uuid};

/// Nothing is known: begin at the oldest row.
const START: i64 = i64::MIN;

/// For how many polls bounds are kept at most. Losing the older ones lowers a bound, nothing else.
const HISTORY_MAX: usize = 256;

/// Whose place it is: another worker, or one with more lanes, has not seen what this one has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reader {
    /// The worker's token.
    pub token: Uuid,
    /// The lanes it reads.
    pub lanes: LaneSet,
}

/// What a statement is told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Question {
    /// The least of what is covered and the bound of xmax.
    pub settled: i64,
    /// Ids that ran when last looked.
    pub ids: Vec<i64>,
    /// Their bounds.
    pub bounds: Vec<i64>,
}

/// What a statement tells.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seen {
    /// Id of its transaction.
    pub own: i64,
    /// The counter, read before that id was drawn; `None` = no number was ever drawn.
    pub counter: Option<i64>,
    /// First id that the snapshot knows nothing of.
    pub xmax: i64,
    /// Ids that ran in the snapshot.
    pub running: Vec<i64>,
}

/// How far the statement read behind the walk's place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Extent {
    /// All of it.
    Whole,
    /// Up to the row with this `sequence`, others of which may be missing.
    UpTo(i64),
}

#[derive(Debug)]
struct Known {
    reader: Reader,
    covered: i64,
    xmax: i64,
    xmax_bound: i64,
    running: Vec<(i64, i64)>,
}

/// The memory behind the rule.
#[derive(Debug, Default)]
pub struct Floor {
    /// Ids of polls with the counter as it stood before each, ascending.
    history: VecDeque<(i64, i64)>,
    known: Option<Known>,
}

impl Floor {
    /// What to ask for a reader.
    pub fn question(&self, reader: Reader) -> Question {
        match self.known.as_ref().filter(|known| known.serves(reader)) {
            None => Question { settled: START, ids: Vec::new(), bounds: Vec::new() },
            Some(known) => Question {
                settled: known.covered.min(known.xmax_bound),
                ids: known.running.iter().map(|(id, _)| *id).collect(),
                bounds: known.running.iter().map(|(_, bound)| *bound).collect(),
            },
        }
    }

    /// Forgets everything: the server may be another one now, whose ids and numbers have not come as far.
    pub fn forget(&mut self) {
        self.history.clear();
        self.known = None;
    }

    /// Takes in what a statement saw that read from the floor, or from the start.
    pub fn learn(&mut self, reader: Reader, seen: &Seen, extent: Extent) {
        if self.history.back().is_some_and(|(own, _)| *own >= seen.own) {
            // Ids only grow. A standby that was promoted behind our back, or two polls that overtook each other: begin anew.
            return self.forget();
        }
        let before = self.known.take();
        let carried = |id: i64| {
            before
                .as_ref()
                .and_then(|known| known.running.iter().find(|(known, _)| *known == id))
                .map_or(START, |(_, bound)| *bound)
        };
        let running = seen.running.iter().map(|id| (*id, self.bound(*id).max(carried(*id)))).collect();
        self.known = Some(Known {
            reader,
            covered: match extent {
                Extent::Whole => i64::MAX,
                // Children carry their parent's sequence, so other rows of it may stand behind the last one.
                Extent::UpTo(sequence) => sequence.saturating_sub(1),
            },
            xmax: seen.xmax,
            xmax_bound: self.bound(seen.xmax),
            running,
        });
        self.remember(seen);
    }

    /// Numbers of transactions with this id, or a higher one, are greater.
    fn bound(&self, id: i64) -> i64 {
        self.history.iter().rev().find(|(own, _)| *own < id).map_or(START, |(_, counter)| *counter)
    }

    /// Later lists hold no unlisted id below this xmax, so of the older polls only the last one below it is of use.
    fn remember(&mut self, seen: &Seen) {
        self.history.push_back((seen.own, seen.counter.unwrap_or(START)));
        let xmax = self.known.as_ref().map_or(START, |known| known.xmax);
        while self.history.get(1).is_some_and(|(own, _)| *own < xmax) || self.history.len() > HISTORY_MAX {
            self.history.pop_front();
        }
    }
}

impl Known {
    fn serves(&self, reader: Reader) -> bool {
        self.reader.token == reader.token && reader.lanes.minus(self.reader.lanes).is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const READER: Reader = Reader { token: Uuid::nil(), lanes: LaneSet::EMPTY };

    fn seen(own: i64, counter: i64, xmax: i64, running: &[i64]) -> Seen {
        Seen { own, counter: Some(counter), xmax, running: running.to_vec() }
    }

    /// The statement's side of rule 3.
    fn floor(question: &Question, ended: impl Fn(i64) -> bool) -> i64 {
        let ids = question.ids.iter().zip(&question.bounds).filter(|(id, _)| ended(**id)).map(|(_, bound)| *bound);
        ids.chain([question.settled]).min().unwrap()
    }

    #[test]
    fn nothing_is_known_at_first() {
        assert_eq!(Floor::default().question(READER).settled, START);
    }

    #[test]
    fn a_late_commit_lowers_the_floor_to_its_bound_and_no_further() {
        let mut at = Floor::default();
        at.learn(READER, &seen(100, 10, 100, &[]), Extent::Whole);
        at.learn(READER, &seen(110, 20, 110, &[]), Extent::Whole);
        // 115 draws numbers behind 20 and stays open while others commit.
        at.learn(READER, &seen(120, 30, 120, &[115]), Extent::Whole);
        at.learn(READER, &seen(130, 40, 130, &[115]), Extent::Whole);
        let question = at.question(READER);
        assert_eq!(floor(&question, |_| false), 30, "ids from 130 on draw behind what 120 saw");
        assert_eq!(floor(&question, |id| id == 115), 20);
    }

    #[test]
    fn an_id_that_began_after_the_snapshot_is_bound_by_xmax() {
        let mut at = Floor::default();
        at.learn(READER, &seen(100, 10, 100, &[]), Extent::Whole);
        // 104 began after the snapshot (xmax 103) and before this poll's own id.
        at.learn(READER, &seen(105, 20, 103, &[]), Extent::Whole);
        assert_eq!(at.question(READER).settled, 10, "104 may have drawn 11 to 20");
        at.learn(READER, &seen(110, 30, 110, &[104]), Extent::Whole);
        assert_eq!(floor(&at.question(READER), |id| id == 104), 10);
    }

    #[test]
    fn a_cut_part_covers_up_to_its_last_row() {
        let mut at = Floor::default();
        at.learn(READER, &seen(100, 1_000, 100, &[]), Extent::Whole);
        at.learn(READER, &seen(110, 2_000, 110, &[]), Extent::UpTo(70));
        assert_eq!(at.question(READER).settled, 69);
    }

    #[test]
    fn another_worker_or_more_lanes_begin_at_the_start() {
        let mut at = Floor::default();
        let lanes = LaneSet::first(8);
        let reader = Reader { token: Uuid::from_u128(1), lanes };
        at.learn(reader, &seen(100, 10, 100, &[]), Extent::Whole);
        at.learn(reader, &seen(110, 20, 110, &[]), Extent::Whole);
        assert_eq!(at.question(reader).settled, 10);
        assert_eq!(at.question(Reader { lanes: LaneSet::first(4), ..reader }).settled, 10);
        assert_eq!(at.question(Reader { lanes: LaneSet::first(9), ..reader }).settled, START);
        assert_eq!(at.question(Reader { token: Uuid::from_u128(2), lanes }).settled, START);
    }

    #[test]
    fn ids_that_go_back_are_another_server() {
        let mut at = Floor::default();
        at.learn(READER, &seen(100, 10, 100, &[]), Extent::Whole);
        at.learn(READER, &seen(110, 20, 110, &[]), Extent::Whole);
        at.learn(READER, &seen(90, 8, 90, &[]), Extent::Whole);
        assert_eq!(at.question(READER).settled, START);
    }

    #[test]
    fn the_memory_is_bounded() {
        let mut at = Floor::default();
        for n in 1..10_000 {
            at.learn(READER, &seen(n * 10, n, n * 10, &[5]), Extent::Whole);
        }
        assert!(at.history.len() <= 2, "{}", at.history.len());
        assert_eq!(at.question(READER).settled, 9_998);
    }
}

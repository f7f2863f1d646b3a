//! One partition that is ours: what is with the intake, how far the unbroken run goes, and the pauses of a partition in
//! trouble. No I/O; times are passed in.
//!
//! ```text
//!            poll            answers: all taken
//!   Idle ──────────► Busy ──────────────────────► Idle (full batches)
//!    ▲                 │ answers: one failed
//!    │ pause is over   ▼
//!    └────────────  Paused (1 s doubling to 60 s, then one record at a time until the failed one is taken)
//! ```

use std::time::{Duration, Instant};

/// First pause after a failed store (contract 6.7).
const PAUSE_MIN: Duration = Duration::from_secs(1);

/// Longest pause (contract 6.7).
const PAUSE_MAX: Duration = Duration::from_secs(60);

/// Progress of one partition during one assignment.
#[derive(Debug, Default)]
pub(super) struct Progress {
    /// Offsets of the batch with the intake, in order.
    busy: Vec<i64>,
    /// The record that failed, and how often in a row.
    trouble: Option<(i64, u32)>,
    /// Nothing is polled until then.
    paused_until: Option<Instant>,
}

/// What the answers for a batch mean.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Verdict {
    /// Offset to commit: everything before it is done.
    pub done_before: Option<i64>,
    /// Seek back to this record and pause for so long.
    pub back_to: Option<(i64, Duration)>,
}

impl Progress {
    /// Records may be polled.
    pub(super) fn is_idle(&self) -> bool {
        self.busy.is_empty() && self.paused_until.is_none()
    }

    /// Records with the intake.
    pub(super) fn in_flight(&self) -> usize {
        self.busy.len()
    }

    /// At most so many records in the next batch, out of `free`. A partition in trouble gets one, so that its retries take
    /// nothing from the others.
    pub(super) fn share(&self, free: usize) -> usize {
        if self.trouble.is_some() { free.min(1) } else { free }
    }

    /// A batch went to the intake.
    pub(super) fn start(&mut self, offsets: Vec<i64>) {
        debug_assert!(self.busy.is_empty() && offsets.is_sorted());
        self.busy = offsets;
    }

    /// The intake answered: `taken[i]` tells whether record i of the batch is stored, a duplicate, or filtered.
    pub(super) fn finish(&mut self, taken: &[bool], now: Instant) -> Verdict {
        let offsets = std::mem::take(&mut self.busy);
        let run = taken.iter().zip(&offsets).take_while(|(taken, _)| **taken).count();
        let done_before = run.checked_sub(1).and_then(|last| offsets.get(last)).map(|offset| offset + 1);
        let Some(failed) = offsets.get(run).copied() else {
            self.trouble = None;
            return Verdict { done_before, back_to: None };
        };
        let failures = match self.trouble {
            Some((offset, failures)) if offset == failed => failures.saturating_add(1),
            _ => 1,
        };
        self.trouble = Some((failed, failures));
        let pause = PAUSE_MAX.min(PAUSE_MIN.saturating_mul(1 << (failures - 1).min(10)));
        self.paused_until = Some(now + pause);
        Verdict { done_before, back_to: Some((failed, pause)) }
    }

    /// Where to go on, once a pause is over; asked once per pause.
    pub(super) fn resume(&mut self, now: Instant) -> Option<i64> {
        if self.paused_until? > now {
            return None;
        }
        self.paused_until = None;
        self.trouble.map(|(failed, _)| failed)
    }

    /// The way back did not work: a little later again.
    pub(super) fn pause_again(&mut self, now: Instant) {
        self.paused_until = Some(now + PAUSE_MIN);
    }

    /// When the pause ends.
    pub(super) fn paused_until(&self) -> Option<Instant> {
        self.paused_until
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_unbroken_run_is_done() {
        let now = Instant::now();
        let mut progress = Progress::default();
        progress.start(vec![3, 4, 7, 9]);
        assert!(!progress.is_idle());
        let verdict = progress.finish(&[true, true, false, true], now);
        assert_eq!(verdict, Verdict { done_before: Some(5), back_to: Some((7, PAUSE_MIN)) });
        assert!(!progress.is_idle(), "paused");
        assert_eq!(progress.resume(now), None);
        assert_eq!(progress.resume(now + PAUSE_MIN), Some(7));
        assert_eq!(progress.share(100), 1);
        progress.start(vec![7]);
        assert_eq!(progress.finish(&[true], now), Verdict { done_before: Some(8), back_to: None });
        assert_eq!(progress.share(100), 100);
    }

    #[test]
    fn pauses_double_up_to_a_minute_and_start_over_after_progress() {
        let now = Instant::now();
        let mut progress = Progress::default();
        let mut pause_of = |offset: i64| {
            progress.start(vec![offset]);
            let (_, pause) = progress.finish(&[false], now).back_to.unwrap();
            progress.resume(now + pause);
            pause.as_secs()
        };
        let pauses: Vec<u64> = (0..9).map(|_| pause_of(4)).collect();
        assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 60, 60, 60]);
        assert_eq!(pause_of(5), 1);
    }

    #[test]
    fn an_answer_that_is_missing_is_a_failure() {
        let mut progress = Progress::default();
        progress.start(vec![1, 2]);
        let verdict = progress.finish(&[true], Instant::now());
        assert_eq!((verdict.done_before, verdict.back_to.map(|(offset, _)| offset)), (Some(2), Some(2)));
    }
}

//! Who should own which lane: a pure rule that every worker computes alike from the same survey (contract 5.2).
//!
//! Fair share: about lanes / live workers each; one more for those who own most already, so that a newcomer moves no lane without
//! need (a SQLite file has one lane: its owner keeps it). A worker takes free lanes and lanes of dead owners up to its share, and gives
//! what is above it to the workers below theirs. Since the rule is the same for all and deterministic, no lane is given twice.

use queuebox_core::{
    Lane, LaneSet,
    ports::lanes::{Survey, Take},
};

/// What a worker should do about the lanes of one scope.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Plan {
    /// Why the worker owns nothing: another Relay, or another lane hash, is at work on this table, or every lane has its owner.
    pub stand_by: Option<String>,
    /// Lanes to take.
    pub take: Vec<Take>,
    /// Lanes to give, with their new owner.
    pub give: Vec<(Lane, String)>,
}

/// The worker for which a plan is made.
#[derive(Debug, Clone, Copy)]
pub struct Me<'a> {
    /// Its name.
    pub worker: &'a str,
    /// UID of its Relay.
    pub relay_uid: &'a str,
    /// Name of its hash.
    pub lane_hash: &'a str,
    /// 64, or 1.
    pub lane_count: u8,
}

/// The plan of `me`. `keep`: lanes of mine that must not be given away (careful ones).
pub fn plan(survey: &Survey, me: Me<'_>, keep: LaneSet) -> Plan {
    if let Some(reason) = stranger(survey, me) {
        return Plan { stand_by: Some(reason), ..Plan::default() };
    }
    let mut live: Vec<&str> = survey
        .workers
        .iter()
        .filter(|worker| worker.live && worker.relay_uid == me.relay_uid && worker.lane_hash == me.lane_hash)
        .map(|worker| worker.worker.as_str())
        .collect();
    live.sort_unstable();
    live.dedup();
    let Some(my_index) = live.iter().position(|worker| *worker == me.worker) else {
        return Plan::default();
    };
    let owned = owned_by(survey, &live);
    let shares = shares(usize::from(me.lane_count), &owned);
    let share = |index: usize| shares[index];
    let stand_by = (shares[my_index] == 0 && owned[my_index].is_empty()).then(|| {
        format!(
            "{} live workers share {} lane(s) of this table, which others own; this one takes over when one of them ends",
            live.len(),
            me.lane_count
        )
    });
    let missing = |index: usize| share(index).saturating_sub(owned[index].len());
    // Each worker leaves those to the workers before it that they are missing, so that joiners do not reach for the same lanes.
    let before: usize = (0..my_index).map(missing).sum();
    let mut free = free_lanes(survey, me.lane_count, &live);
    let before = if before >= free.len() { 0 } else { before };
    free.rotate_left(before);
    free.truncate(missing(my_index));
    let take = free;
    let give =
        moves(&owned, &share, my_index, keep).into_iter().map(|(lane, to)| (lane, live[to].to_owned())).collect();
    Plan { stand_by, take, give }
}

/// Lanes that each worker should own. Those that are left over after division go to whoever owns most, then by name.
fn shares(lanes: usize, owned: &[Vec<Lane>]) -> Vec<usize> {
    let mut ranked: Vec<usize> = (0..owned.len()).collect();
    ranked.sort_by_key(|index| std::cmp::Reverse(owned[*index].len()));
    let mut shares = vec![lanes / owned.len(); owned.len()];
    for index in ranked.into_iter().take(lanes % owned.len()) {
        shares[index] += 1;
    }
    shares
}

/// A live owner of a lane that is not of our kind.
fn stranger(survey: &Survey, me: Me<'_>) -> Option<String> {
    let owners = survey.lanes.iter().filter_map(|lane| lane.worker.as_deref());
    for owner in owners {
        let Some(worker) = survey.workers.iter().find(|worker| worker.worker == owner && worker.live) else { continue };
        if worker.relay_uid != me.relay_uid {
            return Some(format!(
                "worker {:?} of another Relay ({}) owns lanes of this table; one Relay at a time works a table",
                worker.worker, worker.relay_uid
            ));
        }
        if worker.lane_hash != me.lane_hash {
            return Some(format!(
                "worker {:?} computes lanes with {}, this one with {}; it must end first",
                worker.worker, worker.lane_hash, me.lane_hash
            ));
        }
    }
    None
}

fn owned_by(survey: &Survey, live: &[&str]) -> Vec<Vec<Lane>> {
    let mut owned = vec![Vec::new(); live.len()];
    for lane in &survey.lanes {
        if let Some(owner) = lane.worker.as_deref()
            && let Ok(index) = live.binary_search(&owner)
        {
            owned[index].push(lane.lane);
        }
    }
    for lanes in &mut owned {
        lanes.sort_unstable();
    }
    owned
}

/// Lanes without a live owner, those of dead owners first: their rows wait longest.
fn free_lanes(survey: &Survey, lane_count: u8, live: &[&str]) -> Vec<Take> {
    let mut dead = Vec::new();
    let mut free = Vec::new();
    for lane in 0..lane_count {
        match survey.lanes.iter().find(|row| row.lane == lane) {
            None => free.push(Take { lane, owner: None, term: 0 }),
            Some(row) => match row.worker.as_deref() {
                None => free.push(Take { lane, owner: None, term: row.term }),
                Some(owner) if live.contains(&owner) => {}
                Some(owner) => dead.push(Take { lane, owner: Some(owner.to_owned()), term: row.term }),
            },
        }
    }
    dead.append(&mut free);
    dead
}

/// Moves from workers above their share to those below, of which mine are returned.
fn moves(owned: &[Vec<Lane>], share: &impl Fn(usize) -> usize, mine: usize, keep: LaneSet) -> Vec<(Lane, usize)> {
    let mut wanting: Vec<(usize, usize)> = (0..owned.len())
        .filter_map(|index| {
            share(index).checked_sub(owned[index].len()).filter(|wanted| *wanted > 0).map(|wanted| (index, wanted))
        })
        .collect();
    let mut result = Vec::new();
    for (index, lanes) in owned.iter().enumerate() {
        let mut surplus = lanes.len().saturating_sub(share(index));
        let givable: Vec<Lane> =
            lanes.iter().rev().copied().filter(|lane| index != mine || !keep.contains(*lane)).collect();
        for lane in givable {
            let Some(next) = wanting.first_mut().filter(|_| surplus > 0) else { break };
            if index == mine {
                result.push((lane, next.0));
            }
            surplus -= 1;
            next.1 -= 1;
            if next.1 == 0 {
                wanting.remove(0);
            }
        }
    }
    result
}

#[cfg(test)]
mod tests {
    use queuebox_core::ports::lanes::{LaneRow, WorkerRow};

    use super::*;

    fn worker(name: &str, relay: &str, hash: &str, live: bool) -> WorkerRow {
        WorkerRow {
            worker: name.to_owned(),
            relay_uid: relay.to_owned(),
            config: "1/a".to_owned(),
            lane_hash: hash.to_owned(),
            live,
        }
    }

    fn me(name: &str) -> Me<'_> {
        Me { worker: name, relay_uid: "r", lane_hash: "h/64", lane_count: 64 }
    }

    fn owned(lanes: std::ops::Range<u8>, by: &str) -> Vec<LaneRow> {
        lanes.map(|lane| LaneRow { lane, worker: Some(by.to_owned()), term: 1 }).collect()
    }

    #[test]
    fn the_first_worker_takes_everything() {
        let survey = Survey { workers: vec![worker("a", "r", "h/64", true)], lanes: vec![] };
        let plan = plan(&survey, me("a"), LaneSet::EMPTY);
        assert_eq!((plan.take.len(), plan.give.len(), plan.stand_by), (64, 0, None));
    }

    #[test]
    fn a_joining_worker_is_given_its_share_once() {
        let workers = ["a", "b", "c"].map(|name| worker(name, "r", "h/64", true)).to_vec();
        let lanes = [owned(0..32, "a"), owned(32..64, "b")].concat();
        let survey = Survey { workers, lanes };
        let from_a = plan(&survey, me("a"), LaneSet::EMPTY).give;
        let from_b = plan(&survey, me("b"), LaneSet::EMPTY).give;
        assert_eq!(from_a.len() + from_b.len(), 21);
        assert!(from_a.iter().chain(&from_b).all(|(_, to)| to == "c"));
        assert!(plan(&survey, me("c"), LaneSet::EMPTY).take.is_empty(), "live owners are never robbed");
    }

    #[test]
    fn lanes_of_the_dead_are_shared_by_the_living() {
        let workers =
            vec![worker("a", "r", "h/64", true), worker("b", "r", "h/64", true), worker("x", "r", "h/64", false)];
        let lanes = [owned(0..22, "a"), owned(22..43, "b"), owned(43..64, "x")].concat();
        let survey = Survey { workers, lanes };
        let a = plan(&survey, me("a"), LaneSet::EMPTY).take;
        let b = plan(&survey, me("b"), LaneSet::EMPTY).take;
        assert_eq!((a.len(), b.len()), (10, 11));
        assert!(a.iter().all(|take| take.owner.as_deref() == Some("x")));
    }

    #[test]
    fn careful_lanes_stay() {
        let workers = ["a", "b"].map(|name| worker(name, "r", "h/64", true)).to_vec();
        let survey = Survey { workers, lanes: owned(0..64, "a") };
        let keep = LaneSet::first(40);
        let give = plan(&survey, me("a"), keep).give;
        assert_eq!(give.len(), 24);
        assert!(give.iter().all(|(lane, _)| !keep.contains(*lane)));
    }

    #[test]
    fn one_lane_stays_with_its_owner() {
        let one = |name| Me { lane_count: 1, ..me(name) };
        let workers = ["a", "b"].map(|name| worker(name, "r", "h/64", true)).to_vec();
        let survey = Survey { workers: workers.clone(), lanes: owned(0..1, "b") };
        let of_owner = plan(&survey, one("b"), LaneSet::EMPTY);
        assert_eq!(of_owner, Plan::default(), "it is given to nobody");
        let of_other = plan(&survey, one("a"), LaneSet::EMPTY);
        assert!(of_other.take.is_empty() && of_other.stand_by.is_some());
        let survey = Survey { workers: vec![workers[0].clone()], lanes: owned(0..1, "b") };
        let of_other = plan(&survey, one("a"), LaneSet::EMPTY);
        assert_eq!((of_other.take.len(), of_other.stand_by), (1, None));
    }

    #[test]
    fn strangers_make_us_stand_by() {
        let survey = Survey {
            workers: vec![worker("a", "r", "h/64", true), worker("x", "other", "h/64", true)],
            lanes: owned(0..1, "x"),
        };
        assert!(plan(&survey, me("a"), LaneSet::EMPTY).stand_by.is_some_and(|reason| reason.contains("another Relay")));
        let survey = Survey {
            workers: vec![worker("a", "r", "h/64", true), worker("x", "r", "old/64", true)],
            lanes: owned(0..1, "x"),
        };
        assert!(plan(&survey, me("a"), LaneSet::EMPTY).stand_by.is_some_and(|reason| reason.contains("old/64")));
        let survey = Survey {
            workers: vec![worker("a", "r", "h/64", true), worker("x", "other", "h/64", false)],
            lanes: owned(0..64, "x"),
        };
        assert_eq!(plan(&survey, me("a"), LaneSet::EMPTY).take.len(), 64, "a dead stranger is no hindrance");
    }
}

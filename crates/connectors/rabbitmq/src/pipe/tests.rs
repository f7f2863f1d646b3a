//! The rule of the module head against every order in which a broker may return and confirm, with the client library's way
//! of handing out returns played by hand.

use std::collections::{HashSet, VecDeque};

use lapin::{message::Delivery, protocol::basic::AMQPProperties};
use rand::{RngExt, SeedableRng, rngs::StdRng, seq::SliceRandom};

use super::*;

fn returned(id: Uuid) -> BasicReturnMessage {
    let mut delivery = Delivery::mock(0, "e".into(), "k".into(), false, Vec::new());
    delivery.properties = AMQPProperties::default().with_message_id(id.to_string().into());
    BasicReturnMessage { delivery, reply_code: 312, reply_text: "NO_ROUTE".into() }
}

struct World {
    rng: StdRng,
    judge: Judge,
    unroutable: HashSet<Uuid>,
    /// Published, not confirmed yet.
    open: Vec<Ticket>,
    /// Unroutable, not returned yet.
    to_return: VecDeque<Uuid>,
    /// The client library's queue of returns.
    waiting: VecDeque<Uuid>,
    settled: Vec<(Ticket, Confirmation)>,
    answers: Vec<(Uuid, oneshot::Receiver<Verdict>)>,
}

impl World {
    fn publish(&mut self) {
        let id = Uuid::from_u128(self.rng.random());
        let (verdict, answer) = oneshot::channel();
        if self.rng.random_bool(0.4) {
            self.unroutable.insert(id);
            self.to_return.push_back(id);
        }
        self.open.push(Ticket { id, bytes: 1, verdict });
        self.answers.push((id, answer));
    }

    /// One frame of the broker: confirms some messages, each after its own return.
    fn confirm(&mut self) {
        let returned_by_now = |world: &Self, ticket: &Ticket| !world.to_return.contains(&ticket.id);
        let mut ready: Vec<usize> = (0..self.open.len()).filter(|&at| returned_by_now(self, &self.open[at])).collect();
        ready.shuffle(&mut self.rng);
        let many = if self.rng.random_bool(0.5) { 1 } else { self.rng.random_range(0..=ready.len()) };
        ready.truncate(many);
        ready.sort_unstable();
        let mut frame: Vec<Ticket> = ready.into_iter().rev().map(|at| self.open.remove(at)).collect();
        frame.shuffle(&mut self.rng);
        for ticket in frame {
            let carried = self.waiting.pop_front().map(returned);
            self.settled.push((ticket, Confirmation::Ack(carried)));
        }
    }

    fn look(&mut self) {
        let mut settled = std::mem::take(&mut self.settled);
        settled.shuffle(&mut self.rng);
        self.judge.decide(settled, self.open.is_empty());
        for (id, answer) in &mut self.answers {
            if let Ok(verdict) = answer.try_recv() {
                let truth = self.unroutable.contains(id);
                assert_eq!(matches!(verdict, Verdict::Returned { .. }), truth, "{id}: {verdict:?}");
                assert!(truth || verdict == Verdict::Confirmed, "{id}: {verdict:?}");
            }
        }
    }
}

#[test]
fn d06_returns_are_matched_to_their_own_message_under_multiple_confirms() {
    for seed in 0..2_000 {
        let mut world = World {
            rng: StdRng::seed_from_u64(seed),
            judge: Judge::default(),
            unroutable: HashSet::new(),
            open: Vec::new(),
            to_return: VecDeque::new(),
            waiting: VecDeque::new(),
            settled: Vec::new(),
            answers: Vec::new(),
        };
        for _ in 0..60 {
            match world.rng.random_range(0..5) {
                0 | 1 => world.publish(),
                2 => {
                    if let Some(id) = world.to_return.pop_front() {
                        world.waiting.push_back(id);
                    }
                }
                3 => world.confirm(),
                _ => world.look(),
            }
        }
        while !world.open.is_empty() {
            while let Some(id) = world.to_return.pop_front() {
                world.waiting.push_back(id);
            }
            world.confirm();
        }
        world.look();
        assert!(world.judge.undecided.is_empty(), "seed {seed}: an answer is missing");
        assert!(
            world.answers.iter_mut().all(|(_, answer)| answer.try_recv() == Err(oneshot::error::TryRecvError::Closed))
        );
    }
}

#[test]
fn a_channel_that_ends_loses_the_undecided_and_names_the_one_that_was_too_large() {
    for too_large in [None, Some((200, 100))] {
        let mut judge = Judge { too_large, ..Judge::default() };
        let (large, mut large_answer) = oneshot::channel();
        let (other, mut other_answer) = oneshot::channel();
        let (carrier, mut carrier_answer) = oneshot::channel();
        judge.lost.push(Ticket { id: Uuid::from_u128(1), bytes: 200, verdict: large });
        judge.lost.push(Ticket { id: Uuid::from_u128(2), bytes: 7, verdict: other });
        let foreign = Confirmation::Ack(Some(returned(Uuid::from_u128(9))));
        judge.decide(vec![(Ticket { id: Uuid::from_u128(3), bytes: 7, verdict: carrier }, foreign)], false);
        judge.lose("gone");
        let gone = "gone".to_owned();
        let (of_large, of_others) = match too_large {
            Some((bytes, limit)) => (Verdict::TooLarge { bytes, limit }, Verdict::Collateral(gone)),
            None => (Verdict::Lost(gone.clone()), Verdict::Lost(gone)),
        };
        assert_eq!(large_answer.try_recv(), Ok(of_large));
        assert_eq!(other_answer.try_recv(), Ok(of_others.clone()));
        assert_eq!(carrier_answer.try_recv(), Ok(of_others));
    }
}

#[test]
fn the_broker_names_its_limit() {
    let text = "PRECONDITION_FAILED - message size 134217729 is larger than configured max size 134217728";
    assert_eq!(size_limit(text), Some((134_217_729, 134_217_728)));
    assert_eq!(size_limit("PRECONDITION_FAILED - unknown delivery tag 1"), None);
}

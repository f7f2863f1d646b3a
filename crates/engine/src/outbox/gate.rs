//! Whether a destination may be sent to now: pause, connection, breaker, rate (contract 7.5, 7.6).
//!
//! ```text
//!            NotConnected                    probe ok
//!   Open ───────────────────► Disconnected ───────────► Open
//!    │  n failures in a row               openFor over             success
//!    └───────────────────────► Broken ──────────────────► Probing ─────────► Open
//!                                ▲                           │ failure
//!                                └───────────────────────────┘
//! ```

use std::time::Duration;

use tokio::time::Instant;

use crate::config::{BreakerConfig, Rate};

/// First pause before a broker is asked again; doubles up to [`RECONNECT_MAX`].
const RECONNECT_FIRST: Duration = Duration::from_secs(1);
/// Longest pause before a broker is asked again.
const RECONNECT_MAX: Duration = Duration::from_secs(30);

/// State of the way to a destination.
#[derive(Debug, Clone, PartialEq)]
pub enum State {
    /// Rows flow.
    Open,
    /// By the manifest.
    Paused,
    /// The broker is not there; asked again at `retry_at`, with growing pauses.
    Disconnected {
        /// When to probe next.
        retry_at: Instant,
        /// The pause after that.
        pause: Duration,
        /// For people.
        reason: String,
        /// A probe is under way.
        probing: bool,
    },
    /// Too many failures in a row.
    Broken {
        /// When a row may probe.
        until: Instant,
    },
    /// One row probes.
    Probing {
        /// It is under way.
        in_flight: bool,
    },
}

/// The gate of one destination.
#[derive(Debug)]
pub struct Gate {
    state: State,
    breaker: Option<BreakerConfig>,
    failures: u32,
    /// Publishes that failed since the last success, whatever the breaker makes of them, and since when.
    streak: Option<(u32, Instant)>,
    bucket: Option<Bucket>,
}

impl Gate {
    /// A gate that is open, or paused by the manifest.
    pub fn new(paused: bool, breaker: Option<BreakerConfig>, rate: Option<Rate>, now: Instant) -> Self {
        let state = if paused { State::Paused } else { State::Open };
        Self { state, breaker, failures: 0, streak: None, bucket: rate.map(|rate| Bucket::new(rate, now)) }
    }

    /// This worker's part of the Relay's rate: the share of the lanes that it owns.
    pub fn share_rate(&mut self, lanes: u32, of: u32, now: Instant) {
        if let Some(bucket) = &mut self.bucket {
            bucket.share(f64::from(lanes.max(1)) / f64::from(of.max(1)), now);
        }
    }

    /// Current state.
    pub fn state(&self) -> &State {
        &self.state
    }

    /// May rows be read for this destination? Moves a broken gate on to probing when its time has come.
    pub fn is_open(&mut self, now: Instant) -> bool {
        if let State::Broken { until } = self.state
            && now >= until
        {
            self.state = State::Probing { in_flight: false };
        }
        match self.state {
            State::Open => true,
            State::Probing { in_flight } => !in_flight,
            _ => false,
        }
    }

    /// How many publishes may start, of at most `wanted`. The rate is not spent yet.
    pub fn allowance(&mut self, wanted: u32, now: Instant) -> u32 {
        let by_state = match self.state {
            State::Open => wanted,
            State::Probing { in_flight: false } => wanted.min(1),
            _ => 0,
        };
        match &mut self.bucket {
            Some(bucket) => by_state.min(bucket.available(now)),
            None => by_state,
        }
    }

    /// A publish starts.
    pub fn started(&mut self, now: Instant) {
        if let Some(bucket) = &mut self.bucket {
            bucket.take(now);
        }
        if let State::Probing { in_flight } = &mut self.state {
            *in_flight = true;
        }
    }

    /// Is a row that starts now the probe of a broken gate? Its failure costs no attempt.
    pub fn is_probing(&self) -> bool {
        matches!(self.state, State::Probing { .. })
    }

    /// A publish that ended well. True when the gate opened by it.
    pub fn succeeded(&mut self) -> bool {
        self.failures = 0;
        self.streak = None;
        let opened = matches!(self.state, State::Probing { .. } | State::Disconnected { .. });
        if opened || matches!(self.state, State::Broken { .. }) {
            self.state = State::Open;
            return true;
        }
        false
    }

    /// A publish that failed. `is_probe`: it was started as the probe; what was under way when the gate closed decides nothing about it.
    /// True when the gate closed by it.
    pub fn failed(&mut self, trips: bool, is_probe: bool, now: Instant) -> bool {
        let (failures, since) = self.streak.unwrap_or((0, now));
        self.streak = Some((failures.saturating_add(1), since));
        let Some(breaker) = self.breaker else {
            return false;
        };
        if !trips {
            // Any other outcome ends the run: the receiver is alive.
            self.failures = 0;
            if is_probe && self.is_probing() {
                self.state = State::Open;
            }
            return false;
        }
        self.failures = self.failures.saturating_add(1);
        let closes = match self.state {
            State::Open => self.failures >= breaker.failures,
            State::Probing { .. } => is_probe,
            _ => false,
        };
        if closes {
            self.state = State::Broken { until: now + breaker.open_for };
        }
        closes
    }

    /// The probing row ended without an outcome of the destination's (its lane went away, its transform failed): another one may probe.
    pub fn probe_vanished(&mut self) {
        if let State::Probing { in_flight } = &mut self.state {
            *in_flight = false;
        }
    }

    /// The broker is not there. True when that is news.
    pub fn disconnected(&mut self, reason: &str, now: Instant) -> bool {
        match &mut self.state {
            State::Paused => false,
            State::Disconnected { reason: known, .. } => {
                reason.clone_into(known);
                false
            }
            _ => {
                self.state = State::Disconnected {
                    retry_at: now + RECONNECT_FIRST,
                    pause: RECONNECT_FIRST,
                    reason: reason.to_owned(),
                    probing: false,
                };
                true
            }
        }
    }

    /// Should the connector be probed now? Then the probe counts as under way. `jitter` is in [0, 1).
    pub fn wants_probe(&mut self, now: Instant, jitter: f64) -> bool {
        let State::Disconnected { retry_at, pause, probing, .. } = &mut self.state else {
            return false;
        };
        if *probing || now < *retry_at {
            return false;
        }
        *probing = true;
        *pause = (*pause * 2).min(RECONNECT_MAX);
        *retry_at = now + pause.mul_f64(0.75 + jitter / 4.0);
        true
    }

    /// The probe's answer. True when the gate opened.
    pub fn probed(&mut self, outcome: Result<(), String>, now: Instant) -> bool {
        let State::Disconnected { retry_at, pause, reason, probing } = &mut self.state else {
            return false;
        };
        *probing = false;
        match outcome {
            Ok(()) => {
                self.state = State::Open;
                self.failures = 0;
                true
            }
            Err(why) => {
                *reason = why;
                *retry_at = (*retry_at).max(now + *pause / 2);
                false
            }
        }
    }

    /// When this gate wants to be looked at again.
    pub fn next_timer(&self, now: Instant) -> Option<Instant> {
        match &self.state {
            State::Broken { until } => Some(*until),
            State::Disconnected { retry_at, probing: false, .. } => Some(*retry_at),
            State::Open | State::Probing { .. } => self.bucket.as_ref().and_then(|bucket| bucket.next(now)),
            _ => None,
        }
    }

    /// 0 closed, 1 half open, 2 open: the breaker's gauge.
    pub fn breaker_gauge(&self) -> i64 {
        match self.state {
            State::Broken { .. } => 2,
            State::Probing { .. } => 1,
            _ => 0,
        }
    }

    /// Publishes that failed since the last success, and since when; `None` = the last one succeeded, or there was none.
    pub fn streak(&self) -> Option<(u32, Instant)> {
        self.streak
    }

    /// Why rows are held, for people.
    pub fn held_because(&self) -> Option<String> {
        match &self.state {
            State::Open => None,
            State::Paused => Some("paused by its manifest".to_owned()),
            State::Disconnected { reason, .. } => Some(format!("not connected: {reason}")),
            State::Broken { .. } | State::Probing { .. } => {
                Some(format!("its breaker is open after {} failures in a row", self.failures))
            }
        }
    }
}

/// Token bucket on the engine's clock.
#[derive(Debug)]
struct Bucket {
    /// Of the whole Relay.
    rate: Rate,
    per_second: f64,
    burst: f64,
    tokens: f64,
    at: Instant,
}

impl Bucket {
    fn new(rate: Rate, now: Instant) -> Self {
        let burst = f64::from(rate.burst.max(1));
        Self { rate, per_second: f64::from(rate.per_second.max(1)), burst, tokens: burst, at: now }
    }

    /// Whoever gets lanes gets their part of the tokens by waiting for it, so that a move never lets more through.
    fn share(&mut self, part: f64, now: Instant) {
        self.refill(now);
        self.per_second = f64::from(self.rate.per_second.max(1)) * part;
        self.burst = (f64::from(self.rate.burst.max(1)) * part).max(1.0);
        self.tokens = self.tokens.min(self.burst);
    }

    fn refill(&mut self, now: Instant) {
        let elapsed = now.saturating_duration_since(self.at).as_secs_f64();
        self.tokens = (self.tokens + elapsed * self.per_second).min(self.burst);
        self.at = now;
    }

    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    fn available(&mut self, now: Instant) -> u32 {
        self.refill(now);
        // A hair of tolerance: the timer that `next` asks for may fire a rounding error too early.
        (self.tokens + 1e-6) as u32
    }

    fn take(&mut self, now: Instant) {
        self.refill(now);
        self.tokens -= 1.0;
    }

    fn next(&self, now: Instant) -> Option<Instant> {
        let elapsed = now.saturating_duration_since(self.at).as_secs_f64();
        let tokens = self.tokens + elapsed * self.per_second;
        (tokens < 1.0).then(|| now + Duration::from_secs_f64(((1.0 - tokens) / self.per_second).max(0.0005)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn now() -> Instant {
        Instant::now()
    }

    #[tokio::test(start_paused = true)]
    async fn a_breaker_opens_probes_and_closes() {
        let start = now();
        let mut gate =
            Gate::new(false, Some(BreakerConfig { failures: 3, open_for: Duration::from_secs(10) }), None, start);
        assert!(!gate.failed(true, false, start));
        assert!(!gate.failed(false, false, start), "another outcome ends the run");
        assert!(!gate.failed(true, false, start));
        assert!(!gate.failed(true, false, start));
        assert!(gate.failed(true, false, start));
        assert_eq!((gate.breaker_gauge(), gate.allowance(5, start)), (2, 0));
        let later = start + Duration::from_secs(10);
        assert!(gate.is_open(later));
        assert_eq!((gate.breaker_gauge(), gate.allowance(5, later)), (1, 1));
        gate.started(later);
        assert_eq!(gate.allowance(5, later), 0, "one probe at a time");
        assert!(!gate.failed(true, false, later), "it was under way when the gate closed");
        assert_eq!((gate.breaker_gauge(), gate.allowance(5, later)), (1, 0), "the probe is still awaited");
        assert!(gate.failed(true, true, later));
        let again = later + Duration::from_secs(10);
        assert!(gate.is_open(again));
        gate.started(again);
        assert!(gate.succeeded());
        assert_eq!((gate.breaker_gauge(), gate.allowance(5, again)), (0, 5));
    }

    #[tokio::test(start_paused = true)]
    async fn a_lost_broker_is_probed_with_growing_pauses() {
        let start = now();
        let mut gate = Gate::new(false, None, None, start);
        assert!(gate.disconnected("no route to host", start));
        assert!(!gate.wants_probe(start, 0.0));
        let mut at = start;
        let mut pauses = Vec::new();
        for _ in 0..7 {
            let next = gate.next_timer(at).unwrap();
            pauses.push((next - at).as_secs_f64());
            at = next;
            assert!(gate.wants_probe(at, 0.99));
            assert!(!gate.probed(Err("still away".to_owned()), at));
        }
        assert!(pauses[0] >= 1.0 && pauses[3] > pauses[1] && pauses.iter().all(|pause| *pause <= 30.0), "{pauses:?}");
        at = gate.next_timer(at).unwrap();
        assert!(gate.wants_probe(at, 0.5));
        assert!(gate.probed(Ok(()), at));
        assert!(gate.is_open(at));
    }

    #[tokio::test(start_paused = true)]
    async fn the_rate_is_a_token_bucket() {
        let start = now();
        let mut gate = Gate::new(false, None, Some(Rate { per_second: 10, burst: 2 }), start);
        assert_eq!(gate.allowance(5, start), 2);
        gate.started(start);
        gate.started(start);
        assert_eq!(gate.allowance(5, start), 0);
        let next = gate.next_timer(start).unwrap();
        assert!(next > start && next <= start + Duration::from_millis(101));
        assert_eq!(gate.allowance(5, next), 1);
        assert_eq!(gate.allowance(5, start + Duration::from_secs(60)), 2);
    }

    /// Contract 13.3: the limits are those of the whole Relay.
    #[tokio::test(start_paused = true)]
    async fn workers_share_the_rate_as_they_share_the_lanes() {
        let start = now();
        let mut gates = [48, 16].map(|lanes| {
            let mut gate = Gate::new(false, None, Some(Rate { per_second: 100, burst: 4 }), start);
            gate.share_rate(lanes, 64, start);
            gate
        });
        assert_eq!(gates.each_mut().map(|gate| gate.allowance(50, start)), [3, 1]);
        let mut started = [0, 0];
        for step in 1..=1000 {
            let at = start + Duration::from_millis(step);
            for (gate, count) in gates.iter_mut().zip(&mut started) {
                for _ in 0..gate.allowance(50, at) {
                    gate.started(at);
                    *count += 1;
                }
            }
        }
        // 75 and 25 a second, and the burst at the start.
        assert!((77..=78).contains(&started[0]) && (25..=26).contains(&started[1]), "{started:?}");
    }
}

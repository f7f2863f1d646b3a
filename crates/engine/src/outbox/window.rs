//! What a worker knows of the outbox, and what follows from it: which rows may start, what to read next, what to write.
//!
//! Pure: no I/O, no clock of its own (`now` is a parameter), no randomness but the generator it is given. The driver feeds it
//! answers and carries out what it asks for.
//!
//! Invariants
//! - A *unit* is a key together with the destination of its child rows (none for plain rows). At most one row of a unit is in
//!   flight, and none starts while an earlier unfinished row of the unit is known: in memory, left behind, or waiting for a retry.
//! - A row that was read and could not be kept is *left behind*: its unit remembers the lowest such sequence, and no row of the
//!   unit behind it starts before it has been read again. Rows without a key that were left behind are remembered per destination.
//! - A row is in memory from its read until the database has confirmed its settle; while it is, no read returns it.
//! - A full, slow or held destination never takes room from another.
//! - A row that the database refuses to write holds nobody but its own unit: it is put off, alone.
//!
//! ```text
//!            offer               head of its unit             room, gate open
//!   read ───────────► Chained ────────────────────► Ready ────────────────────► InFlight ──► Settling ──► gone
//!     │                                                │  careful lane, suspect     ▲
//!     └──► left behind (unit.left, destination.behind) └────────► Marking ──────────┘
//! ```

use std::{
    cmp::Reverse,
    collections::{BTreeSet, BinaryHeap, HashMap, VecDeque, hash_map::DefaultHasher},
    hash::BuildHasherDefault,
    sync::Arc,
    time::Duration,
};

use queuebox_core::{
    Class, Fault, Lane, LaneSet, Uuid,
    message::{DeadCode, OutboxRow, Payload, Position, Stamp},
    ports::outbox::{Child, DestinationRead, Expansion, KeyRead, Outcome, Polled, Read, Settle},
};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use tokio::time::Instant;

use super::{
    gate::{self, Gate},
    per_minute::PerMinute,
    routing::{DestinationIndex, Routes, Target},
};
use crate::config::{DestinationConfig, OutboxConfig, RelayConfig};

/// Keys that may be known at a time. At the bound the walk stops until some are done.
const KEYS_MAX: usize = 100_000;
/// Rows that are marked `processing` at a time in careful lanes (contract 5.4).
const MARKED_MAX: usize = 64;
/// Suspects with one crash that are marked together (contract 5.4).
const SUSPECTS_MAX: usize = 8;
/// Before every row: a lap that begins here begins at the oldest row, whatever the store knows about late commits.
const START: Position = Position { sequence: i64::MIN, id: Uuid::nil() };
/// Keys read again in one poll.
const KEY_READS_MAX: usize = 64;
/// Destinations read for alone in one poll.
const DESTINATION_READS_MAX: usize = 4;
/// Topics named in one poll, per list.
const TOPICS_NAMED_MAX: usize = 500;
/// A lap over all pending rows begins so long after the last one ended. It is the safety net: what commits late is found by each
/// poll, retries by their time, recovered rows by an order.
const LAP_EVERY: Duration = Duration::from_secs(5);
/// A walk is barren when less than one of so many rows was of use.
const BARREN_SHARE: usize = 8;
/// A barren walk takes at least one of so many polls.
const BARREN_REST_MAX: u32 = 4;
/// The next step of a lap waits so many times what the last one took, within the bounds: a lap is a small part of the polls, also where
/// its rows are on disk. Without the upper bound a slow database would never be through.
const LAP_REST: u32 = 8;
const LAP_GAP_MIN: Duration = Duration::from_millis(20);
const LAP_GAP_MAX: Duration = Duration::from_millis(250);
/// Rows that the database refuses, kept in memory. Where there are more, it is no matter of single rows.
const PUT_OFF_MAX: usize = 64;
/// Pause before a write that the database refused is tried again; doubles up to the longest one.
const SETBACK_FIRST: Duration = Duration::from_millis(100);
const SETBACK_MAX: Duration = Duration::from_secs(30);

/// A unit whose question was answered: what it had left behind until then, and its lane.
type Answered = (UnitName, Option<(i64, usize)>, Lane);

/// A map whose order is the same in each run, so that a simulated world repeats itself.
type Map<K, V> = HashMap<K, V, BuildHasherDefault<DefaultHasher>>;

/// A key together with the destination of child rows; `None` for plain rows.
type UnitName = (Arc<str>, Option<Arc<str>>);

/// Result of one publish, as the window wants it.
#[derive(Debug)]
pub enum Published {
    /// The destination took responsibility.
    Done,
    /// It did not. What follows is decided by the class.
    Failed(Fault),
    /// A transform with `onError: Dead` failed; the row was never offered to the destination.
    TransformDead(String),
}

/// A row that starts now. The driver turns it into a publish.
#[derive(Debug)]
pub struct Start {
    /// Where to.
    pub destination: DestinationIndex,
    /// Whose transform and routing key apply.
    pub route: usize,
    /// The row, payload included.
    pub row: OutboxRow,
}

/// Things that happened and that people or metrics want to know. Drained by the driver.
#[derive(Debug, PartialEq, Eq)]
pub enum Note {
    /// A row failed and will be tried again.
    Failed { destination: Option<DestinationIndex>, id: Uuid, attempt: i32, error: String },
    /// A row is dead.
    Dead { destination: Option<DestinationIndex>, id: Uuid, error: String },
    /// A row was delivered. Microseconds since 1970 of its creation.
    Sent { destination: DestinationIndex, id: Uuid, created_at_us: i64 },
    /// A parent was expanded.
    Expanded { id: Uuid, topic: String, key: Option<String>, children: usize },
    /// The gate of a destination closed or opened.
    GateClosed { destination: DestinationIndex, reason: String },
    /// See `GateClosed`.
    GateOpened { destination: DestinationIndex },
    /// A settle changed nothing: somebody else moved the row in between.
    Lost { id: Uuid, published: bool },
    /// The walk stopped at the bound of keys.
    KeysFull,
    /// A careful lane is at full speed again.
    LaneTrusted { lane: Lane },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Waits behind a row of its unit.
    Chained,
    /// In the queue of its destination.
    Ready,
    /// Being written `processing`.
    Marking,
    /// Being published, expanded, or decided.
    InFlight,
    /// Its settle is not confirmed yet.
    Settling,
    /// The database refused to write it: it is tried again later.
    PutOff,
}

/// What a row is put off for.
#[derive(Debug)]
enum Again {
    /// To be started: it could not be marked, or not be expanded.
    Start,
    /// For its outcome to be written.
    Settle(Settle),
}

#[derive(Debug)]
struct Entry {
    row: OutboxRow,
    unit: Option<UnitName>,
    target: Target,
    slot: usize,
    phase: Phase,
    stamp: Stamp,
    bytes: u64,
    was_published: bool,
    read_at: Instant,
}

#[derive(Debug, Default)]
struct Unit {
    /// Rows in memory, in order.
    chain: VecDeque<(Position, Uuid)>,
    /// The one that was started. It need not be the first: an earlier one may have come back while it was under way.
    busy: Option<Uuid>,
    /// Lowest sequence that was left behind, with the slot of its destination.
    left: Option<(i64, usize)>,
    /// Changes whenever something is left behind, so that an answer to an older question does not clear it.
    generation: u64,
    /// What the row that was left behind waits for. Rows before it do not wait.
    waits: Waits,
}

#[derive(Debug, Default, Clone, Copy, PartialEq)]
enum Waits {
    #[default]
    No,
    /// The failure of the head is not written yet; nothing of the unit may be read or started.
    ForSettle,
    /// A retry, or its time: until then.
    Until(Instant),
}

impl Unit {
    fn lowest(&self) -> Option<i64> {
        let first = self.chain.front().map(|(position, _)| position.sequence);
        let left = self.left.map(|(sequence, _)| sequence);
        first.into_iter().chain(left).min()
    }

    fn is_empty(&self) -> bool {
        self.chain.is_empty() && self.left.is_none() && self.waits == Waits::No
    }
}

#[derive(Debug)]
struct KeyState {
    lane: Lane,
    plain: Unit,
    children: Vec<(Arc<str>, Unit)>,
}

impl KeyState {
    fn unit(&self, child: Option<&Arc<str>>) -> Option<&Unit> {
        match child {
            None => Some(&self.plain),
            Some(name) => self.children.iter().find(|(at, _)| at == name).map(|(_, unit)| unit),
        }
    }

    fn unit_mut(&mut self, child: Option<&Arc<str>>) -> &mut Unit {
        match child {
            None => &mut self.plain,
            Some(name) => {
                let found = self.children.iter().position(|(at, _)| at == name);
                let index = found.unwrap_or_else(|| {
                    self.children.push((name.clone(), Unit::default()));
                    self.children.len() - 1
                });
                &mut self.children[index].1
            }
        }
    }

    fn is_empty(&self) -> bool {
        self.plain.is_empty() && self.children.iter().all(|(_, unit)| unit.is_empty())
    }
}

/// A destination, or one of the two inner ends: rows without a route and parents to expand.
struct Slot {
    name: Arc<str>,
    config: Option<DestinationConfig>,
    gate: Gate,
    in_flight: u32,
    /// Payload bytes in memory.
    bytes: u64,
    ready: VecDeque<Uuid>,
    ready_careful: VecDeque<Uuid>,
    chained: usize,
    /// Units whose lowest left-behind row goes here, and which may be read again now.
    left: BTreeSet<(i64, UnitName)>,
    /// Lowest position of a row without a key that was left behind.
    behind: Option<Position>,
    behind_generation: u64,
    /// The sequence of the last row that probed a broken gate; the next probe is another one.
    probed: i64,
    /// The row that probes it now.
    probe: Option<Uuid>,
}

impl Slot {
    fn queued(&self) -> usize {
        self.ready.len() + self.ready_careful.len()
    }
}

#[derive(Debug, Clone, Copy, Default)]
struct LaneState {
    draining: bool,
    /// Rows to settle until the lane is trusted again.
    careful_left: Option<u32>,
}

/// What a poll was asked, to judge its answer.
#[derive(Debug, Default)]
pub struct Asked {
    walk: bool,
    walk_generation: u64,
    part: LapPart,
    /// When a step over everything was asked for.
    lap_step_began: Option<Instant>,
    from_the_start: bool,
    /// Unit and its generation.
    keys: Map<UnitName, u64>,
    key_limit: usize,
    destinations: Vec<AskedDestination>,
    bytes_max: u64,
}

/// What the lap of a poll is for.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum LapPart {
    #[default]
    None,
    /// Rows that may have become visible behind the walk since the last poll. Only together with them is a walk in order: a
    /// transaction that commits late may bring rows of one key on both sides of the walk's place.
    Late,
    /// A step over everything.
    Everything,
}

#[derive(Debug)]
struct AskedDestination {
    slot: usize,
    generation: u64,
    limit: u32,
    probing: bool,
}

/// See the module.
pub struct Window {
    outbox: OutboxConfig,
    routes: Routes,
    slots: Vec<Slot>,
    real_slots: usize,
    rows: Map<Uuid, Entry>,
    keys: Map<Arc<str>, KeyState>,
    /// Units to look at for a new head.
    dirty: Vec<Arc<str>>,
    owned: LaneSet,
    lanes: [LaneState; 64],
    lane_rows: [u32; 64],
    lane_count: u8,
    /// Every lane is worked carefully for ever: there are no lanes, rows are claimed (contract 5.2.4).
    always_careful: bool,
    marked: usize,
    marked_suspects: usize,
    lone_suspect: bool,
    marks_wanted: Vec<Uuid>,
    timers: BinaryHeap<Reverse<(Instant, u64)>>,
    timed_units: Map<u64, UnitName>,
    timer_count: u64,
    later_due: bool,
    walk_after: Option<Position>,
    walk_ended: bool,
    /// `None` = no lap is under way.
    lap_after: Option<Position>,
    lap_began: Instant,
    /// No step of a lap before this.
    lap_next: Instant,
    lap_due: Instant,
    /// Walks in a row that brought next to nothing: all that they met belongs to keys that are left behind, or to destinations
    /// without room.
    barren_walks: u32,
    polls_since_walk: u32,
    /// Changes whenever the walk begins anew, so that the answer to an older question does not move it.
    walk_generation: u64,
    active: LaneSet,
    settles: Vec<Settle>,
    expansions: Vec<Uuid>,
    put_off: Map<Uuid, (Instant, Again)>,
    /// How often the database refused a row so far.
    setbacks: Map<Uuid, u32>,
    may_kill_no_route: bool,
    no_route: PerMinute,
    keys_full: bool,
    notes: Vec<Note>,
    rng: StdRng,
    in_flight: u32,
    bytes: u64,
}

impl Window {
    /// An empty window that owns no lane.
    pub fn new(config: &RelayConfig, lane_count: u8, always_careful: bool, seed: u64, now: Instant) -> Self {
        let mut slots: Vec<Slot> = config
            .destinations
            .iter()
            .map(|(name, destination)| {
                Slot::new(
                    name,
                    Some(destination.clone()),
                    Gate::new(destination.paused, destination.breaker, destination.rate, now),
                )
            })
            .collect();
        let real_slots = slots.len();
        slots.push(Slot::new("(no route)", None, Gate::new(false, None, None, now)));
        slots.push(Slot::new("(expand)", None, Gate::new(false, None, None, now)));
        Self {
            outbox: config.outbox.clone(),
            routes: Routes::new(config.routes.clone(), &config.destinations),
            slots,
            real_slots,
            rows: Map::default(),
            keys: Map::default(),
            dirty: Vec::new(),
            owned: LaneSet::EMPTY,
            lanes: [LaneState::default(); 64],
            lane_rows: [0; 64],
            lane_count,
            always_careful,
            marked: 0,
            marked_suspects: 0,
            lone_suspect: false,
            marks_wanted: Vec::new(),
            timers: BinaryHeap::new(),
            timed_units: Map::default(),
            timer_count: 0,
            later_due: true,
            walk_after: None,
            walk_ended: false,
            lap_after: None,
            lap_began: now,
            lap_next: now + LAP_GAP_MIN,
            lap_due: now,
            barren_walks: 0,
            polls_since_walk: 0,
            walk_generation: 0,
            active: LaneSet::EMPTY,
            settles: Vec::new(),
            expansions: Vec::new(),
            put_off: Map::default(),
            setbacks: Map::default(),
            may_kill_no_route: true,
            no_route: PerMinute::new(now),
            keys_full: false,
            notes: Vec::new(),
            rng: StdRng::seed_from_u64(seed),
            in_flight: 0,
            bytes: 0,
        }
    }

    fn no_route_slot(&self) -> usize {
        self.real_slots
    }

    fn expand_slot(&self) -> usize {
        self.real_slots + 1
    }

    // ---- lanes -------------------------------------------------------------------------------------------------------

    /// Lanes that are ours from now on. The walk begins anew, so that nothing in them is missed.
    pub fn own(&mut self, lanes: LaneSet, careful: LaneSet, now: Instant) {
        let fresh = lanes.minus(self.owned);
        self.owned = self.owned.union(lanes);
        for lane in lanes.iter() {
            self.lanes[usize::from(lane)].draining = false;
        }
        for lane in fresh.iter() {
            self.lanes[usize::from(lane)] = LaneState {
                draining: false,
                careful_left: careful.contains(lane).then(|| self.outbox.max_in_flight.saturating_mul(2).max(1)),
            };
        }
        self.find_active(now);
        if !fresh.is_empty() {
            self.walk_anew();
        }
    }

    fn walk_anew(&mut self) {
        self.walk_generation += 1;
        self.walk_after = None;
        self.walk_ended = false;
        self.lap_after = None;
        self.lap_due = self.lap_next;
        self.later_due = true;
    }

    fn find_active(&mut self, now: Instant) {
        self.active = self.owned.iter().filter(|lane| !self.lanes[usize::from(*lane)].draining).collect();
        for slot in &mut self.slots {
            slot.gate.share_rate(self.active.len(), u32::from(self.lane_count), now);
        }
    }

    /// Nothing of these lanes starts any more. They can be given away once they are [quiet](Self::take_quiet).
    pub fn drain(&mut self, lanes: LaneSet, now: Instant) {
        for lane in lanes.intersect(self.owned).iter() {
            self.lanes[usize::from(lane)].draining = true;
        }
        self.find_active(now);
        self.forget_unstarted(lanes);
    }

    /// Draining lanes of which nothing is in flight or unsettled. They are not ours any more when this returns.
    pub fn take_quiet(&mut self) -> LaneSet {
        let quiet: LaneSet = self
            .owned
            .iter()
            .filter(|lane| self.lanes[usize::from(*lane)].draining && self.lane_rows[usize::from(*lane)] == 0)
            .collect();
        if !quiet.is_empty() {
            self.owned = self.owned.minus(quiet);
            self.drop_keys(quiet);
        }
        quiet
    }

    /// Lanes that are ours and not draining.
    pub fn active_lanes(&self) -> LaneSet {
        self.active
    }

    /// Lanes that are worked carefully now.
    pub fn careful_lanes(&self) -> LaneSet {
        self.owned.iter().filter(|lane| self.lanes[usize::from(*lane)].careful_left.is_some()).collect()
    }

    /// The registration is lost: forget everything. Returns rows that were started, with whether they had been published.
    pub fn forget_all(&mut self) -> Vec<(Uuid, bool)> {
        let started = self
            .rows
            .values()
            .filter(|entry| {
                let settles = matches!(self.put_off.get(&entry.row.id), Some((_, Again::Settle(_))));
                (settles || matches!(entry.phase, Phase::InFlight | Phase::Settling)) && entry.slot < self.real_slots
            })
            .map(|entry| (entry.row.id, entry.was_published))
            .collect();
        self.rows.clear();
        self.keys.clear();
        self.dirty.clear();
        self.settles.clear();
        self.expansions.clear();
        self.put_off.clear();
        self.setbacks.clear();
        self.marks_wanted.clear();
        self.timers.clear();
        self.timed_units.clear();
        for slot in &mut self.slots {
            slot.in_flight = 0;
            slot.bytes = 0;
            slot.ready.clear();
            slot.ready_careful.clear();
            slot.chained = 0;
            slot.left.clear();
            slot.behind = None;
            slot.behind_generation += 1;
            slot.probe = None;
            slot.gate.probe_vanished();
        }
        self.owned = LaneSet::EMPTY;
        self.active = LaneSet::EMPTY;
        self.lane_rows = [0; 64];
        self.marked = 0;
        self.marked_suspects = 0;
        self.lone_suspect = false;
        self.walk_anew();
        self.in_flight = 0;
        self.bytes = 0;
        started
    }

    /// Drops rows of `lanes` that have not started, or that the database refuses to write. They stay pending in the database; nothing
    /// is written.
    fn forget_unstarted(&mut self, lanes: LaneSet) {
        let gone: Vec<Uuid> = self
            .rows
            .values()
            .filter(|entry| {
                lanes.contains(entry.row.lane) && matches!(entry.phase, Phase::Chained | Phase::Ready | Phase::PutOff)
            })
            .map(|entry| entry.row.id)
            .collect();
        for id in gone {
            if let Some((_, Again::Settle(settle))) = self.put_off.remove(&id) {
                self.abandon(settle);
            }
            self.remove(id);
        }
        for slot in &mut self.slots {
            let rows = &self.rows;
            slot.ready.retain(|id| rows.contains_key(id));
            slot.ready_careful.retain(|id| rows.contains_key(id));
        }
    }

    fn drop_keys(&mut self, lanes: LaneSet) {
        let keys: Vec<Arc<str>> =
            self.keys.iter().filter(|(_, state)| lanes.contains(state.lane)).map(|(key, _)| key.clone()).collect();
        for key in keys {
            self.keys.remove(&key);
            for slot in &mut self.slots {
                slot.left.retain(|(_, unit)| unit.0 != key);
            }
        }
    }

    /// May rows without a route be declared dead? Only by the newest configuration (contract 7.1).
    pub fn set_may_kill_no_route(&mut self, may: bool) {
        self.may_kill_no_route = may;
    }

    // ---- offers ------------------------------------------------------------------------------------------------------

    /// Takes in the answer of a poll.
    pub fn absorb(&mut self, asked: &Asked, polled: Polled, now: Instant) {
        // Rows of keys first: they are the oldest, and they clear what the others only bump into.
        self.absorb_keys(asked, polled.keys, now);
        self.absorb_destinations(asked, polled.destinations, now);
        for row in polled.later {
            self.offer_later(row, now);
        }
        if let Some(due_in_us) = polled.next_due_in_us {
            self.set_timer(now + micros(due_in_us), None);
        }
        let lap_last = polled.lap.last().map(OutboxRow::position);
        for row in polled.lap {
            self.offer(row, now);
        }
        if asked.part == LapPart::Everything && asked.walk_generation == self.walk_generation {
            self.lap_next = now + asked.lap_step_began.map_or(LAP_GAP_MIN, |began| lap_gap(now - began));
            self.lap_after = if polled.lap_ended { None } else { lap_last.or(self.lap_after) };
            if polled.lap_ended {
                self.lap_due = now + LAP_EVERY;
                self.trust_quiet_lanes();
            }
        }
        let exact = asked.part == LapPart::Late && polled.lap_ended || asked.from_the_start;
        self.absorb_walk(asked, polled.walk, polled.walk_ended, exact, now);
        self.promote();
    }

    /// `exact`: every row of a key that stands before a row of this walk, and was visible to it, is known.
    fn absorb_walk(&mut self, asked: &Asked, rows: Vec<OutboxRow>, ended: bool, exact: bool, now: Instant) {
        if !asked.walk || asked.walk_generation != self.walk_generation {
            return;
        }
        let (read, mut useful) = (rows.len(), 0);
        for row in rows {
            let unit = self.unit_of(&row);
            // What cannot be remembered must not be passed: a later row of its key would overtake it.
            if unit.as_ref().is_some_and(|unit| !self.room_for_key(&unit.0)) {
                return;
            }
            self.walk_after = Some(row.position());
            match unit {
                Some(unit) if !exact => self.read_key(&unit, &row),
                _ => useful += usize::from(self.offer(row, now)),
            }
        }
        let is_barren = exact && read > 0 && useful * BARREN_SHARE < read;
        self.barren_walks = if is_barren { self.barren_walks + 1 } else { 0 };
        self.walk_ended = ended;
    }

    /// The row may have earlier ones of its key that nobody has seen: the key is read as a whole.
    fn read_key(&mut self, unit: &UnitName, row: &OutboxRow) {
        if self.rows.contains_key(&row.id) || !self.is_active(row.lane) || !self.room_for_key(&unit.0) {
            return;
        }
        let (_, slot) = self.target_of(row);
        self.leave(unit, row.lane, row.sequence, slot);
        // The database says that it is due: whoever moved its time, nobody waits for the time that was known before.
        let state = self.keys.get(&unit.0).and_then(|state| state.unit(unit.1.as_ref()));
        let waits = state.is_some_and(|known| {
            matches!(known.waits, Waits::Until(_)) && known.left.is_some_and(|(left, _)| left == row.sequence)
        });
        if waits && row.due_in_us <= 0 {
            self.set_waits(unit, Waits::No);
        }
    }

    fn absorb_keys(&mut self, asked: &Asked, rows: Vec<OutboxRow>, now: Instant) {
        if asked.keys.is_empty() {
            return;
        }
        let answered = self.take_left(asked);
        let mut total_bytes = 0;
        // Rows read of a key, and how far the read came.
        let mut read_of_key: Map<Arc<str>, (usize, i64)> = Map::default();
        let mut slot_of_unit: Map<UnitName, usize> = Map::default();
        for row in rows {
            let Some(unit) = self.unit_of(&row) else { continue };
            total_bytes += payload_bytes(&row.payload);
            let read = read_of_key.entry(unit.0.clone()).or_default();
            *read = (read.0 + 1, row.sequence);
            let (_, slot) = self.target_of(&row);
            slot_of_unit.insert(unit, slot);
            self.offer(row, now);
        }
        for (unit, left, lane) in answered {
            let (count, last) = read_of_key.get(&unit.0).copied().unwrap_or_default();
            if count < asked.key_limit && total_bytes < asked.bytes_max {
                continue;
            }
            // Whatever the key has up to `last` was read, also where none of it was of this unit. What stands behind the walk's place
            // is met by the walk: left behind, it would be read twice, and so would all that follows it.
            if count > 0 && self.walk_after.is_some_and(|walked| walked.sequence < last) {
                continue;
            }
            match (slot_of_unit.get(&unit).copied().or(left.map(|(_, slot)| slot)), left) {
                (Some(slot), _) if count > 0 => self.leave(&unit, lane, last, slot),
                (_, Some((sequence, slot))) => self.leave(&unit, lane, sequence, slot),
                _ => {}
            }
        }
    }

    /// Clears what was left behind of the units whose question is still the newest: what the answer brings and cannot be kept is left
    /// behind anew. Returns what was cleared.
    fn take_left(&mut self, asked: &Asked) -> Vec<Answered> {
        let mut answered = Vec::with_capacity(asked.keys.len());
        for (unit, generation) in &asked.keys {
            let Some(state) = self.keys.get(&unit.0) else { continue };
            let Some(known) = state.unit(unit.1.as_ref()).filter(|known| known.generation == *generation) else {
                continue;
            };
            answered.push((unit.clone(), known.left, state.lane));
            self.set_left(unit, None);
            self.dirty.push(unit.0.clone());
        }
        answered
    }

    fn absorb_destinations(&mut self, asked: &Asked, rows: Vec<OutboxRow>, now: Instant) {
        if asked.destinations.is_empty() {
            return;
        }
        let mut found: Map<usize, (u32, Position, bool)> = Map::default();
        let mut fresh = Vec::new();
        let mut total_bytes = 0;
        for row in rows {
            let (_, slot) = self.target_of(&row);
            let is_beyond = self.walk_after.is_none_or(|after| row.position() > after);
            let (count, _, beyond) = found.get(&slot).copied().unwrap_or((0, row.position(), false));
            total_bytes += payload_bytes(&row.payload);
            found.insert(slot, (count + 1, row.position(), beyond || is_beyond));
            if !is_beyond && row.key.is_none() {
                fresh.push(row);
            }
        }
        // The bytes run over all destinations of the read: one may have been cut short by another's rows.
        let was_cut = total_bytes >= asked.bytes_max;
        for question in &asked.destinations {
            let answer = found.get(&question.slot);
            let at = &mut self.slots[question.slot];
            if question.probing {
                if answer.is_none() {
                    at.probed = i64::MIN;
                }
            } else if at.behind_generation == question.generation {
                at.behind = match answer {
                    Some((count, last, false)) if *count >= question.limit || was_cut => Some(*last),
                    None if was_cut => at.behind,
                    _ => None,
                };
            }
        }
        for row in fresh {
            self.offer(row, now);
        }
    }

    /// A row that came due by itself: a retry, a scheduled or replayed row.
    fn offer_later(&mut self, row: OutboxRow, now: Instant) {
        match self.unit_of(&row) {
            None => {
                self.offer(row, now);
            }
            Some(unit) => self.read_key(&unit, &row),
        }
    }

    /// Says whether the row was taken, or would have been with its payload.
    fn offer(&mut self, row: OutboxRow, now: Instant) -> bool {
        if self.rows.contains_key(&row.id) || !self.is_active(row.lane) {
            return false;
        }
        let (target, slot) = self.target_of(&row);
        match self.unit_of(&row) {
            None => self.offer_free(row, target, slot, now),
            Some(unit) => self.offer_keyed(row, unit, target, slot, now),
        }
    }

    fn offer_free(&mut self, row: OutboxRow, target: Target, slot: usize, now: Instant) -> bool {
        if row.due_in_us > 0 {
            self.set_timer(now + micros(row.due_in_us), None);
            return false;
        }
        let has_room = self.admits(slot, &row, now);
        if row.payload == Payload::Omitted || !has_room {
            let at = &mut self.slots[slot];
            at.behind = Some(at.behind.map_or(row.position(), |behind| behind.min(row.position())));
            at.behind_generation += 1;
        } else {
            let id = row.id;
            self.insert(row, None, target, slot, now);
            self.make_ready(id);
        }
        has_room
    }

    fn offer_keyed(&mut self, row: OutboxRow, unit: UnitName, target: Target, slot: usize, now: Instant) -> bool {
        if !self.room_for_key(&unit.0) {
            return false;
        }
        let known = self.keys.get(&unit.0).and_then(|state| state.unit(unit.1.as_ref()));
        let left = known.and_then(|known| known.left.map(|(sequence, _)| sequence));
        let chain_len = known.map_or(0, |known| known.chain.len());
        let waits = known.map_or(Waits::No, |known| known.waits);
        if left.is_some_and(|left| left <= row.sequence) {
            return false;
        }
        if row.due_in_us > 0 {
            self.leave(&unit, row.lane, row.sequence, slot);
            if waits != Waits::ForSettle {
                self.wait(&unit, now + micros(row.due_in_us));
            }
            return false;
        }
        let has_room = waits != Waits::ForSettle
            && if chain_len == 0 { self.admits(slot, &row, now) } else { self.chains(slot, chain_len, &row, now) };
        if row.payload == Payload::Omitted || !has_room {
            self.leave(&unit, row.lane, row.sequence, slot);
            return has_room;
        }
        let position = row.position();
        let lane = row.lane;
        let id = row.id;
        let key = unit.0.clone();
        let state = self.key_state(&unit.0, lane);
        let chain = &mut state.unit_mut(unit.1.as_ref()).chain;
        let place = chain.partition_point(|(at, _)| *at < position);
        chain.insert(place, (position, id));
        self.slots[slot].chained += 1;
        self.insert(row, Some(unit), target, slot, now);
        self.dirty.push(key);
        true
    }

    fn insert(&mut self, row: OutboxRow, unit: Option<UnitName>, target: Target, slot: usize, now: Instant) {
        let bytes = payload_bytes(&row.payload) + row.headers.len() as u64;
        self.slots[slot].bytes += bytes;
        self.bytes += bytes;
        self.lane_rows[usize::from(row.lane)] += 1;
        let stamp = row.stamp();
        let id = row.id;
        let entry =
            Entry { row, unit, target, slot, phase: Phase::Chained, stamp, bytes, was_published: false, read_at: now };
        self.rows.insert(id, entry);
    }

    /// Room for a row that can start as soon as the destination takes it?
    fn admits(&mut self, slot: usize, row: &OutboxRow, now: Instant) -> bool {
        if !self.slots[slot].gate.is_open(now) || self.is_barred(slot) {
            return false;
        }
        let cap = self.ready_cap(slot);
        self.slots[slot].queued() < cap && self.has_bytes(slot, row)
    }

    /// Room for a row that waits behind others of its unit?
    fn chains(&mut self, slot: usize, chain_len: usize, row: &OutboxRow, now: Instant) -> bool {
        if !self.slots[slot].gate.is_open(now) || self.is_barred(slot) {
            return false;
        }
        let has_room = self.slots[slot].chained < self.chain_cap(slot);
        chain_len < self.unit_cap(slot) && has_room && self.has_bytes(slot, row)
    }

    fn has_bytes(&self, slot: usize, row: &OutboxRow) -> bool {
        let size = payload_bytes(&row.payload) + row.headers.len() as u64;
        let at = &self.slots[slot];
        at.bytes == 0 || at.bytes + size <= self.bytes_share()
    }

    fn bytes_share(&self) -> u64 {
        self.outbox.max_in_flight_bytes / (self.real_slots.max(1) as u64)
    }

    /// Rows without a route are not touched while a newer configuration is alive, nor are parents while too many cannot be expanded.
    fn is_barred(&self, slot: usize) -> bool {
        slot == self.no_route_slot() && !self.may_kill_no_route || slot == self.expand_slot() && !self.may_put_off()
    }

    /// Twice what may be in flight and at least a batch, so that a destination never waits for a read.
    fn ready_cap(&self, slot: usize) -> usize {
        let batch = self.outbox.batch_size.min(512) as usize;
        (self.limit(slot) as usize * 2).clamp(batch.max(16), 4096)
    }

    /// Rows that wait behind others of their units. Many keys with a few rows each must find room, or their rows are read twice.
    fn chain_cap(&self, slot: usize) -> usize {
        self.ready_cap(slot) * 4
    }

    /// Rows of one unit in memory: enough to keep a hot key going while the next ones are read, and room for others.
    fn unit_cap(&self, slot: usize) -> usize {
        self.ready_cap(slot)
    }

    /// Publishes of this worker to a destination: the Relay's limit in the share of the lanes, at least 1.
    fn limit(&self, slot: usize) -> u32 {
        match &self.slots[slot].config {
            None => self.outbox.batch_size,
            Some(config) => {
                let lanes = u64::from(self.active_lanes().len());
                let share = u64::from(config.max_in_flight) * lanes / u64::from(self.lane_count.max(1));
                u32::try_from(share).unwrap_or(u32::MAX).max(1)
            }
        }
    }

    fn is_active(&self, lane: Lane) -> bool {
        self.active.contains(lane)
    }

    fn room_for_key(&self, key: &Arc<str>) -> bool {
        self.keys.len() < KEYS_MAX || self.keys.contains_key(key)
    }

    fn key_state(&mut self, key: &Arc<str>, lane: Lane) -> &mut KeyState {
        self.keys.entry(key.clone()).or_insert_with(|| KeyState { lane, plain: Unit::default(), children: Vec::new() })
    }

    fn unit_of(&self, row: &OutboxRow) -> Option<UnitName> {
        let key = row.key.as_deref()?;
        let key = self.keys.get_key_value(key).map_or_else(|| Arc::from(key), |(known, _)| known.clone());
        Some((key, row.destination.as_deref().map(Arc::from)))
    }

    fn target_of(&mut self, row: &OutboxRow) -> (Target, usize) {
        let target = self.routes.target(&row.topic, row.destination.as_deref());
        let slot = match target {
            Target::One { destination, .. } => destination,
            Target::Many { .. } => self.expand_slot(),
            Target::NoRoute => self.no_route_slot(),
        };
        (target, slot)
    }

    // ---- what is left behind -----------------------------------------------------------------------------------------

    fn leave(&mut self, unit: &UnitName, lane: Lane, sequence: i64, slot: usize) {
        let state = self.key_state(&unit.0, lane);
        let target = state.unit_mut(unit.1.as_ref());
        target.generation += 1;
        let later = match target.left {
            Some((known, at)) if known < sequence || (known, at) == (sequence, slot) => return,
            _ => target.chain.iter().filter(|(at, _)| at.sequence > sequence).map(|(_, id)| *id).collect::<Vec<_>>(),
        };
        // What the unit waits for was the time of a later row: an earlier one that came back is its head now.
        let waits_for_later = target.left.is_some_and(|(known, _)| sequence < known);
        if waits_for_later && matches!(target.waits, Waits::Until(_)) {
            target.waits = Waits::No;
        }
        self.set_left(unit, Some((sequence, slot)));
        // Nothing in memory waits for a row that is not: it would hold room that the row itself may need.
        for id in later {
            if self.rows.get(&id).is_some_and(|entry| matches!(entry.phase, Phase::Chained | Phase::Ready)) {
                self.remove(id);
            }
        }
    }

    fn set_left(&mut self, unit: &UnitName, left: Option<(i64, usize)>) {
        let Some(state) = self.keys.get_mut(&unit.0) else { return };
        let target = state.unit_mut(unit.1.as_ref());
        let waits = target.waits != Waits::No;
        if let Some((sequence, slot)) = target.left {
            self.slots[slot].left.remove(&(sequence, unit.clone()));
        }
        target.left = left;
        if let Some((sequence, slot)) = left
            && !waits
        {
            self.slots[slot].left.insert((sequence, unit.clone()));
        }
        if state.is_empty() {
            self.keys.remove(&unit.0);
        }
    }

    fn set_waits(&mut self, unit: &UnitName, waits: Waits) {
        let Some(state) = self.keys.get_mut(&unit.0) else { return };
        state.unit_mut(unit.1.as_ref()).waits = waits;
        let left = state.unit(unit.1.as_ref()).and_then(|target| target.left);
        self.set_left(unit, left);
    }

    fn wait(&mut self, unit: &UnitName, until: Instant) {
        self.set_waits(unit, Waits::Until(until));
        self.set_timer(until, Some(unit.clone()));
    }

    fn set_timer(&mut self, at: Instant, unit: Option<UnitName>) {
        if unit.is_none()
            && self.timers.peek().is_some_and(|Reverse((next, _))| *next <= at && self.timers.len() > 4096)
        {
            return;
        }
        self.timer_count += 1;
        if let Some(unit) = unit {
            self.timed_units.insert(self.timer_count, unit);
        }
        self.timers.push(Reverse((at, self.timer_count)));
    }

    /// Timers that have come. Called before each plan.
    pub fn tick(&mut self, now: Instant) {
        self.take_up(now);
        while let Some(Reverse((at, number))) = self.timers.peek().copied() {
            if at > now {
                break;
            }
            self.timers.pop();
            let Some(unit) = self.timed_units.remove(&number) else {
                self.later_due = true;
                continue;
            };
            let waits = self.keys.get(&unit.0).and_then(|state| state.unit(unit.1.as_ref())).map(|target| target.waits);
            if let Some(Waits::Until(until)) = waits
                && until <= now
            {
                self.set_waits(&unit, Waits::No);
                self.dirty.push(unit.0.clone());
            }
        }
        self.promote();
    }

    /// When something may happen by itself.
    pub fn next_timer(&self, now: Instant) -> Option<Instant> {
        let own = self.timers.peek().map(|Reverse((at, _))| *at);
        let gates = self.slots.iter().filter_map(|slot| slot.gate.next_timer(now));
        let put_off = self.put_off.values().map(|(at, _)| *at);
        own.into_iter().chain(gates).chain(put_off).min()
    }

    // ---- from chained to in flight -----------------------------------------------------------------------------------

    /// Finds the new heads of units that changed.
    fn promote(&mut self) {
        while let Some(key) = self.dirty.pop() {
            let Some(state) = self.keys.get(&key) else { continue };
            let plain_lowest = state.plain.lowest();
            let mut heads = Vec::new();
            let units = std::iter::once((None, &state.plain))
                .chain(state.children.iter().map(|(name, unit)| (Some(name), unit)));
            for (child, unit) in units {
                let Some((position, id)) = unit.chain.front() else { continue };
                if unit.busy.is_some()
                    || unit.waits == Waits::ForSettle
                    || unit.left.is_some_and(|(left, _)| left < position.sequence)
                {
                    continue;
                }
                let Some(entry) = self.rows.get(id) else { continue };
                let sequence = position.sequence;
                // Contract 4.3: a child waits for earlier plain rows; a plain row for earlier children of its destination.
                let crossed = match child {
                    // An earlier row that came back meets a later one under way: it waits, too.
                    Some(_) => state.plain.busy.is_some() || plain_lowest.is_some_and(|lowest| lowest < sequence),
                    None => {
                        let name = match entry.target {
                            Target::One { destination, .. } => Some(self.slots[destination].name.clone()),
                            _ => None,
                        };
                        name.is_some_and(|name| {
                            state.children.iter().any(|(at, unit)| {
                                let is_earlier = unit.lowest().is_some_and(|lowest| lowest < sequence);
                                *at == name && (unit.busy.is_some() || is_earlier)
                            })
                        })
                    }
                };
                if !crossed {
                    heads.push((child.cloned(), *id));
                }
            }
            for (child, id) in heads {
                if let Some(state) = self.keys.get_mut(&key) {
                    state.unit_mut(child.as_ref()).busy = Some(id);
                }
                if let Some(entry) = self.rows.get(&id) {
                    self.slots[entry.slot].chained = self.slots[entry.slot].chained.saturating_sub(1);
                }
                self.make_ready(id);
            }
        }
    }

    fn make_ready(&mut self, id: Uuid) {
        let careful = self.rows.get(&id).is_some_and(|entry| self.needs_mark(entry));
        let Some(entry) = self.rows.get_mut(&id) else { return };
        entry.phase = Phase::Ready;
        let slot = &mut self.slots[entry.slot];
        if careful { slot.ready_careful.push_back(id) } else { slot.ready.push_back(id) }
    }

    fn needs_mark(&self, entry: &Entry) -> bool {
        !entry.stamp.marked
            && (self.always_careful
                || entry.row.crashes > 0
                || self.lanes[usize::from(entry.row.lane)].careful_left.is_some())
    }

    /// Rows that start now. Each must be answered by [`published`](Self::published) once.
    pub fn start(&mut self, now: Instant) -> Vec<Start> {
        let mut starts = Vec::new();
        for slot in 0..self.slots.len() {
            self.start_slot(slot, now, &mut starts);
        }
        starts
    }

    fn start_slot(&mut self, slot: usize, now: Instant, starts: &mut Vec<Start>) {
        if !self.slots[slot].gate.is_open(now) || self.is_barred(slot) {
            self.leave_queue(slot);
            return;
        }
        loop {
            let limit = self.limit(slot);
            let wanted = limit.saturating_sub(self.slots[slot].in_flight);
            let share = self.outbox.max_in_flight / u32::try_from(self.real_slots.max(1)).unwrap_or(u32::MAX);
            let has_turn = slot >= self.real_slots
                || self.in_flight < self.outbox.max_in_flight
                || self.slots[slot].in_flight < share.max(1);
            if !has_turn || self.slots[slot].gate.allowance(wanted, now) == 0 {
                return;
            }
            let Some(id) = self.next_ready(slot) else { return };
            self.begin(slot, id, now, starts);
        }
    }

    fn next_ready(&mut self, slot: usize) -> Option<Uuid> {
        while let Some(id) = self.slots[slot].ready_careful.front().copied() {
            match self.rows.get(&id).filter(|entry| entry.phase == Phase::Ready) {
                None => {
                    self.slots[slot].ready_careful.pop_front();
                }
                Some(entry) if entry.stamp.marked || self.may_mark(entry) => {
                    return self.slots[slot].ready_careful.pop_front();
                }
                Some(_) => break,
            }
        }
        // Rows that were given up meanwhile may still stand in the queue.
        while let Some(id) = self.slots[slot].ready.pop_front() {
            if self.rows.get(&id).is_some_and(|entry| entry.phase == Phase::Ready) {
                return Some(id);
            }
        }
        None
    }

    /// Contract 5.4: at most 64 marked rows, 8 suspects together, some alone.
    fn may_mark(&self, entry: &Entry) -> bool {
        if self.lone_suspect {
            return false;
        }
        if self.runs_alone(entry) {
            return self.marked == 0;
        }
        self.marked < MARKED_MAX && (entry.row.crashes == 0 || self.marked_suspects < SUSPECTS_MAX)
    }

    fn begin(&mut self, slot: usize, id: Uuid, now: Instant, starts: &mut Vec<Start>) {
        let Some(entry) = self.rows.get(&id) else { return };
        let needs_mark = self.needs_mark(entry) && slot < self.real_slots;
        let (is_suspect, is_lone, sequence) = (entry.row.crashes > 0, self.runs_alone(entry), entry.row.sequence);
        let fresh = !entry.stamp.marked;
        let Some(entry) = self.rows.get_mut(&id) else { return };
        if needs_mark {
            entry.phase = Phase::Marking;
            self.marked += 1;
            self.marked_suspects += usize::from(is_suspect && !is_lone);
            self.lone_suspect |= is_lone;
            self.marks_wanted.push(id);
        } else {
            entry.phase = Phase::InFlight;
        }
        if fresh {
            self.slots[slot].in_flight += 1;
            if slot < self.real_slots {
                self.in_flight += 1;
                if self.slots[slot].gate.is_probing() {
                    self.slots[slot].probed = sequence;
                    self.slots[slot].probe = Some(id);
                }
                self.slots[slot].gate.started(now);
            }
        }
        if !needs_mark {
            self.launch(id, now, starts);
        }
    }

    fn launch(&mut self, id: Uuid, now: Instant, starts: &mut Vec<Start>) {
        let Some(entry) = self.rows.get_mut(&id) else { return };
        if let Payload::TooLarge(size) = entry.row.payload {
            let max = self.outbox.max_payload_bytes;
            let text = format!(
                "the payload has {size} bytes, outbox.maxPayloadSize allows {max}; raise it, or send a reference in place of the data"
            );
            self.finish_dead(id, DeadCode::Refused, &text, false, now);
            return;
        }
        match entry.target {
            Target::NoRoute => {
                let text = match &entry.row.destination {
                    Some(name) => format!(
                        "no route for topic {:?} names destination {name:?} any more; add it to a route, or discard the row",
                        entry.row.topic
                    ),
                    None => {
                        format!("no route matches topic {:?}; add a route for it and replay the row", entry.row.topic)
                    }
                };
                self.finish_dead(id, DeadCode::NoRoute, &text, false, now);
            }
            Target::Many { .. } => self.expansions.push(id),
            Target::One { destination, route } => {
                // The contents move out: a row in flight is settled by its stamp, and its unit is known.
                let at = &mut entry.row;
                let row = OutboxRow {
                    topic: std::mem::take(&mut at.topic),
                    key: at.key.take(),
                    destination: at.destination.take(),
                    payload: std::mem::replace(&mut at.payload, Payload::Omitted),
                    headers: std::mem::take(&mut at.headers),
                    aggregate_type: at.aggregate_type.take(),
                    trace_parent: at.trace_parent.take(),
                    ..*at
                };
                starts.push(Start { destination, route, row });
            }
        }
    }

    /// At most `limit` rows to write `processing` now. Answer with [`marks_done`](Self::marks_done).
    pub fn take_marks(&mut self, limit: usize) -> Vec<(Position, Stamp)> {
        let wanted: Vec<Uuid> = self.marks_wanted.drain(..limit.min(self.marks_wanted.len())).collect();
        wanted.iter().filter_map(|id| self.rows.get(id)).map(|entry| (entry.row.position(), entry.stamp)).collect()
    }

    /// The database's answer to [`take_marks`](Self::take_marks). What was not marked was moved by somebody else.
    pub fn marks_done(&mut self, asked: &[(Position, Stamp)], marked: &[Uuid], now: Instant) -> Vec<Start> {
        let mut starts = Vec::new();
        for (position, _) in asked {
            let Some(entry) = self.rows.get_mut(&position.id) else { continue };
            entry.stamp.marked = true;
            if marked.contains(&position.id) {
                entry.phase = Phase::InFlight;
                self.setbacks.remove(&position.id);
                self.launch(position.id, now, &mut starts);
            } else {
                self.unstart(position.id);
                self.unmark(position.id);
                self.give_up_in_memory(position.id);
            }
        }
        self.promote();
        starts
    }

    /// Marking failed: the rows are asked for again, before all others.
    pub fn marks_failed(&mut self, asked: &[(Position, Stamp)]) {
        let rows = &self.rows;
        let again = asked.iter().map(|(position, _)| position.id).filter(|id| rows.contains_key(id));
        self.marks_wanted.splice(0..0, again);
    }

    /// Takes a row out of the counts of what is in flight. If it was the probe of its gate and the destination has not decided about
    /// that, another row may probe.
    fn unstart(&mut self, id: Uuid) {
        let Some(entry) = self.rows.get(&id) else { return };
        let slot = entry.slot;
        if self.slots[slot].probe == Some(id) {
            self.slots[slot].probe = None;
            self.slots[slot].gate.probe_vanished();
        }
        self.slots[slot].in_flight = self.slots[slot].in_flight.saturating_sub(1);
        if slot < self.real_slots {
            self.in_flight = self.in_flight.saturating_sub(1);
        }
    }

    /// Takes a row out of the counts of what is marked. Not before its settle is written: until then the database has it as
    /// `processing`, and the death of this worker counts against it.
    fn unmark(&mut self, id: Uuid) {
        let Some(entry) = self.rows.get(&id).filter(|entry| entry.stamp.marked) else { return };
        let is_lone = self.runs_alone(entry);
        let is_suspect = entry.row.crashes > 0 && !is_lone;
        self.marked = self.marked.saturating_sub(1);
        self.marked_suspects = self.marked_suspects.saturating_sub(usize::from(is_suspect));
        self.lone_suspect &= !is_lone;
    }

    /// A row that runs alone among the marked ones: it was there at two deaths, or one more would end it. So whoever has no part in
    /// the deaths never ends dead of them, whatever `maxCrashes` is.
    fn runs_alone(&self, entry: &Entry) -> bool {
        entry.row.crashes > 1 || entry.row.crashes.saturating_add(1) >= self.outbox.max_crashes
    }

    /// A row that may run, but not here and now: its destination closed, or somebody else moved it. It is read again.
    fn give_up_in_memory(&mut self, id: Uuid) {
        let Some(entry) = self.rows.get(&id) else { return };
        let (slot, position, lane) = (entry.slot, entry.row.position(), entry.row.lane);
        match entry.unit.clone() {
            Some(unit) => self.leave(&unit, lane, position.sequence, slot),
            None => {
                let at = &mut self.slots[slot];
                at.behind = Some(at.behind.map_or(position, |behind| behind.min(position)));
                at.behind_generation += 1;
            }
        }
        self.remove(id);
    }

    /// The gate closed: what waits for it in memory makes room for others.
    fn leave_queue(&mut self, slot: usize) {
        if self.slots[slot].queued() == 0 && self.slots[slot].chained == 0 {
            return;
        }
        let unstarted: Vec<Uuid> = self
            .rows
            .values()
            .filter(|entry| entry.slot == slot && matches!(entry.phase, Phase::Ready | Phase::Chained))
            .map(|entry| entry.row.id)
            .collect();
        for id in unstarted {
            self.give_up_in_memory(id);
        }
        self.slots[slot].ready.clear();
        self.slots[slot].ready_careful.clear();
        self.slots[slot].chained = 0;
    }

    // ---- outcomes ----------------------------------------------------------------------------------------------------

    /// The result of a publish.
    pub fn published(&mut self, id: Uuid, result: Published, now: Instant) {
        let Some(entry) = self.rows.get_mut(&id) else { return };
        if entry.phase != Phase::InFlight {
            return;
        }
        let slot = entry.slot;
        let is_probe = self.slots[slot].probe == Some(id);
        match result {
            Published::Done => {
                entry.was_published = true;
                let (id, created_at_us) = (entry.row.id, entry.row.created_at_us);
                self.notes.push(Note::Sent { destination: slot, id, created_at_us });
                if self.slots[slot].gate.succeeded() {
                    self.notes.push(Note::GateOpened { destination: slot });
                }
                self.finish(id, Outcome::Sent);
            }
            Published::TransformDead(text) => self.finish_dead(id, DeadCode::Transform, &text, false, now),
            Published::Failed(fault) if fault.class == Class::NotConnected => {
                if self.slots[slot].gate.disconnected(&fault.detail, now) {
                    self.notes.push(Note::GateClosed { destination: slot, reason: fault.detail });
                }
                self.release(id);
            }
            Published::Failed(fault) => {
                if self.slots[slot].gate.failed(fault.trips_breaker, is_probe, now) {
                    self.notes.push(Note::GateClosed { destination: slot, reason: fault.detail.clone() });
                }
                if is_probe && fault.trips_breaker && fault.class != Class::Refused {
                    self.release(id);
                } else {
                    self.failed(id, &fault, now);
                }
            }
        }
        self.promote();
    }

    fn failed(&mut self, id: Uuid, fault: &Fault, now: Instant) {
        let Some(entry) = self.rows.get_mut(&id) else { return };
        entry.was_published = fault.class == Class::Ambiguous;
        let (attempt, max_attempts, slot) = (entry.row.attempt, entry.row.max_attempts, entry.slot);
        if fault.class == Class::Refused {
            self.finish_dead(id, DeadCode::Refused, &fault.detail, true, now);
        } else if attempt.saturating_add(1) >= max_attempts {
            self.finish_dead(id, DeadCode::Attempts, &fault.detail, true, now);
        } else {
            let schedule = self.slots[slot].config.as_ref().map(|config| config.schedule).unwrap_or_default();
            let delay = schedule.delay(attempt, fault.retry_after, &mut self.rng);
            let error = queuebox_core::redact::redact(&fault.detail);
            self.notes.push(Note::Failed {
                destination: Some(slot),
                id,
                attempt: attempt.saturating_add(1),
                error: error.clone(),
            });
            self.finish(id, Outcome::Retry { delay_us: i64::try_from(delay.as_micros()).unwrap_or(i64::MAX), error });
        }
    }

    fn finish_dead(&mut self, id: Uuid, code: DeadCode, text: &str, counted: bool, now: Instant) {
        let Some(entry) = self.rows.get(&id) else { return };
        let destination = (entry.slot < self.real_slots).then_some(entry.slot);
        let error = code.because(text);
        if code == DeadCode::NoRoute {
            self.no_route.count(now);
        }
        self.notes.push(Note::Dead { destination, id, error: error.clone() });
        self.finish(id, Outcome::Dead { error, counted });
    }

    /// A started row goes back without an attempt. A row that was never written is simply forgotten.
    fn release(&mut self, id: Uuid) {
        let Some(entry) = self.rows.get(&id) else { return };
        if entry.stamp.marked {
            self.finish(id, Outcome::Release);
        } else {
            self.unstart(id);
            self.give_up_in_memory(id);
        }
    }

    fn finish(&mut self, id: Uuid, outcome: Outcome) {
        self.unstart(id);
        let Some(entry) = self.rows.get_mut(&id) else { return };
        entry.phase = Phase::Settling;
        let settle = Settle { position: entry.row.position(), stamp: entry.stamp, outcome };
        let (slot, bytes, unit) = (entry.slot, entry.bytes, entry.unit.clone());
        entry.bytes = 0;
        self.slots[slot].bytes = self.slots[slot].bytes.saturating_sub(bytes);
        self.bytes = self.bytes.saturating_sub(bytes);
        if let Some(unit) = unit {
            // Delivered: the next of the unit may go at once; after a crash both are sent again, in order. Any other
            // outcome must be in the database first, or a crash would let a later row overtake this one.
            if settle.outcome == Outcome::Sent {
                self.unchain(&unit, id);
            } else {
                self.set_waits(&unit, Waits::ForSettle);
            }
            self.dirty.push(unit.0.clone());
        }
        self.settles.push(settle);
    }

    fn unchain(&mut self, unit: &UnitName, id: Uuid) {
        let Some(state) = self.keys.get_mut(&unit.0) else { return };
        let target = state.unit_mut(unit.1.as_ref());
        if let Some(place) = target.chain.iter().position(|(_, at)| *at == id) {
            target.chain.remove(place);
        }
        if target.busy == Some(id) {
            target.busy = None;
        }
        if state.is_empty() {
            self.keys.remove(&unit.0);
        }
    }

    /// Removes a row from memory.
    fn remove(&mut self, id: Uuid) {
        let Some(entry) = self.rows.remove(&id) else { return };
        self.lane_rows[usize::from(entry.row.lane)] = self.lane_rows[usize::from(entry.row.lane)].saturating_sub(1);
        self.slots[entry.slot].bytes = self.slots[entry.slot].bytes.saturating_sub(entry.bytes);
        self.bytes = self.bytes.saturating_sub(entry.bytes);
        if entry.phase == Phase::Chained {
            self.slots[entry.slot].chained = self.slots[entry.slot].chained.saturating_sub(1);
        }
        if let Some(unit) = entry.unit {
            self.unchain(&unit, id);
            self.dirty.push(unit.0);
        }
    }

    // ---- settles -----------------------------------------------------------------------------------------------------

    /// At most `limit` settles to write. Answer with [`settled`](Self::settled) or [`unsettled`](Self::unsettled).
    pub fn take_settles(&mut self, limit: usize) -> Vec<Settle> {
        if self.settles.len() <= limit {
            return std::mem::take(&mut self.settles);
        }
        let rest = self.settles.split_off(limit);
        std::mem::replace(&mut self.settles, rest)
    }

    /// At most `limit` settles of delivered rows, if there are `least`. Answered like those of [`take_settles`](Self::take_settles).
    pub fn take_sent(&mut self, least: usize, limit: usize) -> Option<Vec<Settle>> {
        if self.settles.len() < least || self.settles.iter().filter(|settle| settle.is_sent()).count() < least {
            return None;
        }
        let mut taken = 0;
        let takes = |settle: &mut Settle| {
            taken += usize::from(settle.is_sent());
            settle.is_sent() && taken <= limit
        };
        Some(self.settles.extract_if(.., takes).collect())
    }

    /// Settles that wait to be written.
    pub fn has_settles(&self) -> bool {
        !self.settles.is_empty()
    }

    /// The database has them. `repeated`: an earlier try may have been written already, so a lost one is no news.
    pub fn settled(&mut self, settles: Vec<Settle>, lost: &[Uuid], repeated: bool, now: Instant) {
        for settle in settles {
            let id = settle.position.id;
            let is_lost = !lost.is_empty() && lost.contains(&id);
            let Some(entry) = self.rows.get(&id) else { continue };
            let (lane, slot, was_published) = (entry.row.lane, entry.slot, entry.was_published);
            let unit = entry.unit.clone();
            if is_lost && !repeated {
                self.notes.push(Note::Lost { id, published: was_published });
            }
            self.setbacks.remove(&id);
            self.unmark(id);
            self.count_careful(lane);
            if let Some(unit) = &unit {
                self.settled_unit(unit, lane, &settle, slot, now);
            } else {
                match &settle.outcome {
                    Outcome::Retry { delay_us, .. } => self.set_timer(now + micros(*delay_us), None),
                    Outcome::Release => {
                        let at = &mut self.slots[slot];
                        let position = settle.position;
                        at.behind = Some(at.behind.map_or(position, |behind| behind.min(position)));
                        at.behind_generation += 1;
                    }
                    _ => {}
                }
            }
            self.remove(id);
        }
        self.promote();
    }

    fn settled_unit(&mut self, unit: &UnitName, lane: Lane, settle: &Settle, slot: usize, now: Instant) {
        match &settle.outcome {
            Outcome::Sent => {}
            Outcome::Dead { .. } => self.set_waits(unit, Waits::No),
            Outcome::Release => {
                self.set_waits(unit, Waits::No);
                self.leave(unit, lane, settle.position.sequence, slot);
            }
            Outcome::Retry { delay_us, .. } => {
                self.leave(unit, lane, settle.position.sequence, slot);
                self.wait(unit, now + micros(*delay_us));
            }
        }
    }

    /// They could not be written for a passing reason.
    pub fn unsettled(&mut self, mut settles: Vec<Settle>) {
        settles.append(&mut self.settles);
        self.settles = settles;
    }

    // ---- writes that the database refuses ----------------------------------------------------------------------------

    /// Is it still a matter of single rows?
    pub fn may_put_off(&self) -> bool {
        self.put_off.len() < PUT_OFF_MAX
    }

    /// The outcome of this row, alone, cannot be written: a trigger or a value of it is in the way. It is tried again later, and holds
    /// its own unit only. Returns the pause.
    pub fn put_off_settle(&mut self, settle: Settle, now: Instant) -> Duration {
        let id = settle.position.id;
        let Some(entry) = self.rows.get_mut(&id) else { return Duration::ZERO };
        entry.phase = Phase::PutOff;
        let pause = self.setback(id);
        self.put_off.insert(id, (now + pause, Again::Settle(settle)));
        pause
    }

    /// This row cannot be marked, or not be expanded. It is tried again later. Returns the pause.
    pub fn put_off_start(&mut self, id: Uuid, now: Instant) -> Duration {
        self.unstart(id);
        let Some(entry) = self.rows.get_mut(&id) else { return Duration::ZERO };
        if entry.phase == Phase::Marking {
            entry.stamp.marked = true;
            self.unmark(id);
        }
        let pause = self.setback(id);
        let Some(entry) = self.rows.get_mut(&id) else { return Duration::ZERO };
        entry.stamp = entry.row.stamp();
        match entry.unit.clone() {
            // Read again with its key, which may hold more by then: a write whose reply was lost may have been carried out.
            Some(unit) => {
                self.give_up_in_memory(id);
                self.wait(&unit, now + pause);
            }
            // Kept, so that no read brings it before its time.
            None => {
                entry.phase = Phase::PutOff;
                self.put_off.insert(id, (now + pause, Again::Start));
            }
        }
        self.promote();
        pause
    }

    fn setback(&mut self, id: Uuid) -> Duration {
        // Rows that others took over are never heard of again.
        if self.setbacks.len() >= KEYS_MAX {
            self.setbacks.clear();
        }
        let count = self.setbacks.entry(id).or_default();
        *count = count.saturating_add(1);
        SETBACK_FIRST.saturating_mul(1 << (*count - 1).min(16)).min(SETBACK_MAX)
    }

    /// What was put off and has its turn.
    fn take_up(&mut self, now: Instant) {
        if self.put_off.values().all(|(at, _)| *at > now) {
            return;
        }
        let due: Vec<Uuid> = self.put_off.iter().filter(|(_, (at, _))| *at <= now).map(|(id, _)| *id).collect();
        for id in due {
            match self.put_off.remove(&id) {
                Some((_, Again::Settle(settle))) => {
                    if let Some(entry) = self.rows.get_mut(&id) {
                        entry.phase = Phase::Settling;
                        self.settles.push(settle);
                    }
                }
                Some((_, Again::Start)) => self.make_ready(id),
                None => {}
            }
        }
    }

    /// The outcome of this row will not be written by this worker any more: whoever reads it next sends it again.
    fn abandon(&mut self, settle: Settle) {
        let id = settle.position.id;
        let Some(entry) = self.rows.get(&id) else { return };
        let (unit, lane, slot, published) = (entry.unit.clone(), entry.row.lane, entry.slot, entry.was_published);
        self.unmark(id);
        if let Some(unit) = unit {
            self.set_waits(&unit, Waits::No);
            self.leave(&unit, lane, settle.position.sequence, slot);
        }
        self.notes.push(Note::Lost { id, published });
    }

    fn count_careful(&mut self, lane: Lane) {
        let state = &mut self.lanes[usize::from(lane)];
        if let Some(left) = state.careful_left {
            state.careful_left = left.checked_sub(1).filter(|left| *left > 0);
            if state.careful_left.is_none() {
                self.trusted(lane);
            }
        }
    }

    /// A careful lane of which nothing can start is careful no more.
    fn trust_quiet_lanes(&mut self) {
        for lane in self.careful_lanes().iter() {
            let waits_to_be_read = self.slots.iter().enumerate().any(|(index, slot)| {
                index < self.real_slots && !slot.left.is_empty() && matches!(slot.gate.state(), gate::State::Open)
            });
            if self.lane_rows[usize::from(lane)] == 0 && !waits_to_be_read && self.walk_ended {
                self.lanes[usize::from(lane)].careful_left = None;
                self.trusted(lane);
            }
        }
    }

    fn trusted(&mut self, lane: Lane) {
        self.notes.push(Note::LaneTrusted { lane });
        for slot in 0..self.slots.len() {
            let queue = std::mem::take(&mut self.slots[slot].ready_careful);
            for id in queue {
                if self.rows.get(&id).is_some_and(|entry| entry.phase == Phase::Ready) {
                    self.make_ready(id);
                }
            }
        }
    }

    // ---- fan-out -----------------------------------------------------------------------------------------------------

    /// Parents to expand now. Answer with [`expanded`](Self::expanded) or [`unexpanded`](Self::unexpanded).
    pub fn take_expansions(&mut self, limit: usize) -> Vec<Expansion> {
        let count = self.expansions.len().min(limit);
        let ids: Vec<Uuid> = self.expansions.drain(..count).collect();
        let mut expansions = Vec::with_capacity(ids.len());
        for id in ids {
            let Some(entry) = self.rows.get(&id) else { continue };
            let Target::Many { route } = entry.target else { continue };
            let destinations = self.routes.route(route).destinations.clone();
            let (parent, stamp) = (entry.row.position(), entry.stamp);
            let children =
                destinations.into_iter().map(|destination| Child { id: self.fresh_id(), destination }).collect();
            expansions.push(Expansion { parent, stamp, children });
        }
        expansions
    }

    fn fresh_id(&mut self) -> Uuid {
        uuid::Builder::from_random_bytes(self.rng.random()).into_uuid()
    }

    /// The database's answer: `lost` parents were moved by somebody else. The children of the others come straight into memory.
    pub fn expanded(&mut self, expansions: Vec<Expansion>, lost: &[Uuid], now: Instant) {
        for expansion in expansions {
            let id = expansion.parent.id;
            let Some(entry) = self.rows.get(&id) else { continue };
            let parent = entry.row.clone();
            self.setbacks.remove(&id);
            self.unstart(id);
            if lost.contains(&id) {
                self.notes.push(Note::Lost { id, published: false });
                self.suspect_children(&parent, &expansion);
                self.remove(id);
                continue;
            }
            self.notes.push(Note::Expanded {
                id,
                topic: parent.topic.clone(),
                key: parent.key.clone(),
                children: expansion.children.len(),
            });
            self.count_careful(parent.lane);
            self.remove(id);
            for child in expansion.children {
                let row = OutboxRow {
                    id: child.id,
                    destination: Some(child.destination),
                    parent_id: Some(id),
                    attempt: 0,
                    crashes: 0,
                    ..parent.clone()
                };
                self.offer(row, now);
            }
        }
        self.promote();
    }

    /// An earlier try may have expanded the parent without our hearing of it: its children may be there, under ids that we do
    /// not know. Nothing of the key may pass them before it has been read again.
    fn suspect_children(&mut self, parent: &OutboxRow, expansion: &Expansion) {
        let Some((key, _)) = self.unit_of(parent) else { return };
        for child in &expansion.children {
            let row = OutboxRow { destination: Some(child.destination.clone()), ..parent.clone() };
            let (_, slot) = self.target_of(&row);
            let unit = (key.clone(), Some(Arc::from(child.destination.as_str())));
            self.leave(&unit, parent.lane, parent.sequence, slot);
        }
    }

    /// They could not be expanded: they are asked for again, before all others.
    pub fn unexpanded(&mut self, expansions: &[Expansion]) {
        self.expansions.splice(0..0, expansions.iter().map(|expansion| expansion.parent.id));
    }

    /// Parents that wait to be expanded?
    pub fn has_expansions(&self) -> bool {
        !self.expansions.is_empty()
    }

    // ---- reads -------------------------------------------------------------------------------------------------------

    /// What to read now; `None` when there is no room or nothing to ask. `idle_poll`: the poll interval is over, look at
    /// everything once.
    pub fn plan_read(&mut self, idle_poll: bool, now: Instant) -> Option<(Read, Asked)> {
        self.tick(now);
        let lanes = self.active_lanes();
        if lanes.is_empty() {
            return None;
        }
        let (hungry, mut omitted) = self.appetite(now);
        let bytes_max = self.bytes_budget();
        let mut asked = Asked { bytes_max, walk_generation: self.walk_generation, ..Asked::default() };
        let mut read = Read {
            lanes,
            walk_after: self.walk_after,
            bytes_max: asked.bytes_max,
            payload_max: self.outbox.max_payload_bytes,
            key_limit: 32,
            ..Read::default()
        };
        self.ask_keys(&mut read, &mut asked, now);
        self.ask_destinations(&mut read, &mut asked, now);
        if hungry {
            self.ask_walk(&mut read, &mut asked, &omitted, idle_poll, now);
            if self.barren_walks > 0 {
                omitted = (0..self.real_slots).collect();
            }
            self.omit(&mut read, &omitted);
        }
        if read.keys.is_empty()
            && read.destinations.is_empty()
            && !asked.walk
            && asked.part == LapPart::None
            && read.later_limit == 0
        {
            return None;
        }
        read.exclude = self.rows.keys().copied().collect();
        asked.key_limit = read.key_limit as usize;
        Some((read, asked))
    }

    /// Is there a destination that the walk could bring rows, and which ones could not use them?
    fn appetite(&mut self, now: Instant) -> (bool, Vec<usize>) {
        let mut omitted = Vec::new();
        let mut is_any_open = false;
        for slot in 0..self.real_slots {
            let open = self.slots[slot].gate.is_open(now);
            let room = self.slots[slot].queued() * 2 <= self.ready_cap(slot)
                && self.slots[slot].bytes * 2 <= self.bytes_share();
            is_any_open |= open;
            if !(open && room) || self.is_fed_by_keys(slot) {
                omitted.push(slot);
            }
        }
        // Rows without a route, and parents, may stand behind the rows of destinations that are held.
        (omitted.len() < self.real_slots || !is_any_open, omitted)
    }

    /// Rows that were left behind fill the next read: the walk would only leave more of them behind.
    fn is_fed_by_keys(&self, slot: usize) -> bool {
        let low_water = self.unit_cap(slot) / 2;
        let first = self.slots[slot].left.iter().take(KEY_READS_MAX * 4);
        first.filter(|(_, unit)| self.is_low(unit, low_water)).count() >= KEY_READS_MAX
    }

    /// Few enough rows of the unit are in memory to read more of it.
    fn is_low(&self, unit: &UnitName, low_water: usize) -> bool {
        let state = self.keys.get(&unit.0).and_then(|state| state.unit(unit.1.as_ref()));
        state.is_none_or(|known| known.chain.len() <= low_water)
    }

    fn bytes_budget(&self) -> u64 {
        self.outbox.max_in_flight_bytes.saturating_sub(self.bytes).max(1)
    }

    /// `omitted`: destinations that the walk brings nothing.
    fn ask_walk(&mut self, read: &mut Read, asked: &mut Asked, omitted: &[usize], idle_poll: bool, now: Instant) {
        let full = self.keys.len() >= KEYS_MAX;
        if full && !self.keys_full {
            self.notes.push(Note::KeysFull);
        }
        self.keys_full = full;
        // A walk that brings nothing goes on more slowly while there is something else to do.
        self.polls_since_walk += 1;
        let rests = !read.keys.is_empty() && self.polls_since_walk < self.barren_walks.min(BARREN_REST_MAX);
        if !full && !rests {
            self.polls_since_walk = 0;
            asked.walk = true;
            asked.walk_generation = self.walk_generation;
            // No more than there is room for: what finds none is left behind and read again.
            let hungry = (0..self.real_slots).filter(|slot| !omitted.contains(slot));
            let room: usize = hungry.map(|slot| self.ready_cap(slot).saturating_sub(self.slots[slot].queued())).sum();
            let room = u32::try_from(room.saturating_sub(read.keys.len())).unwrap_or(u32::MAX).max(16);
            let batch = self.outbox.batch_size;
            read.walk_limit = if omitted.len() < self.real_slots { batch.min(room) } else { batch };
        }
        asked.from_the_start = self.walk_after.is_none();
        let lap_steps = now >= self.lap_next && (self.lap_after.is_some() || now >= self.lap_due);
        if self.walk_after.is_some() && lap_steps {
            if self.lap_after.is_none() {
                self.lap_began = now;
            }
            asked.part = LapPart::Everything;
            asked.lap_step_began = Some(now);
            asked.walk = false;
            read.walk_limit = 0;
            read.lap_after = self.lap_after.or(Some(START));
            read.lap_limit = self.outbox.batch_size * 2;
        } else if self.walk_after.is_some() {
            asked.part = LapPart::Late;
            read.lap_limit = self.outbox.batch_size * 2;
        }
        if idle_poll || self.later_due || asked.part == LapPart::Everything {
            read.later_limit = self.outbox.batch_size;
            self.later_due = false;
        }
    }

    fn ask_keys(&mut self, read: &mut Read, asked: &mut Asked, now: Instant) {
        let mut unit_room = usize::MAX;
        for slot in 0..self.slots.len() {
            if read.keys.len() >= KEY_READS_MAX || self.slots[slot].left.is_empty() {
                continue;
            }
            if !self.slots[slot].gate.is_open(now) || self.is_barred(slot) {
                continue;
            }
            let cap = self.ready_cap(slot);
            let room = cap.saturating_sub(self.slots[slot].queued());
            if self.slots[slot].bytes * 2 > self.bytes_share() || room == 0 {
                continue;
            }
            let wanted = if self.slots[slot].gate.is_probing() { 1 } else { room.min(KEY_READS_MAX - read.keys.len()) };
            let low_water = self.unit_cap(slot) / 2;
            unit_room = unit_room.min(self.unit_cap(slot) - low_water);
            for (_, unit) in self.left_units(slot, wanted, low_water) {
                let state = self.keys.get(&unit.0);
                let known = state.and_then(|state| state.unit(unit.1.as_ref()));
                let generation = known.map_or(0, |known| known.generation);
                // From the first row on: one that committed late may stand before all that are known.
                read.keys.push(KeyRead { key: unit.0.to_string(), from: i64::MIN });
                asked.keys.insert(unit, generation);
            }
        }
        // One hot key alone is read in long runs, many keys in short ones.
        let per_key = (self.outbox.batch_size as usize / read.keys.len().max(1)).clamp(2, unit_room.max(2));
        read.key_limit = u32::try_from(per_key).unwrap_or(2);
    }

    /// The lowest units to read again: those with few rows in memory. A broken gate takes them in turn.
    fn left_units(&self, slot: usize, wanted: usize, low_water: usize) -> Vec<(i64, UnitName)> {
        let at = &self.slots[slot];
        let is_low = |(_, unit): &&(i64, UnitName)| self.is_low(unit, low_water);
        if at.gate.is_probing() {
            let probed = at.probed;
            let next = at.left.iter().filter(is_low).find(|(sequence, _)| *sequence > probed);
            return next.or_else(|| at.left.iter().find(is_low)).cloned().into_iter().collect();
        }
        at.left.iter().filter(is_low).take(wanted).cloned().collect()
    }

    fn ask_destinations(&mut self, read: &mut Read, asked: &mut Asked, now: Instant) {
        for slot in 0..self.slots.len() {
            if read.destinations.len() >= DESTINATION_READS_MAX {
                return;
            }
            let Some(behind) = self.slots[slot].behind else { continue };
            let open = self.slots[slot].gate.is_open(now) && !self.is_barred(slot);
            let room = self.ready_cap(slot).saturating_sub(self.slots[slot].queued());
            if !open || room * 2 < self.ready_cap(slot) || self.slots[slot].bytes * 2 > self.bytes_share() {
                continue;
            }
            if slot >= self.real_slots {
                // The two inner ends have no topics of their own: only the walk brings their rows.
                self.slots[slot].behind = None;
                self.walk_anew();
                read.walk_after = None;
                continue;
            }
            let probing = self.slots[slot].gate.is_probing();
            let probed = self.slots[slot].probed;
            let limit = u32::try_from(room).unwrap_or(u32::MAX).min(self.outbox.batch_size);
            let limit = if probing { 1 } else { limit };
            // Successive probes of a broken gate take different rows.
            let before = if probing && probed >= behind.sequence { probed } else { behind.sequence.saturating_sub(1) };
            read.destinations.push(DestinationRead {
                destination: self.slots[slot].name.to_string(),
                topics: self.routes.topics_of(slot, TOPICS_NAMED_MAX),
                after: Some(Position { sequence: before, id: Uuid::max() }),
                limit,
            });
            let generation = self.slots[slot].behind_generation;
            asked.destinations.push(AskedDestination { slot, generation, limit, probing });
        }
    }

    fn omit(&self, read: &mut Read, omitted: &[usize]) {
        for slot in omitted {
            let room = TOPICS_NAMED_MAX.saturating_sub(read.omit_topics.len());
            read.omit_topics.extend(self.routes.topics_of(*slot, room));
            read.omit_destinations.push(self.slots[*slot].name.to_string());
        }
    }

    // ---- gates, state ------------------------------------------------------------------------------------------------

    /// Destinations whose connector should be probed now.
    pub fn take_probes(&mut self, now: Instant) -> Vec<DestinationIndex> {
        let mut probes = Vec::new();
        for slot in 0..self.real_slots {
            let jitter = self.rng.random_range(0.0..1.0);
            if self.slots[slot].gate.wants_probe(now, jitter) {
                probes.push(slot);
            }
        }
        probes
    }

    /// A probe's answer.
    pub fn probed(&mut self, slot: DestinationIndex, outcome: Result<(), String>, now: Instant) {
        if self.slots[slot].gate.probed(outcome, now) {
            self.notes.push(Note::GateOpened { destination: slot });
        }
    }

    /// What happened since the last call.
    pub fn take_notes(&mut self) -> Vec<Note> {
        std::mem::take(&mut self.notes)
    }

    /// Nothing in flight and nothing to write?
    pub fn is_quiet(&self) -> bool {
        !self.rows.values().any(|entry| matches!(entry.phase, Phase::InFlight | Phase::Marking | Phase::Settling))
    }

    /// Lanes of which something is in flight or unsettled.
    pub fn unfinished_lanes(&self) -> LaneSet {
        self.owned.iter().filter(|lane| self.lane_rows[usize::from(*lane)] > 0).collect()
    }

    /// Stop: rows that have not started are forgotten, rows being marked are released once they are.
    pub fn stop_starting(&mut self, now: Instant) {
        self.drain(self.owned, now);
    }

    /// The walk has read everything, and no row is in memory.
    pub fn is_idle(&self) -> bool {
        self.walk_ended && self.rows.is_empty() && self.settles.is_empty()
    }

    /// Rows changed without their time changing (recovered after a crash): look at everything.
    pub fn lap_now(&mut self, now: Instant) {
        self.lap_due = now;
    }

    /// When the last lap over everything began.
    pub fn lap_began(&self) -> Instant {
        self.lap_began
    }

    /// Name of a destination.
    pub fn name(&self, slot: DestinationIndex) -> &str {
        &self.slots[slot].name
    }

    /// Where a row goes, if it goes to one destination.
    pub fn destination_of(&mut self, topic: &str, destination: Option<&str>) -> Option<String> {
        match self.routes.target(topic, destination) {
            Target::One { destination, .. } => Some(self.slots[destination].name.to_string()),
            Target::Many { .. } | Target::NoRoute => None,
        }
    }

    /// Route at `index`.
    pub fn route(&self, index: usize) -> &crate::config::Route {
        self.routes.route(index)
    }

    /// State of each destination: name, queued, in flight, breaker gauge, why it is held.
    pub fn destinations(&self) -> Vec<DestinationState> {
        self.slots[..self.real_slots]
            .iter()
            .map(|slot| DestinationState {
                name: slot.name.to_string(),
                queued: slot.queued() + slot.chained,
                in_flight: slot.in_flight,
                breaker: slot.gate.breaker_gauge(),
                held_because: slot.gate.held_because(),
                failing: slot.gate.streak(),
            })
            .collect()
    }

    /// Rows in memory that could start now were there somebody to carry them, or have started. Rows that wait for another of
    /// their key are none, nor are those whose destination is held.
    pub fn startable(&self) -> Startable {
        let mut found = Startable { more: !self.walk_ended, ..Startable::default() };
        let mut lanes = LaneSet::default();
        let startable = self.rows.values().filter(|entry| {
            matches!(entry.phase, Phase::Ready | Phase::Marking | Phase::InFlight)
                && self.slots[entry.slot].gate.held_because().is_none()
        });
        for entry in startable {
            found.rows += 1;
            lanes.insert(entry.row.lane);
            found.oldest_read = Some(found.oldest_read.map_or(entry.read_at, |oldest| oldest.min(entry.read_at)));
        }
        found.lanes = lanes.len();
        found
    }

    /// Rows of the last minute that no route took.
    pub fn no_route_per_minute(&mut self, now: Instant) -> u64 {
        self.no_route.sum(now)
    }

    /// A row in memory.
    pub fn row(&self, id: Uuid) -> Option<&OutboxRow> {
        self.rows.get(&id).map(|entry| &entry.row)
    }

    /// How long ago a row in memory was read.
    pub fn read_at(&self, id: Uuid) -> Option<Instant> {
        self.rows.get(&id).map(|entry| entry.read_at)
    }
}

/// State of a destination as seen by one worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DestinationState {
    /// Name.
    pub name: String,
    /// Rows in memory that wait for a publish.
    pub queued: usize,
    /// Publishes under way.
    pub in_flight: u32,
    /// 0 closed, 1 half open, 2 open.
    pub breaker: i64,
    /// Why its rows are held, if they are.
    pub held_because: Option<String>,
    /// Publishes that failed since the last success, and since when.
    pub failing: Option<(u32, Instant)>,
}

/// How much a worker has to do right now: what more workers could share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Startable {
    /// Rows in memory.
    pub rows: usize,
    /// Lanes that have one.
    pub lanes: u32,
    /// When the one that has been in memory longest was read.
    pub oldest_read: Option<Instant>,
    /// The walk has not seen everything yet: there may be more in the table.
    pub more: bool,
}

impl Slot {
    fn new(name: &str, config: Option<DestinationConfig>, gate: Gate) -> Self {
        Self {
            name: Arc::from(name),
            config,
            gate,
            in_flight: 0,
            bytes: 0,
            ready: VecDeque::new(),
            ready_careful: VecDeque::new(),
            chained: 0,
            left: BTreeSet::new(),
            behind: None,
            behind_generation: 0,
            probed: i64::MIN,
            probe: None,
        }
    }
}

fn payload_bytes(payload: &Payload) -> u64 {
    match payload {
        Payload::Loaded(bytes) => bytes.len() as u64,
        Payload::Omitted | Payload::TooLarge(_) => 0,
    }
}

/// How long a lap rests after a step that took so long.
fn lap_gap(took: Duration) -> Duration {
    (took * LAP_REST).clamp(LAP_GAP_MIN, LAP_GAP_MAX)
}

fn micros(us: i64) -> Duration {
    Duration::from_micros(u64::try_from(us).unwrap_or(0))
}

#[cfg(test)]
mod tests;

//! A database in memory that keeps the laws of the store ports, and nothing more than them.
//!
//! Without lanes it is one below schema version 14: no worker has a row, rows are claimed one by one, and the head rule takes the place of
//! the lanes (contract 5.2.4).

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::{Arc, Mutex, MutexGuard},
};

use bytes::Bytes;
use queuebox_core::{
    Fault, LaneSet, Uuid,
    message::{OutboxRow, Payload, Position, Stamp, State},
    ports::{
        Fence, Scope,
        lanes::{LaneRow, Registration, Survey, Take, WorkerRow},
        outbox::{Buried, Expansion, Outcome, Polled, Read, Recovered, Settle},
    },
};
use tokio::time::Instant;

use crate::faults::Sabotage;

#[derive(Debug, Clone)]
pub struct Row {
    pub id: Uuid,
    pub sequence: i64,
    pub topic: String,
    pub key: Option<String>,
    pub destination: Option<String>,
    pub parent_id: Option<Uuid>,
    pub state: State,
    pub attempt: i32,
    pub max_attempts: i32,
    pub crashes: i32,
    pub scheduled_at: i64,
    pub created_at: i64,
    pub token: Option<Uuid>,
    pub lease: Option<i64>,
    pub error: Option<String>,
}

#[derive(Debug, Clone)]
struct Worker {
    token: Uuid,
    relay_uid: String,
    config: String,
    lease: i64,
}

#[derive(Default)]
pub struct Tables {
    pub rows: BTreeMap<Position, Row>,
    places: BTreeMap<Uuid, Position>,
    workers: BTreeMap<String, Worker>,
    lanes: BTreeMap<u8, (Option<String>, i64)>,
    inbox_lanes: BTreeMap<u8, (Option<String>, i64)>,
    next_sequence: i64,
    /// Laws that were broken, as the database itself sees it.
    pub breaches: Vec<String>,
}

pub struct Database {
    tables: Mutex<Tables>,
    began: Instant,
    /// Microseconds by which the database's clock was moved.
    pub skew_us: std::sync::atomic::AtomicI64,
    pub sabotage: Sabotage,
    pub lane_count: u8,
    /// False: there are no lane tables.
    pub has_lanes: bool,
}

pub fn lane_of(key: Option<&str>, parent: Option<Uuid>, id: Uuid, lane_count: u8) -> u8 {
    let bytes = match (key.filter(|key| !key.is_empty()), parent) {
        (Some(key), _) => key.as_bytes().to_vec(),
        (None, Some(parent)) => parent.as_bytes().to_vec(),
        (None, None) => id.as_bytes().to_vec(),
    };
    let hash = bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3));
    u8::try_from((hash >> 32) % u64::from(lane_count)).unwrap()
}

fn is_as_read(row: &Row, stamp: &Stamp) -> bool {
    row.state == State::Pending && row.attempt == stamp.attempt && row.scheduled_at == stamp.scheduled_at
}

/// Whose rows of its key a row waits for, beside those without a destination: the routes of `world.rs`.
fn target(row: &Row) -> Option<&str> {
    row.destination.as_deref().or(match row.topic.split('.').next() {
        Some("a") => Some("east"),
        Some("b") => Some("south"),
        _ => None,
    })
}

impl Database {
    pub fn new(lane_count: u8, has_lanes: bool, sabotage: Sabotage) -> Arc<Self> {
        Arc::new(Self {
            tables: Mutex::new(Tables::default()),
            began: Instant::now(),
            skew_us: 0.into(),
            sabotage,
            lane_count,
            has_lanes,
        })
    }

    pub fn now(&self) -> i64 {
        let elapsed = i64::try_from(self.began.elapsed().as_micros()).unwrap();
        1_700_000_000_000_000 + elapsed + self.skew_us.load(std::sync::atomic::Ordering::SeqCst)
    }

    pub fn lock(&self) -> MutexGuard<'_, Tables> {
        self.tables.lock().unwrap()
    }

    pub fn draw_sequence(&self) -> i64 {
        let mut tables = self.lock();
        tables.next_sequence += 1;
        tables.next_sequence
    }

    pub fn commit(&self, rows: Vec<Row>) {
        let mut tables = self.lock();
        for row in rows {
            tables.add(row);
        }
    }

    fn lane(&self, row: &Row) -> u8 {
        lane_of(row.key.as_deref(), row.parent_id, row.id, self.lane_count)
    }

    /// Without lanes the token of each row is the only fence.
    fn fence(&self, tables: &Tables, fence: &Fence) -> Result<(), Fault> {
        let now = self.now();
        if !self.has_lanes {
            return Ok(());
        }
        match tables.workers.get(&fence.worker) {
            Some(worker) if worker.token == fence.token && worker.lease > now => Ok(()),
            _ => Err(Fault::fenced("no such registration, or its lease has ended")),
        }
    }

    // ---- outbox ----

    pub fn poll(&self, fence: &Fence, settles: &[Settle], read: Option<&Read>) -> Result<Polled, Fault> {
        let now = self.now();
        let mut tables = self.lock();
        let standing = self.fence(&tables, fence);
        if self.sabotage != Sabotage::UnfencedSettle {
            standing.clone()?;
        }
        let mut polled = Polled::default();
        let mut settled = Vec::new();
        for settle in settles {
            settled.push(settle.position.id);
            if !self.settle(&mut tables, fence, settle, now) {
                polled.lost.push(settle.position.id);
            } else if standing.is_err() {
                tables.breaches.push(format!("{} was settled by a worker without a lease", settle.position.id));
            }
        }
        if let Some(read) = read {
            self.read(&tables, read, &settled, now, &mut polled);
        }
        Ok(polled)
    }

    fn settle(&self, tables: &mut Tables, fence: &Fence, settle: &Settle, now: i64) -> bool {
        let Some(row) = tables.find(settle.position.id) else { return false };
        if !self.holds(row, &settle.stamp, fence) {
            return false;
        }
        let (attempt, error) = (row.attempt, row.error.take());
        row.error = error;
        row.token = None;
        row.lease = None;
        match &settle.outcome {
            Outcome::Sent => {
                row.state = State::Sent;
                row.crashes = 0;
            }
            Outcome::Retry { delay_us, error } => {
                row.state = State::Pending;
                row.attempt = attempt + 1;
                row.scheduled_at = now + delay_us;
                row.crashes = 0;
                row.error = Some(error.clone());
            }
            Outcome::Dead { error, counted } => {
                row.state = State::Dead;
                row.attempt = attempt + i32::from(*counted);
                row.error = Some(error.clone());
            }
            Outcome::Release => row.state = State::Pending,
        }
        true
    }

    fn holds(&self, row: &Row, stamp: &Stamp, fence: &Fence) -> bool {
        if self.sabotage == Sabotage::SettleIgnoresReplay && !stamp.marked {
            return row.state == State::Pending;
        }
        if stamp.marked {
            let is_live = self.has_lanes || row.lease.is_some_and(|lease| lease > self.now());
            row.state == State::Processing && row.token == Some(fence.token) && is_live
        } else {
            is_as_read(row, stamp)
        }
    }

    fn read(&self, tables: &Tables, read: &Read, settled: &[Uuid], now: i64, polled: &mut Polled) {
        let heads = self.heads(tables, Sabotage::ClaimWithoutHeadRule);
        let is_free = |row: &&Row| {
            row.state == State::Pending
                && heads.as_ref().is_none_or(|heads| heads.contains(&row.id))
                && read.lanes.contains(self.lane(row))
                && !read.exclude.contains(&row.id)
                && !settled.contains(&row.id)
        };
        let is_omitted = |row: &Row| match &row.destination {
            Some(destination) => read.omit_destinations.contains(destination),
            None => read.omit_topics.contains(&row.topic),
        };
        let pending = || tables.rows.values().filter(is_free);
        let behind = |row: &&Row, after: Option<Position>| after.is_none_or(|after| row.position() > after);

        let walk_after = read.walk_after.filter(|_| self.sabotage != Sabotage::HeldHidesFree);
        let walk: Vec<&Row> = pending().filter(|row| behind(row, walk_after)).take(read.walk_limit as usize).collect();
        polled.walk_ended = walk.len() < read.walk_limit as usize;
        polled.walk = walk.iter().map(|row| self.out(row, now, !is_omitted(row))).collect();
        let lap: Vec<&Row> = pending()
            .filter(|row| behind(row, read.lap_after) && read.walk_after.is_some_and(|end| row.position() <= end))
            .take(read.lap_limit as usize)
            .collect();
        polled.lap_ended = lap.len() < read.lap_limit as usize;
        if self.sabotage != Sabotage::NoLap {
            polled.lap = lap.iter().map(|row| self.out(row, now, false)).collect();
        }
        for question in &read.keys {
            let rows =
                pending().filter(|row| row.key.as_deref() == Some(&question.key) && row.sequence >= question.from);
            polled.keys.extend(rows.take(read.key_limit as usize).map(|row| self.out(row, now, true)));
        }
        for question in &read.destinations {
            let rows = pending().filter(|row| {
                row.key.is_none()
                    && behind(row, question.after)
                    && match &row.destination {
                        Some(destination) => *destination == question.destination,
                        None => question.topics.contains(&row.topic),
                    }
            });
            polled.destinations.extend(rows.take(question.limit as usize).map(|row| self.out(row, now, true)));
        }
        if read.later_limit > 0 && self.sabotage != Sabotage::NoLap {
            let mut later: Vec<&Row> =
                pending().filter(|row| row.scheduled_at > row.created_at && !is_omitted(row)).collect();
            later.sort_by_key(|row| row.scheduled_at);
            polled.next_due_in_us = later.iter().map(|row| row.scheduled_at - now).find(|due| *due > 0);
            let due = later.into_iter().filter(|row| row.scheduled_at <= now);
            polled.later = due.take(read.later_limit as usize).map(|row| self.out(row, now, true)).collect();
        }
    }

    /// The only rows that may be seen and claimed without lanes: the first pending one of each key of which nothing is claimed, and those
    /// without a key. `None` = all of them: there are lanes, or the bug was put in.
    fn heads(&self, tables: &Tables, bug: Sabotage) -> Option<HashSet<Uuid>> {
        if self.has_lanes || [Sabotage::ClaimWithoutHeadRule, bug].contains(&self.sabotage) {
            return None;
        }
        let in_state = |state| tables.rows.values().filter(move |row| row.state == state);
        // The destinations of the unfinished rows of each key so far; `None` = of a row without one.
        let mut unfinished: HashMap<&str, HashSet<Option<&str>>> = HashMap::new();
        for row in in_state(State::Processing) {
            if let Some(key) = row.key.as_deref() {
                unfinished.entry(key).or_default().insert(row.destination.as_deref());
            }
        }
        let heads = in_state(State::Pending).filter(|row| {
            let Some(key) = row.key.as_deref().filter(|key| !key.is_empty()) else { return true };
            let before = unfinished.entry(key).or_default();
            let waits = before.contains(&None) || target(row).is_some_and(|target| before.contains(&Some(target)));
            before.insert(row.destination.as_deref());
            !waits
        });
        Some(heads.map(|row| row.id).collect())
    }

    fn out(&self, row: &Row, now: i64, loaded: bool) -> OutboxRow {
        OutboxRow {
            id: row.id,
            sequence: row.sequence,
            lane: self.lane(row),
            topic: row.topic.clone(),
            key: row.key.clone(),
            destination: row.destination.clone(),
            parent_id: row.parent_id,
            payload: if loaded { Payload::Loaded(Bytes::from_static(b"{}")) } else { Payload::Omitted },
            headers: "{}".to_owned(),
            aggregate_type: None,
            trace_parent: None,
            attempt: row.attempt,
            max_attempts: row.max_attempts,
            crashes: row.crashes,
            scheduled_at: row.scheduled_at,
            due_in_us: row.scheduled_at - now,
            created_at_us: row.created_at,
        }
    }

    pub fn mark(&self, fence: &Fence, rows: &[(Position, Stamp)], lease_ms: u64) -> Result<Vec<Uuid>, Fault> {
        let now = self.now();
        let mut tables = self.lock();
        self.fence(&tables, fence)?;
        let lease = tables
            .workers
            .get(&fence.worker)
            .map_or(now + i64::try_from(lease_ms * 1000).unwrap(), |worker| worker.lease);
        let heads = self.heads(&tables, Sabotage::HeadRuleOnlyRead);
        let mut marked = Vec::new();
        for (position, stamp) in rows {
            let Some(row) = tables.find(position.id) else { continue };
            let is_head = heads.as_ref().is_none_or(|heads| heads.contains(&row.id));
            if is_head && is_as_read(row, stamp) {
                row.state = State::Processing;
                row.token = Some(fence.token);
                row.lease = Some(lease);
                marked.push(row.id);
            } else if self.holds(row, &Stamp { marked: true, ..*stamp }, fence) {
                marked.push(row.id);
            }
        }
        Ok(marked)
    }

    pub fn recover(&self, fence: &Fence, lanes: LaneSet, max_crashes: i32) -> Result<Recovered, Fault> {
        let now = self.now();
        let mut tables = self.lock();
        self.fence(&tables, fence)?;
        let mut recovered = Recovered::default();
        let lane_count = self.lane_count;
        let tables = &mut *tables;
        let living: Vec<Uuid> =
            tables.workers.values().filter(|worker| worker.lease > now).map(|worker| worker.token).collect();
        for row in tables.rows.values_mut() {
            let lane = lane_of(row.key.as_deref(), row.parent_id, row.id, lane_count);
            let ended = row.lease.is_none_or(|lease| lease <= now);
            if row.state == State::Processing && !ended && row.token != Some(fence.token) && lanes.contains(lane) {
                recovered.unexpired += 1;
                recovered.waiting.insert(lane);
            }
            if row.state == State::Processing && ended && lanes.contains(lane) {
                if row.token.is_some_and(|token| living.contains(&token)) {
                    tables.breaches.push(format!("{} was taken from a worker that lives", row.id));
                }
                row.crashes += 1;
                row.token = None;
                row.lease = None;
                if row.crashes >= max_crashes {
                    row.state = State::Dead;
                    row.error = Some("crashes: its lease ended that often".to_owned());
                    recovered.dead.push(Buried { id: row.id, topic: row.topic.clone(), ..Buried::default() });
                } else {
                    row.state = State::Pending;
                    recovered.pending += 1;
                }
            }
        }
        Ok(recovered)
    }

    pub fn expand(&self, fence: &Fence, parents: &[Expansion]) -> Result<Vec<Uuid>, Fault> {
        let mut tables = self.lock();
        self.fence(&tables, fence)?;
        let mut lost = Vec::new();
        for expansion in parents {
            let parent = match tables.find(expansion.parent.id) {
                Some(row) if self.holds(row, &expansion.stamp, fence) => {
                    row.state = State::Sent;
                    row.token = None;
                    row.lease = None;
                    row.clone()
                }
                _ => {
                    lost.push(expansion.parent.id);
                    continue;
                }
            };
            for child in &expansion.children {
                tables.add(Row {
                    id: child.id,
                    destination: Some(child.destination.clone()),
                    parent_id: Some(parent.id),
                    state: State::Pending,
                    attempt: 0,
                    crashes: 0,
                    ..parent.clone()
                });
            }
        }
        Ok(lost)
    }

    // ---- lanes ----

    pub fn register(&self, new: &Registration) {
        if !self.has_lanes {
            return;
        }
        let now = self.now();
        let mut tables = self.lock();
        let tables = &mut *tables;
        let named = |name: &String| {
            tables.lanes.values().chain(tables.inbox_lanes.values()).any(|(owner, _)| owner.as_ref() == Some(name))
        };
        tables.workers.retain(|name, worker| worker.lease > now || named(name));
        let lease = now + i64::try_from(new.lease_ms * 1000).unwrap();
        let worker =
            Worker { token: new.fence.token, relay_uid: new.relay_uid.clone(), config: new.config.clone(), lease };
        tables.workers.insert(new.fence.worker.clone(), worker);
    }

    pub fn renew(&self, fence: &Fence, lease_ms: u64) -> Result<(), Fault> {
        let now = self.now();
        let mut tables = self.lock();
        self.fence(&tables, fence)?;
        let lease = now + i64::try_from(lease_ms * 1000).unwrap();
        if let Some(worker) = tables.workers.get_mut(&fence.worker) {
            worker.lease = lease;
        }
        if self.sabotage != Sabotage::RowLeaseNotRenewed {
            let is_live = |row: &Row| self.has_lanes || row.lease.is_some_and(|lease| lease > now);
            for row in tables.rows.values_mut().filter(|row| row.token == Some(fence.token) && is_live(row)) {
                row.lease = Some(lease);
            }
        }
        Ok(())
    }

    /// The time by which a takeover judges leases. A renewal that it has not seen makes a lease look older than it is.
    fn takeover_time(&self) -> i64 {
        self.now() + if self.sabotage == Sabotage::TakeoverReadsEarly { 4_500_000 } else { 0 }
    }

    pub fn survey(&self, scope: Scope) -> Survey {
        let judged_at = self.takeover_time();
        let tables = self.lock();
        let lanes = tables.lanes_of(scope).iter().map(|(lane, (worker, term))| LaneRow {
            lane: *lane,
            worker: worker.clone(),
            term: *term,
        });
        let workers = tables.workers.iter().map(|(name, worker)| WorkerRow {
            worker: name.clone(),
            relay_uid: worker.relay_uid.clone(),
            config: worker.config.clone(),
            lane_hash: "sim".to_owned(),
            live: worker.lease > judged_at,
        });
        Survey { workers: workers.collect(), lanes: lanes.collect() }
    }

    pub fn take(&self, fence: &Fence, scope: Scope, wanted: &[Take]) -> Result<LaneSet, Fault> {
        let judged_at = self.takeover_time();
        let mut tables = self.lock();
        self.fence(&tables, fence)?;
        let mut taken = LaneSet::EMPTY;
        for take in wanted {
            let known = tables.lanes_of(scope).get(&take.lane).cloned().unwrap_or((None, 0));
            if known != (take.owner.clone(), take.term) {
                continue;
            }
            let is_dead = take
                .owner
                .as_ref()
                .is_none_or(|owner| tables.workers.get(owner).is_none_or(|worker| worker.lease <= judged_at));
            if is_dead {
                tables.lanes_of_mut(scope).insert(take.lane, (Some(fence.worker.clone()), take.term + 1));
                taken.insert(take.lane);
            }
        }
        Ok(taken)
    }

    pub fn give(&self, fence: &Fence, scope: Scope, lanes: LaneSet, to: Option<&str>) -> Result<LaneSet, Fault> {
        let now = self.now();
        let mut tables = self.lock();
        self.fence(&tables, fence)?;
        if let Some(to) = to
            && tables.workers.get(to).is_none_or(|worker| worker.lease <= now)
        {
            return Ok(LaneSet::EMPTY);
        }
        let mut given = LaneSet::EMPTY;
        for lane in lanes.iter() {
            if let Some((owner, term)) = tables.lanes_of_mut(scope).get_mut(&lane)
                && owner.as_deref() == Some(fence.worker.as_str())
            {
                *owner = to.map(str::to_owned);
                *term += 1;
                given.insert(lane);
            }
        }
        Ok(given)
    }

    pub fn retire(&self, fence: &Fence, careful: LaneSet) -> Result<(), Fault> {
        let now = self.now();
        let mut tables = self.lock();
        self.fence(&tables, fence)?;
        let is_live = |row: &Row| self.has_lanes || row.lease.is_some_and(|lease| lease > now);
        for row in tables.rows.values_mut().filter(|row| row.token == Some(fence.token) && is_live(row)) {
            row.state = State::Pending;
            row.token = None;
            row.lease = None;
        }
        for scope in [Scope::Outbox, Scope::Inbox] {
            for (lane, (owner, term)) in tables.lanes_of_mut(scope).iter_mut() {
                let keeps = scope == Scope::Outbox && careful.contains(*lane);
                if owner.as_deref() == Some(fence.worker.as_str()) && !keeps {
                    *owner = None;
                    *term += 1;
                }
            }
        }
        tables.workers.remove(&fence.worker);
        Ok(())
    }
}

impl Row {
    pub fn position(&self) -> Position {
        Position { sequence: self.sequence, id: self.id }
    }
}

impl Tables {
    fn add(&mut self, row: Row) {
        self.places.insert(row.id, row.position());
        self.rows.insert(row.position(), row);
    }

    pub fn find(&mut self, id: Uuid) -> Option<&mut Row> {
        let place = self.places.get(&id)?;
        self.rows.get_mut(place)
    }

    pub fn remove(&mut self, id: Uuid) -> Option<Row> {
        self.rows.remove(&self.places.remove(&id)?)
    }

    fn lanes_of(&self, scope: Scope) -> &BTreeMap<u8, (Option<String>, i64)> {
        match scope {
            Scope::Outbox => &self.lanes,
            Scope::Inbox => &self.inbox_lanes,
        }
    }

    fn lanes_of_mut(&mut self, scope: Scope) -> &mut BTreeMap<u8, (Option<String>, i64)> {
        match scope {
            Scope::Outbox => &mut self.lanes,
            Scope::Inbox => &mut self.inbox_lanes,
        }
    }
}

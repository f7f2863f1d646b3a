//! A worker in a few lines: registers, takes every lane, polls with the cursor of the engine.

use std::collections::HashSet;

use queuebox_core::{
    LaneSet, Uuid,
    message::{OutboxRow, Position},
    ports::{
        Fence, Lanes, Outbox, Scope,
        lanes::{Registration, Take},
        outbox::{Outcome, Polled, Read, Settle},
    },
};
use queuebox_postgres::PostgresStore;

pub fn fence() -> Fence {
    Fence { worker: format!("worker-{}", Uuid::new_v4()), token: Uuid::new_v4() }
}

pub async fn register(store: &PostgresStore) -> Fence {
    let fence = fence();
    let new = Registration { fence: fence.clone(), relay_uid: "relay".into(), config: "1/a".into(), lease_ms: 600_000 };
    store.register(&new).await.unwrap();
    fence
}

/// A worker that owns every lane of the outbox.
pub async fn owner(store: &PostgresStore) -> Fence {
    let fence = register(store).await;
    let survey = store.survey(Scope::Outbox).await.unwrap();
    let wanted: Vec<Take> = (0..64)
        .map(|lane| {
            let row = survey.lanes.iter().find(|row| row.lane == lane);
            Take { lane, owner: row.and_then(|row| row.worker.clone()), term: row.map_or(0, |row| row.term) }
        })
        .collect();
    assert_eq!(store.take(&fence, Scope::Outbox, &wanted).await.unwrap().len(), 64);
    fence
}

pub fn read(walk_limit: u32) -> Read {
    Read {
        lanes: LaneSet::first(64),
        walk_limit,
        later_limit: walk_limit,
        bytes_max: 64 << 20,
        payload_max: 16 << 20,
        ..Read::default()
    }
}

pub fn sent(row: &OutboxRow) -> Settle {
    Settle { position: row.position(), stamp: row.stamp(), outcome: Outcome::Sent }
}

/// Walks on behind its place and looks behind it for what committed late; sends whatever it finds.
pub struct Cursor {
    pub fence: Fence,
    pub after: Option<Position>,
    pub batch: u32,
    pub settles: Vec<Settle>,
    pub sent: HashSet<Uuid>,
}

impl Cursor {
    pub fn new(fence: Fence, batch: u32) -> Self {
        Self { fence, after: None, batch, settles: Vec::new(), sent: HashSet::new() }
    }

    /// One poll; returns how many rows it found.
    pub async fn step(&mut self, store: &PostgresStore) -> usize {
        let read = Read {
            walk_after: self.after,
            lap_after: None,
            lap_limit: self.batch * 2,
            later_limit: 0,
            ..read(self.batch)
        };
        let polled: Polled = store.poll(&self.fence, &self.settles, Some(&read)).await.unwrap();
        assert!(polled.lost.is_empty(), "nobody else settles");
        if let Some(last) = polled.walk.last() {
            self.after = Some(last.position());
        }
        self.settles.clear();
        for row in polled.lap.iter().chain(&polled.walk) {
            assert!(self.sent.insert(row.id), "read again after its settle: {}", row.id);
            self.settles.push(sent(row));
        }
        self.settles.len()
    }
}

//! A ledger in memory, with the laws of its port, for the tests of this crate.

use std::{
    collections::HashSet,
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use async_trait::async_trait;
use queuebox_core::{
    Fault, Uuid,
    message::{Consumption, State},
    ports::{
        Ledger, Scope,
        ledger::{Direction, LedgerCursor, LedgerEntry, LedgerFilter, LedgerRow, Pruned},
        outbox::PruneRule,
    },
};

/// 2026-01-01T00:00:00Z.
const EPOCH_US: i64 = 1_767_225_600_000_000;

/// Rows of both tables.
#[derive(Default)]
pub struct Memory {
    pub rows: Mutex<Vec<(Scope, LedgerEntry)>>,
    /// Sizes of the batches that were moved or deleted.
    pub batches: Mutex<Vec<usize>>,
    /// The statement of this number, counted from 1, fails; 0 = none.
    pub fails_at: AtomicUsize,
}

/// An outbox row; the number is its id, its sequence, and its second since [`EPOCH_US`].
pub fn outbox_row(number: u32, state: State, topic: &str) -> LedgerRow {
    let created_at_us = EPOCH_US + i64::from(number) * 1_000_000;
    LedgerRow {
        id: id(number),
        state,
        topic: Some(topic.to_owned()),
        key: None,
        destination: None,
        parent_id: None,
        sequence: Some(number.into()),
        max_attempts: Some(5),
        source: None,
        idempotency_key: None,
        event_type: None,
        consumption: None,
        attempt: 5,
        crashes: 0,
        last_error: (state == State::Dead).then(|| "attempts: HTTP 500".to_owned()),
        created_at_us,
        scheduled_at_us: created_at_us,
        finished_at_us: None,
        cursor: LedgerCursor { created_at: created_at_us, id: id(number) },
    }
}

/// An inbox row, numbered as [`outbox_row`].
pub fn inbox_row(number: u32, state: State, source: &str, code: &str) -> LedgerRow {
    LedgerRow {
        topic: None,
        sequence: None,
        max_attempts: None,
        source: Some(source.to_owned()),
        idempotency_key: Some(format!("k{number}")),
        consumption: Some(Consumption::Push),
        last_error: Some(format!("{code}: said so")),
        ..outbox_row(number, state, "")
    }
}

pub fn id(number: u32) -> Uuid {
    Uuid::from_u128(number.into())
}

impl Memory {
    pub fn of(table: Scope, rows: impl IntoIterator<Item = LedgerRow>) -> Self {
        let memory = Self::default();
        rows.into_iter().for_each(|row| memory.add(table, row));
        memory
    }

    pub fn add(&self, table: Scope, row: LedgerRow) {
        let entry = LedgerEntry { row, payload: r#"{"n":1.10}"#.to_owned(), headers: "{}".to_owned() };
        self.rows.lock().unwrap().push((table, entry));
    }

    pub fn states(&self) -> Vec<State> {
        self.rows.lock().unwrap().iter().map(|(_, entry)| entry.row.state).collect()
    }

    fn writes(&self, rows: usize) -> Result<(), Fault> {
        assert!(rows <= 1_000, "a batch of {rows}");
        let mut batches = self.batches.lock().unwrap();
        batches.push(rows);
        if batches.len() == self.fails_at.load(Ordering::SeqCst) {
            return Err(Fault::transient("gone", "postgres://app:canary-7731@db:5432/shop: connection closed"));
        }
        Ok(())
    }
}

fn meets(filter: &LedgerFilter, row: &LedgerRow) -> bool {
    fn any<T: PartialEq>(list: &[T], found: Option<&T>) -> bool {
        list.is_empty() || found.is_some_and(|found| list.contains(found))
    }
    fn same<T: PartialEq>(wanted: Option<&T>, found: Option<&T>) -> bool {
        wanted.is_none() || wanted == found
    }
    any(&filter.states, Some(&row.state))
        && any(&filter.ids, Some(&row.id))
        && any(&filter.topics, row.topic.as_ref())
        && any(&filter.sources, row.source.as_ref())
        && same(filter.key.as_ref(), row.key.as_ref())
        && same(filter.event_type.as_ref(), row.event_type.as_ref())
        && same(filter.consumption.as_ref(), row.consumption.as_ref())
        && same(filter.parent_id.as_ref(), row.parent_id.as_ref())
        && filter
            .code
            .as_ref()
            .is_none_or(|code| row.last_error.as_ref().is_some_and(|error| error.starts_with(&format!("{code}:"))))
        && filter.created_after_us.is_none_or(|after| row.created_at_us > after)
        && filter.created_before_us.is_none_or(|before| row.created_at_us < before)
}

#[async_trait]
impl Ledger for Memory {
    async fn page(
        &self,
        table: Scope,
        filter: &LedgerFilter,
        direction: Direction,
        after: Option<LedgerCursor>,
        limit: u32,
    ) -> Result<Vec<LedgerRow>, Fault> {
        let order = |cursor: LedgerCursor| (cursor.created_at, cursor.id);
        let rows = self.rows.lock().unwrap();
        let mut found: Vec<LedgerRow> = rows
            .iter()
            .filter(|(of, entry)| *of == table && meets(filter, &entry.row))
            .map(|(_, entry)| entry.row.clone())
            .filter(|row| match (after, direction) {
                (None, _) => true,
                (Some(after), Direction::NewestFirst) => order(row.cursor) < order(after),
                (Some(after), Direction::OldestFirst) => order(row.cursor) > order(after),
            })
            .collect();
        found.sort_by_key(|row| order(row.cursor));
        if direction == Direction::NewestFirst {
            found.reverse();
        }
        found.truncate(limit as usize);
        Ok(found)
    }

    async fn entry(&self, table: Scope, id: Uuid) -> Result<Option<LedgerEntry>, Fault> {
        let rows = self.rows.lock().unwrap();
        Ok(rows.iter().find(|(of, entry)| *of == table && entry.row.id == id).map(|(_, entry)| entry.clone()))
    }

    async fn requeue(&self, table: Scope, ids: &[Uuid], states: &[State]) -> Result<Vec<Uuid>, Fault> {
        self.writes(ids.len())?;
        let ids: HashSet<&Uuid> = ids.iter().collect();
        let mut rows = self.rows.lock().unwrap();
        let parents: HashSet<Uuid> = rows.iter().filter_map(|(_, entry)| entry.row.parent_id).collect();
        let mut moved = Vec::new();
        for (_, entry) in rows.iter_mut().filter(|(of, _)| *of == table) {
            let row = &mut entry.row;
            if ids.contains(&row.id) && states.contains(&row.state) && !parents.contains(&row.id) {
                row.state = State::Pending;
                moved.push(row.id);
            }
        }
        Ok(moved)
    }

    async fn discard(&self, table: Scope, ids: &[Uuid]) -> Result<Vec<Uuid>, Fault> {
        self.writes(ids.len())?;
        let ids: HashSet<&Uuid> = ids.iter().collect();
        let mut gone = Vec::new();
        self.rows.lock().unwrap().retain(|(of, entry)| {
            let goes = *of == table && ids.contains(&entry.row.id) && entry.row.state == State::Dead;
            gone.extend(goes.then_some(entry.row.id));
            !goes
        });
        Ok(gone)
    }

    async fn prune(&self, _: Scope, _: State, _: PruneRule, _: u32) -> Result<Pruned, Fault> {
        unreachable!("retention is not part of this crate")
    }
}

//! The database of one test, spoken to in words of the contract instead of SQL.

use std::sync::Arc;

use queuebox_core::{
    LaneSet, Uuid,
    message::{Payload, Stamp, State},
    ports::{
        Fence, Scope, Store,
        lanes::{Registration, Survey, Take},
        outbox::{Outcome, Polled, Read, Settle},
    },
};

use super::{Setup, StoreHarness};

/// Lease of the workers of the suite: no test lasts as long.
pub const LEASE_MS: u64 = 600_000;

/// One test's database with a store that has passed its check.
pub struct World<H> {
    /// The backend.
    pub h: H,
    /// The store under test.
    pub store: Arc<dyn Store>,
}

/// An outbox row as an application inserts it.
#[derive(Debug, Clone)]
pub struct Insert {
    /// `id`.
    pub id: Uuid,
    /// `topic`.
    pub topic: String,
    /// `key`.
    pub key: Option<String>,
    /// `payload`.
    pub payload: String,
    /// Further columns and their SQL expressions.
    pub more: Vec<(&'static str, String)>,
}

impl Default for Insert {
    fn default() -> Self {
        Self { id: Uuid::new_v4(), topic: "t".into(), key: None, payload: r#"{"n": 1}"#.into(), more: Vec::new() }
    }
}

impl Insert {
    /// A row of `topic`.
    pub fn topic(topic: &str) -> Self {
        Self { topic: topic.into(), ..Self::default() }
    }

    /// A row of `key`.
    pub fn key(key: &str) -> Self {
        Self { key: Some(key.into()), ..Self::default() }
    }

    /// The same with a payload.
    #[must_use]
    pub fn payload(mut self, payload: impl Into<String>) -> Self {
        self.payload = payload.into();
        self
    }

    /// The same with a further column.
    #[must_use]
    pub fn with(mut self, column: &'static str, expression: impl Into<String>) -> Self {
        self.more.push((column, expression.into()));
        self
    }

    /// A JSON string of exactly `bytes` bytes, whatever the database does to spaces.
    #[must_use]
    pub fn payload_of(self, bytes: usize) -> Self {
        let text = format!("\"{}\"", "x".repeat(bytes - 2));
        self.payload(text)
    }
}

/// What stands in an outbox row.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct RowState {
    pub state: State,
    pub attempt: i32,
    pub max_attempts: i32,
    pub crashes: i32,
    pub last_error: Option<String>,
    pub claim_token: Option<Uuid>,
    pub claimed: bool,
    /// Microseconds until the lease ends.
    pub lease_in_us: Option<i64>,
    /// Microseconds until the row is due.
    pub due_in_us: i64,
    pub sequence: i64,
    pub destination: Option<String>,
    pub parent_id: Option<Uuid>,
}

impl RowState {
    /// All claim columns are null, as in every settled row.
    pub fn is_unclaimed(&self) -> bool {
        self.claim_token.is_none() && !self.claimed && self.lease_in_us.is_none()
    }
}

/// A read of all that is pending, within generous bounds.
pub fn everything() -> Read {
    Read {
        lanes: LaneSet::from_bits(u64::MAX),
        walk_limit: 5_000,
        later_limit: 1_000,
        bytes_max: 64 << 20,
        payload_max: 16 << 20,
        ..Read::default()
    }
}

impl<H: StoreHarness> World<H> {
    /// Tables of the newest version, the check passed.
    pub async fn start() -> Self {
        Self::start_with(Setup::default()).await
    }

    /// The same with a setup.
    pub async fn start_with(setup: Setup) -> Self {
        let h = H::start(setup).await;
        let store = h.store().await;
        if !setup.empty {
            store.check().await.unwrap();
        }
        Self { h, store }
    }

    /// Another process on the same database.
    pub async fn other_process(&self) -> Arc<dyn Store> {
        let store = self.h.store().await;
        store.check().await.unwrap();
        store
    }

    /// A registered worker of the Relay `relay`.
    pub async fn worker(&self, relay: &str) -> Fence {
        let fence = Fence { worker: format!("worker-{}", Uuid::new_v4()), token: Uuid::new_v4() };
        let new =
            Registration { fence: fence.clone(), relay_uid: relay.into(), config: "1/abc".into(), lease_ms: LEASE_MS };
        self.store.register(&new).await.unwrap();
        fence
    }

    /// A registered worker that owns all lanes of both tables.
    pub async fn owner(&self) -> Fence {
        let fence = self.worker("relay").await;
        self.take_all(&fence, Scope::Outbox).await;
        self.take_all(&fence, Scope::Inbox).await;
        fence
    }

    /// Takes each lane of `scope` as the survey shows it; returns what was got.
    pub async fn take_all(&self, fence: &Fence, scope: Scope) -> LaneSet {
        let wanted = self.wishes(scope).await;
        self.store.take(fence, scope, &wanted).await.unwrap()
    }

    /// A wish for each lane, with its owner and term as the survey shows them.
    pub async fn wishes(&self, scope: Scope) -> Vec<Take> {
        let survey = self.store.survey(scope).await.unwrap();
        self.all_lanes().iter().map(|lane| wish(&survey, lane)).collect()
    }

    /// Every lane of the store.
    pub fn all_lanes(&self) -> LaneSet {
        LaneSet::first(self.store.lane_count())
    }

    /// Ends the lease of a worker, as time would.
    pub async fn end_lease(&self, fence: &Fence) {
        let sql = format!(
            "UPDATE {} SET {} = {} WHERE {} = {}",
            self.h.table("queuebox_worker"),
            self.h.column("queuebox_worker", "lease_expires_at"),
            self.h.now_plus(-1_000_000),
            self.h.column("queuebox_worker", "worker"),
            literal(&fence.worker),
        );
        assert_eq!(self.h.execute(&sql).await, 1, "the worker has a row");
    }

    /// The statement that inserts `row`.
    pub fn insert_sql(&self, row: &Insert) -> String {
        let mut columns = vec![("id", literal(&row.id.to_string())), ("topic", literal(&row.topic))];
        columns.push(("payload", literal(&row.payload)));
        if let Some(key) = &row.key {
            columns.push(("key", literal(key)));
        }
        columns.extend(row.more.iter().map(|(name, value)| (*name, value.clone())));
        let names: Vec<_> = columns.iter().map(|(name, _)| self.h.column("outbox", name)).collect();
        let values: Vec<_> = columns.into_iter().map(|(_, value)| value).collect();
        format!("INSERT INTO {} ({}) VALUES ({})", self.h.table("outbox"), names.join(", "), values.join(", "))
    }

    /// Inserts a row as an application does, and returns its id.
    pub async fn insert(&self, row: Insert) -> Uuid {
        assert_eq!(self.h.execute(&self.insert_sql(&row)).await, 1);
        row.id
    }

    /// Inserts rows in one transaction.
    pub async fn insert_all(&self, rows: impl IntoIterator<Item = Insert>) -> Vec<Uuid> {
        let mut ids = Vec::new();
        let mut open = self.h.begin().await;
        for row in rows {
            open.execute(&self.insert_sql(&row)).await;
            ids.push(row.id);
        }
        open.commit().await;
        ids
    }

    /// Sets columns of one row by hand.
    pub async fn edit(&self, table: &str, id: Uuid, columns: &[(&str, &str)]) {
        let sets: Vec<_> =
            columns.iter().map(|(name, value)| format!("{} = {value}", self.h.column(table, name))).collect();
        let sql = format!(
            "UPDATE {} SET {} WHERE {} = {}",
            self.h.table(table),
            sets.join(", "),
            self.h.column(table, "id"),
            literal(&id.to_string())
        );
        assert_eq!(self.h.execute(&sql).await, 1, "{table} has a row {id}");
    }

    /// Deletes one row by hand.
    pub async fn delete(&self, table: &str, id: Uuid) {
        let sql = format!(
            "DELETE FROM {} WHERE {} = {}",
            self.h.table(table),
            self.h.column(table, "id"),
            literal(&id.to_string())
        );
        assert_eq!(self.h.execute(&sql).await, 1, "{table} has a row {id}");
    }

    /// Number of rows of a table.
    pub async fn count(&self, table: &str) -> usize {
        let sql = format!("SELECT {} FROM {}", self.h.text("count(*)"), self.h.table(table));
        self.h.query(&sql).await[0][0].as_deref().unwrap().parse().unwrap()
    }

    /// Columns of one row as text; `None` = there is no such row.
    pub async fn columns(&self, table: &str, id: Uuid, names: &[&str]) -> Option<Vec<Option<String>>> {
        let list: Vec<_> = names.iter().map(|name| self.h.text(&self.h.column(table, name))).collect();
        let sql = format!(
            "SELECT {} FROM {} WHERE {} = {}",
            list.join(", "),
            self.h.table(table),
            self.h.column(table, "id"),
            literal(&id.to_string())
        );
        self.h.query(&sql).await.pop()
    }

    /// Microseconds from now until the time in a column.
    pub async fn us_until(&self, table: &str, id: Uuid, column: &str) -> Option<i64> {
        let sql = format!(
            "SELECT {} FROM {} WHERE {} = {}",
            self.h.text(&self.h.us_until(&self.h.column(table, column))),
            self.h.table(table),
            self.h.column(table, "id"),
            literal(&id.to_string())
        );
        let rows = self.h.query(&sql).await;
        rows[0][0].as_deref().map(|us| us.parse().unwrap())
    }

    /// The outbox row as it stands, if it is there.
    pub async fn find(&self, id: Uuid) -> Option<RowState> {
        let names = [
            "state",
            "attempt",
            "max_attempts",
            "crashes",
            "last_error",
            "claim_token",
            "claimed_at",
            "sequence",
            "destination",
            "parent_id",
        ];
        let mut row = self.columns("outbox", id, &names).await?;
        let lease_in_us = self.us_until("outbox", id, "lease_expires_at").await;
        let due_in_us = self.us_until("outbox", id, "scheduled_at").await.unwrap();
        let number = |text: &Option<String>| text.as_deref().unwrap().parse::<i64>().unwrap();
        Some(RowState {
            state: State::parse(row[0].as_deref().unwrap()).unwrap(),
            attempt: number(&row[1]) as i32,
            max_attempts: number(&row[2]) as i32,
            crashes: number(&row[3]) as i32,
            last_error: row[4].take(),
            claim_token: row[5].as_deref().map(|token| token.parse().unwrap()),
            claimed: row[6].is_some(),
            lease_in_us,
            due_in_us,
            sequence: number(&row[7]),
            destination: row[8].take(),
            parent_id: row[9].as_deref().map(|id| id.parse().unwrap()),
        })
    }

    /// The outbox row as it stands.
    pub async fn row(&self, id: Uuid) -> RowState {
        self.find(id).await.unwrap_or_else(|| panic!("no outbox row {id}"))
    }

    /// Reads everything that is pending.
    pub async fn read(&self, fence: &Fence) -> Polled {
        self.store.poll(fence, &[], Some(&everything())).await.unwrap()
    }

    /// Reads one pending row as the walk shows it.
    pub async fn read_row(&self, fence: &Fence, id: Uuid) -> queuebox_core::message::OutboxRow {
        let polled = self.read(fence).await;
        polled.walk.into_iter().find(|row| row.id == id).unwrap_or_else(|| panic!("the walk has no row {id}"))
    }

    /// A settle of the row as it is read now.
    pub async fn settle_of(&self, fence: &Fence, id: Uuid, outcome: Outcome) -> Settle {
        let row = self.read_row(fence, id).await;
        Settle { position: row.position(), stamp: row.stamp(), outcome }
    }

    /// Settles, and returns the ids that were lost.
    pub async fn settle(&self, fence: &Fence, settles: &[Settle]) -> Vec<Uuid> {
        self.store.poll(fence, settles, None).await.unwrap().lost
    }

    /// Marks the row `processing`; returns its settle with `outcome`.
    pub async fn mark(&self, fence: &Fence, id: Uuid, outcome: Outcome) -> Settle {
        let row = self.read_row(fence, id).await;
        let marked = self.store.mark(fence, &[(row.position(), row.stamp())], LEASE_MS).await.unwrap();
        assert_eq!(marked, [id]);
        Settle { position: row.position(), stamp: Stamp { marked: true, ..row.stamp() }, outcome }
    }
}

fn wish(survey: &Survey, lane: u8) -> Take {
    let row = survey.lanes.iter().find(|row| row.lane == lane);
    Take { lane, owner: row.and_then(|row| row.worker.clone()), term: row.map_or(0, |row| row.term) }
}

/// A text literal. The suite writes no backslash.
pub fn literal(text: &str) -> String {
    assert!(!text.contains('\\'), "not the same in every dialect");
    format!("'{}'", text.replace('\'', "''"))
}

/// The ids of rows, in order.
pub fn ids(rows: &[queuebox_core::message::OutboxRow]) -> Vec<Uuid> {
    rows.iter().map(|row| row.id).collect()
}

/// The loaded payload as JSON.
pub fn json(payload: &Payload) -> serde_json::Value {
    match payload {
        Payload::Loaded(bytes) => serde_json::from_slice(bytes).unwrap(),
        other => panic!("not loaded: {other:?}"),
    }
}

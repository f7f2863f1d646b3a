//! Settling, marking, recovering and expanding outbox rows (contract 3.1, 5.1, 5.4, 7.2).

use async_trait::async_trait;
use queuebox_core::{
    Fault, LaneSet, Uuid,
    message::{EXPANDED, Position, Stamp},
    ports::{
        Fence, Outbox,
        outbox::{Buried, Expansion, OutboxBacklog, Outcome, Polled, Read, Recovered, Settle},
    },
};
use serde_json::{Value, json};
use sqlx::{Row as _, sqlite::SqliteRow};

use crate::{OnSent, SqliteStore, classify, lanes::LANE, read::id_list, session::Session, ticks};

/// Rows of the array `?1` of `[id, attempt, scheduled_at, marked, …]` that are still as they were read; `?2` is our token.
/// CROSS JOIN keeps the order: the array outside, each row sought by its id.
macro_rules! as_read {
    () => {
        "json_each(?1) AS j CROSS JOIN {outbox} AS r ON r.{o.id} = j.value ->> 0
         WHERE CASE WHEN j.value ->> 3 THEN r.{o.state} = 'processing' AND r.{o.claim_token} = ?2
                    ELSE r.{o.state} = 'pending' END
           AND r.{o.attempt} = j.value ->> 1 AND r.{o.scheduled_at} = j.value ->> 2"
    };
}

macro_rules! unclaimed {
    () => {
        "{o.updated_at} = ?3, {o.claimed_at} = NULL, {o.claim_token} = NULL, {o.lease_expires_at} = NULL"
    };
}

pub(crate) const SENT: &str = concat!(
    "UPDATE {outbox} SET {o.state} = 'sent', {o.crashes} = 0, ",
    unclaimed!(),
    " WHERE rowid IN (SELECT r.rowid FROM ",
    as_read!(),
    ") RETURNING {o.id}"
);

pub(crate) const EXPANDED_PARENT: &str = concat!(
    "UPDATE {outbox} SET {o.state} = 'sent', {o.crashes} = 0, {o.last_error} = ?4, ",
    unclaimed!(),
    " WHERE rowid IN (SELECT r.rowid FROM ",
    as_read!(),
    ") RETURNING {o.id}"
);

pub(crate) const SENT_AND_DELETED: &str = concat!(
    "DELETE FROM {outbox} WHERE rowid IN (SELECT r.rowid FROM ",
    as_read!(),
    ") RETURNING {o.id}, {o.parent_id}"
);

/// With `onSent: Delete` a parent goes with the last of its open children.
pub(crate) const CHILDLESS: &str = "
DELETE FROM {outbox} AS p
 WHERE p.{o.id} IN (SELECT value FROM json_each(?1)) AND p.{o.state} = 'sent'
   AND NOT EXISTS (SELECT 1 FROM {outbox} AS c
                    WHERE c.{o.parent_id} = p.{o.id} AND c.{o.state} IN ('pending', 'processing'))";

/// The same for children that are dead: only they and parents with open children stay.
pub(crate) const PARENTS_OF_THE_DEAD: &str = "
SELECT DISTINCT {o.parent_id} FROM {outbox}
 WHERE {o.id} IN (SELECT value FROM json_each(?1)) AND {o.state} = 'dead' AND {o.parent_id} IS NOT NULL";

pub(crate) const RELEASE: &str = concat!(
    "UPDATE {outbox} SET {o.state} = 'pending', ",
    unclaimed!(),
    " WHERE rowid IN (SELECT r.rowid FROM ",
    as_read!(),
    ") RETURNING {o.id}"
);

/// Further elements of the array: `scheduled_at`, `last_error`. MATERIALIZED, since SQLite otherwise pulls the search into the
/// update and, bound by its CROSS JOIN, begins with a scan of the whole outbox (measured by its plan).
pub(crate) const RETRY: &str = concat!(
    "WITH w AS MATERIALIZED (SELECT r.rowid AS row, j.value ->> 4 AS at, j.value ->> 5 AS error FROM ",
    as_read!(),
    ") UPDATE {outbox} AS o SET {o.state} = 'pending', {o.attempt} = o.{o.attempt} + 1, {o.crashes} = 0,
       {o.scheduled_at} = w.at, {o.last_error} = w.error, ",
    unclaimed!(),
    " FROM w WHERE o.rowid = w.row RETURNING {o.id}"
);

/// Further elements of the array: what to add to `attempt`, `last_error`.
pub(crate) const DEAD: &str = concat!(
    "WITH w AS MATERIALIZED (SELECT r.rowid AS row, j.value ->> 4 AS counted, j.value ->> 5 AS error FROM ",
    as_read!(),
    ") UPDATE {outbox} AS o SET {o.state} = 'dead', {o.attempt} = o.{o.attempt} + w.counted, {o.crashes} = 0,
       {o.last_error} = w.error, ",
    unclaimed!(),
    " FROM w WHERE o.rowid = w.row RETURNING {o.id}"
);

/// Until the worker's own lease ends. A row that bears our token already is marked again: the reply may have been lost.
pub(crate) const MARK: &str = "
UPDATE {outbox} SET {o.state} = 'processing', {o.claim_token} = ?2, {o.claimed_at} = ?3, {o.updated_at} = ?3,
       {o.lease_expires_at} = ?4
 WHERE rowid IN (
    SELECT r.rowid FROM json_each(?1) AS j CROSS JOIN {outbox} AS r ON r.{o.id} = j.value ->> 0
     WHERE (r.{o.state} = 'pending' OR r.{o.state} = 'processing' AND r.{o.claim_token} = ?2)
       AND r.{o.attempt} = j.value ->> 1 AND r.{o.scheduled_at} = j.value ->> 2)
RETURNING {o.id}";

macro_rules! abandoned {
    () => {
        "SELECT rowid FROM {outbox} WHERE {o.state} = 'processing'
           AND ({o.lease_expires_at} IS NULL OR {o.lease_expires_at} <= ?1)"
    };
}

/// Rows of others that are `processing`: those whose lease has ended, those that hold their keys yet.
pub(crate) const ABANDONED: &str = "
SELECT COUNT(*) FILTER (WHERE {o.lease_expires_at} IS NULL OR {o.lease_expires_at} <= ?1),
       COUNT(*) FILTER (WHERE {o.lease_expires_at} > ?1 AND {o.claim_token} IS NOT ?2)
  FROM {outbox} WHERE {o.state} = 'processing'";

pub(crate) const RECOVER: &str = concat!(
    "UPDATE {outbox} SET {o.crashes} = {o.crashes} + 1,
       {o.state} = CASE WHEN {o.crashes} + 1 >= ?2 THEN 'dead' ELSE 'pending' END,
       {o.last_error} = CASE WHEN {o.crashes} + 1 >= ?2
         THEN 'crashes: its worker ended ' || ({o.crashes} + 1) || ' times in a row while it held this message; look for what'
              || ' in it ends a worker, then replay it'
         ELSE {o.last_error} END,
       {o.updated_at} = ?1, {o.claimed_at} = NULL, {o.claim_token} = NULL, {o.lease_expires_at} = NULL
     WHERE rowid IN (",
    abandoned!(),
    " LIMIT 2000)
    RETURNING {o.state}, {o.id}, {o.topic}, {o.key}, {o.destination}, {o.attempt}, {o.created_at}, {o.last_error}"
);

/// The fifth element of the array holds the children, `[id, destination]` each. `sequence` follows from `parent_sequence`.
pub(crate) const CHILDREN: &str = concat!(
    "INSERT INTO {outbox} ({o.id}, {o.topic}, {o.key}, {o.payload}, {o.headers}, {o.aggregate_type}, {o.max_attempts},
       {o.scheduled_at}, {o.created_at}, {o.updated_at}, {o.trace_parent}, {o.destination}, {o.parent_id}, parent_sequence)
     SELECT c.value ->> 0, p.{o.topic}, p.{o.key}, p.{o.payload}, p.{o.headers}, p.{o.aggregate_type}, p.{o.max_attempts},
            p.{o.scheduled_at}, p.{o.created_at}, ?3, p.{o.trace_parent}, c.value ->> 1, lower(p.{o.id}), p.{o.sequence}
       FROM (SELECT r.rowid AS row, j.value AS wish, j.key AS n FROM ",
    as_read!(),
    ") AS w CROSS JOIN {outbox} AS p ON p.rowid = w.row, json_each(w.wish, '$[4]') AS c
      ORDER BY w.n, c.key"
);

/// The oldest pending rows by `sequence`, up to the bound: their number, the age of the oldest, and the longest due among them.
/// A minimum over all pending rows would read the whole backlog, since no index knows `created_at`.
pub(crate) const PENDING: &str = "
SELECT COUNT(*), MIN(at), MIN(CASE WHEN due <= ?2 THEN due END)
  FROM (SELECT {o.created_at} AS at, {o.scheduled_at} AS due FROM {outbox}
         WHERE {o.state} = 'pending' ORDER BY {o.sequence} LIMIT ?1)";

pub(crate) const LONGEST_DUE_LATER: &str = "
SELECT MIN({o.scheduled_at}) FROM {outbox}
 WHERE {o.state} = 'pending' AND {o.scheduled_at} > {o.created_at} AND {o.scheduled_at} <= ?1";

pub(crate) const DEAD_ROWS: &str = "
SELECT COUNT(*) FROM (SELECT 1 FROM {outbox} WHERE {o.state} = 'dead' LIMIT ?1)";

/// `[id, attempt, scheduled_at, marked]`, and what else the statement needs.
fn as_read(position: Position, stamp: Stamp, more: impl IntoIterator<Item = Value>) -> Value {
    let mut row = vec![
        json!(position.id.to_string()),
        json!(stamp.attempt),
        json!(ticks::text(stamp.scheduled_at)),
        json!(stamp.marked),
    ];
    row.extend(more);
    Value::Array(row)
}

/// Settles by statement.
#[derive(Default)]
struct Batches {
    sent: Vec<Value>,
    retry: Vec<Value>,
    dead: Vec<Value>,
    release: Vec<Value>,
}

impl Batches {
    fn of(session: &Session, settles: &[Settle]) -> Self {
        let mut batches = Self::default();
        for settle in settles {
            let row = |more: Vec<Value>| as_read(settle.position, settle.stamp, more);
            match &settle.outcome {
                Outcome::Sent => batches.sent.push(row(vec![])),
                Outcome::Release => batches.release.push(row(vec![])),
                Outcome::Retry { delay_us, error } => {
                    batches.retry.push(row(vec![json!(session.later(*delay_us)), json!(error)]));
                }
                Outcome::Dead { error, counted } => {
                    batches.dead.push(row(vec![json!(i32::from(*counted)), json!(error)]));
                }
            }
        }
        batches
    }
}

/// The one lane, or none.
fn lane_if(wanted: bool) -> LaneSet {
    if wanted { LaneSet::first(1) } else { LaneSet::EMPTY }
}

impl SqliteStore {
    /// Writes the outcomes; returns the ids of rows that were not as they were read.
    async fn settle(&self, session: &mut Session, fence: &Fence, settles: &[Settle]) -> Result<Vec<Uuid>, Fault> {
        let batches = Batches::of(session, settles);
        let mut done = std::collections::HashSet::with_capacity(settles.len());
        let delete = self.inner.config.on_sent == OnSent::Delete;
        if delete {
            done.extend(self.delete_sent(session, fence, batches.sent).await?);
        } else {
            done.extend(self.change(session, fence, SENT, batches.sent, None).await?);
        }
        done.extend(self.change(session, fence, RETRY, batches.retry, None).await?);
        let dead = self.change(session, fence, DEAD, batches.dead, None).await?;
        self.end_parents(session, &dead).await?;
        done.extend(dead);
        done.extend(self.change(session, fence, RELEASE, batches.release, None).await?);
        Ok(settles.iter().map(|settle| settle.position.id).filter(|id| !done.contains(id)).collect())
    }

    /// With `onSent: Delete`: deletes parents of these dead rows that have no open child.
    pub(crate) async fn end_parents(&self, session: &mut Session, dead: &[Uuid]) -> Result<(), Fault> {
        if dead.is_empty() || self.inner.config.on_sent != OnSent::Delete {
            return Ok(());
        }
        let run = async {
            let parents: Vec<String> = sqlx::query_scalar(self.sql(PARENTS_OF_THE_DEAD))
                .bind(ids(dead))
                .fetch_all(session.connection())
                .await?;
            if !parents.is_empty() {
                let parents = Value::from(parents).to_string();
                sqlx::query(self.sql(CHILDLESS)).bind(parents).execute(session.connection()).await?;
            }
            Ok(())
        };
        run.await.map_err(|error: sqlx::Error| classify(&error))
    }

    /// Runs one of the statements over `as_read!`; returns the ids that changed. `more` is the fourth parameter of those that have it.
    async fn change(
        &self,
        session: &mut Session,
        fence: &Fence,
        sql: &'static str,
        rows: Vec<Value>,
        more: Option<String>,
    ) -> Result<Vec<Uuid>, Fault> {
        if rows.is_empty() {
            return Ok(Vec::new());
        }
        let mut query = sqlx::query_scalar(self.sql(sql))
            .bind(Value::Array(rows).to_string())
            .bind(fence.token.to_string())
            .bind(session.now.clone());
        if let Some(more) = more {
            query = query.bind(more);
        }
        let ids: Vec<String> = query.fetch_all(session.connection()).await.map_err(|error| classify(&error))?;
        Ok(ids.iter().filter_map(|id| id.parse().ok()).collect())
    }

    async fn delete_sent(&self, session: &mut Session, fence: &Fence, rows: Vec<Value>) -> Result<Vec<Uuid>, Fault> {
        if rows.is_empty() {
            return Ok(Vec::new());
        }
        let run = async {
            let deleted = sqlx::query(self.sql(SENT_AND_DELETED))
                .bind(Value::Array(rows).to_string())
                .bind(fence.token.to_string())
                .fetch_all(session.connection())
                .await?;
            let column = |n: usize| deleted.iter().filter_map(move |row| row.try_get::<Option<String>, _>(n).ok()?);
            let parents: Vec<Value> = column(1).map(Value::from).collect();
            if !parents.is_empty() {
                sqlx::query(self.sql(CHILDLESS))
                    .bind(Value::Array(parents).to_string())
                    .execute(session.connection())
                    .await?;
            }
            Ok(column(0).filter_map(|id| id.parse().ok()).collect())
        };
        run.await.map_err(|error: sqlx::Error| classify(&error))
    }

    async fn expand_all(
        &self,
        session: &mut Session,
        fence: &Fence,
        parents: &[Expansion],
    ) -> Result<Vec<Uuid>, Fault> {
        let rows: Vec<Value> = parents
            .iter()
            .map(|parent| {
                let children: Vec<_> =
                    parent.children.iter().map(|child| json!([child.id.to_string(), child.destination])).collect();
                as_read(parent.parent, parent.stamp, [Value::Array(children)])
            })
            .collect();
        sqlx::query(self.sql(CHILDREN))
            .bind(Value::Array(rows.clone()).to_string())
            .bind(fence.token.to_string())
            .bind(session.now.clone())
            .execute(session.connection())
            .await
            .map_err(|error| classify(&error))?;
        // Always marked, never deleted: an open child needs its parent (contract 13.4, onSent).
        self.change(session, fence, EXPANDED_PARENT, rows, Some(EXPANDED.to_owned())).await
    }

    /// Ended, and not ended, of others.
    async fn abandoned(&self, session: &mut Session, fence: &Fence) -> Result<(u64, u64), Fault> {
        let (ended, held): (i64, i64) = sqlx::query_as(self.sql(ABANDONED))
            .bind(session.now.clone())
            .bind(fence.token.to_string())
            .fetch_one(session.connection())
            .await
            .map_err(|error| classify(&error))?;
        Ok((ended.unsigned_abs(), held.unsigned_abs()))
    }

    async fn backlog(&self, session: &mut Session, bound: i64) -> Result<OutboxBacklog, sqlx::Error> {
        let pending = sqlx::query(self.sql(PENDING))
            .bind(bound)
            .bind(session.now.clone())
            .fetch_one(session.connection())
            .await?;
        let later: Option<String> = sqlx::query_scalar(self.sql(LONGEST_DUE_LATER))
            .bind(session.now.clone())
            .fetch_one(session.connection())
            .await?;
        let dead: i64 = sqlx::query_scalar(self.sql(DEAD_ROWS)).bind(bound).fetch_one(session.connection()).await?;
        let oldest: Option<String> = pending.try_get(1)?;
        let due: Option<String> = pending.try_get(2)?;
        let age = |at: Option<String>| at.and_then(|at| ticks::parse(&at)).map_or(0, |at| (session.now_us - at).max(0));
        Ok(OutboxBacklog {
            pending: pending.try_get::<i64, _>(0)?.unsigned_abs(),
            dead: dead.unsigned_abs(),
            oldest_pending_age_us: age(oldest),
            oldest_due_age_us: age(due).max(age(later)),
        })
    }
}

#[async_trait]
impl Outbox for SqliteStore {
    /// With nothing to settle this is a read transaction: it sees one snapshot, and no writer waits for it.
    async fn poll(&self, fence: &Fence, settles: &[Settle], read: Option<&Read>) -> Result<Polled, Fault> {
        let mut polled = Polled::default();
        let mut session = if settles.is_empty() {
            self.read(Some(fence)).await?
        } else {
            let mut session = self.write(Some(fence)).await?;
            polled.lost = self.settle(&mut session, fence, settles).await?;
            session
        };
        if let Some(read) = read {
            let settled = settles.iter().map(|settle| settle.position.id);
            let unreadable = self.parts(&mut session, read, settled, &mut polled).await?;
            if !unreadable.is_empty() {
                if settles.is_empty() {
                    session.commit().await?;
                    session = self.write(Some(fence)).await?;
                }
                self.bury_unreadable(&mut session, &unreadable).await?;
            }
        }
        session.commit().await?;
        Ok(polled)
    }

    async fn mark(&self, fence: &Fence, rows: &[(Position, Stamp)], _lease_ms: u64) -> Result<Vec<Uuid>, Fault> {
        let mut session = self.write(Some(fence)).await?;
        let unmarked = |stamp: &Stamp| Stamp { marked: false, ..*stamp };
        let wishes = rows.iter().map(|(position, stamp)| as_read(*position, unmarked(stamp), [])).collect();
        let lease = session.lease.clone();
        let marked = self.change(&mut session, fence, MARK, wishes, lease).await?;
        session.commit().await?;
        let marked: std::collections::HashSet<_> = marked.into_iter().collect();
        Ok(rows.iter().map(|(position, _)| position.id).filter(|id| marked.contains(id)).collect())
    }

    async fn recover(&self, fence: &Fence, lanes: LaneSet, max_crashes: i32) -> Result<Recovered, Fault> {
        if !lanes.contains(LANE) {
            self.read(Some(fence)).await?.commit().await?;
            return Ok(Recovered::default());
        }
        let mut session = self.read(Some(fence)).await?;
        let found = self.abandoned(&mut session, fence).await?;
        session.commit().await?;
        if found.0 == 0 {
            return Ok(Recovered { unexpired: found.1, waiting: lane_if(found.1 > 0), ..Recovered::default() });
        }
        let mut session = self.write(Some(fence)).await?;
        let rows = sqlx::query(self.sql(RECOVER))
            .bind(session.now.clone())
            .bind(max_crashes)
            .fetch_all(session.connection())
            .await
            .map_err(|error| classify(&error))?;
        let buried_ids: Vec<Uuid> = rows
            .iter()
            .filter(|row| row.try_get::<&str, _>(0).is_ok_and(|state| state == "dead"))
            .filter_map(|row| row.try_get::<&str, _>(1).ok()?.parse().ok())
            .collect();
        self.end_parents(&mut session, &buried_ids).await?;
        // What the bound left for the next call holds its keys like what has not ended.
        let left = self.abandoned(&mut session, fence).await?;
        session.commit().await?;
        let mut dead = Vec::new();
        for row in &rows {
            dead.extend(buried(row).map_err(|error| classify(&error))?);
        }
        let (pending, unexpired) = ((rows.len() - dead.len()) as u64, left.0 + left.1);
        Ok(Recovered { pending, dead, unexpired, waiting: lane_if(unexpired > 0) })
    }

    async fn expand(&self, fence: &Fence, parents: &[Expansion]) -> Result<Vec<Uuid>, Fault> {
        let mut session = self.write(Some(fence)).await?;
        let expanded = self.expand_all(&mut session, fence, parents).await?;
        session.commit().await?;
        Ok(parents.iter().map(|parent| parent.parent.id).filter(|id| !expanded.contains(id)).collect())
    }

    async fn outbox_backlog(&self, bound: u64) -> Result<OutboxBacklog, Fault> {
        let mut session = self.read(None).await?;
        let bound = i64::try_from(bound).unwrap_or(i64::MAX);
        let backlog = self.backlog(&mut session, bound).await.map_err(|error| classify(&error))?;
        session.commit().await?;
        Ok(backlog)
    }

    async fn woken(&self) {
        self.wait_for_change().await;
    }
}

/// The row of an answer to [`RECOVER`], if it is dead.
fn buried(row: &SqliteRow) -> Result<Option<Buried>, sqlx::Error> {
    if row.try_get::<&str, _>(0)? != "dead" {
        return Ok(None);
    }
    Ok(Some(Buried {
        id: Uuid::parse_str(row.try_get(1)?).map_err(|error| sqlx::Error::Decode(error.into()))?,
        topic: row.try_get(2)?,
        key: row.try_get::<Option<String>, _>(3)?.filter(|key| !key.is_empty()),
        destination: row.try_get(4)?,
        attempt: row.try_get(5)?,
        created_at_us: ticks::parse(row.try_get(6)?).unwrap_or_default(),
        error: row.try_get(7)?,
    }))
}

/// Ids of a JSON array, for the statements of other files.
pub(crate) fn ids(ids: &[Uuid]) -> String {
    id_list(ids.iter().copied())
}

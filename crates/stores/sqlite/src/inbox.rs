//! Admitting messages once, and forwarding push rows (contract 2.4, 4.5, 5.2, 6.5, 8).

use std::{collections::HashSet, sync::atomic::Ordering};

use async_trait::async_trait;
use queuebox_core::{
    Class, Fault, LaneSet, Uuid,
    message::{Consumption, Forward, NewInboxRow, PushRow},
    ports::{
        Admitted, Fence, Inbox,
        inbox::{Forwarded, SourceBacklog},
    },
};
use serde_json::{Value, json};
use sqlx::{Row as _, Sqlite, query::Query, sqlite::SqliteArguments};

use crate::{
    SqliteStore, classify,
    classify::{is_raised, is_refused},
    lanes::LANE,
    outbox,
    session::Session,
    ticks,
};

const COLUMNS: &str = "INSERT INTO {inbox} ({i.id}, {i.source}, {i.idempotency_key}, {i.aggregate_id}, {i.event_type},
  {i.payload}, {i.headers}, {i.correlation_id}, {i.consumption}, {i.topic}, {i.trace_parent}, {i.state}, {i.last_error},
  {i.created_at}, {i.scheduled_at}) VALUES ";
const VALUES: &str = "(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)";
/// No target: a batch that is sent again meets its own ids as well.
const NEW_ONES: &str = " ON CONFLICT DO NOTHING RETURNING {i.id}";

/// Rows a statement: few texts, so that each is prepared once, and still few round trips.
const CHUNKS: [usize; 3] = [64, 8, 1];

/// What stands under the key, by the column's own idea of equality.
pub(crate) const STORED: &str = "
SELECT {i.source}, {i.idempotency_key} FROM {inbox} WHERE {i.source} = ?1 AND {i.idempotency_key} = ?2";

/// Without stored statistics SQLite takes "state = …" for the narrowest condition and sorts all that is pending (measured by
/// its plan), so the index is named where it is there.
pub(crate) const WAITING: &str = "
SELECT {i.id}, {i.source}, {i.idempotency_key}, {i.aggregate_id}, {i.event_type}, {i.topic}, {i.headers}, {i.correlation_id},
       {i.crashes}, {i.trace_parent}
  FROM {inbox}
       INDEXED BY idx_inbox_push_pending --if push_index
 WHERE {i.consumption} = 'push' AND {i.state} = 'pending' AND {i.scheduled_at} <= ?1
   AND {i.id} NOT IN (SELECT value FROM json_each(?2))
 ORDER BY {i.scheduled_at}, {i.created_at}, {i.id} LIMIT ?3";

/// `?1` is an array of `[inbox id, outbox id, topic, headers]`. `row_no`, and with it `sequence`, follows its order.
pub(crate) const FORWARD: &str = "
INSERT INTO {outbox} ({o.id}, {o.topic}, {o.key}, {o.payload}, {o.headers}, {o.max_attempts}, {o.trace_parent},
                      {o.scheduled_at}, {o.created_at}, {o.updated_at})
SELECT j.value ->> 1, j.value ->> 2, i.{i.aggregate_id}, i.{i.payload}, j.value ->> 3, ?3, i.{i.trace_parent}, ?2, ?2, ?2
  FROM json_each(?1) AS j CROSS JOIN {inbox} AS i ON i.{i.id} = j.value ->> 0
 WHERE i.{i.consumption} = 'push' AND i.{i.state} = 'pending' AND i.{i.scheduled_at} <= ?2
 ORDER BY j.key";

pub(crate) const FORWARDED: &str = "
UPDATE {inbox} SET {i.state} = 'processed', {i.processed_at} = ?2, {i.crashes} = 0,
       {i.claimed_at} = NULL, {i.claim_token} = NULL, {i.lease_expires_at} = NULL
 WHERE rowid IN (
    SELECT i.rowid FROM json_each(?1) AS j CROSS JOIN {inbox} AS i ON i.{i.id} = j.value ->> 0
     WHERE i.{i.consumption} = 'push' AND i.{i.state} = 'pending' AND i.{i.scheduled_at} <= ?2)
RETURNING {i.id}";

const BURY: &str = "
UPDATE {inbox} SET {i.state} = 'dead', {i.last_error} = ?2
 WHERE {i.id} = ?1 AND {i.consumption} = 'push' AND {i.state} = 'pending'";

const PUT_OFF: &str = "
UPDATE {inbox} SET {i.crashes} = {i.crashes} + 1, {i.scheduled_at} = ?2
 WHERE {i.id} = ?1 AND {i.consumption} = 'push' AND {i.state} = 'pending'";

/// The oldest pending rows, up to the bound, by source: exact below the bound; behind a larger backlog a source whose rows
/// are all younger is not seen. Counting each source by itself would read the whole backlog.
pub(crate) const BACKLOG: &str = "
SELECT source, consumption, SUM(state = 'pending'), SUM(state = 'dead'), MIN(CASE WHEN state = 'pending' THEN at END)
  FROM (SELECT * FROM (SELECT {i.source} AS source, {i.consumption} AS consumption, {i.state} AS state, {i.created_at} AS at
          FROM {inbox} WHERE {i.state} = 'pending' ORDER BY {i.created_at} LIMIT ?1)
        UNION ALL
        SELECT * FROM (SELECT {i.source}, {i.consumption}, {i.state}, {i.created_at}
          FROM {inbox} WHERE {i.state} = 'dead' ORDER BY {i.created_at} DESC LIMIT ?1))
 GROUP BY source, consumption ORDER BY source, consumption";

pub(crate) const NEXT_DUE: &str = "
SELECT MIN({i.scheduled_at})
  FROM {inbox}
       INDEXED BY idx_inbox_push_pending --if push_index
 WHERE {i.consumption} = 'push' AND {i.state} = 'pending'";

/// A message with its receipt.
#[derive(Clone, Copy)]
struct Receipt<'a> {
    place: usize,
    message: &'a NewInboxRow,
    payload: &'a str,
    received_us: i64,
}

impl SqliteStore {
    /// The first receipt of `count` rows.
    fn receipts(&self, now_us: i64, count: usize) -> i64 {
        let first = first_receipt(self.inner.last_receipt_us.load(Ordering::Relaxed), now_us);
        let count = i64::try_from(count).unwrap_or(i64::MAX);
        self.inner.last_receipt_us.store(first.saturating_add(count - 1), Ordering::Relaxed);
        first
    }

    async fn insert(&self, session: &mut Session, rows: &[Receipt<'_>]) -> Result<HashSet<Uuid>, sqlx::Error> {
        let values = vec![VALUES; rows.len()].join(", ");
        let mut query = sqlx::query(self.sql_text(&format!("{COLUMNS}{values}{NEW_ONES}")));
        for row in rows {
            query = bind_row(query, row);
        }
        let new = query.fetch_all(session.connection()).await?;
        new.iter().map(|row| row.try_get::<String, _>(0).map(|id| id.parse().unwrap_or(Uuid::nil()))).collect()
    }

    /// Inserts rows; those that the database refuses are told, each by itself.
    async fn insert_each(
        &self,
        session: &mut Session,
        rows: &[Receipt<'_>],
        answers: &mut [Option<Admitted>],
    ) -> Result<(), Fault> {
        let new = match self.insert(session, rows).await {
            Ok(new) => new,
            // It may pass, and later rows of the aggregate must not go ahead meanwhile: nothing of the batch is stored.
            Err(error) if is_raised(&error) => return Err(classify(&error)),
            // The statement alone was undone, the transaction goes on: find the guilty row.
            Err(error) if is_refused(&error) && rows.len() > 1 => {
                for row in rows {
                    Box::pin(self.insert_each(session, std::slice::from_ref(row), answers)).await?;
                }
                return Ok(());
            }
            Err(error) if is_refused(&error) => {
                answers[rows[0].place] = Some(Admitted::Refused(classify(&error)));
                return Ok(());
            }
            Err(error) => return Err(classify(&error)),
        };
        for row in rows {
            let id = row.message.id;
            let answer =
                if new.contains(&id) { Admitted::New(id) } else { self.conflict(session, row.message).await? };
            answers[row.place] = Some(answer);
        }
        Ok(())
    }

    /// Why nothing was inserted: the key is stored byte for byte, or the column takes two keys for one (contract 2.4).
    async fn conflict(&self, session: &mut Session, message: &NewInboxRow) -> Result<Admitted, Fault> {
        let stored: Option<(String, String)> = sqlx::query_as(self.sql(STORED))
            .bind(&message.source)
            .bind(&message.idempotency_key)
            .fetch_optional(session.connection())
            .await
            .map_err(|error| classify(&error))?;
        Ok(match stored {
            Some((source, key)) if source == message.source && key == message.idempotency_key => Admitted::Duplicate,
            Some(_) => Admitted::Collision(Fault::new(
                Class::Misconfigured,
                "collation",
                "a column of the unique constraint (source, idempotency_key) takes different texts for equal; declare both \
                 columns with COLLATE BINARY",
            )),
            None => {
                Admitted::Refused(Fault::refused("id_in_use", format!("another message has the id {}", message.id)))
            }
        })
    }

    /// Inserts and marks; returns the inbox rows that were forwarded.
    async fn move_on(
        &self,
        session: &mut Session,
        batch: &[Forward],
        max_attempts: i32,
    ) -> Result<HashSet<Uuid>, sqlx::Error> {
        let rows: Vec<Value> = batch
            .iter()
            .map(|one| json!([one.inbox_id.to_string(), one.outbox_id.to_string(), one.topic, one.headers]))
            .collect();
        let rows = Value::Array(rows).to_string();
        sqlx::query(self.sql(FORWARD))
            .bind(rows.clone())
            .bind(session.now.clone())
            .bind(max_attempts)
            .execute(session.connection())
            .await?;
        let marked: Vec<String> = sqlx::query_scalar(self.sql(FORWARDED))
            .bind(rows)
            .bind(session.now.clone())
            .fetch_all(session.connection())
            .await?;
        Ok(marked.iter().filter_map(|id| id.parse().ok()).collect())
    }

    async fn move_each(&self, session: &mut Session, batch: &[Forward], max_attempts: i32) -> Result<Forwarded, Fault> {
        let mut outcome = Forwarded::default();
        for one in batch {
            match self.move_on(session, std::slice::from_ref(one), max_attempts).await {
                Ok(moved) if moved.is_empty() => outcome.lost.push(one.inbox_id),
                Ok(_) => {}
                Err(error) if is_refused(&error) => outcome.refused.push((one.inbox_id, classify(&error))),
                Err(error) => return Err(classify(&error)),
            }
        }
        Ok(outcome)
    }
}

#[async_trait]
impl Inbox for SqliteStore {
    async fn admit(&self, batch: &[NewInboxRow]) -> Result<Vec<Admitted>, Fault> {
        let mut answers: Vec<Option<Admitted>> = vec![None; batch.len()];
        let mut session = self.write(None).await?;
        let first = self.receipts(session.now_us, batch.len());
        let mut rows = Vec::with_capacity(batch.len());
        for (place, message) in batch.iter().enumerate() {
            match std::str::from_utf8(&message.payload) {
                Ok(payload) => rows.push(Receipt { place, message, payload, received_us: first + place as i64 }),
                Err(_) => answers[place] = Some(Admitted::Refused(Fault::refused("not_utf8", "the body is no UTF-8"))),
            }
        }
        let mut rest = rows.as_slice();
        for size in CHUNKS {
            while rest.len() >= size {
                let (chunk, behind) = rest.split_at(size);
                self.insert_each(&mut session, chunk, &mut answers).await?;
                rest = behind;
            }
        }
        session.commit().await?;
        let missing = || Fault::transient("admit", "a message of the batch has no answer");
        answers.into_iter().map(|answer| answer.ok_or_else(missing)).collect()
    }

    async fn waiting(
        &self,
        fence: &Fence,
        lanes: LaneSet,
        limit: u32,
        exclude: &[Uuid],
    ) -> Result<Vec<PushRow>, Fault> {
        let mut session = self.read(Some(fence)).await?;
        if !lanes.contains(LANE) {
            session.commit().await?;
            return Ok(Vec::new());
        }
        let rows = sqlx::query(self.sql(WAITING))
            .bind(session.now.clone())
            .bind(outbox::ids(exclude))
            .bind(i64::from(limit))
            .fetch_all(session.connection())
            .await
            .map_err(|error| classify(&error))?;
        session.commit().await?;
        rows.iter().map(push_row).collect::<Result<_, _>>().map_err(|error| classify(&error))
    }

    async fn forward(&self, fence: &Fence, batch: &[Forward], max_attempts: i32) -> Result<Forwarded, Fault> {
        if batch.is_empty() {
            return Ok(Forwarded::default());
        }
        let mut session = self.write(Some(fence)).await?;
        let outcome = match self.move_on(&mut session, batch, max_attempts).await {
            Ok(moved) => Forwarded {
                lost: batch.iter().map(|one| one.inbox_id).filter(|id| !moved.contains(id)).collect(),
                ..Forwarded::default()
            },
            // The insert alone was undone, nothing was marked: each row by itself.
            Err(error) if is_refused(&error) => self.move_each(&mut session, batch, max_attempts).await?,
            Err(error) => return Err(classify(&error)),
        };
        session.commit().await?;
        self.inner.wake.notify();
        Ok(outcome)
    }

    async fn set_aside(&self, fence: &Fence, id: Uuid, error: Option<&str>, delay_us: i64) -> Result<bool, Fault> {
        let mut session = self.write(Some(fence)).await?;
        let (sql, value) = match error {
            Some(error) => (BURY, error.to_owned()),
            None => (PUT_OFF, session.later(delay_us)),
        };
        let changed = sqlx::query(self.sql(sql))
            .bind(id.to_string())
            .bind(value)
            .execute(session.connection())
            .await
            .map_err(|error| classify(&error))?;
        session.commit().await?;
        Ok(changed.rows_affected() == 1)
    }

    async fn inbox_backlog(&self, bound: u64) -> Result<Vec<SourceBacklog>, Fault> {
        let mut session = self.read(None).await?;
        let rows = sqlx::query(self.sql(BACKLOG))
            .bind(i64::try_from(bound).unwrap_or(i64::MAX))
            .fetch_all(session.connection())
            .await
            .map_err(|error| classify(&error))?;
        let now_us = session.now_us;
        session.commit().await?;
        rows.iter()
            .map(|row| {
                let oldest: Option<String> = row.try_get(4)?;
                Ok(SourceBacklog {
                    source: row.try_get(0)?,
                    consumption: consumption(row.try_get(1)?),
                    pending: row.try_get::<i64, _>(2)?.unsigned_abs(),
                    dead: row.try_get::<i64, _>(3)?.unsigned_abs(),
                    oldest_pending_age_us: oldest.and_then(|at| ticks::parse(&at)).map_or(0, |at| (now_us - at).max(0)),
                })
            })
            .collect::<Result<_, sqlx::Error>>()
            .map_err(|error| classify(&error))
    }

    async fn next_push_due_in_us(&self, lanes: LaneSet) -> Result<Option<i64>, Fault> {
        if !lanes.contains(LANE) {
            return Ok(None);
        }
        let mut session = self.read(None).await?;
        let next: Option<String> = sqlx::query_scalar(self.sql(NEXT_DUE))
            .fetch_one(session.connection())
            .await
            .map_err(|error| classify(&error))?;
        let now_us = session.now_us;
        session.commit().await?;
        Ok(next.and_then(|at| ticks::parse(&at)).map(|at| (at - now_us).max(0)))
    }
}

/// Now, or just behind the last receipt of this process: SQLite's clock has milliseconds, and two batches may fall into one.
/// After a step back of the clock by more than a second receipts follow the clock again.
fn first_receipt(last_us: i64, now_us: i64) -> i64 {
    if (now_us..now_us + 1_000_000).contains(&last_us) { last_us + 1 } else { now_us }
}

fn bind_row<'q>(query: Query<'q, Sqlite, SqliteArguments>, row: &Receipt<'_>) -> Query<'q, Sqlite, SqliteArguments> {
    let message = row.message;
    let from = message.published_at_us.map_or(row.received_us, |published| published.min(row.received_us));
    query
        .bind(message.id.to_string())
        .bind(message.source.clone())
        .bind(message.idempotency_key.clone())
        .bind(message.aggregate_id.clone())
        .bind(message.event_type.clone())
        .bind(row.payload.to_owned())
        .bind(message.headers.clone())
        .bind(message.correlation_id.clone())
        .bind(message.consumption.as_str())
        .bind(message.topic.clone())
        .bind(message.trace_parent.clone())
        .bind(if message.dead.is_some() { "dead" } else { "pending" })
        .bind(message.dead.clone())
        .bind(ticks::text(row.received_us))
        .bind(ticks::text(from.saturating_add(message.delay_us)))
}

fn push_row(row: &sqlx::sqlite::SqliteRow) -> Result<PushRow, sqlx::Error> {
    let id: String = row.try_get(0)?;
    Ok(PushRow {
        id: id.parse().map_err(|error| sqlx::Error::Decode(Box::new(error)))?,
        source: row.try_get(1)?,
        idempotency_key: row.try_get(2)?,
        aggregate_id: row.try_get(3)?,
        event_type: row.try_get(4)?,
        topic: row.try_get(5)?,
        headers: row.try_get(6)?,
        correlation_id: row.try_get(7)?,
        crashes: row.try_get(8)?,
        trace_parent: row.try_get(9)?,
    })
}

pub(crate) fn consumption(word: String) -> Consumption {
    if word == "pull" { Consumption::Pull } else { Consumption::Push }
}

#[cfg(test)]
mod tests {
    use super::first_receipt;

    #[test]
    fn receipts_rise_within_a_millisecond() {
        let now = 1_764_470_000_123_000;
        assert_eq!(first_receipt(0, now), now);
        assert_eq!(first_receipt(now + 499, now), now + 500, "a second batch in the same millisecond");
        assert_eq!(first_receipt(now - 1, now), now);
        assert_eq!(first_receipt(now + 3_600_000_000, now), now, "the clock was set back");
    }
}

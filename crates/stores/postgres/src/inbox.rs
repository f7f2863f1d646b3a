//! The inbox behind its port: each message once, push rows on into the outbox (contract 3.2, 4.5, 5.2, 6).
//!
//! The unique constraint is the deduplication. An insert that meets the uncommitted row of another transaction waits for its
//! outcome, so a duplicate is answered only when the first row has committed.

use std::collections::HashSet;

use async_trait::async_trait;
use queuebox_core::{
    Class, Fault, LaneSet, Uuid,
    message::{Consumption, Forward, NewInboxRow, PushRow},
    ports::{
        Admitted, Fence, Inbox,
        inbox::{Forwarded, SourceBacklog},
    },
};
use sqlx::postgres::PgRow;

use crate::{
    PostgresStore,
    cells::Cells,
    db::Args,
    error::{Error, classify},
    values::Ticks,
};

/// Rows that the backlog looks at for each row that it may count per source.
const BACKLOG_FACTOR: i64 = 16;

/// Sorted by the bytes of the key, so that two flushes meet in the same order and cannot deadlock. The receipt is read once; row i
/// gets i microseconds more, so that rows of one statement keep their order (contract 2.3).
const ADMIT: &str = r#"
WITH clock AS MATERIALIZED (SELECT clock_timestamp() AS now), input AS MATERIALIZED (
    SELECT r.*, clock.now + (r.ord - 1) * interval '1 microsecond' AS receipt
      FROM clock, unnest($1::uuid[], $2::text[], $3::text[], $4::text[], $5::text[], $6::text[], $7::text[], $8::text[],
                         $9::text[], $10::text[], $11::text[], $12::bigint[], $13::timestamptz[], $14::text[])
           WITH ORDINALITY AS r(id, source, idempotency_key, aggregate_id, event_type, payload, headers, correlation_id,
                                consumption, topic, trace_parent, delay_us, published_at, error, ord)
), stored AS (
    INSERT INTO {inbox} ({i.id}, {i.source}, {i.idempotency_key}, {i.aggregate_id}, {i.event_type}, {i.payload}, {i.headers},
                         {i.correlation_id}, {i.consumption}, {i.state}, {i.last_error}, {i.created_at},
                         {i.topic}, --if topics
                         {i.trace_parent}, --if inbox_trace
                         {i.scheduled_at})
    SELECT r.id, r.source, r.idempotency_key, r.aggregate_id, r.event_type, r.payload::jsonb, r.headers::jsonb,
           r.correlation_id, r.consumption, CASE WHEN r.error IS NULL THEN 'pending' ELSE 'dead' END, r.error, r.receipt,
           r.topic, --if topics
           r.trace_parent, --if inbox_trace
           least(r.published_at, r.receipt) + r.delay_us * interval '1 microsecond'
      FROM input r
     ORDER BY r.source COLLATE "C", r.idempotency_key COLLATE "C", r.ord
        ON CONFLICT ({i.source}, {i.idempotency_key}) DO NOTHING
    RETURNING {i.id} AS id
)
SELECT id FROM stored"#;

/// Only where the collation of a key column takes different bytes for equal: is what stands there really ours?
const SAME_BYTES: &str = r#"
SELECT r.ord
  FROM unnest($1::text[], $2::text[]) WITH ORDINALITY AS r(source, idempotency_key, ord)
 WHERE EXISTS (SELECT FROM {inbox} i
                WHERE i.{i.source} = r.source AND i.{i.idempotency_key} = r.idempotency_key
                  AND i.{i.source} COLLATE "C" = r.source COLLATE "C"
                  AND i.{i.idempotency_key} COLLATE "C" = r.idempotency_key COLLATE "C")"#;

/// Through `idx_inbox_push_pending`, whose order is that of the rows.
const WAITING: &str = "
@FENCE@, waiting AS MATERIALIZED (
    SELECT i.{i.id} AS id, i.{i.source}, i.{i.idempotency_key}, i.{i.aggregate_id}, i.{i.event_type},
           i.{i.topic} AS topic, --if topics
           NULL::text AS topic, --unless topics
           i.{i.headers}::text AS headers, i.{i.correlation_id},
           i.{i.crashes} AS crashes, --if inbox_crashes
           0 AS crashes, --unless inbox_crashes
           i.{i.trace_parent} AS trace_parent, --if inbox_trace
           NULL::text AS trace_parent, --unless inbox_trace
           row_number() OVER () AS ord
      FROM (SELECT i.*
              FROM {inbox} i
             WHERE i.{i.consumption} = 'push' AND i.{i.state} = 'pending' AND EXISTS (SELECT FROM fence)
               AND i.{i.scheduled_at} <= (SELECT now FROM clock)
               AND ($3::bigint = -1 OR ($3::bigint >> {i.lane}) & 1 = 1)
               AND i.{i.id} NOT IN (SELECT unnest($5::uuid[]))
             ORDER BY i.{i.scheduled_at}, i.{i.created_at}, i.{i.id} LIMIT $4) i
)
SELECT NULL::uuid, NULL::text, NULL::text, NULL::text, NULL::text, NULL::text, NULL::text, NULL::text, NULL::integer, NULL::text, 0::bigint
  FROM fence
UNION ALL
SELECT * FROM waiting
ORDER BY 11";

/// The outbox row is made from what the mark returned: a mark that changes nothing makes no row, so a second row with another id
/// cannot appear. The payload never leaves the server. Rows are inserted in the order given, so `sequence` follows it.
const FORWARD: &str = "
@FENCE@, marked AS (
    UPDATE {inbox} i
       SET {i.state} = 'processed', {i.processed_at} = clock_timestamp(),
           {i.crashes} = 0, --if inbox_crashes
           {i.claimed_at} = NULL, {i.claim_token} = NULL, {i.lease_expires_at} = NULL
      FROM unnest($3::uuid[], $4::uuid[], $5::text[], $6::text[]) WITH ORDINALITY AS f(inbox_id, outbox_id, topic, headers, ord)
     WHERE EXISTS (SELECT FROM fence)
       AND i.{i.id} = f.inbox_id AND i.{i.consumption} = 'push' AND i.{i.state} = 'pending'
       AND NOT EXISTS (SELECT FROM {inbox} e --unless lanes
                        WHERE e.{i.aggregate_id} = i.{i.aggregate_id} AND e.{i.aggregate_id} <> '' --unless lanes
                          AND e.{i.consumption} = 'push' AND e.{i.state} = 'pending' AND e.{i.id} <> ALL ($3::uuid[]) --unless lanes
                          AND (e.{i.scheduled_at}, e.{i.created_at}, e.{i.id}) --unless lanes
                            < (i.{i.scheduled_at}, i.{i.created_at}, i.{i.id})) --unless lanes
    RETURNING i.{i.id} AS id, f.ord, f.outbox_id, f.topic, f.headers, i.{i.payload} AS payload, i.{i.aggregate_id} AS aggregate_id
              , i.{i.trace_parent} AS trace_parent --if inbox_trace
              , NULL::text AS trace_parent --unless inbox_trace
), inserted AS (
    INSERT INTO {outbox} ({o.id}, {o.topic}, {o.key}, {o.payload}, {o.headers},
                          {o.trace_parent}, --if trace
                          {o.max_attempts})
    SELECT m.outbox_id, m.topic, m.aggregate_id, m.payload, m.headers::jsonb,
           m.trace_parent, --if trace
           $7::integer
      FROM marked m ORDER BY m.ord
)
SELECT NULL::uuid FROM fence UNION ALL SELECT id FROM marked";

const FORWARD_LOCK: &str =
    "SELECT pg_advisory_xact_lock(hashtextextended('queuebox claim ' || '{inbox}'::regclass::oid::text, 0))";

/// Of rows that were not marked: those that wait behind an earlier one.
const STILL_PENDING: &str = "
SELECT i.{i.id} FROM {inbox} i
 WHERE i.{i.id} = ANY ($1::uuid[]) AND i.{i.consumption} = 'push' AND i.{i.state} = 'pending'";

const SET_ASIDE: &str = "
@FENCE@, moved AS (
    UPDATE {inbox} i
       SET {i.state} = CASE WHEN $4::text IS NULL THEN 'pending' ELSE 'dead' END,
           {i.last_error} = coalesce($4::text, i.{i.last_error}),
           {i.crashes} = i.{i.crashes} + CASE WHEN $4::text IS NULL THEN 1 ELSE 0 END, --if inbox_crashes
           {i.scheduled_at} = CASE WHEN $4::text IS NULL THEN clock_timestamp() + $5::bigint * interval '1 microsecond'
                                   ELSE i.{i.scheduled_at} END
     WHERE EXISTS (SELECT FROM fence)
       AND i.{i.id} = $3 AND i.{i.consumption} = 'push' AND i.{i.state} = 'pending'
    RETURNING i.{i.id} AS id
)
SELECT NULL::uuid FROM fence UNION ALL SELECT id FROM moved";

/// Through `idx_inbox_state_created`, oldest first. No index knows sources, so the look is bounded over all of them together.
const BACKLOG: &str = "
WITH clock AS MATERIALIZED (SELECT clock_timestamp() AS now), rows AS (
    (SELECT i.{i.source} AS source, i.{i.consumption} AS consumption, i.{i.state} AS state, i.{i.created_at} AS created_at
       FROM {inbox} i WHERE i.{i.state} = 'pending' ORDER BY i.{i.created_at} LIMIT $2)
    UNION ALL
    (SELECT i.{i.source}, i.{i.consumption}, i.{i.state}, i.{i.created_at}
       FROM {inbox} i WHERE i.{i.state} = 'dead' ORDER BY i.{i.created_at} LIMIT $2)
)
SELECT r.source, r.consumption, least(count(*) FILTER (WHERE r.state = 'pending'), $1),
       least(count(*) FILTER (WHERE r.state = 'dead'), $1), (SELECT now FROM clock),
       min(r.created_at) FILTER (WHERE r.state = 'pending')
  FROM rows r GROUP BY r.source, r.consumption ORDER BY r.source, r.consumption";

const NEXT_PUSH: &str = "
SELECT clock_timestamp(), i.{i.scheduled_at}
  FROM {inbox} i
 WHERE i.{i.consumption} = 'push' AND i.{i.state} = 'pending' AND ($1::bigint = -1 OR ($1::bigint >> {i.lane}) & 1 = 1)
 ORDER BY i.{i.scheduled_at}, i.{i.created_at}, i.{i.id} LIMIT 1";

impl PostgresStore {
    /// Stores a batch. When the database refuses it for a row, halves are tried, so that one row in a thousand costs about ten
    /// statements more. What may pass (a trigger that raises) ends the batch there, since later rows of the aggregate must not
    /// go ahead: the rows from there on are answered with it.
    async fn admit_batch(&self, batch: &[NewInboxRow], answers: &mut Vec<Admitted>) -> Result<(), Error> {
        let mut ranges = vec![batch];
        while let Some(rows) = ranges.pop() {
            match self.admit_rows(rows).await {
                Ok(admitted) => answers.extend(admitted),
                Err(error) if error.is_of_one_row() && classify(&error).class != Class::Refused => {
                    if answers.is_empty() {
                        return Err(error);
                    }
                    answers.resize(batch.len(), Admitted::Refused(classify(&error)));
                    return Ok(());
                }
                Err(error) if error.is_of_one_row() && rows.len() > 1 => {
                    let (first, second) = rows.split_at(rows.len() / 2);
                    ranges.extend([second, first]);
                }
                Err(error) if error.is_of_one_row() => answers.push(Admitted::Refused(classify(&error))),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    async fn admit_rows(&self, rows: &[NewInboxRow]) -> Result<Vec<Admitted>, Error> {
        if rows.is_empty() {
            return Ok(Vec::new());
        }
        let Some(payloads) = rows.iter().map(|row| std::str::from_utf8(&row.payload).ok()).collect::<Option<Vec<_>>>()
        else {
            return self.admit_around_bad_utf8(rows).await;
        };
        let texts = |of: fn(&NewInboxRow) -> &str| rows.iter().map(of).collect::<Vec<_>>();
        let nullable = |of: fn(&NewInboxRow) -> Option<&str>| rows.iter().map(of).collect::<Vec<_>>();
        let published = rows.iter().map(|row| row.published_at_us.map(Ticks::from_unix_us)).collect::<Vec<_>>();
        let args = Args::new()
            .bind(rows.iter().map(|row| row.id).collect::<Vec<_>>())
            .bind(texts(|row| &row.source))
            .bind(texts(|row| &row.idempotency_key))
            .bind(nullable(|row| row.aggregate_id.as_deref()))
            .bind(nullable(|row| row.event_type.as_deref()))
            .bind(payloads)
            .bind(texts(|row| &row.headers))
            .bind(nullable(|row| row.correlation_id.as_deref()))
            .bind(texts(|row| row.consumption.as_str()))
            .bind(nullable(|row| row.topic.as_deref()))
            .bind(nullable(|row| row.trace_parent.as_deref()))
            .bind(rows.iter().map(|row| row.delay_us).collect::<Vec<_>>())
            .bind(published)
            .bind(nullable(|row| row.dead.as_deref()));
        let mut stored = HashSet::with_capacity(rows.len());
        for row in &self.db.rows(&self.sql(ADMIT), args).await? {
            stored.insert(Cells::of(row).next::<Uuid>()?);
        }
        let mut answers: Vec<Admitted> = rows
            .iter()
            .map(|row| if stored.contains(&row.id) { Admitted::New(row.id) } else { Admitted::Duplicate })
            .collect();
        if self.features().merging_keys && stored.len() < rows.len() {
            self.tell_collisions(rows, &mut answers).await?;
        }
        Ok(answers)
    }

    /// A body that is not UTF-8 cannot even be sent; the intake never lets one through.
    async fn admit_around_bad_utf8(&self, rows: &[NewInboxRow]) -> Result<Vec<Admitted>, Error> {
        let mut answers = Vec::with_capacity(rows.len());
        for row in rows {
            if std::str::from_utf8(&row.payload).is_ok() {
                answers.extend(Box::pin(self.admit_rows(std::slice::from_ref(row))).await?);
            } else {
                answers.push(Admitted::Refused(Fault::refused(
                    "value",
                    "the payload is not UTF-8, so it is no JSON text",
                )));
            }
        }
        Ok(answers)
    }

    async fn tell_collisions(&self, rows: &[NewInboxRow], answers: &mut [Admitted]) -> Result<(), Error> {
        let args = Args::new()
            .bind(rows.iter().map(|row| row.source.as_str()).collect::<Vec<_>>())
            .bind(rows.iter().map(|row| row.idempotency_key.as_str()).collect::<Vec<_>>());
        let mut same = HashSet::new();
        for row in &self.db.rows(&self.sql(SAME_BYTES), args).await? {
            same.insert(Cells::of(row).next::<i64>()?);
        }
        for (answer, ord) in answers.iter_mut().zip(1..) {
            if *answer == Admitted::Duplicate && !same.contains(&ord) {
                *answer = Admitted::Collision(Fault::new(
                    Class::Misconfigured,
                    "collation",
                    "the unique constraint of the inbox takes another key for this one: the collation of source or \
                     idempotency_key is not deterministic. Change these columns to COLLATE \"C\"",
                ));
            }
        }
        Ok(())
    }

    async fn waiting_rows(
        &self,
        fence: &Fence,
        lanes: LaneSet,
        limit: u32,
        exclude: &[Uuid],
    ) -> Result<Vec<PushRow>, Error> {
        let sql = self.reading("waiting", WAITING);
        let args = Args::new()
            .bind(fence.worker.as_str())
            .bind(fence.token)
            .bind(lanes.as_i64())
            .bind(i64::from(limit))
            .bind(exclude);
        let rows = self.db.rows(&sql, args).await?;
        let mut waiting = Vec::with_capacity(rows.len());
        let (_, found) = rows.split_first().ok_or(Error::Fenced)?;
        for row in found {
            let mut cells = Cells::of(row);
            waiting.push(PushRow {
                id: cells.next()?,
                source: cells.next()?,
                idempotency_key: cells.next()?,
                aggregate_id: cells.next()?,
                event_type: cells.next()?,
                topic: cells.next()?,
                headers: cells.next()?,
                correlation_id: cells.next()?,
                crashes: cells.next()?,
                trace_parent: cells.next()?,
            });
        }
        Ok(waiting)
    }

    async fn forward_batch(&self, fence: &Fence, batch: &[Forward], max_attempts: i32) -> Result<Forwarded, Error> {
        let mut forwarded = Forwarded::default();
        match self.forward_rows(fence, batch, max_attempts).await {
            Ok(done) => forwarded = done,
            Err(error) if error.is_of_one_row() => {
                for row in batch {
                    match self.forward_rows(fence, std::slice::from_ref(row), max_attempts).await {
                        Ok(done) => {
                            forwarded.lost.extend(done.lost);
                            forwarded.held.extend(done.held);
                        }
                        Err(error) if error.is_of_one_row() => {
                            forwarded.refused.push((row.inbox_id, classify(&error)));
                        }
                        Err(error) => return Err(error),
                    }
                }
            }
            Err(error) => return Err(error),
        }
        Ok(forwarded)
    }

    /// Lost and held rows of a batch that the database took.
    async fn forward_rows(&self, fence: &Fence, batch: &[Forward], max_attempts: i32) -> Result<Forwarded, Error> {
        let args = Args::new()
            .bind(fence.worker.as_str())
            .bind(fence.token)
            .bind(batch.iter().map(|row| row.inbox_id).collect::<Vec<_>>())
            .bind(batch.iter().map(|row| row.outbox_id).collect::<Vec<_>>())
            .bind(batch.iter().map(|row| row.topic.as_str()).collect::<Vec<_>>())
            .bind(batch.iter().map(|row| row.headers.as_str()).collect::<Vec<_>>())
            .bind(max_attempts);
        let sql = self.fenced("forward", FORWARD);
        let unmarked = |rows: &[PgRow]| -> Result<Vec<Uuid>, Error> {
            let marked: HashSet<Uuid> = crate::outbox::fenced_ids(rows)?.into_iter().collect();
            Ok(batch.iter().map(|row| row.inbox_id).filter(|id| !marked.contains(id)).collect())
        };
        if self.features().lanes {
            let lost = unmarked(&self.db.rows(&sql, args).await?)?;
            return Ok(Forwarded { lost, ..Forwarded::default() });
        }
        // The second statement's snapshot must be taken after the lock was got: see `mark`.
        let mut tx = self.db.begin().await?;
        tx.rows(&self.sql(FORWARD_LOCK), Args::new()).await?;
        let rest = unmarked(&tx.rows(&sql, args).await?)?;
        let mut held = HashSet::new();
        if !rest.is_empty() {
            for row in &tx.rows(&self.sql(STILL_PENDING), Args::new().bind(&rest)).await? {
                held.insert(Cells::of(row).next::<Uuid>()?);
            }
        }
        tx.commit().await?;
        let (held, lost) = rest.into_iter().partition(|id| held.contains(id));
        Ok(Forwarded { lost, held, refused: Vec::new() })
    }

    async fn backlog_by_source(&self, bound: u64) -> Result<Vec<SourceBacklog>, Error> {
        let bound = i64::try_from(bound).unwrap_or(i64::MAX);
        let args = Args::new().bind(bound).bind(bound.saturating_mul(BACKLOG_FACTOR));
        let rows = self.db.rows(&self.sql(BACKLOG), args).await?;
        let mut sources = Vec::with_capacity(rows.len());
        for row in &rows {
            let mut cells = Cells::of(row);
            let (source, consumption): (String, String) = (cells.next()?, cells.next()?);
            let (pending, dead): (i64, i64) = (cells.next()?, cells.next()?);
            let (now, oldest) = (cells.ticks()?, cells.ticks()?);
            sources.push(SourceBacklog {
                source,
                consumption: if consumption == "pull" { Consumption::Pull } else { Consumption::Push },
                pending: pending.unsigned_abs(),
                dead: dead.unsigned_abs(),
                oldest_pending_age_us: now.zip(oldest).map_or(0, |(now, oldest)| now.since(oldest).max(0)),
            });
        }
        Ok(sources)
    }
}

#[async_trait]
impl Inbox for PostgresStore {
    async fn admit(&self, batch: &[NewInboxRow]) -> Result<Vec<Admitted>, Fault> {
        let mut answers = Vec::with_capacity(batch.len());
        self.admit_batch(batch, &mut answers).await?;
        Ok(answers)
    }

    async fn waiting(
        &self,
        fence: &Fence,
        lanes: LaneSet,
        limit: u32,
        exclude: &[Uuid],
    ) -> Result<Vec<PushRow>, Fault> {
        Ok(self.waiting_rows(fence, lanes, limit, exclude).await?)
    }

    async fn forward(&self, fence: &Fence, batch: &[Forward], max_attempts: i32) -> Result<Forwarded, Fault> {
        Ok(self.forward_batch(fence, batch, max_attempts).await?)
    }

    fn counts_refusals(&self) -> bool {
        self.features().inbox_crashes
    }

    async fn set_aside(&self, fence: &Fence, id: Uuid, error: Option<&str>, delay_us: i64) -> Result<bool, Fault> {
        let args = Args::new().bind(fence.worker.as_str()).bind(fence.token).bind(id).bind(error).bind(delay_us);
        let rows = self.db.rows(&self.fenced("set_aside", SET_ASIDE), args).await?;
        Ok(!crate::outbox::fenced_ids(&rows)?.is_empty())
    }

    async fn inbox_backlog(&self, bound: u64) -> Result<Vec<SourceBacklog>, Fault> {
        Ok(self.backlog_by_source(bound).await?)
    }

    async fn next_push_due_in_us(&self, lanes: LaneSet) -> Result<Option<i64>, Fault> {
        let rows = self.db.rows(&self.sql(NEXT_PUSH), Args::new().bind(lanes.as_i64())).await?;
        let Some(row) = rows.first() else { return Ok(None) };
        let mut cells = Cells::of(row);
        let (now, due) = (cells.ticks()?, cells.ticks()?);
        Ok(now.zip(due).map(|(now, due)| due.since(now).max(0)))
    }
}

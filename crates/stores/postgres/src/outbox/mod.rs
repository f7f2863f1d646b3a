//! The outbox behind its port: the hot path ([`poll`]), marks, recovery, fan-out, gauges.

mod poll;

use async_trait::async_trait;
use queuebox_core::{
    Fault, LaneSet, Uuid,
    message::{DeadCode, EXPANDED, Position, Stamp},
    ports::{
        Fence, Outbox,
        outbox::{Buried, Expansion, OutboxBacklog, Polled, Read, Recovered, Settle},
    },
};
use sqlx::postgres::PgRow;

use crate::{PostgresStore, cells::Cells, db::Args, error::Error, values::Ticks};

pub(crate) use poll::{CONDITION, FENCE, HEADS, target};

/// At most so many rows are recovered in one call.
const RECOVER_MAX: i64 = 2_000;
/// A statement of its own costs as much as settling some twenty rows; two at a time use the second core, and the flush of one does
/// not keep the other waiting (measured, ARCHITECTURE "Measured and taken").
const SETTLES_BESIDE: usize = 128;

/// Until the end of the worker's own lease, so that whoever takes the lane over finds the rows' ended as well. Rows that bear our token
/// already are ours: the reply of an earlier try may have been lost. Without lanes only the lock makes the look at the other rows of a key safe.
const MARK: &str = "
@FENCE@, marked AS (
    UPDATE {outbox} o
       SET {o.state} = 'processing', {o.claim_token} = $2, {o.claimed_at} = clock_timestamp(),
           {o.updated_at} = clock_timestamp(),
           {o.lease_expires_at} = coalesce((SELECT lease FROM fence), clock_timestamp() + $3::bigint * interval '1 millisecond')
      FROM unnest($4::uuid[], $5::integer[], $6::timestamptz[]) AS s(id, attempt, scheduled_at)
     WHERE EXISTS (SELECT FROM fence)
       AND o.{o.id} = s.id AND o.{o.state} = 'pending' AND o.{o.attempt} = s.attempt AND o.{o.scheduled_at} = s.scheduled_at@HEADS@
    RETURNING o.{o.id} AS id
)
SELECT NULL::uuid FROM fence UNION ALL SELECT id FROM marked
UNION ALL
SELECT o.{o.id} FROM {outbox} o
 WHERE EXISTS (SELECT FROM fence) AND o.{o.id} = ANY ($4::uuid[]) AND o.{o.state} = 'processing' AND o.{o.claim_token} = $2
   AND o.{o.lease_expires_at} > clock_timestamp()";

/// The lock that serialises claims below version 14. It belongs to the transaction, so it works behind a pooler.
const CLAIM_LOCK: &str =
    "SELECT pg_advisory_xact_lock(hashtextextended('queuebox claim ' || '{outbox}'::regclass::oid::text, 0))";

/// Through `idx_outbox_processing`.
const RECOVER: &str = "
@FENCE@, expired AS MATERIALIZED (
    SELECT o.{o.id} AS id
      FROM {outbox} o
     WHERE o.{o.state} = 'processing' AND EXISTS (SELECT FROM fence)
       AND ($3::bigint = -1 OR ($3::bigint >> {o.lane}) & 1 = 1)
       AND (o.{o.lease_expires_at} IS NULL OR o.{o.lease_expires_at} <= (SELECT now FROM clock))
     ORDER BY o.{o.sequence}, o.{o.id} LIMIT $4
       FOR UPDATE SKIP LOCKED
), recovered AS (
    UPDATE {outbox} o
       SET
           {o.state} = CASE WHEN o.{o.crashes} + 1 >= $5::integer THEN 'dead' ELSE 'pending' END, --if crashes
           {o.last_error} = CASE WHEN o.{o.crashes} + 1 >= $5::integer THEN $6::text ELSE o.{o.last_error} END, --if crashes
           {o.crashes} = o.{o.crashes} + 1, --if crashes
           {o.state} = 'pending', --unless crashes
           {o.updated_at} = clock_timestamp(),
           {o.claimed_at} = NULL, {o.claim_token} = NULL, {o.lease_expires_at} = NULL
      FROM expired e
     WHERE o.{o.id} = e.id AND o.{o.state} = 'processing'
       AND (o.{o.lease_expires_at} IS NULL OR o.{o.lease_expires_at} <= clock_timestamp())
    RETURNING o.{o.id} AS id, o.{o.state} AS state, o.{o.topic} AS topic, nullif(o.{o.key}, '') AS key, o.{o.attempt} AS attempt,
              o.{o.created_at} AS created_at,
              o.{o.parent_id} AS parent_id, --if fan_out
              o.{o.destination} AS destination --if fan_out
              NULL::text AS destination --unless fan_out
), parents AS ( --if delete_parents
    DELETE FROM {outbox} p --if delete_parents
     WHERE p.{o.id} IN (SELECT parent_id FROM recovered WHERE state = 'dead') AND p.{o.state} = 'sent' --if delete_parents
       AND NOT EXISTS (SELECT FROM {outbox} c WHERE c.{o.parent_id} = p.{o.id} AND c.{o.state} IN ('pending', 'processing') --if delete_parents
                        AND c.{o.id} NOT IN (SELECT id FROM recovered WHERE state = 'dead')) --if delete_parents
), waiting AS (
    SELECT count(*) AS rows, coalesce(bit_or(1::bigint << {o.lane}), 0) AS lanes
      FROM {outbox} o
     WHERE o.{o.state} = 'processing' AND ($3::bigint = -1 OR ($3::bigint >> {o.lane}) & 1 = 1)
       AND (o.{o.claim_token} IS DISTINCT FROM $2 OR o.{o.lease_expires_at} <= (SELECT now FROM clock))
       AND NOT EXISTS (SELECT FROM recovered r WHERE r.id = o.{o.id})
)
SELECT (SELECT count(*) FROM recovered WHERE state = 'pending'), (SELECT rows FROM waiting), (SELECT lanes FROM waiting),
       d.id, d.topic, d.key, d.destination, d.attempt, d.created_at
  FROM fence LEFT JOIN recovered d ON d.state = 'dead'";

const EXPAND: &str = "
@FENCE@, parent AS (
    UPDATE {outbox} o
       SET {o.state} = 'sent', {o.updated_at} = clock_timestamp(), {o.last_error} = $10::text,
           {o.crashes} = 0, --if crashes
           {o.claimed_at} = NULL, {o.claim_token} = NULL, {o.lease_expires_at} = NULL
      FROM unnest($3::uuid[], $4::boolean[], $5::integer[], $6::timestamptz[]) AS s(id, marked, attempt, scheduled_at)
     WHERE EXISTS (SELECT FROM fence)@CONDITION@
    RETURNING o.*
), child AS (
    INSERT INTO {outbox} ({o.id}, {o.topic}, {o.key}, {o.payload}, {o.headers}, {o.aggregate_type}, {o.max_attempts},
                          {o.trace_parent}, --if trace
                          {o.scheduled_at}, {o.created_at}, {o.sequence}, {o.destination}, {o.parent_id})
    SELECT c.id, p.{o.topic}, p.{o.key}, p.{o.payload}, p.{o.headers}, p.{o.aggregate_type}, p.{o.max_attempts},
           p.{o.trace_parent}, --if trace
           p.{o.scheduled_at}, p.{o.created_at}, p.{o.sequence}, c.destination, p.{o.id}
      FROM parent p JOIN unnest($7::uuid[], $8::uuid[], $9::text[]) AS c(parent, id, destination) ON c.parent = p.{o.id}
     ORDER BY p.{o.sequence}, p.{o.id}
)
SELECT NULL::uuid FROM fence UNION ALL SELECT {o.id} FROM parent";

/// Counts stop at the bound. The oldest row is looked for among the rows with the lowest sequences, where it stands unless a
/// transaction stayed open for longer than it took to insert `bound` rows behind it.
const BACKLOG: &str = "
WITH pending AS MATERIALIZED (
    SELECT o.{o.created_at} AS created_at, o.{o.scheduled_at} AS scheduled_at
      FROM {outbox} o WHERE o.{o.state} = 'pending'
     ORDER BY o.{o.sequence} --if lanes
     LIMIT $1
), clock AS MATERIALIZED (SELECT clock_timestamp() AS now)
SELECT (SELECT count(*) FROM pending),
       (SELECT count(*) FROM (SELECT FROM {outbox} o WHERE o.{o.state} = 'dead' LIMIT $1) dead),
       clock.now, (SELECT min(created_at) FROM pending), (SELECT min(scheduled_at) FROM pending)
  FROM clock";

/// The ids in the first column; the first row is the fence's and says that it holds.
pub(crate) fn fenced_ids(rows: &[PgRow]) -> Result<Vec<Uuid>, Error> {
    if rows.is_empty() {
        return Err(Error::Fenced);
    }
    let mut ids = Vec::with_capacity(rows.len());
    for row in rows {
        ids.extend(Cells::of(row).next::<Option<Uuid>>()?);
    }
    Ok(ids)
}

/// Where the row that was buried stands in an answer to [`RECOVER`].
const BURIED_COLUMNS: usize = 3;

fn buried(mut cells: Cells<'_>, error: &str) -> Result<Option<Buried>, Error> {
    let Some(id) = cells.next::<Option<Uuid>>()? else { return Ok(None) };
    Ok(Some(Buried {
        id,
        topic: cells.next()?,
        key: cells.next()?,
        destination: cells.next()?,
        attempt: cells.next()?,
        created_at_us: cells.ticks()?.map_or(0, Ticks::unix_us),
        error: error.to_owned(),
    }))
}

impl PostgresStore {
    pub(crate) fn fenced(&self, name: &'static str, template: &'static str) -> std::sync::Arc<str> {
        self.variant(name, 0, |features| {
            let mut words = features.words();
            if features.lanes {
                words.push("locks");
            }
            let parts = [("@FENCE@", FENCE), ("@CONDITION@", CONDITION), ("@HEADS@", HEADS)];
            (parts.iter().fold(template.to_owned(), |sql, (name, part)| sql.replace(name, part)), words)
        })
    }

    async fn mark_rows(&self, fence: &Fence, rows: &[(Position, Stamp)], lease_ms: u64) -> Result<Vec<Uuid>, Error> {
        let mut rows = rows.to_vec();
        rows.sort_by_key(|(position, _)| *position);
        let args = Args::new()
            .bind(fence.worker.as_str())
            .bind(fence.token)
            .bind(i64::try_from(lease_ms).unwrap_or(i64::MAX))
            .bind(rows.iter().map(|(position, _)| position.id).collect::<Vec<_>>())
            .bind(rows.iter().map(|(_, stamp)| stamp.attempt).collect::<Vec<_>>())
            .bind(rows.iter().map(|(_, stamp)| Ticks(stamp.scheduled_at)).collect::<Vec<_>>());
        let sql = self.fenced("mark", MARK);
        if self.features().lanes {
            return fenced_ids(&self.db.rows(&sql, args).await?);
        }
        // Two statements: the second one's snapshot must be taken after the lock was got.
        let mut tx = self.db.begin().await?;
        tx.rows(&self.sql(CLAIM_LOCK), Args::new()).await?;
        let answer = tx.rows(&sql, args).await?;
        tx.commit().await?;
        fenced_ids(&answer)
    }

    async fn recover_rows(&self, fence: &Fence, lanes: LaneSet, max_crashes: i32) -> Result<Recovered, Error> {
        let error = DeadCode::Crashes.because(&format!(
            "the lease of this row ended {max_crashes} times in a row without an outcome; it seems to end its worker. \
             Look at the log of that time, then replay it"
        ));
        let args = Args::new()
            .bind(fence.worker.as_str())
            .bind(fence.token)
            .bind(lanes.as_i64())
            .bind(RECOVER_MAX)
            .bind(max_crashes)
            .bind(error.as_str());
        let rows = self.db.rows(&self.fenced("recover", RECOVER), args).await?;
        let mut cells = Cells::of(rows.first().ok_or(Error::Fenced)?);
        let (pending, unexpired, waiting): (i64, i64, i64) = (cells.next()?, cells.next()?, cells.next()?);
        let mut dead = Vec::new();
        for row in &rows {
            dead.extend(buried(Cells::at(row, BURIED_COLUMNS), &error)?);
        }
        Ok(Recovered {
            pending: pending.unsigned_abs(),
            dead,
            unexpired: unexpired.unsigned_abs(),
            waiting: LaneSet::from_bits(waiting.cast_unsigned()),
        })
    }

    async fn expand_rows(&self, fence: &Fence, parents: &[Expansion]) -> Result<Vec<Uuid>, Error> {
        if !self.features().fan_out {
            return Err(Error::Misconfigured {
                code: "fan_out",
                detail: "a route with several destinations needs schema version 12; run \"queuebox migrate\""
                    .to_owned(),
            });
        }
        let mut parents: Vec<&Expansion> = parents.iter().collect();
        parents.sort_by_key(|expansion| expansion.parent);
        let children: Vec<_> = parents
            .iter()
            .flat_map(|expansion| expansion.children.iter().map(|child| (expansion.parent.id, child)))
            .collect();
        let args = Args::new()
            .bind(fence.worker.as_str())
            .bind(fence.token)
            .bind(parents.iter().map(|expansion| expansion.parent.id).collect::<Vec<_>>())
            .bind(parents.iter().map(|expansion| expansion.stamp.marked).collect::<Vec<_>>())
            .bind(parents.iter().map(|expansion| expansion.stamp.attempt).collect::<Vec<_>>())
            .bind(parents.iter().map(|expansion| Ticks(expansion.stamp.scheduled_at)).collect::<Vec<_>>())
            .bind(children.iter().map(|(parent, _)| *parent).collect::<Vec<_>>())
            .bind(children.iter().map(|(_, child)| child.id).collect::<Vec<_>>())
            .bind(children.iter().map(|(_, child)| child.destination.as_str()).collect::<Vec<_>>())
            .bind(EXPANDED);
        let done = fenced_ids(&self.db.rows(&self.fenced("expand", EXPAND), args).await?)?;
        Ok(parents.iter().map(|expansion| expansion.parent.id).filter(|id| !done.contains(id)).collect())
    }

    async fn backlog(&self, bound: u64) -> Result<OutboxBacklog, Error> {
        let bound = i64::try_from(bound).unwrap_or(i64::MAX);
        let rows = self.db.rows(&self.sql(BACKLOG), Args::new().bind(bound)).await?;
        let Some(row) = rows.first() else { return Ok(OutboxBacklog::default()) };
        let mut cells = Cells::of(row);
        let (pending, dead): (i64, i64) = (cells.next()?, cells.next()?);
        let (now, created, due) = (cells.ticks()?, cells.ticks()?, cells.ticks()?);
        let age = |since: Option<Ticks>| now.zip(since).map_or(0, |(now, since)| now.since(since).max(0));
        Ok(OutboxBacklog {
            pending: pending.unsigned_abs(),
            dead: dead.unsigned_abs(),
            oldest_pending_age_us: age(created),
            oldest_due_age_us: age(due),
        })
    }
}

#[async_trait]
impl Outbox for PostgresStore {
    fn settles_beside(&self) -> Option<usize> {
        Some(SETTLES_BESIDE)
    }

    async fn poll(&self, fence: &Fence, settles: &[Settle], read: Option<&Read>) -> Result<Polled, Fault> {
        Ok(self.poll_once(fence, settles, read).await?)
    }

    async fn mark(&self, fence: &Fence, rows: &[(Position, Stamp)], lease_ms: u64) -> Result<Vec<Uuid>, Fault> {
        Ok(self.mark_rows(fence, rows, lease_ms).await?)
    }

    async fn recover(&self, fence: &Fence, lanes: LaneSet, max_crashes: i32) -> Result<Recovered, Fault> {
        Ok(self.recover_rows(fence, lanes, max_crashes).await?)
    }

    async fn expand(&self, fence: &Fence, parents: &[Expansion]) -> Result<Vec<Uuid>, Fault> {
        Ok(self.expand_rows(fence, parents).await?)
    }

    async fn outbox_backlog(&self, bound: u64) -> Result<OutboxBacklog, Fault> {
        Ok(self.backlog(bound).await?)
    }

    async fn woken(&self) {
        self.wake.woken().await;
    }
}

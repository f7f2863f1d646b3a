//! Finished rows behind their port: pages, replay, discard (contract 11). Never on the hot path. Retention has a file of its own.

use std::sync::Arc;

use async_trait::async_trait;
use queuebox_core::{
    Fault, Uuid,
    message::{Consumption, EXPANDED_PREFIX, State},
    ports::{
        Ledger, Scope,
        ledger::{Direction, LedgerCursor, LedgerEntry, LedgerFilter, LedgerRow, Pruned},
        outbox::PruneRule,
    },
};
use sqlx::postgres::PgRow;

use crate::{PostgresStore, cells::Cells, db::Args, error::Error, values::Ticks};

/// Columns of a page, the same list for both tables.
const OUTBOX_ROW: &str = "
       o.{o.id}, o.{o.state}, o.{o.topic}, o.{o.key},
       o.{o.destination}, o.{o.parent_id}, --if fan_out
       NULL::text, NULL::uuid, --unless fan_out
       o.{o.sequence}, o.{o.max_attempts}, NULL::text, NULL::text, NULL::text, NULL::text, o.{o.attempt},
       o.{o.crashes}, --if crashes
       0, --unless crashes
       o.{o.last_error}, o.{o.created_at}, o.{o.scheduled_at},
       CASE WHEN o.{o.state} IN ('sent', 'dead') THEN o.{o.updated_at} END";

const INBOX_ROW: &str = "
       i.{i.id}, i.{i.state},
       i.{i.topic}, --if topics
       NULL::text, --unless topics
       i.{i.aggregate_id}, NULL::text, NULL::uuid, NULL::bigint, NULL::integer, i.{i.source}, i.{i.idempotency_key},
       i.{i.event_type}, i.{i.consumption}, i.{i.attempt},
       i.{i.crashes}, --if inbox_crashes
       0, --unless inbox_crashes
       i.{i.last_error}, i.{i.created_at}, i.{i.scheduled_at}, i.{i.processed_at}";

/// A filter that is not given is an empty list or NULL. Planned for its values, so such conditions fall away, and the states find
/// `idx_outbox_dead` where only dead rows are asked for.
const OUTBOX_FILTER: &str = "
  FROM {outbox} o
 WHERE (cardinality($1::text[]) = 0 OR o.{o.state} = ANY ($1::text[]))
   AND (cardinality($2::uuid[]) = 0 OR o.{o.id} = ANY ($2::uuid[]))
   AND (cardinality($3::text[]) = 0 OR o.{o.topic} = ANY ($3::text[]))
   AND ($4::text IS NULL OR o.{o.key} = $4)
   AND ($8::text IS NULL OR starts_with(o.{o.last_error}, $8 || ':'))
   AND ($9::timestamptz IS NULL OR o.{o.created_at} > $9)
   AND ($10::timestamptz IS NULL OR o.{o.created_at} < $10)
   AND ($11::uuid IS NULL OR o.{o.parent_id} = $11) --if fan_out
   AND $11::uuid IS NULL --unless fan_out";

const INBOX_FILTER: &str = "
  FROM {inbox} i
 WHERE (cardinality($1::text[]) = 0 OR i.{i.state} = ANY ($1::text[]))
   AND (cardinality($2::uuid[]) = 0 OR i.{i.id} = ANY ($2::uuid[]))
   AND ($4::text IS NULL OR i.{i.aggregate_id} = $4)
   AND (cardinality($5::text[]) = 0 OR i.{i.source} = ANY ($5::text[]))
   AND ($6::text IS NULL OR i.{i.event_type} = $6)
   AND ($7::text IS NULL OR i.{i.consumption} = $7)
   AND ($8::text IS NULL OR starts_with(i.{i.last_error}, $8 || ':'))
   AND ($9::timestamptz IS NULL OR i.{i.created_at} > $9)
   AND ($10::timestamptz IS NULL OR i.{i.created_at} < $10)";

/// `id` settles ties, so a page that ends inside equal times goes on behind the last row.
const PAGE: &str = "SELECT @ROW@@FILTER@
   AND ($12::timestamptz IS NULL OR (@T@.{@T@.created_at}, @T@.{@T@.id}) @THAN@ ($12, $13::uuid))
 ORDER BY @T@.{@T@.created_at} @ORDER@, @T@.{@T@.id} @ORDER@ LIMIT $14";

const OUTBOX_ENTRY: &str = "SELECT @ROW@, o.{o.payload}::text, o.{o.headers}::text FROM {outbox} o WHERE o.{o.id} = $1";

const INBOX_ENTRY: &str = "SELECT @ROW@, i.{i.payload}::text, i.{i.headers}::text FROM {inbox} i WHERE i.{i.id} = $1";

/// Locked in the order of `sequence`, like every write. A parent that was expanded stays: its id stands for its children.
const OUTBOX_REQUEUE: &str = "
WITH locked AS MATERIALIZED (
    SELECT o.{o.id} AS id FROM {outbox} o
     WHERE o.{o.id} = ANY ($1::uuid[]) AND o.{o.state} = ANY ($2::text[]) AND o.{o.state} IN ('sent', 'dead')
       AND NOT (o.{o.state} = 'sent' AND starts_with(coalesce(o.{o.last_error}, ''), $3::text))
       AND NOT EXISTS (SELECT FROM {outbox} c WHERE c.{o.parent_id} = o.{o.id}) --if fan_out
     ORDER BY o.{o.sequence}, o.{o.id} FOR UPDATE
)
UPDATE {outbox} o
   SET {o.state} = 'pending', {o.attempt} = 0, {o.scheduled_at} = clock_timestamp(), {o.updated_at} = clock_timestamp(),
       {o.crashes} = 0, --if crashes
       {o.last_error} = NULL, {o.claimed_at} = NULL, {o.claim_token} = NULL, {o.lease_expires_at} = NULL
  FROM locked l
 WHERE o.{o.id} = l.id AND o.{o.state} = ANY ($2::text[]) AND o.{o.state} IN ('sent', 'dead')
RETURNING o.{o.id}";

const INBOX_REQUEUE: &str = "
WITH locked AS MATERIALIZED (
    SELECT i.{i.id} AS id FROM {inbox} i
     WHERE i.{i.id} = ANY ($1::uuid[]) AND i.{i.state} = ANY ($2::text[]) AND i.{i.state} IN ('processed', 'dead')
     ORDER BY i.{i.id} FOR UPDATE
)
UPDATE {inbox} i
   SET {i.state} = 'pending', {i.attempt} = 0, {i.scheduled_at} = clock_timestamp(), {i.processed_at} = NULL,
       {i.crashes} = 0, --if inbox_crashes
       {i.last_error} = NULL, {i.claimed_at} = NULL, {i.claim_token} = NULL, {i.lease_expires_at} = NULL
  FROM locked l
 WHERE i.{i.id} = l.id AND i.{i.state} = ANY ($2::text[]) AND i.{i.state} IN ('processed', 'dead')
RETURNING i.{i.id}";

const OUTBOX_DISCARD: &str = "
WITH gone AS (
    DELETE FROM {outbox} o WHERE o.{o.id} = ANY ($1::uuid[]) AND o.{o.state} = 'dead'
    RETURNING o.{o.id} AS id
    , o.{o.parent_id} AS parent_id --if delete_parents
), parents AS ( --if delete_parents
    DELETE FROM {outbox} p WHERE p.{o.id} IN (SELECT parent_id FROM gone) AND p.{o.state} = 'sent' --if delete_parents
       AND NOT EXISTS (SELECT FROM {outbox} c WHERE c.{o.parent_id} = p.{o.id} AND c.{o.state} IN ('pending', 'processing')) --if delete_parents
)
SELECT id FROM gone";

const INBOX_DISCARD: &str = "
DELETE FROM {inbox} i WHERE i.{i.id} = ANY ($1::uuid[]) AND i.{i.state} = 'dead' RETURNING i.{i.id}";

impl PostgresStore {
    async fn list(
        &self,
        table: Scope,
        filter: &LedgerFilter,
        direction: Direction,
        after: Option<LedgerCursor>,
        limit: u32,
    ) -> Result<Vec<LedgerRow>, Error> {
        let newest = direction == Direction::NewestFirst;
        let name = if newest { "page_newest" } else { "page_oldest" };
        let sql = self.variant(name, u32::from(table == Scope::Inbox), |features| {
            let (row, rows, alias) = match table {
                Scope::Outbox => (OUTBOX_ROW, OUTBOX_FILTER, "o"),
                Scope::Inbox => (INBOX_ROW, INBOX_FILTER, "i"),
            };
            let (than, order) = if newest { ("<", "DESC") } else { (">", "ASC") };
            let text = PAGE.replace("@ROW@", row).replace("@FILTER@", rows).replace("@T@", alias);
            (text.replace("@THAN@", than).replace("@ORDER@", order), features.words())
        });
        let states: Vec<&str> = filter.states.iter().map(|state| state.as_str()).collect();
        let args = Args::new()
            .bind(states)
            .bind(&filter.ids)
            .bind(&filter.topics)
            .bind(filter.key.as_deref())
            .bind(&filter.sources)
            .bind(filter.event_type.as_deref())
            .bind(filter.consumption.map(Consumption::as_str))
            .bind(filter.code.as_deref())
            .bind(filter.created_after_us.map(Ticks::from_unix_us))
            .bind(filter.created_before_us.map(Ticks::from_unix_us))
            .bind(filter.parent_id)
            .bind(after.map(|cursor| Ticks(cursor.created_at)))
            .bind(after.map(|cursor| cursor.id))
            .bind(i64::from(limit));
        self.db.rows_planned(&sql, args).await?.iter().map(|row| ledger_row(&mut Cells::of(row))).collect()
    }

    async fn whole(&self, table: Scope, id: Uuid) -> Result<Option<LedgerEntry>, Error> {
        let sql = self.variant("entry", u32::from(table == Scope::Inbox), |features| {
            let text = match table {
                Scope::Outbox => OUTBOX_ENTRY.replace("@ROW@", OUTBOX_ROW),
                Scope::Inbox => INBOX_ENTRY.replace("@ROW@", INBOX_ROW),
            };
            (text, features.words())
        });
        let rows = self.db.rows(&sql, Args::new().bind(id)).await?;
        let Some(row) = rows.first() else { return Ok(None) };
        let mut cells = Cells::of(row);
        let row = ledger_row(&mut cells)?;
        Ok(Some(LedgerEntry { row, payload: cells.next()?, headers: cells.next()? }))
    }

    async fn ids(&self, sql: &Arc<str>, args: Args) -> Result<Vec<Uuid>, Error> {
        self.db.rows(sql, args).await?.iter().map(first_id).collect()
    }
}

fn first_id(row: &PgRow) -> Result<Uuid, Error> {
    Cells::of(row).next()
}

fn ledger_row(cells: &mut Cells<'_>) -> Result<LedgerRow, Error> {
    let id = cells.next()?;
    let state: String = cells.next()?;
    let (topic, key, destination, parent_id) = (cells.next()?, cells.next()?, cells.next()?, cells.next()?);
    let (sequence, max_attempts) = (cells.next()?, cells.next()?);
    let (source, idempotency_key, event_type) = (cells.next()?, cells.next()?, cells.next()?);
    let consumption: Option<String> = cells.next()?;
    let (attempt, crashes, last_error) = (cells.next()?, cells.next()?, cells.next()?);
    let (created_at, scheduled_at, finished_at) = (cells.ticks()?, cells.ticks()?, cells.ticks()?);
    let created_at = created_at.unwrap_or(Ticks(0));
    Ok(LedgerRow {
        id,
        state: State::parse(&state).ok_or_else(|| Error::Misconfigured {
            code: "state",
            detail: format!("row {id} has a state that QueueBox does not know; the states are pending, processing, sent, processed, dead"),
        })?,
        topic,
        key,
        destination,
        parent_id,
        sequence,
        max_attempts,
        source,
        idempotency_key,
        event_type,
        consumption: consumption.map(|word| if word == "pull" { Consumption::Pull } else { Consumption::Push }),
        attempt,
        crashes,
        last_error,
        created_at_us: created_at.unix_us(),
        scheduled_at_us: scheduled_at.unwrap_or(created_at).unix_us(),
        finished_at_us: finished_at.map(Ticks::unix_us),
        cursor: LedgerCursor { created_at: created_at.0, id },
    })
}

#[async_trait]
impl Ledger for PostgresStore {
    async fn page(
        &self,
        table: Scope,
        filter: &LedgerFilter,
        direction: Direction,
        after: Option<LedgerCursor>,
        limit: u32,
    ) -> Result<Vec<LedgerRow>, Fault> {
        Ok(self.list(table, filter, direction, after, limit).await?)
    }

    async fn entry(&self, table: Scope, id: Uuid) -> Result<Option<LedgerEntry>, Fault> {
        Ok(self.whole(table, id).await?)
    }

    async fn requeue(&self, table: Scope, ids: &[Uuid], states: &[State]) -> Result<Vec<Uuid>, Fault> {
        let sql = self.sql(if table == Scope::Outbox { OUTBOX_REQUEUE } else { INBOX_REQUEUE });
        let states: Vec<&str> = states.iter().map(|state| state.as_str()).collect();
        let args = Args::new().bind(ids).bind(states);
        let args = if table == Scope::Outbox { args.bind(EXPANDED_PREFIX) } else { args };
        Ok(self.ids(&sql, args).await?)
    }

    async fn discard(&self, table: Scope, ids: &[Uuid]) -> Result<Vec<Uuid>, Fault> {
        let sql = self.sql(if table == Scope::Outbox { OUTBOX_DISCARD } else { INBOX_DISCARD });
        Ok(self.ids(&sql, Args::new().bind(ids)).await?)
    }

    async fn prune(&self, table: Scope, state: State, rule: PruneRule, batch: u32) -> Result<Pruned, Fault> {
        let allowed = match table {
            Scope::Outbox => matches!(state, State::Sent | State::Dead),
            Scope::Inbox => matches!(state, State::Processed | State::Dead),
        };
        if !allowed {
            return Ok(Pruned::default());
        }
        Ok(self.prune_step(table, state, rule, batch).await?)
    }
}

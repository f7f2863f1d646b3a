//! Retention behind its port (contract 11): each call is one short step of a pass, which the store remembers.
//!
//! Invariants
//! - No statement reads more than a window of the table, a page of an index, or a batch; none grows with the table.
//! - Whatever is remembered may be forgotten or old: each delete repeats the state and the age.

use queuebox_core::{
    Uuid,
    message::State,
    ports::{Scope, ledger::Pruned, outbox::PruneRule},
};
use queuebox_sql::{Boundary, Lap, Part};

use crate::{PostgresStore, cells::Cells, db::Args, error::Error, values::Ticks};

/// No open child may lose its parent.
const CHILDLESS: &str = "
       AND NOT EXISTS (SELECT FROM {outbox} c WHERE c.{o.parent_id} = o.{o.id} AND c.{o.state} IN ('pending', 'processing')) --if fan_out";

/// Through `idx_outbox_dead`, from where the last batch ended: entries of deleted rows stay in an index for as long as somebody's
/// snapshot may see them, and would be passed again by each batch. An array, not IN over the subquery: that was planned as a join
/// which ran the subquery, locks and all, once for each dead row.
const PRUNE_DEAD: &str = "
DELETE FROM {outbox} d
 WHERE d.{o.id} = ANY (ARRAY(
        SELECT o.{o.id} FROM {outbox} o
         WHERE o.{o.state} = 'dead' AND (o.{o.updated_at}, o.{o.id}) <= ($1::timestamptz, $2::uuid)
           AND o.{o.updated_at} >= $4::timestamptz@CHILDLESS@
         ORDER BY o.{o.updated_at} LIMIT $3 FOR UPDATE SKIP LOCKED))
   AND d.{o.state} = 'dead'
RETURNING d.{o.updated_at}";

/// Through `idx_inbox_state_created`, likewise.
const PRUNE_INBOX: &str = "
DELETE FROM {inbox} d
 WHERE d.{i.id} = ANY (ARRAY(
        SELECT i.{i.id} FROM {inbox} i
         WHERE i.{i.state} = $5::text AND (i.{i.created_at}, i.{i.id}) <= ($1::timestamptz, $2::uuid)
           AND i.{i.created_at} >= $4::timestamptz
         ORDER BY i.{i.created_at} LIMIT $3 FOR UPDATE SKIP LOCKED))
   AND d.{i.state} = $5::text
RETURNING d.{i.created_at}";

/// No index knows when a row was sent: it would be one more entry for each message. The table is passed window by window instead
/// (a TID range scan), and a full batch says where it ended, so a pass reads each page once, whatever it finds.
const PRUNE_WINDOW: &str = "
WITH gone AS (
    DELETE FROM {outbox} d
     WHERE d.ctid = ANY (ARRAY(
            SELECT o.ctid FROM {outbox} o
             WHERE o.ctid >= format('(%s,0)', $4::bigint)::tid AND o.ctid < format('(%s,0)', $5::bigint)::tid
               AND o.{o.state} = $6::text AND (o.{o.updated_at}, o.{o.id}) <= ($1::timestamptz, $2::uuid)@CHILDLESS@
             LIMIT $3 FOR UPDATE SKIP LOCKED))
       AND d.{o.state} = $6::text
    RETURNING d.ctid
)
SELECT count(*), (max(ctid)::text::point)[0]::bigint FROM gone";

/// `date_bin` counts in whole microseconds; numeric arithmetic on times took three times as long.
const COUNT_TIMES: &str = "
SELECT date_bin($4::bigint * interval '1 microsecond', o.{o.updated_at}, timestamptz '2000-01-01 00:00:00+00'), count(*)
  FROM {outbox} o
 WHERE o.ctid >= format('(%s,0)', $1::bigint)::tid AND o.ctid < format('(%s,0)', $2::bigint)::tid
   AND o.{o.state} = $3::text AND o.{o.updated_at} >= $5::timestamptz AND o.{o.updated_at} <= $6::timestamptz
 GROUP BY 1";

/// Many rows of one moment, as a bulk load leaves them, by the first 60 bits of their ids.
const COUNT_TIES: &str = "
SELECT (t.tie >> $4::integer) << $4::integer, count(*)
  FROM (SELECT ('x0' || left(replace(o.{o.id}::text, '-', ''), 15))::bit(64)::bigint AS tie FROM {outbox} o
         WHERE o.ctid >= format('(%s,0)', $1::bigint)::tid AND o.ctid < format('(%s,0)', $2::bigint)::tid
           AND o.{o.state} = $3::text AND o.{o.updated_at} = $5::timestamptz) t
 WHERE t.tie BETWEEN $6::bigint AND $7::bigint
 GROUP BY 1";

/// Also which file the table is in: whoever rewrites it (CLUSTER, VACUUM FULL) moves its rows past a walk.
const OUTBOX_BLOCKS: &str = "
SELECT pg_relation_size('{outbox}'::regclass) / current_setting('block_size')::bigint,
       pg_relation_filenode('{outbox}'::regclass)::bigint";

/// Newest dead rows first, a page at a time, through `idx_outbox_dead`.
const DEAD_PAGE: &str = "
SELECT o.{o.updated_at}, o.{o.id} FROM {outbox} o
 WHERE o.{o.state} = 'dead' AND (o.{o.updated_at}, o.{o.id}) < ($1::timestamptz, $2::uuid)
 ORDER BY o.{o.updated_at} DESC, o.{o.id} DESC OFFSET $3 LIMIT 1";

/// Five thousand years; the server's calendar begins at 4713 BC.
const AGE_MAX_MS: u64 = 5_000 * 365 * 86_400_000;

const AGE: &str = "SELECT clock_timestamp() - $1::bigint * interval '1 millisecond'";

/// Pages (8 KiB) that one window covers.
const WINDOW_BLOCKS: i64 = 1_024;

/// Dead rows that one statement passes while it counts.
const DEAD_PAGE_ROWS: u64 = 5_000;

/// Ties are 60 bits of an id.
const TIES: std::ops::RangeInclusive<i64> = 0..=(1 << 60) - 1;

/// Everything up to here may go.
type Cutoff = (Ticks, Uuid);

const HIGHEST_ID: Uuid = Uuid::max();

/// Before every row.
const FIRST: Ticks = Ticks(i64::MIN);

/// Behind every row.
const LAST: Cutoff = (Ticks(i64::MAX), HIGHEST_ID);

/// Where the clean-up of one table and state stands.
#[derive(Debug)]
pub(crate) enum Pass {
    /// The table is walked to find what is beyond a count.
    Search(Boundary, Walk),
    /// The table is walked to delete.
    Windows(Cutoff, Walk),
    /// Dead rows are counted from the newest: so many may still stay, before this one.
    Count(u64, Cutoff),
    /// An index is followed from the oldest row, or from where the last batch ended.
    Index(Cutoff, Ticks),
}

/// A place in the table.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Walk {
    /// Page at which the next window begins.
    block: i64,
    /// The file in which the walk began.
    file: Option<i64>,
}

/// What comes next on a walk.
enum Next {
    /// Pages `from` up to, without, `to`.
    Window { from: i64, to: i64, last: bool },
    /// The table has been passed.
    End,
    /// Somebody has written the table anew, and its rows are elsewhere.
    Rewritten,
}

const DONE: Pruned = Pruned { rows: 0, more: false };
const GO_ON: Pruned = Pruned { rows: 0, more: true };

impl PostgresStore {
    /// One step of the clean-up of a table and state under `rule`.
    pub(crate) async fn prune_step(
        &self,
        scope: Scope,
        state: State,
        rule: PruneRule,
        batch: u32,
    ) -> Result<Pruned, Error> {
        let of = (scope, state, rule);
        let known = self.passes.take(of);
        let mut pass = match known {
            Some(pass) => pass,
            None => self.begin_pass(scope, state, rule).await?,
        };
        let done = match &mut pass {
            Pass::Search(boundary, walk) => self.search(state, rule, boundary, walk).await,
            Pass::Windows(cutoff, walk) => {
                self.prune_window(state, *cutoff, walk, batch).await.map(|done| (done, None))
            }
            Pass::Count(left, before) => self.count_dead(left, before).await,
            Pass::Index(cutoff, floor) => {
                self.prune_index(scope, state, *cutoff, floor, batch).await.map(|done| (done, None))
            }
        };
        // After a failure the step is taken again.
        match done {
            Ok((done, next)) => {
                if done.more {
                    self.passes.put(of, next.unwrap_or(pass));
                }
                Ok(done)
            }
            Err(error) => {
                self.passes.put(of, pass);
                Err(error)
            }
        }
    }

    async fn begin_pass(&self, scope: Scope, state: State, rule: PruneRule) -> Result<Pass, Error> {
        // Tables below version 14 have no index of dead rows.
        let indexed = scope == Scope::Inbox || state == State::Dead && self.features().lanes;
        match rule {
            PruneRule::OlderThan(age_ms) => {
                // Rows that finished at that very moment are not older.
                let cutoff = (Ticks(self.ago(age_ms).await?.0.saturating_sub(1)), HIGHEST_ID);
                Ok(if indexed { Pass::Index(cutoff, FIRST) } else { Pass::Windows(cutoff, Walk::default()) })
            }
            PruneRule::Beyond(_) if scope == Scope::Inbox => Err(Error::Misconfigured {
                code: "retention",
                detail: "retention.inbox.maxCount is not supported: it would end deduplication at an unknown age"
                    .to_owned(),
            }),
            PruneRule::Beyond(keep) if indexed => Ok(Pass::Count(keep, LAST)),
            PruneRule::Beyond(keep) => {
                Ok(Pass::Search(Boundary::new(keep, self.ago(0).await?.0, TIES), Walk::default()))
            }
        }
    }

    /// The database's clock, so many milliseconds ago.
    async fn ago(&self, age_ms: u64) -> Result<Ticks, Error> {
        let age = i64::try_from(age_ms.min(AGE_MAX_MS)).unwrap_or(i64::MAX);
        let rows = self.db.rows(&self.sql(AGE), Args::new().bind(age)).await?;
        let at = rows.first().map(|row| Cells::of(row).ticks()).transpose()?.flatten();
        Ok(at.unwrap_or(FIRST))
    }

    async fn next_window(&self, walk: &mut Walk) -> Result<Next, Error> {
        let rows = self.db.rows(&self.sql(OUTBOX_BLOCKS), Args::new()).await?;
        let Some(row) = rows.first() else { return Ok(Next::End) };
        let mut cells = Cells::of(row);
        let (blocks, file): (i64, Option<i64>) = (cells.next()?, cells.next()?);
        if walk.file.is_some() && walk.file != file {
            return Ok(Next::Rewritten);
        }
        walk.file = file;
        let (from, to) = (walk.block, walk.block + WINDOW_BLOCKS);
        Ok(if from < blocks { Next::Window { from, to, last: to >= blocks } } else { Next::End })
    }

    /// Counts one window.
    async fn search(
        &self,
        state: State,
        rule: PruneRule,
        boundary: &mut Boundary,
        walk: &mut Walk,
    ) -> Result<(Pruned, Option<Pass>), Error> {
        match self.next_window(walk).await? {
            Next::Window { from, to, last } => {
                for (value, rows) in self.counts(state, boundary.part(), from, to).await? {
                    boundary.add(value, rows);
                }
                walk.block = to;
                if !last {
                    return Ok((GO_ON, None));
                }
            }
            Next::End => {}
            // Rows may have been counted twice.
            Next::Rewritten => return Ok((GO_ON, Some(self.begin_pass(Scope::Outbox, state, rule).await?))),
        }
        walk.block = 0;
        Ok(match boundary.lap() {
            Lap::NothingToDo => (DONE, None),
            Lap::Again => (GO_ON, None),
            Lap::Cutoff(time, tie) => (GO_ON, Some(Pass::Windows((Ticks(time), id_of(tie)), Walk::default()))),
        })
    }

    async fn counts(&self, state: State, part: Part, from: i64, to: i64) -> Result<Vec<(i64, u64)>, Error> {
        let args = Args::new().bind(from).bind(to).bind(state.as_str());
        let (sql, args) = match part {
            // No interval is as wide as the widest buckets; finer ones are merged.
            Part::Times { from, to, shift } => {
                (COUNT_TIMES, args.bind(1_i64 << shift.min(60)).bind(Ticks(from)).bind(Ticks(to)))
            }
            Part::Ties { time, from, to, shift } => {
                (COUNT_TIES, args.bind(i32::try_from(shift).unwrap_or(60)).bind(Ticks(time)).bind(from).bind(to))
            }
        };
        let rows = self.db.rows(&self.sql(sql), args).await?;
        rows.iter()
            .map(|row| {
                let mut cells = Cells::of(row);
                let value = match part {
                    Part::Times { .. } => cells.ticks()?.unwrap_or(FIRST).0,
                    Part::Ties { .. } => cells.next()?,
                };
                Ok((value, u64::try_from(cells.next::<i64>()?).unwrap_or_default()))
            })
            .collect()
    }

    async fn prune_window(&self, state: State, (at, id): Cutoff, walk: &mut Walk, batch: u32) -> Result<Pruned, Error> {
        let (from, to, last) = match self.next_window(walk).await? {
            Next::Window { from, to, last } => (from, to, last),
            Next::End => return Ok(DONE),
            Next::Rewritten => {
                *walk = Walk::default();
                return Ok(GO_ON);
            }
        };
        let sql = self
            .variant("prune_window", 0, |features| (PRUNE_WINDOW.replace("@CHILDLESS@", CHILDLESS), features.words()));
        let args = Args::new().bind(at).bind(id).bind(i64::from(batch)).bind(from).bind(to);
        let rows = self.db.rows(&sql, args.bind(state.as_str())).await?;
        let Some(row) = rows.first() else { return Ok(DONE) };
        let mut cells = Cells::of(row);
        let (rows, block): (i64, Option<i64>) = (cells.next()?, cells.next()?);
        let full = rows >= i64::from(batch);
        walk.block = if full { block.unwrap_or(from) } else { to };
        Ok(Pruned { rows: u64::try_from(rows).unwrap_or_default(), more: full || !last })
    }

    /// Passes one page of dead rows that may stay.
    async fn count_dead(&self, left: &mut u64, before: &mut Cutoff) -> Result<(Pruned, Option<Pass>), Error> {
        let ends = *left <= DEAD_PAGE_ROWS;
        let offset = if ends { *left } else { DEAD_PAGE_ROWS - 1 };
        let args = Args::new().bind(before.0).bind(before.1).bind(i64::try_from(offset).unwrap_or(i64::MAX));
        let rows = self.db.rows(&self.sql(DEAD_PAGE), args).await?;
        let Some(row) = rows.first() else { return Ok((DONE, None)) };
        let mut cells = Cells::of(row);
        let found = (cells.ticks()?.unwrap_or(FIRST), cells.next()?);
        if ends {
            return Ok((GO_ON, Some(Pass::Index(found, FIRST))));
        }
        (*left, *before) = (*left - DEAD_PAGE_ROWS, found);
        Ok((GO_ON, None))
    }

    async fn prune_index(
        &self,
        scope: Scope,
        state: State,
        (at, id): Cutoff,
        floor: &mut Ticks,
        batch: u32,
    ) -> Result<Pruned, Error> {
        let args = Args::new().bind(at).bind(id).bind(i64::from(batch)).bind(*floor);
        let rows = if scope == Scope::Inbox {
            self.db.rows(&self.sql(PRUNE_INBOX), args.bind(state.as_str())).await?
        } else {
            let sql = self
                .variant("prune_dead", 0, |features| (PRUNE_DEAD.replace("@CHILDLESS@", CHILDLESS), features.words()));
            self.db.rows(&sql, args).await?
        };
        for row in &rows {
            *floor = (*floor).max(Cells::of(row).ticks()?.unwrap_or(FIRST));
        }
        Ok(Pruned { rows: rows.len() as u64, more: rows.len() as u64 >= u64::from(batch) })
    }
}

/// The highest id with these first 60 bits.
fn id_of(tie: i64) -> Uuid {
    if !TIES.contains(&tie) {
        return HIGHEST_ID;
    }
    Uuid::from_u128(u128::from(tie.unsigned_abs()) << 68 | ((1 << 68) - 1))
}

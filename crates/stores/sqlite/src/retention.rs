//! Retention behind its port (contract 11): each call is one short step of a pass, which the store remembers.
//!
//! Invariants
//! - No statement reads more than a window of the table, a page of an index, or a batch; none grows with the table.
//! - What goes is looked for without the write lock: a search must not keep applications from writing. The delete repeats the whole
//!   condition.

use queuebox_core::{
    Fault,
    message::State,
    ports::{Scope, ledger::Pruned, outbox::PruneRule},
};
use queuebox_sql::{Boundary, Lap, Part};
use sqlx::Row as _;

use crate::{SqliteStore, classify, session::Session, ticks};

/// Rows of one window, whatever their state.
const WINDOW_ROWS: i64 = 5_000;

/// Dead rows that one statement passes while it counts.
const DEAD_PAGE_ROWS: u64 = 5_000;

/// `?1` the row behind which the window begins, `?2` its size.
pub(crate) const WINDOW_END: &str = "
SELECT max(w.place), count(*) FROM (SELECT t.rowid AS place FROM {outbox} AS t WHERE t.rowid > ?1 ORDER BY t.rowid LIMIT ?2) AS w";

/// Of the window from `?1` to `?2`, what finished in the time from `?3` to `?4`.
pub(crate) const WINDOW_TIMES: &str = "
SELECT t.{o.updated_at}, t.rowid FROM {outbox} AS t
 WHERE t.rowid > ?1 AND t.rowid <= ?2 AND t.{o.state} = 'sent' AND t.{o.updated_at} BETWEEN ?3 AND ?4";

/// Of the window from `?1` to `?2`, what is not behind `(?3, ?4)`. No open child may lose its parent.
pub(crate) const WINDOW_SENT: &str = "
SELECT t.rowid FROM {outbox} AS t
 WHERE t.rowid > ?1 AND t.rowid <= ?2 AND t.{o.state} = 'sent' AND (t.{o.updated_at}, t.rowid) <= (?3, ?4)
   AND NOT EXISTS (SELECT 1 FROM {outbox} AS c WHERE c.{o.parent_id} = t.{o.id} AND c.{o.state} IN ('pending', 'processing'))
 ORDER BY t.rowid LIMIT ?5";

const DELETE_SENT: &str = "
DELETE FROM {outbox} AS t WHERE t.rowid IN (SELECT value FROM json_each(?1))
   AND t.{o.state} = 'sent' AND (t.{o.updated_at}, t.rowid) <= (?2, ?3)
   AND NOT EXISTS (SELECT 1 FROM {outbox} AS c WHERE c.{o.parent_id} = t.{o.id} AND c.{o.state} IN ('pending', 'processing'))";

/// Dead rows, newest first, a page at a time.
pub(crate) const DEAD_PAGE: &str = "
SELECT t.{o.updated_at}, t.rowid FROM {outbox} AS t
 WHERE t.{o.state} = 'dead' AND (t.{o.updated_at}, t.rowid) < (?1, ?2)
 ORDER BY t.{o.updated_at} DESC, t.rowid DESC LIMIT 1 OFFSET ?3";

pub(crate) const OLDEST_DEAD: &str = "
SELECT t.rowid FROM {outbox} AS t
 WHERE t.{o.state} = 'dead' AND (t.{o.updated_at}, t.rowid) <= (?1, ?2)
   AND NOT EXISTS (SELECT 1 FROM {outbox} AS c WHERE c.{o.parent_id} = t.{o.id} AND c.{o.state} IN ('pending', 'processing'))
 ORDER BY t.{o.updated_at} LIMIT ?3";

const DELETE_DEAD: &str = "
DELETE FROM {outbox} AS t WHERE t.rowid IN (SELECT value FROM json_each(?1))
   AND t.{o.state} = 'dead' AND (t.{o.updated_at}, t.rowid) <= (?2, ?3)
   AND NOT EXISTS (SELECT 1 FROM {outbox} AS c WHERE c.{o.parent_id} = t.{o.id} AND c.{o.state} IN ('pending', 'processing'))";

pub(crate) const OLDEST_OF_THE_INBOX: &str = "
SELECT t.rowid FROM {inbox} AS t
 WHERE t.{i.state} = ?4 AND (t.{i.created_at}, t.rowid) <= (?1, ?2) ORDER BY t.{i.created_at} LIMIT ?3";

const DELETE_OF_THE_INBOX: &str = "
DELETE FROM {inbox} AS t WHERE t.rowid IN (SELECT value FROM json_each(?1))
   AND t.{i.state} = ?4 AND (t.{i.created_at}, t.rowid) <= (?2, ?3)";

const HIGHEST_ROW: &str = "SELECT coalesce(max(t.rowid), 0) FROM {outbox} AS t";

/// Everything up to this time, and of this time up to this row, may go.
type Cutoff = (i64, i64);

/// Where the clean-up of one table and state stands.
#[derive(Debug, Clone)]
pub(crate) enum Pass {
    /// The table is walked to find what is beyond a count, from behind a row.
    Search(Boundary, i64),
    /// The table is walked to delete, from behind a row.
    Windows(Cutoff, i64),
    /// Dead rows are counted from the newest: so many may still stay, before this one.
    Count(u64, Cutoff),
    /// An index is followed from the oldest row.
    Index(Cutoff),
}

/// What a step did and what comes next; without a next step the pass is over.
type Step = (u64, Option<Pass>);

impl SqliteStore {
    /// One step of the clean-up of a table and state under `rule`.
    pub(crate) async fn prune_step(
        &self,
        scope: Scope,
        state: State,
        rule: PruneRule,
        batch: u32,
    ) -> Result<Pruned, Fault> {
        let of = (scope, state, rule);
        let pass = match self.inner.passes.take(of) {
            Some(pass) => pass,
            None => self.begin_pass(scope, state, rule).await?,
        };
        let step = match pass.clone() {
            Pass::Search(boundary, place) => self.search(boundary, place).await,
            Pass::Windows(cutoff, place) => self.prune_window(cutoff, place, batch).await,
            Pass::Count(left, before) => self.count_dead(left, before).await,
            Pass::Index(cutoff) => self.prune_index(scope, state, cutoff, batch).await,
        };
        let (rows, next) = step.inspect_err(|_| self.inner.passes.put(of, pass))?;
        let more = next.is_some();
        if let Some(next) = next {
            self.inner.passes.put(of, next);
        }
        Ok(Pruned { rows, more })
    }

    async fn begin_pass(&self, scope: Scope, state: State, rule: PruneRule) -> Result<Pass, Fault> {
        let mut session = self.read(None).await?;
        let indexed = scope == Scope::Inbox || state == State::Dead;
        let pass = match rule {
            PruneRule::OlderThan(ms) => {
                let age_us = i64::try_from(ms.saturating_mul(1_000)).unwrap_or(i64::MAX);
                // Rows that finished at that very moment are not older.
                let cutoff = (session.now_us.saturating_sub(age_us).saturating_sub(1), i64::MAX);
                if indexed { Pass::Index(cutoff) } else { Pass::Windows(cutoff, i64::MIN) }
            }
            PruneRule::Beyond(_) if scope == Scope::Inbox => {
                return Err(Fault::misconfigured(
                    "retention",
                    "retention.inbox.maxCount is not supported: it would end deduplication at an unknown age",
                ));
            }
            PruneRule::Beyond(keep) if indexed => Pass::Count(keep, (i64::MAX, i64::MAX)),
            PruneRule::Beyond(keep) => {
                let highest: i64 = sqlx::query_scalar(self.sql(HIGHEST_ROW))
                    .fetch_one(session.connection())
                    .await
                    .map_err(|error| classify(&error))?;
                Pass::Search(Boundary::new(keep, session.now_us, 0..=highest), i64::MIN)
            }
        };
        session.commit().await?;
        Ok(pass)
    }

    /// The last row of the window behind `place`, and whether it is the last window.
    async fn window_end(&self, session: &mut Session, place: i64) -> Result<Option<(i64, bool)>, sqlx::Error> {
        let row =
            sqlx::query(self.sql(WINDOW_END)).bind(place).bind(WINDOW_ROWS).fetch_one(session.connection()).await?;
        let (end, rows): (Option<i64>, i64) = (row.try_get(0)?, row.try_get(1)?);
        Ok(end.map(|end| (end, rows < WINDOW_ROWS)))
    }

    /// Counts one window.
    async fn search(&self, mut boundary: Boundary, place: i64) -> Result<Step, Fault> {
        let mut session = self.read(None).await?;
        let end = self.window_end(&mut session, place).await.map_err(|error| classify(&error))?;
        if let Some((end, _)) = end {
            self.count(&mut session, &mut boundary, place, end).await.map_err(|error| classify(&error))?;
        }
        session.commit().await?;
        if let Some((end, false)) = end {
            return Ok((0, Some(Pass::Search(boundary, end))));
        }
        Ok(match boundary.lap() {
            Lap::NothingToDo => (0, None),
            Lap::Again => (0, Some(Pass::Search(boundary, i64::MIN))),
            Lap::Cutoff(time, row) => (0, Some(Pass::Windows((time, row), i64::MIN))),
        })
    }

    async fn count(
        &self,
        session: &mut Session,
        boundary: &mut Boundary,
        place: i64,
        end: i64,
    ) -> Result<(), sqlx::Error> {
        let part = boundary.part();
        let (from, to) = match part {
            Part::Times { from, to, .. } => (from, to),
            Part::Ties { time, .. } => (time, time),
        };
        let rows = sqlx::query(self.sql(WINDOW_TIMES))
            .bind(place)
            .bind(end)
            .bind(ticks::text(from))
            .bind(ticks::text(to))
            .fetch_all(session.connection())
            .await?;
        for row in rows {
            let value = match part {
                Part::Times { .. } => ticks::parse(row.try_get(0)?),
                Part::Ties { from, to, .. } => Some(row.try_get(1)?).filter(|row| (from..=to).contains(row)),
            };
            if let Some(value) = value {
                boundary.add(value, 1);
            }
        }
        Ok(())
    }

    async fn prune_window(&self, cutoff: Cutoff, place: i64, batch: u32) -> Result<Step, Fault> {
        let mut session = self.read(None).await?;
        let Some((end, last)) = self.window_end(&mut session, place).await.map_err(|error| classify(&error))? else {
            session.commit().await?;
            return Ok((0, None));
        };
        let found: Vec<i64> = sqlx::query_scalar(self.sql(WINDOW_SENT))
            .bind(place)
            .bind(end)
            .bind(ticks::text(cutoff.0))
            .bind(cutoff.1)
            .bind(i64::from(batch))
            .fetch_all(session.connection())
            .await
            .map_err(|error| classify(&error))?;
        session.commit().await?;
        let full = found.len() as u64 >= u64::from(batch);
        let place = if full { found.last().copied().unwrap_or(end) } else { end };
        let rows = self.delete(DELETE_SENT, found, cutoff, None).await?;
        Ok((rows, (full || !last).then_some(Pass::Windows(cutoff, place))))
    }

    /// Passes one page of dead rows that may stay.
    async fn count_dead(&self, left: u64, before: Cutoff) -> Result<Step, Fault> {
        let ends = left <= DEAD_PAGE_ROWS;
        let offset = if ends { left } else { DEAD_PAGE_ROWS - 1 };
        let mut session = self.read(None).await?;
        let row = sqlx::query(self.sql(DEAD_PAGE))
            .bind(ticks::text(before.0))
            .bind(before.1)
            .bind(i64::try_from(offset).unwrap_or(i64::MAX))
            .fetch_optional(session.connection())
            .await
            .map_err(|error| classify(&error))?;
        session.commit().await?;
        let Some(row) = row else { return Ok((0, None)) };
        let found = || Ok((ticks::parse(row.try_get(0)?).unwrap_or(i64::MIN), row.try_get(1)?));
        let found = found().map_err(|error: sqlx::Error| classify(&error))?;
        Ok((0, Some(if ends { Pass::Index(found) } else { Pass::Count(left - DEAD_PAGE_ROWS, found) })))
    }

    async fn prune_index(&self, scope: Scope, state: State, cutoff: Cutoff, batch: u32) -> Result<Step, Fault> {
        let inbox = (scope == Scope::Inbox).then_some(state);
        let (search, delete) =
            if inbox.is_some() { (OLDEST_OF_THE_INBOX, DELETE_OF_THE_INBOX) } else { (OLDEST_DEAD, DELETE_DEAD) };
        let mut session = self.read(None).await?;
        let mut query =
            sqlx::query_scalar(self.sql(search)).bind(ticks::text(cutoff.0)).bind(cutoff.1).bind(i64::from(batch));
        if let Some(state) = inbox {
            query = query.bind(state.as_str());
        }
        let found: Vec<i64> = query.fetch_all(session.connection()).await.map_err(|error| classify(&error))?;
        session.commit().await?;
        let full = found.len() as u64 >= u64::from(batch);
        let rows = self.delete(delete, found, cutoff, inbox).await?;
        // A full batch of which nothing went is somebody else's: the pass would never end.
        Ok((rows, (full && rows > 0).then_some(Pass::Index(cutoff))))
    }

    async fn delete(
        &self,
        sql: &'static str,
        rows: Vec<i64>,
        cutoff: Cutoff,
        state: Option<State>,
    ) -> Result<u64, Fault> {
        if rows.is_empty() {
            return Ok(0);
        }
        let mut session = self.write(None).await?;
        let mut query = sqlx::query(self.sql(sql))
            .bind(serde_json::Value::from(rows).to_string())
            .bind(ticks::text(cutoff.0))
            .bind(cutoff.1);
        if let Some(state) = state {
            query = query.bind(state.as_str());
        }
        let deleted = query.execute(session.connection()).await.map_err(|error| classify(&error))?;
        session.commit().await?;
        Ok(deleted.rows_affected())
    }
}

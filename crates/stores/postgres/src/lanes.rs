//! Workers and lanes behind their port (contract 2.7, 5.2).
//!
//! Locks are taken in the order: scope, own worker, other workers by name, lanes by number, rows by sequence.
//!
//! A takeover locks the dead owner's row FOR UPDATE and writes a new token into it. The lock waits for every statement of the old
//! owner that holds its fence; the new token makes every later one fail, also one that read the row before its lease ended and
//! was slow to lock it: an update that is waited for is looked at again, a lock alone is not.

use async_trait::async_trait;
use queuebox_core::{
    Fault, LaneSet,
    ports::{
        Fence, Lanes, Scope,
        lanes::{LaneRow, Registration, Survey, Take, WorkerRow},
    },
};

use crate::{
    PostgresStore,
    cells::Cells,
    db::{Args, Conn},
    error::Error,
};

/// Name of the hash and number of lanes.
pub const LANE_HASH: &str = "hashtextextended/64";

const REGISTER: &str = "
INSERT INTO {worker} (worker, token, relay_uid, config, lane_hash, lease_expires_at)
VALUES ($1, $2, $3, $4, $5, clock_timestamp() + $6::bigint * interval '1 millisecond')";

/// SKIP LOCKED: a row that is being taken over is somebody's work right now.
const SWEEP: &str = "
DELETE FROM {worker} w
 WHERE w.worker IN (SELECT d.worker FROM {worker} d
                     WHERE d.lease_expires_at <= clock_timestamp()
                       AND NOT EXISTS (SELECT FROM {lane} l WHERE l.worker = d.worker)
                     ORDER BY d.worker FOR UPDATE SKIP LOCKED)
   AND w.lease_expires_at <= clock_timestamp()";

/// The lease of the worker and of the rows that it has marked, in one statement and to the same moment: whoever finds the
/// worker's lease ended finds the rows' ended as well.
const RENEW: &str = "
WITH renewed AS ( --if lanes
    UPDATE {worker} --if lanes
       SET lease_expires_at = clock_timestamp() + $3::bigint * interval '1 millisecond' --if lanes
     WHERE worker = $1 AND token = $2 AND lease_expires_at > clock_timestamp() --if lanes
    RETURNING lease_expires_at AS lease --if lanes
), marked AS ( --if lanes
WITH renewed AS MATERIALIZED ( --unless lanes
    SELECT clock_timestamp() + $3::bigint * interval '1 millisecond' AS lease --unless lanes
), marked AS ( --unless lanes
    UPDATE {outbox} o
       SET {o.lease_expires_at} = (SELECT lease FROM renewed), {o.updated_at} = clock_timestamp()
     WHERE o.{o.state} = 'processing' AND o.{o.claim_token} = $2 AND o.{o.lease_expires_at} > clock_timestamp()
       AND EXISTS (SELECT FROM renewed)
)
SELECT 1 FROM renewed";

const SURVEY: &str = "
SELECT w.worker, w.relay_uid, w.config, w.lane_hash, w.lease_expires_at > clock_timestamp(), NULL::integer, NULL::bigint
  FROM {worker} w
UNION ALL
SELECT l.worker, NULL, NULL, NULL, NULL, l.lane, l.term FROM {lane} l WHERE l.scope = $1";

/// One taker of a scope at a time: two Relays that start together must not both get lanes.
const SCOPE_LOCK: &str =
    "SELECT pg_advisory_xact_lock(hashtextextended('queuebox lanes ' || '{lane}'::regclass::oid::text || $1, 0))";

const OWN_SHARED: &str = "
SELECT w.relay_uid FROM {worker} w
 WHERE w.worker = $1 AND w.token = $2 AND w.lease_expires_at > clock_timestamp() FOR KEY SHARE";

const OWN_WHOLE: &str = "
SELECT w.relay_uid FROM {worker} w
 WHERE w.worker = $1 AND w.token = $2 AND w.lease_expires_at > clock_timestamp() FOR UPDATE";

/// Is a lane of the scope in the hands of a live worker that is not one of us?
const STRANGERS: &str = "
SELECT count(*) FROM {lane} l JOIN {worker} w ON w.worker = l.worker
 WHERE l.scope = $1 AND w.lease_expires_at > clock_timestamp() AND (w.relay_uid <> $2 OR w.lane_hash <> $3)";

/// Waits until every statement of the dead owners has ended, then lets none of them begin.
const LOCK_OWNERS: &str = "
SELECT w.worker FROM {worker} w
 WHERE w.worker = ANY ($1::text[]) AND w.lease_expires_at <= clock_timestamp()
 ORDER BY w.worker FOR UPDATE";

const RETOKEN_OWNERS: &str = "UPDATE {worker} SET token = gen_random_uuid() WHERE worker = ANY ($1::text[])";

const MAKE_LANES: &str = "
INSERT INTO {lane} (scope, lane) SELECT $1, n FROM unnest($2::integer[]) AS n ORDER BY n
    ON CONFLICT (scope, lane) DO NOTHING";

/// `$6`: owners whose lease has ended and whose row is locked. An owner without a row is as free as none.
const TAKE: &str = "
UPDATE {lane} l
   SET worker = $2, term = l.term + 1
  FROM unnest($3::integer[], $4::text[], $5::bigint[]) AS t(lane, owner, term)
 WHERE l.scope = $1 AND l.lane = t.lane AND l.term = t.term AND l.worker IS NOT DISTINCT FROM t.owner
   AND (t.owner IS NULL OR t.owner = ANY ($6::text[]) OR NOT EXISTS (SELECT FROM {worker} w WHERE w.worker = t.owner))
RETURNING l.lane";

/// The receiver's row is locked as well, so that its lease cannot be found ended while it gets lanes.
const GIVE: &str = "
WITH fence AS MATERIALIZED (
    SELECT 1 FROM {worker} w WHERE w.worker = $1 AND w.token = $2 AND w.lease_expires_at > clock_timestamp() FOR KEY SHARE
), receiver AS MATERIALIZED (
    SELECT 1 FROM {worker} w WHERE w.worker = $5 AND w.lease_expires_at > clock_timestamp() FOR KEY SHARE
), given AS (
    UPDATE {lane} l SET worker = $5, term = l.term + 1
     WHERE EXISTS (SELECT FROM fence) AND l.scope = $3 AND l.lane = ANY ($4::integer[]) AND l.worker = $1
       AND ($5::text IS NULL OR EXISTS (SELECT FROM receiver))
    RETURNING l.lane
)
SELECT NULL::integer FROM fence UNION ALL SELECT lane FROM given";

const RELEASE_LANES: &str = "
UPDATE {lane} SET worker = NULL, term = term + 1
 WHERE worker = $1 AND NOT (scope = $2 AND lane = ANY ($3::integer[]))";

const RELEASE_ROWS: &str = "
UPDATE {outbox} o
   SET {o.state} = 'pending', {o.claimed_at} = NULL, {o.claim_token} = NULL, {o.lease_expires_at} = NULL,
       {o.updated_at} = clock_timestamp()
 WHERE o.{o.state} = 'processing' AND o.{o.claim_token} = $1 AND o.{o.lease_expires_at} > clock_timestamp()";

const REMOVE: &str = "DELETE FROM {worker} WHERE worker = $1 AND token = $2";

const IDLE: &str = "
WITH fence AS MATERIALIZED (
    SELECT 1 FROM {worker} w WHERE w.worker = $1 AND w.token = $2 AND w.lease_expires_at > clock_timestamp()
), written AS (
    UPDATE {worker} SET idle = $3
     WHERE worker = $1 AND token = $2 AND lease_expires_at > clock_timestamp() AND idle <> $3
)
SELECT 1 FROM fence";

impl PostgresStore {
    fn scope(&self, scope: Scope) -> &str {
        match scope {
            Scope::Outbox => self.names.outbox(),
            Scope::Inbox => self.names.inbox(),
        }
    }

    async fn register_worker(&self, new: &Registration) -> Result<(), Error> {
        if !self.features().lanes {
            return Ok(());
        }
        let args = Args::new()
            .bind(new.fence.worker.as_str())
            .bind(new.fence.token)
            .bind(new.relay_uid.as_str())
            .bind(new.config.as_str())
            .bind(LANE_HASH)
            .bind(i64::try_from(new.lease_ms).unwrap_or(i64::MAX));
        self.db.rows(&self.sql(REGISTER), args).await?;
        self.db.rows(&self.sql(SWEEP), Args::new()).await?;
        Ok(())
    }

    async fn renew_worker(&self, fence: &Fence, lease_ms: u64) -> Result<(), Error> {
        let args =
            Args::new().bind(fence.worker.as_str()).bind(fence.token).bind(i64::try_from(lease_ms).unwrap_or(i64::MAX));
        let rows = self.db.rows(&self.sql(RENEW), args).await?;
        if rows.is_empty() { Err(Error::Fenced) } else { Ok(()) }
    }

    async fn survey_scope(&self, scope: Scope) -> Result<Survey, Error> {
        let mut survey = Survey::default();
        if !self.features().lanes {
            return Ok(survey);
        }
        for row in &self.db.rows(&self.sql(SURVEY), Args::new().bind(self.scope(scope))).await? {
            let mut cells = Cells::of(row);
            let worker: Option<String> = cells.next()?;
            let (relay_uid, config, lane_hash): (Option<String>, Option<String>, Option<String>) =
                (cells.next()?, cells.next()?, cells.next()?);
            let live: Option<bool> = cells.next()?;
            let (lane, term): (Option<i32>, Option<i64>) = (cells.next()?, cells.next()?);
            match (lane.and_then(|lane| u8::try_from(lane).ok()), term) {
                (Some(lane), Some(term)) => survey.lanes.push(LaneRow { lane, worker, term }),
                _ => survey.workers.push(WorkerRow {
                    worker: worker.unwrap_or_default(),
                    relay_uid: relay_uid.unwrap_or_default(),
                    config: config.unwrap_or_default(),
                    lane_hash: lane_hash.unwrap_or_default(),
                    live: live.unwrap_or_default(),
                }),
            }
        }
        survey.lanes.sort_by_key(|lane| lane.lane);
        Ok(survey)
    }

    async fn take_lanes(&self, fence: &Fence, scope: Scope, wanted: &[Take]) -> Result<LaneSet, Error> {
        if wanted.is_empty() || !self.features().lanes {
            return Ok(LaneSet::EMPTY);
        }
        let mut tx = self.db.begin().await?;
        match self.take_within(&mut tx, fence, self.scope(scope), wanted).await {
            Ok(lanes) => tx.commit().await.map(|()| lanes),
            Err(error) => {
                tx.rollback().await;
                Err(error)
            }
        }
    }

    async fn take_within(&self, tx: &mut Conn, fence: &Fence, scope: &str, wanted: &[Take]) -> Result<LaneSet, Error> {
        tx.rows(&self.sql(SCOPE_LOCK), Args::new().bind(scope)).await?;
        let relay_uid = self.own(tx, OWN_SHARED, fence).await?;
        let args = Args::new().bind(scope).bind(relay_uid).bind(LANE_HASH);
        if count(&tx.rows(&self.sql(STRANGERS), args).await?)? > 0 {
            return Ok(LaneSet::EMPTY);
        }
        let mut wanted: Vec<&Take> = wanted.iter().collect();
        wanted.sort_by_key(|take| take.lane);
        let lanes: Vec<i32> = wanted.iter().map(|take| i32::from(take.lane)).collect();
        let owners: Vec<Option<&str>> = wanted.iter().map(|take| take.owner.as_deref()).collect();
        let mut dead = Vec::new();
        if owners.iter().any(Option::is_some) {
            let named: Vec<&str> = owners.iter().copied().flatten().collect();
            for row in &tx.rows(&self.sql(LOCK_OWNERS), Args::new().bind(named)).await? {
                dead.push(Cells::of(row).next::<String>()?);
            }
            tx.rows(&self.sql(RETOKEN_OWNERS), Args::new().bind(dead.clone())).await?;
        }
        tx.rows(&self.sql(MAKE_LANES), Args::new().bind(scope).bind(lanes.clone())).await?;
        let args = Args::new()
            .bind(scope)
            .bind(fence.worker.as_str())
            .bind(lanes)
            .bind(owners)
            .bind(wanted.iter().map(|take| take.term).collect::<Vec<_>>())
            .bind(dead);
        lane_set(&tx.rows(&self.sql(TAKE), args).await?)
    }

    /// Locks the worker's own row; returns the UID of its Relay.
    async fn own(&self, tx: &mut Conn, lock: &'static str, fence: &Fence) -> Result<String, Error> {
        let args = Args::new().bind(fence.worker.as_str()).bind(fence.token);
        let rows = tx.rows(&self.sql(lock), args).await?;
        Cells::of(rows.first().ok_or(Error::Fenced)?).next()
    }

    async fn give_lanes(
        &self,
        fence: &Fence,
        scope: Scope,
        lanes: LaneSet,
        to: Option<&str>,
    ) -> Result<LaneSet, Error> {
        if !self.features().lanes {
            return Ok(LaneSet::EMPTY);
        }
        let args = Args::new()
            .bind(fence.worker.as_str())
            .bind(fence.token)
            .bind(self.scope(scope))
            .bind(lanes.iter().map(i32::from).collect::<Vec<_>>())
            .bind(to);
        let rows = self.db.rows(&self.sql(GIVE), args).await?;
        if rows.is_empty() { Err(Error::Fenced) } else { lane_set(&rows) }
    }

    async fn retire_worker(&self, fence: &Fence, careful: LaneSet) -> Result<(), Error> {
        if !self.features().lanes {
            self.db.rows(&self.sql(RELEASE_ROWS), Args::new().bind(fence.token)).await?;
            return Ok(());
        }
        let mut tx = self.db.begin().await?;
        match self.retire_within(&mut tx, fence, careful).await {
            Ok(()) => tx.commit().await,
            Err(error) => {
                tx.rollback().await;
                Err(error)
            }
        }
    }

    async fn retire_within(&self, tx: &mut Conn, fence: &Fence, careful: LaneSet) -> Result<(), Error> {
        self.own(tx, OWN_WHOLE, fence).await?;
        let args = Args::new()
            .bind(fence.worker.as_str())
            .bind(self.scope(Scope::Outbox))
            .bind(careful.iter().map(i32::from).collect::<Vec<_>>());
        tx.rows(&self.sql(RELEASE_LANES), args).await?;
        tx.rows(&self.sql(RELEASE_ROWS), Args::new().bind(fence.token)).await?;
        tx.rows(&self.sql(REMOVE), Args::new().bind(fence.worker.as_str()).bind(fence.token)).await?;
        Ok(())
    }

    async fn write_idle(&self, fence: &Fence, idle: bool) -> Result<(), Error> {
        if !self.features().lanes {
            return Ok(());
        }
        let args = Args::new().bind(fence.worker.as_str()).bind(fence.token).bind(idle);
        let rows = self.db.rows(&self.sql(IDLE), args).await?;
        if rows.is_empty() { Err(Error::Fenced) } else { Ok(()) }
    }
}

fn count(rows: &[sqlx::postgres::PgRow]) -> Result<i64, Error> {
    rows.first().map_or(Ok(0), |row| Cells::of(row).next())
}

fn lane_set(rows: &[sqlx::postgres::PgRow]) -> Result<LaneSet, Error> {
    let mut lanes = LaneSet::EMPTY;
    for row in rows {
        let lane: Option<i32> = Cells::of(row).next()?;
        if let Some(lane) = lane.and_then(|lane| u8::try_from(lane).ok()).filter(|lane| *lane < 64) {
            lanes.insert(lane);
        }
    }
    Ok(lanes)
}

#[async_trait]
impl Lanes for PostgresStore {
    fn lane_count(&self) -> u8 {
        64
    }

    fn lane_hash(&self) -> &str {
        LANE_HASH
    }

    fn has_lanes(&self) -> bool {
        self.features().lanes
    }

    async fn register(&self, new: &Registration) -> Result<(), Fault> {
        Ok(self.register_worker(new).await?)
    }

    async fn renew(&self, fence: &Fence, lease_ms: u64) -> Result<(), Fault> {
        Ok(self.renew_worker(fence, lease_ms).await?)
    }

    async fn survey(&self, scope: Scope) -> Result<Survey, Fault> {
        Ok(self.survey_scope(scope).await?)
    }

    async fn take(&self, fence: &Fence, scope: Scope, wanted: &[Take]) -> Result<LaneSet, Fault> {
        Ok(self.take_lanes(fence, scope, wanted).await?)
    }

    async fn give(&self, fence: &Fence, scope: Scope, lanes: LaneSet, to: Option<&str>) -> Result<LaneSet, Fault> {
        Ok(self.give_lanes(fence, scope, lanes, to).await?)
    }

    async fn retire(&self, fence: &Fence, careful: LaneSet) -> Result<(), Fault> {
        Ok(self.retire_worker(fence, careful).await?)
    }

    async fn set_idle(&self, fence: &Fence, idle: bool) -> Result<(), Fault> {
        Ok(self.write_idle(fence, idle).await?)
    }
}

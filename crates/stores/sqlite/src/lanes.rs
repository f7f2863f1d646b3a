//! Workers and the one lane of each table (contract 2.7, 5.2). A second process finds the lane taken and stands by.

use async_trait::async_trait;
use queuebox_core::{
    Fault, Lane, LaneSet,
    ports::{
        Fence, Lanes, Scope,
        lanes::{LaneRow, Registration, Survey, Take, WorkerRow},
    },
};
use sqlx::Row as _;

use crate::{
    SqliteStore, classify,
    session::{Session, lost},
};

/// Every key is in lane 0, whatever it is.
pub(crate) const LANE: Lane = 0;

pub(crate) const LANE_HASH: &str = "none/1";

const SWEEP: &str = "
DELETE FROM {worker}
 WHERE lease_expires_at <= ?1
   AND NOT EXISTS (SELECT 1 FROM {lane} AS l WHERE l.worker = {worker}.worker)";

const REGISTER: &str = "
INSERT INTO {worker} (worker, token, relay_uid, config, lane_hash, idle, lease_expires_at)
VALUES (?1, ?2, ?3, ?4, ?5, 0, ?6)";

const RENEW: &str = "
UPDATE {worker} SET lease_expires_at = ?1 WHERE worker = ?2 AND token = ?3 AND lease_expires_at > ?4";

const RENEW_MARKED: &str = "
UPDATE {outbox} SET {o.lease_expires_at} = ?1, {o.updated_at} = ?2
 WHERE {o.state} = 'processing' AND {o.claim_token} = ?3";

const WORKERS: &str = "
SELECT worker, relay_uid, config, lane_hash, lease_expires_at > ?1 FROM {worker} ORDER BY worker";

const LANES: &str = "
SELECT lane, worker, term FROM {lane} WHERE scope = ?1 ORDER BY lane";

/// A live worker of another Relay, or with another hash, owns a lane of the table.
const STRANGER: &str = "
SELECT EXISTS (
    SELECT 1 FROM {lane} AS l JOIN {worker} AS w ON w.worker = l.worker, {worker} AS me
     WHERE me.worker = ?1 AND l.scope = ?2 AND w.lease_expires_at > ?3
       AND (w.relay_uid <> me.relay_uid OR w.lane_hash <> me.lane_hash))";

/// Free, or of an owner that is dead or gone; owner and term as seen. The lane's row exists already.
const TAKE: &str = "
UPDATE {lane} SET worker = ?1, term = term + 1
 WHERE scope = ?2 AND lane = ?3 AND worker IS ?4 AND term = ?5
   AND NOT EXISTS (SELECT 1 FROM {worker} AS w WHERE w.worker = {lane}.worker AND w.lease_expires_at > ?6)";

const FIRST_TAKE: &str = "
INSERT INTO {lane} (scope, lane, term) VALUES (?1, ?2, 0) ON CONFLICT DO NOTHING";

const GIVE: &str = "
UPDATE {lane} SET worker = ?1, term = term + 1
 WHERE scope = ?2 AND lane = ?3 AND worker = ?4
   AND (?1 IS NULL OR EXISTS (SELECT 1 FROM {worker} AS w WHERE w.worker = ?1 AND w.lease_expires_at > ?5))";

const RELEASE_MARKED: &str = "
UPDATE {outbox} SET {o.state} = 'pending', {o.updated_at} = ?1,
       {o.claimed_at} = NULL, {o.claim_token} = NULL, {o.lease_expires_at} = NULL
 WHERE {o.state} = 'processing' AND {o.claim_token} = ?2";

const GIVE_ALL: &str = "
UPDATE {lane} SET worker = NULL, term = term + 1
 WHERE worker = ?1 AND NOT (scope = ?2 AND (?3 >> lane) & 1)";

const REMOVE: &str = "
DELETE FROM {worker} WHERE worker = ?1 AND token = ?2";

impl SqliteStore {
    fn scope(&self, scope: Scope) -> &str {
        match scope {
            Scope::Outbox => self.names().outbox(),
            Scope::Inbox => self.names().inbox(),
        }
    }

    async fn take_one(
        &self,
        session: &mut Session,
        fence: &Fence,
        scope: Scope,
        wish: &Take,
    ) -> Result<bool, sqlx::Error> {
        if wish.owner.is_none() && wish.term == 0 {
            sqlx::query(self.sql(FIRST_TAKE))
                .bind(self.scope(scope))
                .bind(i64::from(wish.lane))
                .execute(session.connection())
                .await?;
        }
        let taken = sqlx::query(self.sql(TAKE))
            .bind(&fence.worker)
            .bind(self.scope(scope))
            .bind(i64::from(wish.lane))
            .bind(wish.owner.as_deref())
            .bind(wish.term)
            .bind(session.now.clone())
            .execute(session.connection())
            .await?;
        Ok(taken.rows_affected() == 1)
    }
}

#[async_trait]
impl Lanes for SqliteStore {
    fn lane_count(&self) -> u8 {
        1
    }

    fn lane_hash(&self) -> &str {
        LANE_HASH
    }

    async fn register(&self, new: &Registration) -> Result<(), Fault> {
        let mut session = self.write(None).await?;
        let lease = session.later(lease_us(new.lease_ms));
        let run = async {
            sqlx::query(self.sql(SWEEP)).bind(session.now.clone()).execute(session.connection()).await?;
            sqlx::query(self.sql(REGISTER))
                .bind(&new.fence.worker)
                .bind(new.fence.token.to_string())
                .bind(&new.relay_uid)
                .bind(&new.config)
                .bind(LANE_HASH)
                .bind(lease)
                .execute(session.connection())
                .await
        };
        run.await.map_err(|error| classify(&error))?;
        session.commit().await
    }

    async fn renew(&self, fence: &Fence, lease_ms: u64) -> Result<(), Fault> {
        let mut session = self.write(Some(fence)).await?;
        let lease = session.later(lease_us(lease_ms));
        let run = async {
            let renewed = sqlx::query(self.sql(RENEW))
                .bind(lease.clone())
                .bind(&fence.worker)
                .bind(fence.token.to_string())
                .bind(session.now.clone())
                .execute(session.connection())
                .await?;
            sqlx::query(self.sql(RENEW_MARKED))
                .bind(lease)
                .bind(session.now.clone())
                .bind(fence.token.to_string())
                .execute(session.connection())
                .await?;
            Ok(renewed.rows_affected())
        };
        if run.await.map_err(|error: sqlx::Error| classify(&error))? == 0 {
            return Err(lost(fence));
        }
        session.commit().await
    }

    async fn survey(&self, scope: Scope) -> Result<Survey, Fault> {
        let mut session = self.read(None).await?;
        let run = async {
            let workers = sqlx::query(self.sql(WORKERS))
                .bind(session.now.clone())
                .fetch_all(session.connection())
                .await?
                .iter()
                .map(|row| {
                    Ok(WorkerRow {
                        worker: row.try_get(0)?,
                        relay_uid: row.try_get(1)?,
                        config: row.try_get(2)?,
                        lane_hash: row.try_get(3)?,
                        live: row.try_get(4)?,
                    })
                })
                .collect::<Result<_, sqlx::Error>>()?;
            let lanes = sqlx::query(self.sql(LANES))
                .bind(self.scope(scope))
                .fetch_all(session.connection())
                .await?
                .iter()
                .map(|row| Ok(LaneRow { lane: row.try_get(0)?, worker: row.try_get(1)?, term: row.try_get(2)? }))
                .collect::<Result<_, sqlx::Error>>()?;
            Ok(Survey { workers, lanes })
        };
        let survey = run.await.map_err(|error: sqlx::Error| classify(&error))?;
        session.commit().await?;
        Ok(survey)
    }

    async fn take(&self, fence: &Fence, scope: Scope, wanted: &[Take]) -> Result<LaneSet, Fault> {
        let mut session = self.write(Some(fence)).await?;
        let run = async {
            let strangers: bool = sqlx::query_scalar(self.sql(STRANGER))
                .bind(&fence.worker)
                .bind(self.scope(scope))
                .bind(session.now.clone())
                .fetch_one(session.connection())
                .await?;
            let mut taken = LaneSet::EMPTY;
            if !strangers {
                for wish in wanted.iter().filter(|wish| wish.lane == LANE) {
                    if self.take_one(&mut session, fence, scope, wish).await? {
                        taken.insert(wish.lane);
                    }
                }
            }
            Ok(taken)
        };
        let taken = run.await.map_err(|error: sqlx::Error| classify(&error))?;
        session.commit().await?;
        Ok(taken)
    }

    async fn give(&self, fence: &Fence, scope: Scope, lanes: LaneSet, to: Option<&str>) -> Result<LaneSet, Fault> {
        let mut session = self.write(Some(fence)).await?;
        let mut moved = LaneSet::EMPTY;
        for lane in lanes.iter() {
            let given = sqlx::query(self.sql(GIVE))
                .bind(to)
                .bind(self.scope(scope))
                .bind(i64::from(lane))
                .bind(&fence.worker)
                .bind(session.now.clone())
                .execute(session.connection())
                .await
                .map_err(|error| classify(&error))?;
            if given.rows_affected() == 1 {
                moved.insert(lane);
            }
        }
        session.commit().await?;
        Ok(moved)
    }

    async fn retire(&self, fence: &Fence, careful: LaneSet) -> Result<(), Fault> {
        let mut session = self.write(Some(fence)).await?;
        let run = async {
            sqlx::query(self.sql(RELEASE_MARKED))
                .bind(session.now.clone())
                .bind(fence.token.to_string())
                .execute(session.connection())
                .await?;
            sqlx::query(self.sql(GIVE_ALL))
                .bind(&fence.worker)
                .bind(self.scope(Scope::Outbox))
                .bind(careful.as_i64())
                .execute(session.connection())
                .await?;
            sqlx::query(self.sql(REMOVE))
                .bind(&fence.worker)
                .bind(fence.token.to_string())
                .execute(session.connection())
                .await
        };
        run.await.map_err(|error| classify(&error))?;
        session.commit().await
    }

    /// Nothing wakes through a SQLite file: see `wake.rs`.
    async fn set_idle(&self, _fence: &Fence, _idle: bool) -> Result<(), Fault> {
        Ok(())
    }
}

/// A lease in microseconds; an absurd one ends with the calendar.
pub(crate) fn lease_us(lease_ms: u64) -> i64 {
    i64::try_from(lease_ms.saturating_mul(1_000)).unwrap_or(i64::MAX)
}

//! Finished rows: pages, replay, discard (contract 11).

use async_trait::async_trait;
use queuebox_core::{
    Fault, Uuid,
    message::{EXPANDED_PREFIX, State},
    ports::{
        Ledger, Scope,
        ledger::{Direction, LedgerCursor, LedgerEntry, LedgerFilter, LedgerRow, Pruned},
        outbox::PruneRule,
    },
};
use sqlx::{
    Row as _, Sqlite,
    query::Query,
    sqlite::{SqliteArguments, SqliteRow},
};

use crate::{
    SqliteStore, classify,
    inbox::consumption,
    outbox::ids,
    read::{clamped, text_list},
    session::Session,
    ticks,
};

/// Columns of a row of the outbox and of the inbox, in one order; `t` is the table.
const OUTBOX_ROW: &str =
    "t.{o.id}, t.{o.state}, t.{o.topic}, t.{o.key}, t.{o.destination}, t.{o.parent_id}, t.{o.sequence},
  t.{o.max_attempts}, NULL, NULL, NULL, NULL, t.{o.attempt}, t.{o.crashes}, t.{o.last_error}, t.{o.created_at},
  t.{o.scheduled_at}, t.{o.updated_at}";

const INBOX_ROW: &str = "t.{i.id}, t.{i.state}, t.{i.topic}, t.{i.aggregate_id}, NULL, NULL, NULL,
  NULL, t.{i.source}, t.{i.idempotency_key}, t.{i.event_type}, t.{i.consumption}, t.{i.attempt}, t.{i.crashes},
  t.{i.last_error}, t.{i.created_at}, t.{i.scheduled_at}, t.{i.processed_at}";

/// `?2` ids, `?3` states, `?1` now. An expanded parent (`?4`) is never moved: its id stands for its children.
const REQUEUE_OUTBOX: &str = "
UPDATE {outbox} SET {o.state} = 'pending', {o.attempt} = 0, {o.crashes} = 0, {o.scheduled_at} = ?1, {o.updated_at} = ?1,
       {o.last_error} = NULL, {o.claimed_at} = NULL, {o.claim_token} = NULL, {o.lease_expires_at} = NULL
 WHERE {o.id} IN (SELECT value FROM json_each(?2)) AND {o.state} IN (SELECT value FROM json_each(?3))
   AND {o.state} NOT IN ('pending', 'processing')
   AND NOT ({o.state} = 'sent' AND coalesce({o.last_error}, '') GLOB ?4)
   AND NOT EXISTS (SELECT 1 FROM {outbox} AS c WHERE c.{o.parent_id} = {outbox}.{o.id})
RETURNING {o.id}";

const REQUEUE_INBOX: &str = "
UPDATE {inbox} SET {i.state} = 'pending', {i.attempt} = 0, {i.crashes} = 0, {i.scheduled_at} = ?1, {i.processed_at} = NULL,
       {i.last_error} = NULL, {i.claimed_at} = NULL, {i.claim_token} = NULL, {i.lease_expires_at} = NULL
 WHERE {i.id} IN (SELECT value FROM json_each(?2)) AND {i.state} IN (SELECT value FROM json_each(?3))
   AND {i.state} NOT IN ('pending', 'processing')
RETURNING {i.id}";

const DISCARD_OUTBOX: &str = "
DELETE FROM {outbox} WHERE {o.id} IN (SELECT value FROM json_each(?1)) AND {o.state} = 'dead' RETURNING {o.id}";

const DISCARD_INBOX: &str = "
DELETE FROM {inbox} WHERE {i.id} IN (SELECT value FROM json_each(?1)) AND {i.state} = 'dead' RETURNING {i.id}";

/// A value bound to a statement that is put together.
enum Value {
    Text(String),
    Number(i64),
}

/// A condition put together from what a filter names.
#[derive(Default)]
struct Conditions {
    sql: Vec<String>,
    values: Vec<Value>,
}

impl Conditions {
    fn add(&mut self, condition: &str, value: Value) {
        self.values.push(value);
        self.sql.push(condition.replace("{}", &format!("?{}", self.values.len())));
    }

    fn text(&mut self, condition: &str, value: impl Into<String>) {
        self.add(condition, Value::Text(value.into()));
    }

    fn any_of(&mut self, column: &str, list: String) {
        self.text(&format!("t.{column} IN (SELECT value FROM json_each({{}}))"), list);
    }

    fn of(table: Scope, filter: &LedgerFilter) -> Self {
        let mut all = Self::default();
        let name = |outbox: &'static str, inbox: &'static str| if table == Scope::Outbox { outbox } else { inbox };
        if !filter.states.is_empty() {
            // Literals, so that the indexes of one state serve.
            let states: Vec<_> = filter.states.iter().map(|state| format!("'{}'", state.as_str())).collect();
            all.sql.push(format!("t.{} IN ({})", name("{o.state}", "{i.state}"), states.join(", ")));
        }
        if !filter.ids.is_empty() {
            all.any_of(name("{o.id}", "{i.id}"), ids(&filter.ids));
        }
        if let Some(key) = &filter.key {
            all.text(name("t.{o.key} = {}", "t.{i.aggregate_id} = {}"), key);
        }
        if let Some(code) = &filter.code {
            let error = name("{o.last_error}", "{i.last_error}");
            all.text(&format!("substr(t.{error}, 1, {}) = {{}}", code.chars().count() + 1), format!("{code}:"));
        }
        let created = name("{o.created_at}", "{i.created_at}");
        if let Some(us) = filter.created_after_us {
            all.text(&format!("t.{created} > {{}}"), ticks::text(us));
        }
        if let Some(us) = filter.created_before_us {
            all.text(&format!("t.{created} < {{}}"), ticks::text(us));
        }
        match table {
            Scope::Outbox => all.of_the_outbox(filter),
            Scope::Inbox => all.of_the_inbox(filter),
        }
        all
    }

    fn of_the_outbox(&mut self, filter: &LedgerFilter) {
        if !filter.topics.is_empty() {
            self.any_of("{o.topic}", text_list(&filter.topics));
        }
        if let Some(parent) = filter.parent_id {
            self.text("t.{o.parent_id} = {}", parent.to_string());
        }
    }

    fn of_the_inbox(&mut self, filter: &LedgerFilter) {
        if !filter.sources.is_empty() {
            self.any_of("{i.source}", text_list(&filter.sources));
        }
        if let Some(event_type) = &filter.event_type {
            self.text("t.{i.event_type} = {}", event_type);
        }
        if let Some(consumption) = filter.consumption {
            self.text("t.{i.consumption} = {}", consumption.as_str());
        }
    }

    fn behind(&mut self, table: Scope, direction: Direction, after: LedgerCursor) {
        let sign = if direction == Direction::OldestFirst { ">" } else { "<" };
        let (created, id) = order(table);
        self.values.push(Value::Text(ticks::text(after.created_at)));
        self.values.push(Value::Text(after.id.to_string()));
        let last = self.values.len();
        self.sql.push(format!("(t.{created}, t.{id}) {sign} (?{}, ?{last})", last - 1));
    }

    fn clause(&self) -> String {
        if self.sql.is_empty() { String::new() } else { format!("WHERE {}", self.sql.join(" AND ")) }
    }

    fn bind<'q>(self, mut query: Query<'q, Sqlite, SqliteArguments>) -> Query<'q, Sqlite, SqliteArguments> {
        for value in self.values {
            query = match value {
                Value::Text(text) => query.bind(text),
                Value::Number(number) => query.bind(number),
            };
        }
        query
    }
}

fn order(table: Scope) -> (&'static str, &'static str) {
    match table {
        Scope::Outbox => ("{o.created_at}", "{o.id}"),
        Scope::Inbox => ("{i.created_at}", "{i.id}"),
    }
}

fn row_of(table: Scope) -> (&'static str, &'static str) {
    match table {
        Scope::Outbox => (OUTBOX_ROW, "{outbox}"),
        Scope::Inbox => (INBOX_ROW, "{inbox}"),
    }
}

impl SqliteStore {
    async fn returned_ids(
        &self,
        query: Query<'_, Sqlite, SqliteArguments>,
        mut session: Session,
    ) -> Result<Vec<Uuid>, Fault> {
        let rows = query.fetch_all(session.connection()).await.map_err(|error| classify(&error))?;
        session.commit().await?;
        let ids: Vec<String> =
            rows.iter().map(|row| row.try_get(0)).collect::<Result<_, _>>().map_err(|error| classify(&error))?;
        Ok(ids.iter().filter_map(|id| id.parse().ok()).collect())
    }
}

#[async_trait]
impl Ledger for SqliteStore {
    async fn page(
        &self,
        table: Scope,
        filter: &LedgerFilter,
        direction: Direction,
        after: Option<LedgerCursor>,
        limit: u32,
    ) -> Result<Vec<LedgerRow>, Fault> {
        let mut conditions = Conditions::of(table, filter);
        if let Some(after) = after {
            conditions.behind(table, direction, after);
        }
        let (columns, from) = row_of(table);
        let (created, id) = order(table);
        let way = if direction == Direction::OldestFirst { "ASC" } else { "DESC" };
        let clause = conditions.clause();
        conditions.values.push(Value::Number(i64::from(limit)));
        let limit = conditions.values.len();
        let sql = format!(
            "SELECT {columns} FROM {from} AS t {clause} ORDER BY t.{created} {way}, t.{id} {way} LIMIT ?{limit}"
        );
        let mut session = self.read(None).await?;
        let rows = conditions
            .bind(sqlx::query(self.sql_text(&sql)))
            .fetch_all(session.connection())
            .await
            .map_err(|error| classify(&error))?;
        session.commit().await?;
        rows.iter().map(ledger_row).collect::<Result<_, _>>().map_err(|error| classify(&error))
    }

    async fn entry(&self, table: Scope, id: Uuid) -> Result<Option<LedgerEntry>, Fault> {
        let (columns, from) = row_of(table);
        let more = if table == Scope::Outbox { "t.{o.payload}, t.{o.headers}" } else { "t.{i.payload}, t.{i.headers}" };
        let sql = format!("SELECT {columns}, {more} FROM {from} AS t WHERE t.{} = ?1", order(table).1);
        let mut session = self.read(None).await?;
        let row = sqlx::query(self.sql_text(&sql))
            .bind(id.to_string())
            .fetch_optional(session.connection())
            .await
            .map_err(|error| classify(&error))?;
        session.commit().await?;
        let entry = |row: SqliteRow| {
            Ok(LedgerEntry { row: ledger_row(&row)?, payload: lossy(&row, 18)?, headers: lossy(&row, 19)? })
        };
        row.map(entry).transpose().map_err(|error: sqlx::Error| classify(&error))
    }

    async fn requeue(&self, table: Scope, rows: &[Uuid], states: &[State]) -> Result<Vec<Uuid>, Fault> {
        let session = self.write(None).await?;
        let sql = if table == Scope::Outbox { REQUEUE_OUTBOX } else { REQUEUE_INBOX };
        let states: Vec<String> = states.iter().map(|state| state.as_str().to_owned()).collect();
        let mut query = sqlx::query(self.sql(sql)).bind(session.now.clone()).bind(ids(rows)).bind(text_list(&states));
        if table == Scope::Outbox {
            query = query.bind(format!("{EXPANDED_PREFIX}*"));
        }
        let moved = self.returned_ids(query, session).await?;
        self.inner.wake.notify();
        Ok(moved)
    }

    async fn discard(&self, table: Scope, rows: &[Uuid]) -> Result<Vec<Uuid>, Fault> {
        let mut session = self.write(None).await?;
        if table == Scope::Outbox {
            self.end_parents(&mut session, rows).await?;
        }
        let sql = if table == Scope::Outbox { DISCARD_OUTBOX } else { DISCARD_INBOX };
        let query = sqlx::query(self.sql(sql)).bind(ids(rows));
        self.returned_ids(query, session).await
    }

    async fn prune(&self, table: Scope, state: State, rule: PruneRule, batch: u32) -> Result<Pruned, Fault> {
        if matches!(state, State::Pending | State::Processing) {
            return Ok(Pruned::default());
        }
        self.prune_step(table, state, rule, batch).await
    }
}

fn ledger_row(row: &SqliteRow) -> Result<LedgerRow, sqlx::Error> {
    let id = |column: usize| -> Result<Option<Uuid>, sqlx::Error> {
        let text: Option<String> = row.try_get(column)?;
        text.map(|text| text.parse().map_err(|error| sqlx::Error::Decode(Box::new(error)))).transpose()
    };
    let time = |column: usize| -> Result<Option<i64>, sqlx::Error> {
        Ok(row.try_get::<Option<String>, _>(column)?.and_then(|text| ticks::parse(&text)))
    };
    let own = id(0)?.unwrap_or_default();
    let created_at_us = time(15)?.unwrap_or_default();
    let state: String = row.try_get(1)?;
    let state = State::parse(&state).ok_or_else(|| sqlx::Error::Decode(format!("state {state:?}").into()))?;
    Ok(LedgerRow {
        id: own,
        state,
        topic: row.try_get(2)?,
        key: row.try_get(3)?,
        destination: row.try_get(4)?,
        parent_id: id(5)?,
        sequence: row.try_get(6)?,
        max_attempts: row.try_get::<Option<i64>, _>(7)?.map(clamped),
        source: row.try_get(8)?,
        idempotency_key: row.try_get(9)?,
        event_type: row.try_get(10)?,
        consumption: row.try_get::<Option<String>, _>(11)?.map(consumption),
        attempt: clamped(row.try_get(12)?),
        crashes: clamped(row.try_get(13)?),
        last_error: row.try_get(14)?,
        created_at_us,
        scheduled_at_us: time(16)?.unwrap_or_default(),
        finished_at_us: time(17)?,
        cursor: LedgerCursor { created_at: created_at_us, id: own },
    })
}

/// A text column as written, also where an application stored its bytes.
fn lossy(row: &SqliteRow, column: usize) -> Result<String, sqlx::Error> {
    let bytes: Vec<u8> = row.try_get_unchecked(column)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

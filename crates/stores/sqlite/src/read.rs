//! The parts of a read: each picks its rows without their payloads, adds up the bytes, and loads only what fits.

use queuebox_core::{
    Fault, Uuid,
    message::{DeadCode, OutboxRow, Payload, Position},
    ports::outbox::{DestinationRead, Polled, Read},
};
use sqlx::{
    Row as _, Sqlite,
    query::Query,
    sqlite::{SqliteArguments, SqliteRow},
};

use crate::{SqliteStore, classify, lanes::LANE, session::Session, ticks};

/// One part: `$keys` name the order as `a`, `b`, `c`; `$omitted` says which payloads stay out; `$from` picks rows of `o`.
///
/// The rows are picked first, by an index and a limit, and only then numbered and summed: a window over all that is pending
/// would read the whole backlog. `octet_length` of a plain column is read from the record's head, so that a large payload is
/// not touched before it is known to fit. Parameters of every part: `?1` `payload_max`, `?2` `bytes_max`, `?3` ids to leave
/// out, `?4` limit.
macro_rules! part {
    ($keys:expr, $omitted:expr, $($from:expr),+) => {
        concat!(
            "WITH picked AS (SELECT o.rowid AS r, ", $keys, ", octet_length(o.{o.payload}) AS size, ", $omitted, " AS omitted FROM ",
            $($from),+,
            "),
summed AS (
    SELECT r, a, b, c, size, omitted, omitted OR size > ?1 AS left_out,
           SUM(CASE WHEN omitted OR size > ?1 THEN 0 ELSE size END) OVER (ORDER BY a, b, c ROWS UNBOUNDED PRECEDING)
             - CASE WHEN omitted OR size > ?1 THEN 0 ELSE size END AS before,
           COUNT(*) OVER () AS found
      FROM picked)
SELECT o.{o.id}, o.{o.sequence}, o.{o.topic}, o.{o.key}, o.{o.destination}, o.{o.parent_id}, o.{o.headers},
       o.{o.aggregate_type}, o.{o.trace_parent}, o.{o.attempt}, o.{o.max_attempts}, o.{o.crashes},
       o.{o.scheduled_at}, o.{o.created_at}, s.omitted, s.size, s.found,
       CASE WHEN s.left_out THEN NULL ELSE o.{o.payload} END, s.r
  FROM summed AS s CROSS JOIN {outbox} AS o ON o.rowid = s.r
 WHERE s.before < ?2
 ORDER BY s.a, s.b, s.c"
        )
    };
}

macro_rules! pending {
    () => {
        "{outbox} AS o WHERE o.{o.state} = 'pending' AND o.{o.id} NOT IN (SELECT value FROM json_each(?3))"
    };
}

macro_rules! behind {
    () => {
        " AND o.{o.sequence} >= ?5 AND (o.{o.sequence} > ?5 OR o.{o.id} > ?6)"
    };
}

/// Its destination is full or held: topics `?7` of rows without a destination, destinations `?8`.
macro_rules! held {
    () => {
        "CASE WHEN o.{o.destination} IS NULL THEN o.{o.topic} IN (SELECT value FROM json_each(?7))
              ELSE o.{o.destination} IN (SELECT value FROM json_each(?8)) END"
    };
}

macro_rules! by_sequence {
    () => {
        "o.{o.sequence} AS a, o.{o.id} AS b, 0 AS c"
    };
}

macro_rules! in_order {
    () => {
        " ORDER BY o.{o.sequence}, o.{o.id} LIMIT ?4"
    };
}

pub(crate) const WALK: &str = part!(by_sequence!(), held!(), pending!(), behind!(), in_order!());

pub(crate) const LAP: &str = part!(
    by_sequence!(),
    "1",
    pending!(),
    behind!(),
    " AND o.{o.sequence} <= ?7 AND (o.{o.sequence} < ?7 OR o.{o.id} <= ?8)",
    in_order!()
);

/// `?5` is an array of `[key, from]`; `?4` counts per key. The correlated list is sought through `(key, sequence)` where
/// pending and stops at its limit, so that a hot key costs what it returns; a window partitioned by key would read all of it.
pub(crate) const KEYS: &str = part!(
    "k.key AS a, o.{o.sequence} AS b, o.{o.id} AS c",
    "0",
    "json_each(?5) AS k CROSS JOIN {outbox} AS o WHERE o.rowid IN (
        SELECT x.rowid FROM {outbox} AS x
         WHERE x.{o.state} = 'pending' AND x.{o.key} = k.value ->> 0 AND x.{o.sequence} >= k.value ->> 1
           AND x.{o.id} NOT IN (SELECT value FROM json_each(?3))
         ORDER BY x.{o.sequence}, x.{o.id} LIMIT ?4)"
);

pub(crate) const LATER: &str = part!(
    "o.{o.scheduled_at} AS a, o.{o.sequence} AS b, o.{o.id} AS c",
    "0",
    pending!(),
    " AND o.{o.scheduled_at} > o.{o.created_at} AND o.{o.scheduled_at} <= ?5 AND NOT ",
    held!(),
    " ORDER BY o.{o.scheduled_at}, o.{o.sequence}, o.{o.id} LIMIT ?4"
);

pub(crate) const DESTINATION: &str = part!(
    by_sequence!(),
    "0",
    pending!(),
    behind!(),
    " AND COALESCE(o.{o.key}, '') = ''
      AND CASE WHEN o.{o.destination} IS NULL THEN o.{o.topic} IN (SELECT value FROM json_each(?7))
               ELSE o.{o.destination} = ?8 END",
    in_order!()
);

pub(crate) const NEXT_DUE: &str = "
SELECT MIN({o.scheduled_at}) FROM {outbox}
 WHERE {o.state} = 'pending' AND {o.scheduled_at} > {o.created_at} AND {o.scheduled_at} > ?1";

/// A row that cannot be read would be overtaken by the later ones of its key, so it ends dead (contract 4.2, 4.4).
const UNREADABLE: &str = "
UPDATE {outbox} SET {o.state} = 'dead', {o.last_error} = ?2, {o.updated_at} = ?3
 WHERE rowid = ?1 AND {o.state} = 'pending'";

/// A pending row that cannot be read.
pub(crate) struct Unreadable {
    row: i64,
    id: String,
    reason: String,
}

/// Rows of one part, and whether rows were left for lack of bytes.
struct Part {
    rows: Vec<OutboxRow>,
    /// Rows that the database returned; more than `rows` where one could not be read.
    returned: usize,
    /// Rows within the limit, loaded or not.
    found: usize,
    bytes: u64,
    unreadable: Vec<Unreadable>,
}

impl Part {
    /// Nothing of this part is left.
    fn ended(&self, limit: u32) -> bool {
        self.returned == self.found && (self.found as u64) < u64::from(limit)
    }
}

type Bound<'q> = Query<'q, Sqlite, SqliteArguments>;

/// What all parts of one read share.
struct Common<'a> {
    read: &'a Read,
    exclude: String,
}

impl SqliteStore {
    /// Ends rows that cannot be read, in a transaction that writes.
    pub(crate) async fn bury_unreadable(&self, session: &mut Session, rows: &[Unreadable]) -> Result<(), Fault> {
        for one in rows {
            let error =
                DeadCode::Refused.because(&format!("this row cannot be read: {}; mend it, then replay it", one.reason));
            let done = sqlx::query(self.sql(UNREADABLE))
                .bind(one.row)
                .bind(error)
                .bind(session.now.clone())
                .execute(session.connection())
                .await;
            match done {
                Ok(_) => tracing::error!(id = one.id, reason = one.reason, "an outbox row cannot be read and is dead"),
                // The table itself refuses to have it mended: it stays, and nobody else stops for it.
                Err(error) if classify::is_refused(&error) => {
                    tracing::error!(id = one.id, reason = one.reason, %error, "an outbox row cannot be read and is left where it is");
                }
                Err(error) => return Err(classify(&error)),
            }
        }
        Ok(())
    }

    /// Reads all parts of `read` in the order of the port, without rows of `exclude` and of `settled`. Returns those that cannot be
    /// read; they must be buried before what was read is used.
    pub(crate) async fn parts(
        &self,
        session: &mut Session,
        read: &Read,
        settled: impl Iterator<Item = Uuid>,
        polled: &mut Polled,
    ) -> Result<Vec<Unreadable>, Fault> {
        if !read.lanes.contains(LANE) {
            (polled.walk_ended, polled.lap_ended) = (true, true);
            return Ok(Vec::new());
        }
        let exclude = id_list(read.exclude.iter().copied().chain(settled));
        let common = Common { read, exclude };
        let mut unreadable = self.walk(session, &common, polled).await?;
        unreadable.extend(self.lap(session, &common, polled).await?);
        unreadable.extend(self.keys(session, &common, polled).await?);
        unreadable.extend(self.later(session, &common, polled).await?);
        unreadable.extend(self.destinations(session, &common, polled).await?);
        unreadable.sort_by_key(|one| one.row);
        unreadable.dedup_by_key(|one| one.row);
        Ok(unreadable)
    }

    fn part(&self, sql: &'static str, common: &Common<'_>, bytes_max: u64, limit: u32) -> Bound<'static> {
        sqlx::query(self.sql(sql))
            .bind(clamp(common.read.payload_max))
            .bind(clamp(bytes_max.max(1)))
            .bind(common.exclude.clone())
            .bind(i64::from(limit))
    }

    async fn walk(
        &self,
        session: &mut Session,
        common: &Common<'_>,
        polled: &mut Polled,
    ) -> Result<Vec<Unreadable>, Fault> {
        let read = common.read;
        if read.walk_limit == 0 {
            return Ok(Vec::new());
        }
        let query = self
            .part(WALK, common, read.bytes_max, read.walk_limit)
            .bind(first(read.walk_after))
            .bind(first_id(read.walk_after))
            .bind(text_list(&read.omit_topics))
            .bind(text_list(&read.omit_destinations));
        let part = fetch(session, query).await?;
        polled.walk_ended = part.ended(read.walk_limit);
        polled.walk = part.rows;
        Ok(part.unreadable)
    }

    /// Behind its own place, up to the walk's. Without a place of its own it asks for late commits, and rows of SQLite commit in
    /// the order of `sequence`: there are none.
    async fn lap(
        &self,
        session: &mut Session,
        common: &Common<'_>,
        polled: &mut Polled,
    ) -> Result<Vec<Unreadable>, Fault> {
        let read = common.read;
        let (Some(upto), true) = (read.walk_after, read.lap_after.is_some() && read.lap_limit > 0) else {
            polled.lap_ended = true;
            return Ok(Vec::new());
        };
        let query = self
            .part(LAP, common, read.bytes_max, read.lap_limit)
            .bind(first(read.lap_after))
            .bind(first_id(read.lap_after))
            .bind(upto.sequence)
            .bind(upto.id.to_string());
        let part = fetch(session, query).await?;
        polled.lap_ended = part.ended(read.lap_limit);
        polled.lap = part.rows;
        Ok(part.unreadable)
    }

    async fn keys(
        &self,
        session: &mut Session,
        common: &Common<'_>,
        polled: &mut Polled,
    ) -> Result<Vec<Unreadable>, Fault> {
        let read = common.read;
        if read.keys.is_empty() || read.key_limit == 0 {
            return Ok(Vec::new());
        }
        let keys: Vec<_> = read.keys.iter().map(|key| serde_json::json!([key.key, key.from])).collect();
        let query =
            self.part(KEYS, common, read.bytes_max, read.key_limit).bind(serde_json::Value::Array(keys).to_string());
        let part = fetch(session, query).await?;
        polled.keys = part.rows;
        Ok(part.unreadable)
    }

    async fn later(
        &self,
        session: &mut Session,
        common: &Common<'_>,
        polled: &mut Polled,
    ) -> Result<Vec<Unreadable>, Fault> {
        let read = common.read;
        if read.later_limit == 0 {
            return Ok(Vec::new());
        }
        let query = self
            .part(LATER, common, read.bytes_max, read.later_limit)
            .bind(session.now.clone())
            .bind(None::<String>)
            .bind(text_list(&read.omit_topics))
            .bind(text_list(&read.omit_destinations));
        let part = fetch(session, query).await?;
        polled.later = part.rows;
        let next: Option<String> = sqlx::query_scalar(self.sql(NEXT_DUE))
            .bind(session.now.clone())
            .fetch_one(session.connection())
            .await
            .map_err(|error| classify(&error))?;
        polled.next_due_in_us = next.and_then(|at| ticks::parse(&at)).map(|at| at - session.now_us);
        Ok(part.unreadable)
    }

    /// One statement each, in the order asked; the bytes of one are taken from those of the next.
    async fn destinations(
        &self,
        session: &mut Session,
        common: &Common<'_>,
        polled: &mut Polled,
    ) -> Result<Vec<Unreadable>, Fault> {
        let mut unreadable = Vec::new();
        let mut left = common.read.bytes_max.max(1);
        for wish in common.read.destinations.iter().filter(|wish| wish.limit > 0) {
            if left == 0 {
                break;
            }
            let part = fetch(session, self.destination(common, wish, left)).await?;
            left = left.saturating_sub(part.bytes);
            polled.destinations.extend(part.rows);
            unreadable.extend(part.unreadable);
        }
        Ok(unreadable)
    }

    fn destination(&self, common: &Common<'_>, wish: &DestinationRead, bytes_max: u64) -> Bound<'static> {
        self.part(DESTINATION, common, bytes_max, wish.limit)
            .bind(first(wish.after))
            .bind(first_id(wish.after))
            .bind(text_list(&wish.topics))
            .bind(wish.destination.clone())
    }
}

async fn fetch(session: &mut Session, query: Bound<'_>) -> Result<Part, Fault> {
    let now_us = session.now_us;
    let rows = query.fetch_all(session.connection()).await.map_err(|error| classify(&error))?;
    let found = rows.first().map_or(Ok(0), |row| row.try_get::<i64, _>(16)).map_err(|error| classify(&error))?;
    let mut part = Part {
        rows: Vec::with_capacity(rows.len()),
        returned: rows.len(),
        found: found as usize,
        bytes: 0,
        unreadable: Vec::new(),
    };
    for row in rows {
        match decode(&row, now_us) {
            Ok(row) => {
                if let Payload::Loaded(bytes) = &row.payload {
                    part.bytes += bytes.len() as u64;
                }
                part.rows.push(row);
            }
            // Tables of our own have checks that make nearly all of this impossible; others should not stop at one row.
            Err(reason) => part.unreadable.push(Unreadable {
                row: row.try_get(18).map_err(|error| classify(&error))?,
                id: row.try_get_unchecked(0).unwrap_or_default(),
                reason,
            }),
        }
    }
    Ok(part)
}

fn decode(row: &SqliteRow, now_us: i64) -> Result<OutboxRow, String> {
    let text = |column: usize| -> Result<Option<String>, String> {
        let bytes: Option<Vec<u8>> = row.try_get_unchecked(column).map_err(|error| error.to_string())?;
        bytes.map(String::from_utf8).transpose().map_err(|_| format!("column {column} is no UTF-8 text"))
    };
    let needed = |column: usize| text(column)?.ok_or_else(|| format!("column {column} is null"));
    let id = |text: String| text.parse::<Uuid>().map_err(|_| format!("{text:?} is no UUID"));
    let time = |text: String| ticks::parse(&text).ok_or_else(|| format!("{text:?} is no time as of contract 2.3"));
    let number = |column: usize| row.try_get::<i64, _>(column).map_err(|error| error.to_string());
    // QueueBox's own columns: what is beyond them can never be compared with, so it cannot be settled.
    let small =
        |column: usize| i32::try_from(number(column)?).map_err(|_| format!("column {column} is beyond 32 bits"));
    let scheduled_at = time(needed(12)?)?;
    let size = u64::try_from(number(15)?).unwrap_or(0);
    let payload: Option<Vec<u8>> = row.try_get_unchecked(17).map_err(|error| error.to_string())?;
    Ok(OutboxRow {
        id: id(needed(0)?)?,
        sequence: number(1)?,
        lane: LANE,
        topic: needed(2)?,
        key: text(3)?.filter(|key| !key.is_empty()),
        destination: text(4)?,
        parent_id: text(5)?.map(id).transpose()?,
        headers: needed(6)?,
        aggregate_type: text(7)?,
        trace_parent: text(8)?,
        attempt: small(9)?,
        max_attempts: clamped(number(10)?),
        crashes: small(11)?,
        scheduled_at,
        due_in_us: scheduled_at - now_us,
        created_at_us: time(needed(13)?)?,
        payload: match payload {
            Some(bytes) => Payload::Loaded(bytes.into()),
            None if number(14)? != 0 => Payload::Omitted,
            None => Payload::TooLarge(size),
        },
    })
}

/// A number of an application: SQLite's integers have 64 bits, those of the contract 32.
pub(crate) fn clamped(number: i64) -> i32 {
    i32::try_from(number).unwrap_or(if number < 0 { i32::MIN } else { i32::MAX })
}

fn first(after: Option<Position>) -> i64 {
    after.map_or(i64::MIN, |position| position.sequence)
}

fn first_id(after: Option<Position>) -> String {
    after.map_or_else(String::new, |position| position.id.to_string())
}

fn clamp(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

/// A JSON array of ids, for `json_each`.
pub(crate) fn id_list(ids: impl Iterator<Item = Uuid>) -> String {
    let mut list = String::from("[");
    for id in ids {
        if list.len() > 1 {
            list.push(',');
        }
        list.push('"');
        list.push_str(id.hyphenated().encode_lower(&mut Uuid::encode_buffer()));
        list.push('"');
    }
    list.push(']');
    list
}

/// A JSON array of texts, for `json_each`.
pub(crate) fn text_list(texts: &[String]) -> String {
    serde_json::Value::from(texts.to_vec()).to_string()
}

//! The hot path: settle and read in one statement, one round trip, one commit (`Outbox::poll`).
//!
//! The statement is put together from parts, and a part that is not wished for is not in it: some dozens of variants, each
//! prepared once per connection. Parameters have fixed numbers over all variants.
//!
//! ```text
//! fence ──► sent, failed        (each repeats the whole condition)
//!       └─► walk, lap, keys, later, destinations ──► bounded by bytes ──► rows
//! ```
//!
//! What was measured or rejected is said in the SQL comments. A data-modifying statement reads with the snapshot from before its
//! own writes, so rows settled in the call would still look pending: they are put into the exclusion list.

use std::{fmt::Write as _, sync::Arc};

use bytes::Bytes;
use queuebox_core::{
    Uuid,
    message::{OutboxRow, Payload, Position},
    ports::{
        Fence,
        outbox::{Outcome, Polled, Read, Settle},
    },
};
use sqlx::postgres::PgRow;

use crate::{
    PostgresStore,
    cells::Cells,
    config::RouteTarget,
    db::Args,
    error::Error,
    features::Features,
    floor::{Extent, Reader, Seen},
    values::Ticks,
};

/// The worker's own row. With writes it is locked, so that a takeover, which locks it FOR UPDATE, comes before or after this
/// statement, never in the middle; KEY SHARE does not stand in the way of the renewal. A poll that only reads takes no lock: the
/// lock would end with the statement anyway, and writing it would cost the flush of a commit.
///
/// For the safe floor (`floor.rs`, rule 1) the counter is read first, then the transaction draws its id, then the lock is taken.
/// An id alone costs no flush.
pub(crate) const FENCE: &str = "
WITH
drawn AS MATERIALIZED (SELECT pg_sequence_last_value('{sequence}'::regclass) AS counter), --if floor
own AS MATERIALIZED (SELECT d.counter, pg_current_xact_id() AS id FROM drawn d), --if floor
fence AS MATERIALIZED (
    SELECT w.lease_expires_at AS lease --if lanes
      FROM {worker} w --if lanes
     CROSS JOIN own --if floor
     WHERE w.worker = $1 AND w.token = $2 AND w.lease_expires_at > clock_timestamp() --if lanes
       FOR KEY SHARE OF w --if locks
    SELECT NULL::timestamptz AS lease --unless lanes
), busy AS MATERIALIZED ( --unless lanes
    SELECT b.{o.key} AS key --unless lanes
           , b.{o.destination} AS destination --if fan_out --unless lanes
      FROM {outbox} b WHERE b.{o.state} = 'processing' AND b.{o.key} <> '' --unless lanes
), clock AS MATERIALIZED (SELECT clock_timestamp() AS now)";

/// Rows are found through the primary key: an index on (sequence) where pending would be smaller, but a settle with `marked` needs
/// another one, and both were equally fast. Without lanes a claim is fenced by the lease of its row; what is decided without a claim (no
/// route, fan-out) by what was read.
pub(crate) const CONDITION: &str = "
       AND o.{o.id} = s.id AND o.{o.attempt} = s.attempt AND o.{o.scheduled_at} = s.scheduled_at
       AND o.{o.state} = CASE WHEN s.marked THEN 'processing' ELSE 'pending' END
       AND (NOT s.marked OR o.{o.claim_token} = $2)
       AND (NOT s.marked OR o.{o.lease_expires_at} > clock_timestamp()) --unless lanes";

const SENT: &str = ",
sent AS (
    DELETE FROM {outbox} o USING --if delete
    UPDATE {outbox} o --unless delete
       SET {o.state} = 'sent', {o.updated_at} = clock_timestamp(), --unless delete
           {o.crashes} = 0, --if sent_crashes
           {o.claimed_at} = NULL, {o.claim_token} = NULL, {o.lease_expires_at} = NULL --unless delete
      FROM --unless delete
           unnest($4::uuid[], $5::boolean[], $6::integer[], $7::timestamptz[]) AS s(id, marked, attempt, scheduled_at)
     WHERE EXISTS (SELECT FROM fence)@CONDITION@
    RETURNING o.{o.id} AS id
    , o.{o.parent_id} AS parent_id --if delete_parents
)";

/// With `onSent: Delete` a parent goes with the last of its open children, be that sent or dead.
const PARENTS: &str = ",
ended AS (
    @ENDED@
), parents AS (
    DELETE FROM {outbox} p
     WHERE p.{o.id} IN (SELECT parent_id FROM ended) AND p.{o.state} = 'sent'
       AND NOT EXISTS (SELECT FROM {outbox} c WHERE c.{o.parent_id} = p.{o.id} AND c.{o.state} IN ('pending', 'processing')
                        AND c.{o.id} NOT IN (SELECT id FROM ended))
)";

const FAILED: &str = ",
failed AS (
    UPDATE {outbox} o
       SET {o.state} = CASE s.kind WHEN 'dead' THEN 'dead' ELSE 'pending' END,
           {o.attempt} = o.{o.attempt} + s.counted,
           {o.scheduled_at} = CASE s.kind WHEN 'retry' THEN clock_timestamp() + s.delay_us * interval '1 microsecond'
                                          ELSE o.{o.scheduled_at} END,
           {o.last_error} = CASE s.kind WHEN 'release' THEN o.{o.last_error} ELSE s.error END,
           {o.crashes} = CASE s.kind WHEN 'release' THEN o.{o.crashes} ELSE 0 END, --if crashes
           {o.updated_at} = clock_timestamp(),
           {o.claimed_at} = NULL, {o.claim_token} = NULL, {o.lease_expires_at} = NULL
      FROM unnest($8::uuid[], $9::boolean[], $10::integer[], $11::timestamptz[], $12::text[], $13::integer[], $14::bigint[],
                  $15::text[]) AS s(id, marked, attempt, scheduled_at, kind, counted, delay_us, error)
     WHERE EXISTS (SELECT FROM fence)@CONDITION@
    RETURNING o.{o.id} AS id
    , CASE WHEN o.{o.state} = 'dead' THEN o.{o.parent_id} END AS parent_id --if delete_parents
)";

/// What every part reads of a row.
const COLUMNS: &str = "o.{o.id} AS id, o.{o.sequence} AS sequence, {o.lane} AS lane, o.{o.topic} AS topic,
           nullif(o.{o.key}, '') AS key, o.{o.headers} AS headers, o.{o.aggregate_type} AS aggregate_type,
           o.{o.destination} AS destination, o.{o.parent_id} AS parent_id, --if fan_out
           NULL::text AS destination, NULL::uuid AS parent_id, --unless fan_out
           o.{o.trace_parent} AS trace_parent, --if trace
           NULL::text AS trace_parent, --unless trace
           o.{o.crashes} AS crashes, --if crashes
           0 AS crashes, --unless crashes
           o.{o.attempt} AS attempt, o.{o.max_attempts} AS max_attempts, o.{o.scheduled_at} AS scheduled_at,
           o.{o.created_at} AS created_at";

/// Pending rows of my lanes that are not in memory. NOT IN over a subquery is a hash table that is built once and keeps the order
/// of the index scan; `<> ALL (array)` compares each row with each id, and an anti-join loses the order.
const MINE: &str = "o.{o.state} = 'pending' AND EXISTS (SELECT FROM fence)
       AND ($3::bigint = -1 OR ($3::bigint >> {o.lane}) & 1 = 1)
       AND o.{o.id} NOT IN (SELECT unnest($16::uuid[]))@HEADS@";

/// Without lanes several workers read the same rows, so only the head of each key may be seen and claimed (contract 5.2.4), and none
/// while a row of the key is claimed: one that was replayed is the head again while a later one is under way. The few rows that are claimed
/// are found through their own index, once per statement; asked key by key, a hot key would be walked from end to end.
///
/// With fan-out the unit is (destination, key): a child waits for rows of its destination and for those without one, a plain row for those
/// without one and for children of the destination that it is routed to (contract 4.3).
pub(crate) const HEADS: &str = "
       AND NOT EXISTS (SELECT FROM {outbox} e --unless lanes
                        WHERE e.{o.key} = o.{o.key} AND e.{o.key} <> '' AND e.{o.state} IN ('pending', 'processing') --unless lanes
                          AND (e.{o.destination} IS NULL OR e.{o.destination} = coalesce(o.{o.destination}, {o.target})) --if fan_out --unless lanes
                          AND (e.{o.sequence}, e.{o.id}) < (o.{o.sequence}, o.{o.id})) --unless lanes
       AND coalesce(o.{o.key}, '') NOT IN (SELECT key FROM busy WHERE destination IS NULL) --if fan_out --unless lanes
       AND (coalesce(o.{o.key}, ''), coalesce(o.{o.destination}, {o.target}, '')) --if fan_out --unless lanes
           NOT IN (SELECT key, destination FROM busy WHERE destination IS NOT NULL) --if fan_out --unless lanes
       AND coalesce(o.{o.key}, '') NOT IN (SELECT key FROM busy) --unless fan_out --unless lanes";

/// The destination of the route that a topic takes, as an expression; NULL where there are several or none. Values are written so that
/// neither a template nor the server can take a part of them for something else.
pub(crate) fn target(routes: &[RouteTarget]) -> String {
    if routes.is_empty() {
        return "NULL::text".to_owned();
    }
    let mut sql = String::from("CASE");
    for route in routes {
        let any: Vec<String> = route
            .topics
            .iter()
            .map(|topic| format!("o.{{o.topic}} COLLATE \"C\" ~ {}", literal(&topic.to_regex())))
            .collect();
        let destination = route.destination.as_deref().map_or_else(|| "NULL".to_owned(), literal);
        let _ = write!(sql, " WHEN {} THEN {destination}", any.join(" OR "));
    }
    sql + " END"
}

fn literal(text: &str) -> String {
    let mut sql = String::from("E'");
    for character in text.chars() {
        if character.is_ascii_alphanumeric() {
            sql.push(character);
        } else {
            let _ = write!(sql, "\\U{:08X}", u32::from(character));
        }
    }
    sql + "'::text"
}

/// Through `idx_outbox_pending`. The first condition on `sequence` is for the index, the second for rows that share it.
const WALK: &str = ",
walk_seen AS MATERIALIZED (
    SELECT 0::bigint AS ord, @COLUMNS@, o.{o.payload} AS payload
      FROM {outbox} o
     WHERE @MINE@
       AND o.{o.sequence} >= $20 AND (o.{o.sequence} > $20 OR o.{o.id} > $21)
     ORDER BY o.{o.sequence}, o.{o.id} LIMIT $22
)";

/// The same index from another place, up to the walk's. No payload: nearly all of these rows are known.
const LAP: &str = ",
lap_seen AS MATERIALIZED (
    SELECT 0::bigint AS ord, @COLUMNS@
      FROM {outbox} o
     WHERE @MINE@
       AND o.{o.sequence} >= $23 AND (o.{o.sequence} > $23 OR o.{o.id} > $24)
       AND o.{o.sequence} <= $20 AND (o.{o.sequence} < $20 OR o.{o.id} <= $21)
     ORDER BY o.{o.sequence}, o.{o.id} LIMIT $25
)";

/// What may have become visible since the last look: from the safe floor on, in the snapshot of this very statement.
const LATE: &str = ",
late_floor AS MATERIALIZED (
    SELECT least($38::bigint, (SELECT min(l.bound) FROM unnest($39::bigint[], $40::bigint[]) AS l(id, bound)
                                WHERE pg_visible_in_snapshot(l.id::text::xid8, pg_current_snapshot()))) AS sequence
), lap_seen AS MATERIALIZED (
    SELECT 0::bigint AS ord, @COLUMNS@
      FROM {outbox} o
     WHERE @MINE@
       AND o.{o.sequence} > (SELECT sequence FROM late_floor)
       AND o.{o.sequence} <= $20 AND (o.{o.sequence} < $20 OR o.{o.id} <= $21)
     ORDER BY o.{o.sequence}, o.{o.id} LIMIT $25
)";

/// Through `idx_outbox_key`.
const KEYS: &str = ",
keys_seen AS MATERIALIZED (
    SELECT k.ord, r.*
      FROM unnest($26::text[], $27::bigint[]) WITH ORDINALITY AS k(key, lowest, ord)
     CROSS JOIN LATERAL (
        SELECT @COLUMNS@, o.{o.payload} AS payload
          FROM {outbox} o
         WHERE @MINE@
           AND o.{o.key} = k.key AND o.{o.sequence} >= k.lowest
         ORDER BY o.{o.sequence}, o.{o.id} LIMIT $28) r
)";

/// Through `idx_outbox_later`, whose predicate stands here word for word. What cannot be taken is left out before the bound.
const LATER: &str = ",
later_seen AS MATERIALIZED (
    SELECT 0::bigint AS ord, @COLUMNS@, o.{o.payload} AS payload
      FROM {outbox} o
     WHERE @MINE@
       AND o.{o.scheduled_at} > o.{o.created_at} AND o.{o.scheduled_at} <= (SELECT now FROM clock)
       AND NOT @OMIT@
     ORDER BY o.{o.scheduled_at}, o.{o.sequence}, o.{o.id} LIMIT $29
), next_later AS MATERIALIZED (
    SELECT o.{o.scheduled_at} AS scheduled_at
      FROM {outbox} o
     WHERE @MINE@
       AND o.{o.scheduled_at} > o.{o.created_at} AND o.{o.scheduled_at} > (SELECT now FROM clock)
     ORDER BY o.{o.scheduled_at} LIMIT 1
)";

/// No index knows topics: the scan is that of the walk, from the destination's own place. Bounded by the caller's place, which only
/// moves forward. An index on (topic, sequence) was rejected: it would cost each insert and each settle an entry.
const DESTINATIONS: &str = ",
destinations_seen AS MATERIALIZED (
    SELECT d.ord, r.*
      FROM unnest($30::text[], $31::bigint[], $32::uuid[], $33::bigint[]) WITH ORDINALITY AS d(name, after, after_id, most, ord)
     CROSS JOIN LATERAL (SELECT array_agg(t.topic) AS topics FROM unnest($34::text[], $35::bigint[]) AS t(topic, ord)
                          WHERE t.ord = d.ord) AS t
     CROSS JOIN LATERAL (
        SELECT @COLUMNS@, o.{o.payload} AS payload
          FROM {outbox} o
         WHERE @MINE@
           AND o.{o.sequence} >= d.after AND (o.{o.sequence} > d.after OR o.{o.id} > d.after_id)
           AND (o.{o.key} IS NULL OR o.{o.key} = '')
           AND (o.{o.destination} = d.name OR o.{o.destination} IS NULL AND o.{o.topic} = ANY (t.topics)) --if fan_out
           AND o.{o.topic} = ANY (t.topics) --unless fan_out
         ORDER BY o.{o.sequence}, o.{o.id} LIMIT d.most) r
)";

/// Rows whose destination has no room: of these topics without a destination, and children of these destinations.
fn omitted(topic: &str, destination: &str) -> String {
    format!(
        "
           ({destination} IS NOT NULL AND {destination} IN (SELECT unnest($19::text[])) OR {destination} IS NULL AND --if fan_out
           ({topic} IN (SELECT unnest($18::text[]))) --if fan_out
           ({topic} IN (SELECT unnest($18::text[])) --unless fan_out
           )"
    )
}

/// Bounds a part by the text size of its payloads. The text is made once, and not beyond what the sum of the *stored* sizes, which cost
/// nothing to know, lets through ($36, eight times the bound: text is never shorter than a quarter of what is stored): a
/// batch of 500 rows of 16 MiB must not become 8 GiB of text in the server. OFFSET 0 keeps the planner from writing the conversion
/// twice. The windows have no ORDER BY: they run in the order of the scan below, without a sort.
const BOUNDED: &str = ",
@PART@ AS (
    SELECT b.*
      FROM (SELECT s.*, sum(s.counted) OVER (ROWS UNBOUNDED PRECEDING) - s.counted AS before
              FROM (SELECT t.*, CASE WHEN t.size IS NULL OR t.size > $17 THEN 0 ELSE t.size END AS counted
                      FROM (SELECT c.*, octet_length(c.body) AS size
                              FROM (SELECT g.*, CASE WHEN NOT g.omitted THEN g.payload::text END AS body
                                      FROM (SELECT w.*, sum(w.stored) OVER (ROWS UNBOUNDED PRECEDING) - w.stored AS stored_before
                                              FROM (SELECT p.*, @OMITTED@ AS omitted, @STORED@ AS stored
                                                      FROM @PART@_seen p) w) g
                                     WHERE g.stored_before < $36 OFFSET 0) c OFFSET 0) t) s) b
     WHERE b.before < $37
)";

/// What is certainly too large is never handed out, so it counts nothing here either.
const STORED: &str = "CASE WHEN pg_column_size(p.payload) > 4 * $17 + 64 THEN 0 ELSE pg_column_size(p.payload) END";

const ROWS: &str = "
UNION ALL
SELECT @NUMBER@, r.ord, r.id, r.sequence, r.lane, r.topic, r.key, r.destination, r.parent_id,
       @BODY@, r.headers::text, r.aggregate_type, r.trace_parent,
       r.attempt, r.max_attempts, r.crashes, r.scheduled_at, r.created_at, NULL, NULL, NULL, NULL, NULL, NULL
  FROM @PART@ r";

/// The head row: what was lost, how much was seen, what time it is. It is missing when the fence does not hold.
const HEAD: &str = "
SELECT 0 AS part, 0::bigint AS ord, NULL::uuid AS id, NULL::bigint AS sequence, NULL::integer AS lane, NULL::text AS topic,
       NULL::text AS key, NULL::text AS destination, NULL::uuid AS parent_id, NULL::text AS body, NULL::integer AS size,
       NULL::text AS headers, NULL::text AS aggregate_type, NULL::text AS trace_parent, NULL::integer AS attempt,
       NULL::integer AS max_attempts, NULL::integer AS crashes, @NEXT@ AS scheduled_at, clock.now AS created_at,
       @LOST@ AS lost,
       ARRAY[@WALK_SEEN@, @LAP_SEEN@, @CUT@, (current_setting('transaction_read_only') = 'on')::integer]::bigint[] AS seen,
       own.counter, own.id::text::bigint, pg_snapshot_xmax(pg_current_snapshot())::text::bigint, --if floor
       ARRAY(SELECT x::text::bigint FROM pg_snapshot_xip(pg_current_snapshot()) x) --if floor
       NULL::bigint, NULL::bigint, NULL::bigint, NULL::bigint[] --unless floor
  FROM fence, clock
       , own --if floor
";

const LOST: &str = "ARRAY(SELECT unnest(@IDS@) EXCEPT ALL SELECT id FROM @CTE@)";

/// Which parts a statement has.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
struct Shape {
    sent: bool,
    failed: bool,
    walk: bool,
    lap: bool,
    /// The lap is what may have become visible since the last look.
    late: bool,
    keys: bool,
    later: bool,
    destinations: bool,
    /// The answer moves the safe floor.
    floor: bool,
}

const WALK_PART: i32 = 1;
const LAP_PART: i32 = 2;
const KEYS_PART: i32 = 3;
const LATER_PART: i32 = 4;
const DESTINATIONS_PART: i32 = 5;

impl Shape {
    fn of(settles: &Settles<'_>, read: &Read, features: &Features) -> Self {
        // Nothing is behind the start.
        let lap = read.lap_limit > 0 && read.walk_after.is_some();
        let (walk, late) = (read.walk_limit > 0, lap && read.lap_after.is_none());
        Self {
            sent: !settles.sent.is_empty(),
            failed: !settles.failed.is_empty(),
            walk,
            lap,
            late,
            keys: !read.keys.is_empty(),
            later: read.later_limit > 0,
            destinations: !read.destinations.is_empty(),
            floor: features.floor && features.lanes && (late || walk && read.walk_after.is_none()),
        }
    }

    fn bits(self) -> u32 {
        [self.sent, self.failed, self.walk, self.lap, self.late, self.keys, self.later, self.destinations, self.floor]
            .iter()
            .fold(1, |bits, part| bits << 1 | u32::from(*part))
    }

    /// Name, number, definition, and what is omitted, of each part that carries payloads.
    fn loaded(self) -> impl Iterator<Item = (&'static str, i32, &'static str, bool)> {
        [
            (self.walk, "walk", WALK_PART, WALK, true),
            (self.keys, "keys", KEYS_PART, KEYS, false),
            (self.later, "later", LATER_PART, LATER, false),
            (self.destinations, "destinations", DESTINATIONS_PART, DESTINATIONS, false),
        ]
        .into_iter()
        .filter_map(|(on, name, number, sql, omits)| on.then_some((name, number, sql, omits)))
    }

    fn template(self, delete_parents: bool) -> String {
        let mut sql = FENCE.to_owned();
        if self.sent {
            sql.push_str(SENT);
        }
        if self.failed {
            sql.push_str(FAILED);
        }
        if delete_parents && (self.sent || self.failed) {
            let parts = [(self.sent, "sent"), (self.failed, "failed")].into_iter().filter(|(on, _)| *on);
            let ended: Vec<String> = parts
                .map(|(_, part)| format!("SELECT s.id, s.parent_id FROM {part} s WHERE s.parent_id IS NOT NULL"))
                .collect();
            sql.push_str(&PARENTS.replace("@ENDED@", &ended.join(" UNION ALL ")));
        }
        let (mut rows, mut cut) = (String::new(), Vec::new());
        if self.lap {
            sql.push_str(if self.late { LATE } else { LAP });
            rows.push_str(&row_part("lap_seen", LAP_PART, false));
        }
        for (name, number, definition, omits) in self.loaded() {
            sql.push_str(definition);
            let omitted = if omits { omitted("p.topic", "p.destination") } else { "FALSE".to_owned() };
            sql.push_str(&BOUNDED.replace("@PART@", name).replace("@OMITTED@", &omitted).replace("@STORED@", STORED));
            rows.push_str(&row_part(name, number, true));
            if name != "walk" {
                cut.push(format!("coalesce((SELECT sum({STORED}) FROM {name}_seen p), 0) >= $36"));
            }
        }
        sql.push_str(&self.head(&cut));
        sql.push_str(&rows);
        sql.replace("@CONDITION@", CONDITION)
            .replace("@MINE@", MINE)
            .replace("@HEADS@", HEADS)
            .replace("@COLUMNS@", COLUMNS)
            .replace("@OMIT@", &omitted("o.{o.topic}", "o.{o.destination}"))
    }

    fn head(self, cut: &[String]) -> String {
        let lost = |on: bool, ids, cte| on.then(|| LOST.replace("@IDS@", ids).replace("@CTE@", cte));
        let lost: Vec<String> = [lost(self.sent, "$4::uuid[]", "sent"), lost(self.failed, "$8::uuid[]", "failed")]
            .into_iter()
            .flatten()
            .collect();
        let count = |on: bool, part: &str| if on { format!("(SELECT count(*) FROM {part})") } else { "0".to_owned() };
        HEAD.replace("@LOST@", &if lost.is_empty() { "NULL::uuid[]".to_owned() } else { lost.join(" || ") })
            .replace("@NEXT@", if self.later { "(SELECT scheduled_at FROM next_later)" } else { "NULL::timestamptz" })
            .replace("@WALK_SEEN@", &count(self.walk, "walk_seen"))
            .replace("@LAP_SEEN@", &count(self.lap, "lap_seen"))
            .replace("@CUT@", &if cut.is_empty() { "0".to_owned() } else { format!("({})::integer", cut.join(" OR ")) })
    }
}

fn row_part(name: &str, number: i32, has_body: bool) -> String {
    let body = if has_body {
        "CASE WHEN r.size <= $17 THEN r.body END, CASE WHEN r.size > $17 THEN r.size END"
    } else {
        "NULL, NULL"
    };
    ROWS.replace("@NUMBER@", &number.to_string()).replace("@PART@", name).replace("@BODY@", body)
}

/// Settles split by what they need.
#[derive(Default)]
struct Settles<'a> {
    sent: Vec<&'a Settle>,
    failed: Vec<&'a Settle>,
}

impl<'a> Settles<'a> {
    /// In the order of `sequence`: locks are always taken in that order. Releasing a row that was never marked writes nothing.
    fn split(settles: &'a [Settle]) -> Self {
        let mut split = Self::default();
        for settle in settles {
            match settle.outcome {
                Outcome::Sent => split.sent.push(settle),
                Outcome::Release if !settle.stamp.marked => {}
                _ => split.failed.push(settle),
            }
        }
        split.sent.sort_by_key(|settle| settle.position);
        split.failed.sort_by_key(|settle| settle.position);
        split
    }

    fn bind(&self, args: Args) -> Args {
        let stamps = |args: Args, settles: &[&Settle]| {
            args.bind(settles.iter().map(|settle| settle.position.id).collect::<Vec<_>>())
                .bind(settles.iter().map(|settle| settle.stamp.marked).collect::<Vec<_>>())
                .bind(settles.iter().map(|settle| settle.stamp.attempt).collect::<Vec<_>>())
                .bind(settles.iter().map(|settle| Ticks(settle.stamp.scheduled_at)).collect::<Vec<_>>())
        };
        let (mut kinds, mut counted, mut delays, mut errors) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for settle in &self.failed {
            let (kind, count, delay, error) = match &settle.outcome {
                Outcome::Retry { delay_us, error } => ("retry", 1, *delay_us, Some(error.as_str())),
                Outcome::Dead { error, counted } => ("dead", i32::from(*counted), 0, Some(error.as_str())),
                Outcome::Release | Outcome::Sent => ("release", 0, 0, None),
            };
            kinds.push(kind);
            counted.push(count);
            delays.push(delay);
            errors.push(error);
        }
        let args = stamps(stamps(args, &self.sent), &self.failed);
        args.bind(kinds).bind(counted).bind(delays).bind(errors)
    }
}

/// The start of everything.
const FIRST: Position = Position { sequence: i64::MIN, id: Uuid::nil() };

fn bind_read(args: Args, read: &Read, exclude: &[Uuid], guarded: bool) -> Args {
    let limit = |rows: u32| i64::from(rows);
    let bytes = |bytes: u64| i64::try_from(bytes).unwrap_or(i64::MAX / 16).min(i64::MAX / 16);
    let (walk, lap) = (read.walk_after.unwrap_or(FIRST), read.lap_after.unwrap_or(FIRST));
    let after: Vec<Position> = read.destinations.iter().map(|asked| asked.after.unwrap_or(FIRST)).collect();
    let topics: Vec<(&str, i64)> = read
        .destinations
        .iter()
        .zip(1..)
        .flat_map(|(asked, ord)| asked.topics.iter().map(move |topic| (topic.as_str(), ord)))
        .collect();
    let guard = if guarded { bytes(read.bytes_max).saturating_mul(8).saturating_add(64 << 10) } else { i64::MAX };
    args.bind(exclude)
        .bind(bytes(read.payload_max))
        .bind(&read.omit_topics)
        .bind(&read.omit_destinations)
        .bind(walk.sequence)
        .bind(walk.id)
        .bind(limit(read.walk_limit))
        .bind(lap.sequence)
        .bind(lap.id)
        .bind(limit(read.lap_limit))
        .bind(read.keys.iter().map(|asked| asked.key.as_str()).collect::<Vec<_>>())
        .bind(read.keys.iter().map(|asked| asked.from).collect::<Vec<_>>())
        .bind(limit(read.key_limit))
        .bind(limit(read.later_limit))
        .bind(read.destinations.iter().map(|asked| asked.destination.as_str()).collect::<Vec<_>>())
        .bind(after.iter().map(|position| position.sequence).collect::<Vec<_>>())
        .bind(after.iter().map(|position| position.id).collect::<Vec<_>>())
        .bind(read.destinations.iter().map(|asked| limit(asked.limit)).collect::<Vec<_>>())
        .bind(topics.iter().map(|(topic, _)| *topic).collect::<Vec<_>>())
        .bind(topics.iter().map(|(_, ord)| *ord).collect::<Vec<_>>())
        .bind(guard)
        .bind(bytes(read.bytes_max).max(1))
}

impl PostgresStore {
    /// Settles, then reads.
    pub(crate) async fn poll_once(
        &self,
        fence: &Fence,
        settles: &[Settle],
        read: Option<&Read>,
    ) -> Result<Polled, Error> {
        let mut answer = match self.poll_guarded(fence, settles, read, true).await {
            Err(error) => {
                if matches!(error, Error::ReadOnly) {
                    self.db.doubt();
                }
                if error.ends_connection() {
                    self.floor().forget();
                }
                return Err(error);
            }
            Ok(answer) => answer,
        };
        if let Some(read) = read.filter(|_| answer.cut) {
            // Rare: far more bytes are stored than text was counted, so the bound must be found by the text alone. What was
            // settled is settled, and stays out of the read.
            let mut read = read.clone();
            read.exclude.extend(settles.iter().map(|settle| settle.position.id));
            let again = self.poll_guarded(fence, &[], Some(&read), false).await?;
            answer.polled = Polled { lost: answer.polled.lost, ..again.polled };
        }
        Ok(answer.polled)
    }

    async fn poll_guarded(
        &self,
        fence: &Fence,
        settles: &[Settle],
        read: Option<&Read>,
        guarded: bool,
    ) -> Result<Answer, Error> {
        let split = Settles::split(settles);
        let nothing = Read::default();
        let wishes = read.unwrap_or(&nothing);
        let features = self.features();
        let shape = Shape::of(&split, wishes, &features);
        let reader = Reader { token: fence.token, lanes: wishes.lanes };
        let sql = self.poll_sql(shape);
        let exclude: Vec<Uuid> =
            wishes.exclude.iter().copied().chain(settles.iter().map(|settle| settle.position.id)).collect();
        let args = Args::new().bind(fence.worker.as_str()).bind(fence.token).bind(wishes.lanes.as_i64());
        let question = self.floor().question(reader);
        let args = bind_read(split.bind(args), wishes, &exclude, guarded)
            .bind(if features.floor { question.settled } else { i64::MIN })
            .bind(question.ids)
            .bind(question.bounds);
        let rows = self.db.rows(&sql, args).await?;
        let mut answer = Answer::default();
        for row in &rows {
            answer.take(row)?;
        }
        let answer = answer.finish(wishes)?;
        if let Some(seen) = &answer.seen {
            let cut = (shape.late && !answer.polled.lap_ended).then(|| answer.polled.lap.last()).flatten();
            let extent = cut.map_or(Extent::Whole, |row| Extent::UpTo(row.sequence));
            self.floor().learn(reader, seen, extent);
        }
        Ok(answer)
    }

    /// The statement that [`queuebox_core::ports::Outbox::poll`] would run, for tests of its plan.
    #[doc(hidden)]
    pub fn poll_statement(&self, settles: &[Settle], read: &Read) -> Arc<str> {
        self.poll_sql(Shape::of(&Settles::split(settles), read, &self.features()))
    }

    fn poll_sql(&self, shape: Shape) -> Arc<str> {
        self.variant("poll", shape.bits(), |features| {
            let mut words = features.words();
            if shape.floor {
                words.push("floor");
            }
            let deletes = features.on_sent_delete;
            if features.lanes && (shape.sent || shape.failed) {
                words.push("locks");
            }
            if deletes {
                words.push("delete");
            } else if features.crashes {
                words.push("sent_crashes");
            }
            (shape.template(deletes && features.fan_out), words)
        })
    }
}

/// A poll's answer on its way into a [`Polled`].
#[derive(Default)]
struct Answer {
    polled: Polled,
    cut: bool,
    walk_seen: i64,
    lap_seen: i64,
    now: Option<Ticks>,
    seen: Option<Seen>,
    /// Rows of keys and of destinations, each with the number of the question that it answers.
    keys: Vec<(i64, OutboxRow)>,
    destinations: Vec<(i64, OutboxRow)>,
}

impl Answer {
    fn take(&mut self, row: &PgRow) -> Result<(), Error> {
        let mut cells = Cells::of(row);
        let (part, ord): (i32, i64) = (cells.next()?, cells.next()?);
        if part == 0 {
            return self.take_head(row);
        }
        let now = self.now.ok_or(Error::Fenced)?;
        let read = outbox_row(&mut cells, part == LAP_PART, now)?;
        let polled = &mut self.polled;
        match part {
            WALK_PART => polled.walk.push(read),
            LAP_PART => polled.lap.push(read),
            LATER_PART => polled.later.push(read),
            KEYS_PART => self.keys.push((ord, read)),
            _ => self.destinations.push((ord, read)),
        }
        Ok(())
    }

    fn take_head(&mut self, row: &PgRow) -> Result<(), Error> {
        let mut cells = Cells::at(row, HEAD_COLUMNS);
        let (next, now) = (cells.ticks()?, cells.ticks()?);
        self.polled.lost = cells.next::<Option<Vec<Uuid>>>()?.unwrap_or_default();
        let seen: Vec<i64> = cells.next()?;
        let [walk_seen, lap_seen, cut, read_only] = <[i64; 4]>::try_from(seen).unwrap_or_default();
        (self.walk_seen, self.lap_seen, self.cut, self.now) = (walk_seen, lap_seen, cut != 0, now);
        let (counter, own, xmax): (Option<i64>, Option<i64>, Option<i64>) =
            (cells.next()?, cells.next()?, cells.next()?);
        let running: Option<Vec<i64>> = cells.next()?;
        self.seen = own.zip(xmax).map(|(own, xmax)| Seen { own, counter, xmax, running: running.unwrap_or_default() });
        self.polled.next_due_in_us = next.zip(now).map(|(next, now)| next.since(now).max(0));
        if read_only != 0 { Err(Error::ReadOnly) } else { Ok(()) }
    }

    fn finish(mut self, read: &Read) -> Result<Self, Error> {
        if self.now.is_none() {
            return Err(Error::Fenced);
        }
        let in_order = |mut rows: Vec<(i64, OutboxRow)>| {
            rows.sort_by_key(|(ord, row)| (*ord, row.position()));
            rows.into_iter().map(|(_, row)| row).collect()
        };
        let polled = &mut self.polled;
        // The parts come in order already; nothing in SQL promises it.
        sort(&mut polled.walk, |row| (0, row.position()));
        sort(&mut polled.lap, |row| (0, row.position()));
        sort(&mut polled.later, |row| (row.scheduled_at, row.position()));
        polled.keys = in_order(self.keys);
        polled.destinations = in_order(self.destinations);
        (self.keys, self.destinations) = Default::default();
        let returned = |rows: &[OutboxRow]| i64::try_from(rows.len()).unwrap_or(i64::MAX);
        polled.walk_ended = read.walk_limit > 0
            && self.walk_seen < i64::from(read.walk_limit)
            && returned(&polled.walk) == self.walk_seen;
        polled.lap_ended = read.lap_limit > 0 && self.lap_seen < i64::from(read.lap_limit);
        Ok(self)
    }
}

fn sort<K: Ord>(rows: &mut [OutboxRow], key: impl Fn(&OutboxRow) -> K) {
    if !rows.is_sorted_by_key(&key) {
        rows.sort_by_key(key);
    }
}

/// Where `scheduled_at` stands.
const HEAD_COLUMNS: usize = 17;

fn outbox_row(cells: &mut Cells<'_>, lap: bool, now: Ticks) -> Result<OutboxRow, Error> {
    let id = cells.next()?;
    let sequence = cells.next()?;
    let lane: i32 = cells.next()?;
    let (topic, key, destination, parent_id) = (cells.next()?, cells.next()?, cells.next()?, cells.next()?);
    let body = cells.bytes()?.map(Bytes::copy_from_slice);
    let size: Option<i32> = cells.next()?;
    let payload = match (body, size) {
        (Some(body), _) if !lap => Payload::Loaded(body),
        (_, Some(size)) => Payload::TooLarge(u64::from(size.unsigned_abs())),
        _ => Payload::Omitted,
    };
    let (headers, aggregate_type, trace_parent) = (cells.next()?, cells.next()?, cells.next()?);
    let (attempt, max_attempts, crashes) = (cells.next()?, cells.next()?, cells.next()?);
    let scheduled_at = cells.ticks()?.unwrap_or(now);
    let created_at = cells.ticks()?.unwrap_or(now);
    Ok(OutboxRow {
        id,
        sequence,
        lane: u8::try_from(lane).unwrap_or_default(),
        topic,
        key,
        destination,
        parent_id,
        payload,
        headers,
        aggregate_type,
        trace_parent,
        attempt,
        max_attempts,
        crashes,
        scheduled_at: scheduled_at.0,
        due_in_us: scheduled_at.since(now),
        created_at_us: created_at.unix_us(),
    })
}

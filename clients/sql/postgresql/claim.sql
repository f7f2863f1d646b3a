-- Takes at most `batch` messages of a source, at most one per aggregate, for `lease_ms`.
-- Due pending rows and rows whose lease has ended are read through an index each. The lock skips what others hold, and repeats
-- the whole condition on the newest version of the row, as does the update. The columns are named, since a prepared RETURNING * fails
-- from the moment on at which a migration adds one.
WITH candidates AS (
    (SELECT i.id, i.aggregate_id, i.scheduled_at, i.created_at
       FROM inbox i
      WHERE i.source = CAST(:source AS varchar) AND i.consumption = 'pull'
        AND i.state = 'pending' AND i.scheduled_at <= clock_timestamp()
        AND NOT EXISTS (SELECT FROM inbox b
                         WHERE b.source = i.source AND b.aggregate_id = i.aggregate_id AND b.consumption = 'pull'
                           AND b.state = 'processing' AND b.lease_expires_at > clock_timestamp())
      ORDER BY i.scheduled_at, i.created_at, i.id
      LIMIT CAST(:cand_limit AS bigint))
    UNION ALL
    (SELECT i.id, i.aggregate_id, i.scheduled_at, i.created_at
       FROM inbox i
      WHERE i.source = CAST(:source AS varchar) AND i.consumption = 'pull'
        AND i.state = 'processing' AND i.lease_expires_at <= clock_timestamp()
        AND NOT EXISTS (SELECT FROM inbox b
                         WHERE b.source = i.source AND b.aggregate_id = i.aggregate_id AND b.consumption = 'pull'
                           AND b.state = 'processing' AND b.lease_expires_at > clock_timestamp())
      ORDER BY i.scheduled_at, i.created_at, i.id
      LIMIT CAST(:cand_limit AS bigint))
), heads AS (
    SELECT DISTINCT ON (COALESCE('a' || c.aggregate_id, 'i' || c.id)) c.id, c.scheduled_at, c.created_at
      FROM candidates c
     ORDER BY COALESCE('a' || c.aggregate_id, 'i' || c.id), c.scheduled_at, c.created_at, c.id
), chosen AS (
    SELECT h.id FROM heads h ORDER BY h.scheduled_at, h.created_at, h.id LIMIT CAST(:batch AS bigint)
), locked AS MATERIALIZED (
    SELECT i.id
      FROM inbox i
     WHERE i.id IN (SELECT id FROM chosen) AND i.consumption = 'pull'
       AND (i.state = 'pending' AND i.scheduled_at <= clock_timestamp()
            OR i.state = 'processing' AND i.lease_expires_at <= clock_timestamp())
       FOR UPDATE SKIP LOCKED
)
UPDATE inbox i
   SET state = 'processing',
       crashes = i.crashes + CASE WHEN i.state = 'processing' THEN 1 ELSE 0 END,
       claim_token = gen_random_uuid(),
       claimed_at = clock_timestamp(),
       lease_expires_at = clock_timestamp() + CAST(:lease_ms AS bigint) * interval '1 millisecond'
  FROM locked l
 WHERE i.id = l.id AND i.consumption = 'pull'
   AND (i.state = 'pending' AND i.scheduled_at <= clock_timestamp()
        OR i.state = 'processing' AND i.lease_expires_at <= clock_timestamp())
RETURNING i.id, i.source, i.idempotency_key, i.aggregate_id, i.event_type, i.payload, i.headers, i.correlation_id, i.consumption,
          i.crashes, i.trace_parent, i.topic,
          i.state, i.created_at, i.processed_at, i.scheduled_at, i.attempt, i.last_error, i.claimed_at, i.lease_expires_at, i.claim_token

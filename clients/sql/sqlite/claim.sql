-- Takes at most `batch` messages of a source, at most one per aggregate, for `lease_ms`. In a transaction that began IMMEDIATE:
-- there is one writer at a time, so what was read is still true when it is written.
WITH candidates AS (
    SELECT * FROM (
        SELECT i.id, i.aggregate_id, i.scheduled_at, i.created_at
          FROM inbox i
         WHERE i.source = :source AND i.consumption = 'pull'
           AND i.state = 'pending' AND i.scheduled_at <= strftime('%Y-%m-%dT%H:%M:%f000Z', 'now')
           AND NOT EXISTS (SELECT 1 FROM inbox b
                       WHERE b.source = i.source AND b.aggregate_id = i.aggregate_id AND b.consumption = 'pull'
                         AND b.state = 'processing' AND b.lease_expires_at > strftime('%Y-%m-%dT%H:%M:%f000Z', 'now'))
         ORDER BY i.scheduled_at, i.created_at, i.id
         LIMIT :cand_limit)
    UNION ALL
    SELECT * FROM (
        SELECT i.id, i.aggregate_id, i.scheduled_at, i.created_at
          FROM inbox i
         WHERE i.source = :source AND i.consumption = 'pull'
           AND i.state = 'processing' AND i.lease_expires_at <= strftime('%Y-%m-%dT%H:%M:%f000Z', 'now')
           AND NOT EXISTS (SELECT 1 FROM inbox b
                       WHERE b.source = i.source AND b.aggregate_id = i.aggregate_id AND b.consumption = 'pull'
                         AND b.state = 'processing' AND b.lease_expires_at > strftime('%Y-%m-%dT%H:%M:%f000Z', 'now'))
         ORDER BY i.scheduled_at, i.created_at, i.id
         LIMIT :cand_limit)
), heads AS (
    SELECT c.id, c.scheduled_at, c.created_at,
           row_number() OVER (PARTITION BY COALESCE('a' || c.aggregate_id, 'i' || c.id)
                              ORDER BY c.scheduled_at, c.created_at, c.id) AS place
      FROM candidates c
)
UPDATE inbox
   SET state = 'processing',
       crashes = crashes + (state = 'processing'),
       claim_token = lower(hex(randomblob(4)) || '-' || hex(randomblob(2)) || '-4' || substr(hex(randomblob(2)), 2) || '-'
           || substr('89ab', 1 + (abs(random()) % 4), 1) || substr(hex(randomblob(2)), 2) || '-' || hex(randomblob(6))),
       claimed_at = strftime('%Y-%m-%dT%H:%M:%f000Z', 'now'),
       lease_expires_at = strftime('%Y-%m-%dT%H:%M:%f000Z', 'now', printf('+%d.%03d seconds', :lease_ms / 1000, :lease_ms % 1000))
 WHERE id IN (SELECT h.id FROM heads h WHERE h.place = 1 ORDER BY h.scheduled_at, h.created_at, h.id LIMIT :batch)
RETURNING id, source, idempotency_key, aggregate_id, event_type, payload, headers, correlation_id, consumption,
          crashes, trace_parent, topic,
          state, created_at, processed_at, scheduled_at, attempt, last_error, claimed_at, lease_expires_at, claim_token

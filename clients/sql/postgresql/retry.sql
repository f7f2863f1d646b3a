-- A failed attempt; the message is due again in `delay_ms`.
UPDATE inbox
   SET state = 'pending', attempt = attempt + 1,
       crashes = 0,
       last_error = CAST(:error AS text),
       scheduled_at = clock_timestamp() + CAST(:delay_ms AS bigint) * interval '1 millisecond',
       claim_token = NULL, claimed_at = NULL, lease_expires_at = NULL
 WHERE id = CAST(:id AS uuid) AND consumption = 'pull' AND state = 'processing'
   AND claim_token = CAST(:token AS uuid) AND lease_expires_at > clock_timestamp()

-- 0 rows: the claim is lost.
UPDATE inbox
   SET lease_expires_at = clock_timestamp() + CAST(:lease_ms AS bigint) * interval '1 millisecond'
 WHERE id = CAST(:id AS uuid) AND consumption = 'pull' AND state = 'processing'
   AND claim_token = CAST(:token AS uuid) AND lease_expires_at > clock_timestamp()

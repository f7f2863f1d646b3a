-- The worker gives up; `error` begins with "handler: ".
UPDATE inbox
   SET state = 'dead', last_error = CAST(:error AS text),
       claim_token = NULL, claimed_at = NULL, lease_expires_at = NULL
 WHERE id = CAST(:id AS uuid) AND consumption = 'pull' AND state = 'processing'
   AND claim_token = CAST(:token AS uuid) AND lease_expires_at > clock_timestamp()

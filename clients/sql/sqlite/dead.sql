-- The worker gives up; `error` begins with "handler: ".
UPDATE inbox
   SET state = 'dead', last_error = :error,
       claim_token = NULL, claimed_at = NULL, lease_expires_at = NULL
 WHERE id = :id AND consumption = 'pull' AND state = 'processing' AND claim_token = :token

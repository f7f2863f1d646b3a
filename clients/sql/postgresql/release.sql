-- Back to where it was, nothing counted: the message was not started, or its worker stops.
UPDATE inbox
   SET state = 'pending',
       claim_token = NULL, claimed_at = NULL, lease_expires_at = NULL
 WHERE id = CAST(:id AS uuid) AND consumption = 'pull' AND state = 'processing'
   AND claim_token = CAST(:token AS uuid) AND lease_expires_at > clock_timestamp()

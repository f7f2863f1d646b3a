-- In the transaction of the work. 0 rows: the claim is lost, and all of that transaction is rolled back.
UPDATE inbox
   SET state = 'processed', processed_at = clock_timestamp(),
       crashes = 0,
       claim_token = NULL, claimed_at = NULL, lease_expires_at = NULL
 WHERE id = CAST(:id AS uuid) AND consumption = 'pull' AND state = 'processing'
   AND claim_token = CAST(:token AS uuid) AND lease_expires_at > clock_timestamp()

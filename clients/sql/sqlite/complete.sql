-- In the transaction of the work. 0 rows: the claim is lost, and all of that transaction is rolled back.
UPDATE inbox
   SET state = 'processed', processed_at = strftime('%Y-%m-%dT%H:%M:%f000Z', 'now'),
       crashes = 0,
       claim_token = NULL, claimed_at = NULL, lease_expires_at = NULL
 WHERE id = :id AND consumption = 'pull' AND state = 'processing' AND claim_token = :token

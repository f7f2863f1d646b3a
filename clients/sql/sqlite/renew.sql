-- 0 rows: the claim is lost. The fence needs no lease: a takeover always changes the token, and there is one writer at a time.
UPDATE inbox
   SET lease_expires_at = strftime('%Y-%m-%dT%H:%M:%f000Z', 'now', printf('+%d.%03d seconds', :lease_ms / 1000, :lease_ms % 1000))
 WHERE id = :id AND consumption = 'pull' AND state = 'processing' AND claim_token = :token

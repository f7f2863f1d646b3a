-- A failed attempt; the message is due again in `delay_ms`.
UPDATE inbox
   SET state = 'pending', attempt = attempt + 1,
       crashes = 0,
       last_error = :error,
       scheduled_at = strftime('%Y-%m-%dT%H:%M:%f000Z', 'now', printf('+%d.%03d seconds', :delay_ms / 1000, :delay_ms % 1000)),
       claim_token = NULL, claimed_at = NULL, lease_expires_at = NULL
 WHERE id = :id AND consumption = 'pull' AND state = 'processing' AND claim_token = :token

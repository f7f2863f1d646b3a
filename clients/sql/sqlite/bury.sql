-- Messages whose worker died with them, and whose next takeover would reach `max_crashes`.
UPDATE inbox
   SET state = 'dead', crashes = crashes + 1,
       last_error = 'crashes: its worker ended without an outcome ' || (crashes + 1) || ' times in a row; see why, then requeue it',
       claim_token = NULL, claimed_at = NULL, lease_expires_at = NULL
 WHERE source = :source AND consumption = 'pull' AND state = 'processing'
   AND lease_expires_at <= strftime('%Y-%m-%dT%H:%M:%f000Z', 'now') AND crashes + 1 >= :max_crashes

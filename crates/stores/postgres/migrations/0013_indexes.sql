--- outside idx_inbox_pull_expired
CREATE INDEX CONCURRENTLY IF NOT EXISTS idx_inbox_pull_expired ON {inbox} (source, lease_expires_at)
    WHERE consumption = 'pull' AND state = 'processing';
--- outside idx_outbox_parent
CREATE INDEX CONCURRENTLY IF NOT EXISTS idx_outbox_parent ON {outbox} (parent_id) WHERE parent_id IS NOT NULL;

-- Old workers must be stopped: they know neither token nor lease.
ALTER TABLE {outbox} ADD COLUMN claim_token UUID, ADD COLUMN lease_expires_at TIMESTAMPTZ;
---
ALTER TABLE {inbox}
    ADD COLUMN claim_token UUID,
    ADD COLUMN lease_expires_at TIMESTAMPTZ,
    ADD COLUMN consumption VARCHAR(4) NOT NULL DEFAULT 'push' CHECK (consumption IN ('push', 'pull')),
    ADD COLUMN scheduled_at TIMESTAMPTZ NOT NULL DEFAULT CURRENT_TIMESTAMP,
    ADD COLUMN attempt INT NOT NULL DEFAULT 0,
    ADD COLUMN last_error TEXT;
---
CREATE INDEX idx_inbox_consumption_pending ON {inbox} (consumption, state, scheduled_at);

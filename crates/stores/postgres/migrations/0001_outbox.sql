CREATE TABLE {outbox} (
    id           UUID         NOT NULL DEFAULT gen_random_uuid() PRIMARY KEY,
    topic        VARCHAR(255) NOT NULL,
    key          VARCHAR(255),
    payload      JSONB        NOT NULL,
    headers      JSONB        NOT NULL DEFAULT '{}',
    state        VARCHAR(50)  NOT NULL DEFAULT 'pending',
    attempt      INTEGER      NOT NULL DEFAULT 0,
    max_attempts INTEGER      NOT NULL DEFAULT 5,
    scheduled_at TIMESTAMPTZ  NOT NULL DEFAULT CURRENT_TIMESTAMP,
    created_at   TIMESTAMPTZ  NOT NULL DEFAULT CURRENT_TIMESTAMP,
    updated_at   TIMESTAMPTZ  NOT NULL DEFAULT CURRENT_TIMESTAMP
);
---
CREATE INDEX idx_outbox_pending_scheduled ON {outbox} (state, scheduled_at) WHERE state = 'pending';
---
CREATE INDEX idx_outbox_topic ON {outbox} (topic);

-- Nullable or with a constant default: no row is rewritten, and older workers and pull clients go on.
ALTER TABLE {outbox}
    ADD COLUMN IF NOT EXISTS destination VARCHAR(255),
    ADD COLUMN IF NOT EXISTS parent_id UUID,
    ADD COLUMN IF NOT EXISTS trace_parent VARCHAR(64),
    ADD COLUMN IF NOT EXISTS crashes INTEGER NOT NULL DEFAULT 0;
---
ALTER TABLE {inbox}
    ADD COLUMN IF NOT EXISTS trace_parent VARCHAR(64),
    ADD COLUMN IF NOT EXISTS crashes INTEGER NOT NULL DEFAULT 0,
    ADD COLUMN IF NOT EXISTS topic VARCHAR(255);

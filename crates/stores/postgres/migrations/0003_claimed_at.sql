ALTER TABLE {outbox} ADD COLUMN claimed_at TIMESTAMPTZ;
---
ALTER TABLE {inbox} ADD COLUMN claimed_at TIMESTAMPTZ;
---
CREATE INDEX idx_outbox_processing_claimed ON {outbox} (claimed_at) WHERE state = 'processing';
---
CREATE INDEX idx_inbox_processing_claimed ON {inbox} (claimed_at) WHERE state = 'processing';

-- Rows are numbered in the order (created_at, id). Old workers must be stopped. Safe to run again: only rows without a number
-- get one, behind those that have one.
CREATE SEQUENCE IF NOT EXISTS {sequence};
---
ALTER TABLE {outbox} ADD COLUMN IF NOT EXISTS sequence BIGINT;
---
WITH numbered AS (
    SELECT id, (SELECT coalesce(max(sequence), 0) FROM {outbox}) + row_number() OVER (ORDER BY created_at, id) AS number
      FROM {outbox} WHERE sequence IS NULL
)
UPDATE {outbox} o SET sequence = n.number FROM numbered n WHERE n.id = o.id;
---
SELECT setval('{sequence}', greatest((SELECT coalesce(max(sequence), 0) FROM {outbox}), (SELECT last_value FROM {sequence})));
---
ALTER TABLE {outbox} ALTER COLUMN sequence SET DEFAULT nextval('{sequence}'), ALTER COLUMN sequence SET NOT NULL;
---
CREATE INDEX IF NOT EXISTS idx_outbox_key_sequence ON {outbox} (key, sequence) WHERE state IN ('pending', 'processing');

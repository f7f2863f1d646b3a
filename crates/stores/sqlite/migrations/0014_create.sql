-- Everything that QueueBox keeps in a SQLite file (contract 2.1 to 2.3, 2.7). This file is never edited after its release.
--
-- Order of inserts is order of `sequence`: SQLite commits one writer at a time, so a lower number never commits after a
-- higher one. A child of a fan-out takes its parent's number through `parent_sequence`.
-- Ids compare without regard to case, since that is comparing them by value, whoever wrote them.
CREATE TABLE {outbox} (
    row_no INTEGER PRIMARY KEY AUTOINCREMENT,
    {o.id} TEXT NOT NULL DEFAULT (lower(hex(randomblob(4)) || '-' || hex(randomblob(2)) || '-4' || substr(hex(randomblob(2)), 2) || '-' || substr('89ab', 1 + (abs(random()) % 4), 1) || substr(hex(randomblob(2)), 2) || '-' || hex(randomblob(6)))) COLLATE NOCASE UNIQUE
        CONSTRAINT "an id is a UUID with hyphens" CHECK ({o.id} LIKE '________-____-____-____-____________' AND {o.id} NOT GLOB '*[^-0-9a-fA-F]*'
            AND length(replace({o.id}, '-', '')) = 32),
    {o.topic} TEXT NOT NULL CHECK (length({o.topic}) <= 255),
    {o.key} TEXT CHECK (length({o.key}) <= 255),
    {o.payload} TEXT NOT NULL
        CONSTRAINT "it must be JSON" CHECK (json_valid({o.payload})),
    {o.headers} TEXT NOT NULL DEFAULT '{}'
        CONSTRAINT "it must be JSON" CHECK (json_valid({o.headers})),
    {o.aggregate_type} TEXT CHECK (length({o.aggregate_type}) <= 255),
    {o.state} TEXT NOT NULL DEFAULT 'pending'
        CONSTRAINT "a state is pending, processing, sent or dead" CHECK ({o.state} IN ('pending', 'processing', 'sent', 'dead')),
    {o.attempt} INTEGER NOT NULL DEFAULT 0,
    {o.max_attempts} INTEGER NOT NULL DEFAULT 5,
    {o.scheduled_at} TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%f000Z', 'now'))
        CONSTRAINT "a time is written YYYY-MM-DDThh:mm:ss.ffffffZ, in UTC"
        CHECK ({o.scheduled_at} GLOB '[0-9][0-9][0-9][0-9]-[0-9][0-9]-[0-9][0-9]T[0-9][0-9]:[0-9][0-9]:[0-9][0-9].[0-9][0-9][0-9][0-9][0-9][0-9]Z'
            AND strftime('%Y-%m-%dT%H:%M:%S', julianday(substr({o.scheduled_at}, 1, 19))) IS substr({o.scheduled_at}, 1, 19)),
    {o.created_at} TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%f000Z', 'now'))
        CONSTRAINT "a time is written YYYY-MM-DDThh:mm:ss.ffffffZ, in UTC"
        CHECK ({o.created_at} GLOB '[0-9][0-9][0-9][0-9]-[0-9][0-9]-[0-9][0-9]T[0-9][0-9]:[0-9][0-9]:[0-9][0-9].[0-9][0-9][0-9][0-9][0-9][0-9]Z'
            AND strftime('%Y-%m-%dT%H:%M:%S', julianday(substr({o.created_at}, 1, 19))) IS substr({o.created_at}, 1, 19)),
    {o.updated_at} TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%f000Z', 'now'))
        CONSTRAINT "a time is written YYYY-MM-DDThh:mm:ss.ffffffZ, in UTC"
        CHECK ({o.updated_at} GLOB '[0-9][0-9][0-9][0-9]-[0-9][0-9]-[0-9][0-9]T[0-9][0-9]:[0-9][0-9]:[0-9][0-9].[0-9][0-9][0-9][0-9][0-9][0-9]Z'
            AND strftime('%Y-%m-%dT%H:%M:%S', julianday(substr({o.updated_at}, 1, 19))) IS substr({o.updated_at}, 1, 19)),
    {o.claimed_at} TEXT
        CONSTRAINT "a time is written YYYY-MM-DDThh:mm:ss.ffffffZ, in UTC"
        CHECK ({o.claimed_at} GLOB '[0-9][0-9][0-9][0-9]-[0-9][0-9]-[0-9][0-9]T[0-9][0-9]:[0-9][0-9]:[0-9][0-9].[0-9][0-9][0-9][0-9][0-9][0-9]Z'
            AND strftime('%Y-%m-%dT%H:%M:%S', julianday(substr({o.claimed_at}, 1, 19))) IS substr({o.claimed_at}, 1, 19)),
    {o.lease_expires_at} TEXT
        CONSTRAINT "a time is written YYYY-MM-DDThh:mm:ss.ffffffZ, in UTC"
        CHECK ({o.lease_expires_at} GLOB '[0-9][0-9][0-9][0-9]-[0-9][0-9]-[0-9][0-9]T[0-9][0-9]:[0-9][0-9]:[0-9][0-9].[0-9][0-9][0-9][0-9][0-9][0-9]Z'
            AND strftime('%Y-%m-%dT%H:%M:%S', julianday(substr({o.lease_expires_at}, 1, 19))) IS substr({o.lease_expires_at}, 1, 19)),
    {o.claim_token} TEXT COLLATE NOCASE,
    {o.last_error} TEXT,
    parent_sequence INTEGER,
    {o.sequence} INTEGER GENERATED ALWAYS AS (COALESCE(parent_sequence, row_no)) STORED,
    {o.destination} TEXT CHECK (length({o.destination}) <= 255),
    {o.parent_id} TEXT COLLATE NOCASE,
    {o.trace_parent} TEXT CHECK (length({o.trace_parent}) <= 64),
    {o.crashes} INTEGER NOT NULL DEFAULT 0
)
---
CREATE INDEX idx_outbox_pending ON {outbox} ({o.sequence}) WHERE {o.state} = 'pending'
---
CREATE INDEX idx_outbox_key ON {outbox} ({o.key}, {o.sequence}) WHERE {o.state} = 'pending'
---
CREATE INDEX idx_outbox_later ON {outbox} ({o.scheduled_at})
    WHERE {o.state} = 'pending' AND {o.scheduled_at} > {o.created_at}
---
CREATE INDEX idx_outbox_processing ON {outbox} ({o.lease_expires_at}) WHERE {o.state} = 'processing'
---
CREATE INDEX idx_outbox_dead ON {outbox} ({o.updated_at}) WHERE {o.state} = 'dead'
---
CREATE INDEX idx_outbox_parent ON {outbox} ({o.parent_id}) WHERE {o.parent_id} IS NOT NULL
---
CREATE TABLE {inbox} (
    {i.id} TEXT NOT NULL DEFAULT (lower(hex(randomblob(4)) || '-' || hex(randomblob(2)) || '-4' || substr(hex(randomblob(2)), 2) || '-' || substr('89ab', 1 + (abs(random()) % 4), 1) || substr(hex(randomblob(2)), 2) || '-' || hex(randomblob(6)))) COLLATE NOCASE PRIMARY KEY
        CONSTRAINT "an id is a UUID with hyphens" CHECK ({i.id} LIKE '________-____-____-____-____________' AND {i.id} NOT GLOB '*[^-0-9a-fA-F]*'
            AND length(replace({i.id}, '-', '')) = 32),
    {i.source} TEXT NOT NULL CHECK (length({i.source}) <= 255),
    {i.idempotency_key} TEXT NOT NULL CHECK (length({i.idempotency_key}) <= 255),
    {i.aggregate_id} TEXT CHECK (length({i.aggregate_id}) <= 255),
    {i.event_type} TEXT CHECK (length({i.event_type}) <= 255),
    {i.payload} TEXT NOT NULL
        CONSTRAINT "it must be JSON" CHECK (json_valid({i.payload})),
    {i.headers} TEXT NOT NULL DEFAULT '{}'
        CONSTRAINT "it must be JSON" CHECK (json_valid({i.headers})),
    {i.correlation_id} TEXT CHECK (length({i.correlation_id}) <= 128),
    {i.consumption} TEXT NOT NULL DEFAULT 'push' CHECK ({i.consumption} IN ('push', 'pull')),
    {i.state} TEXT NOT NULL DEFAULT 'pending'
        CONSTRAINT "a state is pending, processing, processed or dead" CHECK ({i.state} IN ('pending', 'processing', 'processed', 'dead')),
    {i.created_at} TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%f000Z', 'now'))
        CONSTRAINT "a time is written YYYY-MM-DDThh:mm:ss.ffffffZ, in UTC"
        CHECK ({i.created_at} GLOB '[0-9][0-9][0-9][0-9]-[0-9][0-9]-[0-9][0-9]T[0-9][0-9]:[0-9][0-9]:[0-9][0-9].[0-9][0-9][0-9][0-9][0-9][0-9]Z'
            AND strftime('%Y-%m-%dT%H:%M:%S', julianday(substr({i.created_at}, 1, 19))) IS substr({i.created_at}, 1, 19)),
    {i.processed_at} TEXT
        CONSTRAINT "a time is written YYYY-MM-DDThh:mm:ss.ffffffZ, in UTC"
        CHECK ({i.processed_at} GLOB '[0-9][0-9][0-9][0-9]-[0-9][0-9]-[0-9][0-9]T[0-9][0-9]:[0-9][0-9]:[0-9][0-9].[0-9][0-9][0-9][0-9][0-9][0-9]Z'
            AND strftime('%Y-%m-%dT%H:%M:%S', julianday(substr({i.processed_at}, 1, 19))) IS substr({i.processed_at}, 1, 19)),
    {i.scheduled_at} TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%f000Z', 'now'))
        CONSTRAINT "a time is written YYYY-MM-DDThh:mm:ss.ffffffZ, in UTC"
        CHECK ({i.scheduled_at} GLOB '[0-9][0-9][0-9][0-9]-[0-9][0-9]-[0-9][0-9]T[0-9][0-9]:[0-9][0-9]:[0-9][0-9].[0-9][0-9][0-9][0-9][0-9][0-9]Z'
            AND strftime('%Y-%m-%dT%H:%M:%S', julianday(substr({i.scheduled_at}, 1, 19))) IS substr({i.scheduled_at}, 1, 19)),
    {i.attempt} INTEGER NOT NULL DEFAULT 0,
    {i.last_error} TEXT,
    {i.claimed_at} TEXT
        CONSTRAINT "a time is written YYYY-MM-DDThh:mm:ss.ffffffZ, in UTC"
        CHECK ({i.claimed_at} GLOB '[0-9][0-9][0-9][0-9]-[0-9][0-9]-[0-9][0-9]T[0-9][0-9]:[0-9][0-9]:[0-9][0-9].[0-9][0-9][0-9][0-9][0-9][0-9]Z'
            AND strftime('%Y-%m-%dT%H:%M:%S', julianday(substr({i.claimed_at}, 1, 19))) IS substr({i.claimed_at}, 1, 19)),
    {i.lease_expires_at} TEXT
        CONSTRAINT "a time is written YYYY-MM-DDThh:mm:ss.ffffffZ, in UTC"
        CHECK ({i.lease_expires_at} GLOB '[0-9][0-9][0-9][0-9]-[0-9][0-9]-[0-9][0-9]T[0-9][0-9]:[0-9][0-9]:[0-9][0-9].[0-9][0-9][0-9][0-9][0-9][0-9]Z'
            AND strftime('%Y-%m-%dT%H:%M:%S', julianday(substr({i.lease_expires_at}, 1, 19))) IS substr({i.lease_expires_at}, 1, 19)),
    {i.claim_token} TEXT COLLATE NOCASE,
    {i.trace_parent} TEXT CHECK (length({i.trace_parent}) <= 64),
    {i.crashes} INTEGER NOT NULL DEFAULT 0,
    {i.topic} TEXT CHECK (length({i.topic}) <= 255)
)
---
-- This index is the deduplication.
CREATE UNIQUE INDEX uq_inbox_source_idempotency ON {inbox} ({i.source}, {i.idempotency_key})
---
CREATE INDEX idx_inbox_push_pending ON {inbox} ({i.scheduled_at}, {i.created_at}, {i.id})
    WHERE {i.consumption} = 'push' AND {i.state} = 'pending'
---
CREATE INDEX idx_inbox_state_created ON {inbox} ({i.state}, {i.created_at})
---
CREATE INDEX idx_inbox_pull_pending ON {inbox} ({i.source}, {i.scheduled_at}, {i.created_at}, {i.id})
    WHERE {i.consumption} = 'pull' AND {i.state} = 'pending'
---
CREATE INDEX idx_inbox_pull_busy ON {inbox} ({i.source}, {i.aggregate_id}, {i.lease_expires_at})
    WHERE {i.consumption} = 'pull' AND {i.state} = 'processing'
---
CREATE INDEX idx_inbox_pull_expired ON {inbox} ({i.source}, {i.lease_expires_at})
    WHERE {i.consumption} = 'pull' AND {i.state} = 'processing'
---
CREATE TABLE {worker} (
    worker TEXT NOT NULL PRIMARY KEY,
    token TEXT NOT NULL,
    relay_uid TEXT NOT NULL,
    config TEXT NOT NULL,
    lane_hash TEXT NOT NULL,
    idle INTEGER NOT NULL DEFAULT 0,
    lease_expires_at TEXT NOT NULL
)
---
CREATE TABLE {lane} (
    scope TEXT NOT NULL,
    lane INTEGER NOT NULL,
    worker TEXT,
    term INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (scope, lane)
)

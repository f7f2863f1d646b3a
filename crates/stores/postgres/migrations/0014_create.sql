-- The whole schema of version 14 for a database without QueueBox tables (contract 2.1 to 2.3, 2.7, 5.5).
CREATE SEQUENCE {sequence} AS BIGINT CACHE 1;
---
-- The default of `sequence` gives the transaction its id before it draws the number, and the counter does not cache: the safe
-- floor of the read relies on both (src/floor.rs). Transactions commit in another order than that of their numbers, so no
-- reader may remember a highest number (contract 4.7).
-- Half of each page stays free for the settled version of its rows. While the partial indexes mention `state` no settle is a HOT
-- update, but one that stays on its page logs only what changed: 200 bytes in place of 800 for a message of 512 (PostgreSQL 15),
-- and a little less CPU. The price is a table of twice the pages until its rows are settled.
--
-- An id that the application leaves out is a UUID of version 7 (RFC 9562): the milliseconds since 1970 in front of random bits. Each
-- settle writes the primary key again; keys in time order are close together there, random ones are all over it: a quarter more of the
-- server's CPU, and on a large table a whole page in the log for nearly every row.
CREATE TABLE {outbox} (
    id               UUID         NOT NULL DEFAULT encode(set_bit(set_bit(
                         overlay(uuid_send(gen_random_uuid()) PLACING
                                 substring(int8send((extract(epoch FROM clock_timestamp()) * 1000)::bigint) FROM 3) FROM 1 FOR 6),
                         52, 1), 53, 1), 'hex')::uuid PRIMARY KEY,
    topic            VARCHAR(255) NOT NULL,
    key              VARCHAR(255),
    payload          JSONB        NOT NULL,
    headers          JSONB        NOT NULL DEFAULT '{}',
    aggregate_type   VARCHAR(255),
    state            VARCHAR(50)  NOT NULL DEFAULT 'pending' CHECK (state IN ('pending', 'processing', 'sent', 'dead')),
    attempt          INTEGER      NOT NULL DEFAULT 0,
    max_attempts     INTEGER      NOT NULL DEFAULT 5,
    scheduled_at     TIMESTAMPTZ  NOT NULL DEFAULT CURRENT_TIMESTAMP,
    created_at       TIMESTAMPTZ  NOT NULL DEFAULT CURRENT_TIMESTAMP,
    updated_at       TIMESTAMPTZ  NOT NULL DEFAULT CURRENT_TIMESTAMP,
    claimed_at       TIMESTAMPTZ,
    lease_expires_at TIMESTAMPTZ,
    claim_token      UUID,
    last_error       TEXT,
    sequence         BIGINT       NOT NULL DEFAULT CASE WHEN pg_current_xact_id() IS NOT NULL THEN nextval('{sequence}') END,
    destination      VARCHAR(255),
    parent_id        UUID,
    trace_parent     VARCHAR(64),
    crashes          INTEGER      NOT NULL DEFAULT 0
) WITH (fillfactor = 50);
---
ALTER SEQUENCE {sequence} OWNED BY {outbox}.sequence;
---
CREATE INDEX idx_outbox_pending ON {outbox} (sequence) WHERE state = 'pending';
---
CREATE INDEX idx_outbox_key ON {outbox} (key, sequence) WHERE state = 'pending';
---
CREATE INDEX idx_outbox_later ON {outbox} (scheduled_at) WHERE state = 'pending' AND scheduled_at > created_at;
---
CREATE INDEX idx_outbox_processing ON {outbox} (lease_expires_at) WHERE state = 'processing';
---
CREATE INDEX idx_outbox_dead ON {outbox} (updated_at) WHERE state = 'dead';
---
CREATE INDEX idx_outbox_parent ON {outbox} (parent_id) WHERE parent_id IS NOT NULL;
---
CREATE TABLE {inbox} (
    id               UUID         NOT NULL DEFAULT gen_random_uuid() PRIMARY KEY,
    source           VARCHAR(255) NOT NULL,
    idempotency_key  VARCHAR(255) NOT NULL,
    aggregate_id     VARCHAR(255),
    event_type       VARCHAR(255),
    payload          JSONB        NOT NULL,
    headers          JSONB        NOT NULL DEFAULT '{}',
    correlation_id   VARCHAR(128),
    consumption      VARCHAR(4)   NOT NULL DEFAULT 'push' CHECK (consumption IN ('push', 'pull')),
    state            VARCHAR(50)  NOT NULL DEFAULT 'pending' CHECK (state IN ('pending', 'processing', 'processed', 'dead')),
    created_at       TIMESTAMPTZ  NOT NULL DEFAULT CURRENT_TIMESTAMP,
    processed_at     TIMESTAMPTZ,
    scheduled_at     TIMESTAMPTZ  NOT NULL DEFAULT CURRENT_TIMESTAMP,
    attempt          INT          NOT NULL DEFAULT 0,
    last_error       TEXT,
    claimed_at       TIMESTAMPTZ,
    lease_expires_at TIMESTAMPTZ,
    claim_token      UUID,
    trace_parent     VARCHAR(64),
    crashes          INTEGER      NOT NULL DEFAULT 0,
    topic            VARCHAR(255),
    CONSTRAINT uq_inbox_source_idempotency UNIQUE (source, idempotency_key)
);
---
CREATE INDEX idx_inbox_push_pending ON {inbox} (scheduled_at, created_at, id)
    WHERE consumption = 'push' AND state = 'pending';
---
CREATE INDEX idx_inbox_state_created ON {inbox} (state, created_at);
---
CREATE INDEX idx_inbox_pull_pending ON {inbox} (source, scheduled_at, created_at, id)
    WHERE consumption = 'pull' AND state = 'pending';
---
CREATE INDEX idx_inbox_pull_busy ON {inbox} (source, aggregate_id, lease_expires_at)
    WHERE consumption = 'pull' AND state = 'processing';
---
CREATE INDEX idx_inbox_pull_expired ON {inbox} (source, lease_expires_at)
    WHERE consumption = 'pull' AND state = 'processing';
---
-- Renewed every third of a lease and rewritten when a worker falls idle: room in the page keeps these updates HOT.
CREATE TABLE {worker} (
    worker           VARCHAR(255) NOT NULL PRIMARY KEY,
    token            UUID         NOT NULL,
    relay_uid        VARCHAR(255) NOT NULL,
    config           VARCHAR(255) NOT NULL,
    lane_hash        VARCHAR(255) NOT NULL,
    idle             BOOLEAN      NOT NULL DEFAULT FALSE,
    lease_expires_at TIMESTAMPTZ  NOT NULL
) WITH (fillfactor = 20);
---
CREATE TABLE {lane} (
    scope  VARCHAR(255) NOT NULL,
    lane   INTEGER      NOT NULL CHECK (lane BETWEEN 0 AND 63),
    worker VARCHAR(255),
    term   BIGINT       NOT NULL DEFAULT 0,
    PRIMARY KEY (scope, lane)
);
---
-- Runs with its owner's rights, so that an application needs none on {worker}; swallows every error, so that an
-- application's insert never fails for it. Silent while no worker waits: with a NOTIFY in every transaction 64 producers
-- committed half as much, because each notifying commit takes one lock of the whole server.
CREATE FUNCTION {schema}queuebox_wake() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF EXISTS (SELECT FROM {worker} WHERE idle AND lease_expires_at > clock_timestamp()) THEN
        PERFORM pg_notify('queuebox_outbox', TG_TABLE_SCHEMA);
    END IF;
    RETURN NULL;
EXCEPTION WHEN OTHERS THEN
    RETURN NULL;
END
$$;
---
CREATE TRIGGER queuebox_wake AFTER INSERT ON {outbox} FOR EACH STATEMENT EXECUTE FUNCTION {schema}queuebox_wake();

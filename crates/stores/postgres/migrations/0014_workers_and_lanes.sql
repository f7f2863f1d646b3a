--- outside idx_outbox_pending
CREATE INDEX CONCURRENTLY IF NOT EXISTS idx_outbox_pending ON {outbox} (sequence) WHERE state = 'pending';
--- outside idx_outbox_dead
CREATE INDEX CONCURRENTLY IF NOT EXISTS idx_outbox_dead ON {outbox} (updated_at) WHERE state = 'dead';
---
-- Renewed every third of a lease and rewritten when a worker falls idle: room in the page keeps these updates HOT.
CREATE TABLE IF NOT EXISTS {worker} (
    worker           VARCHAR(255) NOT NULL PRIMARY KEY,
    token            UUID         NOT NULL,
    relay_uid        VARCHAR(255) NOT NULL,
    config           VARCHAR(255) NOT NULL,
    lane_hash        VARCHAR(255) NOT NULL,
    idle             BOOLEAN      NOT NULL DEFAULT FALSE,
    lease_expires_at TIMESTAMPTZ  NOT NULL
) WITH (fillfactor = 20);
---
CREATE TABLE IF NOT EXISTS {lane} (
    scope  VARCHAR(255) NOT NULL,
    lane   INTEGER      NOT NULL CHECK (lane BETWEEN 0 AND 63),
    worker VARCHAR(255),
    term   BIGINT       NOT NULL DEFAULT 0,
    PRIMARY KEY (scope, lane)
);
---
-- The two tables for each role that may update the outbox, so that a worker whose role is not the owner's can go on.
DO $$
DECLARE
    grantee TEXT;
BEGIN
    FOR grantee IN
        SELECT DISTINCT CASE WHEN a.grantee = 0 THEN 'PUBLIC' ELSE quote_ident(r.rolname) END
          FROM (SELECT relacl AS acl FROM pg_class WHERE oid = '{outbox}'::regclass
                UNION ALL
                SELECT attacl FROM pg_attribute WHERE attrelid = '{outbox}'::regclass) AS t
         CROSS JOIN LATERAL aclexplode(t.acl) AS a
          LEFT JOIN pg_roles r ON r.oid = a.grantee
         WHERE a.privilege_type = 'UPDATE' AND (a.grantee = 0 OR r.rolname IS NOT NULL)
    LOOP
        EXECUTE format('GRANT SELECT, INSERT, UPDATE, DELETE ON {worker}, {lane} TO %s', grantee);
        EXECUTE format('GRANT SELECT ON {history} TO %s', grantee);
    END LOOP;
END
$$;
---
-- Runs with its owner's rights, so that an application needs none on {worker}; swallows every error, so that an
-- application's insert never fails for it. Silent while no worker waits: with a NOTIFY in every transaction 64 producers
-- committed half as much, because each notifying commit takes one lock of the whole server.
CREATE OR REPLACE FUNCTION {schema}queuebox_wake() RETURNS trigger
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
DROP TRIGGER IF EXISTS queuebox_wake ON {outbox};
---
CREATE TRIGGER queuebox_wake AFTER INSERT ON {outbox} FOR EACH STATEMENT EXECUTE FUNCTION {schema}queuebox_wake();

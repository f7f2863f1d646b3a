-- Belonged to a form of capture that is not offered any more; kept and not used.
CREATE TABLE {schema}queuebox_capture_state (
    identity_name      VARCHAR(63) NOT NULL PRIMARY KEY,
    state_id           VARCHAR(36) NOT NULL,
    config_fingerprint VARCHAR(64) NOT NULL
);

//! The PostgreSQL store against real servers.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod harness;
mod late;
mod names;
mod plans;
mod pooled;
mod retention;
mod server;
mod version_11;
mod worker;

/// The contract of the store ports.
mod contract {
    use crate::harness::PostgresHarness;
    queuebox_conformance::store_tests!(PostgresHarness);
}

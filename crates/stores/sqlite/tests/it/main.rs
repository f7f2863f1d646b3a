//! The SQLite store against real files.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod files;
mod harness;
mod retention;

/// The contract of the store ports, with the default names.
mod contract {
    use crate::harness::SqliteHarness;
    queuebox_conformance::store_tests!(SqliteHarness);
}

/// The same with names of its own (contract 2.6).
mod renamed {
    use crate::harness::RenamedHarness;
    queuebox_conformance::store_tests!(RenamedHarness, renamed);
}

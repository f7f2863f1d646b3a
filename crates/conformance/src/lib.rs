//! The contract of the ports as functions: every backend runs the same suite against its real peer.
//!
//! [`store`] is for databases. A backend implements [`store::StoreHarness`] in its `tests/it` and expands
//! [`store_tests!`] there; each line of that macro is one test of its own name. A backend declares what it cannot do
//! ([`store::Capabilities`]) rather than leaving tests out.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

pub mod destination;
pub mod source;
pub mod store;

//! The HTTP connector against real sockets on loopback. Rows of `docs/conformance.md` and cases carry their names, as far
//! as the connector alone can show them; with a database they are shown again by the scenarios.

// Helpers of tests may unwrap like tests.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod contract;
mod credentials;
mod delivery;
mod inbound_auth;
mod outcomes;
mod peer;
mod receiving;
mod tls;

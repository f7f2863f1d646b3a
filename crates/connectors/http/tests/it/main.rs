//! The HTTP connector against real sockets on loopback. Rows of `docs/conformance.md` and cases carry their names, as far
//! as the connector alone can show them; with a database they are shown again by the scenarios.

mod credentials;
mod delivery;
mod outcomes;
mod peer;
mod receiving;
mod tls;

//! The built program between real peers. `scenarios` are the rows of `docs/conformance.md` by name, `cases` the faults of
//! `docs/cases.md`, each with its neighbours. `chart` is the Helm chart without a node, `cluster` are journeys on a real one.

// Helpers of tests may unwrap like tests.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
// Each scenario uses a part of the helpers.
#![allow(dead_code)]

mod bench;
mod brokers;
mod cases;
mod chart;
mod cluster;
mod docs;
mod examples;
mod scenarios;
mod support;

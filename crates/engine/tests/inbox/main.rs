//! The inbox half of the engine on ports in memory, under tokio's paused clock.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "helpers of tests are tests")]

mod admissions;
mod attributes;
mod fake;
mod intake;
mod jsonata_suite;
mod properties;
mod relay;
mod retention;

//! Manifests from their text to the checked value or the report.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "helpers of tests")]

mod check;
mod classic;
mod load;
mod table;

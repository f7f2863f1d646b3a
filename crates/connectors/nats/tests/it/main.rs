//! The NATS connector against a real NATS.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

mod contract;
mod d14_idle_pull_subscription;
mod d15_max_payload;
mod d39_passwords;
mod delivery;
mod login;

//! The NATS connector against a real NATS.

mod support;

mod contract;
mod d14_idle_pull_subscription;
mod d15_max_payload;
mod d39_passwords;
mod delivery;
mod login;

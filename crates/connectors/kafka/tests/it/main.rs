//! The Kafka connector against a real Kafka.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

mod contract;
mod d12_too_large_record;
mod d13_poll_interval_exceeded;
mod d39_passwords;
mod destination;
mod outages;
mod rebalances;
mod source;
mod tls;

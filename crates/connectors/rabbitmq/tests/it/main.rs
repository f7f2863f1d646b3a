//! The RabbitMQ connector against a real RabbitMQ.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

mod contract;
mod d06_unroutable_is_confirmed;
mod d07_futures_that_never_resolve;
mod d08_cancelled_consumer;
mod d09_redelivery_storm;
mod d10_unbounded_prefetch;
mod d39_passwords_inside_urls;
mod delivery;
mod login;

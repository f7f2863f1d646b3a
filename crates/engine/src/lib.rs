//! queuebox-engine

mod attributes;
pub mod config;
pub mod expression;
pub mod filter;
pub mod forward;
pub mod ids;
pub mod inbox_observer;
pub mod intake;
pub mod json;
pub mod metrics;
pub mod outbox;
pub mod publish_time;
pub mod retention;
pub mod spans;
pub mod tail;
pub mod transform;
pub mod worker;

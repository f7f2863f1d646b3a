//! queuebox-engine

mod attributes;
pub mod expression;
pub mod filter;
pub mod forward;
pub mod ids;
pub mod inbox_observer;
pub mod intake;
pub mod json;
pub mod publish_time;
pub mod retention;
pub mod transform;

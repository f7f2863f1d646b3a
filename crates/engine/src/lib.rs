//! queuebox-engine

pub mod expression;
pub mod filter;
pub mod ids;
pub mod json;
pub mod publish_time;
pub mod transform;

//! queuebox-engine

//! queuebox-bench

//! queuebox-kafka

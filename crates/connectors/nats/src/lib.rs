//! queuebox-nats

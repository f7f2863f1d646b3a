//! queuebox-testkit

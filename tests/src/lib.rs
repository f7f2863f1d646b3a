//! queuebox-tests

//! queuebox-api

//! queuebox-http

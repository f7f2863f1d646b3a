//! queuebox-sqlite

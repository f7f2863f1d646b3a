//! queuebox-postgres

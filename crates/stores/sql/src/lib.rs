//! queuebox-sql

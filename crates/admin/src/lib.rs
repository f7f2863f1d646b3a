//! queuebox-admin

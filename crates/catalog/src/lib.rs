//! queuebox-catalog

//! queuebox-conformance

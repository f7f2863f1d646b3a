//! queuebox-operator

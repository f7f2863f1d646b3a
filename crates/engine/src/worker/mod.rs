//! A worker: registration, lease, lanes, and the tasks that depend on them.

pub mod keeper;
pub mod share;

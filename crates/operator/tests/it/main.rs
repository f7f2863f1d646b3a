//! The operator on a real control plane: etcd, API server and the controllers behind Deployments. No node: pods come into being
//! and stay pending, and a test plays the worker.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "helpers of tests")]

mod accept_deny;
mod cases;
mod last_good;
mod leading;
mod making;
mod many;
mod rights;
mod scaling;
mod support;
mod upgrading;

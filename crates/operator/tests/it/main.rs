//! The operator on a real control plane: etcd, API server and the controllers behind Deployments. No node: pods come into being
//! and stay pending, and a test plays the worker.

mod making;
mod support;

//! Journeys on a real Kubernetes node, each under load of a counting prober: every accepted message arrives, in order per key, and
//! repeats are counted. `./dev test cluster` starts the node, runs them one after the other, and stops it.

mod journeys;
mod node;
mod operations;
mod prober;
mod readme;
mod team;

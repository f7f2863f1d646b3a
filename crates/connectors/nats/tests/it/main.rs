//! The NATS connector against a real NATS.

mod support;

mod contract;

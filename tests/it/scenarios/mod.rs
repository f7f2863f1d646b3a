//! One module per section of `docs/conformance.md`.

mod broker_faults;
mod broker_logins;
mod brokers_in;
mod brokers_matrix;
mod brokers_out;
mod claims;
mod classic;
mod database_faults;
mod doctor;
mod fan_out;
mod health;
mod inbound;
mod letters;
mod order;
mod relay;
mod sending;
mod soak;
mod standard_webhooks;
mod start;

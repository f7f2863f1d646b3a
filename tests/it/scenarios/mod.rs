//! One module per section of `docs/conformance.md`.

mod claims;
mod classic;
mod doctor;
mod fan_out;
mod health;
mod inbound;
mod letters;
mod order;
mod relay;
mod sending;
mod start;

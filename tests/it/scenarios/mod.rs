//! One module per section of `docs/conformance.md`.

mod fan_out;
mod inbound;
mod order;
mod relay;
mod sending;
pub mod claims;

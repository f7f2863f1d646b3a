//! The operator: turns Relays with their Sources and Destinations into running workers, and says how they fare.
//!
//! ```text
//!   watches ──► cache ──► plan (pure) ──► desired objects ──► apply ──► API server
//!   workers' /status ──────┘    └────────► statuses, events ──┘
//! ```
//!
//! Invariants:
//! - [`plan`] is pure: the objects of one namespace, what the workers report and a clock value go in, everything that is to be
//!   written comes out. The same input gives the same plan, and a plan that is carried out leaves nothing to write.
//! - Nothing is written without the Lease ([`apply::lease`]), and no Secret is ever read.
//! - There is no finalizer and no webhook: deleting a resource never waits for the operator, and never touches data.

pub mod apply;
pub mod plan;

pub use apply::{Error, Options, run, run_in};
pub use plan::Settings;

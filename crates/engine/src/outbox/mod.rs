//! The way out: outbox rows to destinations.
//!
//! `window` knows and decides, `publish` carries out, [`driver`] moves answers and wishes between them and the database.

pub mod driver;
mod gate;
mod per_minute;
mod publish;
mod routing;
mod window;

pub use window::{DestinationState, Startable};

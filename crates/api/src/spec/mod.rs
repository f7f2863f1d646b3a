//! The three kinds that users write, as they stand in manifests (contract 13).
//!
//! These types say only what a field may look like. Whether the fields make sense together is the business of
//! [`crate::check()`], which turns them into [`crate::checked`] values with every default resolved.
//!
//! Conventions of all three: one optional member per kind of a union, and a rule "exactly one" on the API server; no field for
//! a secret value; every list and text is bounded (texts 2,048 characters and lists 64 entries where nothing is said).

pub mod auth;
pub mod common;
pub mod destination;
pub mod relay;
pub mod source;
pub mod status;

pub use destination::{Destination, DestinationSpec};
pub use relay::{Relay, RelaySpec};
pub use source::{Source, SourceSpec};

/// API group.
pub const GROUP: &str = "queuebox.io";
/// API version.
pub const VERSION: &str = "v1alpha1";
/// `apiVersion` of the three kinds.
pub const API_VERSION: &str = "queuebox.io/v1alpha1";

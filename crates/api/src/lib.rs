//! What users of QueueBox write, and its checks: the kinds `Source`, `Destination` and `Relay`, the files that hold them, and
//! the secrets that they refer to.
//!
//! ```text
//!   files ──load──► Manifests ──check──► Report ──into_relay──► checked::Relay ──► catalog
//!                       └── Secrets (SecretResolver) ── values, read again when they change ──┘
//!   types ──crds──► CustomResourceDefinitions with the same rules for the API server
//! ```
//!
//! Invariants: [`check()`] is pure and reports every problem at once; only what it returns can be opened; no secret value is ever
//! part of a manifest, an error or a debug text.

pub mod check;
pub mod checked;
pub mod classic;
pub mod condition;
pub mod crd;
pub mod load;
pub mod names;
pub mod problem;
pub mod secret;
pub mod spec;
pub mod value;
pub mod yaml;

pub use check::{Report, Target, check};
pub use crd::{Kind, crds};
pub use load::{Manifests, Object, load};
pub use problem::{Problem, Problems, Reason};
pub use queuebox_core::SecretError;
pub use secret::{Reader, Redactor, Reference, Secret, SecretResolver, Secrets};
pub use value::{format_duration, format_size, parse_duration, parse_size};

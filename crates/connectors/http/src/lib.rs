//! HTTP as a destination and as a source: one `POST` per attempt on the way out, webhooks on the way in.
//!
//! ```text
//!   HttpDestination::publish ──► destination (headers, signature, outcome) ──► client (pool, addresses, TLS, phases)
//!   DataPort::serve          ──► port (order of work, answers)             ──► auth ──► Intake of the engine
//! ```
//!
//! Nothing here reads manifests or files: the configuration structs are plain, and secrets are asked for through
//! [`Secret`] at each use, so that a rotated one counts at once.

pub mod auth;
mod client;
pub mod destination;
pub mod port;
mod signature;

pub use auth::{Auth, Authenticator};
pub use client::{
    address::{Resolve, SystemResolver, is_private},
    tls::TlsFiles,
};
pub use destination::{HttpDestination, HttpDestinationConfig};
pub use port::{DataPort, DataPortConfig, HttpSource};
pub use queuebox_core::{Secret, SecretError};

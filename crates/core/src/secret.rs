//! Secrets by reference: whoever owns the reference (an environment variable, a mounted file, a key of a Secret) answers with the
//! value of this moment, so that rotation needs no restart.
//!
//! Invariant: no `Debug` or `Display` here ever prints a value.

use std::{fmt, sync::Arc};

type Read = dyn Fn() -> Result<Arc<str>, SecretError> + Send + Sync;

/// A secret whose current value is asked for at each use: by HTTP at each request, by brokers and databases at each connection.
/// Cheap to clone.
#[derive(Clone)]
pub struct Secret(Arc<Read>);

/// A reference that gives no value.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("cannot read {reference}, {reason}")]
pub struct SecretError {
    /// What was referred to, such as `file /run/secrets/token`. Never the value.
    pub reference: String,
    /// Why there is no value.
    pub reason: String,
}

impl Secret {
    /// A secret that `read` answers for. It is called often, also from tasks that must not wait, so it should cache.
    pub fn from_fn(read: impl Fn() -> Result<Arc<str>, SecretError> + Send + Sync + 'static) -> Self {
        Self(Arc::new(read))
    }

    /// A secret that never changes.
    pub fn fixed(value: impl Into<Arc<str>>) -> Self {
        let value = value.into();
        Self::from_fn(move || Ok(value.clone()))
    }

    /// The value of this moment.
    ///
    /// # Errors
    /// [`SecretError`], which names the reference and the reason.
    pub fn current(&self) -> Result<Arc<str>, SecretError> {
        (self.0)()
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.current() {
            Ok(value) if value.is_empty() => f.write_str("Secret(empty)"),
            _ => f.write_str("Secret(***)"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_never_prints_its_value() {
        assert_eq!(format!("{:?}", Secret::fixed("canary-7731")), "Secret(***)");
        assert_eq!(format!("{:?}", Secret::fixed("")), "Secret(empty)");
    }
}

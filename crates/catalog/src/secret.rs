//! References of manifests as what connectors and stores take for a secret: a closure that gives the value of this moment. The
//! memory of a second that makes asking cheap is the [`Reader`]'s.

use std::sync::Arc;

use queuebox_api::{Reader, Reference, SecretResolver, checked};
use queuebox_core::Secret;

/// The secret behind one reference.
pub(crate) fn secret(reference: &Reference, resolver: &Arc<dyn SecretResolver>) -> Secret {
    let reader = Reader::new(reference.clone(), resolver.clone());
    Secret::from_fn(move || reader.current().map(queuebox_api::Secret::into_inner))
}

/// The secret behind a reference that may be absent.
pub(crate) fn optional(reference: Option<&Reference>, resolver: &Arc<dyn SecretResolver>) -> Option<Secret> {
    reference.map(|reference| secret(reference, resolver))
}

/// TLS files for the HTTP connector.
pub(crate) fn http_tls(tls: &checked::Tls, resolver: &Arc<dyn SecretResolver>) -> queuebox_http::TlsFiles {
    let one = |reference: &Option<Reference>| optional(reference.as_ref(), resolver);
    queuebox_http::TlsFiles { ca: one(&tls.ca), cert: one(&tls.cert), key: one(&tls.key) }
}

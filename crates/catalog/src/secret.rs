//! References of manifests as what each connector takes for a secret: a closure that gives the value of this moment.
//!
//! A value is read again at most once a second, so that a rotated one is used at once by human measures, and a busy destination does
//! not read a file per request.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use queuebox_api::{Reader, Reference, SecretError, SecretResolver, checked};

const READ_EVERY: Duration = Duration::from_secs(1);

type Known = Option<(Instant, Arc<str>)>;

/// Reads one reference, with the short memory described in the module.
fn reader(
    reference: &Reference,
    resolver: &Arc<dyn SecretResolver>,
) -> impl Fn() -> Result<Arc<str>, SecretError> + Send + Sync + Clone + 'static {
    let reader = Reader::new(reference.clone(), resolver.clone());
    let known: Arc<Mutex<Known>> = Arc::default();
    move || {
        let mut known = known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((at, value)) = known.as_ref()
            && at.elapsed() < READ_EVERY
        {
            return Ok(value.clone());
        }
        let value = reader.current()?.into_inner();
        *known = Some((Instant::now(), value.clone()));
        Ok(value)
    }
}

/// For the HTTP connector.
pub(crate) fn http(reference: &Reference, resolver: &Arc<dyn SecretResolver>) -> queuebox_http::Secret {
    let read = reader(reference, resolver);
    queuebox_http::Secret::from_fn(move || {
        read().map_err(|error| queuebox_http::SecretError { reference: error.reference, reason: error.reason })
    })
}

/// For the RabbitMQ connector.
pub(crate) fn rabbitmq(reference: &Reference, resolver: &Arc<dyn SecretResolver>) -> queuebox_rabbitmq::config::Secret {
    let read = reader(reference, resolver);
    queuebox_rabbitmq::config::Secret::from_fn(move || read().map_err(|error| error.to_string()))
}

/// For the Kafka connector.
pub(crate) fn kafka(reference: &Reference, resolver: &Arc<dyn SecretResolver>) -> queuebox_kafka::config::Secret {
    let read = reader(reference, resolver);
    queuebox_kafka::config::Secret::from_fn(move || read().map_err(|error| error.to_string()))
}

/// For the NATS connector.
pub(crate) fn nats(reference: &Reference, resolver: &Arc<dyn SecretResolver>) -> queuebox_nats::config::Secret {
    let read = reader(reference, resolver);
    queuebox_nats::config::Secret::from_fn(move || read().map_err(|error| error.to_string()))
}

/// For the PostgreSQL store.
pub(crate) fn postgres(reference: &Reference, resolver: &Arc<dyn SecretResolver>) -> queuebox_postgres::Provider {
    let read = reader(reference, resolver);
    queuebox_postgres::Provider::new(move || match read() {
        Ok(value) => Ok(value.to_string()),
        Err(error) => Err(error.to_string()),
    })
}

/// TLS files for the HTTP connector.
pub(crate) fn http_tls(tls: &checked::Tls, resolver: &Arc<dyn SecretResolver>) -> queuebox_http::TlsFiles {
    let one = |reference: &Option<Reference>| reference.as_ref().map(|reference| http(reference, resolver));
    queuebox_http::TlsFiles { ca: one(&tls.ca), cert: one(&tls.cert), key: one(&tls.key) }
}

//! TLS towards receivers: system roots or a private CA, client certificates, both read anew when they change.

use std::sync::{
    Arc, LazyLock, Mutex, PoisonError,
    atomic::{AtomicU64, Ordering::Relaxed},
};

use rustls::{
    ClientConfig, RootCertStore,
    crypto::aws_lc_rs,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
};

use crate::{Secret, SecretError};

/// PEM texts of a `tls` block. A private CA replaces the system's roots for the destination itself, and is added to them
/// for its token endpoint, which is usually somebody else's.
#[derive(Debug, Clone, Default)]
pub struct TlsFiles {
    /// `caFrom`: one or more CA certificates.
    pub ca: Option<Secret>,
    /// `certFrom`: our certificate, with its chain.
    pub cert: Option<Secret>,
    /// `keyFrom`: its private key.
    pub key: Option<Secret>,
}

impl TlsFiles {
    /// Every file that is given can be read.
    pub(crate) fn readable(&self) -> Result<(), SecretError> {
        [&self.ca, &self.cert, &self.key].into_iter().flatten().try_for_each(|file| file.current().map(drop))
    }
}

/// Why no TLS configuration could be made. Names the field, never the content.
#[derive(Debug, Clone, thiserror::Error)]
pub(crate) enum TlsError {
    #[error(transparent)]
    Secret(#[from] SecretError),
    #[error("tls.{field} holds no usable PEM: {reason}")]
    Pem { field: &'static str, reason: String },
    #[error("tls.certFrom and tls.keyFrom belong together: give both or none")]
    Halves,
    #[error("no CA certificate is installed on this system; install ca-certificates or give tls.caFrom")]
    NoRoots,
    #[error("tls.certFrom and tls.keyFrom cannot be used: {0}")]
    Identity(String),
}

/// Builds a [`ClientConfig`] when the PEM texts have changed, and hands out the last one otherwise.
#[derive(Debug)]
pub(crate) struct Tls {
    files: TlsFiles,
    keep_system_roots: bool,
    built: Mutex<Option<(Texts, Arc<ClientConfig>)>>,
    generation: AtomicU64,
}

#[derive(PartialEq, Eq, Default)]
struct Texts {
    ca: Option<Arc<str>>,
    cert: Option<Arc<str>>,
    key: Option<Arc<str>>,
}

impl std::fmt::Debug for Texts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Texts(***)")
    }
}

static SYSTEM_ROOTS: LazyLock<Vec<CertificateDer<'static>>> = LazyLock::new(|| {
    let found = rustls_native_certs::load_native_certs();
    for error in &found.errors {
        tracing::warn!(%error, "a CA certificate of this system cannot be read");
    }
    found.certs
});

impl Tls {
    pub(crate) fn new(files: TlsFiles, keep_system_roots: bool) -> Self {
        Self { files, keep_system_roots, built: Mutex::new(None), generation: AtomicU64::new(0) }
    }

    /// Goes up with each change of the files. A connection of an older generation is not used again.
    pub(crate) fn generation(&self) -> u64 {
        self.generation.load(Relaxed)
    }

    /// The configuration for a new connection.
    pub(crate) fn config(&self) -> Result<Arc<ClientConfig>, TlsError> {
        let texts = self.read()?;
        let mut built = self.built.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((known, config)) = built.as_ref()
            && *known == texts
        {
            return Ok(config.clone());
        }
        let config = Arc::new(self.build(&texts)?);
        if built.is_some() {
            self.generation.fetch_add(1, Relaxed);
        }
        *built = Some((texts, config.clone()));
        Ok(config)
    }

    fn read(&self) -> Result<Texts, SecretError> {
        let read = |secret: &Option<Secret>| secret.as_ref().map(Secret::current).transpose();
        Ok(Texts { ca: read(&self.files.ca)?, cert: read(&self.files.cert)?, key: read(&self.files.key)? })
    }

    fn build(&self, texts: &Texts) -> Result<ClientConfig, TlsError> {
        let builder = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(|error| TlsError::Identity(error.to_string()))?
            .with_root_certificates(self.roots(texts.ca.as_deref())?);
        let mut config = match (texts.cert.as_deref(), texts.key.as_deref()) {
            (None, None) => builder.with_no_client_auth(),
            (Some(cert), Some(key)) => builder
                .with_client_auth_cert(certificates("certFrom", cert)?, private_key(key)?)
                .map_err(|error| TlsError::Identity(error.to_string()))?,
            _ => return Err(TlsError::Halves),
        };
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(config)
    }

    fn roots(&self, ca: Option<&str>) -> Result<RootCertStore, TlsError> {
        let mut roots = RootCertStore::empty();
        if let Some(ca) = ca {
            for certificate in certificates("caFrom", ca)? {
                roots.add(certificate).map_err(|error| TlsError::Pem { field: "caFrom", reason: error.to_string() })?;
            }
        }
        if ca.is_none() || self.keep_system_roots {
            roots.add_parsable_certificates(SYSTEM_ROOTS.iter().cloned());
        }
        if roots.is_empty() { Err(TlsError::NoRoots) } else { Ok(roots) }
    }
}

fn certificates(field: &'static str, pem: &str) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let parsed: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem.as_bytes()).collect();
    match parsed {
        Ok(list) if list.is_empty() => Err(TlsError::Pem { field, reason: "no certificate in it".to_owned() }),
        Ok(list) => Ok(list),
        Err(error) => Err(TlsError::Pem { field, reason: error.to_string() }),
    }
}

fn private_key(pem: &str) -> Result<PrivateKeyDer<'static>, TlsError> {
    // The parser's own error may quote a line of the key, so it is not repeated.
    PrivateKeyDer::from_pem_slice(pem.as_bytes())
        .map_err(|_| TlsError::Pem { field: "keyFrom", reason: "no private key in it".to_owned() })
}

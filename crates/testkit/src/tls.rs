//! Certificates for tests: an authority of the test's own and what it signs, made by the `openssl` program.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

use crate::packages::run;

/// A certificate authority that nobody else trusts. Its files go with it.
#[derive(Debug)]
pub struct Authority {
    folder: tempfile::TempDir,
    ca: Identity,
}

/// A certificate and its key (PKCS 8), as PEM files that every user of the machine can read.
#[derive(Debug, Clone)]
pub struct Identity {
    /// The certificate's file.
    pub cert: PathBuf,
    /// The key's file.
    pub key: PathBuf,
}

impl Identity {
    fn at(folder: &Path, name: &str) -> Identity {
        Identity { cert: folder.join(format!("{name}.crt")), key: folder.join(format!("{name}.key")) }
    }

    /// The certificate as PEM.
    pub fn cert_pem(&self) -> String {
        std::fs::read_to_string(&self.cert).expect("the certificate's file")
    }

    /// The key as PEM.
    pub fn key_pem(&self) -> String {
        std::fs::read_to_string(&self.key).expect("the key's file")
    }
}

impl Authority {
    /// A fresh authority.
    pub fn new() -> Authority {
        crate::init();
        Authority::make().unwrap_or_else(|error| panic!("cannot make a certificate authority: {error:#}"))
    }

    fn make() -> Result<Authority> {
        let folder = crate::shared::private_folder("tls")?;
        let ca = Identity::at(folder.path(), "ca");
        let mut args = vec!["req", "-x509", "-new", "-nodes", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"];
        let (cert, key) = (ca.cert.to_string_lossy(), ca.key.to_string_lossy());
        args.extend(["-days", "30", "-subj", "/CN=QueueBox test authority", "-keyout", &key, "-out", &cert]);
        args.extend(["-addext", "keyUsage=critical,keyCertSign,cRLSign"]);
        run("openssl", &args)?;
        Ok(Authority { folder, ca })
    }

    /// The authority's certificate, for those who shall trust it.
    pub fn ca_path(&self) -> &Path {
        &self.ca.cert
    }

    /// [`Authority::ca_path`] as PEM.
    pub fn ca_pem(&self) -> String {
        self.ca.cert_pem()
    }

    /// A certificate for servers on this machine: `localhost` and 127.0.0.1.
    pub fn server(&self) -> Identity {
        self.issue("localhost", "DNS:localhost,IP:127.0.0.1", 30)
    }

    /// A certificate for a client of this name.
    pub fn client(&self, name: &str) -> Identity {
        self.issue(name, &format!("DNS:{name}"), 30)
    }

    /// A certificate with this common name and these alternative names (`DNS:a,IP:b`), valid from now for `days`.
    pub fn issue(&self, name: &str, alternatives: &str, days: u32) -> Identity {
        self.sign(name, alternatives, days).unwrap_or_else(|error| panic!("cannot issue a certificate: {error:#}"))
    }

    fn sign(&self, name: &str, alternatives: &str, days: u32) -> Result<Identity> {
        use std::os::unix::fs::PermissionsExt;
        let identity = Identity::at(self.folder.path(), &crate::unique("leaf"));
        let request = identity.cert.with_extension("csr");
        let request = request.to_string_lossy();
        let (cert, key) = (identity.cert.to_string_lossy(), identity.key.to_string_lossy());
        let subject = format!("/CN={name}");
        let mut args = vec!["req", "-new", "-nodes", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"];
        args.extend(["-subj", &subject, "-keyout", &key, "-out", &request]);
        let alternatives = format!("subjectAltName={alternatives}");
        args.extend(["-addext", &alternatives, "-addext", "extendedKeyUsage=serverAuth,clientAuth"]);
        run("openssl", &args)?;
        let (days, ca_cert, ca_key) = (days.to_string(), self.ca.cert.to_string_lossy(), self.ca.key.to_string_lossy());
        let mut args = vec!["x509", "-req", "-in", &request, "-CA", &ca_cert, "-CAkey", &ca_key, "-CAcreateserial"];
        args.extend(["-copy_extensions", "copyall", "-days", &days, "-out", &cert]);
        run("openssl", &args)?;
        // Servers under test run as other users.
        std::fs::set_permissions(&identity.key, std::fs::Permissions::from_mode(0o644))?;
        Ok(identity)
    }

    /// What [`crate::Recorder::start_tls`] needs to be `identity`, which speaks HTTP/1.1.
    pub fn server_config(&self, identity: &Identity) -> rustls::ServerConfig {
        let builder = rustls::ServerConfig::builder().with_no_client_auth();
        with_identity(builder, identity).unwrap_or_else(|error| panic!("{error:#}"))
    }

    /// [`Authority::server_config`] that admits only clients with a certificate of this authority.
    pub fn mutual_server_config(&self, identity: &Identity) -> rustls::ServerConfig {
        let config = || -> Result<rustls::ServerConfig> {
            let mut roots = rustls::RootCertStore::empty();
            roots.add(CertificateDer::from_pem_file(self.ca_path())?)?;
            let verifier = rustls::server::WebPkiClientVerifier::builder(Arc::new(roots)).build()?;
            with_identity(rustls::ServerConfig::builder().with_client_cert_verifier(verifier), identity)
        };
        config().unwrap_or_else(|error| panic!("{error:#}"))
    }
}

impl Default for Authority {
    fn default() -> Self {
        Authority::new()
    }
}

fn with_identity(
    builder: rustls::ConfigBuilder<rustls::ServerConfig, rustls::server::WantsServerCert>,
    identity: &Identity,
) -> Result<rustls::ServerConfig> {
    let chain = vec![CertificateDer::from_pem_file(&identity.cert).context("certificate")?];
    let key = PrivateKeyDer::from_pem_file(&identity.key).context("key")?;
    let mut config = builder.with_single_cert(chain, key)?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(config)
}

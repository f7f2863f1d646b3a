//! Certificates of this test run, and a receiver behind TLS.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex},
};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, ExtendedKeyUsagePurpose, IsCa, KeyPair};
use rustls::{
    RootCertStore, ServerConfig,
    crypto::aws_lc_rs,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
    server::WebPkiClientVerifier,
};
use tokio::io::AsyncWriteExt;
use tokio_rustls::TlsAcceptor;

use crate::peer::{answer, listen, read_request};

pub struct Authority(CertifiedIssuer<'static, KeyPair>);

/// A certificate and its key, as PEM.
pub struct Identity {
    pub cert: String,
    pub key: String,
}

impl Authority {
    pub fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    pub fn pem(&self) -> String {
        self.0.pem()
    }

    pub fn issue(&self, name: &str) -> Identity {
        let mut params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let key = KeyPair::generate().unwrap();
        let cert = params.signed_by(&key, &self.0).unwrap();
        Identity { cert: cert.pem(), key: key.serialize_pem() }
    }
}

pub fn der(pem: &str) -> CertificateDer<'static> {
    CertificateDer::from_pem_slice(pem.as_bytes()).unwrap()
}

/// Answers one 204 per connection; remembers the certificates that clients showed.
pub struct TlsReceiver {
    pub address: SocketAddr,
    pub shown: Arc<Mutex<Vec<Option<CertificateDer<'static>>>>>,
}

impl TlsReceiver {
    pub async fn start(identity: &Identity, clients: Option<&Authority>) -> Self {
        let provider = Arc::new(aws_lc_rs::default_provider());
        let builder =
            ServerConfig::builder_with_provider(provider.clone()).with_safe_default_protocol_versions().unwrap();
        let builder = match clients {
            None => builder.with_no_client_auth(),
            Some(authority) => {
                let mut roots = RootCertStore::empty();
                roots.add(der(&authority.pem())).unwrap();
                let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider).build().unwrap();
                builder.with_client_cert_verifier(verifier)
            }
        };
        let key = PrivateKeyDer::from_pem_slice(identity.key.as_bytes()).unwrap();
        let acceptor = TlsAcceptor::from(Arc::new(builder.with_single_cert(vec![der(&identity.cert)], key).unwrap()));
        let shown = Arc::new(Mutex::new(Vec::new()));
        let log = shown.clone();
        let address = listen(move |stream| {
            let (acceptor, log) = (acceptor.clone(), log.clone());
            async move {
                let Ok(mut stream) = acceptor.accept(stream).await else { return };
                let shown = stream.get_ref().1.peer_certificates().map(|chain| chain[0].clone().into_owned());
                if read_request(&mut stream).await.is_some() {
                    log.lock().unwrap().push(shown);
                    let _ = stream.write_all(answer(204, &[("Connection", "close")], "").as_bytes()).await;
                    let _ = stream.shutdown().await;
                }
            }
        })
        .await;
        Self { address, shown }
    }

    pub fn url(&self) -> String {
        format!("https://localhost:{}/", self.address.port())
    }
}

//! Certificates, authorities and the database's login change while messages flow: files are read again, old and new overlap, and
//! nothing is lost (contract 10.2, 13.1; conformance 108, 109). Tokens and signing secrets: `widened::secret_rotation`.

use std::{
    collections::HashSet,
    path::Path,
    sync::{Arc, Mutex},
};

use queuebox_testkit::{self as testkit, Answer, Authority, CANARY, Identity, Recorder};
use rustls::{
    DigitallySignedStruct, DistinguishedName, RootCertStore, SignatureScheme,
    crypto::CryptoProvider,
    pki_types::{CertificateDer, PrivateKeyDer, UnixTime, pem::PemObject},
    server::{
        ClientHello, ResolvesServerCert, WebPkiClientVerifier,
        danger::{ClientCertVerified, ClientCertVerifier},
    },
    sign::CertifiedKey,
};
use serde_json::json;

use crate::support::{Db, Kind, OutboxRow, PATIENCE, World};

/// Inserts messages and waits until each has been sent, so that something is under way whatever changes.
async fn flow(world: &World, messages: i64) {
    let before = world.db.count("SELECT count(*) FROM outbox").await;
    for n in 0..messages {
        world.db.insert(OutboxRow::new("order", before + n).max_attempts(20)).await;
    }
    world.db.wait_states("outbox", &[("sent", before + messages)]).await;
}

/// Messages that a receiver has seen, repeats not counted.
fn arrived(receiver: &Recorder) -> i64 {
    let requests = receiver.requests();
    let ids: HashSet<&str> = requests.iter().map(|request| request.header("x-message-id")).collect();
    i64::try_from(ids.len()).unwrap()
}

/// What a server shows and whom it lets in; both may change while it runs.
#[derive(Debug)]
struct Door {
    shown: Mutex<Arc<CertifiedKey>>,
    admits: Mutex<Arc<dyn ClientCertVerifier>>,
    /// Certificates that were let in.
    seen: Mutex<Vec<CertificateDer<'static>>>,
}

impl Door {
    fn show(&self, identity: &Identity) {
        *self.shown.lock().unwrap() = certified(identity);
    }

    fn admit(&self, authorities: &[&Authority]) {
        *self.admits.lock().unwrap() = verifier(authorities);
    }

    fn has_seen(&self, identity: &Identity) -> bool {
        let certificate = CertificateDer::from_pem_file(&identity.cert).unwrap();
        self.seen.lock().unwrap().contains(&certificate)
    }

    fn verifier(&self) -> Arc<dyn ClientCertVerifier> {
        self.admits.lock().unwrap().clone()
    }
}

fn certified(identity: &Identity) -> Arc<CertifiedKey> {
    let chain = vec![CertificateDer::from_pem_file(&identity.cert).unwrap()];
    let key = PrivateKeyDer::from_pem_file(&identity.key).unwrap();
    Arc::new(CertifiedKey::from_der(chain, key, CryptoProvider::get_default().unwrap()).unwrap())
}

fn verifier(authorities: &[&Authority]) -> Arc<dyn ClientCertVerifier> {
    let mut roots = RootCertStore::empty();
    for authority in authorities {
        roots.add(CertificateDer::from_pem_file(authority.ca_path()).unwrap()).unwrap();
    }
    WebPkiClientVerifier::builder(Arc::new(roots)).build().unwrap()
}

impl ResolvesServerCert for Door {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.shown.lock().unwrap().clone())
    }
}

impl ClientCertVerifier for Door {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        leaf: &CertificateDer<'_>,
        between: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        let verified = self.verifier().verify_client_cert(leaf, between, now)?;
        self.seen.lock().unwrap().push(leaf.clone().into_owned());
        Ok(verified)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
        self.verifier().verify_tls12_signature(message, certificate, signed)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
        self.verifier().verify_tls13_signature(message, certificate, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.verifier().supported_verify_schemes()
    }
}

/// Both sides of a receiver's TLS move from one authority to another: bundle, client certificate and key, then the server's own.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn certificates_of_a_receiver_change_under_way() {
    testkit::init();
    let (old, new) = (Authority::new(), Authority::new());
    let (first, second) = (old.client("queuebox"), new.client("queuebox"));
    let door = Arc::new(Door {
        shown: Mutex::new(certified(&old.server())),
        admits: Mutex::new(verifier(&[&old])),
        seen: Mutex::default(),
    });
    let mut config =
        rustls::ServerConfig::builder().with_client_cert_verifier(door.clone()).with_cert_resolver(door.clone());
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    let receiver = Recorder::start_tls(config).await;
    // A connection for each message, so that each shows what both sides have now.
    receiver.answer_always(Answer::ok().header("connection", "close"));

    let world = World::on(Kind::Sqlite).await;
    let file = |name: &str| world.folder().join(name);
    let (ca, cert, key) = (file("ca"), file("cert"), file("key"));
    std::fs::write(&ca, old.ca_pem()).unwrap();
    std::fs::copy(&first.cert, &cert).unwrap();
    std::fs::copy(&first.key, &key).unwrap();
    let from = |path: &Path| json!({ "file": path });
    let tls = json!({ "caFrom": from(&ca), "certFrom": from(&cert), "keyFrom": from(&key) });
    let world = world.destination("receiver", json!({ "http": { "url": receiver.url_for("/events"), "tls": tls } }));
    let worker = world.start().await;
    flow(&world, 5).await;
    assert!(door.has_seen(&first));

    // The time in which both count. Between the two writes certificate and key do not belong together.
    door.admit(&[&old, &new]);
    std::fs::write(&ca, old.ca_pem() + &new.ca_pem()).unwrap();
    std::fs::copy(&second.cert, &cert).unwrap();
    world.db.insert(OutboxRow::new("order", 5).max_attempts(20)).await;
    std::fs::copy(&second.key, &key).unwrap();
    testkit::eventually("the new certificate is shown", PATIENCE, || async {
        flow(&world, 1).await;
        door.has_seen(&second).then_some(())
    })
    .await;

    // Nothing of the old is left.
    door.show(&new.server());
    door.admit(&[&new]);
    flow(&world, 5).await;
    std::fs::write(&ca, new.ca_pem()).unwrap();
    flow(&world, 5).await;
    let sent = world.db.count("SELECT count(*) FROM outbox WHERE state = 'sent'").await;
    assert_eq!(arrived(&receiver), sent, "each message");
    assert!(worker.process.is_running(), "nobody restarted");
    world.finish().await;
}

/// The database's certificate comes from another authority and its password is another one: what is open goes on, what is opened
/// anew logs in with what the files say now, and while they are wrong messages wait.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn login_of_the_database_changes_under_way() {
    let (old, new) = (Authority::new(), Authority::new());
    let (shown, next) = (old.server(), new.server());
    let server = testkit::private_postgres_with(&[
        ("ssl", "on"),
        ("ssl_cert_file", shown.cert.to_str().unwrap()),
        ("ssl_key_file", shown.key.to_str().unwrap()),
    ])
    .await;
    let name = server.fresh_database_name().await;
    let folder = tempfile::Builder::new().prefix("queuebox-world-").tempdir().unwrap();
    let world = World::with(Db::postgres(server.url_of(&name)).await, folder).await;
    let (first, second) = (format!("{CANARY}-first"), format!("{CANARY}-second"));
    world.db.execute(&format!("CREATE ROLE relay LOGIN PASSWORD '{first}'; ALTER DATABASE {name} OWNER TO relay; GRANT ALL ON SCHEMA public TO relay")).await;

    let file = |name: &str| world.folder().join(name);
    let (ca, password) = (file("ca"), file("password"));
    std::fs::write(&ca, old.ca_pem()).unwrap();
    std::fs::write(&password, &first).unwrap();
    let login = json!({
        "urlFrom": null, "host": "localhost", "port": server.port(), "database": name, "username": "relay",
        "passwordFrom": { "file": password }, "tls": { "mode": "VerifyFull", "caFrom": { "file": ca } },
    });
    let world = world.relay(json!({ "database": { "postgres": login } }));
    let worker = world.start().await;
    flow(&world, 5).await;
    let over_tls = "SELECT count(*) FROM pg_stat_ssl s JOIN pg_stat_activity a USING (pid) WHERE a.usename = 'relay' AND NOT s.ssl";
    assert_eq!(world.db.count(over_tls).await, 0);

    // Connections that are open do not ask again.
    world.db.execute(&format!("ALTER ROLE relay PASSWORD '{second}'")).await;
    std::fs::write(&ca, old.ca_pem() + &new.ca_pem()).unwrap();
    std::fs::copy(&next.cert, &shown.cert).unwrap();
    std::fs::copy(&next.key, server.folder().join("data/server.key")).unwrap();
    world.db.execute("SELECT pg_reload_conf()").await;
    flow(&world, 5).await;

    // Now they are gone, and the file still has the old password.
    let cut = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE usename = 'relay'";
    world.db.execute(cut).await;
    worker.process.wait_output("password authentication failed", PATIENCE).await;
    world.db.insert(OutboxRow::new("order", 10)).await;
    std::fs::write(&password, &second).unwrap();
    world.db.wait_states("outbox", &[("sent", 11)]).await;

    // Only the new authority is trusted from here on.
    std::fs::write(&ca, new.ca_pem()).unwrap();
    world.db.execute(cut).await;
    flow(&world, 5).await;
    assert_eq!(arrived(&world.receiver), 16);
    assert!(worker.process.is_running(), "nobody restarted");
    world.finish().await;
}

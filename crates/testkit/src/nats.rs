//! NATS with JetStream.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};

use crate::child::{Launch, Signal};
use crate::packages::nats_server;
use crate::shared::{Peer, Server, blocking, process_methods, process_wide};

/// A running NATS server with JetStream. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Nats {
    server: Arc<Server<State>>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct State {
    port: u16,
    monitor: u16,
}

impl Peer for State {
    const NAME: &'static str = "nats";

    fn prepare(folder: &Path) -> Result<(Launch, Self)> {
        let state = State { port: crate::free_port(), monitor: crate::free_port() };
        let config = folder.join("nats.conf");
        let data = folder.join("data");
        std::fs::create_dir_all(&data)?;
        let text = format!(
            "listen: \"127.0.0.1:{}\"\nhttp: \"127.0.0.1:{}\"\njetstream {{ store_dir: {:?} }}\n",
            state.port, state.monitor, data
        );
        std::fs::write(&config, text)?;
        let launch = Launch {
            program: nats_server()?,
            args: vec!["-c".into(), config.to_string_lossy().into_owned()],
            env: Vec::new(),
            unprivileged: false,
            before: String::new(),
            stop: Signal::Term,
        };
        Ok((launch, state))
    }

    fn ready(&self) -> Result<()> {
        let answer = http_get(self.monitor, "/healthz")?;
        ensure!(answer.starts_with("HTTP/1.1 200"), "NATS is not healthy: {answer}");
        Ok(())
    }
}

/// A request without a client library: start-up code is blocking.
pub(crate) fn http_get(port: u16, path: &str) -> Result<String> {
    http_get_with(port, path, "")
}

pub(crate) fn http_get_with(port: u16, path: &str, headers: &str) -> Result<String> {
    use std::io::{Read, Write};
    let mut stream = std::net::TcpStream::connect(("127.0.0.1", port))?;
    stream.set_read_timeout(Some(std::time::Duration::from_secs(5)))?;
    write!(stream, "GET {path} HTTP/1.1\r\nhost: localhost\r\n{headers}connection: close\r\n\r\n")?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer)?;
    Ok(String::from_utf8_lossy(&answer).into_owned())
}

/// The NATS server that all tests share. Tests keep apart by [`Nats::prefix`] in the names of streams and subjects.
pub async fn nats() -> Nats {
    try_nats().await.unwrap_or_else(|error| panic!("{error:#}"))
}

/// [`nats`] with an error instead of a panic.
pub async fn try_nats() -> Result<Nats> {
    crate::init();
    Ok(Nats { server: Server::shared(process_wide!(State).await?) })
}

/// A NATS server of this test alone.
pub async fn private_nats() -> Nats {
    private_nats_with("").await
}

/// [`private_nats`] with more lines for its configuration file, for instance users or TLS.
pub async fn private_nats_with(config: &str) -> Nats {
    try_private_nats_with(config).await.unwrap_or_else(|error| panic!("{error:#}"))
}

/// [`private_nats_with`] with an error instead of a panic.
pub async fn try_private_nats_with(config: &str) -> Result<Nats> {
    crate::init();
    let more = config.to_string();
    let server = blocking(move || {
        Server::private(|folder, _, _| {
            let config = folder.join("nats.conf");
            let text = std::fs::read_to_string(&config)? + &more;
            Ok(std::fs::write(&config, text)?)
        })
    });
    Ok(Nats { server: server.await? })
}

process_methods!(Nats);

impl Nats {
    /// The client port on 127.0.0.1.
    pub fn port(&self) -> u16 {
        self.server.peer.port
    }

    /// The port of the monitoring pages (`/varz`, `/jsz`, `/connz`).
    pub fn monitor_port(&self) -> u16 {
        self.server.peer.monitor
    }

    /// `nats://127.0.0.1:PORT`.
    pub fn url(&self) -> String {
        format!("nats://127.0.0.1:{}", self.port())
    }

    /// A prefix for the names of streams, consumers and subjects that no other test uses; no dots.
    pub fn prefix(&self) -> String {
        crate::unique("qb")
    }
}

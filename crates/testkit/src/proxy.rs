//! A TCP proxy that does to connections what bad networks do.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// What happens to the bytes of all connections, new and old.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProxyMode {
    /// They pass.
    Pass,
    /// Each piece passes this much later.
    Delay(Duration),
    /// Nothing passes in either direction and nothing is closed, as with a dropped route.
    Stall,
    /// Requests pass, replies stay: the peer acts and the client never learns.
    HoldReplies,
    /// New connections are closed at once. Use with [`Proxy::cut`] to end those that are open.
    Refuse,
}

/// A proxy on a free port of 127.0.0.1. It ends with the handle.
#[derive(Debug)]
pub struct Proxy {
    port: u16,
    mode: watch::Sender<ProxyMode>,
    /// Raised by each cut; a connection ends when it differs from what it was at its start.
    cuts: watch::Sender<u64>,
    /// Where new connections go.
    target: watch::Sender<SocketAddr>,
    connections: Arc<AtomicU64>,
    listening: JoinHandle<()>,
}

#[derive(Clone)]
struct Rules {
    mode: watch::Receiver<ProxyMode>,
    cuts: watch::Receiver<u64>,
}

impl Proxy {
    /// In front of a port of 127.0.0.1.
    pub async fn to(port: u16) -> Proxy {
        Proxy::on(crate::free_port(), port).await
    }

    /// [`Proxy::to`] on a port that the caller chose, for peers that announce their own address (Kafka).
    pub async fn on(listen: u16, port: u16) -> Proxy {
        let (target, target_seen) = watch::channel(local(port));
        let listener = TcpListener::bind(("127.0.0.1", listen)).await.expect("the proxy's port is free");
        let (mode, mode_seen) = watch::channel(ProxyMode::Pass);
        let (cuts, cuts_seen) = watch::channel(0);
        let connections = Arc::new(AtomicU64::new(0));
        let rules = Rules { mode: mode_seen, cuts: cuts_seen };
        let listening = tokio::spawn(listen_on(listener, target_seen, rules, connections.clone()));
        Proxy { port: listen, mode, cuts, target, connections, listening }
    }

    /// The port on 127.0.0.1 to connect to.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// `http://127.0.0.1:PORT`.
    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// Changes what happens from now on.
    pub fn set(&self, mode: ProxyMode) {
        self.mode.send_replace(mode);
    }

    /// Lets new connections go to another port of 127.0.0.1, as an address does that moves to another machine; open ones stay where they are.
    pub fn lead_to(&self, port: u16) {
        self.target.send_replace(local(port));
    }

    /// Ends all open connections with a reset; new ones are taken as the mode says.
    pub fn cut(&self) {
        self.cuts.send_modify(|cuts| *cuts += 1);
    }

    /// Number of connections taken so far.
    pub fn connections(&self) -> u64 {
        self.connections.load(Ordering::SeqCst)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.listening.abort();
        self.cut();
    }
}

fn local(port: u16) -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], port))
}

async fn listen_on(
    listener: TcpListener,
    target: watch::Receiver<SocketAddr>,
    rules: Rules,
    connections: Arc<AtomicU64>,
) {
    while let Ok((client, _)) = listener.accept().await {
        connections.fetch_add(1, Ordering::SeqCst);
        if *rules.mode.borrow() == ProxyMode::Refuse {
            reset(&client);
            continue;
        }
        tokio::spawn(serve(client, *target.borrow(), rules.clone()));
    }
}

/// Makes the closing of the socket a reset, which is noticed at once.
fn reset(stream: &TcpStream) {
    let _ = stream.set_zero_linger();
}

async fn serve(client: TcpStream, target: SocketAddr, mut rules: Rules) {
    rules.cuts.mark_unchanged();
    let Ok(server) = TcpStream::connect(target).await else {
        reset(&client);
        return;
    };
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
    reset(&client);
    reset(&server);
    let mode = rules.mode.clone();
    let (client_read, client_write) = client.into_split();
    let (server_read, server_write) = server.into_split();
    let requests = pump(client_read, server_write, mode.clone(), false);
    let replies = pump(server_read, client_write, mode, true);
    tokio::select! {
        _ = async { tokio::join!(requests, replies) } => {}
        // Also when the proxy is gone. Dropping the halves resets both sides.
        _ = rules.cuts.changed() => {}
    }
}

async fn pump(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, mut mode: watch::Receiver<ProxyMode>, replies: bool) {
    let mut buffer = vec![0; 16 * 1024];
    while let Ok(read @ 1..) = from.read(&mut buffer).await {
        let now = *mode.borrow();
        if let ProxyMode::Delay(delay) = now {
            tokio::time::sleep(delay).await;
        }
        let held = |mode: &ProxyMode| *mode == ProxyMode::Stall || (replies && *mode == ProxyMode::HoldReplies);
        let proxy_is_gone = mode.wait_for(|mode| !held(mode)).await.is_err();
        if proxy_is_gone || to.write_all(&buffer[..read]).await.is_err() {
            break;
        }
    }
    // Passes an orderly end on. While held it is held as well.
    let _ = mode.wait_for(|mode| *mode != ProxyMode::Stall).await;
    let _ = to.shutdown().await;
}

//! Peers that all test processes of a checkout use together.
//!
//! A folder per peer holds two locks, the state (ports) and the server's data. Who needs the peer takes `door`
//! exclusively, then `users` shared and for the rest of its life; it reuses a server that answers or starts one. The
//! server's parent is the keeper (`keeper.sh`), which ends it once `users` has been free for the idle time.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::child::{Launch, Owned, Signal, tail};
use crate::packages::target_dir;
use crate::wait::{Hopeless, until};

const KEEPER: &str = include_str!("keeper.sh");

/// Idle time in seconds when `QUEUEBOX_TESTKIT_LINGER_S` does not say otherwise: long enough to link the next test
/// binary in the meantime.
const LINGER_S: &str = "30";

/// What a kind of peer knows about itself.
pub(crate) trait Peer: Serialize + DeserializeOwned + Clone + Send + Sync + 'static {
    /// Name of the folder.
    const NAME: &'static str;

    /// Chooses ports and fills `folder`.
    fn prepare(folder: &Path) -> Result<(Launch, Self)>;

    /// Whether it serves; the error says what is missing.
    fn ready(&self) -> Result<()>;
}

/// A running peer and this process' claim on it.
#[derive(Debug)]
pub(crate) struct Lease<P> {
    pub peer: P,
    pub folder: PathBuf,
    _claim: File,
}

/// Folder of the shared peers: beside other temporary files and not below the target folder, since a server that runs
/// as another user has to reach it, and sockets' paths have to be short. One per target folder.
pub(crate) fn root() -> Result<PathBuf> {
    use std::hash::{DefaultHasher, Hash, Hasher};
    let mut hasher = DefaultHasher::new();
    target_dir().hash(&mut hasher);
    let root = std::env::temp_dir().join(format!("queuebox-testkit-{:08x}", hasher.finish() as u32));
    std::fs::create_dir_all(&root).with_context(|| format!("cannot make {}", root.display()))?;
    // For `./dev stop`, which ends only what belongs to its own checkout.
    std::fs::write(root.join("target"), target_dir().to_string_lossy().as_bytes())?;
    Ok(root)
}

/// Joins the peer of this checkout, after starting it where it does not run.
pub(crate) fn join<P: Peer>() -> Result<Lease<P>> {
    let dir = root()?.join(P::NAME);
    std::fs::create_dir_all(&dir)?;
    let door = File::create(dir.join("door"))?;
    door.lock()?;
    let claim = File::create(dir.join("users"))?;
    claim.lock_shared()?;
    let _ = std::fs::remove_file(dir.join("stop"));
    if let Some(peer) = running::<P>(&dir) {
        return Ok(Lease { peer, folder: dir, _claim: claim });
    }
    // A port may have been taken between its choice and its use: another try takes another port.
    let peer = start::<P>(&dir).or_else(|_| start::<P>(&dir)).with_context(|| format!("cannot start {}", P::NAME))?;
    Ok(Lease { peer, folder: dir, _claim: claim })
}

fn running<P: Peer>(dir: &Path) -> Option<P> {
    let state = std::fs::read(dir.join("state.json")).ok()?;
    let peer: P = serde_json::from_slice(&state).ok()?;
    // A busy machine answers late; a dead server refuses at once.
    until(Duration::from_secs(15), || match server_lives(dir) {
        true => peer.ready(),
        false => Err(Hopeless("gone".into()).into()),
    })
    .ok()?;
    Some(peer)
}

fn server_lives(dir: &Path) -> bool {
    let pid = std::fs::read_to_string(dir.join("server.pid")).unwrap_or_default();
    // Numbers are used again: only a process that works in this folder is the server.
    std::fs::read_link(format!("/proc/{}/cwd", pid.trim())).is_ok_and(|cwd| cwd.starts_with(dir))
}

fn start<P: Peer>(dir: &Path) -> Result<P> {
    clear(dir)?;
    let (launch, peer) = P::prepare(dir)?;
    std::fs::write(dir.join("run"), launch.script(dir, true))?;
    std::fs::write(dir.join("keeper"), KEEPER)?;
    let linger = std::env::var("QUEUEBOX_TESTKIT_LINGER_S").unwrap_or_else(|_| LINGER_S.into());
    let stop = if launch.stop == Signal::Int { "INT" } else { "TERM" };
    // `setsid -f` leaves this process group, so that neither Ctrl-C nor the end of this process ends the keeper, and
    // none of this process' files stay open in it.
    let status = Command::new("setsid")
        .args(["-f", "sh"])
        .arg(dir.join("keeper"))
        .arg(dir)
        .args([linger.as_str(), stop])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .context("cannot run setsid")?;
    anyhow::ensure!(status.success(), "setsid ended with {status}");
    let log = dir.join("log");
    let mut seen = false;
    until(Duration::from_secs(120), || {
        let lives = server_lives(dir);
        if seen && !lives {
            return Err(Hopeless("the server ended".into()).into());
        }
        seen |= lives;
        peer.ready()
    })
    .with_context(|| format!("not ready; the end of its log:\n{}", tail(&log)))?;
    std::fs::write(dir.join("state.json"), serde_json::to_vec(&peer)?)?;
    Ok(peer)
}

/// Removes what an earlier server left, and that server if it hangs.
fn clear(dir: &Path) -> Result<()> {
    if server_lives(dir) {
        let pid = std::fs::read_to_string(dir.join("server.pid"))?;
        let _ = crate::child::send(pid.trim().parse()?, Signal::Kill);
    }
    for name in ["state.json", "server.pid", "log"] {
        let _ = std::fs::remove_file(dir.join(name));
    }
    match std::fs::remove_dir_all(dir.join("data")) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error.into()),
        _ => Ok(()),
    }
}

/// A folder for a peer of one test, removed with it.
pub(crate) fn private_folder(name: &str) -> Result<tempfile::TempDir> {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::Builder::new().prefix(&format!("queuebox-{name}-")).tempdir()?;
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o755))?;
    Ok(folder)
}

/// Runs blocking start-up code without holding up the runtime.
pub(crate) async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    tokio::task::spawn_blocking(work).await.expect("start-up code does not panic")
}

/// A server as its handle holds it.
#[derive(Debug)]
pub(crate) struct Server<P: Peer> {
    pub peer: P,
    pub folder: PathBuf,
    kind: Kind<P>,
}

#[derive(Debug)]
enum Kind<P> {
    Shared { _lease: Arc<Lease<P>> },
    Private(Box<Mutex<Owned>>),
}

impl<P: Peer> Server<P> {
    pub(crate) fn shared(lease: Arc<Lease<P>>) -> Arc<Self> {
        Arc::new(Server {
            peer: lease.peer.clone(),
            folder: lease.folder.clone(),
            kind: Kind::Shared { _lease: lease },
        })
    }

    /// A running server of this process alone. `adjust` may change what `prepare` laid down.
    pub(crate) fn private(adjust: impl FnOnce(&Path, &mut Launch, &mut P) -> Result<()>) -> Result<Arc<Self>> {
        let folder = private_folder(P::NAME)?;
        let (mut launch, mut peer) = P::prepare(folder.path())?;
        adjust(folder.path(), &mut launch, &mut peer)?;
        let at = folder.path().to_path_buf();
        let mut owned = Owned::new(folder, launch);
        owned.start(|| peer.ready())?;
        Ok(Arc::new(Server { peer, folder: at, kind: Kind::Private(Box::new(Mutex::new(owned))) }))
    }

    /// Does something to the process of a private server.
    pub(crate) async fn control(
        self: &Arc<Self>,
        what: &'static str,
        work: impl FnOnce(&P, &mut Owned) -> Result<()> + Send + 'static,
    ) {
        let server = self.clone();
        let done = tokio::task::spawn_blocking(move || match &server.kind {
            Kind::Shared { .. } => panic!("{} is shared with other tests: {what} is for private_* servers", P::NAME),
            Kind::Private(owned) => {
                work(&server.peer, &mut owned.lock().unwrap_or_else(PoisonError::into_inner))
                    .unwrap_or_else(|error| panic!("cannot {what} {}: {error:#}", P::NAME));
            }
        });
        if let Err(error) = done.await {
            std::panic::resume_unwind(error.into_panic());
        }
    }
}

/// Gives a handle the methods that act on the process of a private server.
macro_rules! process_methods {
    ($handle:ident) => {
        impl $handle {
            /// Stops the server cleanly and waits for its end. Private servers only, as all that follow but `log` and `folder`.
            pub async fn stop(&self) {
                self.server.control("stop", |_, owned| owned.stop()).await;
            }

            /// Ends the server at once and waits until it is gone.
            pub async fn kill9(&self) {
                self.server.control("kill", |_, owned| owned.kill9()).await;
            }

            /// Starts the server again, on its port and its data, and waits until it serves.
            pub async fn start(&self) {
                self.server.control("start", |peer, owned| owned.start(|| peer.ready())).await;
            }

            /// Freezes the server's main process: connections stay open and nothing answers.
            pub async fn pause(&self) {
                self.server.control("pause", |_, owned| owned.signal($crate::Signal::Stop)).await;
            }

            /// Lets a frozen server go on.
            pub async fn cont(&self) {
                self.server.control("continue", |_, owned| owned.signal($crate::Signal::Cont)).await;
            }

            /// Where the server writes its log.
            pub fn log(&self) -> std::path::PathBuf {
                self.folder().join("log")
            }

            /// The server's folder: configuration, log, and its data in `data`.
            pub fn folder(&self) -> std::path::PathBuf {
                self.server.folder.clone()
            }
        }
    };
}
pub(crate) use process_methods;

/// Declares the process-wide handle of a shared peer.
macro_rules! process_wide {
    ($peer:ty) => {{
        static LEASE: std::sync::Mutex<Option<std::sync::Arc<$crate::shared::Lease<$peer>>>> =
            std::sync::Mutex::new(None);
        $crate::shared::blocking(|| {
            let mut lease = LEASE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            if let Some(lease) = &*lease {
                return Ok(lease.clone());
            }
            let joined = std::sync::Arc::new($crate::shared::join::<$peer>()?);
            *lease = Some(joined.clone());
            Ok(joined)
        })
    }};
}
pub(crate) use process_wide;

//! Child processes that do not outlive the test process, whichever way it ends.
//!
//! A child that belongs to one test is watched by a tiny shell which reads from a pipe that only the test process
//! holds: when the pipe closes unannounced, the shell kills the child. The kernel's own means (`PR_SET_PDEATHSIG`) is
//! bound to the *thread* that started the child, and threads of a test runtime come and go.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::packages::run;
use crate::wait::{Hopeless, until};

/// A signal that tests send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Signal {
    /// Ask for a clean stop.
    Term,
    /// What a terminal sends on Ctrl-C; also PostgreSQL's fast shutdown.
    Int,
    /// End at once, without a chance to clean up.
    Kill,
    /// Freeze, as a machine that hangs.
    Stop,
    /// Go on after [`Signal::Stop`].
    Cont,
    /// Read the configuration again.
    Hup,
}

impl Signal {
    fn name(self) -> &'static str {
        match self {
            Signal::Term => "-TERM",
            Signal::Int => "-INT",
            Signal::Kill => "-KILL",
            Signal::Stop => "-STOP",
            Signal::Cont => "-CONT",
            Signal::Hup => "-HUP",
        }
    }
}

pub(crate) fn send(pid: u32, signal: Signal) -> Result<()> {
    run("kill", &[signal.name(), &pid.to_string()]).map(drop)
}

/// What a peer is started with, also more than once.
#[derive(Debug, Clone)]
pub(crate) struct Launch {
    pub program: PathBuf,
    pub args: Vec<String>,
    pub env: Vec<(String, String)>,
    /// Runs without root's rights.
    pub unprivileged: bool,
    /// Shell lines that run first, in the same process.
    pub before: String,
    /// What stops the server cleanly.
    pub stop: Signal,
}

impl Launch {
    /// The launch as a shell script that becomes the server. With `die_with_parent` the kernel kills the server when
    /// its parent, the single-threaded keeper, ends.
    pub(crate) fn script(&self, folder: &Path, die_with_parent: bool) -> String {
        let mut script = format!("#!/bin/sh\ncd {} || exit 1\n", quoted(&folder.to_string_lossy()));
        for (name, value) in &self.env {
            script += &format!("export {name}={}\n", quoted(value));
        }
        script += &self.before;
        script += "exec";
        if self.unprivileged {
            for word in crate::packages::unprivileged() {
                script += &format!(" {}", quoted(&word));
            }
        }
        if die_with_parent {
            // After the change of the user, which clears the setting.
            script += " setpriv --pdeathsig KILL --";
        }
        script += &format!(" {}", quoted(&self.program.to_string_lossy()));
        for arg in &self.args {
            script += &format!(" {}", quoted(arg));
        }
        script + "\n"
    }
}

fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// A server that belongs to this process, with the means to stop it in several ways and start it again in place.
#[derive(Debug)]
pub(crate) struct Owned {
    launch: Launch,
    folder: PathBuf,
    running: Option<Watched>,
    /// The folder goes when the server has gone.
    _temp: tempfile::TempDir,
}

impl Owned {
    pub(crate) fn new(temp: tempfile::TempDir, launch: Launch) -> Self {
        Owned { launch, folder: temp.path().to_path_buf(), running: None, _temp: temp }
    }

    /// Starts the server and waits until `ready` agrees.
    pub(crate) fn start(&mut self, ready: impl Fn() -> Result<()>) -> Result<()> {
        if self.running.as_mut().is_some_and(|child| child.try_wait().is_none()) {
            return Ok(());
        }
        let script = self.folder.join("run");
        std::fs::write(&script, self.launch.script(&self.folder, false))?;
        let log = std::fs::OpenOptions::new().create(true).append(true).open(self.folder.join("log"))?;
        let mut command = Command::new("sh");
        command.arg(&script).stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        self.running = Some(Watched::spawn(command)?);
        let log = self.folder.join("log");
        let child = self.running.as_mut().expect("was just set");
        until(Duration::from_secs(90), || match child.try_wait() {
            Some(status) => Err(Hopeless(format!("the server ended with {status}")).into()),
            None => ready(),
        })
        .with_context(|| format!("the server is not ready; the end of its log:\n{}", tail(&log)))
    }

    pub(crate) fn signal(&mut self, signal: Signal) -> Result<()> {
        match &self.running {
            Some(child) => send(child.pid(), signal),
            None => bail!("the server is not running"),
        }
    }

    /// Stops the server cleanly and waits for its end.
    pub(crate) fn stop(&mut self) -> Result<()> {
        let signal = self.launch.stop;
        self.end(signal)
    }

    /// Ends the server at once, as a power cut does, and waits until it is gone.
    pub(crate) fn kill9(&mut self) -> Result<()> {
        self.end(Signal::Kill)
    }

    fn end(&mut self, signal: Signal) -> Result<()> {
        let Some(mut child) = self.running.take() else { return Ok(()) };
        if child.try_wait().is_some() {
            return Ok(());
        }
        send(child.pid(), signal)?;
        if child.wait_within(Duration::from_secs(30)).is_none() {
            bail!("the server is still there 30 s after {signal:?}");
        }
        Ok(())
    }
}

/// The last lines of a log file, for error texts.
pub(crate) fn tail(log: &Path) -> String {
    let text = std::fs::read(log).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(30)..].join("\n")
}

/// A child that is killed when it is dropped and when this process ends in any way.
#[derive(Debug)]
pub(crate) struct Watched {
    child: Child,
    watchdog: Child,
    /// Its closing tells the watchdog that this process is gone.
    leash: Option<ChildStdin>,
    status: Option<ExitStatus>,
}

impl Watched {
    pub(crate) fn spawn(mut command: Command) -> Result<Self> {
        let child = command.spawn().with_context(|| format!("cannot start {:?}", command.get_program()))?;
        let mut watchdog = Command::new("sh")
            .args(["-c", "trap '' INT TERM HUP; read -r word || kill -KILL \"$1\" 2>/dev/null", "watchdog"])
            .arg(child.id().to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .context("cannot start the watchdog")?;
        let leash = watchdog.stdin.take();
        Ok(Watched { child, watchdog, leash, status: None })
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn child(&mut self) -> &mut Child {
        &mut self.child
    }

    pub(crate) fn try_wait(&mut self) -> Option<ExitStatus> {
        if self.status.is_none() {
            self.status = self.child.try_wait().expect("own child");
            if self.status.is_some() {
                self.dismiss();
            }
        }
        self.status
    }

    pub(crate) fn wait_within(&mut self, timeout: Duration) -> Option<ExitStatus> {
        until(timeout, || self.try_wait().context("still running")).ok()
    }

    /// Before the number of the ended child can be given to another process.
    fn dismiss(&mut self) {
        if let Some(mut leash) = self.leash.take() {
            let _ = leash.write_all(b"done\n");
            drop(leash);
            let _ = self.watchdog.wait();
        }
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        if self.try_wait().is_none() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
        self.dismiss();
    }
}

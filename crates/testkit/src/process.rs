//! The built `queuebox` binary (or any other program) as a child of a test.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, ensure};

use crate::child::{Signal, Watched, send, tail};
use crate::packages::{profile_dir, workspace_root};
use crate::wait::{Hopeless, eventually};

/// Path of the built `queuebox` binary: `QUEUEBOX_BIN`, else the one beside the test binary.
///
/// Panics when there is none. Says so on standard error when it is older than a source file.
pub fn queuebox_binary() -> PathBuf {
    if let Some(path) = std::env::var_os("QUEUEBOX_BIN") {
        return path.into();
    }
    let path = profile_dir().map(|dir| dir.join("queuebox")).filter(|path| path.exists());
    let path = path.unwrap_or_else(|| panic!("there is no queuebox binary: run `cargo build --workspace` first"));
    let built = std::fs::metadata(&path).and_then(|meta| meta.modified()).unwrap_or(SystemTime::UNIX_EPOCH);
    static SAID: std::sync::Once = std::sync::Once::new();
    SAID.call_once(|| {
        if let Some(newer) = newer_source(&workspace_root().join("crates"), built) {
            eprintln!("{} is older than {}: run `cargo build`", path.display(), newer.display());
        }
    });
    path
}

fn newer_source(dir: &Path, than: SystemTime) -> Option<PathBuf> {
    const NOT_IN_THE_BINARY: [&str; 4] = ["tests", "testkit", "xtask", "conformance"];
    std::fs::read_dir(dir).ok()?.flatten().find_map(|entry| {
        let (path, meta) = (entry.path(), entry.metadata().ok()?);
        if meta.is_dir() {
            let name = entry.file_name();
            return if NOT_IN_THE_BINARY.iter().any(|n| name == *n) { None } else { newer_source(&path, than) };
        }
        let source = path.extension().is_some_and(|e| e == "rs" || e == "sql");
        (source && meta.modified().ok()? > than).then_some(path)
    })
}

/// How to start a [`Process`].
#[derive(Debug)]
pub struct ProcessBuilder {
    command: Command,
    name: String,
}

/// A running program, killed when dropped and when the test process ends in any way. Its output goes to a file, which
/// [`Process::output`] reads; a failing assertion about the program shows its end.
#[derive(Debug)]
pub struct Process {
    name: String,
    child: Mutex<Watched>,
    pid: u32,
    folder: tempfile::TempDir,
    /// Somebody asked for its end.
    dismissed: AtomicBool,
}

/// The program still runs although its end was waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unfinished;

impl Process {
    /// The built `queuebox` binary with these arguments. It sees none of this process' `QUEUEBOX_*` variables.
    pub fn queuebox<S: AsRef<std::ffi::OsStr>>(args: impl IntoIterator<Item = S>) -> ProcessBuilder {
        let mut builder = Process::program(queuebox_binary()).args(args);
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("QUEUEBOX_") {
                builder.command.env_remove(name);
            }
        }
        builder
    }

    /// Any program.
    pub fn program(path: impl AsRef<Path>) -> ProcessBuilder {
        let path = path.as_ref();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        ProcessBuilder { command: Command::new(path), name }
    }

    /// The process id.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    fn with<T>(&self, work: impl FnOnce(&mut Watched) -> T) -> T {
        work(&mut self.child.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Whether it still runs.
    pub fn is_running(&self) -> bool {
        self.with(|child| child.try_wait().is_none())
    }

    /// Whether it ended although nobody had asked for it: it crashed, or gave up.
    pub fn ended_by_itself(&self) -> bool {
        !self.dismissed.load(Ordering::SeqCst) && !self.is_running()
    }

    /// Sends a signal; panics when the program has ended already.
    pub fn signal(&self, signal: Signal) {
        if matches!(signal, Signal::Term | Signal::Int | Signal::Kill) {
            self.dismissed.store(true, Ordering::SeqCst);
        }
        self.with(|child| {
            assert!(child.try_wait().is_none(), "{} has ended; {}", self.name, self.end_of_log());
            send(child.pid(), signal).unwrap_or_else(|error| panic!("{error:#}"));
        });
    }

    /// Asks for a clean stop.
    pub fn sigterm(&self) {
        self.signal(Signal::Term);
    }

    /// Ends it at once and waits until it is gone.
    pub async fn kill9(&self) {
        self.dismissed.store(true, Ordering::SeqCst);
        self.with(|child| {
            if child.try_wait().is_none() {
                let _ = child.child().kill();
            }
        });
        let _ = self.wait_for_end(Duration::from_secs(10)).await;
    }

    /// Freezes it.
    pub fn pause(&self) {
        self.signal(Signal::Stop);
    }

    /// Lets it go on.
    pub fn cont(&self) {
        self.signal(Signal::Cont);
    }

    /// Waits for its end, which is expected; panics with the end of its log when it still runs after `timeout`.
    pub async fn wait(&self, timeout: Duration) -> ExitStatus {
        self.dismissed.store(true, Ordering::SeqCst);
        match self.wait_for_end(timeout).await {
            Ok(status) => status,
            Err(Unfinished) => panic!("{} still runs after {timeout:?}; {}", self.name, self.end_of_log()),
        }
    }

    /// [`Process::wait`] without the panic.
    pub async fn wait_for_end(&self, timeout: Duration) -> std::result::Result<ExitStatus, Unfinished> {
        let started = Instant::now();
        loop {
            if let Some(status) = self.with(Watched::try_wait) {
                return Ok(status);
            }
            if started.elapsed() >= timeout {
                return Err(Unfinished);
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Asks for a clean stop, waits for it, and returns the exit status.
    pub async fn terminate(&self, timeout: Duration) -> ExitStatus {
        if self.is_running() {
            self.sigterm();
        }
        self.wait(timeout).await
    }

    /// Waits until a GET of `url` answers 2xx. Panics with the end of the log when the program ends or the time is up.
    pub async fn wait_ready(&self, url: &str, timeout: Duration) {
        let client = reqwest::Client::new();
        let look = || async {
            if !self.is_running() {
                return Err(anyhow::Error::new(Hopeless("it ended".into())));
            }
            let status = client.get(url).timeout(Duration::from_secs(5)).send().await?.status();
            ensure!(status.is_success(), "{url} answers {status}");
            Ok(())
        };
        let started = Instant::now();
        while let Err(error) = look().await {
            let over = started.elapsed() >= timeout || error.is::<Hopeless>();
            assert!(!over, "{} is not ready after {timeout:?}: {error:#}; {}", self.name, self.end_of_log());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Waits until its output contains `text`.
    pub async fn wait_output(&self, text: &str, timeout: Duration) {
        eventually(&format!("{} prints {text:?}", self.name), timeout, || async {
            self.output().contains(text).then_some(())
        })
        .await;
    }

    /// Everything that it printed so far, standard output and standard error in the order of their writing.
    pub fn output(&self) -> String {
        self.read("both")
    }

    /// What it printed to standard output; empty unless [`ProcessBuilder::separate`] was asked for.
    pub fn stdout(&self) -> String {
        self.read("stdout")
    }

    fn read(&self, name: &str) -> String {
        let bytes = std::fs::read(self.folder.path().join(name)).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Panics when a secret of a test is in the output.
    fn assert_no_secret(&self) {
        for output in [self.output(), self.stdout()] {
            for secret in crate::evidence::SECRETS.lines() {
                let line = output.lines().find(|line| line.contains(secret));
                assert!(line.is_none(), "{} printed a secret: {}", self.name, line.unwrap_or_default());
            }
        }
    }

    /// Panics when the program did: some task of it is gone, whatever it still answers.
    fn assert_no_panic(&self) {
        let output = self.output();
        let line = output.lines().find(|line| line.contains("panicked at"));
        assert!(line.is_none(), "{} panicked: {}", self.name, line.unwrap_or_default());
    }

    fn end_of_log(&self) -> String {
        format!("the end of its output:\n{}", tail(&self.folder.path().join("both")))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        crate::evidence::keep(&self.name, &[&self.stdout(), &self.output()]);
        // Where a test fails already, its own message counts.
        if !std::thread::panicking() {
            self.assert_no_secret();
            self.assert_no_panic();
        }
    }
}

impl ProcessBuilder {
    /// Another argument.
    pub fn arg(mut self, arg: impl AsRef<std::ffi::OsStr>) -> Self {
        self.command.arg(arg);
        self
    }

    /// More arguments.
    pub fn args<S: AsRef<std::ffi::OsStr>>(mut self, args: impl IntoIterator<Item = S>) -> Self {
        self.command.args(args);
        self
    }

    /// An environment variable.
    pub fn env(mut self, name: &str, value: impl AsRef<std::ffi::OsStr>) -> Self {
        self.command.env(name, value);
        self
    }

    /// The working folder.
    pub fn dir(mut self, dir: impl AsRef<Path>) -> Self {
        self.command.current_dir(dir);
        self
    }

    /// Starts it.
    pub fn spawn(self) -> Process {
        self.start(false).unwrap_or_else(|error| panic!("{error:#}"))
    }

    /// Starts it with standard output in a file of its own ([`Process::stdout`]); [`Process::output`] then has
    /// standard error only.
    pub fn separate(self) -> Process {
        self.start(true).unwrap_or_else(|error| panic!("{error:#}"))
    }

    /// Runs it to its end and returns exit status, standard output and standard error.
    pub async fn run(self, timeout: Duration) -> (ExitStatus, String, String) {
        let process = self.separate();
        let status = process.wait(timeout).await;
        (status, process.stdout(), process.output())
    }

    fn start(mut self, separate: bool) -> Result<Process> {
        crate::init();
        let folder = tempfile::Builder::new().prefix("queuebox-process-").tempdir()?;
        let open = |name: &str| {
            std::fs::OpenOptions::new().create(true).append(true).open(folder.path().join(name)).context("log file")
        };
        let both = open("both")?;
        let out = if separate { open("stdout")? } else { both.try_clone()? };
        self.command.stdin(Stdio::null()).stdout(out).stderr(both);
        let child = Watched::spawn(self.command)?;
        let pid = child.pid();
        Ok(Process { name: self.name, child: Mutex::new(child), pid, folder, dismissed: AtomicBool::new(false) })
    }
}

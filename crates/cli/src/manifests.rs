//! Where a command gets its manifests from, and what it says when they are wrong.

use std::{path::PathBuf, sync::Arc};

use anyhow::{Context, bail};
use clap::Args;
use queuebox_api::{
    Kind, Manifests, Problems, SecretResolver, Target,
    checked::{self, UsedReference},
    classic,
};
use serde_json::json;
use sha2::{Digest, Sha256};

use crate::output::{Output, print_json};

/// The command was called in a way that cannot work; exit code 2.
#[derive(Debug)]
pub struct WrongUsage(pub String);

impl std::fmt::Display for WrongUsage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for WrongUsage {}

/// Which manifests.
#[derive(Debug, Clone, Default, Args)]
pub struct Given {
    /// Manifests: files, or folders with .yaml, .yml and .json files. May be repeated.
    #[arg(short = 'f', long = "file", value_name = "PATH")]
    pub files: Vec<PathBuf>,

    /// A classic configuration file in place of manifests; without a path: QUEUEBOX_CONFIG_FILE, then
    /// /etc/queuebox/queuebox.yml.
    #[arg(long, value_name = "FILE", num_args = 0..=1, conflicts_with = "files")]
    pub config: Option<Option<PathBuf>>,

    /// A folder of NAME/KEY files that answers secretKeyRef and configMapKeyRef.
    #[arg(long, value_name = "DIR")]
    pub secrets: Option<PathBuf>,

    /// Which Relay, when there are several.
    #[arg(long, value_name = "NAME")]
    pub relay: Option<String>,
}

/// What `queuebox run` serves, and as what.
#[derive(Debug, Clone, Default, Args)]
pub struct RunOptions {
    /// Which manifests.
    #[command(flatten)]
    pub given: Given,

    /// As a pod of a cluster, with its rules and defaults: no SQLite, http.shutdownDelay 5s, and a missing Secret is waited for.
    #[arg(long, conflicts_with = "config")]
    pub cluster: bool,

    /// Number and content hash of the configuration, counted by whoever starts several workers on it. During a rollout only the
    /// newest may say that a row has no route. Default: the time of the start, and the hash of what was read.
    #[arg(long, value_name = "NUMBER/HASH", value_parser = config_version)]
    pub config_version: Option<String>,
}

fn config_version(text: &str) -> Result<String, String> {
    let is_version = text.split_once('/').is_some_and(|(number, hash)| {
        number.parse::<u64>().is_ok()
            && (1..=64).contains(&hash.len())
            && hash.chars().all(|it| it.is_ascii_alphanumeric())
    });
    if is_version {
        Ok(text.to_owned())
    } else {
        Err("write a whole number, a slash and a hash, such as 7/3f9ac2d1".to_owned())
    }
}

/// A Relay that may be opened.
pub struct Loaded {
    /// It.
    pub relay: Arc<checked::Relay>,
    /// Who answers its references.
    pub secrets: Arc<dyn SecretResolver>,
    /// Everything that the manifests refer to.
    pub references: Vec<UsedReference>,
    /// A missing secret of the database is waited for, as long as it takes.
    pub waits_for_secrets: bool,
    /// `<number>/<content hash>`: a local run takes the time of loading in ms (contract 2.7).
    pub version: String,
}

/// A reference of the Relay, or of one of its Sources or Destinations.
pub fn belongs(relay: &checked::Relay, used: &UsedReference) -> bool {
    match used.kind {
        Kind::Relay => used.name == relay.name,
        Kind::Source => relay.sources.iter().any(|source| source.name == used.name),
        Kind::Destination => relay.destinations.iter().any(|destination| destination.name == used.name),
    }
}

/// Ends a start whose secrets are not there: with them missing, nothing that needs them would work.
///
/// # Errors
/// There are any.
pub fn refuse_without_value(missing: &[String]) -> anyhow::Result<()> {
    match missing {
        [] => Ok(()),
        missing => bail!("secrets that the manifests refer to are not there:\n{}", missing.join("\n")),
    }
}

impl Loaded {
    /// For commands that look at what is there: a database file that is not there would be made by opening it.
    ///
    /// # Errors
    /// The file does not exist.
    pub fn needs_database(&self) -> anyhow::Result<()> {
        match &self.relay.database.server {
            checked::DatabaseServer::Sqlite { path, .. } if !std::path::Path::new(path).exists() => bail!(
                "{path} does not exist; Relay.spec.database.sqlite.path is relative to the working folder. Call this where \
                 `queuebox run` was started, or start it there first"
            ),
            _ => Ok(()),
        }
    }
}

/// Reads the manifests that were asked for.
///
/// # Errors
/// No manifests named, or a classic file that cannot be found.
pub fn read(given: &Given) -> anyhow::Result<Manifests> {
    let mut manifests = match (&given.config, given.files.is_empty()) {
        (Some(path), _) => read_classic(path.as_deref())?.manifests,
        (None, false) => queuebox_api::load(&given.files),
        (None, true) => {
            let message = "no manifests: name files or folders with -f, such as -f deploy/examples/quickstart";
            return Err(WrongUsage(message.to_owned()).into());
        }
    };
    if let Some(folder) = &given.secrets {
        manifests = manifests.with_secrets_folder(folder);
    }
    Ok(manifests)
}

fn read_classic(path: Option<&std::path::Path>) -> anyhow::Result<classic::Classic> {
    let variable = std::env::var(classic::FILE_VARIABLE).ok();
    if let Some(folder) = path.filter(|path| path.is_dir()) {
        let message = format!("{} is a folder; name the classic file in it, such as queuebox.yml", folder.display());
        return Err(WrongUsage(message).into());
    }
    let found = classic::find_file(path, variable.as_deref()).map_err(|problem| Problems(vec![problem]))?;
    let text = std::fs::read_to_string(&found).with_context(|| format!("cannot read {}", found.display()))?;
    Ok(classic::read(&found.display().to_string(), &text, &classic::Variables::of_process()))
}

/// Reads and checks; warnings are logged, problems are the error.
///
/// # Errors
/// Everything that is wrong with the manifests, at once.
pub fn load(given: &Given) -> anyhow::Result<Loaded> {
    load_for(given, Target::Local)
}

/// [`load`], for a place with other rules and defaults.
///
/// # Errors
/// As for [`load`].
pub fn load_for(given: &Given, target: Target) -> anyhow::Result<Loaded> {
    let manifests = read(given)?;
    let report = queuebox_api::check(&manifests, target);
    for warning in &report.warnings {
        tracing::warn!("{warning}");
    }
    let references = report.references.clone();
    let relay = match report.into_relay(given.relay.as_deref()) {
        Ok(relay) => relay,
        Err(problems) => bail!("the manifests cannot be run:\n{problems}"),
    };
    let hash = Sha256::digest(format!("{relay:?}"));
    let hash: String = hash.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    let version = format!("{}/{hash}", jiff::Timestamp::now().as_millisecond());
    Ok(Loaded {
        relay: Arc::new(relay),
        secrets: Arc::new(manifests.secrets),
        references,
        waits_for_secrets: target == Target::Cluster,
        version,
    })
}

/// `queuebox convert`.
#[derive(Debug, Args)]
pub struct ConvertOptions {
    /// The classic file; without it QUEUEBOX_CONFIG_FILE, then /etc/queuebox/queuebox.yml.
    file: Option<PathBuf>,

    /// How the result is printed: as manifests, or {"manifests": "…", "notes": […], "fill": […]}.
    #[arg(long, value_enum, default_value_t)]
    output: Output,
}

/// Writes manifests to standard output, and to standard error the keys to fill and what could not be kept.
///
/// # Errors
/// The file cannot be read, or its content is wrong.
pub fn convert(options: &ConvertOptions) -> anyhow::Result<()> {
    let is_named = options.file.is_some() || std::env::var_os(classic::FILE_VARIABLE).is_some_and(|it| !it.is_empty());
    if !is_named && !std::path::Path::new(classic::DEFAULT_FILE).is_file() {
        let message = format!(
            "name the classic file: queuebox convert queuebox.yml (without one, {} and {} are looked at)",
            classic::FILE_VARIABLE,
            classic::DEFAULT_FILE
        );
        return Err(WrongUsage(message).into());
    }
    let mut classic = read_classic(options.file.as_deref())?;
    let written = classic.write();
    if options.output == Output::Json {
        let fill = |key: &classic::KeyToFill| json!({ "secret": key.name, "key": key.key, "from": key.from });
        print_json(&json!({
            "manifests": written,
            "notes": classic.notes,
            "fill": classic.keys.iter().map(fill).collect::<Vec<_>>(),
        }))?;
        let problems = std::mem::take(&mut classic.manifests.problems);
        return if problems.is_empty() { Ok(()) } else { bail!("{}", Problems(problems)) };
    }
    outln!("{}", written.trim_end());
    // Warnings of reading are among the notes.
    for note in &classic.notes {
        eprintln!("note: {note}");
    }
    for key in &classic.keys {
        eprintln!("fill: Secret {}, key {}, with the value of {}", key.name, key.key, key.from);
    }
    let problems = std::mem::take(&mut classic.manifests.problems);
    if problems.is_empty() {
        return Ok(());
    }
    bail!("{}", Problems(problems))
}

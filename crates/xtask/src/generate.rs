//! Files that are written by the program itself and checked in, so that readers and charts have them.
//!
//! Each file has a producer: a command of the `queuebox` binary whose standard output is the file, or [`crate::chart`].

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::chart;

/// A generated file and the arguments that make the binary print it; the CRDs first, which the chart is made from.
const FILES: [(&str, &[&str]); 3] = [
    ("crds/queuebox.yaml", &["generate", "crds"]),
    ("docs/reference/metrics.md", &["generate", "metrics"]),
    ("docs/reference/cli.md", &["generate", "cli"]),
];

/// Writes the files, or with `check` only says which differ.
pub fn run(check: bool, binary: Option<PathBuf>) -> Result<Vec<String>> {
    let binary = match binary {
        Some(binary) => binary,
        None => build()?,
    };
    let mut stale = Vec::new();
    let mut files = Vec::new();
    for (file, arguments) in FILES {
        files.push((file.to_owned(), print(&binary, arguments)?));
    }
    files.extend(chart::files(&files[0].1)?);
    for (file, fresh) in files {
        let path = crate::root().join(&file);
        if std::fs::read_to_string(&path).is_ok_and(|text| text == fresh) {
            continue;
        }
        if check {
            stale.push(format!("{file} is out of date: run `cargo xtask gen`"));
        } else {
            std::fs::create_dir_all(path.parent().unwrap_or(Path::new(".")))?;
            std::fs::write(&path, fresh).with_context(|| file.clone())?;
            println!("wrote {file}");
        }
    }
    Ok(stale)
}

fn build() -> Result<PathBuf> {
    let output = crate::cargo().args(["build", "--quiet", "-p", "queuebox", "--message-format=json"]).output()?;
    ensure!(output.status.success(), "cargo build: {}", String::from_utf8_lossy(&output.stderr));
    let executable = String::from_utf8_lossy(&output.stdout)
        .lines()
        .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
        .filter(|message| message["target"]["name"] == "queuebox")
        .find_map(|message| message["executable"].as_str().map(PathBuf::from));
    executable.context("cargo build printed no executable")
}

fn print(binary: &Path, arguments: &[&str]) -> Result<String> {
    let output = Command::new(binary).args(arguments).output().with_context(|| binary.display().to_string())?;
    if !output.status.success() {
        bail!("queuebox {}: {}", arguments.join(" "), String::from_utf8_lossy(&output.stderr));
    }
    String::from_utf8(output.stdout).context("the output is no text")
}

//! The Helm chart and the files of `deploy/`, without a node: rendering by Helm itself, installation on a real control plane.

mod deploy;
mod install;
mod monitoring;
mod render;

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use queuebox_testkit as testkit;
use serde_json::Value;

/// `charts/queuebox`.
pub fn chart() -> PathBuf {
    testkit::workspace_root().join("charts/queuebox")
}

/// A tool that `tests/cluster/cluster build` made: helm, kubectl, glua.
pub fn tool(name: &str) -> Command {
    let cluster = testkit::workspace_root().join("tests/cluster/cluster");
    let bin = Command::new(cluster).arg("bin").output().unwrap();
    let path = Path::new(String::from_utf8(bin.stdout).unwrap().trim()).join(name);
    assert!(
        path.exists(),
        "{name} is not built: run `tests/cluster/cluster packages && tests/cluster/cluster build` once"
    );
    let mut command = Command::new(path);
    // Whatever this machine's user has set up for clusters of their own.
    command.env_remove("KUBECONFIG").env("HELM_CACHE_HOME", "/nonexistent").env("HELM_CONFIG_HOME", "/nonexistent");
    command
}

/// Runs a command: standard output, or what it said when it failed.
pub fn run(command: &mut Command) -> Result<String, String> {
    let output = command.output().unwrap();
    let (out, error) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    if output.status.success() { Ok(out.into_owned()) } else { Err(format!("{out}{error}")) }
}

/// `helm template` of a chart with these arguments.
pub fn template(chart: &Path, arguments: &[&str]) -> Result<String, String> {
    run(tool("helm").arg("template").arg("qb").arg(chart).args(["--namespace", "queuebox"]).args(arguments))
}

/// Documents of a YAML text.
pub fn documents(text: &str) -> Vec<Value> {
    let documents: Vec<Value> = serde_saphyr::from_multiple(text).unwrap_or_else(|error| panic!("{error}\n{text}"));
    documents.into_iter().filter(|document| !document.is_null()).collect()
}

/// Objects that the chart renders with these arguments.
pub fn objects(arguments: &[&str]) -> Vec<Value> {
    documents(&template(&chart(), arguments).unwrap_or_else(|error| panic!("{error}")))
}

/// Those of one kind.
pub fn of_kind<'a>(objects: &'a [Value], kind: &str) -> Vec<&'a Value> {
    objects.iter().filter(|object| object["kind"] == kind).collect()
}

/// A file of the repository.
pub fn read(file: &str) -> String {
    let path = testkit::workspace_root().join(file);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

//! The node, the operator on it, and a team's namespace with a Relay: what the journeys have in common.

use std::{
    io::Write as _,
    net::Ipv4Addr,
    path::{Path, PathBuf},
    process::Stdio,
    time::{Duration, Instant},
};

use queuebox_testkit as testkit;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tokio::io::AsyncWriteExt as _;

use crate::chart;

/// Bound for everything that is awaited. Nothing is expected to take so long.
pub const PATIENCE: Duration = Duration::from_secs(300);
/// Where pods reach this machine.
pub const HOST: Ipv4Addr = Ipv4Addr::new(10, 244, 0, 1);
/// Namespace of the operator.
pub const SYSTEM: &str = "queuebox";

/// How the Dockerfile's release profile is compiled in no time.
static QUICK: [(&str, &str); 4] = [
    ("CARGO_PROFILE_RELEASE_OPT_LEVEL", "0"),
    ("CARGO_PROFILE_RELEASE_LTO", "off"),
    ("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "256"),
    ("CARGO_PROFILE_RELEASE_DEBUG", "0"),
];

/// The running node.
#[derive(Debug, Clone)]
pub struct Node {
    folder: PathBuf,
    /// Tag of the image with the built program.
    pub tag: String,
}

impl Node {
    /// The node that `tests/cluster/cluster up` started, with the image of the built program.
    pub async fn get() -> Node {
        testkit::init();
        let folder = std::env::var_os("CLUSTER_DIR")
            .map_or_else(|| testkit::workspace_root().join("target/cluster"), PathBuf::from);
        let config = folder.join("admin.kubeconfig");
        assert!(
            config.exists(),
            "no node runs: `./dev test cluster`, or `tests/cluster/cluster up` as root and then the test"
        );
        let binary = testkit::queuebox_binary();
        let mut digest = Sha256::new_with_prefix(std::fs::read(&binary).unwrap());
        digest.update(std::fs::read(testkit::workspace_root().join("Dockerfile")).unwrap());
        let tag: String = digest.finalize().iter().take(6).map(|byte| format!("{byte:02x}")).collect();
        let node = Node { folder, tag };
        node.load(&binary).await;
        node
    }

    /// The administrator's kubeconfig.
    pub fn config(&self) -> PathBuf {
        self.folder.join("admin.kubeconfig")
    }

    async fn load(&self, binary: &Path) {
        let marker = self.folder.join(format!("image-{}", self.tag));
        if marker.exists() {
            return;
        }
        let archive = tempfile::NamedTempFile::new_in(&self.folder).unwrap();
        let names = [self.tag.clone(), format!("{}-next", self.tag)].map(|tag| format!("queuebox/queuebox:{tag}"));
        // The program that is tested, in an image made by all that the Dockerfile says but its compilation.
        self.image(archive.path(), &names, Some(binary)).await;
        std::fs::write(marker, "").unwrap();
    }

    /// Builds the image of the Dockerfile and makes it known to the node; with a program, that one is not compiled anew.
    pub async fn image(&self, archive: &Path, names: &[String], binary: Option<&Path>) {
        let archive_name = archive.to_string_lossy();
        let mut arguments = vec!["image", &archive_name];
        arguments.extend(names.iter().map(String::as_str));
        let environment: Vec<(&str, &std::ffi::OsStr)> = match binary {
            Some(binary) => vec![("QUEUEBOX_IMAGE_BINARY", binary.as_os_str())],
            None => QUICK.iter().map(|(name, value)| (*name, std::ffi::OsStr::new(*value))).collect(),
        };
        self.cluster(&arguments, &environment).await;
        self.cluster(&["load", &archive_name], &[]).await;
    }

    async fn cluster(&self, arguments: &[&str], environment: &[(&str, &std::ffi::OsStr)]) {
        let mut command = std::process::Command::new(testkit::workspace_root().join("tests/cluster/cluster"));
        command.env("CLUSTER_DIR", &self.folder).args(arguments).envs(environment.iter().copied());
        output(command, None).await.unwrap_or_else(|error| panic!("cluster {arguments:?}: {error}"));
    }

    /// `kubectl`; an error is what it said.
    pub async fn try_kubectl(&self, arguments: &[&str]) -> Result<String, String> {
        self.kubectl_with(arguments, None).await
    }

    /// `kubectl`; panics with what it said when it fails.
    pub async fn kubectl(&self, arguments: &[&str]) -> String {
        self.try_kubectl(arguments).await.unwrap_or_else(|error| panic!("kubectl {arguments:?}: {error}"))
    }

    async fn kubectl_with(&self, arguments: &[&str], input: Option<String>) -> Result<String, String> {
        let mut command = chart::tool("kubectl");
        command.env("KUBECONFIG", self.config()).args(arguments);
        output(command, input).await
    }

    /// `helm`; an error is what it said.
    pub async fn try_helm(&self, arguments: &[&str]) -> Result<String, String> {
        let mut command = chart::tool("helm");
        command.env("KUBECONFIG", self.config()).args(arguments);
        output(command, None).await
    }

    /// `helm`; panics with what it said when it fails.
    pub async fn helm(&self, arguments: &[&str]) -> String {
        self.try_helm(arguments).await.unwrap_or_else(|error| panic!("helm {arguments:?}: {error}"))
    }

    /// `helm upgrade --install` of the chart as release `queuebox`, with the built image.
    pub async fn release(&self, namespace: &str, tag: &str, more: &[&str]) {
        let (chart, tag) = (chart::chart(), format!("image.tag={tag}"));
        let chart = chart.to_string_lossy();
        let mut arguments =
            vec!["upgrade", "--install", "queuebox", &chart, "--namespace", namespace, "--create-namespace"];
        arguments.extend(["--set", &tag, "--wait", "--timeout", "5m"]);
        arguments.extend(more);
        self.helm(&arguments).await;
    }

    /// The cluster-wide operator, installed if it is not.
    pub async fn operator(&self) {
        self.release(SYSTEM, &self.tag, &[]).await;
    }

    /// Applies objects to a namespace, server-side.
    pub async fn try_apply(&self, namespace: &str, objects: &[Value]) -> Result<String, String> {
        let list = json!({"apiVersion": "v1", "kind": "List", "items": objects}).to_string();
        let arguments = ["apply", "--server-side", "--force-conflicts", "-n", namespace, "-f", "-"];
        self.kubectl_with(&arguments, Some(list)).await
    }

    /// [`Node::try_apply`], which has to work.
    pub async fn apply(&self, namespace: &str, objects: &[Value]) {
        self.try_apply(namespace, objects).await.unwrap_or_else(|error| panic!("apply {objects:#?}: {error}"));
    }

    /// An object.
    pub async fn get_object(&self, namespace: &str, what: &str) -> Value {
        serde_json::from_str(&self.kubectl(&["get", "-n", namespace, what, "-o", "json"]).await).unwrap()
    }

    /// Objects of a kind with a selector.
    pub async fn list(&self, namespace: &str, kind: &str, selector: &str) -> Vec<Value> {
        let text = self.kubectl(&["get", "-n", namespace, kind, "-l", selector, "-o", "json"]).await;
        let list: Value = serde_json::from_str(&text).unwrap();
        list["items"].as_array().unwrap().clone()
    }

    /// Waits until an object is as it should be, and returns it.
    pub async fn wait_object(&self, namespace: &str, what: &str, enough: impl Fn(&Value) -> bool) -> Value {
        let mut last = Value::Null;
        let looking = async {
            loop {
                if let Ok(text) = self.try_kubectl(&["get", "-n", namespace, what, "-o", "json"]).await {
                    last = serde_json::from_str(&text).unwrap();
                    if enough(&last) {
                        return;
                    }
                }
                tokio::time::sleep(Duration::from_millis(250)).await;
            }
        };
        if tokio::time::timeout(PATIENCE, looking).await.is_err() {
            self.report(namespace).await;
            panic!("{what} in {namespace} did not become as expected: {:#}", last["status"]);
        }
        last
    }

    /// Waits for a condition of the object's present generation.
    pub async fn wait_condition(&self, namespace: &str, what: &str, kind: &str, status: &str) -> Value {
        self.wait_object(namespace, what, |object| has_condition(object, kind, status)).await
    }

    /// What a person would look at.
    pub async fn report(&self, namespace: &str) {
        for arguments in [
            vec!["get", "-n", namespace, "queuebox,deployments,replicasets,pods,configmaps", "-o", "wide"],
            vec!["get", "-n", namespace, "events", "--sort-by=.lastTimestamp"],
            vec!["get", "-n", namespace, "relays", "-o", "yaml"],
            vec!["logs", "-n", namespace, "-l", "queuebox.io/relay", "--tail=60", "--prefix"],
            vec!["logs", "-n", SYSTEM, "-l", "app.kubernetes.io/component=operator", "--tail=60"],
        ] {
            eprintln!(
                "--- kubectl {arguments:?}\n{}",
                self.try_kubectl(&arguments).await.unwrap_or_else(|error| error)
            );
        }
    }
}

/// Whether the object, in its present generation, has this condition.
pub fn has_condition(object: &Value, kind: &str, status: &str) -> bool {
    let generation = &object["metadata"]["generation"];
    let conditions = object["status"]["conditions"].as_array();
    conditions.is_some_and(|conditions| {
        conditions
            .iter()
            .any(|it| it["type"] == kind && it["status"] == status && it["observedGeneration"] == *generation)
    })
}

/// Runs a command to its end: standard output, or all that it said.
pub async fn output(mut command: std::process::Command, input: Option<String>) -> Result<String, String> {
    command
        .stdin(if input.is_some() { Stdio::piped() } else { Stdio::null() })
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = tokio::process::Command::from(command).kill_on_drop(true).spawn().unwrap();
    if let (Some(mut pipe), Some(input)) = (child.stdin.take(), input) {
        pipe.write_all(input.as_bytes()).await.unwrap();
    }
    let output = child.wait_with_output().await.unwrap();
    let (out, error) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    if output.status.success() { Ok(out.into_owned()) } else { Err(format!("{out}{error}")) }
}

/// Notes a journey, its time and what the prober found, for the summary of `./dev test cluster`.
pub fn note(name: &str, started: Instant, text: &str) {
    let line = format!("{name:<42} {:>6.1} s  {text}\n", started.elapsed().as_secs_f64());
    eprint!("{line}");
    let file = testkit::target_dir().join("journeys.txt");
    let mut file = std::fs::OpenOptions::new().create(true).append(true).open(file).unwrap();
    file.write_all(line.as_bytes()).unwrap();
}

//! The Kubernetes section of the README as a newcomer follows it: word by word, on a cluster that never saw QueueBox.

use std::{os::unix::fs::PermissionsExt as _, path::Path, process::Command, time::Instant};

use queuebox_testkit::{self as testkit, Recorder};

use super::{
    node::{HOST, Node, PATIENCE, note, output},
    operations::bare,
};
use crate::chart;

/// Language and text of the fenced blocks below a heading.
fn blocks(text: &str, heading: &str) -> Vec<(String, String)> {
    let section = text.split(&format!("\n## {heading}\n")).nth(1).unwrap().split("\n## ").next().unwrap();
    let fenced = section.split("\n```").collect::<Vec<_>>();
    fenced
        .chunks(2)
        .filter_map(|pair| pair.get(1))
        .map(|block| {
            let (language, text) = block.split_once('\n').unwrap();
            (language.to_owned(), text.to_owned())
        })
        .collect()
}

/// `docker build -t NAME .` and `docker push NAME`, on a machine without Docker and a node without a registry.
fn docker(folder: &Path, node: &Node) {
    let cluster = testkit::workspace_root().join("tests/cluster/cluster");
    let script = format!(
        "#!/bin/sh -e\n[ \"$1\" = build ] || exit 0\n[ \"$2 $4\" = '-t .' ]\n\
         export CLUSTER_DIR={} QUEUEBOX_IMAGE_BINARY={}\n{cluster} image image.tar \"$3\"\n{cluster} load image.tar\n",
        node.config().parent().unwrap().display(),
        testkit::queuebox_binary().display(),
        cluster = cluster.display(),
    );
    let file = folder.join("docker");
    std::fs::write(&file, script).unwrap();
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o755)).unwrap();
}

#[tokio::test]
async fn the_readme_word_by_word() {
    let node = Node::get().await;
    bare(&node).await;
    let begun = Instant::now();
    let (addresses, rules) = (format!("127.0.0.1,{HOST}"), "host all all 0.0.0.0/0 scram-sha-256\n");
    let postgres = testkit::private_postgres_with(&[("listen_addresses", &addresses), ("pg_hba", rules)]).await;
    let receiver = Recorder::start_at(HOST).await;
    let namespace = testkit::unique("newcomer-");
    node.kubectl(&["create", "namespace", &namespace]).await;
    // A checkout, a kubeconfig whose namespace is the application's, and the tools.
    let home = tempfile::tempdir().unwrap();
    for part in ["charts", "deploy"] {
        std::os::unix::fs::symlink(testkit::workspace_root().join(part), home.path().join(part)).unwrap();
    }
    docker(home.path(), &node);
    let config = home.path().join("kubeconfig");
    std::fs::copy(node.config(), &config).unwrap();
    let tools = chart::tool("kubectl");
    let tools = Path::new(tools.get_program()).parent().unwrap();
    let path = format!("{}:{}:{}", home.path().display(), tools.display(), std::env::var("PATH").unwrap());
    let shell = |line: String| {
        let mut command = Command::new("sh");
        command.args(["-ec", &line]).current_dir(home.path()).env("PATH", &path).env("KUBECONFIG", &config);
        async move {
            let said = output(command, None).await.unwrap_or_else(|error| panic!("{line}\n{error}"));
            eprintln!("$ {line}\n{said}");
            said
        }
    };
    shell(format!("kubectl config set-context --current --namespace={namespace}")).await;
    let readme = std::fs::read_to_string(testkit::workspace_root().join("README.md")).unwrap();
    let mut seen = String::new();
    for (language, text) in blocks(&readme, "Kubernetes") {
        match language.as_str() {
            "sql" if text.contains("CREATE ROLE") => {
                for statement in text.lines() {
                    postgres.psql("postgres", statement).await;
                }
            }
            "sql" => {
                postgres.psql("shop", &text).await;
                receiver.wait_for(1, PATIENCE).await;
            }
            "sh" => {
                for line in text.lines() {
                    seen += &shell(line.to_owned()).await;
                    // "edit it"
                    if line.starts_with("cp ") {
                        let file = home.path().join("shop.yaml");
                        let manifest = std::fs::read_to_string(&file).unwrap();
                        let database = format!("host: {HOST}\n      port: {}", postgres.port());
                        let edited = manifest
                            .replace("host: shop-db.data.svc", &database)
                            .replace("https://warehouse.example/events", &receiver.url_for("/events"));
                        assert_ne!(edited, manifest);
                        std::fs::write(&file, edited).unwrap();
                    }
                }
            }
            other => panic!("a block of {other}"),
        }
    }
    let request = &receiver.requests()[0];
    assert_eq!(request.json(), serde_json::json!({"order": 7}));
    assert!(!request.header("webhook-signature").is_empty(), "{:?}", request.headers);
    assert!(seen.contains("relay.queuebox.io/shop") && seen.contains("Nothing keeps it from delivering"), "{seen}");
    note("README, word by word", begun, "1 message");
    node.kubectl(&["delete", "namespace", &namespace, "--wait=false"]).await;
}

//! The guide is run as it is written: each shell block of a page in order, in one shell, in a folder with the files that the page
//! names. Only the ports are others.

use std::path::Path;

use queuebox_testkit::{self as testkit, Process};

use crate::support::PATIENCE;

/// Blocks of a page: first line after the fence, and text.
fn blocks(page: &str) -> Vec<(&str, String)> {
    let mut blocks: Vec<(&str, String)> = Vec::new();
    let mut open = false;
    for line in page.lines() {
        match (line.strip_prefix("```"), open) {
            (Some(info), false) => {
                blocks.push((info, String::new()));
                open = true;
            }
            (Some(_), true) => open = false,
            (None, true) => {
                let (_, text) = blocks.last_mut().unwrap();
                text.push_str(line);
                text.push('\n');
            }
            (None, false) => {}
        }
    }
    blocks
}

#[tokio::test]
async fn first_steps_are_right() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let page = std::fs::read_to_string(root.join("docs/tutorials/first-steps.md")).unwrap();
    let folder = tempfile::Builder::new().prefix("queuebox-docs-").tempdir().unwrap();
    let (data, management, receiver) = (testkit::free_port(), testkit::free_port(), testkit::free_port());
    let with_our_ports = |text: &str| {
        [("8080", data), ("9090", management), ("8099", receiver)]
            .into_iter()
            .fold(text.to_owned(), |text, (written, ours)| text.replace(written, &ours.to_string()))
    };
    let example = folder.path().join("deploy/examples/quickstart");
    std::fs::create_dir_all(&example).unwrap();
    for entry in std::fs::read_dir(root.join("deploy/examples/quickstart")).unwrap().flatten() {
        let text = with_our_ports(&std::fs::read_to_string(entry.path()).unwrap());
        let ports = format!("spec:\n  http: {{port: {data}, managementPort: {management}}}\n");
        let text = if entry.file_name() == "relay.yaml" { text.replacen("spec:\n", &ports, 1) } else { text };
        std::fs::write(example.join(entry.file_name()), text).unwrap();
    }

    let program = testkit::queuebox_binary();
    let path = std::env::var("PATH").unwrap_or_default();
    let mut script = format!(
        "set -euo pipefail\nexport PATH='{}':\"{path}\"\ntrap 'kill $(jobs -p) 2>/dev/null || true' EXIT\n",
        program.parent().unwrap().display()
    );
    let mut steps = 0;
    for (info, text) in blocks(&page) {
        match info.split_once(' ') {
            Some(("python", file)) => std::fs::write(folder.path().join(file), with_our_ports(&text)).unwrap(),
            None if info == "sh" => {
                // `explain` and `status` ask port 9090 of this machine unless they are told otherwise.
                let ours = format!("--url http://127.0.0.1:{management}");
                let text = text.replace("queuebox explain", &format!("queuebox explain {ours}"));
                script.push_str(&with_our_ports(&text.replace("queuebox status", &format!("queuebox status {ours}"))));
                steps += 1;
            }
            _ => {}
        }
    }
    assert!(steps >= 7, "the blocks were found: {steps}");
    let (status, out, log) = Process::program("/bin/bash").arg("-c").arg(script).dir(folder.path()).run(PATIENCE).await;
    let received = std::fs::read_to_string(folder.path().join("received.txt")).unwrap_or_default();
    assert!(status.success(), "{out}{log}\nreceived: {received}");
    for topic in ["order.created", "order.paid", "order.shipped"] {
        assert_eq!(received.matches(topic).count(), 1, "{topic}: {received}");
    }
    for said in [
        "Destination warehouse: the last ",
        "It is tried again.",
        "{\"messageId\"",
        "{\"status\":\"duplicate\"}",
        "no_route",
    ] {
        assert!(out.contains(said), "{said}: {out}");
    }
}

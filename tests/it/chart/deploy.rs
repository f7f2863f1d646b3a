//! The files of `deploy/` that people copy: each is tried by whoever reads it in the end.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use queuebox_testkit as testkit;
use serde_json::{Value, json};

use super::{chart, documents, objects, of_kind, read, run, template, tool};

fn files(folder: &str) -> Vec<PathBuf> {
    fn walk(folder: &Path, found: &mut Vec<PathBuf>) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() { walk(&path, found) } else { found.push(path) }
        }
    }
    let mut found = Vec::new();
    walk(&testkit::workspace_root().join(folder), &mut found);
    found.sort();
    found
}

#[test]
fn every_example_passes_check() {
    let examples: Vec<PathBuf> = files("deploy/examples")
        .into_iter()
        .filter(|path| path.file_name().unwrap().to_str().unwrap().starts_with("k8s-"))
        .collect();
    assert!(examples.len() >= 5);
    for file in examples {
        let mut check = Command::new(testkit::queuebox_binary());
        run(check.args(["check", "--cluster", "-f"]).arg(&file))
            .unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    }
}

#[test]
fn every_file_is_yaml_of_named_objects() {
    for file in files("deploy").into_iter().filter(|file| file.extension().is_some_and(|it| it == "yaml")) {
        let text = std::fs::read_to_string(&file).unwrap();
        let shown = file.display().to_string();
        // A rule file and lists of rules are parts of objects.
        if shown.contains("/rbac/") || shown.contains("/monitoring/") || shown.contains("/examples/quickstart/") {
            documents(&text);
            continue;
        }
        for document in documents(&text) {
            for field in ["/apiVersion", "/kind", "/metadata/name"] {
                assert!(document.pointer(field).is_some_and(Value::is_string), "{shown} lacks {field}");
            }
        }
    }
}

#[test]
fn argo_and_flux_give_values_that_the_chart_takes() {
    let argo = documents(&read("deploy/argocd/application.yaml")).remove(0);
    let flux = documents(&read("deploy/flux/helmrelease.yaml"));
    let flux = of_kind(&flux, "HelmRelease")[0];
    for values in [&argo["spec"]["source"]["helm"]["valuesObject"], &flux["spec"]["values"]] {
        assert!(values.is_object());
        let mut file = tempfile::NamedTempFile::new().unwrap();
        std::io::Write::write_all(&mut file, values.to_string().as_bytes()).unwrap();
        template(&chart(), &["--values", file.path().to_str().unwrap()]).unwrap();
    }
    for path in [&argo["spec"]["source"]["path"], &flux["spec"]["chart"]["spec"]["chart"]] {
        assert_eq!(*path, "charts/queuebox");
    }
}

#[test]
fn keda_asks_the_charts_service() {
    let scaled = documents(&read("deploy/keda/scaledobject.yaml")).remove(0);
    let url = scaled["spec"]["triggers"][0]["metadata"]["url"].as_str().unwrap().to_owned();
    let text = template(&chart(), &["--namespace", "queuebox"]).unwrap().replace("qb-queuebox", "queuebox");
    let service = of_kind(&documents(&text), "Service")[0].clone();
    let address = format!(
        "http://{}.{}.svc:{}/",
        service["metadata"]["name"].as_str().unwrap(),
        service["metadata"]["namespace"].as_str().unwrap(),
        service["spec"]["ports"][0]["port"]
    );
    assert!(url.starts_with(&address), "{url} is not at {address}");
    assert!(url.ends_with("/v1/namespaces/default/relays/shop/backlog"), "{url}");
    assert_eq!(scaled["spec"]["scaleTargetRef"]["kind"], "Relay");
}

/// Health by Argo CD's Lua of an object with this status: the word and the message.
fn health(metadata: Value, status: Value) -> (String, String) {
    fn lua(value: &Value) -> String {
        match value {
            Value::Object(fields) => {
                let fields: Vec<String> =
                    fields.iter().map(|(name, value)| format!("[{name:?}]={}", lua(value))).collect();
                format!("{{{}}}", fields.join(","))
            }
            Value::Array(items) => format!("{{{}}}", items.iter().map(lua).collect::<Vec<_>>().join(",")),
            Value::Null => "nil".to_owned(),
            other => other.to_string(),
        }
    }
    let object = json!({"metadata": metadata, "status": status});
    let check = testkit::workspace_root().join("deploy/argocd/health.lua");
    let script = format!(
        "obj={} local hs=dofile({:?}) print(hs.status .. \"|\" .. hs.message)",
        lua(&object),
        check.display().to_string()
    );
    let said = run(tool("glua").args(["-e", &script])).unwrap();
    let (word, message) = said.trim().split_once('|').unwrap();
    (word.to_owned(), message.to_owned())
}

#[test]
fn argo_health_of_every_state() {
    let condition =
        |kind: &str, status: &str| json!({"type": kind, "status": status, "message": format!("{kind} is {status}")});
    let now = json!({"generation": 3});
    for (metadata, status, expected) in [
        (now.clone(), json!({"observedGeneration": -1}), "Progressing"),
        (now.clone(), json!({"observedGeneration": 2, "conditions": [condition("Ready", "True")]}), "Progressing"),
        (now.clone(), json!({"observedGeneration": 3, "conditions": [condition("Ready", "True")]}), "Healthy"),
        (now.clone(), json!({"observedGeneration": 3, "conditions": [condition("Ready", "False")]}), "Progressing"),
        (now.clone(), json!({"observedGeneration": 3}), "Progressing"),
        (
            now.clone(),
            json!({"observedGeneration": 3, "conditions": [condition("Ready", "True"), condition("Stalled", "True")]}),
            "Degraded",
        ),
        (
            now.clone(),
            json!({"observedGeneration": 3, "conditions": [condition("Paused", "True"), condition("Ready", "True")]}),
            "Suspended",
        ),
        (
            now.clone(),
            json!({"observedGeneration": 3, "conditions": [condition("Paused", "False"), condition("Ready", "True")]}),
            "Healthy",
        ),
        (json!({"generation": 3, "annotations": {"queuebox.io/reconcile": "false"}}), json!({}), "Suspended"),
    ] {
        let (word, message) = health(metadata, status.clone());
        assert_eq!(word, expected, "{status:#}");
        assert!(!message.is_empty());
    }
}

#[test]
fn the_plugin_is_a_posix_script() {
    let script = testkit::workspace_root().join("deploy/kubectl/kubectl-queuebox");
    run(Command::new("sh").arg("-n").arg(&script)).unwrap();
    let help = run(Command::new(&script).arg("help")).unwrap();
    for command in ["status", "explain", "dead", "replay", "pause", "resume", "tail", "logs"] {
        assert!(help.contains(&format!("\n  {command} RELAY")), "{command} is missing in\n{help}");
    }
    assert_eq!(Command::new(&script).arg("bogus").output().unwrap().status.code(), Some(2));
}

#[test]
fn the_dockerfile_and_the_chart_agree() {
    let dockerfile = read("Dockerfile");
    assert!(dockerfile.contains("USER 65532:65532") && dockerfile.contains("ENTRYPOINT [\"/usr/local/bin/queuebox\"]"));
    let deployment = of_kind(&objects(&[]), "Deployment")[0].clone();
    assert_eq!(deployment["spec"]["template"]["spec"]["securityContext"]["runAsUser"], 65532);
}

/// A file that the sources include and that `.dockerignore` leaves out breaks the image, and nothing else.
#[test]
fn the_dockerfile_sees_what_the_sources_include() {
    let root = testkit::workspace_root();
    let given: Vec<PathBuf> =
        read(".dockerignore").lines().filter_map(|line| line.strip_prefix('!')).map(|path| root.join(path)).collect();
    let mut seen = 0;
    for file in files("crates").into_iter().filter(|file| file.extension().is_some_and(|it| it == "rs")) {
        let text = std::fs::read_to_string(&file).unwrap();
        for call in text.split("include_str!(\"").skip(1).chain(text.split("include_bytes!(\"").skip(1)) {
            let path = file.parent().unwrap().join(call.split('"').next().unwrap());
            let Ok(path) = path.canonicalize() else { panic!("{} includes {}", file.display(), path.display()) };
            assert!(given.iter().any(|given| path.starts_with(given)), ".dockerignore leaves out {}", path.display());
            seen += 1;
        }
    }
    assert!(seen > 0);
}

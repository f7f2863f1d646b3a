//! Files, folders, documents, and the secrets beside them.

use std::fs;

use queuebox_api::{Kind, Reference, SecretResolver as _, Target, check, load};

#[test]
fn files_and_folders_are_read_in_order() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    fs::create_dir(at("sub")).unwrap();
    fs::create_dir(at("..data")).unwrap();
    fs::write(at("..data/x.yaml"), "kind: Broken").unwrap();
    fs::write(at("README.md"), "not a manifest").unwrap();
    fs::write(
        at("a.yaml"),
        "apiVersion: queuebox.io/v1alpha1\nkind: Relay\nmetadata: {name: shop}\n---\napiVersion: v1\nkind: Secret\nmetadata: {name: s}\n\
         data: {a: Y2FuYXJ5Cg==}\nstringData: {b: plain}\n---\napiVersion: v1\nkind: ConfigMap\nmetadata: {name: c}\ndata: {ca.crt: PEM}\n",
    )
    .unwrap();
    fs::write(
        at("sub/b.json"),
        r#"{"apiVersion": "v1", "kind": "List", "items": [{"apiVersion": "queuebox.io/v1alpha1", "kind": "Destination",
            "metadata": {"name": "out", "uid": "u-1"}, "spec": {"http": {"url": "https://out.example"}}, "status": {}}]}"#,
    )
    .unwrap();
    let manifests = load([folder.path()]);
    assert_eq!(manifests.problems, []);
    let names: Vec<(Kind, &str)> = manifests.objects.iter().map(|object| (object.kind, object.name.as_str())).collect();
    assert_eq!(names, [(Kind::Relay, "shop"), (Kind::Destination, "out")]);
    let secret = |key: &str| {
        let reference = Reference::SecretKey { name: "s".into(), key: key.into() };
        manifests.secrets.resolve(&reference).unwrap().expose().to_owned()
    };
    assert_eq!((secret("a"), secret("b")), ("canary".to_owned(), "plain".to_owned()));
    assert!(!format!("{manifests:?}").contains("canary"));
    assert!(check(&manifests, Target::Local).into_relay(None).is_ok());
}

#[test]
fn what_cannot_be_read_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("m.yaml");
    fs::write(
        &file,
        "a: [\n---\njust text\n---\nkind: Relay\nmetadata: {name: a}\n---\napiVersion: queuebox.io/v1\nkind: Relay\nmetadata: {name: b}\n---\n\
         apiVersion: queuebox.io/v1alpha1\nkind: Rely\n---\napiVersion: apps/v1\nkind: Deployment\nmetadata: {name: d}\n---\n\
         apiVersion: queuebox.io/v1alpha1\nkind: Relay\nmetadata: {name: A_b, lables: {}}\nspce: {}\n---\n\
         apiVersion: queuebox.io/v1alpha1\nkind: Relay\n---\nkind: Secret\napiVersion: v1\nmetadata: {name: s}\ndata: {a: canary-7731}\n",
    )
    .unwrap();
    let manifests = load([file.clone(), folder.path().join("nothing.yaml")]);
    let here = file.display().to_string();
    let text = |problems: &[queuebox_api::Problem]| {
        let all: Vec<String> = problems.iter().map(|problem| problem.to_string().replace(&here, "m.yaml")).collect();
        all.join("\n").replace(&folder.path().display().to_string(), "DIR")
    };
    insta::assert_snapshot!("unreadable", text(&manifests.problems));
    insta::assert_snapshot!("foreign", text(&manifests.warnings));
}

#[test]
fn an_empty_folder_is_a_mistake() {
    let folder = tempfile::tempdir().unwrap();
    let manifests = load([folder.path()]);
    assert_eq!(manifests.problems[0].message, "the folder holds no .yaml, .yml or .json file");
}

#[test]
fn one_name_twice_is_a_mistake() {
    let folder = tempfile::tempdir().unwrap();
    let relay = "apiVersion: queuebox.io/v1alpha1\nkind: Relay\nmetadata: {name: shop}\n";
    fs::write(folder.path().join("a.yaml"), relay).unwrap();
    fs::write(folder.path().join("b.yaml"), relay).unwrap();
    let manifests = load([folder.path()]);
    assert_eq!(manifests.problems.len(), 1);
    assert!(manifests.problems[0].message.starts_with("there is another one of this name in "));
}

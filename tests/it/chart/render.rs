//! What the chart renders, and which values it refuses.

use serde_json::Value;

use super::{chart, documents, objects, of_kind, read, run, template, tool};

/// Everything that can be switched on.
const EVERYTHING: &[&str] = &[
    "--set=metrics.serviceMonitor.enabled=true",
    "--set=metrics.relayPodMonitor.enabled=true",
    "--set=metrics.prometheusRule.enabled=true",
    "--set=metrics.dashboard.enabled=true",
    "--set=networkPolicy.enabled=true",
    "--set=podDisruptionBudget.enabled=true",
    "--set=replicas=2",
    "--set=worker.imagePullSecrets[0].name=pull",
    r#"--set-json=extraObjects=[{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "{{ .Release.Name }}-extra"}}]"#,
];

#[test]
fn lint_is_strict() {
    run(tool("helm").args(["lint", "--strict"]).arg(chart())).unwrap();
    run(tool("helm").args(["lint", "--strict"]).arg(chart()).args(EVERYTHING)).unwrap();
}

#[test]
fn two_renderings_are_equal() {
    assert_eq!(template(&chart(), EVERYTHING).unwrap(), template(&chart(), EVERYTHING).unwrap());
}

#[test]
fn wrong_values_are_refused() {
    for (values, field) in [
        ("bogus=1", "bogus"),
        ("image.pullPolicy=Maybe", "pullPolicy"),
        ("image.digest=abc", "digest"),
        ("replicas=many", "replicas"),
        ("watch.namespaces=shop", "namespaces"),
        ("watch.namespaces={Shop}", "namespaces"),
        ("metrics.serviceMonitor.intervall=30s", "intervall"),
        ("log.format=xml", "format"),
        ("service.port=70000", "port"),
        ("leaderElection.enabled=false,replicas=2,strategy.type=Recreate", "replicas"),
        ("leaderElection.enabled=false", "strategy"),
    ] {
        let error = template(&chart(), &["--set", values]).expect_err(values);
        assert!(error.contains(field), "{values}: {error}");
    }
}

#[test]
fn the_schema_and_the_values_have_the_same_names() {
    fn walk(values: &Value, schema: &Value, path: &str) {
        let (Some(values), Some(properties)) = (values.as_object(), schema["properties"].as_object()) else { return };
        for name in properties.keys().filter(|name| !(path.is_empty() && *name == "enabled")) {
            assert!(values.contains_key(name), "values.schema.json knows {path}.{name}, values.yaml does not");
        }
        for (name, value) in values {
            let schema =
                &properties.get(name).unwrap_or_else(|| panic!("values.yaml has {path}.{name}, the schema does not"));
            walk(value, schema, &format!("{path}.{name}"));
        }
    }
    let schema = serde_json::from_str(&read("charts/queuebox/values.schema.json")).unwrap();
    walk(&documents(&read("charts/queuebox/values.yaml"))[0], &schema, "");
}

#[test]
fn works_as_a_subchart() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("charts")).unwrap();
    std::os::unix::fs::symlink(chart(), folder.path().join("charts/queuebox")).unwrap();
    let parent = "apiVersion: v2\nname: parent\nversion: 1.0.0\n\
                  dependencies: [{name: queuebox, version: '*', condition: queuebox.enabled}]\n";
    std::fs::write(folder.path().join("Chart.yaml"), parent).unwrap();
    let values = "global: {imageRegistry: mirror.example, imagePullSecrets: [{name: pull}], somethingOfOthers: 1}\n";
    std::fs::write(folder.path().join("values.yaml"), values).unwrap();
    let rendered = documents(&template(folder.path(), &[]).unwrap());
    let deployment = of_kind(&rendered, "Deployment")[0];
    let pod = &deployment["spec"]["template"]["spec"];
    assert!(
        pod["containers"][0]["image"].as_str().unwrap().starts_with("mirror.example/queuebox/queuebox:"),
        "{pod:#}"
    );
    assert_eq!(pod["imagePullSecrets"][0]["name"], "pull");
    let off = template(folder.path(), &["--set", "queuebox.enabled=false"]).unwrap();
    assert!(documents(&off).is_empty(), "{off}");
}

#[test]
fn crds_are_the_programs_and_stay() {
    let ours = documents(&read("crds/queuebox.yaml"));
    let rendered = objects(&[]);
    let rendered = of_kind(&rendered, "CustomResourceDefinition");
    assert_eq!(rendered.len(), 3);
    for crd in rendered {
        let name = &crd["metadata"]["name"];
        let own = ours.iter().find(|own| own["metadata"]["name"] == *name).unwrap();
        assert_eq!(crd["spec"], own["spec"], "{name}");
        assert_eq!(crd["metadata"]["annotations"]["helm.sh/resource-policy"], "keep");
    }
    assert!(of_kind(&objects(&["--set=crds.enabled=false"]), "CustomResourceDefinition").is_empty());
    let loose = objects(&["--set=crds.keep=false"]);
    assert!(of_kind(&loose, "CustomResourceDefinition").iter().all(|crd| crd["metadata"]["annotations"].is_null()));
}

#[test]
fn no_hooks_and_no_custom_resources() {
    for object in objects(EVERYTHING) {
        let hook = &object["metadata"]["annotations"]["helm.sh/hook"];
        assert!(hook.is_null() || hook == "test", "{object:#}");
        assert_ne!(
            object["apiVersion"], "queuebox.io/v1alpha1",
            "a chart with its CRDs as templates cannot install {object:#}"
        );
    }
}

#[test]
fn rights_hold_no_secrets_and_no_wildcards() {
    let rendered = objects(&[]);
    let roles = of_kind(&rendered, "ClusterRole").into_iter().chain(of_kind(&rendered, "Role"));
    let mut rules = 0;
    for rule in roles.flat_map(|role| role["rules"].as_array().unwrap()) {
        rules += 1;
        let text = rule.to_string();
        assert!(!text.contains('*') && !text.contains("secrets") && !text.contains("pods/exec"), "{text}");
    }
    assert!(rules > 5);
}

#[test]
fn a_namespaced_release_has_nothing_cluster_wide() {
    let arguments =
        ["--set=watch.namespaces={shop,billing}", "--set=crds.enabled=false", "--set=rbac.aggregateRoles=false"];
    let rendered = objects(&arguments);
    for object in &rendered {
        assert!(object["metadata"]["namespace"].is_string(), "{object:#}");
    }
    let mut places: Vec<&str> =
        of_kind(&rendered, "Role").iter().filter_map(|role| role["metadata"]["namespace"].as_str()).collect();
    places.sort_unstable();
    assert_eq!(places, ["billing", "queuebox", "shop"]);
    let deployment = of_kind(&rendered, "Deployment")[0].to_string();
    assert!(deployment.contains(r#"{"name":"QUEUEBOX_WATCH_NAMESPACES","value":"shop,billing"}"#), "{deployment}");
}

#[test]
fn every_argument_of_the_operator_exists() {
    let arguments = ["operator", "--help"];
    let help = run(std::process::Command::new(queuebox_testkit::queuebox_binary()).args(arguments)).unwrap();
    let deployment = of_kind(&objects(EVERYTHING), "Deployment")[0].clone();
    let container = &deployment["spec"]["template"]["spec"]["containers"][0];
    for argument in container["args"].as_array().unwrap().iter().skip(1) {
        let flag = argument.as_str().unwrap().split('=').next().unwrap();
        assert!(help.contains(flag), "{flag} is not in\n{help}");
    }
    for variable in container["env"].as_array().unwrap() {
        let name = variable["name"].as_str().unwrap();
        assert!(help.contains(name), "{name} is not in\n{help}");
    }
}

#[test]
fn pods_are_restricted() {
    let rendered = objects(EVERYTHING);
    let pods = of_kind(&rendered, "Deployment").into_iter().map(|deployment| &deployment["spec"]["template"]["spec"]);
    for pod in pods.chain(of_kind(&rendered, "Pod").into_iter().map(|pod| &pod["spec"])) {
        assert_eq!(pod["securityContext"]["runAsNonRoot"], true);
        assert_eq!(pod["securityContext"]["seccompProfile"]["type"], "RuntimeDefault");
        let container = &pod["containers"][0]["securityContext"];
        assert_eq!(container["readOnlyRootFilesystem"], true);
        assert_eq!(container["allowPrivilegeEscalation"], false);
        assert_eq!(container["capabilities"]["drop"][0], "ALL");
        assert_eq!(pod["enableServiceLinks"], false);
    }
}

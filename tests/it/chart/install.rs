//! Installation, upgrade and removal by Helm on a real control plane.

use queuebox_testkit::{self as testkit, Kubernetes};
use serde_json::{Value, json};

use super::{chart, documents, run, template, tool};

const CRDS: &str = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";

fn helm(server: &Kubernetes, arguments: &[&str]) -> Result<String, String> {
    run(tool("helm").env("KUBECONFIG", server.kubeconfig()).args(arguments))
}

fn kubectl(server: &Kubernetes, arguments: &[&str]) -> Result<String, String> {
    run(tool("kubectl").env("KUBECONFIG", server.kubeconfig()).args(arguments))
}

fn install(
    server: &Kubernetes,
    chart: &std::path::Path,
    release: &str,
    namespace: &str,
    more: &[&str],
) -> Result<String, String> {
    let chart = chart.to_string_lossy();
    let mut arguments = vec!["upgrade", "--install", release, &chart, "--namespace", namespace, "--create-namespace"];
    arguments.extend(more);
    helm(server, &arguments)
}

fn relay(name: &str, patch: Value) -> Value {
    let mut spec = json!({
        "database": {"postgres": {"host": "db", "database": "shop", "username": "relay"}},
        "routes": [{"topics": ["**"], "destinations": ["out"]}],
    });
    crate::support::merge(&mut spec, patch);
    json!({"apiVersion": "queuebox.io/v1alpha1", "kind": "Relay", "metadata": {"name": name}, "spec": spec})
}

/// What an apply that changes something moves: the version of each object, its generation where controllers write a status.
fn versions(server: &Kubernetes, file: &str) -> Vec<String> {
    let text = kubectl(server, &["get", "-f", file, "-o", "json"]).unwrap();
    let list: Value = serde_json::from_str(&text).unwrap();
    let version = |object: &Value| {
        let metadata = &object["metadata"];
        let field = if object.get("status").is_some() { "generation" } else { "resourceVersion" };
        format!("{} {}: {}", object["kind"], metadata["name"], metadata[field])
    };
    list["items"].as_array().unwrap().iter().map(version).collect()
}

async fn apply_relay(server: &Kubernetes, name: &str, patch: Value) -> Value {
    let path = format!("/apis/queuebox.io/v1alpha1/namespaces/default/relays/{name}");
    // The API server serves a new kind a moment after its definition is there.
    testkit::eventually_ok("the Relay is accepted", crate::support::PATIENCE, || {
        server.try_api("PATCH", &path, Some(relay(name, patch.clone())))
    })
    .await
}

#[tokio::test]
async fn install_twice_uninstall_and_again() {
    let server = testkit::private_kubernetes().await;
    install(&server, &chart(), "qb", "queuebox", &["--set=metrics.dashboard.enabled=true"]).unwrap();
    apply_relay(&server, "shop", json!({})).await;
    // What Argo CD does: the rendered chart, applied server-side, again and again.
    let rendered = template(&chart(), &["--set=metrics.dashboard.enabled=true"]).unwrap();
    let objects: Vec<Value> =
        documents(&rendered).into_iter().filter(|it| it["metadata"]["annotations"]["helm.sh/hook"].is_null()).collect();
    let file = tempfile::NamedTempFile::with_suffix(".json").unwrap();
    std::fs::write(file.path(), json!({"apiVersion": "v1", "kind": "List", "items": objects}).to_string()).unwrap();
    let path = file.path().to_str().unwrap();
    let apply = ["apply", "--server-side", "--force-conflicts", "--field-manager=argocd-controller", "-f", path];
    kubectl(&server, &apply).unwrap();
    let diff = kubectl(
        &server,
        &["diff", "--server-side", "--force-conflicts", "--field-manager=argocd-controller", "-f", path],
    );
    assert_eq!(diff.as_deref(), Ok(""), "a second apply differs");
    let before = versions(&server, path);
    kubectl(&server, &apply).unwrap();
    assert_eq!(versions(&server, path), before, "a second apply writes");

    install(&server, &chart(), "qb", "queuebox", &["--set=metrics.dashboard.enabled=true"]).unwrap();
    helm(&server, &["uninstall", "qb", "--namespace", "queuebox"]).unwrap();
    let deployments = server.api("GET", "/apis/apps/v1/namespaces/queuebox/deployments", None).await;
    assert_eq!(deployments["items"], json!([]));
    server.api("GET", "/apis/queuebox.io/v1alpha1/namespaces/default/relays/shop", None).await;
    server.api("GET", &format!("{CRDS}/relays.queuebox.io"), None).await;
    // The same release takes up what stayed.
    install(&server, &chart(), "qb", "queuebox", &[]).unwrap();
    server.api("GET", "/apis/queuebox.io/v1alpha1/namespaces/default/relays/shop", None).await;
}

mod d38_crd_upgrade {
    use super::*;

    /// The chart of a release before the newest field of Relay (`spec.drainTimeout`, for the sake of this test).
    fn older() -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        run(std::process::Command::new("cp").arg("-r").arg(chart()).arg(folder.path())).unwrap();
        let file = folder.path().join("queuebox/templates/crds/relays.yaml");
        let text = std::fs::read_to_string(&file).unwrap();
        let begin = text.find("              drainTimeout:\n").unwrap();
        let length = text[begin..]
            .lines()
            .skip(1)
            .take_while(|line| line.starts_with("                "))
            .map(|line| line.len() + 1)
            .sum::<usize>();
        let end = begin + "              drainTimeout:\n".len() + length;
        std::fs::write(&file, format!("{}{}", &text[..begin], &text[end..])).unwrap();
        folder
    }

    fn drain_timeout(relay: &Value) -> &Value {
        &relay["spec"]["drainTimeout"]
    }

    #[tokio::test]
    async fn a_new_field_is_kept_after_an_upgrade() {
        let server = testkit::private_kubernetes().await;
        let older = older();
        install(&server, &older.path().join("queuebox"), "qb", "queuebox", &[]).unwrap();
        apply_relay(&server, "old", json!({})).await;
        install(&server, &chart(), "qb", "queuebox", &[]).unwrap();
        // A client that prunes nothing in silence: a strict apply is refused as long as the field is unknown.
        let relay = apply_relay(&server, "new", json!({"drainTimeout": "45s"})).await;
        assert_eq!(*drain_timeout(&relay), "45s");
        // Downgrade: nothing is deleted.
        install(&server, &older.path().join("queuebox"), "qb", "queuebox", &[]).unwrap();
        for name in ["old", "new"] {
            server.api("GET", &format!("/apis/queuebox.io/v1alpha1/namespaces/default/relays/{name}"), None).await;
        }
    }

    #[tokio::test]
    async fn a_second_release_is_refused_or_takes_its_namespaces() {
        let server = testkit::private_kubernetes().await;
        install(&server, &chart(), "qb", "queuebox", &[]).unwrap();
        let error = install(&server, &chart(), "second", "other", &[]).unwrap_err();
        assert!(error.contains("ownership"), "{error}");
        // It may come to be without the CRDs and for namespaces of its own.
        let values = ["--set=crds.enabled=false", "--set=watch.namespaces={other}", "--set=rbac.aggregateRoles=false"];
        install(&server, &chart(), "second", "other", &values).unwrap();
        let cluster_wide =
            server.try_api("GET", "/apis/rbac.authorization.k8s.io/v1/clusterroles/second-queuebox", None).await;
        assert!(cluster_wide.is_err(), "{cluster_wide:?}");
        helm(&server, &["uninstall", "second", "--namespace", "other"]).unwrap();
        server.api("GET", &format!("{CRDS}/relays.queuebox.io"), None).await;
    }
}

#[tokio::test]
async fn files_of_deploy_are_accepted_by_the_api_server() {
    let server = testkit::private_kubernetes().await;
    install(&server, &chart(), "qb", "queuebox", &[]).unwrap();
    apply_relay(&server, "probe", json!({})).await;
    let mut files = vec!["deploy/autoscaling/hpa.yaml".to_owned(), "deploy/ingress/ingress.yaml".to_owned()];
    let examples = std::fs::read_dir(testkit::workspace_root().join("deploy/examples")).unwrap();
    for entry in examples {
        let name = entry.unwrap().file_name().into_string().unwrap();
        if name.starts_with("k8s-") {
            files.push(format!("deploy/examples/{name}"));
        }
    }
    for file in files {
        let path = testkit::workspace_root().join(&file);
        kubectl(
            &server,
            &["apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", path.to_str().unwrap()],
        )
        .unwrap_or_else(|error| panic!("{file}: {error}"));
    }
}

#[tokio::test]
async fn roles_are_aggregated() {
    let server = testkit::private_kubernetes().await;
    install(&server, &chart(), "qb", "queuebox", &[]).unwrap();
    for (role, verb, may) in
        [("view", "list", true), ("view", "create", false), ("edit", "create", true), ("admin", "delete", true)]
    {
        let binding = json!({
            "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding", "metadata": {"name": role},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
            "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": format!("{role}-user")}],
        });
        server
            .api(
                "PATCH",
                &format!("/apis/rbac.authorization.k8s.io/v1/namespaces/default/rolebindings/{role}"),
                Some(binding),
            )
            .await;
        let user = format!("--as={role}-user");
        let ask = || async {
            let answer = kubectl(&server, &["auth", "can-i", verb, "relays.queuebox.io", "-n", "default", &user]);
            (answer.is_ok() == may).then_some(())
        };
        testkit::eventually(&format!("{role} may {verb}: {may}"), crate::support::PATIENCE, ask).await;
    }
}

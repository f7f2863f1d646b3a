//! A Kubernetes control plane without nodes: etcd, API server and the controllers that tests of an operator need.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::Authority;
use crate::child::{Launch, Signal};
use crate::packages::{on_path, run, workspace_root};
use crate::shared::{Peer, Server, blocking, process_methods, process_wide};

/// What an operator's objects need: nothing runs, but owners, deployments and namespaces behave.
const CONTROLLERS: &str = "deployment-controller,replicaset-controller,garbage-collector-controller,\
    namespace-controller,serviceaccount-controller,serviceaccount-token-controller,disruption-controller,\
    endpointslice-controller,clusterrole-aggregation-controller";

/// A running control plane. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Kubernetes {
    server: Arc<Server<State>>,
    http: reqwest::Client,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct State {
    port: u16,
    /// The administrator's.
    token: String,
    folder: PathBuf,
}

impl Peer for State {
    const NAME: &'static str = "kubernetes";

    fn prepare(folder: &Path) -> Result<(Launch, Self)> {
        let bin = components()?;
        let etcd = on_path("etcd")?;
        let data = folder.join("data");
        std::fs::create_dir_all(&data)?;
        let state = State { port: crate::free_port(), token: crate::unique("admin"), folder: data.clone() };
        lay_down_credentials(&state)?;
        let (etcd_port, peer_port) = (crate::free_port(), crate::free_port());
        let before = side_processes(&bin, &etcd, &state, etcd_port, peer_port);
        let launch = Launch {
            program: bin.join("kube-apiserver"),
            args: api_server_arguments(&state, etcd_port),
            env: Vec::new(),
            unprivileged: false,
            before,
            stop: Signal::Term,
        };
        Ok((launch, state))
    }

    fn ready(&self) -> Result<()> {
        let url = format!("https://127.0.0.1:{}/readyz", self.port);
        let ca = self.file("ca.crt");
        let bearer = format!("authorization: Bearer {}", self.token);
        run("curl", &["-sf", "-m", "5", "--cacert", &ca, "-H", &bearer, &url]).map(drop)?;
        // Made by the controllers: without it nothing with a service account is admitted.
        let account = format!("https://127.0.0.1:{}/api/v1/namespaces/default/serviceaccounts/default", self.port);
        run("curl", &["-sf", "-m", "5", "--cacert", &ca, "-H", &bearer, &account]).map(drop)
    }
}

impl State {
    fn file(&self, name: &str) -> String {
        self.folder.join(name).to_string_lossy().into_owned()
    }
}

/// The folder of the components that `tests/cluster/cluster build` made.
fn components() -> Result<PathBuf> {
    let script = workspace_root().join("tests/cluster/cluster");
    let bin = PathBuf::from(run(&script.to_string_lossy(), &["bin"])?.trim());
    let say = "the Kubernetes components are not built: run `tests/cluster/cluster packages && \
        tests/cluster/cluster build` once (some minutes), or `./dev test operator`";
    ensure!(bin.join("complete").exists(), say);
    Ok(bin)
}

fn lay_down_credentials(state: &State) -> Result<()> {
    let authority = Authority::new();
    let server = authority.server();
    std::fs::copy(authority.ca_path(), state.file("ca.crt"))?;
    std::fs::copy(&server.cert, state.file("server.crt"))?;
    std::fs::copy(&server.key, state.file("server.key"))?;
    run("openssl", &["genrsa", "-out", &state.file("accounts.key"), "2048"])?;
    std::fs::write(state.file("tokens.csv"), format!("{},admin,admin,system:masters\n", state.token))?;
    std::fs::write(state.file("kubeconfig"), kubeconfig(state.port, &state.file("ca.crt"), &state.token))?;
    let policy = json!({
        "apiVersion": "audit.k8s.io/v1", "kind": "Policy", "omitStages": ["RequestReceived"],
        "rules": [
            {"level": "None", "users": ["admin", "system:apiserver"]},
            {"level": "Metadata"},
        ],
    });
    Ok(std::fs::write(state.file("audit-policy.yaml"), policy.to_string())?)
}

fn kubeconfig(port: u16, ca: &str, token: &str) -> String {
    json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "test",
        "clusters": [{"name": "test", "cluster": {
            "server": format!("https://127.0.0.1:{port}"), "certificate-authority": ca}}],
        "users": [{"name": "test", "user": {"token": token}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
    })
    .to_string()
}

/// Shell lines that start etcd and the controllers as children of the API server, with which they end.
fn side_processes(bin: &Path, etcd: &Path, state: &State, port: u16, peer_port: u16) -> String {
    let data = state.file("etcd");
    let (client, peer) = (format!("http://127.0.0.1:{port}"), format!("http://127.0.0.1:{peer_port}"));
    let (etcd, manager) = (etcd.display(), bin.join("kube-controller-manager"));
    let (manager, config) = (manager.display(), state.file("kubeconfig"));
    let (ca, key) = (state.file("ca.crt"), state.file("accounts.key"));
    format!(
        "setpriv --pdeathsig KILL -- '{etcd}' --data-dir '{data}' --log-level warn --unsafe-no-fsync \
         --listen-client-urls {client} --advertise-client-urls {client} --listen-peer-urls {peer} \
         --initial-advertise-peer-urls {peer} --initial-cluster default={peer} &\n\
         setpriv --pdeathsig KILL -- '{manager}' --kubeconfig '{config}' --controllers {CONTROLLERS} \
         --service-account-private-key-file '{key}' --root-ca-file '{ca}' --use-service-account-credentials \
         --leader-elect=false --secure-port 0 --bind-address 127.0.0.1 &\n"
    )
}

fn api_server_arguments(state: &State, etcd_port: u16) -> Vec<String> {
    let port = state.port.to_string();
    let etcd = format!("http://127.0.0.1:{etcd_port}");
    let files = [
        ("--tls-cert-file", "server.crt"),
        ("--tls-private-key-file", "server.key"),
        ("--token-auth-file", "tokens.csv"),
        ("--service-account-key-file", "accounts.key"),
        ("--service-account-signing-key-file", "accounts.key"),
        ("--audit-policy-file", "audit-policy.yaml"),
        ("--audit-log-path", "audit.log"),
        ("--cert-dir", "certificates"),
    ];
    let plain = [
        ("--etcd-servers", etcd.as_str()),
        ("--bind-address", "127.0.0.1"),
        // Nobody uses it: there are no nodes. A loopback address is refused here.
        ("--advertise-address", "192.0.2.1"),
        ("--endpoint-reconciler-type", "none"),
        ("--secure-port", &port),
        ("--service-cluster-ip-range", "10.96.0.0/16"),
        ("--authorization-mode", "RBAC"),
        ("--service-account-issuer", "https://kubernetes.default.svc"),
        ("--audit-log-format", "json"),
        ("--shutdown-delay-duration", "0s"),
    ];
    let files = files.iter().map(|(flag, name)| format!("{flag}={}", state.file(name)));
    files.chain(plain.iter().map(|(flag, value)| format!("{flag}={value}"))).collect()
}

/// The control plane that all tests share. Each test takes its own [`Kubernetes::fresh_namespace`].
pub async fn kubernetes() -> Kubernetes {
    try_kubernetes().await.unwrap_or_else(|error| panic!("{error:#}"))
}

/// [`kubernetes`] with an error instead of a panic.
pub async fn try_kubernetes() -> Result<Kubernetes> {
    crate::init();
    Kubernetes::new(Server::shared(process_wide!(State).await?))
}

/// A control plane of this test alone, for tests of cluster-wide objects; takes some ten seconds.
pub async fn private_kubernetes() -> Kubernetes {
    crate::init();
    let server = blocking(|| Server::private(|_, _, _| Ok(()))).await;
    server.and_then(Kubernetes::new).unwrap_or_else(|error| panic!("{error:#}"))
}

process_methods!(Kubernetes);

impl Kubernetes {
    fn new(server: Arc<Server<State>>) -> Result<Self> {
        let ca = std::fs::read(server.peer.file("ca.crt"))?;
        let ca = reqwest::Certificate::from_pem(&ca)?;
        let http = reqwest::Client::builder().tls_certs_only([ca]).build()?;
        Ok(Kubernetes { server, http })
    }

    /// The administrator's kubeconfig.
    pub fn kubeconfig(&self) -> PathBuf {
        self.server.peer.folder.join("kubeconfig")
    }

    /// `https://127.0.0.1:PORT`.
    pub fn url(&self) -> String {
        format!("https://127.0.0.1:{}", self.server.peer.port)
    }

    /// The administrator's token.
    pub fn token(&self) -> String {
        self.server.peer.token.clone()
    }

    /// The certificate of the authority that signed the server's.
    pub fn ca_path(&self) -> PathBuf {
        self.server.peer.folder.join("ca.crt")
    }

    /// Makes a namespace that no other test uses and returns its name.
    pub async fn fresh_namespace(&self) -> String {
        let name = crate::unique("qb-");
        self.api("POST", "/api/v1/namespaces", Some(json!({"metadata": {"name": name}}))).await;
        name
    }

    /// A kubeconfig for a service account, with which its rights can be tried. The account has to exist.
    pub async fn kubeconfig_for(&self, namespace: &str, account: &str) -> PathBuf {
        let path = format!("/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token");
        let answer = self.api("POST", &path, Some(json!({"spec": {"expirationSeconds": 7200}}))).await;
        let token = answer["status"]["token"].as_str().expect("a token").to_string();
        let file = self.server.peer.folder.join(crate::unique("kubeconfig-"));
        let text = kubeconfig(self.server.peer.port, &self.ca_path().to_string_lossy(), &token);
        std::fs::write(&file, text).expect("kubeconfig");
        file
    }

    /// The audit log so far: what everybody but the administrator asked for, one JSON object per request.
    pub fn audit_log(&self) -> Vec<Value> {
        let text = std::fs::read_to_string(self.server.peer.folder.join("audit.log")).unwrap_or_default();
        text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
    }

    /// Calls the API as the administrator and returns the answer; panics when it refuses.
    pub async fn api(&self, method: &str, path: &str, body: Option<Value>) -> Value {
        self.try_api(method, path, body).await.unwrap_or_else(|error| panic!("{error:#}"))
    }

    /// [`Kubernetes::api`] for calls that may fail. A PATCH is a server-side apply by the field manager `test`.
    pub async fn try_api(&self, method: &str, path: &str, body: Option<Value>) -> Result<Value> {
        let mut url = format!("{}{path}", self.url());
        let apply = method == "PATCH";
        if apply {
            url += "?fieldManager=test&force=true&fieldValidation=Strict";
        }
        let mut request = self.http.request(method.parse()?, &url).bearer_auth(&self.server.peer.token);
        if apply {
            request = request.header("content-type", "application/apply-patch+yaml");
        }
        if let Some(body) = body {
            request = request.json(&body);
        }
        let answer = request.send().await.context("API server")?;
        let status = answer.status();
        let text = answer.text().await?;
        if !status.is_success() {
            bail!("the API server answered {status} to {method} {path}: {text}");
        }
        // Secrets are the one thing that holds secrets: objects, their status and events must not.
        if method == "GET" && !path.contains("/secrets") {
            crate::keep("kubernetes", &[&text]);
        }
        Ok(serde_json::from_str(&text)?)
    }
}

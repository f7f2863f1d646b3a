//! RabbitMQ with its management plugin: a virtual host per test.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::child::{Launch, Signal};
use crate::packages::{on_path, rabbitmq_server};
use crate::shared::{Peer, Server, blocking, process_methods, process_wide};

/// A running RabbitMQ server. Cheap to clone.
#[derive(Debug, Clone)]
pub struct RabbitMq {
    server: Arc<Server<State>>,
    http: reqwest::Client,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct State {
    port: u16,
    management: u16,
}

impl Peer for State {
    const NAME: &'static str = "rabbitmq";

    fn prepare(folder: &Path) -> Result<(Launch, Self)> {
        let program = rabbitmq_server()?;
        let epmd = on_path("epmd")?;
        let state = State { port: crate::free_port(), management: crate::free_port() };
        let (epmd_port, dist_port) = (crate::free_port(), crate::free_port());
        let data = folder.join("data");
        std::fs::create_dir_all(data.join("home"))?;
        std::fs::write(folder.join("rabbitmq.conf"), config(&state))?;
        std::fs::write(data.join("enabled_plugins"), "[rabbitmq_management].\n")?;
        let at = |name: &str| folder.join(name).to_string_lossy().into_owned();
        let env = [
            ("HOME", at("data/home")),
            ("RABBITMQ_NODENAME", format!("qb{}@localhost", state.port)),
            ("RABBITMQ_NODE_IP_ADDRESS", "127.0.0.1".into()),
            ("RABBITMQ_NODE_PORT", state.port.to_string()),
            ("RABBITMQ_DIST_PORT", dist_port.to_string()),
            ("RABBITMQ_MNESIA_BASE", at("data/mnesia")),
            ("RABBITMQ_LOG_BASE", at("data/log")),
            ("RABBITMQ_LOGS", "-".into()),
            ("RABBITMQ_CONFIG_FILE", at("rabbitmq")),
            ("RABBITMQ_CONF_ENV_FILE", at("no-environment-file")),
            ("RABBITMQ_ENABLED_PLUGINS_FILE", at("data/enabled_plugins")),
            ("RABBITMQ_PID_FILE", at("data/pid")),
            // The script becomes the server instead of watching it, so that a signal reaches the server itself.
            ("RABBITMQ_ALLOW_INPUT", "1".into()),
            ("RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS", "-noinput -start_epmd false".into()),
            ("ERL_EPMD_PORT", epmd_port.to_string()),
            ("ERL_EPMD_ADDRESS", "127.0.0.1".into()),
        ];
        let launch = Launch {
            program,
            args: Vec::new(),
            env: env.map(|(name, value)| (name.to_string(), value)).to_vec(),
            unprivileged: false,
            // Erlang's own name server would stay behind as a daemon; this one ends with the server, its parent.
            before: format!("setpriv --pdeathsig KILL -- '{}' &\n", epmd.display()),
            stop: Signal::Term,
        };
        Ok((launch, state))
    }

    fn ready(&self) -> Result<()> {
        // "guest:guest"; the answer needs the broker as well as the plugin.
        let answer = crate::nats::http_get_with(
            self.management,
            "/api/health/checks/virtual-hosts",
            "authorization: Basic Z3Vlc3Q6Z3Vlc3Q=\r\n",
        )?;
        ensure!(answer.starts_with("HTTP/1.1 200"), "RabbitMQ is not healthy: {answer}");
        std::net::TcpStream::connect(("127.0.0.1", self.port)).context("AMQP port")?;
        Ok(())
    }
}

fn config(state: &State) -> String {
    format!(
        "management.tcp.ip = 127.0.0.1\nmanagement.tcp.port = {}\n\
         # Fresh figures for tests that read them.\ncollect_statistics_interval = 1000\n\
         vm_memory_high_watermark.absolute = 1GB\ndisk_free_limit.absolute = 50MB\n\
         log.console.level = info\n",
        state.management
    )
}

/// The RabbitMQ server that all tests share. Each test takes its own [`RabbitMq::fresh_vhost`].
pub async fn rabbitmq() -> RabbitMq {
    try_rabbitmq().await.unwrap_or_else(|error| panic!("{error:#}"))
}

/// [`rabbitmq`] with an error instead of a panic.
pub async fn try_rabbitmq() -> Result<RabbitMq> {
    crate::init();
    Ok(RabbitMq { server: Server::shared(process_wide!(State).await?), http: reqwest::Client::new() })
}

/// A RabbitMQ server of this test alone; takes some seconds.
pub async fn private_rabbitmq() -> RabbitMq {
    private_rabbitmq_with("").await
}

/// [`private_rabbitmq`] with more lines for `rabbitmq.conf`, for instance TLS listeners.
pub async fn private_rabbitmq_with(config: &str) -> RabbitMq {
    try_private_rabbitmq_with(config).await.unwrap_or_else(|error| panic!("{error:#}"))
}

/// [`private_rabbitmq_with`] with an error instead of a panic.
pub async fn try_private_rabbitmq_with(config: &str) -> Result<RabbitMq> {
    crate::init();
    let more = config.to_string();
    let server = blocking(move || {
        Server::private(|folder, _, _| {
            let file = folder.join("rabbitmq.conf");
            let text = std::fs::read_to_string(&file)? + &more;
            Ok(std::fs::write(&file, text)?)
        })
    });
    let server = server.await?;
    Ok(RabbitMq { server, http: reqwest::Client::new() })
}

process_methods!(RabbitMq);

impl RabbitMq {
    /// The AMQP port on 127.0.0.1.
    pub fn port(&self) -> u16 {
        self.server.peer.port
    }

    /// URL of the virtual host `/`, as `guest`.
    pub fn url(&self) -> String {
        self.url_of("/")
    }

    /// URL of a virtual host.
    pub fn url_of(&self, vhost: &str) -> String {
        self.url_through(self.port(), vhost)
    }

    /// URL of a virtual host behind another port of 127.0.0.1, for instance that of a [`crate::Proxy`].
    pub fn url_through(&self, port: u16, vhost: &str) -> String {
        format!("amqp://guest:guest@127.0.0.1:{port}/{}", vhost.replace('/', "%2f"))
    }

    /// Makes a virtual host that no other test uses and returns its URL.
    pub async fn fresh_vhost(&self) -> String {
        self.url_of(&self.fresh_vhost_name().await)
    }

    /// [`RabbitMq::fresh_vhost`], by name.
    pub async fn fresh_vhost_name(&self) -> String {
        let name = crate::unique("qb");
        self.api("PUT", &format!("/vhosts/{name}"), None).await;
        let all = json!({"configure": ".*", "write": ".*", "read": ".*"});
        self.api("PUT", &format!("/permissions/{name}/guest"), Some(all)).await;
        name
    }

    /// Calls the management API, for instance `api("GET", "/queues/VHOST/NAME", None)`; `/api` is put in front.
    /// Panics when it refuses; an empty answer is `null`.
    pub async fn api(&self, method: &str, path: &str, body: Option<Value>) -> Value {
        self.try_api(method, path, body).await.unwrap_or_else(|error| panic!("{error:#}"))
    }

    /// [`RabbitMq::api`] for calls that may fail.
    pub async fn try_api(&self, method: &str, path: &str, body: Option<Value>) -> Result<Value> {
        let url = format!("http://127.0.0.1:{}/api{path}", self.server.peer.management);
        let mut request = self.http.request(method.parse()?, &url).basic_auth("guest", Some("guest"));
        if let Some(body) = body {
            request = request.json(&body);
        }
        let answer = request.send().await?;
        let status = answer.status();
        let text = answer.text().await?;
        if !status.is_success() {
            bail!("RabbitMQ answered {status} to {method} {path}: {text}");
        }
        Ok(if text.is_empty() { Value::Null } else { serde_json::from_str(&text)? })
    }
}

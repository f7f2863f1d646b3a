//! `queuebox demo`: the main job in one minute, on SQLite, with nothing else to install.
//!
//! It starts a small receiver and `queuebox run` with the quickstart manifests as a process of its own, commits orders with their outbox
//! rows, kills that process in the middle, posts a webhook twice and a few as GitHub sends them, and says what arrived and what was
//! recognised as a repeat.

use std::{
    collections::BTreeMap,
    net::TcpListener as StdListener,
    path::{Path, PathBuf},
    process::Stdio,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use anyhow::{Context, bail};
use axum::{
    Router,
    extract::State,
    http::{HeaderMap, StatusCode},
    routing::post,
};
use clap::Args;
use hmac::{Hmac, KeyInit as _, Mac as _};
use queuebox_lab::Database;
use tokio::{
    process::{Child, Command},
    time::Instant,
};

/// `queuebox demo`.
#[derive(Debug, Args)]
pub struct Options {
    /// Keep everything running until Ctrl-C, to try more.
    #[arg(long)]
    stay: bool,

    /// Keep the database, the manifests and the log in this folder.
    #[arg(long, value_name = "DIR")]
    folder: Option<PathBuf>,
}

const RELAY: &str = include_str!("../../../deploy/examples/quickstart/relay.yaml");
const WAREHOUSE: &str = include_str!("../../../deploy/examples/quickstart/warehouse.yaml");
const PAYMENTS: &str = include_str!("../../../deploy/examples/quickstart/payments.yaml");

/// Runs the demonstration; ends by itself.
///
/// # Errors
/// Something did not arrive.
pub async fn run(options: &Options) -> anyhow::Result<()> {
    let temporary = tempfile::TempDir::new().context("cannot make a temporary folder")?;
    let folder = options.folder.clone().unwrap_or_else(|| temporary.path().to_owned());
    let receiver = Receiver::start().await?;
    let ports = (free_port()?, free_port()?);
    write_manifests(&folder, receiver.port, ports)?;

    say("1  QueueBox starts: three manifests, SQLite, nothing else.");
    let mut queuebox = start(&folder, ports.1).await?;
    let database = Database::open(&format!("sqlite:{}", folder.join("queuebox.db").display())).await?;

    say("2  Five orders are committed, each with its message in the same transaction. One more is rolled back.");
    for (number, customer) in [(1, "ada"), (2, "ben"), (3, "ada"), (4, "ada"), (5, "ben")] {
        database.execute(INSERT, &[customer, &format!(r#"{{"order":{number},"customer":"{customer}"}}"#)]).await?;
    }
    database.roll_back(INSERT, &["eve", r#"{"order":0,"customer":"eve"}"#]).await?;
    receiver.wait_for(5).await?;

    say(
        "3  The receiver answers 500 once: the message is tried again, and the next one of that customer waits for it.",
    );
    receiver.fail_next();
    for number in [6, 7] {
        database.execute(INSERT, &["ada", &format!(r#"{{"order":{number},"customer":"ada"}}"#)]).await?;
    }
    receiver.wait_for(7).await?;

    say("4  QueueBox is killed (kill -9). Orders go on being committed. It starts again: nothing is lost.");
    queuebox.kill().await.context("cannot end QueueBox")?;
    for number in [8, 9] {
        database.execute(INSERT, &["ben", &format!(r#"{{"order":{number},"customer":"ben"}}"#)]).await?;
    }
    let mut queuebox = start(&folder, ports.1).await?;
    receiver.wait_for(9).await?;

    say("5  A webhook comes in twice, as webhooks do. It is stored once, forwarded once.");
    let url = format!("http://127.0.0.1:{}/inbox/payments", ports.0);
    for _ in 0..2 {
        let (status, body) = post_webhook(&url).await?;
        outln!("     POST {url}  ->  {status} {body}");
    }
    receiver.wait_for(10).await?;

    say(
        "6  GitHub's webhooks: the signature is checked, the repository is the key. One is delivered twice, one is forged.",
    );
    github(ports.0).await?;
    receiver.wait_for(MESSAGES).await?;

    receiver.verdict()?;
    outln!();
    if options.stay {
        stay(&folder, &url, ports.1).await?;
    } else {
        outln!(
            "Look further: docs/tutorials/first-steps.md; `queuebox run -f deploy/examples/quickstart` is the same in earnest."
        );
    }
    database.close().await;
    queuebox.kill().await.context("cannot end QueueBox")?;
    Ok(())
}

/// What arrives in the end: nine orders, a payment, three deliveries of GitHub.
const MESSAGES: usize = 13;

const GITHUB: &str = "\
apiVersion: queuebox.io/v1alpha1
kind: Source
metadata: {name: github}
spec:
  relayRef: {name: shop}
  topic: github.{{ eventType }}
  aggregateIdPath: $.repository.full_name
  http:
    path: /github
    idempotencyKeyHeader: X-GitHub-Delivery
    eventTypeHeader: X-GitHub-Event
    auth: {github: {secretFrom: {env: GITHUB_WEBHOOK_SECRET}}}
";

/// Shared with nobody: the demonstration signs and checks with it.
const GITHUB_SECRET: &str = "It's a Secret to Everybody";

/// Deliveries in the form of GitHub: id, event, body.
const DELIVERIES: [(&str, &str, &str); 3] = [
    (
        "72d3162e-cc78-11e3-81ab-4c9367dc0958",
        "issues",
        r#"{"action":"opened","issue":{"id":444500041,"number":1,"title":"Late webhooks"},"repository":{"full_name":"ada/shop"}}"#,
    ),
    (
        "7fc4d8b0-cc78-11e3-9c5b-1c8f6f7d2a10",
        "push",
        r#"{"ref":"refs/heads/main","after":"6113728f27ae82c7b1a177c8d03f9e96e0adf246","repository":{"full_name":"ada/shop"}}"#,
    ),
    (
        "8ab1c0de-cc78-11e3-8f0d-9e2c55aa7711",
        "issues",
        r#"{"action":"closed","issue":{"id":444500041,"number":1,"title":"Late webhooks"},"repository":{"full_name":"ada/shop"}}"#,
    ),
];

/// Posts the deliveries, the first one twice, and one whose body was changed after it was signed.
async fn github(port: u16) -> anyhow::Result<()> {
    let url = format!("http://127.0.0.1:{port}/inbox/github");
    let [first, second, third] = DELIVERIES;
    for (delivery, event, body) in [first, first, second, third] {
        let (status, answer) = deliver(&url, delivery, event, body, &signature(body)?).await?;
        outln!("     POST {url}  {event}  ->  {status} {answer}");
    }
    let (delivery, event, body) = second;
    let forged = body.replace("main", "evil");
    let (status, answer) = deliver(&url, delivery, event, &forged, &signature(body)?).await?;
    outln!("     POST {url}  {event}, forged  ->  {status} {answer}");
    Ok(())
}

async fn deliver(url: &str, id: &str, event: &str, body: &str, signature: &str) -> anyhow::Result<(u16, String)> {
    let request = reqwest::Client::new()
        .post(url)
        .header("Content-Type", "application/json")
        .header("X-GitHub-Delivery", id)
        .header("X-GitHub-Event", event)
        .header("X-Hub-Signature-256", signature)
        .body(body.to_owned());
    let answer = request.send().await.context("the inbox did not answer")?;
    Ok((answer.status().as_u16(), answer.text().await?))
}

/// `X-Hub-Signature-256` of a body.
fn signature(body: &str) -> anyhow::Result<String> {
    let mut mac = Hmac::<sha2::Sha256>::new_from_slice(GITHUB_SECRET.as_bytes()).context("the secret is no key")?;
    mac.update(body.as_bytes());
    let hex: String = mac.finalize().into_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
    Ok(format!("sha256={hex}"))
}

const INSERT: &str = "INSERT INTO outbox (topic, key, payload) VALUES ('order.created', $1, $2)";

fn say(text: &str) {
    outln!("\n{text}");
}

fn free_port() -> anyhow::Result<u16> {
    Ok(StdListener::bind(("127.0.0.1", 0))?.local_addr()?.port())
}

/// The quickstart manifests, with the ports of this run, a database of its own, and a short lease so that the kill is over soon.
fn write_manifests(folder: &Path, receiver: u16, ports: (u16, u16)) -> anyhow::Result<()> {
    let manifests = folder.join("manifests");
    std::fs::create_dir_all(&manifests).with_context(|| format!("cannot make {}", manifests.display()))?;
    let database = folder.join("queuebox.db");
    let own = format!(
        "spec:\n  database:\n    sqlite:\n      path: {}\n  http:\n    port: {}\n    managementPort: {}\n  outbox:\n    claimTimeout: 3s\n",
        database.display(),
        ports.0,
        ports.1
    );
    let relay = RELAY.replacen("spec:\n", &own, 1).replacen("[\"order.**\"]", "[\"order.**\", \"github.**\"]", 1);
    std::fs::write(manifests.join("relay.yaml"), relay)?;
    std::fs::write(manifests.join("github.yaml"), GITHUB)?;
    std::fs::write(
        manifests.join("warehouse.yaml"),
        WAREHOUSE.replace("127.0.0.1:8099", &format!("127.0.0.1:{receiver}")),
    )?;
    std::fs::write(manifests.join("payments.yaml"), PAYMENTS)?;
    Ok(())
}

async fn start(folder: &Path, management: u16) -> anyhow::Result<Child> {
    let log = std::fs::File::options().create(true).append(true).open(folder.join("queuebox.log"))?;
    let program = std::env::current_exe().context("cannot find the own program")?;
    let child = Command::new(program)
        .args(["run", "-f"])
        .arg(folder.join("manifests"))
        .env("GITHUB_WEBHOOK_SECRET", GITHUB_SECRET)
        .stdout(Stdio::null())
        .stderr(log)
        .kill_on_drop(true)
        .spawn()
        .context("cannot start queuebox run")?;
    let url = format!("http://127.0.0.1:{management}/readyz");
    let deadline = Instant::now() + Duration::from_secs(30);
    while Instant::now() < deadline {
        if reqwest::get(&url).await.is_ok_and(|answer| answer.status().is_success()) {
            return Ok(child);
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let log = std::fs::read_to_string(folder.join("queuebox.log")).unwrap_or_default();
    bail!("queuebox run was not ready within 30 s:\n{log}")
}

async fn post_webhook(url: &str) -> anyhow::Result<(u16, String)> {
    let body = r#"{"id":"evt_42","order":"order-9","paid":12.50}"#;
    let answer = reqwest::Client::new().post(url).body(body).send().await.context("the inbox did not answer")?;
    Ok((answer.status().as_u16(), answer.text().await?))
}

async fn stay(folder: &Path, url: &str, management: u16) -> anyhow::Result<()> {
    outln!("Still running. Try:");
    outln!("  curl -X POST {url} -d '{{\"id\":\"evt_43\",\"order\":\"order-9\"}}'");
    outln!("  sqlite3 {}/queuebox.db \"SELECT topic, key, state, attempt FROM outbox\"", folder.display());
    outln!("  curl http://127.0.0.1:{management}/status");
    outln!("Stop with Ctrl-C.");
    tokio::signal::ctrl_c().await.context("cannot wait for Ctrl-C")
}

#[derive(Debug, Clone)]
struct Arrival {
    id: String,
    topic: String,
    key: String,
    attempt: String,
    body: String,
    status: u16,
    idempotency_key: Option<String>,
}

#[derive(Default)]
struct Seen {
    arrivals: Vec<Arrival>,
    fail_next: bool,
}

/// A small receiver that remembers what it got.
struct Receiver {
    port: u16,
    seen: Arc<Mutex<Seen>>,
    shown: AtomicUsize,
}

impl Receiver {
    async fn start() -> anyhow::Result<Self> {
        let listener = tokio::net::TcpListener::bind(("127.0.0.1", 0)).await?;
        let port = listener.local_addr()?.port();
        let seen: Arc<Mutex<Seen>> = Arc::default();
        let router = Router::new().route("/events", post(receive)).with_state(seen.clone());
        tokio::spawn(async move { axum::serve(listener, router).await });
        Ok(Self { port, seen, shown: AtomicUsize::new(0) })
    }

    fn fail_next(&self) {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).fail_next = true;
    }

    fn arrivals(&self) -> Vec<Arrival> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).arrivals.clone()
    }

    /// Waits until so many different messages were taken, and prints the requests that came meanwhile.
    async fn wait_for(&self, messages: usize) -> anyhow::Result<()> {
        let deadline = Instant::now() + Duration::from_secs(30);
        while taken(&self.arrivals()).len() < messages {
            if Instant::now() > deadline {
                bail!("only {} of {messages} messages arrived within 30 s", taken(&self.arrivals()).len());
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let arrivals = self.arrivals();
        let shown = self.shown.swap(arrivals.len(), Ordering::SeqCst);
        for arrival in arrivals.iter().skip(shown) {
            outln!(
                "     {} {:14} key {:8} attempt {}  {}  answered {}",
                &arrival.id[..8],
                arrival.topic,
                arrival.key,
                arrival.attempt,
                arrival.body,
                arrival.status
            );
        }
        Ok(())
    }

    /// Everything once, in order per key, repeats recognised.
    fn verdict(&self) -> anyhow::Result<()> {
        let arrivals = self.arrivals();
        let accepted = taken(&arrivals);
        let repeats: u32 = accepted.values().map(|times| times - 1).sum();
        outln!();
        outln!(
            "{} messages were committed, {} arrived, {} repeat(s) recognised by identity; {} request(s) in all.",
            accepted.len(),
            accepted.len(),
            repeats,
            arrivals.len()
        );
        if accepted.len() != MESSAGES {
            bail!("{MESSAGES} messages should have arrived");
        }
        Ok(())
    }
}

/// How often each message was taken, by the identity that a receiver deduplicates on (contract 8).
fn taken(arrivals: &[Arrival]) -> BTreeMap<String, u32> {
    let mut taken = BTreeMap::new();
    for arrival in arrivals.iter().filter(|arrival| arrival.status == 200) {
        let identity = arrival.idempotency_key.clone().unwrap_or_else(|| arrival.id.clone());
        *taken.entry(identity).or_default() += 1;
    }
    taken
}

async fn receive(State(seen): State<Arc<Mutex<Seen>>>, headers: HeaderMap, body: String) -> StatusCode {
    let header = |name: &str| headers.get(name).and_then(|value| value.to_str().ok()).map(str::to_owned);
    let mut seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
    let status = if std::mem::take(&mut seen.fail_next) { StatusCode::INTERNAL_SERVER_ERROR } else { StatusCode::OK };
    seen.arrivals.push(Arrival {
        id: header("x-message-id").unwrap_or_default(),
        topic: header("x-topic").unwrap_or_default(),
        key: header("x-message-key").unwrap_or_default(),
        attempt: header("x-attempt").unwrap_or_default(),
        body,
        status: status.as_u16(),
        idempotency_key: header("x-idempotency-key"),
    });
    status
}

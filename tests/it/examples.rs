//! The very files of `deploy/examples/`, run between real peers. Only addresses and ports are put in the place of the documented ones,
//! in a copy.

use std::path::Path;

use hmac::{KeyInit, Mac};
use queuebox_testkit::{self as testkit, Process, Recorder, unique};
use serde_json::json;

use crate::{
    brokers::{Broker, BrokerKind, Message},
    support::PATIENCE,
};

/// A copy of an example with other addresses; each of them occurs.
fn copy(example: &str, addresses: &[(&str, &str)], management: u16, http: u16) -> tempfile::TempDir {
    let from = testkit::workspace_root().join("deploy/examples").join(example);
    let to = tempfile::tempdir().unwrap();
    std::fs::create_dir(to.path().join("manifests")).unwrap();
    let mut left: Vec<&str> = addresses.iter().map(|(documented, _)| *documented).collect();
    for entry in std::fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let mut text = std::fs::read_to_string(&path).unwrap();
        for (documented, real) in addresses {
            if path.extension().is_some_and(|extension| extension == "yaml") && text.contains(documented) {
                left.retain(|one| one != documented);
                text = text.replace(documented, real);
            }
        }
        if path.ends_with("relay.yaml") {
            text += &format!("  http: {{port: {http}, managementPort: {management}}}\n");
        }
        std::fs::write(to.path().join("manifests").join(path.file_name().unwrap()), text).unwrap();
    }
    assert!(left.is_empty(), "the example does not name {left:?}");
    to
}

/// Runs the copy until it is ready.
async fn run(folder: &Path, management: u16) -> Process {
    let process = Process::queuebox(["run", "-f", "manifests"]).dir(folder).spawn();
    process.wait_ready(&format!("http://127.0.0.1:{management}/readyz"), PATIENCE).await;
    process
}

async fn ends_well(process: Process) {
    let status = process.terminate(PATIENCE).await;
    assert!(status.success(), "{status}: {}", process.output());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rabbitmq_to_kafka() {
    let (rabbitmq, kafka) = (Broker::shared(BrokerKind::RabbitMq).await, Broker::shared(BrokerKind::Kafka).await);
    let (queue, topic) = (rabbitmq.line_named("orders").await, kafka.line_named("orders").await);
    let addresses = [("amqp://localhost:5672", rabbitmq.address.as_str()), ("localhost:9092", &kafka.address)];
    let management = testkit::free_port();
    let folder = copy("rabbitmq-to-kafka", &addresses, management, testkit::free_port());
    let process = run(folder.path(), management).await;
    // The topic is shared with other runs.
    let id = unique("o");
    let order = Message::new(json!({ "id": id, "customer": "c-7" }).to_string());
    queue.publish(&[order.clone(), order]).await;
    let ours = |message: &crate::brokers::Arrived| message.json()["id"] == id.as_str();
    let arrived = topic.wait_arrived("the order", |arrived| arrived.iter().any(ours)).await;
    queue.all_acknowledged().await;
    ends_well(process).await;
    assert_eq!(topic.arrived().await.iter().filter(|message| ours(message)).count(), 1);
    let order = arrived.iter().find(|message| ours(message)).unwrap();
    assert_eq!(order.key.as_deref(), Some("c-7"));
    assert_eq!((order.header("x-idempotency-key"), order.header("x-source")), (id.as_str(), "orders-queue"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kafka_to_webhook() {
    let kafka = Broker::shared(BrokerKind::Kafka).await;
    let (topic, receiver) = (kafka.line_named("payments").await, Recorder::start().await);
    let url = receiver.url();
    let addresses = [("localhost:9092", kafka.address.as_str()), ("http://localhost:8099", &url)];
    let management = testkit::free_port();
    let folder = copy("kafka-to-webhook", &addresses, management, testkit::free_port());
    let process = run(folder.path(), management).await;
    let id = unique("p");
    let payment = json!({ "id": id, "account": "a-3", "type": "settled" }).to_string();
    topic.publish(&[Message::new(payment.clone())]).await;
    let ours = |request: &testkit::Recorded| request.header("x-idempotency-key") == id;
    let requests = receiver.wait_until("the payment", PATIENCE, |requests| requests.iter().any(ours)).await;
    ends_well(process).await;
    let request = requests.iter().find(|request| ours(request)).unwrap();
    assert_eq!((request.path(), request.header("x-topic")), ("/webhooks/payments", "payment.settled"));
    assert_eq!(request.json()["account"], "a-3");
    // What the receiver would check.
    use base64::{Engine, engine::general_purpose::STANDARD};
    let key = STANDARD.decode("MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY=").unwrap();
    let mut mac = hmac::Hmac::<sha2::Sha256>::new_from_slice(&key).unwrap();
    let (webhook, at) = (request.header("webhook-id"), request.header("webhook-timestamp"));
    mac.update(format!("{webhook}.{at}.{}", request.text()).as_bytes());
    let signature = format!("v1,{}", STANDARD.encode(mac.finalize().into_bytes()));
    assert_eq!(request.header("webhook-signature"), signature);
    assert_eq!(webhook, request.header("x-message-id"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn webhook_to_nats() {
    let nats = Broker::private(BrokerKind::Nats).await;
    let stream = nats.line_named("events").await;
    let (management, http) = (testkit::free_port(), testkit::free_port());
    let folder = copy("webhook-to-nats", &[("nats://localhost:4222", &nats.address)], management, http);
    let process = run(folder.path(), management).await;
    let body = r#"{"ref":"main","repository":{"full_name":"queuebox/queuebox"}}"#;
    let mut mac = hmac::Hmac::<sha2::Sha256>::new_from_slice(b"It's a Secret to Everybody").unwrap();
    mac.update(body.as_bytes());
    let hex: String = mac.finalize().into_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
    let deliver = async |signature: String| {
        let request = reqwest::Client::new()
            .post(format!("http://127.0.0.1:{http}/inbox/github"))
            .header("x-github-delivery", "d-42")
            .header("x-github-event", "push")
            .header("x-hub-signature-256", format!("sha256={signature}"));
        request.body(body).send().await.unwrap().status().as_u16()
    };
    assert_eq!(deliver("0".repeat(64)).await, 401);
    assert_eq!(deliver(hex.clone()).await, 202);
    assert_eq!(deliver(hex).await, 200);
    let arrived = stream.wait_arrived("the push", |arrived| !arrived.is_empty()).await;
    ends_well(process).await;
    assert_eq!(stream.arrived().await.len(), 1);
    assert_eq!(arrived[0].key.as_deref(), Some("events.github.push"));
    let headers = [("x-source", "github"), ("x-idempotency-key", "d-42"), ("x-message-key", "queuebox/queuebox")];
    for (name, value) in headers {
        assert_eq!(arrived[0].header(name), value, "{name}");
    }
}

/// Every example is checked as it stands, with the names and addresses of its README.
#[tokio::test]
async fn every_example_is_accepted() {
    let examples = testkit::workspace_root().join("deploy/examples");
    for entry in std::fs::read_dir(examples).unwrap() {
        let path = entry.unwrap().path();
        let (status, out, log) = Process::queuebox(["check", "-f", path.to_str().unwrap()]).run(PATIENCE).await;
        assert!(status.success(), "{}: {out}{log}", path.display());
    }
}

//! A stream per test on a real server, a way past the trouble and a way through a proxy.

use std::{collections::HashMap, time::Duration};

use async_nats::{
    Client, HeaderMap,
    jetstream::{self, Context, stream},
};
use queuebox_conformance::destination::{Arrived, delivery};
use queuebox_core::{
    Uuid,
    ports::Delivery,
    template::{Address, Template, Vocabulary},
};
use queuebox_nats::{ConnectionConfig, DestinationConfig, Login, SourceConfig, TlsConfig};
use queuebox_testkit::{Nats, nats};

/// `RUST_LOG=queuebox_nats=debug,async_nats=debug` shows what happened in a test that fails.
pub async fn server() -> Nats {
    let _ = tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
        .with_test_writer()
        .try_init();
    nats().await
}

/// A connection without a login.
pub fn connection(port: u16) -> ConnectionConfig {
    ConnectionConfig {
        servers: format!("nats://127.0.0.1:{port}"),
        login: Login::None,
        tls: TlsConfig::default(),
        name: "queuebox test".to_owned(),
    }
}

/// A JetStream destination with a subject template.
pub fn destination(port: u16, subject: &str) -> DestinationConfig {
    DestinationConfig {
        connection: connection(port),
        subject: Address::Template(Template::parse(subject, Vocabulary::Address).unwrap()),
        jetstream: true,
        timeout: Duration::from_secs(10),
        headers: Vec::new(),
    }
}

/// A source from a stream, with durable `d`.
pub fn source(port: u16, stream: &str) -> SourceConfig {
    SourceConfig {
        connection: connection(port),
        stream: stream.to_owned(),
        durable: "d".to_owned(),
        filter_subject: None,
        ack_wait: Duration::from_secs(30),
        batch_size: 100,
    }
}

/// A row with a new id and topic `order.created`.
pub fn row(n: usize) -> Delivery {
    delivery(n)
}

/// A client past the trouble.
pub struct Direct {
    pub client: Client,
    pub context: Context,
}

impl Direct {
    pub async fn connect(url: &str) -> Self {
        Self::on(async_nats::connect(url).await.unwrap())
    }

    pub fn on(client: Client) -> Self {
        Self { context: jetstream::new(client.clone()), client }
    }

    /// A file stream of every subject below `name`.
    pub async fn make_stream(&self, name: &str) {
        let config =
            stream::Config { name: name.to_owned(), subjects: vec![format!("{name}.>")], ..Default::default() };
        self.context.create_stream(config).await.unwrap();
    }

    pub async fn publish(&self, subject: &str, headers: HeaderMap, body: Vec<u8>) {
        self.context.publish_with_headers(subject.to_owned(), headers, body.into()).await.unwrap().await.unwrap();
    }

    /// All messages of a stream.
    pub async fn messages(&self, name: &str) -> Vec<Arrived> {
        let stream = self.context.get_stream(name).await.unwrap();
        let state = &stream.cached_info().state;
        let mut messages = Vec::new();
        for sequence in state.first_sequence..=state.last_sequence {
            if state.messages == 0 {
                break;
            }
            let raw = stream.get_raw_message(sequence).await.unwrap();
            let headers: HashMap<String, String> = raw
                .headers
                .iter()
                .map(|(name, values)| (name.to_string().to_lowercase(), values.last().unwrap().to_string()))
                .collect();
            messages.push(Arrived {
                id: headers.get("x-message-id").and_then(|id| Uuid::parse_str(id).ok()),
                key: headers.get("x-message-key").cloned(),
                body: raw.payload.to_vec(),
                headers,
            });
        }
        messages
    }

    /// Messages that wait and that are handed out.
    pub async fn outstanding(&self, stream: &str, durable: &str) -> u64 {
        let stream = self.context.get_stream(stream).await.unwrap();
        match stream.consumer_info(durable).await {
            Ok(info) => info.num_pending + u64::try_from(info.num_ack_pending).unwrap(),
            Err(_) => stream.cached_info().state.messages,
        }
    }
}

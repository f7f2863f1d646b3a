//! The shared suites of the ports.

use std::{sync::Arc, time::Duration};

use async_nats::HeaderMap;
use async_trait::async_trait;
use queuebox_conformance::{
    destination::{Arrived, CANARY, Capabilities, DestinationHarness, TIMEOUT, Trouble, Which},
    source::{self, Outgoing, SourceHarness, UNACKNOWLEDGED_MAX},
};
use queuebox_core::ports::{Destination, Source};
use queuebox_nats::{DestinationConfig, Login, NatsDestination, NatsSource, Secret, SourceConfig};
use queuebox_testkit::{Nats, Proxy, ProxyMode, private_nats_with};
use tokio::sync::Mutex;

use crate::support::{self, Direct};

mod destination_contract {
    queuebox_conformance::destination_tests!(super::NatsHarness);
}

mod source_contract {
    queuebox_conformance::source_tests!(super::NatsHarness);
}

/// A stream of its own.
pub struct NatsHarness {
    _server: Nats,
    name: String,
    proxy: Proxy,
    direct: Direct,
    /// Asks for a login.
    strict: Mutex<Option<Nats>>,
}

impl NatsHarness {
    async fn new() -> Self {
        let server = support::server().await;
        let name = server.prefix();
        let direct = Direct::connect(&server.url()).await;
        direct.make_stream(&name).await;
        let proxy = Proxy::to(server.port()).await;
        Self { _server: server, name, proxy, direct, strict: Mutex::new(None) }
    }

    fn subject(&self) -> String {
        format!("{}.x", self.name)
    }

    fn disturb(&self, trouble: Trouble) {
        match trouble {
            Trouble::None => self.proxy.set(ProxyMode::Pass),
            Trouble::Cut => self.proxy.cut(),
            Trouble::Away => {
                self.proxy.set(ProxyMode::Refuse);
                self.proxy.cut();
            }
            Trouble::Silent => self.proxy.set(ProxyMode::Stall),
            Trouble::Deaf => self.proxy.set(ProxyMode::HoldReplies),
        }
    }
}

#[async_trait]
impl DestinationHarness for NatsHarness {
    async fn start() -> Self {
        Self::new().await
    }

    async fn destination(&self, which: Which) -> Arc<dyn Destination> {
        let mut config =
            DestinationConfig { timeout: TIMEOUT, ..support::destination(self.proxy.port(), &self.subject()) };
        if which == Which::WrongSecret {
            let strict = private_nats_with("authorization { user: app, password: right }\n").await;
            config.connection = support::connection(strict.port());
            config.connection.login = Login::Password { username: "app".to_owned(), password: Secret::fixed(CANARY) };
            *self.strict.lock().await = Some(strict);
        }
        Arc::new(NatsDestination::new(config))
    }

    async fn arrived(&self) -> Vec<Arrived> {
        self.direct.messages(&self.name).await
    }

    async fn trouble(&self, trouble: Trouble) {
        self.disturb(trouble);
    }

    /// A subject without a stream is no missing object: it fails its own row (contract 7.5).
    fn capabilities(&self) -> Capabilities {
        Capabilities { connects: true, too_large: Some(1024 * 1024), objects: false, logins: true }
    }
}

#[async_trait]
impl SourceHarness for NatsHarness {
    async fn start() -> Self {
        Self::new().await
    }

    async fn source(&self) -> Arc<dyn Source> {
        let config = SourceConfig {
            batch_size: UNACKNOWLEDGED_MAX,
            ack_wait: Duration::from_secs(5),
            ..support::source(self.proxy.port(), &self.name)
        };
        Arc::new(NatsSource::new(config))
    }

    async fn publish(&self, messages: Vec<Outgoing>) {
        let mut acknowledgements = Vec::new();
        for message in messages {
            let mut headers = HeaderMap::new();
            for (name, value) in message.headers {
                headers.append(name, String::from_utf8(value).unwrap());
            }
            let publishing = self.direct.context.publish_with_headers(self.subject(), headers, message.body.into());
            acknowledgements.push(publishing.await.unwrap());
        }
        for acknowledgement in acknowledgements {
            acknowledgement.await.unwrap();
        }
    }

    async fn outstanding(&self) -> u64 {
        self.direct.outstanding(&self.name, "d").await
    }

    async fn trouble(&self, trouble: Trouble) {
        self.disturb(trouble);
    }

    async fn remove_object(&self) {
        self.direct.context.delete_stream(&self.name).await.unwrap();
    }

    async fn make_object(&self) {
        self.direct.make_stream(&self.name).await;
    }

    fn object_name(&self) -> String {
        self.name.clone()
    }

    fn capabilities(&self) -> source::Capabilities {
        source::Capabilities { byte_headers: false, stops_at_a_failure: false, objects: true }
    }
}

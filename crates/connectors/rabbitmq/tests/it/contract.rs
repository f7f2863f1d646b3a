//! The shared suites of the ports.

use std::sync::Arc;

use async_trait::async_trait;
use lapin::{
    BasicProperties,
    options::BasicPublishOptions,
    types::{AMQPValue, FieldTable, LongString, ShortString},
};
use queuebox_conformance::{
    destination::{Arrived, CANARY, Capabilities, DestinationHarness, TIMEOUT, Trouble, Which},
    source::{self, Outgoing, SourceHarness, UNACKNOWLEDGED_MAX},
};
use queuebox_core::ports::{Destination, Source};
use queuebox_rabbitmq::{DestinationConfig, RabbitDestination, RabbitSource, Secret, SourceConfig};
use queuebox_testkit::{Proxy, ProxyMode, RabbitMq};

use crate::support::{self, Client, MESSAGE_BYTES_MAX};

mod destination_contract {
    queuebox_conformance::destination_tests!(super::RabbitHarness);
}

mod source_contract {
    queuebox_conformance::source_tests!(super::RabbitHarness);
}

/// A virtual host with a queue and an exchange that leads to it.
pub struct RabbitHarness {
    broker: RabbitMq,
    vhost: String,
    proxy: Proxy,
    client: Client,
}

const QUEUE: &str = "the-queue";

impl RabbitHarness {
    async fn new() -> Self {
        let broker = support::broker().await;
        let vhost = support::fresh_vhost(&broker).await;
        let client = Client::connect(&broker.url_of(&vhost)).await;
        client.declare_exchange("ex").await;
        client.declare_queue(QUEUE).await;
        client.bind(QUEUE, "ex", "#").await;
        let proxy = Proxy::to(broker.port()).await;
        Self { broker, vhost, proxy, client }
    }

    fn url(&self) -> String {
        self.broker.url_through(self.proxy.port(), &self.vhost)
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
impl DestinationHarness for RabbitHarness {
    async fn start() -> Self {
        Self::new().await
    }

    async fn destination(&self, which: Which) -> Arc<dyn Destination> {
        let mut config = DestinationConfig { timeout: TIMEOUT, ..support::destination(&self.url()) };
        match which {
            Which::Working => {}
            Which::MissingObject => {
                let template =
                    queuebox_core::template::Template::parse("missing", queuebox_core::template::Vocabulary::Address);
                config.exchange = queuebox_core::template::Address::Template(template.unwrap());
                config.declare_exchange = false;
            }
            Which::WrongSecret => config.connection.password = Some(Secret::fixed(CANARY)),
        }
        Arc::new(RabbitDestination::new(config))
    }

    async fn arrived(&self) -> Vec<Arrived> {
        self.client.take_all(QUEUE).await
    }

    async fn trouble(&self, trouble: Trouble) {
        self.disturb(trouble);
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { connects: true, too_large: Some(MESSAGE_BYTES_MAX), objects: true, logins: true }
    }
}

#[async_trait]
impl SourceHarness for RabbitHarness {
    async fn start() -> Self {
        Self::new().await
    }

    async fn source(&self) -> Arc<dyn Source> {
        let prefetch = u16::try_from(UNACKNOWLEDGED_MAX).unwrap();
        Arc::new(RabbitSource::new(SourceConfig { prefetch, ..support::source(&self.url(), QUEUE) }))
    }

    async fn publish(&self, messages: Vec<Outgoing>) {
        // One transaction, so that the queue has all of them at the same time.
        let other = Client::connect(&self.broker.url_of(&self.vhost)).await;
        let channel = other.connection().create_channel().await.unwrap();
        channel.tx_select().await.unwrap();
        for message in messages {
            let mut headers = FieldTable::default();
            for (name, value) in message.headers {
                headers.insert(ShortString::try_new(name).unwrap(), AMQPValue::LongString(LongString::from(value)));
            }
            let properties = BasicProperties::default().with_headers(headers);
            let options = BasicPublishOptions::default();
            channel.basic_publish("".into(), QUEUE.into(), options, &message.body, properties).await.unwrap();
        }
        channel.tx_commit().await.unwrap();
    }

    async fn outstanding(&self) -> u64 {
        support::outstanding(&self.broker, &self.vhost, QUEUE).await
    }

    async fn trouble(&self, trouble: Trouble) {
        self.disturb(trouble);
    }

    async fn remove_object(&self) {
        self.client.delete_queue(QUEUE).await;
    }

    async fn make_object(&self) {
        self.client.declare_queue(QUEUE).await;
    }

    fn object_name(&self) -> String {
        QUEUE.to_owned()
    }

    fn capabilities(&self) -> source::Capabilities {
        source::Capabilities { byte_headers: true, stops_at_a_failure: false, objects: true }
    }
}

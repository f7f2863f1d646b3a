//! The laws of the ports, run against Kafka.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use queuebox_conformance::{
    destination::{self, Arrived, CANARY, DestinationHarness, TIMEOUT, Which},
    source::{self, Outgoing, SourceHarness, Trouble, UNACKNOWLEDGED_MAX},
};
use queuebox_core::ports::{Destination, Source};
use queuebox_kafka::{KafkaDestination, KafkaSource};
use queuebox_testkit::{KafkaProxy, ProxyMode, unique};

use crate::support::{self, Direct, Guarded, Record, plain, world};

/// A topic behind a proxy.
struct Harness {
    proxy: KafkaProxy,
    direct: Direct,
    topic: String,
    group: String,
    guarded: tokio::sync::OnceCell<Guarded>,
}

impl Harness {
    async fn make() -> Self {
        let world = world().await;
        let proxy = world.proxy().await;
        let direct = world.direct();
        let topic = direct.new_topic(1, &[]).await;
        Self { proxy, direct, topic, group: unique("qb-"), guarded: tokio::sync::OnceCell::new() }
    }

    fn disturb(&self, trouble: Trouble) {
        self.proxy.set(match trouble {
            Trouble::None | Trouble::Cut => ProxyMode::Pass,
            Trouble::Away => ProxyMode::Refuse,
            Trouble::Silent => ProxyMode::Stall,
            Trouble::Deaf => ProxyMode::HoldReplies,
        });
        if matches!(trouble, Trouble::Cut | Trouble::Away) {
            self.proxy.cut();
        }
    }
}

#[async_trait]
impl DestinationHarness for Harness {
    async fn start() -> Self {
        Self::make().await
    }

    async fn destination(&self, which: Which) -> Arc<dyn Destination> {
        let config = match which {
            Which::Working => support::destination(plain(self.proxy.bootstrap()), &self.topic, TIMEOUT),
            Which::MissingObject => support::destination(plain(self.proxy.bootstrap()), &unique("missing-"), TIMEOUT),
            Which::WrongSecret => {
                let guarded = self.guarded.get_or_init(Guarded::start).await;
                support::destination(guarded.sasl_cluster(CANARY), &self.topic, TIMEOUT)
            }
        };
        Arc::new(KafkaDestination::new(config))
    }

    async fn arrived(&self) -> Vec<Arrived> {
        self.direct.read(&self.topic).await.into_iter().map(support::Stored::arrived).collect()
    }

    async fn trouble(&self, trouble: Trouble) {
        self.disturb(trouble);
    }

    fn capabilities(&self) -> destination::Capabilities {
        destination::Capabilities { connects: true, too_large: Some(1_200_000), objects: true, logins: true }
    }
}

#[async_trait]
impl SourceHarness for Harness {
    async fn start() -> Self {
        Self::make().await
    }

    async fn source(&self) -> Arc<dyn Source> {
        let limit = u32::try_from(UNACKNOWLEDGED_MAX).unwrap();
        Arc::new(KafkaSource::new(support::source(plain(self.proxy.bootstrap()), &self.group, &[&self.topic], limit)))
    }

    async fn publish(&self, messages: Vec<Outgoing>) {
        let records = messages
            .into_iter()
            .map(|message| Record {
                partition: Some(0),
                key: message.key,
                body: Some(message.body),
                headers: message.headers,
            })
            .collect();
        self.direct.produce(&self.topic, records).await;
    }

    async fn outstanding(&self) -> u64 {
        self.direct.lag(&self.group, &self.topic).await
    }

    async fn trouble(&self, trouble: Trouble) {
        self.disturb(trouble);
    }

    async fn remove_object(&self) {
        self.direct.remove_topic(&self.topic).await;
    }

    async fn make_object(&self) {
        // The broker removes a topic's files some time after its name.
        tokio::time::timeout(Duration::from_secs(20), self.direct.make_topic(&self.topic, 1, &[])).await.unwrap();
    }

    fn object_name(&self) -> String {
        self.topic.clone()
    }

    fn capabilities(&self) -> source::Capabilities {
        source::Capabilities { byte_headers: true, stops_at_a_failure: true, objects: true }
    }
}

mod destination_contract {
    queuebox_conformance::destination_tests!(super::Harness);
}

mod source_contract {
    queuebox_conformance::source_tests!(super::Harness);
}

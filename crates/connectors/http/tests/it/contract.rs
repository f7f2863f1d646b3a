//! The laws of the destination port, run against a receiver behind a proxy.

use std::{collections::HashMap, sync::Arc};

use async_trait::async_trait;
use queuebox_conformance::destination::{Arrived, CANARY, Capabilities, DestinationHarness, TIMEOUT, Trouble, Which};
use queuebox_core::ports::Destination;
use queuebox_http::{Secret, destination::OutboundAuth};
use queuebox_testkit::{Proxy, ProxyMode, Recorder};

use crate::peer;

struct Harness {
    recorder: Recorder,
    proxy: Proxy,
}

#[async_trait]
impl DestinationHarness for Harness {
    async fn start() -> Self {
        let recorder = Recorder::start().await;
        let proxy = Proxy::to(recorder.port()).await;
        Self { recorder, proxy }
    }

    async fn destination(&self, which: Which) -> Arc<dyn Destination> {
        assert_eq!(which, Which::Working, "HTTP has neither objects nor logins: its probe asks nobody");
        Arc::new(peer::destination(&self.proxy.url(), |config| {
            config.timeout = TIMEOUT;
            config.auth = Some(OutboundAuth::Bearer(Secret::fixed(CANARY)));
        }))
    }

    async fn arrived(&self) -> Vec<Arrived> {
        let arrived = |request: queuebox_testkit::Recorded| {
            let headers: HashMap<String, String> = request
                .headers
                .iter()
                .map(|(name, value)| (name.as_str().to_owned(), String::from_utf8_lossy(value.as_bytes()).into_owned()))
                .collect();
            Arrived {
                id: headers.get("x-message-id").and_then(|id| id.parse().ok()),
                key: headers.get("x-message-key").cloned(),
                body: request.body.to_vec(),
                headers,
            }
        };
        self.recorder.requests().into_iter().map(arrived).collect()
    }

    async fn trouble(&self, trouble: Trouble) {
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

    fn capabilities(&self) -> Capabilities {
        Capabilities { connects: false, too_large: None, objects: false, logins: false }
    }
}

queuebox_conformance::destination_tests!(Harness);

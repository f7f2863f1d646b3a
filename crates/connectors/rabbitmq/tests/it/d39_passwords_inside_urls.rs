//! Any password and any virtual host, in a URL and beside it.

use queuebox_core::{Class, ports::Destination};
use queuebox_rabbitmq::{BrokerUrl, ConnectionConfig, DestinationConfig, RabbitDestination, Secret};
use queuebox_testkit::{eventually_ok, unique};
use serde_json::json;
use std::time::Duration;

use crate::support;

const PASSWORD: &str = r#"p@s:s/w%o#r?d&[é]'" \`;=%41"#;
const ENCODED: &str = "p%40s%3As%2Fw%25o%23r%3Fd%26%5B%C3%A9%5D%27%22%20%5C%60%3B%3D%2541";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn logs_in_with_each_of_them() {
    let broker = support::broker().await;
    let user = unique("user");
    let vhost = format!("{}/b", unique("a"));
    let path = vhost.replace('/', "%2F");
    for (at, body) in [
        (format!("/users/{user}"), json!({"password": PASSWORD, "tags": ""})),
        (format!("/vhosts/{path}"), json!({})),
        (format!("/permissions/{path}/{user}"), json!({"configure": ".*", "write": ".*", "read": ".*"})),
        (format!("/permissions/%2F/{user}"), json!({"configure": ".*", "write": ".*", "read": ".*"})),
    ] {
        eventually_ok("set up", Duration::from_secs(10), || broker.try_api("PUT", &at, Some(body.clone()))).await;
    }
    let port = broker.port();
    let with = |connection: ConnectionConfig| {
        let config = DestinationConfig { connection, ..support::destination("amqp://x") };
        RabbitDestination::new(config)
    };
    for place in [format!("127.0.0.1:{port}/{path}"), format!("127.0.0.1:{port}/%2f"), format!("127.0.0.1:{port}")] {
        let inside = support::connection(&format!("amqp://{user}:{ENCODED}@{place}"));
        with(inside).probe().await.unwrap_or_else(|fault| panic!("{place}: {fault}"));
        let beside = ConnectionConfig {
            url: BrokerUrl::Plain(format!("amqp://{place}")),
            username: Some(user.clone()),
            password: Some(Secret::fixed(PASSWORD)),
            ..support::connection("")
        };
        with(beside).probe().await.unwrap_or_else(|fault| panic!("{place}: {fault}"));
    }
    // The empty virtual host does not exist here: refused with its name, and without what stands before the `@`.
    let empty = with(support::connection(&format!("amqp://{user}:{ENCODED}@127.0.0.1:{port}/")));
    let fault = empty.probe().await.expect_err("no such virtual host");
    assert_eq!(fault.class, Class::NotConnected);
    assert!(fault.detail.contains("virtual host \"\""), "{fault}");
    assert!(!fault.detail.contains("p%40s") && !fault.detail.contains("p@s"), "{fault}");
}

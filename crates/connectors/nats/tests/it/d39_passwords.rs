//! Any password and any token, taken as it is.

use queuebox_core::ports::Destination;
use queuebox_nats::{DestinationConfig, Login, NatsDestination, Secret};
use queuebox_testkit::private_nats_with;

use crate::support;

const PASSWORD: &str = r#"p@s:s/w%o#r?d&[é]'" \`;=%41"#;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn logs_in_with_each_of_them() {
    let quoted = PASSWORD.replace('\\', "\\\\").replace('"', "\\\"");
    for (config, login) in [
        (
            format!("authorization {{ user: \"us@er\", password: \"{quoted}\" }}\n"),
            Login::Password { username: "us@er".to_owned(), password: Secret::fixed(PASSWORD) },
        ),
        (format!("authorization {{ token: \"{quoted}\" }}\n"), Login::Token(Secret::fixed(PASSWORD))),
    ] {
        let server = private_nats_with(&config).await;
        let mut config = DestinationConfig { jetstream: false, ..support::destination(server.port(), "s") };
        config.connection.login = login;
        let destination = NatsDestination::new(config);
        destination.probe().await.unwrap();
        destination.publish(support::row(0)).await.unwrap();
    }
}

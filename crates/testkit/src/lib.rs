//! Starts the real peers that QueueBox talks to, and the built binary itself, as child processes of a test.
//!
//! Invariants:
//! - Every peer listens on loopback only, on free ports, in a folder of its own, and is gone soon after the last
//!   test process that uses it, however that process ended (`shared` and `child` say how).
//! - A shared peer is one server for all test binaries of a checkout; tests keep apart by database, virtual host, or
//!   prefix. A `private_*` peer belongs to one test, which may stop, kill, or freeze it.
//! - A missing program is an error that names it and says `./dev packages`.
//!
//! The functions panic instead of returning errors: a test without its peer has failed, and the message is what its
//! reader needs. The `try_*` variants serve callers that report errors themselves.
#![allow(clippy::panic, clippy::expect_used, clippy::unwrap_used, clippy::disallowed_methods)]

mod child;
mod classic;
mod disk;
mod evidence;
mod kafka;
mod kubernetes;
mod nats;
mod packages;
mod pgbouncer;
mod ports;
mod postgres;
mod process;
mod proxy;
mod rabbitmq;
mod recorder;
mod shared;
mod standby;
mod tls;
mod wait;

pub use child::Signal;
pub use classic::{CLASSIC_VERSION, classic_history, classic_tables};
pub use disk::Disk;
pub use evidence::{CANARY, keep, promise};
pub use kafka::{Kafka, KafkaProxy, kafka, private_kafka, private_kafka_with, try_kafka, try_private_kafka_with};
pub use kubernetes::{Kubernetes, kubernetes, private_kubernetes, try_kubernetes};
pub use nats::{Nats, nats, private_nats, private_nats_with, try_nats, try_private_nats_with};
pub use packages::{cache_dir, target_dir, workspace_root};
pub use pgbouncer::{PgBouncer, PoolMode, pgbouncer, pgbouncer_with};
pub use ports::free_port;
pub use postgres::{
    Postgres, postgres, private_postgres, private_postgres_on, private_postgres_with, try_postgres,
    try_private_postgres_with,
};
pub use process::{Process, ProcessBuilder, Unfinished, queuebox_binary};
pub use proxy::{Proxy, ProxyMode};
pub use rabbitmq::{
    RabbitMq, private_rabbitmq, private_rabbitmq_with, rabbitmq, try_private_rabbitmq_with, try_rabbitmq,
};
pub use recorder::{Answer, Ending, Recorded, Recorder};
pub use standby::private_standby_of;
pub use tls::{Authority, Identity};
pub use wait::{eventually, eventually_ok, init};

/// A short name that no other test uses: lower-case letters and digits, `prefix` first.
pub fn unique(prefix: &str) -> String {
    let random = uuid::Uuid::new_v4().simple().to_string();
    format!("{prefix}{}", &random[..10])
}

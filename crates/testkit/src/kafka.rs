//! Kafka in KRaft mode: one node that is broker and controller.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::child::{Launch, Signal};
use crate::packages::{kafka_libs, on_path, run};
use crate::proxy::Proxy;
use crate::shared::{Peer, Server, blocking, process_methods, process_wide, root};
use crate::wait::until;

/// So many tests, of all processes together, may have a proxy in front of one broker at a time.
const WAYS: usize = 3;

/// A running Kafka broker. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Kafka {
    server: Arc<Server<State>>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct State {
    port: u16,
    ways: Vec<Way>,
}

/// A listener for clients that come through a proxy. Kafka tells its clients where to connect, so the proxy's port is fixed
/// when the broker starts.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct Way {
    proxy: u16,
    behind: u16,
}

impl Peer for State {
    const NAME: &'static str = "kafka";

    fn prepare(folder: &Path) -> Result<(Launch, Self)> {
        let java = on_path("java")?;
        let classes = class_path()?;
        let ways = (0..WAYS).map(|_| Way { proxy: crate::free_port(), behind: crate::free_port() }).collect();
        let state = State { port: crate::free_port(), ways };
        let config = folder.join("server.properties");
        let data = folder.join("data");
        std::fs::create_dir_all(&data)?;
        std::fs::write(&config, properties(&state, crate::free_port(), &data))?;
        let at = config.to_string_lossy().into_owned();
        let log =
            std::fs::write(folder.join("log4j2.properties"), LOGGING).map(|()| folder.join("log4j2.properties"))?;
        let logging = format!("-Dlog4j2.configurationFile={}", log.display());
        let id = "UXVldWVCb3hUZXN0MDAwMQ";
        let format = ["-Xmx128m", "-XX:TieredStopAtLevel=1", &logging, "-cp", &classes, "kafka.tools.StorageTool"];
        let format = [&format[..], &["format", "-t", id, "-c", &at]].concat();
        run(&java.to_string_lossy(), &format).context("cannot format Kafka's storage")?;
        let args =
            ["-Xmx384m", "-Xms128m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Djava.net.preferIPv4Stack=true"];
        let args = [&args[..], &[&logging, "-cp", &classes, "kafka.Kafka", &at]].concat();
        let launch = Launch {
            program: java,
            args: args.into_iter().map(String::from).collect(),
            env: Vec::new(),
            unprivileged: false,
            before: String::new(),
            stop: Signal::Term,
        };
        Ok((launch, state))
    }

    fn ready(&self) -> Result<()> {
        // The port opens when the broker has registered and caught up; ApiVersions is answered from then on.
        use std::io::{Read, Write};
        let mut stream = std::net::TcpStream::connect(("127.0.0.1", self.port))?;
        stream.set_read_timeout(Some(std::time::Duration::from_secs(5)))?;
        // Length, key 18 (ApiVersions), version 0, correlation 1, client id "t".
        stream.write_all(&[0, 0, 0, 11, 0, 18, 0, 0, 0, 0, 0, 1, 0, 1, b't'])?;
        let mut answer = [0_u8; 8];
        stream.read_exact(&mut answer)?;
        anyhow::ensure!(answer[4..] == [0, 0, 0, 1], "not Kafka's answer: {answer:?}");
        Ok(())
    }
}

const LOGGING: &str = "status = error\nappender.console.type = Console\nappender.console.name = out\n\
    appender.console.layout.type = PatternLayout\nappender.console.layout.pattern = %d %p %c %m%n\n\
    rootLogger.level = warn\nrootLogger.appenderRef.out.ref = out\n";

fn class_path() -> Result<String> {
    Ok(kafka_libs()?.join("*").to_string_lossy().into_owned())
}

fn properties(state: &State, controller: u16, data: &Path) -> String {
    let port = state.port;
    let (mut listeners, mut advertised, mut protocols) = (String::new(), String::new(), String::new());
    for (n, way) in state.ways.iter().enumerate() {
        listeners += &format!(",PROXY{n}://127.0.0.1:{}", way.behind);
        advertised += &format!(",PROXY{n}://127.0.0.1:{}", way.proxy);
        protocols += &format!(",PROXY{n}:PLAINTEXT");
    }
    format!(
        "process.roles=broker,controller\nnode.id=1\ncontroller.quorum.voters=1@127.0.0.1:{controller}\n\
         listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}{listeners}\n\
         advertised.listeners=PLAINTEXT://127.0.0.1:{port}{advertised}\ncontroller.listener.names=CONTROLLER\n\
         listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT{protocols}\n\
         inter.broker.listener.name=PLAINTEXT\nlog.dirs={}\n\
         num.partitions=1\ndefault.replication.factor=1\noffsets.topic.replication.factor=1\n\
         offsets.topic.num.partitions=4\ntransaction.state.log.replication.factor=1\ntransaction.state.log.min.isr=1\n\
         transaction.state.log.num.partitions=4\nshare.coordinator.state.topic.replication.factor=1\n\
         share.coordinator.state.topic.min.isr=1\n\
         # A group that waits for members makes every test wait.\ngroup.initial.rebalance.delay.ms=0\n\
         group.min.session.timeout.ms=1000\nauto.create.topics.enable=false\nlog.cleaner.enable=false\n\
         num.network.threads=2\nnum.io.threads=3\nbackground.threads=2\nnum.recovery.threads.per.data.dir=1\n\
         controlled.shutdown.max.retries=1\ncontrolled.shutdown.retry.backoff.ms=200\n",
        data.display()
    )
}

/// `more` lines for a file of properties; `{name}` in them is the value that `name` has in `text`.
fn filled(text: &str, more: &str) -> String {
    text.lines()
        .filter_map(|line| line.split_once('='))
        .fold(more.to_string(), |more, (name, value)| more.replace(&format!("{{{name}}}"), value))
}

/// The Kafka broker that all tests share. Tests keep apart by [`Kafka::prefix`] in the names of topics and groups.
pub async fn kafka() -> Kafka {
    try_kafka().await.unwrap_or_else(|error| panic!("{error:#}"))
}

/// [`kafka`] with an error instead of a panic.
pub async fn try_kafka() -> Result<Kafka> {
    crate::init();
    Ok(Kafka { server: Server::shared(process_wide!(State).await?) })
}

/// A Kafka broker of this test alone; takes some seconds.
pub async fn private_kafka() -> Kafka {
    private_kafka_with("").await
}

/// [`private_kafka`] with more lines for `server.properties`; a later line wins, and `{name}` stands for the value before:
/// `listeners={listeners},SASL://127.0.0.1:1234`.
pub async fn private_kafka_with(properties: &str) -> Kafka {
    try_private_kafka_with(properties).await.unwrap_or_else(|error| panic!("{error:#}"))
}

/// [`private_kafka_with`] with an error instead of a panic.
pub async fn try_private_kafka_with(properties: &str) -> Result<Kafka> {
    crate::init();
    let more = properties.to_string();
    let server = blocking(move || {
        Server::private(|folder, _, _| {
            let file = folder.join("server.properties");
            let text = std::fs::read_to_string(&file)?;
            let more = filled(&text, &more);
            Ok(std::fs::write(&file, text + &more)?)
        })
    });
    Ok(Kafka { server: server.await? })
}

process_methods!(Kafka);

impl Kafka {
    /// The port on 127.0.0.1.
    pub fn port(&self) -> u16 {
        self.server.peer.port
    }

    /// `127.0.0.1:PORT`, for `bootstrap.servers`.
    pub fn bootstrap(&self) -> String {
        format!("127.0.0.1:{}", self.port())
    }

    /// A proxy in front of this broker, for this test alone; waits until one is free. Clients of [`KafkaProxy::bootstrap`]
    /// are told to connect to it, and to nothing else.
    pub async fn proxy(&self) -> KafkaProxy {
        let ways = self.server.peer.ways.clone();
        let taken = blocking(move || until(Duration::from_secs(240), || take(&ways)));
        let (way, claim) = taken.await.unwrap_or_else(|error| panic!("no proxy is free: {error:#}"));
        KafkaProxy { proxy: Proxy::on(way.proxy, way.behind).await, _claim: claim }
    }

    /// A prefix for the names of topics and groups that no other test uses.
    pub fn prefix(&self) -> String {
        crate::unique("qb-")
    }

    /// Makes a topic. Topics do not come into being by use. Costs the start of a Java machine (two seconds); tests that
    /// have a Kafka client at hand make topics with it.
    pub async fn create_topic(&self, name: &str, partitions: u32) {
        let partitions = partitions.to_string();
        let args = ["--create", "--topic", name, "--partitions", &partitions, "--replication-factor", "1"];
        self.tool("org.apache.kafka.tools.TopicCommand", &args).await;
    }

    /// Runs one of Kafka's command-line tools by its class; the bootstrap server is added. Returns its output.
    pub async fn tool(&self, class: &str, args: &[&str]) -> String {
        let mut words = vec!["--bootstrap-server".to_string(), self.bootstrap()];
        words.extend(args.iter().map(ToString::to_string));
        let class = class.to_string();
        let output = blocking(move || {
            let classes = class_path()?;
            let mut all = vec!["-Xmx128m", "-XX:TieredStopAtLevel=1", "-cp", &classes, &class];
            all.extend(words.iter().map(String::as_str));
            run(&on_path("java")?.to_string_lossy(), &all)
        });
        output.await.unwrap_or_else(|error| panic!("{error:#}"))
    }
}

/// A [`Proxy`] in front of a Kafka broker.
#[derive(Debug)]
pub struct KafkaProxy {
    // Ends before its port is given free.
    proxy: Proxy,
    _claim: File,
}

impl KafkaProxy {
    /// `127.0.0.1:PORT`, for `bootstrap.servers`.
    pub fn bootstrap(&self) -> String {
        format!("127.0.0.1:{}", self.proxy.port())
    }
}

impl std::ops::Deref for KafkaProxy {
    type Target = Proxy;

    fn deref(&self) -> &Proxy {
        &self.proxy
    }
}

/// The first way that nobody uses, here or in another process.
fn take(ways: &[Way]) -> Result<(Way, File)> {
    for way in ways {
        let claim = File::create(root()?.join(format!("kafka-way-{}", way.proxy)))?;
        // The listener of the proxy before may take a moment to go.
        if claim.try_lock().is_ok() && std::net::TcpListener::bind(("127.0.0.1", way.proxy)).is_ok() {
            return Ok((*way, claim));
        }
    }
    anyhow::bail!("all {} are in use", ways.len())
}

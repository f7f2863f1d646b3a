//! The other side of each test: a raw receiver that answers as the test says, and an intake that remembers.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex},
    time::Duration,
};

use async_trait::async_trait;
use bytes::Bytes;
use queuebox_core::{
    Fault, Uuid,
    ports::{Admission, Delivery, Destination, Intake, Received},
};
use queuebox_http::{DataPort, DataPortConfig, HttpDestination, HttpDestinationConfig, HttpSource};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::oneshot,
};

/// A request as it came over the wire.
#[derive(Debug, Clone)]
pub struct Seen {
    pub line: String,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Seen {
    pub fn header(&self, name: &str) -> Option<&str> {
        let mut found = self.headers.iter().filter(|(given, _)| given.eq_ignore_ascii_case(name));
        let value = found.next().map(|(_, value)| value.as_str());
        assert!(found.next().is_none(), "{name} came more than once");
        value
    }
}

/// A receiver that writes the next of its answers, byte for byte, to each request. The last one repeats.
pub struct Receiver {
    pub address: SocketAddr,
    seen: Arc<Mutex<Vec<Seen>>>,
    connections: Arc<Mutex<usize>>,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for Receiver {
    fn drop(&mut self) {
        self.task.abort();
    }
}

pub fn answer(status: u16, headers: &[(&str, &str)], body: &str) -> String {
    let mut text = format!("HTTP/1.1 {status} X\r\nContent-Length: {}\r\n", body.len());
    for (name, value) in headers {
        text.push_str(&format!("{name}: {value}\r\n"));
    }
    text + "\r\n" + body
}

impl Receiver {
    pub async fn start(answers: Vec<String>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let connections = Arc::new(Mutex::new(0));
        let (log, count) = (seen.clone(), connections.clone());
        let answers = Arc::new(Mutex::new(answers));
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                *count.lock().unwrap() += 1;
                tokio::spawn(converse(stream, log.clone(), answers.clone()));
            }
        });
        Self { address, seen, connections, task }
    }

    pub fn url(&self) -> String {
        format!("http://{}/hook", self.address)
    }

    pub fn seen(&self) -> Vec<Seen> {
        self.seen.lock().unwrap().clone()
    }

    pub fn connections(&self) -> usize {
        *self.connections.lock().unwrap()
    }
}

async fn converse<S: AsyncReadExt + AsyncWriteExt + Unpin>(
    mut stream: S,
    seen: Arc<Mutex<Vec<Seen>>>,
    answers: Arc<Mutex<Vec<String>>>,
) {
    while let Some(request) = read_request(&mut stream).await {
        seen.lock().unwrap().push(request);
        let answer = {
            let mut answers = answers.lock().unwrap();
            if answers.len() > 1 { answers.remove(0) } else { answers[0].clone() }
        };
        if answer.is_empty() || stream.write_all(answer.as_bytes()).await.is_err() {
            return;
        }
    }
}

/// Reads one request whose body has a `Content-Length`.
pub async fn read_request<S: AsyncReadExt + Unpin>(stream: &mut S) -> Option<Seen> {
    let mut bytes = Vec::new();
    let end = loop {
        if let Some(at) = bytes.windows(4).position(|window| window == b"\r\n\r\n") {
            break at;
        }
        if stream.read_buf(&mut bytes).await.ok()? == 0 {
            return None;
        }
    };
    let mut body = bytes.split_off(end + 4);
    let head = String::from_utf8(bytes).unwrap();
    let mut lines = head.trim_end().split("\r\n");
    let line = lines.next().unwrap().to_owned();
    let headers: Vec<(String, String)> = lines
        .map(|line| line.split_once(':').unwrap())
        .map(|(name, value)| (name.to_owned(), value.trim().to_owned()))
        .collect();
    let length = headers.iter().find(|(name, _)| name.eq_ignore_ascii_case("content-length"));
    let length: usize = length.map_or(0, |(_, value)| value.parse().unwrap());
    while body.len() < length {
        if stream.read_buf(&mut body).await.ok()? == 0 {
            return None;
        }
    }
    Some(Seen { line, headers, body })
}

pub fn delivery() -> Delivery {
    Delivery {
        id: Uuid::new_v4(),
        topic: "order.created".to_owned(),
        key: Some("o-1".to_owned()),
        aggregate_type: None,
        payload: Bytes::from_static(br#"{"n":1}"#),
        headers: Vec::new(),
        attempt: 0,
        routing_key: None,
        time_left: Duration::from_secs(60),
    }
}

pub fn destination(url: &str, change: impl FnOnce(&mut HttpDestinationConfig)) -> HttpDestination {
    let mut config = HttpDestinationConfig::new(url.parse().unwrap());
    config.timeout = Duration::from_secs(10);
    change(&mut config);
    HttpDestination::new(config).unwrap()
}

pub async fn publish(destination: &HttpDestination) -> Result<(), Fault> {
    destination.publish(delivery()).await
}

/// An intake that remembers what came and answers as it was told.
pub struct Memory {
    pub received: Mutex<Vec<Received>>,
    pub answer: Box<dyn Fn(&Received) -> Admission + Send + Sync>,
    /// One permit for each message that has come.
    pub reached: tokio::sync::Semaphore,
    /// Each message takes a permit before it is answered.
    pub gate: tokio::sync::Semaphore,
}

impl Memory {
    pub fn new(answer: impl Fn(&Received) -> Admission + Send + Sync + 'static) -> Arc<Self> {
        Self::with_gate(answer, 1_000_000)
    }

    fn with_gate(answer: impl Fn(&Received) -> Admission + Send + Sync + 'static, permits: usize) -> Arc<Self> {
        Arc::new(Self {
            received: Mutex::new(Vec::new()),
            answer: Box::new(answer),
            reached: tokio::sync::Semaphore::new(0),
            gate: tokio::sync::Semaphore::new(permits),
        })
    }

    /// Stores, but only when the test adds permits to the gate.
    pub fn gated() -> Arc<Self> {
        Self::with_gate(|_| Admission::Stored(Uuid::nil()), 0)
    }

    pub fn storing() -> Arc<Self> {
        Self::new(|_| Admission::Stored(Uuid::nil()))
    }

    pub fn count(&self) -> usize {
        self.received.lock().unwrap().len()
    }

    pub fn last(&self) -> Received {
        self.received.lock().unwrap().last().unwrap().clone()
    }
}

#[async_trait]
impl Intake for Memory {
    async fn admit(&self, batch: Vec<Received>) -> Vec<Admission> {
        let answers = batch.iter().map(|received| (self.answer)(received)).collect();
        self.received.lock().unwrap().extend(batch);
        self.reached.add_permits(1);
        self.gate.acquire().await.unwrap().forget();
        answers
    }
}

/// A data port that serves until it is stopped.
pub struct Port {
    pub address: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    pub served: tokio::task::JoinHandle<()>,
}

impl Port {
    pub async fn start(config: DataPortConfig, source: HttpSource, intake: Arc<dyn Intake>) -> Self {
        Self::start_with_delay(config, source, intake, Duration::ZERO).await
    }

    pub async fn start_with_delay(
        config: DataPortConfig,
        source: HttpSource,
        intake: Arc<dyn Intake>,
        shutdown_delay: Duration,
    ) -> Self {
        let port = Arc::new(DataPort::new(config, vec![(source, intake)]).unwrap());
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (stop, stopped) = oneshot::channel::<()>();
        let stopped = async move {
            let _ = stopped.await;
        };
        let served = tokio::spawn(port.serve(listener, stopped, shutdown_delay));
        Self { address, stop: Some(stop), served }
    }

    pub fn stop(&mut self) {
        let _ = self.stop.take().unwrap().send(());
    }

    pub async fn connect(&self) -> Client {
        Client { stream: TcpStream::connect(self.address).await.unwrap(), buffer: Vec::new() }
    }

    pub async fn send(&self, request: impl AsRef<[u8]>) -> Reply {
        let mut client = self.connect().await;
        client.write(request).await;
        client.reply().await.expect("an answer")
    }

    pub async fn post(&self, headers: &[(&str, &str)], body: impl AsRef<[u8]>) -> Reply {
        self.send(post("/inbox/orders", headers, body)).await
    }
}

pub fn post(path: &str, headers: &[(&str, &str)], body: impl AsRef<[u8]>) -> Vec<u8> {
    let body = body.as_ref();
    let mut head = format!("POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n", body.len());
    for (name, value) in headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    [head.as_bytes(), b"\r\n", body].concat()
}

/// A client that writes bytes and reads answers.
pub struct Client {
    stream: TcpStream,
    buffer: Vec<u8>,
}

/// An answer of the data port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reply {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: String,
}

impl Reply {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(given, _)| given.eq_ignore_ascii_case(name)).map(|(_, value)| value.as_str())
    }
}

impl Client {
    pub async fn write(&mut self, bytes: impl AsRef<[u8]>) {
        self.stream.write_all(bytes.as_ref()).await.unwrap();
    }

    /// For senders that may be cut off: did all of it go out?
    pub async fn try_write(&mut self, bytes: impl AsRef<[u8]>) -> bool {
        self.stream.write_all(bytes.as_ref()).await.is_ok()
    }

    /// Sends no more, and still reads.
    pub async fn finish(&mut self) {
        self.stream.shutdown().await.unwrap();
    }

    /// The next answer; `None` when the port closed the connection.
    pub async fn reply(&mut self) -> Option<Reply> {
        let end = loop {
            if let Some(at) = self.buffer.windows(4).position(|window| window == b"\r\n\r\n") {
                break at;
            }
            if self.stream.read_buf(&mut self.buffer).await.ok()? == 0 {
                return None;
            }
        };
        let mut body = self.buffer.split_off(end + 4);
        let head = String::from_utf8(std::mem::take(&mut self.buffer)).unwrap();
        let mut lines = head.trim_end().split("\r\n");
        let status = lines.next().unwrap().split(' ').nth(1).unwrap().parse().unwrap();
        let headers: Vec<(String, String)> = lines
            .map(|line| line.split_once(": ").unwrap())
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .collect();
        let length = headers.iter().find(|(name, _)| name.eq_ignore_ascii_case("content-length"));
        let length: usize = length.map_or(0, |(_, value)| value.parse().unwrap());
        while body.len() < length {
            if self.stream.read_buf(&mut body).await.ok()? == 0 {
                return None;
            }
        }
        self.buffer = body.split_off(length);
        Some(Reply { status, headers, body: String::from_utf8(body).unwrap() })
    }
}

/// A listener whose connections are all handed to `converse`.
pub async fn listen<F>(converse: impl Fn(TcpStream) -> F + Send + 'static) -> SocketAddr
where
    F: Future<Output = ()> + Send + 'static,
{
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(converse(stream));
        }
    });
    address
}

//! Requests per second of both directions on loopback, everything in one process:
//!
//! ```text
//! cargo run --release -p queuebox-http --example throughput [-- SECONDS [IN_FLIGHT]]
//! ```
//!
//! The bars of `docs/performance.md` on two cores with 64 in flight are 20,000/s out and 15,000/s in (that one with a
//! database). `reqwest` is measured beside the destination, since it was the alternative to connections of our own.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use async_trait::async_trait;
use bytes::Bytes;
use queuebox_core::{
    Uuid,
    ports::{Admission, Delivery, Destination, Intake, Received},
};
use queuebox_http::{DataPort, DataPortConfig, HttpDestination, HttpDestinationConfig, HttpSource};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};

const PAYLOAD_BYTES: usize = 512;

#[tokio::main(worker_threads = 2)]
async fn main() {
    let mut arguments = std::env::args().skip(1).map(|argument| argument.parse::<u64>().expect("a number"));
    let seconds = Duration::from_secs(arguments.next().unwrap_or(5));
    let in_flight = arguments.next().unwrap_or(64) as usize;
    let receiver = receiver().await;

    let destination = HttpDestination::new(HttpDestinationConfig::new(url(receiver).parse().unwrap())).unwrap();
    let destination = Arc::new(destination);
    let measured = measure(seconds, in_flight, move || {
        let destination = destination.clone();
        async move { destination.publish(delivery()).await.unwrap() }
    })
    .await;
    println!("out, HttpDestination  {measured}");

    let client = reqwest::Client::builder().redirect(reqwest::redirect::Policy::none()).build().unwrap();
    let measured = measure(seconds, in_flight, move || {
        let client = client.clone();
        async move { by_reqwest(&client, receiver).await }
    })
    .await;
    println!("out, reqwest          {measured}");

    let port = data_port().await;
    let request = Arc::new(request());
    let served = Arc::new(AtomicU64::new(0));
    let (started, cpu) = (Instant::now(), cpu_time());
    let senders: Vec<_> =
        (0..in_flight).map(|_| tokio::spawn(send(port, request.clone(), served.clone(), started + seconds))).collect();
    for sender in senders {
        sender.await.unwrap();
    }
    println!("in,  DataPort         {}", rate(served.load(Relaxed), started, cpu));
}

async fn measure<F: Future<Output = ()> + Send + 'static>(
    seconds: Duration,
    in_flight: usize,
    call: impl Fn() -> F + Clone + Send + Sync + 'static,
) -> String {
    let done = Arc::new(AtomicU64::new(0));
    let (started, cpu) = (Instant::now(), cpu_time());
    let workers: Vec<_> = (0..in_flight)
        .map(|_| {
            let (call, done) = (call.clone(), done.clone());
            tokio::spawn(async move {
                while started.elapsed() < seconds {
                    call().await;
                    done.fetch_add(1, Relaxed);
                }
            })
        })
        .collect();
    for worker in workers {
        worker.await.unwrap();
    }
    rate(done.load(Relaxed), started, cpu)
}

/// The time of the processor counts both sides, and says what a busy machine hides from the rate.
fn rate(done: u64, started: Instant, cpu: Duration) -> String {
    let per_second = done as f64 / started.elapsed().as_secs_f64();
    let cpu_us = (cpu_time() - cpu).as_secs_f64() * 1e6 / done as f64;
    format!("{per_second:>8.0}/s  {cpu_us:>6.1} us of processor time each, both sides")
}

/// User and system time of this process so far; clock ticks are hundredths of a second on Linux.
fn cpu_time() -> Duration {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    let ticks: u64 = fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap();
    Duration::from_millis(ticks * 10)
}

fn url(address: SocketAddr) -> String {
    format!("http://{address}/hook")
}

fn payload() -> Bytes {
    Bytes::from(format!(r#"{{"text":"{}"}}"#, "x".repeat(PAYLOAD_BYTES - 11)))
}

fn delivery() -> Delivery {
    Delivery {
        id: Uuid::new_v4(),
        topic: "order.created".to_owned(),
        key: Some("o-1".to_owned()),
        aggregate_type: None,
        payload: payload(),
        headers: vec![("x-tenant".to_owned(), "a".to_owned()), ("x-source".to_owned(), "github".to_owned())],
        attempt: 0,
        routing_key: None,
        time_left: Duration::from_secs(30),
    }
}

async fn by_reqwest(client: &reqwest::Client, receiver: SocketAddr) {
    let message = delivery();
    let mut request = client
        .post(url(receiver))
        .timeout(Duration::from_secs(30))
        .header("content-type", "application/json")
        .header("x-message-id", message.id.to_string())
        .header("x-topic", &message.topic)
        .header("x-attempt", message.attempt)
        .header("x-message-key", message.key.as_deref().unwrap_or_default());
    for (name, value) in &message.headers {
        request = request.header(name, value);
    }
    let answer = request.body(message.payload).send().await.unwrap();
    assert!(answer.status().is_success());
    answer.bytes().await.unwrap();
}

/// Answers 204 to each request of a fixed size; as cheap as a receiver can be.
async fn receiver() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut buffer = Vec::with_capacity(4096);
                while stream.read_buf(&mut buffer).await.is_ok_and(|read| read > 0) {
                    let Some(end) = buffer.windows(4).position(|window| window == b"\r\n\r\n") else { continue };
                    if buffer.len() < end + 4 + PAYLOAD_BYTES {
                        continue;
                    }
                    buffer.clear();
                    if stream.write_all(b"HTTP/1.1 204 No Content\r\n\r\n").await.is_err() {
                        return;
                    }
                }
            });
        }
    });
    address
}

struct Accept;

#[async_trait]
impl Intake for Accept {
    async fn admit(&self, batch: Vec<Received>) -> Vec<Admission> {
        batch.iter().map(|_| Admission::Stored(Uuid::nil())).collect()
    }
}

async fn data_port() -> SocketAddr {
    let sources: Vec<(HttpSource, Arc<dyn Intake>)> = vec![(HttpSource::new("orders", "/orders"), Arc::new(Accept))];
    let port = Arc::new(DataPort::new(DataPortConfig::default(), sources).unwrap());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(port.serve(listener, std::future::pending(), Duration::ZERO));
    address
}

fn request() -> Vec<u8> {
    let body = payload();
    let head = format!(
        "POST /inbox/orders HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nX-GitHub-Event: push\r\n\
         X-GitHub-Delivery: d-1\r\nUser-Agent: sender\r\nAccept: */*\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    [head.as_bytes(), &body].concat()
}

async fn send(port: SocketAddr, request: Arc<Vec<u8>>, served: Arc<AtomicU64>, end: Instant) {
    let mut stream = TcpStream::connect(port).await.unwrap();
    stream.set_nodelay(true).unwrap();
    let mut buffer = Vec::with_capacity(4096);
    while Instant::now() < end {
        stream.write_all(&request).await.unwrap();
        buffer.clear();
        // The body of every answer ends with this brace, and nothing before it does.
        while buffer.last() != Some(&b'}') {
            assert!(stream.read_buf(&mut buffer).await.unwrap() > 0);
        }
        assert!(buffer.starts_with(b"HTTP/1.1 202"));
        served.fetch_add(1, Relaxed);
    }
}

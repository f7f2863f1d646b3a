//! The other side of HTTP: a receiver as cheap as one can be, and senders. On a thread of their own, so that what they cost can be told
//! apart from what the relay costs.

use std::{
    net::SocketAddr,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    runtime::Handle,
    sync::oneshot,
};

use crate::cpu;

/// A thread with a runtime of its own.
pub struct Aside {
    handle: Handle,
    thread: Option<u64>,
    _end: oneshot::Sender<()>,
}

impl Aside {
    /// Starts it.
    ///
    /// # Errors
    /// The system gives no thread.
    pub fn start() -> anyhow::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let handle = runtime.handle().clone();
        let (tell, told) = std::sync::mpsc::channel();
        let (end, ended) = oneshot::channel::<()>();
        std::thread::Builder::new().name("beside the relay".to_owned()).spawn(move || {
            let _ = tell.send(cpu::this_thread());
            runtime.block_on(async { ended.await.ok() });
        })?;
        Ok(Self { handle, thread: told.recv()?, _end: end })
    }

    /// Runs something there.
    pub async fn run<T: Send + 'static>(&self, work: impl Future<Output = T> + Send + 'static) -> anyhow::Result<T> {
        Ok(self.handle.spawn(work).await?)
    }

    /// Begins something there.
    pub fn begin(&self, work: impl Future<Output = ()> + Send + 'static) {
        drop(self.handle.spawn(work));
    }

    /// Processor time of the thread so far.
    pub fn cpu(&self) -> Duration {
        self.thread.and_then(cpu::of_thread).unwrap_or_default()
    }
}

/// Answers 204 to every request, and counts.
pub struct Receiver {
    /// Where it listens.
    pub address: SocketAddr,
    /// Requests so far.
    pub count: Arc<AtomicU64>,
}

impl Receiver {
    /// Listens on loopback.
    ///
    /// # Errors
    /// No port.
    pub async fn start(aside: &Aside) -> anyhow::Result<Self> {
        let count = Arc::new(AtomicU64::new(0));
        let counted = count.clone();
        let listener = aside.run(TcpListener::bind("127.0.0.1:0")).await?.context("cannot listen")?;
        let address = listener.local_addr()?;
        aside.begin(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(answer(stream, counted.clone()));
            }
        });
        Ok(Self { address, count })
    }
}

async fn answer(mut stream: TcpStream, count: Arc<AtomicU64>) {
    let _ = stream.set_nodelay(true);
    let mut buffer = Vec::with_capacity(8192);
    while stream.read_buf(&mut buffer).await.is_ok_and(|read| read > 0) {
        let mut answers = Vec::new();
        while let Some(length) = whole_request(&buffer) {
            buffer.drain(..length);
            answers.extend_from_slice(b"HTTP/1.1 204 No Content\r\n\r\n");
            count.fetch_add(1, Relaxed);
        }
        if !answers.is_empty() && stream.write_all(&answers).await.is_err() {
            return;
        }
    }
}

/// Length of the first request in the buffer, once it is there as a whole.
fn whole_request(buffer: &[u8]) -> Option<usize> {
    let head = buffer.windows(4).position(|window| window == b"\r\n\r\n")? + 4;
    let text = std::str::from_utf8(&buffer[..head]).ok()?;
    let length = text.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse::<usize>().ok())?
    });
    let whole = head + length.unwrap_or(0);
    (buffer.len() >= whole).then_some(whole)
}

/// Sends `count` different requests over `connections` kept connections; how long each took, in seconds.
pub async fn send(port: SocketAddr, path: &'static str, count: u64, connections: u64) -> anyhow::Result<Vec<f64>> {
    let next = Arc::new(AtomicU64::new(1));
    let all = Arc::new(Mutex::new(Vec::with_capacity(usize::try_from(count).unwrap_or(0))));
    let senders: Vec<_> =
        (0..connections).map(|_| tokio::spawn(send_some(port, path, count, next.clone(), all.clone()))).collect();
    for sender in senders {
        sender.await??;
    }
    Ok(std::mem::take(&mut *all.lock().unwrap_or_else(PoisonError::into_inner)))
}

async fn send_some(
    port: SocketAddr,
    path: &str,
    count: u64,
    next: Arc<AtomicU64>,
    all: Arc<Mutex<Vec<f64>>>,
) -> anyhow::Result<()> {
    let mut stream = TcpStream::connect(port).await?;
    stream.set_nodelay(true)?;
    let mut buffer = Vec::with_capacity(4096);
    let mut took = Vec::new();
    loop {
        let number = next.fetch_add(1, Relaxed);
        if number > count {
            all.lock().unwrap_or_else(PoisonError::into_inner).extend(took);
            return Ok(());
        }
        let body = body(number);
        let head = format!(
            "POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nUser-Agent: bench\r\nContent-Length: {}\r\n\r\n",
            body.len()
        );
        let begun = Instant::now();
        stream.write_all(&[head.as_bytes(), body.as_bytes()].concat()).await?;
        buffer.clear();
        // The body of every answer ends with this brace, and nothing before it does.
        while buffer.last() != Some(&b'}') {
            if stream.read_buf(&mut buffer).await? == 0 {
                bail!("the data port closed a connection");
            }
        }
        if !buffer.starts_with(b"HTTP/1.1 202") {
            bail!("the data port answered: {}", String::from_utf8_lossy(&buffer));
        }
        took.push(begun.elapsed().as_secs_f64());
    }
}

/// The message with this number, about 512 bytes.
pub fn body(number: u64) -> String {
    format!(r#"{{"n":{number},"id":"m{number}","fill":"{}"}}"#, "x".repeat(470))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_counted_when_it_is_whole() {
        let request = b"POST / HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc";
        assert_eq!(whole_request(request), Some(request.len()));
        assert_eq!(whole_request(&request[..request.len() - 1]), None);
        assert_eq!(whole_request(b"GET / HTTP/1.1\r\n\r\nrest"), Some(18));
    }
}

//! An HTTP receiver that writes down each request and answers as the test says.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{HeaderMap, Method, Request, Response, StatusCode, Uri, Version};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::TcpListener;
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;

/// A request as it arrived, whole.
#[derive(Debug, Clone)]
pub struct Recorded {
    /// Method.
    pub method: Method,
    /// Path and query as sent.
    pub uri: Uri,
    /// HTTP version.
    pub version: Version,
    /// Headers, repeats in order.
    pub headers: HeaderMap,
    /// Body, whole.
    pub body: Bytes,
    /// When its body was complete.
    pub at: Instant,
    /// Number of the connection, counted from 0.
    pub connection: usize,
    /// Number of requests that were being answered when it arrived, itself included.
    pub in_flight: usize,
}

impl Recorded {
    /// Value of a header as text; empty when absent.
    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
    }

    /// Path without the query.
    pub fn path(&self) -> &str {
        self.uri.path()
    }

    /// Body as text, with replacement characters where it is none.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// Body as JSON; panics when it is none.
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("no JSON ({error}): {}", self.text()))
    }
}

/// What becomes of the connection after the delay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// The answer is sent.
    Respond,
    /// The connection is closed without a byte.
    Close,
    /// Nothing is sent and nothing is closed until the client gives up.
    Stall,
}

/// How to answer one request.
#[derive(Debug, Clone)]
pub struct Answer {
    /// Status.
    pub status: StatusCode,
    /// Headers.
    pub headers: HeaderMap,
    /// Body.
    pub body: Bytes,
    /// Wait before the ending.
    pub delay: Duration,
    /// What happens then.
    pub ending: Ending,
}

impl Answer {
    /// An empty answer with this status; panics on a number that is none.
    pub fn status(status: u16) -> Answer {
        Answer {
            status: StatusCode::from_u16(status).expect("a status"),
            headers: HeaderMap::new(),
            body: Bytes::new(),
            delay: Duration::ZERO,
            ending: Ending::Respond,
        }
    }

    /// 200 without a body.
    pub fn ok() -> Answer {
        Answer::status(200)
    }

    /// Closes the connection instead of answering.
    pub fn close() -> Answer {
        Answer { ending: Ending::Close, ..Answer::ok() }
    }

    /// Never answers.
    pub fn stall() -> Answer {
        Answer { ending: Ending::Stall, ..Answer::ok() }
    }

    /// With a header.
    pub fn header(mut self, name: &'static str, value: &str) -> Answer {
        self.headers.append(name, value.parse().expect("a header value"));
        self
    }

    /// With a body.
    pub fn body(mut self, body: impl Into<Bytes>) -> Answer {
        self.body = body.into();
        self
    }

    /// After a wait.
    pub fn after(mut self, delay: Duration) -> Answer {
        self.delay = delay;
        self
    }
}

type Script = dyn Fn(&Recorded) -> Answer + Send + Sync;

struct Shared {
    requests: Mutex<Vec<Recorded>>,
    arrived: Notify,
    /// Answers that come first, one per request.
    queued: Mutex<VecDeque<Answer>>,
    script: Mutex<Arc<Script>>,
    in_flight: AtomicUsize,
    connections: AtomicUsize,
    tls: Option<Arc<rustls::ServerConfig>>,
}

/// A receiver on a free port of 127.0.0.1 (HTTP/1.1 and HTTP/2 with prior knowledge). It ends with the handle.
/// Answers 200 until told otherwise.
pub struct Recorder {
    host: Ipv4Addr,
    port: u16,
    shared: Arc<Shared>,
    /// Whether connections may live.
    open: watch::Sender<bool>,
    listening: Mutex<Option<JoinHandle<()>>>,
}

impl std::fmt::Debug for Recorder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Recorder").field("port", &self.port).field("requests", &self.count()).finish_non_exhaustive()
    }
}

fn lock<T: ?Sized>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Recorder {
    /// Starts a receiver for plain HTTP.
    pub async fn start() -> Recorder {
        Recorder::begin(Ipv4Addr::LOCALHOST, None).await
    }

    /// Starts a receiver for plain HTTP at another address of this machine, which pods or containers reach.
    pub async fn start_at(host: Ipv4Addr) -> Recorder {
        Recorder::begin(host, None).await
    }

    /// Starts a receiver for HTTPS.
    pub async fn start_tls(config: rustls::ServerConfig) -> Recorder {
        Recorder::begin(Ipv4Addr::LOCALHOST, Some(Arc::new(config))).await
    }

    async fn begin(host: Ipv4Addr, tls: Option<Arc<rustls::ServerConfig>>) -> Recorder {
        crate::init();
        let shared = Arc::new(Shared {
            requests: Mutex::default(),
            arrived: Notify::new(),
            queued: Mutex::default(),
            script: Mutex::new(Arc::new(|_: &Recorded| Answer::ok())),
            in_flight: AtomicUsize::new(0),
            connections: AtomicUsize::new(0),
            tls,
        });
        let port = crate::free_port();
        let recorder = Recorder { host, port, shared, open: watch::channel(true).0, listening: Mutex::new(None) };
        recorder.restart().await;
        recorder
    }

    /// The port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// `http://ADDRESS:PORT`, or `https://localhost:PORT` with TLS.
    pub fn url(&self) -> String {
        match self.shared.tls {
            Some(_) => format!("https://localhost:{}", self.port),
            None => format!("http://{}:{}", self.host, self.port),
        }
    }

    /// [`Recorder::url`] with a path, which starts with `/`.
    pub fn url_for(&self, path: &str) -> String {
        self.url() + path
    }

    /// Answers every request from now on with the same.
    pub fn answer_always(&self, answer: Answer) {
        self.answer_with(move |_| answer.clone());
    }

    /// Answers every request from now on as the closure says.
    pub fn answer_with(&self, script: impl Fn(&Recorded) -> Answer + Send + Sync + 'static) {
        *lock(&self.shared.script) = Arc::new(script);
    }

    /// Answers the next requests with these, one each, before anything else is asked.
    pub fn answer_next(&self, answers: impl IntoIterator<Item = Answer>) {
        lock(&self.shared.queued).extend(answers);
    }

    /// All requests so far, in order of arrival.
    pub fn requests(&self) -> Vec<Recorded> {
        lock(&self.shared.requests).clone()
    }

    /// Number of requests so far.
    pub fn count(&self) -> usize {
        lock(&self.shared.requests).len()
    }

    /// Number of connections so far.
    pub fn connections(&self) -> usize {
        self.shared.connections.load(Ordering::SeqCst)
    }

    /// Forgets the requests so far.
    pub fn clear(&self) {
        lock(&self.shared.requests).clear();
    }

    /// Waits until at least `count` requests have arrived, and returns all. Panics when `timeout` has passed.
    pub async fn wait_for(&self, count: usize, timeout: Duration) -> Vec<Recorded> {
        self.wait_until(&format!("{count} requests"), timeout, |requests| requests.len() >= count).await
    }

    /// Waits until the requests satisfy `enough`, and returns all. Panics with `what` when `timeout` has passed.
    pub async fn wait_until(
        &self,
        what: &str,
        timeout: Duration,
        enough: impl Fn(&[Recorded]) -> bool,
    ) -> Vec<Recorded> {
        let wait = async {
            loop {
                let arrived = self.shared.arrived.notified();
                tokio::pin!(arrived);
                arrived.as_mut().enable();
                if enough(&lock(&self.shared.requests)) {
                    return;
                }
                arrived.await;
            }
        };
        if tokio::time::timeout(timeout, wait).await.is_err() {
            panic!("the receiver did not see {what} within {timeout:?}; it saw {}", self.summary());
        }
        self.requests()
    }

    fn summary(&self) -> String {
        let requests = lock(&self.shared.requests);
        let last = requests.iter().rev().take(5).rev().map(|r| format!("\n  {} {} {}", r.method, r.uri, r.text()));
        format!("{} requests, the last:{}", requests.len(), last.collect::<String>())
    }

    /// Goes away: the port refuses connections, open ones are closed. Requests stay recorded.
    pub async fn stop(&self) {
        self.open.send_replace(false);
        let listening = lock(&self.listening).take();
        if let Some(listening) = listening {
            listening.abort();
            let _ = listening.await;
        }
    }

    /// Comes back on the same port after [`Recorder::stop`].
    pub async fn restart(&self) {
        self.open.send_replace(true);
        let address = SocketAddr::from((self.host, self.port));
        let listener = crate::wait::eventually_ok("the receiver's port is free", Duration::from_secs(10), || {
            TcpListener::bind(address)
        })
        .await;
        let task = tokio::spawn(accept(listener, self.shared.clone(), self.open.subscribe()));
        *lock(&self.listening) = Some(task);
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        if let Some(listening) = lock(&self.listening).take() {
            listening.abort();
        }
    }
}

async fn accept(listener: TcpListener, shared: Arc<Shared>, open: watch::Receiver<bool>) {
    while let Ok((stream, _)) = listener.accept().await {
        let _ = stream.set_nodelay(true);
        let number = shared.connections.fetch_add(1, Ordering::SeqCst);
        tokio::spawn(connection(stream, shared.clone(), number, open.clone()));
    }
}

async fn connection(
    stream: tokio::net::TcpStream,
    shared: Arc<Shared>,
    number: usize,
    mut open: watch::Receiver<bool>,
) {
    let serving = async {
        match shared.tls.clone() {
            None => serve(TokioIo::new(stream), &shared, number).await,
            Some(config) => {
                if let Ok(stream) = tokio_rustls::TlsAcceptor::from(config).accept(stream).await {
                    serve(TokioIo::new(stream), &shared, number).await;
                }
            }
        }
    };
    tokio::select! {
        () = serving => {}
        _ = open.wait_for(|open| !open) => {}
    }
}

async fn serve(
    io: impl hyper::rt::Read + hyper::rt::Write + Unpin + Send + 'static,
    shared: &Arc<Shared>,
    number: usize,
) {
    let service = service_fn(|request| respond(shared.clone(), number, request));
    // Errors are the test's own doing: a client that went away, an answer that was to be withheld.
    let _ = hyper_util::server::conn::auto::Builder::new(TokioExecutor::new()).serve_connection(io, service).await;
}

/// Ends the connection when returned from a service.
#[derive(Debug)]
struct Closed;

impl std::fmt::Display for Closed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("closed by the test")
    }
}

impl std::error::Error for Closed {}

/// Counts a request as being answered, also when the client leaves.
struct InFlight(Arc<Shared>);

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::SeqCst);
    }
}

async fn respond(
    shared: Arc<Shared>,
    connection: usize,
    request: Request<Incoming>,
) -> Result<Response<Full<Bytes>>, Closed> {
    let in_flight = shared.in_flight.fetch_add(1, Ordering::SeqCst) + 1;
    let _guard = InFlight(shared.clone());
    let (head, body) = request.into_parts();
    let body = body.collect().await.map_err(|_| Closed)?.to_bytes();
    let recorded = Recorded {
        method: head.method,
        uri: head.uri,
        version: head.version,
        headers: head.headers,
        body,
        at: Instant::now(),
        connection,
        in_flight,
    };
    let answer = choose(&shared, &recorded);
    lock(&shared.requests).push(recorded);
    shared.arrived.notify_waiters();
    if !answer.delay.is_zero() {
        tokio::time::sleep(answer.delay).await;
    }
    match answer.ending {
        Ending::Respond => Ok(response(answer)),
        Ending::Close => Err(Closed),
        Ending::Stall => Ok::<_, Infallible>(std::future::pending().await).map_err(|never| match never {}),
    }
}

fn choose(shared: &Shared, recorded: &Recorded) -> Answer {
    if let Some(answer) = lock(&shared.queued).pop_front() {
        return answer;
    }
    // Not called under its lock: a script may change the script.
    let script = lock(&shared.script).clone();
    script(recorded)
}

fn response(answer: Answer) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(answer.body));
    *response.status_mut() = answer.status;
    *response.headers_mut() = answer.headers;
    response
}

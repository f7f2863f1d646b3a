use std::time::{Duration, Instant};

use queuebox_testkit::{Answer, Authority, Identity, Process, Proxy, ProxyMode, Recorder, Signal, eventually};

const SOON: Duration = Duration::from_secs(10);

#[tokio::test]
async fn recorder_answers_as_told() {
    let recorder = Recorder::start().await;
    recorder.answer_next([Answer::status(503).header("retry-after", "3"), Answer::close()]);
    let client = reqwest::Client::new();
    let send = |body: &'static str| client.post(recorder.url_for("/a?b=c")).header("x-n", "1").body(body).send();
    let first = send("one").await.unwrap();
    assert_eq!((first.status().as_u16(), first.headers()["retry-after"].as_bytes()), (503, b"3".as_slice()));
    assert!(send("two").await.is_err());
    assert_eq!(send("three").await.unwrap().status(), 200);
    let requests = recorder.wait_for(3, SOON).await;
    let bodies: Vec<String> = requests.iter().map(|request| request.text()).collect();
    assert_eq!(bodies, ["one", "two", "three"]);
    assert_eq!((requests[0].path(), requests[0].header("X-N")), ("/a", "1"));
}

#[tokio::test]
async fn recorder_goes_away_and_comes_back() {
    let recorder = Recorder::start().await;
    let client = reqwest::Client::new();
    assert!(client.get(recorder.url()).send().await.is_ok());
    recorder.stop().await;
    assert!(client.get(recorder.url()).send().await.is_err());
    recorder.restart().await;
    assert!(client.get(recorder.url()).send().await.is_ok());
    assert_eq!(recorder.count(), 2);
}

#[tokio::test]
async fn recorder_speaks_tls_and_asks_for_certificates() {
    let (authority, stranger) = (Authority::new(), Authority::new());
    let config = authority.mutual_server_config(&authority.server());
    let recorder = Recorder::start_tls(config).await;
    let client = |identity: Option<Identity>| {
        let ca = reqwest::Certificate::from_pem(authority.ca_pem().as_bytes()).unwrap();
        let mut builder = reqwest::Client::builder().tls_certs_only([ca]);
        if let Some(identity) = identity {
            let pem = identity.cert_pem() + &identity.key_pem();
            builder = builder.identity(reqwest::Identity::from_pem(pem.as_bytes()).unwrap());
        }
        builder.build().unwrap()
    };
    assert!(client(Some(authority.client("shop"))).get(recorder.url()).send().await.is_ok());
    assert!(client(None).get(recorder.url()).send().await.is_err());
    assert!(client(Some(stranger.client("shop"))).get(recorder.url()).send().await.is_err());
    assert_eq!(recorder.count(), 1);
}

#[tokio::test]
async fn proxy_cuts_and_holds_replies() {
    let recorder = Recorder::start().await;
    let proxy = Proxy::to(recorder.port()).await;
    let client = reqwest::Client::new();
    assert!(client.get(proxy.url()).send().await.is_ok());
    proxy.set(ProxyMode::HoldReplies);
    let waiting = tokio::spawn(client.get(proxy.url()).send());
    recorder.wait_for(2, SOON).await;
    assert!(!waiting.is_finished());
    proxy.cut();
    assert!(waiting.await.unwrap().is_err());
    proxy.set(ProxyMode::Refuse);
    assert!(client.get(proxy.url()).send().await.is_err());
    assert_eq!(recorder.count(), 2);
}

#[tokio::test]
async fn process_output_and_end() {
    let process = Process::program("/bin/sh")
        .args(["-c", "trap 'echo bye; exit 3' TERM; echo hello; while :; do sleep 0.05; done"]);
    let process = process.spawn();
    process.wait_output("hello", SOON).await;
    process.signal(Signal::Term);
    assert_eq!(process.wait(SOON).await.code(), Some(3));
    assert_eq!(process.output(), "hello\nbye\n");
}

/// The watchdog at work: a middle process starts a child the way the testkit does and is killed without warning.
#[tokio::test]
async fn children_end_with_a_killed_parent() {
    if let Ok(file) = std::env::var("TESTKIT_CHILD_PID_FILE") {
        let sleeper = Process::program("/bin/sleep").arg("600").spawn();
        std::fs::write(file, sleeper.pid().to_string()).unwrap();
        std::future::pending::<()>().await;
    }
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("pid");
    let middle = Process::program(std::env::current_exe().unwrap())
        .args(["--exact", "tools::children_end_with_a_killed_parent"])
        .env("TESTKIT_CHILD_PID_FILE", &file)
        .spawn();
    let pid: u32 =
        eventually("the child runs", SOON, || async { std::fs::read_to_string(&file).ok()?.parse().ok() }).await;
    let sleeping = || std::fs::read_to_string(format!("/proc/{pid}/cmdline")).is_ok_and(|line| line.contains("sleep"));
    assert!(sleeping());
    middle.kill9().await;
    eventually("the child is gone", SOON, || async { (!sleeping()).then_some(()) }).await;
}

#[tokio::test]
async fn eventually_gives_up() {
    let started = Instant::now();
    let look = tokio::spawn(eventually("never", Duration::from_millis(50), || async { None::<()> }));
    assert!(look.await.unwrap_err().is_panic());
    assert!(started.elapsed() >= Duration::from_millis(50));
}

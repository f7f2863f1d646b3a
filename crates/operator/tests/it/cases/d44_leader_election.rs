//! D44: two operators as processes; the leader is cut off, delayed, stopped and continued. One writes at any time.

use std::path::{Path, PathBuf};

use queuebox_testkit::{self as testkit, Process, Proxy, ProxyMode, eventually};
use serde_json::{Value, json};

use crate::{
    leading::holder,
    rights::grant,
    support::{PATIENCE, World, shop_relay},
};

/// One operator behind a proxy of its own, with an account of its own, by which the audit log tells who wrote.
struct Replica {
    identity: &'static str,
    proxy: Proxy,
    process: Process,
    port: u16,
}

impl Replica {
    async fn start(world: &World, identity: &'static str) -> Self {
        grant(world, identity).await;
        let direct = world.kubernetes.url();
        let proxy = Proxy::to(direct.rsplit(':').next().unwrap().parse().unwrap()).await;
        let kubeconfig = world.kubernetes.kubeconfig_for(&world.namespace, identity).await;
        let kubeconfig = through(&kubeconfig, &direct, proxy.port());
        let port = testkit::free_port();
        let process = Process::queuebox(["operator", "--worker-image", "queuebox/queuebox:test", "--log", "debug"])
            .args(["--namespace", &world.namespace, "--lease-namespace", &world.namespace, "--identity", identity])
            .args(["--listen", &format!("127.0.0.1:{port}")])
            .env("KUBECONFIG", kubeconfig.to_str().unwrap())
            .spawn();
        Self { identity, proxy, process, port }
    }

    /// Whether the process itself says that it leads.
    async fn says_it_leads(&self) -> Option<bool> {
        let text = reqwest::get(format!("http://127.0.0.1:{}/metrics", self.port)).await.ok()?.text().await.ok()?;
        let line = text.lines().find(|line| line.starts_with("queuebox_operator_leader "))?;
        Some(line.ends_with(" 1"))
    }

    async fn leads(&self, world: &World) {
        let what = format!("{} leads", self.identity);
        eventually(&what, PATIENCE, || async { (holder(world).await == self.identity).then_some(()) }).await;
    }

    async fn stands_by(&self) {
        let what = format!("{} stands by", self.identity);
        eventually(&what, PATIENCE, || async { self.says_it_leads().await.filter(|leads| !leads) }).await;
    }
}

/// The kubeconfig with another port.
fn through(kubeconfig: &Path, direct: &str, port: u16) -> PathBuf {
    let text = std::fs::read_to_string(kubeconfig).unwrap().replace(direct, &format!("https://127.0.0.1:{port}"));
    let path = kubeconfig.with_extension("proxied");
    std::fs::write(&path, text).unwrap();
    path
}

/// Gives the leader something to write, and waits until it is written.
async fn work(world: &World, seconds: u32) {
    world.apply("Relay", "shop", shop_relay(json!({"drainTimeout": format!("{seconds}s")}))).await;
    world
        .until("deployments", "shop-relay", "the change is rolled out", |it| {
            it["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == seconds + 15
        })
        .await;
}

/// Every write but those of the Lease is by the one who took the Lease last.
fn one_writer_at_a_time(world: &World) {
    let prefix = format!("system:serviceaccount:{}:", world.namespace);
    let mut entries: Vec<(String, String, Value)> = world
        .kubernetes
        .audit_log()
        .into_iter()
        .filter_map(|entry| {
            let user = entry["user"]["username"].as_str()?.strip_prefix(&prefix)?.to_owned();
            let done = entry["responseStatus"]["code"].as_i64()? < 300 && entry["stage"] == "ResponseComplete";
            let writes = matches!(entry["verb"].as_str()?, "create" | "update" | "patch" | "delete");
            (done && writes)
                .then(|| (entry["requestReceivedTimestamp"].as_str().unwrap_or_default().to_owned(), user, entry))
        })
        .collect();
    entries.sort_by(|(a, ..), (b, ..)| a.cmp(b));
    let (mut holder, mut writes) = (String::new(), 0);
    for (at, user, entry) in entries {
        if entry["objectRef"]["resource"] == "leases" {
            holder = user;
        } else {
            writes += 1;
            assert_eq!(user, holder, "a write at {at} while {holder} held the Lease: {entry}");
        }
    }
    assert!(writes > 10, "{writes}");
}

#[tokio::test(flavor = "multi_thread")]
async fn one_writes_at_any_time_whatever_happens_to_the_leader() {
    let world = World::new().await;
    world.shop().await;
    let a = Replica::start(&world, "a").await;
    a.leads(&world).await;
    let b = Replica::start(&world, "b").await;
    work(&world, 31).await;
    let pods = |it: &Value| it["spec"]["template"].clone();
    // Cut off: it steps down by itself, the other follows, and nothing crashes.
    a.proxy.set(ProxyMode::Stall);
    a.proxy.cut();
    a.stands_by().await;
    b.leads(&world).await;
    work(&world, 32).await;
    a.proxy.set(ProxyMode::Pass);
    a.proxy.cut();
    // Answers come late: the Lease cannot be renewed in time.
    b.proxy.set(ProxyMode::Delay(std::time::Duration::from_secs(12)));
    b.stands_by().await;
    a.leads(&world).await;
    work(&world, 33).await;
    b.proxy.set(ProxyMode::Pass);
    b.proxy.cut();
    let before = world.get("deployments", "shop-relay").await.unwrap();
    // Stopped in the middle of its work, and continued long after.
    a.process.pause();
    b.leads(&world).await;
    a.process.cont();
    a.stands_by().await;
    let after = world.get("deployments", "shop-relay").await.unwrap();
    assert_eq!(pods(&before), pods(&after), "no worker is restarted for it");
    work(&world, 34).await;
    assert!(a.process.is_running() && b.process.is_running());
    one_writer_at_a_time(&world);
}

//! The soak: writers whose transactions overlap and sometimes roll back, workers of the built program that are killed with -9 and started
//! again, a receiver that fails and stalls. Lost 0, order per key, nothing that was rolled back, repeats only of what was not marked at a kill.
//!
//! `./dev test soak` runs it in full: `QUEUEBOX_SOAK_ROWS=1000000`, `QUEUEBOX_SOAK_KEYS=10000`.

use std::{
    collections::{HashMap, HashSet},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    time::Duration,
};

use rand::{RngExt, SeedableRng, rngs::StdRng, seq::IndexedRandom};
use serde_json::json;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};

use queuebox_testkit as testkit;

use crate::support::{Db, Kind, Worker, World};

const WRITERS: u64 = 12;
/// How many of the last messages may not be marked when a worker dies: far more than are ever in flight.
const RECENT: usize = 20_000;

/// A number of the environment, by which `./dev test soak` makes a test larger.
pub fn setting(name: &str, usual: u64) -> u64 {
    std::env::var(name).ok().map_or(usual, |value| value.parse().unwrap_or_else(|_| panic!("{name} is no number")))
}

// ------------------------------------------------------------------------------------------------------- receiver

/// What the receiver took responsibility for, in order.
#[derive(Default)]
struct Taken {
    /// Key and number within it, by id; ids in order of their first arrival.
    order: Vec<(String, u64, String)>,
    times: HashMap<String, u32>,
}

struct Receiver {
    port: u16,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    taken: Mutex<Taken>,
    /// Ports of the connections that are open, on the side of the workers.
    open: Mutex<HashSet<u16>>,
    /// Neither fails nor stalls any more.
    calm: AtomicBool,
}

impl Receiver {
    async fn start() -> Receiver {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let shared = Arc::<Shared>::default();
        let accepting = shared.clone();
        tokio::spawn(async move {
            while let Ok((stream, from)) = listener.accept().await {
                let shared = accepting.clone();
                shared.open.lock().unwrap().insert(from.port());
                tokio::spawn(async move {
                    // A worker that dies cuts its connections.
                    let _ = serve(stream, &shared).await;
                    shared.open.lock().unwrap().remove(&from.port());
                });
            }
        });
        Receiver { port, shared }
    }

    fn count(&self) -> u64 {
        self.shared.taken.lock().unwrap().order.len() as u64
    }

    /// Waits until everything that this worker has sent was read, after its end.
    async fn has_read_all_of(&self, ports: &HashSet<u16>) {
        testkit::eventually("the connections of a dead worker end", crate::support::PATIENCE, || async {
            self.shared.open.lock().unwrap().is_disjoint(ports).then_some(())
        })
        .await;
    }

    /// Ids that came last.
    fn recent(&self) -> Vec<String> {
        let taken = self.shared.taken.lock().unwrap();
        taken.order.iter().rev().take(RECENT).map(|(_, _, id)| id.clone()).collect()
    }
}

async fn serve(mut stream: TcpStream, shared: &Shared) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let mut rng = StdRng::from_rng(&mut rand::rng());
    let mut buffer = Vec::new();
    loop {
        while let Some((length, key, id, number)) = request(&buffer) {
            buffer.drain(..length);
            let roll = if shared.calm.load(SeqCst) { 10_000 } else { rng.random_range(0..10_000) };
            let answer = match roll {
                // No answer: the worker gives up, or dies.
                0..2 => return stream.read_to_end(&mut buffer).await.map(|_| ()),
                2..150 => "HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\n\r\n",
                150..160 => return Ok(()),
                _ => {
                    let mut taken = shared.taken.lock().unwrap();
                    let times = taken.times.entry(id.clone()).or_default();
                    *times += 1;
                    if *times == 1 {
                        taken.order.push((key, number, id));
                    }
                    "HTTP/1.1 204 No Content\r\n\r\n"
                }
            };
            stream.write_all(answer.as_bytes()).await?;
        }
        if stream.read_buf(&mut buffer).await? == 0 {
            return Ok(());
        }
    }
}

/// The first whole request: its length, key, id, and the number in its body `{"n": 17}`.
fn request(buffer: &[u8]) -> Option<(usize, String, String, u64)> {
    let head = buffer.windows(4).position(|window| window == b"\r\n\r\n")? + 4;
    let text = std::str::from_utf8(&buffer[..head]).unwrap();
    let header = |wanted: &str| {
        let line =
            text.lines().find_map(|line| line.split_once(": ").filter(|(name, _)| name.eq_ignore_ascii_case(wanted)));
        line.map(|(_, value)| value.to_owned()).unwrap_or_else(|| panic!("no {wanted} in {text}"))
    };
    let length = head + header("content-length").parse::<usize>().unwrap();
    let body = buffer.get(head..length)?;
    let body: serde_json::Value = serde_json::from_slice(body).unwrap();
    Some((length, header("x-message-key"), header("x-message-id"), body["n"].as_u64().unwrap()))
}

// -------------------------------------------------------------------------------------------------------- writers

/// What was committed: the numbers of each key, in the order of its one writer. And ids that were rolled back.
#[derive(Default)]
struct Written {
    numbers: HashMap<String, Vec<u64>>,
    rolled_back: HashSet<String>,
}

async fn write(db: Db, writer: u64, rows: u64, keys: u64, seed: u64) -> Written {
    let mut rng = StdRng::seed_from_u64(seed ^ writer);
    let mut written = Written::default();
    let (mut committed, mut number) = (0, 0);
    while committed < rows {
        let count = rng.random_range(1..=(rows / 50).clamp(4, 100)).min(rows - committed);
        let batch: Vec<(String, String, u64)> = (0..count)
            .map(|_| {
                number += 1;
                let key = rng.random_range(0..keys.div_ceil(WRITERS)) * WRITERS + writer;
                (uuid::Uuid::new_v4().to_string(), format!("k{key}"), number)
            })
            .collect();
        let values: Vec<String> = batch
            .iter()
            .map(|(id, key, number)| format!("('{id}', 'order', '{key}', '{{\"n\": {number}}}')"))
            .collect();
        let mut tx = db.begin().await;
        // In two statements, so that the numbers of other transactions come in between.
        let (first, second) = values.split_at(values.len() / 2);
        for part in [first, second].into_iter().filter(|part| !part.is_empty()) {
            tx.execute(&format!("INSERT INTO outbox (id, topic, key, payload) VALUES {}", part.join(", "))).await;
            tokio::time::sleep(Duration::from_millis(rng.random_range(0..30))).await;
        }
        if rng.random_bool(0.08) {
            tx.rollback().await;
            written.rolled_back.extend(batch.into_iter().map(|(id, ..)| id));
            continue;
        }
        tx.commit().await;
        committed += count;
        for (_, key, number) in batch {
            written.numbers.entry(key).or_default().push(number);
        }
    }
    written
}

// ---------------------------------------------------------------------------------------------------------- kills

/// Kills a worker now and then and starts another one, until told to stop. Gives the ids that had been taken by the receiver and were
/// not marked at a kill: only they may come again, once for each.
async fn kill(world: Arc<World>, receiver: Arc<Receiver>, step: u64, stop: Arc<AtomicBool>, seed: u64) -> Kills {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut kills = Kills::default();
    let mut workers: Vec<Arc<Worker>> = Vec::new();
    for _ in 0..3 {
        workers.push(world.spawn());
    }
    while !stop.load(SeqCst) {
        // Something must flow between two kills, or nothing would ever be done on a slow machine.
        let next = receiver.count() + rng.random_range(200..=step.max(400));
        while receiver.count() < next && !stop.load(SeqCst) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        if stop.load(SeqCst) {
            break;
        }
        let victim = workers.swap_remove(rng.random_range(0..workers.len()));
        // It opens no connection any more while its connections are counted.
        victim.process.pause();
        let ports = ports_to(victim.process.pid(), receiver.port);
        victim.process.kill9().await;
        receiver.has_read_all_of(&ports).await;
        kills.count += 1;
        let recent = receiver.recent();
        let ids: Vec<String> = recent.iter().map(|id| format!("'{id}'")).collect();
        if !ids.is_empty() {
            let sql = format!(
                "SELECT CAST(id AS text) AS id FROM outbox WHERE id IN ({}) AND state <> 'sent'",
                ids.join(",")
            );
            for row in world.db.rows(&sql).await {
                *kills.unmarked.entry(row["id"].as_str().unwrap().to_owned()).or_default() += 1;
            }
        }
        // Two to five live at a time.
        let wanted = *[2, 3, 3, 4, 5].choose(&mut rng).unwrap();
        while workers.len() < wanted {
            workers.push(world.spawn());
        }
    }
    kills.living = workers;
    kills
}

/// The local ports of the connections that this process has to a port of this machine.
fn ports_to(pid: u32, port: u16) -> HashSet<u16> {
    let links = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().filter_map(Result::ok);
    let links = links.filter_map(|entry| std::fs::read_link(entry.path()).ok());
    let own: HashSet<String> =
        links.filter_map(|link| Some(link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.to_owned())).collect();
    let table = std::fs::read_to_string(format!("/proc/{pid}/net/tcp")).unwrap();
    let port_of = |address: &str| u16::from_str_radix(address.rsplit(':').next()?, 16).ok();
    let connections = table.lines().skip(1).filter_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let (local, remote, inode) = (port_of(fields.get(1)?)?, port_of(fields.get(2)?)?, *fields.get(9)?);
        (remote == port && own.contains(inode)).then_some(local)
    });
    connections.collect()
}

#[derive(Default)]
struct Kills {
    count: u32,
    unmarked: HashMap<String, u32>,
    /// Who lives at the end.
    living: Vec<Arc<Worker>>,
}

/// The soak itself, in a size that its environment decides.
async fn kills_lose_nothing(kind: Kind) {
    let rows = setting("QUEUEBOX_SOAK_ROWS", 6_000);
    let keys = setting("QUEUEBOX_SOAK_KEYS", 300);
    let seed = setting("QUEUEBOX_SOAK_SEED", rand::rng().random_range(0..1_000_000));
    println!("QUEUEBOX_SOAK_SEED={seed}");
    let receiver = Arc::new(Receiver::start().await);
    let world = World::on(kind).await.relay(json!({ "outbox": { "claimTimeout": "5s" } })).destination(
        "receiver",
        json!({ "http": { "url": format!("http://127.0.0.1:{}/", receiver.port), "timeout": "3s" } }),
    );
    world.migrate().await;
    let world = Arc::new(world);
    let stop = Arc::new(AtomicBool::new(false));
    // Some eight kills in a short run, about one for every 5,000 messages in a long one.
    let step = (rows / 8).min(10_000);
    let killer = tokio::spawn(kill(world.clone(), receiver.clone(), step, stop.clone(), seed));
    let writers: Vec<_> = (0..WRITERS)
        .map(|writer| tokio::spawn(write(world.db.clone(), writer, rows.div_ceil(WRITERS), keys, seed)))
        .collect();
    let mut written = Written::default();
    for writer in writers {
        let own = writer.await.unwrap();
        written.numbers.extend(own.numbers);
        written.rolled_back.extend(own.rolled_back);
    }
    let committed: u64 = written.numbers.values().map(|numbers| numbers.len() as u64).sum();
    // The last tenth flows without trouble.
    wait_for(&receiver, committed * 9 / 10).await;
    stop.store(true, SeqCst);
    let kills = killer.await.unwrap();
    receiver.shared.calm.store(true, SeqCst);
    wait_for(&receiver, committed).await;
    let count = i64::try_from(committed).unwrap();
    world.db.wait_states("outbox", &[("sent", count)]).await;

    let world = Arc::into_inner(world).unwrap();
    judge(&world, &receiver.shared.taken.lock().unwrap(), &written, &kills);
    // Who is stopped while it starts says that it never was ready.
    for worker in &kills.living {
        worker.ready().await;
    }
    world.finish().await;
}

async fn wait_for(receiver: &Receiver, count: u64) {
    let mut last = (0, tokio::time::Instant::now());
    while receiver.count() < count {
        let now = receiver.count();
        if now > last.0 {
            last = (now, tokio::time::Instant::now());
        }
        assert!(last.1.elapsed() < crate::support::PATIENCE, "{now} of {count} came, then nothing");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

fn judge(world: &World, taken: &Taken, written: &Written, kills: &Kills) {
    let mut arrived: HashMap<&str, Vec<u64>> = HashMap::new();
    for (key, number, id) in &taken.order {
        assert!(!written.rolled_back.contains(id), "{id} was rolled back and came");
        arrived.entry(key).or_default().push(*number);
    }
    for (key, numbers) in &written.numbers {
        // Neither lost nor out of order: the same list.
        assert_eq!(arrived.get(key.as_str()), Some(numbers), "{key}");
    }
    // A worker that could not renew in time, on a machine that is busy, says what it may have sent twice.
    let said = world.claims_lost();
    let repeats: Vec<_> = taken.times.iter().filter(|(_, times)| **times > 1).collect();
    println!(
        "{} messages, {} kills, {} not marked at a kill, {} came again, {} claims lost by living workers",
        taken.order.len(),
        kills.count,
        kills.unmarked.len(),
        repeats.len(),
        said.len()
    );
    assert!(kills.count > 0, "nothing was killed");
    for (id, times) in repeats {
        let excused = kills.unmarked.get(id).copied().unwrap_or(0) + said.get(id).copied().unwrap_or(0);
        assert!(*times <= 1 + excused, "{id} came {times} times and was not marked at {excused} kills");
    }
}

crate::support::on_postgres!(kills_lose_nothing);

//! What the ratios refer to: the two usual ways of working an outbox, written as a careful author writes them, and other programs.

use std::{
    process::Stdio,
    sync::atomic::Ordering::Relaxed,
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use sqlx::{Executor, Row};
use tokio::process::Command;
use uuid::Uuid;

use super::{PATIENCE, Spent, Stage};
use crate::{
    Peer,
    database::{Database, Rows},
    relay::{Plan, TOPIC, Wish},
    report::Measured,
    traffic::{Aside, Receiver},
};

/// Rows of a claim.
const BATCH: i64 = 500;

const CLAIM: &str = "
WITH c AS (SELECT id FROM claim_outbox WHERE state = 'pending' ORDER BY sequence LIMIT $1 FOR UPDATE SKIP LOCKED)
UPDATE claim_outbox o SET state = 'processing', claimed_at = now() FROM c WHERE o.id = c.id
RETURNING o.id, o.topic, o.key, o.payload::text, o.headers::text";

const MARK: &str = "UPDATE claim_outbox SET state = 'sent', updated_at = now(), claimed_at = NULL WHERE id = ANY ($1)";

/// A table as the classic installation has it: QueueBox's own columns and indexes, pages filled.
async fn table(stage: &Stage<'_>, database: &Database, count: u64) -> anyhow::Result<()> {
    Plan::new(&Wish { database: database.url.clone(), ..Wish::default() })?.migrate().await?;
    database.connect().await?.execute("CREATE TABLE claim_outbox (LIKE outbox INCLUDING ALL)").await?;
    database.fill(Rows { table: "claim_outbox", count, keys: stage.options.keys, topic: TOPIC }).await
}

/// Claim a row, publish it, mark it.
pub async fn naive(stage: &Stage<'_>, database: &Database) -> anyhow::Result<Measured> {
    claiming(stage, database, "naive", 1, stage.options.messages_few.min(stage.options.messages)).await
}

/// Claim a batch, publish it, mark it.
pub async fn claim_batch(stage: &Stage<'_>, database: &Database) -> anyhow::Result<Measured> {
    claiming(stage, database, "claim-batch", BATCH, stage.options.messages).await
}

async fn claiming(
    stage: &Stage<'_>,
    database: &Database,
    name: &str,
    batch: i64,
    count: u64,
) -> anyhow::Result<Measured> {
    table(stage, database, count).await?;
    let mut app = database.connect().await?;
    let spent = Spent::begin(database).await?;
    let started = Instant::now();
    let (mut moved, mut took) = (0, Vec::new());
    loop {
        let begun = Instant::now();
        let rows = sqlx::query(CLAIM).bind(batch).fetch_all(&mut app).await?;
        if rows.is_empty() {
            break;
        }
        let ids: Vec<Uuid> = rows.iter().map(|row| row.get(0)).collect();
        // The null sink: what a publish would need is read.
        if rows.iter().any(|row| row.get::<String, _>(3).is_empty()) {
            bail!("a payload is empty");
        }
        moved += sqlx::query(MARK).bind(&ids).execute(&mut app).await?.rows_affected();
        took.push(begun.elapsed().as_secs_f64());
    }
    let measured = Measured::new(name, moved, started.elapsed()).latencies(took);
    if moved != count {
        bail!("{moved} of {count} rows were marked");
    }
    spent.end(measured, database, Duration::ZERO).await
}

/// Another program: it finds the filled outbox in `BENCH_DATABASE_URL` and POSTs each message to `BENCH_SINK_URL`. The rung ends when
/// all have come, or when the program ends by itself with 0.
pub async fn peer(stage: &Stage<'_>, peer: &Peer, database: &Database) -> anyhow::Result<Measured> {
    Plan::new(&Wish { database: database.url.clone(), ..Wish::default() })?.migrate().await?;
    let count = stage.options.messages;
    database.fill(Rows { table: "outbox", count, keys: stage.options.keys, topic: TOPIC }).await?;
    let aside = Aside::start()?;
    let receiver = Receiver::start(&aside).await?;
    let spent = Spent::begin(database).await?;
    let started = Instant::now();
    let mut child = Command::new("sh")
        .args(["-c", &peer.command])
        .env("BENCH_DATABASE_URL", &database.url)
        .env("BENCH_SINK_URL", format!("http://{}/", receiver.address))
        .env("BENCH_ROWS", count.to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .context("cannot start sh")?;
    let (mut seen, mut moved_at) = (0, Instant::now());
    let ended_by_itself = loop {
        let now = receiver.count.load(Relaxed);
        if now > seen {
            (seen, moved_at) = (now, Instant::now());
        }
        if seen >= count {
            break false;
        }
        if moved_at.elapsed() > PATIENCE {
            bail!("{seen} of {count} messages came, then nothing for {PATIENCE:?}");
        }
        if let Some(status) = child.try_wait()? {
            if !status.success() {
                bail!("the program ended with {status}");
            }
            break true;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    };
    let took = started.elapsed();
    let _ = child.kill().await;
    // A program without the sink has taken all rows when it ends well.
    let messages = if ended_by_itself && seen == 0 { count } else { seen };
    let mut measured = spent.end(Measured::new(peer.name.clone(), messages, took), database, Duration::ZERO).await?;
    // The program's own time is not known here.
    measured.cpu_us_per_message = None;
    Ok(measured)
}

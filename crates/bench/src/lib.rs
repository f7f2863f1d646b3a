//! The speed ladder of `docs/performance.md`: rungs that run side by side, in one go, on local servers that flush their commits.
//!
//! Invariants
//! - The code under test is the real one: manifests are checked, the catalog builds the ports, the engine's worker runs. Only the null
//!   sink stands in the place of a connector, where a rung says so.
//! - Every rung works in a database of its own, which it makes and drops, so that no other data is touched and no rung inherits dead rows.
//! - A rung that lost a message or delivered a key out of order has no figure: it is an error.
//! - Receivers and senders run on a thread of their own, whose processor time is not the relay's.

mod cpu;
mod database;
mod peers;
mod relay;
mod report;
mod rungs;
mod sink;
mod traffic;

pub use self::{
    peers::Given,
    report::{Measured, Report},
    rungs::Rung,
};

/// What is measured, and how much of it.
#[derive(Debug, Clone)]
pub struct Options {
    /// In this order.
    pub rungs: Vec<Rung>,
    /// Messages of a rung.
    pub messages: u64,
    /// Messages of the two rungs that take one row at a time and are slower by an order of magnitude (`naive`), and of `latency`.
    pub messages_few: u64,
    /// Keys of the messages.
    pub keys: u64,
    /// Rows that wait in the table in `depth`.
    pub depths: Vec<u64>,
    /// Rows of a held destination in front of the others in `held`.
    pub held: u64,
    /// Seconds of each half of `snapshot`.
    pub snapshot_seconds: u64,
    /// Messages a second in `snapshot`.
    pub snapshot_rate: u64,
    /// Servers that are there already.
    pub given: Given,
    /// Other programs as further rungs.
    pub peers: Vec<Peer>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            rungs: Rung::usual().to_vec(),
            messages: 200_000,
            messages_few: 4_000,
            keys: 10_000,
            depths: vec![10_000, 100_000, 1_000_000],
            held: 1_000_000,
            snapshot_seconds: 60,
            snapshot_rate: 800,
            given: Given::default(),
            peers: Vec::new(),
        }
    }
}

/// Another relay, measured as a rung (`--peer NAME=COMMAND`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    /// Name of the rung.
    pub name: String,
    /// Runs in a shell with `BENCH_DATABASE_URL`, `BENCH_SINK_URL` and `BENCH_ROWS`.
    pub command: String,
}

impl std::str::FromStr for Peer {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, command) = text.split_once('=').ok_or("write it as NAME=COMMAND")?;
        if name.is_empty() || command.trim().is_empty() {
            return Err("write it as NAME=COMMAND, both of them".to_owned());
        }
        Ok(Self { name: name.to_owned(), command: command.to_owned() })
    }
}

/// Runs the rungs one after the other; `progress` is told what runs.
///
/// # Errors
/// A server that is missing, or a rung that lost or reordered messages.
pub async fn run(options: &Options, mut progress: impl FnMut(&str)) -> anyhow::Result<Report> {
    let mut stage = rungs::Stage::new(options);
    let mut report = Report::default();
    for rung in &options.rungs {
        progress(rung.name());
        report.rungs.extend(stage.run(*rung).await.map_err(|error| error.context(rung.name()))?);
    }
    for peer in &options.peers {
        progress(&peer.name);
        report.rungs.push(stage.peer(peer).await.map_err(|error| error.context(peer.name.clone()))?);
    }
    report.notes = stage.notes();
    Ok(report)
}

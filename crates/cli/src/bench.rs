//! `queuebox bench`: the speed ladder of `docs/performance.md`.

use clap::{Args, ValueEnum};
use queuebox_bench::{Given, Peer, Rung};

use crate::output::Progress;

/// `queuebox bench`.
#[derive(Debug, Args)]
pub struct Options {
    /// Which rungs, in this order: naive, claim-batch, null, delete, one-key, workers-2, workers-4, http, nats, kafka, rabbitmq,
    /// inbox-http, inbox-nats, inbox-kafka, inbox-rabbitmq, latency, depth, held, snapshot. Without it all but the last three, which
    /// take minutes.
    #[arg(long, value_delimiter = ',', value_name = "RUNG,…")]
    rungs: Vec<Rung>,

    /// What is printed at the end.
    #[arg(long, value_enum, default_value_t = Output::Table)]
    output: Output,

    /// Messages of a rung.
    #[arg(long, default_value_t = 200_000, value_parser = clap::value_parser!(u64).range(1..))]
    messages: u64,

    /// Messages of `naive`; of `latency` at most 200 of them.
    #[arg(long, default_value_t = 4_000, value_parser = clap::value_parser!(u64).range(1..))]
    messages_few: u64,

    /// Keys of the messages.
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u64).range(1..))]
    keys: u64,

    /// Rows that wait in the table in `depth`, a figure for each.
    #[arg(long, value_delimiter = ',', value_name = "ROWS,…", default_values_t = [10_000, 100_000, 1_000_000, 5_000_000])]
    depth: Vec<u64>,

    /// Rows of a held destination in front of the others in `held`.
    #[arg(long, default_value_t = 1_000_000, value_name = "ROWS")]
    held: u64,

    /// Length of each half of `snapshot`.
    #[arg(long, default_value_t = 60, value_name = "SECONDS")]
    snapshot_seconds: u64,

    /// Messages a second in `snapshot`.
    #[arg(long, default_value_t = 800, value_parser = clap::value_parser!(u64).range(1..))]
    snapshot_rate: u64,

    /// PostgreSQL, as a role that may create databases: each rung makes one of its own and drops it. Without it a server is started.
    #[arg(long, value_name = "URL")]
    database_url: Option<String>,

    /// RabbitMQ, with credentials. Without it a server is started.
    #[arg(long, value_name = "URL")]
    rabbitmq_url: Option<String>,

    /// Kafka. Without it a broker is started.
    #[arg(long, value_name = "HOST:PORT,…")]
    kafka_bootstrap: Option<String>,

    /// NATS with JetStream. Without it a server is started.
    #[arg(long, value_name = "URL")]
    nats_url: Option<String>,

    /// Another relay as a further rung; may be repeated. The command runs in a shell, finds the filled outbox in BENCH_DATABASE_URL and
    /// the number of its rows in BENCH_ROWS, and POSTs each message to BENCH_SINK_URL, or ends with 0 once all are done.
    #[arg(long, value_name = "NAME=COMMAND")]
    peer: Vec<Peer>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Output {
    /// A table for people, with ratios to `naive` and `claim-batch` where these ran.
    Table,
    /// {"rungs": [{"rung", "messages_per_second", "p50_ms", "p99_ms", "cpu_us_per_message", "log_bytes_per_message"}]}
    Json,
}

/// Runs the ladder and prints its figures; what runs is told on standard error.
///
/// # Errors
/// A server that is missing, or a rung that lost or reordered messages.
pub async fn run(options: Options) -> anyhow::Result<()> {
    let plan = queuebox_bench::Options {
        rungs: if options.rungs.is_empty() { Rung::usual().to_vec() } else { options.rungs },
        messages: options.messages,
        messages_few: options.messages_few,
        keys: options.keys,
        depths: options.depth,
        held: options.held,
        snapshot_seconds: options.snapshot_seconds,
        snapshot_rate: options.snapshot_rate,
        given: Given {
            database_url: options.database_url,
            rabbitmq_url: options.rabbitmq_url,
            kafka_bootstrap: options.kafka_bootstrap,
            nats_url: options.nats_url,
        },
        peers: options.peer,
    };
    let output =
        if matches!(options.output, Output::Json) { crate::output::Output::Json } else { crate::output::Output::Text };
    let shown = Progress::of_time("Starting", output);
    let report = queuebox_bench::run(&plan, |rung| shown.part(rung)).await?;
    drop(shown);
    match options.output {
        Output::Json => outln!("{}", report.json()?),
        Output::Table => outln!("{}", report.table()),
    }
    Ok(())
}

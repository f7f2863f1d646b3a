//! `queuebox lab`.

use anyhow::Context;
use clap::{Args, Subcommand};
use comfy_table::{Table, presets::ASCII_MARKDOWN};
use queuebox_lab::{Database, Line, dual_write};
use serde_json::json;

use crate::output::{Output, Progress, print_json};

/// `queuebox lab`.
#[derive(Debug, Subcommand)]
pub enum Lab {
    /// What a crash between two writes leaves behind, three ways of writing side by side.
    DualWrite(DualWrite),
}

/// `queuebox lab dual-write`.
#[derive(Debug, Args)]
pub struct DualWrite {
    /// Orders of each run.
    #[arg(long, default_value_t = 200)]
    orders: u32,

    /// Decides where the crashes fall.
    #[arg(long, default_value_t = 1)]
    seed: u32,

    /// An empty database for the lab alone: sqlite:PATH or postgres://…; without it SQLite in a temporary folder.
    #[arg(long, value_name = "URL")]
    database_url: Option<String>,

    /// How the result is printed.
    #[arg(long, value_enum, default_value_t)]
    output: Output,
}

/// Runs a lab and prints its table.
///
/// # Errors
/// The database.
pub async fn run(lab: Lab) -> anyhow::Result<()> {
    let Lab::DualWrite(options) = lab;
    let folder = tempfile::TempDir::new().context("cannot make a temporary folder")?;
    let own = format!("sqlite:{}", folder.path().join("lab.db").display());
    let database = Database::open(options.database_url.as_deref().unwrap_or(&own)).await.context("--database-url")?;
    let shown = Progress::of_time("Crashing between two writes", options.output);
    let lines = dual_write(&database, options.orders, options.seed).await?;
    drop(shown);
    database.close().await;
    if options.output == Output::Json {
        let line = |line: &Line| {
            json!({
                "orderOfWrites": line.order_of_writes, "leaves": line.leaves, "broken": line.broken, "delivered": line.delivered,
            })
        };
        return print_json(&lines.iter().map(line).collect::<Vec<_>>());
    }
    let mut table = Table::new();
    table.load_style(ASCII_MARKDOWN);
    table.set_header([
        "order of writes",
        "crash between them leaves",
        &format!("seed {}, {} orders", options.seed, options.orders),
    ]);
    for line in &lines {
        let delivered = format!("{} broken · {} messages delivered", line.broken, line.delivered);
        let duplicates = line.delivered.saturating_sub(options.orders);
        let figures = if duplicates > 0 { format!("{delivered} for {}", options.orders) } else { delivered };
        table.add_row([line.order_of_writes.to_owned(), line.leaves.to_owned(), figures]);
    }
    outln!("{table}");
    Ok(())
}

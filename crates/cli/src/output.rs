//! How commands print: for people, or as one JSON value on standard output; and what they show on the way of long work.

use std::time::Duration;

use clap::ValueEnum;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

/// How a result is printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum Output {
    /// For people.
    #[default]
    Text,
    /// JSON, as the ports of QueueBox answer.
    Json,
}

/// Prints a result as one line of JSON.
///
/// # Errors
/// None that can occur: results are plain data.
pub fn print_json(result: &impl Serialize) -> anyhow::Result<()> {
    println!("{}", serde_json::to_string(result)?);
    Ok(())
}

/// Work that takes its time, shown on standard error when that is a terminal, and gone when it is over.
pub struct Progress(ProgressBar);

impl Progress {
    /// Begins.
    pub fn begin(what: &'static str) -> Self {
        let bar = ProgressBar::new_spinner().with_message(what);
        if let Ok(style) = ProgressStyle::with_template("{spinner} {msg}: {human_pos} rows, {per_sec}, {elapsed}") {
            bar.set_style(style);
        }
        bar.enable_steady_tick(Duration::from_millis(200));
        Self(bar)
    }

    /// So many rows so far.
    pub fn at(&self, rows: u64) {
        self.0.set_position(rows);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

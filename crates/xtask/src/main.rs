//! Checks of the repository that no other tool knows: the law of dependencies, generated files, and whether every
//! promised behaviour has its test.
//!
//! Light on purpose: it depends on no other crate of the workspace, so that it builds in seconds. What it needs from the
//! program it asks the built binary.

mod arch;
mod chart;
mod conformance;
mod generate;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Checks and generated files of the QueueBox repository")]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Check the law of dependencies (ARCHITECTURE.md) against `cargo metadata`
    Arch,
    /// Write the generated files: CRDs, CLI reference, metrics table, the chart's share
    Gen {
        /// Only say which files are out of date; exit 1 if any is
        #[arg(long)]
        check: bool,
        /// The queuebox binary to ask; default: build it and take that one
        #[arg(long)]
        binary: Option<PathBuf>,
    },
    /// Compare the names in docs/conformance.md and docs/cases.md with the tests, both ways
    Conformance {
        /// A file with the names of all tests (`cargo test -- --list` or `cargo nextest list`); default: ask cargo
        #[arg(long)]
        list: Option<PathBuf>,
        /// Remove from tests/pending.txt what has a test now
        #[arg(long)]
        fix: bool,
    },
}

fn main() -> ExitCode {
    match run(Arguments::parse().task) {
        Ok(problems) if problems.is_empty() => ExitCode::SUCCESS,
        Ok(problems) => {
            for problem in &problems {
                eprintln!("error: {problem}");
            }
            eprintln!("{} problems", problems.len());
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(task: Task) -> Result<Vec<String>> {
    match task {
        Task::Arch => arch::check(),
        Task::Gen { check, binary } => generate::run(check, binary),
        Task::Conformance { list, fix } => conformance::check(list, fix),
    }
}

/// The root of the checkout.
fn root() -> PathBuf {
    let here = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    here.ancestors().nth(2).unwrap_or(here).to_path_buf()
}

/// Cargo, as the one that runs this.
fn cargo() -> std::process::Command {
    let mut command = std::process::Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root());
    command
}

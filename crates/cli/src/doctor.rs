//! `queuebox doctor`: looks at everything a Relay needs outside of itself, and says for each finding what mends it.
//!
//! Invariants: it writes nothing, waits for nobody longer than [`PROBE_MAX`], and goes on after a failure, so that one call shows all
//! of them.

use std::{sync::Arc, time::Duration};

use anyhow::bail;
use clap::Args;
use comfy_table::{Table, presets::ASCII_MARKDOWN};
use futures::future::join_all;
use queuebox_catalog::{Catalog, open_store};
use queuebox_core::{Fault, ports::Destination, ports::schema::Finding, redact::redact};

use crate::{
    manifests::{self, Given, Loaded},
    output::{Output, Progress, print_json},
};

/// Longest look at one peer.
const PROBE_MAX: Duration = Duration::from_secs(10);

/// `queuebox doctor`.
#[derive(Debug, Args)]
pub struct Options {
    #[command(flatten)]
    given: Given,

    /// How the result is printed.
    #[arg(long, value_enum, default_value_t)]
    output: Output,
}

/// Prints the findings.
///
/// # Errors
/// Manifests that are wrong, or a finding that keeps the Relay from working.
pub async fn run(options: &Options) -> anyhow::Result<()> {
    let loaded = manifests::load(&options.given)?;
    let shown = Progress::of_time("Looking at the database and the brokers", options.output);
    let (mut findings, peers) = tokio::join!(database(&loaded), destinations(&loaded));
    drop(shown);
    findings.extend(peers);
    match options.output {
        Output::Json => print_json(&findings)?,
        Output::Text => outln!("{}", table(&findings)),
    }
    let errors = findings.iter().filter(|finding| finding.level == "error").count();
    if errors > 0 {
        bail!("{errors} finding(s) keep this Relay from working");
    }
    Ok(())
}

async fn database(loaded: &Loaded) -> Vec<Finding> {
    if let Err(missing) = loaded.needs_database() {
        let fix = "start `queuebox run` once: it makes the file and its tables";
        return vec![finding("database", "error", &missing.to_string(), Some(fix))];
    }
    let opened = match open_store(&loaded.relay, &loaded.secrets).await {
        Ok(opened) => opened,
        Err(fault) => return vec![unreachable_database(&fault)],
    };
    let store = opened.store;
    let examined = match tokio::time::timeout(PROBE_MAX, store.examine()).await {
        Ok(Ok(findings)) => findings,
        Ok(Err(fault)) => vec![unreachable_database(&fault)],
        Err(_) => vec![unreachable_database(&Fault::transient("timeout", "it did not answer within 10 s"))],
    };
    store.close().await;
    examined
}

fn unreachable_database(fault: &Fault) -> Finding {
    finding(
        "database",
        "error",
        &fault.detail,
        Some("look at Relay.spec.database: address, login, TLS, and whether it runs"),
    )
}

/// Broker destinations are connected to, with everything that their manifests name. An HTTP receiver is not asked: a request
/// would be a delivery.
async fn destinations(loaded: &Loaded) -> Vec<Finding> {
    let catalog = Catalog::new(&loaded.relay, loaded.secrets.clone());
    let worker = match catalog.worker(loaded.version.clone(), "doctor".to_owned()) {
        Ok(worker) => worker,
        Err(error) => return vec![finding("destinations", "error", &error.to_string(), None)],
    };
    join_all(worker.relay.destinations.iter().map(|(name, destination)| probe(name, destination.port.clone()))).await
}

async fn probe(name: &str, port: Arc<dyn Destination>) -> Finding {
    let check = format!("destination {name}");
    let answer = tokio::time::timeout(PROBE_MAX, port.probe()).await;
    port.close().await;
    match answer {
        Ok(Ok(())) if port.kind() == "http" => {
            finding(&check, "ok", "is configured; an HTTP receiver is not asked", None)
        }
        Ok(Ok(())) => finding(&check, "ok", "connected; what the manifest names is there", None),
        Ok(Err(fault)) => finding(&check, "error", &fault.detail, Some("look at the Destination and at its peer")),
        Err(_) => {
            finding(&check, "error", "no answer within 10 s", Some("look at the network between here and the peer"))
        }
    }
}

fn finding(check: &str, level: &'static str, detail: &str, fix: Option<&str>) -> Finding {
    Finding { check: check.to_owned(), level, detail: redact(detail), fix: fix.map(str::to_owned) }
}

fn table(findings: &[Finding]) -> Table {
    let mut table = Table::new();
    table.load_style(ASCII_MARKDOWN).set_header(["", "CHECK", "FOUND", "FIX"]);
    for finding in findings {
        table.add_row([finding.level, &finding.check, &finding.detail, finding.fix.as_deref().unwrap_or("")]);
    }
    table
}

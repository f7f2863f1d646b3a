//! `queuebox check`.

use anyhow::bail;
use clap::Args;
use queuebox_api::{Problems, Target, check};

use crate::manifests::{self, Given};

/// `queuebox check`.
#[derive(Debug, Args)]
pub struct Options {
    #[command(flatten)]
    given: Given,

    /// Check for a cluster: no SQLite, no env and file references but those that spec.pod supplies.
    #[arg(long)]
    cluster: bool,

    /// Say which route and destinations this topic takes.
    #[arg(long, value_name = "TOPIC")]
    explain: Option<String>,
}

/// Prints what was found.
///
/// # Errors
/// All problems.
pub fn run(options: &Options) -> anyhow::Result<()> {
    let manifests = manifests::read(&options.given)?;
    let target = if options.cluster { Target::Cluster } else { Target::Local };
    let report = check(&manifests, target);
    for warning in &report.warnings {
        println!("warning: {warning}");
    }
    if !report.problems.is_empty() {
        bail!("{} problem(s):\n{}", report.problems.len(), Problems(report.problems));
    }
    if let Some(topic) = &options.explain {
        let relay = report.into_relay(options.given.relay.as_deref())?;
        return explain(&relay, topic);
    }
    let relays: Vec<String> = report
        .relays
        .iter()
        .map(|relay| {
            format!(
                "{}/{}: {} source(s), {} route(s), {} destination(s), on {}",
                relay.namespace,
                relay.name,
                relay.sources.len(),
                relay.routes.len(),
                relay.destinations.len(),
                relay.database.server.kind()
            )
        })
        .collect();
    println!("{}", relays.join("\n"));
    println!("No problems.");
    Ok(())
}

fn explain(relay: &queuebox_api::checked::Relay, topic: &str) -> anyhow::Result<()> {
    let found = relay.routes.iter().enumerate().find_map(|(index, route)| {
        route.topics.iter().find(|pattern| pattern.matches(topic)).map(|pattern| (index, route, pattern))
    });
    let Some((index, route, pattern)) = found else {
        bail!("no route matches topic {topic:?}: such a row would be dead at once, no_route");
    };
    println!("topic {topic:?} takes routes[{index}], whose pattern {:?} matches first.", pattern.as_str());
    for name in &route.destinations {
        let connector = relay.destinations.iter().find(|destination| destination.name == *name);
        let text = connector.map_or_else(String::new, |destination| {
            format!(" ({}, {})", destination.connector.kind(), destination.connector.endpoint())
        });
        println!("  -> {name}{text}");
    }
    if route.destinations.len() > 1 {
        println!("Each destination gets a row of its own, in order per destination and key.");
    }
    Ok(())
}

//! `queuebox check`.

use anyhow::bail;
use clap::Args;
use queuebox_api::{Problems, Report, Target, check, checked::Relay};
use serde_json::{Value, json};

use crate::{
    manifests::{self, Given},
    output::{Output, print_json},
};

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

    /// How the result is printed.
    #[arg(long, value_enum, default_value_t)]
    output: Output,
}

/// Prints what was found.
///
/// # Errors
/// All problems.
pub fn run(options: &Options) -> anyhow::Result<()> {
    let manifests = manifests::read(&options.given)?;
    let target = if options.cluster { Target::Cluster } else { Target::Local };
    let report = check(&manifests, target);
    let lacking = lacking(&report, options.given.relay.as_deref());
    if options.output == Output::Json && options.explain.is_none() {
        print_json(&json!({
            "problems": report.problems,
            "warnings": report.warnings,
            "relays": report.relays.iter().map(summary).collect::<Vec<_>>(),
        }))?;
        return match (report.problems.len(), lacking) {
            (0, None) => Ok(()),
            (0, Some(lacking)) => bail!("{lacking}"),
            (problems, _) => bail!("{problems} problem(s)"),
        };
    }
    for warning in &report.warnings {
        // Standard output of an explanation is the explanation.
        match options.explain {
            None => outln!("warning: {warning}"),
            Some(_) => eprintln!("warning: {warning}"),
        }
    }
    if !report.problems.is_empty() {
        bail!("{} problem(s):\n{}", report.problems.len(), Problems(report.problems));
    }
    if let Some(topic) = &options.explain {
        let relay = report.into_relay(options.given.relay.as_deref())?;
        return explain(&relay, topic, options.output);
    }
    if let Some(lacking) = lacking {
        bail!("{lacking}");
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
    outln!("{}", relays.join("\n"));
    outln!("No problems.");
    Ok(())
}

/// Nothing is wrong with what is there, and still it could not run.
fn lacking(report: &Report, wanted: Option<&str>) -> Option<String> {
    let names: Vec<&str> = report.relays.iter().map(|relay| relay.name.as_str()).collect();
    match wanted {
        _ if names.is_empty() => Some(
            "there is no Relay: nothing would run. A Relay names the database and its routes; look at \
             deploy/examples/quickstart/relay.yaml"
                .to_owned(),
        ),
        Some(wanted) if !names.contains(&wanted) => {
            Some(format!("there is no Relay called {wanted:?}; there is {}", names.join(", ")))
        }
        _ => None,
    }
}

/// What a Relay consists of.
fn summary(relay: &Relay) -> Value {
    json!({
        "namespace": relay.namespace,
        "name": relay.name,
        "sources": relay.sources.len(),
        "routes": relay.routes.len(),
        "destinations": relay.destinations.len(),
        "database": relay.database.server.kind(),
    })
}

/// Which route and destinations a topic takes.
fn explain(relay: &Relay, topic: &str, output: Output) -> anyhow::Result<()> {
    let found = relay.routes.iter().enumerate().find_map(|(index, route)| {
        route.topics.iter().find(|pattern| pattern.matches(topic)).map(|pattern| (index, route, pattern))
    });
    let Some((index, route, pattern)) = found else {
        bail!("no route matches topic {topic:?}: such a row would be dead at once, no_route");
    };
    let connector = |name: &String| relay.destinations.iter().find(|destination| destination.name == *name);
    if output == Output::Json {
        let destinations: Vec<Value> = route
            .destinations
            .iter()
            .map(|name| {
                let connector = connector(name).map(|destination| &destination.connector);
                json!({
                    "name": name,
                    "kind": connector.map(|connector| connector.kind()),
                    "endpoint": connector.map(|connector| connector.endpoint()),
                })
            })
            .collect();
        return print_json(&json!({
            "topic": topic, "route": index, "pattern": pattern.as_str(), "destinations": destinations,
        }));
    }
    outln!("topic {topic:?} takes routes[{index}], whose pattern {:?} matches first.", pattern.as_str());
    for name in &route.destinations {
        let text = connector(name).map_or_else(String::new, |destination| {
            format!(" ({}, {})", destination.connector.kind(), destination.connector.endpoint())
        });
        outln!("  -> {name}{text}");
    }
    if route.destinations.len() > 1 {
        outln!("Each destination gets a row of its own, in order per destination and key.");
    }
    Ok(())
}

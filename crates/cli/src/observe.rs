//! `queuebox status`, `explain` and `probe`: what a running worker says on its management port, for people and for probes in
//! an image that has no other client.
//!
//! Invariant: they only read, and need no right but to reach the port.

use std::{fmt::Write as _, time::Duration};

use anyhow::{Context, bail};
use clap::Args;
use comfy_table::{Table, presets::ASCII_MARKDOWN};
use serde_json::Value;

use crate::{
    manifests::{self, Given},
    output::{Output, print_json},
};

/// Nothing is waited for longer.
const ANSWER_MAX: Duration = Duration::from_secs(5);
/// Where a worker with the default ports is.
pub const USUAL_URL: &str = "http://127.0.0.1:9090";
/// A row that could go for so long is late.
const LATE_SECONDS: f64 = 60.0;

/// `queuebox status` and `queuebox explain`.
#[derive(Debug, Args)]
pub struct Options {
    #[command(flatten)]
    given: Given,

    /// The management port of a worker. Default: port of the manifests, or 9090, on this machine.
    #[arg(long, value_name = "URL", conflicts_with_all = ["files", "config"])]
    url: Option<String>,

    /// How the result is printed.
    #[arg(long, value_enum, default_value_t)]
    output: Output,
}

/// `queuebox probe`.
#[derive(Debug, Args)]
pub struct Probe {
    /// What to ask for, such as http://127.0.0.1:9090/readyz.
    url: String,

    /// How the answer is printed: as it is, or {"status": n, "body": …}.
    #[arg(long, value_enum, default_value_t)]
    output: Output,
}

/// Carries out `queuebox probe`.
///
/// # Errors
/// No answer, or one other than 2xx.
pub async fn probe(options: &Probe) -> anyhow::Result<()> {
    let answer = get(&options.url).await?;
    let status = answer.status();
    let body = answer.text().await.unwrap_or_default();
    match options.output {
        Output::Text => println!("{body}"),
        Output::Json => {
            let body = serde_json::from_str(&body).unwrap_or(Value::String(body));
            print_json(&serde_json::json!({ "status": status.as_u16(), "body": body }))?;
        }
    }
    if !status.is_success() {
        bail!("{} answers {status}", options.url);
    }
    Ok(())
}

/// Carries out `queuebox status`.
///
/// # Errors
/// The worker cannot be reached.
pub async fn status(options: &Options) -> anyhow::Result<()> {
    let status = read(options).await?;
    match options.output {
        Output::Json => println!("{status}"),
        Output::Text => print!("{}", overview(&status)),
    }
    Ok(())
}

/// Carries out `queuebox explain`: what keeps the Relay from delivering, the cause of the others first.
///
/// # Errors
/// The worker cannot be reached.
pub async fn explain(options: &Options) -> anyhow::Result<()> {
    let status = read(options).await?;
    let reasons = reasons(&status);
    match options.output {
        Output::Json => print_json(&reasons)?,
        Output::Text if reasons.is_empty() => println!("Nothing keeps it from delivering. {}", waiting(&status)),
        Output::Text => {
            for (index, reason) in reasons.iter().enumerate() {
                println!("{}. {reason}", index + 1);
            }
        }
    }
    Ok(())
}

async fn get(url: &str) -> anyhow::Result<reqwest::Response> {
    let client = reqwest::Client::builder().timeout(ANSWER_MAX).no_proxy().build()?;
    client.get(url).send().await.with_context(|| format!("no answer from {url}"))
}

/// The management port of the worker that is meant.
fn base(options: &Options) -> anyhow::Result<String> {
    Ok(match &options.url {
        Some(url) => url.trim_end_matches('/').to_owned(),
        None if options.given.files.is_empty() && options.given.config.is_none() => USUAL_URL.to_owned(),
        None => format!("http://127.0.0.1:{}", manifests::load(&options.given)?.relay.http.management_port),
    })
}

async fn read(options: &Options) -> anyhow::Result<Value> {
    let url = format!("{}/status", base(options)?);
    let answer = get(&url).await.context("is the worker running? --url names its management port")?;
    let text = answer.text().await?;
    serde_json::from_str(&text).with_context(|| format!("{url} does not answer like a worker of QueueBox"))
}

fn word<'a>(value: &'a Value, field: &str) -> Option<&'a str> {
    value.get(field).and_then(Value::as_str)
}

fn list<'a>(value: &'a Value, field: &str) -> &'a [Value] {
    value.get(field).and_then(Value::as_array).map_or(&[], Vec::as_slice)
}

fn number(value: &Value, path: &str) -> f64 {
    value.pointer(path).and_then(Value::as_f64).unwrap_or_default()
}

fn waiting(status: &Value) -> String {
    if status["backlog"].is_null() {
        return "How much waits is not known yet.".to_owned();
    }
    let outbox = &status["backlog"]["outbox"];
    format!(
        "{} pending, the oldest that could go since {} s; {} dead.",
        outbox["pending"], outbox["oldestDueAgeSeconds"], outbox["dead"]
    )
}

/// The whole answer as text.
fn overview(status: &Value) -> String {
    let mut text = String::new();
    let relay = &status["relay"];
    let names = [word(relay, "namespace"), word(relay, "name")].map(Option::unwrap_or_default);
    let _ = writeln!(
        text,
        "Relay {}, worker {} of {}, version {}: {}",
        names.join("/"),
        word(status, "worker").unwrap_or("(not registered)"),
        status["workers"],
        word(status, "version").unwrap_or_default(),
        word(status, "readiness").unwrap_or_default(),
    );
    let database = &status["database"];
    let _ = writeln!(
        text,
        "Database {}, schema {}: {}",
        word(database, "kind").unwrap_or_default(),
        database["schemaVersion"],
        word(database, "failing").unwrap_or("in order")
    );
    let _ = writeln!(text, "Lanes: {} outbox, {} inbox", status["lanes"]["outbox"], status["lanes"]["inbox"]);
    let _ = writeln!(text, "Outbox: {}", waiting(status));
    for of_source in list(&status["backlog"], "inbox") {
        let _ = writeln!(
            text,
            "Inbox {}: {} pending ({}), the oldest since {} s; {} dead.",
            word(of_source, "source").unwrap_or_default(),
            of_source["pending"],
            word(of_source, "consumption").unwrap_or_default(),
            of_source["oldestPendingAgeSeconds"],
            of_source["dead"]
        );
    }
    let mut table = Table::new();
    table.load_style(ASCII_MARKDOWN).set_header(["", "name", "kind", "state", "queued", "in flight", "detail"]);
    for (what, field) in [("source", "sources"), ("destination", "destinations")] {
        for one in list(status, field) {
            let cell = |field: &str| match &one[field] {
                Value::Null => String::new(),
                Value::String(text) => text.clone(),
                other => other.to_string(),
            };
            let mut row = vec![what.to_owned()];
            row.extend(["name", "kind", "state", "queued", "inFlight", "detail"].map(cell));
            table.add_row(row);
        }
    }
    if !table.is_empty() {
        let _ = writeln!(text, "{table}");
    }
    text
}

/// What keeps messages from moving, causes before their effects.
fn reasons(status: &Value) -> Vec<String> {
    let mut reasons = Vec::new();
    match word(status, "readiness") {
        Some("Starting") => reasons.push("The worker is starting: it has not reached its database yet.".to_owned()),
        Some("Stopping") => reasons.push("The worker is stopping; another one takes over.".to_owned()),
        _ => {}
    }
    if let Some(failing) = word(&status["database"], "failing") {
        reasons.push(format!("The database does not do what it is asked: {failing}"));
    }
    if let Some(stand_by) = word(status, "standBy") {
        reasons.push(format!("The worker stands by: {stand_by}"));
    }
    for (what, field) in [("Source", "sources"), ("Destination", "destinations")] {
        for one in list(status, field) {
            let Some(state) = word(one, "state").filter(|state| *state != "Up") else { continue };
            let name = word(one, "name").unwrap_or_default();
            let meaning = match state {
                "Paused" => "is paused by its manifest",
                "BreakerOpen" => "failed too often in a row and is tried again later",
                _ if what == "Source" => "does not receive",
                _ => "is not connected; its messages wait without spending attempts",
            };
            let detail = word(one, "detail").map(|detail| format!(": {detail}")).unwrap_or_default();
            reasons.push(format!("{what} {name} {meaning}{detail}"));
        }
    }
    if let Some(failing) = word(&status["forward"], "failing") {
        reasons.push(format!("The inbox is not forwarded: {failing}"));
    }
    for source in list(&status["forward"], "unknownSources") {
        reasons.push(format!("Rows of source {source} wait in the inbox, and no manifest has that Source any more."));
    }
    let late = number(status, "/backlog/outbox/oldestDueAgeSeconds");
    if late > LATE_SECONDS && reasons.is_empty() {
        reasons.push(format!("Too few workers, or slow destinations: a message could have gone {late} s ago."));
    }
    let dead = number(status, "/backlog/outbox/dead");
    if dead > 0.0 {
        reasons.push(format!(
            "{dead} message(s) are dead and wait for a person: `dead list` says why, `replay` sends them again."
        ));
    }
    reasons
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn healthy() -> Value {
        json!({
            "version": "0.1.0", "readiness": "Ready", "relay": {"namespace": "a", "name": "shop"},
            "worker": "w", "workers": 1, "standBy": null,
            "database": {"kind": "postgres", "schemaVersion": 14, "failing": null},
            "lanes": {"outbox": 64, "inbox": 64},
            "backlog": {"outbox": {"pending": 3, "dead": 0, "oldestPendingAgeSeconds": 1.0, "oldestDueAgeSeconds": 0.5}, "inbox": []},
            "forward": {"failing": null, "unknownSources": []},
            "sources": [{"name": "in", "kind": "http", "state": "Up"}],
            "destinations": [{"name": "out", "kind": "http", "state": "Up", "queued": 2, "inFlight": 1}],
        })
    }

    #[test]
    fn a_healthy_worker_has_no_reasons() {
        assert_eq!(reasons(&healthy()), Vec::<String>::new());
        let text = overview(&healthy());
        assert!(
            text.starts_with(
                "Relay a/shop, worker w of 1, version 0.1.0: Ready\nDatabase postgres, schema 14: in order\n"
            ),
            "{text}"
        );
        assert!(text.contains("3 pending"), "{text}");
    }

    #[test]
    fn causes_come_before_their_effects() {
        let mut status = healthy();
        status["database"]["failing"] = json!("connection refused");
        status["destinations"][0]["state"] = json!("Down");
        status["destinations"][0]["detail"] = json!("no route to host");
        status["backlog"]["outbox"]["dead"] = json!(2);
        let reasons = reasons(&status);
        assert_eq!(reasons.len(), 3, "{reasons:?}");
        assert!(reasons[0].contains("connection refused") && reasons[1].contains("no route to host"), "{reasons:?}");
        assert!(reasons[2].starts_with("2 message(s) are dead"), "{reasons:?}");
    }

    #[test]
    fn lateness_is_named_only_where_nothing_explains_it() {
        let mut status = healthy();
        status["backlog"]["outbox"]["oldestDueAgeSeconds"] = json!(300.0);
        assert!(reasons(&status)[0].contains("300 s ago"));
        status["standBy"] = json!("another Relay has the lanes");
        assert_eq!(reasons(&status).len(), 1);
    }
}

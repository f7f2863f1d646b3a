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
    manifests::{self, Given, WrongUsage},
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
    address(&options.url)?;
    let answer = get(&options.url).await?;
    let status = answer.status();
    let body = answer.text().await.unwrap_or_default();
    match options.output {
        Output::Text => outln!("{body}"),
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
        Output::Json => outln!("{status}"),
        Output::Text => out!("{}", overview(&status)),
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
        Output::Text if reasons.is_empty() => outln!("Nothing keeps it from delivering. {}", waiting(&status)),
        Output::Text => {
            for (index, reason) in reasons.iter().enumerate() {
                outln!("{}. {reason}", index + 1);
            }
        }
    }
    Ok(())
}

async fn get(url: &str) -> anyhow::Result<reqwest::Response> {
    let client = reqwest::Client::builder().timeout(ANSWER_MAX).no_proxy().build()?;
    client.get(url).send().await.with_context(|| format!("no answer from {url}"))
}

/// An address as it was given, without a slash at its end.
///
/// # Errors
/// It does not say how it is spoken to.
pub fn address(url: &str) -> Result<String, WrongUsage> {
    if ["http://", "https://"].iter().any(|scheme| url.starts_with(scheme)) {
        return Ok(url.trim_end_matches('/').to_owned());
    }
    Err(WrongUsage(format!("{url} is no URL; write http://{}", url.trim_start_matches('/').trim_end_matches('/'))))
}

/// The management port of the worker that is meant.
fn base(options: &Options) -> anyhow::Result<String> {
    Ok(match &options.url {
        Some(url) => address(url)?,
        None if options.given.files.is_empty() && options.given.config.is_none() => USUAL_URL.to_owned(),
        None => format!("http://127.0.0.1:{}", manifests::load(&options.given)?.relay.http.management_port),
    })
}

async fn read(options: &Options) -> anyhow::Result<Value> {
    let url = format!("{}/status", base(options)?);
    let answer = get(&url).await.context("is the worker running? --url names its management port")?;
    let status = answer.status();
    let text = answer.text().await?;
    // The data port, and everybody else, has no such page.
    serde_json::from_str(&text).ok().filter(|_| status.is_success()).with_context(|| {
        format!(
            "{url} answers {status}, which is not what the management port of a worker says; --url names \
             Relay.spec.http.managementPort (9090 by default), not the data port"
        )
    })
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
    let due = number(outbox, "/oldestDueAgeSeconds");
    let oldest = if due > 0.0 { format!(", the oldest that could go since {due} s") } else { String::new() };
    format!("{} pending{oldest}; {} dead{}.", outbox["pending"], outbox["dead"], counted(status))
}

/// How old the figures are, where that matters to somebody who has just inserted a row.
fn counted(status: &Value) -> String {
    match status["backlog"]["countedSecondsAgo"].as_f64() {
        Some(age) => format!(" (counted {age:.0} s ago)"),
        None => String::new(),
    }
}

/// The database, and how it does.
fn database(status: &Value) -> String {
    let database = &status["database"];
    let address = word(database, "address").map(|address| format!(" {address}")).unwrap_or_default();
    format!("Database {}{address}", word(database, "kind").unwrap_or_default())
}

/// Why the database does not do what it is asked, while it does not.
fn database_failing(status: &Value) -> Option<String> {
    let failing = word(&status["database"], "failing")?;
    let since = number(status, "/database/failingForSeconds");
    Some(format!("{} does not answer, or refuses, since {since:.0} s: {failing}", database(status)))
}

/// The whole answer as text.
fn overview(status: &Value) -> String {
    let mut text = String::new();
    let failing = database_failing(status);
    if let Some(failing) = &failing {
        let _ = writeln!(text, "{failing}");
    }
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
    if failing.is_none() {
        let _ = writeln!(text, "{}, schema {}: in order", database(status), status["database"]["schemaVersion"]);
    }
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
            row.extend(["name", "kind", "state", "queued", "inFlight"].map(cell));
            let failures = one["failures"].as_u64().filter(|failures| *failures > 0);
            let detail = [failures.map(|failures| format!("{failures} failed in a row")), Some(cell("detail"))];
            row.push(detail.into_iter().flatten().filter(|part| !part.is_empty()).collect::<Vec<_>>().join(": "));
            table.add_row(row);
        }
    }
    if !table.is_empty() {
        let _ = writeln!(text, "{table}");
    }
    text
}

/// Attempts are made, and none gets through.
fn failing_destination(name: &str, destination: &Value) -> String {
    let failures = destination["failures"].as_u64().unwrap_or_default();
    let attempts = if failures == 1 { "attempt".to_owned() } else { format!("{failures} attempts") };
    let since = number(destination, "/failingForSeconds");
    let why = word(destination, "detail").map_or_else(
        || "`queuebox tail --status failed,dead` and the log say why".to_owned(),
        |detail| detail.trim_end_matches('.').to_owned(),
    );
    format!("Destination {name}: the last {attempts} failed, since {since:.0} s: {why}. It is tried again.")
}

/// What keeps messages from moving, causes before their effects.
fn reasons(status: &Value) -> Vec<String> {
    let mut reasons = Vec::new();
    match word(status, "readiness") {
        Some("Starting") => reasons.push("The worker is starting: it has not reached its database yet.".to_owned()),
        Some("Stopping") => reasons.push("The worker is stopping; another one takes over.".to_owned()),
        _ => {}
    }
    reasons.extend(database_failing(status));
    if let Some(stand_by) = word(status, "standBy") {
        reasons.push(format!("The worker stands by: {stand_by}"));
    }
    for (what, field) in [("Source", "sources"), ("Destination", "destinations")] {
        for one in list(status, field) {
            let name = word(one, "name").unwrap_or_default();
            for missing in list(one, "missing").iter().filter_map(Value::as_str) {
                reasons.push(format!("{what} {name} needs {missing}, which is not there."));
            }
            let Some(state) = word(one, "state").filter(|state| *state != "Up") else { continue };
            if state == "Failing" {
                reasons.push(failing_destination(name, one));
                continue;
            }
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
            "database": {"kind": "postgres", "address": "10.0.0.7:5432/shop", "schemaVersion": 14, "failing": null},
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
                "Relay a/shop, worker w of 1, version 0.1.0: Ready\nDatabase postgres 10.0.0.7:5432/shop, schema 14: in order\n"
            ),
            "{text}"
        );
        assert!(text.contains("3 pending"), "{text}");
    }

    #[test]
    fn causes_come_before_their_effects() {
        let mut status = healthy();
        status["database"]["failing"] = json!("connection refused");
        status["database"]["failingForSeconds"] = json!(12.4);
        status["destinations"][0]["state"] = json!("Down");
        status["destinations"][0]["detail"] = json!("no route to host");
        status["backlog"]["outbox"]["dead"] = json!(2);
        let reasons = reasons(&status);
        assert_eq!(reasons.len(), 3, "{reasons:?}");
        assert_eq!(
            reasons[0],
            "Database postgres 10.0.0.7:5432/shop does not answer, or refuses, since 12 s: connection refused"
        );
        assert!(overview(&status).starts_with(&reasons[0]));
        assert!(reasons[1].contains("no route to host"), "{reasons:?}");
        assert!(reasons[2].starts_with("2 message(s) are dead"), "{reasons:?}");
    }

    #[test]
    fn attempts_that_fail_are_named() {
        let mut status = healthy();
        let destination = &mut status["destinations"][0];
        destination["state"] = json!("Failing");
        destination["failures"] = json!(3);
        destination["failingForSeconds"] = json!(7.2);
        destination["detail"] = json!("HTTP 404 Not Found");
        assert_eq!(
            reasons(&status),
            ["Destination out: the last 3 attempts failed, since 7 s: HTTP 404 Not Found. It is tried again."]
        );
        let text = overview(&status);
        assert!(text.contains("Failing") && text.contains("3 failed in a row: HTTP 404 Not Found"), "{text}");
        status["destinations"][0]["missing"] = json!(["env TOKEN"]);
        assert!(reasons(&status)[0].contains("needs env TOKEN"));
    }

    #[test]
    fn an_age_is_said_only_where_there_is_one() {
        let mut status = healthy();
        assert!(waiting(&status).contains("could go since 0.5 s"));
        status["backlog"]["outbox"]["oldestDueAgeSeconds"] = json!(0.0);
        status["backlog"]["countedSecondsAgo"] = json!(3.2);
        assert_eq!(waiting(&status), "3 pending; 0 dead (counted 3 s ago).");
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

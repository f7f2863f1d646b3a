//! `queuebox tail`: what becomes of messages, as a running worker says it, from now on.
//!
//! Invariants: it only reads; it ends by itself at `--limit` or after `--for`; what it missed is said on standard error, so that
//! standard output holds outcomes only.

use std::time::Duration;

use anyhow::{Context, bail};
use clap::Args;
use futures::StreamExt as _;
use queuebox_api::{Secret, SecretResolver, checked};
use serde_json::Value;

use crate::{
    manifests::{self, Given, WrongUsage},
    observe,
    output::Output,
};

/// The worker answers, and sends a line at least every ten seconds.
const SILENCE_MAX: Duration = Duration::from_secs(30);

/// `queuebox tail`.
#[derive(Debug, Args)]
pub struct Options {
    #[command(flatten)]
    given: Given,

    /// The management port of a worker. Default: port of the manifests, on this machine. Topics and keys are shown where the manifests
    /// have an admin API, whose credentials are used.
    #[arg(long, value_name = "URL")]
    url: Option<String>,

    /// Only messages with such a topic.
    #[arg(long, value_name = "PATTERN")]
    topic: Option<String>,

    /// Only messages for this destination.
    #[arg(long, value_name = "NAME")]
    destination: Option<String>,

    /// Only messages with this key.
    #[arg(long, value_name = "KEY")]
    key: Option<String>,

    /// Only these outcomes: sent, failed (will be tried again), dead, expanded. May be repeated.
    #[arg(long = "status", value_name = "STATUS", value_parser = ["sent", "failed", "dead", "expanded"])]
    statuses: Vec<String>,

    /// End after so many outcomes.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    limit: Option<u64>,

    /// End after this time, such as 30s or 5m.
    #[arg(long = "for", value_name = "DURATION", value_parser = queuebox_api::parse_duration)]
    duration: Option<Duration>,

    /// How outcomes are printed.
    #[arg(long, value_enum, default_value_t)]
    output: Output,
}

impl Options {
    fn query(&self) -> Vec<(&'static str, String)> {
        let given = [("topic", &self.topic), ("destination", &self.destination), ("key", &self.key)];
        let mut query: Vec<_> = given.into_iter().filter_map(|(name, value)| Some((name, value.clone()?))).collect();
        if !self.statuses.is_empty() {
            query.push(("status", self.statuses.join(",")));
        }
        query
    }
}

/// Prints outcomes until it has enough, or the worker stops.
///
/// # Errors
/// The worker cannot be reached, has no admin API, or does not let us in.
pub async fn run(options: &Options) -> anyhow::Result<()> {
    let (url, credential) = place(options)?;
    let following = follow(options, &url, credential);
    match options.duration {
        None => following.await,
        Some(duration) => tokio::time::timeout(duration, following).await.unwrap_or(Ok(())),
    }
}

/// Where the worker is, and what lets us in.
fn place(options: &Options) -> anyhow::Result<(String, Option<(String, Secret)>)> {
    let named = options.url.as_deref().map(observe::address).transpose()?;
    let open = |base: String| {
        if options.topic.is_some() || options.key.is_some() {
            let message = "topics and keys are told to those who may use the admin API: set Relay.spec.admin, and name the manifests with -f";
            return Err(anyhow::Error::from(WrongUsage(message.to_owned())));
        }
        Ok((format!("{base}/tail"), None))
    };
    if options.given.files.is_empty() && options.given.config.is_none() {
        return open(named.unwrap_or_else(|| observe::USUAL_URL.to_owned()));
    }
    let loaded = manifests::load(&options.given)?;
    let base = named.unwrap_or_else(|| format!("http://127.0.0.1:{}", loaded.relay.http.management_port));
    let Some(admin) = &loaded.relay.admin else { return open(base) };
    let credential = admin.auth.as_ref().map(|auth| credential(auth, loaded.secrets.as_ref())).transpose()?;
    Ok((format!("{base}/admin/tail"), credential))
}

/// The header that `admin.auth` asks for.
fn credential(auth: &checked::InboundAuth, secrets: &dyn SecretResolver) -> anyhow::Result<(String, Secret)> {
    let value = |accepted: &checked::Accepted| secrets.resolve(&accepted.current);
    Ok(match auth {
        checked::InboundAuth::Bearer(token) => {
            ("Authorization".to_owned(), Secret::new(format!("Bearer {}", value(token)?.expose())))
        }
        checked::InboundAuth::ApiKey { key, header } => (header.clone(), value(key)?),
        _ => {
            let message =
                "following takes Relay.spec.admin.auth of bearer or apiKey; signatures are for requests of programs";
            return Err(WrongUsage(message.to_owned()).into());
        }
    })
}

async fn follow(options: &Options, url: &str, credential: Option<(String, Secret)>) -> anyhow::Result<()> {
    let client = reqwest::Client::builder().read_timeout(SILENCE_MAX).no_proxy().build()?;
    let query = options.query();
    let full = if query.is_empty() { reqwest::Url::parse(url) } else { reqwest::Url::parse_with_params(url, query) };
    let mut request = client.get(full.map_err(|error| WrongUsage(format!("--url: {error}")))?);
    if let Some((name, value)) = &credential {
        request = request.header(name, value.expose());
    }
    let answer = request.send().await.with_context(|| format!("no answer from {url}; is the worker running?"))?;
    let status = answer.status();
    if !status.is_success() {
        let text = answer.text().await.unwrap_or_default();
        let hint = match status.as_u16() {
            404 => {
                "; is that the management port (Relay.spec.http.managementPort) of a worker, and does it run with these manifests?"
            }
            401 => "; name its manifests with -f, so that their credentials are used",
            _ => "",
        };
        bail!("{url} answers {status}: {text}{hint}");
    }
    eprintln!("Following {url}. Stop with Ctrl-C.");
    print_lines(options, answer).await
}

async fn print_lines(options: &Options, answer: reqwest::Response) -> anyhow::Result<()> {
    let mut left = options.limit;
    let mut buffer = Vec::new();
    let mut chunks = answer.bytes_stream();
    while let Some(chunk) = chunks.next().await {
        buffer.extend_from_slice(&chunk.context("the connection to the worker broke")?);
        while let Some(end) = buffer.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = buffer.drain(..=end).collect();
            let Some(outcome) = outcome(&line)? else { continue };
            match options.output {
                Output::Json => outln!("{outcome}"),
                Output::Text => outln!("{}", text(&outcome)),
            }
            left = left.map(|left| left - 1);
            if left == Some(0) {
                return Ok(());
            }
        }
    }
    eprintln!("The worker has stopped.");
    Ok(())
}

/// The outcome of a line, if it holds one.
fn outcome(line: &[u8]) -> anyhow::Result<Option<Value>> {
    let line = line.trim_ascii();
    if line.is_empty() {
        return Ok(None);
    }
    let value: Value = serde_json::from_slice(line).context("the worker sent a line that is no JSON")?;
    if let Some(missed) = value.get("missed") {
        eprintln!("{missed} outcome(s) were missed: there are more than can be shown. A filter helps.");
        return Ok(None);
    }
    Ok(Some(value))
}

fn text(outcome: &Value) -> String {
    let word = |field: &str| outcome[field].as_str().unwrap_or_default();
    let mut text = format!("{}  {:8}  {}  {}", word("at"), word("status"), word("messageId"), word("topic"));
    for (label, field) in [("  key ", "key"), ("  -> ", "destination")] {
        if !word(field).is_empty() {
            text.push_str(label);
            text.push_str(word(field));
        }
    }
    text.push_str(&format!("  attempt {}", outcome["attempt"]));
    if !outcome["ageMs"].is_null() {
        text.push_str(&format!("  {} ms old", outcome["ageMs"]));
    }
    if !word("error").is_empty() {
        text.push_str(": ");
        text.push_str(word("error"));
    }
    text
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_outcome_is_one_line() {
        let dead = json!({
            "at": "2026-09-21T14:13:20Z", "status": "dead", "messageId": "m", "topic": "order.made", "key": "k",
            "destination": "shop", "attempt": 4, "ageMs": 1500, "error": "HTTP 500",
        });
        assert_eq!(
            text(&dead),
            "2026-09-21T14:13:20Z  dead      m  order.made  key k  -> shop  attempt 4  1500 ms old: HTTP 500"
        );
        let expanded = json!({"at": "t", "status": "expanded", "messageId": "m", "topic": "a", "attempt": 0});
        assert_eq!(text(&expanded), "t  expanded  m  a  attempt 0");
    }

    #[test]
    fn what_is_no_outcome_is_not_printed() {
        assert_eq!(outcome(b"\n").unwrap(), None);
        assert_eq!(outcome(b"{\"missed\":7}\n").unwrap(), None);
        assert!(outcome(b"<html>\n").is_err());
    }
}

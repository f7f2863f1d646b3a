//! The figures of a run, as a table for people and as JSON for programs.

use std::time::Duration;

use comfy_table::{Table, presets::ASCII_MARKDOWN};
use serde::Serialize;

/// All rungs of a run.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Report {
    /// In the order in which they ran.
    pub rungs: Vec<Measured>,
    /// What a reader must know to judge the figures.
    #[serde(skip)]
    pub notes: Vec<String>,
}

/// One rung. A figure that the rung does not have is `null`.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Measured {
    /// Name.
    pub rung: String,
    /// From the first delivery to the last.
    pub messages_per_second: f64,
    /// Median of: insert → received (`latency`, `snapshot-…`), request → answer (`inbox-http`), read or claim → outcome (the others).
    pub p50_ms: Option<f64>,
    /// Of the same, 99 in 100 are below.
    pub p99_ms: Option<f64>,
    /// Processor time of relay and database server together.
    pub cpu_us_per_message: Option<f64>,
    /// Write-ahead log of the database.
    pub log_bytes_per_message: Option<f64>,
    /// The database server's part of the processor time.
    #[serde(skip)]
    pub database_cpu_us: Option<f64>,
    /// Messages that were counted.
    #[serde(skip)]
    pub messages: u64,
}

impl Measured {
    /// A rung with its rate.
    pub fn new(rung: impl Into<String>, messages: u64, took: Duration) -> Self {
        #[allow(clippy::cast_precision_loss)]
        let rate = messages as f64 / took.as_secs_f64().max(1e-6);
        Self { rung: rung.into(), messages, messages_per_second: rate, ..Self::default() }
    }

    /// With quantiles of these seconds.
    #[must_use]
    pub fn latencies(mut self, mut seconds: Vec<f64>) -> Self {
        seconds.sort_by(f64::total_cmp);
        self.p50_ms = quantile(&seconds, 0.5);
        self.p99_ms = quantile(&seconds, 0.99);
        self
    }
}

fn quantile(sorted: &[f64], share: f64) -> Option<f64> {
    #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    let index = (sorted.len() as f64 * share).ceil() as usize;
    sorted.get(index.saturating_sub(1)).map(|seconds| seconds * 1e3)
}

/// A quantile in ms of a histogram in Prometheus' text format, interpolated within its bucket.
pub fn histogram_quantile(scrape: &str, name: &str, share: f64) -> Option<f64> {
    let prefix = format!("{name}_bucket{{le=\"");
    let buckets: Vec<(f64, f64)> = scrape
        .lines()
        .filter_map(|line| {
            let (bound, count) = line.strip_prefix(&prefix)?.split_once("\"}")?;
            Some((bound.parse().ok()?, count.trim().parse().ok()?))
        })
        .collect();
    let total = buckets.last()?.1;
    let rank = total * share;
    let index = buckets.iter().position(|(_, count)| *count >= rank).filter(|_| total > 0.0)?;
    let (low, below) = index.checked_sub(1).map_or((0.0, 0.0), |before| buckets[before]);
    let (high, upto) = buckets[index];
    if high.is_infinite() {
        return Some(low * 1e3);
    }
    let part = if upto > below { (rank - below) / (upto - below) } else { 1.0 };
    Some((low + (high - low) * part) * 1e3)
}

impl Report {
    fn rate_of(&self, rung: &str) -> Option<f64> {
        self.rungs.iter().find(|measured| measured.rung == rung).map(|measured| measured.messages_per_second)
    }

    /// As `--output json`.
    ///
    /// # Errors
    /// Never for what a run gives.
    pub fn json(&self) -> serde_json::Result<String> {
        serde_json::to_string_pretty(self)
    }

    /// For people.
    pub fn table(&self) -> String {
        let mut table = Table::new();
        table.load_style(ASCII_MARKDOWN);
        table.set_header([
            "rung",
            "messages",
            "messages/s",
            "p50 ms",
            "p99 ms",
            "CPU µs/message",
            "of it database",
            "log bytes/message",
            "× naive",
            "× claim-batch",
        ]);
        let figure =
            |value: Option<f64>, digits: usize| value.map_or("–".to_owned(), |value| format!("{value:.digits$}"));
        for rung in &self.rungs {
            let ratio = |base: Option<f64>| figure(base.map(|base| rung.messages_per_second / base), 2);
            table.add_row([
                rung.rung.clone(),
                rung.messages.to_string(),
                format!("{:.0}", rung.messages_per_second),
                figure(rung.p50_ms, 2),
                figure(rung.p99_ms, 2),
                figure(rung.cpu_us_per_message, 1),
                figure(rung.database_cpu_us, 1),
                figure(rung.log_bytes_per_message, 0),
                ratio(self.rate_of("naive")),
                ratio(self.rate_of("claim-batch")),
            ]);
        }
        let mut text = table.to_string();
        for note in &self.notes {
            text += &format!("\nnote: {note}");
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_has_the_documented_fields_and_no_others() {
        let report = Report { rungs: vec![Measured::new("null", 10, Duration::from_secs(2))], notes: vec!["x".into()] };
        let json: serde_json::Value = serde_json::from_str(&report.json().unwrap()).unwrap();
        let names: Vec<_> = json["rungs"][0].as_object().unwrap().keys().cloned().collect();
        let documented =
            ["rung", "messages_per_second", "p50_ms", "p99_ms", "cpu_us_per_message", "log_bytes_per_message"];
        assert_eq!(names, documented);
        assert_eq!(json["rungs"][0]["messages_per_second"], 5.0);
        assert_eq!(json.as_object().unwrap().len(), 1);
    }

    #[test]
    fn quantiles_are_those_of_the_sorted_values() {
        let measured = Measured::default().latencies((1..=100).rev().map(f64::from).collect());
        assert_eq!((measured.p50_ms, measured.p99_ms), (Some(50_000.0), Some(99_000.0)));
    }

    #[test]
    fn quantiles_of_a_histogram_lie_within_their_bucket() {
        let scrape = "x_bucket{le=\"0.1\"} 50\nx_bucket{le=\"0.2\"} 100\nx_bucket{le=\"+Inf\"} 100\n";
        assert_eq!(histogram_quantile(scrape, "x", 0.5), Some(100.0));
        assert_eq!(histogram_quantile(scrape, "x", 0.75).map(f64::round), Some(150.0));
        assert_eq!(histogram_quantile("", "x", 0.5), None);
    }
}

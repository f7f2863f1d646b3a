//! Every metric of a worker, by name, in one place (contract 12.2). Labels hold names from manifests and fixed words only.
//!
//! [`METRICS`] is the list from which the documentation is generated and against which a live scrape is compared.

use std::time::Duration;

use queuebox_core::ports::outbox::Recovered;

use prometheus::{
    Gauge, GaugeVec, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts,
    Registry, core::Collector,
};

/// One row of the metrics table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MetricInfo {
    /// Full name.
    pub name: &'static str,
    /// `counter`, `gauge` or `histogram`.
    pub kind: &'static str,
    /// Label names.
    pub labels: &'static [&'static str],
    /// What it counts.
    pub help: &'static str,
}

macro_rules! metrics {
    ($($constant:ident = $name:literal $kind:literal [$($label:literal),*] $help:literal;)*) => {
        $(const $constant: MetricInfo = MetricInfo { name: $name, kind: $kind, labels: &[$($label),*], help: $help };)*
        /// All metrics of a worker.
        pub const METRICS: &[MetricInfo] = &[$($constant),*];
    };
}

metrics! {
    QUEUEBOX = "queuebox" "gauge" ["version"] "Always 1; the version of this binary";
    INFO = "queuebox_info" "gauge" ["version"] "Always 1; the version of this binary";
    UPTIME = "queuebox_uptime_seconds" "gauge" [] "Seconds since the process started";
    OUTBOX_MESSAGES = "queuebox_outbox_messages_total" "counter" ["status"] "Outcomes: sent, failed (will be tried again), dead, expanded";
    OUTBOX_PENDING = "queuebox_outbox_messages_pending" "gauge" [] "Pending rows";
    OUTBOX_DEAD = "queuebox_outbox_messages_dead" "gauge" [] "Dead rows";
    RECLAIMED = "queuebox_outbox_messages_reclaimed_total" "counter" [] "Rows found processing after their lease had ended";
    OLDEST_PENDING = "queuebox_outbox_oldest_pending_age_seconds" "gauge" [] "Age of the oldest pending row, due or not; 0 = none";
    OLDEST_DUE = "queuebox_outbox_oldest_due_age_seconds" "gauge" [] "For how long the row that could go now has been due; 0 = none";
    WALK_AGE = "queuebox_outbox_walk_age_seconds" "gauge" [] "Since the walk over the pending rows last began anew";
    CLAIMS_LOST = "queuebox_claims_lost_total" "counter" ["component"] "Messages whose claim was lost";
    CRASHES = "queuebox_crashes_total" "counter" ["component"] "Crashes counted on rows";
    PROCESS_ERRORS = "queuebox_outbox_process_errors_total" "counter" [] "Errors that aborted one message";
    POLL = "queuebox_outbox_poll_duration_seconds" "histogram" [] "One settle and read of the database";
    PROCESSING = "queuebox_outbox_processing_duration_seconds" "histogram" [] "From the read of a row to its outcome";
    PUBLISH = "queuebox_outbox_publish_duration_seconds" "histogram" ["destination_type"] "One publish";
    DESTINATION_MESSAGES = "queuebox_outbox_destination_messages_total" "counter" ["destination", "outcome"] "Publishes by destination: success, failure";
    QUEUE_DEPTH = "queuebox_outbox_queue_depth" "gauge" ["destination"] "Rows in memory that wait for a publish";
    LATENCY = "queuebox_delivery_latency_seconds" "histogram" ["destination"] "From created_at to sent";
    DESTINATION_UP = "queuebox_destination_up" "gauge" ["destination"] "1 = connected, or the last HTTP attempt succeeded";
    BREAKER = "queuebox_destination_breaker_state" "gauge" ["destination"] "0 closed, 1 half open, 2 open";
    HTTP_RESPONSES = "queuebox_http_publish_responses_total" "counter" ["status_class"] "Answers of HTTP destinations: 1xx to 5xx, other";
    TRANSFORM_FAILURES = "queuebox_transform_failures_total" "counter" ["strategy"] "Failed route and destination transforms";
    INBOX_MESSAGES = "queuebox_inbox_messages_total" "counter" ["status"] "Received: new, duplicate; forwarded";
    INBOX_RELAY_ERRORS = "queuebox_inbox_relay_errors_total" "counter" [] "Failed forwards";
    INBOX_REJECTIONS = "queuebox_inbox_rejections_total" "counter" ["reason"] "Not stored: extraction_failed, transform_failed, storage_failed";
    INBOX_FILTERED = "queuebox_inbox_filtered_total" "counter" ["source"] "Dropped by the filter";
    INBOX_OLDEST = "queuebox_inbox_oldest_pending_age_seconds" "gauge" [] "Age of the oldest pending row, push and pull";
    SOURCE_PENDING = "queuebox_inbox_source_pending" "gauge" ["source", "consumption"] "Pending rows";
    SOURCE_OLDEST = "queuebox_inbox_source_oldest_pending_age_seconds" "gauge" ["source"] "Age of the oldest pending row";
    SOURCE_DEAD = "queuebox_inbox_source_dead" "gauge" ["source"] "Dead rows";
    SOURCE_UP = "queuebox_source_up" "gauge" ["source"] "1 = receiving";
    CLEANUP_DELETED = "queuebox_cleanup_messages_deleted_total" "counter" ["table"] "Rows deleted by retention";
    CLEANUP_DURATION = "queuebox_cleanup_duration_seconds" "histogram" ["table"] "One cleanup";
    CLEANUP_LAST = "queuebox_cleanup_last_run_timestamp" "gauge" ["table"] "End of the last cleanup, Unix seconds";
    POOL_SIZE = "queuebox_db_pool_size" "gauge" [] "Open database connections";
    POOL_IDLE = "queuebox_db_pool_idle" "gauge" [] "Idle database connections";
    POOL_WAITING = "queuebox_db_pool_waiting" "gauge" [] "Callers that wait for a database connection";
}

/// Bounds of duration histograms: 1 ms to 60 s.
const DURATIONS: [f64; 14] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0, 60.0];
/// Bounds of the delivery latency: 5 ms to 1 h (contract 12.2).
const LATENCIES: [f64; 14] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0];

/// Bounds of the histogram of polls: 0.25 ms to 8 s, each twice the one before, so that "twice as slow" can be read from it.
const POLLS: [f64; 16] =
    [0.00025, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.024, 2.048, 4.096, 8.192];

/// Counters, gauges and histograms of one worker.
#[allow(missing_docs, reason = "each field is the metric of the same name in METRICS")]
pub struct Metrics {
    pub registry: Registry,
    pub uptime: Gauge,
    pub outbox_messages: IntCounterVec,
    pub outbox_pending: IntGauge,
    pub outbox_dead: IntGauge,
    pub reclaimed: IntCounter,
    pub oldest_pending: Gauge,
    pub oldest_due: Gauge,
    pub walk_age: Gauge,
    pub claims_lost: IntCounterVec,
    pub crashes: IntCounterVec,
    pub process_errors: IntCounter,
    pub poll: Histogram,
    pub processing: Histogram,
    pub publish: HistogramVec,
    pub destination_messages: IntCounterVec,
    pub queue_depth: IntGaugeVec,
    pub latency: HistogramVec,
    pub destination_up: IntGaugeVec,
    pub breaker: IntGaugeVec,
    pub http_responses: IntCounterVec,
    pub transform_failures: IntCounterVec,
    pub inbox_messages: IntCounterVec,
    pub inbox_relay_errors: IntCounter,
    pub inbox_rejections: IntCounterVec,
    pub inbox_filtered: IntCounterVec,
    pub inbox_oldest: Gauge,
    pub source_pending: IntGaugeVec,
    pub source_oldest: GaugeVec,
    pub source_dead: IntGaugeVec,
    pub source_up: IntGaugeVec,
    pub cleanup_deleted: IntCounterVec,
    pub cleanup_duration: HistogramVec,
    pub cleanup_last: GaugeVec,
    pub pool_size: IntGauge,
    pub pool_idle: IntGauge,
    pub pool_waiting: IntGauge,
}

/// Registers metrics; an impossible definition is reported once instead of ending the process.
struct Registrar(Registry);

impl Registrar {
    fn add<C: Collector + Clone + 'static>(&self, made: Result<C, prometheus::Error>) -> Result<C, prometheus::Error> {
        let collector = made?;
        self.0.register(Box::new(collector.clone()))?;
        Ok(collector)
    }

    fn counter(&self, info: MetricInfo) -> Result<IntCounter, prometheus::Error> {
        self.add(IntCounter::new(info.name, info.help))
    }

    fn counters(&self, info: MetricInfo) -> Result<IntCounterVec, prometheus::Error> {
        self.add(IntCounterVec::new(Opts::new(info.name, info.help), info.labels))
    }

    fn gauge(&self, info: MetricInfo) -> Result<Gauge, prometheus::Error> {
        self.add(Gauge::new(info.name, info.help))
    }

    fn int_gauge(&self, info: MetricInfo) -> Result<IntGauge, prometheus::Error> {
        self.add(IntGauge::new(info.name, info.help))
    }

    fn gauges(&self, info: MetricInfo) -> Result<GaugeVec, prometheus::Error> {
        self.add(GaugeVec::new(Opts::new(info.name, info.help), info.labels))
    }

    fn int_gauges(&self, info: MetricInfo) -> Result<IntGaugeVec, prometheus::Error> {
        self.add(IntGaugeVec::new(Opts::new(info.name, info.help), info.labels))
    }

    fn histograms(&self, info: MetricInfo, buckets: &[f64]) -> Result<HistogramVec, prometheus::Error> {
        self.add(HistogramVec::new(HistogramOpts::new(info.name, info.help).buckets(buckets.to_vec()), info.labels))
    }

    fn histogram(&self, info: MetricInfo, buckets: &[f64]) -> Result<Histogram, prometheus::Error> {
        self.add(Histogram::with_opts(HistogramOpts::new(info.name, info.help).buckets(buckets.to_vec())))
    }
}

impl Metrics {
    /// All metrics, registered, with the fixed label values present from the start so that rates have a first sample.
    ///
    /// # Errors
    /// Only if two metrics had one name, which a test excludes.
    pub fn new(version: &str) -> Result<Self, prometheus::Error> {
        let to = Registrar(Registry::new());
        for info in [QUEUEBOX, INFO] {
            to.int_gauges(info)?.with_label_values(&[version]).set(1);
        }
        let metrics = Self {
            uptime: to.gauge(UPTIME)?,
            outbox_messages: to.counters(OUTBOX_MESSAGES)?,
            outbox_pending: to.int_gauge(OUTBOX_PENDING)?,
            outbox_dead: to.int_gauge(OUTBOX_DEAD)?,
            reclaimed: to.counter(RECLAIMED)?,
            oldest_pending: to.gauge(OLDEST_PENDING)?,
            oldest_due: to.gauge(OLDEST_DUE)?,
            walk_age: to.gauge(WALK_AGE)?,
            claims_lost: to.counters(CLAIMS_LOST)?,
            crashes: to.counters(CRASHES)?,
            process_errors: to.counter(PROCESS_ERRORS)?,
            poll: to.histogram(POLL, &POLLS)?,
            processing: to.histogram(PROCESSING, &DURATIONS)?,
            publish: to.histograms(PUBLISH, &DURATIONS)?,
            destination_messages: to.counters(DESTINATION_MESSAGES)?,
            queue_depth: to.int_gauges(QUEUE_DEPTH)?,
            latency: to.histograms(LATENCY, &LATENCIES)?,
            destination_up: to.int_gauges(DESTINATION_UP)?,
            breaker: to.int_gauges(BREAKER)?,
            http_responses: to.counters(HTTP_RESPONSES)?,
            transform_failures: to.counters(TRANSFORM_FAILURES)?,
            inbox_messages: to.counters(INBOX_MESSAGES)?,
            inbox_relay_errors: to.counter(INBOX_RELAY_ERRORS)?,
            inbox_rejections: to.counters(INBOX_REJECTIONS)?,
            inbox_filtered: to.counters(INBOX_FILTERED)?,
            inbox_oldest: to.gauge(INBOX_OLDEST)?,
            source_pending: to.int_gauges(SOURCE_PENDING)?,
            source_oldest: to.gauges(SOURCE_OLDEST)?,
            source_dead: to.int_gauges(SOURCE_DEAD)?,
            source_up: to.int_gauges(SOURCE_UP)?,
            cleanup_deleted: to.counters(CLEANUP_DELETED)?,
            cleanup_duration: to.histograms(CLEANUP_DURATION, &DURATIONS)?,
            cleanup_last: to.gauges(CLEANUP_LAST)?,
            pool_size: to.int_gauge(POOL_SIZE)?,
            pool_idle: to.int_gauge(POOL_IDLE)?,
            pool_waiting: to.int_gauge(POOL_WAITING)?,
            registry: to.0,
        };
        metrics.touch();
        Ok(metrics)
    }

    fn touch(&self) {
        let fixed: [(&IntCounterVec, &[&str]); 6] = [
            (&self.outbox_messages, &["sent", "failed", "dead", "expanded"]),
            (&self.claims_lost, &["outbox", "inbox"]),
            (&self.crashes, &["outbox", "inbox"]),
            (&self.inbox_messages, &["new", "forwarded", "duplicate"]),
            (&self.inbox_rejections, &["extraction_failed", "transform_failed", "storage_failed"]),
            (&self.transform_failures, &["Fail", "Skip", "Dead"]),
        ];
        for (counter, words) in fixed {
            for word in words {
                counter.with_label_values(&[*word]);
            }
        }
    }

    /// One publish of a connector of `kind` took so long.
    pub fn publish_took(&self, kind: &str, took: Duration) {
        self.publish.with_label_values(&[kind]).observe(took.as_secs_f64());
    }

    /// A route or destination transform failed under this `onError`.
    pub fn transform_failed(&self, strategy: &str) {
        self.transform_failures.with_label_values(&[strategy]).inc();
    }

    /// Rows were found `processing` after their lease had ended.
    pub fn recovered(&self, recovered: &Recovered) {
        let dead = recovered.dead.len() as u64;
        let all = recovered.pending + dead;
        if all > 0 {
            self.reclaimed.inc_by(all);
            self.crashes.with_label_values(&["outbox"]).inc_by(all);
            self.outbox_messages.with_label_values(&["dead"]).inc_by(dead);
            tracing::warn!(rows = all, dead, "Recovered rows whose lease had ended.");
        }
    }

    /// The text of a scrape.
    pub fn encode(&self) -> String {
        let mut text = String::new();
        let families = self.registry.gather();
        if let Err(error) = prometheus::TextEncoder::new().encode_utf8(&families, &mut text) {
            tracing::error!(%error, "Could not encode the metrics.");
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_metric_is_registered_under_its_documented_name() {
        let metrics = Metrics::new("0.0.0").unwrap();
        metrics.publish_took("http", Duration::from_millis(1));
        let text = metrics.encode();
        for info in METRICS.iter().filter(|info| info.labels.is_empty()) {
            assert!(text.contains(&format!("# TYPE {} {}", info.name, info.kind)), "{}", info.name);
        }
        let mut names: Vec<_> = METRICS.iter().map(|info| info.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), METRICS.len());
    }
}

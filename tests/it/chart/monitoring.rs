//! Alerts and dashboard speak of metrics that exist, with labels that they have.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::{documents, objects, of_kind, read};

/// Labels of each metric of docs/reference/metrics.md, histograms under their series.
fn metrics() -> BTreeMap<String, BTreeSet<String>> {
    let mut metrics = BTreeMap::new();
    for line in read("docs/reference/metrics.md").lines() {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let [_, name, kind, labels, ..] = cells.as_slice() else { continue };
        let Some(name) = name.strip_prefix('`').and_then(|name| name.strip_suffix('`')) else { continue };
        let labels: BTreeSet<String> =
            labels.split(',').map(|label| label.trim().trim_matches('`').to_owned()).collect();
        let series: &[&str] = if *kind == "histogram" { &["_bucket", "_sum", "_count"] } else { &[""] };
        for suffix in series {
            metrics.insert(format!("{name}{suffix}"), labels.clone());
        }
    }
    metrics
}

/// Words of an expression.
fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').filter(|word| !word.is_empty())
}

/// Labels that an expression groups by or selects, but for those that a scrape adds.
fn labels(expression: &str) -> BTreeSet<&str> {
    let grouped = expression.split("by (").skip(1).filter_map(|rest| rest.split(')').next()).flat_map(words);
    let selected = expression
        .split('{')
        .skip(1)
        .filter_map(|rest| rest.split('}').next())
        .flat_map(|inside| inside.split(',').filter_map(|matcher| matcher.split(['=', '!']).next()).map(str::trim));
    grouped.chain(selected).filter(|label| !["namespace", "relay", "le"].contains(label)).collect()
}

fn check(expression: &str) {
    let known = metrics();
    let used: Vec<&str> = words(expression).filter(|word| word.starts_with("queuebox_")).collect();
    assert!(!used.is_empty(), "{expression}");
    for name in used {
        let has =
            known.get(name).unwrap_or_else(|| panic!("{name} is no metric of docs/reference/metrics.md: {expression}"));
        for label in labels(expression) {
            assert!(has.contains(label), "{name} has no label {label}: {expression}");
        }
    }
}

fn alerts() -> Vec<Value> {
    let file = documents(&read("deploy/monitoring/alerts.yaml")).remove(0);
    let groups = file["groups"].as_array().unwrap();
    groups.iter().flat_map(|group| group["rules"].as_array().unwrap().clone()).collect()
}

#[test]
fn alerts_name_real_metrics() {
    assert!(alerts().len() > 10);
    for alert in alerts() {
        check(alert["expr"].as_str().unwrap());
        assert!(alert["annotations"]["summary"].is_string() && alert["labels"]["severity"].is_string(), "{alert:#}");
    }
}

#[test]
fn the_dashboard_names_real_metrics() {
    let dashboard: Value = serde_json::from_str(&read("deploy/monitoring/dashboard.json")).unwrap();
    let targets: Vec<&Value> = dashboard["panels"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|panel| panel["targets"].as_array())
        .flatten()
        .collect();
    assert!(targets.len() > 20);
    for target in targets {
        check(target["expr"].as_str().unwrap());
    }
}

#[test]
fn every_metric_of_a_fault_is_watched() {
    let watched: String = alerts().iter().map(|alert| alert["expr"].to_string()).collect();
    for name in [
        "queuebox_outbox_messages_dead",
        "queuebox_outbox_oldest_due_age_seconds",
        "queuebox_destination_up",
        "queuebox_source_up",
        "queuebox_inbox_source_dead",
        "queuebox_claims_lost_total",
    ] {
        assert!(watched.contains(name), "no alert for {name}");
    }
}

#[test]
fn the_chart_ships_alerts_and_dashboard() {
    let rendered = objects(&[
        "--set=metrics.prometheusRule.enabled=true",
        "--set=metrics.prometheusRule.disabled={QueueBoxCrashes}",
        "--set=metrics.dashboard.enabled=true",
    ]);
    let rule = of_kind(&rendered, "PrometheusRule")[0];
    let shipped: Vec<Value> = rule["spec"]["groups"]
        .as_array()
        .unwrap()
        .iter()
        .flat_map(|group| group["rules"].as_array().unwrap().clone())
        .collect();
    let expected: Vec<Value> = alerts().into_iter().filter(|alert| alert["alert"] != "QueueBoxCrashes").collect();
    assert_eq!(shipped, expected);
    let dashboards: Vec<&Value> =
        of_kind(&rendered, "ConfigMap").into_iter().filter(|map| map["data"]["queuebox.json"].is_string()).collect();
    let text = dashboards[0]["data"]["queuebox.json"].as_str().unwrap();
    assert_eq!(text.trim_end(), read("deploy/monitoring/dashboard.json").trim_end());
}

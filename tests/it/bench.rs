//! `queuebox bench` as a program: what it prints. Its figures are the business of `docs/performance.md`.

use queuebox_testkit::{self as testkit, Process};
use serde_json::Value;

use crate::support::PATIENCE;

#[tokio::test]
async fn bench_prints_the_documented_json() {
    let url = testkit::postgres().await.url();
    let words =
        ["bench", "--rungs", "null,claim-batch", "--messages", "600", "--output", "json", "--database-url", &url];
    let (status, stdout, stderr) = Process::queuebox(words).run(PATIENCE).await;
    assert!(status.success(), "{stderr}");
    let report: Value = serde_json::from_str(&stdout).unwrap();
    let rungs: Vec<&str> =
        report["rungs"].as_array().unwrap().iter().map(|rung| rung["rung"].as_str().unwrap()).collect();
    assert_eq!(rungs, ["null", "claim-batch"]);
    for rung in report["rungs"].as_array().unwrap() {
        assert!(
            rung["messages_per_second"].as_f64().unwrap() > 0.0 && rung.get("cpu_us_per_message").is_some(),
            "{rung}"
        );
    }
    let (status, _, stderr) = Process::queuebox(["bench", "--rungs", "speed"]).run(PATIENCE).await;
    assert_eq!(status.code(), Some(2));
    assert!(stderr.contains("there is no rung"), "{stderr}");
}

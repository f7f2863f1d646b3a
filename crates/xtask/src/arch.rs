//! The law of dependencies: which room of the house may see which, and who may name which driver.
//!
//! The rooms of the workspace are listed here by hand: a new room is a decision, and this is where it is written down.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, bail};
use serde::Deserialize;

const STORES: [&str; 4] = ["queuebox-postgres", "queuebox-sqlite", "queuebox-mysql", "queuebox-sqlserver"];
const CONNECTORS: [&str; 4] = ["queuebox-http", "queuebox-rabbitmq", "queuebox-kafka", "queuebox-nats"];

/// What tests may use in addition, in every room.
const FOR_TESTS: [&str; 2] = ["queuebox-testkit", "queuebox-conformance"];

/// Rooms that see everything because they put the parts together: the binary, the ladder of speed and the whole-program tests.
const COMPOSERS: [&str; 3] = ["queuebox", "queuebox-bench", "queuebox-tests"];

/// Foreign crates that belong to some rooms only.
const OWNED: [(&str, &[&str]); 10] = [
    // The ladder makes the topics, queues and streams that it fills.
    ("rdkafka", &["queuebox-kafka", "queuebox-bench"]),
    ("lapin", &["queuebox-rabbitmq", "queuebox-bench"]),
    ("async-nats", &["queuebox-nats", "queuebox-bench"]),
    ("tiberius", &["queuebox-sqlserver"]),
    (
        "sqlx",
        &["queuebox-sql", "queuebox-postgres", "queuebox-sqlite", "queuebox-mysql", "queuebox-lab", "queuebox-bench"],
    ),
    ("kube", &["queuebox-api", "queuebox-operator"]),
    ("k8s-openapi", &["queuebox-api", "queuebox-operator"]),
    ("jsonata-core", &["queuebox-api", "queuebox-engine"]),
    // Libraries have errors of their own, with classes; a program may be content with text.
    ("anyhow", &["queuebox", "queuebox-bench", "queuebox-lab", "queuebox-testkit", "xtask"]),
    // One provider of cryptography: aws-lc through rustls.
    ("ring", &[]),
];

/// What the innermost room must do without: it has no runtime, no clock and no I/O of its own.
const NOT_IN_CORE: [&str; 6] = ["tokio", "hyper", "reqwest", "axum", "kube", "sqlx"];

/// The rooms of the workspace that a room may see; `None` for a room that the law does not know.
fn may_see(room: &str) -> Option<BTreeSet<&'static str>> {
    let core = "queuebox-core";
    let seen: Vec<&'static str> = match room {
        "queuebox-core" | "queuebox-testkit" | "xtask" => vec![],
        "queuebox-api" | "queuebox-engine" | "queuebox-sql" | "queuebox-conformance" => vec![core],
        room if STORES.contains(&room) => vec![core, "queuebox-sql"],
        room if CONNECTORS.contains(&room) => vec![core],
        // The engine only for the types that it is configured with: the catalog turns manifests into them.
        "queuebox-catalog" => {
            [&[core, "queuebox-api", "queuebox-engine", "queuebox-sql"][..], &STORES, &CONNECTORS].concat()
        }
        "queuebox-admin" => vec![core, "queuebox-api", "queuebox-engine"],
        // What users write is all that it knows of QueueBox: workers are seen through their management port.
        "queuebox-operator" => vec!["queuebox-api"],
        // The real engine on real databases, without manifests.
        "queuebox-lab" => [&[core, "queuebox-engine"][..], &STORES].concat(),
        _ => return None,
    };
    Some(seen.into_iter().collect())
}

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

#[derive(Deserialize)]
struct Package {
    name: String,
    dependencies: Vec<Dependency>,
}

#[derive(Deserialize)]
struct Dependency {
    name: String,
    /// Absent for an ordinary dependency.
    kind: Option<String>,
    /// Set for a dependency within the workspace.
    path: Option<String>,
}

impl Dependency {
    fn for_tests(&self) -> bool {
        self.kind.as_deref() == Some("dev")
    }
}

/// All breaches of the law.
pub fn check() -> Result<Vec<String>> {
    let output = crate::cargo().args(["metadata", "--no-deps", "--format-version", "1"]).output()?;
    if !output.status.success() {
        bail!("cargo metadata: {}", String::from_utf8_lossy(&output.stderr));
    }
    let metadata: Metadata = serde_json::from_slice(&output.stdout).context("cargo metadata")?;
    Ok(metadata.packages.iter().flat_map(breaches).collect())
}

fn breaches(package: &Package) -> Vec<String> {
    let room = package.name.as_str();
    let mut found = Vec::new();
    let composes = COMPOSERS.contains(&room);
    let seen = may_see(room).unwrap_or_default();
    if !composes && may_see(room).is_none() {
        found.push(format!(
            "{room} is a room that the law does not know: say in crates/xtask/src/arch.rs what it may see"
        ));
        return found;
    }
    for dependency in &package.dependencies {
        let name = dependency.name.as_str();
        let allowed = match dependency.path {
            Some(_) if dependency.for_tests() && FOR_TESTS.contains(&name) => true,
            Some(_) => composes || seen.contains(name),
            None => foreign_allowed(room, name, dependency.for_tests()),
        };
        if !allowed {
            found.push(format!("{room} must not depend on {name}"));
        }
    }
    found
}

fn foreign_allowed(room: &str, name: &str, for_tests: bool) -> bool {
    if room == "queuebox-core" && NOT_IN_CORE.contains(&name) && !for_tests {
        return false;
    }
    // Tests look at the world with the drivers of others.
    let owners: BTreeMap<&str, &[&str]> = OWNED.into_iter().collect();
    for_tests || owners.get(name).is_none_or(|owners| owners.contains(&room))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn package(name: &str, dependencies: &[(&str, Option<&str>, bool)]) -> Package {
        let dependencies = dependencies.iter().map(|(name, kind, own)| Dependency {
            name: (*name).into(),
            kind: kind.map(String::from),
            path: own.then(String::new),
        });
        Package { name: name.into(), dependencies: dependencies.collect() }
    }

    #[test]
    fn a_connector_sees_neither_the_engine_nor_another_connector() {
        let package = package(
            "queuebox-kafka",
            &[
                ("queuebox-core", None, true),
                ("queuebox-engine", None, true),
                ("queuebox-nats", Some("dev"), true),
                ("queuebox-testkit", Some("dev"), true),
                ("rdkafka", None, false),
            ],
        );
        assert_eq!(
            breaches(&package),
            ["queuebox-kafka must not depend on queuebox-engine", "queuebox-kafka must not depend on queuebox-nats",]
        );
    }

    #[test]
    fn drivers_have_owners_and_core_has_no_runtime() {
        assert_eq!(breaches(&package("queuebox-engine", &[("rdkafka", None, false)])).len(), 1);
        assert_eq!(breaches(&package("queuebox-core", &[("tokio", None, false)])).len(), 1);
        assert!(breaches(&package("queuebox-core", &[("tokio", Some("dev"), false)])).is_empty());
        assert!(breaches(&package("queuebox-tests", &[("rdkafka", Some("dev"), false)])).is_empty());
    }

    #[test]
    fn an_unknown_room_is_named() {
        assert!(breaches(&package("queuebox-new", &[]))[0].contains("does not know"));
    }
}

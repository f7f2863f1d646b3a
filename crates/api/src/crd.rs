//! CustomResourceDefinitions, made from the types of [`crate::spec`].
//!
//! Invariants (tested): every text, list and map has a bound, or the API server refuses the cost of the rules; nothing is
//! `nullable`, so that an explicit null is the same as absence on the API server and in the local checks; no empty list; the
//! status begins as `{observedGeneration: -1}`; each file is far below 100 KB.

use std::sync::LazyLock;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::CustomResourceExt;
use serde::{Serialize, ser::SerializeSeq};
use serde_json::{Map, Value, json};

use crate::spec::{Destination, Relay, Source};

/// Bound of a text where nothing is said (contract 13.1).
const TEXT_MAX: u64 = 2_048;
/// Bound of a list or map where nothing is said (contract 13.1).
const LIST_MAX: u64 = 64;

/// The three kinds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// [`Relay`].
    Relay,
    /// [`Destination`].
    Destination,
    /// [`Source`].
    Source,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Relay, Self::Destination, Self::Source];

    /// The word in `kind`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Relay => "Relay",
            Self::Destination => "Destination",
            Self::Source => "Source",
        }
    }

    /// Reads the word in `kind`.
    pub fn parse(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.as_str() == word)
    }
}

impl std::fmt::Display for Kind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

// ---- Rules ----------------------------------------------------------------------------------------------------------

/// CEL rules of one block, as `x-kubernetes-validations`.
pub(crate) struct Rules(Vec<(String, String)>);

impl Rules {
    /// Both.
    pub(crate) fn and(mut self, other: Self) -> Self {
        self.0.extend(other.0);
        self
    }
}

impl Serialize for Rules {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut list = serializer.serialize_seq(Some(self.0.len()))?;
        for (rule, message) in &self.0 {
            list.serialize_element(&json!({"rule": rule, "message": message}))?;
        }
        list.end()
    }
}

/// One rule with its message.
pub(crate) fn rule(rule: &str, message: &str) -> Rules {
    Rules(vec![(rule.to_owned(), message.to_owned())])
}

fn count(fields: &[&str]) -> String {
    let parts: Vec<String> = fields.iter().map(|field| format!("has(self.{})", cel_name(field))).collect();
    format!("[{}].filter(x, x).size()", parts.join(", "))
}

/// CEL reserves some words; the API server escapes fields that are called so.
fn cel_name(field: &str) -> String {
    if field == "in" { "__in__".to_owned() } else { field.to_owned() }
}

/// Exactly one of `fields` is given.
pub(crate) fn exactly_one(fields: &[&str]) -> Rules {
    rule(&format!("{} == 1", count(fields)), &format!("give exactly one of {}", fields.join(", ")))
}

/// At most one of `fields` is given.
pub(crate) fn at_most_one(fields: &[&str]) -> Rules {
    rule(&format!("{} <= 1", count(fields)), &format!("give at most one of {}", fields.join(", ")))
}

/// At least one of `fields` is given.
pub(crate) fn at_least_one(fields: &[&str]) -> Rules {
    rule(&format!("{} >= 1", count(fields)), &format!("give one of {}", fields.join(", ")))
}

/// Both or neither.
pub(crate) fn together(a: &str, b: &str) -> Rules {
    rule(&format!("has(self.{a}) == has(self.{b})"), &format!("{a} and {b} go together"))
}

/// The member of a union may not change into another.
fn same_member(at: &str, fields: &[&str], what: &str) -> Rules {
    let same: Vec<String> = fields.iter().map(|f| format!("has(self{at}.{f}) == has(oldSelf{at}.{f})")).collect();
    let same = same.join(" && ");
    let rule_text = if at.is_empty() { same } else { format!("!has(self{at}) || !has(oldSelf{at}) || ({same})") };
    rule(&rule_text, &format!("{what} is immutable; make a new object instead"))
}

/// Kinds of sources and destinations.
pub(crate) const CONNECTORS: [&str; 4] = ["http", "rabbitmq", "kafka", "nats"];
/// Kinds of databases.
pub(crate) const DATABASES: [&str; 4] = ["postgres", "sqlserver", "mysql", "sqlite"];

pub(crate) fn source_rules() -> Rules {
    exactly_one(&CONNECTORS)
        .and(same_member("", &CONNECTORS, "the kind of a Source"))
        .and(rule(
            "!has(self.relayRef) || !has(oldSelf.relayRef) || self.relayRef.name == oldSelf.relayRef.name",
            "relayRef is immutable; make a new Source instead",
        ))
        .and(rule(
            "!has(self.topic) || !has(self.consumption) || self.consumption == 'push'",
            "a pull Source has no topic",
        ))
        .and(rule("!has(self.scheduledAtHeader) || has(self.initialDelay)", "scheduledAtHeader needs initialDelay"))
}

pub(crate) fn destination_rules() -> Rules {
    exactly_one(&CONNECTORS).and(same_member("", &CONNECTORS, "the kind of a Destination"))
}

pub(crate) fn relay_rules() -> Rules {
    same_member(".database", &DATABASES, "the kind of the database")
}

// ---- Schemas --------------------------------------------------------------------------------------------------------

/// The three definitions as JSON, as they are written to files and applied.
pub fn crd(kind: Kind) -> Value {
    let crd = match kind {
        Kind::Relay => Relay::crd(),
        Kind::Destination => Destination::crd(),
        Kind::Source => Source::crd(),
    };
    let mut crd = serde_json::to_value(&crd).unwrap_or_default();
    if let Some(version) = crd.pointer_mut("/spec/versions/0") {
        if let Some(schema) = version.pointer_mut("/schema/openAPIV3Schema") {
            bound(schema);
            if let Some(status) = schema.pointer_mut("/properties/status").and_then(Value::as_object_mut) {
                status.insert("default".to_owned(), json!({"observedGeneration": -1}));
            }
        }
        if let Some(version) = version.as_object_mut() {
            version.entry("served").or_insert(json!(true));
        }
    }
    without_empty_lists(&mut crd);
    crd
}

/// The definition as the type of the Kubernetes API.
///
/// # Errors
/// Only if the definition does not have the form of one, which a test excludes.
pub fn definition(kind: Kind) -> Result<CustomResourceDefinition, serde_json::Error> {
    serde_json::from_value(crd(kind))
}

/// File names and YAML texts of the definitions, for `crds/` and the chart.
pub fn crds() -> Vec<(String, String)> {
    Kind::ALL
        .into_iter()
        .map(|kind| {
            let name = format!("queuebox.io_{}s.yaml", kind.as_str().to_lowercase());
            (name, crate::yaml::write(&crd(kind)))
        })
        .collect()
}

/// Schema of the spec of `kind`, for the local checks.
pub(crate) fn spec_schema(kind: Kind) -> &'static Value {
    static SCHEMAS: LazyLock<[Value; 3]> = LazyLock::new(|| {
        Kind::ALL.map(|kind| {
            crd(kind).pointer("/spec/versions/0/schema/openAPIV3Schema/properties/spec").cloned().unwrap_or_default()
        })
    });
    match kind {
        Kind::Relay => &SCHEMAS[0],
        Kind::Destination => &SCHEMAS[1],
        Kind::Source => &SCHEMAS[2],
    }
}

/// Makes a schema structural and bounded.
fn bound(schema: &mut Value) {
    let Some(object) = schema.as_object_mut() else { return };
    object.remove("nullable");
    object.remove("title");
    flatten_optional_enum(object);
    let format = object.get("format").and_then(Value::as_str).unwrap_or_default();
    if format.starts_with("uint") {
        object.remove("format");
        object.entry("maximum").or_insert(json!(i32::MAX));
    }
    for bound in ["minimum", "maximum"] {
        // The Kubernetes type holds them as fractions.
        if let Some(number) = object.get(bound).and_then(Value::as_f64) {
            object.insert(bound.to_owned(), whole(number));
        }
    }
    if object.contains_key("pattern") {
        // Every pattern asks for a character at least.
        object.remove("minLength");
    }
    match object.get("type").and_then(Value::as_str) {
        Some("string") if !object.contains_key("enum") && !object.contains_key("format") => {
            object.entry("maxLength").or_insert(json!(TEXT_MAX));
        }
        Some("array") => {
            object.entry("maxItems").or_insert(json!(LIST_MAX));
        }
        Some("object") if object.contains_key("additionalProperties") => {
            object.entry("maxProperties").or_insert(json!(LIST_MAX));
        }
        _ => {}
    }
    for member in ["items", "additionalProperties"] {
        if let Some(inner) = object.get_mut(member) {
            bound(inner);
        }
    }
    if let Some(properties) = object.get_mut("properties").and_then(Value::as_object_mut) {
        // The same few words at every reference and condition would be a third of the whole.
        let says_enough = properties.contains_key("secretKeyRef") || properties.contains_key("lastTransitionTime");
        for (_, property) in properties.iter_mut() {
            bound(property);
            if says_enough {
                without_descriptions(property);
            }
        }
    }
}

/// The number as a whole one.
fn whole(number: f64) -> Value {
    format!("{number:.0}").parse::<i64>().map_or(json!(number), |number| json!(number))
}

fn without_descriptions(schema: &mut Value) {
    let Some(object) = schema.as_object_mut() else { return };
    object.remove("description");
    if let Some(properties) = object.get_mut("properties").and_then(Value::as_object_mut) {
        properties.values_mut().for_each(without_descriptions);
    }
}

/// An optional enumeration or block comes as `anyOf` with null; the one real branch takes its place.
fn flatten_optional_enum(object: &mut Map<String, Value>) {
    let Some(branches) = object.get("anyOf").and_then(Value::as_array) else { return };
    let real: Vec<Value> = branches
        .iter()
        .filter(|branch| branch.get("type").is_some_and(|kind| kind != "null") || branch.get("properties").is_some())
        .cloned()
        .collect();
    if let [Value::Object(branch)] = real.as_slice() {
        object.remove("anyOf");
        for (name, value) in branch {
            object.entry(name.clone()).or_insert(value.clone());
        }
    }
}

fn without_empty_lists(value: &mut Value) {
    match value {
        Value::Object(object) => {
            object.retain(|_, member| !member.is_null() && member.as_array().is_none_or(|list| !list.is_empty()));
            object.values_mut().for_each(without_empty_lists);
        }
        Value::Array(items) => items.iter_mut().for_each(without_empty_lists),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn walk(schema: &Value, path: &str, visit: &mut impl FnMut(&str, &Map<String, Value>)) {
        let Some(object) = schema.as_object() else { return };
        visit(path, object);
        for member in ["items", "additionalProperties"] {
            if let Some(inner) = object.get(member) {
                walk(inner, &format!("{path}[]"), visit);
            }
        }
        if let Some(properties) = object.get("properties").and_then(Value::as_object) {
            for (name, property) in properties {
                walk(property, &format!("{path}.{name}"), visit);
            }
        }
    }

    #[test]
    fn every_definition_has_the_form_of_one_and_is_small() {
        for kind in Kind::ALL {
            let definition = definition(kind).unwrap();
            assert_eq!(definition.spec.names.kind, kind.as_str());
            assert_eq!(definition.spec.names.categories.as_deref(), Some(["queuebox".to_owned()].as_slice()));
        }
        for (name, yaml) in crds() {
            assert!(yaml.len() < 100_000, "{name} has {} bytes", yaml.len());
            assert!(!yaml.contains("[]"), "{name} has an empty list");
            assert!(!yaml.contains("null"), "{name} has a null");
        }
    }

    #[test]
    fn every_schema_is_structural_and_bounded() {
        for kind in Kind::ALL {
            walk(spec_schema(kind), "spec", &mut |path, schema| {
                let has = |member: &str| schema.contains_key(member);
                let is_open = has("x-kubernetes-preserve-unknown-fields");
                assert!(!has("anyOf") && !has("oneOf") && !has("allOf") && !has("$ref") && !has("nullable"), "{path}");
                match schema.get("type").and_then(Value::as_str) {
                    Some("string") => assert!(has("maxLength") || has("enum"), "{kind} {path}"),
                    Some("integer") => assert!(has("minimum") && has("maximum"), "{kind} {path}"),
                    Some("array") => assert!(has("maxItems") && has("items"), "{kind} {path}"),
                    Some("object") if has("additionalProperties") => assert!(has("maxProperties"), "{kind} {path}"),
                    Some("object") => assert!(has("properties") || is_open, "{kind} {path}"),
                    Some("boolean") => {}
                    None => assert!(is_open || has("x-kubernetes-int-or-string"), "{kind} {path}: {schema:?}"),
                    Some(other) => panic!("{kind} {path}: {other}"),
                }
            });
        }
    }

    #[test]
    fn every_pattern_is_known_to_the_local_checks() {
        for kind in Kind::ALL {
            walk(spec_schema(kind), "spec", &mut |path, schema| {
                if let Some(pattern) = schema.get("pattern").and_then(Value::as_str) {
                    assert!(crate::check::structure::pattern(pattern).is_some(), "{kind} {path}: {pattern}");
                }
            });
        }
    }

    #[test]
    fn the_status_begins_unobserved() {
        for kind in Kind::ALL {
            let crd = crd(kind);
            let default = crd.pointer("/spec/versions/0/schema/openAPIV3Schema/properties/status/default");
            assert_eq!(default, Some(&json!({"observedGeneration": -1})));
        }
    }

    #[test]
    fn a_relay_can_be_scaled() {
        let crd = crd(Kind::Relay);
        assert_eq!(
            crd.pointer("/spec/versions/0/subresources/scale"),
            Some(&json!({
                "specReplicasPath": ".spec.replicas",
                "statusReplicasPath": ".status.replicas",
                "labelSelectorPath": ".status.selector"
            }))
        );
    }
}

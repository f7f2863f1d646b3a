//! The classic file as a tree: key names without case, `-` and `_`; variables laid over it; `${NAME}` filled in.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

const PREFIX: &str = "QUEUEBOX_";

/// A key for comparison: lower case, without `-` and `_`.
pub(super) fn norm(key: &str) -> String {
    key.chars().filter(|character| !matches!(character, '-' | '_')).flat_map(char::to_lowercase).collect()
}

/// Two keys mean the same.
pub(super) fn same(a: &str, b: &str) -> bool {
    norm(a) == norm(b)
}

/// Environment variables of the process.
#[derive(Debug, Clone, Default)]
pub struct Variables(BTreeMap<String, String>);

impl Variables {
    /// These variables.
    pub fn new(variables: impl IntoIterator<Item = (String, String)>) -> Self {
        Self(variables.into_iter().collect())
    }

    /// Those of this process that are text.
    pub fn of_process() -> Self {
        Self(
            std::env::vars_os()
                .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
                .collect(),
        )
    }

    /// The same without some names: variables of the process that are no part of the configuration.
    #[must_use]
    pub fn without(mut self, names: &[&str]) -> Self {
        self.0.retain(|name, _| !names.contains(&name.as_str()));
        self
    }

    /// `QUEUEBOX_*` with the path of keys that each means.
    pub(super) fn own(&self) -> Vec<(&str, Vec<String>, &str)> {
        self.0
            .iter()
            .filter(|(name, _)| *name != super::FILE_VARIABLE)
            .filter_map(|(name, value)| Some((name.as_str(), levels(name.strip_prefix(PREFIX)?), value.as_str())))
            .collect()
    }

    /// Fills in `${NAME}` and `${NAME:-default}` in every text. Returns the places that name a variable that is not set.
    pub(super) fn interpolate(&self, root: &mut Map<String, Value>) -> Vec<(String, String)> {
        let mut missing = Vec::new();
        for (name, value) in root.iter_mut() {
            self.fill(name, value, &mut missing);
        }
        missing
    }

    fn fill(&self, path: &str, value: &mut Value, missing: &mut Vec<(String, String)>) {
        match value {
            Value::String(text) => *text = self.filled(path, text, missing),
            Value::Array(items) => {
                for (index, item) in items.iter_mut().enumerate() {
                    self.fill(&format!("{path}[{index}]"), item, missing);
                }
            }
            Value::Object(members) => {
                for (name, member) in members.iter_mut() {
                    self.fill(&format!("{path}.{name}"), member, missing);
                }
            }
            _ => {}
        }
    }

    fn filled(&self, path: &str, text: &str, missing: &mut Vec<(String, String)>) -> String {
        let mut out = String::new();
        let mut rest = text;
        while let Some(open) = rest.find("${") {
            let Some(close) = rest[open..].find('}') else { break };
            let inner = &rest[open + 2..open + close];
            let (name, default) = match inner.split_once(":-") {
                Some((name, default)) => (name, Some(default)),
                None => (inner, None),
            };
            out.push_str(&rest[..open]);
            // As in a shell, an empty value counts as none where there is a default.
            match (self.0.get(name).filter(|value| default.is_none() || !value.is_empty()), default) {
                (Some(value), _) => out.push_str(value),
                (None, Some(default)) => out.push_str(default),
                (None, None) => missing.push((path.to_owned(), format!("the variable {name} is not set"))),
            }
            rest = &rest[open + close + 1..];
        }
        out + rest
    }
}

/// `_` separates levels, `__` is `_`.
fn levels(name: &str) -> Vec<String> {
    let joined = name.to_lowercase().replace("__", "\u{0}");
    joined.split('_').map(|level| level.replace('\u{0}', "_")).collect()
}

/// Ends as the variables that Kubernetes sets for each service do.
pub(super) fn is_service_link(name: &str) -> bool {
    if name.ends_with("_SERVICE_HOST") || name.ends_with("_PORT") || name.contains("_SERVICE_PORT") {
        return true;
    }
    let Some((_, port)) = name.rsplit_once("_PORT_") else { return false };
    let (number, rest) = port.split_once('_').unwrap_or((port, ""));
    let protocol = rest.split('_').next().unwrap_or_default();
    !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()) && matches!(protocol, "TCP" | "UDP" | "SCTP")
}

/// The tree that variables mean: a level of numbers is a list.
pub(super) fn from_variables(variables: &[(Vec<String>, String)]) -> Map<String, Value> {
    let mut root = Map::new();
    for (path, value) in variables {
        insert(&mut root, path, value);
    }
    for (_, value) in &mut root {
        lists(value);
    }
    root
}

fn insert(map: &mut Map<String, Value>, path: &[String], value: &str) {
    match path {
        [] => {}
        [last] => {
            map.insert(last.clone(), Value::String(value.to_owned()));
        }
        [first, rest @ ..] => {
            let inner = map.entry(first.clone()).or_insert_with(|| Value::Object(Map::new()));
            if let Value::Object(inner) = inner {
                insert(inner, rest, value);
            }
        }
    }
}

fn lists(value: &mut Value) {
    let Value::Object(members) = value else { return };
    members.values_mut().for_each(lists);
    let numbers: Option<BTreeMap<u32, &Value>> =
        members.iter().map(|(name, member)| Some((name.parse().ok()?, member))).collect();
    if let Some(numbers) = numbers.filter(|numbers| !numbers.is_empty()) {
        *value = Value::Array(numbers.into_values().cloned().collect());
    }
}

/// Variables win key by key; one element of a list replaces the list.
pub(super) fn overlay(base: &mut Map<String, Value>, over: Map<String, Value>) {
    for (key, value) in over {
        let existing = base.keys().find(|name| same(name, &key)).cloned();
        let name = existing.unwrap_or(key);
        match (base.get_mut(&name), value) {
            (Some(Value::Object(below)), Value::Object(above)) => overlay(below, above),
            (_, value) => {
                base.insert(name, value);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn names_of_variables_are_paths() {
        assert_eq!(levels("OUTBOX_POLLINTERVALMS"), ["outbox", "pollintervalms"]);
        assert_eq!(levels("SOURCES_MY__SHOP_PATH"), ["sources", "my_shop", "path"]);
        assert_eq!(levels("ROUTES_0_DESTINATION"), ["routes", "0", "destination"]);
    }

    #[test]
    fn service_links_are_known_by_their_ends() {
        for name in [
            "QUEUEBOX_SERVICE_HOST",
            "QUEUEBOX_SERVICE_PORT",
            "QUEUEBOX_SERVICE_PORT_HTTP",
            "QUEUEBOX_PORT",
            "QUEUEBOX_DB_PORT_5432_TCP",
            "QUEUEBOX_PORT_53_UDP_ADDR",
        ] {
            assert!(is_service_link(name), "{name}");
        }
        for name in ["QUEUEBOX_SERVER_HTTPPORT", "QUEUEBOX_PORT_X_TCP", "QUEUEBOX_OUTBOX_BATCHSIZE"] {
            assert!(!is_service_link(name), "{name}");
        }
    }

    #[test]
    fn variables_win_key_by_key_and_replace_lists() {
        let mut base = json!({"outbox": {"batch-size": 5, "pollIntervalMs": 100}, "routes": [{"a": 1}, {"b": 2}]});
        let over = from_variables(&[
            (levels("OUTBOX_BATCHSIZE"), "7".into()),
            (levels("ROUTES_1_DESTINATION"), "y".into()),
            (levels("ROUTES_0_DESTINATION"), "x".into()),
        ]);
        overlay(base.as_object_mut().unwrap(), over);
        assert_eq!(
            base,
            json!({"outbox": {"batch-size": "7", "pollIntervalMs": 100}, "routes": [{"destination": "x"}, {"destination": "y"}]})
        );
    }

    #[test]
    fn names_in_values_are_filled_in() {
        let variables = Variables::new([("A".into(), "1".into()), ("EMPTY".into(), String::new())]);
        let mut root =
            json!({"a": "x${A}y", "b": ["${B:-z}", "${EMPTY:-e}", "${EMPTY}"], "c": "${B}", "d": "${A", "e": 5});
        let missing = variables.interpolate(root.as_object_mut().unwrap());
        assert_eq!(root, json!({"a": "x1y", "b": ["z", "e", ""], "c": "", "d": "${A", "e": 5}));
        assert_eq!(missing, [("c".to_owned(), "the variable B is not set".to_owned())]);
    }
}

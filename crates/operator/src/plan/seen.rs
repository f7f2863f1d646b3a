//! An object as the API server shows it, read field by field: what is missing or has another form is empty, never an error.

use serde_json::{Map, Value};

/// An object of any kind.
#[derive(Debug, Clone, PartialEq)]
pub struct Seen(pub Value);

static NULL: Value = Value::Null;

impl Seen {
    /// The value at a JSON pointer.
    pub fn at(&self, pointer: &str) -> &Value {
        self.0.pointer(pointer).unwrap_or(&NULL)
    }

    /// The text at a JSON pointer, or an empty one.
    pub fn text(&self, pointer: &str) -> &str {
        self.at(pointer).as_str().unwrap_or_default()
    }

    /// The whole number at a JSON pointer, or 0.
    pub fn number(&self, pointer: &str) -> i64 {
        self.at(pointer).as_i64().unwrap_or_default()
    }

    /// `metadata.name`.
    pub fn name(&self) -> &str {
        self.text("/metadata/name")
    }

    /// `metadata.namespace`.
    pub fn namespace(&self) -> &str {
        self.text("/metadata/namespace")
    }

    /// `metadata.uid`.
    pub fn uid(&self) -> &str {
        self.text("/metadata/uid")
    }

    /// `metadata.generation`.
    pub fn generation(&self) -> i64 {
        self.number("/metadata/generation")
    }

    /// `metadata.creationTimestamp`; sorts as text.
    pub fn created(&self) -> &str {
        self.text("/metadata/creationTimestamp")
    }

    /// It is being deleted.
    pub fn is_deleting(&self) -> bool {
        !self.text("/metadata/deletionTimestamp").is_empty()
    }

    /// An annotation.
    pub fn annotation(&self, name: &str) -> Option<&str> {
        self.at("/metadata/annotations").get(name).and_then(Value::as_str)
    }

    /// A label.
    pub fn label(&self, name: &str) -> Option<&str> {
        self.at("/metadata/labels").get(name).and_then(Value::as_str)
    }

    /// `spec`.
    pub fn spec(&self) -> &Value {
        self.at("/spec")
    }

    /// `status`.
    pub fn status(&self) -> &Value {
        self.at("/status")
    }

    /// UID of the controlling owner.
    pub fn controller(&self) -> Option<&str> {
        let owners = self.at("/metadata/ownerReferences").as_array()?;
        let owner = owners.iter().find(|owner| owner.get("controller").and_then(Value::as_bool) == Some(true))?;
        owner.get("uid").and_then(Value::as_str)
    }
}

/// The value with the members of every map in the order of their names.
pub fn sorted(value: &Value) -> Value {
    match value {
        Value::Object(members) => {
            let mut names: Vec<&String> = members.keys().collect();
            names.sort();
            Value::Object(
                names
                    .into_iter()
                    .map(|name| (name.clone(), sorted(members.get(name).unwrap_or(&NULL))))
                    .collect::<Map<_, _>>(),
            )
        }
        Value::Array(items) => Value::Array(items.iter().map(sorted).collect()),
        other => other.clone(),
    }
}

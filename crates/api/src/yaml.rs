//! YAML in and out, by serde-saphyr.
//!
//! A text is split into its documents before it is parsed, so that a mistake in one leaves the others readable. Repeated keys
//! are collected with their paths; the last value counts for the checks that follow. Errors carry a line and a reason, never
//! a piece of the text: it may be a Secret.

use std::{cell::RefCell, fmt};

use serde::{
    Deserialize, Serialize, Serializer,
    de::{DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor},
    ser::{SerializeMap, SerializeSeq},
};
use serde_json::{Map, Number, Value};
use serde_saphyr::{DuplicateKeyPolicy, NonFiniteFloatPolicy};

/// A parsed document.
#[derive(Debug, Clone, PartialEq)]
pub struct Document {
    /// Line of the file in which it begins, from 1.
    pub line: usize,
    /// Its content; null for an empty document.
    pub value: Value,
    /// Paths of keys that stand twice in one map.
    pub repeated: Vec<String>,
}

/// A document that is no YAML.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {message}")]
pub struct SyntaxError {
    /// Line of the file, from 1.
    pub line: usize,
    /// Why.
    pub message: String,
}

/// Parses every document of `text`.
pub fn read(text: &str) -> Vec<Result<Document, SyntaxError>> {
    split(text).into_iter().map(|(line, document)| parse(line, document)).collect()
}

/// Documents with the number of lines before each. A line that begins with `---` separates, whatever stands around it.
fn split(text: &str) -> Vec<(usize, &str)> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let mut documents = Vec::new();
    let (mut start, mut first_line) = (0, 0);
    let mut offset = 0;
    for (number, line) in text.split_inclusive('\n').enumerate() {
        let is_marker =
            line.strip_prefix("---").is_some_and(|rest| rest.is_empty() || rest.starts_with([' ', '\t', '\r', '\n']));
        if is_marker {
            documents.push((first_line, &text[start..offset]));
            (start, first_line) = (offset, number);
        }
        offset += line.len();
    }
    documents.push((first_line, &text[start..]));
    // Directives and comments before the first marker are a document of nothing.
    documents.retain(|(_, document)| {
        document.lines().any(|line| {
            let line = line.trim_start();
            !(line.is_empty() || line.starts_with('#') || line.trim_end() == "---" || line.starts_with('%'))
        })
    });
    documents
}

fn parse(lines_before: usize, text: &str) -> Result<Document, SyntaxError> {
    let options = serde_saphyr::options! {
        duplicate_keys: DuplicateKeyPolicy::PassThrough,
        strict_booleans: true,
        with_snippet: false,
        non_finite_float_policy: NonFiniteFloatPolicy::Reject,
    };
    let repeated = RefCell::new(Vec::new());
    let value = serde_saphyr::with_deserializer_from_str_with_options(text, options, |deserializer| {
        Tree { path: "", repeated: &repeated }.deserialize(deserializer)
    })
    .map_err(|error| {
        let line = error.location().and_then(|place| usize::try_from(place.line()).ok()).unwrap_or(1);
        SyntaxError { line: lines_before + line.max(1), message: reason(error.without_snippet()) }
    })?;
    Ok(Document { line: lines_before + 1, value, repeated: repeated.into_inner() })
}

/// The reason without the place, which is relative to the document.
fn reason(error: &serde_saphyr::Error) -> String {
    let text = error.to_string();
    let first = text.lines().next().unwrap_or("not YAML");
    let end = first.rfind(" at line ").unwrap_or(first.len());
    queuebox_core::redact::redact(&first[..end])
}

/// Builds a JSON value and notes repeated keys.
#[derive(Clone, Copy)]
struct Tree<'a> {
    path: &'a str,
    repeated: &'a RefCell<Vec<String>>,
}

impl<'de> DeserializeSeed<'de> for Tree<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Tree<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i128<E>(self, value: i128) -> Result<Value, E> {
        Ok(value.to_string().into())
    }

    fn visit_u128<E>(self, value: u128) -> Result<Value, E> {
        Ok(value.to_string().into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(Number::from_f64(value).map_or(Value::Null, Value::Number))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_none<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        loop {
            let path = format!("{}[{}]", self.path, list.len());
            match items.next_element_seed(Tree { path: &path, ..self })? {
                Some(item) => list.push(item),
                None => return Ok(Value::Array(list)),
            }
        }
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Value, A::Error> {
        let mut map = Map::new();
        while let Some(Key(key)) = members.next_key()? {
            let path = if self.path.is_empty() { key.clone() } else { format!("{}.{key}", self.path) };
            let value = members.next_value_seed(Tree { path: &path, ..self })?;
            if map.insert(key, value).is_some() {
                self.repeated.borrow_mut().push(path);
            }
        }
        Ok(Value::Object(map))
    }
}

/// A key as text, whatever YAML takes it for.
struct Key(String);

impl<'de> Deserialize<'de> for Key {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Scalar;
        impl Visitor<'_> for Scalar {
            type Value = Key;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a name")
            }

            fn visit_str<E>(self, text: &str) -> Result<Key, E> {
                Ok(Key(text.to_owned()))
            }
        }
        deserializer.deserialize_str(Scalar)
    }
}

/// Writes one document.
pub fn write(value: &Value) -> String {
    serde_saphyr::to_string(&Plain(value)).unwrap_or_default()
}

/// Writes documents, separated by `---`.
pub fn write_all<'v>(values: impl IntoIterator<Item = &'v Value>) -> String {
    let texts: Vec<String> = values.into_iter().map(write).collect();
    texts.join("---\n")
}

/// A JSON value whose numbers are numbers to every serializer (serde_json keeps their digits in a form of its own).
struct Plain<'v>(&'v Value);

impl Serialize for Plain<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            Value::Null => serializer.serialize_unit(),
            Value::Bool(value) => serializer.serialize_bool(*value),
            Value::String(text) => serializer.serialize_str(text),
            Value::Number(number) => match (number.as_i64(), number.as_u64(), number.as_f64()) {
                (Some(number), _, _) => serializer.serialize_i64(number),
                (_, Some(number), _) => serializer.serialize_u64(number),
                (_, _, Some(number)) => serializer.serialize_f64(number),
                _ => serializer.serialize_str(&number.to_string()),
            },
            Value::Array(items) => {
                let mut list = serializer.serialize_seq(Some(items.len()))?;
                for item in items {
                    list.serialize_element(&Plain(item))?;
                }
                list.end()
            }
            Value::Object(members) => {
                let mut map = serializer.serialize_map(Some(members.len()))?;
                for (name, member) in members {
                    map.serialize_entry(name, &Plain(member))?;
                }
                map.end()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn values(text: &str) -> Vec<Value> {
        read(text).into_iter().map(|document| document.unwrap().value).collect()
    }

    #[test]
    fn documents_are_read_one_by_one() {
        assert_eq!(values("a: 1\n---\nb: x\n---\n# nothing\n---\n"), [json!({"a": 1}), json!({"b": "x"})]);
        assert_eq!(values("# head\n---\na: 1"), [json!({"a": 1})]);
        assert_eq!(values("text: |\n  ---\n  x\n"), [json!({"text": "---\nx\n"})]);
        assert_eq!(values("--- {a: [1, two]}\n"), [json!({"a": [1, "two"]})]);
        assert!(values("").is_empty());
    }

    #[test]
    fn a_mistake_in_one_document_leaves_the_others() {
        let documents = read("a: 1\n---\nb: [1\nc: 2\n---\nd: 3\n");
        assert_eq!(documents.len(), 3);
        let error = documents[1].as_ref().unwrap_err();
        assert!((3..=5).contains(&error.line), "{error}");
        assert_eq!(documents[2].as_ref().unwrap().value, json!({"d": 3}));
        assert_eq!(documents[2].as_ref().unwrap().line, 5);
    }

    #[test]
    fn repeated_keys_are_all_found() {
        let document = read("a: 1\nb: {c: 1, c: 2}\na: 2\nl:\n- x: 1\n  x: 2\n").remove(0).unwrap();
        assert_eq!(document.repeated, ["b.c", "a", "l[0].x"]);
        assert_eq!(document.value["a"], json!(2));
    }

    #[test]
    fn bare_words_are_text() {
        assert_eq!(
            values("a: Off\nb: yes\nc: 'Off'\nd: true\ne: 1.5\nf: ~\ng: 12\nh: 2024-01-01\n5: x\n"),
            [
                json!({"a": "Off", "b": "yes", "c": "Off", "d": true, "e": 1.5, "f": null, "g": 12, "h": "2024-01-01", "5": "x"})
            ]
        );
    }

    #[test]
    fn an_error_never_quotes_the_text() {
        let error = read("data:\n  password: \"canary-7731\n").remove(0).unwrap_err();
        assert!(!error.to_string().contains("canary"), "{error}");
        let error = read("data: {password: canary-7731\n").remove(0).unwrap_err();
        assert!(!error.to_string().contains("canary"), "{error}");
    }

    #[test]
    fn what_is_written_reads_the_same() {
        let value = json!({
            "mode": "Off", "n": 1, "f": 1.5, "big": 12345678901_i64, "t": "true", "num": "12", "empty": {}, "none": null, "list": [1, {"a": "b: c"}],
            "lines": "a\nb\n", "colon": "x: y", "star": "*", "template": "{{ topic }}", "tilde": "~", "yes": "yes", "dash": "- a", "é": "ü 🐘"
        });
        assert_eq!(values(&write(&value)), std::slice::from_ref(&value));
        assert_eq!(values(&write_all([&value, &value])), [value.clone(), value]);
    }
}

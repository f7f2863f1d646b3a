//! Definite JSONPath (RFC 9535 singular queries), read during the scan.

use std::fmt;

use serde_json_path::JsonPath;

use super::scan::{Limits, Scalar, Sink, Text, Unusable, scan};

/// A path that names at most one value, such as `$.data.id` or `$['a'][0]`.
#[derive(Clone, PartialEq, Eq)]
pub struct Path {
    text: String,
    steps: Vec<Step>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Step {
    Name(String),
    Index(u64),
}

/// Why a path is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PathError {
    /// Not JSONPath.
    #[error("{path:?} is not a JSONPath: {reason}")]
    Syntax {
        /// As written.
        path: String,
        /// From the parser.
        reason: String,
    },
    /// It may name several values, or counts from the end.
    #[error("{path:?} is not definite: use names and positions from 0 only, such as $.data.id or $.items[0]")]
    NotDefinite {
        /// As written.
        path: String,
    },
}

impl Path {
    /// Checks and compiles `text`.
    ///
    /// # Errors
    /// [`PathError`], with the path in the sentence.
    pub fn parse(text: &str) -> Result<Self, PathError> {
        JsonPath::parse(text)
            .map_err(|error| PathError::Syntax { path: text.to_owned(), reason: error.to_string() })?;
        match steps(text) {
            Some(steps) => Ok(Self { text: text.to_owned(), steps }),
            None => Err(PathError::NotDefinite { path: text.to_owned() }),
        }
    }

    /// As written.
    pub fn as_str(&self) -> &str {
        &self.text
    }
}

impl fmt::Debug for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.text)
    }
}

/// The steps of a text that is known to be JSONPath; `None` when one of them is no single name or position.
fn steps(text: &str) -> Option<Vec<Step>> {
    let mut rest = text.strip_prefix('$')?.trim_start();
    let mut steps = Vec::new();
    while !rest.is_empty() {
        let (step, behind) = match rest.strip_prefix('.') {
            Some(name) => dot_name(name)?,
            None => bracket(rest.strip_prefix('[')?.trim_start())?,
        };
        steps.push(step);
        rest = behind.trim_start();
    }
    Some(steps)
}

fn dot_name(text: &str) -> Option<(Step, &str)> {
    let end = text.find(|c: char| matches!(c, '.' | '[') || c.is_whitespace()).unwrap_or(text.len());
    let (name, rest) = text.split_at(end);
    (!name.is_empty() && name != "*").then(|| (Step::Name(name.to_owned()), rest))
}

fn bracket(text: &str) -> Option<(Step, &str)> {
    let (step, rest) = match text.chars().next()? {
        quote @ ('\'' | '"') => quoted(&text[1..], quote)?,
        _ => {
            let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
            (Step::Index(text[..end].parse().ok()?), &text[end..])
        }
    };
    Some((step, rest.trim_start().strip_prefix(']')?))
}

/// A quoted name up to its closing quote. The escapes are those of JSON, and the quote itself.
fn quoted(text: &str, quote: char) -> Option<(Step, &str)> {
    let mut json = String::from("\"");
    let mut characters = text.char_indices();
    while let Some((at, character)) = characters.next() {
        match character {
            '\\' => match characters.next()?.1 {
                '\'' => json.push('\''),
                escaped => json.extend(['\\', escaped]),
            },
            '"' if quote == '\'' => json.push_str("\\\""),
            _ if character == quote => {
                json.push('"');
                let name = serde_json::from_str(&json).ok()?;
                return Some((Step::Name(name), &text[at + 1..]));
            }
            _ => json.push(character),
        }
    }
    None
}

/// Scans `body` and returns for each path the text of its value: a string decoded, a number with its digits, `true` or
/// `false`. An object, an array, `null`, blank text and nothing at all are `None` (contract 6.2).
///
/// # Errors
/// As [`scan`].
pub fn values_at(body: &[u8], limits: Limits, paths: &[Path]) -> Result<Vec<Option<String>>, Unusable> {
    let mut finder = Finder {
        deepest: paths.iter().map(|path| path.steps.len()).max().unwrap_or(0),
        paths,
        matched: vec![0; paths.len()],
        found: vec![None; paths.len()],
        places: Vec::new(),
    };
    scan(body, limits, &mut finder)?;
    Ok(finder.found)
}

/// Where the scan stands in an open container.
enum Place<'a> {
    /// In an object, at the value of this name.
    Name(Option<Text<'a>>),
    /// In an array, before the value of this position.
    Index(u64),
}

struct Finder<'a, 'p> {
    paths: &'p [Path],
    /// Length of the longest path: deeper values concern nobody.
    deepest: usize,
    /// Per path: how many of its steps the open containers have taken.
    matched: Vec<usize>,
    found: Vec<Option<String>>,
    places: Vec<Place<'a>>,
}

impl<'a> Finder<'a, '_> {
    /// Calls `reach` for each path of which the value that begins here is the next step, with the number of steps taken
    /// once it is entered; then moves on to the next position.
    fn at_value(&mut self, value: Option<Scalar<'a>>) {
        let depth = self.places.len();
        if depth <= self.deepest {
            for (index, path) in self.paths.iter().enumerate() {
                if self.takes(index, depth) {
                    // A repeated name: what was found under the earlier one does not count.
                    self.found[index] = value.filter(|_| path.steps.len() == depth).and_then(text_of);
                    if value.is_none() {
                        self.matched[index] = depth;
                    }
                }
            }
        }
        if let Some(Place::Index(position)) = self.places.last_mut() {
            *position += 1;
        }
    }

    /// Does the value that begins at `depth` lie on path number `index`?
    fn takes(&self, index: usize, depth: usize) -> bool {
        let Some(last) = depth.checked_sub(1) else { return true };
        self.matched[index] == last
            && match (self.paths[index].steps.get(last), &self.places[last]) {
                (Some(Step::Name(wanted)), Place::Name(Some(name))) => name.is(wanted),
                (Some(Step::Index(wanted)), Place::Index(position)) => wanted == position,
                _ => false,
            }
    }
}

fn text_of(value: Scalar<'_>) -> Option<String> {
    match value {
        Scalar::Null => None,
        Scalar::Bool(bool) => Some(bool.to_string()),
        Scalar::Number(digits) => Some(digits.to_owned()),
        Scalar::Text(text) => {
            Some(text.decoded()).filter(|text| !text.trim().is_empty()).map(std::borrow::Cow::into_owned)
        }
    }
}

impl<'a> Sink<'a> for Finder<'a, '_> {
    fn name(&mut self, name: Text<'a>) {
        if let Some(place) = self.places.last_mut() {
            *place = Place::Name(Some(name));
        }
    }

    fn scalar(&mut self, value: Scalar<'a>) {
        self.at_value(Some(value));
    }

    fn open(&mut self, is_object: bool) {
        self.at_value(None);
        self.places.push(if is_object { Place::Name(None) } else { Place::Index(0) });
    }

    fn close(&mut self, _: bool) {
        self.places.pop();
        let depth = self.places.len();
        if depth > 0 && depth <= self.deepest {
            for matched in &mut self.matched {
                *matched = (*matched).min(depth - 1);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::Value;

    use super::*;

    fn value(body: &str, path: &str) -> Option<String> {
        values_at(body.as_bytes(), Limits::default(), &[Path::parse(path).unwrap()]).unwrap().remove(0)
    }

    #[test]
    fn names_and_positions_lead_to_a_value() {
        let body =
            r#"{"id":"a","n":{"id":12.50,"l":[[1,2],[3,{"x":true}]]},"a.b":"dot","é":"e","b":" ","z":null,"o":{}}"#;
        for (path, expected) in [
            ("$.id", Some("a")),
            ("$.n.id", Some("12.50")),
            ("$['n']['l'][1][1].x", Some("true")),
            ("$.n.l[0][1]", Some("2")),
            ("$[\"a.b\"]", Some("dot")),
            ("$['\\u00e9']", Some("e")),
            ("$ .n ['id']", Some("12.50")),
            ("$.b", None),
            ("$.z", None),
            ("$.o", None),
            ("$.n.l", None),
            ("$.n.l[7]", None),
            ("$.id.id", None),
            ("$", None),
        ] {
            assert_eq!(value(body, path).as_deref(), expected, "{path}");
        }
        assert_eq!(value("7", "$").as_deref(), Some("7"));
    }

    /// case D25
    #[test]
    fn numbers_keep_their_digits() {
        assert_eq!(value(r#"{"big":12345678901234567890}"#, "$.big").as_deref(), Some("12345678901234567890"));
        assert_eq!(value(r#"{"money":1.10}"#, "$.money").as_deref(), Some("1.10"));
    }

    #[test]
    fn the_last_of_a_repeated_name_counts() {
        assert_eq!(value(r#"{"id":1,"id":2}"#, "$.id").as_deref(), Some("2"));
        assert_eq!(value(r#"{"a":{"b":1},"a":{}}"#, "$.a.b"), None);
        assert_eq!(value(r#"{"a":{"b":1},"a":7}"#, "$.a.b"), None);
    }

    #[test]
    fn only_definite_paths_are_taken() {
        for path in ["$..id", "$.*", "$[*]", "$.a[1:2]", "$['a','b']", "$.a[?@.x == 1]", "$.a[-1]"] {
            assert!(matches!(Path::parse(path), Err(PathError::NotDefinite { .. })), "{path}");
        }
        for path in ["", "id", "$.", "$[", "$.a b"] {
            assert!(matches!(Path::parse(path), Err(PathError::Syntax { .. })), "{path}");
        }
    }

    fn json() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            "[a-c]{0,2}".prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 24, 4, |inner| {
            prop_oneof![
                proptest::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                proptest::collection::btree_map("[a-c]", inner, 0..4)
                    .prop_map(|map| Value::Object(map.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(400))]

        #[test]
        fn finds_what_the_library_finds(
            document in json(),
            steps in proptest::collection::vec(prop_oneof!["\\.[a-c]", "\\[[0-2]\\]", "\\['[a-c]'\\]"], 0..4),
        ) {
            let path = format!("${}", steps.concat());
            let theirs = match JsonPath::parse(&path).unwrap().query(&document).at_most_one().unwrap() {
                None | Some(Value::Null | Value::Object(_) | Value::Array(_)) => None,
                Some(Value::String(text)) => Some(text.clone()).filter(|text| !text.trim().is_empty()),
                Some(other) => Some(other.to_string()),
            };
            prop_assert_eq!(value(&document.to_string(), &path), theirs);
        }
    }
}

//! Compares a spec with the schema of its kind, as the API server does, and further: unknown fields are errors with a hint.
//!
//! What does not fit is reported and left out of the value that goes on, and a missing text or list is filled with an empty
//! one, so that the rules behind still find everything else that is wrong.

use serde_json::{Map, Value};

use super::Case;
use crate::{
    crd::{Kind, spec_schema},
    names::nearest,
    value::{
        DURATION_PATTERN, POSITIVE_DURATION_PATTERN, POSITIVE_SIZE_PATTERN, SIZE_PATTERN, parse_duration, parse_size,
    },
};

/// Accepts a text, or says what is expected.
pub(crate) type Check = fn(&str) -> Result<(), String>;

/// A pattern of the schemas as a function: the local checks need no regular expressions. `Err` says what is expected.
pub(crate) fn pattern(pattern: &str) -> Option<Check> {
    Some(match pattern {
        DURATION_PATTERN => |text| parse_duration(text).map(|_| ()).map_err(|error| error.to_string()),
        POSITIVE_DURATION_PATTERN => |text| match parse_duration(text) {
            Ok(duration) if duration.is_zero() => Err("must be above zero".to_owned()),
            Ok(_) => Ok(()),
            Err(error) => Err(error.to_string()),
        },
        SIZE_PATTERN => |text| parse_size(text).map(|_| ()).map_err(|error| error.to_string()),
        POSITIVE_SIZE_PATTERN => |text| match parse_size(text) {
            Ok(0) => Err("must be above zero".to_owned()),
            Ok(_) => Ok(()),
            Err(error) => Err(error.to_string()),
        },
        "^/" => |text| text.starts_with('/').then_some(()).ok_or_else(|| format!("{text:?} must begin with \"/\"")),
        "^[A-Za-z_][A-Za-z0-9_]*$" => |text| {
            let begins = text.starts_with(|first: char| first.is_ascii_alphabetic() || first == '_');
            let is_name = begins && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
            is_name
                .then_some(())
                .ok_or_else(|| format!("{text:?} is no name: write a letter or \"_\", then letters, digits and \"_\""))
        },
        _ => return None,
    })
}

/// Message of a field that the schema does not have.
pub(super) const UNKNOWN_FIELD: &str = "unknown field";

/// The spec without what does not fit.
pub(super) fn conform(case: &Case<'_>, spec: &Value) -> Map<String, Value> {
    match node(case, "spec", spec_schema(case.kind), spec) {
        Some(Value::Object(spec)) => spec,
        // A spec of another type was reported; the missing fields are reported as well.
        _ => match node(case, "spec", spec_schema(case.kind), &Value::Object(Map::new())) {
            Some(Value::Object(spec)) => spec,
            _ => Map::new(),
        },
    }
}

fn node(case: &Case<'_>, path: &str, schema: &Value, value: &Value) -> Option<Value> {
    let keyword = |name: &str| schema.get(name);
    if keyword("x-kubernetes-int-or-string").is_some() {
        return int_or_string(case, path, value);
    }
    match keyword("type").and_then(Value::as_str) {
        Some("object") => object(case, path, schema, value),
        Some("array") => array(case, path, schema, value),
        Some("string") => text(case, path, schema, value),
        Some("integer") => integer(case, path, schema, value),
        Some("boolean") => boolean(case, path, schema, value),
        _ => Some(value.clone()),
    }
}

/// What a value is, in words. Never a text itself: a secret may stand where it should not.
fn describe(value: &Value) -> String {
    match value {
        Value::Null => "nothing".to_owned(),
        Value::Bool(value) => format!("{value}"),
        Value::Number(number) => format!("the number {number}"),
        Value::String(_) => "a text".to_owned(),
        Value::Array(_) => "a list".to_owned(),
        Value::Object(_) => "a block".to_owned(),
    }
}

fn wrong(case: &Case<'_>, path: &str, expected: &str, value: &Value) -> Option<Value> {
    case.error(path, format!("expected {expected}, found {}", describe(value)));
    None
}

fn object(case: &Case<'_>, path: &str, schema: &Value, value: &Value) -> Option<Value> {
    let Value::Object(members) = value else {
        let required = schema.get("required").and_then(Value::as_array).map(Vec::as_slice);
        // What has but one field is often written without it.
        if let (Value::String(text), Some([Value::String(only)])) = (value, required) {
            case.error_with_hint(path, "expected a block, found a text", &format!("write {{{only}: {text}}}"));
            return None;
        }
        return wrong(case, path, "a block", value);
    };
    if let Some(inner) = schema.get("additionalProperties") {
        return Some(map(case, path, schema, inner, members));
    }
    let Some(properties) = schema.get("properties").and_then(Value::as_object) else { return Some(value.clone()) };
    let mut out = Map::new();
    for (name, member) in members {
        let at = format!("{path}.{name}");
        match properties.get(name) {
            None => unknown(case, &at, path, name, properties),
            Some(_) if member.is_null() => {}
            Some(property) => {
                if let Some(kept) = node(case, &at, property, member) {
                    out.insert(name.clone(), kept);
                }
            }
        }
    }
    for name in schema.get("required").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str) {
        if members.get(name).is_none_or(Value::is_null) {
            case.error(&format!("{path}.{name}"), "is missing".to_owned());
        }
        if !out.contains_key(name)
            && let Some(property) = properties.get(name)
        {
            out.insert(name.to_owned(), stand_in(property));
        }
    }
    Some(Value::Object(out))
}

/// An empty value of the right type for a required field.
fn stand_in(schema: &Value) -> Value {
    match schema.get("type").and_then(Value::as_str) {
        Some("object") => {
            let required = schema.get("required").and_then(Value::as_array);
            let names = required.into_iter().flatten().filter_map(Value::as_str);
            let members =
                names.filter_map(|name| Some((name.to_owned(), stand_in(schema.get("properties")?.get(name)?))));
            Value::Object(members.collect())
        }
        Some("array") => Value::Array(Vec::new()),
        Some("integer") => schema.get("minimum").cloned().unwrap_or_else(|| 1.into()),
        Some("boolean") => Value::Bool(false),
        _ => schema.pointer("/enum/0").cloned().unwrap_or_else(|| "".into()),
    }
}

fn map(case: &Case<'_>, path: &str, schema: &Value, inner: &Value, members: &Map<String, Value>) -> Value {
    if let Some(max) = schema.get("maxProperties").and_then(Value::as_u64)
        && members.len() as u64 > max
    {
        case.error(path, format!("has {} entries; at most {max}", members.len()));
    }
    let kept = members
        .iter()
        .filter(|(_, member)| !member.is_null())
        .filter_map(|(name, member)| Some((name.clone(), node(case, &format!("{path}.{name}"), inner, member)?)));
    Value::Object(kept.collect())
}

fn array(case: &Case<'_>, path: &str, schema: &Value, value: &Value) -> Option<Value> {
    let Value::Array(items) = value else { return wrong(case, path, "a list", value) };
    let bound = |name: &str| schema.get(name).and_then(Value::as_u64).and_then(|bound| usize::try_from(bound).ok());
    if bound("minItems").is_some_and(|min| items.len() < min) {
        case.error(path, "the list is empty".to_owned());
    }
    if let Some(max) = bound("maxItems").filter(|max| items.len() > *max) {
        case.error(path, format!("has {} entries; at most {max}", items.len()));
    }
    let inner = schema.get("items").unwrap_or(&Value::Null);
    // An entry that does not fit keeps its place, so that the paths of the others stay true.
    let kept = items
        .iter()
        .enumerate()
        .map(|(index, item)| node(case, &format!("{path}[{index}]"), inner, item).unwrap_or_else(|| stand_in(inner)));
    Some(Value::Array(kept.collect()))
}

fn text(case: &Case<'_>, path: &str, schema: &Value, value: &Value) -> Option<Value> {
    let pattern_text = schema.get("pattern").and_then(Value::as_str).unwrap_or_default();
    let choices: Vec<&str> =
        schema.get("enum").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str).collect();
    let Value::String(text) = value else {
        if *value == Value::Bool(false) && choices.contains(&"Off") {
            case.error_with_hint(path, "found false", "write \"Off\" in quotes");
            return None;
        }
        let expected = match pattern_text {
            DURATION_PATTERN | POSITIVE_DURATION_PATTERN => "a duration such as \"30s\"",
            SIZE_PATTERN | POSITIVE_SIZE_PATTERN => "a size such as \"16MiB\"",
            _ if !choices.is_empty() => return wrong(case, path, &format!("one of {}", choices.join(", ")), value),
            _ => "a text",
        };
        if matches!(value, Value::Bool(_) | Value::Number(_)) && expected == "a text" {
            case.error_with_hint(path, "expected a text, found a number or switch", "put it in quotes");
            return None;
        }
        return wrong(case, path, expected, value);
    };
    if !choices.is_empty() {
        if choices.contains(&text.as_str()) {
            return Some(value.clone());
        }
        let message = format!("{text:?} is none of {}", choices.join(", "));
        let lower = text.to_lowercase();
        let same = choices.iter().find(|choice| choice.to_lowercase() == lower).copied();
        match same.or_else(|| nearest(text, choices.iter().copied())) {
            Some(near) => case.error_with_hint(path, &message, &format!("did you mean {near}?")),
            None => case.error(path, message),
        }
        return None;
    }
    let length = text.chars().count() as u64;
    if schema.get("minLength").and_then(Value::as_u64).is_some_and(|min| length < min) {
        case.error(path, "is empty".to_owned());
        return None;
    }
    if let Some(Err(message)) = pattern(pattern_text).map(|check| check(text)) {
        case.error(path, message);
        return None;
    }
    if let Some(max) = schema.get("maxLength").and_then(Value::as_u64).filter(|max| length > *max) {
        case.error(path, format!("has {length} characters; at most {max}"));
        return None;
    }
    Some(value.clone())
}

fn integer(case: &Case<'_>, path: &str, schema: &Value, value: &Value) -> Option<Value> {
    let Some(number) = value.as_i64() else { return wrong(case, path, "a whole number", value) };
    let bound = |name: &str| schema.get(name).and_then(Value::as_i64);
    let (min, max) = (bound("minimum").unwrap_or(i64::MIN), bound("maximum").unwrap_or(i64::MAX));
    if (min..=max).contains(&number) {
        return Some(number.into());
    }
    case.error(
        path,
        if max >= i64::from(i32::MAX) {
            format!("{number} is too small; at least {min}")
        } else {
            format!("{number} is not between {min} and {max}")
        },
    );
    None
}

fn boolean(case: &Case<'_>, path: &str, schema: &Value, value: &Value) -> Option<Value> {
    if !value.is_boolean() {
        return wrong(case, path, "true or false", value);
    }
    if schema.get("enum").and_then(Value::as_array).is_some_and(|choices| !choices.contains(value)) {
        case.error(path, format!("cannot be {value}"));
        return None;
    }
    Some(value.clone())
}

fn int_or_string(case: &Case<'_>, path: &str, value: &Value) -> Option<Value> {
    match value {
        Value::String(_) => Some(value.clone()),
        Value::Number(number) if number.as_i64().is_some_and(|it| i32::try_from(it).is_ok()) => Some(value.clone()),
        _ => wrong(case, path, "a whole number or a text", value),
    }
}

// ---- Unknown fields -------------------------------------------------------------------------------------------------

fn unknown(case: &Case<'_>, at: &str, parent: &str, name: &str, known: &Map<String, Value>) {
    let mut names: Vec<&str> = known.keys().map(String::as_str).collect();
    names.sort_unstable();
    let message = UNKNOWN_FIELD;
    let lower = name.to_lowercase();
    let same = names.iter().copied().find(|known| known.to_lowercase() == lower);
    if let Some(near) = same.or_else(|| nearest(name, names.iter().copied())) {
        case.error_with_hint(at, message, &format!("did you mean {near}?"));
    } else if let Some(owner) = reference_of(name, known) {
        case.error_with_hint(at, message, &owner);
    } else if let Some(owner) = owner(case.kind, parent, name) {
        case.error_with_hint(at, message, &format!("it belongs to {owner}"));
    } else {
        case.error_with_hint(at, message, &format!("known here: {}", names.join(", ")));
    }
}

/// `password` where there is `passwordFrom`: secrets stand in manifests by reference only.
fn reference_of(name: &str, known: &Map<String, Value>) -> Option<String> {
    let reference = format!("{name}From");
    known
        .contains_key(&reference)
        .then(|| format!("secrets are given by reference: write {reference} with secretKeyRef, env or file"))
}

/// Where else a field of this name is. Of several places: one in a block of the same name, one of the same kind, the one
/// that shares the longest beginning with `parent`.
fn owner(kind: Kind, parent: &str, name: &str) -> Option<String> {
    let mut places: Vec<(Kind, String)> = Vec::new();
    for other in Kind::ALL {
        let mut found = Vec::new();
        collect(spec_schema(other), "spec", name, &mut found);
        places.extend(found.into_iter().map(|place| (other, place)));
    }
    let block = |path: &str| path.rsplit('.').next().unwrap_or_default().to_owned();
    let shared = |place: &str| place.bytes().zip(parent.bytes()).take_while(|(a, b)| a == b).count();
    places.sort_by_key(|(other, place)| {
        (block(place) != block(parent), *other != kind, std::cmp::Reverse(shared(place)), place.len())
    });
    places.first().map(|(kind, place)| format!("{kind}.{place}"))
}

fn collect(schema: &Value, path: &str, name: &str, places: &mut Vec<String>) {
    if let Some(properties) = schema.get("properties").and_then(Value::as_object) {
        if properties.contains_key(name) {
            places.push(path.to_owned());
        }
        for (property, inner) in properties {
            collect(inner, &format!("{path}.{property}"), name, places);
        }
    }
    if let Some(items) = schema.get("items") {
        collect(items, &format!("{path}[]"), name, places);
    }
}

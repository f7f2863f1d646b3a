//! AMQP header values as text (contract 6.3): numbers, booleans and times as text, tables and arrays as JSON text, bytes
//! as text when they are UTF-8.

use base64::{Engine, engine::general_purpose::STANDARD};
use lapin::types::{AMQPValue, DecimalValue, FieldTable};
use serde_json::{Map, Value};

/// The headers of a message, in the order of their names. A header without a value is left out.
pub(crate) fn headers(table: &FieldTable) -> Vec<(String, String)> {
    table.inner().iter().filter_map(|(name, value)| Some((name.to_string(), text(value)?))).collect()
}

/// `None` for a value that is no value.
fn text(value: &AMQPValue) -> Option<String> {
    Some(match value {
        AMQPValue::Void => return None,
        AMQPValue::LongString(string) => bytes(string.as_bytes()),
        AMQPValue::ShortString(string) => string.to_string(),
        AMQPValue::ByteArray(array) => bytes(array.as_slice()),
        AMQPValue::Timestamp(seconds) => time(*seconds),
        AMQPValue::FieldArray(_) | AMQPValue::FieldTable(_) => json(value).to_string(),
        AMQPValue::Float(number) => number.to_string(),
        AMQPValue::Double(number) => number.to_string(),
        AMQPValue::DecimalValue(number) => decimal(*number),
        AMQPValue::Boolean(is) => is.to_string(),
        AMQPValue::ShortShortInt(number) => number.to_string(),
        AMQPValue::ShortShortUInt(number) => number.to_string(),
        AMQPValue::ShortInt(number) => number.to_string(),
        AMQPValue::ShortUInt(number) => number.to_string(),
        AMQPValue::LongInt(number) => number.to_string(),
        AMQPValue::LongUInt(number) => number.to_string(),
        AMQPValue::LongLongInt(number) => number.to_string(),
    })
}

/// Inside tables and arrays numbers and booleans keep their JSON type. Nesting is bounded by the frame that held it, and
/// the parser of the client library has already walked it.
fn json(value: &AMQPValue) -> Value {
    match value {
        AMQPValue::FieldArray(array) => Value::Array(array.as_slice().iter().map(json).collect()),
        AMQPValue::FieldTable(table) => Value::Object(
            table.inner().iter().map(|(name, value)| (name.to_string(), json(value))).collect::<Map<_, _>>(),
        ),
        AMQPValue::Boolean(is) => Value::Bool(*is),
        AMQPValue::Float(number) if number.is_finite() => number_of(&number.to_string()),
        AMQPValue::Double(number) if number.is_finite() => number_of(&number.to_string()),
        AMQPValue::DecimalValue(number) => number_of(&decimal(*number)),
        AMQPValue::ShortShortInt(number) => Value::from(*number),
        AMQPValue::ShortShortUInt(number) => Value::from(*number),
        AMQPValue::ShortInt(number) => Value::from(*number),
        AMQPValue::ShortUInt(number) => Value::from(*number),
        AMQPValue::LongInt(number) => Value::from(*number),
        AMQPValue::LongUInt(number) => Value::from(*number),
        AMQPValue::LongLongInt(number) => Value::from(*number),
        other => text(other).map_or(Value::Null, Value::String),
    }
}

/// Numbers keep their digits; what is no JSON number stays text.
fn number_of(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|_| Value::String(text.to_owned()))
}

fn bytes(bytes: &[u8]) -> String {
    match std::str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => format!("base64:{}", STANDARD.encode(bytes)),
    }
}

/// ISO 8601; a time beyond the year 9999 stays a number.
fn time(seconds: u64) -> String {
    i64::try_from(seconds)
        .ok()
        .and_then(|seconds| jiff::Timestamp::from_second(seconds).ok())
        .map_or_else(|| seconds.to_string(), |time| time.to_string())
}

fn decimal(number: DecimalValue) -> String {
    let digits = format!("{:0>width$}", number.value, width = usize::from(number.scale) + 1);
    let (whole, fraction) = digits.split_at(digits.len() - usize::from(number.scale));
    if fraction.is_empty() { whole.to_owned() } else { format!("{whole}.{fraction}") }
}

#[cfg(test)]
mod tests {
    use lapin::types::{ByteArray, FieldArray, LongString};

    use super::*;

    #[test]
    fn every_kind_of_value_becomes_text() {
        let mut inner = FieldTable::default();
        inner.insert("n".into(), AMQPValue::LongLongInt(i64::MIN));
        inner.insert("b".into(), AMQPValue::Boolean(true));
        inner.insert("t".into(), AMQPValue::Timestamp(0));
        inner.insert("x".into(), AMQPValue::ByteArray(ByteArray::from(vec![0xff])));
        inner.insert("v".into(), AMQPValue::Void);
        inner.insert("f".into(), AMQPValue::Double(f64::NAN));
        let array = FieldArray::from(vec![AMQPValue::ShortInt(1), AMQPValue::LongString(LongString::from("a\"b"))]);
        for (value, expected) in [
            (AMQPValue::Boolean(false), "false"),
            (AMQPValue::ShortShortInt(-1), "-1"),
            (AMQPValue::LongUInt(u32::MAX), "4294967295"),
            (AMQPValue::LongLongInt(i64::MAX), "9223372036854775807"),
            (AMQPValue::Double(0.1), "0.1"),
            (AMQPValue::Float(1.5), "1.5"),
            (AMQPValue::DecimalValue(DecimalValue { scale: 2, value: 5 }), "0.05"),
            (AMQPValue::DecimalValue(DecimalValue { scale: 0, value: 5 }), "5"),
            (AMQPValue::DecimalValue(DecimalValue { scale: 1, value: 123 }), "12.3"),
            (AMQPValue::Timestamp(1_700_000_000), "2023-11-14T22:13:20Z"),
            (AMQPValue::Timestamp(u64::MAX), "18446744073709551615"),
            (AMQPValue::LongString(LongString::from("grüße")), "grüße"),
            (AMQPValue::LongString(LongString::from(vec![0xc3, 0x28])), "base64:wyg="),
            (AMQPValue::ByteArray(ByteArray::from(b"text".to_vec())), "text"),
            (AMQPValue::FieldArray(array), r#"[1,"a\"b"]"#),
            (
                AMQPValue::FieldTable(inner),
                r#"{"b":true,"f":"NaN","n":-9223372036854775808,"t":"1970-01-01T00:00:00Z","v":null,"x":"base64:/w=="}"#,
            ),
        ] {
            assert_eq!(text(&value).as_deref(), Some(expected), "{value:?}");
        }
        assert_eq!(text(&AMQPValue::Void), None);
    }
}

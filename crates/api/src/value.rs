//! Durations and sizes as people write them (contract 13.1).
//!
//! A duration is a whole number with `ms`, `s`, `m`, `h` or `d`, a size a whole number with `B`, `KiB`, `MiB` or `GiB`. No
//! unit, a sign and a fraction are errors.

use std::{borrow::Cow, fmt, time::Duration};

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};

/// Pattern of a duration in the CRDs.
pub const DURATION_PATTERN: &str = "^[0-9]{1,9}(ms|s|m|h|d)$";
/// Pattern of a duration above zero.
pub const POSITIVE_DURATION_PATTERN: &str = "^0{0,8}[1-9][0-9]{0,8}(ms|s|m|h|d)$";
/// Pattern of a size in the CRDs.
pub const SIZE_PATTERN: &str = "^[0-9]{1,9}(B|KiB|MiB|GiB)$";
/// Pattern of a size above zero.
pub const POSITIVE_SIZE_PATTERN: &str = "^0{0,8}[1-9][0-9]{0,8}(B|KiB|MiB|GiB)$";

/// No duration is longer: a hundred years.
const DURATION_MAX: Duration = Duration::from_secs(36_500 * 86_400);

const DURATION_UNITS: [(&str, u64); 5] = [("ms", 1), ("s", 1_000), ("m", 60_000), ("h", 3_600_000), ("d", 86_400_000)];
const SIZE_UNITS: [(&str, u64); 4] = [("B", 1), ("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30)];

/// Why a duration or size is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ValueError {
    /// Not of the form.
    #[error("{0:?} is no duration: write a whole number with ms, s, m, h or d, such as \"30s\"")]
    Duration(String),
    /// Above a hundred years.
    #[error("{0:?} is longer than 36500d")]
    TooLong(String),
    /// Not of the form.
    #[error("{0:?} is no size: write a whole number with B, KiB, MiB or GiB, such as \"16MiB\"")]
    Size(String),
}

/// Splits a whole number of at most nine digits from its unit and multiplies.
fn measure(text: &str, units: &[(&str, u64)]) -> Option<u64> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    if !(1..=9).contains(&digits) {
        return None;
    }
    let number: u64 = text[..digits].parse().ok()?;
    let (_, factor) = units.iter().find(|(unit, _)| *unit == &text[digits..])?;
    number.checked_mul(*factor)
}

/// Reads a duration such as `100ms`, `30s`, `5m`, `1h`, `7d`.
///
/// # Errors
/// [`ValueError::Duration`], [`ValueError::TooLong`].
pub fn parse_duration(text: &str) -> Result<Duration, ValueError> {
    let ms = measure(text, &DURATION_UNITS).ok_or_else(|| ValueError::Duration(text.to_owned()))?;
    Some(Duration::from_millis(ms)).filter(|it| *it <= DURATION_MAX).ok_or_else(|| ValueError::TooLong(text.to_owned()))
}

/// Writes a duration with the largest unit that keeps it whole. Parts below a millisecond are dropped.
pub fn format_duration(duration: Duration) -> String {
    let ms = u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
    write_measure(ms, &DURATION_UNITS, "s")
}

/// Reads a size such as `2KiB`, `16MiB`, in bytes.
///
/// # Errors
/// [`ValueError::Size`].
pub fn parse_size(text: &str) -> Result<u64, ValueError> {
    measure(text, &SIZE_UNITS).ok_or_else(|| ValueError::Size(text.to_owned()))
}

/// Writes a size with the largest unit that keeps it whole.
pub fn format_size(bytes: u64) -> String {
    write_measure(bytes, &SIZE_UNITS, "B")
}

fn write_measure(value: u64, units: &[(&str, u64)], unit_of_zero: &str) -> String {
    if value == 0 {
        return format!("0{unit_of_zero}");
    }
    let whole = units.iter().rev().find(|(_, factor)| value.is_multiple_of(*factor) && value / factor < 1_000_000_000);
    let (unit, factor) = whole.copied().unwrap_or(units[0]);
    format!("{}{unit}", value / factor)
}

/// A duration in a manifest: a string such as `30s`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct DurationText(pub Duration);

/// A size in a manifest, in bytes: a string such as `16MiB`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct SizeText(pub u64);

impl fmt::Display for DurationText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&format_duration(self.0))
    }
}

impl fmt::Display for SizeText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&format_size(self.0))
    }
}

impl Serialize for DurationText {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl Serialize for SizeText {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for DurationText {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        parse_duration(&Cow::<str>::deserialize(deserializer)?).map(Self).map_err(D::Error::custom)
    }
}

impl<'de> Deserialize<'de> for SizeText {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        parse_size(&Cow::<str>::deserialize(deserializer)?).map(Self).map_err(D::Error::custom)
    }
}

impl JsonSchema for DurationText {
    fn schema_name() -> Cow<'static, str> {
        "Duration".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"type": "string", "pattern": DURATION_PATTERN, "maxLength": 12})
    }
}

impl JsonSchema for SizeText {
    fn schema_name() -> Cow<'static, str> {
        "Size".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"type": "string", "pattern": SIZE_PATTERN, "maxLength": 12})
    }
}

/// One text or a list of texts, such as a JSONPath. The API server cannot type such a field, so its form is found by the
/// checks of QueueBox only.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct OneOrMany(pub serde_json::Value);

impl OneOrMany {
    /// The texts in order.
    ///
    /// # Errors
    /// A sentence that says what is expected.
    pub fn texts(&self) -> Result<Vec<&str>, &'static str> {
        const EXPECTED: &str = "expected a text or a list of texts";
        match &self.0 {
            serde_json::Value::String(text) => Ok(vec![text]),
            serde_json::Value::Array(items) if items.is_empty() => Err("the list is empty"),
            serde_json::Value::Array(items) if items.len() > 64 => Err("a list has at most 64 entries"),
            serde_json::Value::Array(items) => items.iter().map(|item| item.as_str().ok_or(EXPECTED)).collect(),
            _ => Err(EXPECTED),
        }
    }
}

impl From<&str> for OneOrMany {
    fn from(text: &str) -> Self {
        Self(text.into())
    }
}

impl JsonSchema for OneOrMany {
    fn schema_name() -> Cow<'static, str> {
        "OneOrMany".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"x-kubernetes-preserve-unknown-fields": true})
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_whole_numbers_with_a_unit() {
        for (text, ms) in
            [("0s", 0), ("100ms", 100), ("30s", 30_000), ("5m", 300_000), ("1h", 3_600_000), ("7d", 604_800_000)]
        {
            assert_eq!(parse_duration(text), Ok(Duration::from_millis(ms)), "{text}");
        }
        for text in
            ["", "30", "s", "-1s", "+1s", "1.5s", "1 s", " 1s", "1S", "1sec", "1m30s", "1w", "1234567890s", "1µs"]
        {
            assert_eq!(parse_duration(text), Err(ValueError::Duration(text.to_owned())), "{text}");
        }
        assert_eq!(parse_duration("36501d"), Err(ValueError::TooLong("36501d".into())));
        assert_eq!(parse_duration("999999999d"), Err(ValueError::TooLong("999999999d".into())));
    }

    #[test]
    fn sizes_are_whole_numbers_with_a_unit() {
        for (text, bytes) in [("0B", 0), ("2KiB", 2048), ("16MiB", 16 << 20), ("1GiB", 1 << 30)] {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
        for text in ["", "16", "16MB", "16M", "1.5MiB", "-1B", "1 KiB", "1kib"] {
            assert_eq!(parse_size(text), Err(ValueError::Size(text.to_owned())), "{text}");
        }
    }

    proptest::proptest! {
        #[test]
        fn what_is_written_reads_the_same(ms in 0_u64..3_000_000_000_000, bytes in 0_u64..(1 << 55)) {
            let duration = Duration::from_millis(ms);
            if let Ok(read) = parse_duration(&format_duration(duration)) {
                proptest::prop_assert_eq!(read, duration);
            } else {
                proptest::prop_assert!(ms >= 1_000_000_000);
            }
            if let Ok(read) = parse_size(&format_size(bytes)) {
                proptest::prop_assert_eq!(read, bytes);
            } else {
                proptest::prop_assert!(bytes >= 1_000_000_000);
            }
        }
    }
}

//! JSON as bytes: checked and looked into in one pass, never re-written.
//!
//! A received body is stored as it came, so nothing here builds a tree of values. [`scan()`] walks over the text once, without
//! recursion, tells a [`Sink`] what it meets, and says whether the text can be stored on every database alike (contract 6.4).
//!
//! Invariants:
//! - A number is handed on as its digits, a string as it is written. Only who asks for a value decodes it.
//! - Of a repeated name in one object the last value counts, as for every common parser.
//! - Time and memory are linear in the text, whatever its nesting.

mod path;
mod scan;

pub use path::{Path, PathError, values_at};
pub use scan::{Limits, NumberRule, Scalar, Sink, Text, Unusable, scan};

/// True when `digits`, the text of a JSON number, is the same number after a trip through a double: the shortest text of the
/// double has the same value. `1.10` survives, `0.12345678901234567890123` and `12345678901234567890` do not.
pub fn survives_double(digits: &str) -> bool {
    let bytes = digits.as_bytes();
    // Every decimal of up to 15 digits survives; the exponent is the only thing that could take it out of range.
    if bytes.len() <= 15 && !bytes.iter().any(|byte| matches!(byte, b'e' | b'E')) {
        return true;
    }
    match digits.parse::<f64>() {
        Ok(double) if double.is_finite() => Decimal::of(digits) == Decimal::of(&format!("{double:e}")),
        _ => false,
    }
}

/// A decimal number without its leading and trailing zeros: `digits × 10^exponent`.
#[derive(PartialEq, Eq)]
struct Decimal {
    negative: bool,
    digits: Vec<u8>,
    exponent: i64,
}

impl Decimal {
    fn of(text: &str) -> Self {
        let (mantissa, exponent) = match text.find(['e', 'E']) {
            Some(at) => (&text[..at], text[at + 1..].parse::<i64>().unwrap_or(i64::from(i32::MAX))),
            None => (text, 0),
        };
        let negative = mantissa.starts_with('-');
        let mantissa = mantissa.trim_start_matches('-');
        let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
        let mut digits: Vec<u8> = whole.bytes().chain(fraction.bytes()).skip_while(|digit| *digit == b'0').collect();
        let mut exponent = exponent.saturating_sub(i64::try_from(fraction.len()).unwrap_or(i64::MAX));
        while digits.last() == Some(&b'0') {
            digits.pop();
            exponent += 1;
        }
        if digits.is_empty() {
            return Self { negative: false, digits, exponent: 0 };
        }
        Self { negative, digits, exponent }
    }
}

/// Appends `text` to `out` as a JSON string.
pub fn write_string(out: &mut Vec<u8>, text: &str) {
    out.push(b'"');
    let mut plain_from = 0;
    for (at, byte) in text.bytes().enumerate() {
        let escape: Option<&[u8]> = match byte {
            b'"' => Some(b"\\\""),
            b'\\' => Some(b"\\\\"),
            b'\n' => Some(b"\\n"),
            b'\r' => Some(b"\\r"),
            b'\t' => Some(b"\\t"),
            0..=0x1f => None,
            _ => continue,
        };
        out.extend_from_slice(&text.as_bytes()[plain_from..at]);
        match escape {
            Some(escape) => out.extend_from_slice(escape),
            None => out.extend_from_slice(format!("\\u{byte:04x}").as_bytes()),
        }
        plain_from = at + 1;
    }
    out.extend_from_slice(&text.as_bytes()[plain_from..]);
    out.push(b'"');
}

/// The JSON text of an object of strings, in the order given. The caller has made the names different.
pub fn object_of_strings(entries: &[(String, String)]) -> String {
    let mut out =
        Vec::with_capacity(2 + entries.iter().map(|(name, value)| name.len() + value.len() + 6).sum::<usize>());
    out.push(b'{');
    for (index, (name, value)) in entries.iter().enumerate() {
        if index > 0 {
            out.push(b',');
        }
        write_string(&mut out, name);
        out.push(b':');
        write_string(&mut out, value);
    }
    out.push(b'}');
    // Only whole strings and ASCII were appended.
    String::from_utf8(out).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn doubles_keep_what_they_can() {
        for digits in
            ["0", "-0", "0.0", "1.10", "100", "1e3", "-12.5", "9007199254740992", "1790000000000", "1e22", "5e-324"]
        {
            assert!(survives_double(digits), "{digits}");
        }
        for digits in [
            "12345678901234567890",
            "18446744073709551615",
            "-9223372036854775808",
            "9007199254740993",
            "0.12345678901234567890123",
            "1e400",
            "-1e400",
            "1e-400",
            "1e99999999999999999999",
        ] {
            assert!(!survives_double(digits), "{digits}");
        }
    }

    proptest! {
        #[test]
        fn a_double_survives_itself(double in proptest::num::f64::NORMAL | proptest::num::f64::ZERO) {
            let (scientific, plain) = (format!("{double:e}"), double.to_string());
            prop_assert!(survives_double(&scientific));
            prop_assert!(survives_double(&plain));
        }

        #[test]
        fn strings_are_written_as_serde_reads_them(text in any::<String>()) {
            let mut out = Vec::new();
            write_string(&mut out, &text);
            prop_assert_eq!(serde_json::from_slice::<String>(&out).unwrap(), text);
        }
    }
}

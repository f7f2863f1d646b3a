//! When a message was published, by its own account (contract 6.5).

/// Whole numbers below this are seconds, others milliseconds.
const MILLISECONDS_FROM: i64 = 100_000_000_000;

/// First millisecond behind the year 9999.
const END_MS: i64 = 253_402_300_800_000;

/// Reads a time: ISO 8601 with an offset, or a whole number of seconds or milliseconds since 1970. Returns microseconds since
/// 1970; `None` for what is negative, beyond the year 9999 or unreadable, which counts as the receipt.
pub fn parse(text: &str) -> Option<i64> {
    let text = text.trim();
    if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
        let number = text.parse::<i64>().ok()?;
        let ms = if number < MILLISECONDS_FROM { number * 1000 } else { number };
        return (ms < END_MS).then_some(ms * 1000);
    }
    let time = text.parse::<jiff::Timestamp>().ok()?.as_microsecond();
    (0..END_MS * 1000).contains(&time).then_some(time)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// conformance 31
    #[test]
    fn publish_time_formats() {
        for text in [
            "1790000000000",
            "1790000000",
            "2026-09-21T14:13:20Z",
            "2026-09-21T14:13:20.000Z",
            "2026-09-21T19:43:20+05:30",
            " 1790000000 ",
        ] {
            assert_eq!(parse(text), Some(1_790_000_000_000_000), "{text}");
        }
        assert_eq!(parse("0"), Some(0));
        assert_eq!(parse("99999999999"), Some(99_999_999_999_000_000), "seconds up to the year 5138");
        assert_eq!(parse("100000000000"), Some(100_000_000_000_000), "milliseconds");
        assert_eq!(parse("253402300799999"), Some(253_402_300_799_999_000));
        assert_eq!(parse("2026-09-21T14:13:20.123456Z"), Some(1_790_000_000_123_456));
    }

    #[test]
    fn junk_is_no_time() {
        for text in [
            "",
            " ",
            "soon",
            "-1",
            "-1790000000",
            "1.5",
            "1e9",
            "+5",
            "253402300800000",
            "99999999999999999999999",
            "2026-09-21T14:13:20",
            "2026-09-21",
            "1969-12-31T23:59:59Z",
            "+010000-01-01T00:00:00Z",
            "2026-13-01T00:00:00Z",
        ] {
            assert_eq!(parse(text), None, "{text}");
        }
    }

    proptest::proptest! {
        #[test]
        fn never_panics(text in proptest::prelude::any::<String>(), number in proptest::prelude::any::<i128>()) {
            parse(&text);
            parse(&number.to_string());
        }
    }
}

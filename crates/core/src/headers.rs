//! Header names: compared in any case, joined by one set of rules (contract 6.3, 7.4, 8).

/// The four headers that the relay sets on a forwarded row; a received header of the same name is replaced.
pub const RELAY_HEADERS: [&str; 4] = ["x-inbox-id", "x-source", "x-idempotency-key", "X-Correlation-Id"];

/// The last value of `name`, in any case, trimmed; blank counts as missing.
pub fn last<'a>(headers: &'a [(String, String)], name: &str) -> Option<&'a str> {
    headers
        .iter()
        .rev()
        .find(|(given, _)| given.eq_ignore_ascii_case(name))
        .map(|(_, value)| value.trim())
        .filter(|v| !v.is_empty())
}

/// Adds `name: value` and drops every earlier header of that name in any case.
pub fn set(headers: &mut Vec<(String, String)>, name: &str, value: impl Into<String>) {
    headers.retain(|(given, _)| !given.eq_ignore_ascii_case(name));
    headers.push((name.to_owned(), value.into()));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_value_counts_and_blank_is_missing() {
        let mut headers = vec![
            ("A".to_owned(), "1".to_owned()),
            ("a".to_owned(), " 2 ".to_owned()),
            ("b".to_owned(), "  ".to_owned()),
        ];
        assert_eq!(last(&headers, "A"), Some("2"));
        assert_eq!(last(&headers, "B"), None);
        set(&mut headers, "A", "3");
        assert_eq!(headers.iter().filter(|(name, _)| name.eq_ignore_ascii_case("a")).count(), 1);
        assert_eq!(last(&headers, "a"), Some("3"));
    }
}

//! Which messages of a source are dropped before anything is read out of them (contract 6.6).

use queuebox_core::pattern::Pattern;

/// `filter.require` and `filter.exclude`. The empty filter drops nothing.
#[derive(Debug, Clone, Default)]
pub struct Filter {
    /// All of them match, or the message is dropped.
    pub require: Vec<Rule>,
    /// None of them matches, or the message is dropped.
    pub exclude: Vec<Rule>,
}

/// One rule about one header.
#[derive(Debug, Clone)]
pub struct Rule {
    /// Its name, in any case.
    pub header: String,
    /// What its value has to be.
    pub test: Test,
}

/// What a value has to be. Values compare exactly.
#[derive(Debug, Clone)]
pub enum Test {
    /// This text.
    Equals(String),
    /// One of these texts.
    In(Vec<String>),
    /// Matched by this topic pattern (contract 7.1).
    Matches(Pattern),
    /// The header is there, with any value.
    Exists,
}

impl Rule {
    /// A missing header matches no rule. Of a repeated one the last value counts.
    fn matches(&self, headers: &[(String, String)]) -> bool {
        let Some((_, value)) = headers.iter().rev().find(|(name, _)| name.eq_ignore_ascii_case(&self.header)) else {
            return false;
        };
        match &self.test {
            Test::Equals(text) => value == text,
            Test::In(texts) => texts.contains(value),
            Test::Matches(pattern) => pattern.matches(value),
            Test::Exists => true,
        }
    }
}

impl Filter {
    /// Is a message with these headers taken?
    pub fn takes(&self, headers: &[(String, String)]) -> bool {
        self.require.iter().all(|rule| rule.matches(headers)) && !self.exclude.iter().any(|rule| rule.matches(headers))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(header: &str, test: Test) -> Rule {
        Rule { header: header.to_owned(), test }
    }

    fn headers(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    /// conformance 27
    #[test]
    fn filter_rules() {
        let tests = [
            (Test::Equals("push".into()), "push", "Push"),
            (Test::In(vec!["a".into(), "push".into()]), "push", "b"),
            (Test::Matches(Pattern::parse("order.*").unwrap()), "order.created", "order.item.added"),
        ];
        for (test, yes, no) in tests {
            let require = Filter { require: vec![rule("X-Event", test.clone())], exclude: vec![] };
            let exclude = Filter { require: vec![], exclude: vec![rule("X-Event", test)] };
            for (value, matches) in [(yes, true), (no, false)] {
                let given = headers(&[("x-event", value)]);
                assert_eq!((require.takes(&given), exclude.takes(&given)), (matches, !matches), "{value}");
            }
            assert_eq!((require.takes(&[]), exclude.takes(&[])), (false, true), "a missing header matches only 'not'");
        }
        let exists = Filter { require: vec![rule("A", Test::Exists)], exclude: vec![] };
        assert!(exists.takes(&headers(&[("a", "")])));
        assert!(!exists.takes(&headers(&[("b", "1")])));
    }

    #[test]
    fn all_required_and_none_excluded() {
        let filter = Filter {
            require: vec![rule("a", Test::Exists), rule("b", Test::Equals("1".into()))],
            exclude: vec![rule("c", Test::Exists)],
        };
        assert!(filter.takes(&headers(&[("a", "x"), ("b", "1")])));
        assert!(!filter.takes(&headers(&[("a", "x"), ("b", "2")])));
        assert!(!filter.takes(&headers(&[("a", "x"), ("b", "1"), ("c", "")])));
        assert!(filter.takes(&headers(&[("a", "x"), ("b", "2"), ("B", "1")])), "the last value counts");
        assert!(Filter::default().takes(&[]));
    }
}

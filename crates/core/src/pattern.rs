//! Topic patterns (contract 7.1): `*` is one segment without a dot, `**` is any text with dots, all else is literal. A
//! pattern matches the whole topic.

use std::fmt;

/// A checked pattern.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Pattern {
    text: String,
    parts: Vec<Part>,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
enum Part {
    Literal(String),
    /// `*`: one or more characters, none of them a dot.
    Segment,
    /// `**`: one or more characters.
    Any,
}

/// Why a pattern is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PatternError {
    /// Nothing would ever match it.
    #[error("an empty pattern matches no topic; use \"**\" for all topics")]
    Empty,
    /// Three stars in a row mean nothing.
    #[error("\"***\" is not a pattern; use \"*\" for one segment or \"**\" for any text")]
    ThreeStars,
    /// Topics have at most 255 characters.
    #[error("a pattern has at most 255 characters")]
    TooLong,
}

impl Pattern {
    /// Checks and compiles `text`.
    pub fn parse(text: &str) -> Result<Self, PatternError> {
        if text.is_empty() {
            return Err(PatternError::Empty);
        }
        if text.chars().count() > 255 {
            return Err(PatternError::TooLong);
        }
        if text.contains("***") {
            return Err(PatternError::ThreeStars);
        }
        let mut parts = Vec::new();
        let mut rest = text;
        while let Some(star) = rest.find('*') {
            if star > 0 {
                parts.push(Part::Literal(rest[..star].to_owned()));
            }
            if rest[star..].starts_with("**") {
                parts.push(Part::Any);
                rest = &rest[star + 2..];
            } else {
                parts.push(Part::Segment);
                rest = &rest[star + 1..];
            }
        }
        if !rest.is_empty() {
            parts.push(Part::Literal(rest.to_owned()));
        }
        Ok(Self { text: text.to_owned(), parts })
    }

    /// Does the whole `topic` match? Takes at most (parts × length of the topic) steps, whatever the pattern.
    pub fn matches(&self, topic: &str) -> bool {
        match self.parts.as_slice() {
            [Part::Literal(literal)] => topic == literal,
            [Part::Any] => !topic.is_empty(),
            [Part::Literal(prefix), Part::Any] => topic.len() > prefix.len() && topic.starts_with(prefix.as_str()),
            parts => matches(parts, topic),
        }
    }

    /// The same as a POSIX regular expression, for databases that know them: `**` takes line ends as well.
    pub fn to_regex(&self) -> String {
        let mut regex = String::from("^");
        for part in &self.parts {
            match part {
                Part::Segment => regex.push_str("[^.]+"),
                Part::Any => regex.push_str(".+"),
                Part::Literal(literal) => {
                    for character in literal.chars() {
                        if character.is_ascii() && !character.is_ascii_alphanumeric() {
                            regex.push('\\');
                        }
                        regex.push(character);
                    }
                }
            }
        }
        regex.push('$');
        regex
    }

    /// The pattern as written.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// True when every topic that `other` matches is matched by this pattern as well, as far as simple reasoning can
    /// tell. Used for the warning about routes that can never be reached; `false` may also mean "unknown".
    pub fn hides(&self, other: &Self) -> bool {
        if self == other {
            return true;
        }
        match self.parts.as_slice() {
            [Part::Any] => true,
            [Part::Literal(prefix), Part::Any] => matches!(
                other.parts.as_slice(),
                [Part::Literal(first), rest @ ..]
                    if first.starts_with(prefix.as_str()) && (first.len() > prefix.len() || !rest.is_empty())
            ),
            _ => match other.parts.as_slice() {
                [Part::Literal(literal)] => self.matches(literal),
                _ => false,
            },
        }
    }
}

/// Carries the set of byte positions that can be reached from part to part, so that no pattern can make it back-track.
fn matches(parts: &[Part], topic: &str) -> bool {
    let mut reached = vec![false; topic.len() + 1];
    reached[0] = true;
    for part in parts {
        let mut next = vec![false; topic.len() + 1];
        match part {
            Part::Literal(literal) => {
                for (position, _) in reached.iter().enumerate().filter(|(_, is_reached)| **is_reached) {
                    if topic[position..].starts_with(literal.as_str()) {
                        next[position + literal.len()] = true;
                    }
                }
            }
            Part::Segment | Part::Any => {
                let mut inside = false;
                for (position, character) in topic.char_indices() {
                    inside |= reached[position];
                    inside &= *part == Part::Any || character != '.';
                    next[position + character.len_utf8()] = inside;
                }
            }
        }
        reached = next;
    }
    reached[topic.len()]
}

impl fmt::Debug for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.text)
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pattern(text: &str) -> Pattern {
        Pattern::parse(text).unwrap()
    }

    /// conformance 48
    #[test]
    fn topic_patterns() {
        let cases = [
            ("order.*", "order.created", true),
            ("order.*", "order", false),
            ("order.*", "order.item.added", false),
            ("order.**", "order.created", true),
            ("order.**", "order.item.added", true),
            ("order.**", "order", false),
            ("**", "anything.at.all", true),
            ("*", "one", true),
            ("*", "one.two", false),
            ("*.created", "order.created", true),
            ("*.created", "a.b.created", false),
            ("**.created", "a.b.created", true),
            ("order.*.v1", "order.x.v1", true),
            ("order.*.v1", "order.x.v2", false),
            ("a*b", "axxb", true),
            ("a*b", "ab", false),
            ("order.created", "order.created", true),
            ("order.created", "Order.created", false),
            ("a+(b)", "a+(b)", true),
            ("é.*", "é.ü", true),
        ];
        for (text, topic, expected) in cases {
            assert_eq!(pattern(text).matches(topic), expected, "{text} on {topic}");
        }
        assert_eq!(Pattern::parse("***"), Err(PatternError::ThreeStars));
        assert_eq!(Pattern::parse("a.***.b"), Err(PatternError::ThreeStars));
        assert_eq!(Pattern::parse(""), Err(PatternError::Empty));
    }

    #[test]
    fn as_a_regular_expression() {
        assert_eq!(pattern("order.*").to_regex(), r"^order\.[^.]+$");
        assert_eq!(pattern("a-{b}**ä").to_regex(), r"^a\-\{b\}.+ä$");
    }

    #[test]
    fn a_pattern_knows_what_it_hides() {
        assert!(pattern("**").hides(&pattern("order.*")));
        assert!(pattern("order.**").hides(&pattern("order.*")));
        assert!(pattern("order.**").hides(&pattern("order.created")));
        assert!(pattern("order.*").hides(&pattern("order.created")));
        assert!(!pattern("order.*").hides(&pattern("order.**")));
        assert!(!pattern("order.created").hides(&pattern("order.*")));
    }

    proptest::proptest! {
        #[test]
        fn literals_match_themselves_only(a in "[a-z.]{1,20}", b in "[a-z.]{1,20}") {
            proptest::prop_assert_eq!(pattern(&a).matches(&b), a == b);
        }
    }
}

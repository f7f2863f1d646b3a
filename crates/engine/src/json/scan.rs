//! One pass over a JSON text (RFC 8259): is it JSON, and can every database store it?

use std::borrow::Cow;

/// What a text may be on the database at hand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Deepest nesting: 100, on MariaDB 31 (contract 6.4).
    pub depth_max: u32,
    /// Which numbers are stored unchanged.
    pub numbers: NumberRule,
}

impl Default for Limits {
    fn default() -> Self {
        Self { depth_max: 100, numbers: NumberRule::AllDigits }
    }
}

/// Which numbers a database stores unchanged (contract 2.4).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum NumberRule {
    /// All of them.
    #[default]
    AllDigits,
    /// 64-bit integers and what survives a double (MySQL 8).
    IntegerOrDouble,
}

/// Why a text cannot be used. The sentences are answered to senders.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unusable {
    /// Not JSON at all.
    #[error("not JSON: unexpected text at byte {offset}")]
    NotJson {
        /// Where it stops being JSON, counted from 0.
        offset: usize,
    },
    /// A string or name holds U+0000.
    #[error("JSON with the character U+0000 cannot be stored; remove it from the text")]
    Nul,
    /// A string or name holds half of a surrogate pair.
    #[error("JSON with an unpaired surrogate (\\ud800 to \\udfff) cannot be stored; write the whole pair")]
    LoneSurrogate,
    /// Too many levels.
    #[error("JSON nested deeper than {depth_max} levels cannot be stored")]
    TooDeep {
        /// The limit.
        depth_max: u32,
    },
    /// The database would change a number.
    #[error("the number {digits} would be changed by the database; send it as a string")]
    NumberChanges {
        /// As received, cut to 40 characters.
        digits: String,
    },
}

/// The inside of a JSON string, as written.
#[derive(Debug, Clone, Copy)]
pub struct Text<'a> {
    raw: &'a str,
    escaped: bool,
}

impl<'a> Text<'a> {
    /// The text with its escapes resolved. Borrowed when there are none.
    pub fn decoded(self) -> Cow<'a, str> {
        if self.escaped { Cow::Owned(unescape(self.raw)) } else { Cow::Borrowed(self.raw) }
    }

    /// Is it this text?
    pub fn is(self, other: &str) -> bool {
        if self.escaped { unescape(self.raw) == other } else { self.raw == other }
    }
}

/// A value that is no container.
#[derive(Debug, Clone, Copy)]
pub enum Scalar<'a> {
    /// `null`
    Null,
    /// `true`, `false`
    Bool(bool),
    /// Its digits as written.
    Number(&'a str),
    /// A string.
    Text(Text<'a>),
}

/// Is told what the scan meets, in order.
pub trait Sink<'a> {
    /// The name of the next value of the innermost object.
    fn name(&mut self, name: Text<'a>);
    /// A value.
    fn scalar(&mut self, value: Scalar<'a>);
    /// A container begins as the next value.
    fn open(&mut self, is_object: bool);
    /// The innermost container ends.
    fn close(&mut self, is_object: bool);
}

/// A sink for who only wants to know whether the text is usable.
impl Sink<'_> for () {
    fn name(&mut self, _: Text<'_>) {}
    fn scalar(&mut self, _: Scalar<'_>) {}
    fn open(&mut self, _: bool) {}
    fn close(&mut self, _: bool) {}
}

/// Walks over `text` and tells `sink` what it meets. That a text is no JSON wins over every other reason; of those the first
/// counts. After an error the sink has seen only a part.
///
/// # Errors
/// [`Unusable`] says why the text cannot be stored.
pub fn scan<'a>(text: &'a [u8], limits: Limits, sink: &mut impl Sink<'a>) -> Result<(), Unusable> {
    let text = std::str::from_utf8(text).map_err(|error| Unusable::NotJson { offset: error.valid_up_to() })?;
    let mut scanner = Scanner { text, bytes: text.as_bytes(), at: 0, limits, problem: None, objects: Vec::new() };
    match scanner.document(sink) {
        Err(NotJson) => Err(Unusable::NotJson { offset: scanner.at }),
        Ok(()) => scanner.problem.map_or(Ok(()), Err),
    }
}

struct NotJson;

struct Scanner<'a> {
    text: &'a str,
    bytes: &'a [u8],
    at: usize,
    limits: Limits,
    problem: Option<Unusable>,
    /// The open containers: is it an object?
    objects: Vec<bool>,
}

impl<'a> Scanner<'a> {
    fn document(&mut self, sink: &mut impl Sink<'a>) -> Result<(), NotJson> {
        loop {
            self.blanks();
            let container_opened = self.value(sink)?;
            if container_opened {
                continue;
            }
            if !self.after_value(sink)? {
                return if self.at == self.bytes.len() { Ok(()) } else { Err(NotJson) };
            }
        }
    }

    /// One value, or the beginning of a container that is not empty (`true`): its first value is next.
    fn value(&mut self, sink: &mut impl Sink<'a>) -> Result<bool, NotJson> {
        match self.peek() {
            Some(b'{') => self.open(true, b'}', sink),
            Some(b'[') => self.open(false, b']', sink),
            Some(b'"') => {
                let text = self.string()?;
                sink.scalar(Scalar::Text(text));
                Ok(false)
            }
            Some(b'-' | b'0'..=b'9') => {
                let digits = self.number()?;
                sink.scalar(Scalar::Number(digits));
                Ok(false)
            }
            Some(b't') => self.word("true", Scalar::Bool(true), sink),
            Some(b'f') => self.word("false", Scalar::Bool(false), sink),
            Some(b'n') => self.word("null", Scalar::Null, sink),
            _ => Err(NotJson),
        }
    }

    fn open(&mut self, is_object: bool, end: u8, sink: &mut impl Sink<'a>) -> Result<bool, NotJson> {
        self.at += 1;
        sink.open(is_object);
        self.objects.push(is_object);
        if self.objects.len() > self.limits.depth_max as usize {
            self.note(Unusable::TooDeep { depth_max: self.limits.depth_max });
        }
        self.blanks();
        if self.peek() == Some(end) {
            self.at += 1;
            self.objects.pop();
            sink.close(is_object);
            return Ok(false);
        }
        if is_object {
            self.member_name(sink)?;
        }
        Ok(true)
    }

    /// What stands behind a value: the end of containers, then a comma (`true`: a value is next) or the end of the text.
    fn after_value(&mut self, sink: &mut impl Sink<'a>) -> Result<bool, NotJson> {
        loop {
            self.blanks();
            let Some(&is_object) = self.objects.last() else { return Ok(false) };
            match (self.peek(), is_object) {
                (Some(b','), _) => {
                    self.at += 1;
                    if is_object {
                        self.blanks();
                        self.member_name(sink)?;
                    }
                    return Ok(true);
                }
                (Some(b'}'), true) | (Some(b']'), false) => {
                    self.at += 1;
                    self.objects.pop();
                    sink.close(is_object);
                }
                _ => return Err(NotJson),
            }
        }
    }

    fn member_name(&mut self, sink: &mut impl Sink<'a>) -> Result<(), NotJson> {
        if self.peek() != Some(b'"') {
            return Err(NotJson);
        }
        let name = self.string()?;
        sink.name(name);
        self.blanks();
        if self.peek() != Some(b':') {
            return Err(NotJson);
        }
        self.at += 1;
        Ok(())
    }

    fn string(&mut self) -> Result<Text<'a>, NotJson> {
        self.at += 1;
        let start = self.at;
        let mut escaped = false;
        loop {
            match self.peek() {
                Some(b'"') => {
                    let raw = &self.text[start..self.at];
                    self.at += 1;
                    return Ok(Text { raw, escaped });
                }
                Some(b'\\') => {
                    escaped = true;
                    self.escape()?;
                }
                None | Some(0..=0x1f) => return Err(NotJson),
                Some(_) => self.at += 1,
            }
        }
    }

    fn escape(&mut self) -> Result<(), NotJson> {
        self.at += 1;
        match self.peek() {
            Some(b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't') => {
                self.at += 1;
                Ok(())
            }
            Some(b'u') => {
                self.at += 1;
                match self.unit()? {
                    0 => self.note(Unusable::Nul),
                    0xdc00..=0xdfff => self.note(Unusable::LoneSurrogate),
                    0xd800..=0xdbff => self.second_half()?,
                    _ => {}
                }
                Ok(())
            }
            _ => Err(NotJson),
        }
    }

    /// The low surrogate that has to follow a high one. Anything else is left to be read as what it is.
    fn second_half(&mut self) -> Result<(), NotJson> {
        let behind = self.at;
        if self.bytes[behind..].starts_with(b"\\u") {
            self.at += 2;
            if (0xdc00..=0xdfff).contains(&self.unit()?) {
                return Ok(());
            }
            self.at = behind;
        }
        self.note(Unusable::LoneSurrogate);
        Ok(())
    }

    fn unit(&mut self) -> Result<u16, NotJson> {
        let mut unit = 0;
        for _ in 0..4 {
            let digit = self.peek().and_then(|byte| char::from(byte).to_digit(16)).ok_or(NotJson)?;
            unit = unit << 4 | digit as u16;
            self.at += 1;
        }
        Ok(unit)
    }

    fn number(&mut self) -> Result<&'a str, NotJson> {
        let start = self.at;
        if self.peek() == Some(b'-') {
            self.at += 1;
        }
        match self.peek() {
            Some(b'0') => self.at += 1,
            _ => self.digits()?,
        }
        let mut is_integer = true;
        if self.peek() == Some(b'.') {
            is_integer = false;
            self.at += 1;
            self.digits()?;
        }
        if let Some(b'e' | b'E') = self.peek() {
            is_integer = false;
            self.at += 1;
            if let Some(b'+' | b'-') = self.peek() {
                self.at += 1;
            }
            self.digits()?;
        }
        let digits = &self.text[start..self.at];
        if self.limits.numbers == NumberRule::IntegerOrDouble
            && !(is_integer && (digits.parse::<i64>().is_ok() || digits.parse::<u64>().is_ok()))
            && !super::survives_double(digits)
        {
            self.note(Unusable::NumberChanges { digits: digits.chars().take(40).collect() });
        }
        Ok(digits)
    }

    /// One digit or more.
    fn digits(&mut self) -> Result<(), NotJson> {
        let start = self.at;
        while let Some(b'0'..=b'9') = self.peek() {
            self.at += 1;
        }
        if self.at > start { Ok(()) } else { Err(NotJson) }
    }

    fn word(&mut self, word: &str, value: Scalar<'a>, sink: &mut impl Sink<'a>) -> Result<bool, NotJson> {
        if !self.bytes[self.at..].starts_with(word.as_bytes()) {
            return Err(NotJson);
        }
        self.at += word.len();
        sink.scalar(value);
        Ok(false)
    }

    fn blanks(&mut self) {
        while let Some(b' ' | b'\n' | b'\r' | b'\t') = self.peek() {
            self.at += 1;
        }
    }

    fn peek(&self) -> Option<u8> {
        self.bytes.get(self.at).copied()
    }

    fn note(&mut self, problem: Unusable) {
        self.problem.get_or_insert(problem);
    }
}

/// Resolves the escapes of a string that [`scan`] has walked over. Half a surrogate pair becomes U+FFFD; such a text is
/// refused at the end of its scan.
fn unescape(raw: &str) -> String {
    let mut out = String::with_capacity(raw.len());
    let mut rest = raw;
    while let Some(at) = rest.find('\\') {
        out.push_str(&rest[..at]);
        let escape = rest.as_bytes().get(at + 1).copied().unwrap_or(b'\\');
        let mut used = at + 2;
        match escape {
            b'b' => out.push('\u{8}'),
            b'f' => out.push('\u{c}'),
            b'n' => out.push('\n'),
            b'r' => out.push('\r'),
            b't' => out.push('\t'),
            b'u' => {
                let (character, length) = unicode_escape(&rest[at..]);
                out.push(character);
                used = at + length;
            }
            other => out.push(char::from(other)),
        }
        rest = rest.get(used..).unwrap_or("");
    }
    out.push_str(rest);
    out
}

/// The character of the `\u` escape at the start of `text`, and how many bytes it takes.
fn unicode_escape(text: &str) -> (char, usize) {
    let unit = |at: usize| text.get(at..at + 4).and_then(|digits| u32::from_str_radix(digits, 16).ok());
    let first = unit(2).unwrap_or(0xfffd);
    let is_pair = (0xd800..=0xdbff).contains(&first) && text.get(6..8) == Some("\\u");
    let second = unit(8).filter(|second| is_pair && (0xdc00..=0xdfff).contains(second));
    let (code, length) = match second {
        Some(second) => (0x10000 + ((first - 0xd800) << 10) + (second - 0xdc00), 12),
        None => (first, 6),
    };
    (char::from_u32(code).unwrap_or('\u{fffd}'), length)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn check(text: &str) -> Result<(), Unusable> {
        scan(text.as_bytes(), Limits::default(), &mut ())
    }

    fn nested(levels: usize) -> String {
        format!("{}{}", "[".repeat(levels), "]".repeat(levels))
    }

    #[test]
    fn json_is_json() {
        for text in [
            "{}",
            " [ ] ",
            "1",
            "-0.5e+10",
            "\"\\u00e9\"",
            "null",
            "[1,{\"a\":[true,false,null]}]\n",
            "\"\\ud83d\\ude00\"",
        ] {
            assert_eq!(check(text), Ok(()), "{text}");
        }
    }

    #[test]
    fn what_is_no_json_is_told_where() {
        for (text, offset) in [
            ("", 0),
            ("{", 1),
            ("{\"a\"}", 4),
            ("[1,]", 3),
            ("01", 1),
            ("1.", 2),
            ("tru", 0),
            ("{} x", 3),
            ("[1}", 2),
            ("\"a\u{1}\"", 2),
        ] {
            assert_eq!(check(text), Err(Unusable::NotJson { offset }), "{text}");
        }
        assert_eq!(scan(b"\"\xff\"", Limits::default(), &mut ()), Err(Unusable::NotJson { offset: 1 }));
    }

    /// case D23
    #[test]
    fn what_no_database_stores_is_unusable() {
        assert_eq!(check(r#"{"id":"n1","s":"a\u0000b"}"#), Err(Unusable::Nul));
        assert_eq!(check(r#"{"id":"n2","a\u0000":1}"#), Err(Unusable::Nul));
        assert_eq!(check(r#"{"id":"n3","s":"\ud800"}"#), Err(Unusable::LoneSurrogate));
        assert_eq!(check(r#"["\ude00\ud83d"]"#), Err(Unusable::LoneSurrogate));
        assert_eq!(check(r#"["\ud83d\u0041"]"#), Err(Unusable::LoneSurrogate));
        assert_eq!(check(&nested(100)), Ok(()));
        assert_eq!(check(&nested(101)), Err(Unusable::TooDeep { depth_max: 100 }));
        assert!(matches!(check(r#"["\u0000""#), Err(Unusable::NotJson { .. })), "no JSON wins");
    }

    #[test]
    fn a_million_levels_overflow_nothing() {
        assert_eq!(check(&nested(1_000_000)), Err(Unusable::TooDeep { depth_max: 100 }));
    }

    #[test]
    fn mysql_refuses_numbers_that_it_would_change() {
        let limits = Limits { numbers: NumberRule::IntegerOrDouble, ..Limits::default() };
        for number in ["18446744073709551615", "-9223372036854775808", "1.10", "1e3"] {
            assert_eq!(scan(number.as_bytes(), limits, &mut ()), Ok(()), "{number}");
        }
        for number in ["18446744073709551616", "0.12345678901234567890123", "1e400"] {
            assert!(
                matches!(scan(number.as_bytes(), limits, &mut ()), Err(Unusable::NumberChanges { .. })),
                "{number}"
            );
        }
    }

    /// Collects every name and text that the scan meets.
    #[derive(Default)]
    struct Texts(Vec<String>);

    impl<'a> Sink<'a> for Texts {
        fn name(&mut self, name: Text<'a>) {
            self.0.push(name.decoded().into_owned());
        }
        fn scalar(&mut self, value: Scalar<'a>) {
            if let Scalar::Text(text) = value {
                self.0.push(text.decoded().into_owned());
            }
        }
        fn open(&mut self, _: bool) {}
        fn close(&mut self, _: bool) {}
    }

    #[test]
    fn escapes_are_resolved() {
        let mut texts = Texts::default();
        scan(br#"{"a\u00e9\n":"\ud83d\ude00\/\\\"\b\f\r\t"}"#, Limits::default(), &mut texts).unwrap();
        assert_eq!(texts.0, ["aé\n", "😀/\\\"\u{8}\u{c}\r\t"]);
    }

    /// Texts that are nearly JSON.
    fn nearly_json() -> impl Strategy<Value = String> {
        let piece = prop_oneof![
            Just("{"),
            Just("}"),
            Just("["),
            Just("]"),
            Just(","),
            Just(":"),
            Just("\"a\""),
            Just("\"\\u0041\""),
            Just("1"),
            Just("-"),
            Just("0.5"),
            Just("e3"),
            Just("true"),
            Just("null"),
            Just(" "),
            Just("\\"),
            Just("\""),
            Just("\\ud83d\\ude00"),
            Just("é"),
        ];
        proptest::collection::vec(piece, 0..12).prop_map(|pieces| pieces.concat())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(400))]

        #[test]
        fn agrees_with_serde(text in nearly_json()) {
            let theirs = serde_json::from_str::<&serde_json::value::RawValue>(&text).is_ok();
            let ours = !matches!(check(&text), Err(Unusable::NotJson { .. }));
            prop_assert_eq!(ours, theirs, "{}", text);
        }

        #[test]
        fn reads_what_serde_wrote(name in any::<String>(), value in any::<String>()) {
            let text = serde_json::json!({ name.clone(): [value.clone()] }).to_string();
            let mut texts = Texts::default();
            match scan(text.as_bytes(), Limits::default(), &mut texts) {
                Ok(()) => prop_assert_eq!(texts.0, vec![name, value]),
                Err(problem) => prop_assert!(problem == Unusable::Nul && (name.contains('\0') || value.contains('\0'))),
            }
        }
    }
}

//! Removes secrets from text before it is printed or stored (contract 10.3).
//!
//! Every log line, `last_error`, condition, event, API answer and command line output passes through [`redact`] or
//! [`redact_with`]. The shared corpus `clients/redaction-corpus.json` fixes the result case by case, for this crate and for
//! each client library; a port that differs in one case is a security defect.
//!
//! Invariants:
//! - Where the text leaves a choice, too much is removed rather than too little.
//! - Time is linear in the length of the text: each search either consumes what it has read or is bounded.
//! - Redacting twice gives the same as redacting once.
//!
//! ```text
//!   text ─► known secrets ─► name = value, user information, parameters ─► scheme and credential ─► cut
//!            (redact_with)                (one pass)
//! ```

use std::{error::Error, fmt::Write as _};

use base64::{
    Engine as _,
    engine::general_purpose::{STANDARD, URL_SAFE},
};

/// No redacted text has more characters, the marker included.
pub const MAX_CHARS: usize = 2_000;
/// Ends a text that was cut.
pub const TRUNCATION_MARKER: &str = "...[truncated]";

const REDACTED: &str = "[REDACTED]";
const STARS: &str = "***";
/// A scheme name is at most this long.
const SCHEME_MAX: usize = 32;
/// How far a search for the end of user information goes before it gives up, in bytes.
const RUN_MAX: usize = 200;
/// Backslashes before a quote beyond this number are no escaping any more.
const ESCAPES_MAX: usize = 7;
/// A shorter text is too common to be removed wherever it stands.
const KNOWN_MIN: usize = 4;
/// Causes of an error that are written.
const CAUSES_MAX: usize = 5;

/// Secret names as their parts; the parts may be joined by nothing, `-`, `_` or `.`, and any word may stand in front, which
/// covers `x-api-key`, `proxy-authorization`, `set-cookie`, `access_token`, `client_secret` and the like.
const NAMES: [&[&str]; 12] = [
    &["authorization"],
    &["api", "key"],
    &["cookie"],
    &["token"],
    &["secret"],
    &["password"],
    &["pwd"],
    &["passwd"],
    &["credential"],
    &["credentials"],
    &["passphrase"],
    &["private", "key"],
];
/// Parameters of a URL whose value becomes `***`.
const PARAMETERS: [&str; 4] = ["password", "pwd", "secret", "token"];
const SCHEMES: [&str; 5] = ["basic", "bearer", "digest", "negotiate", "token"];

/// Removes what looks like a secret and cuts the text to [`MAX_CHARS`].
pub fn redact(text: &str) -> String {
    cut(redact_whole(text))
}

/// As [`redact`], without the cut: what a command prints for the person who called it, which may be a list of statements to run.
pub fn redact_whole(text: &str) -> String {
    printable(credentials(&names_and_urls(text)))
}

/// Control characters would act on a terminal, and a database may refuse to store them (PostgreSQL: U+0000).
fn printable(text: String) -> String {
    let acts = |c: char| c.is_control() && !matches!(c, '\n' | '\r' | '\t');
    if text.contains(acts) { text.replace(acts, "\u{fffd}") } else { text }
}

/// As [`redact`], and removes each of `secrets` wherever it stands: as it is, percent-encoded, escaped with backslashes, or
/// in base64, also in the middle of a longer base64 text. Of a secret that is a URL the password is removed as well.
/// Secrets of fewer than four bytes are left to the rules of [`redact`]: removing them everywhere would destroy the text.
pub fn redact_with(text: &str, secrets: &[&str]) -> String {
    redact(&known(text, secrets))
}

/// The message and type of an error and of its causes, at most five, redacted. A cause that only repeats the end of
/// the message before it is left out.
pub fn redact_error(error: &(dyn Error + 'static)) -> String {
    redact(&describe_error(error))
}

/// As [`redact_error`], without redaction: the input of [`redact_with`].
pub fn describe_error(error: &(dyn Error + 'static)) -> String {
    let mut out = String::new();
    let mut previous = String::new();
    let mut next = Some(error);
    let mut depth = 0;
    while let Some(error) = next.filter(|_| depth < CAUSES_MAX) {
        let message = error.to_string();
        if depth == 0 || !previous.ends_with(&message) {
            if depth > 0 {
                out.push_str("; caused by: ");
            }
            out.push_str(&message);
            let kind = type_word(error);
            if !kind.is_empty() {
                // A writer to a String cannot fail.
                let _ = write!(out, " ({kind})");
            }
        }
        previous = message;
        next = error.source();
        depth += 1;
    }
    out
}

/// The first word of the debug form, which is the name of the type or of its variant. The rest of that form is never used:
/// it may hold anything.
fn type_word(error: &dyn Error) -> String {
    struct FirstWord(String);
    impl std::fmt::Write for FirstWord {
        fn write_str(&mut self, text: &str) -> std::fmt::Result {
            for character in text.chars() {
                if !(character.is_ascii_alphanumeric() || matches!(character, '_' | ':')) || self.0.len() >= 64 {
                    return Err(std::fmt::Error);
                }
                self.0.push(character);
            }
            Ok(())
        }
    }
    let mut word = FirstWord(String::new());
    // The error is how writing stops after the first word.
    let _ = write!(word, "{error:?}");
    word.0
}

/// Cuts to [`MAX_CHARS`], never inside a character.
fn cut(mut text: String) -> String {
    if text.char_indices().nth(MAX_CHARS).is_none() {
        return text;
    }
    let keep = MAX_CHARS - TRUNCATION_MARKER.len();
    if let Some((end, _)) = text.char_indices().nth(keep) {
        text.truncate(end);
    }
    text.push_str(TRUNCATION_MARKER);
    text
}

// ---- Names, values, URLs --------------------------------------------------------------------------------------------

/// Writes the output: what was read is either kept or replaced, from left to right.
struct Output<'t> {
    text: &'t str,
    out: String,
    done: usize,
}

impl<'t> Output<'t> {
    fn new(text: &'t str) -> Self {
        Self { text, out: String::with_capacity(text.len()), done: 0 }
    }

    /// Keeps the text up to `from`, puts `with` in place of `from..to`.
    fn replace(&mut self, from: usize, to: usize, with: &str) {
        self.out.push_str(&self.text[self.done..from]);
        self.out.push_str(with);
        self.done = to;
    }

    fn finish(mut self) -> String {
        self.out.push_str(&self.text[self.done..]);
        self.out
    }
}

fn names_and_urls(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut output = Output::new(text);
    // End of the URL that the scan is in, for its parameters.
    let mut url_end = 0;
    let mut at = 0;
    while let Some(separator) = find(bytes, at, |byte| byte == b'=' || byte == b':') {
        at = separator + 1;
        if let Some(name) = secret_name(bytes, output.done, separator) {
            let Some(end) = value_end(bytes, separator) else { continue };
            if separator < url_end && is_parameter(bytes, name) {
                output.replace(separator, end, "=***");
            } else {
                output.replace(name.end, end, "=[REDACTED]");
            }
            at = end;
        } else if let Some(start) = authority_start(bytes, separator) {
            // Looked for once per run without blanks, however many URLs the run holds.
            if start >= url_end {
                url_end = find(bytes, start, ends_url).unwrap_or(bytes.len());
            }
            match authority(bytes, start) {
                Authority::UserInfo(end) => {
                    output.replace(start, end, STARS);
                    at = end;
                }
                Authority::Port(colon) => at = colon + 1,
                Authority::Host => at = start,
            }
        }
    }
    output.finish()
}

fn find(bytes: &[u8], from: usize, wanted: impl Fn(u8) -> bool) -> Option<usize> {
    bytes.get(from..)?.iter().position(|byte| wanted(*byte)).map(|found| from + found)
}

fn is_blank(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t')
}

fn is_space(byte: u8) -> bool {
    byte.is_ascii_whitespace() || byte == 0x0b
}

fn is_quote(byte: u8) -> bool {
    matches!(byte, b'"' | b'\'')
}

fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_' || !byte.is_ascii()
}

fn ends_url(byte: u8) -> bool {
    is_space(byte) || is_quote(byte) || matches!(byte, b'<' | b'>')
}

/// A name before `separator`: where its letters begin, and where it ends with a closing quote or bracket. Blanks, a closing
/// quote and a closing square bracket may stand between the name and the separator.
#[derive(Clone, Copy)]
struct Name {
    start: usize,
    end: usize,
}

fn secret_name(bytes: &[u8], floor: usize, separator: usize) -> Option<Name> {
    let mut end = separator;
    while end > floor && is_blank(bytes[end - 1]) {
        end -= 1;
    }
    let mut letters = end;
    if letters > floor && bytes[letters - 1] == b']' {
        letters -= 1;
    }
    if letters > floor && is_quote(bytes[letters - 1]) {
        letters -= 1;
        while letters > floor && bytes[letters - 1] == b'\\' {
            letters -= 1;
        }
    }
    let start = NAMES.iter().find_map(|parts| ends_with_parts(&bytes[floor..letters], parts))? + floor;
    Some(Name { start, end })
}

/// Where the joined parts begin, if `bytes` ends with them in any case.
fn ends_with_parts(bytes: &[u8], parts: &[&str]) -> Option<usize> {
    let mut end = bytes.len();
    for (index, part) in parts.iter().rev().enumerate() {
        if index > 0 && end > 0 && matches!(bytes[end - 1], b'-' | b'_' | b'.') {
            end -= 1;
        }
        end = end.checked_sub(part.len())?;
        if !bytes[end..end + part.len()].eq_ignore_ascii_case(part.as_bytes()) {
            return None;
        }
    }
    Some(end)
}

/// A whole parameter of a URL is named so: `?token=`, `&password=`.
fn is_parameter(bytes: &[u8], name: Name) -> bool {
    name.start > 0
        && matches!(bytes[name.start - 1], b'?' | b'&')
        && PARAMETERS.iter().any(|parameter| bytes[name.start..name.end].eq_ignore_ascii_case(parameter.as_bytes()))
}

/// Where the value behind `separator` ends; `None` = there is no value.
fn value_end(bytes: &[u8], separator: usize) -> Option<usize> {
    let mut start = separator;
    // `=>`, `:=` and `==` separate as well.
    while start < bytes.len() && matches!(bytes[start], b'=' | b':' | b'>') {
        start += 1;
    }
    while start < bytes.len() && is_blank(bytes[start]) {
        start += 1;
    }
    let first = *bytes.get(start)?;
    let end = if let Some(opener) = opening_quote(bytes, start) {
        closing_quote(bytes, opener).unwrap_or_else(|| line_end(bytes, start))
    } else if matches!(first, b'[' | b'{') {
        closing_bracket(bytes, start)
    } else if bytes[separator] == b':' && !starts_with_scheme(bytes, start, &["digest"]) {
        find(bytes, start, ends_value).unwrap_or(bytes.len())
    } else {
        word_value_end(bytes, start)
    };
    (end > start).then_some(end)
}

/// Ends a value after `:`.
fn ends_value(byte: u8) -> bool {
    matches!(byte, b',' | b';' | b'}' | b']' | b'&' | b'\n' | b'\r') || is_quote(byte)
}

/// Ends a value after `=`.
fn ends_word(byte: u8) -> bool {
    ends_value(byte) || is_space(byte)
}

/// A value after `=`: up to white space, but a scheme takes its credential along, and `Digest` its whole list.
fn word_value_end(bytes: &[u8], start: usize) -> usize {
    if starts_with_scheme(bytes, start, &["digest"]) {
        return line_end(bytes, start);
    }
    let end = find(bytes, start, ends_word).unwrap_or(bytes.len());
    if !starts_with_scheme(bytes, start, &SCHEMES) {
        return end;
    }
    let credential = find(bytes, end, |byte| !is_blank(byte)).unwrap_or(bytes.len());
    find(bytes, credential, ends_word).unwrap_or(bytes.len())
}

/// One of `schemes` stands at `at`, and a blank behind it.
fn starts_with_scheme(bytes: &[u8], at: usize, schemes: &[&str]) -> bool {
    schemes.iter().any(|scheme| {
        bytes.get(at..at + scheme.len()).is_some_and(|word| word.eq_ignore_ascii_case(scheme.as_bytes()))
            && bytes.get(at + scheme.len()).is_some_and(|byte| is_blank(*byte))
    })
}

fn line_end(bytes: &[u8], from: usize) -> usize {
    find(bytes, from, |byte| matches!(byte, b'\n' | b'\r')).unwrap_or(bytes.len())
}

#[derive(Clone, Copy)]
struct Opener {
    quote: u8,
    /// Backslashes before it: the text is itself inside a quoted text.
    escapes: usize,
    /// First byte of the value.
    inner: usize,
}

fn opening_quote(bytes: &[u8], at: usize) -> Option<Opener> {
    let quote = find(bytes, at, |byte| byte != b'\\')?;
    (is_quote(bytes[quote]) && quote - at <= ESCAPES_MAX).then(|| Opener {
        quote: bytes[quote],
        escapes: quote - at,
        inner: quote + 1,
    })
}

/// Behind the quote that closes `opener`. A quote inside has more backslashes than the opener (of an opener without any: an
/// odd number). Each kind of opener can fail only once in a text, since a later opener of that kind would have closed it.
fn closing_quote(bytes: &[u8], opener: Opener) -> Option<usize> {
    let mut backslashes = 0;
    for (offset, byte) in bytes.get(opener.inner..)?.iter().enumerate() {
        if *byte == b'\\' {
            backslashes += 1;
            continue;
        }
        if *byte == opener.quote {
            let closes = if opener.escapes == 0 { backslashes % 2 == 0 } else { backslashes <= opener.escapes };
            if closes {
                return Some(opener.inner + offset + 1);
            }
        }
        backslashes = 0;
    }
    None
}

/// Behind the bracket that closes the one at `open`, on the same line; else the end of the line.
fn closing_bracket(bytes: &[u8], open: usize) -> usize {
    let (opening, closing) = if bytes[open] == b'[' { (b'[', b']') } else { (b'{', b'}') };
    let end = line_end(bytes, open);
    let mut depth = 0_usize;
    for (offset, byte) in bytes[open..end].iter().enumerate() {
        if *byte == opening {
            depth += 1;
        } else if *byte == closing {
            depth -= 1;
            if depth == 0 {
                return open + offset + 1;
            }
        }
    }
    end
}

/// What stands behind `scheme://`.
enum Authority {
    /// User information up to this `@`.
    UserInfo(usize),
    /// No user information, and this colon is before a port number.
    Port(usize),
    /// No user information.
    Host,
}

/// First byte behind the slashes, if `colon` ends a URL scheme and one or more slashes follow. One letter is a drive.
fn authority_start(bytes: &[u8], colon: usize) -> Option<usize> {
    if bytes.get(colon + 1) != Some(&b'/') || !ends_with_url_scheme(&bytes[..colon]) {
        return None;
    }
    Some(find(bytes, colon + 1, |byte| byte != b'/').unwrap_or(bytes.len()))
}

fn ends_with_url_scheme(bytes: &[u8]) -> bool {
    let length = bytes
        .iter()
        .rev()
        .take(SCHEME_MAX)
        .take_while(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'.' | b'-'))
        .count();
    length > 1 && bytes[bytes.len() - length..].iter().any(u8::is_ascii_alphabetic)
}

fn authority(bytes: &[u8], start: usize) -> Authority {
    let Some(stop) =
        find(bytes, start, |byte| ends_url(byte) || matches!(byte, b'/' | b'?' | b'#' | b':' | b'@' | b',' | b';'))
    else {
        return Authority::Host;
    };
    let first = match bytes[stop] {
        b'@' => stop,
        b':' if is_port(bytes, stop + 1) => return Authority::Port(stop),
        b':' if bytes[stop..].starts_with(b"://") => return Authority::Host,
        b':' => match next_at(bytes, stop + 1) {
            Some(at) => at,
            None => return Authority::Host,
        },
        _ => return Authority::Host,
    };
    let mut last = first;
    while let Some(next) = next_at(bytes, last + 1).filter(|next| continues(bytes, last + 1, *next)) {
        last = next;
    }
    Authority::UserInfo(last)
}

/// One to five digits, and then something that may follow a port.
fn is_port(bytes: &[u8], start: usize) -> bool {
    let end = find(bytes, start, |byte| !byte.is_ascii_digit()).unwrap_or(bytes.len());
    (1..=5).contains(&(end - start))
        && bytes.get(end).is_none_or(|byte| {
            ends_url(*byte)
                || matches!(byte, b'/' | b'?' | b'#' | b',' | b';' | b':' | b'.' | b')' | b']' | b'}' | b'&')
        })
}

/// The next `@`, within [`RUN_MAX`] and before the next `scheme://`.
fn next_at(bytes: &[u8], from: usize) -> Option<usize> {
    let window = &bytes[from..bytes.len().min(from + RUN_MAX)];
    for (offset, byte) in window.iter().enumerate() {
        match byte {
            b'@' => return Some(from + offset),
            b':' if bytes[from + offset..].starts_with(b"://") && ends_with_url_scheme(&bytes[..from + offset]) => {
                return None;
            }
            _ => {}
        }
    }
    None
}

/// Does the user information go on to the `@` at `next`? It does unless what stands between two `@` reads like
/// the host at its end: then the later `@` is in a path, a query, or a mail address in the text behind.
fn continues(bytes: &[u8], from: usize, next: usize) -> bool {
    let between = &bytes[from..next];
    if between.ends_with(b"/") {
        return false;
    }
    let has_query = find(between, 0, |byte| byte == b'?').is_some_and(|mark| between[mark..].contains(&b'='));
    let may_end = has_query || between.iter().any(|byte| ends_url(*byte) || *byte == b')');
    !(may_end && reads_like_host(between))
}

/// A host, perhaps with a port, before a path, a query, a blank or punctuation.
fn reads_like_host(text: &[u8]) -> bool {
    let ends = |byte| ends_url(byte) || matches!(byte, b'/' | b'?' | b'#' | b',' | b';' | b')' | b']' | b'}');
    let end = if text.first() == Some(&b'[') {
        find(text, 0, |byte| byte == b']').map_or(text.len(), |close| close + 1)
    } else {
        find(text, 0, |byte| ends(byte) || byte == b':').unwrap_or(text.len())
    };
    let is_name = text[..end]
        .iter()
        .all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b'_' | b'[' | b']' | b':'));
    let rest = &text[end..];
    let rest = match rest.first() {
        Some(b':') => &rest[1 + rest[1..].iter().take_while(|byte| byte.is_ascii_digit()).count()..],
        _ => rest,
    };
    is_name && rest.first().is_none_or(|byte| ends(*byte) || *byte == b':')
}

// ---- Schemes --------------------------------------------------------------------------------------------------------

fn credentials(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut output = Output::new(text);
    let mut at = 0;
    while let Some(start) = find(bytes, at, is_word) {
        let end = find(bytes, start, |byte| !is_word(byte)).unwrap_or(bytes.len());
        at = end;
        if !SCHEMES.iter().any(|scheme| bytes[start..end].eq_ignore_ascii_case(scheme.as_bytes())) {
            continue;
        }
        let Some(credential) = find(bytes, end, |byte| !is_blank(byte)).filter(|credential| *credential > end) else {
            continue;
        };
        let credential_end = find(bytes, credential, ends_word).unwrap_or(bytes.len());
        if !looks_like_credential(&text[credential..credential_end]) {
            continue;
        }
        let list =
            bytes[start..end].eq_ignore_ascii_case(b"digest") && bytes[credential..credential_end].contains(&b'=');
        at = if list { line_end(bytes, credential) } else { credential_end };
        output.replace(credential, at, REDACTED);
    }
    output.finish()
}

fn looks_like_credential(word: &str) -> bool {
    word.bytes().any(|byte| byte.is_ascii_digit() || byte == b'=') || word.chars().count() >= 16
}

// ---- Known secrets --------------------------------------------------------------------------------------------------

fn known(text: &str, secrets: &[&str]) -> String {
    let mut values: Vec<String> = secrets.iter().flat_map(|secret| with_password(secret)).collect();
    values.retain(|value| value.len() >= KNOWN_MIN);
    values.sort_unstable_by(|a, b| b.len().cmp(&a.len()).then_with(|| a.cmp(b)));
    values.dedup();
    let mut text = text.to_owned();
    for form in values.iter().flat_map(|value| base64_forms(value)) {
        if text.contains(&form) {
            text = text.replace(&form, REDACTED);
        }
    }
    for value in &values {
        text = without(&text, value.as_bytes());
    }
    text
}

/// The secret; of a URL also its password, as written and decoded.
fn with_password(secret: &str) -> Vec<String> {
    let mut all = vec![secret.to_owned()];
    let bytes = secret.as_bytes();
    let start = secret.find("://").map(|colon| colon + 3);
    if let Some(start) = start
        && let Authority::UserInfo(end) = authority(bytes, start)
        && let Some((_, password)) = secret[start..end].split_once(':')
    {
        all.push(password.to_owned());
        all.extend(percent_encoding::percent_decode_str(password).decode_utf8().ok().map(Into::into));
    }
    all
}

/// The base64 of `value`, and what is sure to stand in the base64 of any text that contains it.
fn base64_forms(value: &str) -> Vec<String> {
    let mut forms = vec![STANDARD.encode(value), URL_SAFE.encode(value)];
    for shift in 0..3 {
        let mut padded = vec![0_u8; shift];
        padded.extend_from_slice(value.as_bytes());
        // Characters that share bits with what stands before or behind are not sure.
        let from = (shift * 8).div_ceil(6);
        let to = padded.len() * 8 / 6;
        for encoded in [STANDARD.encode(&padded), URL_SAFE.encode(&padded)] {
            forms.push(encoded[from..to].to_owned());
        }
    }
    forms.retain(|form| form.len() >= KNOWN_MIN);
    forms.sort_unstable_by(|a, b| b.len().cmp(&a.len()).then_with(|| a.cmp(b)));
    forms.dedup();
    forms
}

/// The text without `secret`, each byte of which may stand plain, percent-encoded, or behind a backslash.
fn without(text: &str, secret: &[u8]) -> String {
    let bytes = text.as_bytes();
    let mut output = Output::new(text);
    let mut at = 0;
    while at < bytes.len() {
        match match_encoded(&bytes[at..], secret) {
            Some(length) => {
                output.replace(at, at + length, REDACTED);
                at += length;
            }
            None => at += 1,
        }
    }
    output.finish()
}

fn match_encoded(text: &[u8], secret: &[u8]) -> Option<usize> {
    let mut at = 0;
    for byte in secret {
        let rest = &text[at.min(text.len())..];
        at += match rest {
            [b'%', high, low, ..] if hex(*high, *low) == Some(*byte) => 3,
            [b'\\', b'n', ..] if *byte == b'\n' => 2,
            [b'\\', b'r', ..] if *byte == b'\r' => 2,
            [b'\\', b't', ..] if *byte == b'\t' => 2,
            [b'\\', escaped, ..] if escaped == byte && matches!(byte, b'\\' | b'"' | b'\'' | b'/') => 2,
            [plain, ..] if plain == byte || (*plain == b'+' && *byte == b' ') => 1,
            _ => return None,
        };
    }
    Some(at)
}

fn hex(high: u8, low: u8) -> Option<u8> {
    let high = char::from(high).to_digit(16)?;
    let low = char::from(low).to_digit(16)?;
    u8::try_from(high * 16 + low).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(serde::Deserialize)]
    #[serde(rename_all = "camelCase", deny_unknown_fields)]
    struct Corpus {
        #[serde(rename = "comment")]
        _comment: Vec<String>,
        max_length: usize,
        truncation_marker: String,
        cases: Vec<Case>,
    }

    #[derive(serde::Deserialize)]
    #[serde(rename_all = "camelCase", deny_unknown_fields)]
    struct Case {
        name: String,
        #[serde(default, rename = "comment")]
        _comment: String,
        input: String,
        expected: Option<String>,
        #[serde(default)]
        must_not_contain: Vec<String>,
        #[serde(default)]
        must_contain: Vec<String>,
    }

    fn corpus() -> Corpus {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../clients/redaction-corpus.json");
        serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
    }

    #[test]
    fn redaction_corpus() {
        let corpus = corpus();
        assert_eq!(corpus.max_length, MAX_CHARS);
        assert_eq!(corpus.truncation_marker, TRUNCATION_MARKER);
        assert!(corpus.cases.len() >= 45);
        let mut failures = Vec::new();
        for case in &corpus.cases {
            let input = &case.input;
            let output = redact(input);
            let fails = case.expected.as_ref().is_some_and(|expected| *expected != output)
                || case.must_not_contain.iter().any(|text| output.contains(text))
                || case.must_contain.iter().any(|text| !output.contains(text))
                || (case.expected.is_none() && case.must_not_contain.is_empty() && case.must_contain.is_empty())
                || output.chars().count() > MAX_CHARS;
            if fails {
                failures.push(format!(
                    "{}\n  input:    {:.300}\n  expected: {:?}\n  output:   {output:?}",
                    case.name, input, case.expected
                ));
            } else if redact(&output) != output {
                failures.push(format!(
                    "{}: not stable\n  once:  {output:?}\n  twice: {:?}",
                    case.name,
                    redact(&output)
                ));
            }
        }
        assert!(failures.is_empty(), "{} of {}\n{}", failures.len(), corpus.cases.len(), failures.join("\n"));
    }

    #[test]
    fn corpus_names_are_unique() {
        let mut names: Vec<String> = corpus().cases.into_iter().map(|case| case.name).collect();
        let count = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), count);
    }

    /// A search that began anew at each of these would not end within the patience of a test run.
    #[test]
    fn long_and_hostile_texts_take_linear_time() {
        for piece in [
            "x",
            "amqp://a:",
            "amqp://a:b@",
            "password='",
            "password=\"\\\\",
            "token=[",
            "token={",
            "secret:",
            "=",
            ":",
            " ",
            "\\",
            "@",
            "Basic ",
            "Digest a=",
            "https://h?token=",
            "password=\n",
            "a:/",
            "password \t",
            "🐘",
            "p'assword=\n\"",
        ] {
            let text = piece.repeat(200_000 / piece.len());
            let redacted = redact(&text);
            assert!(redacted.chars().count() <= MAX_CHARS, "{piece}");
        }
        let text = "a".repeat(200_000);
        assert_eq!(redact_with(&text, &["aaaaaaaaab"]).chars().count(), MAX_CHARS);
    }

    #[test]
    fn known_secrets_go_in_every_form() {
        let secret = "canary-7731 +/\"\\é";
        let percent = percent_encoding::utf8_percent_encode(secret, percent_encoding::NON_ALPHANUMERIC).to_string();
        for text in [
            format!("host db: wrong {secret} for user"),
            format!("host db: wrong {percent} for user"),
            format!("host db: wrong {} for user", percent.to_lowercase()),
            format!("host db: wrong {} for user", secret.replace(' ', "+")),
            format!("host db: wrong {secret:?} for user"),
            format!("host db: wrong {} for user", serde_json::to_string(secret).unwrap()),
            format!("host db: wrong {} for user", STANDARD.encode(secret)),
            format!("host db: wrong {} for user", STANDARD.encode(format!("u:{secret}"))),
            format!("host db: wrong {} for user", STANDARD.encode(format!("us:{secret}!"))),
            format!("host db: wrong {} for user", URL_SAFE.encode(format!("usr:{secret}?"))),
        ] {
            let redacted = redact_with(&text, &[secret]);
            assert!(redacted.contains("host db: wrong "), "{redacted}");
            assert!(redacted.contains(" for user"), "{redacted}");
            assert!(redacted.contains(REDACTED), "{redacted}");
            assert!(!redacted.contains("7731") && !redacted.contains("Nzcz"), "{redacted}");
        }
    }

    #[test]
    fn the_password_of_a_secret_url_is_a_secret_too() {
        let url = "postgres://shop:p%40ss-canary@db/shop";
        for text in [
            "bad word p%40ss-canary here",
            "bad word p@ss-canary here",
            "cannot parse postgres://shop:p%40ss-canary@db/shop",
        ] {
            let redacted = redact_with(text, &[url]);
            assert!(!redacted.contains("canary"), "{redacted}");
        }
    }

    #[test]
    fn short_and_overlapping_secrets_do_no_harm() {
        assert_eq!(redact_with("a bad day", &["a", ""]), "a bad day");
        assert_eq!(redact_with("abcdefgh", &["abcd", "abcdefgh"]), REDACTED);
    }

    #[derive(Debug, thiserror::Error)]
    #[error("level {0}")]
    struct Level(u32, #[source] Option<Box<Level>>);

    #[test]
    fn an_error_is_written_with_its_causes() {
        let mut error = Level(9, None);
        for level in (0..9).rev() {
            error = Level(level, Some(Box::new(error)));
        }
        assert_eq!(
            describe_error(&error),
            "level 0 (Level); caused by: level 1 (Level); caused by: level 2 (Level); caused by: level 3 (Level); \
             caused by: level 4 (Level)"
        );
        let io = std::io::Error::other("cannot open amqp://u:canary@host");
        assert_eq!(redact_error(&io), "cannot open amqp://***@host (Custom)");
    }

    #[test]
    fn what_cannot_be_said_twice_is_said_once() {
        #[derive(Debug, thiserror::Error)]
        #[error("cannot connect: {0}")]
        struct Wrapped(#[source] Level);
        assert_eq!(describe_error(&Wrapped(Level(1, None))), "cannot connect: level 1 (Wrapped)");
    }

    proptest::proptest! {
        #[test]
        fn redacting_twice_changes_nothing(
            parts in proptest::collection::vec(
                "(password|x-token|note)( = |=|: |:)[a-zA-Z0-9\\[\"'\\\\,;]{0,12}|https?://[a-z]{1,4}(:[a-z@/0-9]{1,6})?@?[a-z]{1,5}(/[a-z@]{1,4})?|Bearer [a-z0-9=]{1,18}|Digest [a-z]=[a-z\",]{1,9}|[a-z ,;@]{1,10}",
                0..6,
            )
        ) {
            let once = redact(&parts.join(" "));
            proptest::prop_assert_eq!(redact(&once), once);
        }

        #[test]
        fn any_text_is_accepted(text: String, secret: String) {
            redact_with(&text, &[&secret]);
        }

        #[test]
        fn a_value_never_survives(
            front in "[a-z ]{0,10}",
            name in "(password|X-Api-Key|db_passwd|client-secret|accessToken)",
            separator in "( = |=|: |:|=> )",
            value in "[A-Z0-9!%/+]{6,20}",
        ) {
            let output = redact(&format!("{front} {name}{separator}{value}"));
            proptest::prop_assert!(!output.contains(&value), "{}", output);
        }
    }
}

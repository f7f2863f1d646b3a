//! Address and key templates: `{{ topic }}`, `{{ payload.a.b }}` and the like (contract 7.3).
//!
//! A [`Template`] is checked once, when its manifest is checked, and rendered for each message. It reads the payload only if
//! a placeholder asks for it ([`Template::needs_payload`]), and then only the members on the way to that value, so that
//! numbers keep their digits and large payloads are never built up in memory.

use std::fmt;

use serde::{
    Deserializer,
    de::{DeserializeSeed, IgnoredAny, MapAccess, Visitor},
};
use serde_json::value::RawValue;

use crate::ports::destination::Delivery;

/// A placeholder of a template.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Placeholder {
    /// `{{ topic }}`.
    Topic,
    /// `{{ key }}`.
    Key,
    /// `{{ aggregateType }}`.
    AggregateType,
    /// `{{ payload.a.b }}` or `{{ data.a.b }}`: the names on the way to the value, at least one.
    Payload(Vec<String>),
    /// `{{ source }}`: the name of the Source.
    Source,
    /// `{{ eventType }}`.
    EventType,
}

impl Placeholder {
    fn parse(name: &str) -> Option<Self> {
        Some(match name {
            "topic" => Self::Topic,
            "key" => Self::Key,
            "aggregateType" => Self::AggregateType,
            "source" => Self::Source,
            "eventType" => Self::EventType,
            _ => {
                let path = name.strip_prefix("payload.").or_else(|| name.strip_prefix("data."))?;
                let names: Vec<String> = path.split('.').map(str::to_owned).collect();
                if names.iter().any(String::is_empty) {
                    return None;
                }
                Self::Payload(names)
            }
        })
    }
}

/// Where a template stands, and so which placeholders it knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Vocabulary {
    /// `exchange`, Kafka `topic`, `subject`: topic, key, aggregate type, payload. An unknown placeholder is an error.
    Address,
    /// `routingKey`: as an address, but an unknown placeholder is a missing one.
    RoutingKey,
    /// Kafka `keyTemplate`: key and topic.
    RecordKey,
    /// A Source's `topic`: source and event type.
    SourceTopic,
}

impl Vocabulary {
    fn knows(self, placeholder: &Placeholder) -> bool {
        match self {
            Self::Address | Self::RoutingKey => !matches!(placeholder, Placeholder::Source | Placeholder::EventType),
            Self::RecordKey => matches!(placeholder, Placeholder::Key | Placeholder::Topic),
            Self::SourceTopic => matches!(placeholder, Placeholder::Source | Placeholder::EventType),
        }
    }

    /// The placeholders, for error texts.
    fn known(self) -> &'static str {
        match self {
            Self::Address | Self::RoutingKey => "topic, key, aggregateType and payload.<name>",
            Self::RecordKey => "key and topic",
            Self::SourceTopic => "source and eventType",
        }
    }
}

/// Why a template is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TemplateError {
    /// A placeholder that this template cannot know.
    #[error("unknown placeholder \"{{{{ {name} }}}}\"; known here: {known}")]
    Unknown {
        /// As written, trimmed.
        name: String,
        /// The placeholders that are known.
        known: &'static str,
    },
    /// `{{` without `}}`.
    #[error("\"{{{{\" at character {0} is never closed by \"}}}}\"")]
    Unclosed(usize),
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Part {
    Literal(String),
    Value(Placeholder),
    /// Routing keys only: becomes the default.
    Missing,
}

/// What a template is rendered from. Unused fields may stay at their default.
#[derive(Debug, Clone, Copy, Default)]
pub struct TemplateContext<'a> {
    /// The row's topic.
    pub topic: &'a str,
    /// The row's key.
    pub key: Option<&'a str>,
    /// The row's aggregate type.
    pub aggregate_type: Option<&'a str>,
    /// The payload after the transforms, JSON text. Text that is no JSON has no members.
    pub payload: &'a [u8],
    /// Name of the Source.
    pub source: &'a str,
    /// Event type of the received message.
    pub event_type: Option<&'a str>,
}

impl<'a> From<&'a Delivery> for TemplateContext<'a> {
    fn from(delivery: &'a Delivery) -> Self {
        Self {
            topic: &delivery.topic,
            key: delivery.key.as_deref(),
            aggregate_type: delivery.aggregate_type.as_deref(),
            payload: &delivery.payload,
            ..Self::default()
        }
    }
}

/// A checked template.
#[derive(Clone, PartialEq, Eq)]
pub struct Template {
    text: String,
    parts: Vec<Part>,
    /// What a placeholder without a value becomes.
    missing: String,
}

impl Template {
    /// Checks and compiles `text`. Inner blanks of a placeholder are optional.
    pub fn parse(text: &str, vocabulary: Vocabulary) -> Result<Self, TemplateError> {
        let mut parts = Vec::new();
        let mut rest = text;
        while let Some(open) = rest.find("{{") {
            if open > 0 {
                parts.push(Part::Literal(rest[..open].to_owned()));
            }
            let inner = &rest[open + 2..];
            let Some(close) = inner.find("}}") else {
                let before = text.len() - rest.len() + open;
                return Err(TemplateError::Unclosed(text[..before].chars().count() + 1));
            };
            parts.push(placeholder(inner[..close].trim(), vocabulary)?);
            rest = &inner[close + 2..];
        }
        if !rest.is_empty() {
            parts.push(Part::Literal(rest.to_owned()));
        }
        Ok(Self { text: text.to_owned(), parts, missing: String::new() })
    }

    /// The same template with another text for placeholders without a value (`routingKeyMissingFieldDefault`).
    #[must_use]
    pub fn with_default(mut self, missing: impl Into<String>) -> Self {
        self.missing = missing.into();
        self
    }

    /// The template as written.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// The placeholders, in order.
    pub fn placeholders(&self) -> impl Iterator<Item = &Placeholder> {
        self.parts.iter().filter_map(|part| match part {
            Part::Value(placeholder) => Some(placeholder),
            Part::Literal(_) | Part::Missing => None,
        })
    }

    /// Rendering reads the payload. Where this is false an empty payload will do.
    pub fn needs_payload(&self) -> bool {
        self.placeholders().any(|placeholder| matches!(placeholder, Placeholder::Payload(_)))
    }

    /// Rendering reads the event type.
    pub fn needs_event_type(&self) -> bool {
        self.placeholders().any(|placeholder| *placeholder == Placeholder::EventType)
    }

    /// Fills in the placeholders. Strings go in as they are, numbers with their digits, objects and arrays as compact JSON
    /// text; null and what is not there become the default.
    pub fn render(&self, context: &TemplateContext<'_>) -> String {
        let mut out = String::with_capacity(self.text.len());
        for part in &self.parts {
            let value = match part {
                Part::Literal(literal) => {
                    out.push_str(literal);
                    continue;
                }
                Part::Missing => None,
                Part::Value(Placeholder::Topic) => Some(context.topic),
                Part::Value(Placeholder::Key) => context.key,
                Part::Value(Placeholder::AggregateType) => context.aggregate_type,
                Part::Value(Placeholder::Source) => Some(context.source),
                Part::Value(Placeholder::EventType) => context.event_type,
                Part::Value(Placeholder::Payload(path)) => {
                    out.push_str(member_text(context.payload, path).as_deref().unwrap_or(&self.missing));
                    continue;
                }
            };
            out.push_str(value.unwrap_or(&self.missing));
        }
        out
    }
}

fn placeholder(name: &str, vocabulary: Vocabulary) -> Result<Part, TemplateError> {
    match Placeholder::parse(name) {
        Some(known) if vocabulary.knows(&known) => Ok(Part::Value(known)),
        _ if vocabulary == Vocabulary::RoutingKey => Ok(Part::Missing),
        _ => Err(TemplateError::Unknown { name: name.to_owned(), known: vocabulary.known() }),
    }
}

impl fmt::Debug for Template {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.text)
    }
}

impl fmt::Display for Template {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// A column of the outbox row, for `exchangeFrom`, `topicFrom` and `subjectFrom`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Column {
    /// `aggregate_type`.
    AggregateType,
    /// `topic`.
    Topic,
    /// `key`.
    Key,
}

/// Where a broker destination sends: a column as it is, or a template.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    /// `…From`.
    Column(Column),
    /// A template of [`Vocabulary::Address`].
    Template(Template),
}

impl Address {
    /// The address of one message. `None` when it is empty, which fails the attempt.
    pub fn render(&self, context: &TemplateContext<'_>) -> Option<String> {
        let address = match self {
            Self::Column(Column::AggregateType) => context.aggregate_type.unwrap_or_default().to_owned(),
            Self::Column(Column::Topic) => context.topic.to_owned(),
            Self::Column(Column::Key) => context.key.unwrap_or_default().to_owned(),
            Self::Template(template) => template.render(context),
        };
        Some(address).filter(|address| !address.is_empty())
    }
}

/// The text of the member at `path`, if there is one that is not null.
fn member_text(payload: &[u8], path: &[String]) -> Option<String> {
    let mut value: &RawValue = serde_json::from_slice(payload).ok()?;
    for name in path {
        value = Member(name).deserialize(&mut serde_json::Deserializer::from_str(value.get())).ok()??;
    }
    let text = value.get();
    match text.as_bytes().first()? {
        b'n' => None,
        b'"' => serde_json::from_str(text).ok(),
        // Databases differ in the blanks they put into JSON text; a key must not.
        b'{' | b'[' => serde_json::from_str::<serde_json::Value>(text).ok().map(|value| value.to_string()),
        _ => Some(text.to_owned()),
    }
}

/// Finds one member of an object and skips the rest. Of repeated names the last counts.
struct Member<'n>(&'n str);

impl<'de> DeserializeSeed<'de> for Member<'_> {
    type Value = Option<&'de RawValue>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Member<'_> {
    type Value = Option<&'de RawValue>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Self::Value, A::Error> {
        let mut found = None;
        while let Some(is_wanted) = members.next_key_seed(Is(self.0))? {
            if is_wanted {
                found = Some(members.next_value()?);
            } else {
                members.next_value::<IgnoredAny>()?;
            }
        }
        Ok(found)
    }
}

/// Compares a name without keeping it.
struct Is<'n>(&'n str);

impl<'de> DeserializeSeed<'de> for Is<'_> {
    type Value = bool;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<bool, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for Is<'_> {
    type Value = bool;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a name")
    }

    fn visit_str<E>(self, name: &str) -> Result<bool, E> {
        Ok(name == self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAYLOAD: &str = r#"{"a": {"b": "x", "n": 12345678901234567890.10, "list": [1, {"k" : 2.50}], "t": true, "none": null},
        "naïve": "ü", "e\u0073c": "q", "twice": 1, "twice": 2}"#;

    fn context() -> TemplateContext<'static> {
        TemplateContext {
            topic: "order.created",
            key: Some("k1"),
            aggregate_type: None,
            payload: PAYLOAD.as_bytes(),
            source: "stripe",
            event_type: Some("charge"),
        }
    }

    fn render(text: &str, vocabulary: Vocabulary) -> String {
        Template::parse(text, vocabulary).unwrap().render(&context())
    }

    #[test]
    fn placeholders_become_values() {
        let cases = [
            ("orders", "orders"),
            ("{{ topic }}", "order.created"),
            ("{{topic}}/{{  key  }}", "order.created/k1"),
            ("[{{ aggregateType }}]", "[]"),
            ("{{ payload.a.b }}", "x"),
            ("{{ data.a.b }}", "x"),
            ("{{ payload.a.n }}", "12345678901234567890.10"),
            ("{{ payload.a.list }}", r#"[1,{"k":2.50}]"#),
            ("{{ payload.a.t }}", "true"),
            ("[{{ payload.a.none }}]", "[]"),
            ("[{{ payload.a.b.c }}]", "[]"),
            ("[{{ payload.nothing }}]", "[]"),
            ("{{ payload.naïve }}", "ü"),
            ("{{ payload.esc }}", "q"),
            ("{{ payload.twice }}", "2"),
            ("{ topic }", "{ topic }"),
            ("a}}b", "a}}b"),
            ("", ""),
        ];
        for (text, expected) in cases {
            assert_eq!(render(text, Vocabulary::Address), expected, "{text}");
        }
        assert_eq!(render("{{ source }}.{{ eventType }}", Vocabulary::SourceTopic), "stripe.charge");
        assert_eq!(render("{{ key }}-{{ topic }}", Vocabulary::RecordKey), "k1-order.created");
    }

    #[test]
    fn an_unknown_placeholder_is_an_error_but_in_a_routing_key() {
        for (text, vocabulary) in [
            ("{{ tpoic }}", Vocabulary::Address),
            ("{{ payload }}", Vocabulary::Address),
            ("{{ payload.a..b }}", Vocabulary::Address),
            ("{{ }}", Vocabulary::Address),
            ("{{ eventType }}", Vocabulary::Address),
            ("{{ payload.a }}", Vocabulary::RecordKey),
            ("{{ topic }}", Vocabulary::SourceTopic),
        ] {
            let error = Template::parse(text, vocabulary).unwrap_err();
            assert!(matches!(error, TemplateError::Unknown { .. }), "{text}: {error}");
        }
        let error = Template::parse("{{ tpoic }}", Vocabulary::Address).unwrap_err().to_string();
        assert_eq!(
            error,
            "unknown placeholder \"{{ tpoic }}\"; known here: topic, key, aggregateType and payload.<name>"
        );
        let key = Template::parse("{{ tpoic }}.{{ payload.x }}.{{ aggregateType }}.{{ key }}", Vocabulary::RoutingKey);
        assert_eq!(key.unwrap().with_default("none").render(&context()), "none.none.none.k1");
    }

    #[test]
    fn an_open_placeholder_is_an_error_that_says_where() {
        let error = Template::parse("é{{ topic", Vocabulary::RoutingKey).unwrap_err();
        assert_eq!(error.to_string(), "\"{{\" at character 2 is never closed by \"}}\"");
    }

    #[test]
    fn a_template_knows_what_it_reads() {
        let parse = |text| Template::parse(text, Vocabulary::Address).unwrap();
        assert!(!parse("{{ topic }}").needs_payload());
        assert!(parse("{{ topic }}{{ data.x }}").needs_payload());
        assert!(Template::parse("{{ eventType }}", Vocabulary::SourceTopic).unwrap().needs_event_type());
    }

    #[test]
    fn a_payload_that_is_no_object_has_no_members() {
        let template = Template::parse("<{{ payload.a }}>", Vocabulary::Address).unwrap();
        for payload in ["", "[1]", "7", "\"a\"", "{\"a\":", "{\"a\":1} x"] {
            assert_eq!(
                template.render(&TemplateContext { payload: payload.as_bytes(), ..context() }),
                "<>",
                "{payload}"
            );
        }
    }

    #[test]
    fn an_empty_address_is_none() {
        let address = Address::Template(Template::parse("{{ payload.nothing }}", Vocabulary::Address).unwrap());
        assert_eq!(address.render(&context()), None);
        assert_eq!(Address::Column(Column::AggregateType).render(&context()), None);
        assert_eq!(Address::Column(Column::Key).render(&context()).as_deref(), Some("k1"));
        assert_eq!(Address::Column(Column::Topic).render(&context()).as_deref(), Some("order.created"));
    }

    proptest::proptest! {
        #[test]
        fn no_text_breaks_the_parser(text in "[a-z{} .é]{0,40}") {
            if let Ok(template) = Template::parse(&text, Vocabulary::RoutingKey) {
                template.render(&context());
            }
        }

        #[test]
        fn text_without_placeholders_stays(text in "[^{]{0,40}") {
            proptest::prop_assert_eq!(render(&text, Vocabulary::Address), text);
        }
    }
}

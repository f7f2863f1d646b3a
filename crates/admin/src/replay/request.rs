//! What is asked, read from named fields: a JSON body, the parameters of a page, or the flags of a command.

use queuebox_api::names::nearest;
use queuebox_core::{
    Uuid,
    message::{Consumption, DeadCode, State},
    pattern::Pattern,
    ports::Scope,
};
use serde_json::{Map, Value};

use super::{Cursor, RequestError};

/// What is done with the rows that match.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verb {
    /// Finished rows become `pending`.
    Replay,
    /// Dead rows are deleted.
    Discard,
    /// Rows of any state are shown.
    List,
}

impl Verb {
    pub(super) fn noun(self) -> &'static str {
        match self {
            Self::Replay => "replay",
            Self::Discard => "discard",
            Self::List => "list",
        }
    }
}

/// Which rows are meant: all conditions hold (contract 11, rules 2 and 3). Empty lists are no condition.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Filter {
    /// One of these; empty = `dead`. States that the verb never touches are left out here.
    pub states: Vec<State>,
    /// One of these ids. For replay and discard the id of an expanded parent stands for its children.
    pub ids: Vec<Uuid>,
    /// Outbox: the whole topic, patterns allowed.
    pub topic: Option<Pattern>,
    /// Outbox: any of these.
    pub topics: Vec<Pattern>,
    /// Outbox: where the row goes.
    pub destination: Option<String>,
    /// Outbox: `key`. Inbox: `aggregateId`.
    pub key: Option<String>,
    /// Inbox.
    pub source: Option<String>,
    /// Inbox: any of these.
    pub sources: Vec<String>,
    /// Inbox.
    pub event_type: Option<String>,
    /// Inbox.
    pub consumption: Option<Consumption>,
    /// Why it is dead.
    pub code: Option<DeadCode>,
    /// Later than this, in microseconds since 1970.
    pub created_after_us: Option<i64>,
    /// Earlier than this, in microseconds since 1970.
    pub created_before_us: Option<i64>,
}

impl Filter {
    /// There is a condition besides the state.
    pub fn is_given(&self) -> bool {
        Self { states: Vec::new(), ..self.clone() } != Self::default()
    }
}

/// A whole request.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Request {
    /// Which rows.
    pub filter: Filter,
    /// At most so many, oldest first; of a page its length.
    pub limit: Option<u64>,
    /// Only counts.
    pub dry_run: bool,
    /// Replay of the inbox: also rows that hold a body which was never accepted (contract 11, rule 7).
    pub include_rejected: bool,
    /// Page: go on here.
    pub cursor: Option<Cursor>,
    /// The fields as given, for the log.
    pub(super) given: String,
}

const OUTBOX_FILTERS: [&str; 9] =
    ["state", "ids", "topic", "topics", "destination", "key", "code", "createdAfter", "createdBefore"];
const INBOX_FILTERS: [&str; 10] = [
    "state",
    "ids",
    "source",
    "sources",
    "eventType",
    "aggregateId",
    "consumption",
    "code",
    "createdAfter",
    "createdBefore",
];

impl Request {
    /// Names that [`Request::parse`] knows.
    pub fn fields(table: Scope, verb: Verb) -> Vec<&'static str> {
        let filters: &[&str] = if table == Scope::Outbox { &OUTBOX_FILTERS } else { &INBOX_FILTERS };
        let more: &[&str] = match (verb, table) {
            (Verb::List, _) => &["limit", "cursor"],
            (Verb::Replay, Scope::Inbox) => &["limit", "dryRun", "includeRejected"],
            _ => &["limit", "dryRun"],
        };
        [filters, more].concat()
    }

    /// Reads a request. Null is the same as an absent field.
    ///
    /// # Errors
    /// [`RequestError::Invalid`] with the name of the field, for an unknown one with the nearest known one. That there is a
    /// filter at all is checked when the request is carried out.
    pub fn parse(table: Scope, verb: Verb, fields: &Map<String, Value>) -> Result<Self, RequestError> {
        let known = Self::fields(table, verb);
        let mut request = Self { given: Value::Object(fields.clone()).to_string(), ..Self::default() };
        for (name, value) in fields {
            if !known.contains(&name.as_str()) {
                return Err(RequestError::Invalid(unknown_field(name, &known)));
            }
            if !value.is_null() {
                request
                    .set(table, verb, name, value)
                    .map_err(|problem| RequestError::Invalid(format!("{name}: {problem}")))?;
            }
        }
        Ok(request)
    }

    fn set(&mut self, table: Scope, verb: Verb, name: &str, value: &Value) -> Result<(), String> {
        let filter = &mut self.filter;
        match name {
            "state" => filter.states = states(table, verb, value)?,
            "ids" => filter.ids = list(value, id)?,
            "topic" => filter.topic = Some(pattern(text(value)?)?),
            "topics" => filter.topics = list(value, pattern)?,
            "destination" => filter.destination = Some(text(value)?.to_owned()),
            "key" | "aggregateId" => filter.key = Some(text(value)?.to_owned()),
            "source" => filter.source = Some(text(value)?.to_owned()),
            "sources" => filter.sources = list(value, |source| Ok(source.to_owned()))?,
            "eventType" => filter.event_type = Some(text(value)?.to_owned()),
            "consumption" => filter.consumption = Some(consumption(text(value)?)?),
            "code" => filter.code = Some(code(text(value)?)?),
            "createdAfter" => filter.created_after_us = Some(time_us(text(value)?)?),
            "createdBefore" => filter.created_before_us = Some(time_us(text(value)?)?),
            "limit" => self.limit = Some(limit(verb, value)?),
            "dryRun" => self.dry_run = yes_or_no(value)?,
            "includeRejected" => self.include_rejected = yes_or_no(value)?,
            "cursor" => {
                let cursor = Cursor::parse(table, text(value)?);
                self.cursor = Some(cursor.ok_or("is none of this table; take it from `next` of a page")?);
            }
            _ => return Err("is not known".to_owned()),
        }
        Ok(())
    }

    /// The states that are really asked for.
    pub(super) fn states(&self) -> Vec<State> {
        if self.filter.states.is_empty() { vec![State::Dead] } else { self.filter.states.clone() }
    }
}

/// What to say of a field that is not known.
pub(crate) fn unknown_field(name: &str, known: &[&str]) -> String {
    match nearest(name, known.iter().copied()) {
        Some(near) => format!("unknown field {name:?}; did you mean {near:?}?"),
        None => format!("unknown field {name:?}; known are {}", known.join(", ")),
    }
}

fn text(value: &Value) -> Result<&str, String> {
    match value {
        Value::String(text) if !text.is_empty() => Ok(text),
        Value::String(_) => Err("is empty; leave it out instead".to_owned()),
        _ => Err("is no text".to_owned()),
    }
}

/// A list of texts. An empty one is refused: it could mean no row as well as every row.
fn list<T>(value: &Value, each: impl Fn(&str) -> Result<T, String>) -> Result<Vec<T>, String> {
    match value {
        Value::Array(items) if !items.is_empty() => items.iter().map(|item| each(text(item)?)).collect(),
        Value::Array(_) => Err("is empty; leave it out instead".to_owned()),
        _ => Err("is no list".to_owned()),
    }
}

/// One state or several. Those that the verb never touches may be named; they are left out.
fn states(table: Scope, verb: Verb, value: &Value) -> Result<Vec<State>, String> {
    let finished = if table == Scope::Outbox { State::Sent } else { State::Processed };
    let words = ["pending", "processing", finished.as_str(), "dead"];
    let state = |word: &str| {
        let known = State::parse(word).filter(|_| words.contains(&word));
        known.ok_or_else(|| format!("{word:?} is none of {}", words.join(", ")))
    };
    let mut named = match value {
        Value::String(word) => vec![state(word)?],
        several => list(several, state)?,
    };
    let touched: &[State] = match verb {
        Verb::List => return Ok(named),
        Verb::Replay => &[finished, State::Dead],
        Verb::Discard => &[State::Dead],
    };
    if verb == Verb::Discard && named.iter().any(|state| !touched.contains(state)) {
        return Err("only dead rows can be discarded".to_owned());
    }
    named.retain(|state| touched.contains(state));
    if named.is_empty() {
        return Err(format!("pending and processing rows are never moved; name dead or {}", finished.as_str()));
    }
    Ok(named)
}

fn id(text: &str) -> Result<Uuid, String> {
    Uuid::parse_str(text).map_err(|_| format!("{text:?} is no UUID"))
}

fn pattern(text: &str) -> Result<Pattern, String> {
    Pattern::parse(text).map_err(|error| format!("{text:?}: {error}"))
}

fn consumption(word: &str) -> Result<Consumption, String> {
    match word {
        "push" => Ok(Consumption::Push),
        "pull" => Ok(Consumption::Pull),
        _ => Err(format!("{word:?} is none of push, pull")),
    }
}

fn code(word: &str) -> Result<DeadCode, String> {
    let known = DeadCode::ALL.map(DeadCode::as_str);
    DeadCode::ALL.into_iter().find(|code| code.as_str() == word).ok_or_else(|| match nearest(word, known) {
        Some(near) => format!("{word:?} is no code; did you mean {near:?}?"),
        None => format!("{word:?} is none of {}", known.join(", ")),
    })
}

fn time_us(text: &str) -> Result<i64, String> {
    let time: jiff::Timestamp = text
        .parse()
        .map_err(|_| format!("{text:?} is no time in ISO 8601 with its offset, such as 2026-01-31T08:00:00Z"))?;
    Ok(time.as_microsecond())
}

fn limit(verb: Verb, value: &Value) -> Result<u64, String> {
    let max = if verb == Verb::List { 1_000 } else { u64::MAX };
    let limit = value.as_u64().filter(|limit| (1..=max).contains(limit));
    limit.ok_or_else(|| match verb {
        Verb::List => "is no whole number from 1 to 1000".to_owned(),
        _ => "is no whole number above 0".to_owned(),
    })
}

fn yes_or_no(value: &Value) -> Result<bool, String> {
    value.as_bool().ok_or_else(|| "is neither true nor false".to_owned())
}

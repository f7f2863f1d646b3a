//! Which rows a filter means: one part is asked of the database, the whole is checked again on what it returns, since patterns,
//! routes and exact spelling (some databases compare without regard to case) are beyond it.

use queuebox_api::checked::Route;
use queuebox_core::{
    message::{DeadCode, State},
    pattern::Pattern,
    ports::ledger::{LedgerFilter, LedgerRow},
};

use super::Filter;

/// A filter with the routes that its `destination` is judged by.
#[derive(Clone, Copy)]
pub(super) struct Matcher<'a> {
    pub filter: &'a Filter,
    pub routes: &'a [Route],
}

impl Matcher<'_> {
    /// What the database can judge. Never narrower than the filter.
    pub fn in_database(&self, states: Vec<State>) -> LedgerFilter {
        let filter = self.filter;
        let literal = |pattern: &Pattern| (!pattern.as_str().contains('*')).then(|| pattern.as_str().to_owned());
        let topics = match filter.topic.as_ref().and_then(literal) {
            Some(topic) => vec![topic],
            // One pattern among them can only be judged here; an empty list asks for every topic.
            None => filter.topics.iter().map(literal).collect::<Option<Vec<_>>>().unwrap_or_default(),
        };
        LedgerFilter {
            states,
            ids: filter.ids.clone(),
            topics,
            key: filter.key.clone(),
            sources: filter.source.clone().map_or_else(|| filter.sources.clone(), |source| vec![source]),
            event_type: filter.event_type.clone(),
            consumption: filter.consumption,
            code: filter.code.map(|code| code.as_str().to_owned()),
            created_after_us: filter.created_after_us,
            created_before_us: filter.created_before_us,
            parent_id: None,
        }
    }

    /// The database may return rows that the filter does not mean.
    pub fn is_wider_in_database(&self) -> bool {
        let filter = self.filter;
        let is_pattern = |pattern: &Pattern| pattern.as_str().contains('*');
        filter.topic.as_ref().is_some_and(|topic| is_pattern(topic) || !filter.topics.is_empty())
            || filter.topics.iter().any(is_pattern)
            || filter.destination.is_some()
            || (filter.source.is_some() && !filter.sources.is_empty())
    }

    /// The filter means this row; the database has judged its state, times and ids.
    pub fn matches(&self, row: &LedgerRow) -> bool {
        let filter = self.filter;
        let topic = |pattern: &Pattern| row.topic.as_deref().is_some_and(|topic| pattern.matches(topic));
        let same = |wanted: &Option<String>, found: &Option<String>| wanted.is_none() || wanted == found;
        filter.topic.as_ref().is_none_or(topic)
            && (filter.topics.is_empty() || filter.topics.iter().any(topic))
            && same(&filter.key, &row.key)
            && same(&filter.source, &row.source)
            && (filter.sources.is_empty() || row.source.as_ref().is_some_and(|source| filter.sources.contains(source)))
            && same(&filter.event_type, &row.event_type)
            && filter.consumption.is_none_or(|consumption| row.consumption == Some(consumption))
            && filter.code.is_none_or(|code| code_of(row) == Some(code))
            && filter.destination.as_deref().is_none_or(|name| self.goes_to(row, name))
    }

    /// By its column, or for a row without one by the first matching route (contract 11, rule 3).
    fn goes_to(&self, row: &LedgerRow, destination: &str) -> bool {
        match (&row.destination, &row.topic) {
            (Some(column), _) => column == destination,
            (None, None) => false,
            (None, Some(topic)) => self
                .routes
                .iter()
                .find(|route| route.topics.iter().any(|pattern| pattern.matches(topic)))
                .is_some_and(|route| route.destinations.iter().any(|name| name == destination)),
        }
    }
}

/// The code in front of `last_error` (contract 3.3), if there is a known one.
pub(super) fn code_of(row: &LedgerRow) -> Option<DeadCode> {
    let (word, _) = row.last_error.as_deref()?.split_once(':')?;
    DeadCode::ALL.into_iter().find(|code| code.as_str() == word)
}

//! Rows as people see them: pages of rows, and one row whole (contract 12.3).

use queuebox_api::checked::Route;
use queuebox_core::{
    Fault, Uuid,
    message::{Consumption, DeadCode, State},
    ports::{
        Ledger, Scope,
        ledger::{Direction, LedgerEntry, LedgerFilter, LedgerRow},
    },
    redact::redact,
};
use queuebox_engine::transform::iso_8601;
use serde::{
    Serialize, Serializer,
    ser::{Error as _, SerializeMap as _},
};
use serde_json::{Value, value::RawValue};

use super::{
    BATCH, Cursor, Request, RequestError,
    matching::{Matcher, code_of},
};

/// Rows of a page when no limit is given.
const PAGE_DEFAULT: u64 = 100;
/// Rows that one request looks at when most of them are not meant. Behind them it answers with what it has and a cursor.
const LOOKED_AT_MAX: u64 = 20_000;

/// A row without payload and headers. Its JSON has the names of the contract's filters and times in ISO 8601.
#[derive(Debug, Clone)]
pub struct Item(pub LedgerRow);

/// A page, newest first.
#[derive(Debug, Clone, Serialize)]
pub struct Page {
    /// Rows. There may be none although more follow, when few rows match.
    pub items: Vec<Item>,
    /// Where the next page begins; `None` = there is none.
    pub next: Option<Cursor>,
}

/// A row whole.
#[derive(Debug, Clone)]
pub struct Entry {
    /// The row with payload and headers.
    pub entry: LedgerEntry,
    /// Of an expanded parent.
    pub children: Vec<Item>,
}

/// A page of rows that match.
///
/// # Errors
/// The database failed.
pub async fn list(
    ledger: &dyn Ledger,
    routes: &[Route],
    table: Scope,
    request: &Request,
) -> Result<Page, RequestError> {
    let matcher = Matcher { filter: &request.filter, routes };
    let filter = matcher.in_database(request.states());
    let limit = request.limit.unwrap_or(PAGE_DEFAULT).clamp(1, BATCH.into());
    // One more row than asked for says whether there is a next page.
    let read = if matcher.is_wider_in_database() { BATCH } else { u32::try_from(limit + 1).unwrap_or(BATCH) };
    let (mut items, mut looked_at) = (Vec::new(), 0_u64);
    let mut after = request.cursor.map(Cursor::place);
    loop {
        let rows = ledger.page(table, &filter, Direction::NewestFirst, after, read).await?;
        let is_last = rows.len() < read as usize;
        looked_at += rows.len() as u64;
        let mut rows = rows.into_iter();
        while let Some(row) = rows.next() {
            after = Some(row.cursor);
            if matcher.matches(&row) {
                items.push(Item(row));
            }
            if items.len() as u64 >= limit && !(is_last && rows.len() == 0) {
                return Ok(Page { items, next: after.map(|place| Cursor::new(table, place)) });
            }
        }
        if is_last {
            return Ok(Page { items, next: None });
        }
        if looked_at >= LOOKED_AT_MAX {
            return Ok(Page { items, next: after.map(|place| Cursor::new(table, place)) });
        }
    }
}

/// One row whole, a parent with its children. `None`: there is no such row.
///
/// # Errors
/// The database failed.
pub async fn show(ledger: &dyn Ledger, table: Scope, id: Uuid) -> Result<Option<Entry>, RequestError> {
    let Some(entry) = ledger.entry(table, id).await? else { return Ok(None) };
    let may_have_children = table == Scope::Outbox && entry.row.parent_id.is_none();
    let children = if may_have_children { children(ledger, id).await? } else { Vec::new() };
    Ok(Some(Entry { entry, children: children.into_iter().map(Item).collect() }))
}

/// Every child of a parent, oldest first. There is one for each destination of a route, so they fit in memory.
pub(super) async fn children(ledger: &dyn Ledger, parent: Uuid) -> Result<Vec<LedgerRow>, Fault> {
    let filter = LedgerFilter { parent_id: Some(parent), ..LedgerFilter::default() };
    let mut all: Vec<LedgerRow> = Vec::new();
    loop {
        let after = all.last().map(|row| row.cursor);
        let page = ledger.page(Scope::Outbox, &filter, Direction::OldestFirst, after, BATCH).await?;
        let is_last = page.len() < BATCH as usize;
        all.extend(page);
        if is_last {
            return Ok(all);
        }
    }
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct View<'a> {
    id: Uuid,
    state: State,
    #[serde(skip_serializing_if = "Option::is_none")]
    topic: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    destination: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    parent_id: Option<Uuid>,
    #[serde(skip_serializing_if = "Option::is_none")]
    sequence: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    source: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    idempotency_key: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    event_type: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    aggregate_id: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    consumption: Option<Consumption>,
    attempt: i32,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_attempts: Option<i32>,
    crashes: i32,
    #[serde(skip_serializing_if = "Option::is_none")]
    code: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    last_error: Option<String>,
    created_at: String,
    scheduled_at: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    updated_at: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    processed_at: Option<String>,
}

impl<'a> View<'a> {
    fn of(row: &'a LedgerRow) -> Self {
        // Only the inbox has a source; the two tables name their unit of order and their last time differently.
        let is_inbox = row.source.is_some();
        let finished_at = row.finished_at_us.map(iso_8601);
        let (key, aggregate_id) = if is_inbox { (None, row.key.as_deref()) } else { (row.key.as_deref(), None) };
        let (updated_at, processed_at) = if is_inbox { (None, finished_at) } else { (finished_at, None) };
        Self {
            id: row.id,
            state: row.state,
            topic: row.topic.as_deref(),
            key,
            destination: row.destination.as_deref(),
            parent_id: row.parent_id,
            sequence: row.sequence,
            source: row.source.as_deref(),
            idempotency_key: row.idempotency_key.as_deref(),
            event_type: row.event_type.as_deref(),
            aggregate_id,
            consumption: row.consumption,
            attempt: row.attempt,
            max_attempts: row.max_attempts,
            crashes: row.crashes,
            code: code_of(row).filter(|_| row.state == State::Dead).map(DeadCode::as_str),
            last_error: row.last_error.as_deref().map(redact),
            created_at: iso_8601(row.created_at_us),
            scheduled_at: iso_8601(row.scheduled_at_us),
            updated_at,
            processed_at,
        }
    }
}

impl Serialize for Item {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        View::of(&self.0).serialize(serializer)
    }
}

impl Serialize for Entry {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let row = serde_json::to_value(View::of(&self.entry.row)).map_err(S::Error::custom)?;
        let mut map = serializer.serialize_map(None)?;
        for (name, value) in row.as_object().into_iter().flatten() {
            map.serialize_entry(name, value)?;
        }
        // People come to see the payload: it is shown as stored, digit for digit. It may be no JSON on SQLite.
        match RawValue::from_string(self.entry.payload.clone()) {
            Ok(payload) => map.serialize_entry("payload", &payload)?,
            Err(_) => map.serialize_entry("payload", &self.entry.payload)?,
        }
        map.serialize_entry("headers", &shown_headers(&self.entry.headers))?;
        if !self.children.is_empty() {
            map.serialize_entry("children", &self.children)?;
        }
        map.end()
    }
}

/// Stored headers without credentials: applications put whatever they like into the outbox (contract 10.3).
fn shown_headers(text: &str) -> Value {
    let Ok(Value::Object(mut headers)) = serde_json::from_str(text) else { return redact(text).into() };
    for (name, value) in &mut headers {
        if let Value::String(content) = value {
            let is_secret = redact(&format!("{name}: x")) != format!("{name}: x");
            *content = if is_secret { "[REDACTED]".to_owned() } else { redact(content) };
        }
    }
    headers.into()
}

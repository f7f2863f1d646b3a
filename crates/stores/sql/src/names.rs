//! Table and column names: checked, always quoted, and rendered into the stores' statements (contract 2.6).
//!
//! A statement is a template. `{outbox}`, `{inbox}`, `{worker}`, `{lane}`, `{history}`, `{sequence}` are tables and the counter, with
//! the schema in front when there is one; `{schema}` is just that prefix. `{o.scheduled_at}` is a column of the outbox,
//! `{i.scheduled_at}` one of the inbox, by the names of contract 2.1 and 2.2. Other braces stay as they are. A line that ends in
//! `--if NAME` stays only when the feature `NAME` is on, one that ends in `--unless NAME` only when it is off; of
//! several such conditions all must hold.

use std::{collections::BTreeMap, fmt::Write as _};

/// Columns of the outbox, contract 2.1, in order.
pub const OUTBOX_COLUMNS: [&str; 21] = [
    "id",
    "topic",
    "key",
    "payload",
    "headers",
    "aggregate_type",
    "state",
    "attempt",
    "max_attempts",
    "scheduled_at",
    "created_at",
    "updated_at",
    "claimed_at",
    "lease_expires_at",
    "claim_token",
    "last_error",
    "sequence",
    "destination",
    "parent_id",
    "trace_parent",
    "crashes",
];

/// Columns of the inbox, contract 2.2, in order.
pub const INBOX_COLUMNS: [&str; 21] = [
    "id",
    "source",
    "idempotency_key",
    "aggregate_id",
    "event_type",
    "payload",
    "headers",
    "correlation_id",
    "consumption",
    "state",
    "created_at",
    "processed_at",
    "scheduled_at",
    "attempt",
    "last_error",
    "claimed_at",
    "lease_expires_at",
    "claim_token",
    "trace_parent",
    "crashes",
    "topic",
];

/// Columns that came with schema version 12; a table of a classic installation may lack them (contract 2.5).
pub const OUTBOX_COLUMNS_12: [&str; 4] = ["destination", "parent_id", "trace_parent", "crashes"];

/// See [`OUTBOX_COLUMNS_12`].
pub const INBOX_COLUMNS_12: [&str; 3] = ["trace_parent", "crashes", "topic"];

const NAME_MAX: usize = 63;

/// How a database quotes a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Quote {
    /// `"name"`: PostgreSQL, SQLite.
    Double,
    /// `` `name` ``: MySQL, MariaDB.
    Backtick,
    /// `[name]`: SQL Server.
    Bracket,
}

impl Quote {
    /// Quotes `name`, which needs no escaping because it was checked.
    pub fn apply(self, name: &str) -> String {
        match self {
            Self::Double => format!("\"{name}\""),
            Self::Backtick => format!("`{name}`"),
            Self::Bracket => format!("[{name}]"),
        }
    }
}

/// Renamed columns: camel-case key of contract 2.6 to the column's name. Omitted keys keep their default.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ColumnMapping {
    /// Columns of the outbox.
    pub outbox: BTreeMap<String, String>,
    /// Columns of the inbox.
    pub inbox: BTreeMap<String, String>,
}

/// Names as a user wrote them, unchecked.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct TableNames {
    /// `outboxTableName`.
    pub outbox_table_name: String,
    /// `inboxTableName`.
    pub inbox_table_name: String,
    /// `columnMapping`.
    pub column_mapping: ColumnMapping,
}

impl Default for TableNames {
    fn default() -> Self {
        Self {
            outbox_table_name: "outbox".to_owned(),
            inbox_table_name: "inbox".to_owned(),
            column_mapping: ColumnMapping::default(),
        }
    }
}

/// Why a name is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// Not a name.
    #[error(
        "{field}: {name:?} is not a name; a name is a letter or \"_\", then letters, digits, \"_\", at most 63 characters"
    )]
    Invalid {
        /// Path of the field, such as `columnMapping.outbox.key`.
        field: String,
        /// What stood there.
        name: String,
    },
    /// No such column.
    #[error("{field}: there is no such column; the keys are {known}")]
    UnknownKey {
        /// Path of the field.
        field: String,
        /// All keys of that table.
        known: String,
    },
    /// Two columns, or both tables, with one name.
    #[error("{field}: {name:?} is the name of another one already")]
    Repeated {
        /// Path of the field.
        field: String,
        /// The name.
        name: String,
    },
}

/// Is `name` a letter or `_`, then letters, digits, `_`, at most 63 characters? Letters are those of ASCII: no database folds or
/// cuts such a name in a way of its own.
pub fn is_name(name: &str) -> bool {
    let mut chars = name.chars();
    name.len() <= NAME_MAX
        && chars.next().is_some_and(|first| first.is_ascii_alphabetic() || first == '_')
        && chars.all(|rest| rest.is_ascii_alphanumeric() || rest == '_')
}

/// `scheduled_at` to `scheduledAt`.
pub fn camel_case(column: &str) -> String {
    let mut camel = String::with_capacity(column.len());
    let mut upper = false;
    for c in column.chars() {
        match c {
            '_' => upper = true,
            c if upper => {
                camel.push(c.to_ascii_uppercase());
                upper = false;
            }
            c => camel.push(c),
        }
    }
    camel
}

/// Checked names of one database, ready to be rendered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Names {
    quote: Quote,
    schema: Option<String>,
    outbox: String,
    inbox: String,
    /// Only the renamed ones.
    outbox_columns: BTreeMap<&'static str, String>,
    inbox_columns: BTreeMap<&'static str, String>,
}

impl Names {
    /// The default names.
    pub fn new(quote: Quote) -> Self {
        Self {
            quote,
            schema: None,
            outbox: "outbox".to_owned(),
            inbox: "inbox".to_owned(),
            outbox_columns: BTreeMap::new(),
            inbox_columns: BTreeMap::new(),
        }
    }

    /// Checks names as written; returns every problem at once.
    pub fn check(raw: &TableNames, quote: Quote, schema: Option<&str>) -> Result<Self, Vec<NameError>> {
        let mut problems = Vec::new();
        for (field, name) in [("outboxTableName", &raw.outbox_table_name), ("inboxTableName", &raw.inbox_table_name)] {
            if !is_name(name) {
                problems.push(NameError::Invalid { field: field.to_owned(), name: name.clone() });
            }
        }
        if raw.outbox_table_name.eq_ignore_ascii_case(&raw.inbox_table_name) {
            problems
                .push(NameError::Repeated { field: "inboxTableName".to_owned(), name: raw.inbox_table_name.clone() });
        }
        if let Some(schema) = schema.filter(|schema| !is_name(schema)) {
            problems.push(NameError::Invalid { field: "schema".to_owned(), name: schema.to_owned() });
        }
        let outbox_columns = check_columns("outbox", &OUTBOX_COLUMNS, &raw.column_mapping.outbox, &mut problems);
        let inbox_columns = check_columns("inbox", &INBOX_COLUMNS, &raw.column_mapping.inbox, &mut problems);
        if !problems.is_empty() {
            return Err(problems);
        }
        Ok(Self {
            quote,
            schema: schema.map(str::to_owned),
            outbox: raw.outbox_table_name.clone(),
            inbox: raw.inbox_table_name.clone(),
            outbox_columns,
            inbox_columns,
        })
    }

    /// The same names in `schema`, which the database itself reported.
    #[must_use]
    pub fn in_schema(&self, schema: &str) -> Self {
        Self { schema: Some(schema.replace('"', "\"\"")), ..self.clone() }
    }

    /// The schema, if one is named.
    pub fn schema(&self) -> Option<&str> {
        self.schema.as_deref()
    }

    /// Name of the outbox, not quoted: the scope of its lanes.
    pub fn outbox(&self) -> &str {
        &self.outbox
    }

    /// Name of the inbox, not quoted: the scope of its lanes.
    pub fn inbox(&self) -> &str {
        &self.inbox
    }

    /// Name of an outbox column, not quoted.
    pub fn outbox_column<'a>(&'a self, column: &'a str) -> &'a str {
        self.outbox_columns.get(column).map_or(column, String::as_str)
    }

    /// Name of an inbox column, not quoted.
    pub fn inbox_column<'a>(&'a self, column: &'a str) -> &'a str {
        self.inbox_columns.get(column).map_or(column, String::as_str)
    }

    /// Every key that differs from its default, as written in a manifest. A rename excludes migrations (contract 2.6).
    pub fn renamed(&self) -> Vec<String> {
        let tables = [("outboxTableName", &self.outbox, "outbox"), ("inboxTableName", &self.inbox, "inbox")];
        let mut keys: Vec<String> =
            tables.iter().filter(|(_, name, default)| name != default).map(|(key, ..)| (*key).to_owned()).collect();
        for (table, columns) in [("outbox", &self.outbox_columns), ("inbox", &self.inbox_columns)] {
            keys.extend(columns.keys().map(|column| format!("columnMapping.{table}.{}", camel_case(column))));
        }
        keys
    }

    /// Renders a template, see the head of this module.
    pub fn render(&self, template: &str, features: &[&str]) -> String {
        let mut sql = String::with_capacity(template.len() + template.len() / 4);
        for line in template.lines() {
            let Some(line) = conditional(line, features) else { continue };
            self.render_line(line, &mut sql);
            sql.push('\n');
        }
        sql
    }

    fn render_line(&self, line: &str, sql: &mut String) {
        let mut rest = line;
        while let Some(open) = rest.find('{') {
            sql.push_str(&rest[..open]);
            rest = &rest[open..];
            let close = rest.find('}');
            match close.and_then(|close| Some((close, self.placeholder(&rest[1..close])?))) {
                Some((close, name)) => {
                    sql.push_str(&name);
                    rest = &rest[close + 1..];
                }
                None => {
                    sql.push('{');
                    rest = &rest[1..];
                }
            }
        }
        sql.push_str(rest);
    }

    fn placeholder(&self, name: &str) -> Option<String> {
        if let Some(column) = name.strip_prefix("o.") {
            return OUTBOX_COLUMNS.contains(&column).then(|| self.quote.apply(self.outbox_column(column)));
        }
        if let Some(column) = name.strip_prefix("i.") {
            return INBOX_COLUMNS.contains(&column).then(|| self.quote.apply(self.inbox_column(column)));
        }
        let table = match name {
            "outbox" => &self.outbox,
            "inbox" => &self.inbox,
            "worker" => "queuebox_worker",
            "lane" => "queuebox_lane",
            "history" => "queuebox_schema_history",
            "sequence" => "outbox_sequence_seq",
            "schema" => "",
            _ => return None,
        };
        let mut qualified = String::new();
        if let Some(schema) = &self.schema {
            let _ = write!(qualified, "{}.", self.quote.apply(schema));
        }
        if !table.is_empty() {
            qualified.push_str(&self.quote.apply(table));
        }
        Some(qualified)
    }
}

/// The line without its condition, or `None` when it falls away.
fn conditional<'a>(line: &'a str, features: &[&str]) -> Option<&'a str> {
    const IF: &str = "--if ";
    const UNLESS: &str = "--unless ";
    let mut text = line;
    while let Some((place, word)) = text.rfind(IF).map(|at| (at, IF)).max(text.rfind(UNLESS).map(|at| (at, UNLESS))) {
        let feature = text[place + word.len()..].trim();
        if features.contains(&feature) != (word == IF) {
            return None;
        }
        text = text[..place].trim_end();
    }
    Some(text)
}

fn check_columns(
    table: &str,
    known: &[&'static str],
    raw: &BTreeMap<String, String>,
    problems: &mut Vec<NameError>,
) -> BTreeMap<&'static str, String> {
    let mut columns = BTreeMap::new();
    for (key, name) in raw {
        let field = format!("columnMapping.{table}.{key}");
        let Some(column) = known.iter().find(|column| camel_case(column) == *key) else {
            let known = known.iter().map(|column| camel_case(column)).collect::<Vec<_>>().join(", ");
            problems.push(NameError::UnknownKey { field, known });
            continue;
        };
        if !is_name(name) {
            problems.push(NameError::Invalid { field, name: name.clone() });
        } else if name != column {
            columns.insert(*column, name.clone());
        }
    }
    let mut seen = std::collections::BTreeSet::new();
    for column in known {
        let name = columns.get(column).map_or(*column, String::as_str);
        if !seen.insert(name.to_ascii_lowercase()) {
            let field = format!("columnMapping.{table}.{}", camel_case(column));
            problems.push(NameError::Repeated { field, name: name.to_owned() });
        }
    }
    columns
}

#[cfg(test)]
mod tests {
    use super::*;

    fn raw(outbox: &[(&str, &str)]) -> TableNames {
        let mut raw = TableNames::default();
        for (key, name) in outbox {
            raw.column_mapping.outbox.insert((*key).to_owned(), (*name).to_owned());
        }
        raw
    }

    #[test]
    fn names_are_rendered_and_quoted() {
        let mut raw = raw(&[("scheduledAt", "due")]);
        raw.outbox_table_name = "Messages".to_owned();
        let names = Names::check(&raw, Quote::Double, Some("app")).unwrap();
        assert_eq!(
            names.render("SELECT {o.scheduled_at}, {o.key}, '{}' FROM {outbox} JOIN {worker}, {schema}x", &[]),
            "SELECT \"due\", \"key\", '{}' FROM \"app\".\"Messages\" JOIN \"app\".\"queuebox_worker\", \"app\".x\n"
        );
        assert_eq!(names.renamed(), ["outboxTableName", "columnMapping.outbox.scheduledAt"]);
    }

    #[test]
    fn lines_follow_their_features() {
        let names = Names::new(Quote::Backtick);
        let template = "a --if crashes\nb --unless crashes\nc";
        assert_eq!(names.render(template, &["crashes"]), "a\nc\n");
        assert_eq!(names.render(template, &[]), "b\nc\n");
        let both = "a --if x --unless y\nb --unless y --unless x";
        assert_eq!(names.render(both, &["x"]), "a\n");
        assert_eq!(names.render(both, &["x", "y"]), "");
        assert_eq!(names.render(both, &[]), "b\n");
    }

    #[test]
    fn every_problem_is_found_at_once() {
        let mut raw = raw(&[("schedule", "x"), ("key", "1st"), ("topic", "state")]);
        raw.outbox_table_name = "out\"box".to_owned();
        let problems = Names::check(&raw, Quote::Double, Some("a.b")).unwrap_err();
        assert_eq!(problems.len(), 5, "{problems:?}");
        assert!(
            problems.iter().any(|p| p.to_string().contains("columnMapping.outbox.schedule: there is no such column"))
        );
    }

    #[test]
    fn nothing_but_ascii_names_up_to_63_characters() {
        assert!(is_name("_a1") && is_name(&"a".repeat(63)));
        for bad in ["", "1a", "a b", "a\"b", "ä", &"a".repeat(64), "a;--", "a$"] {
            assert!(!is_name(bad), "{bad}");
        }
    }
}

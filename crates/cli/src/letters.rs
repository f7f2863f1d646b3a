//! `queuebox dead` and `queuebox replay`: finished rows, under the rules of contract 11, straight on the Relay's database.

use std::sync::Arc;

use anyhow::{Context, bail};
use clap::{Args, Subcommand, ValueEnum};
use comfy_table::{Table, presets::ASCII_MARKDOWN};
use queuebox_admin::replay::{Caller, Request, RequestError, Verb, discard, list, replay, show};
use queuebox_api::checked;
use queuebox_catalog::open_store;
use queuebox_core::{
    Uuid,
    ports::{Scope, Store},
};
use serde_json::{Map, Value, json};

use crate::{
    manifests::{self, Given},
    output::{Output, Progress, print_json},
};

/// `queuebox dead`.
#[derive(Debug, Subcommand)]
pub enum Dead {
    /// Dead rows, newest first.
    List(Find),
    /// One row with its payload and headers, a parent with its children.
    Show(Show),
    /// Put dead rows back to pending.
    Requeue(Change),
    /// Delete dead rows. For a row of the inbox that ends its deduplication.
    Discard(Change),
}

/// Which table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum TableName {
    /// Messages to deliver.
    #[default]
    Outbox,
    /// Received messages.
    Inbox,
}

/// Filters; all that are given hold.
#[derive(Debug, Args)]
pub struct Filters {
    #[command(flatten)]
    given: Given,

    /// Which table.
    #[arg(long, value_enum, default_value_t)]
    table: TableName,

    /// These rows. May be repeated.
    #[arg(long = "id", value_name = "UUID")]
    ids: Vec<String>,

    /// Outbox: with such a topic, patterns allowed. May be repeated.
    #[arg(long = "topic", value_name = "PATTERN")]
    topics: Vec<String>,

    /// Outbox: for this destination.
    #[arg(long, value_name = "NAME")]
    destination: Option<String>,

    /// Outbox: with this key.
    #[arg(long, value_name = "KEY")]
    key: Option<String>,

    /// Inbox: from these sources. May be repeated.
    #[arg(long = "source", value_name = "NAME")]
    sources: Vec<String>,

    /// Inbox: with this event type.
    #[arg(long, value_name = "TYPE")]
    event_type: Option<String>,

    /// Inbox: with this aggregate.
    #[arg(long, value_name = "ID")]
    aggregate_id: Option<String>,

    /// Inbox: push or pull.
    #[arg(long, value_name = "WAY")]
    consumption: Option<String>,

    /// Dead for this reason, such as `attempts` or `no_route`.
    #[arg(long, value_name = "CODE")]
    code: Option<String>,

    /// Created later than this, ISO 8601.
    #[arg(long, value_name = "TIME")]
    created_after: Option<String>,

    /// Created earlier than this, ISO 8601.
    #[arg(long, value_name = "TIME")]
    created_before: Option<String>,

    /// At most so many.
    #[arg(long, value_name = "N")]
    limit: Option<u64>,

    /// How the result is printed.
    #[arg(long, value_enum, default_value_t)]
    output: Output,
}

/// States, where they may be chosen.
#[derive(Debug, Args)]
pub struct States {
    /// In one of these states. May be repeated; without it `dead`.
    #[arg(long = "state", value_name = "STATE")]
    states: Vec<String>,
}

/// `queuebox dead list`.
#[derive(Debug, Args)]
pub struct Find {
    #[command(flatten)]
    filters: Filters,

    #[command(flatten)]
    states: States,

    /// Go on where the last page ended.
    #[arg(long, value_name = "CURSOR")]
    cursor: Option<String>,
}

/// `queuebox dead show`.
#[derive(Debug, Args)]
pub struct Show {
    #[command(flatten)]
    given: Given,

    /// Which table.
    #[arg(long, value_enum, default_value_t)]
    table: TableName,

    /// Which row.
    id: Uuid,

    /// How the row is printed: text is JSON over several lines.
    #[arg(long, value_enum, default_value_t)]
    output: Output,
}

/// `queuebox replay`.
#[derive(Debug, Args)]
pub struct Replay {
    #[command(flatten)]
    change: Change,

    #[command(flatten)]
    states: States,
}

/// `queuebox dead requeue`, `queuebox dead discard`: of dead rows.
#[derive(Debug, Args)]
pub struct Change {
    #[command(flatten)]
    filters: Filters,

    /// Only say how many rows it would concern, with a sample.
    #[arg(long)]
    dry_run: bool,

    /// Inbox: also rows that hold a body which was never accepted (not_json, rejected).
    #[arg(long)]
    include_rejected: bool,
}

impl TableName {
    fn scope(self) -> Scope {
        match self {
            Self::Outbox => Scope::Outbox,
            Self::Inbox => Scope::Inbox,
        }
    }
}

impl States {
    fn field(&self) -> Option<(String, Value)> {
        (!self.states.is_empty()).then(|| ("state".to_owned(), json!(self.states)))
    }
}

impl Filters {
    /// The fields of the same request to the admin API.
    fn fields(&self) -> Map<String, Value> {
        let mut fields = Map::new();
        let lists = [("ids", &self.ids), ("topics", &self.topics), ("sources", &self.sources)];
        for (name, values) in lists {
            if !values.is_empty() {
                fields.insert(name.to_owned(), json!(values));
            }
        }
        let texts = [
            ("destination", &self.destination),
            ("key", &self.key),
            ("eventType", &self.event_type),
            ("aggregateId", &self.aggregate_id),
            ("consumption", &self.consumption),
            ("code", &self.code),
            ("createdAfter", &self.created_after),
            ("createdBefore", &self.created_before),
        ];
        for (name, value) in texts {
            if let Some(value) = value {
                fields.insert(name.to_owned(), json!(value));
            }
        }
        if let Some(limit) = self.limit {
            fields.insert("limit".to_owned(), json!(limit));
        }
        fields
    }

    /// Every filter belongs to one of the tables, and is named as it was given.
    fn fit_the_table(&self) -> Result<(), manifests::WrongUsage> {
        let of_outbox = [
            ("--topic", !self.topics.is_empty()),
            ("--destination", self.destination.is_some()),
            ("--key", self.key.is_some()),
        ];
        let of_inbox = [
            ("--source", !self.sources.is_empty()),
            ("--event-type", self.event_type.is_some()),
            ("--aggregate-id", self.aggregate_id.is_some()),
            ("--consumption", self.consumption.is_some()),
        ];
        let (others, table) = match self.table {
            TableName::Outbox => (&of_inbox[..], "inbox"),
            TableName::Inbox => (&of_outbox[..], "outbox"),
        };
        match others.iter().find(|(_, given)| *given) {
            Some((option, _)) => Err(manifests::WrongUsage(format!("{option} goes with --table {table}"))),
            None => Ok(()),
        }
    }

    fn request(&self, verb: Verb, more: Map<String, Value>) -> anyhow::Result<Request> {
        self.fit_the_table()?;
        let mut fields = self.fields();
        fields.extend(more);
        Request::parse(self.table.scope(), verb, &fields)
            .map_err(|error| manifests::WrongUsage(error.to_string()).into())
    }
}

async fn open(given: &Given) -> anyhow::Result<(Arc<checked::Relay>, Arc<dyn Store>)> {
    let loaded = manifests::load(given)?;
    loaded.needs_database()?;
    let store = open_store(&loaded.relay, &loaded.secrets).await?.store;
    store.check().await.context("the database cannot be used")?;
    Ok((loaded.relay, store))
}

/// Carries out `queuebox dead …`.
///
/// # Errors
/// A filter that is wrong, or the database.
pub async fn dead(command: &Dead) -> anyhow::Result<()> {
    match command {
        Dead::List(find) => print_list(find).await,
        Dead::Show(one) => print_row(one).await,
        Dead::Requeue(change) => apply(change, Verb::Replay, None).await,
        Dead::Discard(change) => apply(change, Verb::Discard, None).await,
    }
}

/// Carries out `queuebox replay`.
///
/// # Errors
/// As of [`dead`].
pub async fn replay_rows(replay: &Replay) -> anyhow::Result<()> {
    apply(&replay.change, Verb::Replay, Some(&replay.states)).await
}

async fn print_list(find: &Find) -> anyhow::Result<()> {
    let mut more: Map<String, Value> = find.cursor.iter().map(|cursor| ("cursor".to_owned(), json!(cursor))).collect();
    more.extend(find.states.field());
    let request = find.filters.request(Verb::List, more)?;
    let (relay, store) = open(&find.filters.given).await?;
    let page = list(store.as_ref(), &relay.routes, find.filters.table.scope(), &request).await?;
    if find.filters.output == Output::Json {
        return print_json(&page);
    }
    if page.items.is_empty() {
        outln!("No such rows.");
        return Ok(());
    }
    let mut table = Table::new();
    table.load_style(ASCII_MARKDOWN).set_header(["id", "state", "topic", "key", "attempt", "why"]);
    for item in &page.items {
        let row = &item.0;
        table.add_row([
            row.id.to_string(),
            row.state.as_str().to_owned(),
            row.topic.clone().or_else(|| row.source.clone()).unwrap_or_default(),
            row.key.clone().unwrap_or_default(),
            row.attempt.to_string(),
            row.last_error.clone().unwrap_or_default(),
        ]);
    }
    outln!("{table}");
    if let Some(next) = serde_json::to_value(&page)?.get("next").and_then(Value::as_str) {
        outln!("More: --cursor {next}");
    }
    Ok(())
}

async fn print_row(one: &Show) -> anyhow::Result<()> {
    let (_, store) = open(&one.given).await?;
    let Some(entry) = show(store.as_ref(), one.table.scope(), one.id).await? else {
        bail!("there is no row {} in the {:?} table", one.id, one.table);
    };
    if one.output == Output::Json {
        return print_json(&entry);
    }
    outln!("{}", serde_json::to_string_pretty(&entry)?);
    Ok(())
}

async fn apply(change: &Change, verb: Verb, states: Option<&States>) -> anyhow::Result<()> {
    let mut more = Map::new();
    if change.dry_run {
        more.insert("dryRun".to_owned(), json!(true));
    }
    if change.include_rejected {
        more.insert("includeRejected".to_owned(), json!(true));
    }
    more.extend(states.and_then(States::field));
    let request = change.filters.request(verb, more)?;
    if !request.filter.is_given() {
        return Err(manifests::WrongUsage(RequestError::NoFilter(verb).to_string()).into());
    }
    let (relay, store) = open(&change.filters.given).await?;
    let caller = Caller("command line".to_owned());
    let table = change.filters.table.scope();
    let what = match (change.dry_run, verb) {
        (true, _) => "Looking",
        (false, Verb::Discard) => "Discarding",
        (false, _) => "Moving to pending",
    };
    let shown = Progress::of_rows(what, change.filters.output);
    let progress = |rows: u64| shown.at(rows);
    let outcome = match verb {
        Verb::Discard => discard(store.as_ref(), &relay.routes, table, &request, &caller, &progress).await?,
        _ => replay(store.as_ref(), &relay.routes, table, &request, &caller, &progress).await?,
    };
    drop(shown);
    if change.filters.output == Output::Json {
        return print_json(&outcome.to_json());
    }
    let word = if verb == Verb::Discard { "discarded" } else { "moved to pending" };
    match &outcome.dry_run {
        Some(found) => {
            outln!("{} row(s) of {} key(s) would be {word}. Nothing was done.", found.matched, found.keys);
            for id in &found.sample {
                outln!("  {id}");
            }
        }
        None => outln!("{} row(s) {word}.", outcome.done),
    }
    if outcome.left_rejected > 0 {
        outln!("{} row(s) that were never accepted stayed; --include-rejected moves them.", outcome.left_rejected);
    }
    Ok(())
}

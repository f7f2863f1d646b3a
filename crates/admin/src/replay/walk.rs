//! The walk over finished rows, oldest first, page by page (contract 11, rules 4 to 7).

use std::{
    collections::HashSet,
    hash::{BuildHasher, RandomState},
};

use queuebox_api::checked::Route;
use queuebox_core::{
    Fault, Uuid,
    message::{DeadCode, EXPANDED_PREFIX, State},
    ports::{
        Ledger, Scope,
        ledger::{Direction, LedgerCursor, LedgerFilter, LedgerRow},
    },
    redact::redact,
};

use super::{
    BATCH, Request, RequestError, Verb,
    matching::{Matcher, code_of},
};

/// Ids that a dry run shows.
const SAMPLE: usize = 10;

/// Who asks, for the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Caller(pub String);

/// Is told how many rows were done so far, or found by a dry run.
pub type Progress<'a> = &'a (dyn Fn(u64) + Send + Sync);

/// What a dry run found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DryRun {
    /// Rows that would move or go.
    pub matched: u64,
    /// Different keys among them, rows without a key left aside.
    pub keys: u64,
    /// Their first ids.
    pub sample: Vec<Uuid>,
}

/// What was done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    /// Of which request.
    pub verb: Verb,
    /// Rows that moved or went.
    pub done: u64,
    /// Of a dry run.
    pub dry_run: Option<DryRun>,
    /// Rows of the inbox that matched and stayed, since `includeRejected` was not given.
    pub left_rejected: u64,
}

impl Outcome {
    /// The answer of the contract: `{"moved":n}`, `{"discarded":n}`, with more after a dry run.
    pub fn to_json(&self) -> serde_json::Value {
        let word = if self.verb == Verb::Discard { "discarded" } else { "moved" };
        let mut answer = serde_json::json!({ word: self.done });
        if let (Some(answer), Some(dry_run)) = (answer.as_object_mut(), &self.dry_run) {
            answer.insert("matched".to_owned(), dry_run.matched.into());
            answer.insert("keys".to_owned(), dry_run.keys.into());
            answer.insert("sample".to_owned(), dry_run.sample.iter().map(Uuid::to_string).collect());
        }
        answer
    }
}

/// Moves finished rows back to `pending`, in batches of at most 1,000, each its own transaction.
///
/// # Errors
/// No filter, or the database failed; batches before that are committed. Dropping the future ends the walk between two
/// batches.
pub async fn replay(
    ledger: &dyn Ledger,
    routes: &[Route],
    table: Scope,
    request: &Request,
    caller: &Caller,
    progress: Progress<'_>,
) -> Result<Outcome, RequestError> {
    Walk::new(ledger, routes, table, request, Verb::Replay).run(caller, progress).await
}

/// Deletes dead rows, as [`replay`] moves them.
///
/// # Errors
/// As of [`replay`].
pub async fn discard(
    ledger: &dyn Ledger,
    routes: &[Route],
    table: Scope,
    request: &Request,
    caller: &Caller,
    progress: Progress<'_>,
) -> Result<Outcome, RequestError> {
    Walk::new(ledger, routes, table, request, Verb::Discard).run(caller, progress).await
}

/// A count of different keys that needs eight bytes for each, however long they are.
#[derive(Default)]
struct Keys {
    hasher: RandomState,
    seen: HashSet<u64>,
}

struct Walk<'a> {
    ledger: &'a dyn Ledger,
    matcher: Matcher<'a>,
    table: Scope,
    request: &'a Request,
    verb: Verb,
    states: Vec<State>,
    left_rejected: u64,
}

impl<'a> Walk<'a> {
    fn new(ledger: &'a dyn Ledger, routes: &'a [Route], table: Scope, request: &'a Request, verb: Verb) -> Self {
        let matcher = Matcher { filter: &request.filter, routes };
        let mut states = request.states();
        // Whatever a caller put into the filter by hand.
        states.retain(|state| match verb {
            Verb::Discard => *state == State::Dead,
            _ => !matches!(state, State::Pending | State::Processing),
        });
        Self { ledger, matcher, table, request, verb, states, left_rejected: 0 }
    }

    async fn run(mut self, caller: &Caller, progress: Progress<'_>) -> Result<Outcome, RequestError> {
        if !self.request.filter.is_given() {
            return Err(RequestError::NoFilter(self.verb));
        }
        let mut journal = Journal { what: self.words(), caller, filter: self.given(), done: 0 };
        let mut outcome = Outcome { verb: self.verb, done: 0, dry_run: None, left_rejected: 0 };
        if !self.states.is_empty() {
            let result = if self.request.dry_run {
                self.count(progress).await.map(|found| outcome.dry_run = Some(found))
            } else {
                self.act(&mut journal.done, progress).await
            };
            result.map_err(|fault| RequestError::Database { done: journal.done, fault })?;
        }
        outcome.done = journal.done;
        outcome.left_rejected = self.left_rejected;
        Ok(outcome)
    }

    fn words(&self) -> String {
        let dry = if self.request.dry_run { ", dry run" } else { "" };
        let table = if self.table == Scope::Outbox { "outbox" } else { "inbox" };
        format!("{} of the {table}{dry}", self.verb.noun())
    }

    fn given(&self) -> String {
        let given = &self.request.given;
        if given.is_empty() { format!("{:?}", self.request.filter) } else { given.clone() }
    }

    fn limit(&self) -> u64 {
        self.request.limit.unwrap_or(u64::MAX)
    }

    async fn act(&mut self, done: &mut u64, progress: Progress<'_>) -> Result<(), Fault> {
        let (mut pages, limit) = (self.pages().await?, self.limit());
        while let Some(rows) = self.next(&mut pages).await? {
            let mut rest = rows.as_slice();
            while !rest.is_empty() && *done < limit {
                let take = usize::try_from(limit - *done).unwrap_or(usize::MAX).min(rest.len());
                let (batch, behind) = rest.split_at(take);
                rest = behind;
                let ids: Vec<Uuid> = batch.iter().map(|row| row.id).collect();
                let went = match self.verb {
                    Verb::Discard => self.ledger.discard(self.table, &ids).await?,
                    _ => self.ledger.requeue(self.table, &ids, &self.states).await?,
                };
                *done += went.len() as u64;
                progress(*done);
            }
            if *done >= limit {
                break;
            }
        }
        Ok(())
    }

    async fn count(&mut self, progress: Progress<'_>) -> Result<DryRun, Fault> {
        let (mut pages, limit) = (self.pages().await?, self.limit());
        let (mut found, mut keys) = (DryRun::default(), Keys::default());
        'pages: while let Some(rows) = self.next(&mut pages).await? {
            progress(found.matched);
            for row in rows {
                if found.matched >= limit {
                    break 'pages;
                }
                if self.verb == Verb::Replay && self.is_expanded(&row).await? {
                    continue;
                }
                found.matched += 1;
                if let Some(key) = row.key.as_deref().filter(|key| !key.is_empty()) {
                    keys.seen.insert(keys.hasher.hash_one(key));
                }
                if found.sample.len() < SAMPLE {
                    found.sample.push(row.id);
                }
            }
        }
        found.keys = keys.seen.len() as u64;
        Ok(found)
    }

    async fn pages(&self) -> Result<Pages, Fault> {
        let mut filter = self.matcher.in_database(self.states.clone());
        if self.table == Scope::Outbox && !filter.ids.is_empty() {
            let children = self.children(&filter.ids).await?;
            filter.ids.extend(children);
        }
        Ok(Pages { filter, after: None, is_over: false })
    }

    /// The next page's rows that are meant; `None` = the walk is over. Rows that moved do not come again: `created_at` stays.
    async fn next(&mut self, pages: &mut Pages) -> Result<Option<Vec<LedgerRow>>, Fault> {
        if pages.is_over {
            return Ok(None);
        }
        let read = self.ledger.page(self.table, &pages.filter, Direction::OldestFirst, pages.after, BATCH);
        let mut rows = read.await?;
        pages.is_over = rows.len() < BATCH as usize;
        pages.after = rows.last().map(|row| row.cursor);
        rows.retain(|row| self.matcher.matches(row) && !self.stays_rejected(row));
        Ok(Some(rows))
    }

    /// What it holds was never accepted, and nobody asked for it (contract 11, rule 7).
    fn stays_rejected(&mut self, row: &LedgerRow) -> bool {
        let rejected = self.table == Scope::Inbox
            && self.verb == Verb::Replay
            && row.state == State::Dead
            && matches!(code_of(row), Some(DeadCode::NotJson | DeadCode::Rejected));
        let stays = rejected && !self.request.include_rejected;
        self.left_rejected += u64::from(stays);
        stays
    }

    /// Children of those of `ids` that are parents (rule 6). A parent may be deleted before its children are.
    async fn children(&self, ids: &[Uuid]) -> Result<Vec<Uuid>, Fault> {
        let mut perhaps: HashSet<Uuid> = ids.iter().copied().collect();
        for some in ids.chunks(BATCH as usize) {
            let filter = LedgerFilter { ids: some.to_vec(), ..LedgerFilter::default() };
            for row in self.ledger.page(self.table, &filter, Direction::OldestFirst, None, BATCH).await? {
                if !may_be_parent(&row) {
                    perhaps.remove(&row.id);
                }
            }
        }
        let mut children = Vec::new();
        for id in perhaps {
            children.extend(super::entry::children(self.ledger, id).await?.into_iter().map(|row| row.id));
        }
        Ok(children)
    }

    async fn is_expanded(&self, row: &LedgerRow) -> Result<bool, Fault> {
        if self.table == Scope::Inbox || !may_be_parent(row) {
            return Ok(false);
        }
        if row.last_error.as_deref().is_some_and(|error| error.starts_with(EXPANDED_PREFIX)) {
            return Ok(true);
        }
        let filter = LedgerFilter { parent_id: Some(row.id), ..LedgerFilter::default() };
        Ok(!self.ledger.page(self.table, &filter, Direction::OldestFirst, None, 1).await?.is_empty())
    }
}

/// Expansion makes a parent `sent`; a child has no children.
fn may_be_parent(row: &LedgerRow) -> bool {
    row.state == State::Sent && row.destination.is_none() && row.parent_id.is_none()
}

struct Pages {
    filter: LedgerFilter,
    after: Option<LedgerCursor>,
    is_over: bool,
}

/// Says at the end what was done, for whom, also when the request failed or was given up half-way (rule 5).
struct Journal<'a> {
    what: String,
    caller: &'a Caller,
    filter: String,
    done: u64,
}

impl Drop for Journal<'_> {
    fn drop(&mut self) {
        tracing::info!(
            caller = redact(&self.caller.0),
            filter = redact(&self.filter),
            rows = self.done,
            "{}: {} rows.",
            self.what,
            self.done
        );
    }
}

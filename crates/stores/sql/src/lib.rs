//! What all SQL stores share: table and column names (contract 2.6), migration files and their history (contract 2.5), text
//! of database errors without secrets, the search for the newest rows without an index, and the one place where SQL that is not a
//! literal is declared safe.
//!
//! Invariants:
//! - Nothing that came from a user is ever put into SQL unless it passed [`names::Names::check`]; values are always bound.
//! - Whoever needs `sqlx::AssertSqlSafe` calls [`statement`] instead.

pub mod boundary;
pub mod errors;
pub mod migrations;
pub mod names;
pub mod passes;

use std::sync::Arc;

pub use boundary::{Boundary, Lap, Part};
pub use migrations::{Applied, Catalog, Found, Migration, Plan, PlanError, Step, plan};
pub use names::{ColumnMapping, NameError, Names, Quote, TableNames};
pub use passes::Passes;

/// Declares SQL text safe to run. The only use of `AssertSqlSafe` in the stores.
///
/// Audited: every text that comes here is a template of the store's own source rendered by [`names::Names::render`], which
/// inserts nothing but checked and quoted names, or a migration file.
pub fn statement(text: impl Into<Arc<str>>) -> sqlx::AssertSqlSafe<Arc<str>> {
    sqlx::AssertSqlSafe(text.into())
}

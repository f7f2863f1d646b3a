//! Cursors as people get them: opaque, valid on every worker of the database (contract 12.3).

use std::fmt;

use queuebox_core::{
    Uuid,
    ports::{Scope, ledger::LedgerCursor},
};

/// Where a page ends. It stays valid while rows change, come and go, since the order never changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cursor {
    table: Scope,
    place: LedgerCursor,
}

impl Cursor {
    pub(super) fn new(table: Scope, place: LedgerCursor) -> Self {
        Self { table, place }
    }

    pub(super) fn place(self) -> LedgerCursor {
        self.place
    }

    /// Reads a cursor of `table`. `None`: it is none, or it is one of the other table.
    pub fn parse(table: Scope, text: &str) -> Option<Self> {
        let digits = text.strip_prefix(letter(table))?;
        if digits.len() != 48 || !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
            return None;
        }
        let (created_at, id) = digits.split_at(16);
        let created_at = u64::from_str_radix(created_at, 16).ok()?.cast_signed();
        Some(Self::new(table, LedgerCursor { created_at, id: Uuid::parse_str(id).ok()? }))
    }
}

impl fmt::Display for Cursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{:016x}{}", letter(self.table), self.place.created_at.cast_unsigned(), self.place.id.simple())
    }
}

impl serde::Serialize for Cursor {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

fn letter(table: Scope) -> char {
    match table {
        Scope::Outbox => 'o',
        Scope::Inbox => 'i',
    }
}

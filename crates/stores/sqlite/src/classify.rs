//! What an error of SQLite means for the engine. The table is in the README and is tested here.

use std::path::Path;

use queuebox_core::{Class, Fault};
use queuebox_sql::errors;

/// Result codes of SQLite that decide: primary codes, which are the low byte of the extended ones.
mod code {
    pub const ERROR: i32 = 1;
    pub const PERM: i32 = 3;
    pub const BUSY: i32 = 5;
    pub const LOCKED: i32 = 6;
    pub const READONLY: i32 = 8;
    pub const CORRUPT: i32 = 11;
    pub const FULL: i32 = 13;
    pub const CANTOPEN: i32 = 14;
    pub const TOOBIG: i32 = 18;
    pub const CONSTRAINT: i32 = 19;
    pub const MISMATCH: i32 = 20;
    pub const AUTH: i32 = 23;
    pub const NOTADB: i32 = 26;
}

/// The extended code of `RAISE` in a trigger.
const RAISED: i32 = 1811;

fn extended(error: &sqlx::Error) -> Option<i32> {
    errors::code(error)?.parse().ok()
}

/// A trigger raised: it may be taken away again, so the row is not refused for good.
pub(crate) fn is_raised(error: &sqlx::Error) -> bool {
    extended(error) == Some(RAISED)
}

fn primary(error: &sqlx::Error) -> Option<i32> {
    Some(extended(error)? & 0xff)
}

/// Another connection has the lock: BUSY, BUSY_SNAPSHOT, BUSY_RECOVERY, BUSY_TIMEOUT, LOCKED.
pub(crate) fn is_busy(error: &sqlx::Error) -> bool {
    matches!(primary(error), Some(code::BUSY | code::LOCKED))
}

/// The database refuses this statement's values, or a trigger does: the other rows may be tried without it, and the transaction
/// goes on.
pub(crate) fn is_refused(error: &sqlx::Error) -> bool {
    matches!(primary(error), Some(code::CONSTRAINT | code::TOOBIG | code::MISMATCH))
}

/// Turns an error of the driver into a fault.
pub fn classify(error: &sqlx::Error) -> Fault {
    let text = errors::text(error);
    let (class, name, advice) = match primary(error) {
        Some(code::BUSY | code::LOCKED) => {
            (Class::Transient, "busy", "another process holds the write lock; it is tried again")
        }
        Some(code::FULL) => (Class::Transient, "disk_full", "make room on the disk of the database file"),
        Some(code::READONLY) => (
            Class::Misconfigured,
            "read_only",
            "the process needs to write the database file, its -wal and -shm files, and their folder",
        ),
        Some(code::CANTOPEN | code::PERM | code::AUTH) => {
            (Class::Misconfigured, "cannot_open", "look at the path and the rights of the file and its folder")
        }
        Some(code::CORRUPT | code::NOTADB) => {
            (Class::Misconfigured, "corrupt", "the file is damaged or no SQLite database; restore it")
        }
        Some(code::CONSTRAINT) if is_raised(error) => (Class::Transient, "raised", ""),
        Some(code::CONSTRAINT) => (Class::Refused, "constraint", ""),
        Some(code::TOOBIG) => (Class::Refused, "too_big", ""),
        Some(code::MISMATCH) => (Class::Refused, "wrong_type", ""),
        Some(code::ERROR) if text.contains("no such table") || text.contains("no such column") => {
            (Class::Misconfigured, "schema", "run \"queuebox migrate\"")
        }
        Some(_) => (Class::Transient, "sqlite", ""),
        None => match error {
            sqlx::Error::PoolTimedOut => (Class::Transient, "pool_timeout", ""),
            sqlx::Error::ColumnDecode { .. } | sqlx::Error::Decode(_) | sqlx::Error::ColumnNotFound(_) => {
                (Class::Misconfigured, "unreadable", "a column does not hold what contract 2 says")
            }
            _ => (Class::Transient, "connection", ""),
        },
    };
    let detail = if advice.is_empty() { format!("SQLite: {text}") } else { format!("SQLite: {text}; {advice}") };
    Fault::new(class, name, detail)
}

/// The same for the first connection, with the file's name.
pub(crate) fn opening(path: &Path, error: &sqlx::Error) -> Fault {
    let fault = classify(error);
    Fault { detail: format!("{}: {}", path.display(), fault.detail), ..fault }
}

#[cfg(test)]
mod tests {
    use std::borrow::Cow;

    use sqlx::error::{DatabaseError, ErrorKind};

    use super::*;

    #[derive(Debug)]
    struct Answer(i32, &'static str);

    impl std::fmt::Display for Answer {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str(self.1)
        }
    }

    impl std::error::Error for Answer {}

    impl DatabaseError for Answer {
        fn message(&self) -> &str {
            self.1
        }
        fn code(&self) -> Option<Cow<'_, str>> {
            Some(self.0.to_string().into())
        }
        fn as_error(&self) -> &(dyn std::error::Error + Send + Sync + 'static) {
            self
        }
        fn as_error_mut(&mut self) -> &mut (dyn std::error::Error + Send + Sync + 'static) {
            self
        }
        fn into_error(self: Box<Self>) -> Box<dyn std::error::Error + Send + Sync + 'static> {
            self
        }
        fn kind(&self) -> ErrorKind {
            ErrorKind::Other
        }
    }

    fn fault(code: i32, text: &'static str) -> Fault {
        classify(&sqlx::Error::Database(Box::new(Answer(code, text))))
    }

    /// The rows of the table in the README, word for word.
    #[test]
    fn the_table_in_the_readme_is_true() {
        let readme = include_str!("../README.md");
        let mut rows = 0;
        for line in readme.lines().filter(|line| line.starts_with("| `")) {
            let cells: Vec<_> = line.trim_matches('|').split('|').map(|cell| cell.trim().trim_matches('`')).collect();
            let [names, codes, class, name] = cells[..] else { continue };
            for code in codes.split(", ") {
                let fault = match code.parse() {
                    Ok(code) => fault(code, if name == "schema" { "no such table: outbox" } else { "text" }),
                    Err(_) => classify(&match code {
                        "PoolTimedOut" => sqlx::Error::PoolTimedOut,
                        "WorkerCrashed" => sqlx::Error::WorkerCrashed,
                        "ColumnNotFound" => sqlx::Error::ColumnNotFound("x".into()),
                        other => panic!("{other}"),
                    }),
                };
                assert_eq!(
                    (format!("{:?}", fault.class).as_str(), fault.code.as_ref()),
                    (class, name),
                    "{names} {code}"
                );
                rows += 1;
            }
        }
        assert!(rows > 25, "the table was read: {rows}");
    }

    #[test]
    fn an_unknown_code_is_tried_again() {
        assert_eq!(fault(10, "disk I/O error").class, Class::Transient);
        assert_eq!(fault(1, "some logic error").class, Class::Transient);
        assert!(is_busy(&sqlx::Error::Database(Box::new(Answer(517, "")))));
        assert!(!is_busy(&sqlx::Error::Database(Box::new(Answer(10, "")))));
    }
}

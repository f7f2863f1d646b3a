//! Every way in which PostgreSQL, or the way to it, can fail, and the one function that decides what a failure means. The
//! README holds its table.

use std::time::Duration;

use queuebox_core::{Class, Fault};
use queuebox_sql::{NameError, PlanError};

/// A failure of this store.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The driver's or the server's.
    #[error("PostgreSQL: {}", queuebox_sql::errors::text(.0))]
    Sql(#[from] sqlx::Error),
    /// No connection: where to, and what mends it.
    #[error("PostgreSQL at {place}: {}{advice}", queuebox_sql::errors::text(.error))]
    Connect {
        /// `host:port/database`.
        place: String,
        /// Begins with a semicolon, or is empty.
        advice: String,
        /// The driver's or the server's.
        error: sqlx::Error,
    },
    /// No answer in time; the connection was given up.
    #[error("PostgreSQL did not answer within {} s; the connection was closed", .0.as_secs())]
    Timeout(Duration),
    /// The server accepts no writes.
    #[error(
        "the PostgreSQL server is read-only (a standby, or default_transaction_read_only is on); the connection was closed"
    )]
    ReadOnly,
    /// The worker's row has another token, its lease has ended, or it is gone.
    #[error("the lease of this worker has ended; nothing was written")]
    Fenced,
    /// A password or certificate cannot be read; names the field and the reference.
    #[error("Relay.spec.database.postgres.{0}")]
    Secret(String),
    /// Names of tables or columns.
    #[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Names(Vec<NameError>),
    /// The history of migrations.
    #[error("{0}")]
    Plan(#[from] PlanError),
    /// The server works, but not as the manifest says.
    #[error("{detail}")]
    Misconfigured {
        /// Stable.
        code: &'static str,
        /// What is wrong and what mends it.
        detail: String,
    },
}

impl Error {
    /// The SQLSTATE, if the server answered.
    pub fn sqlstate(&self) -> Option<String> {
        match self {
            Self::Sql(error) | Self::Connect { error, .. } => queuebox_sql::errors::code(error),
            _ => None,
        }
    }

    /// The fault lies in a value or in a trigger of one row: the other rows of the batch may be tried without it.
    pub fn is_of_one_row(&self) -> bool {
        self.sqlstate().is_some_and(|code| matches!(&code[..2], "22" | "23" | "54" | "P0"))
    }

    /// The connection must not go back to the pool.
    pub fn ends_connection(&self) -> bool {
        match self {
            Self::Sql(error) => match queuebox_sql::errors::code(error) {
                Some(code) => {
                    // 0A000: a cached plan that no longer fits its table. 26000, 42P05: a pooler mixed connections up.
                    matches!(&code[..2], "08")
                        || matches!(
                            code.as_str(),
                            "25006"
                                | "25P03"
                                | "25P04"
                                | "57P01"
                                | "57P02"
                                | "57P03"
                                | "57P05"
                                | "0A000"
                                | "26000"
                                | "42P05"
                        )
                }
                None => !matches!(error, sqlx::Error::PoolTimedOut | sqlx::Error::PoolClosed),
            },
            Self::Timeout(_) | Self::ReadOnly => true,
            _ => false,
        }
    }
}

impl From<Error> for Fault {
    fn from(error: Error) -> Self {
        classify(&error)
    }
}

/// What a failure means. Decided by SQLSTATE alone, never by text.
pub fn classify(error: &Error) -> Fault {
    let (class, code) = match error {
        Error::Sql(error) | Error::Connect { error, .. } => match queuebox_sql::errors::code(error) {
            Some(code) => by_sqlstate(&code),
            None => by_driver(error),
        },
        Error::Timeout(_) => (Class::Transient, "timeout"),
        Error::ReadOnly => (Class::Transient, "read_only"),
        Error::Fenced => (Class::Fenced, "fenced"),
        Error::Secret(_) => (Class::Misconfigured, "secret"),
        Error::Names(_) => (Class::Misconfigured, "names"),
        Error::Plan(_) => (Class::Misconfigured, "migrations"),
        Error::Misconfigured { code, .. } => (Class::Misconfigured, *code),
    };
    let mut text = error.to_string();
    if code == "permission" {
        text.push_str(
            "; the role lacks a right. `queuebox migrate --print-grants ROLE` prints what a worker needs; to make the tables itself it needs \
             GRANT CREATE ON SCHEMA",
        );
    }
    // Our own sentences hold no secret, and a list of statements must not be cut.
    let own = matches!(error, Error::Misconfigured { .. } | Error::Names(_) | Error::Plan(_));
    Fault::new(class, code, if own { text } else { queuebox_core::redact::redact(&text) })
}

fn by_driver(error: &sqlx::Error) -> (Class, &'static str) {
    match error {
        sqlx::Error::PoolTimedOut => (Class::Transient, "pool"),
        sqlx::Error::PoolClosed => (Class::Transient, "closed"),
        sqlx::Error::Tls(_) | sqlx::Error::Configuration(_) => (Class::Misconfigured, "connection"),
        sqlx::Error::Encode(_) => (Class::Refused, "value"),
        sqlx::Error::ColumnDecode { .. } | sqlx::Error::Decode(_) | sqlx::Error::ColumnIndexOutOfBounds { .. } => {
            (Class::Misconfigured, "schema")
        }
        _ => (Class::Transient, "connection"),
    }
}

fn by_sqlstate(code: &str) -> (Class, &'static str) {
    match code {
        "25006" => (Class::Transient, "read_only"),
        "40P01" => (Class::Transient, "deadlock"),
        "55P03" => (Class::Transient, "lock"),
        "57P01" | "57P02" | "57P03" | "57P05" | "25P03" | "25P04" => (Class::Transient, "connection"),
        "23505" => (Class::Refused, "unique_violation"),
        "26000" | "42P05" => (Class::Misconfigured, "pool_mode"),
        "42501" => (Class::Misconfigured, "permission"),
        "42P10" => (Class::Misconfigured, "unique_constraint"),
        "3D000" => (Class::Misconfigured, "database"),
        _ => match &code[..2] {
            "08" => (Class::Transient, "connection"),
            "22" => (Class::Refused, "value"),
            "23" => (Class::Refused, "constraint"),
            "54" => (Class::Refused, "limit"),
            "28" => (Class::Misconfigured, "login"),
            "3F" | "42" => (Class::Misconfigured, "schema"),
            "40" => (Class::Transient, "serialization"),
            "53" => (Class::Transient, "resources"),
            // A trigger raised: it may be taken away again, so the row is not refused for good.
            "P0" => (Class::Transient, "raised"),
            _ => (Class::Transient, "server"),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The table of the README.
    const TABLE: &[(&str, Class, &str)] = &[
        ("08006", Class::Transient, "connection"),
        ("22001", Class::Refused, "value"),
        ("22P05", Class::Refused, "value"),
        ("23502", Class::Refused, "constraint"),
        ("23505", Class::Refused, "unique_violation"),
        ("25006", Class::Transient, "read_only"),
        ("26000", Class::Misconfigured, "pool_mode"),
        ("28P01", Class::Misconfigured, "login"),
        ("3D000", Class::Misconfigured, "database"),
        ("40001", Class::Transient, "serialization"),
        ("40P01", Class::Transient, "deadlock"),
        ("42501", Class::Misconfigured, "permission"),
        ("42703", Class::Misconfigured, "schema"),
        ("42P01", Class::Misconfigured, "schema"),
        ("42P10", Class::Misconfigured, "unique_constraint"),
        ("53100", Class::Transient, "resources"),
        ("54000", Class::Refused, "limit"),
        ("55P03", Class::Transient, "lock"),
        ("57014", Class::Transient, "server"),
        ("57P01", Class::Transient, "connection"),
        ("P0001", Class::Transient, "raised"),
        ("XX000", Class::Transient, "server"),
    ];

    #[test]
    fn the_table_holds_and_is_in_the_readme() {
        let readme = include_str!("../README.md");
        for (sqlstate, class, code) in TABLE {
            assert_eq!(by_sqlstate(sqlstate), (*class, *code), "{sqlstate}");
            let said = format!("| `{code}` | {class:?} |");
            assert!(readme.lines().any(|line| line.contains(&said)), "the README has no row with {said}");
        }
    }

    #[test]
    fn own_failures_have_their_class() {
        assert!(classify(&Error::Fenced).is_fenced());
        assert_eq!(classify(&Error::ReadOnly).class, Class::Transient);
        assert!(Error::ReadOnly.ends_connection() && !Error::Fenced.ends_connection());
        assert_eq!(classify(&Error::Sql(sqlx::Error::PoolTimedOut)).code, "pool");
    }
}

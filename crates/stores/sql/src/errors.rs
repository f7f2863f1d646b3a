//! Text of database errors for people: what was answered and by whom, without the values of a row and without secrets.

use queuebox_core::redact::redact;

/// One line about an error of the driver. The server's `DETAIL` is left out: it quotes the row, and rows are nobody's
/// business in a log. Redacted and cut as contract 10.3 says.
pub fn text(error: &sqlx::Error) -> String {
    let text = match error {
        sqlx::Error::Database(answer) => match answer.code() {
            Some(code) => format!("{} ({code})", answer.message()),
            None => answer.message().to_owned(),
        },
        sqlx::Error::PoolTimedOut => "no connection of the pool became free in time; poolSize bounds them".to_owned(),
        sqlx::Error::Io(cause) => format!("the connection failed: {cause}"),
        sqlx::Error::Tls(cause) => format!("TLS failed: {cause}"),
        other => other.to_string(),
    };
    redact(&text)
}

/// The five-character SQLSTATE, or the code of the database, if the server answered.
pub fn code(error: &sqlx::Error) -> Option<String> {
    error.as_database_error().and_then(|answer| answer.code()).map(|code| code.into_owned())
}

/// The connection itself is of no more use: it broke, or what it would say next is unknown.
pub fn is_broken(error: &sqlx::Error) -> bool {
    matches!(error, sqlx::Error::Io(_) | sqlx::Error::Tls(_) | sqlx::Error::Protocol(_) | sqlx::Error::WorkerCrashed)
}

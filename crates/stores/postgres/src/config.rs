//! How to reach the database, and what to do there: the checked configuration of the store.
//!
//! Invariant: no secret is kept in a form that can be printed. Secrets are [`Secret`]s, read again whenever a connection may
//! be opened, so that a rotated password or certificate is used without a restart.

use std::time::Duration;

use queuebox_core::{Secret, SecretError, pattern::Pattern};
use queuebox_sql::TableNames;

/// `tls.mode` (contract 13.4).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TlsMode {
    /// Never.
    Disable,
    /// When the server offers it; nothing is verified.
    #[default]
    Prefer,
    /// Always; nothing is verified.
    Require,
    /// Always; the certificate is verified.
    VerifyCa,
    /// Always; certificate and host name are verified.
    VerifyFull,
}

/// TLS towards the server.
#[derive(Debug, Clone, Default)]
pub struct Tls {
    /// Whether, and what is verified.
    pub mode: TlsMode,
    /// PEM of the authorities to trust in place of the built-in ones.
    pub ca: Option<Secret>,
    /// PEM of the client's certificate; needs `key`.
    pub cert: Option<Secret>,
    /// PEM of the client's key.
    pub key: Option<Secret>,
}

/// One way to a server.
#[derive(Debug, Clone)]
pub struct Target {
    /// Name, address, or folder of a Unix socket.
    pub host: String,
    /// Port.
    pub port: u16,
    /// Database.
    pub database: String,
    /// Role.
    pub username: String,
    /// Its password, if it has one.
    pub password: Option<Secret>,
    /// TLS.
    pub tls: Tls,
}

/// Is there a pooler in transaction mode between us and the server? (Contract 5.5.)
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Pooler {
    /// Found out at the first connection.
    #[default]
    Auto,
    /// Yes: nothing is kept on a connection.
    Yes,
    /// No.
    No,
}

/// `capture` (contract 5.5).
#[derive(Debug, Clone)]
pub enum Capture {
    /// LISTEN, on a connection of its own: to the target given here, or to the database's.
    Auto(Option<Box<Target>>),
    /// Never LISTEN.
    Polling,
}

/// Everything the store needs to know.
#[derive(Debug, Clone)]
pub struct PostgresConfig {
    /// The database.
    pub target: Target,
    /// Schema of all tables; `None` = the search path.
    pub schema: Option<String>,
    /// Most connections.
    pub pool_size: u32,
    /// For opening a connection, and for waiting for a free one.
    pub connect_timeout: Duration,
    /// Longest wait for the answer to one statement; the connection is given up then.
    pub statement_timeout: Duration,
    /// Own tables and columns (contract 2.6).
    pub names: TableNames,
    /// `outbox.onSent: Delete`.
    pub on_sent_delete: bool,
    /// Wake-up.
    pub capture: Capture,
    /// A pooler in the way.
    pub pooler: Pooler,
    /// Where topics go, first match first. Needed only where rows are claimed (below schema version 14): there the statement that
    /// claims must know for which destination's rows a plain one waits (contract 4.3).
    pub routes: Vec<RouteTarget>,
}

/// A route, as far as a claim has to know it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RouteTarget {
    /// Any of these.
    pub topics: Vec<Pattern>,
    /// Its only destination; `None` = several, so that its rows are expanded.
    pub destination: Option<String>,
}

impl PostgresConfig {
    /// Defaults of contract 13.4 for a target.
    pub fn new(target: Target) -> Self {
        Self {
            target,
            schema: None,
            pool_size: 5,
            connect_timeout: Duration::from_secs(30),
            statement_timeout: Duration::from_secs(30),
            names: TableNames::default(),
            on_sent_delete: false,
            capture: Capture::Auto(None),
            pooler: Pooler::Auto,
            routes: Vec::new(),
        }
    }

    /// From `postgres://user:password@host:port/database?sslmode=…`, `postgresql://` or either with `jdbc:` in front, where user and
    /// password may also be parameters. The error names the part, never its value.
    pub fn from_url(url: &str) -> Result<Self, UrlError> {
        let text = url.trim();
        let text = text.strip_prefix("jdbc:").unwrap_or(text);
        let parsed = url::Url::parse(text).map_err(|error| UrlError::Invalid(error.to_string()))?;
        if !matches!(parsed.scheme(), "postgres" | "postgresql") {
            return Err(UrlError::Scheme);
        }
        // A password with a reserved character of its own: what is taken for the host is a part of it, and would be told as such.
        let behind = [parsed.query().unwrap_or_default(), parsed.fragment().unwrap_or_default()];
        let in_login = !parsed.username().is_empty() && behind.iter().any(|part| part.contains('@'));
        if parsed.path().contains('@') || in_login {
            return Err(UrlError::Invalid("there is an @ after its host".to_owned()));
        }
        let mut username = decode(parsed.username(), "user name")?;
        let mut password = parsed.password().map(|text| decode(text, "password")).transpose()?;
        let mut tls = Tls::default();
        let mut schema = None;
        let mut connect_timeout = None;
        let mut host = parsed.host_str().unwrap_or("localhost").trim_matches(['[', ']']).to_owned();
        for (name, value) in parsed.query_pairs() {
            match name.as_ref() {
                "user" => username = value.into_owned(),
                "password" => password = Some(value.into_owned()),
                "host" => host = value.into_owned(),
                "sslmode" | "ssl-mode" => tls.mode = tls_mode(&value)?,
                "ssl" if value == "true" => tls.mode = TlsMode::VerifyFull,
                "sslrootcert" => tls.ca = Some(file(&value)),
                "sslcert" => tls.cert = Some(file(&value)),
                "sslkey" => tls.key = Some(file(&value)),
                "currentSchema" => schema = Some(value.into_owned()),
                "connect_timeout" | "connectTimeout" => {
                    connect_timeout = Some(value.parse().map_err(|_| UrlError::Parameter(name.into_owned()))?);
                }
                // Meant for another driver; nothing of ours depends on it.
                _ => {}
            }
        }
        let database = decode(parsed.path().trim_start_matches('/'), "database")?;
        if username.is_empty() {
            return Err(UrlError::Missing("user name"));
        }
        let target = Target {
            host: decode(&host, "host")?,
            port: parsed.port().unwrap_or(5432),
            database: if database.is_empty() { username.clone() } else { database },
            username,
            password: password.map(Secret::fixed),
            tls,
        };
        let mut config = Self::new(target);
        config.schema = schema;
        if let Some(seconds) = connect_timeout {
            config.connect_timeout = Duration::from_secs(seconds);
        }
        Ok(config)
    }

    /// [`PostgresConfig::from_url`] for a URL that may change: its password is read again whenever a connection may be opened.
    /// Everything else stays as it was read first.
    pub fn from_url_secret(url: &Secret) -> Result<Self, UrlError> {
        let mut config = Self::from_url(&url.current().map_err(UrlError::Unreadable)?)?;
        let url = url.clone();
        config.target.password = Some(Secret::from_fn(move || {
            let now = Self::from_url(&url.current()?).map_err(|error| SecretError {
                reference: "the password in the database URL".to_owned(),
                reason: error.to_string(),
            })?;
            now.target.password.map_or_else(|| Ok("".into()), |password| password.current())
        }));
        Ok(config)
    }
}

/// Why a database URL is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UrlError {
    /// Not a URL.
    #[error(
        "the database URL cannot be read: {0}; reserved characters of user name and password must be percent-encoded"
    )]
    Invalid(String),
    /// The reference cannot be read; names it.
    #[error("the database URL cannot be read: {0}")]
    Unreadable(SecretError),
    /// Another scheme.
    #[error("the database URL must begin with postgres:// or postgresql:// (or either behind jdbc:)")]
    Scheme,
    /// A part is missing.
    #[error("the database URL has no {0}")]
    Missing(&'static str),
    /// A part is not UTF-8 after decoding.
    #[error("the {0} of the database URL is not percent-encoded UTF-8")]
    Encoding(&'static str),
    /// A parameter whose value means nothing.
    #[error("the database URL's parameter {0} has a value that is not known")]
    Parameter(String),
}

fn decode(text: &str, part: &'static str) -> Result<String, UrlError> {
    percent_encoding::percent_decode_str(text)
        .decode_utf8()
        .map(std::borrow::Cow::into_owned)
        .map_err(|_| UrlError::Encoding(part))
}

fn tls_mode(word: &str) -> Result<TlsMode, UrlError> {
    Ok(match word.to_ascii_lowercase().as_str() {
        "disable" => TlsMode::Disable,
        "allow" | "prefer" => TlsMode::Prefer,
        "require" => TlsMode::Require,
        "verify-ca" => TlsMode::VerifyCa,
        "verify-full" => TlsMode::VerifyFull,
        _ => return Err(UrlError::Parameter("sslmode".to_owned())),
    })
}

fn file(path: &str) -> Secret {
    let path = path.to_owned();
    Secret::from_fn(move || match std::fs::read_to_string(&path) {
        Ok(text) => Ok(text.into()),
        Err(error) => Err(SecretError { reference: format!("file {path}"), reason: error.to_string() }),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_read() {
        let config = PostgresConfig::from_url(
            "jdbc:postgresql://app:p%40ss%3A%2F@db.example:6432/shop?sslmode=verify-full&currentSchema=q",
        )
        .unwrap();
        assert_eq!((config.target.host.as_str(), config.target.port), ("db.example", 6432));
        assert_eq!((config.target.database.as_str(), config.target.username.as_str()), ("shop", "app"));
        assert_eq!(config.target.password.as_ref().unwrap().current().unwrap().as_ref(), "p@ss:/");
        assert_eq!((config.target.tls.mode, config.schema.as_deref()), (TlsMode::VerifyFull, Some("q")));
        let jdbc = PostgresConfig::from_url("jdbc:postgresql://h/d?user=u&password=a%26b").unwrap();
        assert_eq!((jdbc.target.username.as_str(), jdbc.target.port), ("u", 5432));
        assert_eq!(jdbc.target.password.unwrap().current().unwrap().as_ref(), "a&b");
    }

    #[test]
    fn a_url_that_changes_gives_the_new_password() {
        let url = std::sync::Arc::new(std::sync::Mutex::new("postgres://u:old@h/d".to_owned()));
        let source = url.clone();
        let secret = Secret::from_fn(move || Ok(source.lock().unwrap().as_str().into()));
        let config = PostgresConfig::from_url_secret(&secret).unwrap();
        let password = || config.target.password.as_ref().unwrap().current().unwrap();
        assert_eq!(password().as_ref(), "old");
        *url.lock().unwrap() = "postgres://u:new@h/d".to_owned();
        assert_eq!(password().as_ref(), "new");
    }

    #[test]
    fn no_error_and_no_debug_text_shows_a_password() {
        for url in
            ["postgres://u:canary-7731@h:port/d", "mysql://u:canary-7731@h/d", "postgres://u:canary-7731@h/d?sslmode=x"]
        {
            let error = PostgresConfig::from_url(url).unwrap_err();
            assert!(!format!("{error} {error:?}").contains("canary"), "{error}");
        }
        let config = PostgresConfig::from_url("postgres://u:canary-7731@h/d").unwrap();
        assert!(!format!("{config:?}").contains("canary"));
    }
}

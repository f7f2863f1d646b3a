//! Connections: how they are opened, what is set on them, and which of them may be used again.
//!
//! Invariants
//! - A connection on which anything but a clean answer of the server happened (broken, timed out, read-only, a future that was
//!   dropped in the middle) is closed, never pooled.
//! - Secrets are read again before a connection may be opened.
//! - Behind a pooler in transaction mode nothing is set or kept on a connection, and each statement has its own transaction.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use queuebox_sql::statement;
use sqlx::{
    ConnectOptions, Connection, Executor, PgConnection, PgPool, Postgres, Row,
    pool::PoolConnection,
    postgres::{PgArguments, PgConnectOptions, PgPoolOptions, PgRow, PgSslMode},
};
use tokio::{sync::OnceCell, time::Instant};

use crate::{
    config::{Pooler, PostgresConfig, Target, TlsMode},
    error::Error,
};

/// Set on direct connections; a pooler that drops or refuses it has told what it is.
const MARK: &str = "queuebox.direct";
/// As many as run statements all the time: the poll, the settles beside it, the inbox.
const WARM_MAX: usize = 3;
/// Then it goes back to the pool, which closes connections that have become too old.
const WARM_FOR: Duration = Duration::from_secs(300);
/// How long to look for the reason when no connection came about in time.
const REASON_TIMEOUT: Duration = Duration::from_secs(2);

/// A worker that is cut off in the middle of a transaction must not go on holding its locks: whoever takes over waits for them.
const BEGIN: &str = "BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL idle_in_transaction_session_timeout = '5s'";

/// What stands between us and the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Nothing: statements are prepared once, planner settings are ours.
    Direct,
    /// A pooler in transaction mode.
    Pooled,
}

/// The pool and what is known about it.
pub struct Db {
    pool: PgPool,
    config: Arc<PostgresConfig>,
    mode: OnceCell<Mode>,
    /// Connections that were last used before this moment are looked at before they are used again.
    suspect: Arc<Mutex<Option<Instant>>>,
    /// Secrets as used last.
    secrets: Mutex<Vec<Option<Arc<str>>>>,
    waiting: AtomicU32,
    warm: Mutex<Vec<Warm>>,
}

/// A connection that ran a statement a moment ago, kept apart from the pool and used next. The pool hands its connections out in
/// turn, so the poll would run in another server process each time, whose plans and data the processor has forgotten.
struct Warm {
    conn: Conn,
    used: Instant,
}

impl Db {
    /// Opens nothing yet.
    pub fn new(config: Arc<PostgresConfig>) -> Self {
        let suspect = Arc::new(Mutex::new(None));
        let pool = PgPoolOptions::new()
            .max_connections(config.pool_size)
            .acquire_timeout(config.connect_timeout)
            // A round trip before every statement would halve the hot path. What is known to be doubtful is looked at below.
            .test_before_acquire(false)
            .before_acquire({
                let suspect = suspect.clone();
                move |conn, meta| {
                    let since = suspect.lock().ok().and_then(|at| *at).map(|at: Instant| at.elapsed());
                    Box::pin(async move {
                        match since {
                            Some(since) if meta.idle_for >= since => writable(conn).await,
                            _ => Ok(true),
                        }
                    })
                }
            })
            .connect_lazy_with(PgConnectOptions::new_without_pgpass());
        Self {
            pool,
            config,
            mode: OnceCell::new(),
            suspect,
            secrets: Mutex::new(Vec::new()),
            waiting: AtomicU32::new(0),
            warm: Mutex::new(Vec::new()),
        }
    }

    /// Open connections, idle ones, callers that wait.
    pub fn gauges(&self) -> (u32, u32, u32) {
        let idle = u32::try_from(self.pool.num_idle() + self.warm().len()).unwrap_or(u32::MAX);
        (self.pool.size(), idle, self.waiting.load(Ordering::Relaxed))
    }

    /// Closes every connection.
    pub async fn close(&self) {
        let closing = self.pool.close();
        // From here on none is added.
        self.warm().clear();
        closing.await;
    }

    /// What stands between us and the server; connects once to find out.
    pub async fn mode(&self) -> Result<Mode, Error> {
        self.mode.get_or_try_init(|| self.find_mode()).await.copied()
    }

    async fn find_mode(&self) -> Result<Mode, Error> {
        let mode = match self.config.pooler {
            Pooler::Yes => Mode::Pooled,
            Pooler::No => Mode::Direct,
            Pooler::Auto => self.look_for_pooler().await?,
        };
        self.pool.set_connect_options(options(&self.config.target, mode, self.config.statement_timeout)?);
        Ok(mode)
    }

    async fn look_for_pooler(&self) -> Result<Mode, Error> {
        let direct = options(&self.config.target, Mode::Direct, self.config.statement_timeout)?;
        let opened = tokio::time::timeout(self.config.connect_timeout, direct.connect()).await;
        let mut conn = match opened.map_err(|_| Error::Timeout(self.config.connect_timeout))? {
            Ok(conn) => conn,
            // 08P01: the peer refused a start-up parameter, which no server does.
            Err(error) if queuebox_sql::errors::code(&error).as_deref() == Some("08P01") => return Ok(Mode::Pooled),
            Err(error) => return Err(self.unconnected(error)),
        };
        let row = conn.fetch_one("SELECT current_setting('queuebox.direct', true)").await?;
        let kept: Option<String> = row.try_get(0)?;
        conn.close().await.ok();
        Ok(if kept.as_deref() == Some("on") { Mode::Direct } else { Mode::Pooled })
    }

    /// A connection of the pool.
    pub async fn conn(&self) -> Result<Conn, Error> {
        let mode = self.mode().await?;
        // Counted before the look at what is kept warm: whoever would keep one more sees that somebody waits.
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let waiting = Waiting(&self.waiting);
        if let Some(conn) = self.take_warm() {
            return Ok(conn);
        }
        if self.pool.num_idle() == 0 {
            self.refresh_secrets(mode)?;
        }
        let acquired = self.pool.acquire().await;
        drop(waiting);
        match acquired {
            Ok(inner) => Ok(Conn {
                inner,
                mode,
                timeout: self.config.statement_timeout,
                dirty: false,
                in_transaction: false,
                suspect: self.suspect.clone(),
                opened: Instant::now(),
            }),
            Err(sqlx::Error::PoolTimedOut) if self.pool.size() == 0 => Err(self.reason(mode).await),
            Err(error @ (sqlx::Error::PoolTimedOut | sqlx::Error::PoolClosed)) => Err(error.into()),
            Err(error) => Err(self.unconnected(error)),
        }
    }

    /// A connection that did not come about: to where, and what mends it.
    fn unconnected(&self, error: sqlx::Error) -> Error {
        let Target { host, port, database, username, .. } = &self.config.target;
        Error::Connect { place: format!("{host}:{port}/{database}"), advice: advice(&error, database, username), error }
    }

    /// Why no connection could be opened; the pool itself only says that time ran out.
    async fn reason(&self, mode: Mode) -> Error {
        let options = match options(&self.config.target, mode, self.config.statement_timeout) {
            Ok(options) => options,
            Err(error) => return error,
        };
        match tokio::time::timeout(REASON_TIMEOUT, options.connect()).await {
            Ok(Err(error)) => self.unconnected(error),
            Ok(Ok(conn)) => {
                conn.close_hard().await.ok();
                sqlx::Error::PoolTimedOut.into()
            }
            Err(_) => Error::Timeout(REASON_TIMEOUT),
        }
    }

    fn refresh_secrets(&self, mode: Mode) -> Result<(), Error> {
        let now = secrets(&self.config.target)?;
        let mut used = self.secrets.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if *used != now {
            self.pool.set_connect_options(options(&self.config.target, mode, self.config.statement_timeout)?);
            *used = now;
        }
        Ok(())
    }

    /// Runs one statement in a transaction of its own.
    pub async fn rows(&self, sql: &Arc<str>, args: Args) -> Result<Vec<PgRow>, Error> {
        let mut conn = self.conn().await?;
        if conn.mode == Mode::Direct {
            let rows = conn.rows(sql, args).await?;
            self.keep_warm(conn);
            return Ok(rows);
        }
        conn.begin().await?;
        match conn.rows(sql, args).await {
            Ok(rows) => conn.commit().await.map(|()| rows),
            Err(error) => {
                conn.rollback().await;
                Err(error)
            }
        }
    }

    fn take_warm(&self) -> Option<Conn> {
        let mut warm = self.warm();
        while let Some(Warm { mut conn, used }) = warm.pop() {
            let suspect = self.suspect.lock().ok().and_then(|at| *at);
            if suspect.is_none_or(|suspect| used > suspect) {
                return Some(conn);
            }
            // The pool would take it for one that was just used.
            conn.dirty = true;
        }
        None
    }

    fn keep_warm(&self, conn: Conn) {
        let mut warm = self.warm();
        let is_wanted = self.waiting.load(Ordering::SeqCst) > 0;
        if warm.len() < WARM_MAX && !is_wanted && !self.pool.is_closed() && conn.opened.elapsed() < WARM_FOR {
            warm.push(Warm { conn, used: Instant::now() });
        }
    }

    fn warm(&self) -> std::sync::MutexGuard<'_, Vec<Warm>> {
        self.warm.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Runs one statement that is planned for its very values, with every kind of scan allowed: lists and other work off the hot
    /// path, whose conditions differ from call to call.
    pub async fn rows_planned(&self, sql: &Arc<str>, args: Args) -> Result<Vec<PgRow>, Error> {
        let mut conn = self.begin().await?;
        if conn.mode == Mode::Direct {
            conn.batch(PLANNED).await?;
        }
        match conn.rows(sql, args).await {
            Ok(rows) => conn.commit().await.map(|()| rows),
            Err(error) => {
                conn.rollback().await;
                Err(error)
            }
        }
    }

    /// A transaction, READ COMMITTED.
    pub async fn begin(&self) -> Result<Conn, Error> {
        let mut conn = self.conn().await?;
        conn.begin().await?;
        Ok(conn)
    }

    /// The server behind the pool is not what it was: idle connections are looked at before they are used again.
    pub fn doubt(&self) {
        doubt(&self.suspect);
    }
}

/// The statement or the field that lets the next try succeed.
fn advice(error: &sqlx::Error, database: &str, username: &str) -> String {
    let fields = "Relay.spec.database.postgres";
    match queuebox_sql::errors::code(error).as_deref() {
        Some("3D000") => format!("; create it (CREATE DATABASE \"{database}\"), or correct {fields}.database"),
        Some("28P01") => format!(
            "; correct {fields}.username or passwordFrom, or give the role that password (ALTER ROLE \"{username}\" PASSWORD '…')"
        ),
        Some("28000") => format!(
            "; make the role (CREATE ROLE \"{username}\" LOGIN PASSWORD '…'), let it in by pg_hba.conf, or correct {fields}.username"
        ),
        Some("42501") => format!("; GRANT CONNECT ON DATABASE \"{database}\" TO \"{username}\""),
        Some(_) => String::new(),
        None if matches!(error, sqlx::Error::Tls(_)) => format!("; look at {fields}.tls"),
        None => format!("; is it running, and are {fields}.host and port (or urlFrom) right?"),
    }
}

fn doubt(suspect: &Mutex<Option<Instant>>) {
    if let Ok(mut suspect) = suspect.lock() {
        *suspect = Some(Instant::now());
    }
}

struct Waiting<'a>(&'a AtomicU32);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Is the server there, and does it accept writes?
async fn writable(conn: &mut PgConnection) -> Result<bool, sqlx::Error> {
    let row = conn.fetch_one(sqlx::raw_sql("SELECT current_setting('transaction_read_only')")).await?;
    Ok(row.try_get::<String, _>(0)? == "off")
}

/// A connection that goes back to the pool only when the last thing on it was a clean answer.
pub struct Conn {
    inner: PoolConnection<Postgres>,
    mode: Mode,
    timeout: Duration,
    dirty: bool,
    in_transaction: bool,
    suspect: Arc<Mutex<Option<Instant>>>,
    /// When it came from the pool.
    opened: Instant,
}

impl Conn {
    /// Runs one statement and returns its rows.
    pub async fn rows(&mut self, sql: &Arc<str>, args: Args) -> Result<Vec<PgRow>, Error> {
        let args = args.finish()?;
        self.dirty = true;
        let persistent = self.mode == Mode::Direct;
        let query = sqlx::query_with(statement(sql.clone()), args).persistent(persistent);
        let answer = tokio::time::timeout(self.timeout, query.fetch_all(&mut *self.inner)).await;
        self.judge(answer)
    }

    /// Runs statements without parameters, as they stand.
    pub async fn batch(&mut self, sql: &str) -> Result<(), Error> {
        self.dirty = true;
        let query = sqlx::raw_sql(statement(sql));
        let answer = tokio::time::timeout(self.timeout, self.inner.execute(query)).await;
        self.judge(answer).map(drop)
    }

    /// The same without a bound on the time: migrations of large tables.
    pub async fn batch_unbounded(&mut self, sql: &str) -> Result<(), Error> {
        self.dirty = true;
        let answer = self.inner.execute(sqlx::raw_sql(statement(sql))).await;
        self.judge(Ok(answer)).map(drop)
    }

    fn judge<T>(&mut self, answer: Result<Result<T, sqlx::Error>, tokio::time::error::Elapsed>) -> Result<T, Error> {
        let error = match answer {
            Ok(Ok(answer)) => {
                self.dirty = false;
                return Ok(answer);
            }
            Ok(Err(error)) => Error::Sql(error),
            Err(_) => Error::Timeout(self.timeout),
        };
        if error.ends_connection() {
            doubt(&self.suspect);
        } else {
            self.dirty = false;
        }
        Err(error)
    }

    /// Closes the connection instead of pooling it, and doubts the others.
    pub fn give_up(&mut self) {
        self.dirty = true;
        doubt(&self.suspect);
    }

    /// Begins a transaction.
    pub async fn begin(&mut self) -> Result<(), Error> {
        self.in_transaction = true;
        self.batch(BEGIN).await
    }

    /// Commits it.
    pub async fn commit(&mut self) -> Result<(), Error> {
        self.batch("COMMIT").await?;
        self.in_transaction = false;
        Ok(())
    }

    /// Rolls back; a connection that cannot do that is closed.
    pub async fn rollback(&mut self) {
        if !self.dirty && self.batch("ROLLBACK").await.is_ok() {
            self.in_transaction = false;
        }
    }
}

impl Drop for Conn {
    fn drop(&mut self) {
        if self.dirty || self.in_transaction {
            self.inner.close_on_drop();
        }
    }
}

/// Parameters of a statement, in order.
#[derive(Default)]
pub struct Args {
    inner: PgArguments,
    failed: Option<sqlx::error::BoxDynError>,
}

impl Args {
    /// None yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// The next one.
    #[must_use]
    pub fn bind<'q, T: sqlx::Encode<'q, Postgres> + sqlx::Type<Postgres>>(mut self, value: T) -> Self {
        if let Err(error) = sqlx::Arguments::add(&mut self.inner, value) {
            self.failed.get_or_insert(error);
        }
        self
    }

    fn finish(self) -> Result<PgArguments, Error> {
        match self.failed {
            None => Ok(self.inner),
            Some(error) => Err(sqlx::Error::Encode(error).into()),
        }
    }
}

fn secrets(target: &Target) -> Result<Vec<Option<Arc<str>>>, Error> {
    [
        ("passwordFrom", &target.password),
        ("tls.caFrom", &target.tls.ca),
        ("tls.certFrom", &target.tls.cert),
        ("tls.keyFrom", &target.tls.key),
    ]
    .into_iter()
    .map(|(what, secret)| match secret {
        None => Ok(None),
        Some(secret) => secret.current().map(Some).map_err(|error| Error::Secret(format!("{what}: {error}"))),
    })
    .collect()
}

/// Options of a new connection. Time zone UTC is the driver's own start-up parameter, which poolers keep track of.
pub fn options(target: &Target, mode: Mode, statement_timeout: Duration) -> Result<PgConnectOptions, Error> {
    let [password, ca, cert, key] = <[Option<Arc<str>>; 4]>::try_from(secrets(target)?).unwrap_or_default();
    let mut options = PgConnectOptions::new_without_pgpass()
        .host(&target.host)
        .port(target.port)
        .database(&target.database)
        .username(&target.username)
        .application_name("queuebox")
        .extra_float_digits(None)
        .ssl_mode(match target.tls.mode {
            TlsMode::Disable => PgSslMode::Disable,
            TlsMode::Prefer => PgSslMode::Prefer,
            TlsMode::Require => PgSslMode::Require,
            TlsMode::VerifyCa => PgSslMode::VerifyCa,
            TlsMode::VerifyFull => PgSslMode::VerifyFull,
        })
        // The variants of the poll alone are some dozens.
        .statement_cache_capacity(if mode == Mode::Direct { 200 } else { 0 })
        .disable_statement_logging();
    options = options.password(password.as_deref().unwrap_or_default());
    if let Some(ca) = ca {
        options = options.ssl_root_cert_from_pem(ca.as_bytes().to_vec());
    }
    if let (Some(cert), Some(key)) = (cert, key) {
        options = options.ssl_client_cert_from_pem(cert.as_bytes()).ssl_client_key_from_pem(key.as_bytes());
    }
    if mode == Mode::Direct {
        // We close a connection that does not answer, but its server process would go on waiting for its lock, and be joined by
        // another one at each try.
        options = options.options(SETTINGS).options([("statement_timeout", statement_timeout.as_millis())]);
    }
    Ok(options)
}

/// Settings of direct connections.
///
/// Planning the poll costs about a millisecond, running it a few: so plans are generic and kept. A generic plan that was made
/// while the table was empty would be a sequential scan, and stay one until the next ANALYZE, perhaps behind a million rows; so
/// scans that do not follow an index in its order are never preferred, nor sorts of a whole range where an incremental one can
/// stop at its limit. JIT would be tempted by the costs that this gives.
///
/// A connection whose other end is gone without a word ends within half a minute, and with it the locks of what it ran.
const SETTINGS: [(&str, &str); 12] = [
    (MARK, "on"),
    ("default_transaction_isolation", "read committed"),
    ("plan_cache_mode", "force_generic_plan"),
    ("enable_seqscan", "off"),
    ("enable_bitmapscan", "off"),
    ("enable_sort", "off"),
    ("jit", "off"),
    ("max_parallel_workers_per_gather", "0"),
    ("tcp_keepalives_idle", "10"),
    ("tcp_keepalives_interval", "5"),
    ("tcp_keepalives_count", "3"),
    ("tcp_user_timeout", "25000"),
];

/// Undoes [`SETTINGS`] for one transaction.
const PLANNED: &str = "SET LOCAL plan_cache_mode = force_custom_plan; SET LOCAL enable_seqscan = on; \
                       SET LOCAL enable_bitmapscan = on; SET LOCAL enable_sort = on";

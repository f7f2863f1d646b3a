//! What scenarios share: a database of either kind, manifests, the running program, a receiver.
//!
//! A [`World`] is one Relay with its database, one [`Recorder`] as receiver, and as many workers as the scenario starts.
//! Its manifests are JSON values, so that a scenario states only what it is about: [`World::relay`],
//! [`World::destination`] and [`World::source`] merge their patch into the `spec` (a `null` takes a field away).
//! Without routes everything goes to the destination `receiver`, whose breaker is off.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use queuebox_testkit::{self as testkit, Process, Recorder};
use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, Column, Row, TypeInfo, ValueRef};

/// Bound for everything that is awaited. Nothing is expected to take so long; a loaded machine makes no test fail.
pub const PATIENCE: Duration = Duration::from_secs(90);

/// Every metric by its name: a misspelt one would be 0 for ever.
const METRICS: &str = include_str!("../../docs/reference/metrics.md");

/// The databases of these scenarios.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Sqlite,
    Postgres,
}

/// Makes of `async fn name(kind: Kind)` a module `name` with one test per database.
macro_rules! on_every_database {
    ($($name:ident),+ $(,)?) => {$(
        mod $name {
            use crate::support::Kind;

            #[tokio::test]
            async fn on_sqlite() {
                super::$name(Kind::Sqlite).await;
            }

            #[tokio::test]
            async fn on_postgres() {
                super::$name(Kind::Postgres).await;
            }
        }
    )+};
}
pub(crate) use on_every_database;

/// Makes of `async fn name(kind: Kind)` a module `name` with one test, on PostgreSQL.
macro_rules! on_postgres {
    ($($name:ident),+ $(,)?) => {$(
        mod $name {
            use crate::support::Kind;

            #[tokio::test]
            async fn on_postgres() {
                super::$name(Kind::Postgres).await;
            }
        }
    )+};
}
pub(crate) use on_postgres;

// ------------------------------------------------------------------------------------------------------- database

#[derive(Debug, Clone)]
enum Pool {
    Sqlite(sqlx::SqlitePool),
    Postgres(sqlx::PgPool),
}

/// A database of its own, as an application sees it.
#[derive(Debug, Clone)]
pub struct Db {
    pub kind: Kind,
    /// URL (PostgreSQL) or path (SQLite).
    pub address: String,
    pool: Pool,
}

impl Db {
    /// A fresh, empty database; a SQLite file lies in `folder`.
    pub async fn fresh(kind: Kind, folder: &Path) -> Db {
        testkit::init();
        match kind {
            Kind::Postgres => Db::postgres(testkit::postgres().await.fresh_database().await).await,
            Kind::Sqlite => Db::sqlite(&folder.join("queuebox.db")).await,
        }
    }

    /// The PostgreSQL database of this URL.
    pub async fn postgres(url: String) -> Db {
        let options: sqlx::postgres::PgConnectOptions = url.parse().unwrap();
        let pool = sqlx::postgres::PgPoolOptions::new()
            .max_connections(60)
            .acquire_timeout(PATIENCE)
            .connect_with(options.options([("timezone", "UTC")]))
            .await
            .unwrap();
        Db { kind: Kind::Postgres, address: url, pool: Pool::Postgres(pool) }
    }

    /// The SQLite database in this file.
    pub async fn sqlite(path: &Path) -> Db {
        let options = sqlx::sqlite::SqliteConnectOptions::new()
            .filename(path)
            .create_if_missing(true)
            .journal_mode(sqlx::sqlite::SqliteJournalMode::Wal)
            .busy_timeout(PATIENCE);
        let pool = sqlx::sqlite::SqlitePoolOptions::new().max_connections(8).connect_with(options).await.unwrap();
        Db { kind: Kind::Sqlite, address: path.display().to_string(), pool: Pool::Sqlite(pool) }
    }

    /// Runs statements; panics with the text when one fails. Returns the changed rows.
    pub async fn execute(&self, sql: &str) -> u64 {
        self.try_execute(sql).await.unwrap_or_else(|error| panic!("{error}\n{sql}"))
    }

    /// [`Db::execute`] with the error of the database.
    pub async fn try_execute(&self, sql: &str) -> Result<u64, sqlx::Error> {
        let sql = AssertSqlSafe(sql.to_owned());
        Ok(match &self.pool {
            Pool::Sqlite(pool) => sqlx::raw_sql(sql).execute(pool).await?.rows_affected(),
            Pool::Postgres(pool) => sqlx::raw_sql(sql).execute(pool).await?.rows_affected(),
        })
    }

    /// Rows of a query as objects by column name. Times are text that [`time`] reads; JSON columns are values on both
    /// databases.
    pub async fn rows(&self, sql: &str) -> Vec<Value> {
        let fail = |error: sqlx::Error| -> ! { panic!("{error}\n{sql}") };
        match &self.pool {
            Pool::Postgres(pool) => {
                let wrapped = format!("SELECT row_to_json(q)::text FROM ({sql}) q");
                let rows: Vec<String> =
                    sqlx::query_scalar(AssertSqlSafe(wrapped)).fetch_all(pool).await.unwrap_or_else(|e| fail(e));
                rows.iter().map(|row| serde_json::from_str(row).unwrap()).collect()
            }
            Pool::Sqlite(pool) => {
                let rows = sqlx::query(AssertSqlSafe(sql.to_owned())).fetch_all(pool).await.unwrap_or_else(|e| fail(e));
                rows.iter().map(sqlite_object).collect()
            }
        }
    }

    /// The only row of a query.
    pub async fn row(&self, sql: &str) -> Value {
        let mut rows = self.rows(sql).await;
        assert_eq!(rows.len(), 1, "{sql} gave {rows:#?}");
        rows.remove(0)
    }

    /// The number that a query with one column gives.
    pub async fn count(&self, sql: &str) -> i64 {
        let row = self.row(sql).await;
        let value = row.as_object().unwrap().values().next().unwrap();
        value.as_i64().unwrap_or_else(|| panic!("{sql} gave {value}"))
    }

    /// Rows per state of `outbox` or `inbox`.
    pub async fn states(&self, table: &str) -> BTreeMap<String, i64> {
        let rows = self.rows(&format!("SELECT state, count(*) AS n FROM {table} GROUP BY state")).await;
        rows.iter().map(|row| (text(row, "state").to_owned(), row["n"].as_i64().unwrap())).collect()
    }

    /// Waits until the rows of `table` have just these states.
    pub async fn wait_states(&self, table: &str, wanted: &[(&str, i64)]) {
        let wanted: BTreeMap<String, i64> = wanted.iter().map(|(state, n)| ((*state).to_owned(), *n)).collect();
        let last = Mutex::new(BTreeMap::new());
        let look = async {
            loop {
                let states = self.states(table).await;
                if states == wanted {
                    return;
                }
                *last.lock().unwrap() = states;
                tokio::time::sleep(Duration::from_millis(30)).await;
            }
        };
        if tokio::time::timeout(PATIENCE, look).await.is_err() {
            panic!("{table} has {:?} and not {wanted:?}", last.lock().unwrap());
        }
    }

    /// Waits until `row(sql)` satisfies `enough`, and returns it.
    pub async fn wait_row(&self, sql: &str, enough: impl Fn(&Value) -> bool) -> Value {
        testkit::eventually(sql, PATIENCE, || async {
            let mut rows = self.rows(sql).await;
            (rows.len() == 1 && enough(&rows[0])).then(|| rows.remove(0))
        })
        .await
    }

    /// The outbox row with this id.
    pub async fn outbox(&self, id: &str) -> Value {
        self.row(&format!("SELECT * FROM outbox WHERE id = '{id}'")).await
    }

    /// Waits until the outbox row with this id has this state, and returns it.
    pub async fn wait_outbox(&self, id: &str, state: &str) -> Value {
        self.wait_row(&format!("SELECT * FROM outbox WHERE id = '{id}'"), |row| text(row, "state") == state).await
    }

    /// Inserts an outbox row in a transaction of its own, as an application does. Returns its id.
    pub async fn insert(&self, row: OutboxRow) -> String {
        self.execute(&row.sql()).await;
        row.id
    }

    /// Inserts rows in one transaction, in this order. Returns their ids.
    pub async fn insert_all(&self, rows: impl IntoIterator<Item = OutboxRow>) -> Vec<String> {
        let mut tx = self.begin().await;
        let mut ids = Vec::new();
        for row in rows {
            tx.execute(&row.sql()).await;
            ids.push(row.id);
        }
        tx.commit().await;
        ids
    }

    /// A transaction that will write.
    pub async fn begin(&self) -> Tx {
        match &self.pool {
            Pool::Sqlite(pool) => Tx::Sqlite(pool.begin_with("BEGIN IMMEDIATE").await.unwrap()),
            Pool::Postgres(pool) => Tx::Postgres(pool.begin().await.unwrap()),
        }
    }

    /// SQL for now plus so many seconds, which may be negative.
    pub fn in_seconds(&self, seconds: i64) -> String {
        match self.kind {
            Kind::Postgres => format!("clock_timestamp() + interval '{seconds} seconds'"),
            Kind::Sqlite => format!("strftime('%Y-%m-%dT%H:%M:%f000Z','now','{seconds} seconds')"),
        }
    }

    /// Closes the connections of the test.
    pub async fn close(&self) {
        match &self.pool {
            Pool::Sqlite(pool) => pool.close().await,
            Pool::Postgres(pool) => pool.close().await,
        }
    }
}

/// A value that is bound to a parameter.
#[derive(Debug, Clone)]
pub enum Bound {
    Text(String),
    Number(i64),
    Null,
}

impl From<&str> for Bound {
    fn from(text: &str) -> Bound {
        Bound::Text(text.to_owned())
    }
}

impl From<i64> for Bound {
    fn from(number: i64) -> Bound {
        Bound::Number(number)
    }
}

/// Binds values in order; a null is one of text, which every statement casts.
macro_rules! bind_all {
    ($sql:expr, $values:expr) => {
        $values.iter().fold(sqlx::query(AssertSqlSafe($sql)), |query, value| match value {
            Bound::Text(text) => query.bind(text.clone()),
            Bound::Number(number) => query.bind(*number),
            Bound::Null => query.bind(Option::<String>::None),
        })
    };
}

/// A statement with parameters `:name`, as files of `clients/sql` have them.
#[derive(Debug)]
pub struct Statement {
    sql: String,
    /// Names in the order of their numbers.
    pub parameters: Vec<String>,
}

impl Statement {
    /// Gives each name a number: `$1` on PostgreSQL, `?1` on SQLite.
    pub fn new(kind: Kind, text: &str) -> Statement {
        let mark = if kind == Kind::Postgres { '$' } else { '?' };
        let (mut sql, mut parameters) = (String::new(), Vec::<String>::new());
        let mut rest = text;
        while let Some(at) = rest.find(':') {
            let name: String = rest[at + 1..].chars().take_while(|c| c.is_ascii_lowercase() || *c == '_').collect();
            sql.push_str(&rest[..at]);
            rest = &rest[at + 1 + name.len()..];
            if name.is_empty() {
                sql.push(':');
                continue;
            }
            let known = parameters.iter().position(|known| *known == name);
            let number = known.unwrap_or_else(|| {
                parameters.push(name);
                parameters.len() - 1
            });
            sql.push_str(&format!("{mark}{}", number + 1));
        }
        sql.push_str(rest);
        Statement { sql, parameters }
    }

    fn values(&self, given: &[(&str, Bound)]) -> Vec<Bound> {
        assert_eq!(given.len(), self.parameters.len(), "{:?}", self.parameters);
        let of = |name: &String| given.iter().find(|(given, _)| given == name).map(|(_, value)| value.clone());
        self.parameters.iter().map(|name| of(name).unwrap_or_else(|| panic!("{name} is not given"))).collect()
    }

    /// Runs it in a transaction of its own; returns the changed rows.
    pub async fn run(&self, db: &Db, given: &[(&str, Bound)]) -> u64 {
        let mut tx = db.begin().await;
        let changed = self.run_in(&mut tx, given).await;
        tx.commit().await;
        changed
    }

    /// Runs it in this transaction.
    pub async fn run_in(&self, tx: &mut Tx, given: &[(&str, Bound)]) -> u64 {
        let (sql, values) = (self.sql.clone(), self.values(given));
        match tx {
            Tx::Sqlite(tx) => bind_all!(sql, values).execute(&mut **tx).await.map(|done| done.rows_affected()),
            Tx::Postgres(tx) => bind_all!(sql, values).execute(&mut **tx).await.map(|done| done.rows_affected()),
        }
        .unwrap_or_else(|error| panic!("{error}\n{}", self.sql))
    }

    /// Runs it in a transaction of its own; returns the column `id` of its rows.
    pub async fn ids(&self, db: &Db, given: &[(&str, Bound)]) -> Vec<String> {
        let (sql, values) = (self.sql.clone(), self.values(given));
        let mut tx = db.begin().await;
        let ids = match &mut tx {
            Tx::Sqlite(tx) => bind_all!(sql, values)
                .fetch_all(&mut **tx)
                .await
                .map(|rows| rows.iter().map(|row| row.get("id")).collect::<Vec<String>>()),
            Tx::Postgres(tx) => bind_all!(sql, values)
                .fetch_all(&mut **tx)
                .await
                .map(|rows| rows.iter().map(|row| row.get::<uuid::Uuid, _>("id").to_string()).collect()),
        };
        tx.commit().await;
        ids.unwrap_or_else(|error| panic!("{error}\n{}", self.sql))
    }
}

/// An open transaction; it is rolled back when dropped.
#[derive(Debug)]
pub enum Tx {
    Sqlite(sqlx::Transaction<'static, sqlx::Sqlite>),
    Postgres(sqlx::Transaction<'static, sqlx::Postgres>),
}

impl Tx {
    pub async fn execute(&mut self, sql: &str) -> u64 {
        let text = AssertSqlSafe(sql.to_owned());
        let done = match self {
            Tx::Sqlite(tx) => sqlx::raw_sql(text).execute(&mut **tx).await.map(|done| done.rows_affected()),
            Tx::Postgres(tx) => sqlx::raw_sql(text).execute(&mut **tx).await.map(|done| done.rows_affected()),
        };
        done.unwrap_or_else(|error| panic!("{error}\n{sql}"))
    }

    /// Inserts a row and returns its id.
    pub async fn insert(&mut self, row: OutboxRow) -> String {
        self.execute(&row.sql()).await;
        row.id
    }

    pub async fn commit(self) {
        match self {
            Tx::Sqlite(tx) => tx.commit().await.unwrap(),
            Tx::Postgres(tx) => tx.commit().await.unwrap(),
        }
    }

    pub async fn rollback(self) {
        match self {
            Tx::Sqlite(tx) => tx.rollback().await.unwrap(),
            Tx::Postgres(tx) => tx.rollback().await.unwrap(),
        }
    }
}

fn sqlite_object(row: &sqlx::sqlite::SqliteRow) -> Value {
    let cell = |column: &sqlx::sqlite::SqliteColumn| {
        let index = column.ordinal();
        let raw = row.try_get_raw(index).unwrap();
        if raw.is_null() {
            return Value::Null;
        }
        match raw.type_info().name() {
            "INTEGER" => json!(row.get::<i64, _>(index)),
            "REAL" => json!(row.get::<f64, _>(index)),
            _ => {
                let text: String = row.get(index);
                let is_json = ["payload", "headers"].contains(&column.name());
                if is_json { serde_json::from_str(&text).unwrap() } else { Value::String(text) }
            }
        }
    };
    Value::Object(row.columns().iter().map(|column| (column.name().to_owned(), cell(column))).collect())
}

/// Text of a column; panics when it is null or no text.
pub fn text<'a>(row: &'a Value, column: &str) -> &'a str {
    row[column].as_str().unwrap_or_else(|| panic!("{column} of {row:#}"))
}

/// Number in a column.
pub fn number(row: &Value, column: &str) -> i64 {
    row[column].as_i64().unwrap_or_else(|| panic!("{column} of {row:#}"))
}

/// Time in a column, of either database.
pub fn time(row: &Value, column: &str) -> jiff::Timestamp {
    text(row, column).parse().unwrap_or_else(|error| panic!("{error}: {column} of {row:#}"))
}

/// A text as an SQL literal.
pub fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', "''"))
}

/// An outbox row that an application inserts; columns that are not set are left to their defaults.
#[derive(Debug, Clone)]
pub struct OutboxRow {
    /// Id, chosen here so that the test knows it.
    pub id: String,
    columns: Vec<(&'static str, String)>,
}

impl OutboxRow {
    /// A row without a key, with payload `{"n":n}`.
    pub fn new(topic: &str, n: i64) -> OutboxRow {
        OutboxRow { id: uuid::Uuid::new_v4().to_string(), columns: Vec::new() }
            .set("topic", &quoted(topic))
            .payload(&json!({ "n": n }).to_string())
    }

    /// With this key.
    pub fn key(self, key: &str) -> Self {
        self.set("key", &quoted(key))
    }

    /// With this payload, as JSON text.
    pub fn payload(self, json: &str) -> Self {
        self.set("payload", &quoted(json))
    }

    /// With these headers.
    pub fn headers(self, headers: Value) -> Self {
        self.set("headers", &quoted(&headers.to_string()))
    }

    /// With this ceiling of attempts.
    pub fn max_attempts(self, n: i64) -> Self {
        self.set("max_attempts", &n.to_string())
    }

    /// With any column as an SQL expression.
    pub fn set(mut self, column: &'static str, sql: &str) -> Self {
        self.columns.retain(|(name, _)| *name != column);
        self.columns.push((column, sql.to_owned()));
        self
    }

    /// The INSERT.
    pub fn sql(&self) -> String {
        let names: String = self.columns.iter().map(|(name, _)| format!(", \"{name}\"")).collect();
        let values: String = self.columns.iter().map(|(_, value)| format!(", {value}")).collect();
        format!("INSERT INTO outbox (id{names}) VALUES ('{}'{values})", self.id)
    }
}

// ---------------------------------------------------------------------------------------------------------- world

/// One Relay with its manifests, database, receiver and workers.
#[derive(Debug)]
pub struct World {
    /// Name of the Relay.
    name: String,
    pub db: Db,
    /// Where the destination `receiver` sends to.
    pub receiver: Recorder,
    folder: tempfile::TempDir,
    relay: Value,
    others: BTreeMap<(&'static str, String), Value>,
    environment: Vec<(String, String)>,
    workers: Mutex<Vec<Arc<Worker>>>,
}

impl World {
    /// An empty database of this kind, a receiver, and manifests that send everything to it.
    pub async fn on(kind: Kind) -> World {
        let folder = tempfile::Builder::new().prefix("queuebox-world-").tempdir().unwrap();
        let db = Db::fresh(kind, folder.path()).await;
        World::with(db, folder).await
    }

    /// A world around a database that is there already; `folder` ends with the world.
    pub async fn with(db: Db, folder: tempfile::TempDir) -> World {
        let receiver = Recorder::start().await;
        let database = match db.kind {
            Kind::Postgres => json!({ "postgres": { "urlFrom": { "env": "DATABASE_URL" } } }),
            Kind::Sqlite => json!({ "sqlite": { "path": db.address, "busyTimeout": "20s" } }),
        };
        let relay = json!({
            "database": database,
            "routes": [{ "topics": ["**"], "destinations": ["receiver"] }],
            "outbox": {
                "claimTimeout": "3s",
                "pollInterval": "50ms",
                "backoff": { "initial": "200ms", "max": "1s" },
            },
            "inbox": { "relay": { "claimTimeout": "3s", "pollInterval": "50ms" } },
            "admin": { "enabled": true, "insecure": true },
        });
        let environment = vec![("DATABASE_URL".to_owned(), db.address.clone())];
        let world = World {
            name: "shop".to_owned(),
            db,
            receiver,
            folder,
            relay,
            others: BTreeMap::new(),
            environment,
            workers: Mutex::default(),
        };
        let url = world.receiver.url_for("/events");
        world.destination("receiver", json!({ "http": { "url": url } }))
    }

    /// Changes the Relay's `spec`.
    pub fn relay(mut self, patch: Value) -> Self {
        merge(&mut self.relay, patch);
        self
    }

    /// Gives the Relay of the workers that are started from now on another name.
    pub fn named(mut self, name: &str) -> Self {
        name.clone_into(&mut self.name);
        self
    }

    /// Replaces the routes: topics and destinations of each.
    pub fn routes(self, routes: &[(&str, &[&str])]) -> Self {
        let routes: Vec<Value> = routes
            .iter()
            .map(|(topic, destinations)| json!({ "topics": [topic], "destinations": destinations }))
            .collect();
        self.relay(json!({ "routes": routes }))
    }

    /// Adds or changes a Destination: breaker off and time-out 5 s unless the patch says otherwise.
    pub fn destination(mut self, name: &str, patch: Value) -> Self {
        let mut base = json!({ "breaker": { "mode": "Off" } });
        if patch.get("http").is_some() {
            merge(&mut base, json!({ "http": { "timeout": "5s" } }));
        }
        merge(self.others.entry(("Destination", name.to_owned())).or_insert(base), patch);
        self
    }

    /// Adds or changes a Source. Without anything else it is an HTTP source at `/NAME` with `$.id` for the key.
    pub fn source(mut self, name: &str, patch: Value) -> Self {
        let mut base = json!({ "relayRef": { "name": "shop" }, "idempotencyKeyPath": "$.id" });
        if !["rabbitmq", "kafka", "nats"].iter().any(|kind| patch.get(kind).is_some()) {
            merge(&mut base, json!({ "http": { "path": format!("/{name}") }, "topic": name }));
        }
        merge(self.others.entry(("Source", name.to_owned())).or_insert(base), patch);
        self
    }

    /// Sets an environment variable of the workers that are started from now on.
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.environment.push((name.to_owned(), value.to_owned()));
        self
    }

    /// A folder of the world, for files that manifests name.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Writes the manifests into a folder of their own and returns it.
    pub fn write_manifests(&self, http: u16, management: u16) -> PathBuf {
        let folder = self.folder.path().join(format!("manifests-{management}"));
        std::fs::create_dir_all(&folder).unwrap();
        let mut relay = self.relay.clone();
        merge(&mut relay, json!({ "http": { "port": http, "managementPort": management } }));
        let write = |kind: &str, name: &str, spec: &Value| {
            let manifest = json!({
                "apiVersion": "queuebox.io/v1alpha1", "kind": kind, "metadata": { "name": name }, "spec": spec,
            });
            let file = folder.join(format!("{}-{name}.json", kind.to_lowercase()));
            std::fs::write(file, serde_json::to_string_pretty(&manifest).unwrap()).unwrap();
        };
        write("Relay", &self.name, &relay);
        for ((kind, name), spec) in &self.others {
            write(kind, name, spec);
        }
        folder
    }

    /// The program with these arguments and the world's environment.
    pub fn program(&self, arguments: &[&str]) -> testkit::ProcessBuilder {
        let program = Process::queuebox(arguments).dir(self.folder.path());
        self.environment.iter().fold(program, |program, (name, value)| program.env(name, value))
    }

    /// Creates the tables without a worker.
    pub async fn migrate(&self) {
        let folder = self.write_manifests(1, 2);
        let (status, out, log) = self.program(&["migrate", "-f", folder.to_str().unwrap()]).run(PATIENCE).await;
        assert!(status.success(), "{out}{log}");
    }

    /// Starts a worker with the manifests as they are now and returns at once.
    pub fn spawn(&self) -> Arc<Worker> {
        self.spawn_with(&[])
    }

    /// [`World::spawn`] with options before `run`.
    pub fn spawn_with(&self, options: &[&str]) -> Arc<Worker> {
        let (http, management) = (testkit::free_port(), testkit::free_port());
        let folder = self.write_manifests(http, management);
        let process = self.program(&[options, &["run", "-f", folder.to_str().unwrap()]].concat()).spawn();
        let worker = Arc::new(Worker { process, http, management, client: reqwest::Client::new() });
        self.workers.lock().unwrap_or_else(PoisonError::into_inner).push(worker.clone());
        worker
    }

    /// Starts a worker and waits until it is ready.
    pub async fn start(&self) -> Arc<Worker> {
        let worker = self.spawn();
        worker.ready().await;
        worker
    }

    /// Ids of which some worker said that its claim was lost, and how often.
    pub fn claims_lost(&self) -> std::collections::HashMap<String, u32> {
        let workers: Vec<Arc<Worker>> = self.workers.lock().unwrap().clone();
        let mut lost = std::collections::HashMap::new();
        for worker in workers {
            let log = worker.process.output();
            for line in log.lines().filter(|line| line.contains("delivered twice")) {
                let id = line.split("message_id=").nth(1).and_then(|rest| rest.get(..36));
                *lost.entry(id.unwrap_or_else(|| panic!("no id in {line}")).to_owned()).or_default() += 1;
            }
        }
        lost
    }

    /// Waits until the lanes of both tables are spread over so many workers, so that each of them works. A SQLite file has one lane.
    pub async fn spread_over(&self, workers: i64) {
        let owners = |scope: &str| {
            format!(
                "SELECT count(*) AS n FROM (SELECT worker FROM queuebox_lane WHERE scope = '{scope}' AND worker IS NOT NULL \
                 GROUP BY worker HAVING count(*) >= {}) q",
                64 / workers - 1
            )
        };
        let wanted = if self.db.kind == Kind::Sqlite { return } else { workers };
        for scope in ["outbox", "inbox"] {
            self.db.wait_row(&owners(scope), |row| number(row, "n") == wanted).await;
        }
    }

    /// Stops all workers that still run; each must end well, and none may have ended by itself.
    pub async fn finish(self) {
        let workers: Vec<Arc<Worker>> = self.workers.lock().unwrap().clone();
        for worker in &workers {
            assert!(!worker.process.ended_by_itself(), "worker {} ended by itself", worker.process.pid());
        }
        for worker in workers.iter().filter(|worker| worker.process.is_running()) {
            let status = worker.process.terminate(PATIENCE).await;
            assert!(status.success(), "a worker ended with {status}");
        }
        self.db.close().await;
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            return;
        }
        for worker in self.workers.get_mut().unwrap_or_else(PoisonError::into_inner) {
            let log = worker.process.output();
            let lines: Vec<&str> = log.lines().collect();
            eprintln!("--- log of worker {}:", worker.process.pid());
            for line in &lines[lines.len().saturating_sub(60)..] {
                eprintln!("{line}");
            }
        }
    }
}

pub fn merge(base: &mut Value, patch: Value) {
    match (base, patch) {
        (Value::Object(base), Value::Object(patch)) => {
            for (name, value) in patch {
                if value.is_null() {
                    base.remove(&name);
                } else {
                    merge(base.entry(name).or_insert(Value::Null), value);
                }
            }
        }
        (base, patch) => *base = patch,
    }
}

/// A running `queuebox run`.
#[derive(Debug)]
pub struct Worker {
    pub process: Process,
    /// Data port.
    pub http: u16,
    /// Management port.
    pub management: u16,
    client: reqwest::Client,
}

impl Worker {
    /// A program that was started otherwise than by a [`World`].
    pub fn of(process: Process, http: u16, management: u16) -> Worker {
        Worker { process, http, management, client: reqwest::Client::new() }
    }

    /// Waits for `/readyz`.
    pub async fn ready(&self) {
        self.process.wait_ready(&self.management_url("/readyz"), PATIENCE).await;
    }

    /// URL on the management port.
    pub fn management_url(&self, path: &str) -> String {
        format!("http://127.0.0.1:{}{path}", self.management)
    }

    /// URL on the data port.
    pub fn url(&self, path: &str) -> String {
        format!("http://127.0.0.1:{}{path}", self.http)
    }

    /// Posts a body to `/inbox/SOURCE`.
    pub async fn post(&self, source: &str, body: impl Into<String>) -> Answered {
        self.post_with(source, &[], body).await
    }

    /// [`Worker::post`] with headers.
    pub async fn post_with(&self, source: &str, headers: &[(&str, &str)], body: impl Into<String>) -> Answered {
        let url = self.url(&format!("/inbox/{source}"));
        let request =
            headers.iter().fold(self.client.post(url), |request, (name, value)| request.header(*name, *value));
        Answered::of(request.body(body.into())).await
    }

    /// Sends JSON to the management port.
    pub async fn admin(&self, path: &str, body: Value) -> Answered {
        let request = self.client.post(self.management_url(path)).header("content-type", "application/json");
        Answered::of(request.body(body.to_string())).await
    }

    /// GET on the management port.
    pub async fn get(&self, path: &str) -> Answered {
        Answered::of(self.client.get(self.management_url(path))).await
    }

    /// Sum of the series with this name that carry these labels; 0 without any. The name must be a documented one.
    pub async fn metric(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        let of_histogram = ["_count", "_sum", "_bucket"].iter().find_map(|part| name.strip_suffix(part));
        let documented = |name: &str| METRICS.contains(&format!("`{name}`"));
        assert!(documented(name) || of_histogram.is_some_and(documented), "there is no metric {name}");
        let answer = self.get("/metrics").await;
        assert_eq!(answer.status, 200, "{answer:?}");
        let page = answer.body;
        let of_series = |line: &str| {
            let (series, value) = line.rsplit_once(' ')?;
            let (found, rest) = series.split_once('{').unwrap_or((series, ""));
            let fits = found == name && labels.iter().all(|(l, v)| rest.contains(&format!("{l}=\"{v}\"")));
            fits.then(|| value.parse::<f64>().unwrap())
        };
        page.lines().filter(|line| !line.starts_with('#')).filter_map(of_series).sum()
    }

    /// Waits until [`Worker::metric`] satisfies `enough`, and returns it.
    pub async fn wait_metric(&self, name: &str, labels: &[(&str, &str)], enough: impl Fn(f64) -> bool) -> f64 {
        testkit::eventually(&format!("{name}{labels:?}"), PATIENCE, || async {
            let value = self.metric(name, labels).await;
            enough(value).then_some(value)
        })
        .await
    }
}

/// An answer, whole.
#[derive(Debug)]
pub struct Answered {
    pub status: u16,
    pub headers: reqwest::header::HeaderMap,
    pub body: String,
}

impl Answered {
    /// Sends a request; panics when there is no answer.
    pub async fn of(request: reqwest::RequestBuilder) -> Answered {
        let answer = request.timeout(PATIENCE).send().await.unwrap();
        let (status, headers) = (answer.status().as_u16(), answer.headers().clone());
        let body = answer.text().await.unwrap();
        testkit::keep("answer", &[&format!("{headers:?}"), &body]);
        Answered { status, headers, body }
    }

    /// Body as JSON.
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// A header as text; empty when absent.
    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
    }

    /// Asserts 202 and returns the inbox id.
    pub fn accepted(&self) -> String {
        assert_eq!(self.status, 202, "{self:?}");
        text(&self.json(), "messageId").to_owned()
    }
}

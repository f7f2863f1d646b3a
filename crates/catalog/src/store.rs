//! Opens databases.

use std::sync::Arc;

use queuebox_api::{SecretResolver, checked};
use queuebox_core::{Fault, ports::Store};
use queuebox_postgres::{Capture, PostgresConfig, PostgresStore, Target, TlsMode, WakeState};
use queuebox_sql::names::{ColumnMapping, Names, Quote, TableNames};
use queuebox_sqlite::{OnSent, SqliteConfig};

use crate::secret::{optional, secret};

/// A database, and how its worker is woken.
#[derive(Clone)]
pub struct Opened {
    /// The database.
    pub store: Arc<dyn Store>,
    /// LISTEN: `None` = not used, else whether it stands, or why not (contract 5.5).
    pub capture: Arc<dyn Fn() -> Option<Result<(), String>> + Send + Sync>,
}

/// Opens the Relay's database. A server is not reached yet; SQLite's file is made if need be.
///
/// # Errors
/// A database that cannot be configured (an unreadable URL, a file that cannot be made).
pub async fn open_store(relay: &checked::Relay, secrets: &Arc<dyn SecretResolver>) -> Result<Opened, Fault> {
    match &relay.database.server {
        checked::DatabaseServer::Sqlite { path, busy_timeout } => {
            let names = Names::check(&table_names(&relay.database), Quote::Double, None)
                .map_err(|errors| names_fault(&errors))?;
            let config = SqliteConfig {
                path: path.into(),
                busy_timeout: *busy_timeout,
                pool_size: relay.database.pool_size,
                names,
                on_sent: if deletes(relay) { OnSent::Delete } else { OnSent::Keep },
            };
            let store = Arc::new(queuebox_sqlite::open(config).await?);
            Ok(Opened { store, capture: Arc::new(|| None) })
        }
        checked::DatabaseServer::Postgres(server) => {
            let store = Arc::new(PostgresStore::open(postgres(relay, server, secrets)?)?);
            let woken = store.clone();
            let capture = Arc::new(move || match woken.wake_state() {
                WakeState::Polling(_) => None,
                WakeState::Listening => Some(Ok(())),
                WakeState::Down(why) => Some(Err(why)),
            });
            Ok(Opened { store, capture })
        }
        other => Err(Fault::misconfigured("database_kind", format!("this release does not serve {}", other.kind()))),
    }
}

fn deletes(relay: &checked::Relay) -> bool {
    matches!(relay.outbox.on_sent, checked::OnSent::Delete)
}

fn names_fault(errors: &[queuebox_sql::names::NameError]) -> Fault {
    let texts: Vec<String> = errors.iter().map(ToString::to_string).collect();
    Fault::misconfigured("names", texts.join("; "))
}

fn table_names(database: &checked::Database) -> TableNames {
    TableNames {
        outbox_table_name: database.outbox_table.clone(),
        inbox_table_name: database.inbox_table.clone(),
        column_mapping: ColumnMapping {
            outbox: database.outbox_columns.clone(),
            inbox: database.inbox_columns.clone(),
        },
    }
}

fn postgres(
    relay: &checked::Relay,
    server: &checked::Server,
    secrets: &Arc<dyn SecretResolver>,
) -> Result<PostgresConfig, Fault> {
    let mut config = postgres_server(server, secrets)?;
    // What the manifest does not say, the URL may have said.
    if server.schema.is_some() {
        config.schema.clone_from(&server.schema);
    }
    config.pool_size = relay.database.pool_size;
    config.connect_timeout = relay.database.connect_timeout;
    config.names = table_names(&relay.database);
    config.on_sent_delete = deletes(relay);
    config.capture = match (&relay.capture.connection, relay.capture.auto) {
        (_, false) => Capture::Polling,
        (None, true) => Capture::Auto(None),
        (Some(direct), true) => Capture::Auto(Some(Box::new(postgres_server(direct, secrets)?.target))),
    };
    Ok(config)
}

fn postgres_server(server: &checked::Server, secrets: &Arc<dyn SecretResolver>) -> Result<PostgresConfig, Fault> {
    let mut config = match &server.login {
        // Read again for each connection: a rotated password needs no restart.
        checked::DatabaseLogin::Url(reference) => PostgresConfig::from_url_secret(&secret(reference, secrets))
            .map_err(|error| Fault::misconfigured("url_from", format!("{reference}: {error}")))?,
        checked::DatabaseLogin::Parts { host, port, database, username, password } => PostgresConfig::new(Target {
            host: host.clone(),
            port: *port,
            database: database.clone(),
            username: username.clone(),
            password: optional(password.as_ref(), secrets),
            tls: queuebox_postgres::Tls::default(),
        }),
    };
    let tls = &mut config.target.tls;
    if server.tls.has_mode || matches!(server.login, checked::DatabaseLogin::Parts { .. }) {
        tls.mode = match server.tls.mode {
            checked::TlsMode::Disable => TlsMode::Disable,
            checked::TlsMode::Prefer => TlsMode::Prefer,
            checked::TlsMode::Require => TlsMode::Require,
            checked::TlsMode::VerifyCA => TlsMode::VerifyCa,
            checked::TlsMode::VerifyFull => TlsMode::VerifyFull,
        };
    }
    let files = &server.tls.files;
    for (given, used) in [(&files.ca, &mut tls.ca), (&files.cert, &mut tls.cert), (&files.key, &mut tls.key)] {
        if let Some(reference) = given {
            *used = Some(secret(reference, secrets));
        }
    }
    Ok(config)
}

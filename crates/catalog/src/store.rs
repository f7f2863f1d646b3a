//! Opens databases.

use std::{collections::BTreeMap, sync::Arc};

use queuebox_api::{SecretResolver, checked};
use queuebox_core::{Fault, ports::Store};
use queuebox_postgres::{Capture, PostgresConfig, PostgresStore, RouteTarget, Target, TlsMode, WakeState};
use queuebox_sql::names::{ColumnMapping, Names, Quote, TableNames, camel_case};
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

/// Refuses routes with several destinations on tables that cannot hold child rows (contract 2.5): the first row of such a route would
/// hold its key for ever. Asked for after the check of the tables.
///
/// # Errors
/// Names each of these routes.
pub fn refuse_fan_out(relay: &checked::Relay, fans_out: bool) -> Result<(), Fault> {
    let several = relay.routes.iter().enumerate().filter(|(_, route)| route.destinations.len() > 1);
    let fields: Vec<String> =
        several.map(|(index, route)| format!("spec.routes[{index}] ({})", route.destinations.join(", "))).collect();
    if fans_out || fields.is_empty() {
        return Ok(());
    }
    let renamed = !(relay.database.outbox_columns.is_empty() && relay.database.outbox_table == "outbox");
    let mend = if renamed {
        "add the columns destination VARCHAR(255) and parent_id UUID to the outbox"
    } else {
        "run \"queuebox migrate\""
    };
    Err(Fault::misconfigured(
        "fan_out",
        format!(
            "a route with several destinations needs outbox.destination and outbox.parent_id (schema version 12), which this \
             database lacks: {}. Give each of them one destination, or {mend}",
            fields.join(", ")
        ),
    ))
}

fn deletes(relay: &checked::Relay) -> bool {
    matches!(relay.outbox.on_sent, checked::OnSent::Delete)
}

fn names_fault(errors: &[queuebox_sql::names::NameError]) -> Fault {
    let texts: Vec<String> = errors.iter().map(ToString::to_string).collect();
    Fault::misconfigured("names", texts.join("; "))
}

/// A checked manifest has columns by their names in the contract, a store takes the keys of `columnMapping`.
fn table_names(database: &checked::Database) -> TableNames {
    let by_key = |columns: &BTreeMap<String, String>| {
        columns.iter().map(|(column, name)| (camel_case(column), name.clone())).collect()
    };
    TableNames {
        outbox_table_name: database.outbox_table.clone(),
        inbox_table_name: database.inbox_table.clone(),
        column_mapping: ColumnMapping {
            outbox: by_key(&database.outbox_columns),
            inbox: by_key(&database.inbox_columns),
        },
    }
}

fn route_target(route: &checked::Route) -> RouteTarget {
    let destination = match route.destinations.as_slice() {
        [only] => Some(only.clone()),
        _ => None,
    };
    RouteTarget { topics: route.topics.clone(), destination }
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
    config.routes = relay.routes.iter().map(route_target).collect();
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
            .map_err(|error| {
                Fault::misconfigured("url_from", format!("Relay.spec.database.postgres.urlFrom: {error}"))
            })?,
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use queuebox_api::{Manifests, Target, check};
    use queuebox_sql::names::{INBOX_COLUMNS, OUTBOX_COLUMNS};

    use super::*;

    fn relay(spec: &str) -> checked::Relay {
        let mut manifests = Manifests::default();
        let object = |kind: &str, name: &str, spec: &str| {
            format!("apiVersion: queuebox.io/v1alpha1\nkind: {kind}\nmetadata: {{name: {name}}}\nspec: {spec}\n---\n")
        };
        let destination = "{http: {url: \"http://127.0.0.1:1/\"}}";
        let text = [("Relay", "shop", spec), ("Destination", "a", destination), ("Destination", "b", destination)];
        manifests.add_text("m.yaml", &text.map(|(kind, name, spec)| object(kind, name, spec)).concat());
        check(&manifests, Target::Local).into_relay(None).unwrap()
    }

    #[test]
    fn every_column_of_a_manifest_reaches_the_store() {
        let mapping = |columns: &[&str]| {
            columns
                .iter()
                .map(|column| format!("{}: \"My_{column}\"", camel_case(column)))
                .collect::<Vec<_>>()
                .join(", ")
        };
        let relay = relay(&format!(
            "{{database: {{migrate: \"Off\", columnMapping: {{outbox: {{{}}}, inbox: {{{}}}}}}}}}",
            mapping(&OUTBOX_COLUMNS),
            mapping(&INBOX_COLUMNS)
        ));
        let names = Names::check(&table_names(&relay.database), Quote::Double, None).unwrap();
        for column in OUTBOX_COLUMNS {
            assert_eq!(names.outbox_column(column), format!("My_{column}"));
        }
        for column in INBOX_COLUMNS {
            assert_eq!(names.inbox_column(column), format!("My_{column}"));
        }
    }

    /// contract 2.5
    #[test]
    fn fan_out_is_refused_where_the_tables_cannot_hold_it() {
        let routes = "routes: [{topics: [x], destinations: [a]}, {topics: [y], destinations: [a, b]}]";
        let fault = refuse_fan_out(&relay(&format!("{{{routes}}}")), false).unwrap_err();
        for part in ["spec.routes[1] (a, b)", "schema version 12", "queuebox migrate", "one destination"] {
            assert!(fault.detail.contains(part), "{part}: {fault}");
        }
        assert!(!fault.detail.contains("routes[0]"), "{fault}");
        assert_eq!(refuse_fan_out(&relay(&format!("{{{routes}}}")), true), Ok(()));
        assert_eq!(refuse_fan_out(&relay("{routes: [{topics: [x], destinations: [a]}]}"), false), Ok(()));
        let renamed = relay(&format!("{{{routes}, database: {{migrate: \"Off\", outboxTableName: mine}}}}"));
        let fault = refuse_fan_out(&renamed, false).unwrap_err();
        assert!(fault.detail.contains("add the columns") && !fault.detail.contains("migrate"), "{fault}");
    }
}

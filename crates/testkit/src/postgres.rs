//! PostgreSQL: one database per test on a shared server, or a server of its own.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::child::{Launch, Signal};
use crate::packages::{give_away, postgres_bin, run, run_env, unprivileged};
use crate::shared::{Peer, Server, blocking, process_methods, process_wide};

/// The superuser of the test servers.
pub(crate) const USER: &str = "queuebox";
/// Its password; a password, so that logins run as they do elsewhere, and one that the scan of a run finds wherever it is shown.
pub(crate) const PASSWORD: &str = "canary-7731-postgres";

/// A running PostgreSQL server. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Postgres {
    pub(crate) server: Arc<Server<State>>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct State {
    port: u16,
}

impl Peer for State {
    const NAME: &'static str = "postgres";

    fn prepare(folder: &Path) -> Result<(Launch, Self)> {
        let bin = postgres_bin()?;
        let data = folder.join("data");
        std::fs::create_dir_all(&data)?;
        let password = folder.join("password");
        std::fs::write(&password, PASSWORD)?;
        give_away(&data)?;
        init_database(&bin, &data, &password)?;
        let port = crate::free_port();
        let mut args = vec!["-D".to_string(), data.to_string_lossy().into_owned()];
        for (name, value) in settings(port) {
            args.extend(["-c".into(), format!("{name}={value}")]);
        }
        let launch = Launch {
            program: bin.join("postgres"),
            args,
            env: Vec::new(),
            unprivileged: true,
            before: String::new(),
            stop: Signal::Int,
        };
        Ok((launch, State { port }))
    }

    fn ready(&self) -> Result<()> {
        psql(self.port, "postgres", "SELECT 1").map(drop)
    }
}

fn init_database(bin: &Path, data: &Path, password: &Path) -> Result<()> {
    let initdb = bin.join("initdb").to_string_lossy().into_owned();
    let mut words = unprivileged();
    words.extend([initdb, "-D".into(), data.to_string_lossy().into_owned(), "-U".into(), USER.into()]);
    words.extend(["--pwfile".into(), password.to_string_lossy().into_owned(), "--auth=scram-sha-256".into()]);
    words.extend(["--no-sync", "--encoding=UTF8", "--locale=C.UTF-8"].map(String::from));
    let args: Vec<&str> = words[1..].iter().map(String::as_str).collect();
    run(&words[0], &args).map(drop).context("cannot lay down a database cluster")
}

fn settings(port: u16) -> Vec<(&'static str, String)> {
    vec![
        ("port", port.to_string()),
        ("listen_addresses", "127.0.0.1".into()),
        ("unix_socket_directories", String::new()),
        ("max_connections", "400".into()),
        ("shared_buffers", "128MB".into()),
        // Tests kill processes, not machines: what was written to the kernel survives.
        ("fsync", "off".into()),
        ("synchronous_commit", "on".into()),
        ("full_page_writes", "off".into()),
        ("autovacuum_naptime", "10s".into()),
        ("max_prepared_transactions", "20".into()),
        ("max_wal_size", "1GB".into()),
        ("log_min_duration_statement", "-1".into()),
        ("log_line_prefix", "%m [%p] %d ".into()),
    ]
}

fn psql(port: u16, database: &str, sql: &str) -> Result<String> {
    let program = postgres_bin()?.join("psql");
    let port = port.to_string();
    let args = ["-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-h", "127.0.0.1", "-p", &port, "-U", USER];
    let args = [&args[..], &["-d", database, "-c", sql]].concat();
    let env = [("PGPASSWORD", PASSWORD), ("PGCONNECT_TIMEOUT", "5"), ("PGOPTIONS", "--client-min-messages=warning")];
    run_env(&program.to_string_lossy(), &args, &env)
}

/// The PostgreSQL server that all tests share. Each test takes its own [`Postgres::fresh_database`].
pub async fn postgres() -> Postgres {
    try_postgres().await.unwrap_or_else(|error| panic!("{error:#}"))
}

/// [`postgres`] with an error instead of a panic.
pub async fn try_postgres() -> Result<Postgres> {
    crate::init();
    Ok(Postgres { server: Server::shared(process_wide!(State).await?) })
}

/// A PostgreSQL server of this test alone, which it may stop, kill and freeze.
pub async fn private_postgres() -> Postgres {
    private_postgres_with(&[]).await
}

/// [`private_postgres`] with settings as in `postgresql.conf`, for instance `("fsync", "on")`.
///
/// Two are more than settings: `pg_hba` replaces the rules for logins, and the file of `ssl_key_file` is copied to where
/// the server accepts it.
pub async fn private_postgres_with(settings: &[(&str, &str)]) -> Postgres {
    try_private_postgres_with(settings).await.unwrap_or_else(|error| panic!("{error:#}"))
}

/// [`private_postgres`] with this part of its data folder on a disk that can be full: `base` (tables and indexes) or `pg_wal`.
pub async fn private_postgres_on(disk: &crate::Disk, part: &'static str) -> Postgres {
    crate::init();
    let disk = disk.clone();
    let server = blocking(move || {
        Server::private(|folder, launch, _| {
            launch.env.extend(disk.environment(&folder.join("data").join(part)));
            Ok(())
        })
    });
    Postgres { server: server.await.unwrap_or_else(|error| panic!("{error:#}")) }
}

/// [`private_postgres_with`] with an error instead of a panic.
pub async fn try_private_postgres_with(settings: &[(&str, &str)]) -> Result<Postgres> {
    crate::init();
    let settings: Vec<(String, String)> = settings.iter().map(|(n, v)| (n.to_string(), v.to_string())).collect();
    let server = blocking(move || Server::private(|folder, launch, _| adjust(folder, launch, settings)));
    Ok(Postgres { server: server.await? })
}

fn adjust(folder: &Path, launch: &mut Launch, settings: Vec<(String, String)>) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    let data = folder.join("data");
    for (name, mut value) in settings {
        if name == "pg_hba" {
            std::fs::write(data.join("pg_hba.conf"), value)?;
            continue;
        }
        if name == "ssl_key_file" {
            // The server refuses a key that others can read.
            let own = data.join("server.key");
            std::fs::copy(&value, &own)?;
            std::fs::set_permissions(&own, std::fs::Permissions::from_mode(0o600))?;
            value = own.to_string_lossy().into_owned();
        }
        launch.args.extend(["-c".into(), format!("{name}={value}")]);
    }
    give_away(&data)
}

process_methods!(Postgres);

impl Postgres {
    /// The port on 127.0.0.1.
    pub fn port(&self) -> u16 {
        self.server.peer.port
    }

    /// The superuser's name.
    pub fn user(&self) -> &'static str {
        USER
    }

    /// The superuser's password.
    pub fn password(&self) -> &'static str {
        PASSWORD
    }

    /// URL of the maintenance database `postgres`, as superuser.
    pub fn url(&self) -> String {
        self.url_of("postgres")
    }

    /// URL of a database of this server, as superuser.
    pub fn url_of(&self, database: &str) -> String {
        self.url_through(self.port(), database)
    }

    /// URL of a database behind another port of 127.0.0.1, for instance that of a [`crate::Proxy`].
    pub fn url_through(&self, port: u16, database: &str) -> String {
        format!("postgres://{USER}:{PASSWORD}@127.0.0.1:{port}/{database}")
    }

    /// Makes an empty database that no other test uses and returns its URL. It goes with the server.
    pub async fn fresh_database(&self) -> String {
        self.url_of(&self.fresh_database_name().await)
    }

    /// [`Postgres::fresh_database`], by name.
    pub async fn fresh_database_name(&self) -> String {
        let name = crate::unique("qb_");
        self.psql("postgres", &format!("CREATE DATABASE {name} TEMPLATE template0")).await;
        name
    }

    /// Runs SQL beside any driver under test and returns the rows: a line each, fields separated by `|`.
    /// Panics when the statement fails.
    pub async fn psql(&self, database: &str, sql: &str) -> String {
        self.try_psql(database, sql).await.unwrap_or_else(|error| panic!("{error:#}"))
    }

    /// [`Postgres::psql`] for statements that may fail.
    pub async fn try_psql(&self, database: &str, sql: &str) -> Result<String> {
        let (port, database, sql) = (self.port(), database.to_string(), sql.to_string());
        Ok(blocking(move || psql(port, &database, &sql)).await?.trim_end().to_string())
    }
}

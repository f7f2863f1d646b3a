//! PgBouncer in front of a PostgreSQL server, for the cases about poolers.

use std::sync::Arc;

use anyhow::Result;
use serde::{Deserialize, Serialize};

use crate::Postgres;
use crate::child::{Launch, Signal};
use crate::packages::{give_away, on_path};
use crate::shared::{Peer, Server, blocking, process_methods};

/// When the pooler gives a server connection to another client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PoolMode {
    /// When the client goes.
    Session,
    /// After each transaction: session state such as `LISTEN` and advisory locks is lost.
    Transaction,
    /// After each statement.
    Statement,
}

/// A pooler of one test; it passes every database name on.
#[derive(Debug, Clone)]
pub struct PgBouncer {
    server: Arc<Server<State>>,
    postgres: Postgres,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct State {
    port: u16,
}

impl Peer for State {
    const NAME: &'static str = "pgbouncer";

    fn prepare(folder: &std::path::Path) -> Result<(Launch, Self)> {
        let port = crate::free_port();
        let launch = Launch {
            program: on_path("pgbouncer")?,
            args: vec![folder.join("pgbouncer.ini").to_string_lossy().into_owned()],
            env: Vec::new(),
            unprivileged: true,
            before: String::new(),
            stop: Signal::Int,
        };
        Ok((launch, State { port }))
    }

    fn ready(&self) -> Result<()> {
        Ok(std::net::TcpStream::connect(("127.0.0.1", self.port)).map(drop)?)
    }
}

/// Starts a pooler in front of `postgres`.
pub async fn pgbouncer(postgres: &Postgres, mode: PoolMode) -> PgBouncer {
    pgbouncer_with(postgres, mode, 20).await
}

/// [`pgbouncer`] with so many connections to the server for each database and user.
pub async fn pgbouncer_with(postgres: &Postgres, mode: PoolMode, pool_size: u32) -> PgBouncer {
    let behind = postgres.clone();
    let server = blocking(move || {
        Server::private(|folder, _, state: &mut State| {
            let mode = format!("{mode:?}").to_lowercase();
            let (user, password) = (behind.user(), behind.password());
            let users = folder.join("users.txt");
            std::fs::write(&users, format!("\"{user}\" \"{password}\"\n"))?;
            let ini = format!(
                "[databases]\n* = host=127.0.0.1 port={}\n[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {}\n\
                 unix_socket_dir =\npool_mode = {mode}\nauth_type = scram-sha-256\nauth_file = {}\n\
                 admin_users = {user}\nmax_client_conn = 500\ndefault_pool_size = {pool_size}\n\
                 ignore_startup_parameters = extra_float_digits,options\n",
                behind.port(),
                state.port,
                users.display(),
            );
            std::fs::write(folder.join("pgbouncer.ini"), ini)?;
            give_away(folder)
        })
    });
    let server = server.await.unwrap_or_else(|error| panic!("{error:#}"));
    PgBouncer { server, postgres: postgres.clone() }
}

process_methods!(PgBouncer);

impl PgBouncer {
    /// The port on 127.0.0.1.
    pub fn port(&self) -> u16 {
        self.server.peer.port
    }

    /// URL of a database through the pooler, as superuser.
    pub fn url_of(&self, database: &str) -> String {
        self.postgres.url_through(self.port(), database)
    }
}

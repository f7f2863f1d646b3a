//! A second PostgreSQL server that follows the first one, for the cases about failover.

use std::path::Path;

use anyhow::{Context, Result};

use crate::Postgres;
use crate::child::Launch;
use crate::packages::{give_away, postgres_bin, run_env, unprivileged};
use crate::postgres::{PASSWORD, State, USER};
use crate::shared::{Server, blocking};

/// A copy of `primary` that follows it by streaming and takes reads only, until [`Postgres::promote`]. A server of this test alone.
pub async fn private_standby_of(primary: &Postgres) -> Postgres {
    crate::init();
    let port = primary.port();
    let server = blocking(move || Server::private(|folder, launch, _: &mut State| follow(folder, launch, port))).await;
    Postgres { server: server.unwrap_or_else(|error| panic!("{error:#}")) }
}

/// Puts a copy of the primary in place of the cluster that was laid down.
fn follow(folder: &Path, launch: &mut Launch, primary: u16) -> Result<()> {
    let data = folder.join("data");
    // The folder itself stays: it belongs to the user who copies.
    for entry in std::fs::read_dir(&data)? {
        let path = entry?.path();
        if path.is_dir() { std::fs::remove_dir_all(path)? } else { std::fs::remove_file(path)? }
    }
    let port = primary.to_string();
    let program = postgres_bin()?.join("pg_basebackup").to_string_lossy().into_owned();
    let mut words = unprivileged();
    words.extend([program, "-D".into(), data.to_string_lossy().into_owned()]);
    words.extend(
        ["-h", "127.0.0.1", "-p", &port, "-U", USER, "-X", "stream", "-c", "fast", "--no-sync"].map(String::from),
    );
    let args: Vec<&str> = words[1..].iter().map(String::as_str).collect();
    run_env(&words[0], &args, &[("PGPASSWORD", PASSWORD)]).context("cannot copy the primary")?;
    std::fs::write(data.join("standby.signal"), "")?;
    let primary = format!("primary_conninfo=host=127.0.0.1 port={port} user={USER} password={PASSWORD}");
    launch.args.extend(["-c".into(), primary]);
    give_away(&data)
}

impl Postgres {
    /// Waits until this standby has everything that is in the log of `primary` now.
    pub async fn catch_up_with(&self, primary: &Postgres) {
        let written = primary.psql("postgres", "SELECT pg_current_wal_lsn()").await;
        let replayed = format!("SELECT pg_last_wal_replay_lsn() >= '{written}'::pg_lsn");
        crate::eventually("the standby has caught up", std::time::Duration::from_secs(60), || async {
            (self.psql("postgres", &replayed).await == "t").then_some(())
        })
        .await;
    }

    /// Makes a standby a primary and waits until it is one.
    pub async fn promote(&self) {
        assert_eq!(self.psql("postgres", "SELECT pg_promote(true, 60)").await, "t", "the standby was not promoted");
    }
}

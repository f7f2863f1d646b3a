//! `queuebox migrate`.

use anyhow::Context;
use clap::Args;
use queuebox_catalog::open_store;
use queuebox_core::ports::schema::{MigrateOptions, Migrated};
use serde_json::json;

use crate::{
    manifests::{self, Given},
    output::{Output, Progress, print_json},
};

/// `queuebox migrate`.
#[derive(Debug, Args)]
pub struct Options {
    #[command(flatten)]
    given: Given,

    /// Record versions up to this one as applied without running them, then apply the rest.
    #[arg(long, value_name = "VERSION")]
    baseline: Option<u32>,

    /// Print the statements that give a worker's role what it needs, and do nothing else.
    #[arg(long, value_name = "ROLE")]
    print_grants: Option<String>,

    /// How the result is printed.
    #[arg(long, value_enum, default_value_t)]
    output: Output,
}

/// Migrates, whatever `migrate` says in the manifest.
///
/// # Errors
/// The manifests, the database, or a schema that cannot be migrated.
pub async fn run(options: &Options) -> anyhow::Result<()> {
    let loaded = manifests::load(&options.given)?;
    if options.print_grants.is_some() {
        loaded.needs_database()?;
    }
    let store = open_store(&loaded.relay, &loaded.secrets).await?.store;
    if let Some(role) = &options.print_grants {
        store.check().await?;
        let statements: Vec<String> =
            store.grants(role).iter().map(|statement| format!("{};", statement.trim_end_matches(';'))).collect();
        match options.output {
            Output::Json => print_json(&statements)?,
            Output::Text if statements.is_empty() => {
                eprintln!("This database knows no roles: there is nothing to grant.")
            }
            Output::Text => outln!("{}", statements.join("\n")),
        }
        store.close().await;
        return Ok(());
    }
    let wanted = MigrateOptions { baseline: options.baseline, binary_keys: false };
    // Indexes on large tables are built beside the traffic, and that takes its time.
    let shown = Progress::of_time("Migrating", options.output);
    let done = store.migrate(wanted).await.context("the migration failed")?;
    drop(shown);
    store.close().await;
    if options.output == Output::Json {
        let Migrated { from, to, applied, adopted } = &done;
        return print_json(&json!({ "from": from, "to": to, "applied": applied, "adopted": adopted }));
    }
    if let Some(version) = done.adopted {
        outln!("Adopted the history of a classic installation at version {version}.");
    }
    for name in &done.applied {
        outln!("Applied {name}.");
    }
    outln!("The schema is at version {}.", done.to);
    Ok(())
}

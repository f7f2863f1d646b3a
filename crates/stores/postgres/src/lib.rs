//! The PostgreSQL store: outbox, inbox, lanes, finished rows and schema behind the ports of `queuebox-core`.
//!
//! Invariants
//! - Each call of a port is one statement, one round trip, one commit, where it is on the hot path; the driver does not pipeline.
//! - Every time is the server's; no clock of this process ever enters a statement.
//! - Every write repeats its whole condition and is fenced by the worker's own row (`queuebox_worker`).
//! - What an old schema lacks is left out of the statements (`features`), never guessed.
//!
//! Start with [`outbox`] for the hot path and [`schema`] for the start.

mod cells;
mod config;
mod db;
mod doctor;
mod error;
mod features;
mod floor;
mod inbox;
mod lanes;
mod ledger;
mod outbox;
mod retention;
mod schema;
mod values;
mod wake;

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError, RwLock},
};

use queuebox_core::Fault;
use queuebox_sql::{Names, Quote};

pub use config::{Capture, Pooler, PostgresConfig, RouteTarget, Target, Tls, TlsMode, UrlError};
pub use error::{Error, classify};
pub use lanes::LANE_HASH;
pub use schema::CATALOG;
pub use wake::WakeState;

use crate::{db::Db, features::Features, wake::Wake};

/// A PostgreSQL database of QueueBox.
pub struct PostgresStore {
    config: Arc<PostgresConfig>,
    names: Names,
    db: Db,
    features: RwLock<Features>,
    /// Rendered statements by template and variant.
    statements: Mutex<HashMap<(usize, u32), Arc<str>>>,
    /// See [`outbox::target`].
    target: String,
    passes: queuebox_sql::Passes<retention::Pass>,
    floor: Mutex<floor::Floor>,
    wake: Wake,
}

impl PostgresStore {
    /// Checks the names; opens nothing yet, so that a database that is away is met by the first call.
    pub fn open(config: PostgresConfig) -> Result<Self, Fault> {
        let names = Names::check(&config.names, Quote::Double, config.schema.as_deref()).map_err(Error::Names)?;
        let config = Arc::new(config);
        Ok(Self {
            names,
            db: Db::new(config.clone()),
            features: RwLock::new(Features::newest(config.on_sent_delete)),
            statements: Mutex::new(HashMap::new()),
            target: outbox::target(&config.routes),
            passes: queuebox_sql::Passes::default(),
            floor: Mutex::new(floor::Floor::default()),
            wake: Wake::new(),
            config,
        })
    }

    /// How this worker is woken, for `/health/ready` (`outbox-capture`, shown, never a cause of 503).
    pub fn wake_state(&self) -> WakeState {
        self.wake.state()
    }

    /// Resolves with the next state after `known`.
    pub async fn wake_state_changed(&self, known: &WakeState) -> WakeState {
        let mut states = self.wake.watch();
        match states.wait_for(|state| state != known).await {
            Ok(state) => state.clone(),
            Err(_) => std::future::pending().await,
        }
    }

    fn floor(&self) -> std::sync::MutexGuard<'_, floor::Floor> {
        self.floor.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn features(&self) -> Features {
        *self.features.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn set_features(&self, features: Features) {
        *self.features.write().unwrap_or_else(PoisonError::into_inner) = features;
        self.statements.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// The statement of a template with the features of this database.
    fn sql(&self, template: &'static str) -> Arc<str> {
        self.variant(template, 0, |features| (template.to_owned(), features.words()))
    }

    /// A statement that is put together once per variant; `name` tells it from others.
    fn variant(
        &self,
        name: &'static str,
        bits: u32,
        make: impl FnOnce(&Features) -> (String, Vec<&'static str>),
    ) -> Arc<str> {
        let key = (name.as_ptr() as usize, bits);
        if let Some(known) = self.statements.lock().unwrap_or_else(PoisonError::into_inner).get(&key) {
            return known.clone();
        }
        let features = self.features();
        let (template, words) = make(&features);
        let sql: Arc<str> = self.render(&template, &features, &words).into();
        self.statements.lock().unwrap_or_else(PoisonError::into_inner).insert(key, sql.clone());
        sql
    }

    fn render(&self, template: &str, features: &Features, words: &[&str]) -> String {
        let (outbox_lane, inbox_lane) = features.lane_expressions();
        let template = template.replace("{o.lane}", outbox_lane).replace("{i.lane}", inbox_lane);
        let template = template.replace("{o.target}", &self.target);
        self.names.render(&template, words)
    }

    /// A statement behind the fence that only reads, so takes no lock.
    fn reading(&self, name: &'static str, template: &'static str) -> Arc<str> {
        self.variant(name, 0, |features| (template.replace("@FENCE@", outbox::FENCE), features.words()))
    }
}

//! Whether the source receives, and if not, why.

use std::sync::{Mutex, PoisonError};

use queuebox_core::{ports::source::SourceHealth, redact::redact};

/// Shared between the source's thread and whoever asks.
#[derive(Debug)]
pub(super) struct Health(Mutex<SourceHealth>);

impl Health {
    pub(super) fn new(why: String) -> Self {
        Self(Mutex::new(SourceHealth::Down(why)))
    }

    pub(super) fn get(&self) -> SourceHealth {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Receiving again; logged at the change.
    pub(super) fn up(&self, group: &str) {
        let mut health = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if *health != SourceHealth::Up {
            tracing::info!(group, "Kafka source is receiving");
            *health = SourceHealth::Up;
        }
    }

    /// Not receiving; logged at the change.
    pub(super) fn down(&self, why: String) {
        let why = redact(&why);
        let mut health = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if *health == SourceHealth::Up {
            tracing::warn!(why, "Kafka source is not receiving");
        }
        *health = SourceHealth::Down(why);
    }

    /// Not receiving because it was told to end.
    pub(super) fn stopped(&self, group: &str) {
        let why = format!("consumer group {group:?} is stopped");
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = SourceHealth::Down(why);
    }
}

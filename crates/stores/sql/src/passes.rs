//! Where the clean-ups of a store stand between two of their steps. Forgetting it costs time only.

use std::sync::{Mutex, PoisonError};

use queuebox_core::{
    message::State,
    ports::{Scope, outbox::PruneRule},
};

/// What a clean-up is of.
pub type Of = (Scope, State, PruneRule);

/// One place `P` for each table and state.
#[derive(Debug)]
pub struct Passes<P>(Mutex<Vec<(Of, P)>>);

impl<P> Default for Passes<P> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<P> Passes<P> {
    /// Takes what is remembered; what belongs to another rule is forgotten.
    pub fn take(&self, of: Of) -> Option<P> {
        let mut passes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let at = passes.iter().position(|(known, _)| (known.0, known.1) == (of.0, of.1))?;
        let (known, pass) = passes.swap_remove(at);
        (known == of).then_some(pass)
    }

    /// Remembers a place for the next step.
    pub fn put(&self, of: Of, pass: P) {
        let mut passes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        passes.retain(|(known, _)| (known.0, known.1) != (of.0, of.1));
        passes.push((of, pass));
    }
}

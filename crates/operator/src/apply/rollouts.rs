//! How many Relays are being replaced at a time because the operator itself was upgraded.
//!
//! Invariants:
//! - At most [`AT_ONCE`] rollouts that no Relay asked for are under way. What a team changes of its own Relay waits for nothing.
//! - A turn ends with its rollout, or when that is known to be stuck: a Relay that cannot start holds up nobody for ever.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Mutex, PoisonError},
};

use serde_json::Value;

use crate::plan::seen::Seen;

/// Rollouts at a time.
const AT_ONCE: usize = 5;

/// Whose turn it is: UID of the Relay, and its namespace.
#[derive(Debug, Default)]
pub struct Rollouts(Mutex<BTreeMap<String, String>>);

impl Rollouts {
    /// Takes a turn. It is one's own until it ends.
    pub fn begin(&self, namespace: &str, relay: &str) -> bool {
        let mut turns = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if turns.contains_key(relay) {
            return true;
        }
        let is_free = turns.len() < AT_ONCE;
        if is_free {
            turns.insert(relay.to_owned(), namespace.to_owned());
        }
        is_free
    }

    /// Ends all turns of a namespace but these.
    pub fn keep(&self, namespace: &str, under_way: &BTreeSet<&str>) {
        let mut turns = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        turns.retain(|relay, of| of != namespace || under_way.contains(relay.as_str()));
    }
}

/// Whether the Deployment's workers are all of its present form, or will not be.
pub fn has_ended(deployment: &Seen) -> bool {
    let wanted = deployment.number("/spec/replicas");
    let number = |field: &str| deployment.number(&format!("/status/{field}"));
    let conditions = deployment.at("/status/conditions").as_array().into_iter().flatten();
    let mut reasons = conditions.filter_map(|it| it.get("reason").and_then(Value::as_str));
    let is_seen = number("observedGeneration") >= deployment.generation();
    let is_done =
        number("updatedReplicas") >= wanted && number("replicas") <= wanted && number("availableReplicas") >= wanted;
    is_seen && (is_done || reasons.any(|reason| reason == "ProgressDeadlineExceeded"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_few_at_a_time() {
        let rollouts = Rollouts::default();
        let began = (0..9).filter(|index| rollouts.begin("team", &index.to_string())).count();
        assert_eq!(began, AT_ONCE);
        assert!(rollouts.begin("team", "0"), "a turn is kept");
        rollouts.keep("another", &BTreeSet::new());
        assert!(!rollouts.begin("another", "8"), "and ends with nothing that is elsewhere");
        rollouts.keep("team", &["1", "2", "3", "4"].into());
        assert!(rollouts.begin("another", "8") && !rollouts.begin("team", "0"));
    }

    #[test]
    fn a_turn_ends_with_the_rollout_or_when_it_is_stuck() {
        let deployment =
            |status: Value| Seen(json!({"metadata": {"generation": 2}, "spec": {"replicas": 2}, "status": status}));
        let at = |observed: i64, updated: i64, all: i64, available: i64| {
            deployment(json!({
                "observedGeneration": observed, "updatedReplicas": updated, "replicas": all, "availableReplicas": available,
            }))
        };
        assert!(has_ended(&at(2, 2, 2, 2)));
        for going in [at(1, 2, 2, 2), at(2, 1, 2, 2), at(2, 2, 3, 3), at(2, 2, 2, 1)] {
            assert!(!has_ended(&going), "{going:?}");
        }
        let stuck = json!({
            "observedGeneration": 2, "updatedReplicas": 1, "replicas": 3,
            "conditions": [{"type": "Progressing", "reason": "ProgressDeadlineExceeded"}],
        });
        assert!(has_ended(&deployment(stuck)));
    }
}

//! Events: one line for people at each transition, none while nothing changes.

use queuebox_api::Kind;
use serde_json::Value;

use super::{
    asked_for,
    replicas::{Limit, Setter},
    seen::Seen,
    status::RelayView,
};

/// One event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// Kind of the object that it is about.
    pub kind: Kind,
    /// Its name.
    pub name: String,
    /// Its UID.
    pub uid: String,
    /// Something is wrong.
    pub is_warning: bool,
    /// One word.
    pub reason: String,
    /// One sentence.
    pub note: String,
}

/// Types whose transitions are worth an event.
const SPOKEN_OF: [&str; 7] =
    ["Ready", "Stalled", "Delivering", "Receiving", "DeadLettering", "ScalingActive", "Paused"];
/// Types that are bad news when true.
const BAD_WHEN_TRUE: [&str; 2] = ["Stalled", "DeadLettering"];

/// Events of the step from the status that stands there to `status`.
pub fn transitions(kind: Kind, seen: &Seen, status: &Value) -> Vec<Event> {
    let before = seen.at("/status/conditions");
    let after = status.get("conditions").and_then(Value::as_array).into_iter().flatten();
    let word =
        |condition: &Value, field: &str| condition.get(field).and_then(Value::as_str).unwrap_or_default().to_owned();
    let mut events = Vec::new();
    for condition in after {
        let (name, state, reason) = (word(condition, "type"), word(condition, "status"), word(condition, "reason"));
        let old = before.as_array().and_then(|list| list.iter().find(|it| word(it, "type") == name));
        let old_state = old.map(|it| word(it, "status"));
        let is_news = match (old_state.as_deref(), old) {
            (Some(was), Some(old)) => {
                was != state || (state == "True" && name == "Stalled" && word(old, "reason") != reason)
            }
            // At first sight only what is wrong is news.
            _ => state == "True" && BAD_WHEN_TRUE.contains(&name.as_str()),
        };
        // A stall says all that its Ready says.
        let is_said = name == "Ready" && state == "False" && reason != "RollingOut" && reason != "RelayNotReady";
        if !SPOKEN_OF.contains(&name.as_str()) || !is_news || is_said || state == "Unknown" {
            continue;
        }
        let is_bad_when_true = BAD_WHEN_TRUE.contains(&name.as_str());
        if is_bad_when_true && state == "False" {
            continue;
        }
        let is_warning = is_bad_when_true
            || (state == "False" && matches!(name.as_str(), "Delivering" | "Receiving" | "ScalingActive"));
        let message = word(condition, "message");
        let note = if message.is_empty() { format!("{name} is {state} ({reason})") } else { message };
        events.push(Event { kind, name: seen.name().to_owned(), uid: seen.uid().to_owned(), is_warning, reason, note });
    }
    events
}

/// The number of workers changes.
pub fn scaled(view: &RelayView<'_>) -> Option<Event> {
    let (before, after) = (asked_for(view.deployment?), view.decision.replicas);
    let why = match (view.decision.setter, &view.decision.limit) {
        (Setter::Fixed, _) => "spec.replicas",
        (Setter::Paused, _) => "paused",
        (Setter::BuiltIn, None | Some(Limit::Stabilizing)) => "the backlog",
        (Setter::BuiltIn, Some(Limit::Maximum)) => "the backlog, up to maxReplicas",
        (Setter::BuiltIn, Some(Limit::Lanes(_))) => "the backlog, up to the lanes that have something to do",
        (Setter::BuiltIn, Some(Limit::Pace)) => "the backlog, as fast as is allowed",
    };
    (before != after && !view.hands_off && view.configuration.is_some()).then(|| Event {
        kind: Kind::Relay,
        name: view.seen.name().to_owned(),
        uid: view.seen.uid().to_owned(),
        is_warning: false,
        reason: "Scaled".to_owned(),
        note: format!("from {before} to {after} workers by {why}"),
    })
}

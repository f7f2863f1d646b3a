//! Conditions of one status, built on those that stand there: a time of transition moves only with the status it belongs to, and a
//! condition that says the same as before is the same to the byte.

use jiff::Timestamp;
use queuebox_api::condition::ConditionType;
use serde_json::{Value, json};

/// A condition's message holds at most this many bytes; the API server takes 32 KiB.
const MESSAGE_BYTES_MAX: usize = 1_000;

/// State of a condition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Yes.
    True,
    /// No.
    False,
    /// Nobody knows.
    Unknown,
}

impl State {
    fn as_str(self) -> &'static str {
        match self {
            Self::True => "True",
            Self::False => "False",
            Self::Unknown => "Unknown",
        }
    }
}

impl From<bool> for State {
    fn from(yes: bool) -> Self {
        if yes { Self::True } else { Self::False }
    }
}

/// The conditions of one object.
pub struct Conditions<'a> {
    before: &'a Value,
    generation: i64,
    now: Timestamp,
    list: Vec<Value>,
}

impl<'a> Conditions<'a> {
    /// On top of `status.conditions` as they stand.
    pub fn new(before: &'a Value, generation: i64, now: Timestamp) -> Self {
        Self { before, generation, now, list: Vec::new() }
    }

    /// What stands there now.
    pub fn before(&self, kind: ConditionType) -> Option<&'a Value> {
        let before = self.before.as_array()?;
        before.iter().find(|condition| condition.get("type").and_then(Value::as_str) == Some(kind.as_str()))
    }

    /// The status that stands there now.
    pub fn was(&self, kind: ConditionType, state: State) -> bool {
        self.before(kind).and_then(|it| it.get("status")).and_then(Value::as_str) == Some(state.as_str())
    }

    /// Says it.
    pub fn set(&mut self, kind: ConditionType, state: State, reason: &str, message: &str) {
        let since = self
            .before(kind)
            .filter(|_| self.was(kind, state))
            .and_then(|before| before.get("lastTransitionTime"))
            .cloned()
            .unwrap_or_else(|| json!(self.now.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()));
        self.list.push(json!({
            "type": kind.as_str(),
            "status": state.as_str(),
            "reason": reason,
            "message": shortened(message),
            "observedGeneration": self.generation,
            "lastTransitionTime": since,
        }));
    }

    /// Leaves it as it is. Returns whether there was one.
    pub fn keep(&mut self, kind: ConditionType) -> bool {
        let before = self.before(kind).cloned();
        let was_there = before.is_some();
        self.list.extend(before);
        was_there
    }

    /// What was said so far of a type.
    pub fn is(&self, kind: ConditionType, state: State) -> bool {
        self.list.iter().any(|it| {
            it.get("type").and_then(Value::as_str) == Some(kind.as_str())
                && it.get("status").and_then(Value::as_str) == Some(state.as_str())
        })
    }

    /// All of them.
    pub fn list(self) -> Value {
        Value::Array(self.list)
    }
}

fn shortened(message: &str) -> String {
    if message.len() <= MESSAGE_BYTES_MAX {
        return message.to_owned();
    }
    let end = (0..=MESSAGE_BYTES_MAX).rev().find(|end| message.is_char_boundary(*end)).unwrap_or(0);
    format!("{}…", &message[..end])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_moves_only_with_its_status() {
        let first = Timestamp::from_second(1_800_000_000).unwrap();
        let later = Timestamp::from_second(1_800_000_100).unwrap();
        let mut conditions = Conditions::new(&Value::Null, 1, first);
        conditions.set(ConditionType::Ready, State::True, "Ready", "");
        let before = conditions.list();
        let mut conditions = Conditions::new(&before, 1, later);
        conditions.set(ConditionType::Ready, State::True, "Ready", "");
        assert_eq!(conditions.list(), before);
        let mut conditions = Conditions::new(&before, 2, later);
        conditions.set(ConditionType::Ready, State::True, "Other", "why");
        assert_eq!(conditions.list()[0]["lastTransitionTime"], before[0]["lastTransitionTime"]);
        let mut conditions = Conditions::new(&before, 2, later);
        conditions.set(ConditionType::Ready, State::False, "Other", "why");
        assert_eq!(conditions.list()[0]["lastTransitionTime"], "2027-01-15T08:01:40Z");
    }

    #[test]
    fn a_long_message_is_cut_between_letters() {
        assert!(shortened(&"ä".repeat(2_000)).ends_with("ä…"));
    }
}

//! What is wrong with manifests: all of it at once, each with file, object and field path (contract 13.1).

use std::fmt;

/// The reason of a condition, where a problem becomes one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reason {
    /// The manifest itself is wrong.
    InvalidSpec,
    /// Another Source of the Relay has the same path.
    PathConflict,
    /// A route names a Destination that is not there.
    DestinationNotFound,
    /// A Source names a Relay that is not there.
    RelayNotFound,
    /// A database that cannot be served here.
    UnsupportedDatabase,
    /// A reference to a secret value that this place cannot read.
    UnsupportedReference,
    /// The manifests of a Relay are too large together for a cluster.
    TooLarge,
    /// A file that cannot be read or is no YAML.
    Unreadable,
}

impl Reason {
    /// The word in a condition.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::InvalidSpec => "InvalidSpec",
            Self::PathConflict => "PathConflict",
            Self::DestinationNotFound => "DestinationNotFound",
            Self::RelayNotFound => "RelayNotFound",
            Self::UnsupportedDatabase => "UnsupportedDatabase",
            Self::UnsupportedReference => "UnsupportedReference",
            Self::TooLarge => "TooLarge",
            Self::Unreadable => "Unreadable",
        }
    }
}

/// One problem, or one warning.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Problem {
    /// File as given, or where else the manifest came from.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub file: String,
    /// Kind of the object.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub kind: String,
    /// Namespace of the object.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub namespace: String,
    /// Name of the object.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub name: String,
    /// Field, such as `spec.routes[0].topics[1]`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub path: String,
    /// What is wrong.
    pub message: String,
    /// What would mend it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
    /// For conditions.
    #[serde(skip)]
    pub reason: Reason,
}

impl Problem {
    /// A problem of a file as a whole.
    pub fn of_file(file: impl Into<String>, message: impl Into<String>) -> Self {
        Self {
            file: file.into(),
            kind: String::new(),
            namespace: String::new(),
            name: String::new(),
            path: String::new(),
            message: message.into(),
            hint: None,
            reason: Reason::Unreadable,
        }
    }

    /// The same with a hint.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }
}

/// `file: Kind/name: path: message (hint)`. A field that is called like a secret is followed by ` - `, or redaction, through
/// which everything printed passes, would take the message for its value.
impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.file.is_empty() {
            write!(f, "{}: ", self.file)?;
        }
        if !self.kind.is_empty() {
            write!(f, "{}/{}: ", self.kind, if self.name.is_empty() { "?" } else { &self.name })?;
        }
        if !self.path.is_empty() {
            let plain = format!("{}: ", self.path);
            let is_safe = queuebox_core::redact::redact(&format!("{plain}x")) == format!("{plain}x");
            f.write_str(&if is_safe { plain } else { format!("{} - ", self.path) })?;
        }
        f.write_str(&self.message)?;
        match &self.hint {
            Some(hint) => write!(f, " ({hint})"),
            None => Ok(()),
        }
    }
}

/// Manifests that cannot be used, as one error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problems(pub Vec<Problem>);

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, problem) in self.0.iter().enumerate() {
            if index > 0 {
                f.write_str("\n")?;
            }
            write!(f, "{problem}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Problems {}

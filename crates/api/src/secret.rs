//! Secret values: where they come from, and a text type that never prints one (contract 13.1).
//!
//! Invariants:
//! - An error names the reference, never the value.
//! - A trailing line end of a value is removed, once.
//! - A value is read again whenever it is asked for, so that a changed file counts at the next use.

use std::{
    collections::BTreeMap,
    fmt, fs, io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use queuebox_core::SecretError;
use serde::{Deserialize, Deserializer};

/// A value that was read is given for so long before it is read again.
const KEPT: Duration = Duration::from_secs(1);

/// A secret value. It prints as `Secret(***)`, or `Secret(empty)`.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Arc<str>);

impl Secret {
    /// Takes a value as it is.
    pub fn new(value: impl Into<Arc<str>>) -> Self {
        Self(value.into())
    }

    /// The value itself, for the one who needs it.
    pub fn expose(&self) -> &str {
        &self.0
    }

    /// The value itself, shared.
    pub fn into_inner(self) -> Arc<str> {
        self.0
    }

    /// There is no value behind the reference.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_empty() { "Secret(empty)" } else { "Secret(***)" })
    }
}

impl fmt::Display for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

impl<'de> Deserialize<'de> for Secret {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer).map(Self::new)
    }
}

/// Where a value is, checked. It prints without the value, which it does not know.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Reference {
    /// A key of a Secret in the namespace.
    SecretKey {
        /// Name of the Secret.
        name: String,
        /// Key in it.
        key: String,
    },
    /// A key of a ConfigMap in the namespace.
    ConfigMapKey {
        /// Name of the ConfigMap.
        name: String,
        /// Key in it.
        key: String,
    },
    /// An environment variable.
    Env(String),
    /// A file.
    File(PathBuf),
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::SecretKey { name, key } => write!(f, "secretKeyRef {name}/{key}"),
            Self::ConfigMapKey { name, key } => write!(f, "configMapKeyRef {name}/{key}"),
            Self::Env(name) => write!(f, "env {name}"),
            Self::File(path) => write!(f, "file {}", path.display()),
        }
    }
}

/// Who answers for references.
pub trait SecretResolver: Send + Sync + 'static {
    /// The value of this moment.
    ///
    /// # Errors
    /// [`SecretError`], which names the reference and the reason.
    fn resolve(&self, reference: &Reference) -> Result<Secret, SecretError>;
}

/// Answers from `Secret` and `ConfigMap` manifests, a folder of `NAME/KEY` files, the environment and files, in this order for
/// keys: folder, manifests.
#[derive(Debug, Clone, Default)]
pub struct Secrets {
    /// `--secrets DIR`.
    pub folder: Option<PathBuf>,
    /// `(name, key)` of Secret manifests.
    pub secrets: BTreeMap<(String, String), Secret>,
    /// `(name, key)` of ConfigMap manifests.
    pub config_maps: BTreeMap<(String, String), String>,
}

impl Secrets {
    /// Answers from the environment, files, and a folder of `NAME/KEY` files.
    pub fn in_folder(folder: impl Into<PathBuf>) -> Self {
        Self { folder: Some(folder.into()), ..Self::default() }
    }

    fn keyed(&self, kind: &str, name: &str, key: &str, stored: Option<&str>) -> Result<String, String> {
        if let Some(folder) = &self.folder {
            // A name with a slash or dots would leave the folder.
            if [name, key].iter().any(|part| part.contains(['/', '\\']) || *part == ".." || *part == ".") {
                return Err("the name or key is no file name".to_owned());
            }
            match read_file(&folder.join(name).join(key)) {
                Ok(value) => return Ok(value),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error.to_string()),
            }
        }
        stored.map(str::to_owned).ok_or_else(|| match &self.folder {
            Some(folder) => format!(
                "there is no file {} and no {kind} manifest with that key",
                folder.join(name).join(key).display()
            ),
            None => format!("no {kind} manifest has that key (give one, or --secrets DIR with a file {name}/{key})"),
        })
    }
}

impl SecretResolver for Secrets {
    fn resolve(&self, reference: &Reference) -> Result<Secret, SecretError> {
        let value = match reference {
            Reference::SecretKey { name, key } => {
                let stored = self.secrets.get(&(name.clone(), key.clone())).map(Secret::expose);
                self.keyed("Secret", name, key, stored)
            }
            Reference::ConfigMapKey { name, key } => {
                let stored = self.config_maps.get(&(name.clone(), key.clone())).map(String::as_str);
                self.keyed("ConfigMap", name, key, stored)
            }
            Reference::Env(name) => std::env::var(name).map_err(|error| match error {
                std::env::VarError::NotPresent => "the variable is not set".to_owned(),
                std::env::VarError::NotUnicode(_) => "the value is no text".to_owned(),
            }),
            Reference::File(path) => read_file(path).map_err(|error| error.to_string()),
        };
        value
            .map(|value| Secret::new(without_line_end(&value)))
            .map_err(|reason| SecretError { reference: reference.to_string(), reason })
    }
}

fn read_file(path: &Path) -> io::Result<String> {
    let bytes = fs::read(path)?;
    String::from_utf8(bytes).map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "the value is no text"))
}

/// Without one line end at its end.
pub fn without_line_end(value: &str) -> &str {
    let value = value.strip_suffix('\n').unwrap_or(value);
    value.strip_suffix('\r').unwrap_or(value)
}

/// One reference with the value that was read last. A value is read again at most once a second, so that asking at each use
/// is cheap. Where reading fails for a passing reason (a file that is just being replaced) the last value is given.
#[derive(Clone)]
pub struct Reader {
    reference: Reference,
    resolver: Arc<dyn SecretResolver>,
    last: Arc<Mutex<Option<(Secret, Instant)>>>,
}

impl Reader {
    /// For one reference.
    pub fn new(reference: Reference, resolver: Arc<dyn SecretResolver>) -> Self {
        Self { reference, resolver, last: Arc::default() }
    }

    /// What it reads.
    pub fn reference(&self) -> &Reference {
        &self.reference
    }

    /// The value, not older than a second.
    ///
    /// # Errors
    /// [`SecretError`], if there never was a value.
    pub fn current(&self) -> Result<Secret, SecretError> {
        if let Some((secret, read_at)) = &*self.last.lock().unwrap_or_else(PoisonError::into_inner)
            && read_at.elapsed() < KEPT
        {
            return Ok(secret.clone());
        }
        self.read_again().map(|(secret, _)| secret)
    }

    /// The value of this moment, and whether it differs from the one that was read before.
    ///
    /// # Errors
    /// [`SecretError`], if there never was a value.
    pub fn read_again(&self) -> Result<(Secret, bool), SecretError> {
        let read = self.resolver.resolve(&self.reference);
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let before = last.as_ref().map(|(secret, _)| secret.clone());
        let (secret, changed) = match (read, before) {
            (Ok(secret), before) => {
                let changed = before.is_some_and(|before| before != secret);
                (secret, changed)
            }
            (Err(_), Some(before)) => (before, false),
            (Err(error), None) => return Err(error),
        };
        *last = Some((secret.clone(), Instant::now()));
        Ok((secret, changed))
    }
}

/// Redacts texts with everything that is known: the rules of contract 10.3, and the values of these references.
#[derive(Debug, Clone, Default)]
pub struct Redactor(Vec<Reader>);

impl Redactor {
    /// For the values of `references`; those of ConfigMaps are no secrets.
    pub fn new(references: impl IntoIterator<Item = Reference>, resolver: &Arc<dyn SecretResolver>) -> Self {
        let secret = references.into_iter().filter(|it| !matches!(it, Reference::ConfigMapKey { .. }));
        let unique: std::collections::BTreeSet<Reference> = secret.collect();
        Self(unique.into_iter().map(|reference| Reader::new(reference, resolver.clone())).collect())
    }

    /// The text without secrets, at most 2,000 characters.
    pub fn redact(&self, text: &str) -> String {
        let values: Vec<Secret> = self.0.iter().filter_map(|reader| reader.current().ok()).collect();
        let values: Vec<&str> = values.iter().map(Secret::expose).collect();
        queuebox_core::redact::redact_with(text, &values)
    }
}

impl fmt::Debug for Reader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Reader({})", self.reference)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_never_prints_its_value() {
        let secret = Secret::new("canary-7731");
        assert_eq!(format!("{secret:?} {secret}"), "Secret(***) Secret(***)");
        assert_eq!(format!("{:?}", Secret::new("")), "Secret(empty)");
        let secrets = Secrets { secrets: [(("a".into(), "b".into()), secret)].into(), ..Secrets::default() };
        assert!(!format!("{secrets:?}").contains("canary"));
    }

    #[test]
    fn known_values_are_redacted() {
        let key = |name: &str| (("s".to_owned(), name.to_owned()), Secret::new("canary-7731"));
        let secrets = Secrets { secrets: [key("a"), key("b")].into(), ..Secrets::default() };
        let reference = |key: &str| Reference::SecretKey { name: "s".into(), key: key.into() };
        let redactor = Redactor::new([reference("a"), reference("b"), reference("missing")], &(Arc::new(secrets) as _));
        assert_eq!(redactor.redact("host db said canary-7731 twice"), "host db said [REDACTED] twice");
    }

    #[test]
    fn an_error_survives_redaction() {
        let reference = Reference::SecretKey { name: "shop-db".into(), key: "password".into() };
        let text = Secrets::default().resolve(&reference).unwrap_err().to_string();
        assert!(
            text.starts_with("cannot read secretKeyRef shop-db/password, no Secret manifest has that key"),
            "{text}"
        );
        assert_eq!(queuebox_core::redact::redact(&text), text);
    }

    #[test]
    fn one_trailing_line_end_is_removed() {
        for (value, expected) in
            [("a\n", "a"), ("a\r\n", "a"), ("a\n\n", "a\n"), ("a", "a"), ("\n", ""), (" a ", " a ")]
        {
            assert_eq!(without_line_end(value), expected, "{value:?}");
        }
    }

    #[test]
    fn references_are_read_from_where_they_point() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("shop")).unwrap();
        std::fs::write(folder.path().join("shop/token"), "from-folder\n").unwrap();
        let secrets = Secrets {
            folder: Some(folder.path().to_owned()),
            secrets: [
                (("shop".into(), "token".into()), Secret::new("from-manifest")),
                (("shop".into(), "other".into()), Secret::new("from-manifest")),
            ]
            .into(),
            config_maps: [(("ca".into(), "ca.crt".into()), "PEM".to_owned())].into(),
        };
        let key = |name: &str, key: &str| Reference::SecretKey { name: name.into(), key: key.into() };
        assert_eq!(secrets.resolve(&key("shop", "token")).unwrap().expose(), "from-folder");
        assert_eq!(secrets.resolve(&key("shop", "other")).unwrap().expose(), "from-manifest");
        let ca = Reference::ConfigMapKey { name: "ca".into(), key: "ca.crt".into() };
        assert_eq!(secrets.resolve(&ca).unwrap().expose(), "PEM");
        let file = Reference::File(folder.path().join("shop/token"));
        assert_eq!(secrets.resolve(&file).unwrap().expose(), "from-folder");
        let path = std::env::var("PATH").unwrap();
        assert_eq!(secrets.resolve(&Reference::Env("PATH".into())).unwrap().expose(), path);
        for missing in [
            key("shop", "nothing"),
            key("..", "token"),
            Reference::Env("QB_NOT_SET".into()),
            Reference::File("/nowhere/x".into()),
        ] {
            let error = secrets.resolve(&missing).unwrap_err();
            assert_eq!(error.reference, missing.to_string());
        }
    }

    #[test]
    fn a_changed_file_is_noticed_and_a_missing_one_bridged() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        std::fs::write(&path, "one").unwrap();
        let reader = Reader::new(Reference::File(path.clone()), Arc::new(Secrets::default()));
        assert_eq!(reader.read_again().unwrap(), (Secret::new("one"), false));
        assert_eq!(reader.read_again().unwrap(), (Secret::new("one"), false));
        std::fs::write(&path, "two\n").unwrap();
        assert_eq!(reader.read_again().unwrap(), (Secret::new("two"), true));
        std::fs::remove_file(&path).unwrap();
        assert_eq!(reader.read_again().unwrap(), (Secret::new("two"), false));
        let never = Reader::new(Reference::File(path), Arc::new(Secrets::default()));
        assert!(never.current().is_err());
    }
}

//! Manifests from files and folders, with the Secrets and ConfigMaps beside them.
//!
//! Loading never fails as a whole: what cannot be read is a problem beside the objects that can, so that one report names
//! everything.

use std::{
    fs,
    path::{Path, PathBuf},
};

use base64::Engine as _;
use serde_json::{Map, Value};

use crate::{
    crd::Kind,
    names::{is_object_name, nearest},
    problem::{Problem, Reason},
    secret::{Secret, Secrets},
    spec::{API_VERSION, GROUP},
    yaml,
};

/// Where a manifest without a namespace is.
pub const DEFAULT_NAMESPACE: &str = "default";

/// No file is larger.
const FILE_BYTES_MAX: u64 = 8 << 20;
/// Folders are read so deep.
const DEPTH_MAX: usize = 8;

/// One object as written.
#[derive(Debug, Clone, PartialEq)]
pub struct Object {
    /// File, or where else it came from.
    pub file: String,
    /// Kind.
    pub kind: Kind,
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
    /// UID, where it comes from a cluster.
    pub uid: Option<String>,
    /// `spec`.
    pub spec: Value,
    /// A classic file made it: its name may be any, and literals stand for secrets.
    pub classic: bool,
}

/// Manifests as written, with what was wrong already.
#[derive(Debug, Clone, Default)]
pub struct Manifests {
    /// Objects of the three kinds.
    pub objects: Vec<Object>,
    /// What Secrets, ConfigMaps and the folder of secrets give.
    pub secrets: Secrets,
    /// What could not be read.
    pub problems: Vec<Problem>,
    /// What is odd, but harmless.
    pub warnings: Vec<Problem>,
}

/// Reads files and folders: every `.yaml`, `.yml` and `.json` in a folder and below, in the order of their names.
pub fn load<P: AsRef<Path>>(paths: impl IntoIterator<Item = P>) -> Manifests {
    let mut manifests = Manifests::default();
    for path in paths {
        manifests.add_path(path.as_ref(), 0);
    }
    manifests
}

impl Manifests {
    /// Answers keys from `folder` first, a folder of `NAME/KEY` files (`--secrets DIR`).
    #[must_use]
    pub fn with_secrets_folder(mut self, folder: impl Into<PathBuf>) -> Self {
        self.secrets.folder = Some(folder.into());
        self
    }

    fn add_path(&mut self, path: &Path, depth: usize) {
        let shown = path.display().to_string();
        let metadata = match fs::metadata(path) {
            Ok(metadata) => metadata,
            Err(error) => return self.problems.push(Problem::of_file(shown, error.to_string())),
        };
        if metadata.is_dir() {
            return self.add_folder(path, depth);
        }
        if metadata.len() > FILE_BYTES_MAX {
            return self.problems.push(Problem::of_file(shown, "the file is larger than 8 MiB"));
        }
        match fs::read(path).map(String::from_utf8) {
            Ok(Ok(text)) => self.add_text(&shown, &text),
            Ok(Err(_)) => self.problems.push(Problem::of_file(shown, "the file is no UTF-8 text")),
            Err(error) => self.problems.push(Problem::of_file(shown, error.to_string())),
        }
    }

    fn add_folder(&mut self, folder: &Path, depth: usize) {
        let shown = folder.display().to_string();
        if depth > DEPTH_MAX {
            return self.problems.push(Problem::of_file(shown, "the folders are nested too deep"));
        }
        let entries = match fs::read_dir(folder).and_then(Iterator::collect::<Result<Vec<_>, _>>) {
            Ok(entries) => entries,
            Err(error) => return self.problems.push(Problem::of_file(shown, error.to_string())),
        };
        let mut paths: Vec<PathBuf> =
            entries.into_iter().map(|entry| entry.path()).filter(|path| is_manifest(path)).collect();
        paths.sort();
        if paths.is_empty() && depth == 0 {
            self.problems.push(Problem::of_file(shown, "the folder holds no .yaml, .yml or .json file"));
        }
        for path in paths {
            self.add_path(&path, depth + 1);
        }
    }

    /// Adds the documents of a text. `file` is what the problems name.
    pub fn add_text(&mut self, file: &str, text: &str) {
        for document in yaml::read(text) {
            match document {
                Ok(document) => {
                    let mut found = Found {
                        manifests: self,
                        file,
                        kind: String::new(),
                        namespace: String::new(),
                        name: String::new(),
                    };
                    found.document(&document);
                }
                Err(error) => self.problems.push(Problem::of_file(format!("{file}:{}", error.line), error.message)),
            }
        }
    }
}

/// Hidden entries are left out: a mounted ConfigMap has its files a second time in a hidden folder.
fn is_manifest(path: &Path) -> bool {
    let is_hidden = path.file_name().is_some_and(|name| name.to_string_lossy().starts_with('.'));
    let extension = path.extension().unwrap_or_default();
    !is_hidden && (path.is_dir() || ["yaml", "yml", "json"].iter().any(|known| extension == *known))
}

/// A document on its way into the manifests.
struct Found<'m> {
    manifests: &'m mut Manifests,
    file: &'m str,
    kind: String,
    namespace: String,
    name: String,
}

impl Found<'_> {
    fn problem(&self, path: &str, message: impl Into<String>) -> Problem {
        Problem {
            file: self.file.to_owned(),
            kind: self.kind.clone(),
            namespace: self.namespace.clone(),
            name: self.name.clone(),
            path: path.to_owned(),
            message: message.into(),
            hint: None,
            reason: Reason::InvalidSpec,
        }
    }

    fn error(&mut self, path: &str, message: impl Into<String>) {
        let problem = self.problem(path, message);
        self.manifests.problems.push(problem);
    }

    fn document(&mut self, document: &yaml::Document) {
        let Value::Object(object) = &document.value else {
            let place = format!("{}:{}", self.file, document.line);
            self.manifests.problems.push(Problem::of_file(place, "the document is no manifest"));
            return;
        };
        if object.get("kind").and_then(Value::as_str) == Some("List") {
            let items = object.get("items").and_then(Value::as_array);
            for item in items.into_iter().flatten().filter_map(Value::as_object) {
                self.object(item, document.line);
            }
        } else {
            self.object(object, document.line);
        }
        for path in &document.repeated {
            self.error(path, "the key stands twice in one map");
        }
    }

    fn object(&mut self, object: &Map<String, Value>, line: usize) {
        let word = |name: &str| object.get(name).and_then(Value::as_str).unwrap_or_default();
        let metadata =
            |name: &str| object.get("metadata").and_then(|it| it.get(name)).and_then(Value::as_str).unwrap_or_default();
        self.kind = word("kind").to_owned();
        self.name = metadata("name").to_owned();
        self.namespace = match metadata("namespace") {
            "" => DEFAULT_NAMESPACE.to_owned(),
            namespace => namespace.to_owned(),
        };
        match (word("apiVersion"), word("kind")) {
            (_, "") => {
                let place = format!("{}:{line}", self.file);
                let problem = Problem::of_file(place, "the document has no kind").hint(known_kinds());
                self.manifests.problems.push(problem);
            }
            ("v1", "Secret") => self.secret(object),
            ("v1", "ConfigMap") => self.config_map(object),
            (API_VERSION, kind) => match Kind::parse(kind) {
                Some(kind) => self.own(kind, object),
                None => self.unknown_kind(kind),
            },
            (version, kind) if Kind::parse(kind).is_some() && is_ours(version) => {
                let problem =
                    self.problem("apiVersion", format!("{version:?} is unknown")).hint(format!("write {API_VERSION}"));
                self.manifests.problems.push(problem);
            }
            (version, kind) if is_ours(version) => self.unknown_kind(kind),
            (version, _) => {
                let warning =
                    self.problem("apiVersion", format!("{version:?} is none of QueueBox; the manifest is left out"));
                self.manifests.warnings.push(warning);
            }
        }
    }

    fn unknown_kind(&mut self, kind: &str) {
        let near = nearest(kind, Kind::ALL.map(Kind::as_str));
        let hint = near.map_or_else(known_kinds, |near| format!("did you mean {near}?"));
        let problem = self.problem("kind", format!("{kind:?} is unknown")).hint(hint);
        self.manifests.problems.push(problem);
    }

    fn own(&mut self, kind: Kind, object: &Map<String, Value>) {
        self.unknown_fields("", object, &["apiVersion", "kind", "metadata", "spec", "status"]);
        match object.get("metadata") {
            Some(Value::Object(metadata)) => self.unknown_fields("metadata.", metadata, &METADATA),
            Some(_) => self.error("metadata", "expected a block"),
            None => {}
        }
        if self.name.is_empty() {
            self.error("metadata.name", "is missing");
        } else if !is_object_name(&self.name) {
            self.error(
                "metadata.name",
                format!("{:?} is no name: write lower case letters, digits, \"-\" and \".\"", self.name),
            );
        }
        let twin = self.manifests.objects.iter().find(|other| {
            other.kind == kind && other.namespace == self.namespace && other.name == self.name && !self.name.is_empty()
        });
        if let Some(twin) = twin {
            let problem = self.problem("metadata.name", format!("there is another one of this name in {}", twin.file));
            return self.manifests.problems.push(problem);
        }
        let spec = match object.get("spec") {
            None | Some(Value::Null) => Value::Object(Map::new()),
            Some(spec) => spec.clone(),
        };
        let uid = object.get("metadata").and_then(|it| it.get("uid")).and_then(Value::as_str).map(str::to_owned);
        self.manifests.objects.push(Object {
            file: self.file.to_owned(),
            kind,
            namespace: self.namespace.clone(),
            name: self.name.clone(),
            uid,
            spec,
            classic: false,
        });
    }

    fn unknown_fields(&mut self, prefix: &str, members: &Map<String, Value>, known: &[&str]) {
        let names: Vec<&String> = members.keys().filter(|name| !known.contains(&name.as_str())).collect();
        for name in names {
            let mut problem = self.problem(&format!("{prefix}{name}"), "unknown field");
            problem.hint = nearest(name, known.iter().copied()).map(|near| format!("did you mean {near}?"));
            self.manifests.problems.push(problem);
        }
    }

    fn secret(&mut self, object: &Map<String, Value>) {
        for (key, value) in entries(object, "data") {
            let decoded = value
                .as_str()
                .and_then(|text| {
                    base64::engine::general_purpose::STANDARD.decode(text.split_whitespace().collect::<String>()).ok()
                })
                .and_then(|bytes| String::from_utf8(bytes).ok());
            match decoded {
                Some(value) => {
                    self.manifests.secrets.secrets.insert((self.name.clone(), key.clone()), Secret::new(value));
                }
                None => self.error(&format!("data.{key}"), "is no base64 of a text"),
            }
        }
        for (key, value) in entries(object, "stringData") {
            match value.as_str() {
                Some(value) => {
                    self.manifests.secrets.secrets.insert((self.name.clone(), key.clone()), Secret::new(value));
                }
                None => self.error(&format!("stringData.{key}"), "expected a text; put it in quotes"),
            }
        }
    }

    fn config_map(&mut self, object: &Map<String, Value>) {
        for (key, value) in entries(object, "data") {
            match value.as_str() {
                Some(value) => {
                    self.manifests.secrets.config_maps.insert((self.name.clone(), key.clone()), value.to_owned());
                }
                None => self.error(&format!("data.{key}"), "expected a text; put it in quotes"),
            }
        }
    }
}

fn entries<'o>(object: &'o Map<String, Value>, name: &str) -> impl Iterator<Item = (&'o String, &'o Value)> {
    object.get(name).and_then(Value::as_object).into_iter().flatten()
}

fn is_ours(version: &str) -> bool {
    version.is_empty() || version.split('/').next().is_some_and(|group| group == GROUP)
}

fn known_kinds() -> String {
    format!("known kinds: {}, and Secret and ConfigMap", Kind::ALL.map(Kind::as_str).join(", "))
}

/// Fields of Kubernetes' own metadata.
const METADATA: [&str; 16] = [
    "name",
    "namespace",
    "labels",
    "annotations",
    "uid",
    "resourceVersion",
    "generation",
    "generateName",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "finalizers",
    "managedFields",
    "ownerReferences",
    "selfLink",
    "clusterName",
];

//! The classic single-file configuration (contract 13.5): `queuebox.yml` and `QUEUEBOX_*` variables become manifests.
//!
//! Key names are matched against the schemas of the three kinds, in any case and without regard to `-` and `_`; what the
//! contract renames stands in tables here. A literal secret becomes a `secretKeyRef`: its value is known to the run that
//! reads the file, and is never part of a manifest.
//!
//! ```text
//!   file ─► tree ─► + variables ─► ${NAME} ─► Relay, Destinations, Sources ─► check, run
//!                                                        └────► manifests, keys to fill, notes (convert)
//! ```

mod tree;

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use serde_json::{Map, Value, json};
use url::Url;

use crate::{
    crd::{CONNECTORS, Kind, spec_schema},
    load::{DEFAULT_NAMESPACE, Manifests, Object},
    names::{is_object_name, nearest},
    problem::{Problem, Reason},
    secret::Secret,
    spec::API_VERSION,
    value::{
        DURATION_PATTERN, POSITIVE_DURATION_PATTERN, POSITIVE_SIZE_PATTERN, SIZE_PATTERN, format_duration, format_size,
    },
    yaml,
};

pub use tree::Variables;
use tree::{norm, same};

/// Where a classic configuration is looked for when nobody names one.
pub const DEFAULT_FILE: &str = "/etc/queuebox/queuebox.yml";
/// Variable that names the file.
pub const FILE_VARIABLE: &str = "QUEUEBOX_CONFIG_FILE";
/// Name of the Relay that a classic file becomes.
pub const RELAY_NAME: &str = "queuebox";

/// A key of a Secret that somebody must fill after a conversion.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyToFill {
    /// Name of the Secret.
    pub name: String,
    /// Key in it.
    pub key: String,
    /// Where the value stands now: key of the classic file.
    pub from: String,
}

/// A classic configuration as manifests.
#[derive(Debug, Clone, Default)]
pub struct Classic {
    /// Objects, the values of their secrets, and what was wrong.
    pub manifests: Manifests,
    /// Keys of Secrets to fill before the written manifests can be used.
    pub keys: Vec<KeyToFill>,
    /// What could not be kept as it was.
    pub notes: Vec<String>,
}

/// The file to read: the given one, else the one of [`FILE_VARIABLE`], else [`DEFAULT_FILE`].
///
/// # Errors
/// Nothing found; the problem names the places.
#[allow(clippy::result_large_err, reason = "called once, at start")]
pub fn find_file(given: Option<&Path>, variable: Option<&str>) -> Result<PathBuf, Problem> {
    let named = given.map(Path::to_owned).or_else(|| variable.filter(|it| !it.is_empty()).map(PathBuf::from));
    match named {
        Some(path) if path.is_file() => Ok(path),
        Some(path) => Err(Problem::of_file(path.display().to_string(), "there is no such file")),
        None if Path::new(DEFAULT_FILE).is_file() => Ok(DEFAULT_FILE.into()),
        None => Err(Problem::of_file("", "no configuration found")
            .hint(format!("give --config FILE, set {FILE_VARIABLE}, or write {DEFAULT_FILE}"))),
    }
}

/// Reads a classic configuration. `file` is what problems name; `variables` are all of the process, others than
/// `QUEUEBOX_*` serve `${NAME}`.
pub fn read(file: &str, text: &str, variables: &Variables) -> Classic {
    let mut reading = Reading::new(file);
    let Some(mut root) = reading.parse(text) else { return reading.out };
    for (name, path, value) in variables.own() {
        if tree::is_service_link(name) && !binds(&path, value) {
            continue;
        }
        reading.origins.push((path.join("."), name.to_owned()));
        reading.overlays.push((path, value.to_owned()));
    }
    tree::overlay(&mut root, tree::from_variables(&reading.overlays));
    for (path, message) in variables.interpolate(&mut root) {
        reading.problem(&path, message, None);
    }
    reading.convert(&root);
    reading.out
}

/// The variable alone sets something that a classic file knows.
fn binds(path: &[String], value: &str) -> bool {
    let mut reading = Reading::new("");
    let mut root = Map::new();
    tree::overlay(&mut root, tree::from_variables(&[(path.to_vec(), value.to_owned())]));
    reading.convert(&root);
    !reading.unknown
}

impl Classic {
    /// The manifests as one YAML text, for `queuebox convert`. Names that Kubernetes would refuse are changed, with a note.
    pub fn write(&mut self) -> String {
        let mut renamed = BTreeMap::new();
        for object in &self.manifests.objects {
            let name = object_name(&object.name);
            if name != object.name {
                self.notes.push(match object.kind {
                    Kind::Source => format!(
                        "Source {} is written as {name}: Kubernetes takes no other letters. Rows that are stored under the old name \
                         keep it, so a repeat of one of them is taken for new",
                        object.name
                    ),
                    _ => format!("{} {} is written as {name}: Kubernetes takes no other letters", object.kind, object.name),
                });
            }
            renamed.insert((object.kind, object.name.clone()), name);
        }
        let documents: Vec<Value> = self
            .manifests
            .objects
            .iter()
            .map(|object| {
                let mut spec = object.spec.clone();
                if object.kind == Kind::Relay {
                    self.notes.extend(separate_ports(&mut spec));
                    rename_targets(&mut spec, &renamed);
                }
                let name = &renamed[&(object.kind, object.name.clone())];
                json!({"apiVersion": API_VERSION, "kind": object.kind.as_str(), "metadata": {"name": name}, "spec": spec})
            })
            .collect();
        yaml::write_all(&documents)
    }
}

/// A name that Kubernetes takes: `orderEvents` and `order_events` become `order-events`.
fn object_name(name: &str) -> String {
    if is_object_name(name) {
        return name.to_owned();
    }
    let mut out = String::new();
    let mut before_is_small = false;
    for character in name.chars() {
        match character {
            'A'..='Z' => {
                if before_is_small {
                    out.push('-');
                }
                out.push(character.to_ascii_lowercase());
            }
            'a'..='z' | '0'..='9' => out.push(character),
            _ => out.push('-'),
        }
        before_is_small = character.is_ascii_lowercase() || character.is_ascii_digit();
    }
    let out = out.trim_matches('-').to_owned();
    if is_object_name(&out) { out } else { "unnamed".to_owned() }
}

/// A pod has two ports; a classic file without a management port has one.
fn separate_ports(spec: &mut Value) -> Option<String> {
    let http = spec.get_mut("http")?.as_object_mut()?;
    if http.get("port") != http.get("managementPort") {
        return None;
    }
    http.remove("managementPort");
    let port = http.get("port").and_then(Value::as_u64);
    let management = if port == Some(9090) { 8080 } else { 9090 };
    if management != 9090 {
        http.insert("managementPort".to_owned(), json!(management));
    }
    Some(format!("health, metrics and admin move from the data port to the management port {management}"))
}

fn rename_targets(spec: &mut Value, renamed: &BTreeMap<(Kind, String), String>) {
    for route in spec.get_mut("routes").and_then(Value::as_array_mut).into_iter().flatten() {
        for target in route.get_mut("destinations").and_then(Value::as_array_mut).into_iter().flatten() {
            let new = target.as_str().and_then(|name| renamed.get(&(Kind::Destination, name.to_owned())));
            if let Some(name) = new {
                *target = json!(name);
            }
        }
    }
}

/// A file on its way to manifests.
struct Reading<'f> {
    file: &'f str,
    out: Classic,
    overlays: Vec<(Vec<String>, String)>,
    /// Keys that variables set, with the variable, for problems.
    origins: Vec<(String, String)>,
    /// An unknown key was met.
    unknown: bool,
    /// Secret that the literals of the present object go to.
    secret_name: String,
}

type Block<'v> = &'v Map<String, Value>;

impl<'f> Reading<'f> {
    fn new(file: &'f str) -> Self {
        Self {
            file,
            out: Classic::default(),
            overlays: Vec::new(),
            origins: Vec::new(),
            unknown: false,
            secret_name: String::new(),
        }
    }

    fn parse(&mut self, text: &str) -> Option<Map<String, Value>> {
        let mut documents = yaml::read(text);
        if documents.len() > 1 {
            self.problem("", "a classic file is one document", None);
        }
        match documents.drain(..).next() {
            None => Some(Map::new()),
            Some(Ok(document)) => {
                for path in &document.repeated {
                    self.problem(path, "the key stands twice in one map", None);
                }
                match document.value {
                    Value::Object(root) => Some(root),
                    Value::Null => Some(Map::new()),
                    _ => {
                        self.problem("", "the file is no configuration", None);
                        None
                    }
                }
            }
            Some(Err(error)) => {
                let place = format!("{}:{}", self.file, error.line);
                self.out.manifests.problems.push(Problem::of_file(place, error.message));
                None
            }
        }
    }

    fn problem(&mut self, path: &str, message: impl Into<String>, hint: Option<String>) {
        let variable = self.origins.iter().find(|(origin, _)| {
            let (origin, path) = (norm(origin), norm(path));
            origin == path || origin.strip_prefix(&path).is_some_and(|rest| rest.starts_with('.'))
        });
        let mut problem = Problem::of_file(self.file, message);
        problem.path = match variable {
            Some((_, variable)) => format!("{path} (variable {variable})"),
            None => path.to_owned(),
        };
        problem.reason = Reason::InvalidSpec;
        problem.hint = hint;
        self.out.manifests.problems.push(problem);
    }

    fn warning(&mut self, path: &str, message: impl Into<String>) {
        let mut warning = Problem::of_file(self.file, message);
        warning.path = path.to_owned();
        warning.reason = Reason::InvalidSpec;
        self.out.manifests.warnings.push(warning);
    }

    /// An unknown key, with the nearest spelling, or whatever takes it, or all that is known.
    fn unknown(&mut self, path: &str, key: &str, known: &[String]) {
        self.unknown = true;
        let small = norm(key);
        let pairs: Vec<(String, &String)> = known.iter().map(|name| (norm(name), name)).collect();
        let near = nearest(&small, pairs.iter().map(|(small, _)| small.as_str()));
        let near = near.and_then(|near| pairs.iter().find(|(small, _)| small == near)).map(|(_, name)| *name);
        let hint = match (near, self.owner(path, key)) {
            (Some(near), _) => format!("did you mean {near}?"),
            (None, Some(owner)) => format!("it belongs to {owner}"),
            (None, None) => format!("known here: {}", known.join(", ")),
        };
        self.problem(path, "unknown key", Some(hint));
    }

    /// The kind of source or destination that takes a key.
    fn owner(&self, path: &str, key: &str) -> Option<String> {
        let kinds = if path.starts_with("sources") {
            [(Kind::Source, "sources"), (Kind::Destination, "destinations")]
        } else {
            [(Kind::Destination, "destinations"), (Kind::Source, "sources")]
        };
        if !path.starts_with("sources.") && !path.starts_with("destinations.") {
            return None;
        }
        kinds.into_iter().find_map(|(kind, word)| {
            let found = CONNECTORS
                .into_iter()
                .find(|connector| self.resolve(property(spec_schema(kind), connector), key, &Value::Null).is_some())?;
            Some(format!("{word} of type {found}"))
        })
    }

    fn add(&mut self, kind: Kind, name: &str, spec: Map<String, Value>) {
        self.out.manifests.objects.push(Object {
            file: self.file.to_owned(),
            kind,
            namespace: DEFAULT_NAMESPACE.to_owned(),
            name: name.to_owned(),
            uid: None,
            spec: Value::Object(spec),
            classic: true,
        });
    }

    fn block<'v>(&mut self, path: &str, value: &'v Value) -> Option<Block<'v>> {
        match value {
            Value::Object(block) => Some(block),
            Value::Null => None,
            _ => {
                self.problem(path, "expected a block", None);
                None
            }
        }
    }

    // ---- Sections ---------------------------------------------------------------------------------------------------

    fn convert(&mut self, root: Block<'_>) {
        const SECTIONS: [&str; 10] = [
            "server",
            "database",
            "outbox",
            "inbox",
            "http",
            "admin",
            "sources",
            "destinations",
            "routes",
            "retention",
        ];
        let mut relay = Map::new();
        self.secret_name = RELAY_NAME.to_owned();
        for (key, value) in root {
            let Some(section) = SECTIONS.into_iter().find(|section| same(section, key)) else {
                self.unknown(key, key, &SECTIONS.map(str::to_owned));
                continue;
            };
            match section {
                "routes" => self.routes(value, &mut relay),
                "sources" | "destinations" => {}
                _ => {
                    if let Some(block) = self.block(section, value) {
                        self.section(section, block, &mut relay);
                    }
                }
            }
        }
        // Without a management port all is on the data port.
        let port = relay.get("http").and_then(|http| http.get("port")).cloned().unwrap_or(json!(8080));
        let http = child(&mut relay, "http");
        http.entry("managementPort").or_insert(port.clone());
        http.entry("port").or_insert(port);
        self.add(Kind::Relay, RELAY_NAME, relay);
        for (key, value) in root {
            if same(key, "destinations") {
                self.named("destinations", value, Self::destination);
            } else if same(key, "sources") {
                self.named("sources", value, Self::source);
            }
        }
    }

    fn named(&mut self, section: &str, value: &Value, each: impl Fn(&mut Self, &str, &str, Block<'_>)) {
        for (name, value) in self.block(section, value).into_iter().flatten() {
            let path = format!("{section}.{name}");
            if let Some(block) = self.block(&path, value) {
                self.secret_name = object_name(name);
                each(self, &path, name, block);
            }
        }
    }

    fn section(&mut self, section: &str, block: Block<'_>, relay: &mut Map<String, Value>) {
        match section {
            "server" => self.server(block, relay),
            "database" => self.database(block, relay),
            "outbox" => self.outbox(block, relay),
            "retention" => self.retention(block, relay),
            _ => {
                let schema = property(spec_schema(Kind::Relay), section);
                let converted = self.fields(section, schema, block);
                child(relay, section).extend(converted);
            }
        }
    }

    fn server(&mut self, block: Block<'_>, relay: &mut Map<String, Value>) {
        for (key, value) in block {
            let path = format!("server.{key}");
            let port = property(property(spec_schema(Kind::Relay), "http"), "port");
            match norm(key).as_str() {
                "httpport" | "port" => set(child(relay, "http"), "port", self.value(&path, port, value)),
                "managementport" => set(child(relay, "http"), "managementPort", self.value(&path, port, value)),
                "shutdowntimeoutms" => set(relay, "drainTimeout", self.milliseconds(&path, value)),
                _ => self.unknown(&path, key, &["httpPort", "managementPort", "shutdownTimeoutMs"].map(str::to_owned)),
            }
        }
    }

    fn outbox(&mut self, block: Block<'_>, relay: &mut Map<String, Value>) {
        let schema = property(spec_schema(Kind::Relay), "outbox");
        let mut rest = Map::new();
        for (key, value) in block {
            let path = format!("outbox.{key}");
            match norm(key).as_str() {
                "concurrency" => set(
                    child(relay, "outbox"),
                    "maxInFlight",
                    self.value(&path, property(schema, "maxInFlight"), value),
                ),
                "retrybasedelayms" => {
                    set(child(child(relay, "outbox"), "backoff"), "initial", self.milliseconds(&path, value))
                }
                "retrymaxdelayms" => {
                    set(child(child(relay, "outbox"), "backoff"), "max", self.milliseconds(&path, value))
                }
                "shutdowntimeoutms" => set(relay, "drainTimeout", self.milliseconds(&path, value)),
                "capture" => self.capture(&path, value, relay),
                _ => {
                    rest.insert(key.clone(), value.clone());
                }
            }
        }
        let converted = self.fields("outbox", schema, &rest);
        child(relay, "outbox").extend(converted);
    }

    fn capture(&mut self, path: &str, value: &Value, relay: &mut Map<String, Value>) {
        let Some(block) = self.block(path, value) else { return };
        let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned).to_lowercase();
        let mut mode = "Auto";
        let mut unused = Vec::new();
        for (key, value) in block {
            match norm(key).as_str() {
                "enabled" if text(value) == "false" => mode = "Polling",
                "mode" if text(value) == "polling" => mode = "Polling",
                "enabled" | "mode" => {}
                "connection" => {
                    let schema = property(property(spec_schema(Kind::Relay), "capture"), "connection");
                    let at = format!("{path}.{key}");
                    if let Some(connection) = self.value(&at, schema, value) {
                        child(relay, "capture").insert("connection".to_owned(), connection);
                    }
                }
                _ => unused.push(key.clone()),
            }
        }
        child(relay, "capture").insert("mode".to_owned(), json!(mode));
        if !unused.is_empty() {
            let message = format!(
                "{} {} not used any more: idle workers are woken by a trigger",
                unused.join(", "),
                if unused.len() == 1 { "is" } else { "are" }
            );
            self.warning(path, &message);
            self.out.notes.push(format!("{path}: {message}"));
        }
    }

    fn retention(&mut self, block: Block<'_>, relay: &mut Map<String, Value>) {
        const TABLES: [&str; 2] = ["outbox", "inbox"];
        let schema = property(spec_schema(Kind::Relay), "retention");
        let shared: Map<String, Value> = block
            .iter()
            .filter(|(key, _)| !TABLES.iter().any(|table| same(table, key)))
            .map(|(key, value)| (key.clone(), value.clone()))
            .collect();
        for table in TABLES {
            let own = block.iter().find(|(key, _)| same(key, table)).map(|(_, value)| value);
            let path = format!("retention.{table}");
            let Some(own) = own.and_then(|own| self.block(&path, own)) else { continue };
            let mut all = shared.clone();
            all.retain(|key, _| !own.keys().any(|other| same(key, other)));
            all.extend(own.clone());
            let word = |name: &str| {
                let value = all.iter().find(|(key, _)| same(key, name)).map(|(_, value)| value);
                value.map(|value| value.as_str().map_or_else(|| value.to_string(), str::to_owned).to_lowercase())
            };
            let enabled = word("enabled").is_none_or(|enabled| enabled == "true");
            let policy = word("policy");
            all.retain(|key, _| {
                let unused_by_policy = match policy.as_deref() {
                    Some("age") => same(key, "maxCount"),
                    Some("count") => same(key, "maxAge"),
                    _ => false,
                };
                !same(key, "enabled") && !same(key, "policy") && !unused_by_policy
            });
            let converted = self.fields(&path, property(schema, table), &all);
            if enabled && !converted.is_empty() {
                child(child(relay, "retention"), table).extend(converted);
            }
        }
    }

    fn routes(&mut self, value: &Value, relay: &mut Map<String, Value>) {
        let Value::Array(routes) = value else {
            if !value.is_null() {
                self.problem("routes", "expected a list", None);
            }
            return;
        };
        let schema = property(spec_schema(Kind::Relay), "routes").get("items").unwrap_or(&Value::Null).clone();
        let mut converted = Vec::new();
        for (index, route) in routes.iter().enumerate() {
            let path = format!("routes[{index}]");
            let Some(block) = self.block(&path, route) else { continue };
            let renamed: Map<String, Value> = block
                .iter()
                .map(|(key, value)| {
                    let key = match norm(key).as_str() {
                        "topicpattern" => "topics",
                        "destination" => "destinations",
                        "routingkeytemplate" => "routingKey",
                        _ => key,
                    };
                    (key.to_owned(), value.clone())
                })
                .collect();
            converted.push(Value::Object(self.fields(&path, &schema, &renamed)));
        }
        relay.insert("routes".to_owned(), Value::Array(converted));
    }

    // ---- Database ---------------------------------------------------------------------------------------------------

    fn database(&mut self, block: Block<'_>, relay: &mut Map<String, Value>) {
        let schema = property(spec_schema(Kind::Relay), "database");
        let given = |name: &str| block.iter().find(|(key, _)| same(key, name)).map(|(_, value)| value);
        let url = ["url", "jdbcUrl", "connectionUrl"].into_iter().find_map(|name| {
            given(name).and_then(Value::as_str).map(|url| (format!("database.{name}"), url.to_owned()))
        });
        let word = ["type", "kind", "driver"].into_iter().find_map(given).and_then(Value::as_str).map(norm);
        let word = word.or_else(|| url.as_ref().map(|(_, url)| url_scheme(url)));
        let has_server = ["host", "database", "username"].into_iter().any(|name| given(name).is_some());
        let kind = match word.as_deref() {
            Some("postgres" | "postgresql") => "postgres",
            Some("sqlserver" | "mssql") => "sqlserver",
            Some("mysql" | "mariadb") => "mysql",
            Some("sqlite") => "sqlite",
            Some(other) => {
                self.problem(
                    "database.type",
                    format!("{other:?} is unknown"),
                    Some("known: postgres, sqlserver, mysql, sqlite".into()),
                );
                return;
            }
            None if has_server => "postgres",
            None => "sqlite",
        };
        let mut rest = block.clone();
        rest.retain(|key, _| {
            !["type", "kind", "driver", "url", "jdbcUrl", "connectionUrl"].iter().any(|name| same(name, key))
        });
        let server = property(schema, kind);
        let (of_server, of_database): (Map<_, _>, Map<_, _>) =
            rest.into_iter().partition(|(key, value)| self.resolve(server, key, value).is_some());
        let mut converted = self.fields("database", schema, &of_database);
        let mut server_block = self.fields("database", server, &of_server);
        match url {
            Some((_, url)) if kind == "sqlite" => {
                let path = url.trim_start_matches("jdbc:").trim_start_matches("sqlite:").trim_start_matches("//");
                server_block.insert("path".to_owned(), json!(path));
            }
            Some((path, url)) => self.database_url(&path, &url, &mut server_block),
            None => {}
        }
        if kind != "sqlite" || !server_block.is_empty() {
            if kind == "sqlite" {
                server_block.entry("path").or_insert(json!("./queuebox.db"));
            }
            converted.insert(kind.to_owned(), Value::Object(server_block));
        }
        if !converted.is_empty() {
            relay.insert("database".to_owned(), Value::Object(converted));
        }
    }

    /// A URL with everything in it is a secret; one without login and parameters is taken apart.
    fn database_url(&mut self, path: &str, url: &str, server: &mut Map<String, Value>) {
        let plain = url.strip_prefix("jdbc:").unwrap_or(url);
        let parsed = Url::parse(plain).ok().filter(|it| it.host_str().is_some_and(|host| !host.is_empty()));
        let Some(mut parsed) = parsed.filter(|_| !plain.contains(';')) else {
            server.insert("urlFrom".to_owned(), self.secret(path, url));
            return;
        };
        let has_login = !parsed.username().is_empty() || parsed.password().is_some();
        if !has_login && parsed.query().is_none() {
            server.entry("host").or_insert(json!(parsed.host_str()));
            if let Some(port) = parsed.port() {
                server.entry("port").or_insert(json!(port));
            }
            server.entry("database").or_insert(json!(parsed.path().trim_start_matches('/')));
            return;
        }
        // The manifest holds a URL with everything, or parts; so the login goes into the URL.
        let username = server.remove("username");
        let password = server.remove("passwordFrom").and_then(|reference| self.take_secret(&reference));
        if !has_login && let Some(username) = username.as_ref().and_then(Value::as_str) {
            let is_set = parsed.set_username(username).is_ok() && parsed.set_password(password.as_deref()).is_ok();
            if !is_set {
                self.problem(path, "the URL can hold no login", None);
            }
        }
        for part in ["host", "port", "database"] {
            server.remove(part);
        }
        server.insert("urlFrom".to_owned(), self.secret(path, parsed.as_str()));
    }

    // ---- Sources, destinations --------------------------------------------------------------------------------------

    fn source(&mut self, path: &str, name: &str, block: Block<'_>) {
        let kind = self.connector(path, block).unwrap_or("http");
        let mut spec = self.connector_spec(path, Kind::Source, kind, block);
        spec.insert("relayRef".to_owned(), json!({"name": RELAY_NAME}));
        if kind == "kafka" {
            child(&mut spec, "kafka").entry("idempotencyFromRecordKey").or_insert(json!(true));
        }
        self.add(Kind::Source, name, spec);
    }

    fn destination(&mut self, path: &str, name: &str, block: Block<'_>) {
        let is_http = ["baseUrl", "url"].iter().any(|name| block.keys().any(|key| same(key, name)));
        let has_type = block.keys().any(|key| same(key, "type"));
        let Some(kind) = self.connector(path, block).or((is_http && !has_type).then_some("http")) else {
            if !has_type {
                self.problem(
                    &format!("{path}.type"),
                    "is missing",
                    Some(format!("write one of {}", CONNECTORS.join(", "))),
                );
            }
            return;
        };
        let mut block = block.clone();
        if kind == "http" {
            self.join_url(path, &mut block);
        }
        let mut spec = self.connector_spec(path, Kind::Destination, kind, &block);
        if !spec.contains_key("breaker") {
            spec.insert("breaker".to_owned(), json!({"mode": "Off"}));
        }
        self.add(Kind::Destination, name, spec);
    }

    fn connector(&mut self, path: &str, block: Block<'_>) -> Option<&'static str> {
        let word = block.iter().find(|(key, _)| same(key, "type")).and_then(|(_, value)| value.as_str())?;
        let found = CONNECTORS.into_iter().find(|kind| same(kind, word));
        if found.is_none() {
            let hint = format!("known: {}", CONNECTORS.join(", "));
            self.problem(&format!("{path}.type"), format!("{word:?} is unknown"), Some(hint));
        }
        found
    }

    /// `baseUrl` and `path` become `url`; a login in it becomes `auth.basic`.
    fn join_url(&mut self, path: &str, block: &mut Map<String, Value>) {
        let mut take = |name: &str| {
            let key = block.keys().find(|key| same(key, name)).cloned()?;
            block.remove(&key)?.as_str().map(str::to_owned)
        };
        let Some(base) = take("baseUrl").or_else(|| take("url")) else { return };
        let joined = match take("path").filter(|path| !path.is_empty()) {
            Some(path) => format!("{}/{}", base.trim_end_matches('/'), path.trim_start_matches('/')),
            None => base,
        };
        let mut url = joined.clone();
        if let Ok(mut parsed) = Url::parse(&joined)
            && !parsed.username().is_empty()
        {
            let decode = |text: &str| percent_encoding::percent_decode_str(text).decode_utf8_lossy().into_owned();
            let (username, password) = (decode(parsed.username()), decode(parsed.password().unwrap_or_default()));
            let is_bare = parsed.set_username("").is_ok() && parsed.set_password(None).is_ok();
            if is_bare && !block.keys().any(|key| same(key, "auth")) {
                url = parsed.to_string();
                block.insert("auth".to_owned(), json!({"basic": {"username": username, "password": password}}));
                self.out.notes.push(format!("{path}: the login in the URL is now auth.basic"));
            }
        }
        block.insert("url".to_owned(), json!(url));
    }

    /// Keys of the kind go into its block, the others stand beside it.
    fn connector_spec(&mut self, path: &str, kind: Kind, connector: &str, block: Block<'_>) -> Map<String, Value> {
        let schema = spec_schema(kind);
        let inner = property(schema, connector);
        let auth = property(inner, "auth");
        let mut outer = Map::new();
        let mut of_kind = Map::new();
        let mut of_auth = Map::new();
        for (key, value) in block {
            let is_union = CONNECTORS.iter().any(|other| same(other, key));
            if same(key, "type") {
                continue;
            }
            if connector == "rabbitmq" && (same(key, "url") || same(key, "connectionUrl")) {
                let at = format!("{path}.{key}");
                if let Some((field, url)) = self.rabbitmq_url(&at, value) {
                    of_kind.insert(field.to_owned(), url);
                }
            } else if connector != "rabbitmq" && connector != "http" && same(key, "connectionUrl") {
                of_kind.insert("servers".to_owned(), value.clone());
            } else if !is_union && self.resolve(schema, key, value).is_some() {
                outer.insert(key.clone(), value.clone());
            } else if self.resolve(inner, key, value).is_some() || same(key, "routingKeyTemplate") {
                let key = if same(key, "routingKeyTemplate") { "routingKey" } else { key };
                of_kind.insert(key.to_owned(), value.clone());
            } else if let Some(joined) = self.joined(inner, key, value) {
                of_kind.extend(joined);
            } else if self.resolve(auth, key, value).is_some() {
                of_auth.insert(key.clone(), value.clone());
            } else {
                let mut known = spellings(path, schema);
                known.retain(|name| !CONNECTORS.contains(&name.as_str()));
                known.extend(spellings(path, inner));
                self.unknown(&format!("{path}.{key}"), key, &known);
            }
        }
        if !of_auth.is_empty() {
            of_kind.entry("auth").or_insert(Value::Object(of_auth));
        }
        // References are finished already; they pass through as they are.
        let finished: Map<String, Value> =
            ["urlFrom"].iter().filter_map(|key| Some(((*key).to_owned(), of_kind.remove(*key)?))).collect();
        let mut spec = self.fields(path, schema, &outer);
        let mut of_kind = self.fields(path, inner, &of_kind);
        of_kind.extend(finished);
        spec.insert(connector.to_owned(), Value::Object(of_kind));
        spec
    }

    /// A URL with a login is a secret; one without stays.
    fn rabbitmq_url(&mut self, path: &str, value: &Value) -> Option<(&'static str, Value)> {
        let Some(text) = value.as_str() else {
            self.problem(path, "expected a text", None);
            return None;
        };
        let has_login = Url::parse(text).map_or(true, |url| !url.username().is_empty() || url.password().is_some());
        Some(if has_login { ("urlFrom", self.secret(path, text)) } else { ("url", json!(text)) })
    }

    // ---- Fields by schema -------------------------------------------------------------------------------------------

    /// The field of `schema` that a classic key means.
    fn resolve<'s>(&self, schema: &'s Value, key: &str, value: &Value) -> Option<Field<'s>> {
        let properties = schema.get("properties")?.as_object()?;
        let find = |wanted: &str| properties.iter().find(|(name, _)| norm(name) == wanted);
        let small = norm(key);
        if let Some((name, inner)) = find(&small) {
            return Some(Field { name, schema: inner, form: Form::AsIs });
        }
        if let Some((name, inner)) = small.strip_suffix("ms").and_then(find).filter(|(_, inner)| is_duration(inner)) {
            return Some(Field { name, schema: inner, form: Form::Milliseconds });
        }
        if let Some(base) = small.strip_suffix("bytes")
            && let Some((name, inner)) = find(&format!("{base}size")).filter(|(_, inner)| is_size(inner))
        {
            return Some(Field { name, schema: inner, form: Form::AsIs });
        }
        if let Some((name, inner)) = find(&format!("{small}from")).filter(|(_, inner)| is_reference(inner)) {
            return Some(Field { name, schema: inner, form: Form::Secret });
        }
        let alias = match small.as_str() {
            "header" => "headername",
            "user" => "username",
            "maxpoolsize" | "maximumpoolsize" => "poolsize",
            "expression" if value.is_string() => return None,
            _ => return None,
        };
        find(alias).map(|(name, inner)| Field { name, schema: inner, form: Form::AsIs })
    }

    fn fields(&mut self, path: &str, schema: &Value, block: Block<'_>) -> Map<String, Value> {
        let mut out = Map::new();
        let block = self.by_type(schema, block);
        for (key, value) in &block {
            let at = format!("{path}.{key}");
            if value.is_null() {
                if self.resolve(schema, key, value).is_none() {
                    self.unknown(&at, key, &spellings(path, schema));
                }
                continue;
            }
            if let Some(field) = self.resolve(schema, key, value) {
                let name = field.name.to_owned();
                let converted = match field.form {
                    Form::AsIs => self.value(&at, field.schema, value),
                    Form::Milliseconds => self.milliseconds(&at, value),
                    Form::Secret => value_text(value).map(|text| self.secret(&at, &text)),
                };
                set(&mut out, &name, converted);
            } else if let Some(joined) = self.joined(schema, key, value) {
                let inner = self.fields(path, schema, &joined);
                out.extend(inner);
            } else {
                self.unknown(&at, key, &spellings(path, schema));
            }
        }
        out
    }

    /// `auth: {type: hmac, secret: …}` means `auth: {hmac: {secret: …}}`.
    fn by_type(&self, schema: &Value, block: Block<'_>) -> Map<String, Value> {
        let word = block.iter().find(|(key, _)| same(key, "type")).and_then(|(_, value)| value.as_str());
        let member = word.and_then(|word| field_names(schema).into_iter().find(|name| same(name, word)));
        match member {
            Some(member) if self.resolve(schema, "type", &Value::Null).is_none() => {
                let mut inner = block.clone();
                inner.retain(|key, _| !same(key, "type"));
                Map::from_iter([(member.to_owned(), Value::Object(inner))])
            }
            _ => block.clone(),
        }
    }

    /// `sasl: {username: …}` means `saslUsername: …`, if every member does.
    fn joined(&self, schema: &Value, key: &str, value: &Value) -> Option<Map<String, Value>> {
        let members = value.as_object().filter(|members| !members.is_empty())?;
        let joined: Map<String, Value> =
            members.iter().map(|(name, value)| (format!("{key}_{name}"), value.clone())).collect();
        joined.iter().all(|(name, value)| self.resolve(schema, name, value).is_some()).then_some(joined)
    }

    fn value(&mut self, path: &str, schema: &Value, value: &Value) -> Option<Value> {
        match schema.get("type").and_then(Value::as_str) {
            Some("object") if is_reference(schema) => value_text(value).map(|text| self.secret(path, &text)),
            Some("object") if schema.get("additionalProperties").is_some() => {
                let members = self.block(path, value)?;
                Some(Value::Object(members.iter().map(|(name, it)| (name.clone(), json!(value_text(it)))).collect()))
            }
            Some("object") if schema.get("properties").is_none() => Some(value.clone()),
            Some("object") => {
                if let (Value::String(text), Some(_)) = (value, schema.pointer("/properties/expression")) {
                    return Some(json!({"expression": text}));
                }
                let block = self.block(path, value)?;
                Some(Value::Object(self.fields(path, schema, block)))
            }
            Some("array") => Some(Value::Array(self.items(path, schema, value))),
            Some("integer") => Some(self.integer(path, value)),
            Some("boolean") => match value.as_str().map(str::to_lowercase).as_deref() {
                Some("true") => Some(json!(true)),
                Some("false") => Some(json!(false)),
                _ => Some(value.clone()),
            },
            Some("string") => self.text(schema, value),
            // JSONPaths and statuses.
            _ => Some(value.clone()),
        }
    }

    fn items(&mut self, path: &str, schema: &Value, value: &Value) -> Vec<Value> {
        let inner = schema.get("items").unwrap_or(&Value::Null);
        let items = match value {
            Value::Array(items) => items.clone(),
            Value::String(text) if inner.get("type").and_then(Value::as_str) == Some("string") => {
                text.split(',').map(|item| json!(item.trim())).collect()
            }
            other => vec![other.clone()],
        };
        let items = items.iter().enumerate();
        items.filter_map(|(index, item)| self.value(&format!("{path}[{index}]"), inner, item)).collect()
    }

    fn integer(&mut self, path: &str, value: &Value) -> Value {
        match value.as_str().map(|text| text.trim().parse::<i64>()) {
            Some(Ok(number)) => json!(number),
            Some(Err(_)) => {
                self.problem(path, "expected a whole number", None);
                Value::Null
            }
            None => value.clone(),
        }
    }

    #[allow(clippy::unused_self, reason = "one of the value methods")]
    fn text(&mut self, schema: &Value, value: &Value) -> Option<Value> {
        let text = value_text(value)?;
        if is_size(schema) && text.bytes().all(|byte| byte.is_ascii_digit()) {
            return Some(json!(text.parse().map_or(text.clone(), format_size)));
        }
        let choices: Vec<&str> =
            schema.get("enum").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str).collect();
        let choice = choices.iter().find(|choice| same(choice, &text));
        let switched = match text.as_str() {
            "false" => choices.iter().find(|choice| **choice == "Off"),
            "true" => choices.iter().find(|choice| **choice == "Auto"),
            _ => None,
        };
        Some(choice.or(switched).map_or_else(|| json!(text), |choice| json!(choice)))
    }

    fn milliseconds(&mut self, path: &str, value: &Value) -> Option<Value> {
        let number = value.as_u64().or_else(|| value.as_str().and_then(|text| text.trim().parse().ok()));
        if number.is_none() {
            self.problem(path, "expected a whole number of milliseconds", None);
        }
        number.map(|ms| json!(format_duration(std::time::Duration::from_millis(ms))))
    }

    /// A reference for a literal, whose value only this run knows; or for `file:/path`.
    fn secret(&mut self, path: &str, text: &str) -> Value {
        if let Some(file) = text.strip_prefix("file:") {
            return json!({"file": file});
        }
        let last = path.rsplit('.').next().unwrap_or(path);
        let before = path.rsplit('.').nth(1).unwrap_or_default();
        let key = object_name(&format!("{before}-{last}"));
        let mut name = self.secret_name.clone();
        if !is_object_name(&name) {
            name = RELAY_NAME.to_owned();
        }
        let secrets = &mut self.out.manifests.secrets.secrets;
        let key = (1..)
            .map(|count| if count == 1 { key.clone() } else { format!("{key}-{count}") })
            .find(|key| !secrets.contains_key(&(name.clone(), key.clone())))
            .unwrap_or_default();
        secrets.insert((name.clone(), key.clone()), Secret::new(text));
        self.out.keys.push(KeyToFill { name: name.clone(), key: key.clone(), from: path.to_owned() });
        json!({"secretKeyRef": {"name": name, "key": key}})
    }

    /// Takes a literal back, to put it into a URL.
    fn take_secret(&mut self, reference: &Value) -> Option<String> {
        let word = |member: &str| reference.pointer(&format!("/secretKeyRef/{member}")).and_then(Value::as_str);
        let place = (word("name")?.to_owned(), word("key")?.to_owned());
        self.out.keys.retain(|key| key.name != place.0 || key.key != place.1);
        self.out.manifests.secrets.secrets.remove(&place).map(|secret| secret.expose().to_owned())
    }
}

/// A field that a classic key means.
struct Field<'s> {
    name: &'s str,
    schema: &'s Value,
    form: Form,
}

enum Form {
    AsIs,
    Milliseconds,
    Secret,
}

fn property<'s>(schema: &'s Value, name: &str) -> &'s Value {
    schema.get("properties").and_then(|it| it.get(name)).unwrap_or(&Value::Null)
}

fn field_names(schema: &Value) -> Vec<&str> {
    schema
        .get("properties")
        .and_then(Value::as_object)
        .into_iter()
        .flat_map(|it| it.keys().map(String::as_str))
        .collect()
}

/// The keys of a classic block as people write them.
fn spellings(path: &str, schema: &Value) -> Vec<String> {
    let properties = schema.get("properties").and_then(Value::as_object);
    let mut all: Vec<String> = properties
        .into_iter()
        .flatten()
        .map(|(name, inner)| {
            if is_duration(inner) {
                format!("{name}Ms")
            } else if is_reference(inner) {
                name.strip_suffix("From").unwrap_or(name).to_owned()
            } else if let Some(base) = name.strip_suffix("Size").filter(|_| is_size(inner)) {
                format!("{base}Bytes")
            } else {
                name.clone()
            }
        })
        .collect();
    let more: &[&str] = match path.split(['.', '[']).next().unwrap_or_default() {
        "outbox" => &["concurrency", "retryBaseDelayMs", "retryMaxDelayMs", "shutdownTimeoutMs", "capture"],
        "routes" => &["topicPattern", "destination", "routingKeyTemplate"],
        "destinations" => &["type", "baseUrl", "path"],
        "sources" => &["type"],
        "database" => &["type", "url"],
        "retention" => &["enabled", "policy", "maxAge"],
        _ => &[],
    };
    all.extend(more.iter().map(|name| (*name).to_owned()));
    all.sort();
    all.dedup();
    all
}

fn has_pattern(schema: &Value, patterns: [&str; 2]) -> bool {
    schema.get("pattern").and_then(Value::as_str).is_some_and(|pattern| patterns.contains(&pattern))
}

fn is_duration(schema: &Value) -> bool {
    has_pattern(schema, [DURATION_PATTERN, POSITIVE_DURATION_PATTERN])
}

fn is_size(schema: &Value) -> bool {
    has_pattern(schema, [SIZE_PATTERN, POSITIVE_SIZE_PATTERN])
}

fn is_reference(schema: &Value) -> bool {
    schema.pointer("/properties/secretKeyRef").is_some()
}

/// A scalar as text.
fn value_text(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Number(_) | Value::Bool(_) => Some(value.to_string()),
        _ => None,
    }
}

fn url_scheme(url: &str) -> String {
    let plain = url.strip_prefix("jdbc:").unwrap_or(url);
    norm(plain.split(':').next().unwrap_or_default())
}

fn child<'m>(map: &'m mut Map<String, Value>, name: &str) -> &'m mut Map<String, Value> {
    let value = map.entry(name).or_insert_with(|| Value::Object(Map::new()));
    if !value.is_object() {
        *value = Value::Object(Map::new());
    }
    match value {
        Value::Object(child) => child,
        // Made an object just above.
        _ => unreachable!(),
    }
}

fn set(map: &mut Map<String, Value>, name: &str, value: Option<Value>) {
    if let Some(value) = value.filter(|value| !value.is_null()) {
        map.insert(name.to_owned(), value);
    }
}

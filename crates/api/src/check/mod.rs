//! Check, then build: manifests become [`crate::checked`] values, or every problem at once (contract 13).
//!
//! ```text
//!   objects ─► structure (schema, unknown fields) ─► rules of each kind ─► rules across objects ─► checked values
//! ```
//!
//! Pure: nothing is read, resolved or connected. `queuebox check`, a local start, and the operator's `Accepted` condition all
//! call this, so they never disagree.

mod broker;
mod destination;
mod http;
mod relay;
mod source;
pub(crate) mod structure;

use std::cell::RefCell;

use queuebox_core::template::{Template, Vocabulary};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::{
    checked::{self, UsedReference},
    crd::Kind,
    load::{Manifests, Object},
    names::nearest,
    problem::{Problem, Problems, Reason},
    secret::Reference,
    spec::common::{CaRef, KeyRef, SecretRef, TlsSpec, TransformSpec},
    value::OneOrMany,
};

/// Where the manifests are meant to run. A few rules depend on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Target {
    /// In one process: SQLite is allowed and is the default, `env` and `file` references are read from here.
    #[default]
    Local,
    /// In pods: no SQLite; `env` and `file` references only as far as `spec.pod` supplies them.
    Cluster,
}

/// What the checks found.
#[derive(Debug, Clone, Default)]
pub struct Report {
    /// Every Relay whose own manifest is valid, with the valid Sources and Destinations that belong to it.
    pub relays: Vec<checked::Relay>,
    /// Destinations that no route names, as `(namespace, name)`.
    pub unreferenced: Vec<(String, String)>,
    /// References of all objects, with the fields that hold them.
    pub references: Vec<UsedReference>,
    /// Everything that is wrong.
    pub problems: Vec<Problem>,
    /// What is odd, but works.
    pub warnings: Vec<Problem>,
}

impl Report {
    /// Problems of one object.
    pub fn problems_of(&self, kind: Kind, namespace: &str, name: &str) -> impl Iterator<Item = &Problem> {
        self.problems.iter().filter(move |problem| {
            problem.kind == kind.as_str() && problem.namespace == namespace && problem.name == name
        })
    }

    /// The one Relay of a local run, with everything valid.
    ///
    /// # Errors
    /// All problems; or that there is no Relay, or several and none of that name.
    pub fn into_relay(self, name: Option<&str>) -> Result<checked::Relay, Problems> {
        if !self.problems.is_empty() {
            return Err(Problems(self.problems));
        }
        let names: Vec<String> = self.relays.iter().map(|relay| relay.name.clone()).collect();
        let mut wanted: Vec<checked::Relay> =
            self.relays.into_iter().filter(|relay| name.is_none_or(|name| relay.name == name)).collect();
        let fail = |message: String, hint: String| Err(Problems(vec![Problem::of_file("", message).hint(hint)]));
        match (wanted.pop(), wanted.is_empty(), name) {
            (Some(relay), true, _) => Ok(relay),
            (None, _, _) if names.is_empty() => fail(
                "there is no Relay".to_owned(),
                "a run needs exactly one, with the routes of your messages".to_owned(),
            ),
            (None, _, name) => fail(
                format!("there is no Relay called {:?}", name.unwrap_or_default()),
                match nearest(name.unwrap_or_default(), names.iter().map(String::as_str)) {
                    Some(near) => format!("did you mean {near}?"),
                    None => format!("there is {}", names.join(", ")),
                },
            ),
            (Some(_), false, _) => fail(
                format!("there are several Relays: {}", names.join(", ")),
                "a run serves one: choose it with --relay NAME".to_owned(),
            ),
        }
    }
}

/// Checks all manifests together.
pub fn check(manifests: &Manifests, target: Target) -> Report {
    let cases: Vec<Case<'_>> = manifests.objects.iter().map(|object| Case::new(object, target)).collect();
    let mut report =
        Report { problems: manifests.problems.clone(), warnings: manifests.warnings.clone(), ..Report::default() };
    let mut all = All::default();
    for case in &cases {
        match case.kind {
            Kind::Relay => all.relays.push((case, relay::check(case))),
            Kind::Destination => all.destinations.push((case, destination::check(case))),
            Kind::Source => all.sources.push((case, source::check(case))),
        }
    }
    all.join(&mut report);
    for case in &cases {
        report.references.extend(case.references.borrow().iter().map(|(path, reference)| UsedReference {
            kind: case.kind,
            name: case.object.name.clone(),
            path: path.clone(),
            reference: reference.clone(),
        }));
        report.problems.append(&mut case.problems.borrow_mut());
        report.warnings.append(&mut case.warnings.borrow_mut());
    }
    report
}

/// What the schema of the API server refuses in a spec, rules left aside. Unknown fields are none of it: they are pruned there.
pub fn schema_problems(kind: Kind, spec: &Value) -> Vec<String> {
    let object = Object {
        file: String::new(),
        kind,
        namespace: String::new(),
        name: String::new(),
        uid: None,
        spec: spec.clone(),
        classic: false,
    };
    let case = Case::new(&object, Target::Cluster);
    structure::conform(&case, spec);
    let problems = case.problems.into_inner().into_iter();
    problems
        .filter(|problem| problem.message != structure::UNKNOWN_FIELD)
        .map(|problem| format!("{}: {}", problem.path, problem.message))
        .collect()
}

/// Every object with what its own rules made of it.
#[derive(Default)]
struct All<'c> {
    relays: Vec<(&'c Case<'c>, relay::Draft)>,
    destinations: Vec<(&'c Case<'c>, destination::Draft)>,
    sources: Vec<(&'c Case<'c>, source::Draft)>,
}

impl All<'_> {
    fn join(self, report: &mut Report) {
        self.check_relay_refs();
        self.check_paths();
        self.check_routes();
        for (case, draft) in &self.destinations {
            let is_used = self.relays.iter().any(|(relay, relay_draft)| {
                relay.object.namespace == case.object.namespace && relay_draft.uses(&case.object.name)
            });
            if !is_used {
                report.unreferenced.push((case.object.namespace.clone(), case.object.name.clone()));
                draft.check_schedule(case, None);
            }
        }
        for (case, draft) in &self.relays {
            self.finish(case, draft, report);
        }
    }

    /// Builds one Relay from its valid parts.
    fn finish(&self, case: &Case<'_>, draft: &relay::Draft, report: &mut Report) {
        let here = |other: &Case<'_>| other.object.namespace == case.object.namespace;
        let mut destinations = Vec::new();
        for (other, destination) in self.destinations.iter().filter(|(other, _)| here(other)) {
            if !draft.uses(&other.object.name) {
                continue;
            }
            self.check_references(case, draft, other);
            destination.check_schedule(other, Some(draft));
            destinations.extend(destination.finish(other, draft).filter(|_| other.is_valid()));
        }
        let mut sources = Vec::new();
        for (other, source) in self.sources.iter().filter(|(other, _)| here(other)) {
            if source.relay != case.object.name {
                continue;
            }
            self.check_references(case, draft, other);
            sources.extend(source.checked.clone().filter(|_| other.is_valid()));
        }
        self.check_references(case, draft, case);
        draft.warn(case, &sources);
        if let Some(relay) = draft.finish(case).filter(|_| case.is_valid()) {
            report.relays.push(checked::Relay { sources, destinations, ..relay });
        }
    }

    fn check_relay_refs(&self) {
        for (case, draft) in self.sources.iter().filter(|(_, draft)| !draft.relay.is_empty()) {
            let names = || {
                let here = self.relays.iter().filter(|(relay, _)| relay.object.namespace == case.object.namespace);
                here.map(|(relay, _)| relay.object.name.as_str())
            };
            if !names().any(|name| name == draft.relay) {
                case.missing("spec.relayRef.name", Reason::RelayNotFound, "Relay", &draft.relay, names());
            }
        }
    }

    fn check_paths(&self) {
        for (index, (case, draft)) in self.sources.iter().enumerate() {
            let Some(path) = &draft.http_path else { continue };
            let twin = self.sources[..index].iter().find(|(other, other_draft)| {
                other.object.namespace == case.object.namespace
                    && other_draft.relay == draft.relay
                    && other_draft.http_path.as_ref() == Some(path)
            });
            if let Some((twin, _)) = twin {
                case.found(
                    &case.problems,
                    "spec.http.path",
                    format!("Source {} of the same Relay has the path {path:?} already", twin.object.name),
                    None,
                    Reason::PathConflict,
                );
            }
        }
    }

    fn check_routes(&self) {
        for (case, draft) in &self.relays {
            for (route, index, name) in draft.targets() {
                let names = || {
                    let here =
                        self.destinations.iter().filter(|(other, _)| other.object.namespace == case.object.namespace);
                    here.map(|(other, _)| other.object.name.as_str())
                };
                if !name.is_empty() && !names().any(|known| known == name) {
                    let path = format!("spec.routes[{route}].destinations[{index}]");
                    case.missing(&path, Reason::DestinationNotFound, "Destination", name, names());
                }
            }
        }
    }

    /// In a cluster a worker sees only the variables and files that `spec.pod` supplies.
    fn check_references(&self, relay: &Case<'_>, draft: &relay::Draft, case: &Case<'_>) {
        if relay.target == Target::Local {
            return;
        }
        for (path, reference) in case.references.borrow().iter() {
            if let Some(what) = draft.lacks(reference) {
                let message = format!("Relay {} does not supply the {what}", relay.object.name);
                let hint = "write secretKeyRef, or supply it by the Relay's spec.pod";
                case.found(&case.problems, path, message, Some(hint.to_owned()), Reason::UnsupportedReference);
            }
        }
    }
}

/// One object under check: where findings go.
pub(crate) struct Case<'o> {
    object: &'o Object,
    kind: Kind,
    target: Target,
    problems: RefCell<Vec<Problem>>,
    warnings: RefCell<Vec<Problem>>,
    references: RefCell<Vec<(String, Reference)>>,
}

impl<'o> Case<'o> {
    fn new(object: &'o Object, target: Target) -> Self {
        Self {
            object,
            kind: object.kind,
            target,
            problems: RefCell::default(),
            warnings: RefCell::default(),
            references: RefCell::default(),
        }
    }

    fn is_valid(&self) -> bool {
        self.problems.borrow().is_empty()
    }

    fn found(&self, to: &RefCell<Vec<Problem>>, path: &str, message: String, hint: Option<String>, reason: Reason) {
        let problem = Problem {
            file: self.object.file.clone(),
            kind: self.kind.as_str().to_owned(),
            namespace: self.object.namespace.clone(),
            name: self.object.name.clone(),
            path: path.to_owned(),
            message,
            hint,
            reason,
        };
        let mut list = to.borrow_mut();
        if !list.contains(&problem) {
            list.push(problem);
        }
    }

    fn error(&self, path: &str, message: impl Into<String>) {
        self.found(&self.problems, path, message.into(), None, Reason::InvalidSpec);
    }

    fn error_with_hint(&self, path: &str, message: &str, hint: &str) {
        self.found(&self.problems, path, message.to_owned(), Some(hint.to_owned()), Reason::InvalidSpec);
    }

    fn warning(&self, path: &str, message: impl Into<String>) {
        self.found(&self.warnings, path, message.into(), None, Reason::InvalidSpec);
    }

    fn missing<'n>(&self, path: &str, reason: Reason, kind: &str, name: &str, names: impl Iterator<Item = &'n str>) {
        let names: Vec<&str> = names.collect();
        let hint = match nearest(name, names.iter().copied()) {
            Some(near) => format!("did you mean {near}?"),
            None if names.is_empty() => format!("there is no {kind} at all"),
            None => format!("there is {}", names.join(", ")),
        };
        let message = format!("there is no {kind} called {name:?} in namespace {}", self.object.namespace);
        self.found(&self.problems, path, message, Some(hint), reason);
    }

    /// The spec as its type. Whatever does not fit is reported and left out.
    fn spec<T: DeserializeOwned>(&self) -> Option<T> {
        let spec: Map<String, Value> = structure::conform(self, &self.object.spec);
        match serde_json::from_value(Value::Object(spec)) {
            Ok(spec) => Some(spec),
            Err(error) => {
                self.error("spec", queuebox_core::redact::redact(&error.to_string()));
                None
            }
        }
    }

    /// Exactly one member of a union. Returns its index.
    fn exactly_one(&self, path: &str, members: &[(&str, bool)]) -> Option<usize> {
        let given: Vec<usize> =
            members.iter().enumerate().filter(|(_, (_, given))| *given).map(|(index, _)| index).collect();
        let names = || members.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
        match given.as_slice() {
            [one] => Some(*one),
            [] => {
                self.error(path, format!("give exactly one of {}", names()));
                None
            }
            several => {
                let given: Vec<&str> = several.iter().map(|index| members[*index].0).collect();
                self.error(path, format!("give exactly one of {}; there are {}", names(), given.join(" and ")));
                None
            }
        }
    }

    /// At most one member.
    fn at_most_one(&self, path: &str, members: &[(&str, bool)]) {
        let given: Vec<&str> = members.iter().filter(|(_, given)| *given).map(|(name, _)| *name).collect();
        if given.len() > 1 {
            self.error(path, format!("give at most one of {}", given.join(" and ")));
        }
    }

    // ---- References -------------------------------------------------------------------------------------------------

    fn key_ref(&self, path: &str, key_ref: &KeyRef) -> (String, String) {
        for (field, value) in [("name", &key_ref.name), ("key", &key_ref.key)] {
            let is_file_name = !value.contains(['/', '\\', '\0']) && !matches!(value.as_str(), "." | "..");
            if !is_file_name {
                self.error(&format!("{path}.{field}"), "must not hold a slash".to_owned());
            }
        }
        (key_ref.name.clone(), key_ref.key.clone())
    }

    fn reference(&self, path: &str, secret: &SecretRef) -> Reference {
        self.any_reference(
            path,
            &CaRef {
                secret_key_ref: secret.secret_key_ref.clone(),
                config_map_key_ref: None,
                env: secret.env.clone(),
                file: secret.file.clone(),
            },
            false,
        )
    }

    fn any_reference(&self, path: &str, reference: &CaRef, may_be_config_map: bool) -> Reference {
        let mut members = vec![
            ("secretKeyRef", reference.secret_key_ref.is_some()),
            ("env", reference.env.is_some()),
            ("file", reference.file.is_some()),
        ];
        if may_be_config_map {
            members.insert(1, ("configMapKeyRef", reference.config_map_key_ref.is_some()));
        }
        self.exactly_one(path, &members);
        let reference = if let Some(key_ref) = &reference.secret_key_ref {
            let (name, key) = self.key_ref(&format!("{path}.secretKeyRef"), key_ref);
            Reference::SecretKey { name, key }
        } else if let Some(key_ref) = &reference.config_map_key_ref {
            let (name, key) = self.key_ref(&format!("{path}.configMapKeyRef"), key_ref);
            Reference::ConfigMapKey { name, key }
        } else if let Some(env) = &reference.env {
            Reference::Env(env.clone())
        } else if let Some(file) = &reference.file {
            if !file.starts_with('/') && self.target == Target::Cluster {
                self.error(&format!("{path}.file"), "must be an absolute path".to_owned());
            }
            Reference::File(file.into())
        } else {
            // Reported above; an object with a problem is never opened.
            return Reference::Env(String::new());
        };
        self.references.borrow_mut().push((path.to_owned(), reference.clone()));
        reference
    }

    fn optional_reference(&self, path: &str, secret: Option<&SecretRef>) -> Option<Reference> {
        secret.map(|secret| self.reference(path, secret))
    }

    fn accepted(
        &self,
        path: &str,
        field: &str,
        current: &SecretRef,
        previous: Option<&SecretRef>,
    ) -> checked::Accepted {
        let mut letters = field.chars();
        let upper: String = letters.next().map(|first| first.to_ascii_uppercase()).into_iter().chain(letters).collect();
        checked::Accepted {
            current: self.reference(&format!("{path}.{field}From"), current),
            previous: self.optional_reference(&format!("{path}.previous{upper}From"), previous),
        }
    }

    fn tls(&self, path: &str, tls: Option<&TlsSpec>) -> checked::Tls {
        let Some(tls) = tls else { return checked::Tls::default() };
        self.tls_files(path, tls.ca_from.as_ref(), tls.cert_from.as_ref(), tls.key_from.as_ref())
    }

    fn tls_files(
        &self,
        path: &str,
        ca: Option<&CaRef>,
        cert: Option<&SecretRef>,
        key: Option<&SecretRef>,
    ) -> checked::Tls {
        if cert.is_some() != key.is_some() {
            self.error(path, "certFrom and keyFrom go together".to_owned());
        }
        checked::Tls {
            ca: ca.map(|ca| self.any_reference(&format!("{path}.caFrom"), ca, true)),
            cert: self.optional_reference(&format!("{path}.certFrom"), cert),
            key: self.optional_reference(&format!("{path}.keyFrom"), key),
        }
    }

    // ---- Texts that are compiled ------------------------------------------------------------------------------------

    fn expression(&self, path: &str, expression: &str) {
        if expression.is_empty() {
            return;
        }
        if let Err(error) = jsonata_core::parser::parse(expression) {
            self.error(path, format!("is no JSONata: {error}"));
        }
    }

    fn transform(&self, path: &str, transform: Option<&TransformSpec>) -> Option<checked::Transform> {
        let transform = transform?;
        self.expression(&format!("{path}.expression"), &transform.expression);
        Some(checked::Transform {
            expression: transform.expression.clone(),
            timeout: transform.timeout.map_or(std::time::Duration::from_millis(100), |timeout| timeout.0),
            max_depth: transform.max_depth.unwrap_or(100),
            on_error: transform.on_error.unwrap_or_default(),
        })
    }

    fn template(&self, path: &str, text: &str, vocabulary: Vocabulary) -> Option<Template> {
        match Template::parse(text, vocabulary) {
            Ok(template) => Some(template),
            Err(error) => {
                self.error(path, error.to_string());
                None
            }
        }
    }

    /// Definite JSONPaths.
    fn paths(&self, path: &str, paths: Option<&OneOrMany>) -> Vec<String> {
        let Some(paths) = paths else { return Vec::new() };
        let texts = match paths.texts() {
            Ok(texts) => texts,
            Err(message) => {
                self.error(path, message);
                return Vec::new();
            }
        };
        let is_list = paths.0.is_array();
        for (index, text) in texts.iter().enumerate() {
            let at = if is_list { format!("{path}[{index}]") } else { path.to_owned() };
            if let Some(message) = path_problem(text) {
                self.error(&at, message);
            }
        }
        texts.into_iter().map(str::to_owned).collect()
    }

    fn header_name(&self, path: &str, name: &str) {
        if !name.is_empty() && !http::is_token(name) {
            self.error(path, format!("{name:?} is no header name"));
        }
    }
}

/// Why `text` is no definite JSONPath; `None` = it is one.
pub fn path_problem(text: &str) -> Option<String> {
    if text.chars().count() > 2_048 {
        return Some("a path has at most 2048 characters".to_owned());
    }
    // Looked for first, since the library's parser recurses into filters as deep as a text nests them.
    if may_name_several(text) {
        return Some(format!(
            "{text:?} may name several values: use names and positions from 0 only, such as $.data.id or $.items[0]"
        ));
    }
    if !text.starts_with('$') {
        return Some(format!("{text:?} is no JSONPath: it begins with $; write $.{}", text.trim_start_matches('.')));
    }
    serde_json_path::JsonPath::parse(text).err().map(|error| format!("{text:?} is no JSONPath: {error}"))
}

/// Something outside of quoted names is more than a name or a position from 0.
fn may_name_several(text: &str) -> bool {
    let mut quote = None;
    let mut is_escaped = false;
    let mut before = ' ';
    for character in text.chars() {
        match quote {
            Some(_) if is_escaped => is_escaped = false,
            Some(_) if character == '\\' => is_escaped = true,
            Some(open) if character == open => quote = None,
            Some(_) => {}
            None if matches!(character, '"' | '\'') => quote = Some(character),
            None => {
                let several = matches!(character, '?' | '*' | ':' | ',' | '(' | '@')
                    || (before == '.' && character == '.')
                    || (before == '[' && matches!(character, '-' | '['));
                if several {
                    return true;
                }
            }
        }
        if !character.is_whitespace() {
            before = character;
        }
    }
    false
}

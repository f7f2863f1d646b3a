//! The accept and deny table, in memory: the schemas by our own walker, the rules by a CEL interpreter.

use queuebox_api::{Kind, Manifests, Target, check, check::schema_problems, crd, load::Object, yaml};
use serde_json::{Value, json};

struct Row {
    name: String,
    kind: Kind,
    spec: Value,
    old: Option<Value>,
    decides: String,
}

fn rows() -> Vec<Row> {
    let text = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/accept-deny.yaml")).unwrap();
    let document = yaml::read(&text).remove(0).unwrap();
    assert_eq!(document.repeated, [""; 0]);
    let word = |row: &Value, field: &str| row[field].as_str().unwrap_or_else(|| panic!("{field} in {row}")).to_owned();
    let list = document.value.as_array().unwrap().clone();
    list.iter()
        .map(|row| Row {
            name: word(row, "name"),
            kind: Kind::parse(&word(row, "kind")).unwrap(),
            spec: row["spec"].clone(),
            old: row.get("old").cloned(),
            decides: word(row, "decides"),
        })
        .collect()
}

/// As the API server prunes them before it looks at rules.
fn without_nulls(value: &Value) -> Value {
    match value {
        Value::Object(members) => {
            let kept = members.iter().filter(|(_, member)| !member.is_null());
            Value::Object(kept.map(|(name, member)| (name.clone(), without_nulls(member))).collect())
        }
        Value::Array(items) => Value::Array(items.iter().map(without_nulls).collect()),
        other => other.clone(),
    }
}

/// The rules of the three kinds, compiled once.
struct Rules(Vec<(Kind, kube_cel::CompiledSchema)>);

impl Rules {
    fn new() -> Self {
        let compiled = Kind::ALL.into_iter().map(|kind| {
            let crd = crd::crd(kind);
            let schema = crd.pointer("/spec/versions/0/schema/openAPIV3Schema/properties/spec").unwrap();
            let compiled = kube_cel::compile_schema(schema);
            assert!(!compiled.has_errors(), "{kind}: {:?}", compiled.compilation_errors());
            (kind, compiled)
        });
        Self(compiled.collect())
    }

    fn problems(&self, row: &Row) -> Vec<String> {
        let (_, compiled) = self.0.iter().find(|(kind, _)| *kind == row.kind).unwrap();
        let old = row.old.as_ref().map(without_nulls);
        match kube_cel::validate_compiled(compiled, &without_nulls(&row.spec), old.as_ref()) {
            Ok(()) => Vec::new(),
            Err(errors) => errors.into_vec().into_iter().map(|error| format!("{:?} {error}", error.kind)).collect(),
        }
    }
}

fn check_problems(row: &Row) -> Vec<String> {
    let object = |kind: Kind, name: &str, spec: Value| Object {
        file: "table".into(),
        kind,
        namespace: "default".into(),
        name: name.into(),
        uid: None,
        spec,
        classic: false,
    };
    let own = |kind: Kind, other: Value| if kind == row.kind { row.spec.clone() } else { other };
    let relay = json!({
        "database": {"postgres": {"host": "h", "database": "d", "username": "u"}},
        "routes": [{"topics": ["**"], "destinations": ["out"]}]
    });
    let mut objects = vec![
        object(Kind::Relay, "shop", own(Kind::Relay, relay)),
        object(Kind::Destination, "out", own(Kind::Destination, json!({"http": {"url": "https://out.example"}}))),
    ];
    if row.kind == Kind::Source {
        objects.push(object(Kind::Source, "in", row.spec.clone()));
    }
    let manifests = Manifests { objects, ..Manifests::default() };
    check(&manifests, Target::Cluster).problems.iter().map(ToString::to_string).collect()
}

#[test]
fn who_decides() {
    let rules = Rules::new();
    let mut failures = Vec::new();
    for row in rows() {
        let (schema, cel, check) = (schema_problems(row.kind, &row.spec), rules.problems(&row), check_problems(&row));
        let decides = match (schema.is_empty(), cel.is_empty(), check.is_empty()) {
            (false, _, _) => "schema",
            (true, false, _) => "cel",
            (true, true, false) => "check",
            (true, true, true) => "accept",
        };
        // The checks know everything that the API server knows, but what was there before.
        let is_known = check.is_empty() == (decides == "accept") || row.old.is_some();
        let is_refusal = cel.iter().all(|problem| problem.starts_with("ValidationFailure"));
        if decides != row.decides || !is_known || (decides != "schema" && !is_refusal) {
            failures.push(format!("{} {}: {decides}\n  {schema:?}\n  {cel:?}\n  {check:?}", row.kind, row.name));
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

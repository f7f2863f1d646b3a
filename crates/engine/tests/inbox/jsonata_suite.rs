//! The public test-suite of JSONata against the library behind transforms. Not part of the usual run, since the suite is not
//! part of this repository: `QUEUEBOX_JSONATA_SUITE=<folder test-suite of the reference implementation>
//! cargo test -p queuebox-engine --test inbox jsonata_suite -- --ignored --nocapture` prints what
//! `docs/reference/jsonata.md` lists.

use std::{fs, path::Path, time::Duration};

use bytes::Bytes;
use queuebox_engine::expression::{Bounds, Expression, Variables};
use serde_json::Value;

/// Numbers as doubles, as JSONata sees them.
fn same(one: &Value, two: &Value) -> bool {
    match (one, two) {
        (Value::Number(one), Value::Number(two)) => one.as_f64() == two.as_f64(),
        (Value::Array(one), Value::Array(two)) => {
            one.len() == two.len() && one.iter().zip(two).all(|(one, two)| same(one, two))
        }
        (Value::Object(one), Value::Object(two)) => {
            one.len() == two.len()
                && one.iter().all(|(name, value)| two.get(name).is_some_and(|other| same(value, other)))
        }
        (one, two) => one == two,
    }
}

async fn evaluate(expression: &str, input: &Value, case: &Value) -> Result<Value, String> {
    let compiled = Expression::compile(expression).map_err(|error| error.to_string())?;
    let mut variables = Variables::default();
    for (name, value) in case["bindings"].as_object().into_iter().flatten() {
        // Names live as long as the program in production; a test may leak a few.
        variables = variables.with(Box::leak(name.clone().into_boxed_str()), value.clone());
    }
    let bounds = Bounds {
        timeout: Duration::from_millis(case["timelimit"].as_u64().unwrap_or(10_000)),
        max_depth: case["depth"].as_u64().and_then(|depth| u32::try_from(depth).ok()).unwrap_or(1000),
        ..Bounds::default()
    };
    let text =
        compiled.json(Bytes::from(input.to_string()), variables, bounds).await.map_err(|error| error.to_string())?;
    serde_json::from_slice(&text).map_err(|error| error.to_string())
}

/// Does the outcome fit the case? Codes of errors are not compared: what counts here is that there is one.
async fn verdict(folder: &Path, group: &Path, case: &Value) -> Result<(), String> {
    let expression = match (&case["expr"], &case["expr-file"]) {
        (Value::String(expression), _) => expression.clone(),
        (_, Value::String(file)) => fs::read_to_string(group.join(file)).unwrap(),
        _ => return Err("no expression".to_owned()),
    };
    let input = match &case["dataset"] {
        Value::String(name) => read(&folder.join("datasets").join(format!("{name}.json"))),
        _ => case["data"].clone(),
    };
    let outcome = evaluate(&expression, &input, case).await;
    let expects_error = case.get("code").is_some() || case.get("error").is_some();
    match outcome {
        Err(_) if expects_error => Ok(()),
        Err(error) => Err(format!("`{expression}` fails: {error}")),
        Ok(value) if expects_error => Err(format!("`{expression}` gives {value} and should fail")),
        Ok(value) => {
            let expected = case.get("result").unwrap_or(&Value::Null);
            let fits = same(&value, expected) || case["unordered"] == Value::Bool(true) && unordered(&value, expected);
            if fits { Ok(()) } else { Err(format!("`{expression}` gives {value}, expected {expected}")) }
        }
    }
}

fn unordered(one: &Value, two: &Value) -> bool {
    let sorted = |value: &Value| {
        let mut items: Vec<String> = value.as_array().into_iter().flatten().map(ToString::to_string).collect();
        items.sort();
        items
    };
    sorted(one) == sorted(two)
}

fn read(path: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(path).unwrap())
        .unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn sorted(folder: &Path) -> Vec<std::path::PathBuf> {
    let mut entries: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    entries.sort();
    entries
}

#[tokio::test]
#[ignore = "needs the suite, see above"]
async fn jsonata_suite() {
    let folder = std::env::var("QUEUEBOX_JSONATA_SUITE").expect("QUEUEBOX_JSONATA_SUITE names the folder");
    let folder = Path::new(&folder);
    let (mut passed, mut differing) = (0, Vec::new());
    for group in sorted(&folder.join("groups")) {
        for file in sorted(&group).into_iter().filter(|file| file.extension().is_some_and(|ending| ending == "json")) {
            let Ok(content) = serde_json::from_str::<Value>(&fs::read_to_string(&file).unwrap()) else {
                differing.push(format!("{}: not JSON that can be read here", file.display()));
                continue;
            };
            let cases = content.as_array().cloned().unwrap_or_else(|| vec![content.clone()]);
            for (index, case) in cases.iter().enumerate() {
                match verdict(folder, &group, case).await {
                    Ok(()) => passed += 1,
                    Err(difference) => {
                        let name = file.strip_prefix(folder.join("groups")).unwrap_or(&file).display();
                        differing.push(format!("{name} #{index}: {difference}"));
                    }
                }
            }
        }
    }
    println!("{passed} cases as expected, {} differ", differing.len());
    for difference in &differing {
        println!("- {difference}");
    }
    assert!(passed > 1500, "the suite was found");
}

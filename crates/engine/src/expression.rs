//! JSONata, bounded: an expression of a manifest is a guest in the process and must not block other messages (contract 9).
//!
//! Invariants:
//! - An evaluation runs on a thread of the blocking pool, never on one that drives sockets.
//! - It ends within its time-out and depth. A single built-in call over a large input cannot be interrupted: its caller gives
//!   up all the same, and the slot that it holds stays taken until it ends.
//! - Each expression has its own few slots, so that one that never ends keeps only its own messages waiting.
//! - A panic inside the library is an error of that one evaluation.
//! - Numbers of JSONata are doubles. An input with a number that a double would change is refused, never rounded.

use std::{fmt, num::NonZeroUsize, sync::Arc, time::Duration};

use bytes::Bytes;
use jsonata_core::{
    ast::AstNode,
    evaluator::{CancelToken, Context, Evaluator, EvaluatorOptions},
    value::JValue,
};
use serde_json::Value;
use tokio::sync::Semaphore;

use crate::json::{self, Scalar, Sink, Text};

/// No sequence of an evaluation is longer. It bounds the memory of a mistake such as `[1..10000000]`.
const SEQUENCE_MAX: usize = 1_000_000;

/// How long a caller waits behind the time-out for the library to notice it.
const GRACE: Duration = Duration::from_millis(250);

/// Bounds of one evaluation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    /// Longest time of an evaluation.
    pub timeout: Duration,
    /// Deepest nesting of calls and sub-expressions.
    pub max_depth: u32,
    /// Largest result as JSON text, in bytes.
    pub result_bytes_max: usize,
    /// What the result may be.
    pub json: json::Limits,
}

impl Default for Bounds {
    /// 100 ms, depth 100, 16 MiB (contract 9, 13.4).
    fn default() -> Self {
        Self {
            timeout: Duration::from_millis(100),
            max_depth: 100,
            result_bytes_max: 16 << 20,
            json: json::Limits::default(),
        }
    }
}

/// A compiled expression. Cheap to clone; clones share the slots.
#[derive(Clone)]
pub struct Expression {
    source: Arc<str>,
    ast: Arc<AstNode>,
    slots: Arc<Semaphore>,
}

/// An expression that does not compile.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("not a JSONata expression: {0}")]
pub struct CompileError(String);

impl CompileError {
    /// The library's reason alone.
    pub fn reason(&self) -> &str {
        &self.0
    }
}

/// An evaluation that gave no result.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct EvaluationError(String);

impl EvaluationError {
    /// An error with this sentence.
    pub fn new(sentence: impl Into<String>) -> Self {
        Self(sentence.into())
    }
}

impl Expression {
    /// Compiles `source`.
    ///
    /// # Errors
    /// The library's reason, with the position.
    pub fn compile(source: &str) -> Result<Self, CompileError> {
        let ast = jsonata_core::parser::parse(source).map_err(|error| CompileError(error.to_string()))?;
        // As many at a time as the machine can run, but two at least: one endless evaluation leaves the other slot free.
        let slots = std::thread::available_parallelism().map_or(2, NonZeroUsize::get).clamp(2, 8);
        Ok(Self { source: source.into(), ast: Arc::new(ast), slots: Arc::new(Semaphore::new(slots)) })
    }

    /// As written.
    pub fn as_str(&self) -> &str {
        &self.source
    }

    /// The result as JSON text; an undefined one is `null`.
    ///
    /// # Errors
    /// The expression failed, a bound was met, or the input or the result cannot be handled.
    pub async fn json(&self, input: Bytes, variables: Variables, bounds: Bounds) -> Result<Bytes, EvaluationError> {
        self.run(bounds, move |ast, cancel| {
            let result = evaluate(ast, &input, &variables, bounds, cancel)?;
            let text = write(&result, bounds)?;
            json::scan(&text, bounds.json, &mut ()).map_err(|problem| EvaluationError(format!("result: {problem}")))?;
            Ok(Bytes::from(text))
        })
        .await
    }

    /// The result as an attribute (contract 6.2): text, number and boolean are values; all else, and blank text, is none.
    ///
    /// # Errors
    /// As [`Expression::json`].
    pub async fn attribute(&self, input: Bytes, bounds: Bounds) -> Result<Option<String>, EvaluationError> {
        self.run(bounds, move |ast, cancel| {
            Ok(match evaluate(ast, &input, &Variables::default(), bounds, cancel)? {
                JValue::String(text) => Some(text.to_string()).filter(|text| !text.trim().is_empty()),
                JValue::Bool(bool) => Some(bool.to_string()),
                JValue::Number(number) => Some(number_text(number)?),
                _ => None,
            })
        })
        .await
    }

    async fn run<T: Send + 'static>(
        &self,
        bounds: Bounds,
        work: impl FnOnce(&AstNode, CancelToken) -> Result<T, EvaluationError> + Send + 'static,
    ) -> Result<T, EvaluationError> {
        let slot = Arc::clone(&self.slots).acquire_owned().await.map_err(|_| EvaluationError::new("stopping"))?;
        let ast = Arc::clone(&self.ast);
        let cancel = CancelToken::new();
        // Also when our caller goes away: nobody wants the result then.
        let _cancel_on_drop = CancelOnDrop(cancel.clone());
        let task = tokio::task::spawn_blocking(move || {
            let result = work(&ast, cancel);
            drop(slot);
            result
        });
        match tokio::time::timeout(bounds.timeout + GRACE, task).await {
            Ok(Ok(result)) => result,
            Ok(Err(_)) => Err(EvaluationError::new("the expression crashed the evaluator; simplify it")),
            Err(_) => Err(too_slow(bounds)),
        }
    }
}

impl fmt::Debug for Expression {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Expression({:?})", self.source)
    }
}

struct CancelOnDrop(CancelToken);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

/// Variables that an expression sees, names without `$`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Variables(Vec<(&'static str, Value)>);

impl Variables {
    /// The same variables and one more.
    #[must_use]
    pub fn with(mut self, name: &'static str, value: impl Into<Value>) -> Self {
        self.0.push((name, value.into()));
        self
    }
}

fn too_slow(bounds: Bounds) -> EvaluationError {
    EvaluationError(format!("the expression did not end within {} ms", bounds.timeout.as_millis()))
}

fn evaluate(
    ast: &AstNode,
    input: &[u8],
    variables: &Variables,
    bounds: Bounds,
    cancel: CancelToken,
) -> Result<JValue, EvaluationError> {
    let data = read(input)?;
    let mut context = Context::new();
    for (name, value) in &variables.0 {
        context.bind((*name).to_owned(), from_serde(value));
    }
    let options = EvaluatorOptions {
        timeout_ms: Some(u64::try_from(bounds.timeout.as_millis()).unwrap_or(u64::MAX)),
        cancel: Some(cancel),
        max_stack_depth: Some(bounds.max_depth as usize),
        max_sequence_length: Some(SEQUENCE_MAX),
    };
    Evaluator::with_options(context, options).evaluate(ast, &data).map_err(|error| match error.code() {
        Some("D1012" | "U1003") => too_slow(bounds),
        Some("D1011") => EvaluationError(format!("the expression nests deeper than {} levels", bounds.max_depth)),
        _ => EvaluationError(error.message().to_owned()),
    })
}

/// The input as the library's value. Not by way of serde: with numbers of any length switched on, it hands every number to
/// foreign visitors as an object.
fn read(input: &[u8]) -> Result<JValue, EvaluationError> {
    let mut builder = Builder { root: JValue::Null, open: Vec::new(), changed: None };
    json::scan(input, json::Limits::default(), &mut builder)
        .map_err(|problem| EvaluationError(format!("input: {problem}")))?;
    match builder.changed {
        Some(digits) => Err(EvaluationError(format!(
            "input: the number {digits} would lose digits in JSONata; send it as a string, or leave the transform out"
        ))),
        None => Ok(builder.root),
    }
}

/// A container that is being read: the members of an object come with the name of the next one.
enum Open {
    Array(Vec<JValue>),
    Object(Vec<(String, JValue)>, String),
}

struct Builder {
    root: JValue,
    open: Vec<Open>,
    /// The first number that a double would change.
    changed: Option<String>,
}

impl Builder {
    fn add(&mut self, value: JValue) {
        match self.open.last_mut() {
            None => self.root = value,
            Some(Open::Array(items)) => items.push(value),
            Some(Open::Object(members, name)) => {
                members.push((std::mem::take(name), value));
            }
        }
    }
}

impl<'a> Sink<'a> for Builder {
    fn name(&mut self, text: Text<'a>) {
        if let Some(Open::Object(_, name)) = self.open.last_mut() {
            *name = text.decoded().into_owned();
        }
    }

    fn scalar(&mut self, value: Scalar<'a>) {
        let value = match value {
            Scalar::Null => JValue::Null,
            Scalar::Bool(bool) => JValue::Bool(bool),
            Scalar::Text(text) => JValue::string(&*text.decoded()),
            Scalar::Number(digits) => {
                if self.changed.is_none() && !json::survives_double(digits) {
                    self.changed = Some(digits.chars().take(40).collect());
                }
                JValue::Number(digits.parse().unwrap_or(f64::NAN))
            }
        };
        self.add(value);
    }

    fn open(&mut self, is_object: bool) {
        self.open.push(if is_object { Open::Object(Vec::new(), String::new()) } else { Open::Array(Vec::new()) });
    }

    fn close(&mut self, _: bool) {
        match self.open.pop() {
            Some(Open::Array(items)) => self.add(JValue::array(items)),
            Some(Open::Object(members, _)) => self.add(JValue::object(members.into_iter().collect())),
            None => {}
        }
    }
}

fn from_serde(value: &Value) -> JValue {
    match value {
        Value::Null => JValue::Null,
        Value::Bool(bool) => JValue::Bool(*bool),
        Value::Number(number) => JValue::Number(number.as_f64().unwrap_or(f64::NAN)),
        Value::String(text) => JValue::string(text.as_str()),
        Value::Array(items) => JValue::array(items.iter().map(from_serde).collect()),
        Value::Object(members) => {
            JValue::object(members.iter().map(|(name, value)| (name.clone(), from_serde(value))).collect())
        }
    }
}

/// The result as JSON text. Without recursion, and never longer than the bound: a result may nest as deep and grow as large
/// as the expression likes.
fn write(result: &JValue, bounds: Bounds) -> Result<Vec<u8>, EvaluationError> {
    enum Step<'a> {
        Value(&'a JValue),
        Name(&'a str),
        Byte(u8),
    }
    let mut out = Vec::new();
    let mut steps = vec![Step::Value(result)];
    while let Some(step) = steps.pop() {
        match step {
            Step::Byte(byte) => out.push(byte),
            Step::Name(name) => {
                json::write_string(&mut out, name);
                out.push(b':');
            }
            Step::Value(JValue::Array(items)) => {
                out.push(b'[');
                steps.push(Step::Byte(b']'));
                for (index, item) in items.iter().enumerate().rev() {
                    steps.push(Step::Value(item));
                    if index > 0 {
                        steps.push(Step::Byte(b','));
                    }
                }
            }
            Step::Value(JValue::Object(members)) => {
                out.push(b'{');
                steps.push(Step::Byte(b'}'));
                let defined: Vec<_> = members.iter().filter(|(_, value)| !value.is_undefined()).collect();
                for (index, (name, value)) in defined.into_iter().enumerate().rev() {
                    steps.push(Step::Value(value));
                    steps.push(Step::Name(name));
                    if index > 0 {
                        steps.push(Step::Byte(b','));
                    }
                }
            }
            Step::Value(JValue::Null | JValue::Undefined) => out.extend_from_slice(b"null"),
            Step::Value(JValue::Bool(bool)) => out.extend_from_slice(if *bool { b"true" } else { b"false" }),
            Step::Value(JValue::Number(number)) => out.extend_from_slice(number_text(*number)?.as_bytes()),
            Step::Value(JValue::String(text)) => json::write_string(&mut out, text),
            // As JSONata itself writes functions and regular expressions.
            Step::Value(_) => out.extend_from_slice(b"\"\""),
        }
        if out.len() > bounds.result_bytes_max {
            return Err(EvaluationError(format!("the result is larger than {} bytes", bounds.result_bytes_max)));
        }
    }
    Ok(out)
}

/// The shortest text that is this double, in the form of JSON.
fn number_text(number: f64) -> Result<String, EvaluationError> {
    match number {
        _ if !number.is_finite() => Err(EvaluationError::new("the result holds a number that is not finite")),
        _ if number == 0.0 => Ok("0".to_owned()),
        _ if (1e-6..1e21).contains(&number.abs()) => Ok(number.to_string()),
        _ => Ok(format!("{number:e}")),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn document() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i32>().prop_map(Value::from),
            (-1_000_000i32..1_000_000).prop_map(|n| Value::from(f64::from(n) / 64.0)),
            any::<String>().prop_map(|text| Value::from(text.replace('\0', ""))),
        ];
        leaf.prop_recursive(4, 24, 4, |inner| {
            prop_oneof![
                proptest::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                proptest::collection::btree_map("[a-c]{1,2}", inner, 0..4).prop_map(|map| map.into_iter().collect()),
            ]
        })
    }

    /// Equal, where 5 and 5.0 are one number.
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

    proptest! {
        #[test]
        fn a_document_survives_the_library(document in document()) {
            let text = document.to_string();
            let read = read(text.as_bytes()).unwrap();
            let written = write(&read, Bounds::default()).unwrap();
            let again: Value = serde_json::from_slice(&written).unwrap();
            prop_assert!(same(&again, &document), "{} became {}", document, again);
        }
    }

    async fn eval(source: &str, input: &str) -> Result<String, String> {
        let result = Expression::compile(source).unwrap();
        let result =
            result.json(Bytes::copy_from_slice(input.as_bytes()), Variables::default(), Bounds::default()).await;
        result.map(|bytes| String::from_utf8(bytes.to_vec()).unwrap()).map_err(|error| error.to_string())
    }

    #[tokio::test]
    async fn results_are_json() {
        for (source, input, expected) in [
            ("$", r#"{"b":1.50,"a":[1e3,true,null,"é\n"]}"#, r#"{"b":1.5,"a":[1000,true,null,"é\n"]}"#),
            ("nothing", "{}", "null"),
            ("{\"x\": nothing, \"y\": 1}", "{}", r#"{"y":1}"#),
            ("[]", "{}", "[]"),
            ("a.b", r#"{"a":[{"b":1},{"b":2}]}"#, "[1,2]"),
            ("1/3", "{}", "0.3333333333333333"),
            ("1e21 * 10", "{}", "1e22"),
            ("9007199254740992 * 1024", "{}", "9223372036854776000"),
            ("-0", "{}", "0"),
            ("$sum", "{}", "\"\""),
            ("$", "7", "7"),
        ] {
            assert_eq!(eval(source, input).await.as_deref(), Ok(expected), "{source}");
        }
    }

    #[tokio::test]
    async fn variables_are_bound() {
        let expression = Expression::compile("[$topic, $headers.\"X-A\", $nothing, $eventType]").unwrap();
        let variables = Variables::default()
            .with("topic", "t")
            .with("headers", serde_json::json!({"X-A": "1"}))
            .with("eventType", Value::Null);
        let result = expression.json(Bytes::from_static(b"{}"), variables, Bounds::default()).await.unwrap();
        assert_eq!(result, r#"["t","1",null]"#);
    }

    /// conformance 98
    #[tokio::test]
    async fn transform_limits() {
        let endless = eval("($f := function(){$f()}; $f())", "{}").await;
        assert!(endless.as_ref().unwrap_err().contains("100 ms"), "{endless:?}");
        let deep = eval("($f := function($n){1 + $f($n + 1)}; $f(0))", "{}").await;
        assert!(deep.as_ref().unwrap_err().contains("100 levels"), "{deep:?}");
        let bounds = Bounds { result_bytes_max: 1000, ..Bounds::default() };
        let large = Expression::compile("$pad(\"\", 1000, \"x\")").unwrap();
        let large = large.json(Bytes::from_static(b"{}"), Variables::default(), bounds).await;
        assert!(large.as_ref().unwrap_err().to_string().contains("larger than 1000 bytes"), "{large:?}");
        let nested = eval("$reduce([1..200], function($a, $b){[[$a]]}, 0)", "{}").await;
        assert!(nested.as_ref().unwrap_err().contains("deeper than 100 levels"), "{nested:?}");
        let many = eval("[1..5000000]", "{}").await;
        assert!(many.is_err(), "{many:?}");
        for number in ["12345678901234567890", "0.12345678901234567890123", "1e400"] {
            let changed = eval("$.n", &format!(r#"{{"n":1,"other":[{number}]}}"#)).await;
            assert!(changed.as_ref().unwrap_err().contains(number), "{changed:?}");
        }
    }

    /// case D23
    #[tokio::test]
    async fn a_result_with_nul_is_an_error() {
        let result = eval("$decodeUrlComponent(\"%00\")", "{}").await;
        assert!(result.as_ref().unwrap_err().contains("U+0000"), "{result:?}");
    }

    #[tokio::test]
    async fn attributes_are_scalars() {
        for (source, expected) in [
            ("a", Some("x")),
            ("n", Some("12.5")),
            ("b", Some("true")),
            ("blank", None),
            ("o", None),
            ("l", None),
            ("missing", None),
            ("$split(a2, \"-\")[0]", Some("p")),
        ] {
            let body = Bytes::from_static(br#"{"a":"x","n":12.5,"b":true,"blank":" ","o":{},"l":[1,2],"a2":"p-q"}"#);
            let value = Expression::compile(source).unwrap().attribute(body, Bounds::default()).await.unwrap();
            assert_eq!(value.as_deref(), expected, "{source}");
        }
        let error = Expression::compile("$error(\"no\")")
            .unwrap()
            .attribute(Bytes::from_static(b"{}"), Bounds::default())
            .await;
        assert!(error.is_err());
    }

    #[test]
    fn what_does_not_compile_is_told() {
        assert!(Expression::compile("a.(").is_err());
        let deep = format!("{}1{}", "(".repeat(8_000), ")".repeat(8_000));
        assert!(Expression::compile(&deep).is_err(), "no expression overflows the stack of who checks it");
    }

    #[tokio::test]
    async fn an_endless_expression_holds_nobody_else() {
        let endless = Expression::compile("($f := function(){$f()}; $f())").unwrap();
        let waiting: Vec<_> = (0..8)
            .map(|_| {
                let endless = endless.clone();
                tokio::spawn(async move {
                    endless.json(Bytes::from_static(b"{}"), Variables::default(), Bounds::default()).await
                })
            })
            .collect();
        assert_eq!(eval("1 + 1", "{}").await.as_deref(), Ok("2"));
        assert!(waiting.iter().any(|task| !task.is_finished()), "the endless ones are still at it");
    }
}

//! What is reported of Relays, Sources and Destinations.
//!
//! Invariants:
//! - Every condition is set at first sight and speaks of one generation.
//! - `Ready` does not flap: once a configuration is rolled out it stays so, whatever scaling and delivery do.
//! - Numbers enter the status at most every 30 s, and only when they moved by a tenth or crossed zero.

use std::{collections::BTreeMap, time::Duration};

use jiff::Timestamp;
use queuebox_api::{Kind, Problem, checked::Autoscaling, condition::ConditionType as Type, problem::Reason};
use serde_json::{Map, Value, json};

use super::{
    conditions::{Conditions, State},
    group::{Configuration, Key, Outcome},
    names,
    replicas::{Decision, Limit, Setter},
    sample::{Sample, age, freshest, work},
    seen::Seen,
};

/// A Destination fails when it has not succeeded for so long.
const FAILING_AFTER: Duration = Duration::from_secs(60);
/// … in so many attempts at least.
const FAILURES_MIN: i64 = 3;
/// A Source is down when no worker has received for so long.
const DOWN_AFTER: Duration = Duration::from_secs(30);
/// Oldest due row that is still normal where no target is given.
const OLDEST_AGE: Duration = Duration::from_secs(300);
/// Rows without a route that are no slip any more, within a minute.
const NO_ROUTE_MAX: i64 = 100;
/// Numbers enter the status this often at most.
const NUMBERS_EVERY: Duration = Duration::from_secs(30);
/// Numbers that nobody has confirmed for so long are not shown.
const NUMBERS_KEPT: Duration = Duration::from_secs(300);

/// Since when something has been down, by what it is.
pub type Downs = BTreeMap<Key, Timestamp>;

/// Everything about one Relay that statuses are made of.
pub struct RelayView<'a> {
    /// The Relay.
    pub seen: &'a Seen,
    /// What its workers are to run.
    pub configuration: Option<&'a Configuration>,
    /// How many of them.
    pub decision: Decision,
    /// The Deployment as it stands.
    pub deployment: Option<&'a Seen>,
    /// Its pods.
    pub pods: Vec<&'a Seen>,
    /// What they say.
    pub samples: &'a [Sample],
    /// `spec.autoscaling.targetOldestAge`.
    pub autoscaling: Option<Autoscaling>,
    /// Something of the same name belongs to somebody else.
    pub name_taken: Option<String>,
    /// The API server does not take what its workers need.
    pub refused: Option<String>,
    /// Hands off.
    pub hands_off: bool,
}

/// How a rollout stands.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Rollout {
    Done,
    Going(String),
    Stuck(String),
}

/// How something stands that workers report.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Standing {
    /// It works.
    Good,
    /// It has not worked for a while.
    Bad(String),
    /// Not known yet: leave what was said.
    Unclear,
    /// There is nobody to ask.
    NoWorkers,
    /// On purpose.
    Paused,
}

impl RelayView<'_> {
    fn is_paused(&self) -> bool {
        self.decision.setter == Setter::Paused
    }

    fn fresh(&self, now: Timestamp) -> impl Iterator<Item = &Sample> {
        self.samples.iter().filter(move |sample| sample.is_fresh(now))
    }

    fn has_pods(&self) -> bool {
        self.pods.iter().any(|pod| !pod.is_deleting())
    }

    /// The configuration that is wanted is what the workers run.
    fn is_rolled_out(&self) -> bool {
        self.configuration.is_some() && self.rollout() == Rollout::Done
    }

    fn rollout(&self) -> Rollout {
        let Some(configuration) = self.configuration else {
            return Rollout::Going("nothing can run yet".to_owned());
        };
        let before = self.seen.at("/status/conditions");
        let was_ready = before.as_array().into_iter().flatten().any(|condition| {
            condition.get("type").and_then(Value::as_str) == Some("Ready")
                && condition.get("status").and_then(Value::as_str) == Some("True")
        });
        let template_hash =
            |it: &Seen| it.at("/spec/template/metadata/labels")[names::CONFIG_LABEL].as_str().map(str::to_owned);
        let Some(deployment) = self.deployment else {
            return Rollout::Going("the Deployment is being made".to_owned());
        };
        if was_ready
            && self.seen.text("/status/configHash") == configuration.hash
            && template_hash(deployment).as_deref() == Some(configuration.hash.as_str())
        {
            return Rollout::Done;
        }
        if template_hash(deployment).as_deref() != Some(configuration.hash.as_str())
            || deployment.number("/status/observedGeneration") < deployment.generation()
        {
            return Rollout::Going("the rollout begins".to_owned());
        }
        let wanted = i64::from(self.decision.replicas);
        let updated = deployment.number("/status/updatedReplicas");
        let all = deployment.number("/status/replicas");
        let available = deployment.number("/status/availableReplicas");
        if updated >= wanted && all <= updated && available >= wanted {
            return Rollout::Done;
        }
        let why = self.pods.iter().find_map(|pod| waiting(pod)).unwrap_or_default();
        let progressing = deployment.at("/status/conditions").as_array().into_iter().flatten();
        let is_stuck = progressing
            .into_iter()
            .any(|condition| condition.get("reason").and_then(Value::as_str) == Some("ProgressDeadlineExceeded"));
        if is_stuck {
            return Rollout::Stuck(format!(
                "workers of the new configuration do not become ready; the old ones go on. {why}"
            ));
        }
        Rollout::Going(format!("waiting for workers of the new configuration. {why}").trim_end().to_owned())
    }

    /// How deliveries to one Destination stand.
    pub fn delivering_to(&self, name: &str, downs: &mut Downs, now: Timestamp) -> Standing {
        let key = (Kind::Destination, name.to_owned());
        let states: Vec<_> =
            self.fresh(now).flat_map(|sample| sample.status.destinations.iter().filter(|it| it.name == name)).collect();
        if self.is_paused() {
            return Standing::Paused;
        }
        if states.is_empty() {
            return if self.has_pods() { Standing::Unclear } else { Standing::NoWorkers };
        }
        if states.iter().all(|state| state.state == "Paused") {
            return Standing::Paused;
        }
        let worst = states.iter().max_by_key(|state| (is_held(state), state.failures));
        let Some(worst) = worst.filter(|it| is_held(it) || it.failures >= FAILURES_MIN) else {
            downs.remove(&key);
            return Standing::Good;
        };
        let since = *downs.entry(key).or_insert(now);
        let failing = worst.failures >= FAILURES_MIN && worst.failing_for_seconds >= FAILING_AFTER.as_secs_f64();
        if failing || age(since, now) >= FAILING_AFTER {
            return Standing::Bad(
                worst.detail.clone().unwrap_or_else(|| "no attempt has succeeded for a while".to_owned()),
            );
        }
        Standing::Unclear
    }

    /// How a Source stands.
    pub fn receiving(&self, name: &str, downs: &mut Downs, now: Timestamp) -> Standing {
        let key = (Kind::Source, name.to_owned());
        let states: Vec<_> =
            self.fresh(now).flat_map(|sample| sample.status.sources.iter().filter(|it| it.name == name)).collect();
        if self.is_paused() || states.iter().any(|it| it.state == "Paused") {
            return Standing::Paused;
        }
        if states.is_empty() {
            return if self.has_pods() { Standing::Unclear } else { Standing::NoWorkers };
        }
        if states.iter().any(|it| it.state == "Up") {
            downs.remove(&key);
            return Standing::Good;
        }
        let since = *downs.entry(key).or_insert(now);
        if age(since, now) >= DOWN_AFTER {
            let why = states.iter().find_map(|it| it.detail.clone());
            return Standing::Bad(why.unwrap_or_else(|| "no worker receives".to_owned()));
        }
        Standing::Unclear
    }

    /// Secret keys that workers miss, for the database, a Source or a Destination.
    fn missing(&self, kind: Kind, name: &str, now: Timestamp) -> Vec<String> {
        let mut missing: Vec<String> = self
            .fresh(now)
            .flat_map(|sample| -> Vec<String> {
                let status = &sample.status;
                match kind {
                    Kind::Relay => status.database.missing.clone(),
                    Kind::Source => {
                        status.sources.iter().filter(|it| it.name == name).flat_map(|it| it.missing.clone()).collect()
                    }
                    Kind::Destination => status
                        .destinations
                        .iter()
                        .filter(|it| it.name == name)
                        .flat_map(|it| it.missing.clone())
                        .collect(),
                }
            })
            .collect();
        missing.sort();
        missing.dedup();
        missing
    }
}

/// Its rows wait without being tried. `Failing` is tried all the time, and judged by the number of failures.
fn is_held(destination: &super::sample::DestinationState) -> bool {
    !matches!(destination.state.as_str(), "Up" | "Failing")
}

/// Why a container does not start.
fn waiting(pod: &Seen) -> Option<String> {
    let states = pod.at("/status/containerStatuses").as_array()?;
    let waiting = states.iter().find_map(|state| state.pointer("/state/waiting"))?;
    let word = |field: &str| waiting.get(field).and_then(Value::as_str).unwrap_or_default().to_owned();
    let (reason, message) = (word("reason"), word("message"));
    // Names of containers and times in the message change with every look.
    let message = message.split(" for ").next().unwrap_or_default().to_owned();
    (!matches!(reason.as_str(), "" | "ContainerCreating" | "PodInitializing"))
        .then(|| format!("{reason}: {message}").trim_end_matches([':', ' ']).to_owned())
}

// ---- The parts that all three share ---------------------------------------------------------------------------------

/// `Accepted`, `ResolvedRefs` by problems and missing keys. Returns the fault, if a person has to act.
fn refs(conditions: &mut Conditions<'_>, problems: &[Problem], missing: &[String]) -> Option<(String, String)> {
    let is_ref = |problem: &&Problem| matches!(problem.reason, Reason::DestinationNotFound | Reason::RelayNotFound);
    let own: Vec<&Problem> = problems.iter().filter(|problem| !is_ref(problem)).collect();
    let refs: Vec<&Problem> = problems.iter().filter(is_ref).collect();
    let mut fault = None;
    match own.first() {
        None => conditions.set(Type::Accepted, State::True, "Accepted", ""),
        Some(first) => {
            let text = texts(&own);
            conditions.set(Type::Accepted, State::False, first.reason.as_str(), &text);
            fault = Some((first.reason.as_str().to_owned(), text));
        }
    }
    match (refs.first(), missing.is_empty()) {
        (Some(first), _) => {
            let text = texts(&refs);
            conditions.set(Type::ResolvedRefs, State::False, first.reason.as_str(), &text);
            fault.get_or_insert((first.reason.as_str().to_owned(), text));
        }
        (None, false) => {
            let text = format!("workers miss {}", missing.join(", "));
            conditions.set(Type::ResolvedRefs, State::False, "SecretKeyMissing", &text);
        }
        (None, true) => conditions.set(Type::ResolvedRefs, State::True, "ResolvedRefs", ""),
    }
    fault
}

fn texts(problems: &[&Problem]) -> String {
    let shown: Vec<String> = problems
        .iter()
        .map(|problem| {
            let hint = problem.hint.as_ref().map(|hint| format!(" ({hint})")).unwrap_or_default();
            if problem.path.is_empty() {
                format!("{}{hint}", problem.message)
            } else {
                format!("{} - {}{hint}", problem.path, problem.message)
            }
        })
        .collect();
    shown.join("; ")
}

/// `Ready`, `Reconciling`, `Stalled` by the fault and what is still to come.
fn progress(
    conditions: &mut Conditions<'_>,
    fault: Option<(String, String)>,
    going: Option<(&str, String)>,
    ready: &str,
) {
    match (fault, going) {
        (Some((reason, text)), _) => {
            conditions.set(Type::Ready, State::False, &reason, &text);
            conditions.set(Type::Reconciling, State::False, "Stalled", "");
            conditions.set(Type::Stalled, State::True, &reason, &text);
        }
        (None, Some((reason, text))) => {
            conditions.set(Type::Ready, State::False, reason, &text);
            conditions.set(Type::Reconciling, State::True, reason, &text);
            conditions.set(Type::Stalled, State::False, "NotStalled", "");
        }
        (None, None) => {
            conditions.set(Type::Ready, State::True, ready, "");
            conditions.set(Type::Reconciling, State::False, "Done", "");
            conditions.set(Type::Stalled, State::False, "NotStalled", "");
        }
    }
}

fn standing(conditions: &mut Conditions<'_>, kind: Type, standing: &Standing, good: &str, bad: &str) {
    match standing {
        Standing::Good => conditions.set(kind, State::True, good, ""),
        Standing::Bad(why) => conditions.set(kind, State::False, bad, why),
        Standing::Paused => conditions.set(kind, State::Unknown, "Paused", ""),
        Standing::NoWorkers => conditions.set(kind, State::Unknown, "NoWorkers", "there is no worker to ask"),
        Standing::Unclear => {
            // What was said while there was no worker is no answer of the one that is there now.
            let reason = conditions.before(kind).and_then(|it| it.get("reason")).and_then(Value::as_str);
            let is_of_nobody = matches!(reason, Some("NoWorkers" | "Paused"));
            if is_of_nobody || !conditions.keep(kind) {
                conditions.set(kind, State::Unknown, "Pending", "the workers have not said anything yet");
            }
        }
    }
}

fn pause(conditions: &mut Conditions<'_>, paused: bool) {
    if paused {
        conditions.set(Type::Paused, State::True, "PausedBySpec", "spec.paused is true");
    } else {
        conditions.set(Type::Paused, State::False, "NotPaused", "");
    }
}

/// Only `Paused` is said of what nobody may touch; everything else stays as it is.
fn hands_off(seen: &Seen, now: Timestamp) -> Value {
    let before = seen.at("/status/conditions");
    let generation = seen.generation();
    let mut conditions = Conditions::new(before, generation, now);
    for kind in Type::ALL {
        if kind == Type::Paused {
            let text = "the annotation queuebox.io/reconcile is \"false\": nothing is changed until it is removed";
            conditions.set(kind, State::True, "PausedByAnnotation", text);
        } else {
            conditions.keep(kind);
        }
    }
    let mut status = seen.status().as_object().cloned().unwrap_or_default();
    status.insert("conditions".to_owned(), conditions.list());
    Value::Object(status)
}

// ---- Relay ----------------------------------------------------------------------------------------------------------

/// Status of a Relay.
pub fn relay(view: &RelayView<'_>, outcome: &Outcome, downs: &mut Downs, now: Timestamp) -> Value {
    if view.hands_off {
        return hands_off(view.seen, now);
    }
    let seen = view.seen;
    let mut conditions = Conditions::new(seen.at("/status/conditions"), seen.generation(), now);
    let key = (Kind::Relay, seen.name().to_owned());
    let problems = outcome.problems.get(&key).map(Vec::as_slice).unwrap_or_default();
    let missing = view.missing(Kind::Relay, seen.name(), now);
    let mut fault = refs(&mut conditions, problems, &missing);
    if fault.is_none() {
        fault = view.name_taken.clone().map(|text| ("NameTaken".to_owned(), text));
    }
    if fault.is_none() {
        fault = view.refused.clone().map(|text| ("Refused".to_owned(), text));
    }
    let rollout = view.rollout();
    let mut going = None;
    match &rollout {
        Rollout::Done => {}
        Rollout::Going(why) => going = Some(("RollingOut", why.clone())),
        Rollout::Stuck(why) if fault.is_none() => fault = Some(("ProgressDeadlineExceeded".to_owned(), why.clone())),
        Rollout::Stuck(_) => {}
    }
    let ready = if view.is_paused() { "Paused" } else { "Ready" };
    progress(&mut conditions, fault, going, ready);
    delivering(&mut conditions, view, downs, now);
    scaling(&mut conditions, &view.decision);
    let numbers = numbers(view, now);
    match numbers.get("backlog").and_then(|it| it.get("dead")).and_then(Value::as_i64) {
        Some(dead) if dead > 0 => {
            let text = "queuebox dead list shows them; kubectl queuebox dead does so from outside";
            conditions.set(Type::DeadLettering, State::True, "DeadRows", text);
        }
        Some(_) => conditions.set(Type::DeadLettering, State::False, "NoDeadRows", ""),
        None => conditions.set(Type::DeadLettering, State::Unknown, "Pending", "nobody has counted yet"),
    }
    pause(&mut conditions, view.is_paused());
    let mut status = Map::new();
    status.insert("observedGeneration".to_owned(), json!(seen.generation()));
    status.insert("conditions".to_owned(), conditions.list());
    let database = seen.at("/spec/database");
    let kind = ["postgres", "sqlserver", "mysql", "sqlite"].into_iter().find(|kind| database.get(kind).is_some());
    if let Some(kind) = kind {
        status.insert("database".to_owned(), json!(kind));
    }
    let deployed = |pointer: &str| view.deployment.map_or(0, |it| it.number(pointer));
    status.insert("replicas".to_owned(), json!(deployed("/status/replicas")));
    status.insert("readyReplicas".to_owned(), json!(deployed("/status/readyReplicas")));
    status.insert("selector".to_owned(), json!(format!("{}={}", names::RELAY_LABEL, names::short(seen.name()))));
    status.insert("paused".to_owned(), json!(if view.is_paused() { "True" } else { "False" }));
    status.extend(numbers);
    if rollout == Rollout::Done
        && let Some(configuration) = view.configuration
    {
        status.insert("configHash".to_owned(), json!(configuration.hash));
    } else if let Some(hash) = seen.at("/status/configHash").as_str() {
        status.insert("configHash".to_owned(), json!(hash));
    }
    Value::Object(status)
}

fn delivering(conditions: &mut Conditions<'_>, view: &RelayView<'_>, downs: &mut Downs, now: Timestamp) {
    if view.is_paused() {
        return conditions.set(Type::Delivering, State::Unknown, "Paused", "");
    }
    if !view.has_pods() {
        return conditions.set(Type::Delivering, State::Unknown, "NoWorkers", "there is no worker");
    }
    let Some((_, outbox)) = freshest(view.samples, now) else {
        return standing(conditions, Type::Delivering, &Standing::Unclear, "", "");
    };
    let names: Vec<String> = view
        .configuration
        .map(|configuration| configuration.relay.destinations.iter().map(|it| it.name.clone()).collect())
        .unwrap_or_default();
    let standings: Vec<(String, Standing)> =
        names.into_iter().map(|name| (name.clone(), view.delivering_to(&name, downs, now))).collect();
    let failing: Vec<String> = standings
        .iter()
        .filter_map(|(name, standing)| match standing {
            Standing::Bad(why) => Some(format!("{name}: {why}")),
            _ => None,
        })
        .collect();
    let limit =
        view.autoscaling.filter(|it| it.has_target_oldest_age).map_or(OLDEST_AGE, |it| it.target_oldest_age * 10);
    if !failing.is_empty() {
        conditions.set(Type::Delivering, State::False, "DestinationFailing", &failing.join("; "));
    } else if view.fresh(now).map(|sample| sample.status.no_route_per_minute).sum::<i64>() > NO_ROUTE_MAX {
        let text = format!(
            "more than {NO_ROUTE_MAX} rows within a minute matched no route and are dead; add one, then replay --code no_route"
        );
        conditions.set(Type::Delivering, State::False, "NoRoute", &text);
    } else if outbox.oldest_due_age_seconds > limit.as_secs_f64() {
        let text = format!("a row has been due for more than {}", queuebox_api::format_duration(limit));
        conditions.set(Type::Delivering, State::False, "OldestAgeExceeded", &text);
    } else if standings.iter().any(|(_, it)| *it == Standing::Unclear) && conditions.keep(Type::Delivering) {
        // A failure that is not old enough to count changes nothing yet.
    } else {
        conditions.set(Type::Delivering, State::True, "Delivering", "");
    }
}

fn scaling(conditions: &mut Conditions<'_>, decision: &Decision) {
    match (decision.setter, decision.metrics_lost) {
        (Setter::Paused, _) => conditions.set(Type::ScalingActive, State::False, "Paused", ""),
        (Setter::Fixed, _) => {
            conditions.set(Type::ScalingActive, State::True, "Fixed", "spec.replicas, which /scale sets, decides");
        }
        (Setter::BuiltIn, false) => {
            conditions.set(
                Type::ScalingActive,
                State::True,
                "BuiltIn",
                "the backlog decides; spec.replicas is ignored",
            );
        }
        (Setter::BuiltIn, true) => {
            let text = "no worker has reported a count lately; the number of workers stays as it is";
            conditions.set(Type::ScalingActive, State::False, "MetricsUnavailable", text);
        }
    }
    let (limited, reason, text) = match &decision.limit {
        None => (false, "WithinLimits", ""),
        Some(Limit::Maximum) => (true, "TooManyReplicas", "more are wished for than maxReplicas allows"),
        Some(Limit::Lanes(_)) => (true, "NoMoreLanes", "more workers would find nothing that could start"),
        Some(Limit::Pace) => (true, "ScaleUpLimit", "at most 4 more, or twice as many, within a minute"),
        Some(Limit::Stabilizing) => (true, "ScaleDownStabilized", "fewer are wished for, but not for five minutes yet"),
    };
    conditions.set(Type::ScalingLimited, limited.into(), reason, text);
}

/// `backlog` and the texts made of it.
fn numbers(view: &RelayView<'_>, now: Timestamp) -> Map<String, Value> {
    let seen = view.seen;
    let before = seen.at("/status/backlog");
    let observed_at = before.get("observedAt").and_then(Value::as_str).and_then(|at| at.parse::<Timestamp>().ok());
    let mut out = Map::new();
    let keep = |out: &mut Map<String, Value>, stale: bool| {
        for field in ["pending", "oldest", "dead", "backlog"] {
            match seen.at("/status").get(field) {
                Some(_) if stale && field == "pending" => out.insert(field.to_owned(), json!("-")),
                Some(value) => out.insert(field.to_owned(), value.clone()),
                None => None,
            };
        }
    };
    let Some((_, outbox)) = freshest(view.samples, now) else {
        keep(&mut out, observed_at.is_none_or(|at| age(at, now) >= NUMBERS_KEPT));
        return out;
    };
    #[allow(clippy::cast_possible_truncation, reason = "ages in seconds")]
    let oldest = outbox.oldest_due_age_seconds as i64;
    let fresh = [
        ("pending", Some(outbox.pending)),
        ("startable", work(view.samples, now).map(|work| work.rows)),
        ("oldestSeconds", Some(oldest)),
        ("dead", Some(outbox.dead)),
    ];
    let moved = fresh.iter().any(|(field, value)| moved(before.get(field).and_then(Value::as_i64), *value));
    let is_shown = seen.text("/status/pending") != "-";
    if let Some(at) = observed_at
        && (age(at, now) < NUMBERS_EVERY || !moved)
        && is_shown
    {
        keep(&mut out, false);
        return out;
    }
    let mut backlog: Map<String, Value> =
        fresh.iter().filter_map(|(field, value)| Some(((*field).to_owned(), json!((*value)?)))).collect();
    backlog.insert("observedAt".to_owned(), json!(now.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()));
    out.insert("pending".to_owned(), json!(outbox.pending.to_string()));
    out.insert("oldest".to_owned(), json!(short_age(oldest)));
    out.insert("dead".to_owned(), json!(outbox.dead.to_string()));
    out.insert("backlog".to_owned(), Value::Object(backlog));
    out
}

/// By a tenth, or across zero.
fn moved(before: Option<i64>, now: Option<i64>) -> bool {
    match (before, now) {
        (None, None) => false,
        (Some(before), Some(now)) => {
            (before == 0) != (now == 0) || (before - now).unsigned_abs() * 10 > before.unsigned_abs()
        }
        _ => true,
    }
}

/// `0s`, `45s`, `12m`, `3h`, `2d`.
fn short_age(seconds: i64) -> String {
    match seconds {
        ..120 => format!("{seconds}s"),
        120..7_200 => format!("{}m", seconds / 60),
        7_200..172_800 => format!("{}h", seconds / 3_600),
        _ => format!("{}d", seconds / 86_400),
    }
}

/// What the statuses of Sources and Destinations begin with.
fn beginning(seen: &Seen, conditions: Conditions<'_>) -> Map<String, Value> {
    let mut status = Map::new();
    status.insert("observedGeneration".to_owned(), json!(seen.generation()));
    status.insert("conditions".to_owned(), conditions.list());
    if let Some(kind) = member(seen.spec()) {
        status.insert("type".to_owned(), json!(kind));
    }
    status
}

// ---- Destination and Source -----------------------------------------------------------------------------------------

fn member(spec: &Value) -> Option<&'static str> {
    ["http", "rabbitmq", "kafka", "nats"].into_iter().find(|kind| spec.get(kind).is_some())
}

/// Whether the Relays run an object as it is now: the reason and text of what is still to come.
fn rolled_out(views: &[&RelayView<'_>], key: &Key) -> Option<(&'static str, String)> {
    let behind = views.iter().find(|view| {
        !view.is_rolled_out() || view.configuration.is_none_or(|configuration| configuration.last_good.contains(key))
    })?;
    Some(("RelayNotReady", format!("Relay {} does not run it as it is now", behind.seen.name())))
}

/// Status of a Destination. `views` are the Relays that use it.
pub fn destination(
    seen: &Seen,
    views: &[&RelayView<'_>],
    outcome: &Outcome,
    downs: &mut BTreeMap<String, Downs>,
    now: Timestamp,
) -> Value {
    let key = (Kind::Destination, seen.name().to_owned());
    let mut conditions = Conditions::new(seen.at("/status/conditions"), seen.generation(), now);
    let problems = outcome.problems.get(&key).map(Vec::as_slice).unwrap_or_default();
    let mut missing: Vec<String> = views.iter().flat_map(|view| view.missing(key.0, seen.name(), now)).collect();
    missing.dedup();
    let fault = refs(&mut conditions, problems, &missing);
    let paused = seen.at("/spec/paused").as_bool() == Some(true);
    let ready = if views.is_empty() { "NotReferenced" } else { "Ready" };
    let mut going = rolled_out(views, &key);
    if !missing.is_empty() {
        going.get_or_insert(("SecretKeyMissing", format!("workers miss {}", missing.join(", "))));
    }
    progress(&mut conditions, fault, going, ready);
    // The worst of all, and whose it is.
    let mut worst: Option<(u8, String, Standing)> = None;
    for view in views {
        let it = view.delivering_to(seen.name(), downs.entry(view.seen.name().to_owned()).or_default(), now);
        let rank = match &it {
            Standing::Bad(_) => 4,
            Standing::Unclear => 3,
            Standing::NoWorkers => 2,
            Standing::Paused => 1,
            Standing::Good => 0,
        };
        if worst.as_ref().is_none_or(|(known, _, _)| rank > *known) {
            worst = Some((rank, view.seen.name().to_owned(), it));
        }
    }
    let it = match worst {
        _ if paused => Standing::Paused,
        None => Standing::NoWorkers,
        Some((_, relay, Standing::Bad(why))) => Standing::Bad(format!("Relay {relay}: {why}")),
        Some((_, _, it)) => it,
    };
    if views.is_empty() && !paused {
        conditions.set(Type::Delivering, State::Unknown, "NotReferenced", "no route of a Relay names it");
    } else {
        standing(&mut conditions, Type::Delivering, &it, "Delivering", "DestinationFailing");
    }
    pause(&mut conditions, paused);
    let mut status = beginning(seen, conditions);
    if let Some(endpoint) = endpoint(seen) {
        status.insert("endpoint".to_owned(), json!(endpoint));
    }
    let relays: Vec<&str> = views.iter().map(|view| view.seen.name()).take(64).collect();
    if !relays.is_empty() {
        status.insert("relays".to_owned(), json!(relays));
    }
    Value::Object(status)
}

/// Where a valid Destination sends: without credentials and parameters.
fn endpoint(seen: &Seen) -> Option<String> {
    let spec = seen.spec();
    let text = |pointer: &str| spec.pointer(pointer).and_then(Value::as_str).map(str::to_owned);
    match member(spec)? {
        "http" => text("/http/url")
            .map(|url| url.split(['?', '#']).next().unwrap_or_default().to_owned())
            .filter(|url| !url.contains('@')),
        "rabbitmq" => text("/rabbitmq/url").filter(|url| !url.contains('@')),
        "kafka" => text("/kafka/bootstrapServers"),
        _ => text("/nats/servers").filter(|servers| !servers.contains('@')),
    }
}

/// Status of a Source. `view` is its Relay, where there is one.
pub fn source(
    seen: &Seen,
    view: Option<&RelayView<'_>>,
    outcome: &Outcome,
    downs: &mut BTreeMap<String, Downs>,
    now: Timestamp,
) -> Value {
    let key = (Kind::Source, seen.name().to_owned());
    let mut conditions = Conditions::new(seen.at("/status/conditions"), seen.generation(), now);
    let problems = outcome.problems.get(&key).map(Vec::as_slice).unwrap_or_default();
    let missing = view.map(|view| view.missing(key.0, seen.name(), now)).unwrap_or_default();
    let fault = refs(&mut conditions, problems, &missing);
    let paused = seen.at("/spec/paused").as_bool() == Some(true);
    let views: Vec<&RelayView<'_>> = view.into_iter().collect();
    let mut going = rolled_out(&views, &key);
    if !missing.is_empty() {
        going.get_or_insert(("SecretKeyMissing", format!("workers miss {}", missing.join(", "))));
    }
    progress(&mut conditions, fault, going, "Ready");
    let it = match view {
        _ if paused => Standing::Paused,
        None => Standing::NoWorkers,
        Some(view) => view.receiving(seen.name(), downs.entry(view.seen.name().to_owned()).or_default(), now),
    };
    standing(&mut conditions, Type::Receiving, &it, "Receiving", "NotReceiving");
    pause(&mut conditions, paused);
    let mut status = beginning(seen, conditions);
    let consumption = seen.spec().get("consumption").and_then(Value::as_str).unwrap_or("push");
    status.insert("consumption".to_owned(), json!(consumption));
    Value::Object(status)
}

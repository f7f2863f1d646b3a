//! Plans of small namespaces, carried out in memory.

use std::time::Duration;

use serde_json::{Value, json};

use super::*;
use crate::plan::sample::WorkerStatus;

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(1_800_000_000 + second).unwrap()
}

fn settings() -> Settings {
    Settings {
        worker_image: "queuebox/queuebox:1".into(),
        worker_image_pull_policy: "IfNotPresent".into(),
        image_pull_secrets: vec!["registry".into()],
        operator_namespace: "queuebox".into(),
    }
}

fn object(kind: &str, name: &str, spec: Value) -> Seen {
    Seen(json!({
        "apiVersion": "queuebox.io/v1alpha1", "kind": kind,
        "metadata": {
            "name": name, "namespace": "team", "uid": format!("uid-{name}"), "generation": 1,
            "creationTimestamp": "2027-01-15T08:00:00Z",
        },
        "spec": spec, "status": {"observedGeneration": -1},
    }))
}

fn relay(changes: Value) -> Seen {
    let mut spec = json!({
        "database": {"postgres": {
            "host": "db", "database": "shop", "username": "shop",
            "passwordFrom": {"secretKeyRef": {"name": "shop-db", "key": "password"}},
            "tls": {"mode": "VerifyFull", "caFrom": {"configMapKeyRef": {"name": "ca", "key": "ca.crt"}}},
        }},
        "routes": [{"topics": ["**"], "destinations": ["out"]}],
    });
    for (name, value) in changes.as_object().unwrap() {
        spec[name] = value.clone();
    }
    object("Relay", "shop", spec)
}

fn out() -> Seen {
    let auth = json!({"bearer": {"tokenFrom": {"secretKeyRef": {"name": "out", "key": "token"}}}});
    object("Destination", "out", json!({"http": {"url": "https://out.example/?key=1", "auth": auth}}))
}

fn namespace(relay: Seen) -> Observed {
    Observed { namespace: "team".into(), relays: vec![relay], destinations: vec![out()], ..Observed::default() }
}

/// As the API server would keep what was planned.
fn carry_out(observed: &mut Observed, plan: &Plan) {
    for desired in &plan.desired {
        let list = observed.owned.entry(desired.kind).or_default();
        let mut value = desired.value.clone();
        value["metadata"]["uid"] = json!(format!("uid-{}", desired.name));
        match list.iter_mut().find(|it| it.name() == desired.name) {
            Some(known) => {
                value["status"] = known.status().clone();
                *known = Seen(value);
            }
            None => list.push(Seen(value)),
        }
    }
    for garbage in &plan.garbage {
        observed.owned.entry(garbage.kind).or_default().retain(|it| it.name() != garbage.name);
    }
    for new in &plan.statuses {
        let list = match new.kind {
            Kind::Relay => &mut observed.relays,
            Kind::Destination => &mut observed.destinations,
            Kind::Source => &mut observed.sources,
        };
        if let Some(seen) = list.iter_mut().find(|it| it.name() == new.name) {
            seen.0["status"] = new.status.clone();
        }
    }
}

/// The Deployment's pods are up.
fn roll_out(observed: &mut Observed) {
    let deployment = &mut observed.owned.get_mut(&Owned::Deployment).unwrap()[0];
    let wanted = deployment.number("/spec/replicas");
    let hash = deployment.at("/spec/template/metadata/labels")[names::CONFIG_LABEL].clone();
    deployment.0["status"] = json!({
        "observedGeneration": 1, "replicas": wanted, "updatedReplicas": wanted, "readyReplicas": wanted,
        "availableReplicas": wanted,
    });
    observed.pods = (0..wanted)
        .map(|index| {
            let labels = json!({(names::RELAY_LABEL): "shop", (names::CONFIG_LABEL): hash});
            Seen(
                json!({"metadata": {"name": format!("pod-{index}"), "labels": labels}, "status": {"phase": "Running"}}),
            )
        })
        .collect();
}

fn say(observed: &mut Observed, status: Value, now: Timestamp) {
    let status: WorkerStatus = serde_json::from_value(status).unwrap();
    let sample = Sample { pod: "pod-0".into(), at: now, status };
    observed.samples.insert("uid-shop".into(), vec![sample]);
}

fn condition<'o>(seen: &'o Seen, kind: &str) -> (&'o str, &'o str) {
    let list = seen.at("/status/conditions").as_array().unwrap();
    let found = list.iter().find(|it| it["type"] == kind).unwrap_or_else(|| panic!("{kind} in {list:?}"));
    (found["status"].as_str().unwrap(), found["reason"].as_str().unwrap())
}

fn step(observed: &mut Observed, memory: &mut Memory, now: Timestamp) -> Plan {
    let plan = plan(observed, &settings(), memory, now);
    carry_out(observed, &plan);
    plan
}

fn working(state: &str, failures: i64, failing_for: f64) -> Value {
    json!({
        "readiness": "Ready",
        "backlog": {"outbox": {"pending": 5, "dead": 0, "oldestDueAgeSeconds": 1.0}},
        "destinations": [{"name": "out", "state": state, "failures": failures, "failingForSeconds": failing_for}],
    })
}

#[test]
fn the_same_input_gives_the_same_plan_and_a_plan_leaves_nothing_to_write() {
    let mut observed = namespace(relay(json!({})));
    let (mut one, mut two) = (Memory::default(), Memory::default());
    let first = plan(&observed, &settings(), &mut one, at(0));
    assert_eq!(first, plan(&observed, &settings(), &mut two, at(0)));
    carry_out(&mut observed, &first);
    roll_out(&mut observed);
    step(&mut observed, &mut one, at(1));
    let again = plan(&observed, &settings(), &mut one, at(2));
    assert_eq!((again.statuses, again.garbage, again.events), (vec![], vec![], vec![]));
    for desired in &again.desired {
        let live = observed.owned[&desired.kind].iter().find(|it| it.name() == desired.name).unwrap();
        let (wanted, live) = (&desired.value["metadata"]["annotations"], live.at("/metadata/annotations"));
        assert_eq!(wanted, live, "{}", desired.name);
    }
}

#[test]
fn pods_are_restricted_and_secrets_are_optional_files() {
    let observed =
        namespace(relay(json!({"pod": {"logLevel": "debug", "labels": {"queuebox.io/relay": "mine", "a": "b"}}})));
    let plan = plan(&observed, &settings(), &mut Memory::default(), at(0));
    let deployment = plan.desired.iter().find(|it| it.kind == Owned::Deployment).unwrap();
    let template = &deployment.value["spec"]["template"];
    assert_eq!(template["metadata"]["labels"]["queuebox.io/relay"], "shop", "what selects pods is ours");
    assert_eq!(template["metadata"]["labels"]["a"], "b");
    let spec = &template["spec"];
    assert_eq!(spec["securityContext"]["runAsNonRoot"], true);
    assert_eq!(spec["securityContext"]["seccompProfile"]["type"], "RuntimeDefault");
    assert_eq!(spec["imagePullSecrets"], json!([{"name": "registry"}]));
    assert_eq!(spec["terminationGracePeriodSeconds"], 45);
    let container = &spec["containers"][0];
    assert_eq!(container["securityContext"]["capabilities"]["drop"], json!(["ALL"]));
    assert_eq!(container["securityContext"]["readOnlyRootFilesystem"], true);
    assert!(container["resources"]["limits"].get("cpu").is_none());
    let secrets = spec["volumes"].as_array().unwrap().iter().find(|it| it["name"] == "secrets").unwrap();
    let file = |name: &str, key: &str| json!({"key": key, "path": format!("{name}/{key}")});
    assert_eq!(
        secrets["projected"]["sources"],
        json!([
            {"secret": {"name": "out", "items": [file("out", "token")], "optional": true}},
            {"secret": {"name": "shop-db", "items": [file("shop-db", "password")], "optional": true}},
            {"configMap": {"name": "ca", "items": [file("ca", "ca.crt")], "optional": true}},
        ])
    );
}

#[test]
fn scaling_and_pausing_roll_no_pod() {
    let template = |changes: Value| {
        let plan = plan(&namespace(relay(changes)), &settings(), &mut Memory::default(), at(0));
        plan.desired.iter().find(|it| it.kind == Owned::Deployment).unwrap().value["spec"]["template"].clone()
    };
    let usual = template(json!({}));
    for changes in [
        json!({"replicas": 7}),
        json!({"paused": true}),
        json!({"autoscaling": {"maxReplicas": 5}}),
        json!({"disruption": {"maxUnavailable": 2}}),
        json!({"networkPolicy": {"enabled": true}}),
    ] {
        assert_eq!(template(changes.clone()), usual, "{changes}");
    }
    assert_ne!(template(json!({"drainTimeout": "31s"})), usual);
}

#[test]
fn a_network_policy_lets_the_operator_and_whom_the_relay_names() {
    let policy = |given: Value| {
        let plan = plan(&namespace(relay(json!({"networkPolicy": given}))), &settings(), &mut Memory::default(), at(0));
        plan.desired.into_iter().find(|it| it.kind == Owned::NetworkPolicy).map(|it| it.value["spec"].clone())
    };
    assert_eq!(policy(json!({"dataFrom": []})), None);
    let open = policy(json!({"enabled": true})).unwrap();
    assert_eq!(open["ingress"][0].get("from"), None, "a sender of webhooks may come from anywhere");
    let operator = json!({
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "queuebox"}},
        "podSelector": {"matchLabels": {"app.kubernetes.io/component": "operator"}},
    });
    assert_eq!(open["ingress"][1]["from"], json!([operator]));
    let ingress = json!({"namespaceSelector": {"matchLabels": {"name": "ingress"}}});
    let prometheus = json!({"podSelector": {"matchLabels": {"app": "prometheus"}}});
    let closed = policy(json!({"enabled": true, "dataFrom": [ingress], "managementFrom": [prometheus]})).unwrap();
    assert_eq!(closed["ingress"][0]["from"], json!([ingress]));
    assert_eq!(closed["ingress"][1]["from"], json!([operator, prometheus]));
    assert_eq!(closed["policyTypes"], json!(["Ingress"]));
}

#[test]
fn what_is_too_large_is_refused_and_the_last_good_state_goes_on() {
    let mut observed = namespace(relay(json!({})));
    let mut memory = Memory::default();
    let first = step(&mut observed, &mut memory, at(0));
    let transform = json!({"expression": format!("\"{}\"", "x".repeat(16_000))});
    let routes: Vec<Value> = (0..64)
        .map(|n| json!({"topics": [format!("t{n}")], "destinations": ["out"], "transform": transform}))
        .collect();
    observed.relays[0].0["spec"]["routes"] = json!(routes);
    let second = step(&mut observed, &mut memory, at(1));
    assert_eq!(condition(&observed.relays[0], "Accepted"), ("False", "TooLarge"));
    let template = |plan: &Plan| {
        plan.desired.iter().find(|it| it.kind == Owned::Deployment).unwrap().value["spec"]["template"].clone()
    };
    assert_eq!(template(&first), template(&second));
}

#[test]
fn ready_comes_with_the_rollout_and_does_not_flap() {
    let mut observed = namespace(relay(json!({})));
    let mut memory = Memory::default();
    step(&mut observed, &mut memory, at(0));
    assert_eq!(condition(&observed.relays[0], "Ready"), ("False", "RollingOut"));
    assert_eq!(condition(&observed.relays[0], "Reconciling").0, "True");
    roll_out(&mut observed);
    step(&mut observed, &mut memory, at(1));
    assert_eq!(condition(&observed.relays[0], "Ready"), ("True", "Ready"));
    assert_eq!(condition(&observed.destinations[0], "Ready"), ("True", "Ready"));
    // All pods go, and the Relay is scaled: neither is a matter of the manifest.
    observed.owned.get_mut(&Owned::Deployment).unwrap()[0].0["status"] = json!({"observedGeneration": 1});
    observed.relays[0].0["spec"]["replicas"] = json!(5);
    observed.relays[0].0["metadata"]["generation"] = json!(2);
    step(&mut observed, &mut memory, at(2));
    assert_eq!(condition(&observed.relays[0], "Ready"), ("True", "Ready"));
    assert_eq!(observed.relays[0].number("/status/observedGeneration"), 2);
}

#[test]
fn delivering_is_false_after_a_minute_of_failures_and_true_after_one_success() {
    let mut observed = namespace(relay(json!({})));
    let mut memory = Memory::default();
    step(&mut observed, &mut memory, at(0));
    assert_eq!(condition(&observed.relays[0], "Delivering"), ("Unknown", "NoWorkers"));
    roll_out(&mut observed);
    step(&mut observed, &mut memory, at(0));
    assert_eq!(condition(&observed.relays[0], "Delivering"), ("Unknown", "Pending"));
    assert_eq!(condition(&observed.destinations[0], "Delivering"), ("Unknown", "Pending"));
    say(&mut observed, working("Up", 0, 0.0), at(1));
    step(&mut observed, &mut memory, at(1));
    assert_eq!(condition(&observed.relays[0], "Delivering"), ("True", "Delivering"));
    say(&mut observed, working("Up", 5, 30.0), at(10));
    step(&mut observed, &mut memory, at(10));
    assert_eq!(condition(&observed.relays[0], "Delivering"), ("True", "Delivering"), "not long enough");
    say(&mut observed, working("Up", 5, 61.0), at(41));
    let plan = step(&mut observed, &mut memory, at(41));
    assert_eq!(condition(&observed.relays[0], "Delivering"), ("False", "DestinationFailing"));
    assert_eq!(condition(&observed.destinations[0], "Delivering"), ("False", "DestinationFailing"));
    assert!(plan.events.iter().any(|it| it.is_warning && it.reason == "DestinationFailing"));
    say(&mut observed, working("Up", 0, 0.0), at(42));
    step(&mut observed, &mut memory, at(42));
    assert_eq!(condition(&observed.relays[0], "Delivering"), ("True", "Delivering"));
    // Not connected counts like failing.
    say(&mut observed, working("Down", 0, 0.0), at(50));
    step(&mut observed, &mut memory, at(50));
    assert_eq!(condition(&observed.relays[0], "Delivering").0, "True");
    say(&mut observed, working("Down", 0, 0.0), at(111));
    step(&mut observed, &mut memory, at(111));
    assert_eq!(condition(&observed.relays[0], "Delivering"), ("False", "DestinationFailing"));
}

#[test]
fn many_rows_without_a_route_are_told() {
    let mut observed = namespace(relay(json!({})));
    let mut memory = Memory::default();
    step(&mut observed, &mut memory, at(0));
    roll_out(&mut observed);
    let mut told = |rows: i64, second: i64| {
        let mut status = working("Up", 0, 0.0);
        status["noRoutePerMinute"] = json!(rows);
        say(&mut observed, status, at(second));
        step(&mut observed, &mut memory, at(second));
        let (state, reason) = condition(&observed.relays[0], "Delivering");
        (state.to_owned(), reason.to_owned())
    };
    let words = |state: &str, reason: &str| (state.to_owned(), reason.to_owned());
    assert_eq!(told(100, 1), words("True", "Delivering"));
    assert_eq!(told(101, 2), words("False", "NoRoute"));
    assert_eq!(told(40, 60), words("True", "Delivering"));
}

#[test]
fn a_missing_secret_key_is_named_where_it_is_missed() {
    let mut observed = namespace(relay(json!({})));
    let mut memory = Memory::default();
    step(&mut observed, &mut memory, at(0));
    roll_out(&mut observed);
    let mut status = working("Up", 0, 0.0);
    status["destinations"][0]["missing"] = json!(["secretKeyRef out/token"]);
    say(&mut observed, status, at(1));
    step(&mut observed, &mut memory, at(1));
    assert_eq!(condition(&observed.destinations[0], "ResolvedRefs"), ("False", "SecretKeyMissing"));
    assert_eq!(condition(&observed.destinations[0], "Ready"), ("False", "SecretKeyMissing"));
    assert_eq!(condition(&observed.relays[0], "ResolvedRefs").0, "True");
    assert_eq!(observed.destinations[0].text("/status/endpoint"), "https://out.example/");
}

#[test]
fn numbers_move_rarely_and_fade_without_workers() {
    let mut observed = namespace(relay(json!({})));
    let mut memory = Memory::default();
    step(&mut observed, &mut memory, at(0));
    roll_out(&mut observed);
    let say_pending = |observed: &mut Observed, pending: i64, now: Timestamp| {
        let mut status = working("Up", 0, 0.0);
        status["backlog"]["outbox"]["pending"] = json!(pending);
        say(observed, status, now);
    };
    let pending = |observed: &Observed| observed.relays[0].text("/status/pending").to_owned();
    say_pending(&mut observed, 1_000, at(1));
    step(&mut observed, &mut memory, at(1));
    assert_eq!(pending(&observed), "1000");
    say_pending(&mut observed, 9_000, at(20));
    step(&mut observed, &mut memory, at(20));
    assert_eq!(pending(&observed), "1000", "at most every 30 s");
    say_pending(&mut observed, 1_050, at(40));
    step(&mut observed, &mut memory, at(40));
    assert_eq!(pending(&observed), "1000", "less than a tenth");
    say_pending(&mut observed, 9_000, at(41));
    step(&mut observed, &mut memory, at(41));
    assert_eq!(pending(&observed), "9000");
    step(&mut observed, &mut memory, at(41 + 299));
    assert_eq!(pending(&observed), "9000", "the last values stay");
    step(&mut observed, &mut memory, at(41 + 300));
    assert_eq!(pending(&observed), "-");
}

#[test]
fn an_upgrade_of_the_operator_is_told_from_a_change_of_the_relay() {
    let mut observed = namespace(relay(json!({})));
    let mut memory = Memory::default();
    step(&mut observed, &mut memory, at(0));
    roll_out(&mut observed);
    let next = Settings { worker_image: "queuebox/queuebox:2".into(), ..settings() };
    let mut deployment = |observed: &Observed, settings: &Settings| {
        let plan = plan(observed, settings, &mut memory, at(1));
        plan.desired.into_iter().find(|it| it.kind == Owned::Deployment).unwrap()
    };
    assert_eq!(deployment(&observed, &settings()).upgrade, None);
    assert_eq!(deployment(&observed, &next).upgrade, Some(workload::Upgrade { meanwhile: None }));
    // Until its turn comes it is scaled with the workers that it has.
    observed.relays[0].0["spec"]["replicas"] = json!(3);
    let scaled = deployment(&observed, &next);
    let meanwhile = scaled.upgrade.unwrap().meanwhile.unwrap();
    assert_eq!(meanwhile["spec"]["replicas"], 3);
    assert_eq!(meanwhile["spec"]["template"]["spec"]["containers"][0]["image"], "queuebox/queuebox:1");
    assert_eq!(scaled.value["spec"]["template"]["spec"]["containers"][0]["image"], "queuebox/queuebox:2");
    // What the team asks for itself waits for nothing.
    let mut restarted = observed.clone();
    restarted.relays[0].0["metadata"]["annotations"] = json!({"queuebox.io/restartedAt": "now"});
    assert_eq!(deployment(&restarted, &next).upgrade, None);
    observed.relays[0].0["spec"]["drainTimeout"] = json!("31s");
    assert_eq!(deployment(&observed, &next).upgrade, None);
}

#[test]
fn old_config_maps_go_when_nothing_refers_to_them() {
    let mut observed = namespace(relay(json!({})));
    let mut memory = Memory::default();
    step(&mut observed, &mut memory, at(0));
    let first = observed.owned[&Owned::ConfigMap][0].clone();
    let hash = first.label(names::CONFIG_LABEL).unwrap().to_owned();
    let labels = json!({(names::RELAY_LABEL): "shop", (names::CONFIG_LABEL): hash});
    observed.replica_sets = vec![Seen(json!({"metadata": {"name": "shop-relay-1", "labels": labels}}))];
    observed.relays[0].0["spec"]["drainTimeout"] = json!("31s");
    let second = step(&mut observed, &mut memory, at(1));
    assert!(second.garbage.is_empty(), "a ReplicaSet could be rolled back to");
    observed.replica_sets.clear();
    let third = step(&mut observed, &mut memory, at(2));
    assert_eq!(third.garbage, [Garbage { kind: Owned::ConfigMap, name: first.name().into(), uid: first.uid().into() }]);
}

#[test]
fn a_sample_is_fresh_for_thirty_seconds() {
    let sample = Sample { pod: "p".into(), at: at(0), status: WorkerStatus::default() };
    assert!(sample.is_fresh(at(30)) && !sample.is_fresh(at(31)));
    assert_eq!(sample::age(at(5), at(0)), Duration::ZERO, "a clock that goes back makes nothing old");
}

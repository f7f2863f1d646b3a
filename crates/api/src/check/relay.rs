//! Rules of a Relay (contract 13.4).

use std::{collections::BTreeMap, time::Duration};

use k8s_openapi::api::core::v1::{
    Affinity, EnvVar, PodSecurityContext, ResourceRequirements, Toleration, TopologySpreadConstraint, Volume,
    VolumeMount,
};
use queuebox_core::{message::Consumption, pattern::Pattern, retry::RetrySchedule, template::Vocabulary};
use serde::de::DeserializeOwned;

use super::{Case, Target, http};
use crate::{
    checked::{
        self, Admin, Autoscaling, Capture, Database, DatabaseLogin, DatabaseServer, DatabaseTls, Http, Inbox,
        InboxRelay, Keep, Outbox, PodSpec, Retention, Route, Server, TableRetention, TlsMode,
    },
    crd::DATABASES,
    problem::Reason,
    secret::Reference,
    spec::{
        RelaySpec,
        common::AutoOrOff,
        relay::{
            AdminSpec, CaptureConnectionSpec, CaptureMode, CaptureSpec, DatabaseSpec, DatabaseTlsSpec, HttpSpec,
            InboxSpec, OutboxSpec, PodBlock, PodBlocks, RetentionSpec, RouteSpec, ServerSpec,
        },
    },
    value::{DurationText, format_duration, format_size},
};

const SECOND: Duration = Duration::from_secs(1);

fn duration(given: Option<DurationText>, default: Duration) -> Duration {
    given.map_or(default, |it| it.0)
}

/// A Relay after its own rules.
#[derive(Default)]
pub(super) struct Draft {
    spec: RelaySpec,
    parts: Option<Parts>,
}

struct Parts {
    database: Option<Database>,
    routes: Vec<Route>,
    outbox: Outbox,
    inbox: Inbox,
    retention: Retention,
    capture: Capture,
    http: Http,
    admin: Option<Admin>,
    drain_timeout: Duration,
}

pub(super) fn check(case: &Case<'_>) -> Draft {
    let Some(spec) = case.spec::<RelaySpec>() else { return Draft::default() };
    let drain_timeout = duration(spec.drain_timeout, SECOND * 30);
    if drain_timeout > SECOND * 900 {
        case.error("spec.drainTimeout", "must be at most 15m");
    }
    check_scaling(case, &spec);
    check_pod(case, spec.pod.as_ref());
    let outbox = outbox(case, spec.outbox.as_ref());
    let inbox = inbox(case, spec.inbox.as_ref(), outbox.max_attempts);
    let database = database(case, spec.database.as_ref());
    let is_sqlserver = spec.database.as_ref().is_some_and(|it| it.sqlserver.is_some());
    let parts = Parts {
        routes: routes(case, spec.routes.as_deref().unwrap_or_default()),
        retention: retention(case, spec.retention.as_ref(), is_sqlserver),
        capture: capture(case, spec.capture.as_ref(), database.as_ref()),
        http: http(case, spec.http.as_ref(), drain_timeout),
        admin: admin(case, spec.admin.as_ref()),
        outbox,
        inbox,
        database,
        drain_timeout,
    };
    Draft { spec, parts: Some(parts) }
}

impl Draft {
    /// A route names this Destination.
    pub fn uses(&self, name: &str) -> bool {
        self.targets().any(|(_, _, target)| target == name)
    }

    /// Every name of a Destination, with the places of its route and of itself.
    pub fn targets(&self) -> impl Iterator<Item = (usize, usize, &str)> {
        let routes = self.spec.routes.iter().flatten().enumerate();
        routes.flat_map(|(route, it)| {
            it.destinations.iter().enumerate().map(move |(index, name)| (route, index, name.as_str()))
        })
    }

    /// Back-off of destinations that say nothing.
    pub fn schedule(&self) -> RetrySchedule {
        self.parts.as_ref().map_or_else(RetrySchedule::default, |parts| parts.outbox.schedule)
    }

    /// `outbox.maxInFlight`.
    pub fn max_in_flight(&self) -> u32 {
        self.parts.as_ref().map_or(512, |parts| parts.outbox.max_in_flight)
    }

    /// What the pods of this Relay lack for a reference.
    pub fn lacks(&self, reference: &Reference) -> Option<String> {
        let pod = self.spec.pod.clone().unwrap_or_default();
        match reference {
            Reference::SecretKey { .. } | Reference::ConfigMapKey { .. } => None,
            Reference::Env(name) => {
                let has = list::<EnvVar>(pod.env.as_ref()).is_ok_and(|env| env.iter().any(|it| it.name == *name));
                (!has).then(|| format!("variable {name}"))
            }
            Reference::File(path) => {
                let mounts = list::<VolumeMount>(pod.extra_volume_mounts.as_ref()).unwrap_or_default();
                let has = mounts.iter().any(|mount| path.starts_with(&mount.mount_path));
                (!has).then(|| format!("file {}", path.display()))
            }
        }
    }

    /// Warnings that need the sources.
    pub fn warn(&self, case: &Case<'_>, sources: &[checked::Source]) {
        let Some(parts) = &self.parts else { return };
        let pushing = sources.iter().find(|source| source.consumption == Consumption::Push);
        if let Some(source) = pushing.filter(|_| parts.routes.is_empty()) {
            case.warning("spec.routes", format!("are none, so what Source {} receives has no way out", source.name));
        }
        for source in sources.iter().filter(|_| !parts.routes.is_empty()) {
            let Some(topic) = source.topic.as_ref().filter(|topic| topic.placeholders().next().is_none()) else {
                continue;
            };
            let topic = topic.as_str();
            if !parts.routes.iter().flat_map(|route| &route.topics).any(|pattern| pattern.matches(topic)) {
                let what = format!(
                    "none takes {topic:?}, the topic of Source {}: its messages would be dead, no_route",
                    source.name
                );
                case.warning("spec.routes", what);
            }
        }
        if let Some(source) = pushing.filter(|_| parts.inbox.relay.is_none()) {
            case.warning(
                "spec.inbox.relay.enabled",
                format!("is false, so what Source {} receives stays in the inbox", source.name),
            );
        }
    }

    /// The checked value, without sources and destinations.
    pub fn finish(&self, case: &Case<'_>) -> Option<checked::Relay> {
        let parts = self.parts.as_ref()?;
        let autoscaling = self.spec.autoscaling.map(|it| Autoscaling {
            min_replicas: it.min_replicas.unwrap_or(1),
            max_replicas: it.max_replicas,
            target_pending: it.target_pending.unwrap_or(5_000),
            target_oldest_age: duration(it.target_oldest_age, SECOND * 30),
            has_target_oldest_age: it.target_oldest_age.is_some(),
        });
        let disruption = self.spec.disruption.unwrap_or_default();
        Some(checked::Relay {
            namespace: case.object.namespace.clone(),
            name: case.object.name.clone(),
            uid: case.object.uid.clone(),
            replicas: self.spec.replicas.unwrap_or(1),
            autoscaling,
            paused: self.spec.paused.unwrap_or(false),
            max_unavailable: disruption.enabled.unwrap_or(true).then(|| disruption.max_unavailable.unwrap_or(1)),
            pod: self.spec.pod.clone().unwrap_or_default(),
            drain_timeout: parts.drain_timeout,
            database: parts.database.clone()?,
            routes: parts.routes.clone(),
            outbox: parts.outbox.clone(),
            inbox: parts.inbox.clone(),
            retention: parts.retention.clone(),
            capture: parts.capture.clone(),
            http: parts.http.clone(),
            admin: parts.admin.clone(),
            sources: Vec::new(),
            destinations: Vec::new(),
        })
    }
}

// ---- Pods -----------------------------------------------------------------------------------------------------------

fn check_scaling(case: &Case<'_>, spec: &RelaySpec) {
    if let Some(scaling) = spec.autoscaling
        && scaling.min_replicas.is_some_and(|min| min > scaling.max_replicas)
    {
        case.error("spec.autoscaling", "minReplicas is above maxReplicas");
    }
}

fn list<T: DeserializeOwned>(blocks: Option<&PodBlocks>) -> Result<Vec<T>, serde_json::Error> {
    blocks.map_or(Ok(Vec::new()), |blocks| serde_json::from_value(blocks.0.clone()))
}

fn check_pod(case: &Case<'_>, pod: Option<&PodSpec>) {
    let Some(pod) = pod else { return };
    let report = |field: &str, error: Option<serde_json::Error>| {
        if let Some(error) = error {
            // A quoted value may be a secret.
            let reason = Some(error.to_string())
                .filter(|text| !text.contains('"'))
                .unwrap_or_else(|| "a value has another type".to_owned());
            case.error(&format!("spec.pod.{field}"), format!("is not as in a pod: {reason}"));
        }
    };
    report("env", list::<EnvVar>(pod.env.as_ref()).err());
    report("extraVolumes", list::<Volume>(pod.extra_volumes.as_ref()).err());
    report("extraVolumeMounts", list::<VolumeMount>(pod.extra_volume_mounts.as_ref()).err());
    report("tolerations", list::<Toleration>(pod.tolerations.as_ref()).err());
    report(
        "topologySpreadConstraints",
        list::<TopologySpreadConstraint>(pod.topology_spread_constraints.as_ref()).err(),
    );
    report("affinity", one::<Affinity>(pod.affinity.as_ref()).err());
    report("resources", one::<ResourceRequirements>(pod.resources.as_ref()).err());
    report("securityContext", one::<PodSecurityContext>(pod.security_context.as_ref()).err());
    for (index, volume) in list::<Volume>(pod.extra_volumes.as_ref()).unwrap_or_default().into_iter().enumerate() {
        let is_allowed = volume.secret.is_some()
            || volume.config_map.is_some()
            || volume.csi.is_some()
            || volume.projected.is_some()
            || volume.empty_dir.is_some();
        if !is_allowed {
            case.error(
                &format!("spec.pod.extraVolumes[{index}]"),
                "must be secret, configMap, csi, projected or emptyDir",
            );
        }
    }
}

fn one<T: DeserializeOwned>(block: Option<&PodBlock>) -> Result<Option<T>, serde_json::Error> {
    block.map(|block| serde_json::from_value(block.0.clone())).transpose()
}

// ---- Database -------------------------------------------------------------------------------------------------------

fn database(case: &Case<'_>, spec: Option<&DatabaseSpec>) -> Option<Database> {
    let Some(spec) = spec else {
        if case.target == Target::Local {
            return Some(with_defaults(local_sqlite(), &DatabaseSpec::default()));
        }
        case.error_with_hint("spec.database", "is missing", &format!("give exactly one of {}", DATABASES.join(", ")));
        return None;
    };
    let at = "spec.database";
    let given = [spec.postgres.is_some(), spec.sqlserver.is_some(), spec.mysql.is_some(), spec.sqlite.is_some()];
    let members: Vec<(&str, bool)> = DATABASES.into_iter().zip(given).collect();
    // A block that says other things only leaves the database itself at its default.
    if given == [false; 4] && case.target == Target::Local {
        check_tables(case, spec);
        return Some(with_defaults(local_sqlite(), spec));
    }
    case.exactly_one(at, &members);
    for (kind, _) in members.iter().filter(|(kind, given)| *given && matches!(*kind, "sqlserver" | "mysql")) {
        case.found(
            &case.problems,
            &format!("{at}.{kind}"),
            "is not supported by this release".to_owned(),
            Some("postgres and sqlite are".to_owned()),
            Reason::UnsupportedDatabase,
        );
    }
    if let Some(it) = &spec.sqlserver {
        server(case, &format!("{at}.sqlserver"), it, 1433, TlsMode::VerifyFull);
    }
    if let Some(it) = &spec.mysql {
        let common = ServerSpec {
            url_from: it.url_from.clone(),
            host: it.host.clone(),
            port: it.port,
            database: it.database.clone(),
            username: it.username.clone(),
            password_from: it.password_from.clone(),
            schema: None,
            tls: it.tls.clone(),
        };
        server(case, &format!("{at}.mysql"), &common, 3306, TlsMode::Prefer);
    }
    let mut found = None;
    if let Some(it) = &spec.postgres {
        found = Some(DatabaseServer::Postgres(server(case, &format!("{at}.postgres"), it, 5432, TlsMode::Prefer)));
    }
    if let Some(it) = &spec.sqlite {
        if case.target == Target::Cluster {
            case.found(
                &case.problems,
                &format!("{at}.sqlite"),
                "is for local runs only".to_owned(),
                Some("several pods cannot share a file; give postgres".to_owned()),
                Reason::UnsupportedDatabase,
            );
        }
        // Each connection would have a database of its own, and a URI could say anything.
        if it.path == ":memory:" || it.path.starts_with("file:") {
            case.error_with_hint(
                &format!("{at}.sqlite.path"),
                &format!("{:?} names no file", it.path),
                "give the path of a file; a database in memory would be another one for each connection",
            );
        }
        found =
            Some(DatabaseServer::Sqlite { path: it.path.clone(), busy_timeout: duration(it.busy_timeout, SECOND * 5) });
    }
    check_tables(case, spec);
    Some(with_defaults(found?, spec))
}

/// What a local run uses where no database is named.
fn local_sqlite() -> DatabaseServer {
    DatabaseServer::Sqlite { path: "./queuebox.db".to_owned(), busy_timeout: SECOND * 5 }
}

fn with_defaults(server: DatabaseServer, spec: &DatabaseSpec) -> Database {
    let mapping = spec.column_mapping.clone().unwrap_or_default();
    let renamed = |entries: Vec<(&'static str, Option<&str>)>| -> BTreeMap<String, String> {
        let renamed = entries.into_iter().filter_map(|(column, name)| Some((column, name?)));
        renamed
            .filter(|(column, name)| column != name)
            .map(|(column, name)| (column.to_owned(), name.to_owned()))
            .collect()
    };
    Database {
        server,
        migrate: spec.migrate.unwrap_or_default() == AutoOrOff::Auto,
        pool_size: spec.pool_size.unwrap_or(5),
        connect_timeout: duration(spec.connect_timeout, SECOND * 30),
        startup_timeout: duration(spec.startup_timeout, SECOND * 60),
        outbox_table: spec.outbox_table_name.clone().unwrap_or_else(|| "outbox".to_owned()),
        inbox_table: spec.inbox_table_name.clone().unwrap_or_else(|| "inbox".to_owned()),
        outbox_columns: mapping.outbox.as_ref().map(|it| renamed(it.entries())).unwrap_or_default(),
        inbox_columns: mapping.inbox.as_ref().map(|it| renamed(it.entries())).unwrap_or_default(),
    }
}

/// Other names exclude migrations (contract 2.6).
fn check_tables(case: &Case<'_>, spec: &DatabaseSpec) {
    let database = with_defaults(local_sqlite(), spec);
    if database.outbox_table.eq_ignore_ascii_case(&database.inbox_table) {
        case.error("spec.database.inboxTableName", "must differ from outboxTableName");
    }
    let mut renamed: Vec<String> = Vec::new();
    renamed.extend((database.outbox_table != "outbox").then(|| "outboxTableName".to_owned()));
    renamed.extend((database.inbox_table != "inbox").then(|| "inboxTableName".to_owned()));
    let mapping = spec.column_mapping.clone().unwrap_or_default();
    let tables = [
        (
            "outbox",
            mapping.outbox.as_ref().map(super::super::spec::relay::OutboxColumns::entries),
            &database.outbox_columns,
        ),
        (
            "inbox",
            mapping.inbox.as_ref().map(super::super::spec::relay::InboxColumns::entries),
            &database.inbox_columns,
        ),
    ];
    for (table, entries, columns) in tables {
        renamed.extend(columns.keys().map(|column| format!("columnMapping.{table}.{}", camel_case(column))));
        let names: Vec<(&str, &str)> =
            entries.into_iter().flatten().map(|(column, name)| (column, name.unwrap_or(column))).collect();
        for (index, (column, name)) in names.iter().enumerate() {
            if let Some((other, _)) = names[..index].iter().find(|(_, earlier)| earlier.eq_ignore_ascii_case(name)) {
                let at = format!("spec.database.columnMapping.{table}.{}", camel_case(column));
                case.error(&at, format!("{name:?} is the name of {} already", camel_case(other)));
            }
        }
    }
    if database.migrate && !renamed.is_empty() {
        case.error_with_hint(
            "spec.database.migrate",
            &format!("migrations know the default names only, and {} rename", renamed.join(", ")),
            "write migrate: \"Off\" and change the tables yourself",
        );
    }
}

/// `max_attempts` → `maxAttempts`.
fn camel_case(column: &str) -> String {
    let mut out = String::new();
    for (index, word) in column.split('_').enumerate() {
        let mut letters = word.chars();
        match letters.next() {
            Some(first) if index > 0 => {
                out.push(first.to_ascii_uppercase());
                out.push_str(letters.as_str());
            }
            _ => out.push_str(word),
        }
    }
    out
}

fn server(case: &Case<'_>, at: &str, spec: &ServerSpec, port: u16, mode: TlsMode) -> Server {
    let tls = database_tls(case, &format!("{at}.tls"), spec.tls.as_ref(), mode);
    let login = match &spec.url_from {
        Some(url) => {
            let others = [
                ("host", spec.host.is_some()),
                ("port", spec.port.is_some()),
                ("database", spec.database.is_some()),
                ("username", spec.username.is_some()),
                ("passwordFrom", spec.password_from.is_some()),
            ];
            let others: Vec<&str> = others.iter().filter(|(_, given)| *given).map(|(field, _)| *field).collect();
            if !others.is_empty() {
                case.error(at, format!("urlFrom holds everything; leave {} out", others.join(", ")));
            }
            DatabaseLogin::Url(case.reference(&format!("{at}.urlFrom"), url))
        }
        None => {
            for (field, value) in [("host", &spec.host), ("database", &spec.database), ("username", &spec.username)] {
                if value.is_none() {
                    case.error_with_hint(
                        &format!("{at}.{field}"),
                        "is missing",
                        "give host, database and username, or one urlFrom for all",
                    );
                }
            }
            DatabaseLogin::Parts {
                host: spec.host.clone().unwrap_or_default(),
                port: spec.port.unwrap_or(port),
                database: spec.database.clone().unwrap_or_default(),
                username: spec.username.clone().unwrap_or_default(),
                password: case.optional_reference(&format!("{at}.passwordFrom"), spec.password_from.as_ref()),
            }
        }
    };
    Server { login, schema: spec.schema.clone(), tls }
}

fn database_tls(case: &Case<'_>, at: &str, spec: Option<&DatabaseTlsSpec>, default: TlsMode) -> DatabaseTls {
    let Some(spec) = spec else {
        return DatabaseTls { mode: default, has_mode: false, files: checked::Tls::default() };
    };
    let files = case.tls_files(at, spec.ca_from.as_ref(), spec.cert_from.as_ref(), spec.key_from.as_ref());
    DatabaseTls { mode: spec.mode.unwrap_or(default), has_mode: spec.mode.is_some(), files }
}

// ---- Routes ---------------------------------------------------------------------------------------------------------

fn routes(case: &Case<'_>, specs: &[RouteSpec]) -> Vec<Route> {
    let mut routes: Vec<Route> = Vec::new();
    for (index, spec) in specs.iter().enumerate() {
        let at = format!("spec.routes[{index}]");
        let mut topics = Vec::new();
        for (place, topic) in spec.topics.iter().enumerate().filter(|(_, topic)| !topic.is_empty()) {
            let at = format!("{at}.topics[{place}]");
            match Pattern::parse(topic) {
                Ok(pattern) => {
                    warn_if_hidden(case, &at, &pattern, &routes);
                    topics.push(pattern);
                }
                Err(error) => case.error(&at, error.to_string()),
            }
        }
        for (place, name) in spec.destinations.iter().enumerate() {
            if !name.is_empty() && spec.destinations[..place].contains(name) {
                case.error(&format!("{at}.destinations[{place}]"), format!("{name:?} stands twice"));
            }
        }
        let routing_key = spec.routing_key.as_ref().and_then(|text| {
            let template = case.template(&format!("{at}.routingKey"), text, Vocabulary::RoutingKey)?;
            Some(template.with_default(spec.routing_key_missing_field_default.clone().unwrap_or_default()))
        });
        if spec.routing_key.is_none() && spec.routing_key_missing_field_default.is_some() {
            case.warning(&format!("{at}.routingKeyMissingFieldDefault"), "has no effect without routingKey");
        }
        let transform = case.transform(&format!("{at}.transform"), spec.transform.as_ref());
        routes.push(Route { topics, destinations: spec.destinations.clone(), transform, routing_key });
    }
    routes
}

/// An earlier route takes all that this pattern would.
fn warn_if_hidden(case: &Case<'_>, at: &str, pattern: &Pattern, earlier: &[Route]) {
    let hiding = earlier
        .iter()
        .enumerate()
        .find_map(|(index, route)| route.topics.iter().find(|other| other.hides(pattern)).map(|other| (index, other)));
    if let Some((index, other)) = hiding {
        case.warning(at, format!("never matches: spec.routes[{index}] takes {:?} before", other.as_str()));
    }
}

// ---- The other blocks -----------------------------------------------------------------------------------------------

fn outbox(case: &Case<'_>, spec: Option<&OutboxSpec>) -> Outbox {
    let default = OutboxSpec::default();
    let spec = spec.unwrap_or(&default);
    let backoff = spec.backoff.unwrap_or_default();
    let schedule = RetrySchedule {
        initial: duration(backoff.initial, SECOND),
        max: duration(backoff.max, SECOND * 60),
        ..RetrySchedule::default()
    };
    if schedule.initial > schedule.max {
        let (initial, max) = (format_duration(schedule.initial), format_duration(schedule.max));
        case.error("spec.outbox.backoff", format!("initial ({initial}) is above max ({max})"));
    }
    let outbox = Outbox {
        on_sent: spec.on_sent.unwrap_or_default(),
        poll_interval: duration(spec.poll_interval, Duration::from_millis(100)),
        batch_size: spec.batch_size.unwrap_or(500),
        max_in_flight: spec.max_in_flight.unwrap_or(512),
        max_in_flight_bytes: spec.max_in_flight_bytes.map_or(64 << 20, |size| size.0),
        max_payload_bytes: spec.max_payload_size.map_or(16 << 20, |size| size.0),
        schedule,
        max_attempts: spec.max_attempts.unwrap_or(5),
        max_crashes: spec.max_crashes.unwrap_or(5),
        claim_timeout: duration(spec.claim_timeout, SECOND * 30),
        pending_gauge_interval: duration(spec.pending_gauge_interval, SECOND * 5),
    };
    if outbox.claim_timeout < SECOND * 3 {
        case.error("spec.outbox.claimTimeout", "must be 3s or more");
    }
    if outbox.max_payload_bytes > outbox.max_in_flight_bytes {
        let (payload, all) = (format_size(outbox.max_payload_bytes), format_size(outbox.max_in_flight_bytes));
        case.error("spec.outbox.maxPayloadSize", format!("({payload}) is above maxInFlightBytes ({all})"));
    }
    outbox
}

fn inbox(case: &Case<'_>, spec: Option<&InboxSpec>, max_attempts: i32) -> Inbox {
    let default = InboxSpec::default();
    let spec = spec.unwrap_or(&default);
    let base_path = spec.base_path.clone().unwrap_or_else(|| "/inbox".to_owned());
    http::check_route_path(case, "spec.inbox.basePath", &base_path);
    let relay = spec.relay.clone().unwrap_or_default();
    if relay.claim_timeout.is_some() {
        let message = "has no effect: push rows are forwarded under the lease of the worker, outbox.claimTimeout";
        case.warning("spec.inbox.relay.claimTimeout", message);
    }
    let inbox = Inbox {
        base_path: base_path.trim_end_matches('/').to_owned(),
        max_body_bytes: spec.max_body_size.map_or(1 << 20, |size| size.0),
        body_timeout: duration(spec.body_timeout, SECOND * 30),
        max_bytes_in_flight: spec.max_bytes_in_flight.map_or(64 << 20, |size| size.0),
        store_timeout: duration(spec.store_timeout, SECOND * 5),
        store_retry_window: duration(spec.store_retry_window, SECOND * 30),
        max_crashes: spec.max_crashes.unwrap_or(5),
        relay: relay.enabled.unwrap_or(true).then(|| InboxRelay {
            poll_interval: duration(relay.poll_interval, Duration::from_millis(100)),
            batch_size: relay.batch_size.unwrap_or(500),
            max_attempts: relay.max_attempts.unwrap_or(max_attempts),
        }),
        pending_gauge_interval: duration(relay.pending_gauge_interval, SECOND * 5),
    };
    if inbox.max_bytes_in_flight < inbox.max_body_bytes {
        let (all, body) = (format_size(inbox.max_bytes_in_flight), format_size(inbox.max_body_bytes));
        case.error("spec.inbox.maxBytesInFlight", format!("({all}) is below maxBodySize ({body})"));
    }
    inbox
}

fn retention(case: &Case<'_>, spec: Option<&RetentionSpec>, is_sqlserver: bool) -> Retention {
    let default = RetentionSpec::default();
    let spec = spec.unwrap_or(&default);
    let table = |name: &str, keep: Option<Keep>, interval: Option<DurationText>, batch_size: Option<u32>| {
        let batch_size = batch_size.unwrap_or(1_000);
        if is_sqlserver && batch_size >= 5_000 {
            let at = format!("spec.retention.{name}.batchSize");
            case.error(&at, "must be below 5000 on SQL Server, which locks the whole table from there on");
        }
        Some(TableRetention { keep: keep?, cleanup_interval: duration(interval, SECOND * 3_600), batch_size })
    };
    let age = |max: Option<DurationText>, dead: Option<DurationText>| {
        (max.is_some() || dead.is_some())
            .then(|| Keep::Age { finished: max.map(|it| it.0), dead: dead.or(max).map(|it| it.0) })
    };
    let outbox = spec.outbox.as_ref().and_then(|it| {
        if it.max_count.is_some() && (it.max_age.is_some() || it.dead_max_age.is_some()) {
            case.error("spec.retention.outbox", "give an age or a count, not both");
        }
        let count = it.max_count.and_then(|count| u64::try_from(count).ok()).map(Keep::Count);
        table("outbox", count.or(age(it.max_age, it.dead_max_age)), it.cleanup_interval, it.batch_size)
    });
    let inbox = spec
        .inbox
        .as_ref()
        .and_then(|it| table("inbox", age(it.max_age, it.dead_max_age), it.cleanup_interval, it.batch_size));
    Retention { outbox, inbox }
}

fn capture(case: &Case<'_>, spec: Option<&CaptureSpec>, database: Option<&Database>) -> Capture {
    let Some(spec) = spec else { return Capture { auto: true, connection: None } };
    let auto = spec.mode.unwrap_or_default() == CaptureMode::Auto;
    let connection = spec.connection.as_ref().and_then(|it| capture_connection(case, it, database));
    if spec.connection.is_some() && !auto {
        case.warning("spec.capture.connection", "has no effect with mode Polling");
    }
    Capture { auto, connection }
}

/// A direct connection: what it does not say is the database's.
fn capture_connection(case: &Case<'_>, spec: &CaptureConnectionSpec, database: Option<&Database>) -> Option<Server> {
    let at = "spec.capture.connection";
    let password = case.optional_reference(&format!("{at}.passwordFrom"), spec.password_from.as_ref());
    let tls = database_tls(case, &format!("{at}.tls"), spec.tls.as_ref(), TlsMode::Prefer);
    let Some(DatabaseServer::Postgres(server)) = database.map(|database| &database.server) else {
        if database.is_some() {
            case.warning(at, "has an effect on PostgreSQL only");
        }
        return None;
    };
    let login = match &server.login {
        DatabaseLogin::Parts { host, port, database, username, password: own } => DatabaseLogin::Parts {
            host: spec.host.clone().unwrap_or_else(|| host.clone()),
            port: spec.port.unwrap_or(*port),
            database: spec.database.clone().unwrap_or_else(|| database.clone()),
            username: spec.username.clone().unwrap_or_else(|| username.clone()),
            password: password.or_else(|| own.clone()),
        },
        DatabaseLogin::Url(url) => match (&spec.host, &spec.database, &spec.username) {
            (Some(host), Some(database), Some(username)) => DatabaseLogin::Parts {
                host: host.clone(),
                port: spec.port.unwrap_or(5432),
                database: database.clone(),
                username: username.clone(),
                password,
            },
            (None, None, None) if spec.port.is_none() && password.is_none() => DatabaseLogin::Url(url.clone()),
            _ => {
                case.error(at, "give host, database and username: the database's own are hidden in urlFrom");
                return None;
            }
        },
    };
    let tls = if spec.tls.is_some() { tls } else { server.tls.clone() };
    Some(Server { login, schema: server.schema.clone(), tls })
}

fn http(case: &Case<'_>, spec: Option<&HttpSpec>, drain_timeout: Duration) -> Http {
    let default = HttpSpec::default();
    let spec = spec.unwrap_or(&default);
    let (port, management_port) = (spec.port.unwrap_or(8080), spec.management_port.unwrap_or(9090));
    if port == management_port && !case.object.classic {
        case.error("spec.http.managementPort", format!("({management_port}) must differ from port"));
    }
    let shutdown_delay = match spec.shutdown_delay {
        Some(delay) if delay.0 >= drain_timeout => {
            let (delay, all) = (delay.to_string(), format_duration(drain_timeout));
            case.error("spec.http.shutdownDelay", format!("({delay}) must be below drainTimeout ({all})"));
            Duration::ZERO
        }
        Some(delay) => delay.0,
        None if case.target == Target::Local => Duration::ZERO,
        // A short drain leaves room for a short delay only.
        None => (SECOND * 5).min(drain_timeout / 2),
    };
    Http {
        port,
        management_port,
        max_error_body_bytes: spec.max_error_body_size.map_or(2 << 10, |size| size.0),
        block_private_addresses: spec.block_private_addresses.unwrap_or(false),
        shutdown_delay,
    }
}

fn admin(case: &Case<'_>, spec: Option<&AdminSpec>) -> Option<Admin> {
    let spec = spec?;
    let auth = super::http::inbound_auth(case, "spec.admin.auth", spec.auth.as_ref());
    let enabled = spec.enabled.unwrap_or(false);
    if enabled && spec.auth.is_none() && !spec.insecure.unwrap_or(false) {
        case.error_with_hint(
            "spec.admin.auth",
            "is missing",
            "the admin API needs it, or insecure: true for local tests",
        );
    }
    enabled.then(|| Admin {
        auth,
        max_transform_timeout: duration(spec.max_transform_timeout, SECOND),
        max_payload_bytes: spec.max_payload_size.map_or(64 << 10, |size| size.0),
    })
}

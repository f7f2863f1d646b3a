//! `Relay`: one database with its tables, routes and workers (contract 13.4).

#![allow(clippy::duplicated_attributes, reason = "each printer column has a name and a type")]

use std::{borrow::Cow, collections::BTreeMap};

use kube::CustomResource;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{
    auth::InboundAuthSpec,
    common::{AutoOrOff, BackoffSpec, CaRef, SecretRef, TransformSpec},
    status::RelayStatus,
};
use crate::{
    crd::{exactly_one, relay_rules, rule, together},
    value::{DurationText, POSITIVE_DURATION_PATTERN, POSITIVE_SIZE_PATTERN, SizeText},
};

/// One database, its routes, and the workers that serve it.
#[derive(CustomResource, Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema, Default)]
#[kube(
    group = "queuebox.io",
    version = "v1alpha1",
    kind = "Relay",
    plural = "relays",
    namespaced,
    status = "RelayStatus",
    shortname = "qbr",
    category = "queuebox",
    doc = "One database, its routes, and the workers that serve it.",
    scale(
        spec_replicas_path = ".spec.replicas",
        status_replicas_path = ".status.replicas",
        label_selector_path = ".status.selector"
    ),
    printcolumn(name = "Database", type_ = "string", json_path = ".status.database"),
    printcolumn(name = "Ready", type_ = "string", json_path = ".status.conditions[?(@.type==\"Ready\")].status"),
    printcolumn(name = "Replicas", type_ = "integer", json_path = ".status.replicas"),
    printcolumn(name = "Pending", type_ = "string", json_path = ".status.pending"),
    printcolumn(name = "Oldest", type_ = "string", json_path = ".status.oldest"),
    printcolumn(name = "Dead", type_ = "string", json_path = ".status.dead"),
    printcolumn(name = "Paused", type_ = "string", json_path = ".status.paused"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = relay_rules()))]
pub struct RelaySpec {
    /// Worker pods. Ignored while autoscaling is set. Default 1.
    #[schemars(range(min = 0, max = 1000), extend("default" = 1))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replicas: Option<i32>,
    /// Sets the number of worker pods by the backlog.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub autoscaling: Option<AutoscalingSpec>,
    /// Scales to zero after draining. Default false.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub paused: Option<bool>,
    /// How many worker pods may be away at a time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disruption: Option<DisruptionSpec>,
    /// Who may reach the worker pods.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub network_policy: Option<NetworkPolicySpec>,
    /// Changes to the worker pods.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod: Option<PodSpec>,
    /// Time from the stop signal to the end, at most 15m. Default 30s.
    #[schemars(extend("pattern" = POSITIVE_DURATION_PATTERN))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub drain_timeout: Option<DurationText>,
    /// The database. Its kind is immutable. Default in a local run: SQLite in ./queuebox.db.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub database: Option<DatabaseSpec>,
    /// Tested in order, the first match wins.
    #[schemars(length(max = 256))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub routes: Option<Vec<RouteSpec>>,
    /// How the outbox is read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub outbox: Option<OutboxSpec>,
    /// How the inbox is filled and forwarded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub inbox: Option<InboxSpec>,
    /// Deletes finished rows. Off where nothing is said.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retention: Option<RetentionSpec>,
    /// How idle workers are woken.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub capture: Option<CaptureSpec>,
    /// Ports and HTTP behaviour.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub http: Option<HttpSpec>,
    /// The admin API.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub admin: Option<AdminSpec>,
}

/// Number of workers by the backlog.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema, Default)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = rule(
    "!has(self.minReplicas) || self.minReplicas <= self.maxReplicas", "minReplicas is above maxReplicas")))]
pub struct AutoscalingSpec {
    /// Default 1.
    #[schemars(range(min = 1, max = 1000))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_replicas: Option<i32>,
    /// Upper bound.
    #[schemars(range(min = 1, max = 1000))]
    pub max_replicas: i32,
    /// Startable pending rows per worker. Default 5000.
    #[schemars(range(min = 1, max = 1_000_000_000))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target_pending: Option<i64>,
    /// Age of the oldest startable row that is aimed at. Default 30s.
    #[schemars(extend("pattern" = POSITIVE_DURATION_PATTERN))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target_oldest_age: Option<DurationText>,
}

/// The PodDisruptionBudget of the workers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema, Default)]
#[serde(rename_all = "camelCase")]
pub struct DisruptionSpec {
    /// Makes a PodDisruptionBudget. Default true.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub enabled: Option<bool>,
    /// Worker pods that may be away at a time. Default 1.
    #[schemars(range(min = 1, max = 1000))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_unavailable: Option<i32>,
}

/// The NetworkPolicy of the workers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema, Default)]
#[serde(rename_all = "camelCase")]
pub struct NetworkPolicySpec {
    /// Makes a NetworkPolicy for what comes in: the management port is for the operator. Default false.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub enabled: Option<bool>,
    /// Who may reach the data port, as from of an ingress rule. Default: anyone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data_from: Option<PodBlocks>,
    /// Who may reach the management port beside the operator, as from of an ingress rule.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub management_from: Option<PodBlocks>,
}

/// A block of Kubernetes' own, as in a pod. Its schema is left open, or the definition would be several times as large.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct PodBlock(pub Value);

/// A list of blocks of Kubernetes' own, as in a pod.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct PodBlocks(pub Value);

impl JsonSchema for PodBlock {
    fn schema_name() -> Cow<'static, str> {
        "PodBlock".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"type": "object", "x-kubernetes-preserve-unknown-fields": true})
    }
}

impl JsonSchema for PodBlocks {
    fn schema_name() -> Cow<'static, str> {
        "PodBlocks".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        json_schema!({"type": "array", "items": PodBlock::json_schema(generator)})
    }
}

/// Changes to the worker pods. Blocks of Kubernetes' own are written as in a pod.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema, Default)]
#[serde(rename_all = "camelCase")]
pub struct PodSpec {
    /// Image of the workers.
    #[schemars(length(min = 1))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// Secrets for pulling the image.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image_pull_secrets: Option<Vec<super::common::NameRef>>,
    /// ServiceAccount of the workers, in place of the one that the operator makes.
    #[schemars(length(min = 1, max = 253))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub service_account_name: Option<String>,
    /// As in a container.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resources: Option<PodBlock>,
    /// As in a container.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub env: Option<PodBlocks>,
    /// Volumes of kind secret, configMap, csi, projected or emptyDir, as in a pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub extra_volumes: Option<PodBlocks>,
    /// As in a container.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub extra_volume_mounts: Option<PodBlocks>,
    /// As in a pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node_selector: Option<BTreeMap<String, String>>,
    /// As in a pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tolerations: Option<PodBlocks>,
    /// As in a pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub affinity: Option<PodBlock>,
    /// As in a pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub topology_spread_constraints: Option<PodBlocks>,
    /// As in a pod.
    #[schemars(length(min = 1, max = 253))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub priority_class_name: Option<String>,
    /// As in a pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub security_context: Option<PodBlock>,
    /// Labels of the pods.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub labels: Option<BTreeMap<String, String>>,
    /// Annotations of the pods.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub annotations: Option<BTreeMap<String, String>>,
    /// Log filter, such as info or debug. Default info.
    #[schemars(length(min = 1))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub log_level: Option<String>,
}

/// The database: exactly one of postgres, sqlserver, mysql and sqlite.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema, Default)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = exactly_one(&["postgres", "sqlserver", "mysql", "sqlite"])))]
pub struct DatabaseSpec {
    /// PostgreSQL 14 and later.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub postgres: Option<ServerSpec>,
    /// SQL Server 2019 and later.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sqlserver: Option<ServerSpec>,
    /// MySQL 8.0.17 and later, MariaDB 10.6 and later.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mysql: Option<MySqlSpec>,
    /// SQLite, local runs only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sqlite: Option<SqliteSpec>,
    /// Brings the tables to the newest version at start: Auto or "Off" (in quotes). Default Auto.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub migrate: Option<AutoOrOff>,
    /// Connections per worker. Default 5.
    #[schemars(range(min = 3, max = 1000))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pool_size: Option<u32>,
    /// Default 30s.
    #[schemars(extend("pattern" = POSITIVE_DURATION_PATTERN))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub connect_timeout: Option<DurationText>,
    /// How long a start waits for the database. Default 60s.
    #[schemars(extend("pattern" = POSITIVE_DURATION_PATTERN))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub startup_timeout: Option<DurationText>,
    /// Default outbox.
    #[schemars(length(min = 1, max = 63), regex(pattern = "^[A-Za-z_][A-Za-z0-9_]*$"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub outbox_table_name: Option<String>,
    /// Default inbox.
    #[schemars(length(min = 1, max = 63), regex(pattern = "^[A-Za-z_][A-Za-z0-9_]*$"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub inbox_table_name: Option<String>,
    /// Other names of columns.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub column_mapping: Option<ColumnMappingSpec>,
}

/// A database server: host, database and username, or one urlFrom for all.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema, Default)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = server_rule()))]
pub struct ServerSpec {
    /// URL with credentials, for all of host, port, database, username and password.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub url_from: Option<SecretRef>,
    /// Host.
    #[schemars(length(min = 1, max = 255))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// Default 5432 for postgres, 1433 for sqlserver.
    #[schemars(range(min = 1, max = 65535))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
    /// Database.
    #[schemars(length(min = 1, max = 255))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub database: Option<String>,
    /// User.
    #[schemars(length(min = 1, max = 255))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub username: Option<String>,
    /// Password.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub password_from: Option<SecretRef>,
    /// Schema of the tables. Default: the search path, for sqlserver dbo.
    #[schemars(length(min = 1, max = 63), regex(pattern = "^[A-Za-z_][A-Za-z0-9_]*$"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub schema: Option<String>,
    /// Protection of the connection.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tls: Option<DatabaseTlsSpec>,
}

/// A MySQL or MariaDB server: host, database and username, or one urlFrom for all.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema, Default)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = server_rule()))]
pub struct MySqlSpec {
    /// URL with credentials, for all of host, port, database, username and password.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub url_from: Option<SecretRef>,
    /// Host.
    #[schemars(length(min = 1, max = 255))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// Default 3306.
    #[schemars(range(min = 1, max = 65535))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
    /// Database.
    #[schemars(length(min = 1, max = 255))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub database: Option<String>,
    /// User.
    #[schemars(length(min = 1, max = 255))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub username: Option<String>,
    /// Password.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub password_from: Option<SecretRef>,
    /// Protection of the connection.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tls: Option<DatabaseTlsSpec>,
}

fn server_rule() -> crate::crd::Rules {
    rule(
        "has(self.urlFrom) ? !(has(self.host) || has(self.port) || has(self.database) || has(self.username) || \
         has(self.passwordFrom)) : has(self.host) && has(self.database) && has(self.username)",
        "give host, database and username, or one urlFrom for all",
    )
}

/// How a connection to a database is protected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum TlsMode {
    /// Never.
    Disable,
    /// If the server offers it.
    Prefer,
    /// Always; the certificate is not checked.
    Require,
    /// Always; the certificate is from the given CA.
    VerifyCA,
    /// Always; the certificate is from the given CA and names the host.
    VerifyFull,
}

/// Protection of a connection to a database.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema, Default)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = together("certFrom", "keyFrom")))]
pub struct DatabaseTlsSpec {
    /// Default Prefer, for sqlserver VerifyFull.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mode: Option<TlsMode>,
    /// Certificates that the server's is checked against.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ca_from: Option<CaRef>,
    /// Our certificate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cert_from: Option<SecretRef>,
    /// Key of our certificate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key_from: Option<SecretRef>,
}

/// A SQLite file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema, Default)]
#[serde(rename_all = "camelCase")]
pub struct SqliteSpec {
    /// Path of the file.
    #[schemars(length(min = 1))]
    pub path: String,
    /// How long a statement waits for another writer. Default 5s.
    #[schemars(extend("pattern" = POSITIVE_DURATION_PATTERN))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub busy_timeout: Option<DurationText>,
}

/// Other names of columns.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema, Default)]
#[serde(rename_all = "camelCase")]
pub struct ColumnMappingSpec {
    /// Of the outbox.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub outbox: Option<OutboxColumns>,
    /// Of the inbox.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub inbox: Option<InboxColumns>,
}

macro_rules! columns {
    ($(#[$doc:meta])* $name:ident { $($field:ident),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema, Default)]
        #[serde(rename_all = "camelCase")]
        #[allow(missing_docs, reason = "each field is named like its column")]
        pub struct $name {
            $(
                #[serde(skip_serializing_if = "Option::is_none")]
                #[schemars(length(min = 1, max = 63), regex(pattern = "^[A-Za-z_][A-Za-z0-9_]*$"))]
                pub $field: Option<String>,
            )+
        }

        impl $name {
            /// The columns in the order of the contract, each with its new name.
            pub fn entries(&self) -> Vec<(&'static str, Option<&str>)> {
                vec![$((stringify!($field), self.$field.as_deref())),+]
            }
        }
    };
}

columns! {
    /// New names of the columns of the outbox (contract 2.1).
    OutboxColumns {
        id, topic, key, payload, headers, aggregate_type, state, attempt, max_attempts, scheduled_at, created_at,
        updated_at, claimed_at, lease_expires_at, claim_token, last_error, sequence, destination, parent_id,
        trace_parent, crashes,
    }
}

columns! {
    /// New names of the columns of the inbox (contract 2.2).
    InboxColumns {
        id, source, idempotency_key, aggregate_id, event_type, payload, headers, correlation_id, consumption, state,
        created_at, processed_at, scheduled_at, attempt, last_error, claimed_at, lease_expires_at, claim_token,
        trace_parent, crashes, topic,
    }
}

/// Where messages of some topics go.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema, Default)]
#[serde(rename_all = "camelCase")]
pub struct RouteSpec {
    /// Patterns: * is one segment without a dot, ** is any text.
    #[schemars(length(min = 1, max = 64), inner(length(min = 1, max = 255)))]
    pub topics: Vec<String>,
    /// Names of Destinations; several = fan-out.
    #[schemars(length(min = 1, max = 16), inner(length(min = 1, max = 253)))]
    pub destinations: Vec<String>,
    /// Reshapes the payload on every attempt, before the destination's transform.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub transform: Option<TransformSpec>,
    /// Routing key or record key, a template; wins over the destination's.
    #[schemars(length(max = 16384))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub routing_key: Option<String>,
    /// What a missing placeholder of routingKey becomes. Default empty.
    #[schemars(length(max = 255))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub routing_key_missing_field_default: Option<String>,
}

/// What becomes of a row that was sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema, Default)]
pub enum OnSent {
    /// It stays, marked sent.
    #[default]
    Keep,
    /// It is deleted.
    Delete,
}

/// How the outbox is read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema, Default)]
#[serde(rename_all = "camelCase")]
pub struct OutboxSpec {
    /// What becomes of a row that was sent. Default Keep.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub on_sent: Option<OnSent>,
    /// Longest idle wait. Default 100ms.
    #[schemars(extend("pattern" = POSITIVE_DURATION_PATTERN))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub poll_interval: Option<DurationText>,
    /// Rows per round trip. Default 500.
    #[schemars(range(min = 1, max = 10_000))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub batch_size: Option<u32>,
    /// Unfinished publishes per worker. Default 512.
    #[schemars(range(min = 1, max = 100_000))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_in_flight: Option<u32>,
    /// Their payloads. Default 64MiB.
    #[schemars(extend("pattern" = POSITIVE_SIZE_PATTERN))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_in_flight_bytes: Option<SizeText>,
    /// A larger payload is never loaded. Default 16MiB.
    #[schemars(extend("pattern" = POSITIVE_SIZE_PATTERN))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_payload_size: Option<SizeText>,
    /// Delays between attempts. Default 1s to 60s.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backoff: Option<BackoffSpec>,
    /// Default 5.
    #[schemars(range(min = 1, max = 1_000_000))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_attempts: Option<i32>,
    /// Default 5.
    #[schemars(range(min = 1, max = 1_000_000))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_crashes: Option<i32>,
    /// The lease, 3s or more. Default 30s.
    #[schemars(extend("pattern" = POSITIVE_DURATION_PATTERN))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub claim_timeout: Option<DurationText>,
    /// How often the gauges are counted. Default 5s.
    #[schemars(extend("pattern" = POSITIVE_DURATION_PATTERN))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pending_gauge_interval: Option<DurationText>,
}

/// How the inbox is filled and forwarded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema, Default)]
#[serde(rename_all = "camelCase")]
pub struct InboxSpec {
    /// Path in front of every http source. Default /inbox.
    #[schemars(length(min = 1, max = 255), regex(pattern = "^/"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub base_path: Option<String>,
    /// Default 1MiB.
    #[schemars(extend("pattern" = POSITIVE_SIZE_PATTERN))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_body_size: Option<SizeText>,
    /// Default 30s.
    #[schemars(extend("pattern" = POSITIVE_DURATION_PATTERN))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub body_timeout: Option<DurationText>,
    /// Bodies that are being read or stored. Default 64MiB.
    #[schemars(extend("pattern" = POSITIVE_SIZE_PATTERN))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_bytes_in_flight: Option<SizeText>,
    /// How long an http source tries to store. Default 5s.
    #[schemars(extend("pattern" = POSITIVE_DURATION_PATTERN))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub store_timeout: Option<DurationText>,
    /// How long a broker source tries to store; 0s = once. Default 30s.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub store_retry_window: Option<DurationText>,
    /// Default 5.
    #[schemars(range(min = 1, max = 1_000_000))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_crashes: Option<i32>,
    /// Forwarding of push rows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub relay: Option<InboxRelaySpec>,
}

/// Forwarding of push rows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema, Default)]
#[serde(rename_all = "camelCase")]
pub struct InboxRelaySpec {
    /// Default true.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub enabled: Option<bool>,
    /// Longest idle wait. Default 100ms.
    #[schemars(extend("pattern" = POSITIVE_DURATION_PATTERN))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub poll_interval: Option<DurationText>,
    /// Rows per round trip. Default 500.
    #[schemars(range(min = 1, max = 10_000))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub batch_size: Option<u32>,
    /// Has no effect: push rows are forwarded under the lease of the worker, outbox.claimTimeout.
    #[schemars(extend("pattern" = POSITIVE_DURATION_PATTERN))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub claim_timeout: Option<DurationText>,
    /// How often the gauges of the inbox are counted, with enabled false as well. Default 5s.
    #[schemars(extend("pattern" = POSITIVE_DURATION_PATTERN))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pending_gauge_interval: Option<DurationText>,
    /// Stamped on forwarded rows. Default outbox.maxAttempts.
    #[schemars(range(min = 1, max = 1_000_000))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_attempts: Option<i32>,
}

/// Deletes finished rows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema, Default)]
#[serde(rename_all = "camelCase")]
pub struct RetentionSpec {
    /// Rows in state sent and dead.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub outbox: Option<OutboxRetentionSpec>,
    /// Rows in state processed and dead. Ends their deduplication.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub inbox: Option<InboxRetentionSpec>,
}

/// Deletes finished rows of the outbox, by age or by count.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema, Default)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = rule(
    "!(has(self.maxCount) && (has(self.maxAge) || has(self.deadMaxAge)))", "give an age or a count, not both")))]
pub struct OutboxRetentionSpec {
    /// Older rows are deleted.
    #[schemars(extend("pattern" = POSITIVE_DURATION_PATTERN))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_age: Option<DurationText>,
    /// Older dead rows are deleted. Default maxAge.
    #[schemars(extend("pattern" = POSITIVE_DURATION_PATTERN))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dead_max_age: Option<DurationText>,
    /// All but the newest of each finished state are deleted.
    #[schemars(range(min = 1, max = 1_000_000_000_000_i64))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_count: Option<i64>,
    /// Default 1h.
    #[schemars(extend("pattern" = POSITIVE_DURATION_PATTERN))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cleanup_interval: Option<DurationText>,
    /// Rows per statement. Default 1000.
    #[schemars(range(min = 1, max = 100_000))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub batch_size: Option<u32>,
}

/// Deletes finished rows of the inbox, by age.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema, Default)]
#[serde(rename_all = "camelCase")]
pub struct InboxRetentionSpec {
    /// Older rows are deleted. It must exceed the longest time in which a sender may repeat.
    #[schemars(extend("pattern" = POSITIVE_DURATION_PATTERN))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_age: Option<DurationText>,
    /// Older dead rows are deleted. Default maxAge.
    #[schemars(extend("pattern" = POSITIVE_DURATION_PATTERN))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dead_max_age: Option<DurationText>,
    /// Default 1h.
    #[schemars(extend("pattern" = POSITIVE_DURATION_PATTERN))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cleanup_interval: Option<DurationText>,
    /// Rows per statement. Default 1000.
    #[schemars(range(min = 1, max = 100_000))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub batch_size: Option<u32>,
}

/// How idle workers learn of new rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema, Default)]
pub enum CaptureMode {
    /// By the database where it can, else by polling.
    #[default]
    Auto,
    /// By polling.
    Polling,
}

/// How idle workers are woken.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema, Default)]
#[serde(rename_all = "camelCase")]
pub struct CaptureSpec {
    /// Default Auto.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mode: Option<CaptureMode>,
    /// A direct connection past a pooler. Default: the database's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub connection: Option<CaptureConnectionSpec>,
}

/// A direct connection; what is left out is the database's.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema, Default)]
#[serde(rename_all = "camelCase")]
pub struct CaptureConnectionSpec {
    /// Host.
    #[schemars(length(min = 1, max = 255))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// Port.
    #[schemars(range(min = 1, max = 65535))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
    /// Database.
    #[schemars(length(min = 1, max = 255))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub database: Option<String>,
    /// User.
    #[schemars(length(min = 1, max = 255))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub username: Option<String>,
    /// Password.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub password_from: Option<SecretRef>,
    /// Protection of the connection.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tls: Option<DatabaseTlsSpec>,
}

/// Ports and HTTP behaviour.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema, Default)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = rule(
    "(has(self.port) ? self.port : 8080) != (has(self.managementPort) ? self.managementPort : 9090)",
    "port and managementPort must differ")))]
pub struct HttpSpec {
    /// Port of the inbox routes. Default 8080.
    #[schemars(range(min = 1, max = 65535))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
    /// Port of health, metrics, status and admin. Default 9090.
    #[schemars(range(min = 1, max = 65535))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub management_port: Option<u16>,
    /// So much of a failed answer is kept. Default 2KiB.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_error_body_size: Option<SizeText>,
    /// Refuses private addresses of http destinations, at each connection. Default false.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub block_private_addresses: Option<bool>,
    /// Requests are still accepted for so long while stopping; below drainTimeout. Default 5s, in local runs 0s.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shutdown_delay: Option<DurationText>,
}

/// The admin API.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema, Default)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = rule(
    "!(has(self.enabled) && self.enabled) || has(self.auth) || (has(self.insecure) && self.insecure)",
    "the admin API needs auth, or insecure: true for local tests")))]
pub struct AdminSpec {
    /// Default false.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub enabled: Option<bool>,
    /// Serves it without auth. Default false.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub insecure: Option<bool>,
    /// Who may use it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub auth: Option<InboundAuthSpec>,
    /// Longest time of a tested transform. Default 1s.
    #[schemars(extend("pattern" = POSITIVE_DURATION_PATTERN))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_transform_timeout: Option<DurationText>,
    /// Largest request. Default 64KiB.
    #[schemars(extend("pattern" = POSITIVE_SIZE_PATTERN))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_payload_size: Option<SizeText>,
}

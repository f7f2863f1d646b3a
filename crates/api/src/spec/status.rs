//! What the operator reports (design: resources). Every status begins as `{observedGeneration: -1}`, so that a resource that
//! nobody has looked at yet can be told from one that is fine.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Status of a Source.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema, Default)]
#[serde(rename_all = "camelCase")]
pub struct SourceStatus {
    /// Generation that the status speaks of; -1 = none yet.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// See the documentation of conditions.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub conditions: Option<Vec<Condition>>,
    /// http, rabbitmq, kafka or nats.
    #[serde(rename = "type")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// push or pull.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub consumption: Option<String>,
}

/// Status of a Destination.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema, Default)]
#[serde(rename_all = "camelCase")]
pub struct DestinationStatus {
    /// Generation that the status speaks of; -1 = none yet.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// See the documentation of conditions.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub conditions: Option<Vec<Condition>>,
    /// http, rabbitmq, kafka or nats.
    #[serde(rename = "type")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// Where it sends, without credentials.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<String>,
    /// Relays that use it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub relays: Option<Vec<String>>,
}

/// Status of a Relay.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema, Default)]
#[serde(rename_all = "camelCase")]
pub struct RelayStatus {
    /// Generation that the status speaks of; -1 = none yet.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// See the documentation of conditions.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub conditions: Option<Vec<Condition>>,
    /// postgres, sqlserver, mysql or sqlite.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub database: Option<String>,
    /// Worker pods.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replicas: Option<i32>,
    /// Worker pods that are ready.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ready_replicas: Option<i32>,
    /// Selects the worker pods.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub selector: Option<String>,
    /// Pending rows as text; - when nobody has counted for a while.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pending: Option<String>,
    /// Age of the oldest due row as text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub oldest: Option<String>,
    /// Dead rows as text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dead: Option<String>,
    /// True or False.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub paused: Option<String>,
    /// The numbers behind the texts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backlog: Option<BacklogStatus>,
    /// Content hash of the configuration that the workers run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub config_hash: Option<String>,
}

/// Numbers of the outbox.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema, Default)]
#[serde(rename_all = "camelCase")]
pub struct BacklogStatus {
    /// Pending rows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pending: Option<i64>,
    /// Pending rows that could start now.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub startable: Option<i64>,
    /// Seconds since the oldest due row could start.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub oldest_seconds: Option<i64>,
    /// Dead rows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dead: Option<i64>,
    /// When it was counted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_at: Option<Time>,
}

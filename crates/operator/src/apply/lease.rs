//! Who leads: one Lease, taken, renewed and given back.
//!
//! Invariants:
//! - The gate is open only while the Lease is ours, and closes by itself [`RENEW_WITHIN`] after the last renewal was *sent*, five
//!   seconds before anybody else may take it.
//! - Whether another holder's Lease has ended is judged by how long it has not changed here, never by its own clock.
//! - Losing the Lease is no error: this process stands by and competes again.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::{
    api::coordination::v1::{Lease, LeaseSpec},
    apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta},
};
use kube::{Api, Client, api::PostParams};
use tokio::{sync::watch, time::Instant};
use tokio_util::sync::CancellationToken;

use super::gate::Gate;

/// How long a Lease holds for others.
const DURATION: Duration = Duration::from_secs(15);
/// How long it holds for ourselves, from the sending of a renewal.
const RENEW_WITHIN: Duration = Duration::from_secs(10);
/// Pause between two tries.
const RETRY: Duration = Duration::from_secs(2);
/// Longest wait for one answer.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);

/// What this process competes for.
pub struct Election {
    leases: Api<Lease>,
    name: String,
    identity: String,
    gate: Gate,
    leading: watch::Sender<bool>,
    /// The Lease of somebody else as it was last seen, and since when it has not changed.
    seen: Option<(String, Option<MicroTime>, Instant)>,
}

impl Election {
    /// For the Lease `namespace/name`. `leading` tells who leads; the gate opens and closes with it.
    pub fn new(
        client: Client,
        namespace: &str,
        name: &str,
        identity: &str,
        gate: Gate,
        leading: watch::Sender<bool>,
    ) -> Self {
        Self {
            leases: Api::namespaced(client, namespace),
            name: name.to_owned(),
            identity: identity.to_owned(),
            gate,
            leading,
            seen: None,
        }
    }

    /// Competes until stopped. The Lease is still ours then, if it was: [`give_back`](Self::give_back) ends it.
    pub async fn run(&mut self, stop: CancellationToken) {
        loop {
            self.compete().await;
            self.tell(self.gate.is_open());
            // Stepping down is told as soon as the gate closes by itself.
            let pause = match self.gate.left() {
                left if left.is_zero() => RETRY,
                left => RETRY.min(left),
            };
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = stop.cancelled() => return,
            }
        }
    }

    fn tell(&self, leads: bool) {
        self.leading.send_if_modified(|known| {
            let changed = *known != leads;
            if changed && leads {
                tracing::info!(identity = self.identity, "This operator leads.");
            } else if changed {
                tracing::warn!(
                    identity = self.identity,
                    "The Lease could not be renewed in time: this operator stands by."
                );
            }
            *known = leads;
            changed
        });
    }

    /// One try to take or renew.
    async fn compete(&mut self) {
        let sent = Instant::now();
        // A leader that waits for an answer steps down in time all the same.
        let wait = match self.gate.left() {
            left if left.is_zero() => ANSWER_WITHIN,
            left => left.min(ANSWER_WITHIN),
        };
        match tokio::time::timeout(wait, self.take_or_renew()).await {
            Ok(Ok(true)) => self.gate.open_until(sent + RENEW_WITHIN),
            Ok(Ok(false)) => self.gate.close(),
            Ok(Err(error)) => tracing::debug!(%error, "The Lease could not be had."),
            Err(_) => tracing::debug!("The API server did not answer for the Lease."),
        }
    }

    /// Whether the Lease is ours now.
    async fn take_or_renew(&mut self) -> Result<bool, kube::Error> {
        let Some(lease) = self.leases.get_opt(&self.name).await? else {
            let lease = Lease {
                metadata: ObjectMeta { name: Some(self.name.clone()), ..ObjectMeta::default() },
                spec: Some(self.spec(None, true)),
            };
            return match self.leases.create(&PostParams::default(), &lease).await {
                Ok(_) => Ok(true),
                Err(error) if is_conflict(&error) => Ok(false),
                Err(error) => Err(error),
            };
        };
        let spec = lease.spec.clone().unwrap_or_default();
        let holder = spec.holder_identity.clone().unwrap_or_default();
        let is_ours = holder == self.identity;
        if !is_ours && !holder.is_empty() && !self.has_ended(&holder, &spec) {
            return Ok(false);
        }
        // The version of the object makes this a compare-and-set.
        let lease = Lease { spec: Some(self.spec(Some(&spec), !is_ours)), ..lease };
        match self.leases.replace(&self.name, &PostParams::default(), &lease).await {
            Ok(_) => Ok(true),
            Err(error) if is_conflict(&error) => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn has_ended(&mut self, holder: &str, spec: &LeaseSpec) -> bool {
        let duration =
            spec.lease_duration_seconds.and_then(|it| u64::try_from(it).ok()).map_or(DURATION, Duration::from_secs);
        match &self.seen {
            Some((known, renewed, since)) if known == holder && *renewed == spec.renew_time => {
                since.elapsed() > duration
            }
            _ => {
                self.seen = Some((holder.to_owned(), spec.renew_time.clone(), Instant::now()));
                false
            }
        }
    }

    fn spec(&self, before: Option<&LeaseSpec>, taken: bool) -> LeaseSpec {
        let now = MicroTime(Timestamp::now());
        let transitions = before.and_then(|it| it.lease_transitions).unwrap_or(0);
        let acquired = before.and_then(|it| it.acquire_time.clone()).filter(|_| !taken);
        LeaseSpec {
            holder_identity: Some(self.identity.clone()),
            lease_duration_seconds: i32::try_from(DURATION.as_secs()).ok(),
            acquire_time: acquired.or_else(|| Some(now.clone())),
            renew_time: Some(now),
            lease_transitions: Some(transitions + i32::from(taken && before.is_some())),
            ..before.cloned().unwrap_or_default()
        }
    }

    /// Lets the next one lead at once. Nothing is written after this.
    pub async fn give_back(&self) {
        let was_ours = self.gate.is_open();
        self.gate.close();
        self.tell_quietly();
        if !was_ours {
            return;
        }
        let given = async {
            let lease = self.leases.get(&self.name).await?;
            let spec = lease.spec.clone().unwrap_or_default();
            if spec.holder_identity.as_deref() != Some(self.identity.as_str()) {
                return Ok(());
            }
            let spec = LeaseSpec { holder_identity: Some(String::new()), lease_duration_seconds: Some(1), ..spec };
            self.leases
                .replace(&self.name, &PostParams::default(), &Lease { spec: Some(spec), ..lease })
                .await
                .map(drop)
        };
        match tokio::time::timeout(ANSWER_WITHIN, given).await {
            Ok(Ok(())) => tracing::info!("The Lease is given back."),
            Ok(Err(error)) => tracing::warn!(%error, "The Lease could not be given back; it ends by itself."),
            Err(_) => tracing::warn!("The Lease could not be given back in time; it ends by itself."),
        }
    }

    fn tell_quietly(&self) {
        self.leading.send_replace(false);
    }
}

fn is_conflict(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == 409)
}

//! What every destination must do against its real peer (laws in `queuebox_core::ports::destination`, contract 7.4, 7.5).
//!
//! Invariants of the suite: a test sees the peer only through the destination and through [`DestinationHarness`]; it owns
//! the broker object that it sends to; it waits for events, never for a time, and its bounds only guard against hanging.
//!
//! A backend implements [`DestinationHarness`] in its `tests/it` and expands [`destination_tests!`](crate::destination_tests).

use std::{
    collections::{HashMap, HashSet},
    fmt::Debug,
    future::Future,
    sync::Arc,
    time::Duration,
};

use async_trait::async_trait;
use bytes::Bytes;
use futures::{StreamExt, future::join_all, stream::FuturesUnordered};
use queuebox_core::{
    Class, Fault, Uuid,
    ports::{Delivery, Destination},
};

/// The time-out that the harness gives its destinations: short, so that cases with a silent peer end soon.
pub const TIMEOUT: Duration = Duration::from_secs(4);

/// A wait that ends here has hung.
pub const HANG: Duration = Duration::from_secs(60);

/// A secret that must never be seen.
pub const CANARY: &str = "canary-7731";

/// What happens between the destination and its peer, usually through a proxy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trouble {
    /// Nothing: open connections work, new ones are taken.
    None,
    /// Open connections are reset once; new ones are taken.
    Cut,
    /// Open connections are reset and new ones refused.
    Away,
    /// Nothing passes and nothing is closed, on old and new connections.
    Silent,
    /// The peer gets everything and acts, and its answers do not come back.
    Deaf,
}

/// Which destination to make.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Which {
    /// One that works.
    Working,
    /// One whose manifest names a broker object that does not exist.
    MissingObject,
    /// One whose login is refused; its password, token or the like is [`CANARY`].
    WrongSecret,
}

/// A message as the peer has it.
#[derive(Debug, Clone, Default)]
pub struct Arrived {
    /// `X-Message-Id`: the header, or the property that stands for it.
    pub id: Option<Uuid>,
    /// Record key, routing key or `X-Message-Key`, if the protocol has one.
    pub key: Option<String>,
    /// The body.
    pub body: Vec<u8>,
    /// Headers, and properties that stand for one, names in lower case.
    pub headers: HashMap<String, String>,
}

/// What a backend can do. Tests that need more return at once.
#[derive(Debug, Clone, Copy)]
pub struct Capabilities {
    /// It has connections that it can tell to be down (every broker; not HTTP).
    pub connects: bool,
    /// A body of so many bytes is too large for the peer; small ones are not.
    pub too_large: Option<usize>,
    /// It can be asked for [`Which::MissingObject`].
    pub objects: bool,
    /// It can be asked for [`Which::WrongSecret`].
    pub logins: bool,
}

/// One broker object of one test, with a way to disturb the connection to it.
#[async_trait]
pub trait DestinationHarness: Sized + Send + Sync + 'static {
    /// Makes the object and a way to it.
    async fn start() -> Self;

    /// A new destination, with [`TIMEOUT`], that sends every message to the object of this harness.
    async fn destination(&self, which: Which) -> Arc<dyn Destination>;

    /// Everything that has arrived so far, oldest first, read past the trouble.
    async fn arrived(&self) -> Vec<Arrived>;

    /// Makes trouble, or ends it.
    async fn trouble(&self, trouble: Trouble);

    /// What the backend can do.
    fn capabilities(&self) -> Capabilities;
}

/// Expands the whole suite into tests for one harness type.
///
/// ```ignore
/// mod destination_contract { queuebox_conformance::destination_tests!(super::KafkaHarness); }
/// ```
#[macro_export]
macro_rules! destination_tests {
    ($harness:ty) => {
        $crate::destination_tests!(@each $harness;
            done_means_the_peer_has_it
            standard_headers_win
            every_call_has_its_own_outcome
            a_message_that_is_too_large_fails_alone
            not_connected_means_not_offered
            an_answer_that_stays_out_is_ambiguous
            a_silent_peer_ends_within_the_time_left
            a_cut_connection_is_accounted_for
            publishing_goes_on_after_the_peer_is_back
            calls_that_are_dropped_leave_nothing_behind
            a_missing_object_is_named
            a_refused_login_shows_no_secret
            closing_waits_for_what_is_in_flight
        );
    };
    (@each $harness:ty; $($name:ident)*) => {
        $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                $crate::destination::$name::<$harness>().await;
            }
        )*
    };
}

/// A message number `n` of this suite. Its key is its own, so that any number may be in flight.
pub fn delivery(n: usize) -> Delivery {
    Delivery {
        id: Uuid::new_v4(),
        topic: "order.created".into(),
        key: Some(format!("key-{n}")),
        aggregate_type: Some("order".into()),
        payload: Bytes::from(format!(r#"{{"n":{n}}}"#)),
        headers: vec![("x-tenant".into(), "a".into())],
        attempt: 0,
        routing_key: None,
        time_left: Duration::from_secs(30),
    }
}

/// Awaits `future`, which must end by itself.
pub async fn bounded<T>(what: &str, future: impl Future<Output = T>) -> T {
    tokio::time::timeout(HANG, future).await.unwrap_or_else(|_| panic!("hangs: {what}"))
}

/// Looks until `look` gives a value.
pub async fn until<T, F: Future<Output = Option<T>>>(what: &str, mut look: impl FnMut() -> F) -> T {
    bounded(what, async {
        loop {
            if let Some(value) = look().await {
                return value;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    })
    .await
}

async fn ids<H: DestinationHarness>(harness: &H) -> HashSet<Uuid> {
    harness.arrived().await.into_iter().filter_map(|arrived| arrived.id).collect()
}

async fn publish_all(destination: &Arc<dyn Destination>, deliveries: &[Delivery]) -> Vec<Result<(), Fault>> {
    bounded("publishes", join_all(deliveries.iter().map(|delivery| destination.publish(delivery.clone())))).await
}

/// Publishes until it works: the engine does the same, with pauses.
async fn publish_at_last(destination: &Arc<dyn Destination>) -> Uuid {
    until("a publish that works", || async {
        if destination.probe().await.is_err() {
            return None;
        }
        let message = delivery(0);
        let id = message.id;
        destination.publish(message).await.ok().map(|()| id)
    })
    .await
}

fn assert_class(outcome: &Result<(), Fault>, classes: &[Class], what: impl Debug) {
    match outcome {
        Ok(()) => panic!("must fail: {what:?}"),
        Err(fault) => assert!(classes.contains(&fault.class), "{what:?}: {:?} {}", fault.class, fault.detail),
    }
}

/// Contract 7.5: `Ok` only after the peer took responsibility; body and key as given.
pub async fn done_means_the_peer_has_it<H: DestinationHarness>() {
    let harness = H::start().await;
    let destination = harness.destination(Which::Working).await;
    bounded("probe", destination.probe()).await.unwrap();
    let deliveries: Vec<Delivery> = (0..50).map(delivery).collect();
    for outcome in publish_all(&destination, &deliveries).await {
        outcome.unwrap();
    }
    let arrived: HashMap<Uuid, Arrived> =
        harness.arrived().await.into_iter().filter_map(|arrived| Some((arrived.id?, arrived))).collect();
    for sent in &deliveries {
        let got = arrived.get(&sent.id).expect("acknowledged and not there");
        assert_eq!(got.body, sent.payload);
    }
}

/// Contract 7.4: `x-topic`, `x-attempt` and the id are ours, whatever the row says; other headers are sent on.
pub async fn standard_headers_win<H: DestinationHarness>() {
    let harness = H::start().await;
    let destination = harness.destination(Which::Working).await;
    let mut message = delivery(1);
    message.attempt = 3;
    message.headers = [
        ("X-TOPIC", "forged"),
        ("x-Attempt", "99"),
        ("X-Message-ID", "forged"),
        ("x-tenant", "b"),
        ("Host", "h"),
        ("Keep-Alive", "5"),
    ]
    .map(|(name, value)| (name.to_owned(), value.to_owned()))
    .to_vec();
    bounded("publish", destination.publish(message.clone())).await.unwrap();
    let arrived = harness.arrived().await;
    let got = arrived.iter().find(|arrived| arrived.id == Some(message.id)).expect("it arrived under its own id");
    assert_eq!(got.headers.get("x-topic").map(String::as_str), Some("order.created"));
    assert_eq!(got.headers.get("x-attempt").map(String::as_str), Some("3"));
    assert_eq!(got.headers.get("x-tenant").map(String::as_str), Some("b"));
    assert_ne!(got.headers.get("host").map(String::as_str), Some("h"));
    assert_ne!(got.headers.get("keep-alive").map(String::as_str), Some("5"));
}

/// Many at a time, each answered for itself.
pub async fn every_call_has_its_own_outcome<H: DestinationHarness>() {
    let harness = H::start().await;
    let destination = harness.destination(Which::Working).await;
    let Some(size) = harness.capabilities().too_large else { return };
    let mut deliveries: Vec<Delivery> = (0..200).map(delivery).collect();
    for large in deliveries.iter_mut().step_by(40) {
        large.payload = Bytes::from(format!("\"{}\"", "x".repeat(size)));
    }
    let outcomes = publish_all(&destination, &deliveries).await;
    let there = ids(&harness).await;
    for (n, (sent, outcome)) in deliveries.iter().zip(&outcomes).enumerate() {
        if n % 40 == 0 {
            assert_class(outcome, &[Class::Refused], n);
        } else {
            assert!(outcome.is_ok(), "{n}: {outcome:?}");
        }
        assert_eq!(there.contains(&sent.id), outcome.is_ok(), "{n}");
    }
}

/// Contract 7.5: refused with its size; the connection and the others are kept.
pub async fn a_message_that_is_too_large_fails_alone<H: DestinationHarness>() {
    let harness = H::start().await;
    let destination = harness.destination(Which::Working).await;
    let Some(size) = harness.capabilities().too_large else { return };
    let mut large = delivery(2);
    large.payload = Bytes::from(format!("\"{}\"", "x".repeat(size)));
    let fault = bounded("publish", destination.publish(large)).await.expect_err("too large");
    assert_eq!(fault.class, Class::Refused, "{fault}");
    assert!(fault.detail.chars().any(|c| c.is_ascii_digit()), "sizes are named: {fault}");
    bounded("the next one", destination.publish(delivery(3))).await.unwrap();
}

/// Contract 7.5: a broker that cannot be reached costs no attempt, because nothing was offered.
pub async fn not_connected_means_not_offered<H: DestinationHarness>() {
    let harness = H::start().await;
    if !harness.capabilities().connects {
        return;
    }
    harness.trouble(Trouble::Away).await;
    let destination = harness.destination(Which::Working).await;
    let fault = bounded("probe", destination.probe()).await.expect_err("nobody is there");
    assert_eq!(fault.class, Class::NotConnected, "{fault}");
    let deliveries: Vec<Delivery> = (0..20).map(delivery).collect();
    for outcome in publish_all(&destination, &deliveries).await {
        assert_class(&outcome, &[Class::NotConnected], "nobody is there");
    }
    harness.trouble(Trouble::None).await;
    publish_at_last(&destination).await;
    let there = ids(&harness).await;
    assert!(deliveries.iter().all(|sent| !there.contains(&sent.id)), "not connected, and yet it arrived");
}

/// Contract 7.5: what may have arrived is ambiguous, never anything milder.
pub async fn an_answer_that_stays_out_is_ambiguous<H: DestinationHarness>() {
    let harness = H::start().await;
    let destination = harness.destination(Which::Working).await;
    bounded("first", destination.publish(delivery(0))).await.unwrap();
    harness.trouble(Trouble::Deaf).await;
    let deliveries: Vec<Delivery> = (0..10).map(delivery).collect();
    let outcomes = publish_all(&destination, &deliveries).await;
    for outcome in &outcomes {
        assert_class(outcome, &[Class::Ambiguous, Class::NotConnected], "no answer");
    }
    assert!(
        outcomes.iter().flat_map(|outcome| outcome.as_ref().err()).any(|fault| fault.class == Class::Ambiguous),
        "{outcomes:?}"
    );
    harness.trouble(Trouble::None).await;
    publish_at_last(&destination).await;
    let there = ids(&harness).await;
    for (sent, outcome) in deliveries.iter().zip(outcomes) {
        let class = outcome.expect_err("checked above").class;
        assert!(class != Class::NotConnected || !there.contains(&sent.id), "not connected, and yet it arrived");
    }
}

/// Whatever the peer does, a call ends within the time-out and the time left.
pub async fn a_silent_peer_ends_within_the_time_left<H: DestinationHarness>() {
    let harness = H::start().await;
    let destination = harness.destination(Which::Working).await;
    bounded("first", destination.publish(delivery(0))).await.unwrap();
    harness.trouble(Trouble::Silent).await;
    let mut short = delivery(1);
    short.time_left = Duration::from_millis(500);
    // Ten times the bound is a hang, not a slow machine.
    let outcome =
        tokio::time::timeout(Duration::from_secs(5), destination.publish(short)).await.expect("it outlives the lease");
    assert_class(&outcome, &[Class::Ambiguous, Class::NotConnected, Class::Transient], "silent");
    let outcome =
        tokio::time::timeout(TIMEOUT * 4, destination.publish(delivery(2))).await.expect("it outlives its time-out");
    assert_class(&outcome, &[Class::Ambiguous, Class::NotConnected, Class::Transient], "silent");
    let fresh = harness.destination(Which::Working).await;
    let outcome =
        tokio::time::timeout(TIMEOUT * 4, fresh.publish(delivery(3))).await.expect("connecting outlives the time-out");
    assert_class(&outcome, &[Class::NotConnected, Class::Transient, Class::Ambiguous], "silent from the start");
    harness.trouble(Trouble::None).await;
    publish_at_last(&destination).await;
}

/// Under load a connection is cut: what was done is there, what was not offered is not.
pub async fn a_cut_connection_is_accounted_for<H: DestinationHarness>() {
    let harness = H::start().await;
    let destination = harness.destination(Which::Working).await;
    bounded("first", destination.publish(delivery(0))).await.unwrap();
    let mut running = FuturesUnordered::new();
    let (mut outcomes, mut sent) = (Vec::new(), 0);
    while outcomes.len() < 600 {
        while sent < 600 && running.len() < 64 {
            let message = delivery(sent);
            let id = message.id;
            let destination = destination.clone();
            running.push(async move { (id, destination.publish(message).await) });
            sent += 1;
        }
        outcomes.push(bounded("a publish", running.next()).await.expect("something runs"));
        if [100, 250, 400].contains(&outcomes.len()) {
            harness.trouble(Trouble::Cut).await;
        }
    }
    publish_at_last(&destination).await;
    let there = ids(&harness).await;
    for (id, outcome) in outcomes {
        match outcome {
            Ok(()) => assert!(there.contains(&id), "acknowledged and not there"),
            Err(fault) if fault.class == Class::NotConnected => {
                assert!(!there.contains(&id), "not connected, and yet it arrived")
            }
            // A receiver over HTTP that could not be connected to is transient.
            Err(fault) => {
                assert!(matches!(fault.class, Class::Ambiguous | Class::Transient), "{:?} {fault}", fault.class)
            }
        }
    }
}

/// The same destination works again once its peer is back.
pub async fn publishing_goes_on_after_the_peer_is_back<H: DestinationHarness>() {
    let harness = H::start().await;
    let destination = harness.destination(Which::Working).await;
    bounded("first", destination.publish(delivery(0))).await.unwrap();
    for trouble in [Trouble::Cut, Trouble::Away, Trouble::Silent] {
        harness.trouble(trouble).await;
        let _ = bounded("during trouble", destination.publish(delivery(1))).await;
        harness.trouble(Trouble::None).await;
        let id = publish_at_last(&destination).await;
        assert!(ids(&harness).await.contains(&id));
    }
}

/// Dropping a call gives up waiting, nothing more.
pub async fn calls_that_are_dropped_leave_nothing_behind<H: DestinationHarness>() {
    let harness = H::start().await;
    let destination = harness.destination(Which::Working).await;
    bounded("first", destination.publish(delivery(0))).await.unwrap();
    for round in 0..20 {
        let calls: Vec<_> = (0..50).map(|n| destination.publish(delivery(round * 50 + n))).collect();
        let dropped = tokio::time::timeout(Duration::from_millis(1), join_all(calls)).await;
        drop(dropped);
    }
    let deliveries: Vec<Delivery> = (0..50).map(delivery).collect();
    for outcome in publish_all(&destination, &deliveries).await {
        outcome.unwrap();
    }
    bounded("close", destination.close()).await;
}

/// Contract 7.5: a declared object that is not there holds the rows, and its name is told.
pub async fn a_missing_object_is_named<H: DestinationHarness>() {
    let harness = H::start().await;
    if !harness.capabilities().objects {
        return;
    }
    let destination = harness.destination(Which::MissingObject).await;
    let fault = bounded("probe", destination.probe()).await.expect_err("it is missing");
    assert_eq!(fault.class, Class::NotConnected, "{fault}");
    let outcome = bounded("publish", destination.publish(delivery(0))).await;
    assert_class(&outcome, &[Class::NotConnected], "it is missing");
}

/// Contract 10.3: no secret in a fault's text, and the login that is refused holds the rows.
pub async fn a_refused_login_shows_no_secret<H: DestinationHarness>() {
    let harness = H::start().await;
    if !harness.capabilities().logins {
        return;
    }
    let destination = harness.destination(Which::WrongSecret).await;
    for outcome in
        [bounded("probe", destination.probe()).await, bounded("publish", destination.publish(delivery(0))).await]
    {
        let fault = outcome.expect_err("the login is wrong");
        assert!(!fault.detail.contains(CANARY), "the secret is shown");
        if harness.capabilities().connects {
            assert_eq!(fault.class, Class::NotConnected, "{fault}");
        }
    }
}

/// Publishes in flight end before a close does, each with its outcome.
pub async fn closing_waits_for_what_is_in_flight<H: DestinationHarness>() {
    let harness = H::start().await;
    let destination = harness.destination(Which::Working).await;
    bounded("first", destination.publish(delivery(0))).await.unwrap();
    let deliveries: Vec<Delivery> = (0..100).map(delivery).collect();
    let publishing = {
        let (destination, deliveries) = (destination.clone(), deliveries.clone());
        tokio::spawn(async move { publish_all(&destination, &deliveries).await })
    };
    tokio::task::yield_now().await;
    bounded("close", destination.close()).await;
    let outcomes = bounded("outcomes", publishing).await.expect("no panic");
    let there = ids(&harness).await;
    for (sent, outcome) in deliveries.iter().zip(outcomes) {
        assert!(outcome.is_err() || there.contains(&sent.id), "acknowledged and not there");
    }
}

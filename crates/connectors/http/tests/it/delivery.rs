//! HTTP as a destination.

use queuebox_core::Class;

use crate::peer::{Receiver, answer, delivery, destination, publish};
use queuebox_core::ports::Destination;

/// conformance 42, as far as the connector goes
#[tokio::test]
async fn http_delivery() {
    let receiver = Receiver::start(vec![answer(200, &[], "thanks")]).await;
    let destination = destination(&receiver.url(), |_| {});
    let sent = delivery();
    destination.publish(sent.clone()).await.unwrap();
    let [request] = receiver.seen().try_into().unwrap();
    assert_eq!(request.line, "POST /hook HTTP/1.1");
    assert_eq!(request.body, sent.payload);
    assert_eq!(request.header("Host"), Some(receiver.address.to_string().as_str()));
    assert_eq!(request.header("Content-Type"), Some("application/json"));
    assert_eq!(request.header("X-Message-Id"), Some(sent.id.to_string().as_str()));
    assert_eq!(request.header("X-Topic"), Some("order.created"));
    assert_eq!(request.header("X-Attempt"), Some("0"));
    assert_eq!(request.header("X-Message-Key"), Some("o-1"));
}

#[tokio::test]
async fn connections_are_kept() {
    let receiver =
        Receiver::start(vec![answer(200, &[], "thanks"), answer(500, &[], "no"), answer(204, &[], "")]).await;
    let destination = destination(&receiver.url(), |_| {});
    publish(&destination).await.unwrap();
    publish(&destination).await.unwrap_err();
    publish(&destination).await.unwrap();
    assert_eq!((receiver.seen().len(), receiver.connections()), (3, 1));
}

/// conformance 49: the connector's half
#[tokio::test]
async fn at_least_once_after_500() {
    let receiver = Receiver::start(vec![answer(500, &[], "boom"), answer(200, &[], "")]).await;
    let destination = destination(&receiver.url(), |_| {});
    let mut message = delivery();
    let fault = destination.publish(message.clone()).await.unwrap_err();
    assert_eq!((fault.class, fault.code.as_ref(), fault.trips_breaker), (Class::Transient, "http_500", true));
    assert_eq!(fault.detail, "HTTP 500 Internal Server Error: boom");
    message.attempt += 1;
    destination.publish(message.clone()).await.unwrap();
    let seen = receiver.seen();
    assert_eq!(seen.len(), 2);
    for (attempt, request) in seen.iter().enumerate() {
        assert_eq!(request.header("X-Attempt"), Some(attempt.to_string().as_str()));
        assert_eq!(request.header("X-Message-Id"), Some(message.id.to_string().as_str()));
    }
}

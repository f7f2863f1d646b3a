//! HTTP as a source.

use queuebox_http::{DataPortConfig, HttpSource};

use crate::peer::{Memory, Port};

#[tokio::test]
async fn webhook_reaches_the_intake() {
    let intake = Memory::storing();
    let source = HttpSource::new("orders", "/orders");
    let port = Port::start(DataPortConfig::default(), source, intake.clone()).await;
    let reply = port.post(&[("X-Correlation-Id", "c-1"), ("X-Event", "a")], r#"{"id":1}"#).await;
    assert_eq!((reply.status, reply.body.as_str()), (202, r#"{"messageId":"00000000-0000-0000-0000-000000000000"}"#));
    assert_eq!(reply.header("X-Correlation-Id"), Some("c-1"));
    let received = intake.last();
    assert_eq!(received.body, r#"{"id":1}"#);
    assert_eq!(received.correlation_id.as_deref(), Some("c-1"));
}

#[tokio::test]
async fn the_root_answers_and_nothing_else_does() {
    let port = Port::start(DataPortConfig::default(), HttpSource::new("orders", "/orders"), Memory::storing()).await;
    let root = port.send("GET / HTTP/1.1\r\nHost: x\r\n\r\n").await;
    assert_eq!((root.status, root.body.as_str()), (200, "QueueBox is running!"));
    for (method, path) in [("GET", "/inbox/orders"), ("POST", "/inbox/other"), ("POST", "/orders"), ("GET", "/metrics")]
    {
        let reply = port.send(format!("{method} {path} HTTP/1.1\r\nHost: x\r\n\r\n")).await;
        assert_eq!((reply.status, reply.body.as_str()), (404, ""), "{method} {path}");
    }
}

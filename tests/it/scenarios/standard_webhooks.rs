//! Standard Webhooks in: `webhook-id` is the idempotency key, `webhook-timestamp` the publish time, and the signature is a secret.

use base64::{Engine, engine::general_purpose::STANDARD};
use hmac::{KeyInit, Mac};
use serde_json::json;

use crate::support::{Kind, PATIENCE, Worker, World, text};

mod webhook_key_header_wins {
    use super::*;

    const KEY: &[u8] = b"24 bytes of a shared key";

    async fn post(worker: &Worker, id: &str, body: &str) -> crate::support::Answered {
        let at = jiff::Timestamp::now().as_second().to_string();
        let mut mac = hmac::Hmac::<sha2::Sha256>::new_from_slice(KEY).unwrap();
        mac.update(format!("{id}.{at}.{body}").as_bytes());
        let signature = format!("v1,{}", STANDARD.encode(mac.finalize().into_bytes()));
        let headers = [("webhook-id", id), ("webhook-timestamp", &at), ("webhook-signature", &signature)];
        worker.post_with("hooks", &headers, body).await
    }

    #[tokio::test]
    async fn with_the_id_of_standard_webhooks() {
        let auth = json!({ "standardWebhooks": { "secretFrom": { "env": "WEBHOOK_SECRET" } } });
        let http = json!({ "path": "/hooks", "idempotencyKeyHeader": "webhook-id", "auth": auth });
        let world = World::on(Kind::Sqlite)
            .await
            .env("WEBHOOK_SECRET", &format!("whsec_{}", STANDARD.encode(KEY)))
            .source("hooks", json!({ "idempotencyKeyPath": null, "http": http }));
        let worker = world.start().await;
        post(&worker, "msg_1", r#"{"n":1}"#).await.accepted();
        assert_eq!(post(&worker, "msg_1", r#"{"n":1}"#).await.status, 200, "the sender's repeat");
        post(&worker, "msg_2", r#"{"n":1}"#).await.accepted();
        let requests = world.receiver.wait_for(2, PATIENCE).await;
        let rows = world.db.rows("SELECT * FROM inbox ORDER BY idempotency_key").await;
        let keys: Vec<&str> = rows.iter().map(|row| text(row, "idempotency_key")).collect();
        assert_eq!(keys, ["msg_1", "msg_2"]);
        assert_eq!(rows[0]["headers"]["webhook-id"], "msg_1");
        assert!(rows[0]["headers"].get("webhook-signature").is_none(), "{:#}", rows[0]);
        assert!(requests.iter().all(|request| request.header("webhook-signature").is_empty()));
        world.finish().await;
    }

    #[tokio::test]
    async fn and_its_signature_is_no_key() {
        let auth = json!({ "standardWebhooks": { "secretFrom": { "env": "WEBHOOK_SECRET" } } });
        let http = json!({ "path": "/hooks", "idempotencyKeyHeader": "Webhook-Signature", "auth": auth });
        let world = World::on(Kind::Sqlite).await.source("hooks", json!({ "http": http }));
        let folder = world.write_manifests(1, 2);
        let (status, out, log) = world.program(&["check", "-f", folder.to_str().unwrap()]).run(PATIENCE).await;
        assert!(!status.success() && format!("{out}{log}").contains("spec.http.idempotencyKeyHeader"), "{out}{log}");
    }
}

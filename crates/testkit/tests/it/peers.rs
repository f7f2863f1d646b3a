use std::time::Duration;

use queuebox_testkit as testkit;

#[tokio::test]
async fn postgres_gives_each_test_a_database() {
    let postgres = testkit::postgres().await;
    let (one, two) = (postgres.fresh_database_name().await, postgres.fresh_database_name().await);
    postgres.psql(&one, "CREATE TABLE t (n int); INSERT INTO t VALUES (7)").await;
    assert_eq!(postgres.psql(&one, "SELECT n FROM t").await, "7");
    let error = postgres.try_psql(&two, "SELECT n FROM t").await.unwrap_err();
    assert!(format!("{error:#}").contains("does not exist"), "{error:#}");
}

#[tokio::test]
async fn private_postgres_survives_kill_and_stop() {
    let postgres = testkit::private_postgres().await;
    let database = postgres.fresh_database_name().await;
    postgres.psql(&database, "CREATE TABLE t (n int); INSERT INTO t VALUES (7)").await;
    postgres.kill9().await;
    assert!(postgres.try_psql(&database, "SELECT 1").await.is_err());
    postgres.start().await;
    assert_eq!(postgres.psql(&database, "SELECT n FROM t").await, "7");
    postgres.stop().await;
    postgres.start().await;
    assert_eq!(postgres.psql(&database, "SELECT n FROM t").await, "7");
}

#[tokio::test]
async fn private_postgres_speaks_tls() {
    let authority = testkit::Authority::new();
    let identity = authority.server();
    let (cert, key) = (identity.cert.to_str().unwrap(), identity.key.to_str().unwrap());
    let postgres = testkit::private_postgres_with(&[
        ("ssl", "on"),
        ("ssl_cert_file", cert),
        ("ssl_key_file", key),
        ("pg_hba", "hostssl all all 127.0.0.1/32 scram-sha-256\n"),
    ])
    .await;
    assert_eq!(postgres.psql("postgres", "SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()").await, "t");
}

#[tokio::test]
async fn pgbouncer_passes_databases_on() {
    let postgres = testkit::postgres().await;
    let database = postgres.fresh_database_name().await;
    let pooler = testkit::pgbouncer(&postgres, testkit::PoolMode::Transaction).await;
    let url = pooler.url_of(&database);
    let output = std::process::Command::new("psql").args([&url, "-Atc", "SELECT current_database()"]).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), database, "{output:?}");
}

#[tokio::test]
async fn nats_has_jetstream() {
    let nats = testkit::nats().await;
    let jetstream = format!("http://127.0.0.1:{}/jsz", nats.monitor_port());
    let page: serde_json::Value = reqwest::get(jetstream).await.unwrap().json().await.unwrap();
    assert!(page["config"]["store_dir"].is_string(), "{page}");
    let private = testkit::private_nats().await;
    assert_ne!(private.port(), nats.port());
    private.kill9().await;
    private.start().await;
}

#[tokio::test]
async fn rabbitmq_gives_each_test_a_virtual_host() {
    let rabbitmq = testkit::rabbitmq().await;
    let vhost = rabbitmq.fresh_vhost_name().await;
    rabbitmq.api("PUT", &format!("/queues/{vhost}/q"), Some(serde_json::json!({"durable": true}))).await;
    let queues = rabbitmq.api("GET", &format!("/queues/{vhost}"), None).await;
    assert_eq!(queues.as_array().unwrap().len(), 1, "{queues}");
}

#[tokio::test]
async fn private_rabbitmq_restarts_with_its_data() {
    let rabbitmq = testkit::private_rabbitmq().await;
    let vhost = rabbitmq.fresh_vhost_name().await;
    rabbitmq.api("PUT", &format!("/queues/{vhost}/q"), Some(serde_json::json!({"durable": true}))).await;
    rabbitmq.kill9().await;
    rabbitmq.start().await;
    testkit::eventually("the queue is back", Duration::from_secs(20), || async {
        rabbitmq.try_api("GET", &format!("/queues/{vhost}/q"), None).await.ok()
    })
    .await;
}

#[tokio::test]
async fn kafka_makes_topics() {
    let kafka = testkit::kafka().await;
    let topic = format!("{}orders", kafka.prefix());
    kafka.create_topic(&topic, 3).await;
    let text = kafka.tool("org.apache.kafka.tools.TopicCommand", &["--describe", "--topic", &topic]).await;
    assert!(text.contains("PartitionCount: 3"), "{text}");
}

/// Needs the components of Kubernetes: `./dev test cluster`.
mod cluster {
    use super::*;

    #[tokio::test]
    async fn kubernetes_gives_each_test_a_namespace() {
        let kubernetes = testkit::kubernetes().await;
        let namespace = kubernetes.fresh_namespace().await;
        let path = format!("/api/v1/namespaces/{namespace}/configmaps/c");
        let body =
            serde_json::json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}, "data": {"a": "b"}});
        kubernetes.api("PATCH", &path, Some(body)).await;
        assert_eq!(kubernetes.api("GET", &path, None).await["data"]["a"], "b");
        testkit::eventually("the namespace has its account", Duration::from_secs(20), || async {
            let path = format!("/api/v1/namespaces/{namespace}/serviceaccounts/default");
            kubernetes.try_api("GET", &path, None).await.ok()
        })
        .await;
        let config = std::fs::read_to_string(kubernetes.kubeconfig_for(&namespace, "default").await).unwrap();
        assert!(config.contains("token"));
    }
}

//! Section Q: the kit. Its peers by themselves are tested beside it.

use queuebox_testkit::{self as testkit, Recorder};

use crate::support::{Db, Kind};

mod peers_are_isolated {
    use super::*;

    #[tokio::test]
    async fn own_ports_and_folders() {
        testkit::init();
        let (shared, first, second) =
            (testkit::postgres().await, testkit::private_postgres().await, testkit::private_postgres().await);
        let (nats, rabbitmq, kafka) = (testkit::nats().await, testkit::rabbitmq().await, testkit::kafka().await);
        let (one, two) = (Recorder::start().await, Recorder::start().await);
        let mut ports = vec![shared.port(), first.port(), second.port(), nats.port(), rabbitmq.port(), kafka.port()];
        ports.extend([one.port(), two.port()]);
        ports.sort_unstable();
        ports.dedup();
        assert_eq!(ports.len(), 8, "two peers share a port: {ports:?}");
        let folder = first.folder().to_owned();
        assert!(folder.exists());
        drop(first);
        testkit::eventually("the folder of a server goes with it", std::time::Duration::from_secs(60), || async {
            (!folder.exists()).then_some(())
        })
        .await;
        assert_eq!(second.psql("postgres", "SELECT 1").await, "1");
    }

    #[tokio::test]
    async fn nothing_of_others_is_seen() {
        testkit::init();
        let rabbitmq = testkit::rabbitmq().await;
        let (one, two) = (rabbitmq.fresh_vhost_name().await, rabbitmq.fresh_vhost_name().await);
        rabbitmq.api("PUT", &format!("/queues/{one}/q"), Some(serde_json::json!({ "durable": true }))).await;
        assert_eq!(rabbitmq.api("GET", &format!("/queues/{two}"), None).await, serde_json::json!([]));
        let (one, two) = (testkit::nats().await, testkit::kafka().await);
        assert_ne!(one.prefix(), testkit::nats().await.prefix());
        assert_ne!(two.prefix(), testkit::kafka().await.prefix());
        let (recorder, other) = (Recorder::start().await, Recorder::start().await);
        reqwest::get(recorder.url()).await.unwrap();
        assert_eq!((recorder.count(), other.count()), (1, 0));
    }

    /// A test that ends its pool, or has all its connections cut, disturbs no other.
    #[tokio::test]
    async fn closing_a_pool_disturbs_no_other() {
        let folder = tempfile::tempdir().unwrap();
        for kind in [Kind::Postgres, Kind::Sqlite] {
            let (ours, theirs) = (folder.path().join("ours"), folder.path().join("theirs"));
            std::fs::create_dir_all(&ours).unwrap();
            std::fs::create_dir_all(&theirs).unwrap();
            let (ours, theirs) = (Db::fresh(kind, &ours).await, Db::fresh(kind, &theirs).await);
            theirs.execute("CREATE TABLE t (n INTEGER)").await;
            let mut open = theirs.begin().await;
            open.execute("INSERT INTO t VALUES (1)").await;
            assert!(ours.try_execute("SELECT * FROM t").await.is_err(), "it sees the tables of another test");
            if kind == Kind::Postgres {
                let cut = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity \
                           WHERE datname = current_database() AND pid <> pg_backend_pid()";
                ours.execute(cut).await;
            }
            ours.close().await;
            open.execute("INSERT INTO t VALUES (2)").await;
            open.commit().await;
            assert_eq!(theirs.count("SELECT count(*) FROM t").await, 2);
            theirs.close().await;
        }
    }
}

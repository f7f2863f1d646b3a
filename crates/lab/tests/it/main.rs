//! The lab on real databases.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs, reason = "tests end by panicking")]

use queuebox_lab::{Break, Database, Line, Shop, dual_write};
use tempfile::TempDir;

async fn sqlite() -> (Database, TempDir) {
    let folder = TempDir::new().unwrap();
    let database = Database::open(&format!("sqlite:{}/lab.db", folder.path().display())).await.unwrap();
    (database, folder)
}

async fn postgres() -> Database {
    Database::open(&queuebox_testkit::postgres().await.fresh_database().await).await.unwrap()
}

fn figures(lines: &[Line]) -> Vec<(i64, u32)> {
    lines.iter().map(|line| (line.broken, line.delivered)).collect()
}

/// conformance 148
mod lab_reproduces_the_table {
    use super::*;

    const TABLE: [(i64, u32); 3] = [(21, 179), (21, 200), (0, 225)];

    #[tokio::test(flavor = "multi_thread")]
    async fn on_sqlite() {
        let (database, _folder) = sqlite().await;
        assert_eq!(figures(&dual_write(&database, 200, 1).await.unwrap()), TABLE);
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn on_postgres() {
        let database = postgres().await;
        assert_eq!(figures(&dual_write(&database, 200, 1).await.unwrap()), TABLE);
    }
}

/// conformance 149
mod lab_writes_are_one_transaction {
    use queuebox_core::ports::schema::MigrateOptions;

    use super::*;

    async fn nothing_is_half_applied(database: Database) {
        database.claim().await.unwrap();
        let store = database.store().await.unwrap();
        store.migrate(MigrateOptions::default()).await.unwrap();
        let counts = "SELECT (SELECT count(*) FROM orders WHERE status = 'paid') + (SELECT count(*) FROM outbox) \
                      + (SELECT count(*) FROM processed_messages) + (SELECT count(*) FROM shipments)";
        for broken in [Break::AfterOrder, Break::AfterInbox, Break::AfterShipment] {
            let shop = Shop::new(database.clone(), broken);
            shop.open(1).await.unwrap();
            match broken {
                Break::AfterOrder => assert!(shop.pay_with_outbox("order-0000").await.is_err()),
                _ => assert!(shop.ship("m-1", "order-0000").await.is_err()),
            }
            assert_eq!(database.number(counts).await.unwrap(), 0, "{broken:?}");
        }
        // The same writes unbroken leave all of it.
        let shop = Shop::new(database.clone(), Break::Nothing);
        shop.open(1).await.unwrap();
        assert!(shop.pay_with_outbox("order-0000").await.unwrap());
        assert!(!shop.pay_with_outbox("order-0000").await.unwrap(), "paid already");
        assert!(shop.ship("m-1", "order-0000").await.unwrap());
        assert!(!shop.ship("m-1", "order-0000").await.unwrap(), "a repeat changes nothing");
        assert_eq!(database.number(counts).await.unwrap(), 4);
    }

    #[tokio::test]
    async fn on_sqlite() {
        let (database, _folder) = sqlite().await;
        nothing_is_half_applied(database).await;
    }

    #[tokio::test]
    async fn on_postgres() {
        nothing_is_half_applied(postgres().await).await;
    }
}

/// Whatever somebody has in a database stays there, and nothing is added to it.
mod lab_leaves_other_tables_alone {
    use super::*;

    async fn it_is_refused(database: Database, tables: &str) {
        database.execute("CREATE TABLE Orders (id INTEGER, status VARCHAR(20))", &[]).await.unwrap();
        database.execute("INSERT INTO orders VALUES (7, 'placed')", &[]).await.unwrap();
        let before = database.number(tables).await.unwrap();
        let refused = dual_write(&database, 10, 1).await.unwrap_err().to_string();
        assert!(refused.contains("table orders") && refused.contains("give an empty database"), "{refused}");
        let opened = Shop::new(database.clone(), Break::Nothing).open(1).await;
        assert!(opened.is_err());
        assert_eq!(database.number("SELECT count(*) FROM orders WHERE id = 7").await.unwrap(), 1);
        assert_eq!(database.number(tables).await.unwrap(), before, "no table was made");
        database.execute("DROP TABLE orders", &[]).await.unwrap();
        // A database that the lab has used is used again.
        for _ in 0..2 {
            assert_eq!(dual_write(&database, 10, 1).await.unwrap().len(), 3);
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn on_sqlite() {
        let (database, _folder) = sqlite().await;
        it_is_refused(database, "SELECT count(*) FROM sqlite_master").await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn on_postgres() {
        it_is_refused(postgres().await, "SELECT count(*) FROM pg_class WHERE relkind IN ('r', 'v')").await;
    }

    #[tokio::test]
    async fn a_url_says_its_kind() {
        for url in ["foo", "sqlite:", "mysql://h/d", ""] {
            let refused = Database::open(url).await.unwrap_err().to_string();
            assert!(refused.contains("sqlite:PATH"), "{url}: {refused}");
        }
        assert!(!std::path::Path::new("foo").exists());
    }
}

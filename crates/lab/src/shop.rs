//! The two services: a shop that takes payments, and a shipping service that keeps an inbox of its own.
//!
//! Each side uses one transaction: the order is paid by a guarded update, and the outbox row is inserted only if that changed a row;
//! the message id is recorded together with the shipment. [`Break`] breaks one of these writes on purpose.

use anyhow::bail;

use crate::database::Database;

/// A write to break, for tests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Break {
    /// None.
    #[default]
    Nothing,
    /// After the order is paid, before its outbox row.
    AfterOrder,
    /// After the message id is recorded, before the shipment.
    AfterInbox,
    /// After the shipment, before the commit.
    AfterShipment,
}

/// Shop and shipping on one database.
#[derive(Debug, Clone)]
pub struct Shop {
    database: Database,
    broken: Break,
}

impl Shop {
    /// On this database.
    pub fn new(database: Database, broken: Break) -> Self {
        Self { database, broken }
    }

    /// Makes the lab's tables anew, with so many unpaid orders, in a database that the lab has [claimed](Database::claim).
    ///
    /// # Errors
    /// Tables that are not the lab's, and whatever the database says.
    pub async fn open(&self, orders: u32) -> anyhow::Result<()> {
        self.database.claim().await?;
        for table in ["orders", "processed_messages", "shipments"] {
            self.database.execute(&format!("DROP TABLE IF EXISTS {table}"), &[]).await?;
        }
        for sql in [
            "CREATE TABLE orders (id VARCHAR(64) PRIMARY KEY, status VARCHAR(20) NOT NULL)",
            "CREATE TABLE processed_messages (message_id VARCHAR(64) PRIMARY KEY)",
            "CREATE TABLE shipments (order_id VARCHAR(64) PRIMARY KEY)",
        ] {
            self.database.execute(sql, &[]).await?;
        }
        let mut tx = self.database.begin().await?;
        for number in 0..orders {
            tx.execute("INSERT INTO orders (id, status) VALUES ($1, 'unknown')", &[&order_id(number)]).await?;
        }
        tx.commit().await
    }

    /// Pays an order, and nothing else.
    ///
    /// # Errors
    /// Whatever the database says.
    pub async fn pay(&self, order: &str) -> anyhow::Result<bool> {
        let sql = "UPDATE orders SET status = 'paid' WHERE id = $1 AND status != 'paid'";
        Ok(self.database.execute(sql, &[order]).await? == 1)
    }

    /// Pays an order and writes its message, in one transaction.
    ///
    /// # Errors
    /// Whatever the database says; then neither is there.
    pub async fn pay_with_outbox(&self, order: &str) -> anyhow::Result<bool> {
        let mut tx = self.database.begin().await?;
        let sql = "UPDATE orders SET status = 'paid' WHERE id = $1 AND status != 'paid'";
        if tx.execute(sql, &[order]).await? == 0 {
            return Ok(false);
        }
        if self.broken == Break::AfterOrder {
            bail!("broken on purpose between the order and its outbox row");
        }
        let payload = self.database.json("$2");
        let sql = format!("INSERT INTO outbox (topic, key, payload) VALUES ('order.paid', $1, {payload})");
        tx.execute(&sql, &[order, &format!(r#"{{"order":"{order}"}}"#)]).await?;
        tx.commit().await?;
        Ok(true)
    }

    /// Ships an order once per message id: the inbox of a receiver. True when the message was new.
    ///
    /// # Errors
    /// Whatever the database says; then neither the id nor the shipment is there.
    pub async fn ship(&self, message_id: &str, order: &str) -> anyhow::Result<bool> {
        let mut tx = self.database.begin().await?;
        let sql = "INSERT INTO processed_messages (message_id) VALUES ($1) ON CONFLICT (message_id) DO NOTHING";
        if tx.execute(sql, &[message_id]).await? == 0 {
            return Ok(false);
        }
        if self.broken == Break::AfterInbox {
            bail!("broken on purpose between the message id and the shipment");
        }
        tx.execute("INSERT INTO shipments (order_id) VALUES ($1)", &[order]).await?;
        if self.broken == Break::AfterShipment {
            bail!("broken on purpose between the shipment and the commit");
        }
        tx.commit().await?;
        Ok(true)
    }

    /// Orders that are paid and not shipped, or shipped and not paid.
    ///
    /// # Errors
    /// Whatever the database says.
    pub async fn broken_orders(&self) -> anyhow::Result<i64> {
        let lost = "SELECT count(*) FROM orders o WHERE o.status = 'paid' AND NOT EXISTS (SELECT 1 FROM shipments s WHERE s.order_id = o.id)";
        let ghosts = "SELECT count(*) FROM shipments s JOIN orders o ON o.id = s.order_id WHERE o.status != 'paid'";
        Ok(self.database.number(lost).await? + self.database.number(ghosts).await?)
    }
}

/// Name of the order with this number.
pub fn order_id(number: u32) -> String {
    format!("order-{number:04}")
}

//! The hot statements are answered by the indexes that were made for them: without that they read the whole table.

use queuebox_core::ports::schema::{MigrateOptions, Schema as _};
use sqlx::Row as _;

use crate::{SqliteConfig, inbox, open, outbox, read, retention};

#[tokio::test]
async fn every_hot_statement_uses_its_index() {
    let folder = tempfile::tempdir().unwrap();
    let store = open(SqliteConfig::new(folder.path().join("queuebox.db"))).await.unwrap();
    store.migrate(MigrateOptions::default()).await.unwrap();
    store.check().await.unwrap();
    let mut session = store.read(None).await.unwrap();
    let by_id = "INDEX sqlite_autoindex_outbox_1 (id=?)";
    let statements = [
        (read::WALK, "INDEX idx_outbox_pending (sequence>?)"),
        (read::LAP, "INDEX idx_outbox_pending (sequence>? AND sequence<?)"),
        (read::DESTINATION, "INDEX idx_outbox_pending (sequence>?)"),
        (read::KEYS, "INDEX idx_outbox_key (key=? AND sequence>?)"),
        (read::LATER, "INDEX idx_outbox_later (scheduled_at<?)"),
        (read::NEXT_DUE, "INDEX idx_outbox_later (scheduled_at>?)"),
        (outbox::SENT, by_id),
        (outbox::SENT_AND_DELETED, by_id),
        (outbox::RETRY, by_id),
        (outbox::DEAD, by_id),
        (outbox::RELEASE, by_id),
        (outbox::MARK, by_id),
        (outbox::CHILDREN, by_id),
        (outbox::CHILDLESS, "INDEX idx_outbox_parent (parent_id=?)"),
        (outbox::RECOVER, "INDEX idx_outbox_processing"),
        (outbox::ABANDONED, "INDEX idx_outbox_processing"),
        (outbox::PENDING, "INDEX idx_outbox_pending"),
        (outbox::LONGEST_DUE_LATER, "INDEX idx_outbox_later (scheduled_at<?)"),
        (outbox::DEAD_ROWS, "INDEX idx_outbox_dead"),
        (inbox::WAITING, "INDEX idx_inbox_push_pending (scheduled_at<?)"),
        (inbox::FORWARD, "INDEX sqlite_autoindex_inbox_1 (id=?)"),
        (inbox::FORWARDED, "INDEX sqlite_autoindex_inbox_1 (id=?)"),
        (inbox::NEXT_DUE, "INDEX idx_inbox_push_pending"),
        (inbox::BACKLOG, "INDEX idx_inbox_state_created (state=?)"),
        (retention::WINDOW_END, "SEARCH t USING INTEGER PRIMARY KEY (rowid>?)"),
        (retention::WINDOW_TIMES, "SEARCH t USING INTEGER PRIMARY KEY (rowid>? AND rowid<?)"),
        (retention::WINDOW_SENT, "SEARCH t USING INTEGER PRIMARY KEY (rowid>? AND rowid<?)"),
        (retention::DEAD_PAGE, "INDEX idx_outbox_dead (updated_at<?)"),
        (retention::OLDEST_DEAD, "INDEX idx_outbox_dead (updated_at<?)"),
        (retention::OLDEST_OF_THE_INBOX, "INDEX idx_inbox_state_created (state=? AND created_at<?)"),
        (inbox::STORED, "INDEX uq_inbox_source_idempotency (source=? AND idempotency_key=?)"),
    ];
    for (template, index) in statements {
        let sql = store.names().render(&format!("EXPLAIN QUERY PLAN {template}"), &["push_index"]);
        let sql = queuebox_sql::statement(sql);
        let rows = sqlx::query(sql).fetch_all(session.connection()).await.unwrap();
        let plan: Vec<String> = rows.iter().map(|row| row.get(3)).collect();
        let plan = plan.join("\n");
        assert!(plan.contains(index), "{template}\nneeds {index}, has\n{plan}");
        for line in plan.lines().filter(|line| line.starts_with("SCAN")) {
            let small =
                ["VIRTUAL TABLE", "CONSTANT", "SCAN (subquery", "SCAN s", "SCAN w", "SCAN picked", "SCAN summed"];
            let small = small.iter().any(|what| line.contains(what))
                || line.contains("USING INDEX")
                || line.contains("USING COVERING INDEX");
            assert!(small, "{template}\nreads a whole table: {line}\n{plan}");
        }
    }
}

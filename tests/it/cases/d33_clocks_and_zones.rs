//! D33: clocks and zones. Workers with wrong clocks are `clocks_do_not_matter`.

use crate::support::{Kind, OutboxRow, World, number, on_every_database, time};

/// A role, a session and a worker in three zones: a row that is due in five seconds goes then.
async fn zones(kind: Kind) {
    let world = World::on(kind).await.env("TZ", "Asia/Kolkata");
    world.migrate().await;
    let due = world.db.in_seconds(5);
    if kind == Kind::Postgres {
        let name = world.db.row("SELECT current_database() AS name").await["name"].as_str().unwrap().to_owned();
        world.db.execute(&format!("ALTER DATABASE \"{name}\" SET timezone = 'America/New_York'")).await;
    }
    world.start().await;
    let id = world.db.insert(OutboxRow::new("order", 1).set("scheduled_at", &due)).await;
    let row = world.db.wait_outbox(&id, "sent").await;
    assert!(time(&row, "updated_at") >= time(&row, "scheduled_at"), "before its time: {row:#}");
    assert_eq!(number(&row, "attempt"), 0);
    world.finish().await;
}

/// The hour that occurs twice in autumn: two instants, shown with an offset, both past and so both due.
async fn the_hour_that_occurs_twice(kind: Kind) {
    let world = World::on(kind).await.env("TZ", "America/New_York");
    world.migrate().await;
    let times = match kind {
        Kind::Postgres => {
            ["timestamptz '2025-11-02 01:30:00 EDT'".to_owned(), "timestamptz '2025-11-02 01:30:00 EST'".to_owned()]
        }
        Kind::Sqlite => ["'2025-11-02T05:30:00.000000Z'".to_owned(), "'2025-11-02T06:30:00.000000Z'".to_owned()],
    };
    let worker = world.start().await;
    let rows = times
        .iter()
        .enumerate()
        .map(|(n, at)| OutboxRow::new("order", n as i64).set("scheduled_at", at).set("created_at", at).key("k"));
    let ids = world.db.insert_all(rows).await;
    for id in &ids {
        world.db.wait_outbox(id, "sent").await;
    }
    let shown = async |id: &String| worker.get(&format!("/admin/outbox/{id}")).await.json();
    let mut instants = Vec::new();
    for id in &ids {
        let page = shown(id).await;
        let row = page.get("row").unwrap_or(&page).clone();
        let at = ["scheduledAt", "scheduled_at"].iter().find_map(|name| row[*name].as_str());
        // Parsing a time without an offset fails.
        instants.push(at.unwrap_or_else(|| panic!("{page:#}")).parse::<jiff::Timestamp>().unwrap());
    }
    assert_eq!(instants[1].duration_since(instants[0]).as_secs(), 3600);
    world.finish().await;
}

/// A wrong clock of the application's is none of the database's either: SQLite takes only times in UTC of one form.
#[tokio::test]
async fn sqlite_refuses_other_forms_of_time() {
    let world = World::on(Kind::Sqlite).await;
    world.migrate().await;
    for wrong in ["'2026-01-01 00:00:00'", "'2026-01-01T00:00:00+02:00'", "1790000000", "'2026-01-01T00:00:00Z'"] {
        let row = OutboxRow::new("order", 1).set("scheduled_at", wrong);
        let error = world.db.try_execute(&row.sql()).await.unwrap_err().to_string();
        assert!(error.contains("YYYY-MM-DD"), "{error}");
    }
    world.finish().await;
}

on_every_database!(zones, the_hour_that_occurs_twice);

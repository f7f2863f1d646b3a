//! Section H: whose clock counts.

use queuebox_testkit as testkit;
use serde_json::json;

use crate::support::{Kind, OutboxRow, PATIENCE, World, number, time};

/// The library that gives a process another clock (Debian package faketime).
fn libfaketime() -> String {
    let folders = std::fs::read_dir("/usr/lib").unwrap().map(|entry| entry.unwrap().path());
    let found = folders.map(|folder| folder.join("faketime/libfaketime.so.1")).find(|library| library.exists());
    found.expect("faketime is not installed: run `./dev packages` once").display().to_string()
}

/// A worker of this world with a clock that is wrong by so many seconds, in a time zone.
async fn start_at(world: World, offset: &str, zone: &str) -> World {
    let world = world
        .env("LD_PRELOAD", &libfaketime())
        .env("FAKETIME", offset)
        // Waiting is not what is wrong.
        .env("FAKETIME_DONT_FAKE_MONOTONIC", "1")
        .env("TZ", zone);
    world.start().await;
    world
}

mod clocks_do_not_matter {
    use super::*;

    /// Two workers whose clocks are 20 minutes apart, a role and a session in other zones.
    #[tokio::test]
    async fn on_postgres() {
        let world = World::on(Kind::Postgres).await.relay(json!({ "outbox": { "claimTimeout": "6s" } }));
        world.migrate().await;
        let name = world.db.row("SELECT current_database() AS name").await;
        let name = name["name"].as_str().unwrap();
        world.db.execute(&format!("ALTER DATABASE \"{name}\" SET timezone = 'America/New_York'")).await;
        let world = start_at(world, "+600", "Asia/Kolkata").await;
        let world = start_at(world, "-600", "America/New_York").await;
        // A local run numbers its configuration by its own clock: it shows that the two really differ.
        let wall = "SELECT max(at) - min(at) AS apart FROM \
                    (SELECT CAST(split_part(config, '/', 1) AS bigint) AS at FROM queuebox_worker) q";
        let apart = number(&world.db.row(wall).await, "apart");
        assert!((1_100_000..1_300_000).contains(&apart), "{apart} ms apart");
        // Their lanes move to and fro by leases of the database only.
        judge(&world, 40).await;
        let lost = "SELECT count(DISTINCT worker) FROM queuebox_lane WHERE worker IS NOT NULL AND scope = 'outbox'";
        testkit::eventually("both work", PATIENCE, || async { (world.db.count(lost).await == 2).then_some(()) }).await;
        judge(&world, 40).await;
        assert_eq!(world.db.count("SELECT sum(crashes) AS n FROM outbox").await, 0);
        world.finish().await;
    }

    /// The clock of a file is the machine's: there the zone is what may differ.
    #[tokio::test]
    async fn on_sqlite() {
        let world = World::on(Kind::Sqlite).await;
        let world = world.env("TZ", "Asia/Kolkata");
        world.start().await;
        let world = world.env("TZ", "America/New_York");
        world.start().await;
        judge(&world, 40).await;
        world.finish().await;
    }

    /// Rows that are due now go; rows that are due in 5 s go then and not before, whatever the workers believe; rows of an hour wait.
    async fn judge(world: &World, rows: i64) {
        world.receiver.clear();
        let (due, in_an_hour) = (world.db.in_seconds(5), world.db.in_seconds(3600));
        let now = world.db.insert_all((0..rows).map(|n| OutboxRow::new("order", n).key(&format!("k{n}")))).await;
        let soon = world.db.insert(OutboxRow::new("order", 1000).set("scheduled_at", &due)).await;
        let later = world.db.insert(OutboxRow::new("order", 2000).set("scheduled_at", &in_an_hour)).await;
        for id in now.iter().chain([&soon]) {
            world.db.wait_outbox(id, "sent").await;
        }
        let row = world.db.outbox(&soon).await;
        assert!(time(&row, "updated_at") >= time(&row, "scheduled_at"), "before its time: {row:#}");
        let waiting = world.db.outbox(&later).await;
        assert_eq!((waiting["state"].as_str(), number(&waiting, "attempt")), (Some("pending"), 0));
        assert_eq!(world.receiver.count() as i64, rows + 1, "each once");
        world.db.execute("DELETE FROM outbox WHERE state = 'pending'").await;
    }
}

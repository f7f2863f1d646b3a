//! D39 for PostgreSQL: a password with everything that URLs, shells and configuration files trip over. Brokers: beside their connectors.

use queuebox_testkit::{self as testkit, CANARY};
use serde_json::{Value, json};

use crate::{
    scenarios::start::refused,
    support::{Db, OutboxRow, World, quoted},
};

/// `%41` is meant literally.
const AWKWARD: &str = r#"p@s:s/w%o#r?d&[é]'" \`;=%41"#;

/// Every byte that could mean something in a URL, percent-encoded.
fn encoded(text: &str) -> String {
    let byte =
        |byte: u8| if byte.is_ascii_alphanumeric() { char::from(byte).to_string() } else { format!("%{byte:02X}") };
    text.bytes().map(byte).collect()
}

/// A database with a role that has the password and may make the tables.
struct Login {
    server: testkit::Postgres,
    database: String,
    role: String,
    password: String,
}

impl Login {
    async fn new() -> Login {
        let server = testkit::postgres().await;
        let database = server.fresh_database_name().await;
        let (role, password) = (testkit::unique("role"), format!("{CANARY}{AWKWARD}"));
        server.psql(&database, &format!("CREATE ROLE {role} LOGIN PASSWORD {}", quoted(&password))).await;
        server.psql(&database, &format!("GRANT CREATE, USAGE ON SCHEMA public TO {role}")).await;
        Login { server, database, role, password }
    }

    async fn world(&self) -> World {
        let folder = tempfile::Builder::new().prefix("queuebox-world-").tempdir().unwrap();
        World::with(Db::postgres(self.server.url_of(&self.database)).await, folder)
            .await
            .relay(json!({ "database": { "connectTimeout": "2s", "startupTimeout": "1s" } }))
    }

    /// Part by part, with this reference to the password.
    fn parts(&self, password: &Value) -> Value {
        let postgres = json!({
            "urlFrom": null, "host": "127.0.0.1", "port": self.server.port(), "database": self.database,
            "username": self.role, "passwordFrom": password,
        });
        json!({ "database": { "postgres": postgres } })
    }

    fn url(&self, password: &str) -> String {
        format!("postgres://{}:{password}@127.0.0.1:{}/{}", self.role, self.server.port(), self.database)
    }

    async fn end(self) {
        self.server.psql(&self.database, &format!("DROP OWNED BY {0}; DROP ROLE {0}", self.role)).await;
    }
}

/// A worker logs in with the role and sends a row.
async fn works(world: World, role: &str) {
    // There is time here.
    let world = world.relay(json!({ "database": { "connectTimeout": "30s", "startupTimeout": "60s" } }));
    world.start().await;
    let used =
        format!("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND usename = '{role}'");
    assert!(world.db.count(&used).await > 0, "it worked with another role");
    let id = world.db.insert(OutboxRow::new("order", 1)).await;
    world.db.wait_outbox(&id, "sent").await;
    world.finish().await;
}

#[tokio::test]
async fn logs_in_with_it_from_each_place() {
    let login = Login::new().await;
    for line_end in ["", "\n", "\r\n"] {
        let world = login.world().await;
        let file = world.folder().join("password");
        std::fs::write(&file, format!("{}{line_end}", login.password)).unwrap();
        works(world.relay(login.parts(&json!({ "file": file }))), &login.role).await;
    }
    let in_a_variable =
        login.world().await.relay(login.parts(&json!({ "env": "PASSWORD" }))).env("PASSWORD", &login.password);
    works(in_a_variable, &login.role).await;
    let password = encoded(&login.password);
    let jdbc = format!(
        "jdbc:postgresql://127.0.0.1:{}/{}?user={}&password={password}",
        login.server.port(),
        login.database,
        login.role
    );
    for url in [login.url(&password), jdbc] {
        works(login.world().await.env("DATABASE_URL", &url), &login.role).await;
    }
    login.end().await;
}

/// Refused at start with the field, and without any part of the password: what is behind its `@` looks like a host.
#[tokio::test]
async fn a_wrong_one_is_refused_with_its_field() {
    let login = Login::new().await;
    let says = |said: &str, field: &str| {
        assert!(said.contains(field), "{field}: {said}");
        for part in ["s:s", "w%o", "w%25o", "%5B", "behind", "tail"] {
            assert!(!said.contains(part), "{part} of the password: {said}");
        }
    };
    let beside = login.world().await;
    let file = beside.folder().join("password");
    std::fs::write(&file, format!("{CANARY}@behind:tail")).unwrap();
    let beside = beside.relay(login.parts(&json!({ "file": file })));
    let said = refused(&beside).await;
    says(&said, "Relay.spec.database.postgres.username and passwordFrom");
    assert!(said.contains(&login.role), "who was refused is told: {said}");
    // Not as it would be after another decoding.
    let decoded = login.password.replace("%41", "A");
    let raw = |password: &str| login.url(password);
    for (password, field) in [
        (encoded(&decoded), "Relay.spec.database.postgres.urlFrom"),
        // Not encoded at all.
        (login.password.clone(), "Relay.spec.database.postgres.urlFrom"),
    ] {
        let said = refused(&login.world().await.env("DATABASE_URL", &raw(&password))).await;
        says(&said, field);
    }
    // Read as a URL, the host is in the password: it is not found, and not told either.
    let world = login.world().await.env("DATABASE_URL", &raw(&format!("{CANARY}@behind-{CANARY}/tail")));
    says(&refused(&world).await, "database");
    login.end().await;
}

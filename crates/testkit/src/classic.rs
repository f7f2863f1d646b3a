//! The tables of a classic installation on PostgreSQL, as its own program left them (contract 2.5, 14).

use crate::workspace_root;

/// The newest version of a classic installation.
pub const CLASSIC_VERSION: u32 = 11;

/// The statements of the migrations behind version `from`, up to `to`, one by one; those of 13 run outside a transaction only.
pub fn classic_tables(from: u32, to: u32) -> Vec<String> {
    assert!(to < 14, "two files have the number 14");
    let folder = workspace_root().join("crates/stores/postgres/migrations");
    let mut files: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    let number = |file: &std::path::Path| file.file_name()?.to_str()?.get(..4)?.parse::<u32>().ok();
    let wanted = files.iter().filter(|file| number(file).is_some_and(|number| number > from && number <= to));
    wanted.flat_map(|file| statements(&std::fs::read_to_string(file).unwrap())).collect()
}

/// The statements of one file, with the names of a database that renames nothing.
fn statements(text: &str) -> Vec<String> {
    let names = [("{outbox}", "outbox"), ("{inbox}", "inbox"), ("{sequence}", "outbox_sequence_seq"), ("{schema}", "")];
    let text = names.iter().fold(text.to_owned(), |text, (placeholder, name)| text.replace(placeholder, name));
    // Lines that begin so stand between two statements.
    let parts: Vec<String> = format!("\n---\n{text}").split("\n---").skip(1).map(str::to_owned).collect();
    parts.iter().filter_map(|part| part.split_once('\n')).map(|(_, sql)| sql.trim().to_owned()).collect()
}

/// The statements of the classic program's own history of its tables.
pub fn classic_history(version: u32) -> Vec<String> {
    let table = "CREATE TABLE flyway_schema_history (installed_rank INT PRIMARY KEY, version VARCHAR(50), \
                 description VARCHAR(200) NOT NULL, type VARCHAR(20) NOT NULL, script VARCHAR(1000) NOT NULL, checksum INT, \
                 installed_by VARCHAR(100) NOT NULL, installed_on TIMESTAMP NOT NULL DEFAULT now(), execution_time INT NOT NULL, \
                 success BOOLEAN NOT NULL)";
    let row = |n: u32| {
        format!(
            "INSERT INTO flyway_schema_history VALUES ({n}, '{n}', 'step', 'SQL', 'V{n}__step.sql', 7, 'app', now(), 1, TRUE)"
        )
    };
    std::iter::once(table.to_owned()).chain((1..=version).map(row)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statements_are_parted_and_named() {
        let text = "-- head\nCREATE {outbox}\n---\nALTER {inbox}\n--- outside\nCREATE INDEX\n";
        assert_eq!(statements(text), ["-- head\nCREATE outbox", "ALTER inbox", "CREATE INDEX"]);
        let all = classic_tables(0, CLASSIC_VERSION);
        assert!(all.iter().all(|sql| !sql.is_empty() && !sql.replace("'{}'", "").contains('{')), "{all:#?}");
        assert!(classic_tables(11, 13).iter().any(|sql| sql.contains("idx_inbox_pull_expired")));
    }
}

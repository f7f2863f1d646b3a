//! Migration files, their checksums, and the decision what to run (contract 2.5). Pure: a store looks, asks [`plan`], and does.
//!
//! Invariants: only forward; a file never changes after its release (its checksum is kept); a database without QueueBox tables begins
//! with one file that carries the newest number, so versions 1 to 13 exist only where classic installations exist.

use std::fmt;

use sha2::{Digest, Sha256};

/// One migration file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Migration {
    /// Its number.
    pub version: u32,
    /// Its name in the history; a version has one name per way that leads to it.
    pub name: &'static str,
    /// The file, a template of [`crate::names::Names::render`]. Statements are separated by [`SEPARATOR`] lines.
    pub sql: &'static str,
    /// The oldest version that a binary must know to work on the result.
    pub min_reader: u32,
}

/// A line that separates statements in a migration file. What begins with it may add words: `--- outside` means that the
/// statement that follows cannot run in a transaction.
pub const SEPARATOR: &str = "---";

impl Migration {
    /// SHA-256 of the file as written, lower-case hex.
    pub fn checksum(&self) -> String {
        Sha256::digest(self.sql.as_bytes()).iter().fold(String::with_capacity(64), |mut hex, byte| {
            use fmt::Write as _;
            let _ = write!(hex, "{byte:02x}");
            hex
        })
    }

    /// The statements of a rendered text of this file, in order, each with the words behind its separator.
    pub fn statements(rendered: &str) -> Vec<(&str, &str)> {
        let mut statements = Vec::new();
        let (mut words, mut start, mut at) = ("", 0, 0);
        for line in rendered.split_inclusive('\n') {
            if let Some(rest) = line.strip_prefix(SEPARATOR) {
                statements.push((words, rendered[start..at].trim()));
                (words, start) = (rest.trim(), at + line.len());
            }
            at += line.len();
        }
        statements.push((words, rendered[start..].trim()));
        statements
            .retain(|(_, sql)| sql.lines().any(|line| !line.trim().is_empty() && !line.trim_start().starts_with("--")));
        statements
    }
}

/// All files of one database.
#[derive(Debug, Clone, Copy)]
pub struct Catalog {
    /// Creates everything in an empty database; carries the newest number.
    pub fresh: Migration,
    /// The steps from version to version, ascending; empty where no older versions exist.
    pub steps: &'static [Migration],
}

impl Catalog {
    /// The newest version that this binary knows.
    pub fn newest(&self) -> u32 {
        self.fresh.version
    }

    fn file(&self, version: u32, name: &str) -> Option<&Migration> {
        std::iter::once(&self.fresh).chain(self.steps).find(|file| file.version == version && file.name == name)
    }
}

/// A row of `queuebox_schema_history`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Applied {
    /// Version.
    pub version: u32,
    /// Name of the file, or [`BASELINE`] or [`CLASSIC`].
    pub name: String,
    /// Checksum of the file, empty for the two.
    pub checksum: String,
    /// The oldest version that a binary must know.
    pub min_reader: u32,
}

/// Name of history rows that `--baseline` recorded.
pub const BASELINE: &str = "baseline";

/// Name of history rows that were adopted from a classic installation.
pub const CLASSIC: &str = "classic";

/// What a store found in its database.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Found {
    /// The history, ascending; `None` = there is no such table. An empty table counts as none.
    pub history: Option<Vec<Applied>>,
    /// At least one of the two tables is there.
    pub tables: bool,
    /// The version that the classic history names, if the tables really have it.
    pub classic: Option<u32>,
}

/// One thing to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Record a version as applied without running it.
    Record {
        /// Version.
        version: u32,
        /// [`BASELINE`] or [`CLASSIC`].
        name: &'static str,
    },
    /// Run a file and record it.
    Run(Migration),
}

/// What to do, in order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Plan {
    /// Version before; `None` = no QueueBox tables.
    pub from: Option<u32>,
    /// Version afterwards.
    pub to: u32,
    /// The classic history was adopted at this version.
    pub adopted: Option<u32>,
    /// Steps.
    pub steps: Vec<Step>,
    /// The schema is newer than this binary; it works all the same.
    pub newer: bool,
}

/// Why nothing may be run.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// Tables of unknown age.
    #[error(
        "there are QueueBox tables but no queuebox_schema_history; say which version they have with \
         \"queuebox migrate --baseline N\" (a classic installation has 11)"
    )]
    NoHistory,
    /// `--baseline` beside a history.
    #[error("--baseline is refused: queuebox_schema_history is there and names version {0}")]
    BaselineOnHistory(u32),
    /// `--baseline` with a number that means nothing.
    #[error("--baseline {given}: the versions are 1 to {newest}")]
    BaselineUnknown {
        /// As given.
        given: u32,
        /// Newest known.
        newest: u32,
    },
    /// `--baseline` with a version that the tables do not have.
    #[error(
        "--baseline {given}: this database lacks {missing}, which version {given} has; without QueueBox tables leave --baseline out, \
         otherwise name the version that the tables really have"
    )]
    BaselineLacks {
        /// As given.
        given: u32,
        /// What is not there.
        missing: String,
    },
    /// No steps lead from here.
    #[error("this database cannot be brought from version {from} to {to}: no migration begins there")]
    NoPath {
        /// Version found.
        from: u32,
        /// Newest known.
        to: u32,
    },
    /// A released file was edited.
    #[error(
        "migration {version} ({name}) was applied with another checksum than the file of this release has; files never change \
         after their release, so this history belongs to another build"
    )]
    Checksum {
        /// Version.
        version: u32,
        /// Name.
        name: String,
    },
    /// The database asks for a newer binary.
    #[error("this database needs a release of QueueBox that knows schema version {needed}; this one knows {known}")]
    TooNew {
        /// `min_reader`.
        needed: u32,
        /// Newest known.
        known: u32,
    },
}

/// Decides what to run. Does not touch anything.
pub fn plan(catalog: &Catalog, found: &Found, baseline: Option<u32>) -> Result<Plan, PlanError> {
    let newest = catalog.newest();
    if let Some(history) = found.history.as_deref().filter(|history| !history.is_empty()) {
        let version = verify(catalog, history)?;
        if baseline.is_some() {
            return Err(PlanError::BaselineOnHistory(version));
        }
        return forward(catalog, version, Plan { from: Some(version), ..Plan::default() });
    }
    if let Some(given) = baseline {
        if given == 0 || given > newest {
            return Err(PlanError::BaselineUnknown { given, newest });
        }
        if !found.tables {
            return Err(PlanError::BaselineLacks { given, missing: "the tables outbox and inbox".to_owned() });
        }
        return forward(catalog, given, recorded(given, BASELINE, Plan { from: Some(given), ..Plan::default() }));
    }
    match (found.tables, found.classic) {
        (false, _) => Ok(Plan { from: None, to: newest, steps: vec![Step::Run(catalog.fresh)], ..Plan::default() }),
        (true, Some(version)) => {
            let plan = Plan { from: Some(version), adopted: Some(version), ..Plan::default() };
            forward(catalog, version, recorded(version, CLASSIC, plan))
        }
        (true, None) => Err(PlanError::NoHistory),
    }
}

/// Checks that the tables have what a baseline says: `introduced` is what came with each version, `has` looks for it. Recording a
/// version whose columns are not there would leave a history that no migration can mend.
///
/// # Errors
/// [`PlanError::BaselineLacks`] names all that is missing.
pub fn check_baseline(
    given: u32,
    introduced: &[(u32, &str, &str)],
    has: impl Fn(&str, &str) -> bool,
) -> Result<(), PlanError> {
    let asked = introduced.iter().filter(|(since, ..)| *since <= given);
    let missing: Vec<String> = asked
        .filter(|(_, table, column)| !has(table, column))
        .map(|(_, table, column)| format!("{table}.{column}"))
        .collect();
    if missing.is_empty() { Ok(()) } else { Err(PlanError::BaselineLacks { given, missing: missing.join(", ") }) }
}

/// Checks a history against the files; returns its version. Also the check of a start with `migrate: Off`.
pub fn verify(catalog: &Catalog, history: &[Applied]) -> Result<u32, PlanError> {
    let newest = catalog.newest();
    let needed = history.iter().map(|row| row.min_reader).max().unwrap_or(0);
    if needed > newest {
        return Err(PlanError::TooNew { needed, known: newest });
    }
    for row in history.iter().filter(|row| row.version <= newest && row.name != BASELINE && row.name != CLASSIC) {
        if catalog.file(row.version, &row.name).is_none_or(|file| file.checksum() != row.checksum) {
            return Err(PlanError::Checksum { version: row.version, name: row.name.clone() });
        }
    }
    Ok(history.iter().map(|row| row.version).max().unwrap_or(0))
}

fn recorded(upto: u32, name: &'static str, mut plan: Plan) -> Plan {
    plan.steps.extend((1..=upto).map(|version| Step::Record { version, name }));
    plan
}

fn forward(catalog: &Catalog, from: u32, mut plan: Plan) -> Result<Plan, PlanError> {
    let newest = catalog.newest();
    plan.newer = from > newest;
    plan.to = from.max(newest);
    let mut at = from;
    for file in catalog.steps.iter().filter(|file| file.version > from) {
        if file.version != at + 1 {
            break;
        }
        plan.steps.push(Step::Run(*file));
        at = file.version;
    }
    if at < newest {
        return Err(PlanError::NoPath { from, to: newest });
    }
    Ok(plan)
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn file(version: u32, name: &'static str) -> Migration {
        Migration { version, name, sql: "SELECT 1", min_reader: 11 }
    }

    const STEPS: [Migration; 3] = [file(12, "twelve"), file(13, "thirteen"), file(14, "fourteen")];
    const CATALOG: Catalog = Catalog { fresh: file(14, "create"), steps: &STEPS };

    fn row(version: u32, name: &str, checksum: &str) -> Applied {
        Applied { version, name: name.to_owned(), checksum: checksum.to_owned(), min_reader: 11 }
    }

    fn run(plan: &Plan) -> Vec<u32> {
        plan.steps
            .iter()
            .filter_map(|step| if let Step::Run(file) = step { Some(file.version) } else { None })
            .collect()
    }

    #[test]
    fn an_empty_database_begins_with_one_file() {
        let plan = plan(&CATALOG, &Found::default(), None).unwrap();
        assert_eq!((plan.from, plan.to, plan.steps), (None, 14, vec![Step::Run(CATALOG.fresh)]));
    }

    #[test]
    fn a_classic_installation_is_adopted_and_upgraded() {
        let found = Found { tables: true, classic: Some(11), history: None };
        let plan = plan(&CATALOG, &found, None).unwrap();
        assert_eq!((plan.from, plan.adopted, run(&plan)), (Some(11), Some(11), vec![12, 13, 14]));
        assert_eq!(plan.steps.len(), 11 + 3);
    }

    #[test]
    fn tables_of_unknown_age_need_a_baseline() {
        let found = Found { tables: true, ..Found::default() };
        assert_eq!(plan(&CATALOG, &found, None), Err(PlanError::NoHistory));
        let lacks = plan(&CATALOG, &Found::default(), Some(11)).unwrap_err();
        assert_eq!(
            lacks.to_string(),
            "--baseline 11: this database lacks the tables outbox and inbox, which version 11 has; without QueueBox tables leave \
             --baseline out, otherwise name the version that the tables really have"
        );
        let introduced = [(1, "outbox", "topic"), (11, "outbox", "sequence"), (12, "inbox", "topic")];
        let has = |_: &str, column: &str| column == "topic";
        assert_eq!(check_baseline(10, &introduced, has), Ok(()));
        assert_eq!(
            check_baseline(11, &introduced, has),
            Err(PlanError::BaselineLacks { given: 11, missing: "outbox.sequence".to_owned() })
        );
        assert_eq!(run(&plan(&CATALOG, &found, Some(12)).unwrap()), [13, 14]);
        assert!(matches!(plan(&CATALOG, &found, Some(15)), Err(PlanError::BaselineUnknown { .. })));
        assert!(matches!(plan(&CATALOG, &found, Some(3)), Err(PlanError::NoPath { .. })));
    }

    #[test]
    fn a_history_is_checked_and_excludes_a_baseline() {
        let checksum = CATALOG.fresh.checksum();
        let found = |rows| Found { history: Some(rows), tables: true, classic: None };
        assert!(plan(&CATALOG, &found(vec![row(14, "create", &checksum)]), None).unwrap().steps.is_empty());
        assert_eq!(
            plan(&CATALOG, &found(vec![row(14, "create", &checksum)]), Some(11)),
            Err(PlanError::BaselineOnHistory(14))
        );
        assert!(matches!(plan(&CATALOG, &found(vec![row(14, "create", "00")]), None), Err(PlanError::Checksum { .. })));
        assert!(matches!(
            plan(&CATALOG, &found(vec![row(14, "other", &checksum)]), None),
            Err(PlanError::Checksum { .. })
        ));
    }

    #[test]
    fn a_newer_schema_is_accepted_unless_it_asks_for_a_newer_reader() {
        let mut newer = row(15, "fifteen", "ff");
        let found = |row| Found { history: Some(vec![row]), tables: true, classic: None };
        let accepted = plan(&CATALOG, &found(newer.clone()), None).unwrap();
        assert!(accepted.newer && accepted.steps.is_empty() && accepted.to == 15);
        newer.min_reader = 15;
        assert_eq!(plan(&CATALOG, &found(newer), None), Err(PlanError::TooNew { needed: 15, known: 14 }));
    }

    #[test]
    fn statements_are_split_at_separator_lines_only() {
        let text = "-- head\nCREATE a\n---\nCREATE 'x --- y'\n--- outside\nCREATE INDEX\n---\n-- nothing\n";
        assert_eq!(
            Migration::statements(text),
            [("", "-- head\nCREATE a"), ("", "CREATE 'x --- y'"), ("outside", "CREATE INDEX")]
        );
    }
}

//! Every behaviour that the documents promise by name has a test of that name, or stands in `tests/pending.txt`.
//!
//! Names come from the tables of docs/conformance.md and the headings of docs/cases.md (`D20` is a test or module whose
//! name starts with `d20_`). Tests are taken from what the test binaries list, not from their source, so that macros and
//! modules count as they are. The other way round: a test below a module `scenarios` or `cases` bears a promised name.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use anyhow::{Context, Result, bail};

/// Compares; the result lists what is wrong. With `fix`, tests/pending.txt loses what is tested.
pub fn check(list: Option<PathBuf>, fix: bool) -> Result<Vec<String>> {
    let read = |path: &str| std::fs::read_to_string(crate::root().join(path)).with_context(|| path.to_string());
    let promised = promised(&read("docs/conformance.md")?, &read("docs/cases.md")?);
    let tests = match list {
        Some(file) => std::fs::read_to_string(&file).with_context(|| file.display().to_string())?,
        None => listed_by_cargo()?,
    };
    let tests = paths(&tests);
    if fix {
        let kept = without_tested(&read("tests/pending.txt")?, &tests);
        std::fs::write(crate::root().join("tests/pending.txt"), kept)?;
    }
    let found = compare(&promised, &tests, &read("tests/pending.txt")?);
    let tested = promised.iter().filter(|name| is_tested(name, &tests)).count();
    println!("conformance: {tested} of {} promised names have their test", promised.len());
    Ok(found)
}

/// Names in backticks in the second column of numbered rows, and the numbers of the cases.
fn promised(conformance: &str, cases: &str) -> BTreeSet<String> {
    let rows = conformance.lines().filter_map(|line| {
        let mut cells = line.strip_prefix('|')?.split('|').map(str::trim);
        cells.next()?.parse::<u32>().ok()?;
        Some(cells.next()?.trim_matches('`').to_string())
    });
    let headings = cases.lines().filter_map(|line| Some(line.strip_prefix("### ")?.split(' ').next()?.to_string()));
    rows.chain(headings).collect()
}

fn listed_by_cargo() -> Result<String> {
    let output = crate::cargo().args(["test", "--quiet", "--workspace", "--tests", "--", "--list"]).output()?;
    if !output.status.success() {
        bail!("cargo test -- --list: {}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Paths of the tests in the list of libtest (`a::b: test`) or of nextest (`binary a::b`), split into segments.
fn paths(list: &str) -> Vec<Vec<String>> {
    let path = |line: &str| {
        let line = line.trim();
        let name = line.strip_suffix(": test").unwrap_or(line);
        let name = name.rsplit(' ').next()?;
        (!name.is_empty() && !name.ends_with(':')).then(|| name.split("::").map(String::from).collect())
    };
    list.lines().filter_map(path).collect()
}

/// Whether a segment of a path is the test of a promised name.
fn bears(segment: &str, name: &str) -> bool {
    let is_case = name.len() == 3 && name.starts_with('D');
    if is_case { segment.starts_with(&format!("{}_", name.to_lowercase())) } else { segment == name }
}

fn is_tested(name: &str, tests: &[Vec<String>]) -> bool {
    tests.iter().flatten().any(|segment| bears(segment, name))
}

/// `name issue` per line; `#` starts a comment.
fn pending(text: &str) -> BTreeMap<&str, &str> {
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines.map(|line| line.split_once(' ').unwrap_or((line, ""))).map(|(name, issue)| (name, issue.trim())).collect()
}

fn without_tested(text: &str, tests: &[Vec<String>]) -> String {
    let keep = |line: &&str| pending(line).keys().all(|name| !is_tested(name, tests));
    text.lines().filter(keep).map(|line| format!("{line}\n")).collect()
}

fn compare(promised: &BTreeSet<String>, tests: &[Vec<String>], pending_text: &str) -> Vec<String> {
    let pending = pending(pending_text);
    let mut found = Vec::new();
    for name in promised {
        match (is_tested(name, tests), pending.contains_key(name.as_str())) {
            (false, false) => found.push(format!("{name} has no test and is not in tests/pending.txt")),
            (true, true) => found.push(format!("{name} has a test: remove it from tests/pending.txt")),
            _ => {}
        }
    }
    for (name, issue) in &pending {
        if !promised.contains(*name) {
            found.push(format!("tests/pending.txt names {name}, which no document promises"));
        }
        if issue.is_empty() {
            found.push(format!("tests/pending.txt does not say with which issue {name} is due"));
        }
    }
    let stray = |path: &&Vec<String>| {
        let below = path.iter().any(|segment| segment == "scenarios" || segment == "cases");
        below && !path.iter().any(|segment| promised.iter().any(|name| bears(segment, name)))
    };
    found.extend(
        tests.iter().filter(stray).map(|path| {
            format!("{} stands among the scenarios or cases, but no document promises it", path.join("::"))
        }),
    );
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str =
        "## A\n| # | Name | Asserts | On |\n|---|---|---|---|\n| 1 | `one` | x | db |\n| 2 | `two` | y | pg |\n";
    const CASES: &str = "# Cases\n### D01 Lease runs out\n### D02 Retries\n";

    fn problems(list: &str, pending: &str) -> Vec<String> {
        compare(&promised(TABLE, CASES), &paths(list), pending)
    }

    #[test]
    fn all_tested_or_pending() {
        let list = "scenarios::one::postgres: test\ncases::d01_lease: test\n\n2 tests, 0 benchmarks\n";
        assert_eq!(problems(list, "# comment\ntwo 3\nD02  4\n"), Vec::<String>::new());
    }

    #[test]
    fn nextest_lists_are_read() {
        assert_eq!(
            problems("queuebox-tests::it scenarios::one\nqueuebox-tests::it two\n", "D01 3\nD02 3"),
            Vec::<String>::new()
        );
    }

    #[test]
    fn neither_and_both_are_problems() {
        let found = problems("one: test\nd02_x: test\n", "one 3\nD01 3\n");
        assert_eq!(
            found,
            ["one has a test: remove it from tests/pending.txt", "two has no test and is not in tests/pending.txt",]
        );
    }

    #[test]
    fn unknown_names_are_problems_in_both_places() {
        let found = problems("scenarios::three: test\none: test\ntwo: test\n", "D01 3\nD02\nfour 3\n");
        assert_eq!(found.len(), 3, "{found:?}");
    }

    #[test]
    fn fix_keeps_comments_and_untested_names() {
        assert_eq!(without_tested("# why\none 3\ntwo 4\n", &paths("a::one: test")), "# why\ntwo 4\n");
    }
}

//! What a whole run of the tests printed, kept in one folder so that one scan at its end can look for secrets, and for promises that
//! were broken once: `./dev test` names the folder in `QUEUEBOX_TEST_OUTPUT` and fails when it holds either.

use std::io::Write;
use std::path::Path;

/// The text that tests use for every secret, alone or as the beginning of one. Whatever QueueBox prints or answers, this is not in it.
pub const CANARY: &str = "canary-7731";

/// [`CANARY`], and as it would appear in a `Basic` header, a Kubernetes Secret or a URL; one per line. `./dev` reads the same file.
pub(crate) const SECRETS: &str = include_str!("secrets.txt");

/// Keeps what a program printed or a port answered for the scan. Does nothing in a run that has none.
pub fn keep(who: &str, texts: &[&str]) {
    let Some(folder) = std::env::var_os("QUEUEBOX_TEST_OUTPUT") else { return };
    keep_in(Path::new(&folder), who, texts);
}

fn keep_in(folder: &Path, who: &str, texts: &[&str]) {
    let path = folder.join(format!("{who}-{}.txt", std::process::id()));
    let file = std::fs::OpenOptions::new().create(true).append(true).open(&path);
    let written = file.and_then(|mut file| file.write_all(format!("{}\n", texts.join("\n")).as_bytes()));
    // What is not kept is not searched: better no run than one that looks at less.
    written.unwrap_or_else(|error| panic!("cannot keep {}: {error}", path.display()));
}

/// Panics unless a promise was kept, and leaves a note beside what the run printed: `./dev test` fails on it, also when a second try of
/// the test passes. For what may not happen even once (a message lost, reordered, sent twice without cause), not for what took too long.
#[track_caller]
pub fn promise(kept: bool, said: std::fmt::Arguments<'_>) {
    if !kept {
        keep(BROKEN, &[&note(said)]);
        panic!("{said}");
    }
}

/// Beginning of the names of files that hold a note of [`promise`]. `./dev` looks for it.
const BROKEN: &str = "broken-promise";

fn note(said: std::fmt::Arguments<'_>) -> String {
    format!("{}: {said}", std::thread::current().name().unwrap_or("a test"))
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    fn scan(folder: &Path) -> (bool, String) {
        let dev = crate::packages::workspace_root().join("dev");
        let output = Command::new("bash").arg(dev).arg("scan").arg(folder).output().unwrap();
        (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
    }

    /// What is kept is found by the scan of `./dev`: a secret in every form, a broken promise; nothing else is.
    #[test]
    fn the_scan_of_a_run_finds_each_form_of_a_secret() {
        assert_eq!(SECRETS.lines().next(), Some(CANARY));
        let folder = tempfile::tempdir().unwrap();
        keep_in(folder.path(), "queuebox", &["nothing of it", "canary-773"]);
        let (clean, said) = scan(folder.path());
        assert!(clean, "{said}");
        for secret in SECRETS.lines() {
            let leaky = tempfile::tempdir().unwrap();
            keep_in(leaky.path(), "queuebox", &["fine", &format!("password={secret}1")]);
            let (clean, said) = scan(leaky.path());
            assert!(!clean && said.contains("queuebox-"), "{secret}: {said}");
            assert!(!said.contains(secret), "it names the place, not the secret: {said}");
        }
        let broken = tempfile::tempdir().unwrap();
        keep_in(broken.path(), BROKEN, &[&note(format_args!("lost: {}", 7))]);
        let (kept, said) = scan(broken.path());
        assert!(!kept && said.contains("lost: 7"), "{said}");
        let empty = tempfile::tempdir().unwrap();
        assert!(!scan(empty.path()).0, "a run that kept nothing was not searched");
    }
}

//! A disk that a test can fill, without root and without mounting anything: a small library, loaded into a server or program
//! before the C library, refuses to let the files of one folder grow.

use std::{path::Path, sync::Arc};

use anyhow::{Context, Result};

use crate::packages::run;

const SOURCE: &str = include_str!("full_disk.c");

/// See the module. Everything that is started with its [`environment`](Disk::environment) lives on it.
#[derive(Debug, Clone)]
pub struct Disk {
    folder: Arc<tempfile::TempDir>,
}

impl Disk {
    /// A disk with room. Needs a C compiler, as Rust itself does.
    #[allow(clippy::new_without_default)]
    pub fn new() -> Self {
        Self::build().unwrap_or_else(|error| panic!("{error:#}"))
    }

    fn build() -> Result<Self> {
        // A server that gave its rights away must be able to read it.
        let folder = crate::shared::private_folder("disk")?;
        let source = folder.path().join("full_disk.c");
        std::fs::write(&source, SOURCE)?;
        let (source, library) = (source.to_string_lossy(), folder.path().join("full_disk.so"));
        run("cc", &["-shared", "-fPIC", "-O1", "-o", &library.to_string_lossy(), &source, "-ldl"])
            .context("cannot compile the library of a disk that can be full")?;
        Ok(Self { folder: Arc::new(folder) })
    }

    /// What a process is started with, for the files below `folder` to be on this disk.
    pub fn environment(&self, folder: &Path) -> Vec<(String, String)> {
        let text = |path: &Path| path.to_string_lossy().into_owned();
        // The library compares what the kernel calls the files.
        let folder = folder.canonicalize().unwrap_or_else(|_| folder.to_path_buf());
        vec![
            ("LD_PRELOAD".to_owned(), text(&self.folder.path().join("full_disk.so"))),
            ("QUEUEBOX_DISK".to_owned(), text(&folder)),
            ("QUEUEBOX_DISK_FULL".to_owned(), text(&self.marker())),
        ]
    }

    fn marker(&self) -> std::path::PathBuf {
        self.folder.path().join("is-full")
    }

    /// From now on there is no room: files can be written over, not made longer.
    pub fn fill(&self) {
        std::fs::write(self.marker(), "").unwrap_or_else(|error| panic!("cannot fill the disk: {error}"));
    }

    /// There is room again.
    pub fn make_room(&self) {
        std::fs::remove_file(self.marker()).unwrap_or_else(|error| panic!("cannot make room on the disk: {error}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_lets_nothing_grow_but_can_be_written_over() {
        let disk = Disk::new();
        let folder = tempfile::tempdir().unwrap();
        let (on, beside) = (folder.path().join("on"), folder.path().join("beside"));
        std::fs::create_dir(&on).unwrap();
        let shell = |script: &str| {
            let mut command = std::process::Command::new("sh");
            command.args(["-c", script]).current_dir(folder.path()).envs(disk.environment(&on));
            let output = command.output().unwrap();
            (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
        };
        assert!(shell("printf 12345 | dd of=on/file status=none").0);
        disk.fill();
        let (succeeded, said) = shell("printf 6 | dd of=on/file oflag=append conv=notrunc status=none");
        assert!(!succeeded && said.contains("No space left on device"), "{said}");
        assert!(shell("printf 54321 | dd of=on/file conv=notrunc status=none").0);
        assert!(shell("printf 12345 | dd of=beside status=none").0);
        disk.make_room();
        assert!(shell("printf 6 | dd of=on/file oflag=append conv=notrunc status=none").0);
        assert_eq!(std::fs::read_to_string(on.join("file")).unwrap(), "543216");
        assert_eq!(std::fs::read_to_string(beside).unwrap(), "12345");
    }
}

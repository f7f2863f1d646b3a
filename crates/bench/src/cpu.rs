//! Processor time, from `/proc`: of this process, of single threads of it, and of a PostgreSQL server with all of its processes.
//!
//! Where `/proc` does not tell (another system, a server on another machine), the answer is `None` and the figure is left out.

use std::{fs, time::Duration};

/// Clock ticks a second of `/proc/PID/stat`; the kernel's interface says 100 on every architecture that this is built for.
const TICKS_PER_SECOND: u64 = 100;

/// Fields behind the name of the program, which may contain anything.
fn stat(path: &str) -> Option<Vec<u64>> {
    let text = fs::read_to_string(path).ok()?;
    let fields = text.rsplit(')').next()?;
    Some(fields.split_whitespace().map(|field| field.parse().unwrap_or(0)).collect())
}

fn ticks(fields: &[u64], from: usize, count: usize) -> Duration {
    let sum: u64 = fields.iter().skip(from).take(count).sum();
    Duration::from_millis(sum * 1000 / TICKS_PER_SECOND)
}

/// User and system time of this process so far.
pub fn own() -> Option<Duration> {
    Some(ticks(&stat("/proc/self/stat")?, 11, 2))
}

/// Number of the calling thread.
pub fn this_thread() -> Option<u64> {
    fs::read_link("/proc/thread-self").ok()?.file_name()?.to_str()?.parse().ok()
}

/// User and system time of a thread of this process.
pub fn of_thread(thread: u64) -> Option<Duration> {
    Some(ticks(&stat(&format!("/proc/self/task/{thread}/stat"))?, 11, 2))
}

/// The main process of the server that `backend` belongs to, when it runs on this machine.
pub fn postmaster(backend: i32) -> Option<u64> {
    let parent = *stat(&format!("/proc/{backend}/stat"))?.get(1)?;
    let name = fs::read_to_string(format!("/proc/{parent}/comm")).ok()?;
    name.starts_with("postgres").then_some(parent)
}

/// Looks at a server until one meets no end of a child, at most.
const LOOKS_MAX: usize = 20;

/// Time of a server: its main process, the children it has buried, and those that live.
pub fn of_server(postmaster: u64) -> Option<Duration> {
    let main = || stat(&format!("/proc/{postmaster}/stat"));
    let mut before = main()?;
    for _ in 0..LOOKS_MAX {
        let living = of_children(postmaster)?;
        let after = main()?;
        // Whoever is buried between the two looks is in neither, or in both.
        if buried(&before) == buried(&after) {
            return Some(ticks(&after, 11, 4) + living);
        }
        before = after;
    }
    None
}

/// User and system time of the children that were waited for.
fn buried(fields: &[u64]) -> &[u64] {
    fields.get(13..15).unwrap_or_default()
}

fn of_children(parent: u64) -> Option<Duration> {
    let mut sum = Duration::ZERO;
    for entry in fs::read_dir("/proc").ok()?.flatten() {
        let name = entry.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse::<u64>().ok()) else { continue };
        if let Some(fields) = stat(&format!("/proc/{pid}/stat")).filter(|fields| fields.get(1) == Some(&parent)) {
            sum += ticks(&fields, 11, 2);
        }
    }
    Some(sum)
}

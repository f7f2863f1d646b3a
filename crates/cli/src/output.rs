//! How commands print: for people, or as one JSON value on standard output; and what they show on the way of long work.

use std::{
    fmt,
    io::{self, Write as _},
    time::Duration,
};

use clap::ValueEnum;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

/// How a result is printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum Output {
    /// For people.
    #[default]
    Text,
    /// JSON, as the ports of QueueBox answer.
    Json,
}

/// `print!`, for standard output whose reader may have gone: `queuebox generate crds | head -1` is no failure.
macro_rules! out {
    ($($text:tt)*) => { $crate::output::write(format_args!($($text)*), "") };
}

/// `println!`, likewise.
macro_rules! outln {
    () => { $crate::output::write(format_args!(""), "\n") };
    ($($text:tt)*) => { $crate::output::write(format_args!($($text)*), "\n") };
}

/// What [`out!`] and [`outln!`] do. Nobody reads any more: there is nothing left to do, and nobody to tell.
pub fn write(text: fmt::Arguments<'_>, end: &str) {
    let mut stdout = io::stdout().lock();
    let written = stdout.write_fmt(text).and_then(|()| stdout.write_all(end.as_bytes())).and_then(|()| stdout.flush());
    match written {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => std::process::exit(0),
        Err(error) => {
            eprintln!("queuebox: cannot write to standard output: {error}");
            std::process::exit(1);
        }
        Ok(()) => {}
    }
}

/// Prints a result as one line of JSON.
///
/// # Errors
/// None that can occur: results are plain data.
pub fn print_json(result: &impl Serialize) -> anyhow::Result<()> {
    outln!("{}", serde_json::to_string(result)?);
    Ok(())
}

/// Work that takes its time, shown on standard error where a person looks at it: it is a terminal, and no JSON was asked for. Gone when
/// it is over.
pub struct Progress(ProgressBar);

impl Progress {
    /// Work that counts rows.
    pub fn of_rows(what: &'static str, output: Output) -> Self {
        Self::begin(what, output == Output::Text, "{spinner} {msg}: {human_pos} rows, {per_sec}, {elapsed}")
    }

    /// Work of which only the time is known.
    pub fn of_time(what: &'static str, output: Output) -> Self {
        Self::begin(what, output == Output::Text, "{spinner} {msg}, {elapsed}")
    }

    fn begin(what: &'static str, shown: bool, template: &str) -> Self {
        let bar = if shown { ProgressBar::new_spinner() } else { ProgressBar::hidden() }.with_message(what);
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        bar.tick();
        bar.enable_steady_tick(Duration::from_millis(200));
        Self(bar)
    }

    /// So many rows so far.
    pub fn at(&self, rows: u64) {
        self.0.set_position(rows);
    }

    /// A part of the work begins. Where nobody looks it is a line of its own, so that a log shows how far it came.
    pub fn part(&self, name: &str) {
        if self.0.is_hidden() {
            eprintln!("{name} …");
        } else {
            self.0.set_message(name.to_owned());
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

//! `queuebox`: the one binary. `queuebox help` lists what it does.
//!
//! Exit codes of every command: 0 done, 1 failed, 2 wrong usage (contract 2.5.8).

#[macro_use]
mod output;

mod bench;
mod check;
mod demo;
mod doctor;
mod generate;
mod lab;
mod letters;
mod management;
mod manifests;
mod migrate;
mod observe;
mod operator;
mod serve;
mod tail;
mod traces;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// A message is a few dozen small allocations that come and go on several threads: about a fifth of the relay's own processor time with the
/// allocator of the C library (`docs/performance.md`).
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Carries messages between a relational database and the world outside, and never loses one.
#[derive(Debug, Parser)]
#[command(name = "queuebox", version, max_term_width = 120)]
struct Arguments {
    #[command(subcommand)]
    command: Command,

    /// What is logged: error, warn, info, debug or trace; or a filter such as `queuebox_engine=debug`. `run` and `operator` log
    /// info, the other commands errors.
    #[arg(long, global = true, value_name = "LEVEL", value_parser = log_directives)]
    log: Option<String>,

    /// How it is logged.
    #[arg(long, global = true, value_enum, default_value_t = LogFormat::Text)]
    log_format: LogFormat,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve the Relay of the given manifests in this process.
    Run(manifests::RunOptions),
    /// Run the Relays of a Kubernetes cluster: workers, their configuration, their number and their status.
    Operator(operator::Options),
    /// Check manifests without running anything: all problems at once, each with its field.
    Check(check::Options),
    /// Bring the tables of the Relay's database to the newest version.
    Migrate(migrate::Options),
    /// Dead letters: list, show, requeue, discard.
    #[command(subcommand)]
    Dead(letters::Dead),
    /// Put finished rows back to pending: dead ones, or those of the states named.
    Replay(letters::Replay),
    /// What a running worker says of itself: backlog, sources, destinations, database.
    Status(observe::Options),
    /// What keeps a running worker from delivering, the cause of the others first.
    Explain(observe::Options),
    /// Follow what becomes of messages, as a running worker says it.
    Tail(tail::Options),
    /// Ask a URL, such as a worker's /readyz; exit 0 when it answers 2xx.
    Probe(observe::Probe),
    /// Look at the database and the brokers of a Relay: what is wrong, and what mends it.
    Doctor(doctor::Options),
    /// Turn a classic queuebox.yml into manifests.
    Convert(manifests::ConvertOptions),
    /// Experiments that show why QueueBox exists.
    #[command(subcommand)]
    Lab(lab::Lab),
    /// Show the main job on SQLite: committed rows and a webhook on their way to a small receiver.
    Demo(demo::Options),
    /// How fast it is on this machine: rungs side by side, on servers that flush their commits.
    Bench(bench::Options),
    /// Print a file that is generated from this program.
    #[command(subcommand)]
    Generate(generate::Generate),
}

#[tokio::main]
async fn main() -> ExitCode {
    // Asking for help is no failure, a wrong word is: clap decides, with 0 or 2.
    let arguments = Arguments::try_parse().unwrap_or_else(|error| wrong_words(error));
    // Several crates bring TLS; without a default provider the first handshake would panic.
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    start_log(&arguments);
    let outcome = match arguments.command {
        Command::Run(options) => serve::run(&options).await,
        Command::Operator(options) => operator::run(options).await,
        Command::Check(options) => check::run(&options),
        Command::Migrate(options) => migrate::run(&options).await,
        Command::Dead(command) => letters::dead(&command).await,
        Command::Replay(replay) => letters::replay_rows(&replay).await,
        Command::Status(options) => observe::status(&options).await,
        Command::Explain(options) => observe::explain(&options).await,
        Command::Tail(options) => tail::run(&options).await,
        Command::Probe(options) => observe::probe(&options).await,
        Command::Doctor(options) => doctor::run(&options).await,
        Command::Convert(options) => manifests::convert(&options),
        Command::Lab(lab) => lab::run(lab).await,
        Command::Demo(options) => demo::run(&options).await,
        Command::Bench(options) => bench::run(options).await,
        Command::Generate(what) => {
            generate::run(what, &mut <Arguments as clap::CommandFactory>::command());
            Ok(())
        }
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("queuebox: {}", queuebox_core::redact::redact_whole(&chain(&error)));
            ExitCode::from(if error.is::<manifests::WrongUsage>() { 2 } else { 1 })
        }
    }
}

/// Says what is wrong with the words of the command line, and ends.
fn wrong_words(error: clap::Error) -> ! {
    use clap::error::{ContextKind, ContextValue, ErrorKind};
    let unknown = match error.get(ContextKind::InvalidArg) {
        Some(ContextValue::String(word)) if error.kind() == ErrorKind::UnknownArgument => Some(word.as_str()),
        _ => None,
    };
    if let Some(path) = unknown.filter(|word| is_manifest(word)) {
        eprintln!("error: {path} stands alone; manifests are named with -f: -f {path}");
        std::process::exit(2);
    }
    error.exit()
}

fn is_manifest(word: &str) -> bool {
    !word.starts_with('-')
        && ([".yaml", ".yml", ".json"].iter().any(|end| word.ends_with(end)) || std::path::Path::new(word).exists())
}

/// An error and its causes, without those that only repeat what was said before.
fn chain(error: &anyhow::Error) -> String {
    error.chain().map(ToString::to_string).fold(String::new(), |said, cause| match cause.trim() {
        "" => said,
        cause if said.contains(cause) => said,
        cause if said.is_empty() => cause.to_owned(),
        cause => format!("{said}: {cause}"),
    })
}

const LEVELS: [&str; 6] = ["error", "warn", "info", "debug", "trace", "off"];

/// A word that is no level would be taken for the name of a module, and silence everything else.
fn log_directives(text: &str) -> Result<String, String> {
    let levels = "levels are error, warn, info, debug, trace and off; a filter is such as queuebox_engine=debug,info";
    let is_level = |word: &str| LEVELS.iter().any(|level| level.eq_ignore_ascii_case(word));
    // Filters on spans have commas of their own.
    for part in text.split(',').map(str::trim).filter(|_| !text.contains(['[', '{'])) {
        let level = part.rsplit_once('=').map_or(part, |(_, level)| level);
        if !is_level(level) {
            return Err(format!("{level:?} is no level: {levels}"));
        }
    }
    // The library takes no blanks between them.
    let text = text.split(',').map(str::trim).collect::<Vec<_>>().join(",");
    tracing_subscriber::EnvFilter::builder().parse(&text).map_err(|error| format!("{error}: {levels}"))?;
    Ok(text)
}

/// What client libraries say about broken connections, the connectors and stores say as well, once and with names.
const QUIET: &str = "lapin=off,async_nats=off,sqlx=off,sqlx_core=off";

/// The library prints messages that came back with their payloads; these are nobody's to read in a log.
const NO_PAYLOADS: &str = "lapin::returned_messages=off";

/// The filter for the level or filter that was given; `usual` when nothing was.
fn log_filter(given: Option<&str>, usual: &str) -> tracing_subscriber::EnvFilter {
    let directives = match given {
        Some(given) => format!("{NO_PAYLOADS},{given}"),
        None => format!("{NO_PAYLOADS},{QUIET},{usual}"),
    };
    tracing_subscriber::EnvFilter::builder().parse_lossy(directives)
}

fn start_log(arguments: &Arguments) {
    let usual = if matches!(arguments.command, Command::Run(_) | Command::Operator(_)) { "info" } else { "error" };
    let filter = log_filter(arguments.log.as_deref(), usual);
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_target(false);
    match arguments.log_format {
        LogFormat::Text => log.with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr())).init(),
        LogFormat::Json => log.json().flatten_event(true).init(),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    #[derive(Clone, Default)]
    struct Written(Arc<Mutex<Vec<u8>>>);

    impl std::io::Write for Written {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    fn logged(given: Option<&str>) -> String {
        let written = Written::default();
        let writer = written.clone();
        let log = tracing_subscriber::fmt()
            .with_env_filter(log_filter(given, "info"))
            .with_writer(move || writer.clone())
            .finish();
        tracing::subscriber::with_default(log, || {
            tracing::warn!(target: "lapin::returned_messages", "payload");
            tracing::error!(target: "lapin::io_loop", "broken pipe");
            tracing::error!(target: "async_nats::connector", "cannot connect");
            tracing::info!("ours");
            tracing::debug!("detail");
        });
        String::from_utf8(written.0.lock().unwrap().clone()).unwrap()
    }

    #[test]
    fn a_word_that_is_no_level_is_refused() {
        for right in ["info", "WARN", "off", "queuebox_engine=debug,info", "info, lapin=trace", "[publish{id=7}]=debug"]
        {
            assert!(log_directives(right).is_ok(), "{right}");
        }
        for wrong in ["inof", "", "info,verbose", "queuebox=lots", "queuebox_engine", "[=info"] {
            let refused = log_directives(wrong).unwrap_err();
            assert!(refused.contains("error, warn, info"), "{wrong}: {refused}");
        }
    }

    #[test]
    fn causes_that_repeat_their_error_are_not_said_again() {
        let error = anyhow::anyhow!("Connection refused (os error 111)")
            .context("cannot connect: Connection refused (os error 111)")
            .context("no answer");
        assert_eq!(chain(&error), "no answer: cannot connect: Connection refused (os error 111)");
    }

    #[test]
    fn a_lone_path_is_taken_for_a_manifest() {
        assert!(is_manifest("shop.yaml") && is_manifest("src") && !is_manifest("--bogus") && !is_manifest("bogus"));
    }

    #[test]
    fn client_libraries_are_quiet_until_they_are_asked() {
        let says = |log: &str, words: [bool; 5]| {
            let found = ["payload", "broken pipe", "cannot connect", "ours", "detail"].map(|word| log.contains(word));
            assert_eq!(found, words, "{log}");
        };
        says(&logged(None), [false, false, false, true, false]);
        says(&logged(Some("debug")), [false, true, true, true, true]);
        says(&logged(Some("info,lapin=trace")), [false, true, true, true, false]);
        says(&logged(Some("info,lapin::returned_messages=warn")), [true, true, true, true, false]);
    }
}

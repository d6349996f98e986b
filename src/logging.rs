//! Structured logs to standard error; standard output belongs to answers.

use std::{io, str::FromStr};

use tracing::level_filters::LevelFilter;
use tracing_subscriber::{
    Layer, filter::Targets, fmt, layer::SubscriberExt, util::SubscriberInitExt,
};

use crate::config::{Log, LogFormat};

/// Crates that warn of what whoever reaches a port says: a line for each datagram or connection, which would let strangers
/// fill a disk. What is refused is counted in metrics instead.
const TOLD_BY_STRANGERS: [&str; 2] = ["h2", "chitchat"];

/// Starts logging for the whole process; a second call changes nothing.
///
/// # Errors
/// `InvalidInput` if the level cannot be read; validation refuses such a configuration before.
pub fn start(log: &Log) -> io::Result<()> {
    let levels =
        levels(&log.level).map_err(|why| io::Error::new(io::ErrorKind::InvalidInput, why))?;
    let lines = fmt::layer().with_writer(io::stderr);
    let lines = match log.format {
        LogFormat::Text => lines.with_ansi(false).boxed(),
        LogFormat::Json => lines.json().flatten_event(true).boxed(),
    };
    // An embedder that has its own subscriber keeps it.
    if tracing_subscriber::registry().with(lines.with_filter(levels)).try_init().is_err() {
        tracing::debug!("logging was started before");
    }
    Ok(())
}

/// What is logged. Of strangers only errors are, unless the level asks for details, or for one of these crates by its name.
fn levels(given: &str) -> Result<Targets, tracing_subscriber::filter::ParseError> {
    let levels = Targets::from_str(given)?;
    if levels.default_level().is_some_and(|level| level > LevelFilter::INFO) {
        return Ok(levels);
    }
    let quiet: Vec<_> = TOLD_BY_STRANGERS
        .into_iter()
        .filter(|name| !levels.iter().any(|(target, _)| target.starts_with(name)))
        .map(|name| (name, LevelFilter::ERROR))
        .collect();
    Ok(levels.with_targets(quiet))
}

#[cfg(test)]
mod tests {
    use tracing::Level;

    use super::*;

    #[test]
    fn strangers_do_not_fill_the_log_unless_it_is_asked_for() {
        for (given, warns) in [
            ("info", false),
            ("warn", false),
            ("kvstrata=debug,info", false),
            ("info,h2=warn,chitchat=info", true),
            ("debug", true),
        ] {
            let levels = levels(given).unwrap();
            for name in ["h2::proto::streams", "chitchat"] {
                assert_eq!(levels.would_enable(name, &Level::WARN), warns, "{given}: {name}");
            }
            assert!(levels.would_enable("kvstrata::server", &Level::WARN), "{given}");
        }
        assert!(levels("no=such=level").is_err());
    }
}

//! Structured logs to standard error; standard output belongs to answers.

use std::{io, str::FromStr};

use tracing_subscriber::{
    Layer, filter::Targets, fmt, layer::SubscriberExt, util::SubscriberInitExt,
};

use crate::config::{Log, LogFormat};

/// Starts logging for the whole process; a second call changes nothing.
///
/// # Errors
/// `InvalidInput` if the level cannot be read; validation refuses such a configuration before.
pub fn start(log: &Log) -> io::Result<()> {
    let levels = Targets::from_str(&log.level)
        .map_err(|why| io::Error::new(io::ErrorKind::InvalidInput, why))?;
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

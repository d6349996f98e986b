//! What commands that serve have in common: when they should end, and where they say that they listen.

use std::io::{self, Write};

use serde::Serialize;
use tokio::signal::unix::{SignalKind, signal};
use tracing::{info, warn};

/// Resolves when the process is asked to end, by SIGTERM or SIGINT. From this call on neither ends it.
///
/// # Errors
/// As the system's.
pub(super) fn asked_to_end() -> io::Result<impl Future<Output = ()>> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => info!("SIGTERM received"),
            _ = interrupt.recv() => info!("SIGINT received"),
        }
    })
}

/// Writes where a process listens as a line of JSON; what keeps it from that is logged.
///
/// # Blocking
/// As long as the reader takes.
pub(super) fn print_addresses(addresses: &impl Serialize) {
    let print = || -> io::Result<()> {
        let mut out = io::stdout().lock();
        serde_json::to_writer(&mut out, addresses)?;
        writeln!(out)?;
        out.flush()
    };
    if let Err(error) = print() {
        warn!(%error, "addresses not printed");
    }
}

//! What a server asks of whoever connects: tokens, TLS, and the files that both are read from.

use std::{fs, os::unix::fs::PermissionsExt, path::Path, sync::Arc};

use kvstrata_tiers::{error::Result, stack::Stack};
use tracing::warn;

use crate::{
    auth::{Gate, allotments},
    config::Config,
    metrics::{Door, Reloaded, TrustMetrics},
    reload::{Watched, follow},
    tasks::Tasks,
    tls::{self, Entry, Tls},
};

/// See the module.
pub(crate) struct Trust {
    pub(crate) gate: Gate,
    tls: Option<Tls>,
    metrics: TrustMetrics,
    /// Until somebody looks after them.
    watched: Vec<Watched>,
}

impl std::fmt::Debug for Trust {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Trust")
            .field("gate", &self.gate)
            .field("tls", &self.tls)
            .finish_non_exhaustive()
    }
}

impl Trust {
    /// Loads what the configuration names.
    ///
    /// # Errors
    /// `Invalid` with the setting, the path and why; never with a secret.
    pub(crate) fn load(config: &Config, metrics: &TrustMetrics) -> Result<Self> {
        let mut watched = Vec::new();
        let gate = match config.auth.tokens_file.given() {
            None => Gate::open(metrics.clone()),
            Some(path) => {
                warn_if_open(&path.0);
                let gate = Gate::closed(metrics.clone())?;
                let loads = gate.clone();
                let files = vec![("auth.tokens_file", path.0.clone())];
                watched.push(Watched::open(Reloaded::Tokens, files, move |contents| {
                    loads.replace(contents.first().map(Vec::as_slice).unwrap_or_default())
                })?);
                gate
            }
        };
        let tls = tls::watched(&config.tls)?.map(|(tls, files)| {
            watched.push(files);
            tls
        });
        if gate.asks() && tls.is_none() && config.server.listens_beyond_loopback() {
            warn!("tokens cross the network in plain text: set tls.cert_file and tls.key_file");
        }
        Ok(Self { gate, tls, metrics: metrics.clone(), watched })
    }

    /// Loads what tenants may have of `stack` and do in a second, if the configuration names a file of it.
    ///
    /// # Errors
    /// `Invalid` with the setting, the path and why.
    pub(crate) fn load_tenants(&mut self, config: &Config, stack: &Stack) -> Result<()> {
        let Some(path) = config.auth.tenants_file.given() else { return Ok(()) };
        let (stack, rates) = (stack.clone(), Arc::clone(self.gate.rates()));
        let files = vec![("auth.tenants_file", path.0.clone())];
        self.watched.push(Watched::open(Reloaded::Tenants, files, move |contents| {
            let text = contents.first().map(Vec::as_slice).unwrap_or_default();
            let allotments = allotments::read(text)?;
            let quotas: Vec<_> =
                allotments.iter().map(|one| (one.tenant.as_str(), one.quota)).collect();
            stack.set_quotas(&quotas)?;
            let limits: Vec<_> =
                allotments.iter().map(|one| (one.tenant.as_str(), one.rates)).collect();
            rates.set(&limits);
            Ok(())
        })?);
        Ok(())
    }

    /// How connections to a door begin. A client that speaks no TLS where it should is told
    /// `plain_answer`, which is of the door's protocol.
    pub(crate) fn entry(&self, door: Door, plain_answer: Vec<u8>) -> Entry {
        Entry::new(door, self.tls.clone(), self.metrics.clone(), plain_answer)
    }

    /// How connections begin that stay on this host, which no certificate is for.
    pub(crate) fn plain_entry(&self, door: Door) -> Entry {
        Entry::new(door, None, self.metrics.clone(), Vec::new())
    }

    /// Reads files again when they change, for as long as the tasks run.
    pub(crate) fn follow(&mut self, tasks: &Tasks) {
        let watched = std::mem::take(&mut self.watched);
        if !watched.is_empty() {
            let (metrics, stop) = (self.metrics.clone(), tasks.stop_token());
            tasks.spawn_critical("reload", follow(watched, metrics, stop));
        }
    }
}

fn warn_if_open(path: &Path) {
    // What cannot be looked at cannot be read either, which is told then.
    let open = fs::metadata(path).is_ok_and(|found| found.permissions().mode() & 0o004 != 0);
    if open {
        warn!(path = %path.display(), "tokens are readable by everybody on this host");
    }
}

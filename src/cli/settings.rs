//! The flags of commands that read the configuration of a node.

use std::{env, fs, path::PathBuf};

use super::Failure;
use crate::config::{self, FileSource, Sources};

/// Where settings come from, beside defaults and environment.
#[derive(Debug, Clone, clap::Args)]
pub struct Settings {
    /// Configuration file (TOML).
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Sets any key, for example `lease.ttl_default=10s`; may be repeated.
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
}

impl Settings {
    /// All sources of settings.
    ///
    /// # Errors
    /// `Usage` for a file that cannot be read and a setting without a value.
    ///
    /// # Blocking
    /// For the file.
    pub(super) fn sources(&self) -> Result<Sources, Failure> {
        let file = match &self.config {
            None => None,
            Some(path) => {
                let text = fs::read_to_string(path).map_err(|why| {
                    Failure::Usage(format!("--config: {}: {why}", path.display()))
                })?;
                Some(FileSource { path: path.clone(), text })
            }
        };
        let mut flags = Vec::new();
        for setting in &self.set {
            let Some((key, value)) = setting.split_once('=') else {
                return Err(Failure::Usage(format!(
                    "--set: {setting:?} given, KEY=VALUE required"
                )));
            };
            flags.push((key.to_owned(), value.to_owned()));
        }
        Ok(Sources { file, env: config::env_sources(env::vars_os()), flags })
    }
}

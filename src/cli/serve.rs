//! `kvstrata serve`: configuration, logging, server, signals.

use std::{net::SocketAddr, time::Duration};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tracing::info;

use super::{
    Failure,
    process::{asked_to_end, print_addresses},
    settings::Settings,
};
use crate::{
    budget::{Budget, Machine},
    config::{self, Config, Problems, Sources},
    limits::{
        BULK_CONNECTIONS_MAX, CONNECTIONS_MAX, FILES_BESIDES_CONNECTIONS, HTTP_CONNECTIONS_MAX,
        RESP_CONNECTIONS_MAX,
    },
    logging,
    server::{ServeError, Server},
    tasks,
};

/// Time for the process to end once it has stopped serving: closing the store takes milliseconds on
/// a disk that answers, and with the drain this stays below the grace that Kubernetes gives.
const EXIT_GRACE: Duration = Duration::from_secs(5);

/// Examples for the help.
const EXAMPLES: &str = "\
Examples:
  kvstrata serve
  kvstrata serve --config /etc/kvstrata/kvstrata.toml
  kvstrata serve --grpc-listen 127.0.0.1:9400 --dram 4GiB
  KV_LOG__LEVEL=debug kvstrata serve --set lease.ttl_default=10s

Every key is in docs/configuration.md. Sources, weakest first: defaults, file, environment, flags.";

/// The flags of `serve`.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    #[command(flatten)]
    settings: Settings,
    /// Short for `--set server.grpc_listen=`.
    #[arg(long, value_name = "ADDRESS")]
    grpc_listen: Option<SocketAddr>,
    /// Short for `--set server.http_listen=`.
    #[arg(long, value_name = "ADDRESS")]
    http_listen: Option<SocketAddr>,
    /// Short for `--set dram.capacity=`, for example `4GiB`.
    #[arg(long, value_name = "SIZE")]
    dram: Option<String>,
    /// Prints one line of JSON with the addresses to standard output once the node serves.
    #[arg(long)]
    print_addresses: bool,
    /// Checks the configuration and exits.
    #[arg(long)]
    check: bool,
}

/// Runs a node until a signal.
///
/// # Errors
/// `Usage` for a configuration that cannot work, `Failed` for a server that did.
///
/// # Cancel safety
/// Not safe: the server would not drain.
pub async fn run(args: Args) -> Result<(), Failure> {
    let config = config::load(&sources(&args)?)?;
    if args.check {
        let divided = Budget::divide(&config, Machine::detect());
        return divided.map(drop).map_err(|problem| Problems(vec![problem]).into());
    }
    logging::start(&config.log).map_err(Failure::failed)?;
    log_settings(&config);
    raise_open_files(&config);
    let mut server = Server::bind(&config).await.map_err(|why| match why {
        ServeError::Config(problems) => problems.into(),
        other => Failure::failed(other),
    })?;
    let shutdown = asked_to_end().map_err(Failure::failed)?;
    let ready = |addresses| {
        if args.print_addresses {
            print_addresses(&addresses);
        }
    };
    let served = server.serve(shutdown, ready).await.map_err(Failure::failed);
    tasks::end_process_within(EXIT_GRACE);
    drop(server);
    served
}

fn sources(args: &Args) -> Result<Sources, Failure> {
    let mut sources = args.settings.sources()?;
    let mut short = |key: &str, value: Option<String>| {
        sources.flags.extend(value.map(|value| (key.to_owned(), value)));
    };
    short("server.grpc_listen", args.grpc_listen.map(|address| address.to_string()));
    short("server.http_listen", args.http_listen.map(|address| address.to_string()));
    short("dram.capacity", args.dram.clone());
    Ok(sources)
}

/// Asks for as many open files as there may be connections. A shell allows 1024 by default, and a
/// node that has none left cannot answer probes.
fn raise_open_files(config: &Config) {
    let resp = if config.server.resp_address().is_some() { RESP_CONNECTIONS_MAX } else { 0 };
    let connections = CONNECTIONS_MAX + BULK_CONNECTIONS_MAX + HTTP_CONNECTIONS_MAX + resp;
    let needed = connections + FILES_BESIDES_CONNECTIONS;
    let needed = u64::try_from(needed).unwrap_or(u64::MAX);
    let limit = getrlimit(Resource::Nofile);
    let most = limit.maximum.unwrap_or(u64::MAX);
    if limit.current.is_none_or(|current| current >= needed) {
        return;
    }
    let raised = Rlimit { current: Some(needed.min(most)), ..limit };
    match setrlimit(Resource::Nofile, raised) {
        Ok(()) if most >= needed => {}
        Ok(()) => info!(allowed = most, needed, "fewer open files allowed than connections"),
        Err(error) => info!(%error, needed, "limit of open files not raised"),
    }
}

/// The effective configuration, once. There is no secret in it: the secret is in a file.
fn log_settings(config: &Config) {
    for (key, value) in config.settings() {
        info!(key, %value, "setting");
    }
}

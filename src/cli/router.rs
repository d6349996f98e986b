//! `kvstrata router`: a reverse proxy in front of engines.

use std::{net::SocketAddr, time::Duration};

use super::{
    Failure,
    process::{asked_to_end, print_addresses},
    target::Access,
};
use crate::{
    config::Log,
    logging,
    router::{self, ENGINES_MAX, EngineSpec, Mode, Setup},
};

/// Examples for the help.
const EXAMPLES: &str = "\
Examples:
  kvstrata router --kvstrata 10.0.0.9:9400 \\
                  --engine http://10.0.0.1:8000,events=tcp://10.0.0.1:5557,replay=tcp://10.0.0.1:5558 \\
                  --engine http://10.0.0.2:8000,events=tcp://10.0.0.2:5557,replay=tcp://10.0.0.2:5558
  kvstrata router --mode device-only --engine http://10.0.0.1:8000 --engine http://10.0.0.2:8000

docs/router.md has what engines have to be started with.";

/// The flags of `router`.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// An engine: where it answers and, after commas, events=tcp://HOST:PORT it publishes at,
    /// replay=tcp://HOST:PORT, name=NAME, rank=NUMBER, instance=NAME and node=NAME as kvstrata knows it
    #[arg(long = "engine", value_name = "http://HOST:PORT[,...]", required = true)]
    engines: Vec<EngineSpec>,
    /// Where to listen
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:9480")]
    listen: SocketAddr,
    /// How engines are chosen
    #[arg(long, value_enum, default_value_t = Mode::Timed)]
    mode: Mode,
    /// The kvstrata whose tiers count; of several nodes with commas between them, one that answers
    #[arg(long, value_name = "[https://]HOST:PORT[,..]", env = "KVSTRATA_ENDPOINT")]
    kvstrata: Option<String>,
    /// Who the router is for kvstrata.
    #[command(flatten)]
    access: Access,
    /// How long kvstrata may take to say what its tiers have; then it is decided without
    #[arg(long, value_name = "TIME", default_value = "20ms", value_parser = humantime::parse_duration)]
    tiers_deadline: Duration,
    /// What is logged, as log.level of the server
    #[arg(long, value_name = "LEVEL", default_value = "info", env = "KV_LOG__LEVEL")]
    log: String,
    /// Prints one line of JSON with the address to standard output once it listens
    #[arg(long)]
    print_addresses: bool,
}

/// Runs a router until a signal.
///
/// # Errors
/// `Usage` for engines that cannot be told apart, `Failed` if it cannot listen.
///
/// # Cancel safety
/// Not safe: requests under way would be cut.
pub async fn run(args: Args) -> Result<(), Failure> {
    check(&args.engines)?;
    let options = args.access.options()?;
    let tiers = args.kvstrata.map(|endpoint| (endpoint, options));
    logging::start(&Log { level: args.log, ..Log::default() })
        .map_err(|why| Failure::Usage(format!("--log: {why}")))?;
    let shutdown = asked_to_end().map_err(Failure::failed)?;
    let ready = |address: SocketAddr| {
        if args.print_addresses {
            print_addresses(&serde_json::json!({ "http": address }));
        }
    };
    let setup = Setup {
        listen: args.listen,
        engines: args.engines,
        mode: args.mode,
        tiers,
        tiers_deadline: args.tiers_deadline,
    };
    router::run(setup, shutdown, ready)
        .await
        .map_err(|why| Failure::Failed(format!("listen on {}: {why}", args.listen)))
}

fn check(engines: &[EngineSpec]) -> Result<(), Failure> {
    if engines.len() > ENGINES_MAX {
        let given = engines.len();
        return Err(Failure::Usage(format!("--engine: {given} given, {ENGINES_MAX} allowed")));
    }
    for (at, engine) in engines.iter().enumerate() {
        if engines.iter().take(at).any(|before| before.name == engine.name) {
            let name = &engine.name;
            return Err(Failure::Usage(format!("--engine: {name} given twice: give it a name=")));
        }
    }
    Ok(())
}

//! `kvstrata drain`: has a node leave, and says how far it is.

use std::time::Duration;

use bytesize::ByteSize;

use super::{Failure, stdout, target::TokenText};
use crate::{
    client::{ClientOptions, DrainState, Operator, Token},
    config::AdminAddress,
    drain::Phase,
    numbers::count,
};

const EXAMPLES: &str = "\
Examples:
  kvstrata drain --wait
  kvstrata drain --admin unix:/run/kvstrata-admin/admin.sock
  kvstrata drain --status

The node announces that it leaves, hands the hottest blocks to other nodes of its cluster, lets its clients finish
within server.drain_grace, and then waits to be ended. There is no way back but a restart. Draining a node that
drains, or has drained, is a success. Exit codes: 0 it leaves (with --wait: it has drained), 1 it could not be asked,
or ended before it had drained, 64 the command line is wrong.";

/// Has a node leave: its clients finish, others get its hottest blocks
#[derive(Debug, Clone, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Where its admin listener is (server.admin_listen)
    #[arg(
        long,
        value_name = "127.0.0.1:PORT|unix:/PATH",
        env = "KVSTRATA_ADMIN",
        default_value = "127.0.0.1:9404"
    )]
    admin: AdminAddress,

    /// Returns when it has drained, and says how far it is meanwhile
    #[arg(long)]
    wait: bool,

    /// Says how far it is, and changes nothing
    #[arg(long, conflicts_with = "wait")]
    status: bool,

    /// Token of an operator, where the node asks for tokens and the listener is no Unix socket
    #[arg(long, value_name = "TOKEN", env = "KVSTRATA_TOKEN", hide_env_values = true)]
    token: Option<TokenText>,
}

/// Asks the node, and follows it if that is wished.
///
/// # Errors
/// `Failed` if it could not be asked, or ended too early.
///
/// # Cancel safety
/// Safe: the node leaves, whoever follows.
pub async fn run(args: Args) -> Result<(), Failure> {
    let token = args.token.as_ref().map(TokenText::token).transpose()?.flatten();
    let operator = Operator::connect(&args.admin, options(token)).await?;
    let status = operator.status().await?;
    let node = &status.node;
    if args.status {
        let members = status.members;
        let line = format!("{node}: {}, one of {members} node(s)\n", Line(&status.drain));
        return Ok(stdout::print(&line)?);
    }
    let mut drained = operator.drain().await?;
    let mut last = String::new();
    while let Some(state) = drained.next().await? {
        let line = Line(&state).to_string();
        // The time that is left is no news.
        let news = line.split(", at most").next().unwrap_or_default().to_owned();
        if news != last {
            stdout::print(&format!("{node}: {line}\n"))?;
            last = news;
        }
        if state.phase == Phase::Drained || !args.wait {
            return Ok(());
        }
    }
    Err(Failure::failed(format!("{node} has ended before it had drained")))
}

fn options(token: Option<Token>) -> ClientOptions {
    ClientOptions { token, call_deadline: Duration::from_secs(5), ..ClientOptions::default() }
}

/// How far a drain is, as people read it.
struct Line<'a>(&'a DrainState);

impl std::fmt::Display for Line<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let DrainState { phase, sessions, leases, left, handed } = self.0;
        f.write_str(match phase {
            Phase::Serving => return f.write_str("serving"),
            Phase::Announcing => "telling routers and members",
            Phase::HandingOver => "handing over",
            Phase::Finishing => "waiting for clients",
            Phase::Flushing => "copying to nvme what waits for it",
            Phase::Drained => "drained",
        })?;
        if handed.chosen > 0 {
            let (blocks, chosen) = (count(handed.blocks + handed.present), count(handed.chosen));
            write!(f, ", {blocks} of {chosen} blocks ({}) at others", ByteSize(handed.bytes))?;
        }
        if handed.refused > 0 {
            write!(f, ", {} not taken", count(handed.refused))?;
        }
        if *phase == Phase::Drained {
            return Ok(());
        }
        let seconds = left.as_secs();
        write!(f, ", {sessions} session(s), {leases} lease(s), at most {seconds} s left")
    }
}

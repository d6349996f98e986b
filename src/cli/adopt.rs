//! `kvstrata adopt`: gives the packs of a node that is gone for good to those that are left, at once.

use std::{sync::Arc, time::Duration};

use kvstrata_tiers::object::{
    bucket::Bucket,
    format::Role,
    names::{ClusterName, Owner},
    owner::{Claim, OwnerError, Sighting, look, newest_epochs, open_epoch},
    rebuild::rebuild,
};
use prometheus_client::registry::Registry;
use tokio::time::{Instant, sleep};

use super::{Failure, progress, settings::Settings, stdout};
use crate::{config, object};

/// How long it is waited for a node: they look every minute.
const WAIT: Duration = Duration::from_secs(300);
/// How often it is looked whether one has it.
const LOOK_EVERY: Duration = Duration::from_secs(2);
/// How long a question to the bucket may take.
const DEADLINE: Duration = Duration::from_secs(60);
/// Who has opened the epoch, for whoever looks.
const RELEASED_BY: &str = "kvstrata adopt";

const EXAMPLES: &str = "\
Examples:
  Node 3 is gone for good; the others have its configuration:
    kvstrata adopt --ordinal 3 --config /etc/kvstrata/kvstrata.toml
  It ended a moment ago, and nobody should wait until it has been silent for 10 minutes:
    kvstrata adopt --ordinal 3 --config /etc/kvstrata/kvstrata.toml --force

The nodes that are left do this by themselves 10 minutes after the last sign of life. One of them, the same
for all who look, serves what is in the bucket, removes what is too old, and adds nothing. The node whose
ordinal it is gets it back as soon as it starts again; one that still runs takes it back within a
minute or two. The exit code is 0 once a node has it, 1 if none has taken it or the bucket fails, 64 if
there is no such ordinal.";

/// Give the packs of a node that is gone to the nodes that are left
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// The ordinal of the node that is gone
    #[arg(long, value_name = "N")]
    ordinal: u32,

    /// Although its last sign of life is young
    #[arg(long)]
    force: bool,

    /// Where the bucket is: the settings of the nodes.
    #[command(flatten)]
    settings: Settings,
}

/// Releases the ordinal and waits until a node has it.
///
/// # Errors
/// `Usage` without a bucket and for an ordinal that nobody ever had; `Failed` if its node is alive, the
/// bucket fails, or no node takes it.
///
/// # Cancel safety
/// Safe: the ordinal may be released, and is taken by whoever looks next.
pub async fn run(args: Args) -> Result<(), Failure> {
    let config = config::load(&args.settings.sources()?)?;
    let Some(bucket) = object::bucket(&config, &mut Registry::default())? else {
        return Err(Failure::Usage(
            "object.url: none given, the bucket of the nodes is required".to_owned(),
        ));
    };
    let cluster = ClusterName::new(&config.cluster.name)?;
    let office = Office { owner: Owner { cluster, ordinal: args.ordinal }, bucket };
    let seen = office.known().await?;
    if seen.role() == Role::Empty {
        let ordinal = args.ordinal;
        return Ok(stdout::print(&format!("ordinal {ordinal}: nothing is left of it\n"))?);
    }
    let released = office.release(args.force).await?;
    let taken = office.wait_taken(released).await?;
    stdout::print(&office.describe(&taken).await?)?;
    Ok(())
}

/// What it works on.
struct Office {
    owner: Owner,
    bucket: Arc<Bucket>,
}

impl Office {
    fn deadline() -> Instant {
        Instant::now() + DEADLINE
    }

    /// Who has the ordinal.
    async fn known(&self) -> Result<Sighting, Failure> {
        let seen = look(&self.bucket, &self.owner, Self::deadline()).await;
        if let Some(seen) = seen.map_err(Failure::failed)? {
            return Ok(seen);
        }
        let Owner { cluster, ordinal } = &self.owner;
        let others = newest_epochs(&self.bucket, cluster, Self::deadline()).await;
        let others: Vec<_> = others.map_err(Failure::failed)?.keys().map(u32::to_string).collect();
        let there = if others.is_empty() { "none".to_owned() } else { others.join(", ") };
        Err(Failure::Usage(format!(
            "--ordinal: {ordinal} given, of which cluster {cluster} has nothing in {}; ordinals there: \
             {there}",
            self.bucket.url()
        )))
    }

    /// Opens an epoch that anybody may follow; returns its number.
    async fn release(&self, force: bool) -> Result<u64, Failure> {
        let claim = Claim::release(RELEASED_BY, force);
        let now = object::now_unix_ms();
        match open_epoch(&self.bucket, &self.owner, claim, now, Self::deadline()).await {
            Ok(released) => Ok(released.epoch),
            Err(OwnerError::Held { ordinal, holder, age, .. }) => Err(Failure::Failed(format!(
                "ordinal {ordinal} is held by {holder:?}, alive {} s ago; if it is gone for good, give \
                 --force",
                age.as_secs()
            ))),
            Err(error) => Err(Failure::failed(error)),
        }
    }

    /// Waits until somebody has followed.
    async fn wait_taken(&self, released: u64) -> Result<Sighting, Failure> {
        let bar = progress::bar(WAIT.as_secs(), "waiting for a node {bar:40} {pos} of {len} s");
        let start = Instant::now();
        while start.elapsed() < WAIT {
            let seen = look(&self.bucket, &self.owner, Self::deadline()).await;
            let seen = seen.map_err(Failure::failed)?;
            if let Some(seen) = seen.filter(|seen| seen.epoch > released && seen.role().is_held()) {
                bar.finish_and_clear();
                return Ok(seen);
            }
            bar.set_position(start.elapsed().as_secs());
            sleep(LOOK_EVERY).await;
        }
        bar.finish_and_clear();
        Err(Failure::Failed(format!(
            "ordinal {} is released, and no node has taken it in {} s; does one run with object.url {} \
             and cluster.name {}, and hold its own ordinal? The next that looks takes it",
            self.owner.ordinal,
            WAIT.as_secs(),
            self.bucket.url(),
            self.owner.cluster
        )))
    }

    /// Who has it, and what.
    async fn describe(&self, taken: &Sighting) -> Result<String, Failure> {
        let there = rebuild(&self.bucket, &self.owner, Self::deadline()).await;
        let there = there.map_err(Failure::failed)?;
        let blocks: usize = there.packs.iter().map(|pack| pack.footer.entries.len()).sum();
        let (packs, ordinal) = (there.packs.len(), self.owner.ordinal);
        let who = taken.last.as_ref().map_or("a node", |(holder, _)| holder.as_str());
        let has = if taken.role() == Role::Own { "has its own back" } else { "has adopted it" };
        Ok(format!("ordinal {ordinal}: {who} {has}: {packs} packs with {blocks} blocks\n"))
    }
}

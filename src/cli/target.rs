//! Which server and which namespace of foreign keys a command means.

use kvstrata_tiers::{block::BlockHash, error::Result, namespace::foreign_hash};

use crate::client::{Client, ClientOptions, Handle, HashList, NamespaceSpec};

/// The server.
#[derive(Debug, Clone, clap::Args)]
pub struct Server {
    /// Address of the server
    #[arg(
        long,
        value_name = "HOST:PORT",
        env = "KVSTRATA_ENDPOINT",
        default_value = "127.0.0.1:9400"
    )]
    pub endpoint: String,
}

/// The server and a namespace in which keys are any text.
#[derive(Debug, Clone, clap::Args)]
pub struct Target {
    /// The server.
    #[command(flatten)]
    pub server: Server,

    /// Namespace of the keys; equal keys of different namespaces do not meet
    #[arg(long, value_name = "NAME", default_value = "cli")]
    pub namespace: String,
}

impl Server {
    pub(super) async fn connect(&self) -> Result<Client> {
        Client::connect(&self.endpoint, ClientOptions::default()).await
    }
}

impl Target {
    pub(super) async fn open(&self) -> Result<Handle> {
        let client = self.server.connect().await?;
        client.open(NamespaceSpec::Opaque { name: self.namespace.clone(), bytes_max: 0 }).await
    }
}

/// The block hashes of foreign keys.
pub(super) fn hashes_of(keys: &[String]) -> HashList {
    let hashes: Vec<BlockHash> = keys.iter().map(|key| foreign_hash(key.as_bytes())).collect();
    HashList::of(&hashes)
}

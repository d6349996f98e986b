//! The client of operators: one node, over its admin listener.

use std::time::Duration;

use hyper_util::rt::TokioIo;
use kvstrata_proto::admin::v1::{
    DrainPhase, DrainProgress, DrainRequest, StatusRequest, admin_client::AdminClient,
};
use kvstrata_tiers::error::{Error, ErrorKind, Result};
use tokio::net::UnixStream;
use tonic::{Request, Streaming, transport::Endpoint};

use super::{
    access::{Access, Carrier},
    connect::{ClientOptions, within},
    status::root,
};
use crate::{
    config::AdminAddress,
    drain::{Handed, Phase},
};

/// Silence after which a node that drains is given up: it says how far it is four times a second.
const SILENCE_MAX: Duration = Duration::from_secs(10);

/// A connection to one node's admin listener.
#[derive(Debug, Clone)]
pub struct Operator {
    wire: AdminClient<Carrier>,
    call_deadline: Duration,
}

/// How far a drain is, as the node says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DrainState {
    /// Where it is.
    pub phase: Phase,
    /// Sessions that are open.
    pub sessions: u32,
    /// Leases that are held.
    pub leases: u32,
    /// Until what is left is ended.
    pub left: Duration,
    /// What other members have got.
    pub handed: Handed,
}

/// How a node is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeStatus {
    /// Its name.
    pub node: String,
    /// What it runs.
    pub version: String,
    /// Since when.
    pub uptime: Duration,
    /// How far its drain is.
    pub drain: DrainState,
    /// Nodes of its cluster, itself counted.
    pub members: u32,
}

/// A drain that is followed.
#[derive(Debug)]
pub struct Drained {
    stream: Streaming<DrainProgress>,
}

impl Operator {
    /// Connects to where the admin listener is.
    ///
    /// # Errors
    /// `Unavailable` or `Timeout` if nothing answers there.
    ///
    /// # Cancel safety
    /// Safe: a dropped attempt leaves nothing behind.
    pub async fn connect(at: &AdminAddress, options: ClientOptions) -> Result<Self> {
        let access = Access::new(&options, false)?;
        let failed = |kind: ErrorKind, why: &dyn std::fmt::Display| {
            let text = format!("cannot connect to the admin listener at {at}: {why}");
            Error::new(kind, text)
        };
        let connecting = async {
            match at {
                AdminAddress::Tcp(address) => {
                    let endpoint = Endpoint::from_shared(format!("http://{address}"))?;
                    endpoint.tcp_nodelay(true).connect().await
                }
                AdminAddress::Unix(path) => {
                    // The name is never resolved.
                    let endpoint = Endpoint::from_static("http://admin");
                    let path = path.clone();
                    let connector = tower::service_fn(move |_uri| {
                        let path = path.clone();
                        async move { UnixStream::connect(path).await.map(TokioIo::new) }
                    });
                    endpoint.connect_with_connector(connector).await
                }
            }
        };
        let channel = tokio::time::timeout(options.connect_deadline, connecting)
            .await
            .map_err(|elapsed| failed(ErrorKind::Timeout, &elapsed))?
            .map_err(|error| failed(ErrorKind::Unavailable, &root(&error)))?;
        let channel = Carrier::new(channel, access.bearing()?);
        Ok(Self { wire: AdminClient::new(channel), call_deadline: options.call_deadline })
    }

    /// Has the node leave, and follows how far it is.
    ///
    /// # Errors
    /// `Unauthenticated` without an operator's token where one is asked for, and whatever keeps the call from
    /// being answered.
    ///
    /// # Cancel safety
    /// Safe: the node leaves, whoever follows.
    pub async fn drain(&self) -> Result<Drained> {
        let mut wire = self.wire.clone();
        let call = wire.drain(Request::new(DrainRequest {}));
        let reply = within("drain", self.call_deadline, call).await?;
        Ok(Drained { stream: reply.into_inner() })
    }

    /// Asks how the node is.
    ///
    /// # Errors
    /// As [`drain`](Self::drain).
    ///
    /// # Cancel safety
    /// Safe: it changes nothing.
    pub async fn status(&self) -> Result<NodeStatus> {
        let mut wire = self.wire.clone();
        let call = wire.status(Request::new(StatusRequest {}));
        let reply = within("ask how the node is", self.call_deadline, call).await?.into_inner();
        Ok(NodeStatus {
            node: reply.node,
            version: reply.version,
            uptime: Duration::from_millis(reply.uptime_ms),
            drain: state_of(&reply.drain.unwrap_or_default()),
            members: reply.members,
        })
    }
}

impl Drained {
    /// The next word of the node, at least every quarter of a second; none when it has nothing more to say,
    /// which it does behind [`Phase::Drained`].
    ///
    /// # Errors
    /// `Unavailable` if the node has ended before, `Timeout` if it is silent.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn next(&mut self) -> Result<Option<DrainState>> {
        let next = within("follow the drain", SILENCE_MAX, self.stream.message()).await?;
        Ok(next.as_ref().map(state_of))
    }
}

fn state_of(wire: &DrainProgress) -> DrainState {
    let phase = match wire.phase() {
        DrainPhase::Unspecified | DrainPhase::Serving => Phase::Serving,
        DrainPhase::Announcing => Phase::Announcing,
        DrainPhase::HandingOver => Phase::HandingOver,
        DrainPhase::Finishing => Phase::Finishing,
        DrainPhase::Flushing => Phase::Flushing,
        DrainPhase::Drained => Phase::Drained,
    };
    DrainState {
        phase,
        sessions: wire.sessions,
        leases: wire.leases,
        left: Duration::from_millis(wire.left_ms.into()),
        handed: Handed {
            chosen: wire.chosen_blocks,
            blocks: wire.handed_blocks,
            bytes: wire.handed_bytes,
            present: wire.present_blocks,
            refused: wire.refused_blocks,
        },
    }
}

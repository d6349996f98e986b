//! Going home: to the member that an engine's puts and lookups belong to.
//!
//! Any member of a cluster can be asked, and each says which one is the home of an engine instance when that opens
//! a namespace. Then the client connects there, opens there, and asks again nowhere else: blocks that one engine
//! puts are to be found by it in one place. It moves before it has anything anywhere (the first namespace, no
//! session), and never later. A home that cannot be reached is no loss of blocks: it stays where it is.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use kvstrata_proto::v1::{self, Homing};
use kvstrata_tiers::error::Result;

use super::{Client, namespace::Asked};
use crate::{limits::CLIENT_MOVES_MAX, members::Member};

/// How often a client has gone home.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HomeMoves {
    /// It has moved to another member.
    pub made: u64,
    /// The home could not be reached, and it has stayed.
    pub failed: u64,
}

#[derive(Debug, Default)]
pub(super) struct Moves {
    made: AtomicU64,
    failed: AtomicU64,
}

impl Client {
    /// How often it has gone home so far.
    #[must_use]
    pub fn moves(&self) -> HomeMoves {
        let Moves { made, failed } = self.moves_made();
        HomeMoves { made: made.load(Ordering::Relaxed), failed: failed.load(Ordering::Relaxed) }
    }

    /// Opens a namespace, at home if it is the first one.
    pub(super) async fn open_at_home(&self, asked: &Asked) -> Result<v1::OpenResponse> {
        let mut settled = self.settled().lock().await;
        if self.options().instance.is_none() {
            drop(settled);
            return self.open_at(&self.server(), asked, Homing::Unspecified).await;
        }
        if *settled {
            drop(settled);
            return self.open_at(&self.server(), asked, Homing::Sent).await;
        }
        let reply = self.open_at(&self.server(), asked, Homing::Asked).await?;
        let reply = self.go_home(reply, asked).await;
        *settled = true;
        Ok(reply)
    }

    /// Follows what servers say of the home; returns the answer of the one where it is in the end.
    async fn go_home(&self, mut reply: v1::OpenResponse, asked: &Asked) -> v1::OpenResponse {
        for _ in 0..CLIENT_MOVES_MAX {
            let Some(home) = self.elsewhere(&reply) else { break };
            let moves = self.moves_made();
            match self.move_to(&home, asked).await {
                Ok(answer) => {
                    tracing::info!(home = home.name, endpoint = home.endpoint, "went home");
                    moves.made.fetch_add(1, Ordering::Relaxed);
                    reply = answer;
                }
                Err(error) => {
                    let Member { name, endpoint, .. } = home;
                    tracing::warn!(home = name, endpoint, %error, "home not reached, staying");
                    moves.failed.fetch_add(1, Ordering::Relaxed);
                    break;
                }
            }
        }
        reply
    }

    /// The home that a server names, if that is another one and it can be found.
    fn elsewhere(&self, reply: &v1::OpenResponse) -> Option<Member> {
        let server = self.server();
        let members = server.members();
        let home = members.member(reply.home?)?;
        (home.index != members.answering && !home.endpoint.is_empty()).then(|| home.clone())
    }

    async fn move_to(&self, home: &Member, asked: &Asked) -> Result<v1::OpenResponse> {
        let server = self.neighbour(&home.endpoint, self.options().connect_deadline).await?;
        let server = Arc::new(server);
        let reply = self.open_at(&server, asked, Homing::Sent).await?;
        self.go_to(server);
        Ok(reply)
    }
}

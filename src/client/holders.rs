//! Connections to other members, made when something is to be read there, and kept.

use std::sync::Arc;

use kvstrata_tiers::error::{Error, ErrorKind, Result};
use lru::LruCache;
use parking_lot::Mutex;

use super::{Client, ClientOptions, Path, breaker::Breaker};
use crate::{
    limits::{HOLDER_CONNECT_DEADLINE, HOLDER_SILENCE_MAX, HOLDERS_MAX},
    members::{Member, Members},
};

const DOING: &str = "connect to a holder";

/// Those of one client, by name; the one that was not used for longest is given up for another.
pub(super) struct Holders(Mutex<LruCache<String, Arc<Holder>>>);

/// A member at one address. Another address, or another bulk port, is another process.
struct Holder {
    member: Member,
    client: tokio::sync::Mutex<Option<Client>>,
    /// Whether it can be reached.
    breaker: Breaker,
}

impl Default for Holders {
    fn default() -> Self {
        Self(Mutex::new(LruCache::unbounded()))
    }
}

impl Holders {
    fn of(&self, member: &Member) -> Arc<Holder> {
        let mut known = self.0.lock();
        let is_it = |holder: &&Arc<Holder>| {
            (&holder.member.endpoint, &holder.member.bulk) == (&member.endpoint, &member.bulk)
        };
        if let Some(holder) = known.get(&member.name).filter(is_it) {
            return Arc::clone(holder);
        }
        let holder = Arc::new(Holder {
            member: member.clone(),
            client: tokio::sync::Mutex::default(),
            breaker: Breaker::default(),
        });
        known.push(member.name.clone(), Arc::clone(&holder));
        while known.len() > HOLDERS_MAX {
            known.pop_lru();
        }
        holder
    }
}

impl Client {
    /// A client that is at the member of this name.
    ///
    /// # Errors
    /// `Unavailable` or `Timeout` if there is none in the list, or it is not reached.
    pub(super) async fn holder(&self, name: &str) -> Result<Self> {
        let member = self.server().members().named(name).cloned();
        let member = member.ok_or_else(|| {
            Error::new(ErrorKind::Unavailable, format!("{DOING}: {name} has left the cluster"))
        })?;
        let holder = self.holders().of(&member);
        let mut client = holder.client.lock().await;
        if let Some(client) = &*client {
            return Ok(client.clone());
        }
        holder.breaker.admit(DOING)?;
        let deadline = self.options().connect_deadline.min(HOLDER_CONNECT_DEADLINE);
        let connected = self.neighbour(&member.endpoint, deadline).await;
        let server = holder.breaker.note(connected)?;
        let answering = member.index;
        server.introduce(Members { epoch: 0, answering, list: vec![member] });
        let ours = self.options();
        let options = ClientOptions {
            // Memory is shared with servers on this host only.
            path: if ours.path == Path::Shm { Path::Auto } else { ours.path },
            call_deadline: ours.call_deadline.min(HOLDER_SILENCE_MAX),
            ..ours.clone()
        };
        Ok(client.insert(Self::at(server, options)).clone())
    }
}

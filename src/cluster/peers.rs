//! The other members, as this node reaches them: a connection to each, and its filter.
//!
//! Every member has a task that asks for its filter each second and takes what is new, and then for what else it
//! [tells](Told). One that does not answer is asked less and less often; its filter stays, and says nothing any more of
//! what it lacks once it is [too old](FILTER_AGE_MAX). What has left the list is dropped with all that was known of it.
//!
//! All filters together take no more than their share of memory: one that does not fit is not kept, and its member is
//! asked nothing. A member's filter takes no more than [`FILTER_BYTES_PER_SECOND`], on average.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use kvstrata_tiers::error::{Error, ErrorKind, Result};
use parking_lot::{Mutex, RwLock};
use tokio::{
    sync::Notify,
    time::{Instant, sleep, timeout},
};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info};

use super::{
    feed::Feed,
    filter::Filter,
    mirror::{Mirror, Room},
    told::Told,
};
use crate::{
    client::{Client, ClientOptions},
    costs::Locality,
    limits::{FILTER_AGE_MAX, FILTER_BYTES_PER_SECOND, FILTER_INTERVAL, PEER_DEADLINE, PEER_RETRY},
    members::{Member, Members, Roster},
    metrics::{FanoutMetrics, FilterOf},
    tasks::Tasks,
};

/// One other member.
#[derive(Debug)]
pub struct Peer {
    member: Member,
    client: RwLock<Option<Client>>,
    mirror: RwLock<Mirror>,
    told: RwLock<Arc<Told>>,
    /// When it was last known what its filter is.
    heard: Mutex<Option<Instant>>,
    /// It has not answered a lookup; it is not asked for another one before it has told its filter.
    is_away: AtomicBool,
    /// It should be asked for its filter now.
    ask_now: Notify,
    /// It has left the list.
    left: CancellationToken,
}

impl Peer {
    fn new(member: Member, room: &Room) -> Self {
        Self {
            member,
            client: RwLock::default(),
            mirror: RwLock::new(Mirror::new(room.clone())),
            told: RwLock::default(),
            heard: Mutex::default(),
            is_away: AtomicBool::new(false),
            ask_now: Notify::new(),
            left: CancellationToken::new(),
        }
    }

    /// Its index in the list of this node.
    #[must_use]
    pub fn index(&self) -> u32 {
        self.member.index
    }

    /// What it is called.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.member.name
    }

    /// Whether it is on this host, or in this zone; empty ones are unknown.
    #[must_use]
    pub fn is_near(&self, place: (&str, &str)) -> bool {
        self.locality(place) != Locality::Remote
    }

    /// How far it is from an engine on this host in this zone; empty ones are unknown.
    #[must_use]
    pub fn locality(&self, (host, zone): (&str, &str)) -> Locality {
        let is_same = |ours: &str, theirs: &str| !ours.is_empty() && ours == theirs;
        if is_same(&self.member.host, host) {
            return match self.told.read().shared_memory {
                true => Locality::SharedMemory,
                false => Locality::SameNode,
            };
        }
        match is_same(&self.member.zone, zone) {
            true => Locality::SameZone,
            false => Locality::Remote,
        }
    }

    /// What it has told of itself.
    #[must_use]
    pub fn told(&self) -> Arc<Told> {
        Arc::clone(&self.told.read())
    }

    /// The connection to it, once there is one.
    #[must_use]
    pub fn client(&self) -> Option<Client> {
        self.client.read().clone()
    }

    /// Whether it would be asked now.
    #[must_use]
    pub fn can_answer(&self) -> bool {
        // Relaxed: it says nothing about other memory.
        !self.is_away.load(Ordering::Relaxed) && self.client.read().is_some()
    }

    /// Asks its filter how many blocks it may have; none if it may have anything. A filter that is too old is right
    /// about what it has, and not about what it lacks.
    pub fn with_filter(&self, ask: impl FnOnce(&Filter) -> u32) -> Option<u32> {
        let blocks = self.mirror.read().filter().map(ask)?;
        let is_old = self.age().is_none_or(|age| age > FILTER_AGE_MAX);
        (blocks > 0 || !is_old).then_some(blocks)
    }

    /// It did not answer a lookup.
    pub fn went_away(&self) {
        self.is_away.store(true, Ordering::Relaxed);
        self.ask_now.notify_one();
    }

    fn age(&self) -> Option<Duration> {
        self.heard.lock().map(|heard| heard.elapsed())
    }

    /// Asks for what is new in its filter; returns how many bytes that took.
    async fn ask(&self, options: &ClientOptions) -> Result<u64> {
        let client = self.connected(options).await?;
        let known = self.mirror.read().known();
        let mut updates = soon(client.filter(known)).await?;
        let (mut bytes, mut is_complete) = (0, false);
        while let Some(update) = soon(updates.next()).await? {
            bytes += update.words.len() + update.added.len();
            is_complete = self.mirror.write().take(&update)?;
        }
        // A node that has just started has no filter to tell.
        if !is_complete {
            return Err(Error::new(ErrorKind::Unavailable, "filter: not all of it was told"));
        }
        *self.heard.lock() = Some(Instant::now());
        self.is_away.store(false, Ordering::Relaxed);
        self.hear(&client).await;
        Ok(u64::try_from(bytes).unwrap_or(u64::MAX))
    }

    /// Asks what else it tells of itself. What it does not tell stays as it was: its blocks can be found anyway.
    async fn hear(&self, client: &Client) {
        let known = self.told();
        match soon(client.tell(known.openers_version)).await {
            Ok(told) => *self.told.write() = Arc::new(known.followed_by(told)),
            Err(error) => debug!(member = self.name(), %error, "a member does not tell its costs"),
        }
    }

    async fn connected(&self, options: &ClientOptions) -> Result<Client> {
        if let Some(client) = self.client() {
            return Ok(client);
        }
        let client = Client::connect(&self.member.endpoint, options.clone()).await?;
        *self.client.write() = Some(client.clone());
        Ok(client)
    }

    /// Asks again and again.
    async fn follow(&self, options: &ClientOptions) {
        let (retry_min, retry_max) = PEER_RETRY;
        let mut retry = retry_min;
        loop {
            let pause = match self.ask(options).await {
                Ok(bytes) => {
                    retry = retry_min;
                    let millis = bytes.saturating_mul(1000) / FILTER_BYTES_PER_SECOND;
                    FILTER_INTERVAL.max(Duration::from_millis(millis))
                }
                Err(error) => {
                    debug!(member = self.name(), %error, "the filter of a member is not known");
                    let next = (retry * 2).min(retry_max);
                    std::mem::replace(&mut retry, next)
                }
            };
            // Whoever asks to hurry has just met with silence: that is no reason to ask those again who are away.
            tokio::select! {
                () = sleep(pause) => {}
                () = self.ask_now.notified(), if retry == retry_min => {}
            }
        }
    }
}

/// Waits for an answer no longer than members may take for one.
async fn soon<T>(answer: impl Future<Output = Result<T>>) -> Result<T> {
    let late = |_elapsed| Error::new(ErrorKind::Timeout, "a member: no answer in time");
    timeout(PEER_DEADLINE, answer).await.map_err(late)?
}

/// See the module; clones share it.
#[derive(Clone)]
pub struct Peers {
    shared: Arc<Shared>,
}

struct Shared {
    list: RwLock<Arc<[Arc<Peer>]>>,
    room: Room,
    metrics: FanoutMetrics,
}

impl Peers {
    /// Nobody yet; filters may take so many bytes together.
    #[must_use]
    pub fn new(bytes: u64, metrics: FanoutMetrics) -> Self {
        let room = Room::new(usize::try_from(bytes).unwrap_or(usize::MAX));
        let list = RwLock::new(Vec::new().into());
        Self { shared: Arc::new(Shared { list, room, metrics }) }
    }

    /// Those there are now.
    #[must_use]
    pub fn list(&self) -> Arc<[Arc<Peer>]> {
        Arc::clone(&self.shared.list.read())
    }

    /// Where it is counted what they are asked.
    #[must_use]
    pub fn metrics(&self) -> &FanoutMetrics {
        &self.shared.metrics
    }

    /// Shows what is known of them, and what they are told.
    pub fn show(&self, own: &Feed) {
        self.shared.metrics.show_filter(FilterOf::Own, own.bytes());
        let peers = self.list();
        let bytes = peers.iter().map(|peer| peer.mirror.read().bytes()).sum();
        let oldest = peers.iter().filter_map(|peer| peer.age()).max();
        let unknown = peers.iter().filter(|peer| peer.mirror.read().filter().is_none()).count();
        self.shared.metrics.show(bytes, oldest.unwrap_or_default(), unknown);
    }

    /// Follows the list of members, and each of them, until `stop`.
    pub async fn run(
        &self,
        roster: &Roster,
        options: ClientOptions,
        tasks: &Tasks,
        stop: CancellationToken,
    ) {
        let options = ClientOptions {
            connect_deadline: PEER_DEADLINE,
            call_deadline: PEER_DEADLINE,
            ..options
        };
        let mut members = roster.follow();
        loop {
            let now = Arc::clone(&members.borrow_and_update());
            self.adjust(&now, |peer| {
                let (options, stop) = (options.clone(), stop.clone());
                tasks.spawn("member", async move {
                    tokio::select! {
                        biased;
                        () = stop.cancelled() => {}
                        () = peer.left.cancelled() => {}
                        () = peer.follow(&options) => {}
                    }
                });
            });
            tokio::select! {
                () = stop.cancelled() => return,
                changed = members.changed() => if changed.is_err() {
                    return;
                },
            }
        }
    }

    /// Keeps those that are in the list as they were, drops others, and begins with those that are new, or are
    /// somewhere else now.
    fn adjust(&self, members: &Members, begin: impl Fn(Arc<Peer>)) {
        let known = self.list();
        let others = members.list.iter().filter(|member| member.index != members.answering);
        let next: Arc<[_]> = others
            .map(|member| {
                let same = |peer: &&Arc<Peer>| peer.is_same(member);
                known.iter().find(same).map_or_else(
                    || Arc::new(Peer::new(member.clone(), &self.shared.room)),
                    Arc::clone,
                )
            })
            .collect();
        let is_in = |list: &[Arc<Peer>], peer: &Arc<Peer>| {
            list.iter().any(|other| Arc::ptr_eq(other, peer))
        };
        *self.shared.list.write() = Arc::clone(&next);
        for peer in known.iter().filter(|peer| !is_in(&next, peer)) {
            info!(member = peer.name(), "a member has left");
            peer.left.cancel();
        }
        for peer in next.iter().filter(|peer| !is_in(&known, peer)) {
            begin(Arc::clone(peer));
        }
    }
}

impl Peer {
    /// Whether what is said of a member is of this one, at the same place.
    fn is_same(&self, member: &Member) -> bool {
        let place = |member: &Member| {
            (member.index, member.endpoint.clone(), member.host.clone(), member.zone.clone())
        };
        place(&self.member) == place(member)
    }
}

#[cfg(test)]
impl Peer {
    /// A member that nobody connects to, as tests want it.
    pub(crate) fn stand_in(member: Member, told: Told) -> Arc<Self> {
        let peer = Self::new(member, &Room::new(0));
        *peer.told.write() = Arc::new(told);
        Arc::new(peer)
    }
}

#[cfg(test)]
impl Peers {
    /// These are there now.
    pub(crate) fn be(&self, list: Vec<Arc<Peer>>) {
        *self.shared.list.write() = list.into();
    }
}

impl fmt::Debug for Peers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Peers").field("count", &self.list().len()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peers() -> Peers {
        let metrics =
            FanoutMetrics::register(&mut prometheus_client::registry::Registry::default());
        Peers::new(1 << 20, metrics)
    }

    fn member(index: u32, endpoint: &str) -> Member {
        Member {
            index,
            name: format!("node-{index}"),
            endpoint: endpoint.to_owned(),
            zone: format!("zone-{}", index % 2),
            ..Member::default()
        }
    }

    fn begun(peers: &Peers, list: Vec<Member>) -> Vec<u32> {
        let begun = Mutex::new(Vec::new());
        let members = Members { epoch: 1, answering: Roster::OWN, list };
        peers.adjust(&members, |peer| begun.lock().push(peer.index()));
        begun.into_inner()
    }

    #[test]
    fn others_are_followed_while_they_are_in_the_list() {
        let peers = peers();
        let three = || vec![member(0, "a:1"), member(1, "b:1"), member(2, "c:1")];
        assert_eq!(begun(&peers, three()), [1, 2], "not itself");
        let second = Arc::clone(&peers.list()[1]);
        assert!(begun(&peers, three()).is_empty());
        // What changes about a member that is where it was is no reason to begin anew.
        let mut busy = three();
        busy[1].engines = 7;
        assert!(begun(&peers, busy).is_empty());
        let mut moved = three();
        moved[1].endpoint = "b:2".to_owned();
        assert_eq!(begun(&peers, moved), [1]);
        assert!(!second.left.is_cancelled());
        begun(&peers, vec![member(0, "a:1"), member(1, "b:2")]);
        assert!(second.left.is_cancelled());
        assert_eq!(peers.list().len(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn an_old_filter_is_right_about_what_it_has_and_unsure_of_what_it_lacks() {
        let peer = Peer::new(member(1, "a:1"), &Room::new(1 << 20));
        assert_eq!(peer.with_filter(|_| 5), None, "not known");
        let filter = Filter::new(10);
        let update = super::super::mirror::Update {
            generation: 1,
            keys: 10,
            words: filter.piece(0, 1 << 20).into(),
            complete: true,
            ..Default::default()
        };
        assert!(peer.mirror.write().take(&update).unwrap());
        *peer.heard.lock() = Some(Instant::now());
        assert_eq!((peer.with_filter(|_| 5), peer.with_filter(|_| 0)), (Some(5), Some(0)));
        tokio::time::advance(FILTER_AGE_MAX + Duration::from_millis(1)).await;
        assert_eq!((peer.with_filter(|_| 5), peer.with_filter(|_| 0)), (Some(5), None));
        assert!(peer.is_near(("", "zone-1")) && !peer.is_near(("", "zone-0")));
        assert!(!peer.is_near(("", "")));
    }

    #[test]
    fn an_engine_is_as_far_from_a_member_as_both_say() {
        let member = || Member { host: "h1".to_owned(), ..member(1, "a:1") };
        let peer = Peer::stand_in(member(), Told::default());
        let places = [("h1", ""), ("h2", "zone-1"), ("h2", "zone-0"), ("", "")];
        let near = Locality::SameNode;
        let expected = [near, Locality::SameZone, Locality::Remote, Locality::Remote];
        assert_eq!(places.map(|place| peer.locality(place)), expected);
        let shares = Peer::stand_in(member(), Told { shared_memory: true, ..Told::default() });
        assert_eq!(shares.locality(("h1", "zone-0")), Locality::SharedMemory);
        let nowhere = Peer::stand_in(Member::default(), Told::default());
        assert_eq!(nowhere.locality(("", "")), Locality::Remote);
    }
}

//! Where other nodes may be: names that are resolved again for ever.
//!
//! A headless service resolves to the pods that there are at the moment, in a cluster that starts to none, so what
//! was once resolved is never enough. While this node is alone, or a seed's address is not that of a member, names
//! are resolved often; else now and then, so that two halves of a cluster that have forgotten each other meet again.
//!
//! What fails is logged when it begins to fail and when it no longer does.

use std::{
    collections::{BTreeSet, HashSet},
    io,
    net::SocketAddr,
};

use futures_util::{StreamExt, stream};
use tokio::time::{Instant, timeout};
use tracing::{info, warn};

use crate::limits::{
    RESOLVE_DEADLINE, SEED_ADDRESSES_MAX, SEEDS_ASKED_AT_A_TIME, SEEDS_RESOLVED_AT_A_TIME,
    SEEDS_SETTLED_INTERVAL, SEEDS_UNSETTLED_INTERVAL,
};

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Seeds {
    names: Vec<String>,
    /// Whether only addresses of IPv4 can be reached.
    only_v4: bool,
    addresses: Vec<SocketAddr>,
    failing: BTreeSet<String>,
    resolved_at: Option<Instant>,
    /// The first of those that are asked next.
    turn: usize,
}

impl Seeds {
    /// None is resolved yet.
    pub(crate) fn new(names: Vec<String>, only_v4: bool) -> Self {
        Self { names, only_v4, ..Self::default() }
    }

    /// Names that could not be resolved the last time.
    pub(crate) fn unresolved(&self) -> usize {
        self.failing.len()
    }

    /// The seeds to be asked now, resolved again if that is due: those that are none of `known`, some at a time.
    pub(crate) async fn next_asked<F>(
        &mut self,
        known: &HashSet<SocketAddr>,
        resolve: impl Fn(String) -> F,
    ) -> Vec<SocketAddr>
    where
        F: Future<Output = io::Result<Vec<SocketAddr>>>,
    {
        let is_settled = known.len() > 1 && self.unknown(known).next().is_none();
        let interval = if is_settled { SEEDS_SETTLED_INTERVAL } else { SEEDS_UNSETTLED_INTERVAL };
        if self.resolved_at.is_none_or(|at| at.elapsed() >= interval) {
            self.resolve_all(resolve).await;
            self.resolved_at = Some(Instant::now());
        }
        let unknown: Vec<_> = self.unknown(known).collect();
        let asked = unknown.len().min(SEEDS_ASKED_AT_A_TIME);
        let first = self.turn.checked_rem(unknown.len()).unwrap_or(0);
        self.turn = first + asked;
        unknown.iter().cycle().skip(first).take(asked).copied().collect()
    }

    fn unknown(&self, known: &HashSet<SocketAddr>) -> impl Iterator<Item = SocketAddr> {
        self.addresses.iter().copied().filter(|address| !known.contains(address))
    }

    async fn resolve_all<F>(&mut self, resolve: impl Fn(String) -> F)
    where
        F: Future<Output = io::Result<Vec<SocketAddr>>>,
    {
        let mut resolving = Vec::new();
        for name in self.names.clone() {
            let found = timeout(RESOLVE_DEADLINE, resolve(name.clone()));
            resolving.push(async move { (name, found.await) });
        }
        let all: Vec<_> =
            stream::iter(resolving).buffer_unordered(SEEDS_RESOLVED_AT_A_TIME).collect().await;
        let mut addresses = BTreeSet::new();
        for (name, found) in all {
            match found.unwrap_or_else(|_late| Err(io::ErrorKind::TimedOut.into())) {
                Ok(found) => {
                    if self.failing.remove(&name) {
                        info!(seed = name, addresses = found.len(), "seed resolves again");
                    }
                    let usable = found.into_iter().filter(|at| at.is_ipv4() || !self.only_v4);
                    addresses.extend(usable.map(|at| (at.ip().to_canonical(), at.port())));
                }
                Err(error) => {
                    if self.failing.insert(name.clone()) {
                        warn!(seed = name, %error, "seed does not resolve; it is tried again for ever");
                    }
                }
            }
        }
        let addresses = addresses.into_iter().take(SEED_ADDRESSES_MAX).map(SocketAddr::from);
        self.addresses = addresses.collect();
    }
}

/// The addresses of `host:port` now.
pub(crate) async fn look_up(name: String) -> io::Result<Vec<SocketAddr>> {
    Ok(tokio::net::lookup_host(name).await?.collect())
}

#[cfg(test)]
mod tests {
    use std::{net::Ipv4Addr, sync::Arc, time::Duration};

    use parking_lot::Mutex;
    use tokio::time::advance;

    use super::*;

    fn at(last: u8) -> SocketAddr {
        (Ipv4Addr::new(10, 0, 0, last), 9403).into()
    }

    /// A name server whose one name has the addresses that it is given; none of them is a failure.
    #[derive(Clone, Default)]
    struct Names(Arc<Mutex<(Vec<SocketAddr>, usize)>>);

    impl Names {
        fn say(&self, addresses: &[SocketAddr]) {
            self.0.lock().0 = addresses.to_vec();
        }

        fn asked(&self) -> usize {
            self.0.lock().1
        }

        async fn ask(&self, seeds: &mut Seeds, known: &[SocketAddr]) -> Vec<SocketAddr> {
            let known = known.iter().copied().collect();
            let asked = seeds.next_asked(&known, |_name| async {
                let mut names = self.0.lock();
                names.1 += 1;
                match names.0.as_slice() {
                    [] => Err(io::ErrorKind::NotFound.into()),
                    found => Ok(found.to_vec()),
                }
            });
            asked.await
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_name_that_does_not_resolve_is_tried_until_it_does() {
        let (names, own) = (Names::default(), at(1));
        let mut seeds = Seeds::new(vec!["peers:9403".to_owned()], true);
        for _ in 0..1000 {
            assert!(names.ask(&mut seeds, &[own]).await.is_empty());
            assert_eq!(seeds.unresolved(), 1);
            advance(SEEDS_UNSETTLED_INTERVAL).await;
        }
        assert_eq!(names.asked(), 1000);
        names.say(&[own, at(2)]);
        assert_eq!(names.ask(&mut seeds, &[own]).await, [at(2)]);
        assert_eq!(seeds.unresolved(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_settled_cluster_is_resolved_now_and_then_and_new_addresses_are_found() {
        let (names, own) = (Names::default(), at(1));
        let mut seeds = Seeds::new(vec!["peers:9403".to_owned()], true);
        names.say(&[own, at(2)]);
        assert_eq!(names.ask(&mut seeds, &[own]).await, [at(2)]);
        let known = [own, at(2)];
        let second = Duration::from_secs(1);
        advance(second).await;
        assert_eq!(names.ask(&mut seeds, &known).await, []);
        names.say(&[own, at(3)]);
        for _ in 2..SEEDS_SETTLED_INTERVAL.as_secs() {
            advance(second).await;
            assert_eq!(names.ask(&mut seeds, &known).await, []);
        }
        assert_eq!(names.asked(), 1);
        advance(second).await;
        assert_eq!(names.ask(&mut seeds, &known).await, [at(3)]);
        // One that does not answer is asked again, and its name resolved often.
        advance(SEEDS_UNSETTLED_INTERVAL).await;
        assert_eq!(names.ask(&mut seeds, &known).await, [at(3)]);
        assert_eq!(names.asked(), 3);
    }

    #[tokio::test(start_paused = true)]
    async fn all_have_their_turn_and_no_more_are_remembered_than_may_be() {
        let names = Names::default();
        let mut seeds = Seeds::new(vec!["peers:9403".to_owned()], true);
        let many: Vec<SocketAddr> =
            (0..2000).map(|port| (Ipv4Addr::LOCALHOST, 2000 + port).into()).collect();
        let v6 = "[2001:db8::1]:9403".parse().unwrap();
        names.say(&[many.as_slice(), &[v6]].concat());
        let mut asked = HashSet::new();
        for _ in 0..SEED_ADDRESSES_MAX.div_ceil(SEEDS_ASKED_AT_A_TIME) {
            asked.extend(names.ask(&mut seeds, &[at(1)]).await);
        }
        assert_eq!(asked.len(), SEED_ADDRESSES_MAX);
        assert_eq!(asked, many[..SEED_ADDRESSES_MAX].iter().copied().collect());
    }
}

//! Who opened which namespace: what a person asks who wonders whether two engines share their blocks, and
//! where routers' candidates are found.

use std::{
    collections::HashMap,
    sync::atomic::{AtomicU64, Ordering},
};

use parking_lot::Mutex;
use tokio::time::Instant;

use crate::limits::{ENGINE_COUNTS_FOR, ENGINES_COUNTED_MAX};

/// Openers that are remembered of one namespace: more processes than the engines of one model have.
const OPENERS_MAX: usize = 512;

/// Who opened a namespace, in its own words.
#[derive(Debug, Clone)]
pub struct Opener {
    /// The engine instance.
    pub instance: String,
    /// The host it runs on.
    pub host: String,
    /// The zone of that.
    pub zone: String,
    /// What client it runs, like `kvstrata 0.1.0`.
    pub client_version: String,
    /// When it opened it, the last time.
    pub at: Instant,
}

/// The latest openers of each namespace since the start.
#[derive(Debug, Default)]
pub struct Openers {
    known: Mutex<HashMap<u32, Vec<Opener>>>,
    /// Of what is known: grows whenever somebody opens what it had not opened from there.
    version: AtomicU64,
    /// The engine instances whose home this node is, and when they were last seen.
    engines: Mutex<HashMap<String, Instant>>,
    /// Those that belong here, but found this node full: the names of the members that they were sent to, and when.
    sent_on: Mutex<HashMap<String, (String, Instant)>>,
}

impl Opener {
    /// Whether it is what others call `instance`, on `host`; either may be empty, for any.
    #[must_use]
    pub fn is_called(&self, instance: &str, host: &str) -> bool {
        let is_meant = |given: &str, known: &str| given.is_empty() || given == known;
        is_meant(instance, &self.instance) && is_meant(host, &self.host)
    }
}

impl Openers {
    /// The namespace of this index was opened; the same instance on the same host counts once.
    pub fn note(&self, namespace: u32, opener: Opener) {
        let mut known = self.known.lock();
        let openers = known.entry(namespace).or_default();
        let is_same = |known: &Opener| {
            (&known.instance, &known.host, &known.zone)
                == (&opener.instance, &opener.host, &opener.zone)
        };
        if !openers.iter().any(is_same) {
            // Relaxed: the lock orders it.
            self.version.fetch_add(1, Ordering::Relaxed);
        }
        openers.retain(|known| known.instance != opener.instance || known.host != opener.host);
        if openers.len() >= OPENERS_MAX {
            openers.remove(0);
        }
        openers.push(opener);
    }

    /// Tells the node and the zone of whoever opened it last, both empty if that is not known.
    pub fn with_latest<T>(&self, namespace: u32, tell: impl FnOnce(&str, &str) -> T) -> T {
        let known = self.known.lock();
        match known.get(&namespace).and_then(|openers| openers.last()) {
            Some(opener) => tell(&opener.host, &opener.zone),
            None => tell("", ""),
        }
    }

    /// This node is the home of an engine instance, which is here, or it is not.
    pub fn note_engine(&self, instance: &str, is_home: bool) {
        let mut engines = self.engines.lock();
        if !is_home {
            engines.remove(instance);
        } else if engines.len() < ENGINES_COUNTED_MAX || engines.contains_key(instance) {
            engines.insert(instance.to_owned(), Instant::now());
        }
    }

    /// An engine instance that belongs here found this node full, and was sent to another one.
    pub fn note_sent_on(&self, instance: &str, member: &str) {
        let mut sent_on = self.sent_on.lock();
        sent_on.retain(|_, (_, at)| at.elapsed() < ENGINE_COUNTS_FOR);
        if sent_on.len() < ENGINES_COUNTED_MAX || sent_on.contains_key(instance) {
            sent_on.insert(instance.to_owned(), (member.to_owned(), Instant::now()));
        }
    }

    /// The member that an engine instance was sent to lately because this node was full: its blocks are there, whether
    /// or not there is room here now.
    #[must_use]
    pub fn sent_on(&self, instance: &str) -> Option<String> {
        let sent_on = self.sent_on.lock();
        let (member, at) = sent_on.get(instance)?;
        (at.elapsed() < ENGINE_COUNTS_FOR).then(|| member.clone())
    }

    /// How many engine instances have this node for their home, among those that were seen lately.
    #[must_use]
    pub fn engines(&self) -> u32 {
        let mut engines = self.engines.lock();
        engines.retain(|_, seen| seen.elapsed() < ENGINE_COUNTS_FOR);
        u32::try_from(engines.len()).unwrap_or(u32::MAX)
    }

    /// The same, without this one.
    #[must_use]
    pub fn engines_besides(&self, instance: &str) -> u32 {
        let all = self.engines();
        all - u32::from(all > 0 && self.engines.lock().contains_key(instance))
    }

    /// Grows whenever somebody opens what it had not opened from there.
    #[must_use]
    pub fn version(&self) -> u64 {
        // Relaxed: one that is too old has somebody asked again, and told the same.
        self.version.load(Ordering::Relaxed)
    }

    /// So many of all openers with the indices of what they opened, the latest ones, oldest first.
    #[must_use]
    pub fn latest(&self, most: usize) -> Vec<(u32, Opener)> {
        let known = self.known.lock();
        let all = known.iter().flat_map(|(of, all)| all.iter().map(|who| (*of, who.clone())));
        let mut all: Vec<_> = all.collect();
        drop(known);
        all.sort_by_key(|(_, opener)| opener.at);
        all.drain(..all.len().saturating_sub(most));
        all
    }

    /// Who opened it, oldest first.
    #[must_use]
    pub fn of(&self, namespace: u32) -> Vec<Opener> {
        self.known.lock().get(&namespace).cloned().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn opener(number: usize, host: &str) -> Opener {
        Opener {
            instance: format!("vllm-{number}"),
            host: host.to_owned(),
            zone: String::new(),
            client_version: "kvstrata 0.1.0".to_owned(),
            at: Instant::now(),
        }
    }

    #[test]
    fn an_instance_counts_once_and_the_oldest_are_forgotten() {
        let openers = Openers::default();
        openers.note(1, opener(0, "a"));
        openers.note(1, opener(0, "b"));
        openers.note(1, opener(0, "a"));
        let hosts: Vec<_> = openers.of(1).into_iter().map(|opener| opener.host).collect();
        assert_eq!(hosts, ["b", "a"]);
        for number in 1..=OPENERS_MAX {
            openers.note(1, opener(number, "a"));
        }
        let known = openers.of(1);
        assert_eq!(known.len(), OPENERS_MAX);
        assert_eq!(known[0].instance, "vllm-1");
        assert_eq!(
            openers.with_latest(1, |node, zone| (node.to_owned(), zone.len())),
            ("a".to_owned(), 0)
        );
        assert_eq!(openers.with_latest(2, |node, _zone| node.len()), 0);
        assert!(openers.of(2).is_empty());
        assert_eq!(openers.version(), 2 + OPENERS_MAX as u64, "not for what was known");
        openers.note(1, Opener { zone: "z".to_owned(), ..opener(OPENERS_MAX, "a") });
        assert_eq!(openers.version(), 3 + OPENERS_MAX as u64);
        openers.note(2, opener(0, "a"));
        let latest = openers.latest(2);
        let latest: Vec<_> = latest.iter().map(|(of, who)| (*of, who.zone.as_str())).collect();
        assert_eq!(latest, [(1, "z"), (2, "")]);
    }

    #[tokio::test(start_paused = true)]
    async fn engines_count_once_and_for_a_while() {
        let openers = Openers::default();
        for instance in ["a", "b", "a"] {
            openers.note_engine(instance, true);
        }
        assert_eq!((openers.engines(), openers.engines_besides("a")), (2, 1));
        assert_eq!(openers.engines_besides("c"), 2);
        openers.note_engine("b", false);
        assert_eq!(openers.engines(), 1);
        tokio::time::advance(ENGINE_COUNTS_FOR / 2).await;
        openers.note_engine("c", true);
        tokio::time::advance(ENGINE_COUNTS_FOR / 2).await;
        assert_eq!((openers.engines(), openers.engines_besides("a")), (1, 1));
        for number in 0..=ENGINES_COUNTED_MAX {
            openers.note_engine(&number.to_string(), true);
        }
        assert_eq!(openers.engines() as usize, ENGINES_COUNTED_MAX);
    }

    #[tokio::test(start_paused = true)]
    async fn who_was_sent_on_is_sent_there_again_for_a_while() {
        let openers = Openers::default();
        openers.note_sent_on("a", "node-1");
        openers.note_sent_on("a", "node-2");
        assert_eq!(openers.sent_on("a").as_deref(), Some("node-2"));
        assert_eq!(openers.sent_on("b"), None);
        tokio::time::advance(ENGINE_COUNTS_FOR).await;
        assert_eq!(openers.sent_on("a"), None);
        for number in 0..=ENGINES_COUNTED_MAX {
            openers.note_sent_on(&number.to_string(), "node-1");
        }
        assert_eq!(openers.sent_on("0").as_deref(), Some("node-1"));
        assert_eq!(openers.sent_on(&ENGINES_COUNTED_MAX.to_string()), None);
    }

    #[test]
    fn an_instance_is_found_by_its_name_by_its_host_or_by_both() {
        let known = opener(1, "a");
        for (name, host) in [("vllm-1", ""), ("", "a"), ("vllm-1", "a"), ("", "")] {
            assert!(known.is_called(name, host), "{name} {host}");
        }
        for (name, host) in [("vllm", ""), ("", "b"), ("vllm-1", "b"), ("vllm-2", "a")] {
            assert!(!known.is_called(name, host), "{name} {host}");
        }
    }
}

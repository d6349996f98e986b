//! Which member is the home of an engine instance: where its puts and lookups go.
//!
//! A member on the engine's own host comes first, because memory can be shared there; then those in its zone,
//! whose network is near and costs nothing; then all others. Among equals rendezvous hashing decides: the member
//! with the highest [weight] of instance and name. So whoever knows the same list decides the same, a join takes
//! homes only for the member that has joined, and a leave moves only the engines of the one that has left.
//!
//! Loads are bounded: a member that has its share of all engines ([`LOAD_NUM`] / [`LOAD_DEN`] of the mean, rounded
//! up) gets no more; the next of its class is taken, then the next class. Hashing alone would give one of ten
//! members twice the mean, and a host full of engines would all be one member's.
//!
//! Pure: it asks nobody. Members count the engines whose home they are. What a member knows of others may include
//! the engine in question, so it takes one that is just at its bound for one with room: that one knows better, and
//! sends on whom it does not know. Whoever was sent is at home where there is room, or the two would send it back
//! and forth.

use std::cmp::Reverse;

use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use crate::members::Member;

/// A member may have this many times the mean number of engines: 1.25, where a second choice is rare already
/// and nobody has much more than others.
const LOAD_NUM: u64 = 5;
/// See [`LOAD_NUM`].
const LOAD_DEN: u64 = 4;

/// An engine, in its own words.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Engine<'a> {
    /// The instance, as routers call it.
    pub instance: &'a str,
    /// The machine that it runs on; empty if unknown.
    pub node: &'a str,
    /// The zone of that; empty if unknown.
    pub zone: &'a str,
}

/// How far a member is from an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Distance {
    SameHost,
    SameZone,
    Far,
}

/// Who says which member is an engine's home.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Asked {
    /// Somebody whose counts are all without the engine.
    Nobody,
    /// This member, whose own count is without the engine; those of others may be with it.
    Member(u32),
    /// The same, to which another one has sent the engine.
    SentTo(u32),
}

/// The index ([`Member::index`]) of the engine's home; `None` only if every member is draining. The order of the
/// list does not count.
#[must_use]
pub fn home(engine: &Engine<'_>, members: &[Member], asked: Asked) -> Option<u32> {
    let candidates = || members.iter().filter(|member| !member.draining);
    let count = candidates().count();
    let engines = candidates().map(|member| u64::from(member.engines)).sum();
    // Somebody has room: if all were at the bound, they had more than all engines together.
    let bound = engines_max(engines, count);
    let has_room = |member: &Member| {
        let may_be_here =
            matches!(asked, Asked::Member(own) | Asked::SentTo(own) if own != member.index);
        u64::from(member.engines) < bound + u64::from(may_be_here)
    };
    let with_room = || candidates().filter(|member| has_room(member));
    if let Asked::SentTo(own) = asked
        && with_room().any(|member| member.index == own)
    {
        return Some(own);
    }
    with_room().min_by_key(|member| engine.rank(member)).map(|member| member.index)
}

/// The member that an engine would be at home at if all had room.
#[must_use]
pub fn first_choice<'a>(engine: &Engine<'_>, members: &'a [Member]) -> Option<&'a Member> {
    members.iter().filter(|member| !member.draining).min_by_key(|member| engine.rank(member))
}

/// The most engines that a member of `members` may have once there is one more than `engines`.
#[must_use]
pub fn engines_max(engines: u64, members: usize) -> u64 {
    let members = u64::try_from(members).unwrap_or(u64::MAX).max(1);
    let share = engines.saturating_add(1).saturating_mul(LOAD_NUM);
    share.div_ceil(members.saturating_mul(LOAD_DEN))
}

/// How much a member is wanted by an instance: XXH3-64 of the member's name under the seed that XXH3-64 makes of the
/// instance. It is the same in every version: another one would move every engine.
#[must_use]
pub fn weight(instance: &str, member: &str) -> u64 {
    xxh3_64_with_seed(member.as_bytes(), xxh3_64(instance.as_bytes()))
}

impl Engine<'_> {
    /// The lowest comes first.
    fn rank<'a>(&self, member: &'a Member) -> (Distance, Reverse<u64>, &'a str) {
        (self.distance(member), Reverse(weight(self.instance, &member.name)), &member.name)
    }

    fn distance(&self, member: &Member) -> Distance {
        let is_same = |ours: &str, theirs: &str| !ours.is_empty() && ours == theirs;
        if is_same(self.node, &member.host) {
            Distance::SameHost
        } else if is_same(self.zone, &member.zone) {
            Distance::SameZone
        } else {
            Distance::Far
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn members(count: u32) -> Vec<Member> {
        let member = |index| Member {
            index,
            name: format!("kvstrata-{index}"),
            host: format!("host-{index}"),
            zone: format!("zone-{}", index % 3),
            ..Member::default()
        };
        (0..count).map(member).collect()
    }

    fn instances(count: u32) -> Vec<String> {
        (0..count).map(|number| format!("10.0.0.{number}:8000")).collect()
    }

    fn named(instance: &str) -> Engine<'_> {
        Engine { instance, ..Engine::default() }
    }

    /// The homes of engines that come one after the other, by the names of members.
    fn settle(instances: &[String], members: &mut [Member]) -> BTreeMap<String, String> {
        let mut homes = BTreeMap::new();
        for instance in instances {
            let at = home(&named(instance), members, Asked::Nobody).unwrap();
            let member = members.iter_mut().find(|member| member.index == at).unwrap();
            member.engines += 1;
            homes.insert(instance.clone(), member.name.clone());
        }
        homes
    }

    #[test]
    fn weights_are_the_same_in_every_version() {
        for (instance, member, expected) in GOLDEN {
            assert_eq!(weight(instance, member), expected, "{instance} {member}");
        }
        let three = members(3);
        let homes = ["a", "b", "c", "d", "vllm-0:8000", "10.1.2.3:8000"];
        let homes = homes.map(|instance| home(&named(instance), &three, Asked::Nobody).unwrap());
        assert_eq!(homes, GOLDEN_HOMES);
    }

    const GOLDEN: [(&str, &str, u64); 3] = [
        ("vllm-0:8000", "kvstrata-0", 0x4a39_467b_4950_dcca),
        ("vllm-0:8000", "kvstrata-1", 0x1862_9609_a0f1_9765),
        ("", "", 0x412f_1275_e100_17f3),
    ];
    const GOLDEN_HOMES: [u32; 6] = [2, 1, 2, 2, 0, 1];

    #[test]
    fn a_join_takes_only_for_itself_and_a_leave_moves_only_its_own() {
        let instances = instances(2_000);
        for count in [1, 2, 3, 10, 100] {
            let (few, many) = (members(count), members(count + 1));
            let mut moved = 0;
            for instance in &instances {
                let (before, after) = (
                    home(&named(instance), &few, Asked::Nobody),
                    home(&named(instance), &many, Asked::Nobody),
                );
                moved += u32::from(before != after);
                assert!(
                    before == after || after == Some(count),
                    "{instance}: {before:?} {after:?}"
                );
            }
            let expected = 2_000 / (count + 1);
            let near = expected * 3 / 4..=expected * 5 / 4 + 10;
            assert!(near.contains(&moved), "{moved} moved to one of {}", count + 1);
        }
    }

    #[test]
    fn few_move_although_loads_are_bounded() {
        let instances = instances(1_000);
        for count in [3, 10, 30] {
            let before = settle(&instances, &mut members(count));
            let after = settle(&instances, &mut members(count + 1));
            let moved = before.iter().filter(|(instance, home)| after[*instance] != **home).count();
            let share = instances.len() / (count as usize + 1);
            // Besides those of the one that has joined: those that had their second choice, or have it now.
            let second = instances.len() / 10;
            assert!((share / 2..=share + second).contains(&moved), "{moved} of {count} + 1");
        }
    }

    #[test]
    fn nobody_has_more_than_the_bound_and_everybody_has_a_home() {
        for (engines, count) in [(1, 1), (7, 3), (100, 3), (100, 10), (1_000, 10), (10, 100)] {
            let mut members = members(count);
            let homes = settle(&instances(engines), &mut members);
            assert_eq!(homes.len(), engines as usize);
            let bound = engines_max(u64::from(engines) - 1, count as usize);
            assert!(bound <= u64::from((engines * 5).div_ceil(count * 4)));
            let most = members.iter().map(|member| u64::from(member.engines)).max().unwrap();
            assert!(most <= bound, "{most} of {engines} at one of {count}, {bound} allowed");
        }
    }

    #[test]
    fn near_ones_come_first_until_they_have_their_share() {
        let mut members = members(6);
        let engine = Engine { instance: "x", node: "host-4", zone: "zone-1" };
        let mut homes = Vec::new();
        for _ in 0..12 {
            let at = home(&engine, &members, Asked::Nobody).unwrap();
            members[at as usize].engines += 1;
            homes.push(at);
        }
        // Its own host, then the other one of its zone, and others only while both have all they may.
        assert_eq!(homes[..2], [4, 1]);
        assert!(homes.iter().any(|at| ![1, 4].contains(at)), "{homes:?}");
        assert_eq!((members[4].engines, members[1].engines), (3, 3), "{homes:?}");
        let elsewhere = Engine { node: "another", zone: "another", ..engine };
        let unknown = Engine { node: "", zone: "", ..engine };
        let mut nameless = self::members(6);
        nameless.iter_mut().for_each(|member| (member.host, member.zone) = Default::default());
        let by_hash = home(&elsewhere, &self::members(6), Asked::Nobody);
        assert_eq!(
            (
                home(&unknown, &nameless, Asked::Nobody),
                home(&unknown, &self::members(6), Asked::Nobody)
            ),
            (by_hash, by_hash)
        );
    }

    #[test]
    fn an_engine_keeps_the_home_that_it_fills_itself_and_nobody_is_sent_back_and_forth() {
        for number in 0..300 {
            let mut members = members(3);
            // Two others are at work already, anywhere.
            members[number % 3].engines += 1;
            members[number / 3 % 3].engines += 1;
            let instance = format!("vllm-{number}:8000");
            let mut counted: Option<u32> = None;
            let settled: Vec<u32> = (0..3)
                .map(|at| {
                    let (mut asked, mut moves) = (Asked::Member(at), 0);
                    loop {
                        let (Asked::Member(own) | Asked::SentTo(own)) = asked else {
                            unreachable!()
                        };
                        // What it knows of itself is without the engine, what it knows of others with it.
                        let mut known = members.clone();
                        if let Some(at) = counted.filter(|at| *at != own) {
                            known[at as usize].engines += 1;
                        }
                        let next = home(&named(&instance), &known, asked).unwrap();
                        if next == own {
                            counted = Some(own);
                            return own;
                        }
                        (asked, moves) = (Asked::SentTo(next), moves + 1);
                        assert!(moves <= 2, "{instance} is sent from one to another");
                    }
                })
                .collect();
            assert!(settled.iter().all(|home| *home == settled[0]), "{instance}: {settled:?}");
        }
    }

    #[test]
    fn who_drains_is_no_home_and_the_order_of_the_list_does_not_count() {
        let mut members = members(5);
        let engine = Engine { instance: "x", node: "host-2", zone: "" };
        assert_eq!(home(&engine, &members, Asked::Nobody), Some(2));
        members[2].draining = true;
        // What it has left does not count for the others' share.
        members[2].engines = 1_000;
        let other = home(&engine, &members, Asked::Nobody).unwrap();
        assert_ne!(other, 2);
        members.reverse();
        assert_eq!(home(&engine, &members, Asked::Nobody), Some(other));
        members.iter_mut().for_each(|member| member.draining = true);
        assert_eq!(home(&engine, &members, Asked::Nobody), None);
        assert_eq!(home(&engine, &[], Asked::Nobody), None);
        members[0] = Member { draining: false, engines: u32::MAX, ..members[0].clone() };
        assert_eq!(home(&engine, &members, Asked::Nobody), Some(members[0].index));
    }
}

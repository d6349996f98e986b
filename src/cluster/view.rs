//! The member list that a node makes of what lives and what that says of itself. Pure.

use std::collections::{BTreeMap, HashMap};

use super::about::{self, Load};
use crate::{
    limits::{MEMBER_NAMES_MAX, MEMBERS_MAX},
    members::{Member, Roster},
};

/// A node that lives, as gossip knows it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Alive<'a> {
    pub(crate) name: &'a str,
    /// Its start, in milliseconds of its own clock: the latest of one name is it.
    pub(crate) generation: u64,
    /// None if it was not heard yet.
    pub(crate) about: Option<&'a str>,
    pub(crate) load: Option<&'a str>,
}

/// What a node makes of it.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Seen {
    /// The list, the node itself first, then by index.
    pub(crate) list: Vec<Member>,
    /// What the others have to do, by index.
    pub(crate) loads: BTreeMap<u32, Load>,
    /// Nodes that say nonsense, or are too many.
    pub(crate) left_out: usize,
    /// Names that several have.
    pub(crate) twice: Vec<String>,
}

/// The indices that were given so far: an index is never given to another name, because runs name holders by it.
#[derive(Debug, Default)]
pub(crate) struct View {
    indices: HashMap<String, u32>,
}

impl View {
    /// The list of those that live, of which `own` is this node and not among `alive`.
    pub(crate) fn list<'a>(&mut self, own: Member, alive: impl Iterator<Item = Alive<'a>>) -> Seen {
        let mut seen = Seen::default();
        let mut latest: BTreeMap<&str, Alive<'_>> = BTreeMap::new();
        for node in alive {
            let is_twice = node.name == own.name || latest.contains_key(node.name);
            if is_twice && !seen.twice.iter().any(|name| name == node.name) {
                seen.twice.push(node.name.to_owned());
            }
            let known = latest.get(node.name);
            let is_later = known.is_none_or(|known| known.generation < node.generation);
            if node.name != own.name && is_later {
                latest.insert(node.name, node);
            }
        }
        seen.list.push(Member { index: Roster::OWN, ..own });
        for node in latest.values() {
            // Until it has said where it is, it is nowhere.
            let Some(about) = node.about else { continue };
            let load = about::read_load(node.load.unwrap_or("{}"));
            let read = load.and_then(|load| {
                let member = about::read_member(node.name, about, &load)?;
                (seen.list.len() < MEMBERS_MAX).then_some(())?;
                Some((Member { index: self.index(node.name)?, ..member }, load))
            });
            match read {
                Some((member, load)) => {
                    seen.loads.insert(member.index, load);
                    seen.list.push(member);
                }
                None => seen.left_out += 1,
            }
        }
        seen.list.sort_by_key(|member| member.index);
        seen
    }

    /// The index of a name; none if there are too many names.
    fn index(&mut self, name: &str) -> Option<u32> {
        if let Some(index) = self.indices.get(name) {
            return Some(*index);
        }
        if self.indices.len() >= MEMBER_NAMES_MAX {
            return None;
        }
        let index = u32::try_from(self.indices.len()).ok()?.checked_add(1)?;
        self.indices.insert(name.to_owned(), index);
        Some(index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ABOUT: &str = r#"{"endpoint":"a:1"}"#;

    fn alive<'a>(name: &'a str, generation: u64, about: &'a str) -> Alive<'a> {
        Alive { name, generation, about: Some(about), load: Some(r#"{"engines":2}"#) }
    }

    fn own() -> Member {
        Member { name: "own".to_owned(), ..Member::default() }
    }

    fn names(seen: &Seen) -> Vec<(u32, &str)> {
        seen.list.iter().map(|member| (member.index, member.name.as_str())).collect()
    }

    #[test]
    fn an_index_stays_with_its_name() {
        let mut view = View::default();
        let both = [alive("b", 1, ABOUT), alive("c", 1, ABOUT)];
        let seen = view.list(own(), both.into_iter());
        assert_eq!(names(&seen), [(0, "own"), (1, "b"), (2, "c")]);
        assert_eq!(seen.loads.get(&2).map(|load| load.engines), Some(2));
        let seen = view.list(own(), [alive("a", 1, ABOUT), alive("c", 9, ABOUT)].into_iter());
        assert_eq!(names(&seen), [(0, "own"), (2, "c"), (3, "a")]);
        let seen = view.list(own(), both.into_iter());
        assert_eq!(names(&seen), [(0, "own"), (1, "b"), (2, "c")]);
        assert!(seen.twice.is_empty() && seen.left_out == 0);
    }

    #[test]
    fn of_one_name_the_latest_start_counts_and_it_is_told() {
        let mut view = View::default();
        let of = |generation, about| alive("b", generation, about);
        let (old, new) = (of(1, ABOUT), of(2, r#"{"endpoint":"b:2"}"#));
        for nodes in [[old, new], [new, old]] {
            let seen = view.list(own(), nodes.into_iter());
            assert_eq!(names(&seen), [(0, "own"), (1, "b")]);
            assert_eq!(seen.list[1].endpoint, "b:2");
            assert_eq!(seen.twice, ["b"]);
        }
        let seen = view.list(own(), [alive("own", 9, ABOUT)].into_iter());
        assert_eq!(names(&seen), [(0, "own")]);
        assert_eq!(seen.twice, ["own"], "another process has our name");
    }

    #[test]
    fn who_says_nonsense_is_left_out_and_the_others_are_not() {
        let mut view = View::default();
        let silent = Alive { about: None, ..alive("s", 1, ABOUT) };
        let unloaded = Alive { load: None, ..alive("u", 1, ABOUT) };
        let overloaded = Alive { load: Some("x"), ..alive("o", 1, ABOUT) };
        let nodes = [silent, unloaded, overloaded, alive("n", 1, "nonsense"), alive("b", 1, ABOUT)];
        let seen = view.list(own(), nodes.into_iter());
        assert_eq!(names(&seen), [(0, "own"), (1, "b"), (2, "u")]);
        assert_eq!(seen.left_out, 2);
    }

    #[test]
    fn no_more_are_listed_than_may_be_and_no_more_names_remembered() {
        let mut view = View::default();
        let many: Vec<_> = (0..MEMBERS_MAX + 9).map(|number| format!("n{number:05}")).collect();
        let seen = view.list(own(), many.iter().map(|name| alive(name, 1, ABOUT)));
        assert_eq!((seen.list.len(), seen.left_out), (MEMBERS_MAX, 10));
        for number in 0..MEMBER_NAMES_MAX + 9 {
            let name = format!("m{number}");
            view.list(own(), [alive(&name, 1, ABOUT)].into_iter());
        }
        assert_eq!(view.indices.len(), MEMBER_NAMES_MAX);
        let seen = view.list(own(), [alive("late", 1, ABOUT), alive("m0", 1, ABOUT)].into_iter());
        assert_eq!((seen.list.len(), seen.left_out), (2, 1), "the known ones stay");
    }
}

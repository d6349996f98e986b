//! What a member says of itself: where it is, which does not change while it runs, and its load, which does.
//!
//! Two values of JSON, so that a member can be read by one of another version: what is not known is passed over,
//! what is missing takes its default. What others say is checked like any input: lengths before it is parsed, then
//! every field. Who says anything else is not listed.

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::{
    config::is_endpoint,
    id::ID_BYTES,
    limits::{ABOUT_BYTES_MAX, LOAD_BYTES_MAX, MEMBER_TEXT_BYTES_MAX},
    members::{BulkPort, Member},
};

/// The key of [`About`].
pub(crate) const ABOUT_KEY: &str = "about";
/// The key of [`Load`].
pub(crate) const LOAD_KEY: &str = "load";
/// The most tiers that are read of a member: more than there are kinds of.
const TIERS_MAX: usize = 8;
/// The most engines that are believed: of a cluster, not of a node.
const ENGINES_MAX: u32 = 1 << 20;

/// Where a member is.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
struct About {
    endpoint: String,
    zone: String,
    host: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    bulk: Option<Bulk>,
    http: String,
    version: String,
}

#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
struct Bulk {
    tcp: String,
    unix: String,
    /// Hex digits.
    instance: String,
}

/// How much a member has to do.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Load {
    /// Engine instances whose home it is.
    pub engines: u32,
    /// Open sessions.
    pub sessions: u64,
    /// It will go away.
    pub draining: bool,
    /// Its tiers, hot to cold.
    pub tiers: Vec<TierLoad>,
}

/// How full a tier is.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct TierLoad {
    /// `dram`, `nvme` or `object`.
    pub tier: String,
    /// Bytes that it can hold; 0 if that is not limited.
    pub capacity: u64,
    /// Bytes that it holds.
    pub used: u64,
}

/// What `member` says of where it is.
pub(crate) fn say_about(member: &Member) -> String {
    let bulk = member.bulk.as_ref().map(|port| Bulk {
        tcp: port.tcp.clone(),
        unix: port.unix.clone(),
        instance: hex::encode(&port.instance),
    });
    let about = About {
        endpoint: member.endpoint.clone(),
        zone: member.zone.clone(),
        host: member.host.clone(),
        bulk,
        http: member.http.clone(),
        version: member.version.clone(),
    };
    serde_json::to_string(&about).unwrap_or_default()
}

/// What a member says of its load.
pub(crate) fn say_load(load: &Load) -> String {
    serde_json::to_string(load).unwrap_or_default()
}

/// The member of this name that says this; none if it says something that no node of ours does.
pub(crate) fn read_member(name: &str, about: &str, load: &Load) -> Option<Member> {
    if about.len() > ABOUT_BYTES_MAX {
        return None;
    }
    let About { endpoint, zone, host, bulk, http, version } = serde_json::from_str(about).ok()?;
    let is_place = |place: &str| place.is_empty() || is_endpoint(place);
    let fits = is_name(name)
        && is_endpoint(&endpoint)
        && is_place(&http)
        && [&endpoint, &zone, &host, &http, &version].into_iter().all(|text| is_text(text));
    let bulk = match bulk {
        None => None,
        Some(Bulk { tcp, unix, instance }) => {
            let instance = hex::decode(instance).ok().filter(|id| id.len() == ID_BYTES)?;
            (is_place(&tcp) && is_text(&tcp) && is_text(&unix)).then_some(())?;
            Some(BulkPort { tcp, unix, instance: Bytes::from(instance) })
        }
    };
    let member = Member {
        index: 0,
        name: name.to_owned(),
        endpoint,
        zone,
        host,
        bulk,
        draining: load.draining,
        engines: load.engines,
        version,
        http,
    };
    fits.then_some(member)
}

/// The load that a member says; none if it is none.
pub(crate) fn read_load(load: &str) -> Option<Load> {
    if load.len() > LOAD_BYTES_MAX {
        return None;
    }
    let load: Load = serde_json::from_str(load).ok()?;
    let fits = load.engines <= ENGINES_MAX
        && load.tiers.len() <= TIERS_MAX
        && load.tiers.iter().all(|tier| is_text(&tier.tier));
    fits.then_some(load)
}

fn is_name(name: &str) -> bool {
    !name.is_empty() && is_text(name) && !name.contains(char::is_whitespace)
}

/// Short enough to be shown, and nothing that a terminal would obey.
fn is_text(text: &str) -> bool {
    text.len() <= MEMBER_TEXT_BYTES_MAX && !text.contains(char::is_control)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{any, proptest};

    use super::*;

    fn member() -> Member {
        Member {
            index: 0,
            name: "kv-0".to_owned(),
            endpoint: "kv-0.peers:9400".to_owned(),
            zone: "b".to_owned(),
            host: "node-7".to_owned(),
            bulk: Some(BulkPort {
                tcp: "kv-0.peers:9402".to_owned(),
                unix: "/run/kv".to_owned(),
                instance: Bytes::from_static(&[7; ID_BYTES]),
            }),
            draining: true,
            engines: 3,
            version: "0.1.0".to_owned(),
            http: "kv-0.peers:9401".to_owned(),
        }
    }

    #[test]
    fn what_is_said_is_read() {
        let tiers = vec![TierLoad { tier: "dram".to_owned(), capacity: 9, used: 4 }];
        let load = Load { engines: 3, sessions: 5, draining: true, tiers };
        assert_eq!(read_load(&say_load(&load)), Some(load.clone()));
        assert_eq!(read_member("kv-0", &say_about(&member()), &load), Some(member()));
        let alone = Member { bulk: None, http: String::new(), ..member() };
        assert_eq!(read_member("kv-0", &say_about(&alone), &load), Some(alone));
        // A later version says more, an earlier one less.
        let later = r#"{"endpoint":"a:1","colour":"red"}"#;
        assert_eq!(read_member("a", later, &Load::default()).unwrap().endpoint, "a:1");
        assert_eq!(read_load(r#"{"engines":2,"x":[1]}"#).unwrap().engines, 2);
    }

    #[test]
    fn nonsense_is_not_read() {
        let long = "x".repeat(MEMBER_TEXT_BYTES_MAX + 1);
        let damages: [fn(&mut Member, &str); 8] = [
            |member, _| member.endpoint.clear(),
            |member, _| member.endpoint = "kv-0".to_owned(),
            |member, _| member.http = "kv-0:x".to_owned(),
            |member, long| member.zone = long.to_owned(),
            |member, _| member.host = "a\u{1b}[2J".to_owned(),
            |member, long| member.bulk.as_mut().unwrap().unix = long.to_owned(),
            |member, _| member.bulk.as_mut().unwrap().instance = Bytes::from_static(b"short"),
            |member, _| member.bulk.as_mut().unwrap().tcp = "here".to_owned(),
        ];
        for (number, damage) in damages.into_iter().enumerate() {
            let mut member = member();
            damage(&mut member, &long);
            let read = read_member("kv-0", &say_about(&member), &Load::default());
            assert_eq!(read, None, "damage {number}");
        }
        let about = say_about(&member());
        for name in ["", "a b", "a\n", &long] {
            assert_eq!(read_member(name, &about, &Load::default()), None, "{name:?}");
        }
        let padded = format!("{}{about}", " ".repeat(ABOUT_BYTES_MAX));
        for bad in ["", "[]", "{", "null", r#"{"endpoint":7}"#, &padded] {
            assert_eq!(read_member("a", bad, &Load::default()), None, "{bad:.20}");
        }
        let tiers = format!(r#"{{"tiers":[{}{{}}]}}"#, "{},".repeat(TIERS_MAX));
        let spaces = " ".repeat(LOAD_BYTES_MAX);
        for bad in [r#"{"engines":4294967295}"#, r#"{"engines":-1}"#, "7", &tiers, &spaces] {
            assert_eq!(read_load(bad), None, "{bad:.40}");
        }
    }

    proptest! {
        #[test]
        fn any_text_gets_an_answer(name in any::<String>(), text in any::<String>()) {
            let load = read_load(&text).unwrap_or_default();
            assert!(read_member(&name, &text, &load).is_none_or(|read| read.name == name));
        }
    }
}

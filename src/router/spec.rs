//! Engines as they are given on the command line.

use std::{fmt, str::FromStr};

use crate::{config::tcp_address, events::subscribe::Endpoint};

/// Engines behind one router: a bit each says which of them have a block.
pub(crate) const ENGINES_MAX: usize = 128;

const SCHEME: &str = "http://";

/// An engine: where it answers and where it publishes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct EngineSpec {
    /// `host:port` that requests go to.
    pub(crate) authority: String,
    /// What it is called in headers, metrics and logs.
    pub(crate) name: String,
    /// Where it publishes; none if nothing is known of its device.
    pub(crate) events: Option<Endpoint>,
    /// The data parallel rank that is meant, of an engine that has several behind one address.
    pub(crate) rank: Option<u32>,
    /// What it calls itself where it opens namespaces; the address of its API if nothing else is said.
    pub(crate) instance: String,
    /// The host it runs on, if it does not say so itself.
    pub(crate) node: String,
}

/// Not an engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BadEngine(String);

impl std::error::Error for BadEngine {}

impl fmt::Display for BadEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}: http://HOST:PORT[,name=NAME][,events=tcp://HOST:PORT[,replay=tcp://HOST:PORT]]\
             [,rank=NUMBER][,instance=NAME][,node=NAME] is wanted",
            self.0
        )
    }
}

impl FromStr for EngineSpec {
    type Err = BadEngine;

    fn from_str(text: &str) -> Result<Self, BadEngine> {
        let bad = |what: &str| BadEngine(what.to_owned());
        let mut items = text.split(',').map(str::trim);
        let address = items.next().unwrap_or_default();
        let authority = address.strip_prefix(SCHEME).map(|rest| rest.trim_end_matches('/'));
        let authority = authority.filter(|text| is_authority(text));
        let authority = authority.ok_or_else(|| bad("the address of an engine"))?.to_owned();
        let (mut publisher, mut replay) = (None, None);
        let mut spec = Self {
            name: authority.clone(),
            instance: String::new(),
            node: String::new(),
            events: None,
            rank: None,
            authority,
        };
        for item in items {
            let (key, value) = item.split_once('=').ok_or_else(|| bad(item))?;
            let address = || tcp_address(value).ok_or_else(|| bad(item));
            match (key, value) {
                (_, "") => return Err(bad(item)),
                ("name", _) if is_name(value) => value.clone_into(&mut spec.name),
                ("instance", _) => value.clone_into(&mut spec.instance),
                ("node", _) => value.clone_into(&mut spec.node),
                ("events", _) => publisher = Some(address()?),
                ("replay", _) => replay = Some(address()?),
                ("rank", _) => spec.rank = Some(value.parse().map_err(|_none| bad(item))?),
                _ => return Err(bad(item)),
            }
        }
        if replay.is_some() && publisher.is_none() {
            return Err(bad("replay without events"));
        }
        spec.events = publisher.map(|publisher| Endpoint { publisher, replay });
        if spec.instance.is_empty() {
            spec.instance.clone_from(&spec.authority);
        }
        Ok(spec)
    }
}

/// `host:port`, without anything behind it.
fn is_authority(text: &str) -> bool {
    let Some((host, port)) = text.rsplit_once(':') else { return false };
    let known = !host.is_empty() && !host.contains(['/', '?', '@', ' ']);
    known && port.parse::<u16>().is_ok_and(|port| port != 0)
}

/// What may stand in a header and in a label.
fn is_name(text: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._:-[]/".contains(&byte);
    text.len() <= 128 && text.bytes().all(allowed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engines_are_read_with_all_that_can_be_said_of_them() {
        let bare: EngineSpec = "http://10.0.0.1:8000/".parse().unwrap();
        assert_eq!(
            (bare.authority.as_str(), bare.name.as_str()),
            ("10.0.0.1:8000", "10.0.0.1:8000")
        );
        assert_eq!((bare.instance.as_str(), bare.events, bare.rank), ("10.0.0.1:8000", None, None));
        let full = "http://h:1,name=a,events=tcp://h:2, replay=tcp://h:3,rank=1,instance=i,node=n";
        let full: EngineSpec = full.parse().unwrap();
        let events = Endpoint { publisher: "h:2".into(), replay: Some("h:3".into()) };
        assert_eq!((full.name.as_str(), full.events), ("a", Some(events)));
        assert_eq!((full.instance.as_str(), full.node.as_str(), full.rank), ("i", "n", Some(1)));
    }

    #[test]
    fn what_is_no_engine_is_refused_by_what_is_wrong_with_it() {
        for (text, named) in [
            ("", "the address"),
            ("https://h:1", "the address"),
            ("http://h", "the address"),
            ("http://h:0", "the address"),
            ("http://h:1/v1", "the address"),
            ("http://h:1,name=", "name="),
            ("http://h:1,name=a b", "name=a b"),
            ("http://h:1,colour=blue", "colour=blue"),
            ("http://h:1,events=h:2", "events=h:2"),
            ("http://h:1,replay=tcp://h:2", "replay without events"),
            ("http://h:1,rank=x", "rank=x"),
        ] {
            let error = text.parse::<EngineSpec>().unwrap_err().to_string();
            assert!(error.starts_with(named), "{text}: {error}");
        }
    }
}

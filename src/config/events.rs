//! The section of events: which engines are listened to, and which routers are told.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

use super::{Auto, EventTargets, Maybe, PathText};
use crate::{auth::ONLY_TENANT, limits::EVENT_SOURCES_MAX};

/// Which engines are listened to, and which routers are told.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Events {
    /// Engines whose events say what blocks are: their parents, their places in their chains, and, for
    /// namespaces that keep them, their tokens. Default `none`: what a put says is known.
    pub subscribe: Maybe<EventSources>,
    /// Routers that are told where the blocks are that their workers can load. Default `none`. Only blocks of
    /// namespaces that keep tokens can be told of, and tokens are told, without encryption.
    pub publish: Maybe<EventTargets>,
    /// Folder in which is noted what routers were told, so that it can be withdrawn after a restart. Default
    /// `auto`: in `nvme.path`, or nowhere without nvme, where routers keep what was true before.
    pub publish_state: Auto<Maybe<PathText>>,
}

/// Engines, of which there is at least one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EventSources(pub Vec<EventSource>);

/// An engine that publishes events.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EventSource {
    /// `host:port` of its publisher.
    pub publisher: String,
    /// `host:port` at which it sends again what was missed; none if it does not.
    pub replay: Option<String>,
    /// Whose blocks they are.
    pub tenant: String,
    /// The model of the namespaces that are described.
    pub model: String,
    /// The engine of the namespaces that are described.
    pub engine: String,
}

/// Not a list of engines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BadSources;

pub(super) const SCHEME: &str = "tcp://";

impl fmt::Display for BadSources {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "1 to {EVENT_SOURCES_MAX} of tcp://HOST:PORT,model=NAME[,replay=tcp://HOST:PORT]\
             [,engine=NAME][,tenant=NAME] with semicolons between them"
        )
    }
}

impl FromStr for EventSources {
    type Err = BadSources;

    fn from_str(text: &str) -> Result<Self, BadSources> {
        let sources: Vec<_> = text.split(';').map(str::parse).collect::<Result<_, _>>()?;
        if sources.len() > EVENT_SOURCES_MAX {
            return Err(BadSources);
        }
        Ok(Self(sources))
    }
}

impl FromStr for EventSource {
    type Err = BadSources;

    fn from_str(text: &str) -> Result<Self, BadSources> {
        let mut items = text.split(',').map(str::trim);
        let publisher = tcp_address(items.next().unwrap_or_default()).ok_or(BadSources)?;
        let (mut replay, mut model) = (None, None);
        let (mut tenant, mut engine) = (ONLY_TENANT.to_owned(), "vllm".to_owned());
        for item in items {
            match item.split_once('=') {
                Some((_, "")) | None => return Err(BadSources),
                Some(("replay", value)) => replay = Some(tcp_address(value).ok_or(BadSources)?),
                Some(("model", value)) => model = Some(value.to_owned()),
                Some(("tenant", value)) => value.clone_into(&mut tenant),
                Some(("engine", value)) => value.clone_into(&mut engine),
                Some(_) => return Err(BadSources),
            }
        }
        Ok(Self { publisher, replay, tenant, model: model.ok_or(BadSources)?, engine })
    }
}

/// The `host:port` of a `tcp://host:port` that can be connected to.
pub(crate) fn tcp_address(text: &str) -> Option<String> {
    let address = text.strip_prefix(SCHEME)?;
    let (host, port) = address.rsplit_once(':')?;
    let known = !host.is_empty() && host != "*" && port.parse::<u16>().is_ok_and(|port| port != 0);
    known.then(|| address.to_owned())
}

impl fmt::Display for EventSources {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, source) in self.0.iter().enumerate() {
            let between = if number > 0 { ";" } else { "" };
            write!(f, "{between}{source}")?;
        }
        Ok(())
    }
}

impl fmt::Display for EventSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { publisher, replay, tenant, model, engine } = self;
        write!(f, "{SCHEME}{publisher},model={model}")?;
        if let Some(replay) = replay {
            write!(f, ",replay={SCHEME}{replay}")?;
        }
        write!(f, ",engine={engine},tenant={tenant}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_print_as_they_are_read() {
        let text = "tcp://10.0.0.1:5557,model=org/m; tcp://[::1]:5557,replay=tcp://[::1]:5558,\
                    tenant=a,engine=sglang,model=n";
        let sources: EventSources = text.parse().unwrap();
        let [first, second] = sources.0.as_slice() else { panic!("{sources:?}") };
        assert_eq!((first.publisher.as_str(), first.model.as_str()), ("10.0.0.1:5557", "org/m"));
        assert_eq!((first.engine.as_str(), first.tenant.as_str()), ("vllm", ONLY_TENANT));
        assert_eq!(second.replay.as_deref(), Some("[::1]:5558"));
        assert_eq!((second.engine.as_str(), second.tenant.as_str()), ("sglang", "a"));
        assert_eq!(sources.to_string().parse(), Ok(sources));
    }

    #[test]
    fn what_names_no_engine_is_refused() {
        for text in [
            "",
            "tcp://h:1",
            "h:1,model=m",
            "tcp://h,model=m",
            "tcp://*:5557,model=m",
            "tcp://h:0,model=m",
            "tcp://h:1,model=",
            "tcp://h:1,model=m,colour=blue",
            "tcp://h:1,model=m,replay=h:2",
            "tcp://h:1,model=m;",
        ] {
            assert_eq!(text.parse::<EventSources>(), Err(BadSources), "{text}");
        }
    }
}

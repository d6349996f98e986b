//! Which routers are told where blocks are.

use std::{fmt, net::SocketAddr, str::FromStr};

use kvstrata_tiers::tier::Tier;

use super::events::{SCHEME, tcp_address};
use crate::{auth::ONLY_TENANT, limits::PUBLISH_TARGETS_MAX};

/// From how many blocks on a chain is announced on each tier by default, hot to cold: what is in memory or on
/// flash is loaded sooner than computed, the first byte of an object takes as long as a dozen blocks.
const FROM_BLOCKS: [Option<u32>; 3] = [Some(1), Some(1), Some(16)];
/// The longest chain that may be asked for.
const FROM_BLOCKS_MAX: u32 = 1024;

/// Routers, of which there is at least one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EventTargets(pub Vec<EventTarget>);

/// Somebody who is told where the blocks are that a worker can load.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EventTarget {
    /// Which kind of router, and where it is met.
    pub router: Router,
    /// Whose blocks they are.
    pub tenant: String,
    /// The model, as the router knows it.
    pub model: String,
    /// The engine of the namespaces that are announced.
    pub engine: String,
    /// The engine instance that can load them; none for any.
    pub worker: Option<String>,
    /// From how many blocks on a chain is announced on dram, nvme and object; none: not at all.
    pub from_blocks: [Option<u32>; 3],
}

/// A kind of router, and where it is met.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Router {
    /// Dynamo: it connects, to one address for each rank of each worker.
    Dynamo {
        /// Where it is listened on.
        listen: SocketAddr,
        /// Where batches are asked for again; none if they are not.
        replay: Option<SocketAddr>,
        /// The data parallel rank of the worker.
        rank: u32,
    },
    /// llm-d: its endpoint picker listens, and is connected to.
    LlmD {
        /// `host:port` of the picker.
        connect: String,
        /// What the picker calls the worker; none for the name of the instance.
        pod: Option<String>,
        /// Events by place, as engines other than vLLM write them.
        array: bool,
    },
}

/// Not a list of routers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BadTargets;

impl fmt::Display for BadTargets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "1 to {PUBLISH_TARGETS_MAX} of dynamo=tcp://IP:PORT,model=NAME[,replay=tcp://IP:PORT]\
             [,worker=INSTANCE][,rank=N] or \
             llm-d=tcp://HOST:PORT,model=NAME[,worker=INSTANCE[@POD]][,encoding=map|array], each with \
             [,engine=NAME][,tenant=NAME][,dram=N|off][,nvme=N|off][,object=N|off] (N 1 to \
             {FROM_BLOCKS_MAX}), with semicolons between them; for llm-d names without @"
        )
    }
}

impl FromStr for EventTargets {
    type Err = BadTargets;

    fn from_str(text: &str) -> Result<Self, BadTargets> {
        let targets: Vec<_> = text.split(';').map(str::parse).collect::<Result<_, _>>()?;
        if targets.len() > PUBLISH_TARGETS_MAX {
            return Err(BadTargets);
        }
        Ok(Self(targets))
    }
}

impl FromStr for EventTarget {
    type Err = BadTargets;

    fn from_str(text: &str) -> Result<Self, BadTargets> {
        let items = text.split(',').map(|item| item.trim().split_once('='));
        let items: Vec<_> = items.collect::<Option<_>>().ok_or(BadTargets)?;
        let (first, items) = items.split_first().ok_or(BadTargets)?;
        let router = match *first {
            ("dynamo", url) => Router::Dynamo { listen: address(url)?, replay: None, rank: 0 },
            ("llm-d", url) => {
                let connect = tcp_address(url).ok_or(BadTargets)?;
                Router::LlmD { connect, pod: None, array: false }
            }
            _ => return Err(BadTargets),
        };
        let mut target = Self {
            router,
            tenant: ONLY_TENANT.to_owned(),
            model: String::new(),
            engine: "vllm".to_owned(),
            worker: None,
            from_blocks: FROM_BLOCKS,
        };
        for (name, value) in items {
            target.take(name, value)?;
        }
        let told = [&target.model, target.worker.as_ref().unwrap_or(&target.model)];
        let splits = matches!(target.router, Router::LlmD { .. }) && target.model.contains('@');
        if splits || told.iter().any(|name| name.is_empty()) { Err(BadTargets) } else { Ok(target) }
    }
}

impl EventTarget {
    fn take(&mut self, name: &str, value: &str) -> Result<(), BadTargets> {
        if value.is_empty() {
            return Err(BadTargets);
        }
        match (name, &mut self.router) {
            ("model", _) => value.clone_into(&mut self.model),
            ("engine", _) => value.clone_into(&mut self.engine),
            ("tenant", _) => value.clone_into(&mut self.tenant),
            ("worker", Router::Dynamo { .. }) => self.worker = Some(value.to_owned()),
            ("worker", Router::LlmD { pod, .. }) => {
                let (worker, called) = match value.split_once('@') {
                    Some((worker, called)) if !called.is_empty() && !called.contains('@') => {
                        (worker, Some(called.to_owned()))
                    }
                    Some(_) => return Err(BadTargets),
                    None => (value, None),
                };
                (self.worker, *pod) = (Some(worker.to_owned()), called);
            }
            ("rank", Router::Dynamo { rank, .. }) => {
                *rank = value.parse().map_err(|_number| BadTargets)?;
            }
            ("replay", Router::Dynamo { replay, .. }) => *replay = Some(address(value)?),
            ("encoding", Router::LlmD { array, .. }) => {
                *array = match value {
                    "map" => false,
                    "array" => true,
                    _ => return Err(BadTargets),
                }
            }
            _ => self.take_tier(name, value)?,
        }
        Ok(())
    }

    fn take_tier(&mut self, name: &str, value: &str) -> Result<(), BadTargets> {
        let mut tiers = Tier::ALL.into_iter().zip(&mut self.from_blocks);
        let (_, from) = tiers.find(|(tier, _)| tier.name() == name).ok_or(BadTargets)?;
        *from = match value {
            "off" => None,
            number => {
                let number = number.parse().map_err(|_number| BadTargets)?;
                Some(number)
                    .filter(|number| (1..=FROM_BLOCKS_MAX).contains(number))
                    .map(Some)
                    .ok_or(BadTargets)?
            }
        };
        Ok(())
    }
}

/// An address that can be listened on.
fn address(url: &str) -> Result<SocketAddr, BadTargets> {
    let address = url.strip_prefix(SCHEME).ok_or(BadTargets)?;
    let address = match address.strip_prefix("*:") {
        Some(port) => format!("0.0.0.0:{port}"),
        None => address.to_owned(),
    };
    let address: SocketAddr = address.parse().map_err(|_address| BadTargets)?;
    if address.port() == 0 { Err(BadTargets) } else { Ok(address) }
}

impl fmt::Display for EventTargets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, target) in self.0.iter().enumerate() {
            let between = if number > 0 { ";" } else { "" };
            write!(f, "{between}{target}")?;
        }
        Ok(())
    }
}

impl fmt::Display for EventTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { router, tenant, model, engine, worker, from_blocks } = self;
        match router {
            Router::Dynamo { listen, replay, rank } => {
                write!(f, "dynamo={SCHEME}{listen},model={model}")?;
                if let Some(replay) = replay {
                    write!(f, ",replay={SCHEME}{replay}")?;
                }
                write!(f, ",rank={rank}")?;
            }
            Router::LlmD { connect, array, .. } => {
                let encoding = if *array { "array" } else { "map" };
                write!(f, "llm-d={SCHEME}{connect},model={model},encoding={encoding}")?;
            }
        }
        if let Some(worker) = worker {
            write!(f, ",worker={worker}")?;
            if let Router::LlmD { pod: Some(pod), .. } = router {
                write!(f, "@{pod}")?;
            }
        }
        write!(f, ",engine={engine},tenant={tenant}")?;
        for (tier, from) in Tier::ALL.into_iter().zip(from_blocks) {
            match from {
                Some(from) => write!(f, ",{}={from}", tier.name())?,
                None => write!(f, ",{}=off", tier.name())?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn routers_print_as_they_are_read() {
        let text = "dynamo=tcp://*:5600,model=org/m,replay=tcp://[::1]:5601,worker=vllm-0,rank=2,object=off;\
                    llm-d=tcp://epp.svc:5557,model=m,worker=vllm-0@10.0.0.7:8000,encoding=array,nvme=4,\
                    engine=sglang,tenant=a; llm-d=tcp://[::1]:5557,model=m";
        let targets: EventTargets = text.parse().unwrap();
        let [dynamo, named, any] = targets.0.as_slice() else { panic!("{targets:?}") };
        let Router::Dynamo { listen, replay, rank } = &dynamo.router else { panic!("{dynamo:?}") };
        assert_eq!((listen.to_string().as_str(), *rank), ("0.0.0.0:5600", 2));
        assert_eq!(replay.unwrap().to_string(), "[::1]:5601");
        assert_eq!(dynamo.from_blocks, [Some(1), Some(1), None]);
        assert_eq!(dynamo.worker.as_deref(), Some("vllm-0"));
        let Router::LlmD { connect, pod, array } = &named.router else { panic!("{named:?}") };
        assert_eq!((connect.as_str(), *array), ("epp.svc:5557", true));
        assert_eq!(
            (pod.as_deref(), named.worker.as_deref()),
            (Some("10.0.0.7:8000"), Some("vllm-0"))
        );
        assert_eq!((named.engine.as_str(), named.tenant.as_str()), ("sglang", "a"));
        assert_eq!(named.from_blocks, [Some(1), Some(4), Some(16)]);
        assert_eq!((any.worker.as_deref(), any.tenant.as_str()), (None, ONLY_TENANT));
        assert_eq!(targets.to_string().parse(), Ok(targets));
    }

    #[test]
    fn what_names_no_router_is_refused() {
        for text in [
            "",
            "tcp://h:1,model=m",
            "dynamo=tcp://h:1,model=m",
            "dynamo=tcp://1.2.3.4:0,model=m",
            "dynamo=tcp://1.2.3.4:5",
            "dynamo=tcp://1.2.3.4:5,model=",
            "dynamo=tcp://1.2.3.4:5,model=m,rank=x",
            "dynamo=tcp://1.2.3.4:5,model=m,encoding=map",
            "dynamo=tcp://1.2.3.4:5,model=m,dram=0",
            "dynamo=tcp://1.2.3.4:5,model=m,object=1025",
            "dynamo=tcp://1.2.3.4:5,model=m;",
            "llm-d=tcp://h,model=m",
            "llm-d=tcp://h:1,model=m,rank=1",
            "llm-d=tcp://h:1,model=m,replay=tcp://1.2.3.4:5",
            "llm-d=tcp://h:1,model=m,worker=w@p@q",
            "llm-d=tcp://h:1,model=m@n",
            "llm-d=tcp://h:1,model=m,worker=@p",
        ] {
            assert_eq!(text.parse::<EventTargets>(), Err(BadTargets), "{text}");
        }
    }
}

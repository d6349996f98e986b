//! The section of the cluster: its name, and how its nodes find one another.

use std::{fmt, str::FromStr};

use kvstrata_tiers::object::names::{CLUSTER_BYTES_MAX, ClusterName};
use serde::{Deserialize, Serialize};

use super::{Address, Auto, Maybe, Problem, validate::is_endpoint};

/// The most seeds: all nodes of a large cluster, although one that answers is enough.
const SEEDS_MAX: usize = 256;

/// How the nodes of a cluster find one another.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Cluster {
    /// Name of the cluster, the same at all its nodes: nodes of another do not join it, and a bucket may be
    /// shared by several. Default `kvstrata`. 1 to 63 of `a-z`, `0-9` and `-`.
    pub name: String,
    /// Address of gossip (UDP). Default `none`: this node is alone. All nodes of a cluster share the secret
    /// of `identity.secret_file`, from which the key is made that their datagrams are sealed with.
    pub listen: Maybe<Address>,
    /// `host:port` that the others are told to reach this node's gossip at. Default `auto`: the address listened
    /// on, or, listening on all of them, the host of `node.advertise`, or the node's name.
    pub advertise: Auto<String>,
    /// Where other nodes may be: `host:port`, with commas between them. A name may have many addresses, such as
    /// that of a headless service; it is resolved again for ever. Default `none`: this node waits to be found.
    pub seeds: Maybe<Seeds>,
}

impl Default for Cluster {
    fn default() -> Self {
        Self {
            name: "kvstrata".to_owned(),
            listen: Maybe::None,
            advertise: Auto::Auto,
            seeds: Maybe::None,
        }
    }
}

/// Places of other nodes, of which there is at least one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seeds(pub Vec<String>);

/// Not a list of seeds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BadSeeds;

impl fmt::Display for BadSeeds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "1 to {SEEDS_MAX} of HOST:PORT with commas between them")
    }
}

impl FromStr for Seeds {
    type Err = BadSeeds;

    fn from_str(text: &str) -> Result<Self, BadSeeds> {
        let seeds: Vec<_> = text.split(',').map(|seed| seed.trim().to_owned()).collect();
        let is_seed = |seed: &String| is_endpoint(seed) && !seed.contains(';');
        if seeds.len() > SEEDS_MAX || !seeds.iter().all(is_seed) {
            return Err(BadSeeds);
        }
        Ok(Self(seeds))
    }
}

impl fmt::Display for Seeds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.join(","))
    }
}

impl Cluster {
    pub(super) fn check(&self, problems: &mut Vec<Problem>) {
        let mut problem = |key: &str, given: &dyn fmt::Display, allowed: String| {
            problems.push(Problem::new(key, given, allowed));
        };
        if ClusterName::new(&self.name).is_err() {
            let allowed = format!("1 to {CLUSTER_BYTES_MAX} of a-z, 0-9 and -");
            problem("cluster.name", &format_args!("{:?}", self.name), allowed);
        }
        if let Some(endpoint) = self.advertise.given().filter(|endpoint| !is_endpoint(endpoint)) {
            let allowed = "host:port, port 1 to 65535".to_owned();
            problem("cluster.advertise", &format_args!("{endpoint:?}"), allowed);
        }
        if let Some(seeds) = self.seeds.given()
            && self.listen.given().is_none()
        {
            let allowed = "none without cluster.listen: answers must reach this node";
            problem("cluster.seeds", seeds, allowed.to_owned());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(cluster: &Cluster) -> Vec<String> {
        let mut problems = Vec::new();
        cluster.check(&mut problems);
        problems.into_iter().map(|problem| problem.key).collect()
    }

    #[test]
    fn what_cannot_be_is_refused_by_its_key() {
        assert!(keys(&Cluster::default()).is_empty());
        for name in ["", "A", "a_b", "a/b", &"a".repeat(64)] {
            let cluster = Cluster { name: name.to_owned(), ..Cluster::default() };
            assert_eq!(keys(&cluster), ["cluster.name"], "{name}");
        }
        let seeds: Maybe<Seeds> = "cache-peers:9403, 10.0.0.1:9403".parse().unwrap();
        assert_eq!(seeds.to_string(), "cache-peers:9403,10.0.0.1:9403");
        let alone = Cluster { seeds: seeds.clone(), ..Cluster::default() };
        assert_eq!(keys(&alone), ["cluster.seeds"], "nobody could answer");
        let listening = Cluster { listen: "127.0.0.1:9403".parse().unwrap(), seeds, ..alone };
        assert!(keys(&listening).is_empty());
        let wrong = Cluster { advertise: Auto::Given("cache".to_owned()), ..listening };
        assert_eq!(keys(&wrong), ["cluster.advertise"]);
        for text in ["", "a", "a:0", "a:1,", "a:1;b:2", "a b:1"] {
            assert_eq!(text.parse::<Seeds>(), Err(BadSeeds), "{text:?}");
        }
    }
}

//! The section of the tier in an object store: what can be set and what is allowed.

use std::{fmt, str::FromStr, time::Duration};

use kvstrata_tiers::{
    limits::MIB,
    object::{CAPACITY_PACKS_MIN, PACK_BYTES_MAX, PACK_BYTES_MIN, Prices, bucket::SCHEMES},
};
use serde::{Deserialize, Serialize};

use super::{
    Auto, Maybe, Nvme, Period, Problem, Size,
    units::{from_text, to_text},
};

/// The least capacity, however small the packs.
const CAPACITY_MIN: u64 = 64 * MIB;
/// The shortest life of a pack: nothing shorter is worth a request.
const TTL_MIN: Duration = Duration::from_secs(60);
/// The shortest time until what nobody needs is deleted: for tests, where nobody reads that long.
const DELETE_GRACE_MIN: Duration = Duration::from_secs(1);
/// The highest ordinal of a node.
const ORDINAL_MAX: u32 = 99_999;

/// The tier in an object store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Object {
    /// The bucket and the path in it, such as `s3://bucket/path`, `gs://bucket/path`,
    /// `az://container/path` or `file:///directory`; credentials, region and endpoint come from the
    /// environment as for the provider's own tools. Default `none`: no object tier. It needs an nvme
    /// tier, from whose segments packs are cut.
    pub url: Maybe<ObjectUrl>,
    /// Number of this node in the cluster; packs belong to it. Default `auto`: the number at the end
    /// of `node.name`, as a StatefulSet gives it, else 0. 0 to 99999.
    pub ordinal: Auto<u32>,
    /// Bytes of this node's packs in the bucket, those included that have left and wait for
    /// `object.delete_grace`; what is coldest leaves. An adopted ordinal has its own. Two packs are kept free, and as much as is dropped
    /// within the grace time. Default `none`: no limit but `object.ttl`. The least is 64MiB, and 5 packs.
    pub capacity: Maybe<Size>,
    /// How long a pack stays after it was made; blocks of it that were used since go into a new one.
    /// Default `7d`: a week of sessions. `none`: no limit. The
    /// least is 1m.
    pub ttl: Maybe<Period>,
    /// How long the object of a pack stays after the pack has left: longer than the deadline of a read
    /// together with the longest lease, since whoever found it before may still read it. Default `70m`:
    /// an hour, the longest that `lease.ttl_max` may be, and some. The least is 1s.
    pub delete_grace: Period,
    /// Which blocks are stored. Default `worthwhile`: those that were read since they were put, and
    /// those put in chains of 65,536 tokens or more, because every stored byte is paid for. `all`: all.
    pub admission: ObjectAdmission,
    /// Bytes of a pack, 1MiB to 64MiB. Default `32MiB`: large enough that requests cost little, small
    /// enough to be made in memory.
    pub pack_bytes: Size,
    /// What the store charges: `put` for 1000 requests that write or list, `get` for 1000 that read, and
    /// `gib` for one GiB stored for a month. For estimates only. Default: dollars, the list prices of S3
    /// Standard in us-east-1.
    #[serde(serialize_with = "to_text", deserialize_with = "from_text")]
    pub prices: Prices,
}

impl Default for Object {
    fn default() -> Self {
        Self {
            url: Maybe::None,
            ordinal: Auto::Auto,
            capacity: Maybe::None,
            ttl: Maybe::Given(Period(Duration::from_secs(7 * 24 * 60 * 60))),
            delete_grace: Period(Duration::from_secs(70 * 60)),
            admission: ObjectAdmission::default(),
            pack_bytes: Size(32 * MIB),
            prices: Prices::default(),
        }
    }
}

/// Which blocks are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ObjectAdmission {
    /// Those that were read since they were put, and those of long chains.
    #[default]
    Worthwhile,
    /// All.
    All,
}

/// Where the bucket is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectUrl(pub String);

impl FromStr for ObjectUrl {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(Self(text.to_owned()))
    }
}

impl fmt::Display for ObjectUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Object {
    /// Whether there is an object tier.
    #[must_use]
    pub fn is_enabled(&self) -> bool {
        self.url.given().is_some()
    }

    /// The number of the node of this name.
    #[must_use]
    pub fn ordinal_of(&self, node: &str) -> u32 {
        let ending = || {
            let digits = node.len() - node.trim_end_matches(|c: char| c.is_ascii_digit()).len();
            let number = node.get(node.len() - digits..)?.parse().ok()?;
            // `db7` is a name, `db-7` is the seventh of a set.
            let is_numbered = node.get(..node.len() - digits)?.ends_with('-');
            Some(number).filter(|number| is_numbered && *number <= ORDINAL_MAX)
        };
        self.ordinal.given().copied().or_else(ending).unwrap_or(0)
    }

    pub(super) fn check(&self, nvme: &Nvme, problems: &mut Vec<Problem>) {
        let mut problem = |key: &str, given: &dyn fmt::Display, allowed: String| {
            problems.push(Problem::new(key, given, allowed));
        };
        if let Some(url) = self.url.given() {
            let scheme = url.0.split_once("://").map(|(scheme, _)| scheme);
            if !scheme.is_some_and(|scheme| SCHEMES.contains(&scheme)) {
                let allowed = "none, or s3://BUCKET/PATH, gs://BUCKET/PATH, az://CONTAINER/PATH or \
                               file:///DIRECTORY";
                problem("object.url", url, allowed.to_owned());
            }
            if !nvme.is_enabled() {
                let allowed = "none without nvme.path: packs are cut from the segments of nvme";
                problem("object.url", url, allowed.to_owned());
            }
        }
        if let Some(ordinal) = self.ordinal.given().filter(|ordinal| **ordinal > ORDINAL_MAX) {
            problem("object.ordinal", ordinal, format!("auto, or 0 to {ORDINAL_MAX}"));
        }
        let packs = self.pack_bytes.0.min(PACK_BYTES_MAX) * CAPACITY_PACKS_MIN;
        let least = Size(packs.max(CAPACITY_MIN));
        if let Some(bytes) = self.capacity.given().filter(|bytes| **bytes < least) {
            problem("object.capacity", bytes, format!("none, or at least {least}"));
        }
        if let Some(ttl) = self.ttl.given().filter(|ttl| ttl.0 < TTL_MIN) {
            problem("object.ttl", ttl, format!("none, or at least {}", Period(TTL_MIN)));
        }
        if self.delete_grace.0 < DELETE_GRACE_MIN {
            let allowed = format!("at least {}", Period(DELETE_GRACE_MIN));
            problem("object.delete_grace", &self.delete_grace, allowed);
        }
        if !(PACK_BYTES_MIN..=PACK_BYTES_MAX).contains(&self.pack_bytes.0) {
            let allowed = format!("{} to {}", Size(PACK_BYTES_MIN), Size(PACK_BYTES_MAX));
            problem("object.pack_bytes", &self.pack_bytes, allowed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(object: &Object, nvme: &str) -> Vec<String> {
        let nvme = Nvme { path: nvme.parse().unwrap(), ..Nvme::default() };
        let mut problems = Vec::new();
        object.check(&nvme, &mut problems);
        problems.into_iter().map(|problem| problem.key).collect()
    }

    #[test]
    fn what_cannot_be_is_refused_by_its_key() {
        let given = || Object { url: "s3://bucket/path".parse().unwrap(), ..Object::default() };
        assert!(keys(&Object::default(), "none").is_empty());
        assert!(keys(&given(), "/data").is_empty());
        assert_eq!(keys(&given(), "none"), ["object.url"], "it needs nvme");
        for url in ["bucket", "", "ftp://host/path", "s3:bucket"] {
            let object = Object { url: url.parse().unwrap(), ..Object::default() };
            assert_eq!(keys(&object, "/data"), ["object.url"], "{url}");
        }
        let wrong = Object {
            ordinal: Auto::Given(100_000),
            capacity: "63MiB".parse().unwrap(),
            ttl: "59s".parse().unwrap(),
            delete_grace: "999ms".parse().unwrap(),
            pack_bytes: Size(65 * MIB),
            ..given()
        };
        let expected = ["ordinal", "capacity", "ttl", "delete_grace", "pack_bytes"]
            .map(|key| format!("object.{key}"));
        assert_eq!(keys(&wrong, "/data"), expected);
        let of_packs = |capacity: &str, mib| Object {
            capacity: capacity.parse().unwrap(),
            pack_bytes: Size(mib * MIB),
            ..given()
        };
        assert_eq!(keys(&of_packs("159MiB", 32), "/data"), ["object.capacity"]);
        assert!(keys(&of_packs("160MiB", 32), "/data").is_empty());
        assert!(keys(&of_packs("64MiB", 1), "/data").is_empty());
    }

    #[test]
    fn the_ordinal_is_that_of_the_pod() {
        let object = Object::default();
        for (node, ordinal) in
            [("cache-0", 0), ("cache-12", 12), ("host", 0), ("db7", 0), ("", 0), ("x-100000", 0)]
        {
            assert_eq!(object.ordinal_of(node), ordinal, "{node}");
        }
        let given = Object { ordinal: Auto::Given(3), ..Object::default() };
        assert_eq!(given.ordinal_of("cache-12"), 3);
    }
}

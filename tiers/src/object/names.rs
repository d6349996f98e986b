//! What lies where in the bucket, below the path of its URL.
//!
//! ```text
//! v1/{cluster}/epochs/{ordinal:05}/{epoch:010}                who holds the epoch, made once
//! v1/{cluster}/epochs/{ordinal:05}/alive                      the holder's last sign of life
//! v1/{cluster}/manifests/{ordinal:05}/{epoch:010}-{seq:010}   a log of what packs there are
//! v1/{cluster}/packs/{hh}/{ordinal:05}-{epoch:010}-{seq:010}.pack
//! ```
//! `hh` is the first byte of XXH3-64 (big-endian) of what stands behind it, in hex: it spreads packs
//! over prefixes. Numbers are padded with zeros so that names sort as numbers do; one with more
//! digits is still a name. A name is only read in the one form in which it is written.

use std::fmt;

use crate::{
    error::{Error, Result},
    fields::checksum,
};

/// The longest name of a cluster, in bytes: that of a DNS label.
pub const CLUSTER_BYTES_MAX: usize = 63;

/// The name of a cluster: 1 to 63 of a-z, 0-9 and `-`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClusterName(Box<str>);

impl ClusterName {
    /// Takes a name.
    ///
    /// # Errors
    /// `Invalid` for one that is empty, too long or has other characters.
    pub fn new(name: &str) -> Result<Self> {
        let fits = (1..=CLUSTER_BYTES_MAX).contains(&name.len());
        let plain = |byte: u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-');
        if fits && name.bytes().all(plain) {
            return Ok(Self(name.into()));
        }
        Err(Error::invalid(format!(
            "cluster name: {name:?} given, 1 to {CLUSTER_BYTES_MAX} of a-z, 0-9 and - allowed"
        )))
    }

    /// The name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// What the names of the epochs of all ordinals begin with, and those of their signs of life.
    #[must_use]
    pub fn epochs_prefix(&self) -> String {
        format!("v1/{self}/epochs/")
    }

    /// What the names of all packs of the cluster begin with, whosever they are.
    #[must_use]
    pub fn packs_prefix(&self) -> String {
        format!("v1/{self}/packs/")
    }
}

impl fmt::Display for ClusterName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Whose packs: the node of one ordinal of a cluster.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Owner {
    /// The cluster.
    pub cluster: ClusterName,
    /// The node's ordinal in it.
    pub ordinal: u32,
}

impl Owner {
    /// What the names of its epochs begin with, and that of its sign of life.
    #[must_use]
    pub fn epochs_prefix(&self) -> String {
        format!("{}{:05}/", self.cluster.epochs_prefix(), self.ordinal)
    }

    /// The name of the holder's last sign of life.
    #[must_use]
    pub fn alive_name(&self) -> String {
        format!("{}alive", self.epochs_prefix())
    }

    /// What the names of its manifests begin with.
    #[must_use]
    pub fn manifests_prefix(&self) -> String {
        format!("v1/{}/manifests/{:05}/", self.cluster, self.ordinal)
    }

    /// One of its epochs.
    #[must_use]
    pub fn epoch(&self, epoch: u64) -> EpochId {
        EpochId { ordinal: self.ordinal, epoch }
    }

    /// One of its manifests.
    #[must_use]
    pub fn manifest(&self, at: Seq) -> ManifestId {
        ManifestId { ordinal: self.ordinal, at }
    }

    /// One of its packs.
    #[must_use]
    pub fn pack(&self, at: Seq) -> PackId {
        PackId { ordinal: self.ordinal, epoch: at.epoch, seq: at.seq }
    }
}

/// A moment in the life of an ordinal: objects are numbered within their epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Seq {
    /// The epoch.
    pub epoch: u64,
    /// The number within it.
    pub seq: u64,
}

/// One epoch of an ordinal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EpochId {
    /// The ordinal.
    pub ordinal: u32,
    /// The epoch.
    pub epoch: u64,
}

impl EpochId {
    /// The name of the object that says who holds it.
    #[must_use]
    pub fn name(&self, cluster: &ClusterName) -> String {
        format!("v1/{cluster}/epochs/{:05}/{:010}", self.ordinal, self.epoch)
    }

    /// The epoch that an object is about; `None` for all other names.
    #[must_use]
    pub fn parse(name: &str) -> Option<(ClusterName, Self)> {
        let (cluster, rest) = split(name, "epochs")?;
        let (ordinal, epoch) = rest.split_once('/')?;
        let id = Self { ordinal: ordinal.parse().ok()?, epoch: epoch.parse().ok()? };
        (id.name(&cluster) == name).then_some((cluster, id))
    }
}

/// One object of the log of an ordinal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ManifestId {
    /// The ordinal.
    pub ordinal: u32,
    /// Its place in the log.
    pub at: Seq,
}

impl ManifestId {
    /// The name of the object.
    #[must_use]
    pub fn name(&self, cluster: &ClusterName) -> String {
        let Seq { epoch, seq } = self.at;
        format!("v1/{cluster}/manifests/{:05}/{epoch:010}-{seq:010}", self.ordinal)
    }

    /// The manifest that an object is; `None` for all other names.
    #[must_use]
    pub fn parse(name: &str) -> Option<(ClusterName, Self)> {
        let (cluster, rest) = split(name, "manifests")?;
        let (ordinal, at) = rest.split_once('/')?;
        let (epoch, seq) = at.split_once('-')?;
        let at = Seq { epoch: epoch.parse().ok()?, seq: seq.parse().ok()? };
        let id = Self { ordinal: ordinal.parse().ok()?, at };
        (id.name(&cluster) == name).then_some((cluster, id))
    }
}

/// One pack of a cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PackId {
    /// The ordinal that it belongs to.
    pub ordinal: u32,
    /// The epoch in which it was written.
    pub epoch: u64,
    /// Its number within the epoch.
    pub seq: u64,
}

impl PackId {
    /// When it was written, as its ordinal counts.
    #[must_use]
    pub fn at(&self) -> Seq {
        Seq { epoch: self.epoch, seq: self.seq }
    }

    /// The name of the object.
    #[must_use]
    pub fn name(&self, cluster: &ClusterName) -> String {
        let file = format!("{:05}-{:010}-{:010}.pack", self.ordinal, self.epoch, self.seq);
        format!("v1/{cluster}/packs/{:02x}/{file}", checksum(file.as_bytes()) >> 56)
    }

    /// The pack that an object is; `None` for all other names.
    #[must_use]
    pub fn parse(name: &str) -> Option<(ClusterName, Self)> {
        let (cluster, rest) = split(name, "packs")?;
        let (_spread, file) = rest.split_once('/')?;
        let mut numbers = file.strip_suffix(".pack")?.splitn(3, '-');
        let id = Self {
            ordinal: numbers.next()?.parse().ok()?,
            epoch: numbers.next()?.parse().ok()?,
            seq: numbers.next()?.parse().ok()?,
        };
        (id.name(&cluster) == name).then_some((cluster, id))
    }
}

impl fmt::Display for PackId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}-{}", self.ordinal, self.epoch, self.seq)
    }
}

/// The cluster and what stands behind the room, of a name in it.
fn split<'a>(name: &'a str, room: &str) -> Option<(ClusterName, &'a str)> {
    let (cluster, rest) = name.strip_prefix("v1/")?.split_once('/')?;
    let rest = rest.strip_prefix(room)?.strip_prefix('/')?;
    Some((ClusterName::new(cluster).ok()?, rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cluster() -> ClusterName {
        ClusterName::new("prod-1").unwrap()
    }

    fn owner() -> Owner {
        Owner { cluster: cluster(), ordinal: 3 }
    }

    #[test]
    fn names_are_as_promised() {
        let at = Seq { epoch: 7, seq: 21 };
        let pack = owner().pack(at).name(&cluster());
        assert_eq!(pack, "v1/prod-1/packs/32/00003-0000000007-0000000021.pack");
        let manifest = owner().manifest(at).name(&cluster());
        assert_eq!(manifest, "v1/prod-1/manifests/00003/0000000007-0000000021");
        assert_eq!(owner().epoch(7).name(&cluster()), "v1/prod-1/epochs/00003/0000000007");
        assert!(pack.starts_with(&cluster().packs_prefix()));
        assert!(manifest.starts_with(&owner().manifests_prefix()));
        assert_eq!(owner().alive_name(), "v1/prod-1/epochs/00003/alive");
    }

    #[test]
    fn every_name_is_read_back() {
        for epoch in [0, 1, 9_999_999_999, 10_000_000_000, u64::MAX] {
            for (ordinal, seq) in [(0, 0), (99_999, 1), (u32::MAX, u64::MAX)] {
                let owner = Owner { cluster: cluster(), ordinal };
                let pack = owner.pack(Seq { epoch, seq });
                assert_eq!(PackId::parse(&pack.name(&cluster())), Some((cluster(), pack)));
                let manifest = owner.manifest(pack.at());
                let name = manifest.name(&cluster());
                assert_eq!(ManifestId::parse(&name), Some((cluster(), manifest)));
                let epoch = owner.epoch(epoch);
                assert_eq!(EpochId::parse(&epoch.name(&cluster())), Some((cluster(), epoch)));
            }
        }
    }

    #[test]
    fn other_names_are_nobodys() {
        let pack = owner().pack(Seq { epoch: 7, seq: 21 }).name(&cluster());
        let others = [
            String::new(),
            owner().alive_name(),
            pack.replace("v1", "v2"),
            pack.replace("/32/", "/33/"),
            pack.replace("00003", "3"),
            pack.replace("0000000007", "+000000007"),
            pack.replace("prod-1", "Prod"),
            format!("{pack}x"),
            format!("/{pack}"),
            pack.replace("packs", "manifests"),
            "v1//packs/00/00003-0000000007-0000000021.pack".to_owned(),
        ];
        for other in others {
            assert_eq!(PackId::parse(&other), None, "{other}");
            assert_eq!(ManifestId::parse(&other), None, "{other}");
            assert_eq!(EpochId::parse(&other), None, "{other}");
        }
    }

    #[test]
    fn packs_are_spread_over_prefixes() {
        let spread = |seq| {
            let name = owner().pack(Seq { epoch: 1, seq }).name(&cluster());
            name.split('/').nth(3).map(str::to_owned).unwrap()
        };
        let prefixes: std::collections::HashSet<_> = (0..1000).map(spread).collect();
        assert!(prefixes.len() > 200, "{}", prefixes.len());
    }

    #[test]
    fn names_of_clusters_are_those_of_dns() {
        for good in ["a", "prod-1", &"x".repeat(63)] {
            assert!(ClusterName::new(good).is_ok(), "{good}");
        }
        for bad in ["", "A", "a/b", "a.b", "..", "é", &"x".repeat(64)] {
            let error = ClusterName::new(bad).unwrap_err().to_string();
            assert!(error.contains("cluster name") && error.contains("1 to 63"), "{error}");
        }
    }
}

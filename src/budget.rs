//! Divides the one memory knob: limit = dram + index + staging + reserve, and with an nvme tier also
//! what its index on disk and its writes and reads keep in memory.
//!
//! The shares are promises to each other, not allocations: dram is mapped, the index and the staging
//! are bounded by counts derived from their shares, and the reserve is what nobody may claim. The
//! table is printed at start, so that nobody has to guess where the memory went.

use std::{fmt, fs, path::Path};

use kvstrata_tiers::limits::{GIB, INDEX_BYTES_PER_BLOCK, MIB};

use crate::{
    cluster::feed::Feed,
    config::{Auto, Config, Problem, Size},
};

/// The index takes 1 / this of the limit: enough for blocks of 7 KiB in dram, and real ones are
/// larger; a node with a colder tier uses the rest for what lies there.
const INDEX_DIVISOR: u64 = 32;
/// The smallest index: 40,000 blocks.
const INDEX_BYTES_MIN: u64 = 8 * MIB;
/// The index of hash schemes may take 1 / this of the limit, where namespaces opt in: with 64 GiB names of
/// tokens for 1.4 million blocks, or names by parts of hashes for four times as many.
const SCHEMES_DIVISOR: u64 = 128;
/// Staging (HTTP/2 windows, messages being read and written) takes 1 / this of the limit.
const STAGING_DIVISOR: u64 = 16;
/// The least staging: two connections with a full message each way.
const STAGING_BYTES_MIN: u64 = 16 * MIB;
/// More staging than this serves no purpose: 64 busy connections.
const STAGING_BYTES_MAX: u64 = GIB;
/// With an nvme tier, its index on disk (block cache and write buffers) takes 1 / this of the limit.
const NVME_INDEX_DIVISOR: u64 = 16;
/// The least that the index on disk works with: its write buffers, and a cache of its own indices.
const NVME_INDEX_BYTES_MIN: u64 = 16 * MIB;
/// More serves no purpose: the index on disk is read at start, not on a lookup.
const NVME_INDEX_BYTES_MAX: u64 = 256 * MIB;
/// With an nvme tier, its buffers take 1 / this of the limit.
const NVME_STAGING_DIVISOR: u64 = 32;
/// The least buffers: a few writes of 1 MiB under way and as many reads.
const NVME_STAGING_BYTES_MIN: u64 = 8 * MIB;
/// More buffers than this serve no purpose: one disk is busy with 32 of 1 MiB.
const NVME_STAGING_BYTES_MAX: u64 = 32 * MIB;
/// With an object tier: blocks that are read to be packed, a pack's own bytes apart, and ranges that are
/// read.
const OBJECT_STAGING_BYTES: u64 = 48 * MIB;
/// Of the blocks that the index has room for, nvme may hold this many eighths: the rest is for what
/// is in dram only, which would be refused if nvme could fill the index.
const NVME_BLOCKS_EIGHTHS: u64 = 7;
/// Where routers are told of blocks, what they were told takes 1 / this of the limit: a third of it where all
/// blocks are, the rest for three routers or workers that are told of all of them.
const EVENTS_DIVISOR: u64 = 32;
/// The least: what is kept to be sent again, and ten thousand blocks.
const EVENTS_BYTES_MIN: u64 = 16 * MIB;
/// In a cluster, filters that say which blocks nodes may have take 1 / this of the limit: those of ninety nodes as
/// large as this one, each with an index that is full.
const CLUSTER_DIVISOR: u64 = 64;
/// The least: the same of nodes with the smallest index, and what is kept to tell others of it.
const CLUSTER_BYTES_MIN: u64 = 8 * MIB;
/// Reserve that does not depend on the limit: code, runtime, thread stacks, metrics.
const RESERVE_BYTES: u64 = 40 * MIB;
/// Reserve for allocator slack and page tables: 1 / this of the limit.
const RESERVE_DIVISOR: u64 = 50;
/// The least dram that a derived capacity may come to.
const DRAM_BYTES_MIN: u64 = 32 * MIB;

/// What the machine offers.
#[derive(Debug, Clone, Copy)]
pub struct Machine {
    /// Memory of the machine, in bytes.
    pub memory_bytes: u64,
    /// The limit of the cgroup this process is in, in bytes; none outside a limited one.
    pub cgroup_bytes: Option<u64>,
}

/// How the memory of this process is divided, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Budget {
    /// All of it.
    pub limit: u64,
    /// Payload of blocks.
    pub dram: u64,
    /// The map from block keys to places.
    pub index: u64,
    /// Names of blocks in other hash schemes.
    pub schemes: u64,
    /// Messages and windows of connections.
    pub staging: u64,
    /// The index of the nvme tier; 0 without one.
    pub nvme_index: u64,
    /// Buffers of the nvme tier for writes and reads; 0 without one.
    pub nvme_staging: u64,
    /// Packs and ranges of the object tier on their way; 0 without one.
    pub object_staging: u64,
    /// What routers were told; 0 where none are.
    pub events: u64,
    /// Filters of the nodes of a cluster; 0 for one that is alone.
    pub cluster: u64,
    /// What nobody may claim, with what an explicit dram capacity leaves.
    pub reserve: u64,
}

/// The colder tiers, as far as memory goes.
#[derive(Debug, Clone, Copy)]
struct Tiers {
    nvme: bool,
    /// Bytes of a pack, with an object tier.
    pack_bytes: Option<u64>,
    /// Routers are told of what is in them.
    told: bool,
    /// Other nodes ask for it.
    shared: bool,
}

impl Tiers {
    fn of(config: &Config) -> Self {
        let object = &config.object;
        Self {
            nvme: config.nvme.is_enabled(),
            pack_bytes: object.is_enabled().then_some(object.pack_bytes.0),
            told: config.events.publish.given().is_some(),
            shared: config.cluster.listen.given().is_some(),
        }
    }
}

impl Machine {
    /// Reads this machine and the cgroup (v1 or v2) of this process.
    #[must_use]
    pub fn detect() -> Self {
        let info = rustix::system::sysinfo();
        let unit = u64::from(info.mem_unit).max(1);
        #[allow(
            clippy::useless_conversion,
            reason = "the kernel's word is 32 bits on some targets"
        )]
        let memory_bytes = u64::from(info.totalram).saturating_mul(unit);
        let membership = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let cgroup_bytes = cgroup_limit(&membership, Path::new("/sys/fs/cgroup"))
            .filter(|limit| *limit < memory_bytes);
        Self { memory_bytes, cgroup_bytes }
    }
}

/// The smallest memory limit among the cgroup named by `membership` (the text of
/// `/proc/self/cgroup`) and its parents, below the mount point `root`.
fn cgroup_limit(membership: &str, root: &Path) -> Option<u64> {
    membership
        .lines()
        .filter_map(|line| {
            let mut fields = line.splitn(3, ':');
            let (_id, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
            let (base, file) = if controllers.is_empty() {
                (root.to_path_buf(), "memory.max")
            } else if controllers.split(',').any(|name| name == "memory") {
                (root.join("memory"), "memory.limit_in_bytes")
            } else {
                return None;
            };
            // Inside a container the path may be that of the host: then only the root is there.
            let below = base.join(path.trim_start_matches('/'));
            below
                .ancestors()
                .take_while(|directory| directory.starts_with(&base))
                .filter_map(|directory| fs::read_to_string(directory.join(file)).ok())
                .filter_map(|text| text.trim().parse::<u64>().ok())
                .min()
        })
        .min()
}

impl Budget {
    /// Divides the memory.
    ///
    /// # Errors
    /// A problem naming the least limit if the limit is too small for what it must hold.
    pub fn divide(config: &Config, machine: Machine) -> Result<Self, Problem> {
        let limit = match (&config.memory.limit, machine.cgroup_bytes) {
            (Auto::Given(limit), _) => limit.0,
            (Auto::Auto, Some(cgroup)) => cgroup,
            (Auto::Auto, None) => machine.memory_bytes / 2,
        };
        let wanted = config.dram.capacity.given().map(|capacity| capacity.0);
        let fixed = Self::shares(limit, Tiers::of(config));
        let free = limit.saturating_sub(fixed.all_but_dram());
        let dram = wanted.unwrap_or(free / MIB * MIB);
        if dram > free || dram < wanted.unwrap_or(DRAM_BYTES_MIN) {
            let dram = wanted.unwrap_or(DRAM_BYTES_MIN);
            let least = limit_min(dram, Tiers::of(config));
            return Err(Problem::new(
                "memory.limit",
                Size(limit),
                format!("at least {} for a dram of {}", Size(least), Size(dram)),
            ));
        }
        Ok(Self { dram, reserve: fixed.reserve + free - dram, ..fixed })
    }

    /// The shares that depend on the limit only; dram is left 0.
    fn shares(limit: u64, Tiers { nvme, pack_bytes, told, shared }: Tiers) -> Self {
        let of_nvme = |divisor: u64, least: u64, most: u64| {
            if nvme { (limit / divisor).clamp(least, most) } else { 0 }
        };
        Self {
            limit,
            dram: 0,
            index: (limit / INDEX_DIVISOR).max(INDEX_BYTES_MIN),
            schemes: limit / SCHEMES_DIVISOR,
            staging: (limit / STAGING_DIVISOR).clamp(STAGING_BYTES_MIN, STAGING_BYTES_MAX),
            nvme_index: of_nvme(NVME_INDEX_DIVISOR, NVME_INDEX_BYTES_MIN, NVME_INDEX_BYTES_MAX),
            nvme_staging: of_nvme(
                NVME_STAGING_DIVISOR,
                NVME_STAGING_BYTES_MIN,
                NVME_STAGING_BYTES_MAX,
            ),
            object_staging: pack_bytes.map_or(0, |pack| pack + OBJECT_STAGING_BYTES),
            events: if told { (limit / EVENTS_DIVISOR).max(EVENTS_BYTES_MIN) } else { 0 },
            cluster: if shared { (limit / CLUSTER_DIVISOR).max(CLUSTER_BYTES_MIN) } else { 0 },
            reserve: RESERVE_BYTES + limit / RESERVE_DIVISOR,
        }
    }

    fn all_but_dram(&self) -> u64 {
        self.index
            + self.schemes
            + self.staging
            + self.nvme_index
            + self.nvme_staging
            + self.object_staging
            + self.events
            + self.cluster
            + self.reserve
    }

    /// How many blocks the index has room for.
    #[must_use]
    pub fn index_blocks_max(&self) -> u64 {
        self.index / INDEX_BYTES_PER_BLOCK
    }

    /// Bytes for the filters of other members: what that of this node leaves.
    #[must_use]
    pub fn filters_of_members(&self) -> u64 {
        let own = Feed::new(self.index_blocks_max()).bytes_max();
        self.cluster.saturating_sub(u64::try_from(own).unwrap_or(u64::MAX))
    }

    /// How many blocks the nvme tier may hold.
    #[must_use]
    pub fn nvme_blocks_max(&self) -> u64 {
        self.index_blocks_max() / 8 * NVME_BLOCKS_EIGHTHS
    }
}

/// The smallest limit, in whole mebibytes, that leaves `dram`.
fn limit_min(dram: u64, tiers: Tiers) -> u64 {
    let leaves = |mebibytes: u64| {
        let limit = mebibytes.saturating_mul(MIB);
        limit.saturating_sub(Budget::shares(limit, tiers).all_but_dram())
    };
    // What is left grows with the limit, and all shares together take less than half of it.
    let (mut too_small, mut enough) = (0, dram / MIB * 2 + 512);
    while too_small + 1 < enough {
        let middle = u64::midpoint(too_small, enough);
        if leaves(middle) >= dram { enough = middle } else { too_small = middle }
    }
    enough.saturating_mul(MIB)
}

impl fmt::Display for Budget {
    /// The table that is printed at start.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rows = [
            ("dram", self.dram, "payload of blocks"),
            ("index", self.index, "the map from block keys to places"),
            ("schemes", self.schemes, "names of blocks in other hash schemes"),
            ("staging", self.staging, "messages and windows of connections"),
            ("nvme index", self.nvme_index, "cache and write buffers of the index on disk"),
            ("nvme staging", self.nvme_staging, "blocks on their way to and from the disk"),
            ("object", self.object_staging, "packs on their way to the bucket, ranges from it"),
            ("events", self.events, "what routers were told, and what is kept to tell them again"),
            ("cluster", self.cluster, "filters that say which blocks other nodes may have"),
            ("reserve", self.reserve, "code, runtime, allocator; what nobody may claim"),
            ("limit", self.limit, "all of it"),
        ];
        writeln!(f, "memory          MiB  for")?;
        for (name, bytes, what) in rows.into_iter().filter(|(_, bytes, _)| *bytes > 0) {
            writeln!(f, "{name:<12} {:>6}  {what}", bytes / MIB)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::config::Config;

    fn config(limit: Option<u64>, dram: Option<u64>) -> Config {
        let auto = |bytes: Option<u64>| bytes.map_or(Auto::Auto, |bytes| Auto::Given(Size(bytes)));
        let mut config = Config::default();
        config.memory.limit = auto(limit);
        config.dram.capacity = auto(dram);
        config
    }

    fn with_nvme(mut config: Config) -> Config {
        config.nvme.path = "/data".parse().unwrap();
        config
    }

    fn with_object(config: Config) -> Config {
        let mut config = with_nvme(config);
        config.object.url = "file:///bucket".parse().unwrap();
        config
    }

    const MACHINE: Machine = Machine { memory_bytes: 16 * GIB, cgroup_bytes: None };

    #[test]
    fn the_cgroup_comes_before_half_of_the_machine() {
        let limit = |machine| Budget::divide(&config(None, None), machine).unwrap().limit;
        assert_eq!(limit(MACHINE), 8 * GIB);
        assert_eq!(limit(Machine { cgroup_bytes: Some(GIB), ..MACHINE }), GIB);
    }

    #[test]
    fn the_least_limit_that_validation_accepts_is_enough() {
        let least = crate::config::MEMORY_LIMIT_MIN;
        assert!(Budget::divide(&config(Some(least), None), MACHINE).is_ok());
        let smallest = Budget::divide(&with_nvme(config(Some(least), None)), MACHINE).unwrap();
        assert_eq!((smallest.nvme_index, smallest.nvme_staging), (16 * MIB, 8 * MIB));
    }

    #[test]
    fn the_shares_of_nvme_are_bounded_and_none_without_it() {
        let large = Budget::divide(&with_nvme(config(Some(64 * GIB), None)), MACHINE).unwrap();
        assert_eq!((large.nvme_index, large.nvme_staging), (256 * MIB, 32 * MIB));
        let without = Budget::divide(&config(Some(64 * GIB), None), MACHINE).unwrap();
        assert_eq!((without.nvme_index, without.nvme_staging), (0, 0));
        assert_eq!(without.dram - large.dram, 288 * MIB);
        assert!(large.nvme_blocks_max() < large.index_blocks_max());
        assert!(large.nvme_blocks_max() > large.index_blocks_max() / 10 * 8);
    }

    #[test]
    fn the_table_names_the_shares_that_there_are() {
        let table = |config| Budget::divide(&config, MACHINE).unwrap().to_string();
        assert!(!table(config(Some(GIB), None)).contains("nvme"));
        let with = table(with_nvme(config(Some(GIB), None)));
        assert!(with.contains("nvme index       64  cache"), "{with}");
        assert!(with.contains("limit          1024  all"), "{with}");
        assert!(!with.contains("object"), "{with}");
        let with = table(with_object(config(Some(GIB), None)));
        assert!(with.contains("object           80  packs"), "{with}");
        assert!(!with.contains("events"), "{with}");
        let mut telling = config(Some(GIB), None);
        telling.events.publish = "llm-d=tcp://epp:5557,model=m".parse().unwrap();
        let telling = table(telling);
        assert!(telling.contains("events           32  what"), "{telling}");
        assert!(!telling.contains("cluster"), "{telling}");
        let mut shared = config(Some(GIB), None);
        shared.cluster.listen = "127.0.0.1:9403".parse().unwrap();
        let budget = Budget::divide(&shared, MACHINE).unwrap();
        let text = budget.to_string();
        assert!(text.contains("cluster          16  filters"), "{text}");
        assert!(budget.filters_of_members() > 13 * MIB && budget.filters_of_members() < 16 * MIB);
    }

    #[test]
    fn a_limit_too_small_names_the_least_one() {
        for change in [|config| config, with_nvme, with_object] {
            let divide =
                |limit| Budget::divide(&change(config(Some(limit), Some(200 * MIB))), MACHINE);
            let problem = divide(256 * MIB).unwrap_err();
            assert_eq!((problem.key.as_str(), problem.given.as_str()), ("memory.limit", "256MiB"));
            let least: Size = problem.allowed.split_whitespace().nth(2).unwrap().parse().unwrap();
            assert!(divide(least.0).is_ok());
            assert!(divide(least.0 - MIB).is_err());
        }
    }

    proptest! {
        #[test]
        fn the_shares_are_the_limit(limit in 128 * MIB..1024 * GIB, dram in 4 * MIB..1024 * GIB) {
            for (dram, nvme) in [(None, false), (Some(dram), false), (None, true), (Some(dram), true)] {
                let config = config(Some(limit), dram);
                let config = if nvme { with_nvme(config) } else { config };
                if let Ok(budget) = Budget::divide(&config, MACHINE) {
                    let Budget { dram: got, index, schemes, staging, reserve, .. } = budget;
                    let of_nvme = budget.nvme_index + budget.nvme_staging;
                    prop_assert_eq!(got + index + schemes + staging + of_nvme + reserve, limit);
                    prop_assert_eq!(of_nvme > 0, nvme);
                    prop_assert!(dram.is_none_or(|dram| dram == got));
                }
            }
        }
    }

    #[test]
    fn cgroup_files_of_both_versions_are_read() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("a/memory.max", "1000\n");
        write("a/b/memory.max", "max\n");
        write("memory/c/memory.limit_in_bytes", "2000\n");
        write("memory/memory.limit_in_bytes", "9223372036854771712\n");
        let limit = |membership| cgroup_limit(membership, root.path());
        assert_eq!(limit("0::/a/b\n"), Some(1000), "a parent's limit holds");
        assert_eq!(limit("4:cpu:/c\n3:memory:/c\n"), Some(2000));
        assert_eq!(limit("3:cpuset,memory:/of/the/host\n"), Some(9_223_372_036_854_771_712));
        assert_eq!(limit("0::/\n"), None);
    }
}

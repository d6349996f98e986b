//! The section of the tier on nvme: what can be set, what is allowed, and what `auto` comes to.
//!
//! The disk is an argument of [`Nvme::resolve`], so that everything here can be decided without one.

use std::path::PathBuf;

use kvstrata_tiers::limits::{GIB, MIB};
use serde::{Deserialize, Serialize};

use super::{Auto, Maybe, PathText, Problem, Size};

/// Of what the file system has for the tier, this share may be segments; the rest is for the index,
/// for segments being rewritten, and because file systems are slow when they are full.
const CAPACITY_PERCENT: u64 = 90;
/// The smallest tier: a few of the smallest useful segments.
pub(crate) const CAPACITY_MIN: u64 = 16 * MIB;
/// A tier has at least this many segments: with fewer, making room drops too much at once.
const SEGMENTS_MIN: u64 = 4;
/// A tier has about this many segments unless their bounds say otherwise.
const SEGMENTS_WANTED: u64 = 64;
/// The smallest segment unless a smaller one is asked for: one that a disk writes at full speed.
const SEGMENT_BYTES_AUTO_MIN: u64 = 16 * MIB;
/// The largest segment unless a larger one is asked for: room is made by dropping whole ones.
const SEGMENT_BYTES_AUTO_MAX: u64 = 256 * MIB;
/// Segments are whole multiples of this, which is also the smallest.
const SEGMENT_BYTES_STEP: u64 = MIB;
/// The largest segment: its table of entries is read at once.
const SEGMENT_BYTES_MAX: u64 = GIB;
/// Times a day that a tier may be written in full: the rating of common data-centre disks, which
/// are sold for 1 (read-intensive) to 3 (mixed use) writes a day over five years.
const DAILY_WRITES: u64 = 3;

/// The tier on nvme.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Nvme {
    /// Directory in which the tier makes its own, `kvstrata-nvme`. Default `none`: no nvme tier,
    /// because a server should not take a disk that nobody gave it.
    pub path: Maybe<PathText>,
    /// Bytes that segments may take on disk. Default `auto`: 90 % of what the file system has
    /// available together with what the tier already uses, so that it is the same at every start.
    /// There is no 0; the least is 16MiB.
    pub capacity: Auto<Size>,
    /// Bytes of one segment file: a multiple of 1MiB from 1MiB to 1GiB, at most a quarter of the
    /// capacity. A block must fit into one. Default `auto`: 1/64 of the capacity, 16MiB to 256MiB.
    /// There is no 0.
    pub segment_bytes: Auto<Size>,
    /// Bytes that may be written in 24 hours, with a burst of one capacity; more is not admitted,
    /// because flash wears out. Default `auto`: three times the capacity. `none`: no limit. There is
    /// no 0.
    pub daily_writes: Auto<Maybe<Size>>,
    /// How bytes move to and from the disk. Default `auto`: io_uring where the kernel permits it,
    /// else `pread`; the log says which.
    pub engine: NvmeEngine,
}

/// How bytes move to and from the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NvmeEngine {
    /// The first of the others that works.
    #[default]
    Auto,
    /// `io_uring`, or no start.
    IoUring,
    /// `pread` and `pwrite` on threads.
    Pread,
}

/// What the file system says before a start, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NvmeSpace {
    /// What this process may still allocate there.
    pub available: u64,
    /// What the tier has allocated there already.
    pub used: u64,
}

/// The tier as it will be: every `auto` decided.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NvmePlan {
    /// The directory that was given.
    pub path: PathBuf,
    /// Bytes that segments may take on disk.
    pub capacity_bytes: u64,
    /// Bytes of one segment file.
    pub segment_bytes: u64,
    /// Bytes that may be written in 24 hours; 0: no limit.
    pub daily_write_bytes: u64,
    /// How bytes move.
    pub engine: NvmeEngine,
    /// Whether the capacity given is more than the file system has now: worth a warning, and no
    /// reason not to start, for others may be using it only for the moment.
    pub exceeds_space: bool,
}

impl Nvme {
    /// Whether there is an nvme tier.
    #[must_use]
    pub fn is_enabled(&self) -> bool {
        self.path.given().is_some()
    }

    /// Decides every `auto`; `None` if there is no nvme tier.
    ///
    /// # Errors
    /// A problem if the file system has too little room, or a segment size given does not fit the
    /// capacity it led to.
    pub fn resolve(&self, space: NvmeSpace) -> Result<Option<NvmePlan>, Problem> {
        let Some(path) = self.path.given() else { return Ok(None) };
        let room = space.available.saturating_add(space.used);
        let given = self.capacity.given().map(|capacity| capacity.0);
        let capacity_bytes = given.unwrap_or(room / 100 * CAPACITY_PERCENT / MIB * MIB);
        if capacity_bytes < CAPACITY_MIN {
            let least = Size(CAPACITY_MIN);
            let allowed = format!(
                "at least {least}, but the file system of nvme.path ({path}) has room for {}: free \
                 some, or give another directory",
                Size(capacity_bytes)
            );
            return Err(Problem::new("nvme.capacity", &self.capacity, allowed));
        }
        let segment_bytes = match self.segment_bytes.given() {
            Some(bytes) if bytes.0 > capacity_bytes / SEGMENTS_MIN => {
                return Err(Problem::new("nvme.segment_bytes", bytes, segments(capacity_bytes)));
            }
            Some(bytes) => bytes.0,
            None => segment_bytes_auto(capacity_bytes),
        };
        let daily_write_bytes = match &self.daily_writes {
            Auto::Auto => capacity_bytes.saturating_mul(DAILY_WRITES),
            Auto::Given(Maybe::Given(bytes)) => bytes.0,
            Auto::Given(Maybe::None) => 0,
        };
        Ok(Some(NvmePlan {
            path: path.0.clone(),
            capacity_bytes,
            segment_bytes,
            daily_write_bytes,
            engine: self.engine,
            exceeds_space: capacity_bytes > room,
        }))
    }

    /// Checks what can be checked without the disk.
    pub(super) fn check(&self, problems: &mut Vec<Problem>) {
        if self.path.given().is_some_and(|path| path.0.as_os_str().is_empty()) {
            problems.push(Problem::new("nvme.path", "\"\"", "none, or a directory"));
        }
        let capacity = self.capacity.given().map(|capacity| capacity.0);
        if let Some(bytes) = capacity
            && bytes < CAPACITY_MIN
        {
            let allowed = format!("auto, or at least {}", Size(CAPACITY_MIN));
            problems.push(Problem::new("nvme.capacity", Size(bytes), allowed));
        }
        if let Some(Size(bytes)) = self.segment_bytes.given() {
            let whole = bytes.is_multiple_of(SEGMENT_BYTES_STEP);
            let bounded = (SEGMENT_BYTES_STEP..=SEGMENT_BYTES_MAX).contains(bytes);
            let few = capacity.is_some_and(|capacity| *bytes > capacity / SEGMENTS_MIN);
            if !whole || !bounded || few {
                let allowed = segments(capacity.unwrap_or(u64::MAX));
                problems.push(Problem::new("nvme.segment_bytes", Size(*bytes), allowed));
            }
        }
        if let Auto::Given(Maybe::Given(bytes)) = &self.daily_writes
            && bytes.0 < SEGMENT_BYTES_STEP
        {
            let allowed = format!("auto, none, or at least {}", Size(SEGMENT_BYTES_STEP));
            problems.push(Problem::new("nvme.daily_writes", bytes, allowed));
        }
    }
}

/// The segment size for a capacity of at least [`CAPACITY_MIN`].
fn segment_bytes_auto(capacity: u64) -> u64 {
    let whole = |bytes: u64| bytes / SEGMENT_BYTES_STEP * SEGMENT_BYTES_STEP;
    whole(capacity / SEGMENTS_WANTED)
        .clamp(SEGMENT_BYTES_AUTO_MIN, SEGMENT_BYTES_AUTO_MAX)
        .min(whole(capacity / SEGMENTS_MIN))
}

/// What segment sizes a capacity allows, in words.
fn segments(capacity: u64) -> String {
    let most =
        (capacity / SEGMENTS_MIN / SEGMENT_BYTES_STEP * SEGMENT_BYTES_STEP).min(SEGMENT_BYTES_MAX);
    let (step, most) = (Size(SEGMENT_BYTES_STEP), Size(most));
    format!("auto, or a multiple of {step} from {step} to {most}, at most 1/4 of nvme.capacity")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nvme(capacity: &str, segment_bytes: &str, daily_writes: &str) -> Nvme {
        Nvme {
            path: "/data".parse().unwrap(),
            capacity: capacity.parse().unwrap(),
            segment_bytes: segment_bytes.parse().unwrap(),
            daily_writes: daily_writes.parse().unwrap(),
            engine: NvmeEngine::Auto,
        }
    }

    const SPACE: NvmeSpace = NvmeSpace { available: 80 * GIB, used: 20 * GIB };

    fn plan(nvme: &Nvme) -> NvmePlan {
        nvme.resolve(SPACE).unwrap().unwrap()
    }

    #[test]
    fn without_a_path_there_is_no_tier() {
        assert_eq!(Nvme::default().resolve(SPACE), Ok(None));
        assert!(!Nvme::default().is_enabled());
    }

    #[test]
    fn the_capacity_is_the_same_however_much_of_it_is_used_already() {
        let auto = nvme("auto", "auto", "auto");
        let capacity = plan(&auto).capacity_bytes;
        assert_eq!(capacity, 90 * GIB);
        let used = NvmeSpace { available: 0, used: 100 * GIB };
        assert_eq!(auto.resolve(used).unwrap().unwrap().capacity_bytes, capacity);
    }

    #[test]
    fn segments_follow_the_capacity_within_their_bounds() {
        for (capacity, segment) in [
            ("16MiB", 4 * MIB),
            ("50MiB", 12 * MIB),
            ("64MiB", 16 * MIB),
            ("1GiB", 16 * MIB),
            ("4100MiB", 64 * MIB),
            ("16GiB", 256 * MIB),
            ("64TiB", 256 * MIB),
        ] {
            assert_eq!(plan(&nvme(capacity, "auto", "auto")).segment_bytes, segment, "{capacity}");
        }
        assert_eq!(plan(&nvme("1GiB", "7MiB", "auto")).segment_bytes, 7 * MIB);
    }

    #[test]
    fn daily_writes_follow_the_capacity_or_have_no_limit() {
        let daily = |text| plan(&nvme("10GiB", "auto", text)).daily_write_bytes;
        assert_eq!([daily("auto"), daily("none"), daily("5GiB")], [30 * GIB, 0, 5 * GIB]);
    }

    #[test]
    fn more_than_there_is_can_be_given_and_is_told() {
        assert!(plan(&nvme("101GiB", "auto", "auto")).exceeds_space);
        assert!(!plan(&nvme("100GiB", "auto", "auto")).exceeds_space);
    }

    #[test]
    fn a_full_disk_is_refused_with_what_it_has() {
        let full = NvmeSpace { available: 10 * MIB, used: 0 };
        let problem = nvme("auto", "auto", "auto").resolve(full).unwrap_err();
        assert_eq!((problem.key.as_str(), problem.given.as_str()), ("nvme.capacity", "auto"));
        assert!(problem.allowed.contains("at least 16MiB"), "{problem}");
        assert!(problem.allowed.contains("/data"), "{problem}");
    }

    #[test]
    fn a_segment_too_large_for_the_disk_is_refused() {
        let small = NvmeSpace { available: 100 * MIB, used: 0 };
        let problem = nvme("auto", "512MiB", "auto").resolve(small).unwrap_err();
        assert_eq!(
            (problem.key.as_str(), problem.given.as_str()),
            ("nvme.segment_bytes", "512MiB")
        );
        assert!(problem.allowed.contains("from 1MiB to 22MiB"), "{problem}");
    }

    #[test]
    fn what_needs_no_disk_is_checked_without_one() {
        let keys = |nvme: &Nvme| {
            let mut problems = Vec::new();
            nvme.check(&mut problems);
            problems.into_iter().map(|problem| problem.key).collect::<Vec<_>>()
        };
        assert!(keys(&nvme("1GiB", "256MiB", "none")).is_empty());
        assert!(keys(&nvme("auto", "1GiB", "1MiB")).is_empty());
        assert_eq!(keys(&nvme("1MiB", "auto", "auto")), ["nvme.capacity"]);
        for bytes in ["0B", "1025KiB", "2GiB", "257MiB"] {
            assert_eq!(keys(&nvme("1GiB", bytes, "auto")), ["nvme.segment_bytes"], "{bytes}");
        }
        assert_eq!(keys(&nvme("auto", "auto", "0B")), ["nvme.daily_writes"]);
        let nowhere = Nvme { path: "".parse().unwrap(), ..Nvme::default() };
        assert_eq!(keys(&nowhere), ["nvme.path"]);
    }
}

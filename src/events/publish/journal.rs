//! The shadow of a router on disk: what it may believe of a node that has started anew.
//!
//! ```text
//! "kvstrata shadow 1\n"
//! tag u8, hash u64 big-endian        tag: 1, 2, 4 for dram, nvme, object, together; 8 more: withdrawn
//! ```
//! What is announced is written before it is sent, what was withdrawn when that has been heard. Not synced: it outlives the process, not the machine, whose engines go with
//! it. A record that is cut is the last one, and is passed over. What is written down and was never sent is
//! withdrawn once too often, which does nothing, too. When most of the file is history, it is written anew.

use std::{
    collections::HashMap,
    fs::{self, File, OpenOptions},
    io::{self, Read, Write},
    path::{Path, PathBuf},
};

use kvstrata_tiers::tier::Tier;

use super::{
    encode::Event,
    shadow::{TierSet, index},
};

const HEADER: &[u8] = b"kvstrata shadow 1\n";
const WITHDRAWN: u8 = 8;
const RECORD_BYTES: usize = 9;
/// History up to this is left alone.
const HISTORY_RECORDS_MIN: usize = 65_536;

/// See the module.
#[derive(Debug)]
pub(super) struct Journal {
    path: PathBuf,
    file: File,
    believed: HashMap<u64, TierSet>,
    records: usize,
}

impl Journal {
    /// Opens the one at `path`, or begins one; returns it with what the router may believe. Its folder is
    /// made.
    ///
    /// # Errors
    /// As the system's. A file of another kind is replaced.
    ///
    /// # Blocking
    /// Reads the file.
    pub(super) fn open(path: &Path) -> io::Result<(Self, Vec<(u64, TierSet)>)> {
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder)?;
        }
        let mut bytes = Vec::new();
        match File::open(path) {
            Ok(mut file) => _ = file.read_to_end(&mut bytes)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        let believed = read(&bytes);
        let file = write_anew(path, &believed)?;
        let told = believed.iter().map(|(hash, tiers)| (*hash, *tiers)).collect();
        let records = believed.len();
        Ok((Self { path: path.to_owned(), file, believed, records }, told))
    }

    /// Writes down what is about to be said.
    ///
    /// # Errors
    /// As the system's.
    pub(super) fn note(&mut self, events: &[Event]) -> io::Result<()> {
        let stored = events.iter().filter(|event| matches!(event, Event::Stored(_)));
        let stored = stored.flat_map(|event| {
            let tier = TierSet::of(event.tier());
            event.hashes().iter().map(move |hash| (*hash, tier))
        });
        self.write(stored, true)
    }

    /// Writes down what was withdrawn for good.
    ///
    /// # Errors
    /// As the system's.
    pub(super) fn settle(&mut self, withdrawn: Vec<(u64, TierSet)>) -> io::Result<()> {
        self.write(withdrawn.into_iter(), false)
    }

    fn write(
        &mut self,
        blocks: impl Iterator<Item = (u64, TierSet)>,
        stored: bool,
    ) -> io::Result<()> {
        let mut bytes = Vec::new();
        for (hash, tiers) in blocks {
            bytes.push(tag(tiers) | if stored { 0 } else { WITHDRAWN });
            bytes.extend(hash.to_be_bytes());
            believe(&mut self.believed, hash, tiers, stored);
        }
        self.records += bytes.len() / RECORD_BYTES;
        self.file.write_all(&bytes)?;
        if self.records > HISTORY_RECORDS_MIN.max(4 * self.believed.len()) {
            self.file = write_anew(&self.path, &self.believed)?;
            self.records = self.believed.len();
        }
        Ok(())
    }
}

/// The bits of tiers.
fn tag(tiers: TierSet) -> u8 {
    tiers.iter().fold(0, |tag, tier| tag | 1 << index(tier))
}

fn believe(believed: &mut HashMap<u64, TierSet>, hash: u64, tier: TierSet, stored: bool) {
    let tiers = believed.entry(hash).or_default();
    *tiers = if stored { tiers.with(tier) } else { tiers.without(tier) };
    if tiers.is_empty() {
        believed.remove(&hash);
    }
}

fn read(bytes: &[u8]) -> HashMap<u64, TierSet> {
    let mut believed = HashMap::new();
    let records = bytes.strip_prefix(HEADER).unwrap_or_default().chunks_exact(RECORD_BYTES);
    for record in records {
        let Some((tag, hash)) = record.split_first() else { break };
        let Some(hash) = hash.first_chunk().map(|hash| u64::from_be_bytes(*hash)) else { break };
        for tier in Tier::ALL.into_iter().filter(|tier| tag & 1 << index(*tier) != 0) {
            believe(&mut believed, hash, TierSet::of(tier), tag & WITHDRAWN == 0);
        }
    }
    believed
}

/// Writes what is believed beside the file, and puts it in its place.
fn write_anew(path: &Path, believed: &HashMap<u64, TierSet>) -> io::Result<File> {
    let mut bytes = HEADER.to_vec();
    for (hash, tiers) in believed {
        bytes.push(tag(*tiers));
        bytes.extend(hash.to_be_bytes());
    }
    let draft = path.with_extension("draft");
    fs::write(&draft, &bytes)?;
    fs::rename(&draft, path)?;
    OpenOptions::new().append(true).open(path)
}

#[cfg(test)]
mod tests {
    use super::{super::encode::Stored, *};

    fn stored(tier: Tier, hashes: &[u64]) -> Event {
        Event::Stored(Stored {
            tier,
            hashes: hashes.to_vec(),
            parent: None,
            tokens: Vec::new(),
            block_tokens: 1,
            lora_name: String::new(),
            salt: String::new(),
        })
    }

    fn sorted(mut told: Vec<(u64, TierSet)>) -> Vec<(u64, Vec<Tier>)> {
        told.sort_by_key(|(hash, _)| *hash);
        told.into_iter().map(|(hash, tiers)| (hash, tiers.iter().collect())).collect()
    }

    #[test]
    fn what_was_said_is_known_after_a_restart_also_when_the_last_word_is_cut() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("events").join("a.shadow");
        let (mut journal, told) = Journal::open(&path).unwrap();
        assert!(told.is_empty());
        journal.note(&[stored(Tier::Dram, &[1, 2]), stored(Tier::Object, &[2])]).unwrap();
        // What was withdrawn may not have been heard yet.
        journal.note(&[Event::Removed { tier: Tier::Object, hashes: vec![2] }]).unwrap();
        journal.settle(vec![(1, TierSet::of(Tier::Dram)), (3, TierSet::of(Tier::Dram))]).unwrap();
        journal.note(&[stored(Tier::Nvme, &[4])]).unwrap();
        drop(journal);
        let expected = vec![(2, vec![Tier::Dram, Tier::Object]), (4, vec![Tier::Nvme])];
        assert_eq!(sorted(Journal::open(&path).unwrap().1), expected);
        let (mut journal, _) = Journal::open(&path).unwrap();
        journal.note(&[stored(Tier::Nvme, &[5])]).unwrap();
        let bytes = fs::read(&path).unwrap();
        fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
        assert_eq!(sorted(Journal::open(&path).unwrap().1), expected);
        fs::write(&path, b"something else").unwrap();
        assert!(Journal::open(&path).unwrap().1.is_empty());
    }

    #[test]
    fn history_is_forgotten() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("a.shadow");
        let (mut journal, _) = Journal::open(&path).unwrap();
        let hashes: Vec<u64> = (0..1000).collect();
        for _ in 0..100 {
            journal.note(&[stored(Tier::Dram, &hashes)]).unwrap();
            let gone = hashes.iter().map(|hash| (*hash, TierSet::of(Tier::Dram))).collect();
            journal.settle(gone).unwrap();
        }
        journal.note(&[stored(Tier::Dram, &[7])]).unwrap();
        let bytes = usize::try_from(fs::metadata(&path).unwrap().len()).unwrap();
        assert!(bytes < RECORD_BYTES * (HISTORY_RECORDS_MIN + 2000), "{bytes}");
        assert_eq!(sorted(Journal::open(&path).unwrap().1), [(7, vec![Tier::Dram])]);
    }
}

//! What a server has acknowledged and must therefore keep, whatever becomes of its process.
//!
//! Two claims are kept: a block whose durable put was acknowledged is there, and a block whose removal
//! was acknowledged is not. Everything else is unsure and claims nothing: what was asked and not
//! answered, and a put and a removal of one block that were under way at the same time, because
//! nobody but the server knows which of them came last.
//!
//! The file has one line for each change, synced before the change counts, so that what is claimed
//! after a kill was claimed before it:
//!
//! ```text
//! kept 17 18 19       their durable put was acknowledged
//! unsure 17           a removal was asked for, or the put of a removed block
//! removed 17          its removal was acknowledged
//! ```
//! The last line that names a block holds. A line without an end was not written to its end and
//! counts for nothing.

use std::{
    collections::HashMap,
    fs::{File, OpenOptions},
    io::{self, Write},
    path::{Path, PathBuf},
    sync::Arc,
};

use kvstrata_tiers::error::{Error, ErrorKind, Result};
use parking_lot::Mutex;

/// What is claimed of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Claim {
    Kept,
    Unsure,
    Removed,
}

/// All blocks of which something is claimed, in ascending order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Claims {
    /// Acknowledged as durable.
    pub(super) kept: Vec<u32>,
    /// Acknowledged as removed.
    pub(super) removed: Vec<u32>,
}

/// A handle to the ledger of one replay; clones share it.
#[derive(Debug, Clone)]
pub(super) struct Ledger {
    shared: Arc<Mutex<Book>>,
}

#[derive(Debug)]
struct Book {
    file: File,
    path: PathBuf,
    claims: HashMap<u32, Claim>,
    /// Blocks that a put or a removal is under way for.
    flights: HashMap<u32, Flight>,
}

/// What is under way for one block.
#[derive(Debug, Default)]
struct Flight {
    puts: u32,
    removals: u32,
    /// Puts and removals have met: their order is unknown until all of them have ended.
    mixed: bool,
}

/// Something that changes a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Change {
    /// A put of it.
    Put,
    /// A removal of it.
    Remove,
}

impl Ledger {
    /// Opens the file, made if there is none; what it claims is claimed.
    pub(super) fn open(path: &Path) -> Result<Self> {
        let failed = |error| failed(path, error);
        let claims = match std::fs::read_to_string(path) {
            Ok(text) => read(&text),
            Err(error) if error.kind() == io::ErrorKind::NotFound => HashMap::new(),
            Err(error) => return Err(failed(error)),
        };
        let file = OpenOptions::new().append(true).create(true).open(path).map_err(failed)?;
        let path = path.to_owned();
        let book = Book { file, path, claims, flights: HashMap::new() };
        Ok(Self { shared: Arc::new(Mutex::new(book)) })
    }

    /// Notes that `change` of `blocks` is about to be asked for.
    pub(super) async fn begin(&self, change: Change, blocks: &[u32]) -> Result<()> {
        let blocks = blocks.to_vec();
        self.write(move |book| book.begin(change, &blocks)).await
    }

    /// Notes that `change` of `blocks` has ended; of these, `acknowledged` are as was asked.
    pub(super) async fn end(
        &self,
        change: Change,
        blocks: &[u32],
        acknowledged: &[u32],
    ) -> Result<()> {
        let (blocks, acknowledged) = (blocks.to_vec(), acknowledged.to_vec());
        self.write(move |book| book.end(change, &blocks, &acknowledged)).await
    }

    /// What is claimed now.
    pub(super) fn claims(&self) -> Claims {
        let book = self.shared.lock();
        let of = |wanted| {
            let claimed = book.claims.iter().filter(|(_, claim)| **claim == wanted);
            let mut blocks: Vec<_> = claimed.map(|(block, _)| *block).collect();
            blocks.sort_unstable();
            blocks
        };
        Claims { kept: of(Claim::Kept), removed: of(Claim::Removed) }
    }

    /// Whether a removal of `block` was asked for and no put acknowledged since.
    pub(super) fn may_be_removed(&self, block: u32) -> bool {
        match self.shared.lock().claims.get(&block) {
            Some(Claim::Unsure | Claim::Removed) => true,
            Some(Claim::Kept) | None => false,
        }
    }

    /// Writes on a thread that may wait for the disk.
    async fn write(
        &self,
        change: impl FnOnce(&mut Book) -> io::Result<()> + Send + 'static,
    ) -> Result<()> {
        let shared = Arc::clone(&self.shared);
        let written = tokio::task::spawn_blocking(move || {
            let mut book = shared.lock();
            change(&mut book).map_err(|error| failed(&book.path, error))
        });
        written
            .await
            .map_err(|error| Error::new(ErrorKind::Internal, "write the ledger").because(error))?
    }
}

impl Book {
    fn begin(&mut self, change: Change, blocks: &[u32]) -> io::Result<()> {
        let mut unsure = Vec::new();
        for block in blocks {
            let flight = self.flights.entry(*block).or_default();
            match change {
                Change::Put => flight.puts += 1,
                Change::Remove => flight.removals += 1,
            }
            flight.mixed |= flight.puts > 0 && flight.removals > 0;
            // The put of a block that is kept leaves it kept.
            let stays = match change {
                Change::Put => Claim::Kept,
                Change::Remove => Claim::Unsure,
            };
            let claim = self.claims.get(block);
            let was_claimed = claim.is_some_and(|claim| ![stays, Claim::Unsure].contains(claim));
            if was_claimed || (claim.is_none() && change == Change::Remove) {
                unsure.push(*block);
            }
        }
        self.claim(Claim::Unsure, unsure)
    }

    fn end(&mut self, change: Change, blocks: &[u32], acknowledged: &[u32]) -> io::Result<()> {
        let mut sure = acknowledged.to_vec();
        sure.retain(|block| self.flights.get(block).is_some_and(|flight| !flight.mixed));
        for block in blocks {
            let Some(flight) = self.flights.get_mut(block) else { continue };
            match change {
                Change::Put => flight.puts = flight.puts.saturating_sub(1),
                Change::Remove => flight.removals = flight.removals.saturating_sub(1),
            }
            if flight.puts == 0 && flight.removals == 0 {
                self.flights.remove(block);
            }
        }
        let claim = match change {
            Change::Put => Claim::Kept,
            Change::Remove => Claim::Removed,
        };
        sure.retain(|block| self.claims.get(block) != Some(&claim));
        self.claim(claim, sure)
    }

    /// Claims it on disk, then here.
    fn claim(&mut self, claim: Claim, blocks: Vec<u32>) -> io::Result<()> {
        if blocks.is_empty() {
            return Ok(());
        }
        let mut line = claim.word().to_owned();
        for block in &blocks {
            line.push(' ');
            line.push_str(&block.to_string());
        }
        line.push('\n');
        self.file.write_all(line.as_bytes())?;
        self.file.sync_data()?;
        self.claims.extend(blocks.into_iter().map(|block| (block, claim)));
        Ok(())
    }
}

impl Claim {
    const ALL: [Self; 3] = [Self::Kept, Self::Unsure, Self::Removed];

    fn word(self) -> &'static str {
        match self {
            Self::Kept => "kept",
            Self::Unsure => "unsure",
            Self::Removed => "removed",
        }
    }
}

/// The claims of a file.
fn read(text: &str) -> HashMap<u32, Claim> {
    let whole = text.rfind('\n').and_then(|end| text.get(..end)).unwrap_or_default();
    let mut claims = HashMap::new();
    for line in whole.lines() {
        let mut words = line.split(' ');
        let word = words.next();
        let Some(claim) = Claim::ALL.into_iter().find(|claim| Some(claim.word()) == word) else {
            continue;
        };
        let blocks = words.filter_map(|block| block.parse().ok());
        claims.extend(blocks.map(|block: u32| (block, claim)));
    }
    claims
}

fn failed(path: &Path, error: io::Error) -> Error {
    Error::new(ErrorKind::Internal, format!("keep the ledger {}", path.display())).because(error)
}

#[cfg(test)]
mod tests {
    use super::{Change::*, *};

    fn claims(kept: &[u32], removed: &[u32]) -> Claims {
        Claims { kept: kept.to_vec(), removed: removed.to_vec() }
    }

    /// A ledger in a directory of its own.
    fn ledger() -> (tempfile::TempDir, Ledger) {
        let directory = tempfile::tempdir().unwrap();
        let ledger = Ledger::open(&directory.path().join("ledger")).unwrap();
        (directory, ledger)
    }

    /// A change with nothing else under way.
    async fn change(ledger: &Ledger, change: Change, blocks: &[u32], acknowledged: &[u32]) {
        ledger.begin(change, blocks).await.unwrap();
        ledger.end(change, blocks, acknowledged).await.unwrap();
    }

    #[tokio::test]
    async fn only_what_was_acknowledged_is_claimed() {
        let (_directory, ledger) = ledger();
        change(&ledger, Put, &[1, 2, 3], &[1, 3]).await;
        change(&ledger, Remove, &[4], &[4]).await;
        change(&ledger, Remove, &[5], &[]).await;
        assert_eq!(ledger.claims(), claims(&[1, 3], &[4]));
    }

    #[tokio::test]
    async fn what_was_asked_and_not_answered_is_unsure() {
        let (_directory, ledger) = ledger();
        change(&ledger, Put, &[1], &[1]).await;
        ledger.begin(Remove, &[1]).await.unwrap();
        assert_eq!(ledger.claims(), claims(&[], &[]), "from the moment it is asked");
        assert!(ledger.may_be_removed(1) && !ledger.may_be_removed(2));
        ledger.end(Remove, &[1], &[]).await.unwrap();
        assert_eq!(ledger.claims(), claims(&[], &[]));
        change(&ledger, Remove, &[1], &[1]).await;
        assert_eq!(ledger.claims(), claims(&[], &[1]));
        change(&ledger, Put, &[1], &[]).await;
        assert_eq!(ledger.claims(), claims(&[], &[]), "it may be back");
        change(&ledger, Put, &[1], &[1]).await;
        assert_eq!(ledger.claims(), claims(&[1], &[]));
        change(&ledger, Put, &[1], &[]).await;
        assert_eq!(ledger.claims(), claims(&[1], &[]), "a put takes nothing away");
    }

    #[tokio::test]
    async fn a_put_and_a_removal_that_meet_leave_nothing_sure() {
        for first_to_end in [Put, Remove] {
            let (_directory, ledger) = ledger();
            for asked in [Put, Remove] {
                ledger.begin(asked, &[1, 2]).await.unwrap();
            }
            ledger.begin(Put, &[3]).await.unwrap();
            let second = if first_to_end == Put { Remove } else { Put };
            for ended in [first_to_end, second] {
                ledger.end(ended, &[1, 2], &[1, 2]).await.unwrap();
            }
            ledger.end(Put, &[3], &[3]).await.unwrap();
            assert_eq!(ledger.claims(), claims(&[3], &[]));
            change(&ledger, Put, &[1], &[1]).await;
            change(&ledger, Remove, &[2], &[2]).await;
            assert_eq!(ledger.claims(), claims(&[1, 3], &[2]), "later ones are sure again");
        }
    }

    #[tokio::test]
    async fn the_file_says_the_same_and_a_torn_line_says_nothing() {
        let (directory, ledger) = ledger();
        let path = directory.path().join("ledger");
        change(&ledger, Put, &[1, 2, 30], &[1, 2, 30]).await;
        change(&ledger, Put, &[1], &[1]).await;
        change(&ledger, Remove, &[2], &[2]).await;
        let text = std::fs::read_to_string(&path).unwrap();
        assert_eq!(text, "kept 1 2 30\nunsure 2\nremoved 2\n");
        assert_eq!(Ledger::open(&path).unwrap().claims(), ledger.claims());
        std::fs::write(&path, format!("{text}kept 4 5\nkept 6 7")).unwrap();
        assert_eq!(Ledger::open(&path).unwrap().claims(), claims(&[1, 4, 5, 30], &[2]));
    }
}

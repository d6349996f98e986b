//! An index that is not there.

use std::io;

use crate::nvme::index::{Change, Index, IndexEntry, IndexKey, IndexUsage, Known};

/// Stands for an index that is not there or cannot be opened: every call fails and says why.
#[derive(Debug)]
pub struct LostIndex(String);

impl LostIndex {
    /// An index that is lost because of `why`.
    #[must_use]
    pub fn new(why: &str) -> Self {
        Self(why.to_owned())
    }

    fn lost<T>(&self) -> io::Result<T> {
        Err(io::Error::new(io::ErrorKind::InvalidData, format!("index: {}", self.0)))
    }
}

impl Index for LostIndex {
    fn apply(&self, _changes: &[Change]) -> io::Result<()> {
        self.lost()
    }

    fn get(&self, _key: &IndexKey) -> io::Result<Option<IndexEntry>> {
        self.lost()
    }

    fn load(&self, _visit: &mut dyn FnMut(Known) -> io::Result<()>) -> io::Result<u64> {
        self.lost()
    }

    fn clear(&self) -> io::Result<()> {
        self.lost()
    }

    fn reopen(&self) -> io::Result<()> {
        self.lost()
    }

    fn usage(&self) -> IndexUsage {
        IndexUsage::default()
    }
}

//! Reading segments from one end to the other: their header, their entry table, or, where there is
//! none, their records one by one.

use std::io;

use super::{
    aligned::{AlignedBuf, PAGE_BYTES},
    device::{Device, Landing, SegmentId, read_full},
    format::{
        Damage, Entry, EntryTable, Kind, RecordHeader, SegmentHeader, Trailer, checksum, pages,
    },
};

const PAGE: u64 = PAGE_BYTES as u64;
/// The longest payload of tombstones and namespaces: far more than a namespace can be encoded to,
/// and than the writer puts into one record.
const NOTE_BYTES_MAX: u32 = 4 << 20;

/// Why a scan did not give what was asked for.
#[derive(Debug)]
pub(super) enum Trouble {
    /// The disk failed.
    Disk(io::Error),
    /// The bytes are not what should be there.
    Damaged(Damage),
}

impl From<io::Error> for Trouble {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            // A file that is shorter than it should be has lost its end.
            io::ErrorKind::UnexpectedEof => Self::Damaged(Damage::Foreign),
            _ => Self::Disk(error),
        }
    }
}

impl From<Damage> for Trouble {
    fn from(damage: Damage) -> Self {
        Self::Damaged(damage)
    }
}

/// Reads `bytes`, rounded up to whole pages, at `offset`.
pub(super) async fn read_bytes(
    device: &dyn Device,
    segment: SegmentId,
    offset: u64,
    bytes: usize,
) -> io::Result<AlignedBuf> {
    let landing = Landing::new(AlignedBuf::zeroed(bytes), None);
    let (landing, read) = read_full(device, segment, offset, landing).await;
    read.map(|()| landing.head)
}

/// Reads the first page of a segment.
pub(super) async fn read_header(
    device: &dyn Device,
    segment: SegmentId,
) -> Result<SegmentHeader, Trouble> {
    let page = read_bytes(device, segment, 0, PAGE_BYTES).await?;
    let header = SegmentHeader::decode(&page)?;
    if header.segment == segment { Ok(header) } else { Err(Damage::Misplaced.into()) }
}

/// Reads the trailer of a segment whose file is `file_bytes` long; `None` if it was not sealed.
pub(super) async fn read_trailer(
    device: &dyn Device,
    segment: SegmentId,
    generation: u64,
    file_bytes: u64,
) -> Result<Option<Trailer>, Trouble> {
    let Some(offset) = file_bytes.checked_sub(PAGE).map(|offset| offset / PAGE * PAGE) else {
        return Ok(None);
    };
    let page = read_bytes(device, segment, offset, PAGE_BYTES).await?;
    match Trailer::decode(&page, file_bytes) {
        Ok(trailer) if (trailer.segment, trailer.generation) == (segment, generation) => {
            Ok(Some(trailer))
        }
        // What is not a trailer of this segment may be the end of a record.
        Ok(_) | Err(_) => Ok(None),
    }
}

/// Reads the entry table that a trailer names.
pub(super) async fn read_table(
    device: &dyn Device,
    segment: SegmentId,
    trailer: &Trailer,
) -> Result<EntryTable, Trouble> {
    let bytes = usize::try_from(trailer.table_bytes).unwrap_or(usize::MAX);
    let read = read_bytes(device, segment, trailer.data_bytes, bytes).await?;
    let table = read.get(..bytes).ok_or(Damage::Misplaced)?;
    if checksum(table) != trailer.table_sum {
        return Err(Damage::Checksum.into());
    }
    Ok(EntryTable::decode(table, trailer.entries)?)
}

/// A record as it was found.
#[derive(Debug)]
pub(super) struct Scanned {
    pub(super) entry: Entry,
    pub(super) header: RecordHeader,
    /// The payload, if it was read.
    pub(super) payload: Vec<u8>,
}

/// Goes from record to record.
#[derive(Debug)]
pub(super) struct Scanner<'a> {
    device: &'a dyn Device,
    segment: SegmentId,
    generation: u64,
    /// Where the next record starts, in bytes.
    at: u64,
    /// Where records must end, in bytes.
    end: u64,
    /// Bytes read so far.
    read: u64,
}

impl<'a> Scanner<'a> {
    /// Starts at `at` (a multiple of a page, at least one page) of a segment.
    pub(super) fn new(
        device: &'a dyn Device,
        segment: SegmentId,
        generation: u64,
        (at, end): (u64, u64),
    ) -> Self {
        Self { device, segment, generation, at: at.max(PAGE), end, read: 0 }
    }

    /// Where the next record starts; after the last one, where the records end.
    pub(super) fn at(&self) -> u64 {
        self.at
    }

    /// Bytes read.
    pub(super) fn bytes_read(&self) -> u64 {
        self.read
    }

    /// The next record; `None` at the end, which is where no valid record starts. Payloads of
    /// tombstones and namespaces are always read and verified, those of blocks if `blocks` is set.
    pub(super) async fn next(&mut self, blocks: bool) -> Result<Option<Scanned>, Trouble> {
        if self.at + PAGE > self.end {
            return Ok(None);
        }
        match self.read_record(blocks).await {
            Ok(scanned) => {
                self.at += u64::from(scanned.entry.units) * PAGE;
                Ok(Some(scanned))
            }
            Err(Trouble::Damaged(_)) => Ok(None),
            Err(Trouble::Disk(error)) => Err(Trouble::Disk(error)),
        }
    }

    /// Reads and verifies the record at the scanner's place, whatever is wrong with it.
    pub(super) async fn read_record(&mut self, blocks: bool) -> Result<Scanned, Trouble> {
        let unit = u32::try_from(self.at / PAGE).unwrap_or(u32::MAX);
        let page = self.read_at(self.at, PAGE_BYTES).await?;
        let (mut header, behind) = RecordHeader::decode(&page, self.generation, unit)?;
        let shape = header.shape();
        if self.at + shape.bytes() > self.end {
            return Err(Damage::Misplaced.into());
        }
        if header.kind != Kind::Block && header.len > NOTE_BYTES_MAX {
            return Err(Damage::Misplaced.into());
        }
        let len = usize::try_from(header.len).unwrap_or(usize::MAX);
        let payload_pages = if shape.inline { 0 } else { u64::from(pages(len)) };
        if behind.count > 0 {
            let offset = self.at + PAGE + payload_pages * PAGE;
            let bytes = self.read_at(offset, behind.count * 8).await?;
            header.sums = behind.read(&bytes)?;
        }
        let mut payload = Vec::new();
        if blocks || header.kind != Kind::Block {
            payload = match header.inline_payload(&page) {
                Some(inline) => inline.to_vec(),
                None => {
                    let bytes = self.read_at(self.at + PAGE, len).await?;
                    bytes.get(..len).unwrap_or_default().to_vec()
                }
            };
            if !header.is_payload(&payload) {
                return Err(Damage::Checksum.into());
            }
        }
        let encoded = if header.kind == Kind::Namespace { payload.as_slice() } else { &[] };
        let entry = Entry::of(&header, encoded);
        Ok(Scanned { entry, header, payload })
    }

    async fn read_at(&mut self, offset: u64, bytes: usize) -> io::Result<AlignedBuf> {
        let read = read_bytes(self.device, self.segment, offset, bytes).await?;
        self.read += u64::try_from(read.len()).unwrap_or(u64::MAX);
        Ok(read)
    }
}

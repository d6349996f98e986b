//! Reading segments from one end to the other: their header, their entry table, or, where there is
//! none, their records one by one.

use std::{io, time::Duration};

use super::{
    aligned::{AlignedBuf, PAGE, PAGE_BYTES},
    device::{Device, Landing, SegmentId, read_full},
    format::{
        Damage, Entry, EntryTable, Kind, RecordHeader, SegmentHeader, Trailer, checksum, pages,
    },
};

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

/// How often something is read that the disk fails to deliver: what is given up here is lost.
const TRIES: u32 = 3;
/// How long to wait before the next try.
const TRY_AGAIN_AFTER: Duration = Duration::from_millis(20);

/// Reads `bytes`, rounded up to whole pages, at `offset`; a few times if the disk fails.
pub(super) async fn read_bytes(
    device: &dyn Device,
    segment: SegmentId,
    offset: u64,
    bytes: usize,
) -> io::Result<AlignedBuf> {
    let mut tries = 1;
    loop {
        match read_once(device, segment, offset, bytes).await {
            Err(error) if tries < TRIES && !is_final(&error) => {
                tries += 1;
                tokio::time::sleep(TRY_AGAIN_AFTER).await;
            }
            read => return read,
        }
    }
}

async fn read_once(
    device: &dyn Device,
    segment: SegmentId,
    offset: u64,
    bytes: usize,
) -> io::Result<AlignedBuf> {
    let landing = Landing::new(AlignedBuf::zeroed(bytes), None);
    let (landing, read) = read_full(device, segment, offset, landing).await;
    read.map(|()| landing.head)
}

fn is_final(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::UnexpectedEof | io::ErrorKind::NotFound)
}

/// What the first page of a file says.
#[derive(Debug)]
pub(super) enum First {
    /// It is this segment, of this store.
    Ours(SegmentHeader),
    /// Nothing was ever written to it.
    Unwritten,
    /// It cannot be read, or not any more. Others may vouch for it.
    Unreadable(Trouble),
    /// Of another store, version, or number.
    Stranger(Damage),
}

/// Reads the first page of a segment of the store.
pub(super) async fn read_first(device: &dyn Device, segment: SegmentId, store: [u8; 16]) -> First {
    let page = match read_bytes(device, segment, 0, PAGE_BYTES).await {
        Ok(page) => page,
        // Too short for a page.
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return First::Unwritten,
        Err(error) => return First::Unreadable(Trouble::Disk(error)),
    };
    match SegmentHeader::decode(&page) {
        Ok(header) if (header.segment, header.store) == (segment, store) => First::Ours(header),
        Ok(_other) => First::Stranger(Damage::Misplaced),
        Err(Damage::Version) => First::Stranger(Damage::Version),
        Err(Damage::Foreign) if page.iter().all(|byte| *byte == 0) => First::Unwritten,
        Err(damage) => First::Unreadable(Trouble::Damaged(damage)),
    }
}

/// The generation that the trailer of a segment vouches for, if it was sealed.
pub(super) async fn generation_of_trailer(
    device: &dyn Device,
    segment: SegmentId,
    file_bytes: u64,
) -> Option<u64> {
    let offset = file_bytes.checked_sub(PAGE)? / PAGE * PAGE;
    let page = read_bytes(device, segment, offset, PAGE_BYTES).await.ok()?;
    let trailer = Trailer::decode(&page, file_bytes).ok()?;
    (trailer.segment == segment).then_some(trailer.generation)
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
    /// Whether to look for records behind what is damaged.
    search: Search,
    /// What was passed over to find the next record.
    holes: Vec<Hole>,
    /// What is behind the last record.
    tail: Option<Trouble>,
}

/// Pages between records that are none.
#[derive(Debug)]
pub(super) struct Hole {
    pub(super) from: u32,
    pub(super) to: u32,
    pub(super) trouble: Trouble,
}

/// Where a scanner goes on behind a page that is no record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Search {
    /// Only behind damage: a page of zeros is the end.
    BehindDamage,
    /// To the end of the segment.
    Everywhere,
}

fn page_of(offset: u64) -> u32 {
    u32::try_from(offset / PAGE).unwrap_or(u32::MAX)
}

/// Bytes read at once to find the next record.
const SEARCH_BYTES: u64 = 256 << 10;

impl<'a> Scanner<'a> {
    /// Starts at `at` (a multiple of a page, at least one page) of a segment.
    pub(super) fn new(
        device: &'a dyn Device,
        segment: SegmentId,
        generation: u64,
        (at, end): (u64, u64),
    ) -> Self {
        let (search, holes) = (Search::BehindDamage, Vec::new());
        let at = at.max(PAGE);
        Self { device, segment, generation, at, end, read: 0, search, holes, tail: None }
    }

    /// Looks for records up to the end, whatever is before them.
    pub(super) fn searching(self) -> Self {
        Self { search: Search::Everywhere, ..self }
    }

    /// The error of the disk behind the last record, if that is why it is the last one.
    pub(super) fn failure(&self) -> Option<&Trouble> {
        self.tail.as_ref().filter(|tail| matches!(tail, Trouble::Disk(_)))
    }

    /// Damage behind the last record: a crash, or one more record that was there.
    pub(super) fn torn(&self) -> Option<&Trouble> {
        let torn = |tail: &&Trouble| match tail {
            Trouble::Damaged(damage) => *damage != Damage::Foreign,
            Trouble::Disk(_) => false,
        };
        self.tail.as_ref().filter(torn)
    }

    /// What was damaged between records that are not.
    pub(super) fn holes(&self) -> &[Hole] {
        &self.holes
    }

    /// Where the next record starts; after the last one, where the records end.
    pub(super) fn at(&self) -> u64 {
        self.at
    }

    /// Bytes read.
    pub(super) fn bytes_read(&self) -> u64 {
        self.read
    }

    /// The next record that is whole; `None` if there is none, and then [`at`](Self::at) is behind the
    /// last one. Payloads of tombstones and namespaces are always read and verified, those of blocks
    /// if `blocks` is set.
    ///
    /// A record that is damaged, or that the disk fails to deliver, costs itself: the search goes on
    /// behind it. That is safe: no page but the header of a record of this segment at its own place
    /// has that place, checksum and generation, which nobody who chooses payloads can know.
    pub(super) async fn next(&mut self, blocks: bool) -> Option<Scanned> {
        let start = self.at;
        let mut hole = None;
        while self.at + PAGE <= self.end {
            match self.read_record(blocks).await {
                Ok(scanned) => {
                    self.at += u64::from(scanned.entry.units) * PAGE;
                    let (from, to) = (page_of(start), scanned.header.unit);
                    self.holes.extend(hole.map(|trouble| Hole { from, to, trouble }));
                    return Some(scanned);
                }
                Err(trouble) => {
                    let everywhere = self.search == Search::Everywhere || hole.is_some();
                    hole.get_or_insert(trouble);
                    if !(everywhere || self.is_damage().await) || !self.find_next().await {
                        break;
                    }
                }
            }
        }
        self.at = start;
        self.tail = hole;
        None
    }

    /// The payload of a block that was found without it; whether it is what was written is not known.
    pub(super) async fn payload_of(&mut self, header: &RecordHeader) -> io::Result<Vec<u8>> {
        let at = u64::from(header.unit) * PAGE;
        let len = usize::try_from(header.len).unwrap_or(usize::MAX);
        if header.shape().inline {
            let page = self.read_at(at, PAGE_BYTES).await?;
            return Ok(header.inline_payload(&page).unwrap_or_default().to_vec());
        }
        let bytes = self.read_at(at + PAGE, len).await?;
        Ok(bytes.get(..len).unwrap_or_default().to_vec())
    }

    /// Whether there is something at the scanner's place, and not just nothing.
    async fn is_damage(&mut self) -> bool {
        let page = self.read_at(self.at, PAGE_BYTES).await;
        page.map_or(true, |page| page.iter().any(|byte| *byte != 0))
    }

    /// Goes to the next page that is the header of a record.
    async fn find_next(&mut self) -> bool {
        self.at += PAGE;
        while self.at + PAGE <= self.end {
            let bytes = (self.end - self.at).min(SEARCH_BYTES) / PAGE * PAGE;
            let read = self.read_at(self.at, usize::try_from(bytes).unwrap_or(0)).await;
            // What cannot be read is passed over as a whole: page by page it could take hours.
            for page in read.iter().flat_map(|read| read.chunks(PAGE_BYTES)) {
                if RecordHeader::decode(page, self.generation, page_of(self.at)).is_ok() {
                    return true;
                }
                self.at += PAGE;
            }
            if read.is_err() {
                self.at += bytes;
            }
        }
        false
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

//! The records of one segment, against its table, its namespaces and the index.

use super::{Check, PAGE, Summary, TOMBSTONES_MAX, What, digest};
use crate::{
    namespace::layout_of,
    nvme::{
        aligned::PAGE_BYTES,
        device::SegmentId,
        format::{Entry, Kind, Place, RecordHeader, Tombstone},
        scan::{Scanned, Scanner, Trouble, read_bytes, read_table, read_trailer},
    },
};

/// A block that the index does not name, until the tombstones of its segment are known.
struct Unnamed {
    digest: u64,
    unit: u32,
}

/// The entries of a table that are still to be met.
type Table = std::iter::Peekable<std::vec::IntoIter<Entry>>;

/// Whether the table says of this record what it is, if there is a table.
fn is_in_table(table: &mut Option<Table>, found: &Entry) -> bool {
    let Some(table) = table else { return true };
    if table.next_if(|entry| entry == found).is_some() {
        return true;
    }
    // Behind it they may agree again.
    while table.next_if(|entry| entry.unit <= found.unit).is_some() {}
    false
}

impl Check<'_> {
    /// Reads all records of a segment.
    pub(super) async fn records(&mut self, id: SegmentId, generation: u64, file_bytes: u64) {
        let (data_bytes, mut table) = self.table(id, generation, file_bytes).await;
        let known = self.indexed.get(&id).filter(|(known, _)| *known == generation);
        let indexed = known.map_or(0, |(_, bytes)| *bytes);
        let end = data_bytes.unwrap_or(file_bytes);
        let mut summary = Summary { generation, ..Summary::default() };
        let mut unnamed = Vec::new();
        let device = self.device;
        let mut scanner = Scanner::new(device, id, generation, (0, end)).searching();
        while let Some(scanned) = scanner.next(false).await {
            self.report.records += 1;
            // What lies in a hole only the table has.
            if !is_in_table(&mut table, &scanned.entry) && scanner.holes().is_empty() {
                self.report.add(id, scanned.entry.unit, What::Table, 0);
            }
            match scanned.entry.kind {
                Kind::Block => {
                    let beyond = u64::from(scanned.entry.unit) * PAGE >= indexed;
                    let found = (id, &scanned, beyond);
                    self.block(found, &mut scanner, (&mut summary, &mut unnamed)).await;
                }
                Kind::Tombstones => self.tombstones(&scanned),
                Kind::Namespace => self.namespace(id, &scanned),
            }
        }
        self.end(&scanner, (id, file_bytes), (data_bytes, indexed), &mut summary).await;
        self.lacking(id, &unnamed);
        self.summaries.insert(id, summary);
    }

    /// What is between and behind the records that were found.
    async fn end(
        &mut self,
        scanner: &Scanner<'_>,
        (id, file_bytes): (SegmentId, u64),
        (data_bytes, indexed): (Option<u64>, u64),
        summary: &mut Summary,
    ) {
        for hole in scanner.holes() {
            match &hole.trouble {
                Trouble::Disk(_) => self.report.add(id, hole.from, What::Unreadable, 0),
                Trouble::Damaged(_) => {}
            }
            self.hole(summary, id, (hole.from, hole.to));
        }
        // Where records must be: a sealed segment says it, and so does the index.
        let promised = data_bytes.unwrap_or(indexed).min(file_bytes);
        let last = u32::try_from(scanner.at() / PAGE).unwrap_or(u32::MAX);
        if scanner.at() < promised
            && (data_bytes.is_some() || self.is_written(id, scanner.at()).await)
        {
            let to = u32::try_from(promised / PAGE).unwrap_or(u32::MAX);
            self.hole(summary, id, (last, to));
            summary.end = to;
        } else {
            summary.end = last;
        }
        if scanner.failure().is_some() {
            self.report.add(id, last, What::Unreadable, 0);
        }
        self.report.bytes_read += scanner.bytes_read();
        if data_bytes.is_none() && scanner.at() + PAGE <= file_bytes {
            self.no_trailer(id, file_bytes).await;
        }
    }

    /// Where records end and what the table says, if the segment was sealed.
    async fn table(
        &mut self,
        id: SegmentId,
        generation: u64,
        file_bytes: u64,
    ) -> (Option<u64>, Option<Table>) {
        let trailer = read_trailer(self.device, id, generation, file_bytes).await;
        self.report.bytes_read += PAGE;
        let Ok(Some(trailer)) = trailer else { return (None, None) };
        self.report.bytes_read += trailer.table_bytes;
        match read_table(self.device, id, &trailer).await {
            Ok(table) => {
                (Some(trailer.data_bytes), Some(table.into_entries().into_iter().peekable()))
            }
            Err(_trouble) => {
                let page = u32::try_from(trailer.data_bytes / PAGE).unwrap_or(u32::MAX);
                self.report.add(id, page, What::Table, 0);
                (Some(trailer.data_bytes), None)
            }
        }
    }

    /// Whether there is anything but zeros in a page.
    async fn is_written(&self, id: SegmentId, offset: u64) -> bool {
        let page = read_bytes(self.device, id, offset, PAGE_BYTES).await;
        page.map_or(true, |page| page.iter().any(|byte| *byte != 0))
    }

    /// A segment that is not sealed ends with its last record, or with zeros that were allocated.
    async fn no_trailer(&mut self, id: SegmentId, file_bytes: u64) {
        let offset = (file_bytes - PAGE) / PAGE * PAGE;
        if self.is_written(id, offset).await {
            let page = u32::try_from(offset / PAGE).unwrap_or(u32::MAX);
            self.report.add(id, page, What::Trailer, 0);
        }
    }

    async fn block(
        &mut self,
        (id, scanned, beyond): (SegmentId, &Scanned, bool),
        scanner: &mut Scanner<'_>,
        (summary, unnamed): (&mut Summary, &mut Vec<Unnamed>),
    ) {
        let header = &scanned.header;
        let bytes = header.shape().bytes();
        let place = Place { segment: id, unit: header.unit };
        let entry = self.index.get(&header.key).ok().flatten();
        let live = entry.as_ref().is_some_and(|entry| Some(entry.location) == place.location());
        let costs = u64::from(live || (entry.is_none() && beyond));
        if let Some(what) = self.payload(header, scanner).await {
            self.report.add(id, header.unit, what, costs);
        }
        if live {
            summary.matched += 1;
            self.report.live_blocks += 1;
            self.report.live_bytes += bytes;
            let says = |entry: &crate::nvme::index::IndexEntry| {
                (entry.len, &entry.checksums) == (header.len, &header.checksums())
            };
            if entry.as_ref().is_some_and(|entry| !says(entry)) {
                self.report.add(id, header.unit, What::Entry, 1);
            }
        } else if entry.is_none() && beyond {
            self.report.unindexed_blocks += 1;
        } else {
            self.report.dead_bytes += bytes;
            if entry.is_none() {
                unnamed.push(Unnamed { digest: digest(&header.key), unit: header.unit });
            }
        }
    }

    /// What is wrong with the bytes of a block.
    async fn payload(&self, header: &RecordHeader, scanner: &mut Scanner<'_>) -> Option<What> {
        let Ok(payload) = scanner.payload_of(header).await else { return Some(What::Unreadable) };
        if !header.is_payload(&payload) {
            return Some(What::Payload);
        }
        let Some(layout) = self.layouts.get(&header.key.namespace) else {
            return Some(What::Layout);
        };
        let right = layout.parts().len() == header.sums.len() && layout.digest() == header.layout;
        let Some(sums) = layout.checksums(&header.key, &payload).filter(|_| right) else {
            return Some(What::Layout);
        };
        (sums != header.sums).then_some(What::Parts)
    }

    fn tombstones(&mut self, scanned: &Scanned) {
        for tombstone in Tombstone::decode_all(&scanned.payload) {
            self.report.tombstones += 1;
            if self.removed.len() < TOMBSTONES_MAX {
                let barrier =
                    self.removed.entry(digest(&tombstone.key)).or_insert(tombstone.barrier);
                *barrier = (*barrier).max(tombstone.barrier);
            }
        }
    }

    fn namespace(&mut self, id: SegmentId, scanned: &Scanned) {
        match layout_of(&scanned.payload) {
            Ok(layout) => drop(self.layouts.insert(scanned.entry.key.namespace, layout)),
            Err(_damage) => self.report.add(id, scanned.entry.unit, What::Layout, 0),
        }
    }

    /// Which of the blocks that the index does not name nothing has removed.
    fn lacking(&mut self, id: SegmentId, unnamed: &[Unnamed]) {
        if self.removed.len() >= TOMBSTONES_MAX {
            return;
        }
        for Unnamed { digest, unit } in unnamed {
            let place = Place { segment: id, unit: *unit };
            if self.removed.get(digest).is_none_or(|barrier| *barrier <= place) {
                self.report.add(id, *unit, What::Lacking, 1);
                // Older records of it are not lost once more.
                self.removed.insert(*digest, place);
            }
        }
    }
}

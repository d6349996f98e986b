//! The open segment: how it begins and how it ends.

use std::{collections::HashSet, io};

use super::{
    OpLabel,
    aligned::{AlignedBuf, PAGE, PAGE_BYTES},
    device::{SegmentId, SyncPoint, write_full},
    format::{EntryTable, Trailer, checksum},
    segments::Segment,
    writer::Writer,
};
use crate::namespace::NamespaceId;

/// The segment that is being written.
#[derive(Debug)]
pub(super) struct Open {
    pub(super) id: SegmentId,
    pub(super) generation: u64,
    /// Where the next record goes; 0 while not even the header is written.
    pub(super) at: u64,
    pub(super) table: EntryTable,
    pub(super) namespaces: HashSet<NamespaceId>,
}

impl Open {
    /// Bytes of records that a segment can take at most, if it is one record and its namespace.
    pub(super) fn room_bytes(segment_bytes: u64) -> u64 {
        // Header, trailer, a namespace and a table of them: generous, as segments are large.
        segment_bytes.saturating_sub(segment_bytes / 8).saturating_sub(16 * PAGE)
    }
}

impl Writer {
    /// Ends the open segment with its table, so that nobody has to read its records to know them.
    pub(super) async fn seal(&mut self) {
        self.settle().await;
        let Some(open) = self.open.take() else { return };
        if open.at == 0 {
            self.open = Some(open);
            return;
        }
        let table = open.table.encode();
        let trailer = Trailer {
            segment: open.id,
            generation: open.generation,
            data_bytes: open.at,
            table_bytes: u64::try_from(table.len()).unwrap_or(0),
            entries: u32::try_from(open.table.entries().len()).unwrap_or(0),
            table_sum: checksum(&table),
        };
        let mut pages = AlignedBuf::zeroed(table.len().next_multiple_of(PAGE_BYTES) + PAGE_BYTES);
        if let Some(place) = pages.get_mut(..table.len()) {
            place.copy_from_slice(&table);
        }
        let last = pages.len() - PAGE_BYTES;
        if let Some(page) = pages.get_mut(last..) {
            trailer.encode(page);
        }
        let file_bytes = open.at + u64::try_from(pages.len()).unwrap_or(0);
        // Not synced: without its table a segment is read record by record.
        let (_, written) =
            write_full(self.core.device.as_ref(), open.id, open.at, pages.into()).await;
        let cut = written.and_then(|()| self.core.device.truncate(open.id, file_bytes));
        let cut = cut.inspect_err(|error| {
            self.core.metrics.errors(OpLabel::Write).inc();
            tracing::warn!(%error, segment = open.id.0, "nvme segment stays without its table");
        });
        self.core.segments.update(open.id, |segment| {
            segment.closed = true;
            if cut.is_ok() {
                segment.file_bytes = file_bytes;
            }
        });
        self.core.feed.sealed.notify_one();
    }

    /// Makes a segment, without looking for room.
    pub(super) fn create(&mut self) -> io::Result<()> {
        let (id, generation) = self.next_id();
        let file_bytes = self.core.config.segment_bytes;
        self.space = None;
        self.core.device.create(id, file_bytes)?;
        if let Err(error) = self.core.device.sync_directory(SyncPoint::Created) {
            self.core.metrics.errors(OpLabel::Sync).inc();
            self.core.state.poison(&error);
            return Err(error);
        }
        let segment = Segment { generation, file_bytes, ..Segment::default() };
        self.core.segments.insert(id, segment);
        self.open = Some(Open {
            id,
            generation,
            at: 0,
            table: EntryTable::default(),
            namespaces: HashSet::new(),
        });
        Ok(())
    }
}

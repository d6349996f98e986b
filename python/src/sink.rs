//! What a get does with blocks: writes them where its caller wants them, or keeps them to be copied.

use std::ops::Range;

use bytes::Bytes;
use kvstrata::client::{FetchedBlock, GetSink, GetSummary, MissReason, PiecePlace};
use kvstrata_tiers::error::Result;
use pyo3::prelude::*;

use crate::{
    arguments::Parts,
    errors,
    memory::Rooms,
    values::{GetResult, reason_name},
};

/// Why a value that was found is not delivered: only an opaque namespace has such.
const TOO_LONG: &str = "too_long";

/// Has blocks written into the buffers of the caller, straight from the connection where the path allows.
#[derive(Debug)]
pub(crate) struct Into {
    rooms: Rooms,
    /// Parts of a block that were asked for.
    parts: usize,
    /// The latest position with a part that is longer than its buffer.
    too_long: Option<u32>,
    result: GetResult,
}

impl Into {
    /// One room for each of `parts` of each block, of exactly its length where that is declared.
    pub(crate) fn new(
        py: Python<'_>,
        rooms: Rooms,
        parts: &Parts,
        blocks: usize,
    ) -> PyResult<Self> {
        let (given, each) = (rooms.len(), parts.bytes.len());
        if given != blocks * each {
            let due = blocks * each;
            let text = format!(
                "buffers: {given} given, exactly {due} required ({blocks} blocks x {each} parts)"
            );
            return Err(errors::invalid(py, &text));
        }
        for (index, declared) in (0..given).zip(parts.bytes.iter().cycle()) {
            let bytes = rooms.bytes(index);
            if let Some(declared) = declared.filter(|declared| *declared != bytes) {
                let (position, part) = (index / each, index % each);
                let text = format!(
                    "buffers: position {position}, part {part}: {bytes} bytes given, exactly {declared} declared"
                );
                return Err(errors::invalid(py, &text));
            }
        }
        let result = GetResult {
            found: vec![false; blocks],
            lengths: vec![0; given],
            ..GetResult::default()
        };
        Ok(Self { rooms, parts: each, too_long: None, result })
    }

    /// Lets go of the buffers. What was delivered counts, also when the get failed.
    pub(crate) fn end(mut self, summary: Option<&GetSummary>) -> GetResult {
        if let Some(summary) = summary {
            self.result.count(*summary);
        }
        self.result
    }
}

impl GetSink for Into {
    fn room(&mut self, place: PiecePlace) -> Option<&mut [u8]> {
        let index = place.position as usize * self.parts + place.part;
        if place.part_bytes > self.rooms.bytes(index) {
            self.too_long = Some(place.position);
            return None;
        }
        if let Some(length) = self.result.lengths.get_mut(index) {
            *length = place.part_bytes;
        }
        self.rooms.slice(index, place.offset..place.offset + place.bytes)
    }

    fn block(&mut self, block: FetchedBlock<'_>) {
        let position = block.position;
        if self.too_long == Some(position) {
            self.result.misses.push((position, position + 1, TOO_LONG));
        } else if let Some(found) = self.result.found.get_mut(position as usize) {
            *found = true;
        }
    }

    fn miss(&mut self, positions: Range<u32>, reason: MissReason) {
        self.result.misses.push((positions.start, positions.end, reason_name(reason)));
    }
}

/// Keeps blocks as they come.
#[derive(Debug)]
pub(crate) struct Keep(pub(crate) Vec<Option<Vec<Bytes>>>);

impl GetSink for Keep {
    fn block(&mut self, block: FetchedBlock<'_>) {
        if let Some(kept) = self.0.get_mut(block.position as usize) {
            *kept = Some(block.pieces().to_vec());
        }
    }

    fn miss(&mut self, _positions: Range<u32>, _reason: MissReason) {}
}

/// The end of a get, whole or not.
pub(crate) type Ended = (GetResult, Result<()>);

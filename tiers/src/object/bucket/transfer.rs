//! Moves bytes: bodies of an exact length in, bodies in parts out.

use std::ops::Range;

use bytes::{Bytes, BytesMut};
use futures_util::StreamExt;
use object_store::{
    GetOptions, GetRange, GetResult, GetResultPayload, ObjectStore, PutPayload, path::Path,
};
use prometheus_client::metrics::counter::Counter;

use super::error::Fault;

/// Reads a range, all of it or nothing.
pub(super) async fn read_range(
    store: &dyn ObjectStore,
    path: &Path,
    range: &Range<u64>,
    read_bytes: &Counter,
) -> Result<Bytes, Fault> {
    let options =
        GetOptions { range: Some(GetRange::Bounded(range.clone())), ..GetOptions::default() };
    let found = store.get_opts(path, options).await.map_err(Fault::of)?;
    if found.range != *range {
        let what = format!("asked for {range:?}, got {:?}", found.range);
        return Err(Fault::damaged(what, false));
    }
    collect(found, range.end - range.start, read_bytes).await
}

/// Reads an object of at most so many bytes.
pub(super) async fn read_whole(
    store: &dyn ObjectStore,
    path: &Path,
    bytes_max: u64,
    read_bytes: &Counter,
) -> Result<Bytes, Fault> {
    let found = store.get_opts(path, GetOptions::default()).await.map_err(Fault::of)?;
    let bytes = found.meta.size;
    if bytes > bytes_max {
        let what = format!("it has {bytes} bytes, at most {bytes_max} expected");
        return Err(Fault::damaged(what, false));
    }
    collect(found, bytes, read_bytes).await
}

/// The body, if it has exactly so many bytes; never holds more.
async fn collect(found: GetResult, bytes: u64, read_bytes: &Counter) -> Result<Bytes, Fault> {
    let wrong = |got: u64| Fault::damaged(format!("{bytes} bytes expected, {got} came"), true);
    // As a stream, a file comes in pieces of 8 KiB, each by a turn of another thread.
    if matches!(found.payload, GetResultPayload::File(..)) {
        let len = found.range.end - found.range.start;
        if len != bytes {
            return Err(wrong(len));
        }
        let body = found.bytes().await.map_err(Fault::of)?;
        read_bytes.inc_by(body.len() as u64);
        return if body.len() as u64 == bytes { Ok(body) } else { Err(wrong(body.len() as u64)) };
    }
    let mut chunks = found.into_stream();
    let mut body = Body::default();
    while let Some(chunk) = chunks.next().await {
        let chunk = chunk.map_err(Fault::of)?;
        read_bytes.inc_by(chunk.len() as u64);
        let got = body.len() + chunk.len() as u64;
        if got > bytes {
            return Err(wrong(got));
        }
        body.push(chunk, bytes);
    }
    if body.len() != bytes {
        return Err(wrong(body.len()));
    }
    Ok(body.into_bytes())
}

/// A body that arrives in pieces; one that comes in one piece is not copied.
#[derive(Debug, Default)]
struct Body {
    first: Option<Bytes>,
    rest: BytesMut,
}

impl Body {
    fn len(&self) -> u64 {
        (self.first.as_ref().map_or(0, Bytes::len) + self.rest.len()) as u64
    }

    fn push(&mut self, chunk: Bytes, bytes: u64) {
        if self.first.is_none() && self.rest.is_empty() {
            self.first = Some(chunk);
            return;
        }
        if let Some(first) = self.first.take() {
            self.rest.reserve(usize::try_from(bytes).unwrap_or(0));
            self.rest.extend_from_slice(&first);
        }
        self.rest.extend_from_slice(&chunk);
    }

    fn into_bytes(self) -> Bytes {
        self.first.unwrap_or_else(|| self.rest.freeze())
    }
}

/// The bytes of a body.
pub(super) fn length(body: &[Bytes]) -> u64 {
    body.iter().map(|piece| piece.len() as u64).sum()
}

/// Cuts a body into parts of `part_bytes`, the last one shorter, without copying.
pub(super) fn parts(body: Vec<Bytes>, part_bytes: usize) -> Vec<PutPayload> {
    let mut parts = Vec::new();
    let mut part: Vec<Bytes> = Vec::new();
    let mut room = part_bytes;
    for mut piece in body {
        while !piece.is_empty() {
            let taken = piece.split_to(piece.len().min(room));
            room -= taken.len();
            part.push(taken);
            if room == 0 {
                parts.push(PutPayload::from_iter(part.drain(..)));
                room = part_bytes;
            }
        }
    }
    if !part.is_empty() {
        parts.push(PutPayload::from_iter(part));
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_full_but_the_last_and_make_the_body_again() {
        let pieces: [&'static [u8]; 5] = [b"abc", b"", b"0123456789", b"x", b"ABCDEFG"];
        let body: Vec<Bytes> = pieces.map(Bytes::from_static).into();
        let whole: Vec<u8> = body.concat();
        let parts = parts(body, 4);
        let lengths: Vec<_> = parts.iter().map(PutPayload::content_length).collect();
        assert_eq!(lengths, [4, 4, 4, 4, 4, 1]);
        let again: Vec<u8> = parts.iter().flat_map(|part| Bytes::from(part.clone())).collect();
        assert_eq!(again, whole);
    }
}

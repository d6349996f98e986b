//! The bodies of frames. Each is read to its last byte or refused, and what is read is written as the
//! same bytes again; nothing is made that is larger than the body it came from.
//!
//! The layouts are drawn in docs/formats.md. Numbers of tiers, reasons, outcomes and codes are those
//! of the gRPC contract.

use bytes::Bytes;

use super::frame::{Broken, Kind, push};

/// Bytes of an id of a session, a lease or an instance; all zero is none.
pub(crate) const ID_BYTES: usize = 16;
/// Bytes of a namespace's id.
pub(crate) const NAMESPACE_BYTES: usize = 32;

/// Bytes of a [`Place`].
pub(crate) const PLACE_BYTES: usize = 24;

/// Flag of a get: later blocks are of no use after a miss.
pub(crate) const STOP_AT_MISS: u8 = 1;
/// Flag of an offer: results wait for nvme.
pub(crate) const DURABLE: u8 = 1;

/// Who a client is and what it can take.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Hello {
    /// The newest version it speaks.
    pub(crate) version: u16,
    /// Bytes of payload that it may be sent to begin with.
    pub(crate) credit: u32,
    /// The session that owns what the connection puts; zero for none.
    pub(crate) session: [u8; ID_BYTES],
    /// Who it is; empty for none.
    pub(crate) token: Bytes,
}

/// What a server answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Welcome {
    /// The version that both speak from now on.
    pub(crate) version: u16,
    /// Requests that may be under way at a time.
    pub(crate) requests_max: u16,
    /// The longest payload of one frame, in bytes.
    pub(crate) payload_bytes_max: u32,
    /// What the member list says of this server.
    pub(crate) instance: [u8; ID_BYTES],
}

/// Asks for blocks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Get {
    pub(crate) namespace: [u8; NAMESPACE_BYTES],
    /// A lease of the connection's session; zero for none.
    pub(crate) lease: [u8; ID_BYTES],
    /// 0 takes the default.
    pub(crate) deadline_ms: u32,
    /// Indices into the declared parts; empty: all.
    pub(crate) parts: Vec<u32>,
    /// Packed.
    pub(crate) hashes: Bytes,
}

/// Offers blocks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Offer {
    pub(crate) namespace: [u8; NAMESPACE_BYTES],
    /// Empty at the root.
    pub(crate) parent: Bytes,
    /// Packed.
    pub(crate) hashes: Bytes,
    /// Indices into the declared parts; empty: all.
    pub(crate) parts: Vec<u32>,
    /// One for each (block, part).
    pub(crate) checksums: Vec<u64>,
    /// One for each block of an opaque namespace.
    pub(crate) lengths: Vec<u32>,
}

/// Where a payload belongs: the body of data and blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) position: u32,
    pub(crate) part: u32,
    pub(crate) offset: u32,
    /// Bytes of the whole part.
    pub(crate) part_bytes: u32,
    /// Of the whole part.
    pub(crate) checksum: u64,
}

/// What a server wants of an offer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Want {
    /// When to offer again what was refused; 0 if nothing was.
    pub(crate) retry_after_ms: u32,
    /// Positions, each from the first to before the second.
    pub(crate) ranges: Vec<(u32, u32)>,
}

/// Why a request or a connection ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Refused {
    /// A gRPC code.
    pub(crate) code: u32,
    /// 0 if it does not say.
    pub(crate) retry_after_ms: u32,
    pub(crate) text: String,
}

/// Takes a body apart.
struct Reader {
    kind: Kind,
    rest: Bytes,
}

impl Reader {
    fn new(kind: Kind, body: Bytes) -> Self {
        Self { kind, rest: body }
    }

    fn broken(&self, what: &'static str) -> Broken {
        Broken::Body { kind: self.kind, what }
    }

    fn take(&mut self, bytes: usize) -> Result<Bytes, Broken> {
        if bytes > self.rest.len() {
            return Err(self.broken("it is cut"));
        }
        Ok(self.rest.split_to(bytes))
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Broken> {
        let bytes = self.take(N)?;
        <[u8; N]>::try_from(bytes.as_ref()).map_err(|_other| self.broken("it is cut"))
    }

    fn u16(&mut self) -> Result<u16, Broken> {
        self.array().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Result<u32, Broken> {
        self.array().map(u32::from_le_bytes)
    }

    /// A count of things that take so many bytes each and are still to come.
    fn count(&mut self, each: usize) -> Result<usize, Broken> {
        let count = usize::try_from(self.u32()?).unwrap_or(usize::MAX);
        if count.saturating_mul(each) > self.rest.len() {
            return Err(self.broken("it counts more than it has"));
        }
        Ok(count)
    }

    fn u32s(&mut self, count: usize) -> Result<Vec<u32>, Broken> {
        let bytes = self.take(count.saturating_mul(4))?;
        Ok(bytes.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)).collect())
    }

    fn u64s(&mut self, count: usize) -> Result<Vec<u64>, Broken> {
        let bytes = self.take(count.saturating_mul(8))?;
        Ok(bytes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)).collect())
    }

    fn end(self) -> Result<(), Broken> {
        if self.rest.is_empty() { Ok(()) } else { Err(self.broken("it has bytes behind its end")) }
    }
}

fn put_u32s(out: &mut Vec<u8>, numbers: &[u32]) {
    numbers.iter().for_each(|number| out.extend_from_slice(&number.to_le_bytes()));
}

fn put_count(out: &mut Vec<u8>, count: usize) {
    out.extend_from_slice(&u32::try_from(count).unwrap_or(u32::MAX).to_le_bytes());
}

impl Hello {
    pub(crate) fn read(body: Bytes) -> Result<Self, Broken> {
        let mut reader = Reader::new(Kind::Hello, body);
        let (version, token_bytes) = (reader.u16()?, reader.u16()?);
        let (credit, session) = (reader.u32()?, reader.array()?);
        let token = reader.take(usize::from(token_bytes))?;
        reader.end()?;
        Ok(Self { version, credit, session, token })
    }

    pub(crate) fn push(&self, out: &mut Vec<u8>) {
        push(out, (Kind::Hello, 0), 0, 0, |body| {
            let token_bytes = u16::try_from(self.token.len()).unwrap_or(u16::MAX);
            body.extend_from_slice(&self.version.to_le_bytes());
            body.extend_from_slice(&token_bytes.to_le_bytes());
            put_u32s(body, &[self.credit]);
            body.extend_from_slice(&self.session);
            body.extend_from_slice(&self.token);
        });
    }
}

impl Welcome {
    pub(crate) fn read(body: Bytes) -> Result<Self, Broken> {
        let mut reader = Reader::new(Kind::Welcome, body);
        let (version, requests_max) = (reader.u16()?, reader.u16()?);
        let (payload_bytes_max, instance) = (reader.u32()?, reader.array()?);
        reader.end()?;
        Ok(Self { version, requests_max, payload_bytes_max, instance })
    }

    pub(crate) fn push(&self, out: &mut Vec<u8>) {
        push(out, (Kind::Welcome, 0), 0, 0, |body| {
            body.extend_from_slice(&self.version.to_le_bytes());
            body.extend_from_slice(&self.requests_max.to_le_bytes());
            put_u32s(body, &[self.payload_bytes_max]);
            body.extend_from_slice(&self.instance);
        });
    }
}

impl Get {
    pub(crate) fn read(body: Bytes) -> Result<Self, Broken> {
        let mut reader = Reader::new(Kind::Get, body);
        let (namespace, lease) = (reader.array()?, reader.array()?);
        let deadline_ms = reader.u32()?;
        let parts = reader.count(4)?;
        let parts = reader.u32s(parts)?;
        Ok(Self { namespace, lease, deadline_ms, parts, hashes: reader.rest })
    }

    pub(crate) fn push(&self, out: &mut Vec<u8>, request: u32, flags: u8) {
        push(out, (Kind::Get, flags), request, 0, |body| {
            body.extend_from_slice(&self.namespace);
            body.extend_from_slice(&self.lease);
            put_u32s(body, &[self.deadline_ms]);
            put_count(body, self.parts.len());
            put_u32s(body, &self.parts);
            body.extend_from_slice(&self.hashes);
        });
    }
}

impl Offer {
    pub(crate) fn read(body: Bytes) -> Result<Self, Broken> {
        let mut reader = Reader::new(Kind::Offer, body);
        let namespace = reader.array()?;
        let (parent, hashes) = (reader.count(1)?, reader.count(1)?);
        let (parts, checksums, lengths) = (reader.count(4)?, reader.count(8)?, reader.count(4)?);
        let read = Self {
            namespace,
            parent: reader.take(parent)?,
            hashes: reader.take(hashes)?,
            parts: reader.u32s(parts)?,
            checksums: reader.u64s(checksums)?,
            lengths: reader.u32s(lengths)?,
        };
        reader.end()?;
        Ok(read)
    }

    pub(crate) fn push(&self, out: &mut Vec<u8>, request: u32, flags: u8) {
        push(out, (Kind::Offer, flags), request, 0, |body| {
            body.extend_from_slice(&self.namespace);
            let counts = [self.parent.len(), self.hashes.len(), self.parts.len()];
            counts.into_iter().for_each(|count| put_count(body, count));
            put_count(body, self.checksums.len());
            put_count(body, self.lengths.len());
            body.extend_from_slice(&self.parent);
            body.extend_from_slice(&self.hashes);
            put_u32s(body, &self.parts);
            for checksum in &self.checksums {
                body.extend_from_slice(&checksum.to_le_bytes());
            }
            put_u32s(body, &self.lengths);
        });
    }
}

impl Place {
    /// Reads a body, of which every one is right.
    pub(crate) fn read(body: &[u8; PLACE_BYTES]) -> Self {
        let [p0, p1, p2, p3, t0, t1, t2, t3, o0, o1, o2, o3, b0, b1, b2, b3, checksum @ ..] = *body;
        Self {
            position: u32::from_le_bytes([p0, p1, p2, p3]),
            part: u32::from_le_bytes([t0, t1, t2, t3]),
            offset: u32::from_le_bytes([o0, o1, o2, o3]),
            part_bytes: u32::from_le_bytes([b0, b1, b2, b3]),
            checksum: u64::from_le_bytes(checksum),
        }
    }

    /// Appends the frame up to its payload; `flags` of a block are its tier.
    pub(crate) fn push(
        &self,
        out: &mut Vec<u8>,
        (kind, flags): (Kind, u8),
        request: u32,
        payload_bytes: u32,
    ) {
        push(out, (kind, flags), request, payload_bytes, |body| self.write(body));
    }

    /// Appends it as what a body begins with.
    pub(crate) fn write(&self, body: &mut Vec<u8>) {
        put_u32s(body, &[self.position, self.part, self.offset, self.part_bytes]);
        body.extend_from_slice(&self.checksum.to_le_bytes());
    }
}

/// Reads the positions of a miss; why is in its flags.
pub(crate) fn read_miss(body: Bytes) -> Result<(u32, u32), Broken> {
    let mut reader = Reader::new(Kind::Miss, body);
    let range = (reader.u32()?, reader.u32()?);
    reader.end()?;
    Ok(range)
}

/// Appends a miss.
pub(crate) fn push_miss(out: &mut Vec<u8>, request: u32, (start, end): (u32, u32), reason: u8) {
    push(out, (Kind::Miss, reason), request, 0, |body| put_u32s(body, &[start, end]));
}

/// Reads how many more bytes may be sent.
pub(crate) fn read_credit(body: Bytes) -> Result<u32, Broken> {
    let mut reader = Reader::new(Kind::Credit, body);
    let bytes = reader.u32()?;
    reader.end()?;
    Ok(bytes)
}

/// Appends a credit.
pub(crate) fn push_credit(out: &mut Vec<u8>, bytes: u32) {
    push(out, (Kind::Credit, 0), 0, 0, |body| put_u32s(body, &[bytes]));
}

impl Want {
    pub(crate) fn read(body: Bytes) -> Result<Self, Broken> {
        let mut reader = Reader::new(Kind::Want, body);
        let retry_after_ms = reader.u32()?;
        if !reader.rest.len().is_multiple_of(8) {
            return Err(reader.broken("a range takes 8 bytes"));
        }
        let words = reader.u32s(reader.rest.len() / 4)?;
        let ranges = words.as_chunks::<2>().0.iter().map(|[start, end]| (*start, *end)).collect();
        Ok(Self { retry_after_ms, ranges })
    }

    pub(crate) fn push(&self, out: &mut Vec<u8>, request: u32) {
        push(out, (Kind::Want, 0), request, 0, |body| {
            put_u32s(body, &[self.retry_after_ms]);
            self.ranges.iter().for_each(|(start, end)| put_u32s(body, &[*start, *end]));
        });
    }
}

/// Reads results: from the first position to before the second, and the outcome.
pub(crate) fn read_results(body: Bytes) -> Result<Vec<(u32, u32, u32)>, Broken> {
    let mut reader = Reader::new(Kind::Results, body);
    if !reader.rest.len().is_multiple_of(12) {
        return Err(reader.broken("a result takes 12 bytes"));
    }
    let words = reader.u32s(reader.rest.len() / 4)?;
    Ok(words
        .as_chunks::<3>()
        .0
        .iter()
        .map(|[start, end, outcome]| (*start, *end, *outcome))
        .collect())
}

/// Appends results.
pub(crate) fn push_results(
    out: &mut Vec<u8>,
    request: u32,
    results: impl Iterator<Item = (u32, u32, u32)>,
) {
    push(out, (Kind::Results, 0), request, 0, |body| {
        results.for_each(|(start, end, outcome)| put_u32s(body, &[start, end, outcome]));
    });
}

impl Refused {
    pub(crate) fn read(body: Bytes) -> Result<Self, Broken> {
        let mut reader = Reader::new(Kind::Refused, body);
        let (code, retry_after_ms) = (reader.u32()?, reader.u32()?);
        let text = String::from_utf8(reader.rest.to_vec());
        let text = text.map_err(|_other| reader.broken("its text is not UTF-8"))?;
        Ok(Self { code, retry_after_ms, text })
    }

    pub(crate) fn push(&self, out: &mut Vec<u8>, request: u32) {
        push(out, (Kind::Refused, 0), request, 0, |body| {
            put_u32s(body, &[self.code, self.retry_after_ms]);
            body.extend_from_slice(self.text.as_bytes());
        });
    }
}

//! Frames against inputs of all kinds: those of the corpus, and as many seeded changes of them as there
//! is time for.
//!
//! The corpus is in `corpus/NAME` beside this file: streams of frames. What is `good-` must be read to
//! its end, what is `bad-` must be refused; `good-v1` stays as it is. To write the made ones again on
//! purpose, while version 1 is not released:
//!
//! ```text
//! KVSTRATA_REWRITE_CORPUS=1 cargo test -p kvstrata --lib bulk::fuzz_tests
//! ```
//! For longer than a moment, with `KVSTRATA_FUZZ_SEED` for other changes:
//!
//! ```text
//! KVSTRATA_FUZZ_SECONDS=600 cargo test -p kvstrata --lib changed_frames -- --nocapture
//! ```

use bytes::Bytes;
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use super::{
    body::{
        Get, Hello, Offer, Place, Refused, Want, Welcome, push_credit, push_miss, push_results,
        read_credit, read_miss, read_results,
    },
    frame::{Broken, HEADER_BYTES, Header, Kind, VERSION, push},
    shared_body::{DAMAGED, HAS_REGIONS, Regions, Spot, Staged, push_number, read_number},
};
use crate::corpus_tests::{Changes, Corpus};

/// Reads one frame; what is read is written as the same bytes again.
fn read_frame(stream: &[u8]) -> Result<usize, Broken> {
    let cut = Broken::Body { kind: Kind::End, what: "the stream is cut" };
    let Some(header) = stream.first_chunk::<HEADER_BYTES>() else { return Err(cut) };
    let header = Header::read(header)?;
    let end = HEADER_BYTES + header.body_bytes;
    let Some(body) = stream.get(HEADER_BYTES..end) else { return Err(cut) };
    header.verify(body)?;
    let again = write_again(&header, Bytes::copy_from_slice(body))?;
    assert_eq!(again, stream[..end], "there is one way to write it");
    let payload = usize::try_from(header.payload_bytes).unwrap();
    if stream.len() < end + payload {
        return Err(cut);
    }
    Ok(end + payload)
}

fn write_again(header: &Header, body: Bytes) -> Result<Vec<u8>, Broken> {
    let (request, flags) = (header.request, header.flags);
    let (mut out, bytes) = (Vec::new(), body.len());
    let words = |count: usize| assert!(count * 4 <= bytes, "no more is made than there is");
    match header.kind {
        Kind::Hello => Hello::read(body)?.push(&mut out),
        Kind::Welcome => Welcome::read(body)?.push(&mut out),
        Kind::Get => {
            let get = Get::read(body)?;
            words(get.parts.capacity());
            get.push(&mut out, request, flags);
        }
        Kind::Offer => {
            let offer = Offer::read(body)?;
            words(offer.parts.capacity() + 2 * offer.checksums.capacity());
            offer.push(&mut out, request, flags);
        }
        Kind::Data | Kind::Block => {
            let place = Place::read(body.as_ref().try_into().unwrap());
            place.push(&mut out, (header.kind, flags), request, header.payload_bytes);
        }
        Kind::Miss => push_miss(&mut out, request, read_miss(body)?, flags),
        Kind::Credit => push_credit(&mut out, read_credit(body)?),
        Kind::Want => Want::read(body)?.push(&mut out, request),
        Kind::Results => push_results(&mut out, request, read_results(body)?.into_iter()),
        Kind::Refused => Refused::read(body)?.push(&mut out, request),
        Kind::Map | Kind::Release => {
            let number = read_number(body.as_ref().try_into().unwrap());
            push_number(&mut out, (header.kind, flags), request, number);
        }
        Kind::Staged => Staged::read(body.as_ref().try_into().unwrap()).push(&mut out, request),
        Kind::Pinned => {
            Spot::read(body.as_ref().try_into().unwrap()).push(&mut out, flags, request);
        }
        Kind::Arena => {
            let regions = Regions::read(&body)?;
            words(2 * regions.lengths.capacity());
            regions.push(&mut out, request);
        }
        Kind::Finish | Kind::Cancel | Kind::End | Kind::Taken => {
            push(&mut out, (header.kind, flags), request, 0, |_body| {});
        }
    }
    // Fields that a kind does not use are not kept.
    let unused = match header.kind {
        Kind::Hello | Kind::Welcome | Kind::Credit => request != 0 || flags != 0,
        Kind::Want | Kind::Results | Kind::Refused | Kind::Staged | Kind::Arena => flags != 0,
        _ => false,
    };
    if unused { Err(Broken::Unexpected(header.kind)) } else { Ok(out) }
}

/// Reads all frames of a stream.
fn read_stream(mut stream: &[u8]) -> Result<(), Broken> {
    while !stream.is_empty() {
        let read = read_frame(stream)?;
        stream = &stream[read..];
    }
    Ok(())
}

/// Makes the checksum of the first frame right again.
fn reseal(stream: &mut [u8]) {
    let Some(header) = stream.first_chunk::<HEADER_BYTES>() else { return };
    let body_bytes = u32::from_le_bytes(header[8..12].try_into().unwrap());
    let end = HEADER_BYTES.saturating_add(usize::try_from(body_bytes).unwrap());
    let Some(body) = stream.get(HEADER_BYTES..end) else { return };
    let checksum = xxh3_64_with_seed(body, xxh3_64(&header[..16]));
    stream[16..24].copy_from_slice(&checksum.to_le_bytes());
}

fn corpus() -> Corpus {
    Corpus::of("bulk")
}

fn client_frames() -> Vec<Vec<u8>> {
    let (session, token) = ([3; 16], Bytes::from_static(b"token"));
    let bytes = |byte: u8, count: usize| Bytes::from(vec![byte; count]);
    let place = Place { position: 1, part: 0, offset: 0, part_bytes: 5, checksum: 99 };
    let get = Get {
        namespace: [1; 32],
        lease: [2; 16],
        deadline_ms: 5000,
        parts: vec![0, 2],
        hashes: bytes(7, 96),
    };
    let offer = Offer {
        namespace: [1; 32],
        parent: bytes(6, 32),
        hashes: bytes(7, 64),
        parts: vec![0],
        checksums: vec![11, 12],
        lengths: vec![5, 6],
    };
    let write = |write: &dyn Fn(&mut Vec<u8>)| {
        let mut out = Vec::new();
        write(&mut out);
        out
    };
    vec![
        write(&|out| {
            Hello { version: VERSION, credit: 1 << 24, session, token: token.clone() }.push(out);
        }),
        write(&|out| get.push(out, 1, 1)),
        write(&|out| offer.push(out, 2, 1)),
        write(&|out| {
            place.push(out, (Kind::Data, 0), 2, 5);
            out.extend(b"bytes");
        }),
        write(&|out| push(out, (Kind::Finish, 0), 2, 0, |_body| {})),
        write(&|out| push(out, (Kind::Cancel, 0), 1, 0, |_body| {})),
        write(&|out| push_credit(out, 1 << 20)),
        write(&|out| push_number(out, (Kind::Map, HAS_REGIONS), 3, 2 << 20)),
        write(&|out| Staged { place, bytes: 5, offset: 1 << 20 }.push(out, 2)),
        write(&|out| push_number(out, (Kind::Release, DAMAGED), 0, 77)),
    ]
}

fn server_frames() -> Vec<Vec<u8>> {
    let place = Place { position: 1, part: 0, offset: 0, part_bytes: 5, checksum: 99 };
    let write = |write: &dyn Fn(&mut Vec<u8>)| {
        let mut out = Vec::new();
        write(&mut out);
        out
    };
    vec![
        write(&|out| {
            let (requests_max, payload_bytes_max) = (16, 1 << 22);
            let instance = [9; 16];
            Welcome { version: VERSION, requests_max, payload_bytes_max, instance }.push(out);
        }),
        write(&|out| {
            place.push(out, (Kind::Block, 1), 1, 5);
            out.extend(b"bytes");
        }),
        write(&|out| push_miss(out, 1, (2, 9), 3)),
        write(&|out| push(out, (Kind::End, 0), 1, 0, |_body| {})),
        write(&|out| Want { retry_after_ms: 5, ranges: vec![(0, 1), (3, 4)] }.push(out, 2)),
        write(&|out| push_results(out, 2, [(0, 1, 1), (3, 4, 6)].into_iter())),
        write(&|out| {
            Refused { code: 8, retry_after_ms: 100, text: "no room".into() }.push(out, 2);
        }),
        write(&|out| {
            Regions { pinned_bytes_max: 8 << 20, lengths: vec![1 << 30, 1 << 26] }.push(out, 3);
        }),
        write(&|out| Spot { place, pin: 77, region: 1, offset: 1 << 20 }.push(out, 1, 1)),
        write(&|out| push(out, (Kind::Taken, 0), 2, 0, |_body| {})),
    ]
}

#[test]
fn the_corpus_reads_as_its_names_say() {
    corpus().rewrite(made);
    for (name, stream) in corpus().files() {
        let read = read_stream(&stream);
        assert_eq!(read.is_ok(), name.starts_with("good-"), "{name}: {read:?}");
    }
}

#[test]
fn what_version_1_wrote_is_what_this_build_writes() {
    for (name, frames) in [("good-v1-client", client_frames()), ("good-v1-server", server_frames())]
    {
        assert_eq!(corpus().file(name), frames.concat(), "{name}");
    }
}

fn made() -> Vec<(&'static str, Vec<u8>)> {
    let (client, server) = (client_frames(), server_frames());
    let mut counts = client[1].clone();
    counts[HEADER_BYTES + 52..HEADER_BYTES + 56].fill(0xff);
    reseal(&mut counts);
    let mut behind = client[6].clone();
    behind[8] = 5;
    behind.push(0);
    let mut wrong = server[1].clone();
    wrong[30] ^= 1;
    let mut kind = server[3].clone();
    kind[2] = 99;
    reseal(&mut kind);
    vec![
        ("good-v1-client", client.concat()),
        ("good-v1-server", server.concat()),
        ("good-nothing", Vec::new()),
        ("bad-http", b"GET / HTTP/1.1\r\nHost: kvstrata\r\n\r\n".to_vec()),
        ("bad-counts-more-than-it-has", counts),
        ("bad-length-of-a-credit", behind),
        ("bad-checksum", wrong),
        ("bad-kind", kind),
        ("bad-cut", server.concat()[..40].to_vec()),
    ]
}

#[test]
fn changed_frames_break_nothing() {
    let mut pool: Vec<_> = client_frames().into_iter().chain(server_frames()).collect();
    pool.extend(corpus().files().into_iter().map(|(_, bytes)| bytes));
    let mut changes = Changes::of(pool);
    while let Some(mut stream) = changes.next() {
        if changes.mutator.chance(750) {
            reseal(&mut stream);
        }
        if read_frame(&stream).is_ok() {
            changes.note_read(stream);
        }
    }
}

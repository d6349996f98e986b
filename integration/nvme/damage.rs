//! Damage on the disk while the server is down: it costs what it hit, and nothing else.

use std::{
    fs,
    io::{Read, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
};

use kvstrata_proto::v1::MissReason;

use super::{Home, ON_NVME, count_right, misses, store};
use crate::wire::{Wire, namespace, payload};

/// Blocks that were found to be damaged on nvme.
const CORRUPT: &str = "kvstrata_corrupt_blocks_total{tier=\"nvme\"}";

/// Where the bytes of a block are: in which file and at which offset.
fn find(home: &Home, number: u64) -> (PathBuf, usize) {
    let wanted = payload(number);
    for path in home.segments() {
        let bytes = fs::read(&path).unwrap();
        // Payload starts at a page.
        let mut pages = bytes.chunks(4096).enumerate();
        if let Some((page, _)) = pages.find(|(_, page)| wanted.starts_with(page)) {
            return (path, page * 4096);
        }
    }
    panic!("block {number} is in no segment");
}

fn flip_bit(path: &Path, offset: usize) {
    let mut file = fs::File::options().read(true).write(true).open(path).unwrap();
    let at = SeekFrom::Start(offset as u64);
    let mut byte = [0];
    file.seek(at).unwrap();
    file.read_exact(&mut byte).unwrap();
    file.seek(at).unwrap();
    file.write_all(&[byte[0] ^ 4]).unwrap();
}

#[tokio::test]
async fn a_flipped_bit_costs_exactly_its_block_for_good() {
    let (home, blocks, hit) = (Home::new(), 200, 77);
    let numbers: Vec<u64> = (0..blocks).collect();
    let server = home.server().start().await;
    let mut wire = Wire::connect(&server, namespace("m")).await;
    store(&mut wire, 0..blocks, true).await;
    drop(wire);
    server.stop(&[]).await;
    let (path, offset) = find(&home, hit);
    flip_bit(&path, offset + 1234);

    let server = home.server().start().await;
    let mut wire = Wire::connect(&server, namespace("m")).await;
    assert_eq!(wire.lookup(0..blocks).await.prefix_blocks, 200, "a start reads no payload");
    assert_eq!(server.metric(CORRUPT).await, 0.0);
    assert_eq!(misses(&mut wire, &numbers).await, [(hit, MissReason::Corrupt)]);
    assert_eq!(server.metric(CORRUPT).await, 1.0);
    assert_eq!(wire.lookup(0..blocks).await.prefix_blocks, 77, "it is not offered again");
    assert_eq!(misses(&mut wire, &numbers).await, [(hit, MissReason::Absent)]);
    assert_eq!(count_right(&mut wire, 0..blocks).await, 199);
    server.kill();

    let server = home.server().start().await;
    let mut wire = Wire::connect(&server, namespace("m")).await;
    assert_eq!(server.metric(ON_NVME).await, 199.0, "also after a kill");
    assert_eq!(wire.lookup([hit]).await.prefix_blocks, 0);
    assert_eq!(count_right(&mut wire, 0..blocks).await, 199);
    store(&mut wire, [hit], true).await;
    server.kill();
    let server = home.server().start().await;
    let mut wire = Wire::connect(&server, namespace("m")).await;
    assert_eq!(count_right(&mut wire, 0..blocks).await, 200, "put again, it is back");
}

#[tokio::test]
async fn bad_segment_files_cost_themselves() {
    let (home, blocks) = (Home::new(), 1000);
    let builder = || home.server().set("nvme.segment_bytes", "1MiB");
    let server = builder().start().await;
    let mut wire = Wire::connect(&server, namespace("m")).await;
    store(&mut wire, 0..blocks, true).await;
    drop(wire);
    server.stop(&[]).await;
    let segments = home.segments();
    assert!(segments.len() >= 8, "{segments:?}");
    let bytes = |path: &Path| fs::metadata(path).unwrap().len();
    let half = bytes(&segments[1]) / 2;
    fs::File::options().write(true).open(&segments[1]).unwrap().set_len(half).unwrap();
    fs::write(&segments[3], vec![0xA7; usize::try_from(bytes(&segments[3])).unwrap()]).unwrap();
    fs::remove_file(&segments[5]).unwrap();
    let folder = segments[0].parent().unwrap();
    // Numbers that no segment of ours can have, the largest of all among them, and one that may.
    for name in ["ffffffffffffffff.seg", "7fffffffffffffff.seg", "0000000000001000.seg"] {
        fs::write(folder.join(name), b"not a segment").unwrap();
    }
    fs::write(folder.join("notes.txt"), b"of somebody else").unwrap();

    let server = builder().start().await;
    let mut wire = Wire::connect(&server, namespace("m")).await;
    let right = count_right(&mut wire, 0..blocks).await;
    // At most 127 blocks with their headers fit into a segment.
    assert!((1000 - 3 * 127..1000).contains(&right), "{right} of {blocks}");
    // And it goes on.
    store(&mut wire, blocks..2 * blocks, true).await;
    server.kill();
    assert_eq!(fs::read(folder.join("notes.txt")).unwrap(), b"of somebody else");
    let server = builder().start().await;
    let mut wire = Wire::connect(&server, namespace("m")).await;
    assert_eq!(count_right(&mut wire, blocks..2 * blocks).await, 1000);
    assert_eq!(count_right(&mut wire, 0..blocks).await, right);
}

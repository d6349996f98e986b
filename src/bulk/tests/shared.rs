//! Shared memory with peers that behave, and with such that do not.

use std::{
    os::fd::OwnedFd,
    sync::atomic::{AtomicBool, Ordering},
};

use kvstrata_tiers::{error::ErrorKind, shared::Room};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use tokio::net::UnixStream;

use super::*;
use crate::{
    bulk::shared::Sharing,
    bulk::shared_body::{BY_PLACE, DAMAGED, Regions, Spot, Staged, push_number},
    limits::SHM_REGIONS_MAX,
    shm::{
        Arena,
        map::{Mapping, Staging},
        socket,
    },
};

const UNSUPPORTED: u32 = 12;
const CORRUPT: u32 = 7;
const STORED: u32 = 1;
/// What one client may have pinned of the 16 MiB of the stage, in blocks; two of them leave nothing.
const PINNED_MAX: usize = 8;

/// A stage that shares its memory.
fn sharing() -> Stage {
    let mut stage = Stage::new();
    let arena = {
        let node = stage.node();
        Arena::new(&node.stack, node.metrics.shared_pinned_bytes.clone()).unwrap()
    };
    Arc::get_mut(&mut stage.bulk).unwrap().arena = Some(Arc::new(arena));
    stage
}

/// A peer with a mapping of the arena.
struct Reader {
    peer: Peer,
    regions: Vec<Mapping>,
}

impl Stage {
    /// A client on this host, which asks to map the arena with this staging.
    async fn ask(&self, staging: Option<OwnedFd>, bytes: u64) -> (Peer, Arc<socket::Files>) {
        let (theirs, ours) = UnixStream::pair().unwrap();
        let (from, to, files) = socket::split(ours);
        let serving =
            connection::run(Arc::clone(&self.bulk), from, to, (Via::UnixSocket, Some(files)));
        self.node().tasks.spawn("bulk", serving);
        let (from, to, files) = socket::split(theirs);
        let peer = Peer { from: Input::new(Box::new(from)), to: Box::new(to) };
        let mut peer = self.greet(peer, u32::MAX).await;
        files.expect(SHM_REGIONS_MAX);
        files.send(staging.into_iter().collect());
        peer.say(|out| push_number(out, (Kind::Map, 0), 1, bytes)).await;
        (peer, files)
    }

    async fn mapped(&self, staging: Option<&Staging>) -> Reader {
        let file = staging.map(|staging| staging.file().try_clone().unwrap());
        let bytes = staging.map_or(0, |staging| staging.len() as u64);
        let (mut peer, files) = self.ask(file, bytes).await;
        let (header, body) = peer.hear().await.unwrap();
        assert_eq!(header.kind, Kind::Arena, "{body:?}");
        let told = Regions::read(&body).unwrap();
        assert_eq!(told.pinned_bytes_max, PINNED_MAX as u64 * u64::from(BLOCK_BYTES));
        let come = files.take();
        assert_eq!(come.len(), told.lengths.len());
        let regions = come.iter().zip(&told.lengths);
        let regions = regions.map(|(file, bytes)| Mapping::new(file, *bytes).unwrap()).collect();
        Reader { peer, regions }
    }

    fn pinned(&self) -> usize {
        let bytes = self.node().metrics.shared_pinned_bytes.get();
        usize::try_from(bytes).unwrap() / BLOCK_BYTES as usize
    }

    async fn wait_unpinned(&self) {
        while self.pinned() > 0 {
            sleep(Duration::from_millis(1)).await;
        }
    }
}

impl Reader {
    async fn ask(&mut self, stage: &Stage, numbers: Range<u64>) {
        self.peer.say(|out| stage.get(numbers, 0).push(out, 9, BY_PLACE)).await;
    }

    /// The next place.
    async fn spot(&mut self) -> Spot {
        let (header, body) = self.peer.hear().await.unwrap();
        assert_eq!(header.kind, Kind::Pinned, "{body:?}");
        Spot::read(body.as_ref().try_into().unwrap())
    }

    /// What lies there.
    fn bytes(&self, spot: &Spot) -> Vec<u8> {
        let mut bytes = vec![0; spot.place.part_bytes as usize];
        let offset = usize::try_from(spot.offset).unwrap();
        let region = &self.regions[spot.region as usize];
        region.bytes(offset, bytes.len()).unwrap().copy_to(Room::from(bytes.as_mut_slice()));
        bytes
    }

    async fn release(&mut self, through: u64, flags: u8) {
        self.peer.say(|out| push_number(out, (Kind::Release, flags), 0, through)).await;
    }
}

#[tokio::test]
async fn clients_that_never_let_go_hold_a_bounded_share_and_others_are_sent_what_they_ask_for() {
    let stage = sharing();
    stage.put(0..12).await;
    let mut readers = Vec::new();
    for holding in 1..=2 {
        let mut reader = stage.mapped(None).await;
        reader.ask(&stage, 0..12).await;
        for number in 0..PINNED_MAX as u64 {
            let spot = reader.spot().await;
            assert_eq!((spot.pin, reader.bytes(&spot)), (number + 1, payload(number)));
        }
        let more = timeout(Duration::from_millis(50), reader.peer.hear()).await;
        assert!(more.is_err(), "it must let go first");
        assert_eq!(stage.pinned(), holding * PINNED_MAX);
        readers.push(reader);
    }
    let mut other = stage.mapped(None).await;
    other.ask(&stage, 0..12).await;
    let expected: Vec<_> = (0..12).map(|n| (u32::try_from(n).unwrap(), payload(n))).collect();
    assert_eq!(other.peer.blocks().await, expected, "as payload");
    assert_eq!(stage.put(12..20).await, [(0, 8, STORED)]);

    let mut first = readers.swap_remove(0);
    first.release(PINNED_MAX as u64, 0).await;
    for number in PINNED_MAX as u64..12 {
        let spot = first.spot().await;
        assert_eq!(first.bytes(&spot), payload(number));
    }
    assert_eq!(first.peer.hear().await.unwrap().0.kind, Kind::End);
    assert_eq!(stage.pinned(), PINNED_MAX + 4);
    drop((first, readers, other));
    timeout(Duration::from_secs(10), stage.wait_unpinned()).await.expect("gone with its client");
    assert!(stage.is_clean().await);
}

#[tokio::test]
async fn what_was_shown_stays_where_it_is_whatever_becomes_of_its_block() {
    let stage = sharing();
    stage.put(0..1).await;
    let mut reader = stage.mapped(None).await;
    reader.ask(&stage, 0..1).await;
    let spot = reader.spot().await;
    assert_eq!(stage.node().stack.remove(&stage.namespace, hashes(&pack(&[0]))).await.unwrap(), 1);
    let mut stored = 0;
    for start in (100..260).step_by(20) {
        let outcomes = stage.put(start..start + 20).await;
        let outcomes = outcomes.iter().filter(|(_, _, outcome)| *outcome == STORED);
        stored += outcomes.map(|(from, to, _)| to - from).sum::<u32>();
    }
    assert!(stored > 128, "more than twice what there is room for: {stored}");
    assert_eq!(reader.bytes(&spot), payload(0));
}

#[tokio::test]
async fn a_block_is_not_taken_out_of_use_by_a_claim_and_a_pin_that_was_not_given_ends_the_connection()
 {
    let stage = sharing();
    stage.put(0..2).await;
    let mut reader = stage.mapped(None).await;
    reader.ask(&stage, 0..2).await;
    let second = [reader.spot().await, reader.spot().await][1];
    assert_eq!(reader.peer.hear().await.unwrap().0.kind, Kind::End);
    reader.release(second.pin, DAMAGED).await;
    reader.ask(&stage, 1..2).await;
    let spot = reader.spot().await;
    assert_eq!(reader.bytes(&spot), payload(1));
    reader.release(spot.pin + 1, 0).await;
    assert_eq!(reader.peer.hear().await.unwrap().0.kind, Kind::End);
    let (request, refused) = reader.peer.refusal().await;
    assert_eq!((request, refused.code), (0, INVALID), "{}", refused.text);
}

#[tokio::test]
async fn a_staging_that_could_be_taken_away_is_refused_and_its_client_is_served_otherwise() {
    let stage = sharing();
    stage.put(0..1).await;
    let open = memfd_create("open", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&open, 8192).unwrap();
    let sealed = || Staging::new(8192).unwrap().file().try_clone().unwrap();
    for (file, bytes, why) in [
        (Some(open), 8192, "F_SEAL_SHRINK"),
        (Some(sealed()), 8193, "8193 bytes given"),
        (Some(sealed()), u64::MAX, "at most"),
        (None, 8192, "no file"),
    ] {
        let (mut peer, files) = stage.ask(file, bytes).await;
        let (request, refused) = peer.refusal().await;
        assert_eq!((request, refused.code), (1, INVALID), "{}", refused.text);
        assert!(refused.text.contains(why), "{}", refused.text);
        assert!(files.take().is_empty(), "nothing is shown");
        peer.say(|out| stage.get(0..1, 0).push(out, 9, BY_PLACE)).await;
        assert_eq!(peer.blocks().await, [(0, payload(0))]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_written_to_a_staging_while_it_is_read_is_stored_only_if_it_is_right() {
    let stage = sharing();
    let mut staging = Staging::new(BLOCK_BYTES as usize).unwrap();
    let mut writer = stage.mapped(Some(&staging)).await;
    // Another mapping of the same memory, by which it is changed meanwhile.
    let file = std::fs::File::from(staging.file().try_clone().unwrap());
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = Arc::clone(&stop);
    let changing = std::thread::spawn(move || {
        use std::os::unix::fs::FileExt;
        while !stopped.load(Ordering::Relaxed) {
            file.write_all_at(&[0xff], u64::from(BLOCK_BYTES) / 2).unwrap();
        }
    });
    let mut outcomes = Vec::new();
    for number in 0..30 {
        let offer = stage.offer(number..number + 1);
        writer.peer.say(|out| offer.push(out, 2, 0)).await;
        assert_eq!(writer.peer.wanted().await, [(0, 1)]);
        assert!(staging.write(0, &payload(number)));
        if number < 3 {
            assert!(staging.write(5, &[0xff]), "changed, whatever the other one does");
        }
        let checksum = stage.checksum(number, &payload(number));
        let place = Place { position: 0, part: 0, offset: 0, part_bytes: BLOCK_BYTES, checksum };
        let staged = Staged { place, bytes: BLOCK_BYTES, offset: 0 };
        writer.peer.say(|out| staged.push(out, 2)).await;
        writer.peer.say(|out| push(out, (Kind::Finish, 0), 2, 0, |_body| {})).await;
        assert_eq!(writer.peer.hear().await.unwrap().0.kind, Kind::Taken);
        outcomes.push(writer.peer.results().await[0].2);
        if number == 20 {
            stop.store(true, Ordering::Relaxed);
        }
    }
    changing.join().unwrap();
    assert!(outcomes.iter().all(|outcome| [STORED, CORRUPT].contains(outcome)), "{outcomes:?}");
    assert_eq!(outcomes[..3], [CORRUPT; 3]);
    assert_eq!(outcomes[29], STORED);
    let mut reader = stage.greeted(u32::MAX).await;
    reader.say(|out| stage.get(0..30, 0).push(out, 3, 0)).await;
    for ((position, bytes), outcome) in reader.blocks().await.into_iter().zip(outcomes) {
        let expected = if outcome == STORED { payload(u64::from(position)) } else { Vec::new() };
        assert!(bytes == expected, "block {position}");
    }
    assert!(stage.is_clean().await);
}

#[tokio::test]
async fn bytes_outside_of_the_staging_refuse_their_put_only() {
    let stage = sharing();
    let staging = Staging::new(4096).unwrap();
    let mut writer = stage.mapped(Some(&staging)).await;
    for (request, offset) in [(2, 4096 - 10), (3, u64::MAX)] {
        writer.peer.say(|out| stage.offer(0..1).push(out, request, 0)).await;
        assert_eq!(writer.peer.wanted().await, [(0, 1)]);
        let place = Place { position: 0, part: 0, offset: 0, part_bytes: BLOCK_BYTES, checksum: 1 };
        writer.peer.say(|out| Staged { place, bytes: 11, offset }.push(out, request)).await;
        assert_eq!(writer.peer.hear().await.unwrap().0.kind, Kind::Taken);
        let (refused, reason) = writer.peer.refusal().await;
        assert_eq!((refused, reason.code), (request, INVALID));
        assert!(reason.text.contains("not in the staging"), "{}", reason.text);
    }
    assert_eq!(stage.put(0..1).await, [(0, 1, STORED)]);
}

#[tokio::test]
async fn nothing_is_shown_while_there_are_two_tenants_or_where_it_is_not_switched_on() {
    let mut stage = sharing();
    let begin = |bulk: &Bulk| Sharing::new(Some(Arc::default())).begin(bulk, 0, false);
    let gate = Gate::closed(stage.node().metrics.trust.clone()).unwrap();
    let open = stage.bulk.gate.clone();
    let token = "token-of-thirty-two-characters-or-more";
    gate.replace(format!("{ONLY_TENANT} {token}1\nother {token}2\n").as_bytes()).unwrap();
    Arc::get_mut(&mut stage.bulk).unwrap().gate = gate.clone();
    let refused = begin(&stage.bulk).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unsupported);
    assert!(refused.to_string().contains("several tenants"), "{refused}");
    gate.replace(format!("a {token}1\na {token}2\n").as_bytes()).unwrap();
    begin(&stage.bulk).unwrap();
    let bulk = Arc::get_mut(&mut stage.bulk).unwrap();
    (bulk.arena, bulk.gate) = (None, open);
    assert_eq!(begin(&stage.bulk).unwrap_err().kind(), ErrorKind::Unsupported);
    // A peer that asks all the same goes on without.
    let (mut peer, files) = stage.ask(None, 0).await;
    assert_eq!(peer.refusal().await.1.code, UNSUPPORTED);
    assert!(files.take().is_empty());
}

//! How a log is walked back, and what its parts say together.

use super::*;
use crate::object::rig_tests::{key, owner, pack};

fn at(epoch: u64, seq: u64) -> Seq {
    Seq { epoch, seq }
}

fn object(at: Seq, records: Vec<ManifestRecord>) -> LogObject {
    LogObject { id: owner().manifest(at), bytes: 1, records }
}

/// Walks back over a log; a base is a number: the object where it begins.
fn walk(log: &[(Seq, Option<u64>)], damaged: Option<Seq>) -> (Vec<Seq>, usize, Option<u64>) {
    let mut ids: Vec<_> = log.iter().map(|(at, _)| owner().manifest(*at)).collect();
    ids.reverse();
    let mut walk = Walk::default();
    for (at, base) in log.iter().rev() {
        let records = base.map(|from| ManifestRecord::Base { from }).into_iter().collect();
        let read = if damaged == Some(*at) {
            Read::Damaged(owner().manifest(*at))
        } else {
            Read::There { object: object(*at, records), cached: false }
        };
        if !walk.take(read) {
            break;
        }
    }
    let log = walk.into_log(&ids);
    let objects = log.objects.iter().map(|object| object.id.at).collect();
    (objects, log.superseded.len(), log.lost_until)
}

#[test]
fn a_log_counts_from_its_last_base_or_its_first_object() {
    let plain = [at(1, 1), at(1, 2), at(2, 1), at(4, 1), at(4, 2)];
    let all = plain.map(|at| (at, None));
    assert_eq!(walk(&[], None), (vec![], 0, None));
    assert_eq!(walk(&all, None), (plain.to_vec(), 0, None));
    let mut based = all;
    based[4].1 = Some(2);
    assert_eq!(walk(&based, None), (vec![at(4, 2)], 4, None));
    based[4].1 = Some(1);
    assert_eq!(walk(&based, None), (vec![at(4, 1), at(4, 2)], 3, None));
    // Only the newest base counts, and what is before it may be anything.
    based[1].1 = Some(1);
    assert_eq!(walk(&based, Some(at(1, 2))), (vec![at(4, 1), at(4, 2)], 3, None));
}

#[test]
fn where_an_object_is_missing_or_damaged_older_epochs_are_lost() {
    let all = [at(1, 1), at(1, 2), at(2, 1), at(2, 2), at(3, 1)].map(|at| (at, None));
    let newest = vec![at(2, 2), at(3, 1)];
    assert_eq!(walk(&all, Some(at(2, 1))), (newest.clone(), 3, Some(2)));
    // The first of an epoch, one in the middle, the first of all.
    assert_eq!(walk(&[all[0], all[1], all[3], all[4]], None), (newest, 2, Some(2)));
    let gap = [(at(1, 1), None), (at(1, 3), None), (at(2, 1), None)];
    assert_eq!(walk(&gap, None), (vec![at(1, 3), at(2, 1)], 1, Some(1)));
    assert_eq!(walk(&all[1..], None), (all[1..].iter().map(|it| it.0).collect(), 0, Some(1)));
    // The beginning of a base.
    let base = [(at(2, 2), None), (at(2, 3), Some(1))];
    assert_eq!(walk(&base, None), (vec![at(2, 2), at(2, 3)], 0, Some(2)));
    // All of it.
    assert_eq!(walk(&all[4..], Some(at(3, 1))), (vec![], 1, Some(3)));
}

#[test]
fn the_order_of_objects_does_not_matter() {
    let [first, second, third] = [1, 2, 3].map(|seq| owner().pack(at(1, seq)));
    let removed = |keys: &[u64], seq| ManifestRecord::Removed {
        keys: keys.iter().map(|it| key(*it)).collect(),
        before: at(1, seq),
    };
    let objects = || {
        vec![
            object(at(1, 1), vec![ManifestRecord::Pack(pack(first, [10, 11])), mark_of(1)]),
            object(at(1, 2), vec![ManifestRecord::Pack(pack(second, [11, 12]))]),
            object(at(1, 3), vec![removed(&[11], 3), removed(&[10], 1)]),
            object(at(1, 4), vec![ManifestRecord::Pack(pack(third, [11]))]),
            object(at(1, 5), vec![ManifestRecord::Dropped(second), removed(&[11], 2)]),
        ]
    };
    for first_object in 0..5 {
        let mut turned = objects();
        turned.rotate_left(first_object);
        let folded = Folded::of(turned, None);
        assert_eq!(folded.begun, 1);
        let rebuilt = folded.into_rebuilt(Unnamed::default(), Reads::default());
        let entries = |pack: &RebuiltPack| pack.footer.entries.len();
        let packs: Vec<_> = rebuilt.packs.iter().map(|pack| (pack.id, entries(pack))).collect();
        // 11 is gone from the first pack, 10 was removed before there was one, 11 was put again.
        assert_eq!(packs, [(first, 1), (third, 1)]);
        assert_eq!(rebuilt.packs[0].footer.entries[0].key, key(10));
        assert_eq!(rebuilt.dropped, [second]);
        let whole = pack(first, [10, 11]).object_bytes();
        assert_eq!(rebuilt.packs[0].bytes, whole, "removed blocks stay in the object");
    }
}

#[test]
fn what_is_lost_takes_the_packs_of_its_epoch_along() {
    let ids = [(1, 1), (2, 1), (3, 1)].map(|(epoch, seq)| owner().pack(at(epoch, seq)));
    let records = ids.map(|id| ManifestRecord::Pack(pack(id, [1]))).to_vec();
    let folded = Folded::of(vec![object(at(3, 1), records.clone())], Some(2));
    assert_eq!(folded.packs.keys().copied().collect::<Vec<_>>(), [ids[2]]);
    let mut folded = Folded::of(vec![object(at(3, 1), records)], None);
    folded.lose(1);
    assert_eq!(folded.packs.keys().copied().collect::<Vec<_>>(), [ids[1], ids[2]]);
}

//! What is read often is named, and nothing else.

use super::*;
use crate::limits::{POPULAR_MAX, POPULAR_USES};

async fn popular(fixture: &Fixture) -> Option<Vec<HotChain>> {
    tokio::time::timeout(Duration::from_secs(1), fixture.stack.popular(1000)).await.ok()
}

#[tokio::test(start_paused = true)]
async fn a_chain_is_named_by_its_eighth_use_and_by_no_other_before_the_sixteenth() {
    let fixture = Fixture::new(MIB, Vec::new()).unwrap();
    let namespace = fixture.namespace("m", &[4096]).unwrap();
    assert_eq!(fixture.put(&namespace, &[1, 2, 3, 4]).unwrap(), 4);
    assert_eq!(popular(&fixture).await, None);
    for uses in 1..=2 * POPULAR_USES {
        for number in [1, 2, 3] {
            assert!(has(&fixture, &namespace, number).await);
        }
        let named = popular(&fixture).await;
        if !uses.is_multiple_of(POPULAR_USES) {
            assert_eq!(named, None, "{uses} uses");
            continue;
        }
        let hashes = [1, 2, 3].map(hash_of).to_vec();
        let chain =
            HotChain { namespace: namespace.index(), parent: None, hashes, bytes: 3 * 4096 };
        assert_eq!(named, Some(vec![chain]), "{uses} uses");
    }
}

#[tokio::test(start_paused = true)]
async fn ranks_together_use_a_block_once_and_copies_use_it_not_at_all() {
    let fixture = Fixture::new(MIB, Vec::new()).unwrap();
    let namespace = fixture.namespace("m", &[1024, 1024]).unwrap();
    assert_eq!(fixture.put(&namespace, &[1]).unwrap(), 1);
    assert_eq!(popular(&fixture).await, None);
    for _ in 1..POPULAR_USES {
        for part in [0, 1] {
            let read = fixture.stack.get_dram(&namespace, hash_of(1), &[part]).unwrap();
            assert!(matches!(read, Some(Fetch::Hit(_))));
        }
        let copy = fixture.stack.copy_in_dram(&namespace, hash_of(1)).unwrap();
        assert!(copy.is_right(0) && copy.is_right(1));
    }
    assert_eq!(popular(&fixture).await, None);
    assert!(has(&fixture, &namespace, 1).await);
    assert_eq!(popular(&fixture).await.unwrap()[0].hashes, [hash_of(1)]);
    assert!(fixture.stack.copy_in_dram(&namespace, hash_of(2)).is_none());
}

#[tokio::test(start_paused = true)]
async fn nothing_is_kept_for_nobody_and_no_more_than_there_is_room_for() {
    let fixture = Fixture::new(MIB, Vec::new()).unwrap();
    let namespace = fixture.namespace("m", &[4096]).unwrap();
    assert_eq!(fixture.put(&namespace, &[1]).unwrap(), 1);
    let shared = &fixture.stack.shared;
    let key = BlockKey { namespace: namespace.index(), hash: hash_of(1) };
    shared.popular.note(key, POPULAR_USES);
    assert_eq!(popular(&fixture).await, None, "nobody had asked");
    for _ in 0..POPULAR_MAX + 10 {
        shared.popular.note(key, POPULAR_USES);
    }
    let mut named = 0;
    while let Some(chains) = popular(&fixture).await {
        named += chains.iter().map(|chain| chain.hashes.len()).sum::<usize>();
    }
    assert_eq!(named, POPULAR_MAX);
}

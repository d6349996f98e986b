//! What is named as hottest: order, chains, bounds; and that naming it is no use of it.

use super::*;

const SLOT: u32 = 4096;

fn small() -> (Fixture, Arc<Namespace>) {
    let fixture = Fixture::new(MIB, Vec::new()).unwrap();
    let namespace = fixture.namespace("m", &[SLOT]).unwrap();
    (fixture, namespace)
}

fn touch(fixture: &Fixture, namespace: &Namespace, numbers: &[u64]) {
    let packed = pack(numbers);
    let touched = fixture.stack.touch(namespace, Hashes::new(&packed, 32).unwrap());
    assert_eq!(touched as usize, numbers.len());
}

/// The chains that are named for so many blocks, as the numbers of their blocks.
fn named(fixture: &Fixture, blocks: u64) -> Vec<Vec<u64>> {
    let chains = fixture.stack.hottest(blocks * u64::from(SLOT));
    for chain in &chains {
        assert_eq!(chain.bytes, chain.hashes.len() as u64 * u64::from(SLOT));
    }
    let number = |hash: &BlockHash| (0..10_000).find(|n| hash_of(*n) == *hash).unwrap();
    chains.iter().map(|chain| chain.hashes.iter().map(number).collect()).collect()
}

#[tokio::test]
async fn the_chain_used_last_comes_first_and_each_from_its_head() {
    let (fixture, namespace) = small();
    assert_eq!(fixture.put(&namespace, &[1, 2, 3, 4]).unwrap(), 4);
    assert_eq!(fixture.put(&namespace, &[11, 12, 13]).unwrap(), 3);
    assert_eq!(named(&fixture, 100), [vec![11, 12, 13], vec![1, 2, 3, 4]]);
    touch(&fixture, &namespace, &[1, 2, 3, 4]);
    assert_eq!(named(&fixture, 100), [vec![1, 2, 3, 4], vec![11, 12, 13]]);
    // The head of one goes on with other blocks: it stands before both of its ends.
    assert_eq!(fixture.put_behind(&namespace, &[21, 22], Some(2)).unwrap(), 2);
    touch(&fixture, &namespace, &[1, 2, 21, 22]);
    assert_eq!(named(&fixture, 100), [vec![1, 2, 21, 22], vec![3, 4], vec![11, 12, 13]]);
}

#[tokio::test]
async fn no_more_is_named_than_was_asked_for_and_the_hottest_of_it() {
    let (fixture, namespace) = small();
    for first in (0..200).step_by(10) {
        let chain: Vec<u64> = (first..first + 10).collect();
        assert_eq!(fixture.put(&namespace, &chain).unwrap(), 10);
    }
    let hottest = named(&fixture, 25);
    assert_eq!(
        hottest,
        [(190..200).collect(), (180..190).collect(), (170..175).collect::<Vec<_>>()]
    );
    assert_eq!(named(&fixture, 0), Vec::<Vec<u64>>::new());
    assert_eq!(named(&fixture, 1), [vec![190]]);
    assert_eq!(named(&fixture, 1000).concat().len(), 200);
}

#[tokio::test]
async fn what_is_described_is_a_chain_by_its_parents_and_namespaces_stay_apart() {
    let (fixture, namespace) = small();
    let other = fixture.namespace("other", &[SLOT]).unwrap();
    assert_eq!(fixture.put(&namespace, &[1, 2]).unwrap(), 2);
    assert_eq!(fixture.put(&other, &[1, 2]).unwrap(), 2);
    // One by one: their ages do not stand beside one another.
    for number in [3, 4, 5] {
        assert_eq!(fixture.put(&namespace, &[number]).unwrap(), 1);
        let parent = (number > 3).then(|| hash_of(number - 1));
        let description = Description {
            parent,
            position: u32::try_from(number - 3).unwrap(),
            tokens: Vec::new(),
            lora_name: String::new(),
        };
        assert_eq!(fixture.describe(&namespace, number, &description).unwrap(), 1);
    }
    for number in [5, 4, 3] {
        touch(&fixture, &namespace, &[number]);
        touch(&fixture, &other, &[1]);
        touch(&fixture, &namespace, &[number]);
    }
    let chains = fixture.stack.hottest(u64::MAX);
    let of = |chain: &HotChain| (chain.namespace, chain.parent, chain.hashes.clone());
    let hashes = |numbers: &[u64]| numbers.iter().map(|n| hash_of(*n)).collect::<Vec<_>>();
    let (ours, theirs) = (namespace.index(), other.index());
    let expected = [
        (ours, None, hashes(&[3])),
        (theirs, None, hashes(&[1])),
        (ours, Some(hash_of(3)), hashes(&[4, 5])),
        (theirs, None, hashes(&[2])),
        (ours, None, hashes(&[1, 2])),
    ];
    assert_eq!(chains.iter().map(of).collect::<Vec<_>>(), expected);
}

#[tokio::test]
async fn naming_what_is_hot_keeps_nothing_from_leaving() {
    let (fixture, namespace) = small();
    let chain: Vec<u64> = (0..256).collect();
    for number in &chain {
        assert_eq!(fixture.put(&namespace, &[*number]).unwrap(), 1);
    }
    let before = named(&fixture, 256).concat();
    assert_eq!(before, chain.into_iter().rev().collect::<Vec<_>>());
    for number in 1000..1010 {
        assert_eq!(fixture.put(&namespace, &[number]).unwrap(), 1);
    }
    let after = named(&fixture, 256).concat();
    let expected: Vec<u64> = (1000..1010).rev().chain((10..256).rev()).collect();
    assert_eq!(after, expected, "the coldest have left, and what is read is not named");
    audit(&fixture);
}

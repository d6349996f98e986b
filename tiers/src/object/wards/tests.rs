//! Who stands in for whom.

use std::collections::HashMap;

use super::*;

fn names(count: u32) -> Vec<String> {
    (0..count).map(|number| format!("kvstrata-{number}")).collect()
}

fn picks(nodes: &[String]) -> HashMap<u32, &str> {
    let pick = |ordinal| rendezvous(nodes.iter().map(String::as_str), ordinal).unwrap();
    (0..1000).map(|ordinal| (ordinal, pick(ordinal))).collect()
}

#[test]
fn a_node_that_leaves_moves_only_what_it_had() {
    let nodes = names(10);
    let before = picks(&nodes);
    for left in 0..nodes.len() {
        let mut others = nodes.clone();
        let gone = others.remove(left);
        for (ordinal, now) in picks(&others) {
            assert!(now == before[&ordinal] || before[&ordinal] == gone, "{ordinal}: {now}");
        }
    }
}

#[test]
fn ordinals_are_spread_evenly_whatever_the_order_of_nodes() {
    let mut nodes = names(10);
    let before: HashMap<u32, String> =
        picks(&nodes).into_iter().map(|(ordinal, node)| (ordinal, node.to_owned())).collect();
    for node in &nodes {
        let share = before.values().filter(|picked| *picked == node).count();
        assert!((60..=140).contains(&share), "{node} has {share} of 1000");
    }
    nodes.reverse();
    assert!(picks(&nodes).iter().all(|(ordinal, node)| before[ordinal] == *node));
    assert_eq!(rendezvous([], 3), None);
}

//! Identity: every field counts, bad ones are named, differing roots are noticed.

use std::collections::HashSet;

use super::*;
use crate::namespace::{PartSpec, foreign_hash};

fn identity() -> Identity {
    Identity {
        tenant: "default".into(),
        model: "m".into(),
        weights: "w".into(),
        engine: "vllm".into(),
        layout: "l".into(),
        dtype: "bf16".into(),
        block_tokens: 16,
        parts: vec![PartSpec { group: 0, rank: 0, bytes: 4096 }],
        split: "none".into(),
        hash_algorithm: "sha256".into(),
        hash_bytes: 32,
        hash_root: vec![1],
        lora: Vec::new(),
        cache_salt: Vec::new(),
    }
}

fn table() -> NamespaceTable {
    NamespaceTable::new(Secret::new([3; 32]), false)
}

fn open(table: &NamespaceTable, identity: Identity) -> Opened {
    table.open(NamespaceSpec::Engine(Box::new(identity)), false).unwrap()
}

/// One change for each identity field.
fn variants() -> Vec<Identity> {
    let edit = |change: fn(&mut Identity)| {
        let mut changed = identity();
        change(&mut changed);
        changed
    };
    vec![
        identity(),
        edit(|i| i.tenant = "x".into()),
        edit(|i| i.model = "x".into()),
        edit(|i| i.weights = "x".into()),
        edit(|i| i.engine = "x".into()),
        edit(|i| i.layout = "x".into()),
        edit(|i| i.dtype = "x".into()),
        edit(|i| i.block_tokens = 17),
        edit(|i| i.parts[0].bytes = 4097),
        edit(|i| i.parts[0].rank = 1),
        edit(|i| i.parts[0].group = 1),
        edit(|i| i.parts.push(PartSpec { group: 0, rank: 1, bytes: 1 })),
        edit(|i| i.split = "x".into()),
        edit(|i| i.hash_algorithm = "x".into()),
        edit(|i| i.hash_bytes = 16),
        edit(|i| i.hash_root = vec![2]),
        edit(|i| i.lora = vec![1]),
        edit(|i| i.cache_salt = vec![1]),
        // The same bytes moved across a field boundary must not meet.
        edit(|i| (i.model, i.weights) = ("mw".into(), String::new())),
        edit(|i| (i.lora, i.cache_salt) = (vec![], vec![1, 1])),
    ]
}

#[test]
fn each_field_makes_another_id() {
    let table = table();
    let ids: HashSet<_> = variants().into_iter().map(|i| *open(&table, i).namespace.id()).collect();
    assert_eq!(ids.len(), variants().len());
    let other_secret = NamespaceTable::new(Secret::new([4; 32]), false);
    assert!(!ids.contains(open(&other_secret, identity()).namespace.id()));
    assert_eq!(table.list().len(), variants().len());
}

#[test]
fn the_id_never_changes() {
    let id = open(&table(), identity()).namespace.id().to_string();
    assert_eq!(id, "2bd621527611805dc37153901c7e4ebdc086a20ece74deb8bf6ab5dbc7d014f6");
}

#[test]
fn opening_twice_returns_the_same() {
    let table = table();
    let (first, second) = (open(&table, identity()), open(&table, identity()));
    assert!(first.new && !second.new && second.warnings.is_empty());
    assert!(Arc::ptr_eq(&first.namespace, &second.namespace));
    assert!(Arc::ptr_eq(&first.namespace, &table.get(first.namespace.id().as_bytes()).unwrap()));
    assert!(Arc::ptr_eq(&first.namespace, &table.by_index(0).unwrap()));
}

#[test]
fn every_problem_is_reported_at_once() {
    let mut bad = identity();
    bad.model = String::new();
    bad.block_tokens = 0;
    bad.hash_bytes = 4;
    bad.cache_salt = vec![0; 1025];
    bad.parts = vec![
        PartSpec { group: 0, rank: 1, bytes: 0 },
        PartSpec { group: 0, rank: 1, bytes: 64 << 20 },
        PartSpec { group: 0, rank: 0, bytes: 64 << 20 },
    ];
    let error = table().open(NamespaceSpec::Engine(Box::new(bad)), false).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    let text = error.to_string();
    for piece in [
        "model: 0 bytes given, 1 to 1024",
        "block_tokens: 0 given",
        "hash_bytes: 4 given, 8 to 32",
        "cache_salt: 1025 bytes given, 0 to 1024",
        "(group 0, rank 1) has 0 bytes",
        "must ascend",
        "134217728 bytes in all",
    ] {
        assert!(text.contains(piece), "{piece} is missing in: {text}");
    }
}

#[test]
fn unknown_and_malformed_ids_are_told_apart() {
    assert_eq!(table().get(&[0; 31]).unwrap_err().kind(), ErrorKind::Invalid);
    assert_eq!(table().get(&[0; 32]).unwrap_err().kind(), ErrorKind::UnknownNamespace);
}

#[test]
fn differing_roots_are_said_loudly() {
    let table = table();
    assert!(open(&table, identity()).warnings.is_empty());
    let other = Identity { hash_root: vec![0xab, 0xcd], ..identity() };
    let opened = open(&table, other);
    assert!(
        opened.warnings[0].contains("2 different hash roots (01, abcd)"),
        "{:?}",
        opened.warnings
    );
    assert_eq!(table.root_mismatches().len(), 1);
    // The first client hears of it when it opens again, and another model is not touched by it.
    assert_eq!(open(&table, identity()).warnings.len(), 1);
    assert!(open(&table, Identity { model: "n".into(), ..identity() }).warnings.is_empty());
}

#[test]
fn weak_algorithms_are_refused_for_shared_tenants_only() {
    let weak = Identity { hash_algorithm: "xxhash".into(), hash_bytes: 16, ..identity() };
    assert!(table().open(NamespaceSpec::Engine(Box::new(weak.clone())), false).is_ok());
    let shared = NamespaceTable::new(Secret::new([3; 32]), true);
    let error = shared.open(NamespaceSpec::Engine(Box::new(weak)), false).unwrap_err();
    assert!(error.to_string().contains("hash_algorithm: \"xxhash\""), "{error}");
}

#[test]
fn opaque_namespaces_are_apart_and_any_length() {
    let table = table();
    let spec = |name: &str| NamespaceSpec::Opaque {
        tenant: "default".into(),
        name: name.into(),
        bytes_max: 100,
    };
    let a = table.open(spec("a"), false).unwrap().namespace;
    let b = table.open(spec("b"), false).unwrap().namespace;
    assert_ne!(a.id(), b.id());
    assert_eq!(a.layout().range(0, 7), Some(0..7));
    assert_eq!(a.layout().block_bytes(), 0);
    assert_ne!(foreign_hash(b"k1"), foreign_hash(b"k2"));
}

#[test]
fn parts_lie_one_behind_the_other() {
    let mut two = identity();
    two.parts =
        vec![PartSpec { group: 0, rank: 0, bytes: 10 }, PartSpec { group: 1, rank: 0, bytes: 5 }];
    let layout = open(&table(), two).namespace.layout().clone();
    assert_eq!((layout.range(0, 15), layout.range(1, 15)), (Some(0..10), Some(10..15)));
    assert_eq!((layout.range(1, 14), layout.range(2, 15)), (None, None));
}

#[test]
fn many_roots_of_one_model_are_counted_but_not_all_listed() {
    let table = table();
    for root in 0..1000_u32 {
        open(&table, Identity { hash_root: root.to_le_bytes().to_vec(), ..identity() });
    }
    let warnings = open(&table, identity()).warnings;
    assert!(warnings[0].contains("use 1001 different hash roots"), "{warnings:?}");
    assert!(warnings[0].len() < 1000, "{} bytes", warnings[0].len());
}

#[test]
fn a_full_table_refuses_and_remembers_nothing() {
    let table = table();
    let numbered = |root: u32| Identity { model: format!("{root}"), ..identity() };
    for number in 0..NAMESPACES_MAX {
        open(&table, numbered(u32::try_from(number).unwrap()));
    }
    let more = NamespaceSpec::Engine(Box::new(numbered(u32::MAX)));
    let error = table.open(more, false).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Exhausted { .. }), "{error}");
    assert_eq!(table.interned.read().roots.len(), NAMESPACES_MAX);
    assert!(!open(&table, numbered(0)).new, "what is open stays open");
}

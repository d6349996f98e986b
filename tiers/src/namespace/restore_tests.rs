//! Namespaces come back from the disk as they were, or not at all.

use proptest::{collection::vec, prelude::*};

use super::*;
use crate::namespace::{PartSpec, Wishes, layout_of};

fn table() -> NamespaceTable {
    NamespaceTable::new(Secret::new([3; 32]), false)
}

fn text() -> impl Strategy<Value = String> {
    "[a-z\u{e9}\u{1f600}/.-]{1,20}"
}

fn identities() -> impl Strategy<Value = Identity> {
    let names = (text(), text(), text(), text(), text(), text(), text(), text());
    let parts = vec((0..3_u32, 1..100_000_u32), 1..40);
    let blobs = (vec(any::<u8>(), 0..50), vec(any::<u8>(), 0..50), vec(any::<u8>(), 0..50));
    (names, parts, blobs, 1..=u32::MAX, 8..=32_u32).prop_map(
        |(names, parts, (hash_root, lora, cache_salt), block_tokens, hash_bytes)| {
            let (tenant, model, weights, engine, layout, dtype, split, hash_algorithm) = names;
            let parts =
                (0..).zip(parts).map(|(rank, (_, bytes))| PartSpec { group: 1, rank, bytes });
            Identity {
                tenant,
                model,
                weights,
                engine,
                layout,
                dtype,
                block_tokens,
                parts: parts.collect(),
                split,
                hash_algorithm,
                hash_bytes,
                hash_root,
                lora,
                cache_salt,
            }
        },
    )
}

fn specs() -> impl Strategy<Value = NamespaceSpec> {
    let opaque = (text(), text(), 0..=1_u32 << 26)
        .prop_map(|(tenant, name, bytes_max)| NamespaceSpec::Opaque { tenant, name, bytes_max });
    prop_oneof![identities().prop_map(|it| NamespaceSpec::Engine(Box::new(it))), opaque]
}

proptest! {
    #[test]
    fn what_was_stored_is_restored(spec in specs(), keep in any::<bool>()) {
        let opened = table().open(spec.clone(), keep).unwrap().namespace;
        let encoded = opened.encoded();
        let restored = table().restore(opened.id(), &encoded).unwrap().unwrap();
        prop_assert_eq!(restored.spec(), &spec);
        prop_assert_eq!(restored.id(), opened.id());
        prop_assert_eq!(restored.keeps_tokens(), keep);
        prop_assert_eq!(restored.encoded(), encoded);
    }

    #[test]
    fn hash_schemes_come_back_and_name_nothing(
        identity in identities(),
        names in proptest::collection::btree_set("[a-z_0-9]{1,12}", 1..5),
        keep_tokens in any::<bool>(),
    ) {
        let spec = NamespaceSpec::Engine(Box::new(identity));
        let wishes = Wishes { keep_tokens, hash_schemes: names.clone() };
        let opened = table().open(spec.clone(), wishes).unwrap().namespace;
        let plain = table().open(spec, keep_tokens).unwrap().namespace;
        prop_assert_eq!(opened.id(), plain.id());
        let (encoded, shorter) = (opened.encoded(), plain.encoded());
        prop_assert!(encoded.starts_with(&shorter), "what an older version wrote is read as ever");
        let restored = table().restore(opened.id(), &encoded).unwrap().unwrap();
        prop_assert_eq!(restored.hash_schemes(), names);
        prop_assert_eq!(restored.encoded(), encoded.clone());
        let digest = |encoded: &[u8]| layout_of(encoded).unwrap().digest();
        prop_assert_eq!(digest(&encoded), digest(&shorter));
        for cut in shorter.len() + 1..encoded.len() {
            let error = table().restore(opened.id(), &encoded[..cut]).unwrap_err();
            prop_assert_eq!(error.kind(), ErrorKind::Corrupt, "cut at {}: {}", cut, error);
        }
    }

    #[test]
    fn cut_off_anywhere_it_is_corrupt(spec in specs()) {
        let opened = table().open(spec, false).unwrap().namespace;
        let encoded = opened.encoded();
        for cut in 0..encoded.len() {
            let error = table().restore(opened.id(), &encoded[..cut]).unwrap_err();
            prop_assert_eq!(error.kind(), ErrorKind::Corrupt, "cut at {}: {}", cut, error);
        }
    }

    #[test]
    fn any_other_bytes_are_never_another_namespace(
        spec in specs(),
        at in any::<prop::sample::Index>(),
        to in any::<u8>(),
    ) {
        let opened = table().open(spec, false).unwrap().namespace;
        let encoded = opened.encoded();
        let mut changed = encoded.clone();
        let at = 1 + at.index(changed.len() - 1);
        changed[at] = to;
        let table = table();
        match table.restore(opened.id(), &changed) {
            Ok(Some(_)) => prop_assert_eq!(changed, encoded),
            Ok(None) | Err(_) => prop_assert!(table.list().is_empty()),
        }
    }

    #[test]
    fn garbage_is_an_error(bytes in vec(any::<u8>(), 0..200)) {
        prop_assert!(table().restore(&NamespaceId([0; 32]), &bytes).is_err());
        let behind_domain = [&[1], b"kvstrata namespace v1\0\x01".as_slice(), &bytes].concat();
        prop_assert!(table().restore(&NamespaceId([0; 32]), &behind_domain).is_err());
    }
}

fn spec() -> NamespaceSpec {
    NamespaceSpec::Opaque { tenant: "t".into(), name: "n".into(), bytes_max: 5 }
}

#[test]
fn the_bytes_never_change() {
    let opened = table().open(spec(), true).unwrap().namespace;
    let fields: [&[u8]; 8] = [
        &[1],
        b"kvstrata namespace v1\0",
        &[2],
        &[1, 1, 0, 0, 0, 0, 0, 0, 0],
        b"t",
        &[2, 1, 0, 0, 0, 0, 0, 0, 0],
        b"n",
        &[3, 4, 0, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0],
    ];
    assert_eq!(opened.encoded(), fields.concat());
    let id = "f871503c";
    assert_eq!(opened.id().short(), id);
}

#[test]
fn what_is_wrong_is_named() {
    let opened = table().open(spec(), true).unwrap().namespace;
    let good = opened.encoded();
    let fields = good.len() - 13;
    let said = |bytes: &[u8]| {
        let error = table().restore(opened.id(), bytes).unwrap_err();
        (error.kind(), error.to_string())
    };
    let with = |at: usize, byte: u8| {
        let mut bytes = good.clone();
        bytes[at] = byte;
        said(&bytes)
    };
    let behind = |more: &[u8]| said(&[&good, more].concat());
    let newer = "is of a newer version, upgrade to use its blocks";
    for ((kind, text), (expected, what)) in [
        (said(&[]), (ErrorKind::Corrupt, "empty")),
        (with(0, 2), (ErrorKind::Corrupt, "keep_tokens: 2, 0 or 1 allowed")),
        (with(1, b'x'), (ErrorKind::Corrupt, "no domain")),
        (with(21, b'2'), (ErrorKind::Unsupported, newer)),
        (with(23, 3), (ErrorKind::Unsupported, newer)),
        (with(23, 0), (ErrorKind::Corrupt, "kind: 0")),
        (with(23, 1), (ErrorKind::Corrupt, "engine: cut off")),
        (with(24, 2), (ErrorKind::Corrupt, "tenant: tag 2 found, 1 required")),
        (with(33, 0xff), (ErrorKind::Corrupt, "tenant: invalid utf-8")),
        (with(fields + 1, 5), (ErrorKind::Corrupt, "bytes_max: 5 bytes said, 4 left")),
        (with(fields + 1, 3), (ErrorKind::Corrupt, "bytes_max: 3 bytes, 4 required")),
        (behind(&[4, 0, 0, 0, 0, 0, 0, 0, 0]), (ErrorKind::Unsupported, newer)),
        (behind(&[3]), (ErrorKind::Corrupt, "tag 3 found behind the last field")),
    ] {
        assert!(kind == expected && text.contains(what), "{what} expected: {text} ({kind:?})");
    }
}

#[test]
fn of_another_secret_it_is_nothing() {
    let theirs = NamespaceTable::new(Secret::new([4; 32]), false);
    let opened = theirs.open(spec(), false).unwrap().namespace;
    assert!(table().restore(opened.id(), &opened.encoded()).unwrap().is_none());
    let mut other = *opened.id().as_bytes();
    other[0] ^= 1;
    assert!(theirs.restore(&NamespaceId(other), &opened.encoded()).unwrap().is_none());
}

#[test]
fn what_may_not_be_opened_is_not_restored() {
    let weak = |shared| NamespaceTable::new(Secret::new([3; 32]), shared);
    let part = PartSpec { group: 0, rank: 0, bytes: 1 };
    let spec = NamespaceSpec::Engine(Box::new(Identity {
        tenant: "t".into(),
        model: "m".into(),
        engine: "e".into(),
        dtype: "d".into(),
        block_tokens: 1,
        parts: vec![part],
        hash_algorithm: "xxhash".into(),
        hash_bytes: 8,
        ..Identity::default()
    }));
    let opened = weak(false).open(spec, false).unwrap().namespace;
    assert!(weak(false).restore(opened.id(), &opened.encoded()).unwrap().is_some());
    let error = weak(true).restore(opened.id(), &opened.encoded()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
}

#[test]
fn the_first_client_decides_whether_tokens_are_kept() {
    for wish in [true, false] {
        let before = table().open(spec(), !wish).unwrap().namespace;
        let table = table();
        let restored = table.restore(before.id(), &before.encoded()).unwrap().unwrap();
        assert_eq!(restored.keeps_tokens(), !wish, "until a client says otherwise");
        let first = table.open(spec(), wish).unwrap();
        assert!(first.new && Arc::ptr_eq(&first.namespace, &restored));
        assert_eq!(restored.keeps_tokens(), wish);
        // Neither a later client nor a late restore changes it.
        assert!(!table.open(spec(), !wish).unwrap().new);
        table.restore(before.id(), &before.encoded()).unwrap().unwrap();
        assert_eq!(restored.keeps_tokens(), wish);
        assert_eq!(restored.encoded()[0], u8::from(wish));
        assert_eq!(table.list().len(), 1);
    }
}

#[test]
fn the_bytes_of_hash_schemes_never_change() {
    let part = PartSpec { group: 0, rank: 0, bytes: 1 };
    let identity = Identity {
        tenant: "t".into(),
        model: "m".into(),
        engine: "e".into(),
        dtype: "d".into(),
        block_tokens: 1,
        parts: vec![part],
        hash_algorithm: "sha256".into(),
        hash_bytes: 32,
        ..Identity::default()
    };
    let spec = NamespaceSpec::Engine(Box::new(identity));
    let hash_schemes = ["vllm_u64", "dynamo"].map(str::to_owned).into();
    let wishes = Wishes { keep_tokens: true, hash_schemes };
    let opened = table().open(spec.clone(), wishes).unwrap().namespace;
    let plain = table().open(spec.clone(), true).unwrap().namespace.encoded();
    let behind: &[&[u8]] = &[&plain, &[15, 15, 0, 0, 0, 0, 0, 0, 0], b"dynamo,vllm_u64"];
    assert_eq!(opened.encoded(), behind.concat());

    let said = |names: &[u8]| {
        let length = u64::try_from(names.len()).unwrap().to_le_bytes();
        let bytes = [&plain, &[15][..], &length, names].concat();
        table().restore(opened.id(), &bytes).map(|_| ()).map_err(|error| error.kind())
    };
    assert_eq!(said(b"dynamo"), Ok(()));
    for bad in [b"".as_slice(), b"b,a", b"a,a", b"a,", b"\xff"] {
        assert_eq!(said(bad), Err(ErrorKind::Corrupt), "{bad:?}");
    }

    // All clients' wishes since the start; the first one's replace what was restored.
    let table = table();
    let restored = table.restore(opened.id(), &opened.encoded()).unwrap().unwrap();
    assert_eq!(restored.hash_schemes().len(), 2);
    for (wish, count) in [("llm_d", 1), ("dynamo", 2), ("llm_d", 2)] {
        let wishes = Wishes { keep_tokens: true, hash_schemes: [wish.to_owned()].into() };
        table.open(spec.clone(), wishes).unwrap();
        assert_eq!(restored.hash_schemes().len(), count, "{wish}");
    }
}

#[test]
fn a_root_that_was_restored_is_a_root_seen() {
    let identity = |root: u8| Identity {
        tenant: "t".into(),
        model: "m".into(),
        engine: "e".into(),
        dtype: "d".into(),
        block_tokens: 1,
        parts: vec![PartSpec { group: 0, rank: 0, bytes: 1 }],
        hash_algorithm: "sha256".into(),
        hash_bytes: 32,
        hash_root: vec![root],
        ..Identity::default()
    };
    let spec = |root| NamespaceSpec::Engine(Box::new(identity(root)));
    let before = table().open(spec(1), false).unwrap().namespace;
    let table = table();
    table.restore(before.id(), &before.encoded()).unwrap().unwrap();
    assert_eq!(table.open(spec(2), false).unwrap().warnings.len(), 1);
}

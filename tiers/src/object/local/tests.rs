//! Copies that are whole, damaged, and of another log.

use bytes::Bytes;

use super::*;
use crate::object::{format::Role, names::Seq, rig_tests::owner};

fn id(seq: u64) -> ManifestId {
    owner().manifest(Seq { epoch: 1, seq })
}

fn record() -> EpochRecord {
    EpochRecord {
        cluster: owner().cluster,
        id: owner().epoch(4),
        holder: "node-a".into(),
        role: Role::Own,
        opened_unix_ms: 5,
        adopted_from: None,
    }
}

#[tokio::test]
async fn copies_are_read_back_kept_and_deleted() {
    let dir = tempfile::tempdir().unwrap();
    let local = Local::new(dir.path().join("object"));
    assert!(local.read(id(1)).await.is_none() && local.whose().await.is_none());
    for seq in 1..=3 {
        local.store(id(seq), Bytes::from(format!("object {seq}"))).await;
    }
    local.sign(&record()).await;
    assert_eq!(local.read(id(2)).await.unwrap(), "object 2");
    assert_eq!(local.whose().await, Some(record()));
    local.keep_only(vec![id(3)]).await;
    assert!(local.read(id(2)).await.is_none());
    assert_eq!(local.read(id(3)).await.unwrap(), "object 3");
    assert_eq!(local.whose().await, Some(record()));
    local.clear().await;
    assert!(local.read(id(3)).await.is_none() && local.whose().await.is_none());
}

#[tokio::test]
async fn nothing_is_left_beside_and_a_damaged_signature_is_none() {
    let dir = tempfile::tempdir().unwrap();
    let local = Local::new(dir.path().to_owned());
    std::fs::write(dir.path().join("0000000001-0000000001.draft"), "half").unwrap();
    local.store(id(2), Bytes::from_static(b"whole")).await;
    local.sign(&record()).await;
    local.keep_only(vec![id(2)]).await;
    let names = std::fs::read_dir(dir.path()).unwrap().map(|it| it.unwrap().file_name());
    let mut names: Vec<_> = names.map(|it| it.into_string().unwrap()).collect();
    names.sort();
    assert_eq!(names, ["0000000001-0000000002", "of"]);
    std::fs::write(dir.path().join("of"), "somebody").unwrap();
    assert_eq!(local.whose().await, None);
}

#[tokio::test]
async fn a_directory_that_cannot_be_written_is_only_a_warning() {
    let dir = tempfile::tempdir().unwrap();
    let in_the_way = dir.path().join("file");
    std::fs::write(&in_the_way, "x").unwrap();
    let local = Local::new(in_the_way);
    local.store(id(1), Bytes::from_static(b"x")).await;
    local.sign(&record()).await;
    assert!(local.read(id(1)).await.is_none() && local.whose().await.is_none());
}

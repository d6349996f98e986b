//! A directory of segments and an index as format version 1 wrote them: every later version reads it.
//!
//! It is in `src/testing/fixtures/nvme-1` and stays as it is: a version that writes other bytes gets a
//! directory of its own beside it, and a test that reads both. To write it again on purpose, while
//! version 1 is not released:
//!
//! ```text
//! KVSTRATA_REWRITE_FIXTURE=1 cargo test -p kvstrata-tiers nvme::tests::fixture
//! ```
//! Blocks 0 to 19 of 1 KiB are in two sealed segments and one that a kill has left without a table;
//! 3, 4 and 12 were removed, and 4 was put again.

use std::{
    collections::BTreeSet,
    fs, io,
    path::{Path, PathBuf},
};

use super::rig::{Rig, open_index};
use crate::{
    nvme::device::{Engine, open},
    store::BlockStore,
};

const BLOCK_BYTES: u32 = 1024;

fn home() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src/testing/fixtures/nvme-1")
}

async fn rig(directory: &Path) -> Rig {
    let index = open_index(&directory.join("index")).await;
    let mut rig = Rig::on(open(&directory.join("segments"), Engine::Pread).unwrap(), index);
    rig.parts = vec![BLOCK_BYTES];
    rig
}

/// What is read of the fixture; RocksDB makes the others anew.
fn is_kept(name: &str) -> bool {
    !name.starts_with("LOG") && name != "LOCK"
}

fn copy(from: &Path, to: &Path) -> io::Result<()> {
    for part in ["segments", "index"] {
        fs::create_dir_all(to.join(part))?;
        for file in fs::read_dir(from.join(part))? {
            let name = file?.file_name();
            if name.to_str().is_some_and(is_kept) {
                fs::copy(from.join(part).join(&name), to.join(part).join(&name))?;
            }
        }
    }
    Ok(())
}

async fn write_again() {
    let directory = tempfile::tempdir().unwrap();
    fs::create_dir(directory.path().join("segments")).unwrap();
    let life = rig(directory.path()).await.start().await;
    life.put(0..8).await;
    life.store.close().await.unwrap();
    drop(life);
    let life = rig(directory.path()).await.start().await;
    life.put(8..14).await;
    life.remove([3, 4, 12]).await;
    // Killed.
    drop(life);
    let life = rig(directory.path()).await.start().await;
    life.put([4]).await;
    life.put(14..20).await;
    life.store.close().await.unwrap();
    drop(life);
    // Held until the life has ended for good.
    drop(open_index(&directory.path().join("index")).await);
    drop(fs::remove_dir_all(home()));
    copy(directory.path(), &home()).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_version_1_wrote_is_read() {
    if std::env::var_os("KVSTRATA_REWRITE_FIXTURE").is_some() {
        write_again().await;
    }
    let there: BTreeSet<u64> = (0..20).filter(|number| ![3, 12].contains(number)).collect();
    for lost in [false, true] {
        let directory = tempfile::tempdir().unwrap();
        copy(&home(), directory.path()).unwrap();
        if lost {
            open_index(&directory.path().join("index")).await.clear().unwrap();
        }
        let rig = rig(directory.path()).await;
        if !lost {
            let report = rig.verify().await;
            assert_eq!(report.problems, [], "{report}");
            assert_eq!((report.live_blocks, report.segments), (18, 3));
        }
        let life = rig.start().await;
        assert_eq!(life.hits(0..30).await, there, "index lost: {lost}");
        let again = life.works(&rig).await;
        assert_eq!(again.hits(0..30).await, there, "index lost: {lost}");
    }
}

//! Whose directory it is, whose blocks they are, and what is done about what is not ours.

use std::fs;

use super::{Home, ON_NVME, count_right, store};
use crate::{
    harness::Server,
    tmpfs::Tmpfs,
    wire::{Wire, namespace},
};

/// The exit code of a server that did not start.
const FAILED: Option<i32> = Some(1);

/// Stores blocks of one server's life and ends it.
async fn fill(home: &Home, blocks: u64) {
    let server = home.server().start().await;
    let mut wire = Wire::connect(&server, namespace("m")).await;
    store(&mut wire, 0..blocks, true).await;
    drop(wire);
    server.stop(&[]).await;
}

async fn count(server: &Server, blocks: u64) -> usize {
    let mut wire = Wire::connect(server, namespace("m")).await;
    count_right(&mut wire, 0..blocks).await
}

#[tokio::test]
async fn a_directory_of_another_node_is_set_aside_and_not_served() {
    let home = Home::new();
    fill(&home, 50).await;
    let kept = home.segments();
    let server = home.server().set("node.name", "node-b").start().await;
    assert_eq!((count(&server, 50).await, server.metric(ON_NVME).await), (0, 0.0));
    let log = server.stop(&["aside"]).await;
    let told = log.lines().find(|line| line.contains(" WARN ") && line.contains("node-a"));
    assert!(told.is_some_and(|line| line.contains("aside-1")), "{log}");
    let aside = home.data.path().join("kvstrata-nvme.aside-1/segments");
    assert!(kept.iter().all(|path| aside.join(path.file_name().unwrap()).exists()));
    // Nothing was lost: moved back, it is node-a's as before.
    fs::remove_dir_all(home.tier()).unwrap();
    fs::rename(aside.parent().unwrap(), home.tier()).unwrap();
    let server = home.server().start().await;
    assert_eq!(count(&server, 50).await, 50);
    server.stop(&[]).await;
}

#[tokio::test]
async fn a_second_server_on_a_directory_is_refused_and_the_first_goes_on() {
    let home = Home::new();
    let first = home.server().start().await;
    let mut wire = Wire::connect(&first, namespace("m")).await;
    store(&mut wire, 0..20, true).await;
    let (code, said) = home.server().start_refused().await;
    assert_eq!(code, FAILED, "{said}");
    let holder = format!("process {}", first.process_id());
    for part in ["nvme.path", "in use by", &holder, "another directory"] {
        assert!(said.contains(part), "{part}:\n{said}");
    }
    store(&mut wire, 20..40, true).await;
    drop(wire);
    assert_eq!(count(&first, 40).await, 40);
    first.stop(&[]).await;
}

#[tokio::test]
async fn a_path_that_cannot_be_written_is_refused_by_its_name() {
    let home = Home::new();
    let file = home.data.path().join("a file");
    fs::write(&file, "").unwrap();
    let read_only = Tmpfs::mount("a_path_that_cannot_be_written_is_refused_by_its_name", "ro");
    let paths = [Some(file.join("tier")), read_only.as_ref().map(|mount| mount.path().to_owned())];
    for path in paths.into_iter().flatten() {
        let (code, said) = home.server_at(&path).start_refused().await;
        assert_eq!(code, FAILED, "{said}");
        for part in ["nvme.path", path.to_str().unwrap(), "that this process can write"] {
            assert!(said.contains(part), "{part}:\n{said}");
        }
    }
}

#[tokio::test]
async fn blocks_of_another_secret_are_dropped_and_counted() {
    let home = Home::new();
    fill(&home, 50).await;
    let other = Home { data: home.data, ..Home::new() };
    let server = other.server().start().await;
    assert_eq!((count(&server, 50).await, server.metric(ON_NVME).await), (0, 0.0));
    assert_eq!(server.metric("kvstrata_nvme_stale_entries_total").await, 50.0);
    let told = "blocks of another identity secret are dropped blocks=50";
    let log = server.stop(&[told]).await;
    assert_eq!(log.matches(told).count(), 1, "{log}");
    // Told once, and gone.
    fill(&other, 50).await;
    let server = other.server().start().await;
    assert_eq!(count(&server, 50).await, 50);
}

#[tokio::test]
async fn a_lost_index_is_made_anew_from_the_segments() {
    let home = Home::new();
    fill(&home, 300).await;
    fs::remove_dir_all(home.tier().join("index")).unwrap();
    let server = home.server().start().await;
    assert_eq!((count(&server, 300).await, server.metric(ON_NVME).await), (300, 300.0));
    let log = server.kill();
    let found = log.lines().find(|line| line.contains("nvme tier recovered")).unwrap();
    assert!(!found.contains("replayed=0 "), "{found}");
    // Damaged instead of gone.
    let index = fs::read_dir(home.tier().join("index")).unwrap().map(|file| file.unwrap().path());
    for file in index.filter(|file| !file.ends_with("CURRENT") && !file.ends_with("IDENTITY")) {
        let bytes = fs::metadata(&file).unwrap().len();
        fs::write(&file, vec![0x5A; usize::try_from(bytes).unwrap()]).unwrap();
    }
    let server = home.server().start().await;
    assert_eq!((count(&server, 300).await, server.metric(ON_NVME).await), (300, 300.0));
    assert!(server.metric("kvstrata_nvme_index_rebuilds_total").await >= 1.0);
    server.stop(&["index"]).await;
}

//! `kvstrata verify`: exit codes, text and JSON.

use std::{fs, path::Path, process::Output};

use kvstrata_tiers::nvme::directory::Directory;
use serde_json::Value;

use crate::harness::command;

const FIXTURE: &str = "tiers/src/testing/fixtures/nvme-1";

fn verify(directory: &tempfile::TempDir, arguments: &[&str]) -> Output {
    let path = directory.path().to_str().unwrap();
    command(directory).arg("verify").args(arguments).arg(path).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A tier's directory with the blocks of the fixture.
fn with_blocks() -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    let store = [3; 16];
    let tier = Directory::open(directory.path(), "node", store).unwrap();
    for (from, to) in [("segments", tier.segments()), ("index", tier.index())] {
        for file in fs::read_dir(Path::new(FIXTURE).join(from)).unwrap() {
            let file = file.unwrap();
            fs::copy(file.path(), to.join(file.file_name())).unwrap();
        }
    }
    directory
}

#[test]
fn a_whole_directory_is_clean_and_a_damaged_one_is_not() {
    let directory = with_blocks();
    let output = verify(&directory, &[]);
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
    assert!(text(&output.stdout).contains("live blocks       18"), "{}", text(&output.stdout));
    let json: Value = serde_json::from_slice(&verify(&directory, &["--json"]).stdout).unwrap();
    assert_eq!((&json["live_blocks"], &json["problem_count"]), (&18.into(), &0.into()));

    let segment = directory.path().join("kvstrata-nvme/segments/0000000000000001.seg");
    let mut bytes = fs::read(&segment).unwrap();
    // The payload of the first block, behind its header: page 1 is the namespace.
    bytes[2 * 4096 + 500] ^= 1;
    fs::write(&segment, bytes).unwrap();
    let output = verify(&directory, &["--json"]);
    assert_eq!(output.status.code(), Some(1));
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json["problems"][0]["what"], "payload");
    assert_eq!((&json["lost_blocks"], &json["problems"][0]["segment"]), (&1.into(), &1.into()));
}

#[test]
fn a_lost_index_is_a_problem_and_the_segments_are_checked() {
    let directory = with_blocks();
    fs::remove_file(directory.path().join("kvstrata-nvme/index/CURRENT")).unwrap();
    let output = verify(&directory, &["--json"]);
    assert_eq!(output.status.code(), Some(1));
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json["problems"][0]["what"], "index");
    assert!(json["unindexed_blocks"].as_u64().unwrap() >= 18, "{json}");
}

#[test]
fn nothing_to_check_is_bad_usage_and_makes_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let output = verify(&directory, &[]);
    assert_eq!(output.status.code(), Some(64), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("nvme.path"), "{}", text(&output.stderr));
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
}

#[test]
fn a_directory_in_use_is_left_alone() {
    let directory = with_blocks();
    let held = Directory::open(directory.path(), "node", [0; 16]).unwrap();
    let output = verify(&directory, &[]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("in use by process"), "{}", text(&output.stderr));
    drop(held);
    assert!(verify(&directory, &[]).status.success());
}

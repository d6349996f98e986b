//! Every case of what can be found, two processes at once, and disks that refuse.

use tempfile::TempDir;

use super::*;

const STORE: [u8; 16] = [0xa5; 16];
const OTHER_STORE: [u8; 16] = [1; 16];

fn open(root: &TempDir, node: &str, random: [u8; 16]) -> Directory {
    Directory::open(root.path(), node, random).unwrap()
}

/// A directory of node `a` with one segment in it, closed.
fn filled(root: &TempDir) -> PathBuf {
    let directory = open(root, "a", STORE);
    fs::write(directory.segments().join("1"), "blocks").unwrap();
    root.path().join(NAME)
}

fn names(path: &Path) -> Vec<String> {
    let entries = fs::read_dir(path).unwrap();
    let mut names: Vec<_> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// What was moved aside as number `number` still has its segment.
fn assert_aside(root: &TempDir, number: u32) {
    let aside = root.path().join(format!("{NAME}.aside-{number}"));
    assert_eq!(fs::read_to_string(aside.join(SEGMENTS).join("1")).unwrap(), "blocks");
}

#[test]
fn the_first_start_makes_it_and_the_next_ones_keep_it() {
    let root = tempfile::tempdir().unwrap();
    let deep = root.path().join("not").join("there");
    let first = Directory::open(&deep, "a", STORE).unwrap();
    assert_eq!((first.store(), &first.started_empty), (STORE, &Some(Reason::New)));
    assert_eq!(names(&deep.join(NAME)), [IDENTITY, INDEX, LOCK, SEGMENTS]);
    assert!(first.segments().is_dir() && first.index().is_dir());
    fs::write(first.segments().join("1"), "blocks").unwrap();
    drop(first);
    let second = Directory::open(&deep, "a", OTHER_STORE).unwrap();
    assert_eq!((second.store(), &second.started_empty), (STORE, &None));
    assert_eq!(names(&second.segments()), ["1"]);
    assert_eq!(names(&deep), [NAME]);
}

#[test]
fn an_interrupted_start_is_finished() {
    for left in [&[][..], &[LOCK], &[LOCK, DRAFT]] {
        let root = tempfile::tempdir().unwrap();
        let own = root.path().join(NAME);
        fs::create_dir_all(own.join(SEGMENTS)).unwrap();
        for name in left {
            fs::write(own.join(name), "half").unwrap();
        }
        let directory = open(&root, "a", STORE);
        assert_eq!(directory.started_empty, Some(Reason::New), "{left:?}");
        assert_eq!(names(root.path()), [NAME]);
        drop(directory);
        assert_eq!(open(&root, "a", OTHER_STORE).store(), STORE);
    }
}

#[test]
fn what_is_not_ours_is_moved_aside_whole_and_told() {
    let damage =
        |text: &'static str| move |own: &Path| fs::write(own.join(IDENTITY), text).unwrap();
    type Change = Box<dyn Fn(&Path)>;
    let cases: Vec<(Change, Reason)> = vec![
        (Box::new(damage("kvstrata-nvme 2\nsomething new\n")), Reason::OtherVersion(2)),
        (Box::new(damage("")), Reason::Damaged),
        (Box::new(damage("kvstrata-nvme 1\n")), Reason::Damaged),
        (Box::new(|own| fs::remove_file(own.join(IDENTITY)).unwrap()), Reason::Foreign),
        (
            Box::new(|own| {
                let text = fs::read_to_string(own.join(IDENTITY)).unwrap();
                fs::write(own.join(IDENTITY), text.replace("a5", "a4")).unwrap();
            }),
            Reason::Damaged,
        ),
        (
            Box::new(|own| {
                fs::remove_file(own.join(IDENTITY)).unwrap();
                fs::create_dir(own.join(IDENTITY)).unwrap();
            }),
            Reason::Damaged,
        ),
    ];
    for (change, reason) in cases {
        let root = tempfile::tempdir().unwrap();
        change(&filled(&root));
        let directory = open(&root, "a", OTHER_STORE);
        assert_eq!((&directory.started_empty, directory.store()), (&Some(reason), OTHER_STORE));
        assert!(names(&directory.segments()).is_empty());
        assert_aside(&root, 1);
    }
}

#[test]
fn another_nodes_directory_is_moved_aside_and_no_aside_is_overwritten() {
    let root = tempfile::tempdir().unwrap();
    filled(&root);
    for (number, node) in (1..=ASIDE_MAX).zip(["b", "a"].into_iter().cycle()) {
        let directory = open(&root, node, OTHER_STORE);
        let before = if node == "b" { "a" } else { "b" };
        assert_eq!(directory.started_empty, Some(Reason::OtherNode(before.to_owned())));
        fs::write(directory.segments().join("1"), "blocks").unwrap();
        assert_aside(&root, number);
    }
    let refused = Directory::open(root.path(), "c", STORE).unwrap_err().to_string();
    assert!(refused.starts_with("nvme.path: "), "{refused}");
    assert!(refused.contains("belongs to node a") && refused.contains("aside-8"), "{refused}");
    assert_eq!(open(&root, "a", STORE).started_empty, None, "what was refused is left as it was");
    fs::remove_dir_all(root.path().join(format!("{NAME}.aside-3"))).unwrap();
    assert!(Directory::open(root.path(), "c", STORE).is_ok());
    assert_aside(&root, 3);
}

#[test]
fn files_of_somebody_else_get_nothing_added() {
    let root = tempfile::tempdir().unwrap();
    let own = root.path().join(NAME);
    fs::create_dir(&own).unwrap();
    fs::write(own.join("thesis.txt"), "years").unwrap();
    assert_eq!(open(&root, "a", STORE).started_empty, Some(Reason::Foreign));
    let aside = root.path().join(format!("{NAME}.aside-1"));
    assert_eq!(names(&aside), ["thesis.txt"]);
    fs::remove_dir_all(&own).unwrap();
    fs::write(&own, "a file where the directory should be").unwrap();
    assert_eq!(open(&root, "a", STORE).started_empty, Some(Reason::Foreign));
    assert!(root.path().join(format!("{NAME}.aside-2")).is_file());
}

#[test]
fn a_second_open_is_refused_and_says_by_whom() {
    let root = tempfile::tempdir().unwrap();
    let first = open(&root, "a", STORE);
    for node in ["a", "b"] {
        let refused = Directory::open(root.path(), node, OTHER_STORE).unwrap_err();
        assert!(matches!(refused, DirectoryError::Held { .. }));
        let said = refused.to_string();
        let holder = format!("process {} (node a)", std::process::id());
        assert!(said.starts_with("nvme.path: ") && said.contains(&holder), "{said}");
    }
    assert_eq!(names(root.path()), [NAME], "what is in use is not moved");
    drop(first);
    assert_eq!(open(&root, "a", OTHER_STORE).started_empty, None);
}

#[test]
fn of_many_that_open_at_once_one_has_it() {
    let root = tempfile::tempdir().unwrap();
    let opened: Vec<_> = std::thread::scope(|scope| {
        let open = |number: u8| {
            let path = root.path();
            scope.spawn(move || Directory::open(path, "a", [number; 16]))
        };
        let threads: Vec<_> = (0..8).map(open).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(opened.iter().filter(|opened| opened.is_ok()).count(), 1);
    let held = |opened: &&Result<Directory, _>| matches!(opened, Err(DirectoryError::Held { .. }));
    assert_eq!(opened.iter().filter(held).count(), 7);
}

#[test]
fn a_place_that_cannot_be_written_is_named() {
    let root = tempfile::tempdir().unwrap();
    let file = root.path().join("file");
    fs::write(&file, "").unwrap();
    // Not even root can write below these.
    for path in [Path::new("/proc/kvstrata"), &file, &file.join("below")] {
        let refused = Directory::open(path, "a", STORE).unwrap_err().to_string();
        assert!(refused.starts_with("nvme.path: "), "{refused}");
        assert!(refused.contains(path.to_str().unwrap()), "{refused}");
        assert!(refused.contains("can write"), "{refused}");
    }
}

#[test]
fn names_are_kept_however_they_are_written() {
    let root = tempfile::tempdir().unwrap();
    for node in ["knoten-ä", "two\nlines"] {
        open(&root, node, STORE);
        assert_eq!(open(&root, node, OTHER_STORE).started_empty, None);
    }
}

#[test]
fn the_bytes_of_an_identity_are_these() {
    let identity = Identity { node: "a".to_owned(), store: STORE };
    let text = identity.to_text();
    let expected = "kvstrata-nvme 1\nstore a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5\nnode a\ncheck ";
    assert!(text.starts_with(expected), "{text}");
    assert_eq!(Identity::of_text(&text), Ok(identity));
}

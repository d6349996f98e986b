//! put, get, lookup and stats, as typed.

use std::{
    fs,
    io::Write,
    path::Path,
    process::{Output, Stdio},
};

use serde_json::Value;

use crate::{
    client::pattern,
    harness::{Server, command},
};

/// A server and a directory for files.
struct Shell {
    server: Server,
    directory: tempfile::TempDir,
}

impl Shell {
    async fn open() -> Self {
        let server = Server::builder().dram("512MiB").start().await;
        Self { server, directory: tempfile::tempdir().unwrap() }
    }

    fn run(&self, arguments: &[&str]) -> Output {
        run(&self.directory, self.server.grpc(), arguments, b"")
    }

    fn path(&self, name: &str) -> String {
        self.directory.path().join(name).to_str().unwrap().to_owned()
    }
}

fn run(directory: &tempfile::TempDir, endpoint: &str, arguments: &[&str], input: &[u8]) -> Output {
    let mut child = command(directory)
        .args(arguments)
        .env("KVSTRATA_ENDPOINT", endpoint)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(input).unwrap();
    child.wait_with_output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn ok(output: &Output) -> String {
    assert!(output.status.success(), "{}", text(&output.stderr));
    text(&output.stdout)
}

#[tokio::test]
async fn a_file_comes_back_byte_for_byte() {
    let shell = Shell::open().await;
    let value = pattern(1, 0, 5_000_000);
    fs::write(shell.path("in"), &value).unwrap();
    let put = ok(&shell.run(&["put", "key", &shell.path("in")]));
    assert!(put.contains("key: stored 4.8 MiB"), "{put}");
    let again = ok(&shell.run(&["put", "key", &shell.path("in")]));
    assert!(again.contains("already"), "{again}");

    ok(&shell.run(&["get", "key", "-o", &shell.path("out")]));
    assert!(fs::read(shell.path("out")).unwrap() == value);
    let to_stdout = shell.run(&["get", "key"]);
    assert!(to_stdout.status.success() && to_stdout.stdout == value);
    shell.server.stop(&[]).await;
}

#[tokio::test]
async fn the_first_value_stays() {
    let shell = Shell::open().await;
    let put =
        |value: &[u8]| run(&shell.directory, shell.server.grpc(), &["put", "key", "-"], value);
    ok(&put(b"first"));
    let second = put(b"second");
    assert!(!second.status.success());
    assert!(text(&second.stderr).contains("key has other bytes"), "{}", text(&second.stderr));
    assert_eq!(ok(&shell.run(&["get", "key"])), "first");
    let empty = run(&shell.directory, shell.server.grpc(), &["put", "empty", "-"], b"");
    assert!(text(&empty.stderr).contains("0 bytes given, 1 to "), "{}", text(&empty.stderr));
}

#[tokio::test]
async fn namespaces_and_keys_do_not_meet() {
    let shell = Shell::open().await;
    let put = |arguments: &[&str]| ok(&run(&shell.directory, shell.server.grpc(), arguments, b"x"));
    put(&["put", "a", "-"]);
    put(&["put", "c", "-"]);
    let missing = shell.run(&["get", "a", "--namespace", "other"]);
    assert_eq!(missing.status.code(), Some(1));
    assert!(text(&missing.stderr).contains("a: not stored"), "{}", text(&missing.stderr));

    let json = ok(&shell.run(&["lookup", "a", "b", "c", "--json"]));
    let found: Value = serde_json::from_str(&json).unwrap();
    let places: Vec<_> = found.as_array().unwrap().iter().map(|key| &key["place"]).collect();
    assert_eq!(places, ["dram", "miss", "dram"]);
    let table = ok(&shell.run(&["lookup", "a", "b"]));
    assert!(table.contains("a  dram") && table.contains("b  miss"), "{table}");
}

#[tokio::test]
async fn stats_tell_what_happened() {
    let shell = Shell::open().await;
    ok(&run(&shell.directory, shell.server.grpc(), &["put", "key", "-"], b"12345"));
    ok(&shell.run(&["get", "key"]));
    ok(&shell.run(&["lookup", "key", "other"]));
    let stats: Value = serde_json::from_str(&ok(&shell.run(&["stats", "--json"]))).unwrap();
    assert_eq!(stats["tiers"][0]["blocks"], 1);
    assert_eq!(stats["tiers"][0]["get_bytes"], 5);
    assert_eq!(stats["lookups"]["asked"], 2);
    assert_eq!(stats["lookups"]["dram"], 1);
    let table = ok(&shell.run(&["stats"]));
    for piece in ["dram", "512.0 MiB", "2 blocks asked", "cli"] {
        assert!(table.contains(piece), "{piece} is missing in\n{table}");
    }
}

#[test]
fn without_a_server_every_command_says_what_to_do() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("file");
    fs::write(&file, b"x").unwrap();
    let file = Path::to_str(&file).unwrap();
    for arguments in [&["put", "key", file][..], &["get", "key"], &["lookup", "key"], &["stats"]] {
        // Port 1 is reserved and never listened on.
        let output = run(&directory, "127.0.0.1:1", arguments, b"");
        assert_eq!(output.status.code(), Some(1), "{arguments:?}");
        let errors = text(&output.stderr);
        assert!(errors.contains("start it with `kvstrata serve`"), "{errors}");
    }
}

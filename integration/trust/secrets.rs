//! Secrets stay where they are kept: no log, page, answer, argument or environment has one.

use kvstrata::client::{Client, ClientOptions, GetOptions, Path as Way};

use super::{A, B, Files, OPERATOR, options, page, pki::Ca};
use crate::{
    client::{Seen, batch, hashes, namespace},
    harness::{SERVER_WAIT, Server, command, wait_until},
};

const PARTS: [u32; 1] = [4096];
/// A token that is not in the file, as if somebody had mistaken it.
const WRONG: &str = "wrong-token-0123456789-0123456789";
/// What is written in the place of a token, too short to be one.
const SHORT: &str = "hunter2-hunter2";

/// Everything that must be found nowhere, with a name for it.
fn secrets(files: &Files) -> Vec<(&'static str, String)> {
    let read = |name: &str| std::fs::read_to_string(files.path(name)).unwrap();
    let key = read("key");
    // A line of the key: however it was printed, that would be in it.
    let line = key.lines().nth(1).unwrap().to_owned();
    let identity = read("identity").trim().to_owned();
    assert!(line.len() > 40 && identity.len() == 64);
    let given = [("a", A), ("b", B), ("operator", OPERATOR), ("wrong", WRONG), ("short", SHORT)];
    let given = given.map(|(name, token)| (name, token.to_owned()));
    given.into_iter().chain([("key", line), ("identity", identity)]).collect()
}

fn assert_none(files: &Files, place: &str, text: &str) {
    for (name, secret) in secrets(files) {
        assert!(!text.contains(&secret), "{place} has the secret {name}");
    }
}

/// Does what a client does over both paths, and what it should not.
async fn use_it(server: &Server, files: &Files) {
    for (token, way) in [(A, Way::Grpc), (B, Way::Bulk)] {
        let options = options(token, way, Some(files.trusting()));
        let client = Client::connect(server.grpc(), options).await.unwrap();
        let handle = client.open(namespace(&PARTS)).await.unwrap();
        let session = client.session("secrets").await.unwrap();
        handle.put(&session, &batch(0..4, &PARTS)).await.unwrap();
        let mut seen = Seen::default();
        handle.get(&hashes(0..4), GetOptions::default(), &mut seen).await.unwrap();
        assert_eq!(seen.blocks.len(), 4);
        let stats = format!("{:?} {client:?}", client.stats().await.unwrap());
        assert_none(files, "a tenant's stats", &stats);
    }
    let wrong = options(WRONG, Way::Grpc, Some(files.trusting()));
    let shown = format!("{wrong:?}");
    assert_none(files, "the options of a client", &shown);
    let client = Client::connect(server.grpc(), wrong).await.unwrap();
    let refused = client.stats().await.unwrap_err();
    assert_none(files, "a refusal", &format!("{refused} {refused:?}"));
    let untrusting = ClientOptions { token: Some(A.parse().unwrap()), ..ClientOptions::default() };
    let client = Client::connect(server.grpc(), untrusting).await.unwrap();
    let failed = client.stats().await.unwrap_err();
    assert_none(files, "a failed connection", &format!("{failed:?}"));
}

/// What a command of ours prints, to both streams.
fn printed(files: &Files, arguments: &[&str]) -> String {
    let home = tempfile::tempdir().unwrap();
    let mut command = command(&home);
    command.env("KVSTRATA_TOKEN", OPERATOR).env("KVSTRATA_TLS_CA", files.path("ca"));
    let output = command.args(arguments).output().unwrap();
    assert!(output.status.success(), "{arguments:?}: {output:?}");
    let text = |bytes| String::from_utf8(bytes).unwrap();
    text(output.stdout) + &text(output.stderr)
}

#[tokio::test]
async fn no_secret_is_logged_shown_or_in_the_process_table() {
    let files = Files::new();
    Ca::new().give(&files);
    files.write("tenants", "[a]\ndram_floor = \"1MiB\"\nrequests_per_second = 100000\n");
    let server = files.tls().set("log.level", "debug").set("server.resp_listen", "127.0.0.1:0");
    let server = server.set("identity.secret_file", &files.text("identity"));
    let server = server.set("auth.tenants_file", &files.text("tenants"));
    let server = server.set("auth.tokens_file", &files.text("tokens")).start().await;
    use_it(&server, &files).await;

    // Files that cannot be used are told of, and not quoted.
    files.write("tokens", &format!("a {A}\nb {B}\nops {OPERATOR} operator\nc {SHORT}\n"));
    wait_until("the refusal of the file", SERVER_WAIT, async || {
        server.log().contains("line 4: token: 15 characters given")
    })
    .await;

    let ca = files.path("ca");
    for path in ["/metrics", "/livez", "/readyz", "/nowhere"] {
        let (_, body) = page(&server, Some(&ca), Some(OPERATOR), path).await;
        assert!(
            path != "/metrics" || body.contains("kvstrata_tenant_bytes{tenant=\"a\""),
            "{body}"
        );
        assert_none(&files, path, &body);
    }
    let process = format!("/proc/{}", server.process_id());
    for name in ["cmdline", "environ"] {
        let bytes = std::fs::read(format!("{process}/{name}")).unwrap();
        assert!(!bytes.is_empty());
        assert_none(&files, name, &String::from_utf8_lossy(&bytes));
    }
    let endpoint = server.grpc().to_owned();
    let stats = printed(&files, &["stats", "--endpoint", &endpoint, "--json"]);
    assert!(stats.contains("\"tenants\""), "{stats}");
    assert_none(&files, "stats", &stats);
    let tokens = format!("auth.tokens_file={}", files.text("tokens"));
    let identity = format!("identity.secret_file={}", files.text("identity"));
    let check = printed(&files, &["serve", "--check", "--set", &tokens, "--set", &identity]);
    assert_none(&files, "serve --check", &check);
    let log = server.stop(&["files changed and cannot be used"]).await;
    assert!(log.contains("DEBUG") && log.contains("namespace opened"), "debug lines are there");
    assert_none(&files, "the log", &log);
}

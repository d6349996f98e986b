//! The admin listener: who may come in, what `kvstrata drain` does, and that clients have none of it.

use std::{
    os::unix::fs::PermissionsExt,
    process::{Child, Output, Stdio},
    time::Duration,
};

use kvstrata_proto::admin::v1::{
    DrainPhase, DrainRequest, StatusRequest, admin_client::AdminClient,
};
use tokio::time::Instant;
use tonic::{Code, transport::Channel};

use crate::{
    harness::{SERVER_WAIT, Server, command, wait_until},
    wire::{Wire, namespace, payload},
};

const TENANT: &str = "tenant-a-token-0123456789-0123456789";
const OPERATOR: &str = "operator-token-0123456789-0123456789";

/// `kvstrata drain` with these arguments, as a process that runs.
fn spawn(home: &tempfile::TempDir, arguments: &[&str], token: &str) -> Child {
    command(home)
        .arg("drain")
        .args(arguments)
        .env("KVSTRATA_TOKEN", token)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

fn drain(home: &tempfile::TempDir, arguments: &[&str], token: &str) -> Output {
    spawn(home, arguments, token).wait_with_output().unwrap()
}

fn said(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn refused(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(1), "{}", String::from_utf8_lossy(&output.stdout));
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[tokio::test]
async fn a_node_that_was_drained_waits_to_be_ended_and_draining_it_again_is_a_success() {
    let home = tempfile::tempdir().unwrap();
    let mut server = Server::builder().dram("8MiB").set("server.drain_grace", "60s").start().await;
    let admin = server.admin().to_owned();
    let at = ["--admin", &admin];
    let mut wire = Wire::connect(&server, namespace("m")).await;
    wire.put(&[1, 2]).await;
    assert!(said(&drain(&home, &[&at[..], &["--status"]].concat(), "")).contains("serving"));
    assert_eq!(server.page("/readyz").await.0, 200, "asking how it is drains nothing");

    let first = said(&drain(&home, &at, ""));
    assert!(first.contains("1 session(s)"), "it says at once that it has begun: {first}");
    wait_until("/readyz says 503", SERVER_WAIT, async || server.page("/readyz").await.0 == 503)
        .await;
    let mut waiting = spawn(&home, &[&at[..], &["--wait"]].concat(), "");
    assert_eq!(wire.get(&[1, 2]).await, [Some(payload(1)), Some(payload(2))], "reads go on");
    assert_eq!(waiting.try_wait().unwrap(), None, "a session is open");
    drop(wire);
    let drained = said(&waiting.wait_with_output().unwrap());
    assert!(drained.trim_end().ends_with("drained"), "{drained}");
    assert_eq!(server.page("/livez").await.0, 200, "whoever has started it ends it");
    let again = said(&drain(&home, &[&at[..], &["--wait"]].concat(), ""));
    assert_eq!(again.lines().count(), 1, "there is nothing to wait for: {again}");
    let late = Wire::without_session(&server, namespace("m")).await.open_session().await;
    assert_eq!(late.unwrap_err().code(), Code::Unavailable);

    let start = Instant::now();
    server.terminate();
    assert_eq!(server.exit_code().await, Some(0));
    assert!(start.elapsed() < Duration::from_secs(20), "no second grace: {:?}", start.elapsed());
    server.assert_quiet(&[]);
    let gone = refused(&drain(&home, &at, ""));
    assert!(gone.contains("cannot connect to the admin listener"), "{gone}");
}

#[tokio::test]
async fn sigterm_during_a_drain_ends_the_process_when_that_drain_is_over() {
    let home = tempfile::tempdir().unwrap();
    let mut server = Server::builder().dram("8MiB").set("server.drain_grace", "60s").start().await;
    let wire = Wire::connect(&server, namespace("m")).await;
    let waiting = spawn(&home, &["--wait", "--admin", server.admin()], "");
    wait_until("/readyz says 503", SERVER_WAIT, async || server.page("/readyz").await.0 == 503)
        .await;
    server.terminate();
    drop(wire);
    assert_eq!(server.exit_code().await, Some(0));
    assert!(said(&waiting.wait_with_output().unwrap()).contains("drained"));
    server.assert_quiet(&[]);
}

#[tokio::test]
async fn clients_have_no_admin_call_on_their_port() {
    let server = Server::builder().dram("8MiB").start().await;
    assert_ne!(server.admin(), server.grpc());
    let mut client = AdminClient::new(server.channel().await);
    assert_eq!(client.drain(DrainRequest {}).await.unwrap_err().code(), Code::Unimplemented);
    assert_eq!(client.status(StatusRequest {}).await.unwrap_err().code(), Code::Unimplemented);
    let admin = Channel::from_shared(format!("http://{}", server.admin())).unwrap();
    let mut admin = AdminClient::new(admin.connect().await.unwrap());
    let status = admin.status(StatusRequest {}).await.unwrap().into_inner();
    assert_eq!(status.drain.unwrap().phase(), DrainPhase::Serving);
    assert_eq!((status.members, server.page("/readyz").await.0), (1, 200));
    server.stop(&[]).await;
}

#[tokio::test]
async fn with_tokens_an_operators_is_asked_for_and_the_file_of_a_socket_is_enough() {
    let home = tempfile::tempdir().unwrap();
    let tokens = home.path().join("tokens");
    std::fs::write(&tokens, format!("a {TENANT}\nops {OPERATOR} operator\n")).unwrap();
    std::fs::set_permissions(&tokens, std::fs::Permissions::from_mode(0o600)).unwrap();
    let builder = || {
        let builder = Server::builder().dram("8MiB").set("server.drain_grace", "1s");
        builder.set("auth.tokens_file", tokens.to_str().unwrap())
    };
    let server = builder().start().await;
    let at = ["--admin", server.admin()];
    for (token, why) in [("", "none given"), (TENANT, "not an operator's")] {
        let text = refused(&drain(&home, &at, token));
        assert!(text.contains(why) && !text.contains(TENANT), "{text}");
    }
    assert_eq!(server.page("/readyz").await.0, 200);
    assert!(said(&drain(&home, &[&at[..], &["--wait"]].concat(), OPERATOR)).contains("drained"));
    server.stop(&[]).await;

    let socket = home.path().join("admin.sock");
    let at = format!("unix:{}", socket.display());
    let mut server = builder().set("server.admin_listen", &at).start().await;
    assert_eq!(socket.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    let drained = said(&drain(&home, &["--wait", "--admin", &at], ""));
    assert!(drained.contains("drained"), "no token is asked for: {drained}");
    server.terminate();
    assert_eq!(server.exit_code().await, Some(0));
    assert!(!socket.exists(), "it is taken away");
    server.assert_quiet(&[]);
}

//! What a server refuses to start with, and what it says then.

use super::{A, Files, assert_no_token, pki::Ca};
use crate::harness::{Server, command};

/// Exit code and what was said of a check of these settings.
fn check(settings: &[(&str, &str)]) -> (Option<i32>, String) {
    let home = tempfile::tempdir().unwrap();
    let mut command = command(&home);
    command.args(["serve", "--check"]);
    for (key, value) in settings {
        command.args(["--set", &format!("{key}={value}")]);
    }
    let output = command.output().unwrap();
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}

#[test]
fn other_hosts_are_not_let_in_without_tokens_unless_that_is_said() {
    assert_eq!(check(&[]).0, Some(0), "the defaults listen on loopback");
    for key in ["server.grpc_listen", "server.http_listen", "server.bulk_listen"] {
        for address in ["0.0.0.0:7400", "[::]:7400", "192.0.2.1:7400"] {
            let (code, said) = check(&[(key, address)]);
            assert_eq!(code, Some(64), "{key} {address}: {said}");
            let expected = format!("{key}: {address} given; allowed: 127.0.0.1:7400");
            assert!(said.contains(&expected), "{said}");
            assert!(said.contains("auth.tokens_file"), "{said}");
            assert!(said.contains("auth.allow_anonymous = true"), "{said}");
            assert!(said.contains("1 problem(s)"), "{said}");
            assert_eq!(check(&[(key, address), ("auth.allow_anonymous", "true")]).0, Some(0));
            assert_eq!(check(&[(key, address), ("auth.tokens_file", "/tokens")]).0, Some(0));
        }
        for address in ["127.0.0.1:7400", "127.1.2.3:7400", "[::1]:7400"] {
            assert_eq!(check(&[(key, address)]).0, Some(0), "{key} {address}");
        }
    }
}

#[test]
fn resp_beyond_loopback_wants_tls_too_unless_that_is_said() {
    let key = "server.resp_listen";
    let tokens = ("auth.tokens_file", "/tokens");
    assert_eq!(check(&[(key, "127.0.0.1:7400")]).0, Some(0));
    let (code, said) = check(&[(key, "0.0.0.0:7400"), tokens]);
    assert_eq!(code, Some(64), "{said}");
    assert!(
        said.contains("server.resp_listen: 0.0.0.0:7400 given; allowed: 127.0.0.1:7400"),
        "{said}"
    );
    assert!(said.contains("tls.cert_file") && said.contains("server.resp_plain = true"), "{said}");
    let (code, said) = check(&[(key, "0.0.0.0:7400"), ("server.resp_plain", "true")]);
    assert_eq!(code, Some(64), "tokens are wanted, too");
    assert!(said.contains("auth.tokens_file") && said.contains("1 problem(s)"), "{said}");
    let tls = [("tls.cert_file", "/cert"), ("tls.key_file", "/key")];
    assert_eq!(check(&[(key, "0.0.0.0:7400"), tokens, tls[0], tls[1]]).0, Some(0));
    assert_eq!(check(&[(key, "0.0.0.0:7400"), tokens, ("server.resp_plain", "true")]).0, Some(0));
    let (code, said) = check(&[("server.resp_plain", "true")]);
    assert_eq!(code, Some(64));
    assert!(said.contains("server.resp_plain: true given"), "{said}");
    assert_eq!(check(&[(key, "127.0.0.1:9402")]).0, Some(64), "the port of bulk");
}

#[test]
fn settings_that_contradict_one_another_are_refused() {
    let both = [("auth.tokens_file", "/tokens"), ("auth.allow_anonymous", "true")];
    let (code, said) = check(&both);
    assert_eq!(code, Some(64));
    assert!(said.contains("auth.allow_anonymous: true given"), "{said}");
    for (given, missing) in [
        ("tls.cert_file", "tls.key_file"),
        ("tls.key_file", "tls.cert_file"),
        ("tls.client_ca_file", "tls.cert_file"),
    ] {
        let (code, said) = check(&[(given, "/file")]);
        assert_eq!(code, Some(64));
        let expected = format!("{missing}: none given; allowed: a path, because {given} is given");
        assert!(said.contains(&expected), "{said}");
    }
}

/// What a server that must not start says, with a file of this name and text.
async fn refused(name: &str, text: &str) -> String {
    let files = Files::new();
    Ca::new().give(&files);
    files.write(name, text);
    let (code, said) = files.tls().start_refused().await;
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains(&files.text(name)), "{said}");
    said
}

#[tokio::test]
async fn files_that_cannot_be_used_are_named_and_never_quoted() {
    let secret = "hunter2-hunter2";
    let said = refused("tokens", &format!("a {secret}\n")).await;
    assert!(said.contains("line 1: token: 15 characters given, 32 to 4096 allowed"), "{said}");
    assert!(!said.contains(secret), "{said}");
    let said = refused("tokens", "# nobody\n").await;
    assert!(said.contains("nobody could come in"), "{said}");
    let said = refused("cert", "no certificate").await;
    assert!(said.contains("no certificate found, PEM required"), "{said}");
    let said = refused("key", secret).await;
    assert!(said.contains("no private key found") && !said.contains(secret), "{said}");
    let (_, key_of_another) = Ca::new().issue(|_params| {});
    let said = refused("key", &key_of_another).await;
    assert!(said.contains("tls.cert_file") && said.contains("certificate and key"), "{said}");

    let missing =
        Server::builder().set("auth.tokens_file", "/nowhere/tokens").start_refused().await;
    assert_eq!(missing.0, Some(1));
    assert!(missing.1.contains("auth.tokens_file: read /nowhere/tokens"), "{}", missing.1);
}

#[tokio::test]
async fn the_command_line_shows_a_token_and_never_prints_one() {
    let files = Files::new();
    Ca::new().give(&files);
    let server = files.tls().start().await;
    let home = tempfile::tempdir().unwrap();
    let stats = |token: &str, ca: bool| {
        let mut command = command(&home);
        command.args(["stats", "--endpoint", server.grpc()]).env("KVSTRATA_TOKEN", token);
        if ca {
            command.env("KVSTRATA_TLS_CA", files.path("ca"));
        }
        let output = command.output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    assert_eq!(stats(A, true), (Some(0), String::new()));
    let (code, said) = stats(A, false);
    assert!(code != Some(0) && said.contains("https://"), "{said}");
    let wrong = format!("{A}-wrong");
    let (code, said) = stats(&wrong, true);
    assert!(code == Some(1) && said.contains("not valid here"), "{said}");
    let (code, short) = stats("hunter2", true);
    assert!(code == Some(64) && short.contains("7 characters given"), "{short}");
    let (code, none) = stats("", true);
    assert!(code == Some(1) && none.contains("none given"), "{none}");
    for said in [said, short, none, server.stop(&[]).await] {
        assert_no_token(&said);
        assert!(!said.contains("hunter2") && !said.contains(&wrong), "{said}");
    }
}

//! Configuration: sources, their order, and every problem at once.

use std::path::{Path, PathBuf};

use kvstrata::config::{
    Auto, Config, FileSource, LogFormat, Maybe, NvmeEngine, Period, Size, Sources, load,
};

use crate::harness::command;

fn sources(file: &str, env: &[(&str, &str)], flags: &[(&str, &str)]) -> Sources {
    let owned = |pairs: &[(&str, &str)]| {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    };
    Sources {
        file: Some(FileSource { path: PathBuf::from("kvstrata.toml"), text: file.to_owned() }),
        env: owned(env),
        flags: owned(flags),
    }
}

/// (key, given) of each problem, in order of the key.
fn problems(sources: &Sources) -> Vec<(String, String)> {
    let refused = load(sources).expect_err("must be refused").0;
    assert!(refused.iter().all(|problem| !problem.allowed.is_empty()), "{refused:?}");
    let mut found: Vec<_> =
        refused.into_iter().map(|problem| (problem.key, problem.given)).collect();
    found.sort();
    found
}

#[test]
fn the_defaults_are_valid_and_print_as_they_are_read() {
    let defaults = load(&Sources::default()).unwrap();
    assert_eq!(defaults, Config::default());
    let printed = defaults.to_table().to_string();
    assert_eq!(load(&sources(&printed, &[], &[])).unwrap(), defaults);
}

#[test]
fn flags_win_over_the_environment_over_the_file_over_defaults() {
    let file = "lease.ttl_default = '10s'\nlease.ttl_max = '20s'\nnode.zone = 'file'";
    let env = [("KV_LEASE__TTL_MAX", "30s"), ("KV_NODE__ZONE", "env")];
    let config = load(&sources(file, &env, &[("node.zone", "flag")])).unwrap();
    assert_eq!(config.lease.ttl_default, "10s".parse::<Period>().unwrap());
    assert_eq!(config.lease.ttl_max, "30s".parse::<Period>().unwrap());
    assert_eq!(config.node.zone, "flag");
    assert_eq!(config.log, Config::default().log);
}

#[test]
fn the_environment_can_set_every_type() {
    let env = [
        ("KV_DRAM__CAPACITY", "1GiB"),
        ("KV_IDENTITY__SHARED_TENANT", "true"),
        ("KV_LOG__FORMAT", "json"),
        ("KV_NODE__NAME", "7"),
        ("KV_NVME__DAILY_WRITES", "none"),
        ("KV_NVME__ENGINE", "io_uring"),
        ("KV_NVME__PATH", "/data"),
        ("KV_SERVER__GRPC_LISTEN", "127.0.0.1:1"),
        ("KV_AUTH__ALLOW_ANONYMOUS", "true"),
        ("KV_TLS__CERT_FILE", "none"),
    ];
    let config = load(&sources("", &env, &[])).unwrap();
    assert_eq!(config.dram.capacity, Auto::Given(Size(1 << 30)));
    assert!(config.identity.shared_tenant && config.auth.allow_anonymous);
    assert_eq!(config.log.format, LogFormat::Json);
    assert_eq!(config.node.name, Auto::Given("7".to_owned()));
    assert_eq!(config.nvme.daily_writes, Auto::Given(Maybe::None));
    assert_eq!(config.nvme.engine, NvmeEngine::IoUring);
    assert_eq!(config.nvme.path.to_string(), "/data");
    assert_eq!(config.server.grpc_listen.to_string(), "127.0.0.1:1");
}

#[test]
fn every_problem_is_reported_at_once_with_key_and_value() {
    let file = "\
        [server]\n\
        grpc_listen = '0.0.0.0:9400'\n\
        http_listen = '0.0.0.0:9400'\n\
        drain_grace = '1h'\n\
        colour = 'blue'\n\
        [memory]\n\
        limit = 5\n\
        [lease]\n\
        ttl_default = 'soon'\n\
        ttl_max = '2h'\n\
        [nvme]\n\
        capacity = '1MiB'\n\
        segment_bytes = '3KiB'\n\
        daily_writes = 'never'\n\
        engine = 'steam'\n\
        [surprise]\n\
        a = 1\n";
    let env = [("KV_LOG", "debug"), ("KV_DRAM__CAPACITY", "1KiB"), ("KV_NODE__ZONE", "a b")];
    let found = problems(&sources(file, &env, &[("log.level", "loud"), ("nothing", "x")]));
    let expected = [
        ("KV_LOG", "an unknown key (environment)"),
        ("dram.capacity", "1KiB"),
        ("lease.ttl_default", "\"soon\" (file)"),
        ("lease.ttl_max", "2h"),
        ("log.level", "\"loud\""),
        ("memory.limit", "5 (file)"),
        ("node.zone", "\"a b\""),
        ("nothing", "\"x\" (flag)"),
        ("nvme.capacity", "1MiB"),
        ("nvme.daily_writes", "\"never\" (file)"),
        ("nvme.engine", "\"steam\" (file)"),
        ("nvme.segment_bytes", "3KiB"),
        ("server.colour", "\"blue\" (file)"),
        ("server.drain_grace", "1h"),
        ("server.grpc_listen", "0.0.0.0:9400"),
        ("server.http_listen", "0.0.0.0:9400"),
        ("server.http_listen", "0.0.0.0:9400"),
        ("surprise.a", "1 (file)"),
    ];
    let expected: Vec<_> =
        expected.iter().map(|(key, given)| ((*key).to_owned(), (*given).to_owned())).collect();
    assert_eq!(found, expected);
}

#[test]
fn a_file_that_is_not_toml_is_one_problem_beside_the_others() {
    let found = problems(&sources("this is = = no", &[("KV_LEASE__TTL_MAX", "2h")], &[]));
    let keys: Vec<_> = found.iter().map(|(key, _)| key.as_str()).collect();
    assert_eq!(keys, ["kvstrata.toml", "lease.ttl_max"]);
}

#[test]
fn a_section_in_place_of_a_value_and_the_reverse_are_problems() {
    let found = problems(&sources("server = 5\n[log.level]\ndeep = 1", &[], &[]));
    let keys: Vec<_> = found.iter().map(|(key, _)| key.as_str()).collect();
    assert_eq!(keys, ["log.level.deep", "server"]);
}

#[test]
fn the_binary_prints_all_problems_and_exits_with_64() {
    let directory = tempfile::tempdir().unwrap();
    let output = command(&directory)
        .args(["serve", "--set", "lease.ttl_max=2h"])
        .env("KV_MEMORY__LIMITS", "not-to-be-shown")
        .output()
        .unwrap();
    let told = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(64), "{told}");
    assert!(told.contains("2 problem(s)"), "{told}");
    assert!(told.contains("lease.ttl_max: 2h given; allowed: 10ms to 1h"), "{told}");
    assert!(!told.contains("not-to-be-shown"), "it may be a secret of something else: {told}");
    assert!(told.contains("KV_MEMORY__LIMITS: an unknown key (environment) given"), "{told}");
}

#[test]
fn a_limit_too_small_for_the_dram_is_refused_with_the_least_that_works() {
    let directory = tempfile::tempdir().unwrap();
    let output = command(&directory)
        .args(["serve", "--grpc-listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0"])
        .args(["--set", "memory.limit=256MiB", "--dram", "240MiB"])
        .output()
        .unwrap();
    let told = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(64), "{told}");
    assert!(told.contains("memory.limit: 256MiB given; allowed: at least"), "{told}");
}

#[test]
fn every_key_is_documented_with_its_default_and_no_other_is() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/configuration.md");
    let page = std::fs::read_to_string(path).unwrap();
    let documented: Vec<_> = page
        .lines()
        .filter_map(|line| line.strip_prefix("| `"))
        .filter_map(|row| row.split_once("` | `"))
        .map(|(key, rest)| (key.to_owned(), rest.split('`').next().unwrap_or("").to_owned()))
        .collect();
    let mut expected: Vec<_> = Config::default()
        .settings()
        .into_iter()
        .map(|(key, value)| {
            let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            (key, if value.is_empty() { "\"\"".to_owned() } else { value })
        })
        .collect();
    expected.sort();
    let mut sorted = documented.clone();
    sorted.sort();
    assert_eq!(sorted, expected);
}

#[test]
fn a_check_finds_what_a_start_would_find() {
    let directory = tempfile::tempdir().unwrap();
    let check = |setting: &str| {
        command(&directory).args(["serve", "--check", "--set", setting]).output().unwrap()
    };
    assert_eq!(check("memory.limit=1GiB").status.code(), Some(0));
    let refused = check("memory.limit=64MiB");
    assert_eq!(refused.status.code(), Some(64));
    let text = String::from_utf8_lossy(&refused.stderr);
    assert!(text.contains("memory.limit") && text.contains("at least"), "{text}");
}

/// The chart refuses keys that are not in its schema: it must know those of the server, and no others.
#[test]
fn the_chart_knows_the_servers_keys() {
    let schema = include_str!("../helm/kvstrata/values.schema.json");
    let schema: serde_json::Value = serde_json::from_str(schema).unwrap();
    let sections = schema["properties"]["config"]["properties"].as_object().unwrap();
    let mut known: Vec<String> = sections
        .iter()
        .flat_map(|(section, rules)| {
            let keys = rules["properties"].as_object().unwrap().keys();
            keys.map(move |key| format!("{section}.{key}"))
        })
        .collect();
    // The chart gives the pod's name and host, and where it mounts volumes and secrets, whatever the values
    // say.
    known.extend(["node.host", "node.name", "nvme.path"].map(str::to_owned));
    known.extend(["cluster.advertise", "server.admin_listen"].map(str::to_owned));
    known.extend(
        ["auth.allow_anonymous", "auth.tenants_file", "auth.tokens_file"].map(str::to_owned),
    );
    known.extend(
        ["tls.cert_file", "tls.client_ca_file", "tls.key_file", "tls.peer_ca_file"]
            .map(str::to_owned),
    );
    known.sort();
    let keys: Vec<String> = Config::default().settings().into_iter().map(|(key, _)| key).collect();
    assert_eq!(known, keys);
}

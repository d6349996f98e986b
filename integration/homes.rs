//! Engines and real nodes: an engine is at home wherever it came in, and has what other nodes hold from them.

use std::{collections::HashMap, ops::Range, time::Duration};

use kvstrata::client::{
    Client, ClientOptions, GetOptions, GetSummary, Handle, Locality, LookupOptions, Path as Way,
    PutOutcome,
};

use crate::{
    client::{Seen, batch, hashes, namespace},
    cluster_drain::{Cluster, PARTS, assert_right},
    harness::{SERVER_WAIT, command, wait_until},
};

async fn client(endpoints: &str, options: ClientOptions) -> (Client, Handle) {
    let client = Client::connect(endpoints, options).await.unwrap();
    let handle = client.open(namespace(&PARTS)).await.unwrap();
    (client, handle)
}

async fn put(handle: &Handle, numbers: Range<u32>) {
    let session = handle.client().session("test").await.unwrap();
    let count = numbers.len() as u64;
    let report = handle.put(&session, &batch(numbers, &PARTS)).await.unwrap();
    assert_eq!(report.count(PutOutcome::Stored), count);
}

/// Gets blocks and checks every byte.
async fn get(handle: &Handle, numbers: Range<u32>) -> GetSummary {
    let mut seen = Seen::default();
    let options = GetOptions { deadline: Some(Duration::from_secs(20)), ..GetOptions::default() };
    let got = handle.get(&hashes(numbers.clone()), options, &mut seen).await.unwrap();
    assert_eq!(assert_right(numbers.start, &seen) as u64, got.blocks());
    assert_eq!(got.blocks() + got.missed, numbers.len() as u64);
    got
}

/// Until the node of this handle knows what others hold.
async fn wait_for_prefix(handle: &Handle, numbers: &Range<u32>) {
    wait_until("what other nodes have is found", SERVER_WAIT, async || {
        let found = handle.lookup(&hashes(numbers.clone()), LookupOptions::default()).await;
        found.unwrap().prefix_blocks as usize == numbers.len()
    })
    .await;
}

#[tokio::test]
async fn what_three_nodes_hold_is_read_as_one_whatever_way_and_a_dead_one_is_a_miss() {
    let mut cluster = Cluster::start(3).await;
    for (number, blocks) in [(0, 0..40), (1, 40..90), (2, 90..120)] {
        let (_, handle) = client(cluster.node(number).grpc(), ClientOptions::default()).await;
        put(&handle, blocks).await;
    }
    for path in [Way::Grpc, Way::Bulk, Way::Auto] {
        let options = ClientOptions { path, ..ClientOptions::default() };
        let (_, handle) = client(cluster.node(0).grpc(), options).await;
        wait_for_prefix(&handle, &(0..120)).await;
        let found = handle.lookup(&hashes(0..120), LookupOptions::default()).await.unwrap();
        let remote = found.runs.iter().filter(|run| run.locality == Locality::Remote);
        assert_eq!(remote.map(|run| run.end - run.start).sum::<u32>(), 80);
        let got = get(&handle, 0..120).await;
        assert_eq!((got.blocks(), got.remote, got.missed), (120, 80, 0), "{path:?}");
    }
    // Another process, as a worker is that loads what a scheduler has found.
    let (_, handle) = client(cluster.node(0).grpc(), ClientOptions::default()).await;
    let got = get(&handle, 0..120).await;
    assert_eq!((got.blocks(), got.remote), (120, 80));
    cluster.take(1).kill();
    let got = get(&handle, 0..120).await;
    assert_eq!((got.blocks(), got.remote, got.missed), (70, 30, 50));
    cluster.stop(&["member", "peer", "node"]).await;
}

#[tokio::test]
async fn an_engine_is_at_home_wherever_it_came_in() {
    let cluster = Cluster::start(3).await;
    let endpoints: Vec<_> = (0..3).map(|number| cluster.node(number).grpc().to_owned()).collect();
    // Memory can be shared on the engine's own host.
    for number in 0..3 {
        let options = ClientOptions {
            instance: Some(format!("near-{number}")),
            node: Some(format!("host-{number}")),
            ..ClientOptions::default()
        };
        let (client, handle) = client(&endpoints.join(","), options).await;
        assert_eq!(client.endpoint(), endpoints[number]);
        let first = u32::try_from(number).unwrap() * 10;
        put(&handle, first..first + 10).await;
        assert_eq!(get(&handle, first..first + 10).await.remote, 0);
    }
    let mut homes: HashMap<String, Vec<String>> = HashMap::new();
    for number in 0..6 {
        let instance = format!("vllm-{number}:8000");
        // Loads are gossiped: until all have heard of the engines before, they may differ about who has room.
        for endpoint in &endpoints {
            wait_until("all know who is here", SERVER_WAIT, async || {
                let (client, _) = client(endpoint, ClientOptions::default()).await;
                let engines: u32 = client.members().list.iter().map(|member| member.engines).sum();
                engines as usize == 3 + number
            })
            .await;
        }
        for at in 0..3 {
            let options =
                ClientOptions { instance: Some(instance.clone()), ..ClientOptions::default() };
            let (client, _) = client(&endpoints[(at + number) % 3], options).await;
            assert_eq!(client.moves().failed, 0);
            homes.entry(instance.clone()).or_default().push(client.endpoint());
        }
    }
    for (instance, homes) in &homes {
        assert_eq!(homes[0], homes[1], "{instance}");
        assert_eq!(homes[0], homes[2], "{instance}");
    }
    cluster.stop(&[]).await;
}

#[tokio::test]
async fn the_command_line_finds_and_gets_what_another_node_has() {
    let cluster = Cluster::start(2).await;
    let home = tempfile::tempdir().unwrap();
    let run = |arguments: &[&str]| {
        let output = command(&home).args(arguments).output().unwrap();
        let why = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(0), "{arguments:?}: {why}");
        String::from_utf8(output.stdout).unwrap()
    };
    let file = home.path().join("hello");
    std::fs::write(&file, "hello, other node").unwrap();
    let (first, second) = (cluster.node(0).grpc(), cluster.node(1).grpc());
    run(&["put", "--endpoint", second, "greeting", file.to_str().unwrap()]);
    let either = format!("{first},{second}");
    wait_until("it is found", SERVER_WAIT, async || {
        run(&["lookup", "--endpoint", &either, "greeting"]).contains("from node-1 (remote)")
    })
    .await;
    let json = run(&["lookup", "--endpoint", second, "--json", "greeting", "nothing"]);
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json.pointer("/0/holder").unwrap(), "node-1");
    assert_eq!(json.pointer("/0/locality").unwrap(), "local");
    assert!(json.pointer("/1/holder").unwrap().is_null());
    assert_eq!(run(&["get", "--endpoint", first, "greeting"]), "hello, other node");
    cluster.stop(&[]).await;
}

//! The console's state, as a page is told: in words where something is wrong, and nothing of any block.

use serde_json::Value;

use crate::{
    harness::{SERVER_WAIT, Server, wait_until},
    wire::{Wire, hash, namespace},
};

async fn state(server: &Server) -> Value {
    let (status, body) = server.page("/console/state").await;
    assert_eq!(status, 200, "{body}");
    serde_json::from_str(&body).unwrap()
}

fn sum(counts: &Value) -> u64 {
    counts.as_array().unwrap().iter().map(|count| count.as_u64().unwrap()).sum()
}

fn whats(state: &Value) -> Vec<&str> {
    let findings = state["problems"].as_array().unwrap();
    findings.iter().map(|finding| finding["what"].as_str().unwrap()).collect()
}

#[tokio::test]
async fn the_state_has_what_was_asked_and_delivered_and_what_is_wrong_and_no_hash() {
    let disk = tempfile::tempdir().unwrap();
    let server = Server::builder()
        .dram("64MiB")
        .set("nvme.path", disk.path().to_str().unwrap())
        .set("nvme.capacity", "256MiB")
        .start()
        .await;
    assert_eq!(state(&server).await["problems"], Value::Array(Vec::new()));
    let mut engine = Wire::connect(&server, namespace("m")).await;
    engine.put(&[1, 2, 3]).await;
    engine.lookup([1, 2, 3, 4]).await;
    assert!(engine.get(&[1, 2, 3]).await.iter().all(Option::is_some));
    let mut seeded = namespace("m");
    seeded.hash_root = vec![2; 32].into();
    let _other = Wire::connect(&server, seeded).await;

    let told = state(&server).await;
    assert_eq!(told["lookups"], serde_json::json!([3, 0, 0, 0, 1]));
    let history = told["history"].as_array().unwrap();
    assert_eq!(history.iter().map(|column| sum(&column["answers"])).sum::<u64>(), 4);
    let delivered: u64 = history.iter().map(|column| sum(&column["bytes"])).sum();
    assert_eq!(delivered, told["tiers"][0]["get_bytes"].as_u64().unwrap());
    assert_eq!(told["tiers"][0]["get_blocks"], 3);
    assert_eq!(told["tiers"][1]["tier"], "nvme");
    assert_eq!(told["members"][0]["own"], true);
    assert_eq!(told["namespaces"].as_array().unwrap().len(), 2);
    assert_eq!(whats(&told), ["hash root"]);
    let text = told.to_string();
    assert!(!text.contains(&hex(&hash(1))) && !text.contains("hash_root"), "{text}");
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[tokio::test]
async fn loads_from_a_disk_that_take_a_while_are_listed() {
    let disk = tempfile::tempdir().unwrap();
    let start = || {
        let builder = Server::builder().dram("64MiB").set("nvme.capacity", "256MiB");
        builder.set("nvme.path", disk.path().to_str().unwrap())
    };
    let server = start().home(disk.path()).start().await;
    let mut engine = Wire::connect(&server, namespace("m")).await;
    let numbers: Vec<u64> = (0..64).collect();
    engine.put_durable(&numbers).await.unwrap();
    drop(engine);
    server.stop(&[]).await;
    let server = start().home(disk.path()).start().await;
    let mut engine = Wire::connect(&server, namespace("m")).await;
    assert!(engine.get(&numbers).await.iter().all(Option::is_some));
    let told = state(&server).await;
    assert_eq!(told["tiers"][1]["get_blocks"], 64, "{told}");
    // Loads below a millisecond are no slow ones: the disk of a test may be memory.
    for load in told["slowest"].as_array().unwrap() {
        assert!(load["took_ms"].as_f64().unwrap() >= 1.0 && load["bytes"].as_u64().unwrap() > 0);
        let namespaces = told["namespaces"].as_array().unwrap();
        assert!(namespaces.iter().any(|namespace| namespace["id"] == load["namespace"]), "{told}");
    }
}

#[tokio::test]
async fn a_node_that_drains_says_so() {
    let server = Server::builder().dram("64MiB").set("server.drain_grace", "20s").start().await;
    let engine = Wire::connect(&server, namespace("m")).await;
    assert_eq!(state(&server).await["phase"], "ready");
    server.terminate();
    let drains = async || state(&server).await["phase"] == "draining";
    wait_until("it drains", SERVER_WAIT, drains).await;
    drop(engine);
}

//! Events that were captured from a real vLLM, told to a router: it knows what the engine had.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};

use super::{engine::Engine, process::RouterProcess};
use crate::{publisher::Publisher, shared_data};

/// What an engine had, by the events as their capturer has decoded them.
#[derive(Default)]
struct Truth {
    blocks: BTreeSet<String>,
    /// Prompts by their tokens and salt, with the hashes of their blocks.
    prompts: BTreeMap<(String, String), Vec<String>>,
}

impl Truth {
    fn take(&mut self, event: &Value) {
        let hashes = || event["block_hashes"].as_array().unwrap().iter().map(Value::to_string);
        match event["type"].as_str().unwrap() {
            "BlockStored" if event["medium"] == "GPU" => {
                let parent = &event["parent_block_hash"];
                self.blocks.extend(hashes());
                if parent.is_null() {
                    let salt = event["extra_keys"][0][0].as_str().unwrap_or_default().to_owned();
                    self.prompts.insert((event["token_ids"].to_string(), salt), hashes().collect());
                }
            }
            "BlockRemoved" if event["medium"] == "GPU" => {
                let gone: Vec<_> = hashes().collect();
                self.blocks.retain(|hash| !gone.contains(hash));
            }
            "AllBlocksCleared" => self.blocks.clear(),
            _ => {}
        }
    }
}

#[tokio::test]
async fn what_a_real_engine_has_published_is_known() {
    let test = "what_a_real_engine_has_published_is_known";
    let Some(samples) = shared_data::find(test, "../vllm/kv_events_samples") else { return };
    for (kind, least) in [("native_gpu", 2), ("raw_bytes_hashes", 2)] {
        let mut files: Vec<_> = std::fs::read_dir(samples.join(kind)).unwrap().collect();
        files.retain(|file| file.as_ref().unwrap().path().extension().unwrap() == "bin");
        let mut files: Vec<_> = files.into_iter().map(|file| file.unwrap().path()).collect();
        files.sort();
        let (engine, publisher) = (Engine::start(None), Publisher::bind().await);
        let flag = format!("http://{},name=a,events={}", engine.address(), publisher.address());
        let router = RouterProcess::spawn(&["--engine".to_owned(), flag]);
        let mut peer = publisher.subscriber().await;
        router.wait_up(1).await;
        let mut truth = Truth::default();
        for (number, file) in (0..).zip(&files) {
            peer.publish(number, &std::fs::read(file).unwrap()).await;
            let text = std::fs::read_to_string(file.with_extension("json")).unwrap();
            let sample: Value = serde_json::from_str(&text).unwrap();
            sample["decoded"][1].as_array().unwrap().iter().for_each(|event| truth.take(event));
            router.wait_blocks("a", truth.blocks.len() as u64).await;
        }
        let mut known = 0;
        for ((tokens, salt), hashes) in &truth.prompts {
            let tokens: Value = serde_json::from_str(tokens).unwrap();
            let body = json!({ "model": "test", "prompt": tokens, "cache_salt": salt });
            let answer = router.post("/select", &body).await;
            let answer: Value = serde_json::from_str(&answer.body).unwrap();
            let has = hashes.iter().take_while(|hash| truth.blocks.contains(*hash)).count();
            assert_eq!(answer["engines"][0]["device"], has, "{kind}: {answer}");
            known += usize::from(has > 0);
        }
        assert!(known >= least, "{kind}: {known} of {} prompts known", truth.prompts.len());
        drop(peer);
        router.stop(&[]);
    }
}

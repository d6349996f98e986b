//! The conformance on Azurite, the emulator of Azure's blob store, on demand: `KVSTRATA_AZURITE=1` says
//! that it runs where its own defaults put it and has the container `kvstrata`. How to start it is in
//! docs/testing.md.

use kvstrata_tiers::object::bucket::BucketConfig;

use super::conformance;
use crate::skipped;

const VARIABLE: &str = "KVSTRATA_AZURITE";

#[tokio::test]
async fn azurite_is_what_the_object_tier_needs() {
    if std::env::var_os(VARIABLE).is_none_or(|value| value != "1") {
        let details = "npm's azurite, see docs/testing.md; set KVSTRATA_AZURITE=1";
        return skipped::say("azurite_is_what_the_object_tier_needs", "no Azurite", details);
    }
    let process = std::process::id();
    let config = BucketConfig {
        url: format!("az://kvstrata/conformance-{process}"),
        options: vec![("use_emulator".to_owned(), "true".to_owned())],
        multipart_above_bytes: super::server::MULTIPART_ABOVE_BYTES,
        ..BucketConfig::default()
    };
    conformance::conforms(&super::bucket(config.clone())).await;
    let missing = BucketConfig { url: "az://no-such-container".to_owned(), ..config };
    let error = super::bucket(missing).probe().await.unwrap_err().to_string();
    assert!(error.contains("there is no such bucket: create it"), "{error}");
}

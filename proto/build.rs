//! Compiles the wire contract without a system protoc, and its JSON mapping.

use std::{env, error::Error, fs, path::PathBuf};

use prost::Message;

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=proto");
    let files = [
        "kvstrata/v1/blocks.proto",
        "kvstrata/router/v1/router.proto",
        "kvstrata/peer/v1/peer.proto",
        "kvstrata/admin/v1/admin.proto",
    ];
    let descriptors = protox::compile(files, ["proto"])?;
    let out_dir = PathBuf::from(env::var("OUT_DIR")?);
    let encoded = descriptors.encode_to_vec();
    fs::write(out_dir.join("descriptors.bin"), &encoded)?;
    tonic_prost_build::configure().bytes(".").compile_fds(descriptors)?;
    // The JSON twins of the router's calls.
    pbjson_build::Builder::new().register_descriptors(&encoded)?.build(&[".kvstrata.router.v1"])?;
    Ok(())
}

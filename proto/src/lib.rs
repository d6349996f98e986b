//! The wire contract of kvstrata, generated from `proto/kvstrata/**/*.proto`. No logic lives here.

/// Version 1 of the contract.
#[allow(clippy::large_enum_variant, reason = "generated; one Open per client is not worth a box")]
pub mod v1 {
    tonic::include_proto!("kvstrata.v1");
}

/// What routers ask.
pub mod router {
    /// Version 1 of the contract with routers, with proto3 JSON by `serde`.
    #[allow(clippy::all, reason = "generated")]
    pub mod v1 {
        tonic::include_proto!("kvstrata.router.v1");
        include!(concat!(env!("OUT_DIR"), "/kvstrata.router.v1.serde.rs"));
    }
}

/// What the nodes of a cluster ask of one another.
pub mod peer {
    /// Version 1 of the contract between nodes.
    pub mod v1 {
        tonic::include_proto!("kvstrata.peer.v1");
    }
}

/// What operators ask of one node.
pub mod admin {
    /// Version 1 of the contract with operators.
    pub mod v1 {
        tonic::include_proto!("kvstrata.admin.v1");
    }
}

/// The encoded file descriptor set, for the reflection service.
pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));

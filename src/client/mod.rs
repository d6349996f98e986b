//! The one client of the `kvstrata.v1` contract: the command line, replay, benches, router and
//! Python all use it.
//!
//! ```text
//! Client::connect -> client.open(spec) -> Handle   lookup, get, put, describe, touch, prefetch, remove
//!                 -> client.session(name) -> Session   owns leases and puts; ends on drop
//! ```
//! In a cluster a client is at one member, the home of its engine; what a lookup has found on others is read
//! from them (`holders`), and is a miss where that fails.
//!
//! Invariants
//! - *A get returns exactly the bytes that were put under that key, or nothing.* Every part is
//!   verified here against a checksum seeded with its identity; what fails is a miss for its block.
//! - A miss is never an error. Errors carry the kind the server meant and say what to do next.
//! - A server that does not answer is an error at once after the first time, until it is back
//!   (`Unavailable`, or `Timeout` for those who waited). It is no miss here: a miss is what a server has
//!   said. Whoever wants to go on without a server takes either of the two kinds as one.
//! - Every call has a deadline; what is in flight is bounded by message size and HTTP/2 windows.
//! - Lists longer than the server's limits are split, in order, where the meaning survives that
//!   (get, put, touch, ...). A lookup is not split: its prefix and lease are one decision.
//!
//! It never retries: only the caller knows whether a late answer is still of use.
//!
//! Why packed hash lists instead of vectors of hashes: a lookup of half a million tokens is 31,250
//! hashes, and slicing one buffer is free.

mod access;
mod admin;
mod assemble;
mod breaker;
mod bulk;
mod codec;
mod connect;
mod endpoints;
mod get;
mod hashes;
mod holders;
mod home;
mod lookup;
mod members;
mod namespace;
mod pack;
mod peer;
mod placements;
mod put;
pub mod router;
mod server;
mod session;
mod spread;
mod stats;
mod status;
mod verbs;

pub use crate::{
    auth::Token,
    members::{BulkPort, Member, Members},
    tls::TlsOptions,
};
pub use admin::{DrainState, Drained, NodeStatus, Operator};
pub use assemble::{FetchedBlock, GetSink, GetSummary, MissReason, PiecePlace};
pub use connect::{Client, ClientOptions, MESSAGE_BYTES_MAX, Path};
pub use get::GetOptions;
pub use hashes::HashList;
pub use home::HomeMoves;
pub use lookup::{Lease, LeaseAsk, Locality, Lookup, LookupOptions, Run};
pub use namespace::{Handle, Limits, NamespaceSpec};
pub(crate) use peer::PeerLookup;
pub use put::{PutBatch, PutOutcome, PutReport};
pub use session::{Session, SessionState};
pub use stats::{
    Finding, LeaseTotals, NamespaceStats, Opener, SchemeStats, Stats, TenantStats, TenantTier,
    TierStats, TierTotals,
};
pub use status::{RETRY_AFTER_KEY, error_of};
pub use verbs::{Description, Prefetched};

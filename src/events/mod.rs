//! Events between engines, routers and this node.
//!
//! ```text
//! engines publish what they compute  ->  subscribe: what blocks are, for those that are put here
//! what is where, and what it is      ->  publish: for routers, each in its own dialect
//! ```
//! Engines and routers speak ZeroMQ to each other, so this room has the little of it that is needed
//! ([`zmtp`]), and the encoding that they use in it ([`msgpack`]).

mod msgpack;
pub(crate) mod publish;
pub(crate) mod subscribe;
mod zmtp;

/// The engine that takes the first bits of a hash for its number; all others take the last ones.
const FIRST_BITS: &str = "sglang";

//! Events between engines, routers and this node.
//!
//! ```text
//! engines publish what they compute  ->  subscribe: what blocks are, for those that are put here
//! ```
//! Engines and routers speak ZeroMQ to each other, so this room has the little of it that is needed
//! ([`zmtp`]), and the encoding that they use in it ([`msgpack`]).

mod msgpack;
pub(crate) mod subscribe;
mod zmtp;

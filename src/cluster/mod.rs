//! The cluster: many nodes, none of which leads.
//!
//! Data stays whole where it was put. Only a contiguous prefix of a prompt counts, so blocks are not spread over the
//! nodes by their hashes: the batches of an engine instance go to its [home](home), whose map answers its lookups.
//! A join moves nothing, and a crash loses what that node held.

//!
//! Nodes find one another by gossip ([membership](membership)): it says who lives and where, and carries a seal.

pub mod about;
pub(crate) mod handover;
pub mod home;
pub(crate) mod keys;
pub mod membership;
mod push;
mod seal;
pub(crate) mod second;
mod seeds;
mod transport;
mod view;

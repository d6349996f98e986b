//! The kvstrata server.

pub mod client;
pub mod sim;
pub mod trace;

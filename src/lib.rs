//! The kvstrata server.

pub mod sim;
pub mod trace;

//! The kvstrata server.

pub mod cli;
pub mod client;
pub mod replay;
pub mod sim;
pub mod trace;

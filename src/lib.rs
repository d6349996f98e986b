//! The kvstrata server.

pub mod cli;
pub mod sim;
pub mod trace;

//! The kvstrata server.

pub mod client;

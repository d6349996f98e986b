//! The kvstrata server.

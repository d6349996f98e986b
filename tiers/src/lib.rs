//! The kvstrata store.

pub mod block;
pub mod error;
pub mod evict;
pub mod limits;

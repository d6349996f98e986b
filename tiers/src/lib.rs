//! The kvstrata store.

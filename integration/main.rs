//! The integration tests: one binary, so that the server is built once.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a test fails by panicking; helpers of this binary are not covered by allow-*-in-tests"
)]

mod abandon;
mod admin;
mod advice;
mod advice_cluster;
mod bad_input;
mod bulk;
mod bulk_peers;
mod cli;
mod client;
mod cluster;
mod cluster_drain;
mod config;
mod console;
mod crash;
mod doctor;
mod drain;
mod events;
mod fake;
mod fanout;
mod formats;
mod handoff;
mod harness;
mod holders;
mod homes;
mod hostile;
mod identity;
mod memory;
mod metrics;
mod netns;
mod nvme;
mod object;
mod plan;
mod publisher;
mod put_get;
mod replay;
mod router;
mod sessions;
mod shared_data;
mod shared_memory;
mod simulate;
mod skipped;
mod tidy;
mod tmpfs;
mod traces;
mod trust;
mod upgrade;
mod verify;
mod wire;

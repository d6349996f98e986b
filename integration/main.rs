//! The integration tests: one binary, so that the server is built once.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a test fails by panicking; helpers of this binary are not covered by allow-*-in-tests"
)]

mod client;
mod fake;
mod plan;
mod shared_data;
mod tidy;
mod traces;

//! The `kvstrata` binary.

fn main() {}

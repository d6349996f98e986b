//! The nvme tier.

pub mod aligned;
pub mod device;
pub mod index;
mod posix;
mod pread;
mod turn;
mod uring;

#[cfg(test)]
mod tests;

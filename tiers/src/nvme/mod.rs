//! The nvme tier.

pub mod aligned;
pub mod device;
pub mod format;
pub mod index;

//! The nvme tier.

pub mod aligned;
pub mod device;
pub mod directory;
pub mod format;
pub mod index;

//! The object tier: blocks in a bucket of any object store, in packs of 16 to 64 MiB.
//!
//! ```text
//! pack     sealed run of nvme -> what is worth it, in order -> encoded -> one object -> map -> log
//! get      map -> catalog: object and place -> neighbours in one ranged GET -> decoded into the arena
//! remove   unreadable -> log -> answered
//! expire   too old, too empty, too many -> what is hot into a new pack -> the rest reported, out of the
//!          map -> log -> long after: object deleted
//! start    take the ordinal -> log, from the local copy or the bucket -> catalog and map
//! adopt    a node is gone -> one that is left takes its ordinal, too, and serves what is there
//! ```
//! Invariants
//! - Only the holder of the newest epoch of an ordinal writes and deletes ([`owner`]).
//! - A pack counts once the log names it ([`manifest_log`]); a start names what was uploaded and is not.
//!   What was removed is named in the log before that is acknowledged, also while a pack that may have
//!   it is on its way: a pack is numbered before its first block is read.
//! - Nothing is listed or asked for by HEAD to read a block. What is not there leaves the map.
//! - The bucket may be slow, wrong or away: reads end in time, as misses; writes stop and go on later.
//!
//! Why not one object for each block: at 2 MiB, requests cost fifteen times what they do packed, and
//! a prefix comes in hundreds of requests. Why not packs of any blocks: what was put together is read
//! together.
//!
//! [`names`] says what lies where in the bucket, [`format`](mod@format) what its bytes mean,
//! [`codec`] how a block becomes fewer of them, and [`bucket`] is the only door to the store.

pub mod bucket;
mod catalog;
pub mod codec;
mod core;
mod counts;
pub mod format;
mod keeper;
pub mod local;
pub mod manifest_log;
mod metrics;
pub mod names;
pub mod owner;
mod packer;
mod prices;
mod reader;
pub mod rebuild;
#[cfg(test)]
mod rig_tests;
mod seats;
mod store;
mod wards;

use self::core::Core;
pub use self::{
    core::{
        CAPACITY_PACKS_MIN, Clock, ObjectConfig, ObjectParts, ObjectTasks, PACK_BYTES_MAX,
        PACK_BYTES_MIN,
    },
    counts::PackMetrics,
    metrics::{ObjectMetrics, OpLabel, OutcomeLabel, UnsentLabel},
    packer::ObjectAdmission,
    prices::Prices,
    reader::RUN_BYTES_MAX,
    store::ObjectStore,
};

#[cfg(test)]
mod tests;

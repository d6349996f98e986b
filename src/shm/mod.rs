//! Blocks by shared memory, for clients on the node's own host: beside the frames of the bulk port's Unix
//! socket nothing moves but what a client copies itself.
//!
//! ```text
//! client                                server
//! Map, with its staging           ->
//!                                 <-  Arena, with the arena's regions
//! Get, by place                   ->
//!                                 <-  Pinned: region, offset, checksum, pin | ... | End
//!   copies, checks its copy
//! Release pins                    ->
//! Offer                           ->
//!                                 <-  Want
//!   copies into its staging
//! Staged: offset in staging       ->
//!                                     copies into the arena, checks its copy
//!                                 <-  Taken, Results | ... | End
//! ```
//! - A mapping shows the whole arena, so it is offered only where it is switched on, and never while
//!   tokens of more than one tenant are known.
//! - The arena is sealed before it is shown ([`Stack::share`](kvstrata_tiers::stack::Stack::share)): a client can
//!   read it and do nothing else. Its staging is sealed against shrinking before it is mapped
//!   ([`map`]), so what a client does to it is never a fault of ours.
//! - What a client was shown stays where it is until it lets go or its connection ends ([`pins`]),
//!   bounded in bytes for each and for all. Where there is no room left, blocks go as payload.
//! - Each side believes its own copy only: bytes that change while they are copied fail their checksum
//!   as damaged ones do.

mod arena;
pub(crate) mod map;
pub(crate) mod pins;
pub(crate) mod socket;

pub(crate) use arena::{Arena, Shown};

//! Routers compared: the requests of a trace, a cluster of engines, and where each mode sends them.
//!
//! [`run()`] lets a trace arrive at a cluster of [`Setup`] whose router works in one [`Mode`]; an [`Outcome`]
//! says how long requests waited for their first token, and where their blocks came from. Modes that score
//! do it by [`score`](crate::score), as a router does, and know what a router knows. All else is the same in
//! all modes: what engines load, and from where.
//!
//! It is pure and exact: no clock, no threads, chance by the seed only. Blocks stay runs (`extents`),
//! so that a day of 85 million block references takes seconds. `tiers` has who holds what and who waits
//! for whom, `router` the choice, `run` the order of events.
//!
//! What it leaves out: blocks that decoding makes count only when a later prompt names them; decoding
//! slows no prefill; copies to colder tiers take nothing from reads; networks have no queue but that of
//! the tier that is read.

mod extents;
mod outcome;
mod router;
mod run;
mod setup;
#[cfg(test)]
mod tests;
mod tiers;

pub use self::{
    outcome::Outcome,
    router::Mode,
    run::{compare, run},
    setup::{Loading, Rate, Setup, TierSetup, WORKERS_MAX},
};

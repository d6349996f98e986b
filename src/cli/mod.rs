//! The subcommands.

pub mod gen_trace;
pub mod plan;
mod stdout;

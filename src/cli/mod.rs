//! The subcommands.

pub mod replay;
mod stdout;

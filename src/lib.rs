//! The kvstrata server: everything but the store and the wire.
//!
//! Read in this order: [`server`] (what there is and how it starts and leaves), [`node`] and [`api`] (the calls),
//! [`session`] and [`lease`] (what clients own), [`config`] and [`budget`] (what operators decide).
//! The store is [`kvstrata_tiers`], the contract [`kvstrata_proto`]; only `api::convert` knows both.

pub mod addresses;
pub mod advice;
pub mod api;
pub mod auth;
pub mod budget;
mod bulk;
pub mod changes;
pub mod cli;
pub mod client;
pub mod cluster;
pub mod config;
mod console;
#[cfg(test)]
mod corpus_tests;
pub mod costs;
pub mod drain;
mod events;
mod flow;
pub mod http;
pub mod id;
pub mod identity_file;
mod keep_alive;
pub mod lease;
pub mod limits;
pub mod logging;
mod members;
pub mod metrics;
pub mod node;
mod numbers;
mod nvme;
mod object;
pub mod openers;
pub mod readiness;
mod reload;
pub mod replay;
mod resp;
mod router;
pub mod schemes;
pub mod score;
pub mod server;
pub mod session;
mod shm;
pub mod sim;
pub mod tasks;
mod tls;
pub mod trace;
mod trust;

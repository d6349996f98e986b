//! Who may name whom. The arrows are those of ARCHITECTURE.md; a new one needs a decision record.
//!
//! Two tables say it all: names that only some rooms may use, and rooms that may not use some names.

use syn::Item;

use super::{
    Rule,
    source::{Finding, Source},
};

/// Only the files in `rooms` may name `names`.
struct Only {
    names: &'static [&'static str],
    rooms: &'static [&'static str],
    instead: &'static str,
}

const ONLY: &[Only] = &[
    Only {
        names: &[
            "kvstrata_proto",
            "prost",
            "tonic",
            "tonic_health",
            "tonic_prost",
            "tonic_reflection",
        ],
        rooms: &["src/api", "src/client", "src/server.rs", "proto", "integration", "benches"],
        instead: "the wire ends in src/api: take a type of the domain, converted in src/api/convert.rs",
    },
    Only {
        names: &["chitchat"],
        rooms: &["src/cluster"],
        instead: "gossip is in src/cluster: who lives is in the roster",
    },
    Only {
        names: &["axum"],
        rooms: &["src/http", "src/console", "src/router", "src/server.rs", "integration"],
        instead: "HTTP is spoken in src/http and, to engines, in src/router",
    },
    Only {
        names: &["object_store"],
        rooms: &["tiers/src/object", "tiers/src/testing", "benches/object"],
        instead: "object stores are reached through the object tier",
    },
    Only {
        names: &["rustls", "tokio_rustls", "rustls_native_certs", "rcgen"],
        rooms: &["src/tls", "integration/trust"],
        instead: "connections are encrypted in src/tls only: accept by its Entry, connect by its Dialer",
    },
    Only {
        names: &["rocksdb"],
        rooms: &["tiers/src/nvme/index"],
        instead: "the index is asked through nvme/index, so that it can be replaced",
    },
    Only {
        names: &["cudarc"],
        rooms: &["tiers/src/gpu"],
        instead: "devices are reached through DeviceCopy in gpu/",
    },
    Only { names: &["pyo3"], rooms: &["python"], instead: "Python is spoken in python/ only" },
];

/// Files in `rooms` must not name `names`.
struct Never {
    rooms: &'static [&'static str],
    names: &'static [&'static str],
    instead: &'static str,
}

const NEVER: &[Never] = &[
    Never {
        rooms: &["tiers"],
        names: &["kvstrata", "kvstrata_proto", "tonic", "prost", "axum", "clap"],
        instead: "the store knows no wire, no server and no command line",
    },
    Never {
        rooms: &["proto"],
        names: &["kvstrata", "kvstrata_tiers"],
        instead: "the contract knows nobody",
    },
    Never {
        rooms: &["tiers/src/dram"],
        names: &["kvstrata_tiers::nvme", "kvstrata_tiers::object", "kvstrata_tiers::stack"],
        instead: "only the stack moves a block between tiers",
    },
    Never {
        rooms: &["tiers/src/nvme"],
        names: &["kvstrata_tiers::dram", "kvstrata_tiers::object", "kvstrata_tiers::stack"],
        instead: "only the stack moves a block between tiers",
    },
    Never {
        rooms: &["tiers/src/object"],
        names: &["kvstrata_tiers::dram", "kvstrata_tiers::nvme", "kvstrata_tiers::stack"],
        instead: "only the stack moves a block between tiers",
    },
    Never {
        rooms: &["tiers/src/evict", "tiers/src/gpu"],
        names: &[
            "kvstrata_tiers::dram",
            "kvstrata_tiers::nvme",
            "kvstrata_tiers::object",
            "kvstrata_tiers::stack",
        ],
        instead: "tiers use it, it knows no tier",
    },
    Never {
        rooms: &[
            "tiers/src/block",
            "tiers/src/namespace",
            "tiers/src/limits",
            "tiers/src/error",
            "tiers/src/codec",
        ],
        names: &[
            "kvstrata_tiers::dram",
            "kvstrata_tiers::evict",
            "kvstrata_tiers::nvme",
            "kvstrata_tiers::object",
            "kvstrata_tiers::stack",
        ],
        instead: "everybody knows the words, the words know nobody",
    },
    Never {
        rooms: &["src/score", "src/sim"],
        names: &[
            "std::env",
            "std::fs",
            "std::net",
            "std::os",
            "std::process",
            "tokio::fs",
            "tokio::io",
            "tokio::net",
            "tokio::process",
        ],
        instead: "scores and simulations are pure: take what was read as an argument",
    },
    Never {
        rooms: &["src/score"],
        names: &["std::time::Instant", "std::time::SystemTime", "tokio"],
        instead: "a score has no clock: take the time as an argument",
    },
];

fn only(source: &Source) -> Vec<Finding> {
    let mut findings = Vec::new();
    for mention in source.mentions() {
        for rule in ONLY {
            let named = rule.names.iter().find(|name| mention.begins_with(name));
            let Some(name) = named else { continue };
            if !rule.rooms.iter().any(|room| source.is_in(room)) {
                let rooms = rule.rooms.join(", ");
                let what = format!("names `{name}`, which only {rooms} may: {}", rule.instead);
                findings.push(source.finding(mention.line, what));
            }
        }
    }
    findings
}

fn never(source: &Source) -> Vec<Finding> {
    let mut findings = Vec::new();
    for mention in source.mentions() {
        for rule in NEVER.iter().filter(|rule| rule.rooms.iter().any(|room| source.is_in(room))) {
            if let Some(name) = rule.names.iter().find(|name| mention.begins_with(name)) {
                let what = format!("must not name `{name}`: {}", rule.instead);
                findings.push(source.finding(mention.line, what));
            }
        }
    }
    findings
}

fn proto_has_no_logic(source: &Source) -> Vec<Finding> {
    fn visit(source: &Source, items: &[Item], findings: &mut Vec<Finding>) {
        for item in items {
            match item {
                Item::Mod(module) => {
                    let inner = module.content.as_ref().map_or(&[][..], |(_, items)| items);
                    visit(source, inner, findings);
                }
                Item::Const(_) | Item::Macro(_) | Item::Use(_) => {}
                other => {
                    let line = syn::spanned::Spanned::span(other).start().line;
                    let what = "logic in the proto crate: move it to src/api/convert.rs";
                    findings.push(source.finding(line, what));
                }
            }
        }
    }
    let mut findings = Vec::new();
    if source.is_in("proto/src") {
        visit(source, &source.tree.items, &mut findings);
    }
    findings
}

pub(super) const RULES: &[Rule] = &[
    Rule {
        name: "only some rooms name it",
        check: only,
        bad: &[
            ("src/lease.rs", "use tonic::Status;"),
            ("src/lease.rs", "use kvstrata_proto::v1;"),
            ("src/cli/put.rs", "fn f() -> prost::bytes::Bytes { todo }"),
            ("src/serverless.rs", "use {std::fmt, tonic::transport};"),
            ("src/lease.rs", "fn f() { assert!(tonic::Code::Ok == x) }"),
            ("src/api/blocks.rs", "use axum::Router;"),
            ("tiers/src/stack.rs", "use object_store as store;"),
            ("tiers/src/nvme/mod.rs", "use rocksdb::DB;"),
            ("tiers/src/dram/arena.rs", "use cudarc::driver::sys;"),
        ],
        good: &[
            ("src/api/convert.rs", "use kvstrata_proto::v1; use tonic::Status;"),
            ("src/client/mod.rs", "use tonic::transport::Channel;"),
            ("src/lease.rs", "//! Not tonic::Status.\nfn tonic() { let s = \"tonic::Status\"; }"),
            ("tiers/src/nvme/index.rs", "use rocksdb::DB;"),
            ("tiers/src/object/mod.rs", "use object_store::ObjectStore;"),
        ],
    },
    Rule {
        name: "arrows",
        check: never,
        bad: &[
            ("tiers/src/stack.rs", "use kvstrata_proto::v1::Run;"),
            ("tiers/src/dram/mod.rs", "use crate::nvme::Segment;"),
            ("tiers/src/dram/arena.rs", "use super::super::object;"),
            ("tiers/src/nvme/writer.rs", "use crate::{block, dram::Arena};"),
            ("tiers/src/object/mod.rs", "fn f(s: &crate::stack::Stack) {}"),
            ("tiers/src/evict/lru.rs", "use crate::dram::Map;"),
            ("tiers/src/block.rs", "use crate::evict::Eviction;"),
            ("src/score/cost.rs", "use tokio::time::Instant;"),
            ("src/sim.rs", "use std::{fmt, fs};"),
        ],
        good: &[
            ("tiers/src/stack.rs", "use crate::{dram, nvme, object};"),
            ("tiers/src/dram/mod.rs", "use crate::evict::Lru; use self::object::Pool;"),
            ("tiers/src/dram/mod.rs", "mod tests { use super::object; }"),
            ("src/sim/mod.rs", "use std::collections::HashMap; use crate::trace::Request;"),
        ],
    },
    Rule {
        name: "proto has no logic",
        check: proto_has_no_logic,
        bad: &[
            ("proto/src/lib.rs", "pub mod v1 { impl Run { fn len(&self) {} } }"),
            ("proto/src/lib.rs", "fn f() {}"),
        ],
        good: &[("proto/src/lib.rs", "pub mod v1 { tonic::include_proto!(\"x\"); }")],
    },
];

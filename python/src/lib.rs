//! The Python package `kvstrata`, native half: a thin layer over [`kvstrata::client`].
//!
//! ```text
//! Client -> Namespace   verbs; get_into and put use the caller's memory (memory.rs)
//!        -> Session     owns leases and puts
//!        -> Request     a verb that runs by itself -> CompletionQueue
//! ```
//! Invariants
//! - No thread waits for anything while it holds the interpreter, and no thread of ours waits for the
//!   interpreter.
//! - A buffer is held until nothing can read or write it any more.
//! - Every call ends: by its deadline, by a signal, or by the end of its client.
//!
//! What the classes mean to a caller stands in `kvstrata/_native.pyi` and docs/python.md.

mod arguments;
mod client;
mod core;
mod errors;
mod lease;
mod memory;
mod namespace;
mod queue;
mod request;
mod sink;
mod values;

use pyo3::prelude::*;

/// Native half of the package.
#[pymodule]
mod _native {
    use kvstrata_tiers::namespace;
    use pyo3::{prelude::*, types::PyBytes};

    #[pymodule_export]
    use crate::{
        client::Client,
        lease::{Lease, Session},
        namespace::Namespace,
        queue::CompletionQueue,
        request::Request,
        values::{GetResult, LookupOf, PutResult, RunOf},
    };

    /// The block hash of a key in an opaque namespace.
    #[pyfunction]
    fn foreign_hash<'py>(py: Python<'py>, key: &[u8]) -> Bound<'py, PyBytes> {
        PyBytes::new(py, namespace::foreign_hash(key).as_bytes())
    }
}

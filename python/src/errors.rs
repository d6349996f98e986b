//! From the client's errors to Python's exceptions, which `kvstrata/errors.py` defines.

use kvstrata_tiers::error::{Error, ErrorKind};
use pyo3::{prelude::*, types::PyType};

/// The exception for an error of the client.
pub(crate) fn raised(py: Python<'_>, error: &Error) -> PyErr {
    let made = make(py, class_of(error.kind()), &error.to_string());
    if let Some(after) = error.retry_after() {
        let set = made.value(py).setattr("retry_after", after.as_secs_f64());
        return set.err().unwrap_or(made);
    }
    made
}

/// The exception for an argument that can never work.
pub(crate) fn invalid(py: Python<'_>, text: &str) -> PyErr {
    make(py, "InvalidError", text)
}

/// An exception of the class of this name.
pub(crate) fn make(py: Python<'_>, class: &str, text: &str) -> PyErr {
    let found = py.import("kvstrata.errors").and_then(|errors| errors.getattr(class));
    match found.and_then(|class| Ok(class.cast_into::<PyType>()?)) {
        Ok(class) => PyErr::from_type(class, text.to_owned()),
        Err(error) => error,
    }
}

fn class_of(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::Invalid => "InvalidError",
        ErrorKind::Unauthenticated => "UnauthenticatedError",
        ErrorKind::UnknownNamespace => "UnknownNamespaceError",
        ErrorKind::LayoutMismatch => "LayoutMismatchError",
        ErrorKind::LeaseExpired => "LeaseExpiredError",
        ErrorKind::Exhausted { .. } => "ExhaustedError",
        ErrorKind::Unavailable => "UnavailableError",
        ErrorKind::Timeout => "DeadlineError",
        ErrorKind::Cancelled => "CancelledError",
        ErrorKind::Corrupt => "CorruptError",
        ErrorKind::Unsupported => "UnsupportedError",
        ErrorKind::Internal => "InternalError",
    }
}

//! The one error type that crosses the boundary of this crate.
//!
//! The kind says what the caller should do; `doing` says what was attempted, as a bare verb phrase;
//! the source, where there is one, is kept. A cache miss is never an error.

use std::{fmt, time::Duration};

use thiserror::Error;

/// The result of this crate's fallible calls.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What the caller should do about a failure. Matches over kinds are exhaustive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorKind {
    /// The request can never work as written: correct it.
    Invalid,
    /// One side could not show who it is: give a token or certificate that is valid.
    Unauthenticated,
    /// The namespace is not known here: open it first.
    UnknownNamespace,
    /// The bytes do not fit the namespace: open the right one.
    LayoutMismatch,
    /// The lease has ended: do the lookup again.
    LeaseExpired,
    /// Over a limit: try again after the delay.
    Exhausted {
        /// How long to wait before the next try.
        retry_after: Duration,
    },
    /// Starting, draining, or a needed service is away: back off and retry.
    Unavailable,
    /// The deadline passed and the outcome is unknown; puts are idempotent.
    Timeout,
    /// The caller or a shutdown stopped it.
    Cancelled,
    /// Stored bytes failed verification (only from calls that verify on purpose).
    Corrupt,
    /// Not built in or not switched on.
    Unsupported,
    /// A broken invariant: a defect of this program.
    Internal,
}

impl ErrorKind {
    /// Whether the same request may succeed later.
    #[must_use]
    pub fn is_retryable(self) -> bool {
        match self {
            Self::Exhausted { .. } | Self::Unavailable | Self::Timeout => true,
            Self::Invalid
            | Self::Unauthenticated
            | Self::UnknownNamespace
            | Self::LayoutMismatch
            | Self::LeaseExpired
            | Self::Cancelled
            | Self::Corrupt
            | Self::Unsupported
            | Self::Internal => false,
        }
    }
}

/// A failure: its kind, what was being done, and why.
#[derive(Error)]
pub struct Error {
    kind: ErrorKind,
    doing: Box<str>,
    #[source]
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

impl Error {
    /// Makes an error; `doing` is a bare verb phrase or a statement naming field, value and range.
    #[must_use]
    pub fn new(kind: ErrorKind, doing: impl Into<Box<str>>) -> Self {
        Self { kind, doing: doing.into(), source: None }
    }

    /// A request that can never work as written.
    #[must_use]
    pub fn invalid(doing: impl Into<Box<str>>) -> Self {
        Self::new(ErrorKind::Invalid, doing)
    }

    /// Keeps the cause.
    #[must_use]
    pub fn because(mut self, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        self.source = Some(source.into());
        self
    }

    /// What the caller should do.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// How long to wait, for [`ErrorKind::Exhausted`].
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        if let ErrorKind::Exhausted { retry_after } = self.kind { Some(retry_after) } else { None }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.doing)?;
        if let Some(source) = &self.source {
            write!(f, ": {source}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self} ({:?})", self.kind)
    }
}

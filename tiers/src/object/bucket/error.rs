//! What can go wrong with a request to the store, and how an answer of the store is read.
//!
//! An error of the store becomes a [`Fault`]: what it means for the caller, and what for the requests
//! after it (try again, slow down, the store may be down). Where the library below tells only in words
//! (the HTTP status), the words are read here and nowhere else.

use std::{error::Error as StdError, fmt, time::Duration};

use object_store::client::{HttpError, HttpErrorKind};
use thiserror::Error;

use crate::{
    error::{Error as TierError, ErrorKind},
    object::metrics::OutcomeLabel,
};

type Source = Box<dyn StdError + Send + Sync>;

/// How long to wait after requests that were not, or no longer, tried.
pub(super) const PAUSE_AFTER_BUSY: Duration = Duration::from_secs(1);
/// Characters of an answer of the store that a message repeats.
const WORDS_CHARS_MAX: usize = 600;
/// What precedes the HTTP status in messages of the library.
const STATUS_MARK: &str = "status code: ";

/// What the caller should do about a failed request. Matches over kinds are exhaustive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BucketErrorKind {
    /// There is no object of this name: forget it.
    NotFound,
    /// The store knows us and says no: somebody must change permissions or credentials.
    Refused,
    /// Not tried, or not again: the store fails or asks to slow down. Come back after this time.
    Busy(Duration),
    /// The deadline passed. A write may have been done, or may still be.
    Timeout,
    /// The object or the answer has another length than asked for: nothing of it is used.
    Damaged,
    /// The store or its configuration cannot do this.
    Unsupported,
    /// It failed, with retries where those were allowed.
    Failed,
}

/// A failed request: its kind, what was being done, and why.
#[derive(Error)]
pub struct BucketError {
    kind: BucketErrorKind,
    doing: Box<str>,
    #[source]
    source: Option<Source>,
}

impl BucketError {
    pub(super) fn new(kind: BucketErrorKind, doing: impl Into<Box<str>>) -> Self {
        Self { kind, doing: doing.into(), source: None }
    }

    pub(super) fn because(mut self, source: Option<Source>) -> Self {
        self.source = source;
        self
    }

    /// What the caller should do.
    #[must_use]
    pub fn kind(&self) -> BucketErrorKind {
        self.kind
    }
}

impl fmt::Display for BucketError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.doing)?;
        let Some(source) = &self.source else { return Ok(()) };
        // Stores answer with pages of XML.
        let words = source.to_string();
        let words: Vec<&str> = words.split_whitespace().collect();
        let words = words.join(" ");
        match words.char_indices().nth(WORDS_CHARS_MAX) {
            Some((end, _)) => write!(f, ": {}..", words.get(..end).unwrap_or_default()),
            None => write!(f, ": {words}"),
        }
    }
}

impl fmt::Debug for BucketError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self} ({:?})", self.kind)
    }
}

impl From<BucketError> for TierError {
    fn from(error: BucketError) -> Self {
        let kind = match error.kind {
            BucketErrorKind::NotFound | BucketErrorKind::Damaged => ErrorKind::Corrupt,
            BucketErrorKind::Refused | BucketErrorKind::Failed => ErrorKind::Unavailable,
            BucketErrorKind::Busy(retry_after) => ErrorKind::Exhausted { retry_after },
            BucketErrorKind::Timeout => ErrorKind::Timeout,
            BucketErrorKind::Unsupported => ErrorKind::Unsupported,
        };
        let doing = error.doing.clone();
        Self::new(kind, doing).because(error)
    }
}

/// One failed try of a request, and what follows from it.
#[derive(Debug)]
pub(super) struct Fault {
    pub(super) kind: BucketErrorKind,
    /// The same request may succeed in a moment.
    pub(super) transient: bool,
    /// The store asks for fewer requests.
    pub(super) throttled: bool,
    /// The store did not do its work: several in a row and it is taken to be down.
    pub(super) down: bool,
    pub(super) outcome: OutcomeLabel,
    pub(super) source: Option<Source>,
}

impl Fault {
    fn new(kind: BucketErrorKind, outcome: OutcomeLabel) -> Self {
        Self { kind, transient: false, throttled: false, down: false, outcome, source: None }
    }

    /// The answer does not have the length asked for. `again`: the object itself may well be right.
    pub(super) fn damaged(what: String, again: bool) -> Self {
        let fault = Self::new(BucketErrorKind::Damaged, OutcomeLabel::Damaged);
        Self { transient: again, source: Some(what.into()), ..fault }
    }

    /// No answer in time; `blame`: the store had enough of it.
    pub(super) fn timeout(blame: bool) -> Self {
        let fault = Self::new(BucketErrorKind::Timeout, OutcomeLabel::Timeout);
        Self { transient: true, down: blame, ..fault }
    }

    /// The name cannot be one of an object.
    pub(super) fn name(source: object_store::path::Error) -> Self {
        let fault = Self::new(BucketErrorKind::Unsupported, OutcomeLabel::Failed);
        Self { source: Some(Box::new(source)), ..fault }
    }

    /// Reads an error of the library.
    pub(super) fn of(error: object_store::Error) -> Self {
        use object_store::Error as E;
        let fault = match &error {
            E::NotFound { .. } => Self::new(BucketErrorKind::NotFound, OutcomeLabel::NotFound),
            E::PermissionDenied { .. } | E::Unauthenticated { .. } => {
                Self::new(BucketErrorKind::Refused, OutcomeLabel::Refused)
            }
            E::NotSupported { .. }
            | E::NotImplemented { .. }
            | E::UnknownConfigurationKey { .. } => {
                Self::new(BucketErrorKind::Unsupported, OutcomeLabel::Failed)
            }
            _ => Self::of_words(&error),
        };
        Self { source: Some(Box::new(error)), ..fault }
    }

    /// Reads what has no type of its own.
    fn of_words(error: &(dyn StdError + 'static)) -> Self {
        let words = error.to_string();
        let failed = Self::new(BucketErrorKind::Failed, OutcomeLabel::Failed);
        let throttled = Self { transient: true, throttled: true, down: true, ..failed };
        let throttled = Self { outcome: OutcomeLabel::Throttled, ..throttled };
        let failed = Self::new(BucketErrorKind::Failed, OutcomeLabel::Failed);
        match status(&words) {
            Some(503 | 429) => return throttled,
            Some(408 | 500..) => return Self { transient: true, down: true, ..failed },
            Some(416) => return Self::damaged("the object ends before".to_owned(), false),
            Some(_) => return failed,
            None => {}
        }
        if words.contains("SlowDown") {
            return throttled;
        }
        if words.contains("InternalError") {
            return Self { transient: true, down: true, ..failed };
        }
        if words.contains("Wanted range starting at") {
            return Self::damaged("the object ends before".to_owned(), false);
        }
        if words.contains("non-partial response") || words.contains("Requested ") {
            return Self::damaged("not the range that was asked for".to_owned(), true);
        }
        match transport(error) {
            Some(HttpErrorKind::Timeout) => Self::timeout(true),
            Some(HttpErrorKind::Connect) if words.contains("not allowed") => failed,
            Some(_) => Self { transient: true, down: true, ..failed },
            // A local disk, a credential, a header: another try would meet the same.
            None => failed,
        }
    }
}

/// The HTTP status that a message of the library names.
pub(super) fn status(words: &str) -> Option<u16> {
    let (_, rest) = words.split_once(STATUS_MARK)?;
    rest.get(..3)?.parse().ok()
}

/// How the connection failed, if it was that.
fn transport(error: &(dyn StdError + 'static)) -> Option<HttpErrorKind> {
    let mut error = Some(error);
    while let Some(cause) = error {
        if let Some(http) = cause.downcast_ref::<HttpError>() {
            return Some(http.kind());
        }
        error = cause.source();
    }
    None
}

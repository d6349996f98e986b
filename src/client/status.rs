//! From a gRPC status to the one error type, with what to do next in the message.
//!
//! The server encodes an error's kind as a gRPC code; this is the way back. A code alone is not
//! enough where the transport itself failed: tonic then reports `Unknown` or `Internal` with a
//! source, and that means "the server is away", not "the server has a defect".

use std::{error::Error as _, time::Duration};

use kvstrata_tiers::error::{Error, ErrorKind};
use tonic::{Code, Status};

/// The metadata key that carries the delay of `RESOURCE_EXHAUSTED`, in milliseconds.
pub const RETRY_AFTER_KEY: &str = "retry-after-ms";
/// The delay assumed when a server names none.
const RETRY_AFTER_DEFAULT: Duration = Duration::from_millis(100);

/// Returns the error that `status` stands for; `doing` is a bare verb phrase.
#[must_use]
pub fn error_of(doing: &str, status: &Status) -> Error {
    let kind = kind_of(status);
    let message = status.message();
    let why = status.source().map(|error| format!(" ({})", root(error))).unwrap_or_default();
    // A server that says that it is away needs no other than its own advice.
    let advice =
        if kind == ErrorKind::Unavailable && status.source().is_none() { "" } else { advice(kind) };
    Error::new(kind, format!("{doing}: {message}{why}{advice}"))
}

/// Returns an error for a reply that breaks the wire contract.
pub(super) fn broken_contract(doing: &str, what: &str) -> Error {
    Error::new(
        ErrorKind::Internal,
        format!(
            "{doing}: the server broke the contract: {what} (do client and server versions match?)"
        ),
    )
}

/// The innermost cause: the layers above it only say "transport error".
pub(super) fn root(error: &(dyn std::error::Error + 'static)) -> String {
    let mut innermost = error;
    while let Some(source) = innermost.source() {
        innermost = source;
    }
    innermost.to_string()
}

fn kind_of(status: &Status) -> ErrorKind {
    let from_transport = status.source().is_some();
    match status.code() {
        Code::InvalidArgument | Code::OutOfRange | Code::AlreadyExists | Code::PermissionDenied => {
            ErrorKind::Invalid
        }
        Code::Unauthenticated => ErrorKind::Unauthenticated,
        Code::NotFound => ErrorKind::UnknownNamespace,
        Code::FailedPrecondition => ErrorKind::LayoutMismatch,
        Code::Aborted => ErrorKind::LeaseExpired,
        Code::ResourceExhausted => ErrorKind::Exhausted { retry_after: retry_after(status) },
        Code::Unavailable => ErrorKind::Unavailable,
        Code::DeadlineExceeded => ErrorKind::Timeout,
        // Tonic reports its own expired deadline as a cancellation.
        Code::Cancelled if status.message() == "Timeout expired" => ErrorKind::Timeout,
        Code::Cancelled if from_transport => ErrorKind::Unavailable,
        Code::Cancelled => ErrorKind::Cancelled,
        Code::DataLoss => ErrorKind::Corrupt,
        Code::Unimplemented => ErrorKind::Unsupported,
        Code::Unknown | Code::Internal if from_transport => ErrorKind::Unavailable,
        Code::Unknown | Code::Internal | Code::Ok => ErrorKind::Internal,
    }
}

fn retry_after(status: &Status) -> Duration {
    status
        .metadata()
        .get(RETRY_AFTER_KEY)
        .and_then(|value| value.to_str().ok()?.parse().ok())
        .map_or(RETRY_AFTER_DEFAULT, Duration::from_millis)
}

fn advice(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::Unauthenticated => {
            "; a token is given by KVSTRATA_TOKEN or in the client's options"
        }
        ErrorKind::UnknownNamespace => {
            "; open the namespace again (a server forgets it on restart)"
        }
        ErrorKind::LeaseExpired => "; do the lookup again",
        ErrorKind::Unavailable => {
            "; is the server running, and was https:// given if it speaks TLS? start it with `kvstrata serve`"
        }
        ErrorKind::Timeout => "; the outcome is unknown, and trying again is safe",
        ErrorKind::Invalid
        | ErrorKind::LayoutMismatch
        | ErrorKind::Exhausted { .. }
        | ErrorKind::Cancelled
        | ErrorKind::Corrupt
        | ErrorKind::Unsupported
        | ErrorKind::Internal => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_map_back_to_kinds() {
        let cases = [
            (Code::InvalidArgument, ErrorKind::Invalid),
            (Code::Unauthenticated, ErrorKind::Unauthenticated),
            (Code::NotFound, ErrorKind::UnknownNamespace),
            (Code::FailedPrecondition, ErrorKind::LayoutMismatch),
            (Code::Aborted, ErrorKind::LeaseExpired),
            (Code::Unavailable, ErrorKind::Unavailable),
            (Code::DeadlineExceeded, ErrorKind::Timeout),
            (Code::Cancelled, ErrorKind::Cancelled),
            (Code::DataLoss, ErrorKind::Corrupt),
            (Code::Unimplemented, ErrorKind::Unsupported),
            (Code::Internal, ErrorKind::Internal),
        ];
        for (code, kind) in cases {
            assert_eq!(error_of("lookup", &Status::new(code, "x")).kind(), kind, "{code:?}");
        }
    }

    #[test]
    fn the_delay_of_exhausted_comes_from_the_metadata() {
        let mut status = Status::resource_exhausted("all pinned");
        assert_eq!(error_of("put", &status).retry_after(), Some(RETRY_AFTER_DEFAULT));
        status.metadata_mut().insert(RETRY_AFTER_KEY, "250".parse().unwrap());
        assert_eq!(error_of("put", &status).retry_after(), Some(Duration::from_millis(250)));
    }

    #[test]
    fn a_broken_transport_means_the_server_is_away() {
        let status = Status::from_error(Box::new(std::io::Error::other("connection reset")));
        let error = error_of("get", &status);
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        assert!(error.to_string().contains("kvstrata serve"), "{error}");
    }
}

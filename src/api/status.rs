//! From the store's errors to gRPC, and from gRPC codes to metric labels.

use kvstrata_tiers::error::{Error, ErrorKind};
use tonic::{Code, Status, metadata::MetadataValue};

use crate::metrics::Outcome;

/// Metadata that says how long to wait, in milliseconds.
pub const RETRY_AFTER_KEY: &str = "retry-after-ms";

/// The longest text of a status, in bytes. It travels in a header, and clients take a few KiB of
/// those: with a longer one they would see a broken stream and no error at all.
const TEXT_BYTES_MAX: usize = 2048;
/// What ends a text that was cut.
const CUT: &str = " ...";

/// How tonic's message begins when a request does not decode.
const DECODE_FAILED: &str = "failed to decode Protobuf message";
/// How tonic's message begins when a request is over the limit.
const TOO_LARGE: &str = "Error, decoded message length too large";

/// The status of a failed call. The kind alone decides the code; the text names field, value, range.
#[must_use]
pub fn from_error(error: &Error) -> Status {
    let text = cut(error.to_string());
    match error.kind() {
        ErrorKind::Invalid => Status::invalid_argument(text),
        ErrorKind::Unauthenticated => Status::unauthenticated(text),
        ErrorKind::UnknownNamespace => Status::not_found(text),
        ErrorKind::LayoutMismatch => Status::failed_precondition(text),
        ErrorKind::LeaseExpired => Status::aborted(text),
        ErrorKind::Exhausted { retry_after } => {
            let mut status = Status::resource_exhausted(text);
            let millis = u64::try_from(retry_after.as_millis()).unwrap_or(u64::MAX);
            status.metadata_mut().insert(RETRY_AFTER_KEY, MetadataValue::from(millis));
            status
        }
        ErrorKind::Unavailable => Status::unavailable(text),
        ErrorKind::Timeout => Status::deadline_exceeded(text),
        ErrorKind::Cancelled => Status::cancelled(text),
        ErrorKind::Corrupt => Status::data_loss(text),
        ErrorKind::Unsupported => Status::unimplemented(text),
        ErrorKind::Internal => Status::internal(text),
    }
}

/// Cuts a text that is too long for a header at the end of a character.
fn cut(mut text: String) -> String {
    if text.len() > TEXT_BYTES_MAX {
        text.truncate(text.floor_char_boundary(TEXT_BYTES_MAX - CUT.len()));
        text.push_str(CUT);
    }
    text
}

/// Corrects the code of a message that could not be read.
///
/// tonic calls a message that does not decode (text that is not UTF-8, say) `INTERNAL` and one that
/// is too large `OUT_OF_RANGE`; both are requests that can never work as written.
#[must_use]
pub fn of_unreadable(code: Code, message: &str) -> Code {
    if message.starts_with(DECODE_FAILED) || message.starts_with(TOO_LARGE) {
        Code::InvalidArgument
    } else {
        code
    }
}

/// The label of a code.
#[must_use]
pub fn outcome(code: Code) -> Outcome {
    match code {
        Code::Ok => Outcome::Ok,
        Code::Cancelled => Outcome::Cancelled,
        Code::Unknown => Outcome::Unknown,
        Code::InvalidArgument => Outcome::InvalidArgument,
        Code::DeadlineExceeded => Outcome::DeadlineExceeded,
        Code::NotFound => Outcome::NotFound,
        Code::AlreadyExists => Outcome::AlreadyExists,
        Code::PermissionDenied => Outcome::PermissionDenied,
        Code::ResourceExhausted => Outcome::ResourceExhausted,
        Code::FailedPrecondition => Outcome::FailedPrecondition,
        Code::Aborted => Outcome::Aborted,
        Code::OutOfRange => Outcome::OutOfRange,
        Code::Unimplemented => Outcome::Unimplemented,
        Code::Internal => Outcome::Internal,
        Code::Unavailable => Outcome::Unavailable,
        Code::DataLoss => Outcome::DataLoss,
        Code::Unauthenticated => Outcome::Unauthenticated,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn each_kind_has_its_code() {
        let exhausted = ErrorKind::Exhausted { retry_after: Duration::from_millis(70) };
        let table = [
            (ErrorKind::Invalid, Code::InvalidArgument),
            (ErrorKind::Unauthenticated, Code::Unauthenticated),
            (ErrorKind::UnknownNamespace, Code::NotFound),
            (ErrorKind::LayoutMismatch, Code::FailedPrecondition),
            (ErrorKind::LeaseExpired, Code::Aborted),
            (exhausted, Code::ResourceExhausted),
            (ErrorKind::Unavailable, Code::Unavailable),
            (ErrorKind::Timeout, Code::DeadlineExceeded),
            (ErrorKind::Cancelled, Code::Cancelled),
            (ErrorKind::Corrupt, Code::DataLoss),
            (ErrorKind::Unsupported, Code::Unimplemented),
            (ErrorKind::Internal, Code::Internal),
        ];
        for (kind, code) in table {
            let status = from_error(&Error::new(kind, "offer 5 blocks"));
            assert_eq!((status.code(), status.message()), (code, "offer 5 blocks"));
            let retry = status.metadata().get(RETRY_AFTER_KEY).map(|v| v.to_str().unwrap());
            assert_eq!(retry, (kind == exhausted).then_some("70"));
        }
    }

    #[test]
    fn a_long_text_is_cut_at_a_character() {
        for pad in 0..3 {
            let text = "x".repeat(pad) + &"\u{e9}".repeat(5000);
            let status = from_error(&Error::new(ErrorKind::Invalid, text));
            assert!((TEXT_BYTES_MAX - 2..=TEXT_BYTES_MAX).contains(&status.message().len()));
            assert!(status.message().ends_with(CUT));
        }
    }
}

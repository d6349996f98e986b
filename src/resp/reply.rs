//! Writes answers: short ones one behind the other, values from where they lie, as RESP2 or RESP3.

use kvstrata_tiers::{error::Result, stack::PartBytes};
use tokio::io::AsyncWrite;

use crate::{
    bulk::output::Output,
    limits::{BULK_BATCH_BYTES, RESP_ANSWERS_BYTES},
};

/// The version of the protocol that a client has asked for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Version {
    #[default]
    Two,
    Three,
}

/// Answers that wait to be written.
#[derive(Debug, Default)]
pub(super) struct Replies {
    out: Output<PartBytes>,
    pub(super) version: Version,
    /// Bytes of short answers in it.
    short_bytes: usize,
}

impl Replies {
    fn push(&mut self, bytes: &[u8]) {
        self.short_bytes = self.short_bytes.saturating_add(bytes.len());
        self.out.push(|heads| heads.extend_from_slice(bytes));
    }

    /// `+OK` and its like.
    pub(super) fn simple(&mut self, text: &str) {
        self.push(format!("+{text}\r\n").as_bytes());
    }

    /// An error, which begins with its kind in capitals.
    pub(super) fn error(&mut self, text: &str) {
        let line: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
        self.push(format!("-{line}\r\n").as_bytes());
    }

    /// A number.
    pub(super) fn integer(&mut self, number: i64) {
        self.push(format!(":{number}\r\n").as_bytes());
    }

    /// A short string.
    pub(super) fn text(&mut self, bytes: &[u8]) {
        self.push(format!("${}\r\n", bytes.len()).as_bytes());
        self.push(bytes);
        self.push(b"\r\n");
    }

    /// A value, from where it lies.
    pub(super) fn value(&mut self, value: PartBytes) {
        let bytes = value.as_ref().len();
        let head = format!("${bytes}\r\n");
        self.out.push_payload(value, 0..bytes, |heads| heads.extend(head.bytes()));
        self.push(b"\r\n");
    }

    /// Nothing.
    pub(super) fn nil(&mut self) {
        self.push(match self.version {
            Version::Two => b"$-1\r\n",
            Version::Three => b"_\r\n",
        });
    }

    /// The head of a list of so many answers, which come next.
    pub(super) fn array(&mut self, count: usize) {
        self.push(format!("*{count}\r\n").as_bytes());
    }

    /// The head of so many pairs of answers, which come next.
    pub(super) fn map(&mut self, pairs: usize) {
        match self.version {
            Version::Two => self.array(pairs * 2),
            Version::Three => self.push(format!("%{pairs}\r\n").as_bytes()),
        }
    }

    /// As much waits as should be written at a time.
    pub(super) fn is_full(&self) -> bool {
        self.out.is_full()
            || self.out.payload_bytes() >= BULK_BATCH_BYTES
            || self.short_bytes >= RESP_ANSWERS_BYTES
    }

    /// Writes all that waits.
    ///
    /// # Errors
    /// `Timeout` if the peer does not read, `Unavailable` if it is gone.
    pub(super) async fn flush<W: AsyncWrite + Unpin>(&mut self, to: &mut W) -> Result<()> {
        if self.out.is_empty() {
            return Ok(());
        }
        self.short_bytes = 0;
        self.out.flush(to).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn each_version_writes_what_its_clients_read() {
        for (version, expected) in [
            (Version::Two, "+OK\r\n-ERR a  b\r\n:-2\r\n$1\r\nx\r\n$-1\r\n*2\r\n*4\r\n"),
            (Version::Three, "+OK\r\n-ERR a  b\r\n:-2\r\n$1\r\nx\r\n_\r\n*2\r\n%2\r\n"),
        ] {
            let mut replies = Replies { version, ..Replies::default() };
            replies.simple("OK");
            replies.error("ERR a\r\nb");
            replies.integer(-2);
            replies.text(b"x");
            replies.nil();
            replies.array(2);
            replies.map(2);
            let mut written = Vec::new();
            replies.flush(&mut written).await.unwrap();
            assert_eq!(String::from_utf8(written).unwrap(), expected);
        }
    }
}

//! The writing half of a connection: answers gets in turn, and the short answers of puts in between.

use std::sync::Arc;

use kvstrata_tiers::{error::Result, stack::PartBytes};
use tokio::{io::AsyncWrite, sync::mpsc};

use super::{
    get::{Made, Sending},
    lane::Lane,
    output::Output,
};

/// What is to be written.
pub(super) struct Writer {
    pub(super) lane: Arc<Lane>,
    /// Gets, in the order in which they came.
    pub(super) gets: mpsc::Receiver<Sending>,
    /// Whole frames.
    pub(super) notes: mpsc::Receiver<Vec<u8>>,
}

impl Writer {
    /// Writes until the reader has ended and everything is answered. What was not written is left in
    /// `out`.
    ///
    /// # Errors
    /// `Timeout` if the peer does not read, `Unavailable` if it is gone.
    pub(super) async fn run<W: AsyncWrite + Unpin>(
        mut self,
        out: &mut Output<PartBytes>,
        to: &mut W,
    ) -> Result<()> {
        let mut current: Option<Sending> = None;
        let (mut more_notes, mut more_gets) = (true, true);
        loop {
            let mut done = false;
            tokio::select! {
                biased;
                note = self.notes.recv(), if more_notes => match note {
                    Some(note) => self.push_notes(&note, out),
                    None => more_notes = false,
                },
                get = self.gets.recv(), if current.is_none() && more_gets => match get {
                    Some(get) => current = Some(get),
                    None => more_gets = false,
                },
                made = advance(current.as_mut(), &self.lane, out), if current.is_some() => {
                    done = matches!(made, Made::Done);
                }
                else => return Ok(()),
            }
            if !out.is_empty() {
                current.as_mut().into_iter().for_each(Sending::hand);
                out.flush(to).await?;
                current.as_mut().into_iter().for_each(Sending::resume);
            }
            if done && let Some(get) = current.take() {
                get.finish(&self.lane);
            }
        }
    }

    /// Appends a note and those behind it that have come already.
    fn push_notes(&mut self, first: &[u8], out: &mut Output<PartBytes>) {
        out.push(|heads| heads.extend_from_slice(first));
        while !out.is_full()
            && let Ok(note) = self.notes.try_recv()
        {
            out.push(|heads| heads.extend_from_slice(&note));
        }
    }
}

async fn advance(get: Option<&mut Sending>, lane: &Lane, out: &mut Output<PartBytes>) -> Made {
    match get {
        Some(get) => get.advance(lane, out).await,
        None => std::future::pending().await,
    }
}

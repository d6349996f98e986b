//! What the numbers of batches say: that one follows the other, that some were lost, that the engine has
//! started anew.

/// The numbers of one engine's batches.
#[derive(Debug, Default)]
pub(super) struct Sequence {
    /// The next one expected; none before the first.
    next: Option<u64>,
    /// Nothing has come since the connection was made.
    fresh: bool,
}

/// What a number says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Seen {
    /// It is the one that was expected.
    Next,
    /// It was seen before.
    Again,
    /// Those from `from` to before this one are to be asked for; those from `unseen` on were never seen.
    Missing { from: u64, unseen: u64 },
}

impl Sequence {
    /// A connection was made: what comes first on it may be of another start of the engine.
    pub(super) fn connect(&mut self) {
        self.fresh = true;
    }

    /// What a batch's number says when it comes from the publisher. It is then the latest.
    ///
    /// An engine that has started anew counts from 0 again, and may have come further than before by the
    /// time that it is reached. So the first batch of a connection says nothing of those before it, and
    /// all that the engine still has are asked for: what comes twice changes nothing.
    pub(super) fn see(&mut self, number: u64) -> Seen {
        let fresh = std::mem::take(&mut self.fresh);
        let expected = self.next.unwrap_or(0);
        let seen = match (fresh, number) {
            (true, 0) => Seen::Next,
            (true, _) => {
                let unseen = if number < expected { 0 } else { expected };
                Seen::Missing { from: 0, unseen }
            }
            (false, number) if number == expected => Seen::Next,
            (false, number) if number > expected => {
                Seen::Missing { from: expected, unseen: expected }
            }
            // On one connection numbers only grow.
            (false, _) => return Seen::Again,
        };
        self.next = Some(number.saturating_add(1));
        seen
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn see(numbers: &[u64]) -> Vec<Seen> {
        let mut sequence = Sequence::default();
        sequence.connect();
        numbers.iter().map(|number| sequence.see(*number)).collect()
    }

    fn missing(from: u64) -> Seen {
        Seen::Missing { from, unseen: from }
    }

    #[test]
    fn numbers_that_follow_one_another_say_nothing() {
        assert_eq!(see(&[0, 1, 2]), [Seen::Next; 3]);
    }

    #[test]
    fn what_came_before_we_did_and_what_was_dropped_is_missing() {
        assert_eq!(see(&[5, 6]), [missing(0), Seen::Next]);
        assert_eq!(see(&[0, 3, 4]), [Seen::Next, missing(1), Seen::Next]);
        assert_eq!(see(&[0, 3, 2]), [Seen::Next, missing(1), Seen::Again]);
    }

    #[test]
    fn the_first_number_of_a_connection_may_be_of_a_new_start() {
        let mut sequence = Sequence::default();
        sequence.connect();
        assert_eq!((0..5).map(|number| sequence.see(number)).last(), Some(Seen::Next));
        for (number, unseen) in [(5, 5), (9, 6), (2, 0), (3, 3)] {
            sequence.connect();
            assert_eq!(sequence.see(number), Seen::Missing { from: 0, unseen }, "{number}");
        }
        assert_eq!(sequence.see(4), Seen::Next);
        sequence.connect();
        assert_eq!((sequence.see(0), sequence.see(1)), (Seen::Next, Seen::Next));
    }
}

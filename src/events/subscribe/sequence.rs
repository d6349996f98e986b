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
    /// Those from the first to before this one are missing.
    Missing(u64),
    /// The engine has started anew, and those from 0 to before this one are missing, if there are any.
    Restarted,
}

impl Sequence {
    /// A connection was made: what comes first on it may be of another start.
    pub(super) fn connect(&mut self) {
        self.fresh = true;
    }

    /// What a batch's number says when it comes from the publisher. It is then the latest.
    pub(super) fn see(&mut self, number: u64) -> Seen {
        let fresh = std::mem::take(&mut self.fresh);
        let seen = match self.next {
            None if number == 0 => Seen::Next,
            None => Seen::Missing(0),
            Some(next) if number == next => Seen::Next,
            Some(next) if number > next => Seen::Missing(next),
            // On one connection numbers only grow, but for what a replay has brought already.
            Some(_) if !fresh => return Seen::Again,
            Some(_) => Seen::Restarted,
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

    #[test]
    fn numbers_that_follow_one_another_say_nothing() {
        assert_eq!(see(&[0, 1, 2]), [Seen::Next; 3]);
    }

    #[test]
    fn what_came_before_we_did_and_what_was_dropped_is_missing() {
        assert_eq!(see(&[5, 6]), [Seen::Missing(0), Seen::Next]);
        assert_eq!(see(&[0, 3, 4]), [Seen::Next, Seen::Missing(1), Seen::Next]);
        assert_eq!(see(&[0, 3, 2]), [Seen::Next, Seen::Missing(1), Seen::Again]);
    }

    #[test]
    fn a_number_that_goes_back_on_a_new_connection_is_a_new_start() {
        let mut sequence = Sequence::default();
        sequence.connect();
        assert_eq!((0..5).map(|number| sequence.see(number)).last(), Some(Seen::Next));
        sequence.connect();
        assert_eq!(sequence.see(5), Seen::Next, "the same start");
        sequence.connect();
        assert_eq!(sequence.see(2), Seen::Restarted);
        assert_eq!(sequence.see(3), Seen::Next);
        sequence.connect();
        assert_eq!(sequence.see(0), Seen::Restarted);
        assert_eq!(sequence.see(1), Seen::Next);
    }
}

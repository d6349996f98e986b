//! Which demotions a tier takes when it cannot take all.
//!
//! Flash wears out by writing, so a tier has a write budget. Of the blocks that engines put, most are
//! never read again, and those that were read once are likely to be read again: while the budget is
//! short, only they are worth it. What a client waits for is written in any case, or fails.

use crate::store::Urgency;

/// A rule for demotions, the loosest last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Admission {
    /// Blocks that were read since they were put.
    Reused,
    /// All blocks.
    All,
}

impl Admission {
    /// Whether a block may be written.
    #[must_use]
    pub fn admits(self, urgency: Urgency, reused: bool) -> bool {
        match (self, urgency) {
            (Self::All, _) | (Self::Reused, Urgency::Durable) => true,
            (Self::Reused, Urgency::Background) => reused,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_nobody_waits_for_and_nobody_read_is_turned_down() {
        for urgency in [Urgency::Durable, Urgency::Background] {
            for reused in [false, true] {
                assert!(Admission::All.admits(urgency, reused));
                let expected = reused || urgency == Urgency::Durable;
                assert_eq!(Admission::Reused.admits(urgency, reused), expected);
            }
        }
    }
}

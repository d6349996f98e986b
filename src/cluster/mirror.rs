//! A mirror of another node's filter, made of what that tells: first the whole, in pieces, then what is added.
//!
//! What a node tells is not believed to be well made. A mirror takes no memory before it is known how much, and that
//! it is there; what does not fit what came before is refused and changes nothing that is in use.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use bytes::Bytes;
use kvstrata_tiers::error::{Error, ErrorKind, Result};

use super::filter::{Filter, LINE_BYTES};
use crate::limits::RETRY_AFTER_COUNT;

/// A step of what a node tells of its filter.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Update {
    /// Of the filter; another one replaces what was known.
    pub generation: u64,
    /// That of the filter with this update, once it is complete.
    pub version: u64,
    /// Keys that the whole filter is made for; 0: this is an addition.
    pub keys: u32,
    /// Where `words` begin in the whole filter, in bytes.
    pub offset: u64,
    /// A piece of the filter.
    pub words: Bytes,
    /// Digests that were added, 8 bytes each, little-endian.
    pub added: Bytes,
    /// Nothing follows.
    pub complete: bool,
}

/// Memory that mirrors share.
#[derive(Debug, Clone)]
pub struct Room {
    left: Arc<AtomicUsize>,
}

/// Some of it, given back when dropped.
#[derive(Debug)]
struct Taken {
    room: Room,
    bytes: usize,
}

impl Room {
    /// So many bytes for all mirrors together.
    #[must_use]
    pub fn new(bytes: usize) -> Self {
        Self { left: Arc::new(AtomicUsize::new(bytes)) }
    }

    fn take(&self, bytes: usize) -> Result<Taken> {
        // Relaxed: it guards no other memory.
        let taken = self
            .left
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(bytes));
        match taken {
            Ok(_) => Ok(Taken { room: self.clone(), bytes }),
            Err(left) => Err(Error::new(
                ErrorKind::Exhausted { retry_after: RETRY_AFTER_COUNT },
                format!("filter: it takes {bytes} bytes, {left} are left for those of members"),
            )),
        }
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.room.left.fetch_add(self.bytes, Ordering::Relaxed);
    }
}

/// A filter and the memory that it was allowed.
#[derive(Debug)]
struct Kept {
    generation: u64,
    version: u64,
    filter: Filter,
    _taken: Taken,
}

/// See the module.
#[derive(Debug)]
pub struct Mirror {
    room: Room,
    known: Option<Kept>,
    /// The next one, of which so many bytes have come.
    coming: Option<(Kept, usize)>,
}

impl Mirror {
    /// Nothing is known yet.
    #[must_use]
    pub fn new(room: Room) -> Self {
        Self { room, known: None, coming: None }
    }

    /// Generation and version of what is known, for the next question; 0 for nothing.
    #[must_use]
    pub fn known(&self) -> (u64, u64) {
        self.known.as_ref().map_or((0, 0), |known| (known.generation, known.version))
    }

    /// The filter; none if it is not known.
    #[must_use]
    pub fn filter(&self) -> Option<&Filter> {
        self.known.as_ref().map(|known| &known.filter)
    }

    /// Bytes of the filters that it has.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let coming = self.coming.as_ref().map(|(coming, _)| coming);
        self.known.iter().chain(coming).map(|kept| kept.filter.bytes()).sum()
    }

    /// Takes the next step; returns whether what is known is now as new as the node has said.
    ///
    /// # Errors
    /// `Invalid` for what does not fit what came before, `Exhausted` if there is no room: then what was to come is
    /// forgotten, and what is known stays.
    pub fn take(&mut self, update: &Update) -> Result<bool> {
        let taken = match update.keys {
            0 => self.take_added(update),
            _ => self.take_piece(update),
        };
        if taken.is_err() {
            self.coming = None;
        }
        taken
    }

    fn take_added(&mut self, update: &Update) -> Result<bool> {
        let known = self.known.as_mut().filter(|known| known.generation == update.generation);
        let known =
            known.ok_or_else(|| Error::invalid("filter: additions to what is not known"))?;
        let (digests, rest) = update.added.as_chunks::<8>();
        if !rest.is_empty() || !update.words.is_empty() || update.version < known.version {
            return Err(Error::invalid(format!(
                "filter: version {} after {}, with {} bytes added and {} others",
                update.version,
                known.version,
                update.added.len(),
                update.words.len()
            )));
        }
        for digest in digests {
            known.filter.add(u64::from_le_bytes(*digest));
        }
        if update.complete {
            known.version = update.version;
        }
        Ok(update.complete)
    }

    fn take_piece(&mut self, update: &Update) -> Result<bool> {
        let Update { generation, version, keys, offset, .. } = *update;
        if offset == 0 {
            self.coming = None;
            Filter::check_keys(keys)?;
            let taken = self.room.take(Filter::bytes_for(keys))?;
            let filter = Filter::new(keys);
            self.coming = Some((Kept { generation, version, filter, _taken: taken }, 0));
        }
        let Some((coming, filled)) = &mut self.coming else {
            return Err(Error::invalid(format!("filter: its bytes before {offset} come first")));
        };
        let is_next = (coming.generation, coming.version, coming.filter.keys())
            == (generation, version, keys)
            && u64::try_from(*filled) == Ok(offset)
            && update.added.is_empty();
        if !is_next || !coming.filter.fill(*filled, &update.words) {
            return Err(Error::invalid(format!(
                "filter: {} bytes from {offset} on given, of which whole lines of {LINE_BYTES} bytes from \
                 {filled} on were to come",
                update.words.len(),
            )));
        }
        *filled += update.words.len();
        if !update.complete {
            return Ok(false);
        }
        let required = coming.filter.bytes();
        if *filled < required {
            return Err(Error::invalid(format!("filter: {filled} of {required} bytes have come")));
        }
        self.known = self.coming.take().map(|(kept, _)| kept);
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn piece(filter: &Filter, offset: usize, len: usize) -> Update {
        let words = Bytes::from(filter.piece(offset, len));
        let complete = offset + words.len() >= filter.bytes();
        Update {
            generation: 5,
            version: 9,
            keys: filter.keys(),
            offset: offset as u64,
            words,
            added: Bytes::new(),
            complete,
        }
    }

    fn addition(version: u64, digests: &[u64]) -> Update {
        let added = digests.iter().flat_map(|digest| digest.to_le_bytes()).collect();
        Update { generation: 5, version, added, complete: true, ..Update::default() }
    }

    fn digest(number: u64) -> u64 {
        number.wrapping_mul(0x0123_4567_89ab_cdef)
    }

    fn filter() -> Filter {
        let mut filter = Filter::new(200);
        for number in 0..200 {
            filter.add(digest(number));
        }
        filter
    }

    fn may_have(mirror: &Mirror, number: u64) -> Option<bool> {
        mirror.filter().map(|filter| filter.may_have(digest(number)))
    }

    #[test]
    fn a_whole_one_comes_in_pieces_and_then_what_is_added() {
        let (filter, room) = (filter(), Room::new(1 << 20));
        let mut mirror = Mirror::new(room.clone());
        assert_eq!((mirror.known(), may_have(&mirror, 0)), ((0, 0), None));
        assert!(!mirror.take(&piece(&filter, 0, 128)).unwrap());
        assert_eq!(may_have(&mirror, 0), None, "not whole");
        assert!(mirror.take(&piece(&filter, 128, 1024)).unwrap());
        assert_eq!((mirror.known(), mirror.bytes()), ((5, 9), filter.bytes()));
        assert!((0..200).all(|number| may_have(&mirror, number) == Some(true)));
        let new = (200..).find(|number| may_have(&mirror, *number) == Some(false)).unwrap();
        assert!(mirror.take(&addition(11, &[digest(new)])).unwrap());
        assert_eq!((mirror.known(), may_have(&mirror, new)), ((5, 11), Some(true)));
        drop(mirror);
        assert_eq!(room.left.load(Ordering::Relaxed), 1 << 20, "given back");
    }

    #[test]
    fn what_does_not_fit_changes_nothing_that_is_known() {
        let filter = filter();
        let mut mirror = Mirror::new(Room::new(2 * filter.bytes()));
        mirror.take(&piece(&filter, 0, 1024)).unwrap();
        let good = piece(&filter, 0, 128);
        let wrong = [
            Update { generation: 6, ..addition(10, &[1]) },
            addition(8, &[1]),
            Update { added: Bytes::from_static(b"seven b"), ..addition(10, &[]) },
            piece(&filter, 128, 128),
            Update { words: Bytes::from(vec![0; 100]), ..good.clone() },
            Update { words: Bytes::from(vec![0; 4096]), ..good.clone() },
            Update { complete: true, ..good.clone() },
            Update { keys: u32::MAX, ..good.clone() },
            Update { keys: 1_000_000, ..good.clone() },
        ];
        for update in wrong {
            mirror.take(&update).unwrap_err();
            assert_eq!((mirror.known(), mirror.bytes()), ((5, 9), filter.bytes()), "{update:?}");
        }
        // Another generation in its place, which had to have room beside it.
        let next = |offset| Update { generation: 7, ..piece(&filter, offset, 128) };
        assert!(!mirror.take(&next(0)).unwrap());
        assert_eq!(mirror.known(), (5, 9));
        assert!(mirror.take(&next(128)).unwrap());
        assert_eq!((mirror.known(), mirror.bytes()), ((7, 9), filter.bytes()));
    }

    #[test]
    fn there_is_no_more_memory_than_there_is_room() {
        let filter = filter();
        let room = Room::new(filter.bytes() + LINE_BYTES);
        let mut first = Mirror::new(room.clone());
        assert!(first.take(&piece(&filter, 0, 1024)).unwrap());
        let mut second = Mirror::new(room);
        let refused = second.take(&piece(&filter, 0, 1024)).unwrap_err();
        assert!(refused.kind().is_retryable() && second.bytes() == 0, "{refused}");
        drop(first);
        assert!(second.take(&piece(&filter, 0, 1024)).unwrap());
    }

    proptest! {
        #[test]
        fn any_updates_are_taken_or_refused_within_the_room(
            updates in prop::collection::vec(
                (0..3_u64, 0..4_u64, prop_oneof![Just(0), 0..200_u32, any::<u32>()],
                 prop_oneof![Just(0_u64), Just(64), any::<u64>()],
                 (0..5_usize, 0..20_usize), any::<bool>()),
                1..40,
            )
        ) {
            let room = Room::new(1024);
            let mut mirror = Mirror::new(room.clone());
            for (generation, version, keys, offset, (lines, added), complete) in updates {
                let words = Bytes::from(vec![1; lines * 64]);
                let added = Bytes::from(vec![2; added]);
                let update = Update { generation, version, keys, offset, words, added, complete };
                if mirror.take(&update).is_ok_and(|complete| complete) {
                    prop_assert_eq!(mirror.known(), (generation, version));
                }
                prop_assert!(mirror.bytes() + room.left.load(Ordering::Relaxed) == 1024);
            }
        }
    }
}

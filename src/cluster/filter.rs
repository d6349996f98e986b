//! What tells which blocks a node may have: a Bloom filter over digests of their keys, small enough that every node
//! keeps one of every other.
//!
//! 10 bits for each key it is made for, of which a key sets 7 within 64 bytes: to ask costs one cache line, however
//! large the filter is. At most about one absent key in a hundred seems to be there; a key that was added always
//! does. Nothing can be taken out: whoever keeps one makes another when too much has left.
//!
//! Pure. The bytes are those of docs/formats.md ("Filter of a node"), the same for every node of a cluster.

use kvstrata_tiers::{
    block::BlockHash,
    error::{Error, Result},
    namespace::NamespaceId,
};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::limits::FILTER_KEYS_MAX;

/// Bits of the filter for each key that it is made for.
pub const KEY_BITS: u64 = 10;
/// Bits that a key sets: what gives the fewest false positives with [`KEY_BITS`].
pub const KEY_PROBES: u32 = 7;
/// Bytes within which they lie: a cache line.
pub const LINE_BYTES: usize = 64;

const LINE_WORDS: usize = LINE_BYTES / 8;
const LINE_BITS: u64 = LINE_BYTES as u64 * 8;
/// Bits of a place within a line.
const PLACE_BITS: u32 = LINE_BITS.trailing_zeros();
/// 2^64 over the golden ratio, odd: spreads a digest over the bits that the line has not used.
const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;

const _: () = assert!(KEY_PROBES * PLACE_BITS <= u64::BITS, "one word names all places of a key");

/// Digests of the blocks of one namespace.
#[derive(Debug, Clone, Copy)]
pub struct Digester {
    seed: u64,
}

impl Digester {
    /// For the namespace of this id.
    #[must_use]
    pub fn new(namespace: &NamespaceId) -> Self {
        let [a, b, c, d, e, f, g, h, ..] = *namespace.as_bytes();
        Self { seed: u64::from_le_bytes([a, b, c, d, e, f, g, h]) }
    }

    /// The digest of a block: XXH3-64 of the zero-extended hash, under the first 8 bytes of the id as seed. Ids are
    /// made under a secret, so that nobody outside of a cluster can choose what falls together.
    #[must_use]
    pub fn digest(self, hash: &BlockHash) -> u64 {
        xxh3_64_with_seed(hash.as_bytes(), self.seed)
    }
}

/// See the module.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Filter {
    keys: u32,
    lines: Vec<[u64; LINE_WORDS]>,
}

impl Filter {
    /// An empty one for so many keys, 1 to [`FILTER_KEYS_MAX`]; other numbers take the nearest of these. It takes
    /// [`bytes_for`](Self::bytes_for) them.
    #[must_use]
    pub fn new(keys: u32) -> Self {
        let keys = keys.clamp(1, FILTER_KEYS_MAX);
        Self { keys, lines: vec![[0; LINE_WORDS]; Self::lines_for(keys)] }
    }

    /// The one with these bytes, made for so many keys.
    ///
    /// # Errors
    /// `Invalid` if the number is out of range, or there are not as many bytes as it takes.
    pub fn from_bytes(keys: u32, bytes: &[u8]) -> Result<Self> {
        Self::check_keys(keys)?;
        let required = Self::bytes_for(keys);
        if bytes.len() != required {
            let given = bytes.len();
            return Err(Error::invalid(format!(
                "filter: {given} bytes given, {required} required for {keys} keys"
            )));
        }
        let mut filter = Self::new(keys);
        filter.fill(0, bytes);
        Ok(filter)
    }

    /// Whether there can be one for so many keys.
    ///
    /// # Errors
    /// `Invalid` if not.
    pub(super) fn check_keys(keys: u32) -> Result<()> {
        if (1..=FILTER_KEYS_MAX).contains(&keys) {
            return Ok(());
        }
        Err(Error::invalid(format!("filter: {keys} keys given, 1 to {FILTER_KEYS_MAX} allowed")))
    }

    /// Takes bytes of another one from `offset` on; false if these are no whole lines within it, and then none.
    pub(super) fn fill(&mut self, offset: usize, bytes: &[u8]) -> bool {
        let whole = offset.is_multiple_of(LINE_BYTES) && bytes.len().is_multiple_of(LINE_BYTES);
        let first = offset / LINE_BYTES;
        let places = first.checked_add(bytes.len() / LINE_BYTES);
        let places = places.and_then(|end| self.lines.get_mut(first..end));
        let Some(places) = places.filter(|_| whole) else { return false };
        let (words, _) = bytes.as_chunks::<8>();
        let (lines, _) = words.as_chunks::<LINE_WORDS>();
        for (place, line) in places.iter_mut().zip(lines) {
            *place = line.map(u64::from_le_bytes);
        }
        true
    }

    /// Bytes of memory, and of the wire, that one for so many keys takes: at most 64 more than 1.25 for each.
    #[must_use]
    pub fn bytes_for(keys: u32) -> usize {
        Self::lines_for(keys) * LINE_BYTES
    }

    fn lines_for(keys: u32) -> usize {
        let lines = (u64::from(keys) * KEY_BITS).div_ceil(LINE_BITS).max(1);
        usize::try_from(lines).unwrap_or(usize::MAX)
    }

    /// How many keys it is made for: with more, more seem to be there that are not.
    #[must_use]
    pub fn keys(&self) -> u32 {
        self.keys
    }

    /// Bytes that it takes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.lines.len() * LINE_BYTES
    }

    /// Up to `len` of its bytes from `offset` on, both multiples of [`LINE_BYTES`]; empty behind its end.
    #[must_use]
    pub fn piece(&self, offset: usize, len: usize) -> Vec<u8> {
        let lines = self.lines.iter().skip(offset / LINE_BYTES).take(len / LINE_BYTES);
        lines.flatten().flat_map(|word| word.to_le_bytes()).collect()
    }

    /// Adds a key; false if it, or others with the same bits, were there already.
    pub fn add(&mut self, digest: u64) -> bool {
        let at = self.line_of(digest);
        let Some(line) = self.lines.get_mut(at) else { return false };
        let mut is_new = false;
        for (word, bits) in line.iter_mut().zip(mask(digest)) {
            is_new |= *word & bits != bits;
            *word |= bits;
        }
        is_new
    }

    /// Whether a key may have been added; true for all that were.
    #[must_use]
    pub fn may_have(&self, digest: u64) -> bool {
        let Some(line) = self.lines.get(self.line_of(digest)) else { return false };
        line.iter().zip(mask(digest)).all(|(word, bits)| word & bits == bits)
    }

    /// The line of a key: the high half of the product with their number, so that each has an equal share.
    fn line_of(&self, digest: u64) -> usize {
        let product = u128::from(digest) * self.lines.len() as u128;
        usize::try_from(product >> u64::BITS).unwrap_or(usize::MAX)
    }
}

/// The bits of a key within its line.
fn mask(digest: u64) -> [u64; LINE_WORDS] {
    let spread = (digest ^ (digest >> 32)).wrapping_mul(SPREAD);
    let mut mask = [0; LINE_WORDS];
    for probe in 0..KEY_PROBES {
        let place = (spread >> (u64::BITS - (probe + 1) * PLACE_BITS)) % LINE_BITS;
        let word = usize::try_from(place / u64::from(u64::BITS)).unwrap_or(0);
        if let Some(word) = mask.get_mut(word) {
            *word |= 1 << (place % u64::from(u64::BITS));
        }
    }
    mask
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Hashes as engines make them: nothing to tell them from random ones.
    fn digests(from: u32, count: u32) -> impl Iterator<Item = u64> {
        let digester = Digester::new(&NamespaceId::from_bytes([7; 32]));
        (from..from + count).map(move |number| {
            let hash = *blake3::hash(&number.to_le_bytes()).as_bytes();
            digester.digest(&BlockHash::from_array(hash))
        })
    }

    #[expect(clippy::cast_precision_loss, reason = "small numbers")]
    fn false_positives(keys: u32, added: u32) -> f64 {
        let mut filter = Filter::new(keys);
        for digest in digests(0, added) {
            filter.add(digest);
        }
        assert!(digests(0, added).all(|digest| filter.may_have(digest)), "no false negatives");
        let asked = 200_000;
        let wrong = digests(added, asked).filter(|digest| filter.may_have(*digest)).count();
        wrong as f64 / f64::from(asked)
    }

    #[test]
    fn as_many_seem_to_be_there_as_theory_says() {
        for (keys, added) in [(20_000, 20_000), (20_000, 10_000), (100_000, 150_000), (1_000, 900)]
        {
            let load = f64::from(added) / f64::from(keys);
            let (probes, bits) = (f64::from(KEY_PROBES), 10.0);
            let theory = (1.0 - (-probes * load / bits).exp()).powf(probes);
            let measured = false_positives(keys, added);
            let ratio = measured / theory;
            assert!((0.5..=2.0).contains(&ratio), "{added} of {keys}: {measured} for {theory}");
        }
    }

    #[test]
    fn namespaces_do_not_share_digests() {
        let mut filter = Filter::new(1000);
        let hash = BlockHash::from_array([1; 32]);
        let of = |id: [u8; 32]| Digester::new(&NamespaceId::from_bytes(id)).digest(&hash);
        assert!(filter.add(of([1; 32])) && !filter.add(of([1; 32])));
        assert!(filter.may_have(of([1; 32])) && !filter.may_have(of([2; 32])));
    }

    #[test]
    fn its_bytes_are_those_of_version_1() {
        let digester = Digester::new(&NamespaceId::from_bytes([9; 32]));
        let hash = BlockHash::new(b"block hash").unwrap();
        assert_eq!(digester.digest(&hash), 0x45ae_af35_115d_fe01);
        let mut filter = Filter::new(100);
        filter.add(digester.digest(&hash));
        let bytes = filter.piece(0, filter.bytes());
        assert_eq!(bytes.len(), 128);
        let set: Vec<_> = (0..1024).filter(|bit| bytes[bit / 8] >> (bit % 8) & 1 == 1).collect();
        assert_eq!(set, [146, 162, 182, 188, 266, 385, 469]);
        assert_eq!(Filter::from_bytes(100, &bytes).unwrap(), filter);
    }

    #[test]
    fn pieces_are_the_whole_and_memory_is_as_stated() {
        let mut filter = Filter::new(10_000);
        for digest in digests(0, 10_000) {
            filter.add(digest);
        }
        let pieces: Vec<u8> =
            (0..filter.bytes()).step_by(1024).flat_map(|at| filter.piece(at, 1024)).collect();
        assert_eq!(Filter::from_bytes(10_000, &pieces).unwrap(), filter);
        assert!(filter.piece(filter.bytes(), 1024).is_empty());
        for keys in [1, 51, 52, 10_000, FILTER_KEYS_MAX] {
            let exact = (u64::from(keys) * 10).div_ceil(8);
            let bytes = Filter::bytes_for(keys) as u64;
            assert!((exact..exact + 64).contains(&bytes), "{keys}: {bytes}");
        }
        assert_eq!(Filter::new(0).keys(), 1);
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_filter_or_refused(
            keys in any::<u32>(), few in 0..2_000_u32, bytes in prop::collection::vec(any::<u8>(), 0..4096),
            digest in any::<u64>(),
        ) {
            for keys in [keys, few] {
                match Filter::from_bytes(keys, &bytes) {
                    Ok(filter) => {
                        prop_assert_eq!(filter.piece(0, usize::MAX), bytes.clone());
                        let _asked = filter.may_have(digest);
                    }
                    Err(refused) => prop_assert!(refused.to_string().contains("filter: ")),
                }
            }
        }

        #[test]
        fn what_was_added_stays(digests in prop::collection::vec(any::<u64>(), 1..300)) {
            let mut filter = Filter::new(64);
            for digest in &digests {
                filter.add(*digest);
            }
            prop_assert!(digests.iter().all(|digest| filter.may_have(*digest)));
        }
    }
}

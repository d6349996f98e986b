//! The bytes of batches, as each kind of router wants them.
//!
//! ```text
//! [timestamp f64, [event, ...], data parallel rank]
//! map     {"type": "BlockStored", "block_hashes": [...], "parent_block_hash": hash or nil, "token_ids": [...],
//!          "block_size": n, "lora_id": nil, "medium": "...", "lora_name": nil or "...",
//!          "extra_keys": nil or [[salt], nil, ...], "cache_salt": "..."}     the last only if there is one
//!         {"type": "BlockRemoved", "block_hashes": [...], "medium": "..."}
//! array   the same fields by their places: 9 of a stored one, 3 of a removed one
//! hash    CF and 8 bytes, always: one router takes the whole batch for broken if a small number is short
//! ```
//! What is left out is left out on purpose: a locality or a cache group, which make routers drop events,
//! and `AllBlocksCleared`, which takes an engine's own memory from their index, too.

use kvstrata_tiers::tier::Tier;

/// How events are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Dialect {
    /// By name; otherwise by place.
    pub(super) map: bool,
    /// What the tiers are called, hot to cold.
    pub(super) mediums: [&'static str; 3],
}

/// Dynamo's routers: an unknown medium would be taken for the memory of a GPU.
pub(super) const DYNAMO: Dialect =
    Dialect { map: true, mediums: ["CPU_PINNED", "DISK", "EXTERNAL"] };
/// The endpoint picker of llm-d: names are free, but `cpu` is what engines may fetch from one another.
pub(super) const LLM_D: Dialect = Dialect { map: true, mediums: ["dram", "nvme", "object"] };

impl Dialect {
    fn medium(self, tier: Tier) -> &'static str {
        let [dram, nvme, object] = self.mediums;
        match tier {
            Tier::Dram => dram,
            Tier::Nvme => nvme,
            Tier::Object => object,
        }
    }
}

/// What routers are told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Event {
    /// Blocks that follow one another can be read from a tier.
    Stored(Stored),
    /// They no longer can.
    Removed {
        /// From which tier.
        tier: Tier,
        /// Which blocks.
        hashes: Vec<u64>,
    },
}

/// Blocks that follow one another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Stored {
    /// Where they are.
    pub(super) tier: Tier,
    /// Their hashes, in order.
    pub(super) hashes: Vec<u64>,
    /// The block before the first one; none at the root.
    pub(super) parent: Option<u64>,
    /// The tokens of all of them.
    pub(super) tokens: Vec<u32>,
    /// Tokens in each.
    pub(super) block_tokens: u32,
    /// Name of the LoRA adapter; empty for none.
    pub(super) lora_name: String,
    /// The cache salt; empty for none.
    pub(super) salt: String,
}

impl Event {
    /// Which tier it is about.
    pub(super) fn tier(&self) -> Tier {
        match self {
            Self::Stored(Stored { tier, .. }) | Self::Removed { tier, .. } => *tier,
        }
    }

    /// Which blocks it is about.
    pub(super) fn hashes(&self) -> &[u64] {
        match self {
            Self::Stored(Stored { hashes, .. }) | Self::Removed { hashes, .. } => hashes,
        }
    }
}

/// Writes a batch.
pub(super) fn batch(dialect: Dialect, seconds: f64, events: &[Event], rank: u32) -> Vec<u8> {
    let blocks: usize = events.iter().map(|event| event.hashes().len()).sum();
    // Sixteen tokens of up to five bytes and a hash each.
    let mut writer = Writer(Vec::with_capacity(128 + events.len() * 256 + blocks * 96));
    writer.array(3);
    writer.float(seconds);
    writer.array(events.len());
    for event in events {
        match event {
            Event::Stored(stored) => write_stored(&mut writer, dialect, stored),
            Event::Removed { tier, hashes } => {
                writer.event(dialect.map, "BlockRemoved", 2);
                writer.name(dialect.map, "block_hashes");
                writer.hashes(hashes);
                writer.name(dialect.map, "medium");
                writer.text(dialect.medium(*tier));
            }
        }
    }
    writer.number(u64::from(rank));
    writer.0
}

fn write_stored(writer: &mut Writer, dialect: Dialect, stored: &Stored) {
    let map = dialect.map;
    let salted = map && !stored.salt.is_empty();
    writer.event(map, "BlockStored", if salted { 9 } else { 8 });
    writer.name(map, "block_hashes");
    writer.hashes(&stored.hashes);
    writer.name(map, "parent_block_hash");
    match stored.parent {
        Some(parent) => writer.hash(parent),
        None => writer.nil(),
    }
    writer.name(map, "token_ids");
    writer.array(stored.tokens.len());
    for token in &stored.tokens {
        writer.number(u64::from(*token));
    }
    writer.name(map, "block_size");
    writer.number(u64::from(stored.block_tokens));
    writer.name(map, "lora_id");
    writer.nil();
    writer.name(map, "medium");
    writer.text(dialect.medium(stored.tier));
    writer.name(map, "lora_name");
    match stored.lora_name.as_str() {
        "" => writer.nil(),
        name => writer.text(name),
    }
    writer.name(map, "extra_keys");
    // As engines have it: a salt is told with the root.
    if stored.salt.is_empty() || stored.parent.is_some() {
        writer.nil();
    } else {
        writer.array(stored.hashes.len());
        writer.array(1);
        writer.text(&stored.salt);
        for _ in 1..stored.hashes.len() {
            writer.nil();
        }
    }
    if salted {
        writer.name(map, "cache_salt");
        writer.text(&stored.salt);
    }
}

/// MessagePack, as far as events take it.
struct Writer(Vec<u8>);

impl Writer {
    /// Begins an event with so many fields besides its kind.
    fn event(&mut self, map: bool, kind: &str, fields: u8) {
        if map {
            // Up to fifteen.
            self.0.push(0x80 | (fields + 1));
            self.text("type");
        } else {
            self.array(usize::from(fields + 1));
        }
        self.text(kind);
    }

    fn name(&mut self, map: bool, name: &str) {
        if map {
            self.text(name);
        }
    }

    fn nil(&mut self) {
        self.0.push(0xc0);
    }

    fn float(&mut self, number: f64) {
        self.0.push(0xcb);
        self.0.extend(number.to_be_bytes());
    }

    fn number(&mut self, number: u64) {
        match (u8::try_from(number), u16::try_from(number), u32::try_from(number)) {
            (Ok(number @ 0..0x80), ..) => self.0.push(number),
            (Ok(number), ..) => self.0.extend([0xcc, number]),
            (_, Ok(number), _) => self.tagged(0xcd, &number.to_be_bytes()),
            (.., Ok(number)) => self.tagged(0xce, &number.to_be_bytes()),
            _ => self.hash(number),
        }
    }

    /// Always in full.
    fn hash(&mut self, hash: u64) {
        self.tagged(0xcf, &hash.to_be_bytes());
    }

    fn hashes(&mut self, hashes: &[u64]) {
        self.array(hashes.len());
        for hash in hashes {
            self.hash(*hash);
        }
    }

    fn array(&mut self, count: usize) {
        match (u8::try_from(count), u16::try_from(count)) {
            (Ok(count @ 0..16), _) => self.0.push(0x90 | count),
            (_, Ok(count)) => self.tagged(0xdc, &count.to_be_bytes()),
            _ => self.tagged(0xdd, &u32::try_from(count).unwrap_or(u32::MAX).to_be_bytes()),
        }
    }

    fn text(&mut self, text: &str) {
        let len = text.len();
        match (u8::try_from(len), u16::try_from(len)) {
            (Ok(len @ 0..32), _) => self.0.push(0xa0 | len),
            (Ok(len), _) => self.0.extend([0xd9, len]),
            (_, Ok(len)) => self.tagged(0xda, &len.to_be_bytes()),
            _ => self.tagged(0xdb, &u32::try_from(len).unwrap_or(u32::MAX).to_be_bytes()),
        }
        self.0.extend(text.as_bytes());
    }

    fn tagged(&mut self, tag: u8, bytes: &[u8]) {
        self.0.push(tag);
        self.0.extend(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored() -> Stored {
        Stored {
            tier: Tier::Nvme,
            hashes: vec![5, u64::MAX],
            parent: None,
            tokens: vec![1, 2, 128, 70_000],
            block_tokens: 2,
            lora_name: String::new(),
            salt: String::new(),
        }
    }

    /// Hexadecimal, without what is between bytes for the eye.
    fn hex(text: &str) -> Vec<u8> {
        hex::decode(text.split_whitespace().collect::<String>()).unwrap()
    }

    #[test]
    fn a_stored_chain_has_these_bytes_for_dynamo() {
        let golden = hex("93 cb 3ff8000000000000 91
             89 a4 74797065 ab 426c6f636b53746f726564
             ac 626c6f636b5f686173686573 92 cf 0000000000000005 cf ffffffffffffffff
             b1 706172656e745f626c6f636b5f68617368 c0
             a9 746f6b656e5f696473 94 01 02 cc80 ce 00011170
             aa 626c6f636b5f73697a65 02
             a7 6c6f72615f6964 c0
             a6 6d656469756d a4 4449534b
             a9 6c6f72615f6e616d65 c0
             aa 65787472615f6b657973 c0
             03");
        let bytes = batch(DYNAMO, 1.5, &[Event::Stored(stored())], 3);
        assert_eq!(bytes, golden);
        // Which is read where engines are listened to.
        assert_eq!(bytes, include_bytes!("../subscribe/corpus/good-published-for-dynamo"));
    }

    #[test]
    fn a_stored_chain_has_these_bytes_for_llm_d_by_name_and_by_place() {
        let event = Stored {
            parent: Some(6),
            lora_name: "adapter".to_owned(),
            salt: "s".to_owned(),
            tier: Tier::Dram,
            ..stored()
        };
        let golden = hex("93 cb 3ff8000000000000 91
             8a a4 74797065 ab 426c6f636b53746f726564
             ac 626c6f636b5f686173686573 92 cf 0000000000000005 cf ffffffffffffffff
             b1 706172656e745f626c6f636b5f68617368 cf 0000000000000006
             a9 746f6b656e5f696473 94 01 02 cc80 ce 00011170
             aa 626c6f636b5f73697a65 02
             a7 6c6f72615f6964 c0
             a6 6d656469756d a4 6472616d
             a9 6c6f72615f6e616d65 a7 61646170746572
             aa 65787472615f6b657973 c0
             aa 63616368655f73616c74 a1 73
             00");
        let bytes = batch(LLM_D, 1.5, &[Event::Stored(event.clone())], 0);
        assert_eq!(bytes, golden);
        assert_eq!(bytes, include_bytes!("../subscribe/corpus/good-published-for-llm-d"));
        let root = Stored { parent: None, ..event };
        let golden = hex("93 cb 3ff8000000000000 91
             99 ab 426c6f636b53746f726564
             92 cf 0000000000000005 cf ffffffffffffffff
             c0
             94 01 02 cc80 ce 00011170
             02 c0 a4 6472616d a7 61646170746572
             92 91 a1 73 c0
             00");
        let places = Dialect { map: false, ..LLM_D };
        let bytes = batch(places, 1.5, &[Event::Stored(root)], 0);
        assert_eq!(bytes, golden);
        assert_eq!(bytes, include_bytes!("../subscribe/corpus/good-published-by-place"));
    }

    #[test]
    fn what_was_removed_has_these_bytes() {
        let removed = [Event::Removed { tier: Tier::Object, hashes: vec![5] }];
        let named = hex("93 cb 3ff8000000000000 91
             83 a4 74797065 ac 426c6f636b52656d6f766564
             ac 626c6f636b5f686173686573 91 cf 0000000000000005
             a6 6d656469756d a8 45585445524e414c
             00");
        let bytes = batch(DYNAMO, 1.5, &removed, 0);
        assert_eq!(bytes, named);
        assert_eq!(bytes, include_bytes!("../subscribe/corpus/good-published-removed"));
        let placed = hex("93 cb 3ff8000000000000 91
             93 ac 426c6f636b52656d6f766564 91 cf 0000000000000005 a6 6f626a656374
             00");
        assert_eq!(batch(Dialect { map: false, ..LLM_D }, 1.5, &removed, 0), placed);
    }

    #[test]
    fn long_chains_and_names_take_longer_lengths() {
        for count in [15, 16, 255, 256, 65_535, 65_536] {
            let event = Stored {
                hashes: vec![1; count],
                tokens: vec![7; count],
                block_tokens: 1,
                lora_name: "l".repeat(count),
                ..stored()
            };
            for dialect in [DYNAMO, Dialect { map: false, ..LLM_D }] {
                let bytes = batch(dialect, 0.0, &[Event::Stored(event.clone())], 0);
                let mut reader = crate::events::msgpack::Reader::new(&bytes);
                reader.skip().unwrap();
                assert!(reader.is_empty(), "{count}");
            }
        }
    }
}

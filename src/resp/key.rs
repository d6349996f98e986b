//! What a foreign key says: which namespace its value belongs to, and which block it is there.
//!
//! ```text
//! LMCache, multiprocess   MODEL@RANK@GROUP@CHUNK[@SALT]           RANK: 8 hex digits
//! LMCache, in process     MODEL@WORLD@WORKER@CHUNK@DTYPE[@...]    two values: ...metadata, ...kv_bytes
//! anything else           in one namespace of its own
//! ```
//! Everything but the chunk names the namespace, so that values of two models, ranks or salts are
//! counted apart. The block is named by a hash of the whole key, whatever it looks like: a key that is
//! taken for another kind than it is costs nothing but its place in the accounts.

use kvstrata_tiers::{
    block::BlockHash, limits::NAMESPACE_FIELD_BYTES_MAX, namespace::foreign_hash,
};

/// How the names of all namespaces of this listener begin.
pub(super) const PREFIX: &str = "resp/";
/// The name of the namespace of keys that say nothing to us.
pub(super) const KEYS: &str = "resp/keys";

/// A key that was read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Key {
    /// Name of its namespace.
    pub(super) space: String,
    /// Its block.
    pub(super) hash: BlockHash,
    /// Set if the value is of no use without another one.
    pub(super) pair: Option<Pair>,
}

/// One of two values that belong together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Pair {
    pub(super) half: Half,
    /// The block of the other one.
    pub(super) twin: BlockHash,
}

/// Which of the two a value is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Half {
    /// Shape and length: stored second.
    Metadata,
    /// The payload: stored first.
    KvBytes,
}

const METADATA: &str = "metadata";
const KV_BYTES: &str = "kv_bytes";

impl Key {
    /// Reads a key of any bytes.
    pub(super) fn read(key: &[u8]) -> Self {
        let hash = foreign_hash(key);
        let parsed = str::from_utf8(key)
            .ok()
            .and_then(|text| multiprocess(text).or_else(|| in_process(text)));
        let (space, pair) = parsed.unwrap_or_else(|| (KEYS.to_owned(), None));
        if space.len() > NAMESPACE_FIELD_BYTES_MAX {
            return Self { space: KEYS.to_owned(), hash, pair };
        }
        Self { space, hash, pair }
    }
}

type Parsed = (String, Option<Pair>);

fn multiprocess(text: &str) -> Option<Parsed> {
    let fields: Vec<_> = text.split('@').collect();
    let (model, rank, group, chunk, salt) = match fields.as_slice() {
        [model, rank, group, chunk] => (*model, *rank, *group, *chunk, ""),
        [model, rank, group, chunk, salt] if !salt.is_empty() => {
            (*model, *rank, *group, *chunk, *salt)
        }
        _ => return None,
    };
    let known = !model.is_empty() && rank.len() == 8 && is_hex(rank) && is_hex(group);
    (known && is_hex(chunk))
        .then(|| (format!("{PREFIX}lmcache-mp/{model}@{rank}@{group}@{salt}"), None))
}

fn in_process(text: &str) -> Option<Parsed> {
    let (body, half, other) = match (text.strip_suffix(METADATA), text.strip_suffix(KV_BYTES)) {
        (Some(body), _) => (body, Some(Half::Metadata), KV_BYTES),
        (None, Some(body)) => (body, Some(Half::KvBytes), METADATA),
        (None, None) => (text, None, ""),
    };
    let mut fields = body.splitn(5, '@');
    let mut next = || fields.next().filter(|field| !field.is_empty());
    let (model, world, worker, chunk, rest) = (next()?, next()?, next()?, next()?, next()?);
    let is_number = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    // Some hashes of Python are negative.
    let digits = chunk.strip_prefix('-').unwrap_or(chunk);
    if !is_number(world) || !is_number(worker) || !is_hex(digits) {
        return None;
    }
    let pair =
        half.map(|half| Pair { half, twin: foreign_hash(format!("{body}{other}").as_bytes()) });
    Some((format!("{PREFIX}lmcache/{model}@{world}@{worker}@{rest}"), pair))
}

fn is_hex(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn space(key: &str) -> String {
        Key::read(key.as_bytes()).space
    }

    #[test]
    fn all_but_the_chunk_names_the_namespace() {
        let table = [
            ("org/m@01000100@0@00ff", "resp/lmcache-mp/org/m@01000100@0@"),
            ("org/m@01000100@0@00fe", "resp/lmcache-mp/org/m@01000100@0@"),
            ("org/m@01000100@0@00ff@salt", "resp/lmcache-mp/org/m@01000100@0@salt"),
            ("org/m@01000100@1@00ff", "resp/lmcache-mp/org/m@01000100@1@"),
            ("m@2@1@-5@bfloat16metadata", "resp/lmcache/m@2@1@bfloat16"),
            ("m@2@1@5a@bfloat16metadata", "resp/lmcache/m@2@1@bfloat16"),
            ("m@2@1@5b@bfloat16kv_bytes", "resp/lmcache/m@2@1@bfloat16"),
            ("m@2@1@5a@bfloat16@3@tag%xkv_bytes", "resp/lmcache/m@2@1@bfloat16@3@tag%x"),
            ("m@2@1@5a@half", "resp/lmcache/m@2@1@half"),
        ];
        for (key, expected) in table {
            assert_eq!(space(key), expected, "{key}");
        }
    }

    #[test]
    fn what_does_not_parse_has_a_namespace_of_its_own() {
        let long = format!("{}@01000100@0@ff", "m".repeat(2000));
        for key in
            ["", "x", "metadata", "a@b@c@d", "m@1@0@zz@half", "@01000100@0@ff", "a@b\0@", &long]
        {
            assert_eq!(space(key), KEYS, "{key}");
        }
        assert_eq!(Key::read(b"\xff\xfe").space, KEYS);
        // A model whose name has the separator.
        assert_eq!(space("org@m@01000100@0@ff"), KEYS);
    }

    #[test]
    fn halves_name_each_other_and_nobody_else() {
        let pair = |key: &str| Key::read(key.as_bytes()).pair;
        let hash = |key: &str| Key::read(key.as_bytes()).hash;
        let (first, second) = ("m@1@0@ab@halfkv_bytes", "m@1@0@ab@halfmetadata");
        assert_eq!(pair(first), Some(Pair { half: Half::KvBytes, twin: hash(second) }));
        assert_eq!(pair(second), Some(Pair { half: Half::Metadata, twin: hash(first) }));
        for alone in ["m@1@0@ab@half", "m@01000100@0@ab", "my metadata", "kv_bytes"] {
            assert_eq!(pair(alone), None, "{alone}");
        }
    }

    #[test]
    fn no_two_keys_are_one_block() {
        let keys =
            ["m@1@0@ab@half", "m@1@0@abc@half", "n@1@0@ab@half", "m@1@0@ab@halfmetadata", ""];
        let mut hashes: Vec<_> = keys.iter().map(|key| Key::read(key.as_bytes()).hash).collect();
        hashes.sort_unstable();
        hashes.dedup();
        assert_eq!(hashes.len(), keys.len());
    }
}

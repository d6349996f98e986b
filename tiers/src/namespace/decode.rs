//! Reads a namespace back from the bytes of `encode`.
//!
//! Strict: every field, in order, and nothing behind them. Bytes with a field that this version does
//! not know are not read in part, because blocks would then be served under an identity that says
//! less than the one they were stored under: that is refused as of a newer version (`Unsupported`).
//! What no version can have written is `Corrupt`.

use std::collections::BTreeSet;

use super::{
    BlockLayout, Identity, NamespaceSpec, PartSpec,
    encode::{DOMAIN, KIND_ENGINE, KIND_OPAQUE, TAG_HASH_SCHEMES},
    wishes,
};
use crate::error::{Error, ErrorKind, Result};

/// What the domains of all versions begin with.
const ANY_DOMAIN: &[u8] = b"kvstrata namespace v";

/// The layout of blocks that an [encoded](super::Namespace::encoded) namespace declares, whoever's
/// secret its id was made with.
///
/// # Errors
/// `Corrupt` for bytes that no version can have written, `Unsupported` for those of a newer one.
pub fn layout_of(encoded: &[u8]) -> Result<BlockLayout> {
    let fields = encoded.split_first().map(|(_, fields)| fields);
    decode(fields.ok_or_else(|| corrupt("empty"))?).map(|(spec, _)| BlockLayout::new(&spec))
}

/// Returns what `encoded` says, and the hash schemes behind it.
pub(super) fn decode(encoded: &[u8]) -> Result<(NamespaceSpec, BTreeSet<String>)> {
    let Some(rest) = encoded.strip_prefix(DOMAIN) else {
        // A whole prefix of another version, not ours cut off.
        let newer = encoded.len() >= DOMAIN.len() && encoded.starts_with(ANY_DOMAIN);
        return Err(if newer { newer_version("its domain") } else { corrupt("no domain") });
    };
    let Some((kind, rest)) = rest.split_first() else { return Err(corrupt("kind: cut off")) };
    let mut fields = Fields(rest);
    let spec = match *kind {
        KIND_ENGINE => NamespaceSpec::Engine(Box::new(engine(&mut fields)?)),
        KIND_OPAQUE => NamespaceSpec::Opaque {
            tenant: fields.text(1, "tenant")?,
            name: fields.text(2, "name")?,
            bytes_max: fields.number(3, "bytes_max")?,
        },
        0 => return Err(corrupt("kind: 0")),
        other => return Err(newer_version(&format!("kind {other}"))),
    };
    let mut hash_schemes = BTreeSet::new();
    if *kind == KIND_ENGINE && fields.0.first() == Some(&TAG_HASH_SCHEMES) {
        let names = fields.text(TAG_HASH_SCHEMES, "hash_schemes")?;
        hash_schemes = wishes::split(&names).ok_or_else(|| corrupt("hash_schemes: no list"))?;
    }
    fields.end(if *kind == KIND_ENGINE { TAG_HASH_SCHEMES } else { 3 })?;
    Ok((spec, hash_schemes))
}

fn engine(fields: &mut Fields<'_>) -> Result<Identity> {
    // Evaluated as written: in ascending order of tags.
    Ok(Identity {
        tenant: fields.text(1, "tenant")?,
        model: fields.text(2, "model")?,
        weights: fields.text(3, "weights")?,
        engine: fields.text(4, "engine")?,
        layout: fields.text(5, "layout")?,
        dtype: fields.text(6, "dtype")?,
        block_tokens: fields.number(7, "block_tokens")?,
        parts: parts(fields.value(8, "parts")?)?,
        split: fields.text(9, "split")?,
        hash_algorithm: fields.text(10, "hash_algorithm")?,
        hash_bytes: fields.number(11, "hash_bytes")?,
        hash_root: fields.value(12, "hash_root")?.to_vec(),
        lora: fields.value(13, "lora")?.to_vec(),
        cache_salt: fields.value(14, "cache_salt")?.to_vec(),
    })
}

fn parts(value: &[u8]) -> Result<Vec<PartSpec>> {
    let (words, rest) = value.as_chunks();
    let (triples, words_left) = words.as_chunks();
    if !rest.is_empty() || !words_left.is_empty() {
        return Err(corrupt(&format!("parts: {} bytes, no multiple of 12", value.len())));
    }
    let part = |triple: &[[u8; 4]; 3]| {
        let [group, rank, bytes] = triple.map(u32::from_le_bytes);
        PartSpec { group, rank, bytes }
    };
    Ok(triples.iter().map(part).collect())
}

/// Fields, taken from the front.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn value(&mut self, tag: u8, name: &str) -> Result<&'a [u8]> {
        let cut_off = || corrupt(&format!("{name}: cut off"));
        let (found, rest) = self.0.split_first().ok_or_else(cut_off)?;
        if *found != tag {
            return Err(corrupt(&format!("{name}: tag {found} found, {tag} required")));
        }
        let (length, rest) = rest.split_first_chunk().ok_or_else(cut_off)?;
        let length = u64::from_le_bytes(*length);
        let split = usize::try_from(length).ok().and_then(|length| rest.split_at_checked(length));
        let Some((value, rest)) = split else {
            return Err(corrupt(&format!("{name}: {length} bytes said, {} left", rest.len())));
        };
        self.0 = rest;
        Ok(value)
    }

    fn text(&mut self, tag: u8, name: &str) -> Result<String> {
        let value = self.value(tag, name)?;
        let text = std::str::from_utf8(value);
        text.map(str::to_owned).map_err(|error| corrupt(&format!("{name}: {error}")))
    }

    fn number(&mut self, tag: u8, name: &str) -> Result<u32> {
        let value = self.value(tag, name)?;
        let bytes = value.try_into().map(u32::from_le_bytes);
        bytes.map_err(|_length| corrupt(&format!("{name}: {} bytes, 4 required", value.len())))
    }

    /// Nothing is left behind the field `last`.
    fn end(&self, last: u8) -> Result<()> {
        match self.0.first() {
            None => Ok(()),
            Some(tag) if *tag > last => Err(newer_version(&format!("tag {tag}"))),
            Some(tag) => Err(corrupt(&format!("tag {tag} found behind the last field"))),
        }
    }
}

/// What no version can have written.
pub(super) fn corrupt(what: &str) -> Error {
    Error::new(ErrorKind::Corrupt, format!("restore namespace: {what}"))
}

fn newer_version(what: &str) -> Error {
    Error::new(
        ErrorKind::Unsupported,
        format!("restore namespace: {what} is of a newer version, upgrade to use its blocks"),
    )
}

//! What was said of a block with `describe`, and its bytes on a medium.
//!
//! ```text
//! offset  bytes
//!      0      1   1 if there is a block before it, else 0
//!      1      4   position                 u32
//!      5      2   n, bytes of the name     u16
//!      7     32   hash of the block before it, zero-extended; not there without one
//!             n   name of the LoRA adapter, UTF-8
//!                 its token ids, to the end    u32 each
//! ```
//! Numbers are little-endian.

use crate::{block::BlockHash, limits::NAMESPACE_FIELD_BYTES_MAX};

/// What was described of a block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Description {
    /// The block before it; `None` at the root.
    pub parent: Option<BlockHash>,
    /// Its index in its chain.
    pub position: u32,
    /// Its token ids, if the namespace keeps them.
    pub tokens: Vec<u32>,
    /// Name of the LoRA adapter; empty for none.
    pub lora_name: String,
}

impl Description {
    /// Appends its bytes. A name beyond the limit of `describe` is left out.
    pub(crate) fn encode(&self, into: &mut Vec<u8>) {
        let name = self.lora_name.as_bytes();
        let (name, length) = match u16::try_from(name.len()) {
            Ok(length) if name.len() <= NAMESPACE_FIELD_BYTES_MAX => (name, length),
            Ok(_) | Err(_) => (&[][..], 0),
        };
        into.push(u8::from(self.parent.is_some()));
        into.extend(self.position.to_le_bytes());
        into.extend(length.to_le_bytes());
        into.extend(self.parent.iter().flat_map(BlockHash::as_bytes));
        into.extend(name);
        into.extend(self.tokens.iter().flat_map(|token| token.to_le_bytes()));
    }

    /// Reads what [`encode`](Self::encode) wrote; `None` for anything else.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut rest = bytes;
        let [has_parent] = *rest.split_off(..1)? else { return None };
        let position = u32::from_le_bytes(rest.split_off(..4)?.try_into().ok()?);
        let name_bytes = u16::from_le_bytes(rest.split_off(..2)?.try_into().ok()?);
        let parent = match has_parent {
            0 => None,
            1 => Some(BlockHash::from_array(rest.split_off(..32)?.try_into().ok()?)),
            _ => return None,
        };
        let name = rest.split_off(..usize::from(name_bytes))?;
        if name.len() > NAMESPACE_FIELD_BYTES_MAX {
            return None;
        }
        let lora_name = std::str::from_utf8(name).ok()?.to_owned();
        let (tokens, torn) = rest.as_chunks();
        let tokens = tokens.iter().map(|token| u32::from_le_bytes(*token)).collect();
        torn.is_empty().then_some(Self { parent, position, tokens, lora_name })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn encoded(description: &Description) -> Vec<u8> {
        let mut bytes = Vec::new();
        description.encode(&mut bytes);
        bytes
    }

    #[test]
    fn the_bytes_never_change() {
        let root = Description {
            parent: None,
            position: 0x0102,
            tokens: vec![3, u32::MAX],
            lora_name: "ab".to_owned(),
        };
        let expected = [0, 2, 1, 0, 0, 2, 0, b'a', b'b', 3, 0, 0, 0, 255, 255, 255, 255];
        assert_eq!(encoded(&root), expected);
        let parent = Some(BlockHash::from_array([7; 32]));
        let bare = Description { parent, tokens: Vec::new(), lora_name: String::new(), ..root };
        assert_eq!(encoded(&bare), [vec![1, 2, 1, 0, 0, 0, 0], vec![7; 32]].concat());
    }

    #[test]
    fn what_was_encoded_is_decoded_and_what_was_cut_is_not_the_same() {
        let whole = Description {
            parent: Some(BlockHash::from_array([7; 32])),
            position: u32::MAX,
            tokens: (0..16).collect(),
            lora_name: "adapter".to_owned(),
        };
        let bytes = encoded(&whole);
        assert_eq!(Description::decode(&bytes), Some(whole.clone()));
        for cut in 0..bytes.len() {
            assert_ne!(Description::decode(&bytes[..cut]), Some(whole.clone()), "cut at {cut}");
        }
        assert_eq!(Description::decode(&[bytes.as_slice(), &[0]].concat()), None, "longer");
        assert_eq!(Description::decode(&[&[2], &bytes[1..]].concat()), None, "no such mark");
        let long = Description { lora_name: "x".repeat(70_000), ..whole };
        assert_eq!(Description::decode(&encoded(&long)).unwrap().lora_name, "");
    }
}

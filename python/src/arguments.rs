//! Arguments that several verbs take, checked once, with errors that name the argument.

use bytes::Bytes;
use kvstrata::client::{Handle, HashList};
use kvstrata_tiers::{
    block::{BlockHash, HASH_BYTES_MAX, HASH_BYTES_MIN},
    namespace::PartSpec,
};
use pyo3::{prelude::*, pybacked::PyBackedBytes};

use crate::{errors, memory};

/// Hashes, packed in one buffer or as a sequence of bytes.
pub(crate) fn hashes(given: &Bound<'_, PyAny>, hash_bytes: usize) -> PyResult<HashList> {
    let py = given.py();
    let packed = if let Some(packed) = memory::copy(given)? {
        packed
    } else {
        let mut packed = Vec::new();
        for (position, each) in given.try_iter()?.enumerate() {
            let each: PyBackedBytes = each?.extract()?;
            if each.len() != hash_bytes {
                let length = each.len();
                let text = format!(
                    "hashes: position {position}: {length} bytes given, exactly {hash_bytes} declared"
                );
                return Err(errors::invalid(py, &text));
            }
            packed.extend_from_slice(&each);
        }
        Bytes::from(packed)
    };
    HashList::new(packed, hash_bytes).map_err(|error| errors::raised(py, &error))
}

/// One hash of the declared length.
pub(crate) fn hash(
    py: Python<'_>,
    name: &str,
    given: &[u8],
    hash_bytes: usize,
) -> PyResult<BlockHash> {
    if given.len() != hash_bytes {
        let length = given.len();
        let text = format!("{name}: {length} bytes given, exactly {hash_bytes} declared");
        return Err(errors::invalid(py, &text));
    }
    BlockHash::new(given).map_err(|error| errors::raised(py, &error))
}

/// The length of the hashes of a namespace, as it was given.
pub(crate) fn hash_bytes(py: Python<'_>, given: usize) -> PyResult<u32> {
    let allowed = HASH_BYTES_MIN..=HASH_BYTES_MAX;
    let fitting = u32::try_from(given).ok().filter(|_| allowed.contains(&given));
    fitting.ok_or_else(|| {
        let (low, high) = (allowed.start(), allowed.end());
        let text = format!("hash_bytes: {given} given, {low} to {high} allowed");
        errors::invalid(py, &text)
    })
}

/// The parts that a call is about.
pub(crate) struct Parts {
    /// As they go to the client: none are all.
    pub(crate) indices: Vec<u32>,
    /// The bytes that each has; none if they may be any.
    pub(crate) bytes: Vec<Option<usize>>,
}

impl Parts {
    /// Those of a namespace at these indices; all if there are none.
    pub(crate) fn chosen(
        py: Python<'_>,
        handle: &Handle,
        indices: Option<Vec<u32>>,
    ) -> PyResult<Self> {
        let declared = handle.parts();
        let bytes = |part: &PartSpec| (!handle.is_opaque()).then_some(part.bytes as usize);
        let Some(indices) = indices.filter(|indices| !indices.is_empty()) else {
            let bytes = declared.iter().map(bytes).collect();
            return Ok(Self { indices: Vec::new(), bytes });
        };
        let chosen = indices.iter().map(|index| {
            declared.get(*index as usize).map(bytes).ok_or_else(|| {
                let last = declared.len().saturating_sub(1);
                let text = format!("parts: {index} given, 0 to {last} declared");
                errors::invalid(py, &text)
            })
        });
        let bytes = chosen.collect::<PyResult<_>>()?;
        Ok(Self { indices, bytes })
    }
}

//! Where a prompt's prefix is: its namespaces, and what this node has of each of them.

use std::{collections::BTreeSet, sync::Arc};

use bytes::Bytes;
use kvstrata_tiers::{
    block::{HASH_BYTES_MIN, Hashes},
    error::{Error, Result},
    namespace::Namespace,
    tier::{Run, Tier},
};

use tokio::time::Instant;

use super::{Others, others::Held};
use crate::{
    auth::Bearer,
    flow::count,
    limits::ROUTER_DEADLINE_DEFAULT,
    node::Node,
    schemes::{self, Lora, Scheme},
};

/// A prompt, by its hashes or by its tokens.
#[derive(Debug, Clone)]
pub(crate) struct Prompt {
    /// Where to look.
    pub(crate) among: Among,
    /// Tokens of a block; 0: whatever a namespace has.
    pub(crate) block_tokens: u32,
    /// What of it is known.
    pub(crate) asked: Asked,
    /// Blocks of the whole prompt; 0: as many as `asked` has.
    pub(crate) total_blocks: u32,
}

/// Which namespaces may have it.
#[derive(Debug, Clone)]
pub(crate) enum Among {
    /// The tenant's of this model.
    Model(String),
    /// The one with this id.
    Namespace(Bytes),
    /// All of the tenant's.
    All,
}

/// What is known of a prompt.
#[derive(Debug, Clone)]
pub(crate) enum Asked {
    /// The engine's own hashes, packed; `hash_bytes` of each, 0 for what the namespaces have.
    Hashes { packed: Bytes, hash_bytes: u32 },
    /// Names of 64 bits by this scheme; `chained` if those of [`Scheme::Dynamo`] are sequence hashes.
    Hashes64 { scheme: Scheme, chained: bool, hashes: Vec<u64> },
    /// Its tokens. A last block that is not full does not count.
    Tokens { tokens: Vec<u32>, lora_name: String, cache_salt: String },
}

/// What was found of a prompt.
#[derive(Debug)]
pub(crate) struct Found {
    /// Blocks of the whole prompt.
    pub(crate) total_blocks: u32,
    /// So many at the end are hashes that no namespace knows.
    pub(crate) unresolved_blocks: u32,
    /// What each namespace has, those that have nothing included.
    pub(crate) prefixes: Vec<Prefix>,
    /// The other members that have runs of these.
    pub(crate) others: Others,
}

/// What one namespace has of a prompt.
#[derive(Debug)]
pub(crate) struct Prefix {
    pub(crate) namespace: Arc<Namespace>,
    /// Readable blocks from the first one on, without gaps.
    pub(crate) runs: Vec<Run>,
    /// Who has each of them; empty if this node has all.
    pub(super) held: Vec<Held>,
    /// The hashes of the prompt as the engine has them, packed.
    pub(super) hashes: Bytes,
}

impl Prefix {
    /// How many blocks it is.
    pub(crate) fn blocks(&self) -> u32 {
        self.runs.last().map_or(0, |run| run.end)
    }

    /// The hashes of the blocks `start..end`, as far as there are any.
    pub(super) fn hashes(&self, start: u32, end: u32) -> Result<Hashes<'_>> {
        let hash_bytes = self.namespace.hash_bytes();
        let at =
            |block: u32| usize::try_from(block).unwrap_or(usize::MAX).saturating_mul(hash_bytes);
        let packed = self.hashes.get(at(start)..at(end.min(self.blocks()))).unwrap_or_default();
        Hashes::new(packed, hash_bytes)
    }
}

impl Node {
    /// Finds what this node has of `prompt` in the tenant's namespaces.
    ///
    /// # Errors
    /// `UnknownNamespace` for one that was named; `Invalid` for what does not fit the namespaces.
    pub(super) fn find_prefixes(&self, bearer: &Bearer, prompt: &Prompt) -> Result<Found> {
        let namespaces = self.namespaces_of(bearer, prompt)?;
        check_agreement(&namespaces, &prompt.asked)?;
        let mut prefixes = Vec::with_capacity(namespaces.len());
        let (mut asked, mut known, mut refused) = (None, 0, None);
        for namespace in namespaces {
            asked = asked.max(Some(prompt.asked.blocks(&namespace)));
            let hashes = match self.hashes_in(&namespace, &prompt.asked) {
                Ok(hashes) => hashes,
                Err(why) => {
                    refused.get_or_insert(why);
                    continue;
                }
            };
            known = known.max(count(hashes.len() / namespace.hash_bytes()));
            let runs = self.runs_of(&namespace, &hashes)?;
            prefixes.push(Prefix { namespace, runs, held: Vec::new(), hashes });
        }
        // Nothing would be found, ever: a router that is not told so looks for it for long.
        if let Some(why) = refused.filter(|_| prefixes.is_empty()) {
            return Err(why);
        }
        let asked = asked.unwrap_or_else(|| {
            prompt.asked.blocks_of(prompt.block_tokens, prompt.asked.hash_bytes())
        });
        let total_blocks = total(prompt.total_blocks, asked)?;
        let unresolved_blocks = asked.saturating_sub(known);
        Ok(Found { total_blocks, unresolved_blocks, prefixes, others: Others::default() })
    }

    /// The hashes of the longest prefix of a prompt that are known in a namespace, packed.
    fn hashes_in(&self, namespace: &Namespace, asked: &Asked) -> Result<Bytes> {
        let hashes = match asked {
            Asked::Hashes { packed, .. } => return Ok(packed.clone()),
            Asked::Hashes64 { scheme, chained: true, hashes } => {
                self.schemes.resolve_chained(namespace, *scheme, hashes)
            }
            Asked::Hashes64 { scheme, chained: false, hashes } => {
                self.schemes.resolve(namespace, *scheme, hashes)
            }
            Asked::Tokens { tokens, lora_name, cache_salt } => {
                let lora = (!lora_name.is_empty()).then_some(Lora { name: lora_name, path: "" });
                let prompt = schemes::Prompt { tokens, lora, cache_salt };
                self.schemes.engine_hashes(namespace, &prompt)
            }
        };
        hashes.map(Bytes::from)
    }

    /// The longest prefix that any of the tenant's namespaces has at any member, in blocks.
    ///
    /// # Errors
    /// As those of a lookup.
    ///
    /// # Cancel safety
    /// Safe.
    pub(crate) async fn prefix_blocks(&self, bearer: &Bearer, prompt: &Prompt) -> Result<u32> {
        let mut found = self.find_prefixes(bearer, prompt)?;
        if self.roster.has_others() {
            let deadline = Instant::now() + ROUTER_DEADLINE_DEFAULT;
            self.widen(std::iter::once(&mut found), &[], deadline).await;
        }
        Ok(found.prefixes.iter().map(Prefix::blocks).max().unwrap_or(0))
    }

    fn namespaces_of(&self, bearer: &Bearer, prompt: &Prompt) -> Result<Vec<Arc<Namespace>>> {
        let mut namespaces = match &prompt.among {
            Among::Namespace(id) => vec![self.namespace(bearer, id)?],
            Among::Model(model) => self.namespaces.of_model(bearer.tenant(), model),
            Among::All => self.namespaces.of_tenant(bearer.tenant()),
        };
        let wanted = prompt.block_tokens;
        namespaces.retain(|namespace| wanted == 0 || namespace.block_tokens() == wanted);
        let wanted = prompt.asked.hash_bytes();
        namespaces.retain(|namespace| wanted == 0 || namespace.hash_bytes() == wanted);
        if namespaces.is_empty() && matches!(prompt.among, Among::Namespace(_)) {
            return Err(Error::invalid(format!(
                "prompt.block_tokens, prompt.hash_bytes: {} and {wanted} given, 0 or what the namespace \
                 has required",
                prompt.block_tokens
            )));
        }
        Ok(namespaces)
    }

    /// What the tiers have of these hashes and can be loaded, from the first one on.
    pub(super) fn runs_of(&self, namespace: &Namespace, packed: &[u8]) -> Result<Vec<Run>> {
        if packed.is_empty() {
            return Ok(Vec::new());
        }
        let answer = self.stack.peek(namespace, Hashes::new(packed, namespace.hash_bytes())?);
        let mut runs = answer.runs;
        let down: Vec<Tier> = Tier::ALL.into_iter().filter(|tier| !self.can_load(*tier)).collect();
        let readable = |run: &Run| !run.pending && !down.contains(&run.tier);
        let end = runs.iter().position(|run| !readable(run)).unwrap_or(runs.len());
        runs.truncate(end);
        Ok(runs)
    }
}

impl Asked {
    /// Hashes or tokens, whichever it is made of; the most that packed ones can be.
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Hashes { packed, .. } => packed.len() / HASH_BYTES_MIN,
            Self::Hashes64 { hashes, .. } => hashes.len(),
            Self::Tokens { tokens, .. } => tokens.len(),
        }
    }

    /// The length of its hashes, if it says one.
    fn hash_bytes(&self) -> usize {
        match self {
            Self::Hashes { hash_bytes, .. } => usize::try_from(*hash_bytes).unwrap_or(0),
            Self::Hashes64 { .. } | Self::Tokens { .. } => 0,
        }
    }

    /// How many blocks of a namespace it is.
    fn blocks(&self, namespace: &Namespace) -> u32 {
        self.blocks_of(namespace.block_tokens(), namespace.hash_bytes())
    }

    /// How many blocks it is, of so many tokens and with hashes of so many bytes; 0 if that is not known.
    fn blocks_of(&self, block_tokens: u32, hash_bytes: usize) -> u32 {
        let block_tokens = usize::try_from(block_tokens).unwrap_or(0);
        match self {
            Self::Hashes { packed, .. } => count(packed.len().checked_div(hash_bytes).unwrap_or(0)),
            Self::Hashes64 { hashes, .. } => count(hashes.len()),
            Self::Tokens { tokens, .. } => {
                count(tokens.len().checked_div(block_tokens).unwrap_or(0))
            }
        }
    }
}

/// What a request means must not depend on which namespace is asked.
fn check_agreement(namespaces: &[Arc<Namespace>], asked: &Asked) -> Result<()> {
    let (field, of): (_, fn(&Namespace) -> u64) = match asked {
        Asked::Hashes { .. } => {
            ("hash_bytes", |known| u64::try_from(known.hash_bytes()).unwrap_or(u64::MAX))
        }
        Asked::Tokens { .. } => ("block_tokens", |known| u64::from(known.block_tokens())),
        Asked::Hashes64 { .. } => return Ok(()),
    };
    let values: BTreeSet<u64> = namespaces.iter().map(|namespace| of(namespace)).collect();
    if values.len() > 1 {
        return Err(Error::invalid(format!(
            "prompt.{field}: 0 given, but the namespaces of this model have {values:?}: say which"
        )));
    }
    let (Asked::Hashes { packed, .. }, Some(hash_bytes)) = (asked, values.first()) else {
        return Ok(());
    };
    let given = u64::try_from(packed.len()).unwrap_or(u64::MAX);
    if given.is_multiple_of(*hash_bytes) {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "prompt.hashes: {given} bytes given, a multiple of {hash_bytes} required (hash_bytes of the \
         namespace)"
    )))
}

fn total(given: u32, asked: u32) -> Result<u32> {
    if given == 0 || given >= asked {
        return Ok(given.max(asked));
    }
    Err(Error::invalid(format!(
        "prompt.total_blocks: {given} given, 0 or at least {asked} allowed, as there are hashes"
    )))
}

//! Puts blocks of this node's dram at another member, in the name of the tenant whose they are.
//!
//! It is an ordinary put: the member names what it lacks, takes memory as for anybody, and verifies every part
//! before it is readable. What is sent was verified here just before, so that a block that has gone wrong in this
//! memory is quarantined and not handed on. What is known of the blocks' places in their chains goes with them.
//! Namespaces are opened in the words of the engine that opened them here last, so that the member knows who will
//! come for them.

use std::{collections::HashMap, sync::Arc};

use bytes::Bytes;
use kvstrata_tiers::{
    block::BlockHash,
    error::{Error, Result},
    namespace::{Namespace, NamespaceSpec as Spec, Wishes},
    stack::{self, Block, Stack},
};
use tracing::debug;

use crate::{
    client::{
        Client, ClientOptions, Description, Handle, HashList, NamespaceSpec, PutBatch, PutOutcome,
        Session,
    },
    limits::PUSH_DEADLINE,
    members::Member,
    node::Node,
};

/// What became of blocks that were pushed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Pushed {
    /// The member has taken them.
    pub(crate) blocks: u64,
    /// Payload of these, in bytes.
    pub(crate) bytes: u64,
    /// It had them.
    pub(crate) present: u64,
    /// It did not take them.
    pub(crate) refused: u64,
    /// They had left dram here meanwhile.
    pub(crate) gone: u64,
}

/// The engine in whose words a namespace is opened.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub(crate) struct Words {
    pub(crate) instance: String,
    pub(crate) host: String,
    pub(crate) zone: String,
}

/// A client of one member for one tenant's engine, with the session that owns its puts.
#[derive(Debug)]
struct Line {
    client: Client,
    session: Arc<Session>,
    opened: HashMap<u32, Handle>,
}

/// The ways to one member.
#[derive(Debug)]
pub(crate) struct Door {
    member: Member,
    options: ClientOptions,
    lines: HashMap<(String, Words), Line>,
}

/// A namespace that is open at a member: clones share the connection.
#[derive(Debug, Clone)]
pub(crate) struct Place {
    handle: Handle,
    session: Arc<Session>,
    namespace: Arc<Namespace>,
}

impl Words {
    /// Those of whoever opened a namespace last; empty if nobody has since the start.
    pub(crate) fn of(node: &Node, namespace: &Namespace) -> Self {
        let latest = node.openers.of(namespace.index()).pop();
        latest.map_or_else(Self::default, |opener| Self {
            instance: opener.instance,
            host: opener.host,
            zone: opener.zone,
        })
    }
}

impl Door {
    /// The way to `member`; `options` show that this is a node.
    pub(crate) fn new(member: Member, options: ClientOptions) -> Self {
        Self { member, options, lines: HashMap::new() }
    }

    /// Where it leads.
    pub(crate) fn member(&self) -> &Member {
        &self.member
    }

    /// Opens a namespace there, in the words of its engine.
    ///
    /// # Errors
    /// Whatever keeps the member from being reached, or from opening it.
    ///
    /// # Cancel safety
    /// Safe: opening is idempotent.
    pub(crate) async fn place(
        &mut self,
        namespace: &Arc<Namespace>,
        words: &Words,
    ) -> Result<Place> {
        let key = (namespace.tenant().to_owned(), words.clone());
        let line = match self.lines.remove(&key) {
            Some(line) => line,
            None => Line::open(&self.member, &self.options, &key).await?,
        };
        let line = self.lines.entry(key).or_insert(line);
        let session = Arc::clone(&line.session);
        if let Some(handle) = line.opened.get(&namespace.index()) {
            let (handle, namespace) = (handle.clone(), Arc::clone(namespace));
            return Ok(Place { handle, session, namespace });
        }
        let spec = match namespace.spec() {
            Spec::Engine(identity) => NamespaceSpec::Engine(identity.clone()),
            Spec::Opaque { name, bytes_max, .. } => {
                NamespaceSpec::Opaque { name: name.clone(), bytes_max: *bytes_max }
            }
        };
        let wishes = Wishes {
            keep_tokens: namespace.keeps_tokens(),
            hash_schemes: namespace.hash_schemes(),
        };
        let handle = line.client.open_with(spec, wishes).await?;
        if handle.id() != namespace.id() {
            let text =
                "open namespace: a member gives it another id: do all nodes have one secret?";
            return Err(Error::invalid(text));
        }
        line.opened.insert(namespace.index(), handle.clone());
        Ok(Place { handle, session, namespace: Arc::clone(namespace) })
    }
}

impl Line {
    async fn open(
        member: &Member,
        options: &ClientOptions,
        (tenant, words): &(String, Words),
    ) -> Result<Self> {
        let options = ClientOptions {
            acting_for: Some(tenant.clone()),
            instance: Some(words.instance.clone()),
            node: Some(words.host.clone()),
            zone: words.zone.clone(),
            call_deadline: PUSH_DEADLINE,
            stall_deadline: PUSH_DEADLINE,
            ..options.clone()
        };
        let client = Client::connect(&member.endpoint, options).await?;
        // The session first: with one, a client stays where it is, wherever its engine's home may be.
        let session = client.session("a node that hands on blocks").await?;
        Ok(Self { client, session: Arc::new(session), opened: HashMap::new() })
    }
}

impl Place {
    /// Puts what dram still has of these blocks, which follow one another behind `parent` as far as is known.
    ///
    /// # Errors
    /// Whatever keeps the member from answering; that it takes nothing is no error.
    ///
    /// # Cancel safety
    /// Safe: what it has taken stays there.
    pub(crate) async fn put(
        &self,
        stack: &Stack,
        parent: Option<BlockHash>,
        hashes: &[BlockHash],
    ) -> Result<Pushed> {
        let mut pushed = Pushed::default();
        let (mut kept, mut values, mut lengths) = (Vec::new(), Vec::new(), Vec::new());
        for hash in hashes {
            let Some(block) = self.in_dram(stack, *hash) else {
                pushed.gone += 1;
                continue;
            };
            kept.push(*hash);
            lengths.push(u64::try_from(block.len()).unwrap_or(0));
            let parts = (0..self.parts()).filter_map(|part| block.part(part));
            values.extend(parts.map(Bytes::from_owner));
        }
        if kept.is_empty() {
            return Ok(pushed);
        }
        let hashes = self.list(&kept)?;
        let batch = PutBatch { hashes, parts: Vec::new(), values, parent, durable: false };
        let report = match self.handle.put(&self.session, &batch).await {
            Ok(report) => report,
            Err(error) if error.retry_after().is_some() => {
                debug!(%error, "a member has no room");
                pushed.refused += u64::try_from(kept.len()).unwrap_or(u64::MAX);
                return Ok(pushed);
            }
            Err(error) => return Err(error),
        };
        for (outcome, bytes) in report.outcomes.iter().zip(&lengths) {
            match outcome {
                PutOutcome::Stored | PutOutcome::NotDurable => {
                    pushed.blocks += 1;
                    pushed.bytes += bytes;
                }
                PutOutcome::Duplicate | PutOutcome::DuplicateDiffers | PutOutcome::Pending => {
                    pushed.present += 1;
                }
                PutOutcome::PartStored | PutOutcome::Refused | PutOutcome::Corrupt => {
                    pushed.refused += 1;
                }
            }
        }
        self.describe(stack, &kept).await?;
        Ok(pushed)
    }

    /// A block that dram has and that is right.
    fn in_dram(&self, stack: &Stack, hash: BlockHash) -> Option<Block> {
        let block = stack.copy_in_dram(&self.namespace, hash)?;
        if (0..self.parts()).all(|part| block.is_right(part)) {
            return Some(block);
        }
        stack.quarantine(&block);
        None
    }

    fn parts(&self) -> u32 {
        u32::try_from(self.namespace.layout().parts().len()).unwrap_or(u32::MAX)
    }

    fn list(&self, hashes: &[BlockHash]) -> Result<HashList> {
        let bytes = self.namespace.hash_bytes();
        let packed: Vec<u8> = hashes
            .iter()
            .flat_map(|hash| hash.as_bytes().get(..bytes).unwrap_or_default())
            .copied()
            .collect();
        HashList::new(packed.into(), bytes)
    }

    /// Says what is known of these blocks, run by run.
    async fn describe(&self, stack: &Stack, hashes: &[BlockHash]) -> Result<()> {
        let mut run = Run::default();
        for hash in hashes {
            let Some(known) = stack.description(&self.namespace, *hash) else {
                self.tell(&std::mem::take(&mut run)).await?;
                continue;
            };
            if !run.goes_on(&known) {
                self.tell(&std::mem::take(&mut run)).await?;
                run = Run {
                    parent: known.parent,
                    position: known.position,
                    has_tokens: !known.tokens.is_empty(),
                    lora_name: known.lora_name,
                    ..Run::default()
                };
            }
            run.hashes.push(*hash);
            run.tokens.extend(known.tokens);
        }
        self.tell(&run).await
    }

    async fn tell(&self, run: &Run) -> Result<()> {
        if run.hashes.is_empty() {
            return Ok(());
        }
        let what = Description {
            parent: run.parent,
            position: run.position,
            tokens: &run.tokens,
            lora_name: &run.lora_name,
        };
        self.handle.describe(&self.list(&run.hashes)?, what).await.map(drop)
    }
}

/// Blocks of a chain that are described together.
#[derive(Debug, Default)]
struct Run {
    parent: Option<BlockHash>,
    position: u32,
    hashes: Vec<BlockHash>,
    tokens: Vec<u32>,
    has_tokens: bool,
    lora_name: String,
}

impl Run {
    /// Whether this is the next block, with as much known of it.
    fn goes_on(&self, next: &stack::Description) -> bool {
        let position =
            u32::try_from(self.hashes.len()).ok().and_then(|len| self.position.checked_add(len));
        self.hashes.last().is_some_and(|last| next.parent == Some(*last))
            && position == Some(next.position)
            && next.lora_name == self.lora_name
            && self.has_tokens != next.tokens.is_empty()
    }
}

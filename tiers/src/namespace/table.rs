//! The namespaces of this process: interned, validated, and watched for differing hash roots.

use std::{
    collections::{BTreeSet, HashMap},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use parking_lot::RwLock;

use super::{
    BlockLayout, Identity, NamespaceCounters, NamespaceId, NamespaceSpec, Secret, Wishes,
    decode::{corrupt, decode},
    encode::{encode, namespace_id, rootless_id, with_schemes},
    roots::{RootMismatch, Roots},
    wishes,
};
use crate::{
    account::{Account, Accounts},
    block::{HASH_BYTES_MAX, HASH_BYTES_MIN, Hashes},
    error::{Error, ErrorKind, Result},
    limits::{
        BLOCK_BYTES_MAX, NAMESPACE_FIELD_BYTES_MAX, NAMESPACES_MAX, PART_BYTES_MAX, PARTS_MAX,
    },
};

/// Hash algorithms that an attacker can collide; refused where a tenant is shared.
const WEAK_ALGORITHMS: [&str; 4] = ["xxhash", "xxhash_cbor", "builtin", "murmur"];

/// An open namespace.
#[derive(Debug)]
pub struct Namespace {
    index: u32,
    id: NamespaceId,
    spec: NamespaceSpec,
    layout: BlockLayout,
    keep_tokens: AtomicBool,
    hash_schemes: RwLock<BTreeSet<String>>,
    /// No client has opened it yet: it was restored, with what the last one wished.
    unclaimed: AtomicBool,
    counters: NamespaceCounters,
    account: Arc<Account>,
}

impl Namespace {
    /// The index of this namespace in this process.
    #[must_use]
    pub fn index(&self) -> u32 {
        self.index
    }

    /// The full id.
    #[must_use]
    pub fn id(&self) -> &NamespaceId {
        &self.id
    }

    /// What was opened.
    #[must_use]
    pub fn spec(&self) -> &NamespaceSpec {
        &self.spec
    }

    /// Whose it is.
    #[must_use]
    pub fn tenant(&self) -> &str {
        self.spec.tenant()
    }

    /// Where parts lie in a block.
    #[must_use]
    pub fn layout(&self) -> &BlockLayout {
        &self.layout
    }

    /// Whether token ids given to `describe` are kept.
    #[must_use]
    pub fn keeps_tokens(&self) -> bool {
        // Relaxed: it says nothing about other memory.
        self.keep_tokens.load(Ordering::Relaxed)
    }

    /// The hash schemes that were wished for.
    #[must_use]
    pub fn hash_schemes(&self) -> BTreeSet<String> {
        self.hash_schemes.read().clone()
    }

    /// What the disk keeps of it, for [`NamespaceTable::restore`]: one byte, 1 if token ids are kept
    /// and else 0, then the bytes that are hashed for the id, then the hash schemes, if there are any.
    #[must_use]
    pub fn encoded(&self) -> Vec<u8> {
        let mut encoded = vec![u8::from(self.keeps_tokens())];
        encoded.extend(encode(&self.spec));
        with_schemes(encoded, &wishes::join(&self.hash_schemes.read()))
    }

    /// What its tenant has and may have.
    #[must_use]
    pub fn account(&self) -> &Arc<Account> {
        &self.account
    }

    /// Counters for stats.
    #[must_use]
    pub fn counters(&self) -> &NamespaceCounters {
        &self.counters
    }

    /// Tokens in one block; 1 for an opaque namespace.
    #[must_use]
    pub fn block_tokens(&self) -> u32 {
        match &self.spec {
            NamespaceSpec::Engine(identity) => identity.block_tokens,
            NamespaceSpec::Opaque { .. } => 1,
        }
    }

    /// Length of one block hash, in bytes.
    #[must_use]
    pub fn hash_bytes(&self) -> usize {
        match &self.spec {
            NamespaceSpec::Engine(identity) => {
                usize::try_from(identity.hash_bytes).unwrap_or(HASH_BYTES_MAX)
            }
            NamespaceSpec::Opaque { .. } => HASH_BYTES_MAX,
        }
    }

    /// Views `packed` as block hashes of this namespace.
    ///
    /// # Errors
    /// `Invalid`, naming `field`, when there is no whole hash or more than `count_max`.
    pub fn hashes<'a>(
        &self,
        packed: &'a [u8],
        count_max: usize,
        field: &str,
    ) -> Result<Hashes<'a>> {
        let hash_bytes = self.hash_bytes();
        let count = packed.len() / hash_bytes;
        if packed.is_empty() || !packed.len().is_multiple_of(hash_bytes) || count > count_max {
            return Err(Error::invalid(format!(
                "{field}: {} bytes given; 1 to {count_max} block hashes of exactly {hash_bytes} \
                 bytes each allowed (the namespace declares hash_bytes {hash_bytes})",
                packed.len(),
            )));
        }
        Hashes::new(packed, hash_bytes)
    }
}

/// The outcome of [`NamespaceTable::open`].
#[derive(Debug)]
pub struct Opened {
    /// The interned namespace.
    pub namespace: Arc<Namespace>,
    /// What a person should know.
    pub warnings: Vec<String>,
    /// Whether it is the first open by a client since the start. What the disk keeps of it may have
    /// changed then.
    pub new: bool,
}

#[derive(Debug, Default)]
struct Interned {
    by_id: HashMap<NamespaceId, Arc<Namespace>>,
    by_index: Vec<Arc<Namespace>>,
    roots: HashMap<NamespaceId, Roots>,
}

/// All namespaces opened or restored since the start. They are never dropped: an index is never reused.
#[derive(Debug)]
pub struct NamespaceTable {
    secret: Secret,
    shared_tenant: bool,
    interned: RwLock<Interned>,
    accounts: Arc<Accounts>,
}

impl NamespaceTable {
    /// An empty table. With `shared_tenant`, hash algorithms that can be collided are refused.
    #[must_use]
    pub fn new(secret: Secret, shared_tenant: bool) -> Self {
        let (interned, accounts) = (RwLock::default(), Arc::default());
        Self { secret, shared_tenant, interned, accounts }
    }

    /// Validates `spec` and interns it; repeating a call returns the same namespace. Whether token ids
    /// are kept is the wish of the first client since the start; the hash schemes are those of all clients
    /// since then.
    ///
    /// # Errors
    /// `Invalid` with every problem of every field; `Exhausted` over the number of namespaces.
    pub fn open(&self, spec: NamespaceSpec, wishes: impl Into<Wishes>) -> Result<Opened> {
        let Wishes { keep_tokens, hash_schemes } = wishes.into();
        self.check(&spec)?;
        let id = namespace_id(&self.secret, &spec);
        let mut interned = self.interned.write();
        let (namespace, warnings) =
            self.intern(&mut interned, id, spec, Wishes::from(keep_tokens))?;
        // Relaxed: the lock orders the opens.
        let new = namespace.unclaimed.swap(false, Ordering::Relaxed);
        let mut known = namespace.hash_schemes.write();
        if new {
            namespace.keep_tokens.store(keep_tokens, Ordering::Relaxed);
            known.clear();
        }
        known.extend(hash_schemes);
        drop(known);
        Ok(Opened { namespace, warnings, new })
    }

    /// Interns what [`Namespace::encoded`] gave before a restart. Nothing if `id` was made from other
    /// fields or under another secret: nobody can ask for its blocks here. A client that opens it
    /// later is the first, and its wish about token ids holds.
    ///
    /// # Errors
    /// `Corrupt` with what is wrong in `encoded`, `Unsupported` if a newer version wrote it, `Invalid`
    /// with every problem if it may not be opened here (any more); `Exhausted` over the number of
    /// namespaces.
    pub fn restore(&self, id: &NamespaceId, encoded: &[u8]) -> Result<Option<Arc<Namespace>>> {
        let (keep_tokens, fields) = match encoded.split_first() {
            Some((keep @ (0 | 1), fields)) => (*keep == 1, fields),
            Some((other, _)) => {
                return Err(corrupt(&format!("keep_tokens: {other}, 0 or 1 allowed")));
            }
            None => return Err(corrupt("empty")),
        };
        let (spec, hash_schemes) = decode(fields)?;
        if namespace_id(&self.secret, &spec) != *id {
            return Ok(None);
        }
        self.check(&spec)?;
        let mut interned = self.interned.write();
        let wishes = Wishes { keep_tokens, hash_schemes };
        let (namespace, _warnings) = self.intern(&mut interned, *id, spec, wishes)?;
        Ok(Some(namespace))
    }

    fn check(&self, spec: &NamespaceSpec) -> Result<()> {
        let problems = problems(spec, self.shared_tenant);
        if problems.is_empty() {
            return Ok(());
        }
        Err(Error::invalid(format!("namespace: {}", problems.join("; "))))
    }

    /// The namespace with this id, unclaimed if it is new, and what to warn of.
    fn intern(
        &self,
        interned: &mut Interned,
        id: NamespaceId,
        spec: NamespaceSpec,
        wishes: Wishes,
    ) -> Result<(Arc<Namespace>, Vec<String>)> {
        let index = interned.by_index.len();
        if index >= NAMESPACES_MAX && !interned.by_id.contains_key(&id) {
            return Err(Error::new(
                ErrorKind::Exhausted { retry_after: Duration::from_secs(60) },
                format!("namespaces: {index} are open, at most {NAMESPACES_MAX} allowed"),
            ));
        }
        let warnings = match &spec {
            NamespaceSpec::Engine(identity) => self.note_root(interned, identity),
            NamespaceSpec::Opaque { .. } => Vec::new(),
        };
        if let Some(namespace) = interned.by_id.get(&id) {
            return Ok((Arc::clone(namespace), warnings));
        }
        let account = self.accounts.of(spec.tenant());
        let namespace = Arc::new(Namespace {
            account,
            index: u32::try_from(index).unwrap_or(u32::MAX),
            id,
            layout: BlockLayout::new(&spec),
            spec,
            keep_tokens: AtomicBool::new(wishes.keep_tokens),
            hash_schemes: RwLock::new(wishes.hash_schemes),
            unclaimed: AtomicBool::new(true),
            counters: NamespaceCounters::default(),
        });
        interned.by_id.insert(id, Arc::clone(&namespace));
        interned.by_index.push(Arc::clone(&namespace));
        Ok((namespace, warnings))
    }

    fn note_root(&self, interned: &mut Interned, identity: &Identity) -> Vec<String> {
        let roots = interned
            .roots
            .entry(rootless_id(&self.secret, identity))
            .or_insert_with(|| Roots::of(identity));
        roots.see(identity);
        roots.mismatch().iter().map(ToString::to_string).collect()
    }

    /// The namespace that this describes, if it was opened or restored here.
    #[must_use]
    pub fn known(&self, spec: &NamespaceSpec) -> Option<Arc<Namespace>> {
        let id = namespace_id(&self.secret, spec);
        self.interned.read().by_id.get(&id).cloned()
    }

    /// The namespace with this id, whoever's it is.
    ///
    /// # Errors
    /// `Invalid` if `id` is not 32 bytes long, `UnknownNamespace` if it was not opened here.
    pub fn get(&self, id: &[u8]) -> Result<Arc<Namespace>> {
        self.find(id, |_anyones| true)
    }

    /// The namespace with the id given by a client of this tenant.
    ///
    /// # Errors
    /// As [`get`](Self::get); that of another tenant was not opened here either.
    pub fn get_for(&self, tenant: &str, id: &[u8]) -> Result<Arc<Namespace>> {
        self.find(id, |namespace| namespace.tenant() == tenant)
    }

    fn find(&self, id: &[u8], allowed: impl Fn(&Namespace) -> bool) -> Result<Arc<Namespace>> {
        let Ok(bytes) = <[u8; 32]>::try_from(id) else {
            return Err(Error::invalid(format!(
                "namespace_id: {} bytes given, exactly 32 required",
                id.len()
            )));
        };
        let found = self.interned.read().by_id.get(&NamespaceId(bytes)).cloned();
        found.filter(|namespace| allowed(namespace)).ok_or_else(|| {
            Error::new(
                ErrorKind::UnknownNamespace,
                format!(
                    "namespace_id: {} is not open on this node, open it first",
                    NamespaceId(bytes)
                ),
            )
        })
    }

    /// What each tenant has and may have.
    #[must_use]
    pub fn accounts(&self) -> &Arc<Accounts> {
        &self.accounts
    }

    /// The account of the namespace with this index.
    pub(crate) fn account_of(&self, index: u32) -> Option<Arc<Account>> {
        let interned = self.interned.read();
        let namespace = interned.by_index.get(usize::try_from(index).ok()?)?;
        Some(Arc::clone(namespace.account()))
    }

    /// The namespace with this index.
    #[must_use]
    pub fn by_index(&self, index: u32) -> Option<Arc<Namespace>> {
        self.interned.read().by_index.get(usize::try_from(index).ok()?).cloned()
    }

    /// The tenant's namespaces of this model, in the order in which they were opened or restored.
    #[must_use]
    pub fn of_model(&self, tenant: &str, model: &str) -> Vec<Arc<Namespace>> {
        self.which(|namespace| match namespace.spec() {
            NamespaceSpec::Engine(identity) => identity.model == model && identity.tenant == tenant,
            NamespaceSpec::Opaque { .. } => false,
        })
    }

    /// All namespaces of the tenant, in that order.
    #[must_use]
    pub fn of_tenant(&self, tenant: &str) -> Vec<Arc<Namespace>> {
        self.which(|namespace| namespace.tenant() == tenant)
    }

    fn which(&self, is_meant: impl Fn(&Namespace) -> bool) -> Vec<Arc<Namespace>> {
        let interned = self.interned.read();
        interned.by_index.iter().filter(|namespace| is_meant(namespace)).cloned().collect()
    }

    /// All namespaces, in the order in which they were opened or restored.
    #[must_use]
    pub fn list(&self) -> Vec<Arc<Namespace>> {
        self.interned.read().by_index.clone()
    }

    /// Groups of namespaces that differ only in their hash root.
    #[must_use]
    pub fn root_mismatches(&self) -> Vec<RootMismatch> {
        self.interned.read().roots.values().filter_map(Roots::mismatch).collect()
    }
}

fn problems(spec: &NamespaceSpec, shared_tenant: bool) -> Vec<String> {
    match spec {
        NamespaceSpec::Engine(identity) => engine_problems(identity, shared_tenant),
        NamespaceSpec::Opaque { tenant, name, bytes_max } => {
            let mut found = Vec::new();
            check_text(&mut found, "tenant", tenant.as_bytes(), true);
            check_text(&mut found, "name", name.as_bytes(), true);
            if u64::from(*bytes_max) > PART_BYTES_MAX {
                found.push(format!("bytes_max: {bytes_max} given, 0 to {PART_BYTES_MAX} allowed"));
            }
            found
        }
    }
}

fn engine_problems(identity: &Identity, shared_tenant: bool) -> Vec<String> {
    let mut found = Vec::new();
    for (field, value, required) in [
        ("tenant", identity.tenant.as_bytes(), true),
        ("model", identity.model.as_bytes(), true),
        ("weights", identity.weights.as_bytes(), false),
        ("engine", identity.engine.as_bytes(), true),
        ("layout", identity.layout.as_bytes(), false),
        ("dtype", identity.dtype.as_bytes(), true),
        ("split", identity.split.as_bytes(), false),
        ("hash_algorithm", identity.hash_algorithm.as_bytes(), true),
        ("hash_root", &identity.hash_root, false),
        ("lora", &identity.lora, false),
        ("cache_salt", &identity.cache_salt, false),
    ] {
        check_text(&mut found, field, value, required);
    }
    if identity.block_tokens == 0 {
        found.push("block_tokens: 0 given, at least 1 required".to_owned());
    }
    let hash_bytes = usize::try_from(identity.hash_bytes).unwrap_or(usize::MAX);
    if !(HASH_BYTES_MIN..=HASH_BYTES_MAX).contains(&hash_bytes) {
        found.push(format!(
            "hash_bytes: {hash_bytes} given, {HASH_BYTES_MIN} to {HASH_BYTES_MAX} allowed"
        ));
    }
    if shared_tenant && WEAK_ALGORITHMS.contains(&identity.hash_algorithm.as_str()) {
        found.push(format!(
            "hash_algorithm: {:?} given, a cryptographic one (sha256, sha256_cbor, blake3) required \
             because this tenant is shared",
            identity.hash_algorithm
        ));
    }
    check_parts(&mut found, identity);
    found
}

fn check_text(found: &mut Vec<String>, field: &str, value: &[u8], required: bool) {
    if value.len() > NAMESPACE_FIELD_BYTES_MAX || (required && value.is_empty()) {
        found.push(format!(
            "{field}: {} bytes given, {} to {NAMESPACE_FIELD_BYTES_MAX} allowed",
            value.len(),
            u8::from(required)
        ));
    }
}

fn check_parts(found: &mut Vec<String>, identity: &Identity) {
    let parts = &identity.parts;
    if parts.is_empty() || parts.len() > PARTS_MAX {
        found.push(format!("parts: {} given, 1 to {PARTS_MAX} allowed", parts.len()));
        return;
    }
    for part in parts {
        if part.bytes == 0 || u64::from(part.bytes) > PART_BYTES_MAX {
            found.push(format!(
                "parts: (group {}, rank {}) has {} bytes, 1 to {PART_BYTES_MAX} allowed",
                part.group, part.rank, part.bytes
            ));
        }
    }
    if !parts.is_sorted_by(|a, b| (a.group, a.rank) < (b.group, b.rank)) {
        found.push("parts: must ascend by (group, rank) without repetition".to_owned());
    }
    let block_bytes: u64 = parts.iter().map(|part| u64::from(part.bytes)).sum();
    if block_bytes > BLOCK_BYTES_MAX {
        found.push(format!("parts: {block_bytes} bytes in all, 1 to {BLOCK_BYTES_MAX} allowed"));
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;

#[cfg(test)]
#[path = "restore_tests.rs"]
mod restore_tests;

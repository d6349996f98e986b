//! A device that fails on demand.
//!
//! Faults are planned, for the next calls of a kind, or drawn with a chance from a seed; a plan goes
//! first. Bits are flipped apart from that, by place, as a disk does that has forgotten.
#![deny(clippy::missing_trait_methods)]

use std::{
    any::Any,
    collections::{HashMap, VecDeque},
    fmt,
    io::{self, ErrorKind},
    sync::Arc,
    time::Duration,
};

use parking_lot::Mutex;
use tokio::sync::watch;

use super::Draws;
use crate::{
    nvme::{
        aligned::{AlignedBuf, PAGE_BYTES},
        device::{Device, Landing, Moved, SegmentId, Space, SyncPoint},
        gather::Gather,
    },
    store::BoxFuture,
};

/// What is left of a short read: nobody may take it for bytes of the disk.
const GARBAGE: u8 = 0xa5;

/// The calls that can fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Call {
    /// [`Device::read`].
    Read,
    /// [`Device::write`].
    Write,
    /// [`Device::sync`].
    Sync,
    /// [`Device::create`].
    Create,
    /// [`Device::truncate`].
    Truncate,
    /// [`Device::remove`].
    Remove,
    /// [`Device::sync_directory`].
    SyncDirectory,
}

/// How one call fails. What makes no sense for a call lets it pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceFault {
    /// Passes the call on.
    None,
    /// The call fails as a broken disk does, without being passed on.
    Error,
    /// A read or write moves half of the pages, rounded up to one.
    Short,
    /// A read, write or sync begins so much later.
    Slow(Duration),
    /// A read, write or sync does not begin before [`FaultyDevice::release`]; its buffer is kept
    /// until then, also when the future is dropped.
    Hang,
    /// A creation finds no space.
    Full,
}

/// For a page that was read, by segment and offset: the byte in it that comes back wrong, if any.
pub type Flip = dyn Fn(SegmentId, u64) -> Option<usize> + Send + Sync;

struct State {
    plan: HashMap<Call, VecDeque<DeviceFault>>,
    chances: Vec<(Call, DeviceFault, u64)>,
    draws: Draws,
    flip: Option<Arc<Flip>>,
    hung: usize,
    /// Buffers of operations that hang and that nobody waits for.
    stranded: Vec<Box<dyn Any + Send>>,
}

struct Shared {
    state: Mutex<State>,
    releases: watch::Sender<u64>,
}

/// Wraps a device; without a plan and chances it passes everything on.
pub struct FaultyDevice {
    inner: Arc<dyn Device>,
    shared: Arc<Shared>,
}

impl FaultyDevice {
    /// Wraps `inner` without faults. `seed` decides what [`chance`](Self::chance) draws.
    #[must_use]
    pub fn new(inner: Arc<dyn Device>, seed: u64) -> Self {
        let state = State {
            plan: HashMap::new(),
            chances: Vec::new(),
            draws: Draws::new(seed),
            flip: None,
            hung: 0,
            stranded: Vec::new(),
        };
        let (releases, _) = watch::channel(0);
        Self { inner, shared: Arc::new(Shared { state: Mutex::new(state), releases }) }
    }

    /// Plans the faults of the next calls of a kind, in order.
    pub fn plan(&self, call: Call, faults: &[DeviceFault]) {
        self.shared.state.lock().plan.entry(call).or_default().extend(faults);
    }

    /// From now on each call of a kind, if nothing is planned for it, fails like this `per_mille`
    /// times in a thousand; 0 takes it back.
    pub fn chance(&self, call: Call, fault: DeviceFault, per_mille: u64) {
        let mut state = self.shared.state.lock();
        state.chances.retain(|(other, kind, _)| (*other, *kind) != (call, fault));
        state.chances.push((call, fault, per_mille));
    }

    /// From now on, flips a bit in the byte of each page read that `flip` says.
    pub fn flip(&self, flip: impl Fn(SegmentId, u64) -> Option<usize> + Send + Sync + 'static) {
        self.shared.state.lock().flip = Some(Arc::new(flip));
    }

    /// Forgets all plans, chances and flips.
    pub fn heal(&self) {
        let mut state = self.shared.state.lock();
        state.plan.clear();
        state.chances.clear();
        state.flip = None;
    }

    /// Operations that hang now, also those that nobody waits for.
    #[must_use]
    pub fn hung(&self) -> usize {
        self.shared.state.lock().hung
    }

    /// Lets go of everything that hangs.
    pub fn release(&self) {
        let stranded = {
            let mut state = self.shared.state.lock();
            let stranded = std::mem::take(&mut state.stranded);
            state.hung = state.hung.saturating_sub(stranded.len());
            stranded
        };
        drop(stranded);
        self.shared.releases.send_modify(|releases| *releases += 1);
    }
}

impl fmt::Debug for FaultyDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FaultyDevice({:?})", self.inner)
    }
}

/// Holds the buffer of an operation that hangs, whoever goes away.
struct Hanging<B: Send + 'static> {
    buffer: Option<B>,
    shared: Arc<Shared>,
}

impl<B: Send + 'static> Drop for Hanging<B> {
    fn drop(&mut self) {
        let mut state = self.shared.state.lock();
        match self.buffer.take() {
            Some(buffer) => state.stranded.push(Box::new(buffer)),
            None => state.hung = state.hung.saturating_sub(1),
        }
    }
}

impl Shared {
    fn next(&self, call: Call) -> DeviceFault {
        let mut state = self.state.lock();
        if let Some(fault) = state.plan.get_mut(&call).and_then(VecDeque::pop_front) {
            return fault;
        }
        let State { chances, draws, .. } = &mut *state;
        let mut chances = chances.iter().filter(|(other, ..)| *other == call);
        let drawn = chances.find(|(.., per_mille)| draws.chance(*per_mille));
        drawn.map_or(DeviceFault::None, |(_, fault, _)| *fault)
    }

    /// What happens before a call that does not wait.
    fn disturb(&self, call: Call) -> io::Result<()> {
        match self.next(call) {
            DeviceFault::Error => Err(broken(call)),
            DeviceFault::Full if call == Call::Create => {
                Err(io::Error::new(ErrorKind::StorageFull, "create a segment: full as planned"))
            }
            DeviceFault::None
            | DeviceFault::Short
            | DeviceFault::Slow(_)
            | DeviceFault::Hang
            | DeviceFault::Full => Ok(()),
        }
    }

    /// What happens before a call that waits, and whether that falls short.
    async fn delay<B: Send + 'static>(
        self: &Arc<Self>,
        call: Call,
        buffer: B,
    ) -> (B, io::Result<bool>) {
        match self.next(call) {
            DeviceFault::Error => (buffer, Err(broken(call))),
            DeviceFault::Short => (buffer, Ok(true)),
            DeviceFault::Slow(delay) => {
                tokio::time::sleep(delay).await;
                (buffer, Ok(false))
            }
            DeviceFault::Hang => (self.hang(buffer).await, Ok(false)),
            DeviceFault::None | DeviceFault::Full => (buffer, Ok(false)),
        }
    }

    async fn hang<B: Send + 'static>(self: &Arc<Self>, buffer: B) -> B {
        let mut releases = self.releases.subscribe();
        self.state.lock().hung += 1;
        let mut hanging = Hanging { buffer: Some(buffer), shared: Arc::clone(self) };
        // An error: nobody can release it any more.
        if releases.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
        let buffer = hanging.buffer.take();
        drop(hanging);
        match buffer {
            Some(buffer) => buffer,
            None => std::future::pending().await,
        }
    }

    /// Flips bits in the first `bytes` of what was read at `offset`.
    fn flip(&self, segment: SegmentId, offset: u64, landing: &mut Landing, bytes: usize) {
        let Some(flip) = self.state.lock().flip.clone() else { return };
        let pages = landing.slices().into_iter().flat_map(|slice| slice.chunks_mut(PAGE_BYTES));
        let offsets = (offset..).step_by(PAGE_BYTES);
        for (page, at) in pages.zip(offsets).take(bytes.div_ceil(PAGE_BYTES)) {
            let wrong = flip(segment, at).and_then(|byte| page.get_mut(byte));
            if let Some(byte) = wrong {
                *byte ^= 1;
            }
        }
    }
}

fn broken(call: Call) -> io::Error {
    io::Error::other(format!("{call:?} of a segment: input/output error as planned"))
}

/// Half of so many bytes: whole pages, and at least one.
fn half(bytes: usize) -> usize {
    (bytes / 2).next_multiple_of(PAGE_BYTES).max(PAGE_BYTES).min(bytes)
}

/// Makes a complete read a short one.
fn cut_short(landing: &mut Landing, read: usize) -> usize {
    let left = half(read);
    let bytes = landing.slices().into_iter().flatten();
    bytes.take(read).skip(left).for_each(|byte| *byte = GARBAGE);
    left
}

impl Device for FaultyDevice {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn list(&self) -> io::Result<Vec<(SegmentId, u64)>> {
        self.inner.list()
    }

    fn create(&self, segment: SegmentId, bytes: u64) -> io::Result<()> {
        self.shared.disturb(Call::Create)?;
        self.inner.create(segment, bytes)
    }

    fn truncate(&self, segment: SegmentId, bytes: u64) -> io::Result<()> {
        self.shared.disturb(Call::Truncate)?;
        self.inner.truncate(segment, bytes)
    }

    fn remove(&self, segment: SegmentId) -> io::Result<()> {
        self.shared.disturb(Call::Remove)?;
        self.inner.remove(segment)
    }

    fn sync_directory(&self, why: SyncPoint) -> io::Result<()> {
        self.shared.disturb(Call::SyncDirectory)?;
        self.inner.sync_directory(why)
    }

    fn space(&self) -> io::Result<Space> {
        self.inner.space()
    }

    fn read(&self, segment: SegmentId, offset: u64, landing: Landing) -> Moved<Landing> {
        let (inner, shared) = (Arc::clone(&self.inner), Arc::clone(&self.shared));
        Box::pin(async move {
            let (landing, delayed) = shared.delay(Call::Read, landing).await;
            let is_short = match delayed {
                Ok(is_short) => is_short,
                Err(error) => return (landing, Err(error)),
            };
            let (mut landing, read) = inner.read(segment, offset, landing).await;
            let read = read.map(|bytes| {
                shared.flip(segment, offset, &mut landing, bytes);
                if is_short { cut_short(&mut landing, bytes) } else { bytes }
            });
            (landing, read)
        })
    }

    fn write(&self, segment: SegmentId, offset: u64, from: Gather) -> Moved<Gather> {
        let (inner, shared) = (Arc::clone(&self.inner), Arc::clone(&self.shared));
        Box::pin(async move {
            let (from, delayed) = shared.delay(Call::Write, from).await;
            match delayed {
                Ok(true) => {}
                Ok(false) => return inner.write(segment, offset, from).await,
                Err(error) => return (from, Err(error)),
            }
            let bytes = from.slices().collect::<Vec<_>>().concat();
            let mut part = Gather::empty(AlignedBuf::zeroed(half(bytes.len())));
            part.copy(&bytes);
            let (_, written) = inner.write(segment, offset, part).await;
            (from, written)
        })
    }

    fn sync(&self, segment: SegmentId, why: SyncPoint) -> BoxFuture<'static, io::Result<()>> {
        let (inner, shared) = (Arc::clone(&self.inner), Arc::clone(&self.shared));
        Box::pin(async move {
            shared.delay(Call::Sync, ()).await.1?;
            inner.sync(segment, why).await
        })
    }
}

#[cfg(test)]
mod tests;

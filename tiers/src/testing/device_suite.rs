//! The contract of [`Device`], as steps that any implementation can be put through.
//!
//! ```text
//! device_suite::run(device::open(directory, Engine::Auto)?).await;
//! ```
#![expect(clippy::panic, reason = "a contract fails by panicking with what was broken")]

use std::{
    io::{self, ErrorKind},
    ops::RangeInclusive,
    sync::Arc,
    task::Poll,
    time::Duration,
};

use tokio::task::JoinSet;

use crate::{
    dram::{BlockWriter, Pool, seal, slot_bytes},
    nvme::{
        aligned::{AlignedBuf, PAGE, PAGE_BYTES},
        device::{Device, Landing, SegmentId, SyncPoint, read_full, write_full},
        gather::Gather,
    },
};

/// Bytes of the segments that the steps make.
const SEGMENT_BYTES: u64 = 1 << 20;

/// Far more than any engine has in flight.
const MANY: u64 = 1000;

/// How often a step looks for what must happen soon, and how long it waits in between.
const LOOKS_MAX: u32 = 5000;
const LOOK_AGAIN: Duration = Duration::from_millis(1);

/// Puts a device through all steps; it must be empty and have 16 MiB of space, and is empty again
/// afterwards.
///
/// # Panics
/// Where the device breaks the contract.
///
/// # Cancel safety
/// Not safe: the device is left in the middle of a step.
pub async fn run(device: Arc<dyn Device>) {
    let bench = Bench::new(device);
    bench.check(bench.segments_come_and_go(), "segments come and go");
    bench.check(bench.reads_back_what_was_written().await, "reads back what was written");
    let gathered = bench.writes_what_is_left_from_where_it_is().await;
    bench.check(gathered, "writes what is left from where it is");
    bench.check(bench.ends_where_the_file_ends().await, "ends where the file ends");
    bench.check(bench.absent_segments_are_errors().await, "absent segments are errors");
    bench.check(bench.space_is_accounted(), "space is accounted");
    bench.check(bench.syncs_for_any_reason().await, "syncs for any reason");
    bench.check(bench.dropped_writes_end().await, "dropped writes run to their end");
    bench.check(bench.dropped_reads_keep_memory().await, "dropped reads keep their memory");
    bench.check(bench.many_at_once().await, "many operations at once");
    bench.check(bench.stays_usable().await, "stays usable");
}

struct Bench {
    device: Arc<dyn Device>,
    pool: Arc<Pool>,
}

impl Bench {
    fn new(device: Arc<dyn Device>) -> Self {
        let Ok(pool) = Pool::new(4 << 20, Arc::default()) else {
            panic!("no memory for the suite")
        };
        Self { device, pool }
    }

    fn check(&self, outcome: io::Result<bool>, step: &str) {
        match outcome {
            Ok(true) => {}
            Ok(false) => panic!("{:?}: contract broken: {step}", self.device),
            Err(error) => panic!("{:?}: failed while checking: {step}: {error}", self.device),
        }
        let left = self.device.list().map(|segments| segments.len());
        assert!(matches!(left, Ok(0)), "{step}: left segments behind");
    }

    fn create(&self, segments: RangeInclusive<u64>) -> io::Result<()> {
        segments.into_iter().try_for_each(|n| self.device.create(SegmentId(n), SEGMENT_BYTES))
    }

    fn remove(&self, segments: RangeInclusive<u64>) -> io::Result<()> {
        segments.into_iter().try_for_each(|n| self.device.remove(SegmentId(n)))
    }

    fn body(&self, pages: u32) -> io::Result<BlockWriter> {
        let len = pages * 4096;
        let writer = self.pool.allocate(slot_bytes(len, false), &[len]).and_then(|mut w| w.pop());
        writer.ok_or_else(|| io::Error::other("the arena of the suite is full"))
    }

    /// Writes pages that each hold what [`page_byte`] says of them.
    async fn write(&self, segment: u64, pages: RangeInclusive<u64>, salt: u64) -> io::Result<()> {
        let count = pages.end() + 1 - pages.start();
        let mut from = AlignedBuf::zeroed(usize::try_from(count * PAGE).unwrap_or(0));
        for (page, number) in from.chunks_mut(PAGE_BYTES).zip(pages.clone()) {
            page.fill(page_byte(segment, number, salt));
        }
        let offset = pages.start() * PAGE;
        write_full(&*self.device, SegmentId(segment), offset, from.into()).await.1
    }

    /// Whether these pages hold what `write` wrote.
    async fn holds(&self, segment: u64, pages: RangeInclusive<u64>, salt: u64) -> io::Result<bool> {
        let count = pages.end() + 1 - pages.start();
        let head = AlignedBuf::zeroed(usize::try_from(count * PAGE).unwrap_or(0));
        let (id, offset) = (SegmentId(segment), pages.start() * PAGE);
        let (landing, read) = read_full(&*self.device, id, offset, Landing::new(head, None)).await;
        read?;
        let mut pages = landing.head.chunks(PAGE_BYTES).zip(pages);
        Ok(pages.all(|(page, number)| is_filled(page, page_byte(segment, number, salt))))
    }

    fn segments_come_and_go(&self) -> io::Result<bool> {
        for number in [3, 1, 0x1b, 2] {
            self.create(number..=number)?;
        }
        let again = self.device.create(SegmentId(2), SEGMENT_BYTES);
        let is_refused = again.is_err_and(|error| error.kind() == ErrorKind::AlreadyExists);
        let listed = self.device.list()?;
        self.remove(2..=2)?;
        let fewer = self.device.list()?;
        self.remove(1..=0x1b)?;
        let all = [1, 2, 3, 0x1b].map(|number| (SegmentId(number), SEGMENT_BYTES));
        let left = [1, 3, 0x1b].map(|number| (SegmentId(number), SEGMENT_BYTES));
        Ok(is_refused && listed == all && fewer == left)
    }

    async fn reads_back_what_was_written(&self) -> io::Result<bool> {
        self.create(1..=1)?;
        self.write(1, 2..=4, 0).await?;
        // One page into the head, two into the arena, and nothing that was never written.
        let landing = Landing::new(AlignedBuf::zeroed(PAGE_BYTES), Some(self.body(2)?));
        let (landing, read) = read_full(&*self.device, SegmentId(1), 2 * PAGE, landing).await;
        read?;
        let mut right = is_filled(&landing.head, page_byte(1, 2, 0));
        let body = landing.body.as_ref().map_or(&[][..], |body| body.bytes());
        right &= body.len() == 2 * PAGE_BYTES;
        for (page, number) in body.chunks(PAGE_BYTES).zip(3..) {
            right &= is_filled(page, page_byte(1, number, 0));
        }
        let (landing, read) = self.read_once(1, 5, 2).await;
        right &= read? > 0 && is_filled(&landing.head, 0);
        self.remove(1..=1)?;
        Ok(right)
    }

    async fn writes_what_is_left_from_where_it_is(&self) -> io::Result<bool> {
        self.create(1..=1)?;
        let mut body = self.body(4)?;
        for (page, byte) in body.bytes_mut().chunks_mut(PAGE_BYTES).zip(4..) {
            page.fill(byte);
        }
        let unsealed = |_writers| io::Error::other("the block of the suite is not whole");
        let block = seal(vec![body], 4 * 4096).map_err(unsealed)?;
        let mut from = Gather::empty(AlignedBuf::zeroed(4 * PAGE_BYTES));
        from.copy(&[1; PAGE_BYTES]);
        from.copy(&[2; PAGE_BYTES]);
        from.lend(&block, PAGE_BYTES..3 * PAGE_BYTES);
        from.copy(&[3; PAGE_BYTES]);
        let right = from.advance(PAGE_BYTES) == PAGE_BYTES;
        let (from, written) = write_full(&*self.device, SegmentId(1), 7 * PAGE, from).await;
        written?;
        let back = from.written() == 5 * PAGE_BYTES && from.into_own().len() == 4 * PAGE_BYTES;
        let landing = Landing::new(AlignedBuf::zeroed(6 * PAGE_BYTES), None);
        let (landing, read) = read_full(&*self.device, SegmentId(1), 7 * PAGE, landing).await;
        read?;
        self.remove(1..=1)?;
        let mut holds = landing.head.chunks(PAGE_BYTES).zip([0, 2, 5, 6, 3, 0]);
        Ok(right && back && holds.all(|(page, byte)| is_filled(page, byte)))
    }

    async fn read_once(
        &self,
        segment: u64,
        page: u64,
        pages: usize,
    ) -> (Landing, io::Result<usize>) {
        let landing = Landing::new(AlignedBuf::zeroed(pages * PAGE_BYTES), None);
        self.device.read(SegmentId(segment), page * PAGE, landing).await
    }

    async fn ends_where_the_file_ends(&self) -> io::Result<bool> {
        self.create(1..=1)?;
        let last = SEGMENT_BYTES / PAGE - 1;
        let full = self.read_once(1, last, 2).await.1? == PAGE_BYTES;
        let none = self.read_once(1, last + 1, 2).await.1? == 0;
        let landing = Landing::new(AlignedBuf::zeroed(2 * PAGE_BYTES), None);
        let (landing, read) = read_full(&*self.device, SegmentId(1), last * PAGE, landing).await;
        let ended = read.is_err_and(|error| error.kind() == ErrorKind::UnexpectedEof);
        self.device.truncate(SegmentId(1), 2 * PAGE)?;
        let longer = self.device.truncate(SegmentId(1), 3 * PAGE).is_err();
        let cut = self.read_once(1, 1, 2).await.1? == PAGE_BYTES;
        let listed = self.device.list()? == [(SegmentId(1), 2 * PAGE)];
        self.remove(1..=1)?;
        Ok(full && none && ended && landing.filled() == PAGE_BYTES && longer && cut && listed)
    }

    async fn absent_segments_are_errors(&self) -> io::Result<bool> {
        self.create(1..=1)?;
        self.write(1, 0..=0, 0).await?;
        self.remove(1..=1)?;
        self.remove(1..=1)?;
        let (landing, read) = self.read_once(1, 0, 1).await;
        let (from, written) =
            self.device.write(SegmentId(1), 0, AlignedBuf::zeroed(PAGE_BYTES).into()).await;
        let synced = self.device.sync(SegmentId(1), SyncPoint::Records).await;
        let absent = |error: io::Error| error.kind() == ErrorKind::NotFound;
        let back = landing.head.len() == PAGE_BYTES && from.len() == PAGE_BYTES;
        Ok(back
            && [read.map(drop), written.map(drop), synced]
                .into_iter()
                .all(|o| o.is_err_and(absent)))
    }

    fn space_is_accounted(&self) -> io::Result<bool> {
        let before = self.device.space()?;
        self.create(1..=2)?;
        let made = self.device.space()?;
        self.device.truncate(SegmentId(1), SEGMENT_BYTES / 4)?;
        let cut = self.device.space()?;
        self.remove(1..=2)?;
        let after = self.device.space()?;
        let allocated = [before, made, cut, after].map(|space| space.allocated_bytes);
        let expected = [0, 2 * SEGMENT_BYTES, SEGMENT_BYTES / 4 + SEGMENT_BYTES, 0];
        // A file system may take some blocks more for what it notes about a file.
        let close = |(is, should): (&u64, &u64)| *is >= *should && *is <= *should + 16 * PAGE;
        let total = before.total_bytes >= before.available_bytes && before.total_bytes > 0;
        Ok(total && allocated.iter().zip(&expected).all(close))
    }

    async fn syncs_for_any_reason(&self) -> io::Result<bool> {
        self.create(1..=1)?;
        self.write(1, 0..=0, 0).await?;
        for why in SyncPoint::ALL {
            self.device.sync(SegmentId(1), why).await?;
            self.device.sync_directory(why)?;
        }
        let right = self.holds(1, 0..=0, 0).await?;
        self.remove(1..=1)?;
        self.device.sync_directory(SyncPoint::Deleted)?;
        Ok(right)
    }

    async fn dropped_writes_end(&self) -> io::Result<bool> {
        self.create(1..=1)?;
        self.write(1, 0..=255, 0).await?;
        // The file is open and it is nobody's turn: this begins when it is polled.
        for page in 0..64 {
            let mut from = AlignedBuf::zeroed(2 * PAGE_BYTES);
            from.fill(0xdd);
            poll_once(self.device.write(SegmentId(1), page * 4 * PAGE, from.into())).await;
        }
        let mut right = true;
        for page in 0..64 {
            right &=
                self.becomes(page * 4, 0xdd).await? && self.becomes(page * 4 + 1, 0xdd).await?;
            right &= self.holds(1, page * 4 + 2..=page * 4 + 3, 0).await?;
        }
        self.remove(1..=1)?;
        Ok(right)
    }

    /// Whether a page of segment 1 is, soon, filled with `byte`.
    async fn becomes(&self, page: u64, byte: u8) -> io::Result<bool> {
        for _ in 0..LOOKS_MAX {
            let (landing, read) = self.read_once(1, page, 1).await;
            read?;
            if is_filled(&landing.head, byte) {
                return Ok(true);
            }
            tokio::time::sleep(LOOK_AGAIN).await;
        }
        Ok(false)
    }

    /// The memory of a read that was given up comes home, and only when nobody writes there any more.
    async fn dropped_reads_keep_memory(&self) -> io::Result<bool> {
        self.create(1..=1)?;
        self.write(1, 0..=255, 0).await?;
        // One place in the arena is left: whoever gets memory gets that of the read.
        let mut held = Vec::new();
        while let Ok(writer) = self.body(128) {
            held.push(writer);
        }
        let mut right = held.pop().is_some();
        for round in 0..200 {
            let landing = Landing::new(AlignedBuf::zeroed(PAGE_BYTES), Some(self.body(128)?));
            poll_once(self.device.read(SegmentId(1), round % 64 * PAGE, landing)).await;
            let mut fresh = self.body_soon().await?;
            fresh.bytes_mut().fill(0xee);
            right &= self.holds(1, 0..=255, 0).await?;
            right &= is_filled(fresh.bytes(), 0xee);
        }
        self.remove(1..=1)?;
        Ok(right)
    }

    /// The next memory that comes home.
    async fn body_soon(&self) -> io::Result<BlockWriter> {
        let mut looks = 0;
        loop {
            match self.body(128) {
                Ok(writer) => return Ok(writer),
                Err(error) if looks == LOOKS_MAX => return Err(error),
                Err(_not_yet) => looks += 1,
            }
            // Not a moment later than it is there.
            if looks < LOOKS_MAX / 2 {
                tokio::task::yield_now().await;
            } else {
                tokio::time::sleep(LOOK_AGAIN).await;
            }
        }
    }

    async fn many_at_once(&self) -> io::Result<bool> {
        self.create(1..=4)?;
        let place = |number: u64| (number % 4 + 1, number / 4 % 256);
        let mut writes = JoinSet::new();
        for number in 0..MANY {
            let (segment, page) = place(number);
            let mut from = AlignedBuf::zeroed(PAGE_BYTES);
            from.fill(page_byte(segment, page, 0));
            drop(writes.spawn(self.device.write(SegmentId(segment), page * PAGE, from.into())));
            if number % 100 == 0 {
                let sync = self.device.sync(SegmentId(segment), SyncPoint::Records);
                drop(
                    writes
                        .spawn(async move { (Gather::default(), sync.await.map(|()| PAGE_BYTES)) }),
                );
            }
        }
        let mut right = true;
        while let Some(written) = writes.join_next().await {
            right &= written?.1? == PAGE_BYTES;
        }
        let mut reads = JoinSet::new();
        for number in 0..MANY {
            let (segment, page) = place(number);
            let landing = Landing::new(AlignedBuf::zeroed(PAGE_BYTES), None);
            let read = self.device.read(SegmentId(segment), page * PAGE, landing);
            drop(reads.spawn(async move { (segment, page, read.await) }));
        }
        while let Some(read) = reads.join_next().await {
            let (segment, page, (landing, moved)) = read?;
            right &= moved? == PAGE_BYTES;
            right &= is_filled(&landing.head, page_byte(segment, page, 0));
        }
        self.remove(1..=4)?;
        Ok(right)
    }

    /// After all the errors above.
    async fn stays_usable(&self) -> io::Result<bool> {
        self.create(1..=1)?;
        self.write(1, 0..=255, 1).await?;
        let right = self.holds(1, 0..=255, 1).await?;
        self.remove(1..=1)?;
        Ok(right)
    }
}

/// What a page is filled with: never 0.
fn page_byte(segment: u64, page: u64, salt: u64) -> u8 {
    u8::try_from((segment * 31 + page * 7 + salt * 101) % 255).unwrap_or(0) + 1
}

fn is_filled(bytes: &[u8], with: u8) -> bool {
    bytes.iter().all(|byte| *byte == with)
}

/// Begins an operation, if it is not too many, and gives it up.
async fn poll_once<T>(mut operation: crate::store::BoxFuture<'static, T>) {
    std::future::poll_fn(|context| {
        drop(operation.as_mut().poll(context));
        Poll::Ready(())
    })
    .await;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{FaultyDevice, VolatileDevice};

    #[tokio::test]
    async fn a_disk_with_a_volatile_cache_keeps_the_contract() {
        run(Arc::new(VolatileDevice::new(16 << 20))).await;
    }

    #[tokio::test]
    async fn a_faulty_device_without_faults_keeps_the_contract() {
        let inner = Arc::new(VolatileDevice::new(16 << 20));
        run(Arc::new(FaultyDevice::new(inner, 1))).await;
    }

    #[test]
    fn the_landing_goes_on_where_it_was_left() {
        let pool = Pool::new(1 << 20, Arc::default()).unwrap();
        let body = pool.allocate(slot_bytes(8192, false), &[8192]).unwrap().pop();
        let mut landing = Landing::new(AlignedBuf::zeroed(PAGE_BYTES), body);
        assert_eq!((landing.len(), landing.filled()), (3 * PAGE_BYTES, 0));
        assert_eq!(landing.slices().len(), 2);
        assert_eq!(landing.advance(PAGE_BYTES - 1), 0, "no whole page");
        assert_eq!(landing.advance(PAGE_BYTES + 1), PAGE_BYTES);
        assert_eq!(landing.slices().len(), 1);
        assert_eq!(landing.advance(PAGE_BYTES), PAGE_BYTES);
        assert_eq!(landing.slices().iter().map(|slice| slice.len()).sum::<usize>(), PAGE_BYTES);
        assert_eq!(landing.advance(usize::MAX), PAGE_BYTES);
        assert!(landing.slices().is_empty());
        assert_eq!(landing.len(), 3 * PAGE_BYTES);
    }
}

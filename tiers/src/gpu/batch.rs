//! Copies as few and as long as the device takes them.

use std::num::NonZeroUsize;

use super::{DeviceAddress, RawCopy};

/// Joins copies that are neighbours on both sides, and cuts them where host memory is pinned piece by
/// piece: at multiples of `chunk`.
pub(super) fn planned(copies: impl Iterator<Item = RawCopy>, chunk: NonZeroUsize) -> Vec<RawCopy> {
    let mut planned: Vec<RawCopy> = Vec::new();
    for copy in copies {
        for piece in pieces(copy, chunk) {
            match planned.last_mut() {
                Some(last) if are_neighbours(last, &piece, chunk) => last.bytes += piece.bytes,
                _ => planned.push(piece),
            }
        }
    }
    planned
}

fn are_neighbours(one: &RawCopy, next: &RawCopy, chunk: NonZeroUsize) -> bool {
    let host_end = one.host.addr().get().checked_add(one.bytes);
    let device_end =
        u64::try_from(one.bytes).ok().and_then(|bytes| one.device.0.checked_add(bytes));
    let next_host = next.host.addr().get();
    host_end == Some(next_host)
        && device_end == Some(next.device.0)
        && !next_host.is_multiple_of(chunk.get())
}

/// A copy, cut at multiples of `chunk` in host memory.
fn pieces(copy: RawCopy, chunk: NonZeroUsize) -> impl Iterator<Item = RawCopy> {
    let mut done = 0;
    std::iter::from_fn(move || {
        let left = copy.bytes - done;
        if left == 0 {
            return None;
        }
        let at = copy.host.addr().get() + done;
        let bytes = left.min(chunk.get() - at % chunk.get());
        let offset = u64::try_from(done).ok()?;
        let piece = RawCopy {
            host: copy.host.map_addr(|base| base.saturating_add(done)),
            device: DeviceAddress(copy.device.0 + offset),
            bytes,
        };
        done += bytes;
        Some(piece)
    })
}

#[cfg(test)]
mod tests {
    use std::ptr::{NonNull, without_provenance_mut};

    use super::*;

    fn copy(host: usize, device: u64, bytes: usize) -> RawCopy {
        let host = NonNull::new(without_provenance_mut(host)).unwrap();
        RawCopy { host, device: DeviceAddress(device), bytes }
    }

    fn plan(copies: &[RawCopy], chunk: usize) -> Vec<RawCopy> {
        planned(copies.iter().copied(), NonZeroUsize::new(chunk).unwrap())
    }

    #[test]
    fn neighbours_on_both_sides_become_one() {
        let copies = [copy(100, 7, 10), copy(110, 17, 5), copy(115, 22, 1)];
        assert_eq!(plan(&copies, 1 << 20), [copy(100, 7, 16)]);
    }

    #[test]
    fn neighbours_on_one_side_or_in_the_other_order_do_not() {
        for copies in [
            [copy(100, 7, 10), copy(110, 18, 5)],
            [copy(100, 7, 10), copy(111, 17, 5)],
            [copy(110, 17, 5), copy(100, 7, 10)],
        ] {
            assert_eq!(plan(&copies, 1 << 20), copies);
        }
    }

    #[test]
    fn what_reaches_over_the_end_of_a_chunk_is_cut_there_and_not_joined_again() {
        let copies = [copy(90, 7, 20), copy(110, 27, 100)];
        assert_eq!(plan(&copies, 100), [copy(90, 7, 10), copy(100, 17, 100), copy(200, 117, 10)]);
        assert_eq!(plan(&[copy(100, 7, 100)], 100), [copy(100, 7, 100)]);
    }
}

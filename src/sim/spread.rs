//! Independent simulations, spread over the cores. Each is single-threaded, so that the outcomes do not
//! depend on how many run at once.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    thread,
};

use kvstrata_tiers::error::{Error, ErrorKind, Result};
use parking_lot::Mutex;

/// Simulations run at once at most: memory grows with each.
const THREADS_MAX: usize = 16;

/// What `work` says of each of `cells`, in their order.
///
/// # Errors
/// `Internal` if a simulation did not finish.
///
/// # Blocking
/// Computes on up to 16 threads until all are done.
pub(super) fn spread<C: Sync, O: Send>(
    cells: &[C],
    work: &(dyn Fn(&C) -> O + Sync),
) -> Result<Vec<O>> {
    let outcomes: Vec<Mutex<Option<O>>> = cells.iter().map(|_| Mutex::new(None)).collect();
    // Relaxed: only hands out each number once; outcomes travel through the mutexes.
    let next = AtomicUsize::new(0);
    let run = || {
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let (Some(cell), Some(place)) = (cells.get(at), outcomes.get(at)) else { return };
            let outcome = work(cell);
            *place.lock() = Some(outcome);
        }
    };
    let threads = thread::available_parallelism().map_or(1, usize::from).min(THREADS_MAX);
    thread::scope(|scope| {
        for _ in 0..threads.min(cells.len()) {
            scope.spawn(run);
        }
    });
    let outcomes: Option<Vec<O>> = outcomes.into_iter().map(Mutex::into_inner).collect();
    outcomes.ok_or_else(|| Error::new(ErrorKind::Internal, "simulate: a cell has no outcome"))
}

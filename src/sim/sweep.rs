//! Many simulations of one trace, spread over the cores.
//!
//! Each simulation is independent and single-threaded, so the outcomes do not depend on how many
//! run at once. The next uses that [`Opt`] needs are found once and shared.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    thread,
};

use kvstrata_tiers::error::{Error, Result};
use parking_lot::Mutex;

use super::{Opt, Outcome, Policy, simulate_watched};
use crate::trace::Trace;

/// Simulations run at once at most: memory grows with each.
const THREADS_MAX: usize = 16;

/// Runs every (policy, capacity in blocks) of `cells` and returns the outcomes in the same order.
///
/// `progress` is called from any thread with the references done since its last call; all calls
/// together come to the trace's references for each cell.
///
/// # Errors
/// `Internal` if a simulation did not finish.
///
/// # Blocking
/// Computes on up to 16 threads until all are done: minutes for a large trace.
pub fn sweep(
    trace: &Trace,
    cells: &[(Policy, u32)],
    progress: &(dyn Fn(u64) + Sync),
) -> Result<Vec<Outcome>> {
    let needs_opt = cells.iter().any(|(policy, _)| *policy == Policy::Opt);
    let opt = needs_opt.then(|| Opt::new(trace));
    let outcomes = Mutex::new(vec![None; cells.len()]);
    // Relaxed: only hands out each number once; results travel through the mutex.
    let next = AtomicUsize::new(0);
    let work = || {
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some((policy, capacity)) = cells.get(at) else {
                return;
            };
            let outcome = match &opt {
                Some(opt) if *policy == Policy::Opt => {
                    progress(trace.references());
                    opt.outcome(*capacity)
                }
                _ => simulate_watched(trace, *policy, *capacity, &mut |done| progress(done)),
            };
            if let Some(place) = outcomes.lock().get_mut(at) {
                *place = Some(outcome);
            }
        }
    };
    let threads = thread::available_parallelism().map_or(1, usize::from).min(THREADS_MAX);
    thread::scope(|scope| {
        for _ in 0..threads.min(cells.len()) {
            scope.spawn(work);
        }
    });
    let outcomes: Option<Vec<_>> = outcomes.into_inner().into_iter().collect();
    outcomes.ok_or_else(|| {
        Error::new(kvstrata_tiers::error::ErrorKind::Internal, "simulate: a cell has no outcome")
    })
}

//! Many simulations of one trace, spread over the cores. The next uses that [`Opt`] needs are found once
//! and shared.

use kvstrata_tiers::error::Result;

use super::{Opt, Outcome, Policy, simulate_watched, spread::spread};
use crate::trace::Trace;

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
    spread(cells, &|(policy, capacity)| match &opt {
        Some(opt) if *policy == Policy::Opt => {
            progress(trace.references());
            opt.outcome(*capacity)
        }
        _ => simulate_watched(trace, *policy, *capacity, &mut |done| progress(done)),
    })
}

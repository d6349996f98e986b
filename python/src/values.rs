//! What calls return, as Python sees it: plain values, read only.

use std::sync::Arc;

use kvstrata::client::{
    self, GetSummary, Locality, Lookup, MissReason, PutOutcome, PutReport, Run,
};
use kvstrata_tiers::tier::TierCounts;
use pyo3::prelude::*;

use crate::{core::Core, lease::Lease};

/// What a get delivered.
#[pyclass(frozen, get_all, module = "kvstrata")]
#[derive(Debug, Clone, Default)]
pub(crate) struct GetResult {
    pub(crate) found: Vec<bool>,
    pub(crate) lengths: Vec<usize>,
    pub(crate) misses: Vec<(u32, u32, &'static str)>,
    pub(crate) dram: u64,
    pub(crate) nvme: u64,
    pub(crate) object: u64,
    pub(crate) bytes: u64,
    pub(crate) corrupt_here: u64,
    pub(crate) remote: u64,
}

#[pymethods]
impl GetResult {
    #[getter]
    fn blocks(&self) -> usize {
        self.found.iter().filter(|found| **found).count()
    }

    #[getter]
    fn prefix_blocks(&self) -> usize {
        self.found.iter().take_while(|found| **found).count()
    }

    fn __repr__(&self) -> String {
        let (blocks, asked, bytes) = (self.blocks(), self.found.len(), self.bytes);
        let Self { dram, nvme, object, .. } = self;
        format!(
            "GetResult({blocks} of {asked} blocks, {bytes} bytes, dram={dram}, nvme={nvme}, object={object})"
        )
    }
}

impl GetResult {
    pub(crate) fn count(&mut self, summary: GetSummary) {
        self.dram = summary.dram;
        self.nvme = summary.nvme;
        self.object = summary.object;
        self.bytes = summary.bytes;
        self.corrupt_here = summary.corrupt_here;
        self.remote = summary.remote;
    }
}

/// What became of a put.
#[pyclass(frozen, module = "kvstrata")]
#[derive(Debug, Clone)]
pub(crate) struct PutResult(pub(crate) PutReport);

#[pymethods]
impl PutResult {
    #[getter]
    fn outcomes(&self) -> Vec<&'static str> {
        self.0.outcomes.iter().map(|outcome| outcome_name(*outcome)).collect()
    }

    #[getter]
    fn sent_bytes(&self) -> u64 {
        self.0.sent_bytes
    }

    #[getter]
    fn retry_after(&self) -> Option<f64> {
        self.0.retry_after.map(|delay| delay.as_secs_f64())
    }

    fn count(&self, outcome: &str) -> usize {
        self.0.outcomes.iter().filter(|each| outcome_name(**each) == outcome).count()
    }

    fn __repr__(&self) -> String {
        let (blocks, bytes) = (self.0.outcomes.len(), self.0.sent_bytes);
        format!("PutResult({blocks} blocks, stored={}, sent_bytes={bytes})", self.count("stored"))
    }
}

/// Neighbouring blocks on one tier of one node.
#[pyclass(frozen, get_all, module = "kvstrata", name = "Run")]
#[derive(Debug, Clone)]
pub(crate) struct RunOf {
    start: u32,
    end: u32,
    tier: &'static str,
    holder: u32,
    local: bool,
    est_load: f64,
    pending: bool,
}

#[pymethods]
impl RunOf {
    fn __repr__(&self) -> String {
        let Self { start, end, tier, pending, est_load, .. } = self;
        let pending = if *pending { ", pending" } else { "" };
        format!("Run({start}..{end} on {tier}, est_load={est_load}{pending})")
    }
}

impl From<&Run> for RunOf {
    fn from(run: &Run) -> Self {
        Self {
            start: run.start,
            end: run.end,
            tier: run.tier.name(),
            holder: run.holder,
            local: run.locality == Locality::Local,
            est_load: run.est_load.as_secs_f64(),
            pending: run.pending,
        }
    }
}

/// The answer to a lookup.
#[pyclass(frozen, get_all, module = "kvstrata", name = "Lookup")]
#[derive(Debug)]
pub(crate) struct LookupOf {
    prefix_blocks: u32,
    runs: Vec<RunOf>,
    sparse: Vec<RunOf>,
    dram: u32,
    nvme: u32,
    object: u32,
    pending: u32,
    miss: u32,
    lease: Option<Py<Lease>>,
    partial: bool,
}

#[pymethods]
impl LookupOf {
    fn __repr__(&self) -> String {
        let Self { prefix_blocks, dram, nvme, object, pending, miss, .. } = self;
        format!(
            "Lookup(prefix_blocks={prefix_blocks}, dram={dram}, nvme={nvme}, object={object}, \
             pending={pending}, miss={miss})"
        )
    }
}

impl LookupOf {
    /// What was found; its lease, if it got one, keeps `session` open.
    pub(crate) fn leased(
        py: Python<'_>,
        core: &Arc<Core>,
        found: &Lookup,
        session: Option<Arc<client::Session>>,
    ) -> PyResult<Self> {
        let lease = found.lease.clone().zip(session);
        let lease = lease.map(|(lease, session)| Lease::new(Arc::clone(core), session, lease));
        let lease = lease.map(|lease| Py::new(py, lease)).transpose()?;
        let TierCounts { dram, nvme, object, pending, miss } = found.counts;
        Ok(Self {
            prefix_blocks: found.prefix_blocks,
            runs: found.runs.iter().map(RunOf::from).collect(),
            sparse: found.sparse.iter().map(RunOf::from).collect(),
            dram,
            nvme,
            object,
            pending,
            miss,
            lease,
            partial: found.partial,
        })
    }
}

/// What Python calls a reason.
pub(crate) fn reason_name(reason: MissReason) -> &'static str {
    match reason {
        MissReason::Absent => "absent",
        MissReason::Pending => "pending",
        MissReason::Corrupt => "corrupt",
        MissReason::CorruptHere => "corrupt_here",
        MissReason::Timeout => "timeout",
        MissReason::Busy => "busy",
    }
}

fn outcome_name(outcome: PutOutcome) -> &'static str {
    match outcome {
        PutOutcome::Stored => "stored",
        PutOutcome::PartStored => "part_stored",
        PutOutcome::Duplicate => "duplicate",
        PutOutcome::DuplicateDiffers => "duplicate_differs",
        PutOutcome::Pending => "pending",
        PutOutcome::Refused => "refused",
        PutOutcome::Corrupt => "corrupt",
        PutOutcome::NotDurable => "not_durable",
    }
}

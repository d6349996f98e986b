//! The verbs of a namespace.
#![expect(clippy::too_many_arguments, reason = "arguments of Python, most of them by keyword")]

use std::{future::Future, sync::Arc, time::Duration};

use kvstrata::client::{
    self, Description, GetOptions, Handle, HashList, LeaseAsk, Lookup, LookupOptions, PutBatch,
};
use kvstrata_tiers::{block::BlockHash, error::Result};
use pyo3::{prelude::*, types::PyBytes};

use crate::{
    arguments::{Parts, hash, hashes},
    core::{Core, Own, seconds, timeout_of},
    lease::{Lease, Session},
    memory::{Rooms, lend},
    queue::CompletionQueue,
    request::{Outcome, Request, Tell},
    sink::{Into, Keep},
    values::{GetResult, LookupOf, PutResult},
};

/// An open namespace of one client.
#[pyclass(frozen, module = "kvstrata")]
#[derive(Debug)]
pub(crate) struct Namespace {
    opened: Own<Opened>,
    hash_bytes: usize,
}

/// What is used in its own process only.
#[derive(Debug, Clone)]
struct Opened {
    core: Arc<Core>,
    handle: Handle,
}

/// A get as it was asked for.
struct Asked {
    hashes: HashList,
    parts: Parts,
    lease: Option<kvstrata::client::Lease>,
    stop_at_miss: bool,
    timeout: Option<Duration>,
}

impl Asked {
    fn options(&self) -> GetOptions<'_> {
        GetOptions {
            parts: self.parts.indices.clone(),
            lease: self.lease.as_ref(),
            deadline: self.timeout,
            stop_at_miss: self.stop_at_miss,
        }
    }
}

impl Namespace {
    pub(crate) fn new(core: Arc<Core>, handle: Handle, hash_bytes: usize) -> Self {
        Self { opened: Own::new(Opened { core, handle }), hash_bytes }
    }

    fn asked(
        &self,
        given: &Bound<'_, PyAny>,
        parts: Option<Vec<u32>>,
        lease: Option<&Lease>,
        stop_at_miss: bool,
        timeout: Option<f64>,
    ) -> PyResult<(Opened, Asked)> {
        let py = given.py();
        let mut opened = self.opened.get(py)?.clone();
        if let Some(core) = lease.map(|lease| lease.core(py)).transpose()?
            && !Arc::ptr_eq(core, &opened.core)
        {
            // It was given by another server, which has what it covers.
            let handle = opened.handle.at(&core.client);
            opened = Opened { core: Arc::clone(core), handle };
        }
        let asked = Asked {
            hashes: hashes(given, self.hash_bytes)?,
            parts: Parts::chosen(py, &opened.handle, parts)?,
            lease: lease.map(Lease::get),
            stop_at_miss,
            timeout: timeout_of(py, timeout)?,
        };
        Ok((opened, asked))
    }

    fn sink(opened: &Opened, asked: &Asked, buffers: &Bound<'_, PyAny>) -> PyResult<Into> {
        let (py, bin) = (buffers.py(), &opened.core.bin);
        let sink = Rooms::take(buffers, bin)
            .and_then(|rooms| Into::new(py, rooms, &asked.parts, asked.hashes.len()));
        if sink.is_err() {
            bin.empty(py);
        }
        sink
    }

    fn batch(
        &self,
        opened: &Opened,
        given: &Bound<'_, PyAny>,
        values: &Bound<'_, PyAny>,
        parts: Option<Vec<u32>>,
        parent: Option<&[u8]>,
        durable: bool,
    ) -> PyResult<PutBatch> {
        let py = given.py();
        Ok(PutBatch {
            hashes: hashes(given, self.hash_bytes)?,
            parts: Parts::chosen(py, &opened.handle, parts)?.indices,
            parent: self.parent(py, parent)?,
            durable,
            // The last one: what comes behind it could not fail without holding them.
            values: lend(values, &opened.core.bin)?,
        })
    }

    /// A lookup that is ready to go.
    fn look(
        &self,
        given: &Bound<'_, PyAny>,
        lease: Option<f64>,
        lease_bytes: u64,
        session: Option<&Session>,
        sparse: bool,
    ) -> PyResult<
        impl Future<Output = Result<(Lookup, Option<Arc<client::Session>>)>> + Send + 'static,
    > {
        let py = given.py();
        let opened = self.opened.get(py)?;
        let hashes = hashes(given, self.hash_bytes)?;
        let ttl = lease.map(|lease| seconds(py, "lease", lease)).transpose()?;
        let given = session.map(|session| session.get(py)).transpose()?;
        let (handle, sessions) = (opened.handle.clone(), Arc::clone(&opened.core.session));
        Ok(async move {
            let Some(ttl) = ttl else {
                let options = LookupOptions { sparse, ..LookupOptions::default() };
                return Ok((handle.lookup(&hashes, options).await?, None));
            };
            let session = sessions.or(given).await?;
            let ask = LeaseAsk { session: &session, ttl, bytes_max: lease_bytes };
            let options = LookupOptions { lease: Some(ask), sparse, ..LookupOptions::default() };
            Ok((handle.lookup(&hashes, options).await?, Some(session)))
        })
    }

    fn parent(&self, py: Python<'_>, given: Option<&[u8]>) -> PyResult<Option<BlockHash>> {
        given.map(|given| hash(py, "parent", given, self.hash_bytes)).transpose()
    }
}

#[pymethods]
impl Namespace {
    #[getter]
    fn id<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        Ok(PyBytes::new(py, self.opened.get(py)?.handle.id().as_bytes()))
    }

    #[getter]
    fn hash_bytes(&self) -> usize {
        self.hash_bytes
    }

    #[getter]
    fn block_bytes(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.opened.get(py)?.handle.block_bytes())
    }

    #[getter]
    fn parts(&self, py: Python<'_>) -> PyResult<Vec<(u32, u32, u32)>> {
        let parts = self.opened.get(py)?.handle.parts();
        Ok(parts.iter().map(|part| (part.group, part.rank, part.bytes)).collect())
    }

    #[getter]
    fn warnings(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        Ok(self.opened.get(py)?.handle.warnings().to_vec())
    }

    #[pyo3(signature = (hashes, *, lease = None, lease_bytes = 0, session = None, sparse = false,
                        timeout = None))]
    fn lookup(
        &self,
        py: Python<'_>,
        hashes: &Bound<'_, PyAny>,
        lease: Option<f64>,
        lease_bytes: u64,
        session: Option<&Session>,
        sparse: bool,
        timeout: Option<f64>,
    ) -> PyResult<LookupOf> {
        let core = &self.opened.get(py)?.core;
        let look = self.look(hashes, lease, lease_bytes, session, sparse)?;
        let (found, session) = core.run(py, timeout_of(py, timeout)?, look)?;
        LookupOf::leased(py, core, &found, session)
    }

    #[pyo3(signature = (hashes, *, lease = None, lease_bytes = 0, session = None, sparse = false,
                        timeout = None, queue = None, tag = None))]
    fn submit_lookup(
        &self,
        py: Python<'_>,
        hashes: &Bound<'_, PyAny>,
        lease: Option<f64>,
        lease_bytes: u64,
        session: Option<&Session>,
        sparse: bool,
        timeout: Option<f64>,
        queue: Option<Bound<'_, CompletionQueue>>,
        tag: Option<Py<PyAny>>,
    ) -> PyResult<Py<Request>> {
        let core = &self.opened.get(py)?.core;
        let timeout = timeout_of(py, timeout)?;
        let look = self.look(hashes, lease, lease_bytes, session, sparse)?;
        Request::start(py, core, Tell { queue, tag }, |turn| async move {
            Outcome::Lookup(Box::pin(turn.at_once(timeout, look)).await)
        })
    }

    #[pyo3(signature = (hashes, *, timeout = None))]
    fn exists(
        &self,
        py: Python<'_>,
        hashes: &Bound<'_, PyAny>,
        timeout: Option<f64>,
    ) -> PyResult<Vec<bool>> {
        let Opened { core, handle } = self.opened.get(py)?;
        let hashes = self::hashes(hashes, self.hash_bytes)?;
        let options = LookupOptions { sparse: true, ..LookupOptions::default() };
        let found = core.run(py, timeout_of(py, timeout)?, handle.lookup(&hashes, options))?;
        let mut exists = vec![false; hashes.len()];
        for run in found.runs.iter().chain(&found.sparse).filter(|run| !run.pending) {
            if let Some(positions) = exists.get_mut(run.start as usize..run.end as usize) {
                positions.fill(true);
            }
        }
        Ok(exists)
    }

    #[pyo3(signature = (hashes, *, parts = None, lease = None, stop_at_miss = false,
                        timeout = None))]
    fn get<'py>(
        &self,
        py: Python<'py>,
        hashes: &Bound<'py, PyAny>,
        parts: Option<Vec<u32>>,
        lease: Option<&Lease>,
        stop_at_miss: bool,
        timeout: Option<f64>,
    ) -> PyResult<Vec<Option<Bound<'py, PyBytes>>>> {
        let (opened, asked) = self.asked(hashes, parts, lease, stop_at_miss, timeout)?;
        let mut sink = Keep(vec![None; asked.hashes.len()]);
        let getting = opened.handle.get(&asked.hashes, asked.options(), &mut sink);
        opened.core.run(py, asked.timeout, getting)?;
        let copy = |pieces: Vec<bytes::Bytes>| {
            PyBytes::new_with(py, pieces.iter().map(bytes::Bytes::len).sum(), |mut room| {
                for piece in &pieces {
                    let (here, rest) = room.split_at_mut(piece.len());
                    here.copy_from_slice(piece);
                    room = rest;
                }
                Ok(())
            })
        };
        sink.0.into_iter().map(|pieces| pieces.map(copy).transpose()).collect()
    }

    #[pyo3(signature = (hashes, buffers, *, parts = None, lease = None, stop_at_miss = false,
                        timeout = None))]
    fn get_into(
        &self,
        py: Python<'_>,
        hashes: &Bound<'_, PyAny>,
        buffers: &Bound<'_, PyAny>,
        parts: Option<Vec<u32>>,
        lease: Option<&Lease>,
        stop_at_miss: bool,
        timeout: Option<f64>,
    ) -> PyResult<GetResult> {
        let (opened, asked) = self.asked(hashes, parts, lease, stop_at_miss, timeout)?;
        let mut sink = Self::sink(&opened, &asked, buffers)?;
        let getting = opened.handle.get(&asked.hashes, asked.options(), &mut sink);
        let ended = opened.core.run(py, asked.timeout, getting);
        let result = sink.end(ended.as_ref().ok());
        opened.core.bin.empty(py);
        match ended {
            Ok(_) => Ok(result),
            Err(raised) => {
                raised.value(py).setattr("partial", Py::new(py, result)?)?;
                Err(raised)
            }
        }
    }

    #[pyo3(signature = (hashes, buffers, *, parts = None, lease = None, stop_at_miss = false,
                        timeout = None, queue = None, tag = None))]
    fn submit_get_into(
        &self,
        py: Python<'_>,
        hashes: &Bound<'_, PyAny>,
        buffers: &Bound<'_, PyAny>,
        parts: Option<Vec<u32>>,
        lease: Option<&Lease>,
        stop_at_miss: bool,
        timeout: Option<f64>,
        queue: Option<Bound<'_, CompletionQueue>>,
        tag: Option<Py<PyAny>>,
    ) -> PyResult<Py<Request>> {
        let (opened, asked) = self.asked(hashes, parts, lease, stop_at_miss, timeout)?;
        let mut sink = Self::sink(&opened, &asked, buffers)?;
        let (handle, moving) = (opened.handle.clone(), Arc::clone(&opened.core.getting));
        Request::start(py, &opened.core, Tell { queue, tag }, |turn| async move {
            let getting = handle.get(&asked.hashes, asked.options(), &mut sink);
            let ended = turn.run(&moving, asked.timeout, getting).await;
            Outcome::Get((sink.end(ended.as_ref().ok()), ended.map(drop)))
        })
    }

    #[pyo3(signature = (hashes, values, *, parts = None, parent = None, durable = false,
                        session = None, timeout = None))]
    fn put(
        &self,
        py: Python<'_>,
        hashes: &Bound<'_, PyAny>,
        values: &Bound<'_, PyAny>,
        parts: Option<Vec<u32>>,
        parent: Option<&[u8]>,
        durable: bool,
        session: Option<&Session>,
        timeout: Option<f64>,
    ) -> PyResult<PutResult> {
        let opened = self.opened.get(py)?;
        let Opened { core, handle } = opened;
        let given = session.map(|session| session.get(py)).transpose()?;
        let timeout = timeout_of(py, timeout)?;
        let batch = self.batch(opened, hashes, values, parts, parent, durable)?;
        let report = core.run(py, timeout, async move {
            handle.put(&*core.session.or(given).await?, &batch).await
        })?;
        Ok(PutResult(report))
    }

    #[pyo3(signature = (hashes, values, *, parts = None, parent = None, durable = false,
                        session = None, timeout = None, queue = None, tag = None))]
    fn submit_put(
        &self,
        py: Python<'_>,
        hashes: &Bound<'_, PyAny>,
        values: &Bound<'_, PyAny>,
        parts: Option<Vec<u32>>,
        parent: Option<&[u8]>,
        durable: bool,
        session: Option<&Session>,
        timeout: Option<f64>,
        queue: Option<Bound<'_, CompletionQueue>>,
        tag: Option<Py<PyAny>>,
    ) -> PyResult<Py<Request>> {
        let opened = self.opened.get(py)?;
        let given = session.map(|session| session.get(py)).transpose()?;
        let timeout = timeout_of(py, timeout)?;
        let batch = self.batch(opened, hashes, values, parts, parent, durable)?;
        let (handle, sessions) = (opened.handle.clone(), Arc::clone(&opened.core.session));
        let moving = Arc::clone(&opened.core.putting);
        Request::start(py, &opened.core, Tell { queue, tag }, |turn| async move {
            let putting = async move { handle.put(&*sessions.or(given).await?, &batch).await };
            Outcome::Put(Box::pin(turn.run(&moving, timeout, putting)).await)
        })
    }

    #[pyo3(signature = (hashes, *, parent = None, position = 0, tokens = None, lora_name = "",
                        timeout = None))]
    fn describe(
        &self,
        py: Python<'_>,
        hashes: &Bound<'_, PyAny>,
        parent: Option<&[u8]>,
        position: u32,
        tokens: Option<Vec<u32>>,
        lora_name: &str,
        timeout: Option<f64>,
    ) -> PyResult<u32> {
        let Opened { core, handle } = self.opened.get(py)?;
        let hashes = self::hashes(hashes, self.hash_bytes)?;
        let (tokens, parent) = (tokens.unwrap_or_default(), self.parent(py, parent)?);
        let what = Description { parent, position, tokens: &tokens, lora_name };
        core.run(py, timeout_of(py, timeout)?, handle.describe(&hashes, what))
    }

    #[pyo3(signature = (hashes, *, timeout = None))]
    fn touch(
        &self,
        py: Python<'_>,
        hashes: &Bound<'_, PyAny>,
        timeout: Option<f64>,
    ) -> PyResult<u32> {
        let Opened { core, handle } = self.opened.get(py)?;
        let hashes = self::hashes(hashes, self.hash_bytes)?;
        core.run(py, timeout_of(py, timeout)?, handle.touch(&hashes))
    }

    #[pyo3(signature = (hashes, *, timeout = None, queue = None, tag = None))]
    fn submit_touch(
        &self,
        py: Python<'_>,
        hashes: &Bound<'_, PyAny>,
        timeout: Option<f64>,
        queue: Option<Bound<'_, CompletionQueue>>,
        tag: Option<Py<PyAny>>,
    ) -> PyResult<Py<Request>> {
        let Opened { core, handle } = self.opened.get(py)?;
        let hashes = self::hashes(hashes, self.hash_bytes)?;
        let (timeout, handle) = (timeout_of(py, timeout)?, handle.clone());
        Request::start(py, core, Tell { queue, tag }, |turn| async move {
            // Boxed: a call that may go over the network is large.
            Outcome::Touch(turn.at_once(timeout, Box::pin(handle.touch(&hashes))).await)
        })
    }

    #[pyo3(signature = (hashes, *, timeout = None))]
    fn prefetch(
        &self,
        py: Python<'_>,
        hashes: &Bound<'_, PyAny>,
        timeout: Option<f64>,
    ) -> PyResult<(u32, u32)> {
        let Opened { core, handle } = self.opened.get(py)?;
        let hashes = self::hashes(hashes, self.hash_bytes)?;
        let begun = core.run(py, timeout_of(py, timeout)?, handle.prefetch(&hashes))?;
        Ok((begun.in_dram, begun.started))
    }

    #[pyo3(signature = (hashes, *, timeout = None, queue = None, tag = None))]
    fn submit_prefetch(
        &self,
        py: Python<'_>,
        hashes: &Bound<'_, PyAny>,
        timeout: Option<f64>,
        queue: Option<Bound<'_, CompletionQueue>>,
        tag: Option<Py<PyAny>>,
    ) -> PyResult<Py<Request>> {
        let Opened { core, handle } = self.opened.get(py)?;
        let hashes = self::hashes(hashes, self.hash_bytes)?;
        let (timeout, handle) = (timeout_of(py, timeout)?, handle.clone());
        Request::start(py, core, Tell { queue, tag }, |turn| async move {
            let begun = turn.at_once(timeout, Box::pin(handle.prefetch(&hashes))).await;
            Outcome::Prefetch(begun.map(|begun| (begun.in_dram, begun.started)))
        })
    }

    #[pyo3(signature = (hashes, *, timeout = None))]
    fn remove(
        &self,
        py: Python<'_>,
        hashes: &Bound<'_, PyAny>,
        timeout: Option<f64>,
    ) -> PyResult<u32> {
        let Opened { core, handle } = self.opened.get(py)?;
        let hashes = self::hashes(hashes, self.hash_bytes)?;
        core.run(py, timeout_of(py, timeout)?, handle.remove(&hashes))
    }
}

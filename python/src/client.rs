//! The client: where everything begins.
#![expect(clippy::too_many_arguments, reason = "arguments of Python, most of them by keyword")]

use std::{path::PathBuf, str::FromStr, sync::Arc, time::Duration};

use kvstrata::client::{Client as Connection, ClientOptions, NamespaceSpec, TlsOptions, Token};
use kvstrata_tiers::{
    block::HASH_BYTES_MAX,
    namespace::{Identity, PartSpec, Wishes},
};
use pyo3::{prelude::*, types::PyDict};

use crate::{
    arguments::hash_bytes,
    core::{Core, Own, seconds, timeout_of},
    errors,
    lease::Session,
    namespace::Namespace,
};

/// A connection to one server of a cluster.
#[pyclass(frozen, module = "kvstrata")]
#[derive(Debug)]
pub(crate) struct Client(Own<Arc<Core>>);

#[pymethods]
impl Client {
    #[new]
    #[pyo3(signature = (endpoint, *, path = "auto", token = None, tls_ca = None, tls_cert = None,
                        tls_key = None, tls_server_name = None, name = "python",
                        instance = None, node = None, zone = None,
                        timeout = None, connect_timeout = None, stall_timeout = None, transfer_timeout = None))]
    fn new(
        py: Python<'_>,
        endpoint: &str,
        path: &str,
        token: Option<&str>,
        tls_ca: Option<PathBuf>,
        tls_cert: Option<PathBuf>,
        tls_key: Option<PathBuf>,
        tls_server_name: Option<String>,
        name: &str,
        instance: Option<String>,
        node: Option<String>,
        zone: Option<String>,
        timeout: Option<f64>,
        connect_timeout: Option<f64>,
        stall_timeout: Option<f64>,
        transfer_timeout: Option<f64>,
    ) -> PyResult<Self> {
        let token = token.map(Token::from_str).transpose();
        if tls_cert.is_some() != tls_key.is_some() {
            let text = "tls_cert and tls_key: one given, both or neither allowed";
            return Err(errors::invalid(py, text));
        }
        let client = tls_cert.zip(tls_key);
        let tls = TlsOptions { ca_file: tls_ca, client, server_name: tls_server_name };
        let or = |name, given: Option<f64>, default: Duration| {
            given.map_or(Ok(default), |given| seconds(py, name, given))
        };
        let default = ClientOptions::default();
        let options = ClientOptions {
            name: name.to_owned(),
            instance,
            node,
            zone: zone.unwrap_or_default(),
            path: path.parse().map_err(|error| errors::raised(py, &error))?,
            connect_deadline: or("connect_timeout", connect_timeout, default.connect_deadline)?,
            call_deadline: or("timeout", timeout, default.call_deadline)?,
            stall_deadline: or("stall_timeout", stall_timeout, default.stall_deadline)?,
            transfer_deadline: or("transfer_timeout", transfer_timeout, default.transfer_deadline)?,
            token: token.map_err(|error| errors::raised(py, &error))?,
            tls: Some(tls).filter(|tls| *tls != TlsOptions::default()),
            acting_for: None,
        };
        let core = Core::connect(py, Connection::connect(endpoint, options), name.to_owned())?;
        Ok(Self(Own::new(Arc::new(core))))
    }

    #[getter]
    fn endpoint(&self, py: Python<'_>) -> PyResult<String> {
        Ok(self.0.get(py)?.client.endpoint())
    }

    #[getter]
    fn draining(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.0.get(py)?.client.is_draining())
    }

    #[getter]
    fn idle(&self, py: Python<'_>) -> PyResult<bool> {
        // What it gives out has a share of its own.
        Ok(Arc::strong_count(self.0.get(py)?) == 1)
    }

    #[pyo3(signature = (*, model, engine, dtype, block_tokens, parts, hash_algorithm,
                        hash_bytes = 32, weights = "", layout = "", split = "none",
                        hash_root = None, lora = None, cache_salt = None, keep_tokens = false,
                        hash_schemes = None, timeout = None))]
    fn open_namespace(
        &self,
        py: Python<'_>,
        model: &str,
        engine: &str,
        dtype: &str,
        block_tokens: u32,
        parts: Vec<(u32, u32, u32)>,
        hash_algorithm: &str,
        hash_bytes: usize,
        weights: &str,
        layout: &str,
        split: &str,
        hash_root: Option<&[u8]>,
        lora: Option<&[u8]>,
        cache_salt: Option<&[u8]>,
        keep_tokens: bool,
        hash_schemes: Option<Vec<String>>,
        timeout: Option<f64>,
    ) -> PyResult<Namespace> {
        let part = |(group, rank, bytes)| PartSpec { group, rank, bytes };
        let owned = |given: Option<&[u8]>| given.unwrap_or_default().to_vec();
        let identity = Identity {
            tenant: String::new(),
            model: model.to_owned(),
            weights: weights.to_owned(),
            engine: engine.to_owned(),
            layout: layout.to_owned(),
            dtype: dtype.to_owned(),
            block_tokens,
            parts: parts.into_iter().map(part).collect(),
            split: split.to_owned(),
            hash_algorithm: hash_algorithm.to_owned(),
            hash_bytes: self::hash_bytes(py, hash_bytes)?,
            hash_root: owned(hash_root),
            lora: owned(lora),
            cache_salt: owned(cache_salt),
        };
        let hash_schemes = hash_schemes.into_iter().flatten().collect();
        let spec = NamespaceSpec::Engine(Box::new(identity));
        self.open(py, (spec, Wishes { keep_tokens, hash_schemes }), hash_bytes, timeout)
    }

    #[pyo3(signature = (name, *, bytes_max = 0, timeout = None))]
    fn open_opaque(
        &self,
        py: Python<'_>,
        name: &str,
        bytes_max: u32,
        timeout: Option<f64>,
    ) -> PyResult<Namespace> {
        let spec = NamespaceSpec::Opaque { name: name.to_owned(), bytes_max };
        self.open(py, (spec, Wishes::default()), HASH_BYTES_MAX, timeout)
    }

    #[pyo3(signature = (name = "python", *, timeout = None))]
    fn session(&self, py: Python<'_>, name: &str, timeout: Option<f64>) -> PyResult<Session> {
        let core = self.0.get(py)?;
        let session = core.run(py, timeout_of(py, timeout)?, core.client.session(name))?;
        Ok(Session::new(Arc::clone(core), session))
    }

    #[pyo3(signature = (*, timeout = None))]
    fn stats<'py>(&self, py: Python<'py>, timeout: Option<f64>) -> PyResult<Bound<'py, PyDict>> {
        let core = self.0.get(py)?;
        let stats = core.run(py, timeout_of(py, timeout)?, core.client.stats())?;
        let text = serde_json::to_string(&stats)
            .map_err(|error| errors::make(py, "InternalError", &error.to_string()))?;
        Ok(py.import("json")?.call_method1("loads", (text,))?.cast_into()?)
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.0.get(py)?.close(py);
        Ok(())
    }

    fn __enter__(this: Bound<'_, Self>) -> Bound<'_, Self> {
        this
    }

    #[pyo3(signature = (*_raised))]
    fn __exit__(&self, py: Python<'_>, _raised: &Bound<'_, PyAny>) -> PyResult<()> {
        self.close(py)
    }
}

impl Client {
    fn open(
        &self,
        py: Python<'_>,
        (spec, wishes): (NamespaceSpec, Wishes),
        hash_bytes: usize,
        timeout: Option<f64>,
    ) -> PyResult<Namespace> {
        let core = self.0.get(py)?;
        let handle = core.run(py, timeout_of(py, timeout)?, core.client.open_with(spec, wishes))?;
        Ok(Namespace::new(Arc::clone(core), handle, hash_bytes))
    }
}

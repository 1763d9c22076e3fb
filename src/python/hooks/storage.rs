//! torch's storages: who they are, and what plain PyTorch would hold.
//!
//! A storage is known by the address of its `StorageImpl`, held weakly, so the address cannot be used again while we know
//! it; the data behind it can be freed. Never by the address of its data, which the allocator hands out again.

use super::super::torch_api::TorchApi;
use pyo3::prelude::*;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::ThreadId;

/// One storage that autograd saved something of.
#[derive(Debug)]
pub(crate) struct StorageRecord {
    /// Address of the `StorageImpl`, on which a weak reference is held.
    pub(crate) address: usize,
    /// Bytes of the whole storage at its first save.
    pub(crate) nbytes: usize,
    /// Handles that live.
    pub(crate) handles: AtomicUsize,
    /// Handles among them that keep a tensor on this storage.
    pub(crate) aliases: AtomicUsize,
    /// Somebody else keeps the storage alive: plain PyTorch would not hold it for backward alone.
    pub(crate) alive_elsewhere: AtomicBool,
    /// The thread that saved it first: only there is it known when a forward is over.
    pub(crate) thread: ThreadId,
    /// Looked at since the last save: `alive_elsewhere` is final.
    pub(crate) settled: AtomicBool,
}

/// The storage object of a tensor and the address of its implementation.
pub(crate) fn identify<'py>(tensor: &Bound<'py, PyAny>) -> PyResult<(Bound<'py, PyAny>, usize)> {
    let py = tensor.py();
    let storage = tensor.call_method0(pyo3::intern!(py, "untyped_storage"))?;
    let address: usize = storage.getattr(pyo3::intern!(py, "_cdata"))?.extract()?;
    Ok((storage, address))
}

impl StorageRecord {
    /// Takes a weak reference on a storage.
    pub(crate) fn new(storage: &Bound<'_, PyAny>) -> PyResult<StorageRecord> {
        let py = storage.py();
        let nbytes: usize = storage
            .call_method0(pyo3::intern!(py, "nbytes"))?
            .extract()?;
        let address: usize = storage
            .call_method0(pyo3::intern!(py, "_weak_ref"))?
            .extract()?;
        Ok(StorageRecord {
            address,
            nbytes,
            handles: AtomicUsize::new(0),
            aliases: AtomicUsize::new(0),
            alive_elsewhere: AtomicBool::new(false),
            thread: std::thread::current().id(),
            settled: AtomicBool::new(false),
        })
    }

    /// Whether nobody holds the data any more.
    pub(crate) fn expired(&self, py: Python<'_>, api: &TorchApi) -> PyResult<bool> {
        api.storage_expired
            .bind(py)
            .call1((self.address,))?
            .extract()
    }

    /// Whether somebody besides our own kept tensors holds the data.
    pub(crate) fn held_elsewhere(&self, py: Python<'_>, api: &TorchApi) -> PyResult<bool> {
        if self.expired(py, api)? {
            return Ok(false);
        }
        let users: usize = api
            .storage_use_count
            .bind(py)
            .call1((self.address,))?
            .extract()?;
        // The Python object that identified the storage is kept by it and counts as one user.
        Ok(users > self.aliases.load(Ordering::Relaxed) + 1)
    }
}

impl Drop for StorageRecord {
    fn drop(&mut self) {
        // At interpreter exit there is nobody to give the weak reference back to: the process's end frees it.
        Python::try_attach(|py| {
            if let Ok(api) = TorchApi::get(py) {
                let _ = api.storage_free_weak.bind(py).call1((self.address,));
            }
        });
    }
}

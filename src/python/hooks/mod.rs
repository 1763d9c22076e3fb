//! The saved-tensor hooks: what happens between autograd saving a tensor and reading it back.
//!
//! * [`store`] holds one `save_compressed`'s settings, counters and tables, [`context`] its `pack`;
//! * [`pending`] waits for the node that saves a tensor and then decides, with [`consumer`]'s rules, what is stored;
//! * [`encode`] turns a decision into a stored form, [`part`] calls the codec;
//! * [`blob`] is the stored form of one set of elements, shared by every handle on it;
//! * [`handle`] is the object that autograd keeps instead of the tensor, and `unpack`;
//! * [`storage`] identifies torch's storages and counts the bytes that plain PyTorch would hold;
//! * [`axis`] finds which dimension is the channel; [`guard`] the width that attention's q and k need.
//!
//! Invariants: a handle holds a tensor only while its node is not complete, or when the tensor is kept as it is; no lock
//! is held while Python code runs or the interpreter lock is waited for.

mod axis;
mod blob;
mod consumer;
mod context;
mod encode;
mod guard;
mod handle;
mod part;
mod pending;
mod rows;
mod slots;
mod storage;
mod store;

pub(super) use axis::Dim;
use pyo3::prelude::*;

/// Adds the hook layer's classes and functions to the module.
pub(super) fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<context::Context>()?;
    m.add_class::<handle::Saved>()?;
    m.add_function(wrap_pyfunction!(handle::unpack, m)?)?;
    m.add_function(wrap_pyfunction!(pending::on_node, m)?)?;
    m.add_function(wrap_pyfunction!(consumer::forget_consumers, m)?)?;
    Ok(())
}

//! The object that autograd keeps instead of a tensor, and the way back.
//!
//! Unpacking may run any number of times, in any order, on any thread; it never changes the handle.

use super::super::enter::enter;
use super::super::tensor::{Dims, TensorView};
use super::super::torch_api::{DType, TorchApi};
use super::blob::{Blob, Want};
use super::storage::StorageRecord;
use super::store::Store;
use crate::codec::{Layout, Target};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

/// A tensor kept as it is, with the version that backward expects.
pub(crate) struct Kept {
    pub(crate) tensor: Py<PyAny>,
    /// `None` for tensors that keep no version (inference tensors, some subclasses).
    pub(crate) version: Option<i64>,
    /// It had memory when it was saved: backward must not get it without.
    pub(crate) has_memory: bool,
}

impl Kept {
    fn clone_ref(&self, py: Python<'_>) -> Kept {
        Kept {
            tensor: self.tensor.clone_ref(py),
            version: self.version,
            has_memory: self.has_memory,
        }
    }
}

/// How a decoded tensor is laid out.
#[derive(Clone, Debug)]
pub(crate) struct Shape {
    pub(crate) sizes: Dims,
    pub(crate) strides: Dims,
    /// Sizes and strides of the memory that is allocated, where they differ (expanded dimensions, wide gaps).
    pub(crate) allocate: Option<(Dims, Dims)>,
    pub(crate) dtype: DType,
    /// Decode to consecutive elements instead of the blob's own layout.
    pub(crate) compact: bool,
}

/// What a handle is.
pub(crate) enum State {
    /// The node that saves the tensor is not complete yet.
    Pending(Kept),
    /// The tensor itself.
    Kept(Kept),
    /// A part of a blob.
    Coded {
        blob: Arc<Blob>,
        want: Want,
        bits: u8,
        shape: Shape,
    },
    /// Backward never reads it: shape and strides alone.
    Empty(Shape),
    /// It was modified in place before it could be read.
    Lost { found: i64, expected: i64 },
}

/// What is kept of a saved tensor; opaque, and only of use to autograd.
#[pyclass(frozen, weakref, name = "Saved", module = "daf_rs._native")]
pub(crate) struct Saved {
    state: Mutex<State>,
    pub(crate) store: Arc<Store>,
    /// The storage it came from; none for parameters and what has no storage.
    pub(crate) storage: Option<Arc<StorageRecord>>,
    /// On a torch that tells no consumer in the forward: the slot to learn it for.
    pub(crate) slot: Option<u64>,
}

impl Saved {
    pub(crate) fn new(
        store: Arc<Store>,
        storage: Option<Arc<StorageRecord>>,
        state: State,
        slot: Option<u64>,
    ) -> Saved {
        store.handle_made(storage.as_deref(), matches!(state, State::Kept(_)));
        Saved {
            state: Mutex::new(state),
            store,
            storage,
            slot,
        }
    }

    /// Runs `look` on the state; it must not call Python.
    pub(crate) fn look<T>(&self, look: impl FnOnce(&State) -> T) -> T {
        look(&self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Replaces the state; what it held is returned, to be dropped with no lock held.
    pub(crate) fn settle(&self, state: State) -> State {
        if matches!(state, State::Kept(_)) {
            self.store.handle_keeps(self.storage.as_deref());
        }
        std::mem::replace(
            &mut *self.state.lock().unwrap_or_else(PoisonError::into_inner),
            state,
        )
    }
}

impl Drop for Saved {
    fn drop(&mut self) {
        let kept = matches!(
            *self.state.lock().unwrap_or_else(PoisonError::into_inner),
            State::Kept(_)
        );
        self.store.handle_dropped(self.storage.as_deref(), kept);
    }
}

/// What unpacking copies out of a state before it calls Python.
enum Task {
    Return(Kept),
    Detach(Kept),
    Decode(Arc<Blob>, Want, u8, Shape),
    Allocate(Shape),
    Raise(i64, i64),
}

/// The tensor that a handle stands for; autograd calls it in backward.
#[pyfunction]
pub(crate) fn unpack<'py>(
    py: Python<'py>,
    saved: &Bound<'py, Saved>,
) -> PyResult<Bound<'py, PyAny>> {
    let saved = saved.get();
    let api = TorchApi::get(py)?;
    saved.store.note_unpack(py, api)?;
    if saved.slot.is_some() {
        super::pending::learn(py, api, saved)?;
    }
    let task = saved.look(|state| match state {
        State::Pending(kept) => Task::Detach(kept.clone_ref(py)),
        State::Kept(kept) => Task::Return(kept.clone_ref(py)),
        State::Coded {
            blob,
            want,
            bits,
            shape,
        } => Task::Decode(blob.clone(), *want, *bits, shape.clone()),
        State::Empty(shape) => Task::Allocate(shape.clone()),
        State::Lost { found, expected } => Task::Raise(*found, *expected),
    });
    match task {
        Task::Return(kept) => checked(py, kept),
        Task::Detach(kept) => checked(py, kept)?.call_method0(pyo3::intern!(py, "detach")),
        Task::Decode(blob, want, bits, shape) => {
            decode(py, api, &saved.store, &blob, want, bits, &shape)
        }
        Task::Allocate(shape) => Ok(allocate(py, api, &shape)?.0),
        Task::Raise(found, expected) => Err(modified(found, expected)),
    }
}

/// The tensor, if nobody modified it since it was saved.
fn checked<'py>(py: Python<'py>, kept: Kept) -> PyResult<Bound<'py, PyAny>> {
    let tensor = kept.tensor.into_bound(py);
    if let Some(expected) = kept.version {
        let found: i64 = tensor.getattr(pyo3::intern!(py, "_version"))?.extract()?;
        if found != expected {
            return Err(modified(found, expected));
        }
    }
    if kept.has_memory
        && tensor
            .call_method0(pyo3::intern!(py, "data_ptr"))?
            .extract::<usize>()?
            == 0
    {
        return Err(PyRuntimeError::new_err(
            "daf_rs: the storage of a saved tensor was resized to 0 before backward; restore its memory first (FSDP does it by \
             unsharding), or do not resize what the forward saved",
        ));
    }
    Ok(tensor)
}

/// PyTorch's own error for a saved tensor that was modified in place.
fn modified(found: i64, expected: i64) -> PyErr {
    PyRuntimeError::new_err(format!(
        "one of the variables needed for gradient computation has been modified by an inplace operation: a saved tensor is \
         at version {found}; expected version {expected} instead. Hint: the backtrace of the operation that saved it is \
         shown with torch.autograd.set_detect_anomaly(True)."
    ))
}

/// A fresh tensor of the shape, and its view.
fn allocate<'py>(
    py: Python<'py>,
    api: &TorchApi,
    shape: &Shape,
) -> PyResult<(Bound<'py, PyAny>, Option<TensorView>)> {
    let (sizes, strides) = shape
        .allocate
        .as_ref()
        .map_or((&shape.sizes, &shape.strides), |(sizes, strides)| {
            (sizes, strides)
        });
    let fresh = api.empty_strided(
        py,
        &sizes.to_tuple(py)?,
        &strides.to_tuple(py)?,
        shape.dtype,
    )?;
    // A torch mode may have put another tensor in its place; writing to that would be out of bounds.
    let view = TensorView::read(py, api, &fresh)?.filter(|view| {
        view.sizes == *sizes && view.strides == *strides && view.dtype == shape.dtype
    });
    if shape.allocate.is_some() && !shape.compact {
        let whole = api.as_strided.bind(py).call1((
            &fresh,
            shape.sizes.to_tuple(py)?,
            shape.strides.to_tuple(py)?,
        ))?;
        return Ok((whole, view));
    }
    Ok((fresh, view))
}

fn decode<'py>(
    py: Python<'py>,
    api: &TorchApi,
    store: &Store,
    blob: &Blob,
    want: Want,
    bits: u8,
    shape: &Shape,
) -> PyResult<Bound<'py, PyAny>> {
    let started = Instant::now();
    let (tensor, view) = allocate(py, api, shape)?;
    let Some(view) = view else {
        return Err(PyRuntimeError::new_err(
            "daf_rs: cannot unpack a saved tensor here: a torch mode (fake tensors, tracing) replaces new tensors by ones \
             without memory; run backward outside of it",
        ));
    };
    let Some((part, mode)) = blob.serve(want, bits) else {
        return Err(PyRuntimeError::new_err(
            "daf_rs: internal error: a saved tensor's stored form is missing; please report it",
        ));
    };
    let layout = if shape.compact {
        Layout::contiguous(blob.layout.len())
    } else {
        blob.layout.clone()
    };
    let span = layout.span() * view.dtype.size();
    let threads = store.config.threads;
    let address = view.data;
    let bytes = blob.layout.len() * view.dtype.size();
    enter(py, bytes, move || {
        // SAFETY: `tensor` was just allocated with the strides whose span this is, nobody else has it, and it lives until
        // this call returns.
        let target = unsafe { Target::new(address as *mut u8, span) };
        part.decode_into(target, &layout, mode, threads)
    })?;
    store.unpacked(bytes, started.elapsed());
    Ok(tensor)
}

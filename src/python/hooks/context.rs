//! The native half of `daf_rs.save_compressed`, and the hook that autograd calls when it saves a tensor.

use super::super::tensor::{Dims, TensorView};
use super::super::torch_api::TorchApi;
use super::axis::Groups;
use super::handle::{Kept, Saved, State};
use super::pending::{self, Pending};
use super::rows::RowData;
use super::slots;
use super::storage::{self, StorageRecord};
use super::store::{Config, Store};
use crate::codec::Rounding;
use crate::kernels::rng::mix64;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

/// A small view of a storage this many times as large is copied, so that the storage can go.
const SMALL_VIEW_FACTOR: usize = 4;

/// Why a tensor is kept as it is, and the class that the report shows.
#[derive(Clone, Copy)]
struct Keep {
    class: &'static str,
    why: &'static str,
}

const PARAMETER: Keep = Keep {
    class: "parameter",
    why: "a parameter or buffer: it lives anyway",
};
const SUBCLASS: Keep = Keep {
    class: "exact",
    why: "a tensor subclass: kept as it is",
};
const BACKWARD: Keep = Keep {
    class: "exact",
    why: "saved inside a running backward: gradients are not quantized",
};
const OPAQUE: Keep = Keep {
    class: "exact",
    why: "no strided CPU memory of a dtype that we store",
};
const NEGATED: Keep = Keep {
    class: "exact",
    why: "a lazily negated or conjugated view",
};
const OVERLAP: Keep = Keep {
    class: "exact",
    why: "elements of this view share memory",
};
const SMALL: Keep = Keep {
    class: "small",
    why: "smaller than min_bytes",
};
const EMPTY: Keep = Keep {
    class: "small",
    why: "no elements",
};

/// The native half of `daf_rs.save_compressed`.
#[pyclass(frozen, name = "Context", module = "daf_rs._native")]
pub(crate) struct Context {
    store: Arc<Store>,
}

#[pymethods]
impl Context {
    #[new]
    #[pyo3(signature = (*, exact, bits, group_size, rounding, groups, min_bytes, threads, boundary, unknown, node_hook, family))]
    #[expect(
        clippy::too_many_arguments,
        reason = "keywords of one private constructor"
    )]
    fn new(
        exact: bool,
        bits: u8,
        group_size: u16,
        rounding: &str,
        groups: &str,
        min_bytes: usize,
        threads: usize,
        boundary: Option<u8>,
        unknown: Option<u8>,
        node_hook: bool,
        family: u64,
    ) -> PyResult<Context> {
        let rounding = match rounding {
            "dither" => Rounding::Dither,
            "stochastic" => Rounding::Stochastic,
            "nearest" => Rounding::Nearest,
            other => {
                return Err(PyRuntimeError::new_err(format!(
                    "daf_rs: unchecked rounding {other:?}"
                )));
            }
        };
        let groups = match groups {
            "auto" => Groups::Auto,
            "row" => Groups::Row,
            "channel" => Groups::Channel,
            other => {
                return Err(PyRuntimeError::new_err(format!(
                    "daf_rs: unchecked groups {other:?}"
                )));
            }
        };
        let family = slots::number((
            family,
            exact,
            bits,
            group_size,
            rounding,
            groups as u8,
            min_bytes,
            boundary,
            unknown,
        ));
        let config = Config {
            exact,
            bits,
            group_size,
            rounding,
            groups,
            min_bytes,
            threads,
            boundary,
            unknown,
            node_hook,
            family,
        };
        Ok(Context {
            store: Arc::new(Store::new(config)),
        })
    }

    /// Begins a context on this thread: `key` seeds the noise, `parameters` are storages that live anyway.
    fn enter(&self, key: u64, parameters: Vec<usize>) {
        self.store.counters.key.store(mix64(key), Ordering::Relaxed);
        self.store.counters.draws.store(0, Ordering::Relaxed);
        if self.store.counters.handles.load(Ordering::Relaxed) == 0 {
            self.store.begin_step();
        }
        self.store
            .tables(|tables| tables.parameters = parameters.into_iter().collect());
    }

    /// Ends a context on this thread: every saved tensor gets its final form.
    fn exit(&self, py: Python<'_>) -> PyResult<()> {
        pending::flush(py)?;
        self.store.settle(py, TorchApi::get(py)?)
    }

    /// Called by autograd with each tensor that it saves.
    fn pack<'py>(
        &self,
        py: Python<'py>,
        tensor: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, Saved>> {
        pack(py, &self.store, tensor)
    }

    /// The counters, as keywords of `daf_rs.Stats`.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let counters = &self.store.counters;
        let load = |counter: &AtomicUsize| counter.load(Ordering::Relaxed);
        let seconds = |counter: &AtomicU64| {
            Duration::from_nanos(counter.load(Ordering::Relaxed)).as_secs_f64()
        };
        let stats = PyDict::new(py);
        stats.set_item("live_bytes", self.store.live_bytes())?;
        stats.set_item("packed_bytes", load(&counters.packed_bytes))?;
        stats.set_item("kept_bytes", load(&counters.kept_bytes))?;
        // Inside a forward, kept tensors that may live anyway count as live already, but not yet in the peak.
        let peak = load(&counters.peak_bytes).max(self.store.live_bytes());
        stats.set_item("peak_bytes", peak)?;
        stats.set_item("plain_bytes", load(&counters.plain_bytes))?;
        let plain_peak = load(&counters.plain_peak).max(load(&counters.plain_bytes));
        stats.set_item("plain_peak_bytes", plain_peak)?;
        stats.set_item("logical_bytes", load(&counters.logical_bytes))?;
        stats.set_item("unique_bytes", load(&counters.unique_bytes))?;
        stats.set_item("live_handles", load(&counters.handles))?;
        stats.set_item("packs", counters.packs.load(Ordering::Relaxed))?;
        stats.set_item("unpacks", counters.unpacks.load(Ordering::Relaxed))?;
        stats.set_item("pack_seconds", seconds(&counters.pack_nanos))?;
        stats.set_item("unpack_seconds", seconds(&counters.unpack_nanos))?;
        stats.set_item(
            "pack_source_bytes",
            counters.pack_source.load(Ordering::Relaxed),
        )?;
        stats.set_item(
            "unpack_source_bytes",
            counters.unpack_source.load(Ordering::Relaxed),
        )?;
        let (counts, bytes) = (PyDict::new(py), PyDict::new(py));
        for (class, (count, stored)) in self.store.tables(|tables| tables.classes.clone()) {
            counts.set_item(class, count)?;
            bytes.set_item(class, stored)?;
        }
        stats.set_item("live_counts", counts)?;
        stats.set_item("live_bytes_by_class", bytes)?;
        Ok(stats)
    }

    /// Forgets the peaks and the times; what is stored stays.
    fn reset_peaks(&self) {
        let counters = &self.store.counters;
        counters
            .peak_bytes
            .store(self.store.live_bytes(), Ordering::Relaxed);
        counters.plain_peak.store(
            counters.plain_bytes.load(Ordering::Relaxed),
            Ordering::Relaxed,
        );
        for counter in [
            &counters.pack_nanos,
            &counters.pack_source,
            &counters.unpack_nanos,
            &counters.unpack_source,
        ] {
            counter.store(0, Ordering::Relaxed);
        }
    }

    /// The report's rows, each a tuple (module, op, field, shape, dtype, class, bits, plain bytes, stored bytes, why, shared).
    fn rows<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let api = TorchApi::get(py)?;
        let list = PyList::empty(py);
        for row in self.store.tables(|tables| tables.rows.clone()) {
            let dtype = match row.dtype.and_then(|dtype| api.dtype_object(py, dtype)) {
                Some(dtype) => dtype.str()?.to_string(),
                None => "unknown".to_string(),
            };
            let head = (
                &*row.module,
                &*row.op,
                &*row.field,
                row.shape.to_tuple(py)?,
                dtype.trim_start_matches("torch."),
            );
            let tail = (
                row.class,
                row.bits,
                row.plain_bytes,
                row.stored_bytes,
                &*row.why,
                row.shared,
            );
            let cells: Vec<Bound<'py, PyAny>> = head
                .into_pyobject(py)?
                .iter()
                .chain(tail.into_pyobject(py)?.iter())
                .collect();
            list.append(PyTuple::new(py, cells)?)?;
        }
        Ok(list)
    }
}

/// What autograd's pack hook does: sort out what must be kept as it is, put everything else on the pending list.
fn pack<'py>(
    py: Python<'py>,
    store: &Arc<Store>,
    tensor: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, Saved>> {
    let api = TorchApi::get(py)?;
    let counters = &store.counters;
    if counters.handles.load(Ordering::Relaxed) == 0 {
        store.begin_step();
    }
    counters.packs.fetch_add(1, Ordering::Relaxed);
    let ordinal = counters.ordinal.fetch_add(1, Ordering::Relaxed);
    counters.unsettled.store(true, Ordering::Relaxed);

    let class = tensor.get_type();
    let class = class.as_ptr();
    let is_parameter = class == api.parameter.as_ptr()
        || api
            .buffer
            .as_ref()
            .is_some_and(|buffer| class == buffer.as_ptr());
    if is_parameter {
        return keep(py, api, store, tensor, None, PARAMETER, None, ordinal);
    }
    if class != api.tensor.as_ptr() {
        return keep(py, api, store, tensor, None, SUBCLASS, None, ordinal);
    }
    let Some(view) = TensorView::read(py, api, tensor)?.filter(|view| {
        api.dtype_object(py, view.dtype).is_some() && view.data % view.dtype.size() == 0
    }) else {
        return keep(py, api, store, tensor, None, OPAQUE, None, ordinal);
    };
    let numel = view.numel();
    if numel == 0 {
        return keep(py, api, store, tensor, Some(&view), EMPTY, None, ordinal);
    }
    let grad_fn = tensor.getattr(pyo3::intern!(py, "grad_fn"))?;
    if is_parameter_like(py, api, tensor, &grad_fn)? {
        return keep(
            py,
            api,
            store,
            tensor,
            Some(&view),
            PARAMETER,
            None,
            ordinal,
        );
    }
    let (storage, address) = storage::identify(tensor)?;
    if store.tables(|tables| tables.parameters.contains(&address)) {
        return keep(
            py,
            api,
            store,
            tensor,
            Some(&view),
            PARAMETER,
            None,
            ordinal,
        );
    }
    let record = store.record(&storage, address)?;
    drop(storage);
    let bytes = numel * view.dtype.size();
    counters.logical_bytes.fetch_add(bytes, Ordering::Relaxed);

    if running_backward(py, api)? && !pending::recomputing(py)? {
        return keep(
            py,
            api,
            store,
            tensor,
            Some(&view),
            BACKWARD,
            Some(record),
            ordinal,
        );
    }
    let nbytes = record.0.nbytes;
    let small_view = nbytes >= store.config.min_bytes && nbytes / SMALL_VIEW_FACTOR >= bytes.max(1);
    if bytes < store.config.min_bytes && !small_view {
        return keep(
            py,
            api,
            store,
            tensor,
            Some(&view),
            SMALL,
            Some(record),
            ordinal,
        );
    }
    if tensor
        .call_method0(pyo3::intern!(py, "is_neg"))?
        .is_truthy()?
    {
        return keep(
            py,
            api,
            store,
            tensor,
            Some(&view),
            NEGATED,
            Some(record),
            ordinal,
        );
    }
    let Some(dims) = super::axis::memory_order(&view) else {
        return keep(
            py,
            api,
            store,
            tensor,
            Some(&view),
            OVERLAP,
            Some(record),
            ordinal,
        );
    };
    let version = version_of(py, tensor);
    // Kept whole until its node is complete: a detached alias would cost more than the short-lived reference.
    let state = State::Pending(Kept {
        tensor: tensor.clone().unbind(),
        version,
        has_memory: true,
    });
    let slot = (!store.config.node_hook).then(|| pending::forward_slot(store, ordinal, &view));
    let saved = Bound::new(
        py,
        Saved::new(store.clone(), Some(record.0.clone()), state, slot),
    )?;
    let boundary = store.config.node_hook && pending::called_by_checkpoint(py)?;
    let item = Pending {
        saved: saved.clone().unbind(),
        view,
        dims,
        record: record.0,
        plain_bytes: record.1,
        ordinal,
        boundary,
        small_view: small_view && bytes < store.config.min_bytes,
        constant: grad_fn.is_none(),
        age: 0,
    };
    if store.config.node_hook {
        pending::push(item);
    } else {
        pending::encode_at_pack(py, item)?;
    }
    Ok(saved)
}

/// Whether the tensor is a parameter, a view, transpose or cast of one, or a leaf that asks for a gradient.
fn is_parameter_like(
    py: Python<'_>,
    api: &TorchApi,
    tensor: &Bound<'_, PyAny>,
    grad_fn: &Bound<'_, PyAny>,
) -> PyResult<bool> {
    if grad_fn.is_none() {
        if tensor
            .getattr(pyo3::intern!(py, "requires_grad"))?
            .is_truthy()?
        {
            return Ok(true);
        }
    } else if pending::leads_to_parameter(py, grad_fn)? {
        return Ok(true);
    }
    let base = tensor.getattr(pyo3::intern!(py, "_base"))?;
    Ok(!base.is_none() && base.get_type().as_ptr() == api.parameter.as_ptr())
}

fn running_backward(py: Python<'_>, api: &TorchApi) -> PyResult<bool> {
    let task: i64 = api.graph_task_id.bind(py).call0()?.extract()?;
    Ok(task != -1)
}

/// The tensor's version; `None` for tensors that have none.
fn version_of(py: Python<'_>, tensor: &Bound<'_, PyAny>) -> Option<i64> {
    tensor
        .getattr(pyo3::intern!(py, "_version"))
        .ok()?
        .extract()
        .ok()
}

/// Keeps a tensor as it is, with the check of its version that hooks would otherwise switch off.
#[expect(
    clippy::too_many_arguments,
    reason = "one call for all the ways that end here"
)]
fn keep<'py>(
    py: Python<'py>,
    api: &TorchApi,
    store: &Arc<Store>,
    tensor: &Bound<'py, PyAny>,
    view: Option<&TensorView>,
    reason: Keep,
    record: Option<(Arc<StorageRecord>, usize)>,
    ordinal: u64,
) -> PyResult<Bound<'py, Saved>> {
    let version = version_of(py, tensor);
    // A parameter is nobody's output: it can be kept itself. Anything else would close a cycle through its own node.
    let alias = if tensor.get_type().as_ptr() == api.parameter.as_ptr() {
        tensor.clone()
    } else {
        tensor.call_method0(pyo3::intern!(py, "detach"))?
    };
    let shape = match view {
        Some(view) => view.sizes.clone(),
        None => tensor
            .getattr(pyo3::intern!(py, "shape"))
            .and_then(|shape| shape.extract::<Vec<i64>>())
            .map_or_else(|_| Dims::new(&[]), |sizes| Dims::new(&sizes)),
    };
    let (record, plain_bytes) = record.map_or((None, 0), |(record, plain)| (Some(record), plain));
    let stored_bytes = match &record {
        Some(record) if record.aliases.load(Ordering::Relaxed) == 0 => record.nbytes,
        _ => 0,
    };
    let storage = record.as_ref().map_or(0, |record| record.address);
    let dtype = match view {
        Some(view) => Some(view.dtype),
        None => tensor
            .getattr(pyo3::intern!(py, "dtype"))
            .ok()
            .and_then(|dtype| api.dtype_of(&dtype)),
    };
    let state = State::Kept(Kept {
        tensor: alias.unbind(),
        version,
        has_memory: view.is_some_and(|view| view.numel() > 0),
    });
    let saved = Bound::new(py, Saved::new(store.clone(), record, state, None))?;
    let row = store.push_row(RowData {
        module: pending::unnamed(),
        op: pending::unnamed(),
        field: pending::unnamed(),
        shape: shape.clone(),
        dtype,
        class: reason.class,
        bits: 0,
        plain_bytes,
        stored_bytes,
        why: pending::text(reason.why),
        shared: false,
        storage,
    });
    if store.config.node_hook {
        pending::push_kept(&saved, row, shape, ordinal);
    }
    Ok(saved)
}

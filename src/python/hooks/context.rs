//! One `save_compressed`: its settings, its tables and counters, and the hook that autograd calls when it saves a tensor.

use super::super::tensor::{Dims, TensorView};
use super::super::torch_api::{DType, TorchApi};
use super::axis::Groups;
use super::blob::Blob;
use super::handle::{Kept, Saved, State};
use super::pending::{self, Pending};
use super::rows::{MAX_ROWS, RowData};
use super::slots;
use super::storage::{self, StorageRecord};
use crate::codec::Rounding;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

/// A small view of a storage this many times as large is copied, so that the storage can go.
const SMALL_VIEW_FACTOR: usize = 4;

/// Storages below which nothing is forgotten within a step.
const MIN_PRUNE: usize = 8192;

/// The settings, checked by the Python class.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    /// Nothing lossy.
    pub(crate) exact: bool,
    pub(crate) bits: u8,
    pub(crate) group_size: u16,
    pub(crate) rounding: Rounding,
    pub(crate) groups: Groups,
    pub(crate) min_bytes: usize,
    /// 0: as many as torch uses.
    pub(crate) threads: usize,
    /// Width of a checkpoint's boundary; `None`: exact.
    pub(crate) boundary: Option<u8>,
    /// Width for unknown readers; `None`: exact.
    pub(crate) unknown: Option<u8>,
    /// This torch tells the consumer in the forward.
    pub(crate) node_hook: bool,
    /// Tells stores of different models and settings apart in the table of slots.
    pub(crate) family: u64,
}

/// One set of elements: address, merged sizes and strides, dtype, version of the tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SetKey {
    pub(crate) data: usize,
    pub(crate) set: Vec<(usize, usize)>,
    pub(crate) dtype: DType,
    pub(crate) version: Option<i64>,
}

/// What is known of a storage.
pub(crate) struct Entry {
    pub(crate) record: Arc<StorageRecord>,
    pub(crate) blobs: Vec<(SetKey, Weak<Blob>)>,
    /// Slots whose tensors lived on it.
    pub(crate) slots: Vec<u64>,
}

#[derive(Default)]
pub(crate) struct Tables {
    pub(crate) storages: HashMap<usize, Entry>,
    pub(crate) rows: Vec<RowData>,
    /// Addresses of the storages of parameters and buffers.
    parameters: HashSet<usize>,
    /// Storages at which the next look for stale ones is due.
    prune_at: usize,
    /// Count and bytes now stored, by class.
    classes: BTreeMap<&'static str, (usize, usize)>,
}

#[derive(Default)]
struct Counters {
    packs: AtomicU64,
    unpacks: AtomicU64,
    handles: AtomicUsize,
    packed_bytes: AtomicUsize,
    kept_bytes: AtomicUsize,
    peak_bytes: AtomicUsize,
    plain_bytes: AtomicUsize,
    plain_peak: AtomicUsize,
    logical_bytes: AtomicUsize,
    unique_bytes: AtomicUsize,
    pack_nanos: AtomicU64,
    pack_source: AtomicU64,
    unpack_nanos: AtomicU64,
    unpack_source: AtomicU64,
    /// Position of the next saved tensor in the step.
    ordinal: AtomicU64,
    /// A save came since the storages were last looked at.
    unsettled: AtomicBool,
    key: AtomicU64,
}

/// The state that handles share with their context.
pub(crate) struct Store {
    pub(crate) config: Config,
    tables: Mutex<Tables>,
    counters: Counters,
}

/// splitmix64's finalizer: near inputs give outputs that share nothing.
pub(crate) fn mix64(mut x: u64) -> u64 {
    x ^= x >> 30;
    x = x.wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x ^= x >> 27;
    x = x.wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

impl Store {
    /// Runs `work` on the tables; it must not call Python.
    pub(crate) fn tables<T>(&self, work: impl FnOnce(&mut Tables) -> T) -> T {
        work(&mut self.tables.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// A key of the dither that no other tensor of this process has.
    pub(crate) fn next_key(&self, ordinal: u64) -> u64 {
        mix64(
            self.counters
                .key
                .load(Ordering::Relaxed)
                .wrapping_add(ordinal.wrapping_mul(0x9e37_79b9_7f4a_7c15)),
        )
    }

    pub(crate) fn handle_made(&self, storage: Option<&StorageRecord>, kept: bool) {
        self.counters.handles.fetch_add(1, Ordering::Relaxed);
        if let Some(record) = storage {
            if record.handles.fetch_add(1, Ordering::Relaxed) == 0
                && !record.alive_elsewhere.load(Ordering::Relaxed)
            {
                self.counters
                    .plain_bytes
                    .fetch_add(record.nbytes, Ordering::Relaxed);
            }
            if kept {
                self.handle_keeps(storage);
            }
        }
    }

    pub(crate) fn handle_keeps(&self, storage: Option<&StorageRecord>) {
        if let Some(record) = storage {
            if record.aliases.fetch_add(1, Ordering::Relaxed) == 0
                && !record.alive_elsewhere.load(Ordering::Relaxed)
            {
                self.counters
                    .kept_bytes
                    .fetch_add(record.nbytes, Ordering::Relaxed);
            }
        }
    }

    pub(crate) fn handle_dropped(&self, storage: Option<&StorageRecord>, kept: bool) {
        self.counters.handles.fetch_sub(1, Ordering::Relaxed);
        if let Some(record) = storage {
            let counts = !record.alive_elsewhere.load(Ordering::Relaxed);
            if kept && record.aliases.fetch_sub(1, Ordering::Relaxed) == 1 && counts {
                self.counters
                    .kept_bytes
                    .fetch_sub(record.nbytes, Ordering::Relaxed);
            }
            if record.handles.fetch_sub(1, Ordering::Relaxed) == 1 && counts {
                self.counters
                    .plain_bytes
                    .fetch_sub(record.nbytes, Ordering::Relaxed);
            }
        }
    }

    /// A blob's bytes or class changed.
    pub(crate) fn recount(&self, old: (usize, &'static str), new: (usize, &'static str)) {
        self.counters
            .packed_bytes
            .fetch_add(new.0, Ordering::Relaxed);
        self.counters
            .packed_bytes
            .fetch_sub(old.0, Ordering::Relaxed);
        self.tables(|tables| {
            if let Some((count, bytes)) = tables.classes.get_mut(old.1) {
                *count -= 1;
                *bytes -= old.0;
            }
            if new.1 != "none" {
                let (count, bytes) = tables.classes.entry(new.1).or_default();
                *count += 1;
                *bytes += new.0;
            }
        });
        if new.0 > old.0 {
            self.note_peak();
        }
    }

    fn note_peak(&self) {
        // Kept tensors are counted once it is known who else holds them.
        if !self.counters.unsettled.load(Ordering::Relaxed) {
            self.counters
                .peak_bytes
                .fetch_max(self.live_bytes(), Ordering::Relaxed);
        } else {
            self.counters.peak_bytes.fetch_max(
                self.counters.packed_bytes.load(Ordering::Relaxed),
                Ordering::Relaxed,
            );
        }
    }

    fn live_bytes(&self) -> usize {
        self.counters.packed_bytes.load(Ordering::Relaxed)
            + self.counters.kept_bytes.load(Ordering::Relaxed)
    }

    pub(crate) fn packed(&self, source: usize, took: Duration) {
        self.counters
            .pack_source
            .fetch_add(source as u64, Ordering::Relaxed);
        self.counters
            .pack_nanos
            .fetch_add(nanos(took), Ordering::Relaxed);
    }

    pub(crate) fn unpacked(&self, source: usize, took: Duration) {
        self.counters
            .unpack_source
            .fetch_add(source as u64, Ordering::Relaxed);
        self.counters
            .unpack_nanos
            .fetch_add(nanos(took), Ordering::Relaxed);
    }

    /// Counts an unpack; the first one after saves looks at which storages somebody else holds.
    pub(crate) fn note_unpack(&self, py: Python<'_>, api: &TorchApi) -> PyResult<()> {
        self.counters.unpacks.fetch_add(1, Ordering::Relaxed);
        if self.counters.unsettled.load(Ordering::Relaxed) {
            pending::flush(py)?;
            self.settle(py, api)?;
        }
        Ok(())
    }

    /// Finds out which storages live without us: plain PyTorch would not hold them for backward alone.
    pub(crate) fn settle(&self, py: Python<'_>, api: &TorchApi) -> PyResult<()> {
        let here = std::thread::current().id();
        let open: Vec<(Arc<StorageRecord>, Vec<u64>)> = self.tables(|tables| {
            tables
                .storages
                .values()
                .filter(|entry| {
                    let record = &entry.record;
                    record.thread == here
                        && record.handles.load(Ordering::Relaxed) > 0
                        && !record.settled.load(Ordering::Relaxed)
                })
                .map(|entry| (entry.record.clone(), entry.slots.clone()))
                .collect()
        });
        let mut found_alive = HashSet::new();
        for (record, slots) in open {
            let alive = record.held_elsewhere(py, api)?;
            record.settled.store(true, Ordering::Relaxed);
            if alive && !record.alive_elsewhere.swap(true, Ordering::Relaxed) {
                self.counters
                    .plain_bytes
                    .fetch_sub(record.nbytes, Ordering::Relaxed);
                if record.aliases.load(Ordering::Relaxed) > 0 {
                    self.counters
                        .kept_bytes
                        .fetch_sub(record.nbytes, Ordering::Relaxed);
                }
                found_alive.insert(record.address);
            }
            pending::note_alive(&slots, alive);
        }
        if !found_alive.is_empty() {
            self.tables(|tables| {
                for row in tables
                    .rows
                    .iter_mut()
                    .filter(|row| found_alive.contains(&row.storage))
                {
                    row.plain_bytes = 0;
                    if row.bits == 0 {
                        row.stored_bytes = 0;
                        row.why = pending::text("it lives anyway: somebody else holds it");
                    }
                }
            });
        }
        self.counters.unsettled.store(false, Ordering::Relaxed);
        self.counters.plain_peak.fetch_max(
            self.counters.plain_bytes.load(Ordering::Relaxed),
            Ordering::Relaxed,
        );
        self.note_peak();
        Ok(())
    }

    /// A step begins where nothing of the last one is left: rows and positions start anew.
    fn begin_step(&self, py: Python<'_>, api: &TorchApi) {
        self.counters.ordinal.store(0, Ordering::Relaxed);
        self.counters.logical_bytes.store(0, Ordering::Relaxed);
        self.counters.unique_bytes.store(0, Ordering::Relaxed);
        let stale = self.tables(|tables| {
            tables.rows.clear();
            let stale: Vec<usize> = tables
                .storages
                .iter()
                .filter(|(_, entry)| Arc::strong_count(&entry.record) == 1)
                .map(|(address, _)| *address)
                .collect();
            stale
                .iter()
                .filter_map(|address| tables.storages.remove(address))
                .collect::<Vec<Entry>>()
        });
        for entry in stale {
            entry.record.release(py, api);
        }
    }

    /// Forgets storages without handles when there are many, for graphs that never go away whole.
    fn prune(&self, py: Python<'_>) -> PyResult<()> {
        let stale = self.tables(|tables| {
            if tables.storages.len() < tables.prune_at.max(MIN_PRUNE) {
                return Vec::new();
            }
            let stale: Vec<usize> = tables
                .storages
                .iter()
                .filter(|(_, entry)| Arc::strong_count(&entry.record) == 1)
                .map(|(address, _)| *address)
                .collect();
            let stale: Vec<Entry> = stale
                .iter()
                .filter_map(|address| tables.storages.remove(address))
                .collect();
            tables.prune_at = 2 * tables.storages.len();
            stale
        });
        let api = TorchApi::get(py)?;
        for entry in stale {
            entry.record.release(py, api);
        }
        Ok(())
    }

    /// The record of a tensor's storage, and the bytes that it adds to what plain PyTorch holds.
    pub(crate) fn record(
        &self,
        storage: &Bound<'_, PyAny>,
        address: usize,
    ) -> PyResult<(Arc<StorageRecord>, usize)> {
        if let Some(record) = self.tables(|tables| {
            tables
                .storages
                .get(&address)
                .map(|entry| entry.record.clone())
        }) {
            let first = record.handles.load(Ordering::Relaxed) == 0;
            if !record.alive_elsewhere.load(Ordering::Relaxed) {
                record.settled.store(false, Ordering::Relaxed);
            }
            let added = if first { record.nbytes } else { 0 };
            return Ok((record, added));
        }
        self.prune(storage.py())?;
        let record = Arc::new(StorageRecord::new(storage)?);
        let entry = Entry {
            record: record.clone(),
            blobs: Vec::new(),
            slots: Vec::new(),
        };
        self.tables(|tables| tables.storages.insert(address, entry));
        let added = record.nbytes;
        Ok((record, added))
    }

    /// Adds a row to the report; `None` where there are too many.
    pub(crate) fn push_row(&self, row: RowData) -> Option<usize> {
        self.tables(|tables| {
            (tables.rows.len() < MAX_ROWS).then(|| {
                tables.rows.push(row);
                tables.rows.len() - 1
            })
        })
    }

    /// Changes a row that was added in this step.
    pub(crate) fn edit_row(&self, row: Option<usize>, edit: impl FnOnce(&mut RowData)) {
        if let Some(row) = row {
            self.tables(|tables| {
                if let Some(row) = tables.rows.get_mut(row) {
                    edit(row);
                }
            });
        }
    }

    pub(crate) fn add_unique(&self, bytes: usize) {
        self.counters
            .unique_bytes
            .fetch_add(bytes, Ordering::Relaxed);
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

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
            store: Arc::new(Store {
                config,
                tables: Mutex::new(Tables::default()),
                counters: Counters::default(),
            }),
        })
    }

    /// Begins a context on this thread: `key` seeds the noise, `parameters` are storages that live anyway.
    fn enter(&self, py: Python<'_>, key: u64, parameters: Vec<usize>) -> PyResult<()> {
        let api = TorchApi::get(py)?;
        self.store.counters.key.store(mix64(key), Ordering::Relaxed);
        if self.store.counters.handles.load(Ordering::Relaxed) == 0 {
            self.store.begin_step(py, api);
        }
        self.store
            .tables(|tables| tables.parameters = parameters.into_iter().collect());
        Ok(())
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
        stats.set_item("peak_bytes", load(&counters.peak_bytes))?;
        stats.set_item("plain_bytes", load(&counters.plain_bytes))?;
        stats.set_item("plain_peak_bytes", load(&counters.plain_peak))?;
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
        store.begin_step(py, api);
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
    let Some(view) = TensorView::read(py, api, tensor)?
        .filter(|view| api.dtype_object(py, view.dtype).is_some())
    else {
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

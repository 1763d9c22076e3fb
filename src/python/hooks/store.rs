//! What the handles of one `save_compressed` share: its settings, tables and counters.

use super::super::torch_api::{DType, TorchApi};
use super::axis::Groups;
use super::blob::Blob;
use super::pending;
use super::rows::{MAX_ROWS, RowData};
use super::storage::StorageRecord;
use crate::codec::Rounding;
use crate::kernels::rng::mix64;
use pyo3::prelude::*;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

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
    pub(super) parameters: HashSet<usize>,
    /// Storages at which the next look for stale ones is due.
    prune_at: usize,
    /// Count and bytes now stored, by class.
    pub(super) classes: BTreeMap<&'static str, (usize, usize)>,
}

#[derive(Default)]
pub(super) struct Counters {
    pub(super) packs: AtomicU64,
    pub(super) unpacks: AtomicU64,
    pub(super) handles: AtomicUsize,
    pub(super) packed_bytes: AtomicUsize,
    pub(super) kept_bytes: AtomicUsize,
    pub(super) peak_bytes: AtomicUsize,
    pub(super) plain_bytes: AtomicUsize,
    pub(super) plain_peak: AtomicUsize,
    pub(super) logical_bytes: AtomicUsize,
    pub(super) unique_bytes: AtomicUsize,
    pub(super) pack_nanos: AtomicU64,
    pub(super) pack_source: AtomicU64,
    pub(super) unpack_nanos: AtomicU64,
    pub(super) unpack_source: AtomicU64,
    /// Position of the next saved tensor in the step.
    pub(super) ordinal: AtomicU64,
    /// A save came since the storages were last looked at.
    pub(super) unsettled: AtomicBool,
    /// Seeds the noise of this entry.
    pub(super) key: AtomicU64,
    /// Keys drawn from it.
    pub(super) draws: AtomicU64,
}

/// The state that handles share with their context.
pub(crate) struct Store {
    pub(crate) config: Config,
    tables: Mutex<Tables>,
    pub(super) counters: Counters,
}

impl Store {
    /// An empty store.
    pub(super) fn new(config: Config) -> Store {
        Store {
            config,
            tables: Mutex::default(),
            counters: Counters::default(),
        }
    }

    /// Runs `work` on the tables; it must not call Python.
    pub(crate) fn tables<T>(&self, work: impl FnOnce(&mut Tables) -> T) -> T {
        work(&mut self.tables.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// A key of the dither that no other tensor of this process has; never the same again, however many steps a context spans.
    pub(crate) fn next_key(&self) -> u64 {
        let draw = self.counters.draws.fetch_add(1, Ordering::Relaxed);
        let key = self.counters.key.load(Ordering::Relaxed);
        mix64(key.wrapping_add(draw.wrapping_mul(0x9e37_79b9_7f4a_7c15)))
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
        if let Some(record) = storage
            && record.aliases.fetch_add(1, Ordering::Relaxed) == 0
            && !record.alive_elsewhere.load(Ordering::Relaxed)
        {
            self.counters
                .kept_bytes
                .fetch_add(record.nbytes, Ordering::Relaxed);
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

    pub(super) fn live_bytes(&self) -> usize {
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
                .values_mut()
                .filter(|entry| {
                    let record = &entry.record;
                    record.thread == here
                        && record.handles.load(Ordering::Relaxed) > 0
                        && !record.settled.load(Ordering::Relaxed)
                })
                .map(|entry| (entry.record.clone(), std::mem::take(&mut entry.slots)))
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
    pub(super) fn begin_step(&self) {
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
        drop(stale);
    }

    /// Forgets storages without handles when there are many, for graphs that never go away whole.
    fn prune(&self) {
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
        drop(stale);
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
            if first {
                // With no handle nothing of it is counted: who else holds it is asked anew.
                record.alive_elsewhere.store(false, Ordering::Relaxed);
            }
            record.settled.store(false, Ordering::Relaxed);
            let added = if first { record.nbytes } else { 0 };
            return Ok((record, added));
        }
        self.prune();
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

//! The stored form of one set of elements of a storage, shared by every handle on it.
//!
//! A blob has parts: a value code, masks, a lossless class. A reader that needs more than the present parts adds one, from
//! the live tensor that it passes to `pack`; the handles never change.

use super::consumer::Kind;
use super::slots;
use super::storage::StorageRecord;
use super::store::Store;
use crate::codec::{Encoded, Geometry, Layout, ReadMode};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// A question about elements that a mask answers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MaskKey {
    pub(crate) kind: Kind,
    pub(crate) lo: f32,
    pub(crate) hi: f32,
}

impl PartialEq for MaskKey {
    /// By bits: a bound that is NaN (nothing is inside) asks the same question as itself.
    fn eq(&self, other: &MaskKey) -> bool {
        self.kind == other.kind
            && self.lo.to_bits() == other.lo.to_bits()
            && self.hi.to_bits() == other.hi.to_bits()
    }
}

/// What a handle reads of its blob.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Want {
    /// Values, as a known reader takes them.
    Value,
    /// Values whose groups hold elements of one row, at most so many: for readers that weigh each row by its own scale.
    Rows(u16),
    /// Values for a reader that may look at signs: nonzeros stay nonzero.
    UnknownValue,
    /// The answer to a question.
    Mask(MaskKey),
    /// Every bit.
    Lossless,
}

/// The parts; each only ever appears or is replaced by one that serves all its readers.
#[derive(Debug, Default)]
pub(crate) struct Parts {
    pub(crate) value: Option<Arc<Encoded>>,
    /// The value's zero plane answers "above 0": no element is negative.
    pub(crate) value_answers: Option<MaskKey>,
    /// A mask's question "above 0" about elements of which none is negative: a zero plane would answer it.
    pub(crate) never_negative: Option<MaskKey>,
    pub(crate) masks: Vec<(MaskKey, Arc<Encoded>)>,
    pub(crate) lossless: Option<Arc<Encoded>>,
}

impl Parts {
    fn all(&self) -> impl Iterator<Item = &Arc<Encoded>> {
        self.value
            .iter()
            .chain(self.lossless.iter())
            .chain(self.masks.iter().map(|(_, mask)| mask))
    }

    /// The part that says most.
    fn leading(&self) -> Option<&Arc<Encoded>> {
        self.lossless
            .as_ref()
            .or(self.value.as_ref())
            .or(self.masks.first().map(|(_, mask)| mask))
    }

    fn bytes(&self) -> usize {
        self.all().map(|part| part.stored_bytes()).sum()
    }

    /// The part that serves a reader, if there is one; `bits` is the width that a value reader needs.
    pub(crate) fn serve(&self, want: Want, bits: u8) -> Option<(Arc<Encoded>, ReadMode)> {
        if let Some(part) = &self.lossless {
            return Some((part.clone(), ReadMode::Values));
        }
        match want {
            Want::Lossless => None,
            Want::Value | Want::Rows(_) | Want::UnknownValue => {
                let part = self
                    .value
                    .as_ref()
                    .filter(|part| part.bits() >= bits && fits(part, want))?;
                let mode = if want != Want::UnknownValue {
                    ReadMode::Values
                } else {
                    ReadMode::ValuesPositive
                };
                Some((part.clone(), mode))
            }
            Want::Mask(key) => {
                if self.value_answers == Some(key) {
                    return self
                        .value
                        .as_ref()
                        .map(|part| (part.clone(), ReadMode::Mask));
                }
                self.masks
                    .iter()
                    .find(|(known, _)| *known == key)
                    .map(|(_, part)| (part.clone(), ReadMode::Values))
            }
        }
    }
}

/// Whether the groups of a value code are what a reader needs.
fn fits(part: &Encoded, want: Want) -> bool {
    match (want, part.value_spec()) {
        // Both sizes are powers of two, so the smaller divides the larger and with it the row.
        (Want::Rows(most), Some(spec)) => {
            matches!(spec.geometry, Geometry::Row { .. }) && spec.group_size <= most
        }
        _ => true,
    }
}

/// See the module.
pub(crate) struct Blob {
    parts: Mutex<Parts>,
    /// The elements in memory order.
    pub(crate) layout: Layout,
    pub(crate) store: Arc<Store>,
    /// Keeps the storage's weak reference, so that its address stays its own.
    pub(crate) _storage: Arc<StorageRecord>,
    /// The report's row of the first handle.
    pub(crate) row: Option<usize>,
    /// The slot of the first handle.
    pub(crate) first_slot: Option<u64>,
    /// A few elements' hash, to notice writes that no version counts.
    pub(crate) sample: u64,
    /// Values were stored because the slot's past promised a reader of them.
    predicted: bool,
    /// A reader of values came.
    value_read: AtomicBool,
    /// A reader of rows came.
    rows_apart: AtomicBool,
    /// Bytes and class as they were last counted.
    counted: Mutex<(usize, &'static str)>,
}

impl Blob {
    pub(crate) fn new(
        store: Arc<Store>,
        storage: Arc<StorageRecord>,
        layout: Layout,
        row: Option<usize>,
        first_slot: Option<u64>,
        predicted: bool,
        sample: u64,
    ) -> Blob {
        Blob {
            parts: Mutex::new(Parts::default()),
            layout,
            store,
            _storage: storage,
            row,
            first_slot,
            predicted,
            sample,
            value_read: AtomicBool::new(false),
            rows_apart: AtomicBool::new(false),
            counted: Mutex::new((0, "none")),
        }
    }

    /// The part that serves a reader, if there is one.
    pub(crate) fn serve(&self, want: Want, bits: u8) -> Option<(Arc<Encoded>, ReadMode)> {
        self.parts
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .serve(want, bits)
    }

    /// Notes that a reader of this kind has come.
    pub(crate) fn note_reader(&self, want: Want) {
        if matches!(want, Want::Rows(_)) {
            self.rows_apart.store(true, Ordering::Relaxed);
        }
        if !matches!(want, Want::Mask(_)) {
            self.value_read.store(true, Ordering::Relaxed);
        }
    }

    /// Class and bits of the leading part.
    pub(crate) fn class_and_bits(&self) -> (&'static str, u8) {
        let parts = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
        parts
            .leading()
            .map_or(("none", 0), |part| (part.class().name(), part.bits()))
    }

    /// The question that a value code with a zero plane could answer instead of the mask that is stored.
    pub(crate) fn answerable(&self) -> Option<MaskKey> {
        let parts = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
        parts.value_answers.or(parts.never_negative)
    }

    /// Bits of the value code that is there; 0 where there is none.
    pub(crate) fn value_bits(&self) -> u8 {
        let parts = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
        parts.value.as_ref().map_or(0, |part| part.bits())
    }

    /// Whether some reader needs rows apart: every later value code must keep them so.
    pub(crate) fn rows_apart(&self) -> bool {
        self.rows_apart.load(Ordering::Relaxed)
    }

    /// Changes the parts and recounts; gives the blob's bytes, class and bits afterwards.
    pub(crate) fn update(&self, change: impl FnOnce(&mut Parts)) -> (usize, &'static str, u8) {
        let (bytes, class, bits);
        {
            let mut parts = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
            change(&mut parts);
            bytes = parts.bytes();
            let leading = parts.leading();
            class = leading.map_or("none", |part| part.class().name());
            bits = leading.map_or(0, |part| part.bits());
        }
        let mut counted = self.counted.lock().unwrap_or_else(PoisonError::into_inner);
        self.store.recount(*counted, (bytes, class));
        *counted = (bytes, class);
        (bytes, class, bits)
    }
}

impl Drop for Blob {
    fn drop(&mut self) {
        let counted = *self.counted.lock().unwrap_or_else(PoisonError::into_inner);
        self.store.recount(counted, (0, "none"));
        if let (true, false, Some(slot)) = (
            self.predicted,
            self.value_read.load(Ordering::Relaxed),
            self.first_slot,
        ) {
            slots::edit(slot, |slot| slot.value_too = None);
        }
    }
}

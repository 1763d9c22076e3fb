//! What one step teaches the next: a slot is one saved tensor of a model, known again by position, reader and shape.
//!
//! A wrong guess costs bytes or a second encoding, never a wrong gradient: every use is checked against the reader that
//! really comes.

use super::consumer::{NodeType, Rule};
use std::collections::HashMap;
use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::sync::{Arc, Mutex, PoisonError};

/// What is known of a slot.
#[derive(Clone, Default)]
pub(crate) struct Slot {
    /// The module whose forward saves it.
    pub(crate) module: Option<Arc<str>>,
    /// Its storage lived on without us: there is nothing to save.
    pub(crate) alive: bool,
    /// A later reader of the same elements wanted values.
    pub(crate) value_too: Option<ValueNeed>,
    /// The reader, on a torch that tells it in backward only: node type, index of the field, and the rule that the
    /// node's attributes made of the field's.
    pub(crate) reader: Option<(Arc<NodeType>, usize, Arc<Rule>)>,
}

/// A value reader's needs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ValueNeed {
    pub(crate) bits: u8,
    pub(crate) axis: super::axis::Axis,
}

/// Slots kept at most; a program of ever new shapes starts anew.
const MAX_SLOTS: usize = 1 << 16;

static SLOTS: Mutex<Option<HashMap<u64, Slot>>> = Mutex::new(None);

/// A slot's number.
pub(crate) fn number(parts: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    parts.hash(&mut hasher);
    hasher.finish()
}

/// What is known of a slot; `None` at its first appearance.
pub(crate) fn get(slot: u64) -> Option<Slot> {
    SLOTS
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .as_ref()?
        .get(&slot)
        .cloned()
}

/// Changes what is known of a slot. What `edit` returns, and a table that grew too large, dies with no lock held: they
/// may hold Python objects.
pub(crate) fn edit<R>(slot: u64, edit: impl FnOnce(&mut Slot) -> R) {
    let (old, replaced) = {
        let mut slots = SLOTS.lock().unwrap_or_else(PoisonError::into_inner);
        let slots = slots.get_or_insert_with(HashMap::new);
        let full = slots.len() >= MAX_SLOTS && !slots.contains_key(&slot);
        let old = full.then(|| std::mem::take(slots));
        (old, edit(slots.entry(slot).or_default()))
    };
    drop((old, replaced));
}

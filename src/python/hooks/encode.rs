//! From a claimed tensor to its stored form: the rule, the width, what is already stored, and the codec's call.

use super::super::tensor::{self, Dims, TensorView};
use super::super::torch_api::TorchApi;
use super::axis::{self, Axis, Dim};
use super::blob::{Blob, MaskKey, Want};
use super::consumer::{Guard, Kind, NodeType, Rule};
use super::guard;
use super::handle::{Kept, Saved, Shape, State};
use super::part;
use super::pending::{self, Pending, text};
use super::rows::RowData;
use super::slots::{self, ValueNeed};
use super::store::{SetKey, Store};
use crate::codec::{Geometry, Layout};
use pyo3::prelude::*;
use std::sync::Arc;
use std::time::Instant;

/// A view that spans this many times its elements is not restored with its gaps.
const MAX_GAP_FACTOR: usize = 4;
/// Fields that hold a weight: a constant there is a frozen one.
const WEIGHT_FIELDS: [&str; 2] = ["weight", "mat2"];

/// A waiting tensor with its reader, where one is known.
pub(crate) struct Claim {
    pub(crate) item: Pending,
    pub(crate) reader: Option<(Arc<NodeType>, usize)>,
    pub(crate) rule: Arc<Rule>,
}

/// What a claim comes down to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Need {
    Unused,
    Keep(&'static str),
    Lossless,
    Mask(MaskKey, bool),
    Value { bits: u8, want: Want },
}

/// Stores all tensors of one node; `node` is at hand where rules depend on its attributes.
pub(crate) fn encode(
    py: Python<'_>,
    mut claims: Vec<Claim>,
    node: Option<&Bound<'_, PyAny>>,
) -> PyResult<()> {
    let mut outcome = store_all(py, &mut claims, node);
    // Whatever could not be stored is kept: no handle may go on holding its own node's output.
    for claim in &claims {
        outcome = outcome.and(finish(py, claim));
    }
    outcome
}

fn store_all(
    py: Python<'_>,
    claims: &mut [Claim],
    node: Option<&Bound<'_, PyAny>>,
) -> PyResult<()> {
    let api = TorchApi::get(py)?;
    if let Some(node) = node {
        for claim in claims.iter_mut().filter(|claim| claim.rule.is_open()) {
            let (Some((node_type, field)), Some(dtype)) =
                (&claim.reader, api.dtype_object(py, claim.item.view.dtype))
            else {
                continue;
            };
            claim.rule = claim
                .rule
                .resolve(node, &node_type.fields[*field].name, dtype)?;
        }
    }
    for claim in claims.iter() {
        check_memory(py, api, claim)?;
    }
    let widths = guard::guarded_widths(py, claims)?;
    for (claim, width) in claims.iter().zip(widths) {
        encode_one(py, claim, width)?;
    }
    Ok(())
}

/// Settles a handle whose tensor no longer is the memory that it was when it was saved: `set_data`, `resize_` and the like
/// move it, and not all of them count as changes. Memory that is gone is kept, and backward says so; memory that was
/// replaced is lost.
fn check_memory(py: Python<'_>, api: &TorchApi, claim: &Claim) -> PyResult<()> {
    let saved = claim.item.saved.bind(py).get();
    let Some((tensor, version)) = pending_tensor(py, saved) else {
        return Ok(());
    };
    let then = &claim.item.view;
    match TensorView::read(py, api, &tensor)? {
        Some(now)
            if now.data == then.data && now.sizes == then.sizes && now.strides == then.strides =>
        {
            Ok(())
        }
        Some(_) => {
            let expected = version.unwrap_or(0);
            drop(saved.settle(State::Lost {
                found: expected + 1,
                expected,
            }));
            Ok(())
        }
        None => keep(py, saved, &tensor, version),
    }
}

/// A handle that is still pending keeps a detached alias.
fn finish(py: Python<'_>, claim: &Claim) -> PyResult<()> {
    let saved = claim.item.saved.bind(py).get();
    if let Some((tensor, version)) = pending_tensor(py, saved) {
        keep(py, saved, &tensor, version)?;
    }
    Ok(())
}

fn keep(
    py: Python<'_>,
    saved: &Saved,
    tensor: &Bound<'_, PyAny>,
    version: Option<i64>,
) -> PyResult<()> {
    let alias = tensor.call_method0(pyo3::intern!(py, "detach"))?;
    drop(saved.settle(State::Kept(Kept {
        tensor: alias.unbind(),
        version,
        has_memory: true,
    })));
    Ok(())
}

fn pending_tensor<'py>(py: Python<'py>, saved: &Saved) -> Option<(Bound<'py, PyAny>, Option<i64>)> {
    saved.look(|state| match state {
        State::Pending(kept) => Some((kept.tensor.bind(py).clone(), kept.version)),
        _ => None,
    })
}

/// The user's width with a rule's additions.
pub(super) fn rule_bits(store: &Store, rule: &Rule, plus: u8) -> u8 {
    (rule.bits.unwrap_or(store.config.bits) + plus)
        .max(rule.floor)
        .clamp(1, 8)
}

/// The codec's layout of dimensions in memory order.
pub(super) fn layout_of(dims: &[Dim]) -> Layout {
    let sizes: Vec<i64> = dims
        .iter()
        .map(|dim| i64::try_from(dim.size).unwrap_or(i64::MAX))
        .collect();
    let strides: Vec<i64> = dims
        .iter()
        .map(|dim| i64::try_from(dim.stride).unwrap_or(i64::MAX))
        .collect();
    Layout::from_strided(&sizes, &strides)
}

fn need_of(store: &Store, claim: &Claim, width: Option<Option<u8>>, alive: bool) -> Need {
    let (item, rule, config) = (&claim.item, &claim.rule, &store.config);
    if rule.kind == Kind::Unused {
        return Need::Unused;
    }
    if alive {
        return Need::Keep("it lives anyway: somebody else holds it");
    }
    let weight_field = |(node_type, field): &(Arc<NodeType>, usize)| {
        let field = &*node_type.fields[*field].name;
        WEIGHT_FIELDS.contains(&field)
            && (rule.guard != Guard::Bmm || item.view.sizes.as_slice().len() == 2)
    };
    if item.constant && claim.reader.as_ref().is_some_and(weight_field) {
        return Need::Keep("a constant operand (a frozen weight)");
    }
    if item.view.float_type().is_none() || config.exact || item.small_view {
        return Need::Lossless;
    }
    if rule.is_open() {
        // Its node's attributes are not at hand.
        return Need::Lossless;
    }
    if rule.unknown {
        // Without the node hook a reader that is not known yet will be, after its first backward.
        let final_word = config.node_hook || claim.reader.is_some();
        return match config.unknown {
            Some(bits) if final_word => Need::Value {
                bits,
                want: Want::UnknownValue,
            },
            _ => Need::Lossless,
        };
    }
    if rule.boundary {
        return match config.boundary {
            Some(bits) => Need::Value {
                bits,
                want: Want::Value,
            },
            None => Need::Lossless,
        };
    }
    let want = if rule.axis == Axis::Row {
        rows_want(store, item)
    } else {
        Want::Value
    };
    match rule.kind {
        Kind::Unused => Need::Unused,
        Kind::Exact => Need::Lossless,
        Kind::Value => match width {
            Some(None) => Need::Keep("no width up to 8 bits keeps this attention's logits stable"),
            Some(Some(bits)) => Need::Value { bits, want },
            None => Need::Value {
                bits: rule_bits(store, rule, rule.plus),
                want,
            },
        },
        Kind::Mask | Kind::Sign | Kind::Within | Kind::NotBeyond => {
            let [lo, hi] = rule.bounds;
            // Of this one reader it is known that no element is negative: a zero plane then answers "above 0".
            let relu = claim
                .reader
                .as_ref()
                .is_some_and(|(node, _)| &*node.name == "ReluBackward0");
            let never_negative = relu && rule.kind == Kind::Mask && lo == 0.0;
            Need::Mask(
                MaskKey {
                    kind: rule.kind,
                    lo,
                    hi,
                },
                never_negative,
            )
        }
    }
}

/// What a reader wants that weighs rows by their own scale: groups that fit a row, where rows are to be had.
fn rows_want(store: &Store, item: &Pending) -> Want {
    let (groups, size) = (store.config.groups, store.config.group_size);
    let ndim = item.view.sizes.as_slice().len();
    match axis::choose(&item.dims, ndim, Axis::Row, groups, size) {
        (Geometry::Row { .. }, fits, _) => Want::Rows(fits),
        _ => Want::Value,
    }
}

fn encode_one(py: Python<'_>, claim: &Claim, width: Option<Option<u8>>) -> PyResult<()> {
    let item = &claim.item;
    let saved = item.saved.bind(py).get();
    let store = &saved.store;
    let Some((tensor, version)) = pending_tensor(py, saved) else {
        return Ok(());
    };
    let (slot, op, field) = match &claim.reader {
        Some((node_type, index)) => (
            pending::slot_of(store, item.ordinal, node_type, *index, &item.view.sizes),
            node_type.name.clone(),
            node_type.fields[*index].name.clone(),
        ),
        None => {
            let slot = slots::number((
                store.config.family,
                item.ordinal,
                item.boundary,
                &item.view.sizes,
            ));
            let op = if item.boundary {
                text("checkpoint")
            } else {
                pending::unnamed()
            };
            (slot, op, text("input"))
        }
    };
    let mut row = RowData {
        module: pending::module_of(py, slot)?,
        op,
        field,
        shape: item.view.sizes.clone(),
        dtype: Some(item.view.dtype),
        class: "exact",
        bits: 0,
        plain_bytes: item.plain_bytes,
        stored_bytes: 0,
        why: claim.rule.why.clone(),
        shared: false,
        storage: item.record.address,
    };
    if let Some(expected) = version {
        let found: i64 = tensor.getattr(pyo3::intern!(py, "_version"))?.extract()?;
        if found != expected {
            drop(saved.settle(State::Lost { found, expected }));
            row.class = "lost";
            row.why = text(
                "modified in place before its node was complete: backward will raise PyTorch's own error",
            );
            store.push_row(row);
            return Ok(());
        }
    }
    let known = slots::get(slot).unwrap_or_default();
    store.tables(|tables| {
        if let Some(entry) = tables.storages.get_mut(&item.record.address) {
            entry.slots.push(slot);
        }
    });
    let need = need_of(store, claim, width, known.alive && item.constant);
    let shape = shape_of(item);
    let need = match need {
        Need::Lossless | Need::Mask(..) | Need::Value { .. } if kept_already(item) => {
            Need::Keep("its storage is kept as it is for another reader")
        }
        Need::Lossless if shape.compact && !item.small_view => {
            Need::Keep("a view with wide gaps, wanted exactly")
        }
        other => other,
    };
    match need {
        Need::Unused => {
            row.class = "unused";
            store.push_row(row);
            drop(saved.settle(State::Empty(shape)));
            return Ok(());
        }
        Need::Keep(why) => return keep_with_row(py, saved, &tensor, version, row, why, item),
        _ => {}
    }
    let want = match need {
        Need::Mask(key, _) => Want::Mask(key),
        Need::Value { want, .. } => want,
        _ => Want::Lossless,
    };
    let bits = if let Need::Value { bits, .. } = need {
        bits
    } else {
        0
    };
    let key = SetKey {
        data: item.view.data,
        set: axis::element_set(&item.dims),
        dtype: item.view.dtype,
        version,
    };
    let present = find_blob(store, item, &key);
    let sample = tensor::sample(&item.view, &item.dims);
    // PyTorch does not count writes through `.data` as changes; most of them show in a sample.
    let present = present.filter(|blob| blob.sample == sample);
    if let Some(blob) = &present
        && blob.serve(want, bits).is_some()
    {
        blob.note_reader(want);
        row.shared = true;
        (row.class, row.bits) = blob.class_and_bits();
        store.push_row(row);
        drop(saved.settle(State::Coded {
            blob: blob.clone(),
            want,
            bits,
            shape,
        }));
        return Ok(());
    }
    let started = Instant::now();
    let made = part::make_part(py, store, claim, need, present.as_deref(), &known)?;
    let bytes = item.elements() * item.view.dtype.size();
    store.packed(bytes, started.elapsed());
    let Some(made) = made else {
        // Where the policy asks for every bit, its reason says more than that no class fits.
        let why = if claim.rule.kind == Kind::Exact {
            claim.rule.why.clone()
        } else {
            text("no lossless class is smaller than the tensor")
        };
        return keep_with_row(py, saved, &tensor, version, row, &why, item);
    };
    if let Some(note) = made.note {
        row.why = text(note);
    }
    row.shared = present.is_some();
    let row_index = store.push_row(row);
    let blob = match present {
        Some(blob) => {
            if let (Need::Value { .. }, Some(first)) = (need, blob.first_slot) {
                let apart = blob.rows_apart() || matches!(want, Want::Rows(_));
                let need = ValueNeed {
                    bits: bits.max(blob.value_bits()),
                    axis: if apart { Axis::Row } else { claim.rule.axis },
                };
                slots::edit(first, |slot| slot.value_too = Some(need));
            }
            blob
        }
        None => {
            let blob = Arc::new(Blob::new(
                store.clone(),
                item.record.clone(),
                layout_of(&item.dims),
                row_index,
                Some(slot),
                made.predicted,
                sample,
            ));
            store.add_unique(bytes);
            let weak = Arc::downgrade(&blob);
            store.tables(|tables| {
                if let Some(entry) = tables.storages.get_mut(&item.record.address) {
                    entry
                        .blobs
                        .retain(|(known, blob)| blob.strong_count() > 0 && *known != key);
                    entry.blobs.push((key, weak));
                }
            });
            blob
        }
    };
    let (stored, class, coded_bits) = blob.update(|parts| made.put(parts, need));
    blob.note_reader(want);
    store.edit_row(blob.row, |row| {
        row.stored_bytes = stored;
        row.class = class;
        row.bits = coded_bits;
    });
    if row_index != blob.row {
        store.edit_row(row_index, |row| {
            row.class = class;
            row.bits = coded_bits;
        });
    }
    drop(saved.settle(State::Coded {
        blob,
        want,
        bits,
        shape,
    }));
    Ok(())
}

/// Whether the whole storage is kept as it is by a handle, so that storing it again would only add bytes.
fn kept_already(item: &Pending) -> bool {
    item.record
        .aliases
        .load(std::sync::atomic::Ordering::Relaxed)
        > 0
        && !item.small_view
}

fn keep_with_row(
    py: Python<'_>,
    saved: &Saved,
    tensor: &Bound<'_, PyAny>,
    version: Option<i64>,
    mut row: RowData,
    why: &str,
    item: &Pending,
) -> PyResult<()> {
    row.shared = kept_already(item);
    row.stored_bytes = if row.shared { 0 } else { item.record.nbytes };
    row.why = text(why);
    saved.store.push_row(row);
    keep(py, saved, tensor, version)
}

fn find_blob(store: &Store, item: &Pending, key: &SetKey) -> Option<Arc<Blob>> {
    store.tables(|tables| {
        let entry = tables.storages.get(&item.record.address)?;
        entry
            .blobs
            .iter()
            .find(|(known, _)| known == key)
            .and_then(|(_, blob)| blob.upgrade())
    })
}

/// How the decoded tensor is laid out.
fn shape_of(item: &Pending) -> Shape {
    let view = &item.view;
    let (sizes, strides) = (view.sizes.as_slice(), view.strides.as_slice());
    let n: usize = item.dims.iter().map(|dim| dim.size).product();
    let span = 1 + item
        .dims
        .iter()
        .map(|dim| (dim.size - 1) * dim.stride)
        .sum::<usize>();
    let expanded = sizes
        .iter()
        .zip(strides)
        .any(|(&size, &stride)| size > 1 && stride == 0);
    let compact = span / MAX_GAP_FACTOR > n && !expanded;
    let allocate = if compact {
        // Dense, in the same order of dimensions.
        let mut dense = vec![1i64; sizes.len()];
        let mut reach = 1i64;
        for dim in item.dims.iter().rev() {
            dense[dim.logical] = reach;
            reach *= i64::try_from(dim.size).unwrap_or(i64::MAX);
        }
        Some((view.sizes.clone(), Dims::new(&dense)))
    } else if expanded {
        let one: Vec<i64> = sizes
            .iter()
            .zip(strides)
            .map(|(&size, &stride)| if stride == 0 { size.min(1) } else { size })
            .collect();
        Some((Dims::new(&one), view.strides.clone()))
    } else {
        None
    };
    Shape {
        sizes: view.sizes.clone(),
        strides: view.strides.clone(),
        allocate,
        dtype: view.dtype,
        compact,
    }
}

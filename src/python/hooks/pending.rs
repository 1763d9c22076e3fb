//! Tensors that wait for the node that saves them.
//!
//! When autograd saves a tensor nobody knows whether a node will follow: the boundary of a checkpoint has none, an
//! operation that raises leaves its saves behind, and a save can come before the nodes of other operations. So a tensor
//! waits on a list of its thread until a node claims it (by the identity of its handle), until it turns out to be a
//! checkpoint's boundary, or until the context ends.

use super::super::tensor::{Dims, TensorView};
use super::super::torch_api::TorchApi;
use super::axis::Dim;
use super::consumer::{self, Field, NodeType, Rule};
use super::encode::{self, Claim};
use super::handle::{Saved, State};
use super::slots;
use super::storage::StorageRecord;
use super::store::Store;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyList, PyTuple};
use std::cell::RefCell;
use std::sync::{Arc, LazyLock};

/// Nodes that may come between a save and its own node; later the reader counts as unknown.
const MAX_AGE: u8 = 32;
/// Views and casts that are followed from a tensor to a parameter.
const MAX_HOPS: usize = 6;

/// A tensor that waits.
pub(crate) struct Pending {
    pub(crate) saved: Py<Saved>,
    pub(crate) view: TensorView,
    /// The view's dimensions in memory order.
    pub(crate) dims: Vec<Dim>,
    pub(crate) record: Arc<StorageRecord>,
    /// Bytes that this save adds to what plain PyTorch holds.
    pub(crate) plain_bytes: usize,
    pub(crate) ordinal: u64,
    /// Saved by a checkpoint itself.
    pub(crate) boundary: bool,
    /// Below `min_bytes`, on a storage so large that a copy frees memory.
    pub(crate) small_view: bool,
    /// It is nobody's output: an input, a mask, a statistic, a frozen weight.
    pub(crate) constant: bool,
    pub(crate) age: u8,
}

impl Pending {
    /// Distinct elements: expanded ones count once.
    pub(crate) fn elements(&self) -> usize {
        self.dims.iter().map(|dim| dim.size).product()
    }
}

/// A tensor that is kept as it is and waits only for its name in the report.
struct Named {
    saved: usize,
    store: Arc<Store>,
    row: Option<usize>,
    shape: Dims,
    ordinal: u64,
    age: u8,
}

#[derive(Default)]
struct Lists {
    pending: Vec<Pending>,
    named: Vec<Named>,
}

thread_local! {
    static LISTS: RefCell<Lists> = RefCell::new(Lists::default());
}

static UNNAMED: LazyLock<Arc<str>> = LazyLock::new(|| Arc::from("?"));

/// The name of what is not known.
pub(crate) fn unnamed() -> Arc<str> {
    UNNAMED.clone()
}

/// A shared text.
pub(crate) fn text(text: &str) -> Arc<str> {
    Arc::from(text)
}

/// Puts a tensor on this thread's list.
pub(crate) fn push(item: Pending) {
    LISTS.with_borrow_mut(|lists| lists.pending.push(item));
}

/// Puts a kept tensor on this thread's list, for its name.
pub(crate) fn push_kept(saved: &Bound<'_, Saved>, row: Option<usize>, shape: Dims, ordinal: u64) {
    let saved_at = saved.as_ptr() as usize;
    let store = saved.get().store.clone();
    LISTS.with_borrow_mut(|lists| {
        lists.named.push(Named {
            saved: saved_at,
            store,
            row,
            shape,
            ordinal,
            age: 0,
        })
    });
}

/// Called by autograd with every node that it completes on this thread.
#[pyfunction]
pub(crate) fn on_node(py: Python<'_>, node: &Bound<'_, PyAny>) -> PyResult<()> {
    let mut lists = LISTS.take();
    if lists.pending.is_empty() && lists.named.is_empty() {
        return Ok(());
    }
    let outcome = claim(py, node, &mut lists);
    // What came in meanwhile (nothing should) is kept behind what was there.
    LISTS.with_borrow_mut(|current| {
        lists.pending.append(&mut current.pending);
        lists.named.append(&mut current.named);
        *current = lists;
    });
    outcome
}

/// Gives the node what it saved, and decides on what no node will claim.
fn claim(py: Python<'_>, node: &Bound<'_, PyAny>, lists: &mut Lists) -> PyResult<()> {
    let node_type = consumer::node_type(node)?;
    let mut claims: Vec<Claim> = Vec::new();
    for (index, field) in node_type.fields.iter().enumerate() {
        let raw = node.getattr(field.attribute.bind(py))?;
        if raw.is_none() {
            continue;
        }
        if let Ok(several) = raw.cast::<PyTuple>() {
            for saved in several.iter() {
                match_one(py, &saved, &node_type, index, lists, &mut claims)?;
            }
        } else if let Ok(several) = raw.cast::<PyList>() {
            for saved in several.iter() {
                match_one(py, &saved, &node_type, index, lists, &mut claims)?;
            }
        } else {
            match_one(py, &raw, &node_type, index, lists, &mut claims)?;
        }
    }
    let outcome = if claims.is_empty() {
        Ok(())
    } else {
        encode::encode(py, claims, Some(node))
    };
    lists.named.retain_mut(|item| {
        item.age += 1;
        item.age <= MAX_AGE
    });
    let mut unclaimed = Vec::new();
    let mut index = 0;
    while index < lists.pending.len() {
        let item = &mut lists.pending[index];
        item.age += 1;
        if item.boundary || item.age > MAX_AGE || only_ours(&item.saved) {
            unclaimed.push(lists.pending.remove(index));
        } else {
            index += 1;
        }
    }
    outcome.and(resolve(py, unclaimed))
}

/// Looks for a node's saved variable among the waiting tensors.
fn match_one(
    py: Python<'_>,
    saved: &Bound<'_, PyAny>,
    node_type: &Arc<NodeType>,
    field: usize,
    lists: &mut Lists,
    claims: &mut Vec<Claim>,
) -> PyResult<()> {
    if saved.is_none() {
        return Ok(());
    }
    let data = saved.getattr(pyo3::intern!(py, "data"))?;
    let address = data.as_ptr() as usize;
    if let Some(at) = lists
        .pending
        .iter()
        .position(|item| item.saved.as_ptr() as usize == address)
    {
        let item = lists.pending.remove(at);
        claims.push(Claim {
            item,
            reader: Some((node_type.clone(), field)),
            rule: node_type.fields[field].rule.clone(),
        });
    } else if let Some(at) = lists.named.iter().position(|item| item.saved == address) {
        let item = lists.named.remove(at);
        let slot = slot_of(&item.store, item.ordinal, node_type, field, &item.shape);
        let module = module_of(py, slot)?;
        item.store.edit_row(item.row, |row| {
            row.op = node_type.name.clone();
            row.field = node_type.fields[field].name.clone();
            row.module = module;
        });
    }
    Ok(())
}

/// The slot of a tensor that a node has claimed.
pub(crate) fn slot_of(
    store: &Store,
    ordinal: u64,
    node_type: &NodeType,
    field: usize,
    shape: &Dims,
) -> u64 {
    slots::number((store.config.family, ordinal, &node_type.name, field, shape))
}

/// The slot of a tensor whose reader is not known in the forward.
pub(crate) fn forward_slot(store: &Store, ordinal: u64, view: &TensorView) -> u64 {
    slots::number((
        store.config.family,
        ordinal,
        "forward",
        view.dtype,
        &view.sizes,
    ))
}

/// The module whose forward is running, looked up at a slot's first appearance only.
pub(crate) fn module_of(py: Python<'_>, slot: u64) -> PyResult<Arc<str>> {
    if let Some(module) = slots::get(slot).and_then(|known| known.module) {
        return Ok(module);
    }
    let path: String = py
        .import("daf_rs._modules")?
        .getattr("current_module_path")?
        .call0()?
        .extract()?;
    let path: Arc<str> = path.into();
    slots::edit(slot, |known| known.module.replace(path.clone()));
    Ok(path)
}

/// Remembers whether a slot's storage lives anyway.
pub(crate) fn note_alive(numbers: &[u64], alive: bool) {
    for &number in numbers {
        if alive || slots::get(number).is_some_and(|slot| slot.alive) {
            slots::edit(number, |slot| slot.alive = alive);
        }
    }
}

/// Whether nobody but the pending list holds a handle.
fn only_ours(saved: &Py<Saved>) -> bool {
    // SAFETY: `saved` is a live object, and the interpreter is attached wherever a handle is looked at.
    unsafe { ffi::Py_REFCNT(saved.as_ptr()) == 1 }
}

/// Decides on tensors that no node has claimed: boundaries of checkpoints, saves of operations that raised, strangers.
fn resolve(py: Python<'_>, items: Vec<Pending>) -> PyResult<()> {
    let mut claims = Vec::new();
    for item in items {
        if only_ours(&item.saved) {
            // Nobody but this list: the operation raised. Dropping it is all.
            continue;
        }
        let rule: &Arc<Rule> = if item.boundary {
            consumer::boundary_rule(py)?
        } else {
            consumer::unknown_rule(py)?
        };
        claims.push(Claim {
            item,
            reader: None,
            rule: rule.clone(),
        });
    }
    if claims.is_empty() {
        Ok(())
    } else {
        encode::encode(py, claims, None)
    }
}

/// Gives everything that waits on this thread its final form.
pub(crate) fn flush(py: Python<'_>) -> PyResult<()> {
    let lists = LISTS.take();
    resolve(py, lists.pending)
}

/// On a torch without the node hook: decides at once, by what earlier backward passes taught.
pub(crate) fn encode_at_pack(py: Python<'_>, item: Pending) -> PyResult<()> {
    let known = item
        .saved
        .get()
        .slot
        .and_then(slots::get)
        .and_then(|slot| slot.reader);
    let claim = match known {
        Some((node_type, field, rule)) => Claim {
            item,
            reader: Some((node_type, field)),
            rule,
        },
        None => Claim {
            item,
            reader: None,
            rule: consumer::unknown_rule(py)?.clone(),
        },
    };
    encode::encode(py, vec![claim], None)
}

/// On a torch without the node hook: notes who reads a handle, and refuses a reader that the stored form does not serve.
pub(crate) fn learn(py: Python<'_>, api: &TorchApi, saved: &Saved) -> PyResult<()> {
    let Some(number) = saved.slot else {
        return Ok(());
    };
    let node = api.current_node.bind(py).call0()?;
    if node.is_none() {
        return Ok(());
    }
    let node_type = consumer::node_type(&node)?;
    let found = match field_of(py, &node, &node_type, saved)? {
        Some(field) => {
            let rule = rule_in_backward(py, api, &node, &node_type.fields[field], saved)?;
            Some((node_type.clone(), field, rule))
        }
        None => None,
    };
    let known = slots::get(number).and_then(|slot| slot.reader);
    let same = match (&known, &found) {
        (Some((known_type, known_field, known_rule)), Some((_, field, rule))) => {
            known_type.name == node_type.name && known_field == field && known_rule.asks_for(rule)
        }
        _ => false,
    };
    let lossy = saved.look(|state| match state {
        State::Coded { want, .. } => *want != super::blob::Want::Lossless,
        State::Empty(_) => true,
        _ => false,
    });
    slots::edit(number, |slot| std::mem::replace(&mut slot.reader, found));
    if lossy && !same {
        return Err(pyo3::exceptions::PyRuntimeError::new_err(format!(
            "daf_rs: a tensor was stored for another reader than {}: the model's operations changed from one step to the \
             next, and this torch tells readers only in backward. The next step is right again; use torch 2.15 or newer, or \
             bits=\"exact\", for models whose graph changes",
            node_type.name
        )));
    }
    Ok(())
}

/// A field's rule, resolved by the node's attributes where it depends on them.
fn rule_in_backward(
    py: Python<'_>,
    api: &TorchApi,
    node: &Bound<'_, PyAny>,
    field: &Field,
    saved: &Saved,
) -> PyResult<Arc<Rule>> {
    if !field.rule.is_open() {
        return Ok(field.rule.clone());
    }
    let (tensor, dtype) = saved.look(|state| match state {
        State::Kept(kept) | State::Pending(kept) => (Some(kept.tensor.clone_ref(py)), None),
        State::Coded { shape, .. } | State::Empty(shape) => (None, Some(shape.dtype)),
        State::Lost { .. } => (None, None),
    });
    match (tensor, dtype) {
        (Some(tensor), _) => {
            let dtype = tensor.bind(py).getattr(pyo3::intern!(py, "dtype"))?;
            field.rule.resolve(node, &field.name, &dtype)
        }
        (None, Some(dtype)) => match api.dtype_object(py, dtype) {
            Some(dtype) => field.rule.resolve(node, &field.name, dtype),
            None => Ok(field.rule.clone()),
        },
        (None, None) => Ok(field.rule.clone()),
    }
}

/// Which field of the node holds this handle; `None` where none does (a checkpoint's recomputation).
fn field_of(
    py: Python<'_>,
    node: &Bound<'_, PyAny>,
    node_type: &NodeType,
    saved: &Saved,
) -> PyResult<Option<usize>> {
    for (index, field) in node_type.fields.iter().enumerate() {
        let raw = node.getattr(field.attribute.bind(py))?;
        let several: Vec<Bound<'_, PyAny>> = match (raw.cast::<PyTuple>(), raw.cast::<PyList>()) {
            (Ok(tuple), _) => tuple.iter().collect(),
            (_, Ok(list)) => list.iter().collect(),
            _ => vec![raw.clone()],
        };
        for one in several {
            if one.is_none() {
                continue;
            }
            let data = one.getattr(pyo3::intern!(py, "data"))?;
            if data
                .cast::<Saved>()
                .is_ok_and(|other| std::ptr::eq(other.get(), saved))
            {
                return Ok(Some(index));
            }
        }
    }
    Ok(None)
}

/// Whether a node is a chain of views and casts that ends at a leaf.
pub(crate) fn leads_to_parameter(py: Python<'_>, grad_fn: &Bound<'_, PyAny>) -> PyResult<bool> {
    let mut node = grad_fn.clone();
    for _ in 0..MAX_HOPS {
        let node_type = consumer::node_type(&node)?;
        if node_type.is_leaf {
            return Ok(true);
        }
        if !node_type.is_view {
            return Ok(false);
        }
        let next = node.getattr(pyo3::intern!(py, "next_functions"))?;
        let next = next.get_item(0)?.get_item(0)?;
        if next.is_none() {
            return Ok(false);
        }
        node = next;
    }
    Ok(false)
}

static CHECKPOINT_FILE: PyOnceLock<String> = PyOnceLock::new();

fn checkpoint_file(py: Python<'_>) -> PyResult<&'static String> {
    CHECKPOINT_FILE.get_or_try_init(py, || {
        py.import("torch.utils.checkpoint")?
            .getattr("__file__")?
            .extract()
    })
}

/// The code object of the Python frame that is running.
fn running_code(py: Python<'_>) -> Option<Bound<'_, PyAny>> {
    // SAFETY: the interpreter is attached; the result is borrowed, or null where no Python code runs.
    let frame = unsafe { ffi::PyEval_GetFrame() };
    if frame.is_null() {
        return None;
    }
    // SAFETY: `frame` is the live running frame; the result is a new reference, never null.
    let code = unsafe { ffi::PyFrame_GetCode(frame) };
    // SAFETY: a new strong reference to a code object, taken over here.
    unsafe { Bound::from_owned_ptr_or_opt(py, code.cast()) }
}

/// Whether torch's checkpoint itself saves the tensor: its value feeds a recomputation, whoever made it.
pub(crate) fn called_by_checkpoint(py: Python<'_>) -> PyResult<bool> {
    let Some(code) = running_code(py) else {
        return Ok(false);
    };
    let file = code.getattr(pyo3::intern!(py, "co_filename"))?;
    Ok(file.extract::<&str>()? == checkpoint_file(py)?.as_str())
}

/// Whether a reentrant checkpoint recomputes its forward in the running backward.
pub(crate) fn recomputing(py: Python<'_>) -> PyResult<bool> {
    let file = checkpoint_file(py)?;
    let mut frame = py.import("sys")?.getattr("_getframe")?.call0()?;
    while !frame.is_none() {
        let code = frame.getattr("f_code")?;
        if code.getattr("co_name")?.extract::<&str>()? == "backward"
            && code.getattr("co_filename")?.extract::<&str>()? == file.as_str()
        {
            return Ok(true);
        }
        frame = frame.getattr("f_back")?;
    }
    Ok(false)
}

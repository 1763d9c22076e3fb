//! What backward will do with a saved tensor: node types of autograd with their saved fields and the policy's rules.
//!
//! The rules themselves are in `daf_rs/policy.py`; they are asked for once per node type and field and kept here.

use super::axis::Axis;
use crate::dtype::FloatType;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyString, PyTuple};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// What a reader needs of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Never read.
    Unused,
    /// Only whether an element is above a threshold (or NaN).
    Mask,
    /// Only the sign.
    Sign,
    /// Only whether an element is inside closed bounds.
    Within,
    /// Only whether an element is not at or beyond open bounds.
    NotBeyond,
    /// Every bit.
    Exact,
    /// An unbiased value.
    Value,
}

/// A width guard that looks at two operands of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Guard {
    /// None.
    No,
    /// The queries of an attention.
    Query,
    /// The keys of an attention.
    Key,
    /// An operand of a batched product of two activations.
    Bmm,
}

/// One entry of the policy.
#[derive(Debug)]
pub(crate) struct Rule {
    pub(crate) kind: Kind,
    pub(crate) bits: Option<u8>,
    pub(crate) plus: u8,
    pub(crate) floor: u8,
    pub(crate) axis: Axis,
    pub(crate) guard: Guard,
    /// Attributes of the node that the rule depends on: until resolved, every bit is kept.
    attrs: Vec<Py<PyString>>,
    /// Thresholds of a mask or range.
    pub(crate) bounds: [f32; 2],
    /// For f32, f16 and bf16: what an element decodes to that is set, and one that is not.
    pub(crate) representatives: [[f32; 2]; 3],
    /// The rules that the attributes' values gave so far: (values..., dtype) to `Resolved`.
    resolved: Option<Py<PyDict>>,
    pub(crate) why: Arc<str>,
    /// Nobody knows this reader: only lossless classes, unless the user opts in to a width.
    pub(crate) unknown: bool,
    /// The value feeds a recomputation (a checkpoint's boundary).
    pub(crate) boundary: bool,
}

impl Rule {
    fn extract(rule: &Bound<'_, PyAny>, unknown: bool, boundary: bool) -> PyResult<Rule> {
        let py = rule.py();
        let text = |name: &str| -> PyResult<String> { rule.getattr(name)?.extract() };
        let bad = |what: &str, value: &str| {
            PyRuntimeError::new_err(format!(
                "daf_rs: the policy has an unknown {what} {value:?}; see daf_rs.policy.Rule"
            ))
        };
        let kind = match text("kind")?.as_str() {
            "unused" => Kind::Unused,
            "mask" => Kind::Mask,
            "sign" => Kind::Sign,
            "within" => Kind::Within,
            "not_beyond" => Kind::NotBeyond,
            "exact" => Kind::Exact,
            "value" => Kind::Value,
            other => return Err(bad("kind", other)),
        };
        let guard = match text("guard")?.as_str() {
            "" => Guard::No,
            "q" => Guard::Query,
            "k" => Guard::Key,
            "bmm" => Guard::Bmm,
            other => return Err(bad("guard", other)),
        };
        let axis = text("axis")?;
        let attrs: Vec<String> = rule.getattr("attrs")?.extract()?;
        let consts: Vec<f64> = rule.getattr("consts")?.extract()?;
        let mut bounds = [f32::NEG_INFINITY, f32::INFINITY];
        for (bound, value) in bounds.iter_mut().zip(&consts) {
            #[expect(
                clippy::cast_possible_truncation,
                reason = "the policy's thresholds are f32 values"
            )]
            let value = *value as f32;
            *bound = value;
        }
        let mut representatives = [[1.0, 0.0]; 3];
        if attrs.is_empty() && matches!(kind, Kind::Mask | Kind::Within | Kind::NotBeyond) {
            let find = py.import("daf_rs.policy")?.getattr("representatives")?;
            let torch = py.import("torch")?;
            for (pair, dtype) in representatives.iter_mut().zip(FloatType::ALL) {
                *pair = find
                    .call1((rule, torch.getattr(dtype.name())?))?
                    .extract::<(f32, f32)>()?
                    .into();
            }
        }
        Ok(Rule {
            kind,
            bits: rule.getattr("bits")?.extract()?,
            plus: rule.getattr("plus")?.extract()?,
            floor: rule.getattr("floor")?.extract()?,
            axis: Axis::from_name(&axis).ok_or_else(|| bad("axis", &axis))?,
            guard,
            resolved: (!attrs.is_empty()).then(|| PyDict::new(py).unbind()),
            attrs: attrs
                .iter()
                .map(|attr| PyString::new(py, attr).unbind())
                .collect(),
            bounds,
            representatives,
            why: text("why")?.into(),
            unknown,
            boundary,
        })
    }

    /// The rule for one node: where it depends on the node's attributes, what their values make of it.
    pub(crate) fn resolve(
        self: &Arc<Rule>,
        node: &Bound<'_, PyAny>,
        field: &str,
        dtype: &Bound<'_, PyAny>,
    ) -> PyResult<Arc<Rule>> {
        let Some(resolved) = &self.resolved else {
            return Ok(self.clone());
        };
        let py = node.py();
        let resolved = resolved.bind(py);
        let mut values: Vec<Bound<'_, PyAny>> = Vec::with_capacity(self.attrs.len() + 1);
        for attr in &self.attrs {
            let attr = attr.bind(py);
            values.push(if attr.len()? == 0 {
                py.None().into_bound(py)
            } else {
                node.getattr(attr)?
            });
        }
        values.push(dtype.clone());
        let key = PyTuple::new(py, values)?;
        if let Some(known) = resolved.get_item(&key)? {
            return Ok(known.cast::<Resolved>()?.get().0.clone());
        }
        let rule = py
            .import("daf_rs.policy")?
            .getattr("resolve")?
            .call1((node, field, dtype))?;
        let rule = Arc::new(Rule::extract(&rule, false, false)?);
        if resolved.len() < MAX_RESOLVED {
            resolved.set_item(key, Resolved(rule.clone()))?;
        }
        Ok(rule)
    }

    /// Whether both rules make the same of a tensor.
    pub(crate) fn asks_for(&self, other: &Rule) -> bool {
        let said = |rule: &Rule| {
            let bounds = rule.bounds.map(f32::to_bits);
            (
                rule.kind,
                rule.bits,
                rule.plus,
                rule.floor,
                rule.axis,
                bounds,
                rule.is_open(),
            )
        };
        said(self) == said(other)
    }

    /// Whether the rule still waits for a node's attributes.
    pub(crate) fn is_open(&self) -> bool {
        self.resolved.is_some()
    }
}

/// A resolved rule, as a value of a Python dict.
#[pyclass(frozen, module = "daf_rs._native")]
struct Resolved(Arc<Rule>);

/// A saved field of a node type.
#[derive(Debug)]
pub(crate) struct Field {
    /// The attribute that gives the saved variable, `_raw_saved_<name>`.
    pub(crate) attribute: Py<PyString>,
    pub(crate) name: Arc<str>,
    pub(crate) rule: Arc<Rule>,
}

/// A type of autograd node.
#[derive(Debug)]
pub(crate) struct NodeType {
    pub(crate) name: Arc<str>,
    pub(crate) fields: Vec<Field>,
    /// A view, transpose, cast or copy of its input.
    pub(crate) is_view: bool,
    /// A leaf's gradient accumulator.
    pub(crate) is_leaf: bool,
    /// Keeps the type object, hence its address, alive.
    _type: Py<PyAny>,
}

/// Types kept at most: a program that makes new custom functions for ever does not fill the memory with them.
const MAX_TYPES: usize = 4096;
/// Attribute values kept at most for each field.
const MAX_RESOLVED: usize = 4096;
/// Nodes through which a parameter is still the parameter: views of it, and the casts that autocast makes.
const VIEWS: [&str; 14] = [
    "TBackward0",
    "TransposeBackward0",
    "PermuteBackward0",
    "ViewBackward0",
    "ReshapeAliasBackward0",
    "UnsafeViewBackward0",
    "ExpandBackward0",
    "AliasBackward0",
    "SelectBackward0",
    "SliceBackward0",
    "UnsqueezeBackward0",
    "SqueezeBackward1",
    "AsStridedBackward0",
    "ToCopyBackward0",
];
const PREFIX: &str = "_raw_saved_";

/// Known types by the address of the type object; types that several operations share (C++ custom functions) also by name.
type Types = HashMap<(usize, Option<Arc<str>>), Arc<NodeType>>;

/// The Python type of every custom function that is written in C++.
const SHARED_TYPE: &str = "CppFunction";

static TYPES: Mutex<Option<Types>> = Mutex::new(None);
static BOUNDARY: PyOnceLock<Arc<Rule>> = PyOnceLock::new();
static UNKNOWN: PyOnceLock<Arc<Rule>> = PyOnceLock::new();

fn cached(key: &(usize, Option<Arc<str>>)) -> Option<Arc<NodeType>> {
    TYPES
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .as_ref()?
        .get(key)
        .cloned()
}

/// The node's type, with its saved fields and their rules.
pub(crate) fn node_type(node: &Bound<'_, PyAny>) -> PyResult<Arc<NodeType>> {
    let class = node.get_type();
    let mut key = (class.as_ptr() as usize, None);
    if let Some(known) = cached(&key) {
        return Ok(known);
    }
    let py = node.py();
    let name: String = node.call_method0(pyo3::intern!(py, "name"))?.extract()?;
    if class.name()? == SHARED_TYPE {
        key.1 = Some(name.as_str().into());
        if let Some(known) = cached(&key) {
            return Ok(known);
        }
    }
    let mut fields = Vec::new();
    for attribute in node.dir()?.iter() {
        let attribute: String = attribute.extract()?;
        if let Some(field) = attribute.strip_prefix(PREFIX) {
            fields.push(Field {
                attribute: PyString::intern(py, &attribute).unbind(),
                name: field.into(),
                rule: lookup(py, &name, field)?,
            });
        }
    }
    let known = Arc::new(NodeType {
        is_view: VIEWS.contains(&name.as_str()),
        is_leaf: name.ends_with("AccumulateGrad"),
        name: name.into(),
        fields,
        _type: class.into_any().unbind(),
    });
    let old = {
        let mut types = TYPES.lock().unwrap_or_else(PoisonError::into_inner);
        let types = types.get_or_insert_with(HashMap::new);
        let old = (types.len() >= MAX_TYPES).then(|| std::mem::take(types));
        types.insert(key, known.clone());
        old
    };
    drop(old);
    Ok(known)
}

fn lookup(py: Python<'_>, node: &str, field: &str) -> PyResult<Arc<Rule>> {
    let policy = py.import("daf_rs.policy")?;
    let rule = policy.getattr("lookup")?.call1((node, field))?;
    let unknown = rule.is(&policy.getattr("UNKNOWN")?);
    let boundary = rule.is(&policy.getattr("BOUNDARY")?);
    Ok(Arc::new(Rule::extract(&rule, unknown, boundary)?))
}

/// The rule of a tensor that no node reads: it feeds a checkpoint's recomputation.
pub(crate) fn boundary_rule(py: Python<'_>) -> PyResult<&'static Arc<Rule>> {
    BOUNDARY.get_or_try_init(py, || {
        let rule = py.import("daf_rs.policy")?.getattr("BOUNDARY")?;
        Ok(Arc::new(Rule::extract(&rule, false, true)?))
    })
}

/// The rule of a tensor whose reader nobody knows.
pub(crate) fn unknown_rule(py: Python<'_>) -> PyResult<&'static Arc<Rule>> {
    UNKNOWN.get_or_try_init(py, || {
        let rule = py.import("daf_rs.policy")?.getattr("UNKNOWN")?;
        Ok(Arc::new(Rule::extract(&rule, true, false)?))
    })
}

/// Forgets all cached rules; the policy calls it when an entry changes.
#[pyfunction]
pub(crate) fn forget_consumers() {
    let old = TYPES.lock().unwrap_or_else(PoisonError::into_inner).take();
    drop(old);
}

//! The few objects of torch that the bindings call, looked up once per process.
//!
//! Nothing here links against libtorch: everything is reached by name, so one wheel serves every torch from 2.11 on.

use pyo3::exceptions::PyRuntimeError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyTuple};
use std::ffi::c_void;
use std::os::raw::{c_char, c_int};

/// An element type of torch as DLPack writes it: kind and bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct DType {
    /// DLPack's type code: 0 signed, 1 unsigned, 2 float, 4 bfloat, 5 complex, 6 bool; others are opaque to us.
    pub(crate) code: u8,
    /// Bits of one element.
    pub(crate) bits: u8,
}

impl DType {
    /// Bytes of one element.
    pub(crate) const fn size(self) -> usize {
        self.bits as usize / 8
    }
}

/// DLPack's borrowed view of a tensor (`DLTensor`, DLPack 1.x).
#[repr(C)]
pub(crate) struct DlTensor {
    pub(crate) data: *mut c_void,
    pub(crate) device_type: i32,
    pub(crate) device_id: i32,
    pub(crate) ndim: i32,
    pub(crate) code: u8,
    pub(crate) bits: u8,
    pub(crate) lanes: u16,
    pub(crate) shape: *mut i64,
    pub(crate) strides: *mut i64,
    pub(crate) byte_offset: u64,
}

/// Fills a borrowed view of a tensor object; non-zero with a Python error set where there is none.
pub(crate) type DlTensorFromPyObject = unsafe extern "C" fn(*mut c_void, *mut DlTensor) -> c_int;

/// DLPack's table of C functions (`DLPackExchangeAPI`, version 1).
#[repr(C)]
struct DlExchangeApi {
    major: u32,
    minor: u32,
    previous: *const c_void,
    allocate: *const c_void,
    from_object: *const c_void,
    to_object: *const c_void,
    view: Option<DlTensorFromPyObject>,
    stream: *const c_void,
}

/// Cached objects of torch.
pub(crate) struct TorchApi {
    pub(crate) tensor: Py<PyAny>,
    pub(crate) parameter: Py<PyAny>,
    pub(crate) buffer: Option<Py<PyAny>>,
    pub(crate) empty_strided: Py<PyAny>,
    pub(crate) as_strided: Py<PyAny>,
    pub(crate) graph_task_id: Py<PyAny>,
    pub(crate) current_node: Py<PyAny>,
    pub(crate) storage_expired: Py<PyAny>,
    pub(crate) storage_free_weak: Py<PyAny>,
    pub(crate) storage_use_count: Py<PyAny>,
    pub(crate) view: Option<DlTensorFromPyObject>,
    pub(crate) cpu: Py<PyAny>,
    dtypes: Vec<(DType, Py<PyAny>)>,
}

static API: PyOnceLock<TorchApi> = PyOnceLock::new();

impl TorchApi {
    /// The table, filled at the first call.
    pub(crate) fn get(py: Python<'_>) -> PyResult<&'static TorchApi> {
        API.get_or_try_init(py, || TorchApi::load(py))
    }

    fn load(py: Python<'_>) -> PyResult<TorchApi> {
        let torch = py.import("torch")?;
        let c = torch.getattr("_C")?;
        let storage = torch.getattr("UntypedStorage")?;
        let tensor = torch.getattr("Tensor")?;
        let mut dtypes = Vec::new();
        for (name, code, bits) in [
            ("float32", 2, 32),
            ("float64", 2, 64),
            ("float16", 2, 16),
            ("bfloat16", 4, 16),
            ("bool", 6, 8),
            ("uint8", 1, 8),
            ("int8", 0, 8),
            ("int16", 0, 16),
            ("int32", 0, 32),
            ("int64", 0, 64),
            ("uint16", 1, 16),
            ("uint32", 1, 32),
            ("uint64", 1, 64),
        ] {
            if let Ok(dtype) = torch.getattr(name) {
                dtypes.push((DType { code, bits }, dtype.unbind()));
            }
        }
        Ok(TorchApi {
            parameter: torch.getattr("nn")?.getattr("Parameter")?.unbind(),
            buffer: torch
                .getattr("nn")?
                .getattr("Buffer")
                .ok()
                .map(Bound::unbind),
            empty_strided: torch.getattr("empty_strided")?.unbind(),
            as_strided: torch.getattr("as_strided")?.unbind(),
            graph_task_id: c.getattr("_current_graph_task_id")?.unbind(),
            current_node: c.getattr("_current_autograd_node")?.unbind(),
            storage_expired: storage.getattr("_expired")?.unbind(),
            storage_free_weak: storage.getattr("_free_weak_ref")?.unbind(),
            storage_use_count: c.getattr("_storage_Use_Count")?.unbind(),
            view: exchange_api(&tensor)?,
            cpu: torch.getattr("device")?.call1(("cpu",))?.unbind(),
            tensor: tensor.unbind(),
            dtypes,
        })
    }

    /// torch's own object for a dtype, where it is one that we store.
    pub(crate) fn dtype_object<'py>(
        &self,
        py: Python<'py>,
        dtype: DType,
    ) -> Option<&Bound<'py, PyAny>> {
        self.dtypes
            .iter()
            .find(|(known, _)| *known == dtype)
            .map(|(_, object)| object.bind(py))
    }

    /// The dtype that a torch dtype object stands for.
    pub(crate) fn dtype_of(&self, object: &Bound<'_, PyAny>) -> Option<DType> {
        self.dtypes
            .iter()
            .find(|(_, known)| known.as_ptr() == object.as_ptr())
            .map(|(dtype, _)| *dtype)
    }

    /// A fresh CPU tensor with exactly these sizes and strides (elements), its contents undefined.
    ///
    /// Device and dtype are named, so `torch.set_default_device` and its like do not reach it.
    pub(crate) fn empty_strided<'py>(
        &self,
        py: Python<'py>,
        sizes: &Bound<'py, PyTuple>,
        strides: &Bound<'py, PyTuple>,
        dtype: DType,
    ) -> PyResult<Bound<'py, PyAny>> {
        let dtype = self.dtype_object(py, dtype).ok_or_else(|| {
            PyRuntimeError::new_err(format!("daf_rs: no torch dtype for {dtype:?}"))
        })?;
        let keywords = PyDict::new(py);
        keywords.set_item(pyo3::intern!(py, "dtype"), dtype)?;
        keywords.set_item(pyo3::intern!(py, "device"), self.cpu.bind(py))?;
        self.empty_strided
            .bind(py)
            .call((sizes, strides), Some(&keywords))
    }
}

/// torch's C view function, where this torch offers DLPack's exchange API in a version that we know.
fn exchange_api(tensor: &Bound<'_, PyAny>) -> PyResult<Option<DlTensorFromPyObject>> {
    let Ok(capsule) = tensor.getattr("__dlpack_c_exchange_api__") else {
        return Ok(None);
    };
    let name: *const c_char = c"dlpack_exchange_api".as_ptr();
    // SAFETY: `capsule` is a live object; PyCapsule_GetPointer checks that it is a capsule of that name and returns null
    // with an error set otherwise.
    let pointer = unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), name) };
    if pointer.is_null() {
        // Not the table that we know: the attributes serve as well.
        drop(PyErr::take(tensor.py()));
        return Ok(None);
    }
    // SAFETY: DLPack guarantees that a capsule of this name points to a `DLPackExchangeAPI` that lives as long as the
    // process, whose header (version first) has the layout above in every version.
    let api = unsafe { &*pointer.cast::<DlExchangeApi>() };
    Ok(if api.major == 1 { api.view } else { None })
}

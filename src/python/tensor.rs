//! torch tensors as addresses: the only place where a raw address becomes a source or target of the codec.
//!
//! A view is valid while the caller holds the tensor; nothing here keeps one alive.

use super::torch_api::{DType, DlTensor, TorchApi};
use crate::dtype::FloatType;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use std::mem::MaybeUninit;

/// Dimensions that a view holds without an allocation.
const INLINE_DIMS: usize = 8;

/// Sizes or strides of a tensor, in elements.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Dims {
    /// Up to eight of them.
    Inline([i64; INLINE_DIMS], u8),
    /// More.
    Heap(Box<[i64]>),
}

impl Dims {
    /// Copies a slice.
    pub(crate) fn new(values: &[i64]) -> Dims {
        if values.len() <= INLINE_DIMS {
            let mut inline = [0; INLINE_DIMS];
            inline[..values.len()].copy_from_slice(values);
            #[expect(clippy::cast_possible_truncation, reason = "at most 8")]
            Dims::Inline(inline, values.len() as u8)
        } else {
            Dims::Heap(values.into())
        }
    }

    /// The values.
    pub(crate) fn as_slice(&self) -> &[i64] {
        match self {
            Dims::Inline(values, len) => &values[..*len as usize],
            Dims::Heap(values) => values,
        }
    }

    /// As a Python tuple.
    pub(crate) fn to_tuple<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.as_slice())
    }
}

/// A CPU tensor's address, dtype, sizes and strides.
#[derive(Clone, Debug)]
pub(crate) struct TensorView {
    /// Address of element (0, 0, …).
    pub(crate) data: usize,
    pub(crate) dtype: DType,
    pub(crate) sizes: Dims,
    pub(crate) strides: Dims,
}

impl TensorView {
    /// Elements of the view, expanded ones counted as often as they are seen.
    pub(crate) fn numel(&self) -> usize {
        self.sizes
            .as_slice()
            .iter()
            .map(|&size| usize::try_from(size).unwrap_or(0))
            .product()
    }

    /// The codec's type of the elements, where the value codec takes it.
    pub(crate) fn float_type(&self) -> Option<FloatType> {
        float_type(self.dtype)
    }

    /// Reads the view of a strided CPU tensor; `None` where there is no readable memory (another device or layout,
    /// meta and fake tensors, quantized and complex dtypes, freed storages).
    pub(crate) fn read(
        py: Python<'_>,
        api: &TorchApi,
        tensor: &Bound<'_, PyAny>,
    ) -> PyResult<Option<TensorView>> {
        match api.view {
            Some(view) => Ok(read_dlpack(py, view, tensor)),
            None => read_attributes(api, tensor),
        }
    }
}

/// The value codec's name of a torch dtype.
pub(crate) fn float_type(dtype: DType) -> Option<FloatType> {
    match (dtype.code, dtype.bits) {
        (2, 32) => Some(FloatType::F32),
        (2, 16) => Some(FloatType::F16),
        (4, 16) => Some(FloatType::BF16),
        _ => None,
    }
}

fn read_dlpack(
    py: Python<'_>,
    view: super::torch_api::DlTensorFromPyObject,
    tensor: &Bound<'_, PyAny>,
) -> Option<TensorView> {
    let mut raw = MaybeUninit::<DlTensor>::uninit();
    // SAFETY: `tensor` is a live tensor object of the framework whose table gave `view`, and `raw` is writable; the
    // function reads the object and fills `raw`, or returns non-zero with a Python error set.
    let status = unsafe { view(tensor.as_ptr().cast(), raw.as_mut_ptr()) };
    if status != 0 {
        // Not a strided tensor of a dtype that DLPack knows: the caller passes it through.
        // SAFETY: the interpreter is attached (`py`).
        unsafe { ffi::PyErr_Clear() };
        let _ = py;
        return None;
    }
    // SAFETY: status 0 promises that every field was written.
    let raw = unsafe { raw.assume_init() };
    if raw.device_type != 1 || raw.lanes != 1 || raw.data.is_null() {
        return None;
    }
    let ndim = usize::try_from(raw.ndim).ok()?;
    let (sizes, strides) = if ndim == 0 {
        (Dims::new(&[]), Dims::new(&[]))
    } else {
        // SAFETY: DLPack promises `ndim` sizes at `shape`; they live as long as the tensor, which the caller holds.
        let sizes = unsafe { std::slice::from_raw_parts(raw.shape, ndim) };
        if raw.strides.is_null() {
            return None;
        }
        // SAFETY: as for the sizes; checked not to be null.
        let strides = unsafe { std::slice::from_raw_parts(raw.strides, ndim) };
        (Dims::new(sizes), Dims::new(strides))
    };
    let offset = usize::try_from(raw.byte_offset).ok()?;
    Some(TensorView {
        data: (raw.data as usize).checked_add(offset)?,
        dtype: DType {
            code: raw.code,
            bits: raw.bits,
        },
        sizes,
        strides,
    })
}

fn read_attributes(api: &TorchApi, tensor: &Bound<'_, PyAny>) -> PyResult<Option<TensorView>> {
    let py = tensor.py();
    if !tensor.getattr(pyo3::intern!(py, "is_cpu"))?.is_truthy()?
        || tensor
            .getattr(pyo3::intern!(py, "is_sparse"))?
            .is_truthy()?
        || tensor
            .getattr(pyo3::intern!(py, "is_mkldnn"))?
            .is_truthy()?
        || tensor
            .getattr(pyo3::intern!(py, "is_nested"))?
            .is_truthy()?
    {
        return Ok(None);
    }
    let Some(dtype) = api.dtype_of(&tensor.getattr(pyo3::intern!(py, "dtype"))?) else {
        return Ok(None);
    };
    let (Ok(strides), Ok(data)) = (
        tensor.call_method0(pyo3::intern!(py, "stride")),
        tensor.call_method0(pyo3::intern!(py, "data_ptr")),
    ) else {
        return Ok(None);
    };
    let sizes: Vec<i64> = tensor.getattr(pyo3::intern!(py, "shape"))?.extract()?;
    let strides: Vec<i64> = strides.extract()?;
    let data: usize = data.extract()?;
    if data == 0 {
        return Ok(None);
    }
    Ok(Some(TensorView {
        data,
        dtype,
        sizes: Dims::new(&sizes),
        strides: Dims::new(&strides),
    }))
}

/// Elements that [`sample`] looks at.
const SAMPLES: usize = 64;

/// A hash of up to 64 elements spread over the view, whose dimensions in memory order are `dims`.
///
/// The caller holds the tensor.
pub(crate) fn sample(view: &TensorView, dims: &[super::hooks::Dim]) -> u64 {
    let n: usize = dims.iter().map(|dim| dim.size).product();
    let size = view.dtype.size();
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    for at in 0..SAMPLES.min(n) {
        let mut rest = at * n / SAMPLES.min(n);
        let mut offset = 0;
        for dim in dims.iter().rev() {
            offset += rest % dim.size * dim.stride;
            rest /= dim.size;
        }
        let mut word = [0u8; 8];
        // SAFETY: `rest` counts an element below `n`, so the offset lies in the view's memory, which the caller's tensor
        // keeps alive; elements have at most 8 bytes.
        unsafe {
            let element = (view.data as *const u8).add(offset * size);
            std::ptr::copy_nonoverlapping(element, word.as_mut_ptr(), size.min(8));
        }
        hash = (hash ^ u64::from_le_bytes(word)).wrapping_mul(0x0000_0100_0000_01b3);
        hash ^= hash >> 29;
    }
    hash
}

/// The largest squared norm of the view's vectors along one dimension.
///
/// The caller holds the tensor. Sums are in f32 by eight lanes, so the result is good to about 1e-6: it feeds a guard.
pub(crate) fn max_norm_squared(view: &TensorView, dtype: FloatType, along: usize) -> f64 {
    crate::with_float!(dtype, T => max_norm_squared_of::<T>(view, along))
}

fn max_norm_squared_of<T: crate::dtype::Float>(view: &TensorView, along: usize) -> f64 {
    let (sizes, strides) = (view.sizes.as_slice(), view.strides.as_slice());
    let extent = |dim: usize| usize::try_from(sizes[dim]).unwrap_or(0);
    let step = |dim: usize| usize::try_from(strides[dim]).unwrap_or(0);
    if along >= sizes.len() || view.numel() == 0 {
        return 0.0;
    }
    // Where another dimension is innermost, its vectors are summed side by side, so that memory is read in its order.
    let side = (0..sizes.len()).find(|&dim| dim != along && step(dim) == 1 && extent(dim) > 1);
    let side = side.filter(|_| step(along) != 1);
    let mut sums = vec![0f32; side.map_or(0, extent)];
    let outer: Vec<usize> = (0..sizes.len())
        .filter(|&dim| dim != along && Some(dim) != side && step(dim) != 0)
        .collect();
    let mut index = vec![0usize; outer.len()];
    let (length, stride) = (extent(along), step(along));
    let base = view.data as *const T;
    let mut largest = 0f32;
    loop {
        let offset: usize = outer
            .iter()
            .zip(&index)
            .map(|(&dim, &at)| at * step(dim))
            .sum();
        let mut lanes = [0f32; 8];
        if stride == 1 {
            // SAFETY: the row's indices are below their dimensions' sizes, so its elements lie in the view's memory, which
            // the caller's tensor keeps alive; `pack` takes only tensors that are aligned to their elements.
            let row = unsafe { std::slice::from_raw_parts(base.add(offset), length) };
            let chunks = row.chunks_exact(8);
            for (lane, x) in lanes.iter_mut().zip(chunks.remainder()) {
                *lane += x.to_f32() * x.to_f32();
            }
            for chunk in chunks {
                for (lane, x) in lanes.iter_mut().zip(chunk) {
                    *lane += x.to_f32() * x.to_f32();
                }
            }
        } else if side.is_some() {
            sums.fill(0.0);
            for at in 0..length {
                // SAFETY: as above; `side` has stride 1, so its elements are one run.
                let row = unsafe {
                    std::slice::from_raw_parts(base.add(offset + at * stride), sums.len())
                };
                for (sum, x) in sums.iter_mut().zip(row) {
                    *sum += x.to_f32() * x.to_f32();
                }
            }
            largest = sums.iter().copied().fold(largest, f32::max);
        } else {
            for at in 0..length {
                // SAFETY: as above, one element at a time.
                let x = unsafe { *base.add(offset + at * stride) }.to_f32();
                lanes[at % 8] += x * x;
            }
        }
        largest = largest.max(lanes.iter().sum());
        let mut dim = outer.len();
        loop {
            if dim == 0 {
                return f64::from(largest);
            }
            dim -= 1;
            index[dim] += 1;
            if index[dim] < extent(outer[dim]) {
                break;
            }
            index[dim] = 0;
        }
    }
}

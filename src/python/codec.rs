//! The value API's native half: quantize a torch tensor, decode into one, bytes and back.

use super::enter::enter;
use super::tensor::{Dims, TensorView};
use super::torch_api::TorchApi;
use crate::Error;
use crate::codec::{
    Encoded, Geometry, Layout, ReadMode, Rounding, Source, Target, TensorShape, ValueSpec,
    ZeroPlane, encode_value,
};
use crate::kernels::rng::mix64;
use crate::pool::SlabPool;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};

/// Fewest rows for channel groups under `groups="auto"`: below it, groups would be short and their parameters weigh more than they save.
const MIN_ROWS: usize = 128;

/// A quantized tensor: codes in the pool, and the shape to give back.
#[pyclass(frozen, module = "daf_rs._native")]
pub(crate) struct Packed {
    stored: Encoded,
    shape: TensorShape,
}

/// The memory of `view` when it can be read in place: every element its own place, in memory order.
fn layout_of(view: &TensorView) -> Option<Layout> {
    let (sizes, strides) = (view.sizes.as_slice(), view.strides.as_slice());
    let layout = Layout::from_strided(sizes, strides);
    layout.is_ordered().then_some(layout)
}

/// Strides without gaps, dimensions in the order of `strides`.
fn compact(sizes: &[i64], strides: &[i64]) -> Vec<i64> {
    let mut order: Vec<usize> = (0..sizes.len()).collect();
    // Stable, so size-1 dimensions stay where they are relative to equal strides.
    order.sort_by_key(|&d| std::cmp::Reverse(strides[d]));
    let mut out = vec![1; sizes.len()];
    let mut step = 1i64;
    for &d in order.iter().rev() {
        out[d] = step;
        step = step.saturating_mul(sizes[d].max(1));
    }
    out
}

/// The channel that lies innermost in memory, as (rows, columns): the last dimension of a contiguous 2-D or 3-D tensor, dimension 1 of
/// a channels-last map.
fn channels(sizes: &[i64], strides: &[i64], len: usize) -> Option<(usize, usize)> {
    let dim = (0..sizes.len())
        .filter(|&d| sizes[d] > 1)
        .min_by_key(|&d| strides[d])?;
    let is_channel = match sizes.len() {
        2 | 3 => dim + 1 == sizes.len(),
        4 | 5 => dim == 1,
        _ => false,
    };
    let cols = usize::try_from(sizes[dim]).ok()?;
    is_channel.then_some((len / cols, cols))
}

fn geometry(groups: &str, view: &TensorView, len: usize) -> crate::Result<Geometry> {
    let (sizes, strides) = (view.sizes.as_slice(), view.strides.as_slice());
    let innermost = || {
        (0..sizes.len())
            .filter(|&d| sizes[d] > 1)
            .min_by_key(|&d| strides[d])
    };
    match groups {
        "row" => Ok(Geometry::Row { n: len }),
        "channel" => {
            let cols = innermost().map_or(1, |d| usize::try_from(sizes[d]).unwrap_or(1));
            Ok(Geometry::Channel {
                rows: len / cols.max(1),
                cols,
            })
        }
        "auto" => Ok(match channels(sizes, strides, len) {
            Some((rows, cols)) if rows >= MIN_ROWS => Geometry::Channel { rows, cols },
            _ => Geometry::Row { n: len },
        }),
        other => Err(Error::InvalidArgument(format!(
            "groups is {other:?}; allowed are \"auto\", \"row\" and \"channel\""
        ))),
    }
}

fn rounding(name: &str) -> crate::Result<Rounding> {
    match name {
        "dither" => Ok(Rounding::Dither),
        "stochastic" => Ok(Rounding::Stochastic),
        "nearest" => Ok(Rounding::Nearest),
        other => Err(Error::InvalidArgument(format!(
            "rounding is {other:?}; allowed are \"dither\", \"stochastic\" and \"nearest\""
        ))),
    }
}

/// The view of a strided CPU tensor; an empty one has no address to read.
fn view_of(tensor: &Bound<'_, PyAny>) -> PyResult<TensorView> {
    let py = tensor.py();
    let api = TorchApi::get(py)?;
    if let Some(view) = TensorView::read(py, api, tensor)? {
        return Ok(view);
    }
    let sizes: Vec<i64> = tensor.getattr("shape")?.extract()?;
    let dtype = api.dtype_of(&tensor.getattr("dtype")?);
    match dtype {
        Some(dtype) if sizes.contains(&0) => {
            let strides: Vec<i64> = tensor.call_method0("stride")?.extract()?;
            let (sizes, strides) = (Dims::new(&sizes), Dims::new(&strides));
            Ok(TensorView { data: 0, dtype, sizes, strides })
        }
        _ => Err(Error::InvalidArgument(
            "the tensor has no memory that can be read on the CPU; call .cpu() or .to_dense() first".into(),
        )
        .into()),
    }
}

/// Quantizes a tensor whose elements do not share memory; `None` when they do.
#[pyfunction]
#[pyo3(signature = (tensor, bits, group_size, rounding, groups, seed, threads))]
fn quantize(
    tensor: &Bound<'_, PyAny>,
    bits: u8,
    group_size: u16,
    rounding: &str,
    groups: &str,
    seed: u64,
    threads: usize,
) -> PyResult<Option<Packed>> {
    let view = view_of(tensor)?;
    let Some(dtype) = view.float_type() else {
        return Err(Error::UnsupportedDtype(
            "quantize takes float32, float16 and bfloat16 tensors".into(),
        )
        .into());
    };
    let Some(layout) = layout_of(&view) else {
        return Ok(None);
    };
    let spec = ValueSpec {
        dtype,
        bits,
        group_size,
        rounding: self::rounding(rounding)?,
        geometry: geometry(groups, &view, layout.len())?,
        key: mix64(seed),
        zero: ZeroPlane::Auto,
    };
    let (sizes, strides) = (view.sizes.as_slice(), view.strides.as_slice());
    let shape = TensorShape {
        sizes: sizes.to_vec(),
        strides: if layout.is_dense() {
            strides.to_vec()
        } else {
            compact(sizes, strides)
        },
    };
    let (address, span) = (view.data, layout.span() * dtype.size());
    let stored = enter(tensor.py(), span, move || {
        // SAFETY: the caller's reference keeps the tensor, whose memory has this span from this address; that nobody writes to it
        // meanwhile is what every torch operator asks of its arguments.
        let source = unsafe { Source::new(address as *const u8, span) };
        encode_value(source, &layout, &spec, SlabPool::global(), threads)
    })?;
    Ok(Some(Packed { stored, shape }))
}

#[pymethods]
impl Packed {
    /// Writes the values into a new tensor of the right shape and strides, which nobody else may use meanwhile.
    fn decode_into(&self, tensor: &Bound<'_, PyAny>, threads: usize) -> PyResult<()> {
        let view = view_of(tensor)?;
        let layout = Layout::from_strided(&self.shape.sizes, &self.shape.strides);
        let same = view.sizes.as_slice() == self.shape.sizes
            && view.float_type() == Some(self.spec()?.dtype);
        let place = Layout::from_strided(view.sizes.as_slice(), view.strides.as_slice());
        if !same || place != layout {
            return Err(Error::InvalidArgument(format!(
                "the tensor to decode into has sizes {:?} and strides {:?}, not {:?} and {:?}, or another dtype",
                view.sizes.as_slice(),
                view.strides.as_slice(),
                self.shape.sizes,
                self.shape.strides
            ))
            .into());
        }
        let (address, span) = (view.data, layout.span() * view.dtype.size());
        enter(tensor.py(), span, || {
            // SAFETY: the caller's reference keeps the tensor, whose memory has this span from this address; the wrapper just made
            // it and has not given it to anyone.
            let target = unsafe { Target::new(address as *mut u8, span) };
            self.stored
                .decode_into(target, &layout, ReadMode::ValuesPositive, threads)
        })
    }

    /// The byte string that `from_bytes` reads.
    fn to_bytes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let bytes = enter(py, self.stored.stored_bytes(), || {
            self.stored.to_bytes(&self.shape)
        })?;
        Ok(PyBytes::new(py, &bytes))
    }

    /// Reads what `to_bytes` wrote.
    #[staticmethod]
    fn from_bytes(py: Python<'_>, data: &[u8]) -> PyResult<Packed> {
        let (stored, shape) = enter(py, data.len(), || {
            Encoded::from_bytes(data, SlabPool::global())
        })?;
        let packed = Packed { stored, shape };
        packed.spec()?;
        Ok(packed)
    }

    /// Equal codes, parameters, shape and strides.
    fn equals(&self, py: Python<'_>, other: &Packed) -> PyResult<bool> {
        enter(py, self.stored.stored_bytes(), || {
            Ok(self.shape == other.shape && self.stored == other.stored)
        })
    }

    #[getter]
    fn nbytes(&self) -> usize {
        self.stored.stored_bytes()
    }

    #[getter]
    fn bits(&self) -> u8 {
        self.stored.bits()
    }

    #[getter]
    fn sizes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.shape.sizes)
    }

    #[getter]
    fn strides<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.shape.strides)
    }

    /// The dtype's name in torch.
    #[getter]
    fn dtype(&self) -> PyResult<&'static str> {
        Ok(self.spec()?.dtype.name())
    }

    #[getter]
    fn group_size(&self) -> PyResult<u16> {
        Ok(self.spec()?.group_size)
    }

    #[getter]
    fn rounding(&self) -> PyResult<&'static str> {
        Ok(match self.spec()?.rounding {
            Rounding::Dither => "dither",
            Rounding::Stochastic => "stochastic",
            Rounding::Nearest => "nearest",
        })
    }

    /// `"row"` or `"channel"`.
    #[getter]
    fn groups(&self) -> PyResult<&'static str> {
        Ok(match self.spec()?.geometry {
            Geometry::Row { .. } => "row",
            Geometry::Channel { .. } => "channel",
        })
    }
}

impl Packed {
    fn spec(&self) -> PyResult<&ValueSpec> {
        self.stored.value_spec().ok_or_else(|| {
            Error::CorruptData(
                "the bytes hold a tensor of another class than quantize() writes".into(),
            )
            .into()
        })
    }
}

/// Sets how many threads the codec uses by default; 0 means the cores available. `DAF_NUM_THREADS` wins.
#[pyfunction]
fn set_default_threads(threads: usize) {
    crate::parallel::set_default_threads(threads);
}

/// Adds the value API to the module.
pub(crate) fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<Packed>()?;
    m.add_function(wrap_pyfunction!(quantize, m)?)?;
    m.add_function(wrap_pyfunction!(set_default_threads, m)?)?;
    Ok(())
}

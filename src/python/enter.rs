//! Leaving Python for the core: the one place that detaches from the interpreter, catches panics and maps errors.

use crate::Result;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Below this many bytes of source the work is shorter than giving up and taking back the interpreter lock.
const DETACH_FROM_BYTES: usize = 1 << 18;

/// Runs `work` with the interpreter lock released when it moves at least 256 KiB; a panic becomes a `RuntimeError`.
pub(crate) fn enter<T: Send>(
    py: Python<'_>,
    bytes: usize,
    work: impl FnOnce() -> Result<T> + Send,
) -> PyResult<T> {
    let guarded = || catch_unwind(AssertUnwindSafe(work));
    let outcome = if bytes >= DETACH_FROM_BYTES {
        py.detach(guarded)
    } else {
        guarded()
    };
    match outcome {
        Ok(result) => result.map_err(PyErr::from),
        Err(payload) => {
            let text = payload
                .downcast_ref::<&str>()
                .map(|text| (*text).to_string())
                .or_else(|| payload.downcast_ref::<String>().cloned())
                .unwrap_or_else(|| "unknown".to_string());
            Err(PyRuntimeError::new_err(format!(
                "daf_rs: internal error: {text}; please report it with the call that led here"
            )))
        }
    }
}

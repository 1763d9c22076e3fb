//! Core errors to Python exceptions: one exhaustive match, the only one.
//!
//! PyO3 gives an exception one base; ours have two (`InvalidArgumentError` is also a `ValueError`), so the classes
//! live in `daf_rs.exceptions` and are looked up once.

use crate::Error;
use pyo3::prelude::*;
use pyo3::types::PyType;

fn class(py: Python<'_>, name: &str) -> PyResult<Py<PyType>> {
    Ok(py
        .import("daf_rs.exceptions")?
        .getattr(name)?
        .cast_into::<PyType>()?
        .unbind())
}

/// A Python exception of the class `name` of `daf_rs.exceptions`.
pub(crate) fn raise(py: Python<'_>, name: &'static str, message: String) -> PyErr {
    match class(py, name) {
        Ok(class) => PyErr::from_type(class.into_bound(py), message),
        Err(error) => error,
    }
}

impl From<Error> for PyErr {
    fn from(error: Error) -> PyErr {
        let name = match &error {
            Error::InvalidArgument(_) => "InvalidArgumentError",
            Error::UnsupportedDtype(_) => "UnsupportedDtypeError",
            Error::CorruptData(_) => "CorruptDataError",
            Error::OutOfMemory(_) => "OutOfMemoryError",
            Error::BackendUnavailable(_) => "BackendUnavailableError",
        };
        Python::attach(|py| raise(py, name, error.to_string()))
    }
}

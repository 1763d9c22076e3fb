//! The Python bindings: translation only. Every function extracts its arguments, calls the core through [`enter`] and wraps the result.

mod codec;
mod enter;
mod error;
pub(crate) mod hooks;
mod tensor;
mod torch_api;

use pyo3::prelude::*;
use pyo3::types::PyDict;

/// What this module was built from and for: version, profile, target, and the instruction sets found on this machine.
#[pyfunction]
fn build_info(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let info = PyDict::new(py);
    info.set_item("version", env!("CARGO_PKG_VERSION"))?;
    info.set_item(
        "profile",
        if cfg!(debug_assertions) {
            "debug"
        } else {
            "release"
        },
    )?;
    info.set_item("target_arch", std::env::consts::ARCH)?;
    info.set_item("target_os", std::env::consts::OS)?;
    info.set_item("cuda", false)?;
    Ok(info)
}

/// The native half of `daf_rs`; private, use the names that `daf_rs` exports.
#[pymodule]
fn _native(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add("__version__", env!("CARGO_PKG_VERSION"))?;
    m.add_function(wrap_pyfunction!(build_info, m)?)?;
    codec::register(m)?;
    hooks::register(m)?;
    Ok(())
}

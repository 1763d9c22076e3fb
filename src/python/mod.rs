//! The Python bindings: translation only. Every function extracts its arguments, calls the core through [`enter`] and wraps the result.

mod codec;
mod enter;
mod error;
pub(crate) mod hooks;
mod tensor;
mod torch_api;

use crate::kernels::isa::{self, Isa};
use crate::parallel;
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// What this module was built from and for, and what it runs with here, as a new dict.
///
/// Keys: ``version``, ``profile``, ``target_arch``, ``target_os``; ``isa`` (the instruction set in use) and
/// ``isa_available`` (all that this CPU has, from the slowest); ``threads`` (used for large tensors); ``cuda``.
///
/// Raises:
///     InvalidArgumentError: ``DAF_ISA`` names an instruction set that does not exist or that this CPU lacks.
///
/// Example:
///     >>> info = daf_rs.build_info()
///     >>> info["isa"] in info["isa_available"]
///     True
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
    info.set_item("isa", isa::try_active()?.name())?;
    let available: Vec<&str> = Isa::available().iter().map(|isa| isa.name()).collect();
    info.set_item("isa_available", available)?;
    info.set_item("threads", parallel::default_threads())?;
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

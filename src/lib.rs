//! Activation compression for PyTorch training: the core crate, free of Python unless the feature `python` is on.
//!
//! Module map and invariants: `docs/architecture.md`; bytes: `docs/format.md`; words: `docs/terminology.md`.

pub mod codec;
pub mod dtype;
pub mod error;
pub mod kernels;
pub mod parallel;
pub mod pool;

#[cfg(feature = "python")]
mod python;

pub use error::{Error, Result};

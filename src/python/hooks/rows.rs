//! The report's rows: one for every tensor that autograd saved since the last step began.

use super::super::tensor::Dims;
use super::super::torch_api::DType;
use std::sync::Arc;

/// What became of one saved tensor.
#[derive(Clone, Debug)]
pub(crate) struct RowData {
    pub(crate) module: Arc<str>,
    pub(crate) op: Arc<str>,
    pub(crate) field: Arc<str>,
    pub(crate) shape: Dims,
    pub(crate) dtype: Option<DType>,
    /// The class it is stored in.
    pub(crate) class: &'static str,
    /// Bits an element of its codes; 0 where there are none.
    pub(crate) bits: u8,
    /// Bytes that plain PyTorch would hold; 0 where an earlier row already counts the storage.
    pub(crate) plain_bytes: usize,
    /// Bytes that we hold; 0 where an earlier row already counts them.
    pub(crate) stored_bytes: usize,
    pub(crate) why: Arc<str>,
    pub(crate) shared: bool,
    /// Address of the storage's implementation; 0 where none is known.
    pub(crate) storage: usize,
}

/// Rows kept of one step; a loop that never runs backward does not fill the memory with them.
pub(crate) const MAX_ROWS: usize = 100_000;

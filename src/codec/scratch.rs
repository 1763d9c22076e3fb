//! Working memory of a thread, made once: no block allocates.

use std::cell::RefCell;

use super::params::Params;
use crate::kernels::{PLANE_BYTES, PlaneBuf};

/// Working memory of the block encoder and decoder.
pub(super) struct Scratch {
    /// Planes as kernels write them.
    pub(super) planes: PlaneBuf,
    /// A block's zero plane.
    pub(super) zero: [u8; PLANE_BYTES],
    pub(super) params: Params,
}

/// Room for the elements of a block; a u64 has the alignment of every element type.
pub(super) type Elements = Vec<u64>;

thread_local! {
    static SCRATCH: RefCell<(Box<Scratch>, Elements)> = RefCell::new((
        Box::new(Scratch { planes: PlaneBuf::new(), zero: [0; PLANE_BYTES], params: Params::new() }),
        Vec::new(),
    ));
}

/// Calls `work` with this thread's scratch. Not to be nested.
pub(super) fn with<R>(work: impl FnOnce(&mut Scratch, &mut Elements) -> R) -> R {
    SCRATCH.with_borrow_mut(|(scratch, elements)| work(scratch, elements))
}

/// The first `n` elements of the room, which grows as needed.
pub(super) fn room<T: bytemuck::Pod>(elements: &mut Elements, n: usize) -> &mut [T] {
    let words = (n * size_of::<T>()).div_ceil(8);
    if elements.len() < words {
        elements.resize(words, 0);
    }
    &mut bytemuck::cast_slice_mut(&mut elements[..])[..n]
}

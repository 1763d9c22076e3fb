//! Kernels with NEON. What this level lacks is the scalar kernel.
//!
//! # Safety
//! Every `unsafe fn` here requires a CPU with the features of [`Isa::Neon`], and what the method of the same name in `super` checks.

use super::{Element, Isa, KernelTable, PlaneTable, scalar_planes};

/// The kernels of this level over elements of type `T`.
pub(super) const fn table<T: Element>() -> KernelTable<T> {
    KernelTable::scalar(Isa::Neon)
}

/// The plane kernels of this level.
pub(super) const fn plane_table() -> PlaneTable {
    scalar_planes(Isa::Neon)
}

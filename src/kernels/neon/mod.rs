//! NEON kernels, which every aarch64 CPU can run. Codes are made 32 at a time, a dither step.
//!
//! The half types are converted by integer arithmetic: exact in both directions, and free of instructions that ARMv8.0 lacks.
//!
//! # Safety
//! NEON is part of the architecture, so intrinsics on vectors are safe here. Functions in the tables require what the methods of
//! [`super::KernelTable`] check.

mod cols;
mod lanes;
mod planes;
mod rows;
mod unit;

use lanes::Lanes;

use super::{Isa, KernelTable, PlaneTable, scalar_planes};

/// The kernels of this level over elements of type `T`.
pub(super) const fn table<T: Lanes>() -> KernelTable<T> {
    KernelTable {
        range_rows: rows::range,
        quantize_rows: rows::quantize,
        dequantize_rows: rows::dequantize,
        range_cols: cols::range,
        quantize_cols: cols::quantize,
        dequantize_cols: cols::dequantize,
        nonzero_plane_rows: planes::nonzero_rows,
        nonzero_plane_cols: planes::nonzero_cols,
        apply_nonzero_rows: planes::apply_nonzero_rows,
        apply_nonzero_cols: planes::apply_nonzero_cols,
        predicate_plane: planes::predicate,
        sign_planes: planes::sign,
        sign_values: planes::sign_values,
        ..KernelTable::scalar(Isa::Neon)
    }
}

/// The plane kernels of this level.
pub(super) const fn plane_table() -> PlaneTable {
    PlaneTable {
        compact: planes::compact,
        expand: planes::expand,
        match_plane: planes::match_plane,
        select: planes::select,
        ..scalar_planes(Isa::Neon)
    }
}

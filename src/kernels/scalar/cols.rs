//! Row groups of a channel tile: each column has its own parameters.

use super::{Range, code, encode_dither, value};
use crate::kernels::types::{CodeParams, ColumnShape, Columns, PlaneBuf, PlaneSrc};
use crate::kernels::{Element, Prefetch, plane_len};

pub(in crate::kernels) fn range<T: Element>(
    columns: &Columns<'_, T>,
    skip_zeros: bool,
    _ahead: &mut Prefetch,
    out_min: &mut [f32],
    out_max: &mut [f32],
) {
    let ColumnShape {
        pitch, rows, width, ..
    } = columns.shape;
    for c in 0..width {
        let mut range = Range::EMPTY;
        for r in 0..rows {
            range.add(columns.src[r * pitch + c].to_f32(), skip_zeros);
        }
        (out_min[c], out_max[c]) = range.finish();
    }
}

pub(in crate::kernels) fn quantize<T: Element>(
    columns: &Columns<'_, T>,
    m: &[f32],
    inv: &[f32],
    params: &CodeParams,
    _ahead: &mut Prefetch,
    planes: &mut PlaneBuf,
) {
    let shape = columns.shape;
    for k in 0..params.bits {
        planes.plane_mut(k)[shape.first_slot() / 8..plane_len(shape.end_slot())].fill(0);
    }
    for r in 0..shape.rows {
        let tile_row = shape.first_row + r;
        for c in 0..shape.width {
            let (step, element) = (
                (tile_row * shape.row_steps() + c / 32) as u32,
                (c % 32) as u32,
            );
            let x = columns.src[r * shape.pitch + c].to_f32();
            let q = code(x, m[c], inv[c], encode_dither(params, step, element));
            let slot = tile_row * shape.padded_width() + c;
            for k in 0..params.bits {
                planes.plane_mut(k)[slot / 8] |= (((q >> k) & 1) << (slot % 8)) as u8;
            }
        }
    }
}

pub(in crate::kernels) fn dequantize<T: Element>(
    planes: &PlaneSrc<'_>,
    shape: &ColumnShape,
    c0: &[f32],
    step: &[f32],
    params: &CodeParams,
    _stream: bool,
    dst: &mut [T],
) {
    for r in 0..shape.rows {
        let tile_row = shape.first_row + r;
        for c in 0..shape.width {
            let slot = tile_row * shape.padded_width() + c;
            let q = (0..params.bits).fold(0, |q, k| {
                q | u32::from((planes.plane(k)[slot / 8] >> (slot % 8)) & 1) << k
            });
            let (dither_step, element) = (
                (tile_row * shape.row_steps() + c / 32) as u32,
                (c % 32) as u32,
            );
            dst[r * shape.pitch + c] =
                T::from_f32_finite(value(q, params, dither_step, element, step[c], c0[c]));
        }
    }
}

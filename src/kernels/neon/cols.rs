//! Row groups of a channel tile: each column has its own parameters.

use std::arch::aarch64::*;

use super::lanes::{Lanes, padded};
use super::rows::Range;
use super::unit::{UNIT, codes, dither, fetch, gather_codes, half, parameters, plane_bits, values};
use crate::kernels::types::{CodeParams, ColumnShape, Columns, PlaneBuf, PlaneSrc, Rounding};
use crate::kernels::{Prefetch, plane_len};

/// Minimum and maximum of each column, 16 columns at a time.
#[target_feature(enable = "neon")]
pub(super) fn range<T: Lanes>(
    columns: &Columns<'_, T>,
    skip_zeros: bool,
    ahead: &mut Prefetch,
    out_min: &mut [f32],
    out_max: &mut [f32],
) {
    let ColumnShape {
        pitch, rows, width, ..
    } = columns.shape;
    let quota = ahead.range_quota().div_ceil(width.div_ceil(16));
    for c in (0..width).step_by(16) {
        let n = (width - c).min(16);
        let mut ranges = [Range::new(); 4];
        for r in 0..rows {
            fetch(ahead, quota);
            let row = &columns.src[r * pitch + c..][..n];
            let tail;
            let row = match row.first_chunk::<16>() {
                Some(full) => full,
                None => {
                    tail = padded::<T, 16>(row);
                    &tail
                }
            };
            for (k, range) in ranges.iter_mut().enumerate() {
                // SAFETY: the array has 16 elements.
                range.add(unsafe { T::load(row.as_ptr().add(4 * k)) }, skip_zeros);
            }
        }
        for (k, range) in ranges.iter().enumerate() {
            let (min, max) = range.lanes();
            let first = c + 4 * k;
            for (i, (min, max)) in min.into_iter().zip(max).enumerate() {
                if first + i < width {
                    (out_min[first + i], out_max[first + i]) = (min, max);
                }
            }
        }
    }
}

/// Codes of a row group as planes.
#[target_feature(enable = "neon")]
pub(super) fn quantize<T: Lanes>(
    columns: &Columns<'_, T>,
    m: &[f32],
    inv: &[f32],
    params: &CodeParams,
    ahead: &mut Prefetch,
    planes: &mut PlaneBuf,
) {
    let shape = columns.shape;
    let quota = ahead.quantize_quota();
    let units = shape.width.div_ceil(UNIT);
    let of = |values: &[f32], u: usize| parameters(values.get(UNIT * u..).unwrap_or(&[]));
    let (m, scale): ([_; 4], [_; 4]) = (
        std::array::from_fn(|u| of(m, u)),
        std::array::from_fn(|u| of(inv, u)),
    );
    // Groups without parameters (inv = 0) have code 0, whatever their elements, and so do pad slots.
    let mut live = [0u32; 4];
    for (c, &inv) in inv.iter().enumerate() {
        live[c / UNIT] |= u32::from(inv != 0.0) << (c % UNIT);
    }
    for r in 0..shape.rows {
        fetch(ahead, quota);
        let tile_row = shape.first_row + r;
        let row = &columns.src[r * shape.pitch..][..shape.width];
        for (u, part) in row.chunks(UNIT).enumerate().take(units) {
            let step = (tile_row * shape.row_steps() + u) as u32;
            let dither = if params.rounding == Rounding::Nearest {
                half()
            } else {
                dither(params.key, step)
            };
            let codes = match part.first_chunk::<UNIT>() {
                Some(full) => codes(full, &m[u], &scale[u], &dither),
                None => codes(&padded::<T, UNIT>(part), &m[u], &scale[u], &dither),
            };
            let at = (tile_row * shape.padded_width()) / 8 + 4 * u;
            let bytes = part.len().div_ceil(8);
            for k in 0..params.bits {
                let bits = (plane_bits(&codes, k) & live[u]).to_le_bytes();
                planes.plane_mut(k)[at..at + bytes].copy_from_slice(&bits[..bytes]);
            }
        }
    }
    for k in 0..params.bits {
        planes.plane_mut(k)[shape.end_slot() / 8..plane_len(shape.end_slot())].fill(0);
    }
}

/// Values of a row group.
#[target_feature(enable = "neon")]
pub(super) fn dequantize<T: Lanes>(
    planes: &PlaneSrc<'_>,
    shape: &ColumnShape,
    c0: &[f32],
    step: &[f32],
    params: &CodeParams,
    _stream: bool,
    dst: &mut [T],
) {
    let of = |values: &[f32], u: usize| parameters(values.get(UNIT * u..).unwrap_or(&[]));
    let (c0, scale): ([_; 4], [_; 4]) = (
        std::array::from_fn(|u| of(c0, u)),
        std::array::from_fn(|u| of(step, u)),
    );
    for r in 0..shape.rows {
        let tile_row = shape.first_row + r;
        let row = &mut dst[r * shape.pitch..][..shape.width];
        for (u, part) in row.chunks_mut(UNIT).enumerate() {
            let at = (tile_row * shape.padded_width()) / 8 + 4 * u;
            let bytes = part.len().div_ceil(8);
            let codes = gather_codes((0..params.bits).rev().map(|k| {
                let mut bits = [0; 4];
                bits[..bytes].copy_from_slice(&planes.plane(k)[at..at + bytes]);
                u32::from_le_bytes(bits)
            }));
            let dither = match params.rounding {
                Rounding::Dither => dither(params.key, (tile_row * shape.row_steps() + u) as u32),
                Rounding::Stochastic | Rounding::Nearest => [vdupq_n_u16(0); 4],
            };
            match part.first_chunk_mut::<UNIT>() {
                Some(full) => values(&codes, &dither, &c0[u], &scale[u], full),
                None => {
                    let mut all = [T::zeroed(); UNIT];
                    values(&codes, &dither, &c0[u], &scale[u], &mut all);
                    part.copy_from_slice(&all[..part.len()]);
                }
            }
        }
    }
}

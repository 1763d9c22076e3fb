//! Row groups: consecutive elements share their parameters.

use super::{Range, code, encode_dither, value};
use crate::kernels::prefetch::RowsAhead;
use crate::kernels::types::{CodeParams, PlaneBuf, PlaneSrc};
use crate::kernels::{Element, plane_len};

pub(in crate::kernels) fn range<T: Element>(
    src: &[T],
    group: usize,
    skip_zeros: bool,
    _ahead: RowsAhead,
    out_min: &mut [f32],
    out_max: &mut [f32],
) {
    for ((chunk, min), max) in src.chunks(group).zip(out_min).zip(out_max) {
        let mut range = Range::EMPTY;
        for x in chunk {
            range.add(x.to_f32(), skip_zeros);
        }
        (*min, *max) = range.finish();
    }
}

#[expect(
    clippy::too_many_arguments,
    reason = "the signature that all levels share"
)]
pub(in crate::kernels) fn quantize<T: Element>(
    src: &[T],
    group: usize,
    m: &[f32],
    inv: &[f32],
    params: &CodeParams,
    first_step: u32,
    _ahead: RowsAhead,
    planes: &mut PlaneBuf,
    slot0: usize,
) {
    for k in 0..params.bits {
        planes.plane_mut(k)[slot0 / 8..plane_len(slot0 + src.len())].fill(0);
    }
    for (i, x) in src.iter().enumerate() {
        let (step, element) = (first_step + (i / 32) as u32, (i % 32) as u32);
        let q = code(
            x.to_f32(),
            m[i / group],
            inv[i / group],
            encode_dither(params, step, element),
        );
        let slot = slot0 + i;
        for k in 0..params.bits {
            planes.plane_mut(k)[slot / 8] |= (((q >> k) & 1) << (slot % 8)) as u8;
        }
    }
}

#[expect(
    clippy::too_many_arguments,
    reason = "the signature that all levels share"
)]
pub(in crate::kernels) fn dequantize<T: Element>(
    planes: &PlaneSrc<'_>,
    slot0: usize,
    group: usize,
    c0: &[f32],
    step: &[f32],
    params: &CodeParams,
    first_step: u32,
    _stream: bool,
    dst: &mut [T],
) {
    for (i, x) in dst.iter_mut().enumerate() {
        let slot = slot0 + i;
        let q = (0..params.bits).fold(0, |q, k| {
            q | u32::from((planes.plane(k)[slot / 8] >> (slot % 8)) & 1) << k
        });
        let (dither_step, element) = (first_step + (i / 32) as u32, (i % 32) as u32);
        *x = T::from_f32_finite(value(
            q,
            params,
            dither_step,
            element,
            step[i / group],
            c0[i / group],
        ));
    }
}

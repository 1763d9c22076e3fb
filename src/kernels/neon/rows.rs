//! Row groups: consecutive elements share their parameters.

use std::arch::aarch64::*;

use super::lanes::{Lanes, padded};
use super::unit::{UNIT, codes, dither, fetch_rows, gather_codes, half, plane_bits, values};
use crate::kernels::plane_len;
use crate::kernels::prefetch::RowsAhead;
use crate::kernels::types::{CodeParams, PlaneBuf, PlaneSrc, Rounding};

/// Running minimum, maximum and largest magnitude of four lanes.
#[derive(Clone, Copy)]
pub(super) struct Range {
    min: float32x4_t,
    max: float32x4_t,
    magnitude: uint32x4_t,
}

impl Range {
    #[inline]
    #[target_feature(enable = "neon")]
    pub(super) fn new() -> Range {
        Range {
            min: vdupq_n_f32(f32::INFINITY),
            max: vdupq_n_f32(f32::NEG_INFINITY),
            magnitude: vdupq_n_u32(0),
        }
    }

    #[inline]
    #[target_feature(enable = "neon")]
    pub(super) fn add(&mut self, x: float32x4_t, skip_zeros: bool) {
        // As integers, NaN and infinities are the largest magnitudes.
        self.magnitude = vmaxq_u32(
            self.magnitude,
            vandq_u32(vreinterpretq_u32_f32(x), vdupq_n_u32(0x7fff_ffff)),
        );
        let (mut low, mut high) = (x, x);
        if skip_zeros {
            let zero = vceqzq_f32(x);
            low = vbslq_f32(zero, vdupq_n_f32(f32::INFINITY), x);
            high = vbslq_f32(zero, vdupq_n_f32(f32::NEG_INFINITY), x);
        }
        self.min = vminq_f32(self.min, low);
        self.max = vmaxq_f32(self.max, high);
    }

    /// Minima and maxima, lane by lane.
    #[inline]
    #[target_feature(enable = "neon")]
    pub(super) fn lanes(&self) -> ([f32; 4], [f32; 4]) {
        let finite = vcltq_u32(self.magnitude, vdupq_n_u32(0x7f80_0000));
        let (mut min, mut max) = ([0.0; 4], [0.0; 4]);
        // Adding 0 turns -0 into +0.
        let value = |x| {
            vbslq_f32(
                finite,
                vaddq_f32(x, vdupq_n_f32(0.0)),
                vdupq_n_f32(f32::NAN),
            )
        };
        // SAFETY: the arrays have 4 numbers.
        unsafe {
            vst1q_f32(min.as_mut_ptr(), value(self.min));
            vst1q_f32(max.as_mut_ptr(), value(self.max));
        }
        (min, max)
    }

    /// Minimum and maximum over all lanes.
    #[inline]
    #[target_feature(enable = "neon")]
    fn all(&self) -> (f32, f32) {
        if vmaxvq_u32(self.magnitude) >= 0x7f80_0000 {
            return (f32::NAN, f32::NAN);
        }
        (vminvq_f32(self.min) + 0.0, vmaxvq_f32(self.max) + 0.0)
    }
}

/// Minimum and maximum of each group.
#[target_feature(enable = "neon")]
pub(super) fn range<T: Lanes>(
    src: &[T],
    group: usize,
    skip_zeros: bool,
    ahead: RowsAhead,
    out_min: &mut [f32],
    out_max: &mut [f32],
) {
    for ((group, min), max) in src.chunks(group).zip(out_min).zip(out_max) {
        // Four independent chains hide the latency.
        let mut ranges = [Range::new(); 4];
        let (blocks, rest) = group.as_chunks::<16>();
        for block in blocks {
            fetch_rows(ahead, block, 0..1);
            for (k, range) in ranges.iter_mut().enumerate() {
                // SAFETY: the block has 16 elements.
                range.add(unsafe { T::load(block.as_ptr().add(4 * k)) }, skip_zeros);
            }
        }
        for part in rest.chunks(4) {
            // Repeating an element changes nothing.
            let mut all = [part[0]; 4];
            all[..part.len()].copy_from_slice(part);
            // SAFETY: the array has 4 elements.
            ranges[0].add(unsafe { T::load(all.as_ptr()) }, skip_zeros);
        }
        let mut total = ranges[0];
        for range in &ranges[1..] {
            total.min = vminq_f32(total.min, range.min);
            total.max = vmaxq_f32(total.max, range.max);
            total.magnitude = vmaxq_u32(total.magnitude, range.magnitude);
        }
        (*min, *max) = total.all();
    }
}

/// Codes of consecutive groups as planes.
#[expect(
    clippy::too_many_arguments,
    reason = "the signature that all levels share"
)]
#[target_feature(enable = "neon")]
pub(super) fn quantize<T: Lanes>(
    src: &[T],
    group: usize,
    m: &[f32],
    inv: &[f32],
    params: &CodeParams,
    first_step: u32,
    ahead: RowsAhead,
    planes: &mut PlaneBuf,
    slot0: usize,
) {
    for (g, chunk) in src.chunks(group).enumerate() {
        let (m, scale) = ([vdupq_n_f32(m[g]); 8], [vdupq_n_f32(inv[g]); 8]);
        for (i, part) in chunk.chunks(UNIT).enumerate() {
            fetch_rows(ahead, part, 1..4);
            let unit = g * (group / UNIT) + i;
            let step = first_step.wrapping_add(unit as u32);
            let dither = if params.rounding == Rounding::Nearest {
                half()
            } else {
                dither(params.key, step)
            };
            let codes = match part.first_chunk::<UNIT>() {
                Some(full) => codes(full, &m, &scale, &dither),
                None => codes(&padded::<T, UNIT>(part), &m, &scale, &dither),
            };
            // A group without parameters (inv = 0) has code 0, whatever its elements.
            let present = if inv[g] == 0.0 {
                0
            } else {
                !0u32 >> (UNIT - part.len())
            };
            for k in 0..params.bits {
                let bits = plane_bits(&codes, k) & present;
                planes.plane_mut(k)[slot0 / 8 + 4 * unit..][..4]
                    .copy_from_slice(&bits.to_le_bytes());
            }
        }
    }
    let (end, limit) = (
        slot0 / 8 + 4 * src.len().div_ceil(UNIT),
        plane_len(slot0 + src.len()),
    );
    if end < limit {
        for k in 0..params.bits {
            planes.plane_mut(k)[end..limit].fill(0);
        }
    }
}

/// Values of consecutive groups.
#[expect(
    clippy::too_many_arguments,
    reason = "the signature that all levels share"
)]
#[target_feature(enable = "neon")]
pub(super) fn dequantize<T: Lanes>(
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
    for (g, chunk) in dst.chunks_mut(group).enumerate() {
        let (c0, scale) = ([vdupq_n_f32(c0[g]); 8], [vdupq_n_f32(step[g]); 8]);
        for (i, part) in chunk.chunks_mut(UNIT).enumerate() {
            let unit = g * (group / UNIT) + i;
            let at = slot0 / 8 + 4 * unit;
            let codes = gather_codes((0..params.bits).rev().map(|k| {
                let bytes = planes.plane(k)[at..].first_chunk::<4>();
                bytes.map_or(0, |bytes| u32::from_le_bytes(*bytes))
            }));
            let dither = match params.rounding {
                Rounding::Dither => dither(params.key, first_step.wrapping_add(unit as u32)),
                Rounding::Stochastic | Rounding::Nearest => [vdupq_n_u16(0); 4],
            };
            match part.first_chunk_mut::<UNIT>() {
                Some(full) => values(&codes, &dither, &c0, &scale, full),
                None => {
                    let mut all = [T::zeroed(); UNIT];
                    values(&codes, &dither, &c0, &scale, &mut all);
                    part.copy_from_slice(&all[..part.len()]);
                }
            }
        }
    }
}

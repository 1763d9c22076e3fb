//! Values of row groups with AVX2: 32 elements, one dither step, at once, in the byte order that `quantize` describes.

use std::arch::x86_64::*;

use super::lanes::Lanes;
use super::{UNIT, words};
use crate::kernels::types::{CodeParams, PlaneSrc, Rounding};
use crate::kernels::{Key, may_overflow};

/// The codes of 32 elements, from 4 bytes of each plane.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
fn codes<const B: usize>(planes: [u32; B]) -> __m256i {
    // Lane i looks at bit i of each byte.
    let bit = _mm256_sllv_epi32(
        _mm256_set1_epi32(0x0101_0101),
        _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7),
    );
    let mut q = _mm256_setzero_si256();
    for plane in planes.into_iter().rev() {
        let set = _mm256_cmpeq_epi8(_mm256_and_si256(_mm256_set1_epi32(plane as i32), bit), bit);
        q = _mm256_sub_epi8(_mm256_add_epi8(q, q), set);
    }
    q
}

/// The values of 32 codes.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
fn values<const DITHERED: bool>(
    q: __m256i,
    c0: __m256,
    scale: __m256,
    key: Key,
    step: u32,
) -> [__m256; 4] {
    let low_bytes = _mm256_set1_epi16(0xff);
    // 2^23 + 256 q + (255 - r) as the bits of a float: exact, and so is taking 2^23 + 255 away.
    let (r_ac, r_bd) = if DITHERED {
        let r = words(key, step);
        // (~r) & 0xff, and (~r) >> 8.
        (
            _mm256_andnot_si256(r, low_bytes),
            _mm256_xor_si256(_mm256_srli_epi16::<8>(r), low_bytes),
        )
    } else {
        (low_bytes, low_bytes)
    };
    let ac = _mm256_or_si256(_mm256_slli_epi16::<8>(q), r_ac);
    let bd = _mm256_or_si256(_mm256_andnot_si256(low_bytes, q), r_bd);
    let exponent = _mm256_set1_epi32(0x4b00_0000);
    let low = |x| _mm256_blend_epi16::<0xaa>(x, exponent);
    let high = |x| _mm256_or_si256(_mm256_srli_epi32::<16>(x), exponent);
    let offset = _mm256_set1_ps(8_388_608.0 + 255.0);
    [low(ac), low(bd), high(ac), high(bd)]
        .map(|bits| _mm256_fmadd_ps(_mm256_sub_ps(_mm256_castsi256_ps(bits), offset), scale, c0))
}

#[expect(
    clippy::too_many_arguments,
    reason = "the signature that all levels share"
)]
#[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
pub(super) fn dequantize_rows<T: Lanes>(
    planes: &PlaneSrc<'_>,
    slot0: usize,
    group: usize,
    c0: &[f32],
    step: &[f32],
    params: &CodeParams,
    first_step: u32,
    stream: bool,
    dst: &mut [T],
) {
    macro_rules! widths {
        ($($bits:literal)*) => {
            match (params.bits, params.rounding == Rounding::Dither) {
                $(($bits, true) => dequantize_bits::<T, $bits, true>(planes, slot0, group, c0, step, params, first_step, stream, dst),
                ($bits, false) => dequantize_bits::<T, $bits, false>(planes, slot0, group, c0, step, params, first_step, stream, dst),)*
                _ => unreachable!("widths are checked by the caller"),
            }
        };
    }
    widths!(1 2 3 4 5 6 7 8);
}

#[expect(
    clippy::too_many_arguments,
    reason = "the signature that all levels share"
)]
#[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
fn dequantize_bits<T: Lanes, const B: usize, const DITHERED: bool>(
    planes: &PlaneSrc<'_>,
    slot0: usize,
    group: usize,
    c0: &[f32],
    step: &[f32],
    params: &CodeParams,
    first_step: u32,
    stream: bool,
    dst: &mut [T],
) {
    let units = dst.len() / UNIT;
    let stream = stream && (dst.as_ptr() as usize).is_multiple_of(32);
    assert!(slot0 / 8 + units * 4 <= planes.plane_bytes() && B <= planes.planes());
    let clamp = may_overflow::<T>(c0, step);
    let (base, stride) = (planes.as_ptr(), planes.stride());
    let mut unit = 0;
    for (&c0, &scale) in c0.iter().zip(step) {
        let (c0, scale) = (_mm256_set1_ps(c0), _mm256_set1_ps(scale));
        let end = units.min(unit + group / UNIT);
        while unit < end {
            if unit.is_multiple_of(16) {
                for k in 0..B {
                    if let Some(line) = planes.line_ahead(k, slot0 / 8 + unit * 4) {
                        _mm_prefetch::<_MM_HINT_T1>(line);
                    }
                }
            }
            let mut bits = [0; B];
            for (k, bits) in bits.iter_mut().enumerate() {
                // SAFETY: unit < units, so each plane has 4 bytes at this place, as asserted.
                *bits = unsafe {
                    base.add(k * stride + slot0 / 8 + unit * 4)
                        .cast::<u32>()
                        .read_unaligned()
                };
            }
            let first = first_step.wrapping_add(unit as u32);
            let values = values::<DITHERED>(codes(bits), c0, scale, params.key, first);
            // SAFETY: unit < units, so 32 elements can be written behind it, which is a multiple of 64 bytes behind `dst`, so aligned as it is.
            unsafe { T::store_unit(dst.as_mut_ptr().add(unit * UNIT), values, clamp, stream) };
            unit += 1;
        }
    }
    if stream {
        // Other threads see streamed stores in order only behind this.
        _mm_sfence();
    }
    let done = units * UNIT;
    let rest = dst.len() - done;
    if rest > 0 {
        let mut bits = [0; B];
        for (k, bits) in bits.iter_mut().enumerate() {
            let mut bytes = [0; 4];
            bytes.copy_from_slice(&planes.plane(k)[(slot0 + done) / 8..][..4]);
            *bits = u32::from_le_bytes(bytes);
        }
        let (c0, scale) = (
            _mm256_set1_ps(c0[done / group]),
            _mm256_set1_ps(step[done / group]),
        );
        let first = first_step.wrapping_add(units as u32);
        let values = values::<DITHERED>(codes(bits), c0, scale, params.key, first);
        let mut padded = [T::zeroed(); UNIT];
        // SAFETY: `padded` has 32 elements.
        unsafe { T::store_unit(padded.as_mut_ptr(), values, true, false) };
        dst[done..].copy_from_slice(&padded[..rest]);
    }
}

//! Values of row groups with AVX-512: 64 elements, two dither steps, at once.

use std::arch::x86_64::*;

use super::{DITHER, Lanes, TO_LOOP, UNIT, permutation, words};
use crate::kernels::types::{CodeParams, PlaneSrc, Rounding};

/// Turns planes into values.
struct Decoder {
    params: CodeParams,
    dither: __m512i,
    to_loop: __m512i,
}

impl Decoder {
    #[inline]
    #[target_feature(
        enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma,f16c,bmi1,bmi2,popcnt"
    )]
    fn new(params: &CodeParams) -> Decoder {
        Decoder {
            params: *params,
            dither: permutation(&DITHER),
            to_loop: permutation(&TO_LOOP),
        }
    }

    /// The values of 64 codes in element order, 16 a vector.
    #[inline]
    #[target_feature(
        enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma,f16c,bmi1,bmi2,popcnt"
    )]
    fn unit<const DITHERED: bool>(
        &self,
        q: __m512i,
        c0: [__m512; 2],
        scale: [__m512; 2],
        step: u32,
    ) -> [__m512; 4] {
        let low_bytes = _mm512_set1_epi16(0xff);
        let q = _mm512_permutexvar_epi8(self.to_loop, q);
        // 2^23 + 256 q + (255 - r) as the bits of a float: exact, and so is taking 2^23 + 255 away.
        let (r_ab, r_cd) = if DITHERED {
            let r = _mm512_permutexvar_epi8(self.dither, words(self.params.key, step));
            // (~r) & 0xff, and (~r) >> 8.
            (
                _mm512_andnot_si512(r, low_bytes),
                _mm512_xor_si512(_mm512_srli_epi16::<8>(r), low_bytes),
            )
        } else {
            (low_bytes, low_bytes)
        };
        let ab = _mm512_or_si512(_mm512_slli_epi16::<8>(q), r_ab);
        // The high bytes of q where low_bytes has none.
        let cd = _mm512_ternarylogic_epi32::<0xca>(low_bytes, r_cd, q);
        let exponent = _mm512_set1_epi32(0x4b00_0000);
        let a = _mm512_mask_blend_epi16(0xaaaa_aaaa, ab, exponent);
        let b = _mm512_or_si512(_mm512_srli_epi32::<16>(ab), exponent);
        let c = _mm512_mask_blend_epi16(0xaaaa_aaaa, cd, exponent);
        let d = _mm512_or_si512(_mm512_srli_epi32::<16>(cd), exponent);
        let offset = _mm512_set1_ps(8_388_608.0 + 255.0);
        let value = |bits: __m512i, half: usize| {
            _mm512_fmadd_ps(
                _mm512_sub_ps(_mm512_castsi512_ps(bits), offset),
                scale[half],
                c0[half],
            )
        };
        [value(a, 0), value(b, 0), value(c, 1), value(d, 1)]
    }
}

/// Collects 64 codes from their planes.
///
/// # Safety
/// 8 bytes can be read at `src + k * stride` for each k below `B`.
#[inline]
#[target_feature(
    enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma,f16c,bmi1,bmi2,popcnt"
)]
unsafe fn load_planes<const B: usize>(src: *const u8, stride: usize) -> __m512i {
    let mut q = _mm512_setzero_si512();
    for k in 0..B {
        // SAFETY: the caller gives 8 readable bytes in each plane.
        let bits = unsafe { src.add(k * stride).cast::<u64>().read_unaligned() };
        q = _mm512_mask_add_epi8(q, bits, q, _mm512_set1_epi8((1u8 << k) as i8));
    }
    q
}

#[expect(
    clippy::too_many_arguments,
    reason = "the signature that all levels share"
)]
#[target_feature(
    enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma,f16c,bmi1,bmi2,popcnt"
)]
pub(in crate::kernels) fn dequantize_rows<T: Lanes>(
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
#[target_feature(
    enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma,f16c,bmi1,bmi2,popcnt"
)]
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
    let decoder = Decoder::new(params);
    let units = dst.len() / UNIT;
    let stream = stream && (dst.as_ptr() as usize).is_multiple_of(64);
    assert!(slot0 / 8 + units * 8 <= planes.plane_bytes() && B <= planes.planes());
    let (base, stride) = (planes.as_ptr(), planes.stride());
    let per_group = group / UNIT;
    let mut unit = 0;
    while unit < units {
        let g = unit * UNIT / group;
        let h = (unit * UNIT + UNIT / 2) / group;
        let (c2, step2) = (
            [c0[g], c0[h]].map(|x| _mm512_set1_ps(x)),
            [step[g], step[h]].map(|x| _mm512_set1_ps(x)),
        );
        let end = if group.is_multiple_of(UNIT) {
            units.min((g + 1) * per_group)
        } else {
            unit + 1
        };
        while unit < end {
            let first = first_step.wrapping_add(2 * unit as u32);
            // SAFETY: unit < units, so each plane has 8 bytes at this place, as asserted, and 64 elements can be written behind it, which is
            // a multiple of the unit's bytes behind `dst`, so aligned as `dst` is.
            unsafe {
                let q = load_planes::<B>(base.add(slot0 / 8 + unit * 8), stride);
                let values = decoder.unit::<DITHERED>(q, c2, step2, first);
                let to = dst.as_mut_ptr().add(unit * UNIT);
                for (i, x) in values.into_iter().enumerate() {
                    if stream {
                        T::stream(to.add(16 * i), x);
                    } else {
                        T::store(to.add(16 * i), x);
                    }
                }
            }
            unit += 1;
        }
    }
    if stream {
        // Other threads see streamed stores only in order behind this.
        _mm_sfence();
    }
    let done = units * UNIT;
    let rest = dst.len() - done;
    if rest > 0 {
        let mut bytes = [[0u8; 8]; B];
        for (k, bytes) in bytes.iter_mut().enumerate() {
            let tail = &planes.plane(k)[(slot0 + done) / 8..];
            let len = tail.len().min(8);
            bytes[..len].copy_from_slice(&tail[..len]);
        }
        let g = done / group;
        let h = ((done + UNIT / 2) / group).min(c0.len() - 1);
        let (c2, step2) = (
            [c0[g], c0[h]].map(|x| _mm512_set1_ps(x)),
            [step[g], step[h]].map(|x| _mm512_set1_ps(x)),
        );
        let mut padded = [T::zeroed(); UNIT];
        // SAFETY: `bytes` has B times 8 bytes 8 apart, and `padded` has 64 elements.
        unsafe {
            let q = load_planes::<B>(bytes.as_ptr().cast(), 8);
            let values =
                decoder.unit::<DITHERED>(q, c2, step2, first_step.wrapping_add(2 * units as u32));
            for (i, x) in values.into_iter().enumerate() {
                T::store(padded.as_mut_ptr().add(16 * i), x);
            }
        }
        dst[done..].copy_from_slice(&padded[..rest]);
    }
}

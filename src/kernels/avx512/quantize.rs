//! Codes of row groups with AVX-512: 64 elements, two dither steps, at once.

use std::arch::x86_64::*;

use super::{DITHER, Lanes, TO_ELEMENTS, UNIT, fetch, permutation, words};
use crate::kernels::prefetch::RowsAhead;
use crate::kernels::types::{CodeParams, PLANE_STRIDE, PlaneBuf, Rounding};
use crate::kernels::{MAX_BITS, PLANE_BYTES, plane_len};

/// Turns values into codes.
struct Encoder {
    params: CodeParams,
    dither: __m512i,
    to_elements: __m512i,
}

impl Encoder {
    #[inline]
    #[target_feature(
        enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,gfni,avx2,fma,f16c,bmi1,bmi2,popcnt"
    )]
    fn new(params: &CodeParams) -> Encoder {
        Encoder {
            params: *params,
            dither: permutation(&DITHER),
            to_elements: permutation(&TO_ELEMENTS),
        }
    }

    /// The codes of 64 elements in element order; the halves may lie in two groups.
    ///
    /// # Safety
    /// 64 elements can be read at `src`.
    #[inline]
    #[target_feature(
        enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,gfni,avx2,fma,f16c,bmi1,bmi2,popcnt"
    )]
    unsafe fn unit<T: Lanes, const NEAREST: bool>(
        &self,
        src: *const T,
        m: [__m512; 2],
        inv: [__m512; 2],
        step: u32,
    ) -> __m512i {
        let magic = _mm512_set1_ps(8_388_608.0);
        let low_bytes = _mm512_set1_epi16(0xff);
        let w = |i: usize| {
            // SAFETY: i < 4, and the caller gives 64 readable elements.
            let x = unsafe { T::load(src.add(16 * i)) };
            _mm512_castps_si512(_mm512_fmadd_ps(
                _mm512_sub_ps(x, m[i / 2]),
                inv[i / 2],
                magic,
            ))
        };
        // Only the low 16 bits of each matter: elements l and l + 16 share a lane.
        let ab = _mm512_mask_blend_epi16(0xaaaa_aaaa, w(0), _mm512_slli_epi32::<16>(w(1)));
        let cd = _mm512_mask_blend_epi16(0xaaaa_aaaa, w(2), _mm512_slli_epi32::<16>(w(3)));
        let (r_ab, r_cd) = if NEAREST {
            (_mm512_set1_epi16(128), _mm512_set1_epi16(128))
        } else {
            let r = _mm512_permutexvar_epi8(self.dither, words(self.params.key, step));
            (_mm512_and_si512(r, low_bytes), _mm512_srli_epi16::<8>(r))
        };
        let ab = _mm512_srli_epi16::<8>(_mm512_add_epi16(ab, r_ab));
        let cd = _mm512_add_epi16(cd, r_cd);
        // Bytes of ab where the low byte of a 16-bit lane is, of cd where the high one is.
        let q = _mm512_ternarylogic_epi32::<0xca>(low_bytes, ab, cd);
        _mm512_permutexvar_epi8(self.to_elements, q)
    }
}

/// The slots of a unit, as bits, that get codes: a group whose `inv` is 0 has code 0 whatever its elements, even where they are not finite.
fn coded_mask(inv_low: f32, inv_high: f32) -> u64 {
    let half = |inv: f32| if inv == 0.0 { 0 } else { 0xffff_ffff };
    half(inv_low) | (half(inv_high) << 32)
}

/// Writes the planes of 64 codes.
///
/// # Safety
/// 8 bytes can be written at `dst + k * PLANE_STRIDE` for each k below `B`.
#[inline]
#[target_feature(
    enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,gfni,avx2,fma,f16c,bmi1,bmi2,popcnt"
)]
unsafe fn store_planes<const B: usize>(q: __m512i, dst: *mut u8) {
    for k in 0..B {
        let bits = _mm512_test_epi8_mask(q, _mm512_set1_epi8((1u8 << k) as i8));
        // SAFETY: the caller gives room for 8 bytes in each plane.
        unsafe {
            dst.add(k * PLANE_STRIDE)
                .cast::<u64>()
                .write_unaligned(bits)
        };
    }
}

#[expect(
    clippy::too_many_arguments,
    reason = "the signature that all levels share"
)]
#[target_feature(
    enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,gfni,avx2,fma,f16c,bmi1,bmi2,popcnt"
)]
pub(in crate::kernels) fn quantize_rows<T: Lanes>(
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
    macro_rules! widths {
        ($($bits:literal)*) => {
            match (params.bits, params.rounding == Rounding::Nearest) {
                $(($bits, false) => quantize_bits::<T, $bits, false>(src, group, m, inv, params, first_step, ahead, planes, slot0),
                ($bits, true) => quantize_bits::<T, $bits, true>(src, group, m, inv, params, first_step, ahead, planes, slot0),)*
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
    enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,gfni,avx2,fma,f16c,bmi1,bmi2,popcnt"
)]
fn quantize_bits<T: Lanes, const B: usize, const NEAREST: bool>(
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
    let encoder = Encoder::new(params);
    let units = src.len() / UNIT;
    assert!(slot0 / 8 + units * 8 <= PLANE_BYTES && B <= MAX_BITS);
    let base = planes.as_mut_ptr();
    let per_group = group / UNIT;
    let mut unit = 0;
    while unit < units {
        let g = unit * UNIT / group;
        let h = (unit * UNIT + UNIT / 2) / group;
        let (m2, inv2) = (
            [m[g], m[h]].map(|x| _mm512_set1_ps(x)),
            [inv[g], inv[h]].map(|x| _mm512_set1_ps(x)),
        );
        // Units of one group share its parameters; a group of an odd number of steps goes unit by unit.
        let end = if group.is_multiple_of(UNIT) {
            units.min((g + 1) * per_group)
        } else {
            unit + 1
        };
        let coded = coded_mask(inv[g], inv[h]);
        if coded == u64::MAX {
            while unit < end {
                let at = src.as_ptr() as usize + unit * size_of::<[T; UNIT]>();
                if size_of::<T>() == 4 {
                    fetch!(ahead, at, 1..4);
                } else if at % RowsAhead::TURN < RowsAhead::TURN / 2 {
                    fetch!(ahead, at, 1..2);
                } else {
                    fetch!(ahead, at, 2..4);
                }
                let step = first_step.wrapping_add(2 * unit as u32);
                // SAFETY: unit < units, so 64 elements can be read behind it, and the planes have room for 8 bytes more, as asserted.
                unsafe {
                    let q =
                        encoder.unit::<T, NEAREST>(src.as_ptr().add(unit * UNIT), m2, inv2, step);
                    store_planes::<B>(q, base.add(slot0 / 8 + unit * 8));
                }
                unit += 1;
            }
        } else {
            while unit < end {
                let step = first_step.wrapping_add(2 * unit as u32);
                // SAFETY: as above.
                unsafe {
                    let q =
                        encoder.unit::<T, NEAREST>(src.as_ptr().add(unit * UNIT), m2, inv2, step);
                    store_planes::<B>(
                        _mm512_maskz_mov_epi8(coded, q),
                        base.add(slot0 / 8 + unit * 8),
                    );
                }
                unit += 1;
            }
        }
    }
    // The rest, and zero bits up to the next multiple of 64 slots.
    let done = units * UNIT;
    let rest = &src[done..];
    let mut bits = [0u64; B];
    if !rest.is_empty() {
        let mut padded = [T::zeroed(); UNIT];
        padded[..rest.len()].copy_from_slice(rest);
        let g = done / group;
        let h = ((done + UNIT / 2) / group).min(m.len() - 1);
        let (m2, inv2) = (
            [m[g], m[h]].map(|x| _mm512_set1_ps(x)),
            [inv[g], inv[h]].map(|x| _mm512_set1_ps(x)),
        );
        let coded = coded_mask(inv[g], inv[h]);
        let coded = coded & ((1 << rest.len()) - 1);
        // SAFETY: `padded` has 64 elements.
        let q = unsafe {
            encoder.unit::<T, NEAREST>(
                padded.as_ptr(),
                m2,
                inv2,
                first_step.wrapping_add(2 * units as u32),
            )
        };
        for (k, bits) in bits.iter_mut().enumerate() {
            *bits = _mm512_mask_test_epi8_mask(coded, q, _mm512_set1_epi8((1u8 << k) as i8));
        }
    }
    let (start, end) = ((slot0 + done) / 8, plane_len(slot0 + src.len()));
    for (k, bits) in bits.iter().enumerate() {
        let tail = &mut planes.plane_mut(k)[start..end];
        tail.fill(0);
        let len = tail.len().min(8);
        tail[..len].copy_from_slice(&bits.to_le_bytes()[..len]);
    }
}

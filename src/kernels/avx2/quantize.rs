//! Codes of row groups with AVX2: 32 elements, one dither step, at once. Byte b of 32-bit lane i belongs to element 8 b + i wherever codes
//! and dither are held as bytes: the order in which dither words come.

use std::arch::x86_64::*;

use super::lanes::Lanes;
use super::{UNIT, fetch_rows, words};
use crate::kernels::prefetch::RowsAhead;
use crate::kernels::types::{CodeParams, PLANE_STRIDE, PlaneBuf, Rounding};
use crate::kernels::{Key, MAX_BITS, PLANE_BYTES, plane_len};

/// The codes of 32 elements in element order.
///
/// # Safety
/// 32 elements can be read at `src`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
unsafe fn codes<T: Lanes, const NEAREST: bool>(
    src: *const T,
    m: __m256,
    inv: __m256,
    key: Key,
    step: u32,
) -> __m256i {
    let magic = _mm256_set1_ps(8_388_608.0);
    let w = |i: usize| {
        // SAFETY: i < 4, and the caller gives 32 readable elements.
        let x = unsafe { T::load(src.add(8 * i)) };
        _mm256_castps_si256(_mm256_fmadd_ps(_mm256_sub_ps(x, m), inv, magic))
    };
    // A code and its fraction are the low 16 bits of a lane: two vectors fit one, and the dither's carry cannot leave 16 bits.
    let ac = _mm256_blend_epi16::<0xaa>(w(0), _mm256_slli_epi32::<16>(w(2)));
    let bd = _mm256_blend_epi16::<0xaa>(w(1), _mm256_slli_epi32::<16>(w(3)));
    let (r_ac, r_bd) = if NEAREST {
        (_mm256_set1_epi16(128), _mm256_set1_epi16(128))
    } else {
        let r = words(key, step);
        (
            _mm256_and_si256(r, _mm256_set1_epi16(0xff)),
            _mm256_srli_epi16::<8>(r),
        )
    };
    let ac = _mm256_srli_epi16::<8>(_mm256_add_epi16(ac, r_ac));
    let bd = _mm256_and_si256(
        _mm256_add_epi16(bd, r_bd),
        _mm256_set1_epi16(0xff00_u16 as i16),
    );
    // Element order: 4 x 4 bytes within 128-bit halves, then the halves' parts.
    let within = _mm256_broadcastsi128_si256(_mm_setr_epi8(
        0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15,
    ));
    let q = _mm256_shuffle_epi8(_mm256_or_si256(ac, bd), within);
    _mm256_permutevar8x32_epi32(q, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7))
}

/// The planes of 32 codes.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
fn planes_of<const B: usize>(q: __m256i) -> [u32; B] {
    // The top bit of each byte is its bit of the highest plane; the others follow by doubling.
    let mut top = _mm256_sll_epi16(q, _mm_cvtsi32_si128(8 - B as i32));
    let mut bits = [0; B];
    for bits in bits.iter_mut().rev() {
        *bits = _mm256_movemask_epi8(top) as u32;
        top = _mm256_add_epi8(top, top);
    }
    bits
}

#[expect(
    clippy::too_many_arguments,
    reason = "the signature that all levels share"
)]
#[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
pub(super) fn quantize_rows<T: Lanes>(
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
#[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
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
    let units = src.len() / UNIT;
    assert!(slot0.is_multiple_of(UNIT) && slot0 / 8 + units * 4 <= PLANE_BYTES && B <= MAX_BITS);
    let base = planes.as_mut_ptr();
    let mut unit = 0;
    for (&m, &inv) in m.iter().zip(inv) {
        let end = units.min(unit + group / UNIT);
        if inv == 0.0 {
            // Code 0 whatever the elements, even where they are not finite.
            for k in 0..B {
                planes.plane_mut(k)[slot0 / 8 + unit * 4..slot0 / 8 + end * 4].fill(0);
            }
            unit = end;
            continue;
        }
        let (m, inv) = (_mm256_set1_ps(m), _mm256_set1_ps(inv));
        while unit < end {
            let at = src.as_ptr() as usize + unit * size_of::<[T; UNIT]>();
            match (size_of::<T>(), at / size_of::<[T; UNIT]>() % 4) {
                (4, 0 | 2) => fetch_rows(ahead, at, 1, 2),
                (4, _) => fetch_rows(ahead, at, 2, 4),
                (_, k @ 1..) => fetch_rows(ahead, at, k, k + 1),
                _ => {}
            }
            let step = first_step.wrapping_add(unit as u32);
            // SAFETY: unit < units, so 32 elements can be read behind it.
            let q = unsafe {
                codes::<T, NEAREST>(src.as_ptr().add(unit * UNIT), m, inv, params.key, step)
            };
            for (k, bits) in planes_of::<B>(q).into_iter().enumerate() {
                // SAFETY: the buffer's planes have room for 4 bytes here, as asserted.
                unsafe {
                    base.add(k * PLANE_STRIDE + slot0 / 8 + unit * 4)
                        .cast::<u32>()
                        .write_unaligned(bits);
                }
            }
            unit += 1;
        }
    }
    // The rest, and zero bits up to the next multiple of 64 slots.
    let done = units * UNIT;
    let rest = &src[done..];
    let mut bits = [0; B];
    if !rest.is_empty() && inv[done / group] != 0.0 {
        let mut padded = [T::zeroed(); UNIT];
        padded[..rest.len()].copy_from_slice(rest);
        let (m, inv) = (
            _mm256_set1_ps(m[done / group]),
            _mm256_set1_ps(inv[done / group]),
        );
        let step = first_step.wrapping_add(units as u32);
        // SAFETY: `padded` has 32 elements.
        let q = unsafe { codes::<T, NEAREST>(padded.as_ptr(), m, inv, params.key, step) };
        bits = planes_of::<B>(q).map(|bits| bits & ((1 << rest.len()) - 1));
    }
    let (start, end) = ((slot0 + done) / 8, plane_len(slot0 + src.len()));
    for (k, bits) in bits.iter().enumerate() {
        let tail = &mut planes.plane_mut(k)[start..end];
        tail.fill(0);
        let len = tail.len().min(4);
        tail[..len].copy_from_slice(&bits.to_le_bytes()[..len]);
    }
}

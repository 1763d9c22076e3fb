//! Ranges of row groups with AVX2: integer maxima of the bits, as `kernels::range` explains.

use std::arch::x86_64::*;

use super::fetch_rows;
use super::lanes::Lanes;
use crate::dtype::FloatType;
use crate::kernels::prefetch::RowsAhead;
use crate::kernels::range::{Found, judge};
use crate::kernels::scalar;

#[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
pub(super) fn range_rows<T: Lanes>(
    src: &[T],
    group: usize,
    skip_zeros: bool,
    ahead: RowsAhead,
    out_min: &mut [f32],
    out_max: &mut [f32],
) {
    for ((chunk, min), max) in src.chunks(group).zip(out_min).zip(out_max) {
        if size_of_val(chunk) < 32 {
            scalar::rows::range(
                chunk,
                group,
                skip_zeros,
                ahead,
                std::slice::from_mut(min),
                std::slice::from_mut(max),
            );
            continue;
        }
        let found = match T::TYPE {
            FloatType::F32 => {
                let (signed, unsigned) = maxima32(bytemuck::cast_slice(chunk), ahead);
                judge::<T>(signed, unsigned, skip_zeros)
            }
            FloatType::F16 | FloatType::BF16 => {
                let (signed, unsigned) = maxima16(bytemuck::cast_slice(chunk), ahead);
                judge::<T>(
                    i32::from(signed) << 16,
                    u32::from(unsigned) << 16,
                    skip_zeros,
                )
            }
        };
        (*min, *max) = match found {
            Found::Done(min, max) => (min, max),
            Found::Second(second) => second.finish::<T>(match T::TYPE {
                FloatType::F32 => minimum32(bytemuck::cast_slice(chunk), second.bias32()),
                FloatType::F16 | FloatType::BF16 => {
                    u32::from(minimum16(bytemuck::cast_slice(chunk), second.bias16())) << 16
                }
            }),
        };
    }
}

/// Calls `$each` with every vector of a slice of `$lanes` lanes or more, and `$turn` with the address before every eighth; the last vector
/// may overlap the one before.
macro_rules! for_each_vector {
    ($src:expr, $lanes:expr, $at:ident => $turn:block, $x:ident => $each:expr) => {{
        let src = $src;
        assert!(src.len() >= $lanes);
        let mut i = 0;
        while i + 8 * $lanes <= src.len() {
            let $at = src.as_ptr() as usize + i * size_of_val(&src[0]);
            $turn
            for j in 0..8 {
                // SAFETY: eight vectors from lane i on lie in the slice.
                let $x = unsafe { _mm256_loadu_si256(src.as_ptr().add(i + j * $lanes).cast()) };
                $each;
            }
            i += 8 * $lanes;
        }
        while i < src.len() {
            let last = i.min(src.len() - $lanes);
            // SAFETY: one vector from lane `last` on lies in the slice.
            let $x = unsafe { _mm256_loadu_si256(src.as_ptr().add(last).cast()) };
            $each;
            i += $lanes;
        }
    }};
}

/// Signed and unsigned maximum of 8 words or more.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
fn maxima32(src: &[u32], ahead: RowsAhead) -> (i32, u32) {
    let (mut s, mut u) = (_mm256_set1_epi32(i32::MIN), _mm256_setzero_si256());
    for_each_vector!(src, 8, at => { fetch_rows(ahead, at, 0, 1) }, x => {
        s = _mm256_max_epi32(s, x);
        u = _mm256_max_epu32(u, x);
    });
    // Unsigned order becomes signed by flipping the sign bit: one reduction for both, signed in the lower half.
    let u = _mm256_xor_si256(u, _mm256_set1_epi32(i32::MIN));
    let both = _mm256_max_epi32(
        _mm256_permute2x128_si256::<0x20>(s, u),
        _mm256_permute2x128_si256::<0x31>(s, u),
    );
    let both = _mm256_max_epi32(both, _mm256_shuffle_epi32::<0b01_00_11_10>(both));
    let both = _mm256_max_epi32(both, _mm256_shuffle_epi32::<0b10_11_00_01>(both));
    let signed = _mm_cvtsi128_si32(_mm256_castsi256_si128(both));
    let unsigned = _mm_cvtsi128_si32(_mm256_extracti128_si256::<1>(both));
    (signed, unsigned as u32 ^ 0x8000_0000)
}

/// Signed and unsigned maximum of 16 words or more.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
fn maxima16(src: &[u16], ahead: RowsAhead) -> (i16, u16) {
    let (mut s, mut u) = (_mm256_set1_epi16(i16::MIN), _mm256_setzero_si256());
    for_each_vector!(src, 16, at => { fetch_rows(ahead, at, 0, 1) }, x => {
        s = _mm256_max_epi16(s, x);
        u = _mm256_max_epu16(u, x);
    });
    let u = _mm256_xor_si256(u, _mm256_set1_epi16(i16::MIN));
    let both = _mm256_max_epi16(
        _mm256_permute2x128_si256::<0x20>(s, u),
        _mm256_permute2x128_si256::<0x31>(s, u),
    );
    // Eight words are left of each: their largest is the smallest of the complements, which one instruction finds unsigned.
    let flipped = _mm256_xor_si256(both, _mm256_set1_epi16(i16::MAX));
    let signed = _mm_minpos_epu16(_mm256_castsi256_si128(flipped));
    let unsigned = _mm_minpos_epu16(_mm256_extracti128_si256::<1>(flipped));
    (
        (_mm_cvtsi128_si32(signed) as i16) ^ i16::MAX,
        (_mm_cvtsi128_si32(unsigned) as u16) ^ 0x7fff ^ 0x8000,
    )
}

/// The bits whose distance above `bias` is smallest, of 8 words or more.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
fn minimum32(src: &[u32], bias: u32) -> u32 {
    let b = _mm256_set1_epi32(bias as i32);
    let mut least = _mm256_set1_epi32(-1);
    for_each_vector!(src, 8, _at => {}, x => least = _mm256_min_epu32(least, _mm256_sub_epi32(x, b)));
    let least = _mm_min_epu32(
        _mm256_castsi256_si128(least),
        _mm256_extracti128_si256::<1>(least),
    );
    let least = _mm_min_epu32(least, _mm_shuffle_epi32::<0b01_00_11_10>(least));
    let least = _mm_min_epu32(least, _mm_shuffle_epi32::<0b10_11_00_01>(least));
    (_mm_cvtsi128_si32(least) as u32).wrapping_add(bias)
}

/// The bits whose distance above `bias` is smallest, of 16 words or more.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
fn minimum16(src: &[u16], bias: u16) -> u16 {
    let b = _mm256_set1_epi16(bias as i16);
    let mut least = _mm256_set1_epi16(-1);
    for_each_vector!(src, 16, _at => {}, x => least = _mm256_min_epu16(least, _mm256_sub_epi16(x, b)));
    let least = _mm_min_epu16(
        _mm256_castsi256_si128(least),
        _mm256_extracti128_si256::<1>(least),
    );
    (_mm_cvtsi128_si32(_mm_minpos_epu16(least)) as u16).wrapping_add(bias)
}
